"""Train a ResNet with GroupNorm on scikit-learn's digits by a plain loop, before and after its norms are swapped.

pip install "normswap[demo]" && python examples/train_resnet.py
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import normswap

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 128 if DEVICE == "cuda" else 16


class Block(nn.Module):
    """conv - norm - relu - conv - norm, added to what came in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(8, channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(8, channels)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        return F.relu(h + x)


def model() -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Conv2d(1, WIDTH, 3, padding=1)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10))
    return nn.Sequential(stem, Block(WIDTH), Block(WIDTH), *head).to(DEVICE)


def data() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=DEVICE).unsqueeze(1) / 16
    return images, torch.tensor(digits.target, device=DEVICE)


def train(net: nn.Module, epochs: int) -> float:
    """Adam over all images; the seconds an epoch took."""
    images, labels = data()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    started = time.perf_counter()
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch)).to(DEVICE)
        for batch in order.split(128):
            optimizer.zero_grad()
            F.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimizer.step()
    right = float((net(images).argmax(1) == labels).float().mean())  # waits for the device
    print(f"{right:.1%} of the images right")
    return (time.perf_counter() - started) / epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    train(model(), 1)  # warm up
    before = train(model(), epochs)
    fast = normswap.optimize(model(), data()[0][:128], inplace=True)
    after = train(fast, epochs)
    print(normswap.report(fast))
    print(f"an epoch: {before * 1e3:.1f} ms before, {after * 1e3:.1f} ms after")


if __name__ == "__main__":
    main()
