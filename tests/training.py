"""Two small models that learn something real, and the loop that trains them: images of digits, and the source of the
standard library a character at a time."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Batches = Iterator[tuple[Tensor, Tensor]]
SEEDS, STEPS, LAST = (0, 1, 2), 300, 50


class Residual(nn.Module):
    """Two convolutions, each with a GroupNorm, as in ResNets."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.GroupNorm(4, channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.GroupNorm(4, channels)
        self.act1, self.act2 = nn.ReLU(inplace=True), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.conv1(x)
        x = self.norm1(x)
        x = self.act1(x)
        x = self.conv2(x)
        x = self.norm2(x)
        x += shortcut
        return self.act2(x)


class ResNet(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem, self.norm, self.act = nn.Conv2d(1, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU()
        self.blocks = nn.Sequential(Residual(channels), Residual(channels))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.act(self.norm(self.stem(images)))).mean((2, 3)))


class Block(nn.Module):
    """Causal attention and an MLP, each behind its norm; ``again``: computed a second time in the backward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width, eps=1e-6)
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2, length: int = 32) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(128, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)
        self.again = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(self.norm(x))


def digits(seed: int, device: str, batch: int = 32) -> Batches:
    """Scans of digits that come with scikit-learn, in an order that ``seed`` says."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = torch.tensor(found.images).float()[:, None] / 16, torch.tensor(found.target)
    images, labels, draw = images.to(device), labels.to(device), torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(images), (batch,), generator=draw).to(device)
        yield images[chosen], labels[chosen]


def characters(seed: int, device: str, batch: int = 8, length: int = 32) -> Batches:
    """Pieces of Python's json package, and each character's successor."""
    text = "".join(path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py")))
    codes = torch.tensor([min(ord(character), 127) for character in text], device=device)
    draw = torch.Generator().manual_seed(seed)
    while True:
        at = torch.randint(len(codes) - length - 1, (batch, 1), generator=draw).to(device)
        pieces = codes[at + torch.arange(length + 1, device=device)]
        yield pieces[:, :-1], pieces[:, 1:]


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, str], Batches]]] = {
    "resnet": (ResNet, digits),
    "gpt": (GPT, characters),
}


def made(task: str, seed: int, device: str) -> nn.Module:
    """A model as ``seed`` draws it, in train mode."""
    torch.manual_seed(seed)
    return TASKS[task][0]().to(device).train()


def losses(
    model: nn.Module,
    batches: Batches,
    steps: int,
    device: str,
    *,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    then: Callable[[], object] = lambda: None,
) -> list[float]:
    """The loss of each of so many steps of ``optimizer``, by default AdamW in its fused form. ``then`` follows each."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    found: list[Tensor] = []
    for x, y in itertools.islice(batches, steps):
        lowered = torch.autocast(device, autocast) if autocast is not None else contextlib.nullcontext()
        with lowered:
            logits = model(x)
            loss = F.cross_entropy(logits.float().flatten(0, -2), y.flatten())
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        then()
        found.append(loss.detach())
    return torch.stack(found).tolist()


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The mean of |difference| over the last steps."""
    return statistics.mean(abs(a - b) for a, b in zip(one[-LAST:], other[-LAST:], strict=True))


def assert_learns_alike(run: Callable[[int, bool], list[float]]) -> dict[str, float]:
    """``run(seed, ours)`` gives losses. Ours differ from PyTorch's by no more than those of other seeds do, and both
    learn. Returns the figures."""
    theirs = {seed: run(seed, False) for seed in SEEDS}
    ours = {seed: run(seed, True) for seed in SEEDS}
    spread = statistics.mean(difference(theirs[a], theirs[b]) for a, b in itertools.combinations(SEEDS, 2))
    apart = statistics.mean(difference(ours[seed], theirs[seed]) for seed in SEEDS)
    for found in (theirs, ours):
        assert all(statistics.mean(one[-LAST:]) < 0.8 * one[0] for one in found.values())
    assert apart <= spread, f"{apart:.4f} apart, {spread:.4f} from seed to seed"
    return {"apart": apart, "spread": spread}


def swapped(model: nn.Module, x: Tensor, **options: Any) -> nn.Module:
    """``model`` itself with all norms ours, proved."""
    import normswap

    return normswap.optimize(model, x, inplace=True, min_speedup=None, on_mismatch="raise", **options)
