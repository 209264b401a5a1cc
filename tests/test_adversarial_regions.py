"""Regions where somebody means harm: what no example input shows, and only a guard on every call can tell."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolution_checks import outcome
from convolution_models import Block, bn, conv, drawn, undecided
from convolution_models import written as convolving
from models import randomised
from region_checks import CHANNELS, IMAGES, ROWS, Case, Parts, assert_same, check, swap
from torch import Tensor, nn

import normswap

_IMAGE = (IMAGES, IMAGES)
_SAMPLE = (ROWS, (2, 1, CHANNELS))


# --- what is written to between the operations of a region ---------------------------------------------------------


def out_between(self, x, y):
    n = self.gn(x)
    torch.mul(x, 2, out=x)
    return F.relu(n + x)


def out_behind_a_shared_sum(self, x, y):
    h = x + y
    torch.mul(h, 2, out=h)
    return self.norm(h) + h


def out_of_a_gate(self, x, y):
    n = self.norm(x)
    return n * torch.sigmoid(n, out=y), y


def child_between(self, x, y):
    n = self.gn(x)
    return F.relu(n + self.conv(x))


def writes_its_input(model: Any) -> None:
    model.conv = nn.Sequential(nn.ReLU(inplace=True), model.conv)


def writes_its_input_by_a_hook(model: Any) -> None:
    model.conv.register_forward_pre_hook(lambda _, args: (args[0].mul_(2),))


def writes_its_input_deep_inside(model: Any) -> None:
    model.conv[1] = nn.ReLU(inplace=True)


def of_several(model: Any) -> None:
    model.conv = nn.Sequential(nn.Identity(), nn.Identity(), model.conv)


# --- names that hold something else --------------------------------------------------------------------------------


def child_by_another_name(self, x, y):
    norm = self.gn
    return F.relu(norm(x) + y)


def function_by_another_name(self, x, y):
    act = F.relu
    return act(self.gn(x) + y)


def slope_by_name(self, x, y):
    slope = 0.3
    if not self.flag:
        slope = 0.7
    return F.leaky_relu(self.gn(x), slope)


def one_by_name(self, x, y):
    one = 1
    if not self.flag:
        one = 2
    return self.norm(x) * (one + y) + y


def dims_by_name(self, x, y):
    dims = (0, 2, 3, 1)
    return self.norm(x.permute(dims)).permute(0, 3, 1, 2)


def order_by_name(self, x, y):
    p = 2
    if not self.flag:
        p = 1
    return x / x.norm(p, dim=-1, keepdim=True)


def exponent_by_name(self, x, y):
    p = 2
    if not self.flag:
        p = 4
    return x * torch.rsqrt(x.pow(p).mean(-1, keepdim=True) + 1e-6)


def dim_by_name(self, x, y):
    dim = 1
    if not self.flag:
        dim = 2
    return x / x.abs().mean(dim, keepdim=True)


def eps_by_name(self, x, y):
    eps = 1e-3
    if not self.flag:
        eps = 0.5
    return F.layer_norm(x, (8,), self.weight, self.bias, eps)


def other_flag(model: Any) -> None:
    model.flag = False


def doubled(model: Any) -> None:
    model.gn.register_forward_hook(lambda *args: args[-1] * 2)


# --- None, and numbers that are none --------------------------------------------------------------------------------


def residual(self, x, y=None):
    return F.relu(self.gn(x) + y)


def activated(self, x, y):
    return self.act(self.gn(x)) + y


def hidden_by(name: str, by: Any = lambda x: x * 5) -> Any:
    return lambda model: model.__dict__.__setitem__(name, by)


def hidden_by_its_class(name: str) -> Any:
    return lambda model: setattr(type(model), name, property(lambda self: lambda x: x.mul_(5)))


def looked_up_otherwise(model: Any) -> None:
    type(model).__getattr__ = lambda self, name: nn.ReLU() if name == "gn" else nn.Module.__getattr__(self, name)


def of_another_class(model: Any) -> None:
    model.__class__ = type("Other", (type(model),), {"gn": staticmethod(torch.neg)})


def batch_norm_residual(self, x, y=None):
    return F.relu(self.bn(x) + y)


def summed(self, x, y=None):
    return self.norm(x + y)


def summed_and_kept(self, x, y=None):
    h = x + y
    return self.norm(h) + h


def scaled(self, x, y=None):
    return self.norm(x) * (1 + y) + y


def scaled_but_shifted(self, x, y=None):
    return self.norm(x) * (1 + y) + x


def clamped(self, x, y=None):
    return x / x.abs().mean(1, keepdim=True).clamp(y)


def added_to(self, x, y=None):
    return x / (x.abs().mean(1, keepdim=True) + y)


def normalized(self, x, y=None):
    return F.normalize(x, dim=-1, eps=y)


def weighted(self, x, y=None):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rms_along(self, x, y=None):
    return x * torch.rsqrt(x.pow(2).mean(self.dim, keepdim=True) + 1e-6)


def l1_along(self, x, y=None):
    return x / x.abs().mean(self.dim, keepdim=True)


def along(dim: Any) -> Any:
    return lambda model: setattr(model, "dim", dim)


def without_weight(model: Any) -> None:
    model.weight = None


_ADDED, _SUMMED = ("gn + residual + relu",), ("sum + norm",)

CASES = {
    "out_between": Case(out_between, (), _IMAGE),
    "out_behind_a_shared_sum": Case(out_behind_a_shared_sum),
    "out_of_a_gate": Case(out_of_a_gate),
    "child_between": Case(child_between, _ADDED, _IMAGE),
    "child_between_replaced": Case(child_between, _ADDED, _IMAGE, later=writes_its_input),
    "child_between_hooked": Case(child_between, _ADDED, _IMAGE, later=writes_its_input_by_a_hook),
    "children_between": Case(child_between, _ADDED, _IMAGE, of_several),
    "child_in_a_child_replaced": Case(child_between, _ADDED, _IMAGE, of_several, writes_its_input_deep_inside),
    "child_hidden": Case(residual, _ADDED, _IMAGE, later=hidden_by("gn")),
    "child_hidden_by_its_class": Case(residual, _ADDED, _IMAGE, later=hidden_by_its_class("gn")),
    "child_hidden_by_another_class": Case(residual, _ADDED, _IMAGE, later=of_another_class),
    "child_looked_up_otherwise": Case(residual, _ADDED, _IMAGE, later=looked_up_otherwise),
    "child_between_hidden": Case(child_between, _ADDED, _IMAGE, later=hidden_by("conv", torch.Tensor.neg_)),
    "child_between_hidden_by_its_class": Case(child_between, _ADDED, _IMAGE, later=hidden_by_its_class("conv")),
    "activation_hidden": Case(activated, ("gn + act",), _IMAGE, later=hidden_by("act")),
    "child_by_another_name": Case(child_by_another_name, (), _IMAGE, later=doubled),
    "function_by_another_name": Case(function_by_another_name, ("gn + residual",), _IMAGE, later=doubled),
    "slope_by_name": Case(slope_by_name, (), _IMAGE, later=other_flag),
    "one_by_name": Case(one_by_name, (), _SAMPLE, later=other_flag),
    "dims_by_name": Case(dims_by_name, (), _IMAGE),
    "order_by_name": Case(order_by_name, later=other_flag),
    "exponent_by_name": Case(exponent_by_name, later=other_flag),
    "dim_by_name": Case(dim_by_name, ("l1_norm",), later=other_flag),
    "eps_by_name": Case(eps_by_name, ("layer_norm",), later=other_flag),
    "no_residual": Case(residual, _ADDED, (IMAGES,)),
    "no_residual_of_a_batch_norm": Case(batch_norm_residual, ("bn + residual + relu",), (IMAGES,)),
    "nothing_summed": Case(summed, _SUMMED, (ROWS,)),
    "nothing_summed_and_kept": Case(summed_and_kept, _SUMMED, (ROWS,)),
    "no_scale": Case(scaled, ("norm + scale + shift",), (ROWS,)),
    "no_scale_but_a_shift": Case(scaled_but_shifted, ("norm + scale + shift",), (ROWS,)),
    "no_minimum": Case(clamped, ("l1_norm",), (ROWS,)),
    "no_eps": Case(added_to, ("l1_norm",), (ROWS,)),
    "no_eps_of_normalize": Case(normalized, ("l2_norm",), (ROWS,)),
    "no_weight": Case(weighted, ("rms_norm_by_hand",), (ROWS,), later=without_weight),
    "a_list_of_dims": Case(rms_along, ("rms_norm_by_hand",), (ROWS,), along([-1])),
    "later_a_list_of_dims": Case(rms_along, ("rms_norm_by_hand",), (ROWS,), along(-1), along([-1])),
    "later_a_dim_too_many": Case(l1_along, ("l1_norm",), (ROWS,), later=along(5)),
}


class Drawn(Parts):
    """Reads another tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    @property
    def noise(self) -> Tensor:
        self.reads += 1
        return torch.arange(48.0).view(ROWS) * self.reads + self.reads**2

    def forward(self, x: Tensor) -> Tensor:
        return x + self.noise / torch.mean(torch.abs(self.noise), -1, keepdim=True)


def test_what_a_property_gives_is_no_tensor_twice() -> None:
    model = Drawn()
    swapped = swap(model)
    torch.testing.assert_close(swapped(torch.ones(ROWS)), model(torch.ones(ROWS)), rtol=0, atol=0)


class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        eps = 1e-6
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def test_a_number_by_name_is_one_where_the_whole_forward_is_read() -> None:
    assert [swap.match.kind for swap in normswap.plan(nn.Sequential(Whole())).swaps] == ["rms_norm"]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", CASES)
def test_it_does_what_it_did(name: str, mode: str) -> None:
    check(CASES[name], mode)


# --- convolutions ---------------------------------------------------------------------------------------------------


def _as_a_tensor(child: str, name: str) -> Any:
    def change(model: Any) -> None:
        owner = getattr(model, child)
        value = getattr(owner, name).detach() * 2
        delattr(owner, name)
        setattr(owner, name, value)

    return change


def _statistics_as_a_parameter(model: Any) -> None:
    mean = model.bn.running_mean * 2
    del model.bn.running_mean
    model.bn.running_mean = nn.Parameter(mean, requires_grad=False)


LATER = {
    "nothing": lambda model: None,
    "weight_a_tensor": _as_a_tensor("conv", "weight"),
    "bias_a_tensor": _as_a_tensor("conv", "bias"),
    "norm_weight_a_tensor": _as_a_tensor("bn", "weight"),
    "statistics_a_parameter": _statistics_as_a_parameter,
    "stride_a_number": lambda model: setattr(model.conv, "stride", 2),
    "padding_a_number": lambda model: setattr(model.conv, "padding", 2),
    "dilation_a_number": lambda model: setattr(model.conv, "dilation", 2),
    "no_convolution": lambda model: setattr(model, "conv", None),
    "no_activation": lambda model: delattr(model, "act"),
    "other_activation": lambda model: setattr(model, "act", nn.Identity()),
    "negative_variance": lambda model: model.bn.running_var.fill_(-1),
}


@pytest.mark.parametrize("folding", ["folded", "fused"])
@pytest.mark.parametrize("later", LATER)
def test_a_convolution_does_what_it_did(later: str, folding: str) -> None:
    model, fast = (drawn(lambda: Block(conv(), bn())) for _ in range(2))
    normswap.apply(fast, undecided(model, folding), inplace=True)
    for one in (model, fast):
        LATER[later](one)
    _assert_alike(fast, model)


def _may_be_none(self, x, y=None):
    return self.act(self.bn(self.conv(x)) + y)


@pytest.mark.parametrize("folding", ["folded", "fused"])
def test_a_convolution_with_no_residual_raises_what_it_raised(folding: str) -> None:
    model = drawn(lambda: convolving(_may_be_none)(conv(), bn()))
    _assert_alike(normswap.apply(model, undecided(model, folding)), model)


def _assert_alike(fast: nn.Module, model: nn.Module) -> None:
    x: Tensor = torch.randn(2, 6, 9, 8)
    ours, theirs = outcome(fast, x), outcome(model, x)
    if isinstance(theirs, str):
        assert ours == theirs
    else:
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-4, equal_nan=True)


# --- Linear -> scale -> BatchNorm -----------------------------------------------------------------------------------


def scaled_before_and_behind(self, x):
    return self.bn(self.gemm(x) * self.scale) * self.k


class Projection(nn.Module):
    forward = scaled_before_and_behind

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.gemm, self.bn = nn.Linear(8, 6), nn.BatchNorm1d(6, affine=affine)
        self.scale, self.k = nn.Parameter(torch.ones(6)), 2.0


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", ["scale", "k"])
def test_a_factor_that_is_none_raises_what_it_raised(name: str, mode: str) -> None:
    model = randomised(Projection()).train(mode == "train")
    swapped = swap(model)
    for one in (swapped, model):
        setattr(one, name, None)
    assert_same(swapped, model, (torch.randn(5, 8),))


def test_what_multiplies_a_norm_without_weights_has_one_value_a_channel() -> None:
    model = randomised(Projection(affine=False)).train()
    swapped = swap(model)
    assert type(swapped) is not Projection
    assert_same(swapped, model, (torch.randn(5, 8),), exact=False)


# --- children that are replaced, whatever by ------------------------------------------------------------------------

IN_THEIR_PLACE: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "Identity": nn.Identity,
    "Sequential": nn.Sequential,
    "GroupNorm": lambda: nn.GroupNorm(4, CHANNELS),
    "LayerNorm": lambda: nn.LayerNorm(5),
    "BatchNorm2d": lambda: drawn(lambda: nn.BatchNorm2d(CHANNELS, affine=False)),
    "without statistics": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(CHANNELS),
    "Conv2d": lambda: nn.Conv2d(CHANNELS, CHANNELS, 1),
    "PReLU": nn.PReLU,
    "in place": lambda: nn.ReLU(inplace=True),
}
RUNS: dict[str, Callable[[], nn.Sequential]] = {
    "conv, bn, relu": lambda: nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.BatchNorm2d(CHANNELS), nn.ReLU()),
    "gn, silu": lambda: nn.Sequential(nn.GroupNorm(2, CHANNELS), nn.SiLU()),
    "gn, dropout, leaky": lambda: nn.Sequential(nn.GroupNorm(2, CHANNELS), nn.Dropout(0.0), nn.LeakyReLU(0.2)),
    "bn, relu": lambda: nn.Sequential(nn.BatchNorm2d(CHANNELS), nn.ReLU()),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("new", IN_THEIR_PLACE)
@pytest.mark.parametrize("run", RUNS)
def test_what_stands_in_the_place_of_a_child_is_called(run: str, new: str, training: bool) -> None:
    """Also where a tool that folds norms leaves an Identity."""
    model = drawn(RUNS[run]).train(training)
    for at in range(len(model)):
        swapped, original = swap(model), copy.deepcopy(model)
        for one in (swapped, original):
            torch.manual_seed(1)
            one[at] = IN_THEIR_PLACE[new]()
            one.train(training)
        assert_same(swapped, original, (torch.randn(IMAGES),), exact=False)
