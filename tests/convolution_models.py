"""Models in which a BatchNorm stands behind a convolution, or nearly so, and what is made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normswap
from normswap import finding
from normswap.plans import Match, Plan, Swap
from normswap.regions.spec import Region

IMAGE = (2, 6, 9, 8)


class Block(nn.Module):
    """Convolution, norm and activation, and what else a forward here calls."""

    def __init__(self, convolution: nn.Module, norm: nn.Module, act: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.bn, self.act = convolution, norm, nn.ReLU() if act is None else act
        self.bn2, self.drop = copy.deepcopy(norm), nn.Dropout(0.5)
        self.shortcut: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


def written(forward: Callable[..., Any]) -> type[Block]:
    """A class with that forward."""
    return type("Written", (Block,), {"forward": forward})


def residual(self: Any, x: Tensor) -> Tensor:
    out = self.conv(x)
    out = self.bn(out)
    out += x
    return self.act(out)


def broadcast(self: Any, x: Tensor) -> Tensor:
    return self.act(self.bn(self.conv(x)) + x[:1, :, :1])


def number_added(self: Any, x: Tensor) -> Tensor:
    return self.act(self.bn(self.conv(x)) + self.drop.p)


def residual_downsampled(self: Any, x: Tensor) -> Tensor:
    identity = x
    out = self.bn(self.conv(x))
    if self.shortcut is not None:
        identity = self.shortcut(x)
    return F.relu(identity + out)


def without_activation(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.conv(x)) * 2


def residual_alone(self: Any, x: Tensor) -> Tensor:
    return x + self.bn(self.conv(x))


def used_twice(self: Any, x: Tensor) -> Tensor:
    out = self.conv(x)
    return F.relu(self.bn(out)) + out


def two_norms(self: Any, x: Tensor) -> Tensor:
    out = self.conv(x)
    return F.relu(self.bn(out)) + F.relu(self.bn2(out))


def convolved_twice(self: Any, x: Tensor) -> Tensor:
    return F.relu(self.bn2(self.conv(F.relu(self.bn(self.conv(x))))))


def through_dropout(self: Any, x: Tensor) -> Tensor:
    return F.silu(self.drop(self.bn(self.conv(x))))


def effect_between(self: Any, x: Tensor) -> Tensor:
    out = self.conv(x)
    print(end="")
    return F.relu(self.bn(out))


def input_written_between(self: Any, x: Tensor) -> Tensor:
    y = x * 1
    out = self.conv(y)
    y += 1
    return F.relu(self.bn(out)) + y


def scaled_between(self: Any, x: Tensor) -> Tensor:
    return F.relu(self.bn(self.conv(x) * 0.5))


def called_with_more(self: Any, x: Tensor) -> Tensor:
    return F.relu(self.bn(self.conv(input=x)))


def to_a_size(self: Any, x: Tensor) -> Tensor:
    return self.act(self.bn(self.conv(x, output_size=[20, 18])))


def in_a_branch(self: Any, x: Tensor) -> Tensor:
    if x.sum() > -1e9:
        return F.relu(self.bn(self.conv(x)))
    return x


def of_two(self: Any, x: Tensor) -> Tensor:
    x = self.conv(x)
    return self.bn(x)


def residual_alone_of_two(self: Any, x: Tensor) -> Tensor:
    shortcut = x
    x = self.conv(x)
    x = self.bn(x)
    return self.drop(x) + shortcut


class Stem(Block):
    """Its forward leaves all to a method, as torchvision's ResNet does."""

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.act(self.bn(x))

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_impl(x)


class DeepStem(Stem):
    """As timm's models do, by two methods; what another one does is no matter."""

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x).flatten(1)

    def features(self, x: Tensor) -> Tensor:
        return self._forward_impl(x * 1)

    def weights(self) -> Tensor:
        return self.conv.weight


def conv(out: int = 6, kernel: Any = 3, **settings: Any) -> nn.Conv2d:
    return nn.Conv2d(6, out, kernel, **{"padding": 1, **settings})


def bn() -> nn.Module:
    return nn.BatchNorm2d(6)


def undecided(model: nn.Module, folding: str = "folded") -> Plan:
    """The plan of ``model`` with every convolution that can be taken in, computed by ``folding``."""
    found = finding.plan(model, undecided=True)
    return Plan(tuple(Swap(s.site, _with_folding(s.match, folding)) for s in found.swaps), found.refused)


def _with_folding(match: Match, folding: str) -> Match:
    if match.kind != "region":
        return match
    regions = [{**one, "folding": folding} if one["convolution"] else one for one in match.attributes["regions"]]
    return Match(match.kind, {**match.attributes, "regions": regions})


def regions_in(plan: Plan, name: str = "") -> list[Region]:
    """The regions planned in the module called ``name``."""
    swaps = [s for s in plan.swaps if s.site.name == name and s.match.kind == "region"]
    return [Region.from_json(data) for swap in swaps for data in swap.match.attributes["regions"]]


def swapped_with(model: nn.Module, folding: str = "folded") -> Any:
    """A copy of ``model`` with all convolutions taken in, unproved."""
    return normswap.apply(model, undecided(model, folding))


def drawn(make: Callable[[], nn.Module]) -> Any:
    """A model in eval with random weights, biases and statistics, the same ones every time."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
                module.running_mean.normal_(0.0, 0.5)
                module.running_var.uniform_(0.5, 2.0)
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
                module.weight.uniform_(-1.5, 1.5)
                module.bias.normal_()
    return model.eval()
