"""Models, files and helpers that the tests of checkpoints and of the command line share."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from normswap.checkpoint import open_checkpoint
from normswap.checkpoint.files import replacing
from normswap.checkpoint.tensors import tensor_writer

REPOSITORY = Path(__file__).parent.parent

SITES = {"norm", "blocks.0", "group", "rms", "l1", "tail"}
"""What is swapped in zoo:net."""

ZOO = '''
import torch
from torch import nn


class L1(nn.Module):
    def forward(self, x):
        return x / torch.mean(torch.abs(x), dim=1, keepdim=True)


class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.gemm = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.bn = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)


class Net(nn.Module):
    """Every kind of norm, and keys that are not in alphabetical order."""

    def __init__(self, layers=1):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList(nn.LayerNorm(8) for _ in range(layers))
        self.group = nn.GroupNorm(2, 8)
        self.rms = nn.RMSNorm(8)
        self.l1 = L1()
        self.bn = nn.BatchNorm1d(8)
        self.tail = Tail()

    def forward(self, x):
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.tail(self.bn(self.l1(self.rms(self.group(x)))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, scale=None):
        x = self.norm(self.embedding(ids))
        return self.head(x if scale is None else x * scale)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(3, 3)

    def forward(self, x):
        return self.only(x)


def net():
    return Net()


def net_half():
    return Net().to(torch.bfloat16)


def deeper():
    return Net(3)


def tied():
    return Tied()


def plain():
    return Plain()


def meta():
    with torch.device("meta"):
        return Net()


def raises():
    raise KeyError("no such size")


def exits():
    raise SystemExit(7)


def number():
    return 3


def needs(argument):
    return Net()


instance = Plain()
text = "a string"
'''


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """``model`` with every parameter and buffer drawn anew, so that a norm which forgets one is seen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point():
                drawn = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(drawn.abs() + 0.5 if name.endswith("running_var") else drawn)
            else:
                tensor.fill_(5)
    return model


def read_tensors(path: str | Path) -> tuple[OrderedDict[str, Any], dict[str, str]]:
    """The state_dict at ``path`` and the file's free-text metadata."""
    found = open_checkpoint(path)
    return found.state, found.metadata


def write_tensors(path: str | Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """``tensors`` as a file in the format its suffix names, replaced atomically, as a conversion writes it."""
    path = Path(path)
    with replacing(force=True) as files:
        files.write(path, tensor_writer(path, tensors, metadata or {}))


def write_shards(folder: Path, state: Mapping[str, Tensor], suffix: str, count: int) -> None:
    """``state`` in ``count`` files and their index, named and laid out as transformers does."""
    folder.mkdir()
    stem = {".safetensors": "model", ".bin": "pytorch_model"}[suffix]
    names = list(state)
    placed = {}
    for number in range(count):
        shard = f"{stem}-{number + 1:05}-of-{count:05}{suffix}"
        part = {name: state[name] for name in names[number::count]}
        placed.update(dict.fromkeys(part, shard))
        if suffix == ".bin":
            torch.save(part, folder / shard)
        else:
            safetensors.torch.save_file(part, folder / shard, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in state.values())
    content = {"metadata": {"total_size": total}, "weight_map": {name: placed[name] for name in names}}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(content, indent=2))


def awkward_tensors() -> OrderedDict[str, Tensor]:
    """Every case a format could get wrong: dtypes, ranks, strides, ties, NaN payloads, names out of order."""
    torch.manual_seed(3)
    table = torch.randn(5, 4)
    big = torch.randn(10, 10)
    return OrderedDict(
        {
            "z.embedding": table,
            "norm.weight": torch.randn(7).to(torch.bfloat16),
            "norm.bias": torch.randn(7).half(),
            "bn.num_batches_tracked": torch.tensor(12),
            "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
            "transposed": torch.randn(3, 5).t(),
            "slice": big[2:5, ::3],
            "expanded": torch.randn(1, 3).expand(4, 3),
            "flat_of_embedding": table.view(-1),
            "a.head": table,
            "empty": torch.empty(0, 3),
            "second_empty": torch.empty(0, 3),
            "mask": torch.tensor([True, False, True]),
            "double": torch.randn(2, dtype=torch.float64),
            "odd_bytes": torch.arange(3, dtype=torch.uint8),
            "nan": torch.tensor([0x7FC00001, -0x400000 + 5, 0], dtype=torch.int32).view(torch.float32),
            "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        }
    )


class Payload:
    """Creates ``path`` when it is unpickled by anything that executes what a pickle asks for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def write_payload(path: Path, marker: Path, *, plain: bool = False) -> None:
    """A checkpoint that would create ``marker``; ``plain`` as a bare pickle, else as torch.save writes."""
    content = {"weight": torch.ones(2), "more": Payload(marker)}
    if plain:
        path.write_bytes(pickle.dumps({"more": Payload(marker)}, protocol=2))
    else:
        torch.save(content, path)


def snapshot(folder: Path) -> dict[str, Any]:
    """All that lies under ``folder``: names (hidden ones too), bytes and links."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if "__pycache__" in path.parts:
            continue
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
    return found


def environment() -> dict[str, str]:
    """The environment for a new Python process that is to import this normswap."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def forget_zoo() -> None:
    """Have the next import of ``zoo`` read the file of the current folder."""
    sys.modules.pop("zoo", None)
