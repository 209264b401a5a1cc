"""A small classifier of scikit-learn's digits (1,797 real 8x8 images) that holds every kind of norm normswap swaps."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class L1Normalised(nn.Module):
    """Features divided by their mean magnitude, written the way people write it."""

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.mean(torch.abs(x), dim=1, keepdim=True)


class Projection(nn.Module):
    """Linear -> learned scale -> BatchNorm."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.ones(out_features))
        self.bn = nn.BatchNorm1d(out_features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gemm(x)
        return self.bn(x * self.scale)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1)
        self.group_norm = nn.GroupNorm(8, 32)
        self.down = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm((64, 4, 4))
        self.projection = Projection(64 * 4 * 4, 128)
        self.l1 = L1Normalised()
        self.rms = nn.RMSNorm(128, eps=1e-6)
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.group_norm(self.stem(images)))
        x = torch.relu(self.norm(self.down(x)))
        x = torch.relu(self.projection(x.flatten(1)))
        return self.head(self.rms(self.l1(x + 0.1)))


def build() -> nn.Module:
    """The untrained classifier: what the checkpoint's ``--model`` names."""
    return Classifier()


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train images, train labels, test images, test labels; a fixed split of 4 to 1."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    cut = len(images) * 4 // 5
    return images[order[:cut]], labels[order[:cut]], images[order[cut:]], labels[order[cut:]]


def train(epochs: int = 8) -> nn.Module:
    """A classifier trained with Adam; above 95% on the test images."""
    torch.manual_seed(0)
    images, labels, _, _ = data()
    model = build().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        order = torch.randperm(len(images))
        for batch in order.split(64):
            if len(batch) < 2:
                continue
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def accuracy(model: nn.Module) -> float:
    """The share of test images that ``model`` gets right."""
    _, _, images, labels = data()
    device = next(model.parameters()).device
    with torch.no_grad():
        return float((model(images.to(device)).argmax(1).cpu() == labels).float().mean())
