"""Subclasses of convolutions that pad by themselves, or otherwise make something of their input first, and their
look-alikes: folded, or left with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolution_models import bn, drawn
from test_fold_convolution import folded
from torch import Tensor, nn

from normswap.regions.padding import convolves_last


def same(x: Tensor, size: Any, stride: Any) -> Tensor:
    """As TensorFlow pads."""
    height, width = x.size()[-2:]
    rows, columns = (
        max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip((height, width), size, stride, strict=True)
    )
    return F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))


def conv2d_same(x, weight, bias=None, stride=(1, 1), groups=1):
    x = same(x, weight.shape[-2:], stride)
    return F.conv2d(x, weight, bias, stride, (0, 0), groups=groups)


def scaled(x, weight, bias):
    return F.conv2d(x, weight, bias) * 2


def standardised(x, weight, bias):
    weight = weight - weight.mean((1, 2, 3), keepdim=True)
    return F.conv2d(x, weight, bias)


def biased_first(x, weight, bias):
    return F.conv2d(x + bias.sum(), weight, bias)


def by_its_own(x, weight, bias):
    return by_its_own(x, weight, bias)


def by_timm(self, x):
    return conv2d_same(x, self.weight, self.bias, self.stride, self.groups)


def called_by_names(self, x):
    return conv2d_same(bias=self.bias, weight=self.weight, x=x, stride=self.stride)


def padded_here(self, x):
    """Described."""
    if x.shape[-1] % 2:
        x = F.pad(x, (0, 1, 0, 1), value=1.0)
    return torch.conv2d(x, self.weight, bias=self.bias, stride=self.stride, padding=self.padding)


def by_the_size_of_the_weight(self, x):
    x = F.pad(x, (self.weight.size(3), self.weight.shape[2]) * 2)
    return F.conv2d(x, self.weight, self.bias)


PADS = (by_timm, called_by_names, padded_here, by_the_size_of_the_weight)


def scaled_behind(self, x):
    return scaled(x, self.weight, self.bias)


def weight_changed(self, x):
    return standardised(x, self.weight, self.bias)


def weight_changed_here(self, x):
    return F.conv2d(x, self.weight * 2, self.bias)


def bias_read_before(self, x):
    return biased_first(x, self.weight, self.bias)


def weight_read_before(self, x):
    x = x * self.weight.mean()
    return F.conv2d(x, self.weight, self.bias)


def weight_under_a_name(self, x):
    weight = self.weight
    return F.conv2d(x, weight, self.bias)


def without_the_bias(self, x):
    return F.conv2d(x, self.weight)


def bias_for_the_weight(self, x):
    return F.conv2d(x, self.bias, self.weight)


def as_its_own_input(self, x):
    return F.conv2d(self.weight, self.weight, self.bias)


def returned_twice(self, x):
    if x.shape[-1] > 8:
        return x
    return F.conv2d(x, self.weight, self.bias)


def activated(self, x):
    x = F.conv2d(x, self.weight, self.bias)
    return F.relu(x)


def by_a_method(self, x):
    return F.conv2d(self.prepared(x), self.weight, self.bias)


def of_itself(self, x):
    return F.conv2d(x * len(list(type(self).__mro__)), self.weight, self.bias)


def handed_on(self, x):
    return F.conv2d(x * sum(p.mean() for p in nn.Module.parameters(self)), self.weight, self.bias)


def without_end(self, x):
    return by_its_own(x, self.weight, self.bias)


def through_a_lambda(self, x):
    later = lambda: x  # noqa: E731
    return F.conv2d(later(), self.weight, self.bias)


def seeing_all(self, x):
    return F.conv2d(eval("x"), self.weight, self.bias)


OTHERS = (
    *(scaled_behind, weight_changed, weight_changed_here, bias_read_before, weight_read_before, weight_under_a_name),
    *(without_the_bias, bias_for_the_weight, as_its_own_input, returned_twice, activated, by_a_method, of_itself),
    *(handed_on, without_end, through_a_lambda, seeing_all),
)


def made(forward: Any, **members: Any) -> Any:
    """A convolution with that forward."""
    prepared = lambda self, x: x * self.weight.mean()  # noqa: E731
    cls = type("Padded", (nn.Conv2d,), {"forward": forward, "prepared": prepared, **members})
    return cls(6, 6, 3, stride=(2, 1))


@pytest.mark.parametrize("forward", PADS)
@pytest.mark.parametrize("bias", (True, False))
def test_what_pads_is_folded(forward: Any, bias: bool) -> None:
    model = drawn(lambda: nn.Sequential(made(forward), bn(), nn.ReLU()))
    model[0].bias = model[0].bias if bias else None
    folds, told = folded(model)
    assert type(folds[0]) is type(model[0]) and type(folds[1]) is nn.Identity and not told
    x = torch.randn(2, 6, 9, 8)
    with torch.no_grad():
        torch.testing.assert_close(folds(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("forward", OTHERS)
def test_what_does_more_is_left_and_told_of(forward: Any) -> None:
    model = drawn(lambda: nn.Sequential(made(forward), bn(), nn.ReLU()))
    folds, (told,) = folded(model)
    assert folds is None and "0 is a test_padded_convolutions.Padded, which may compute in its own way" in told


def test_a_class_that_reads_attributes_in_its_own_way() -> None:
    assert convolves_last(made(by_timm)) and convolves_last(nn.Conv2d(6, 6, 3)) and not convolves_last(None)
    for name in ("__getattr__", "__call__"):
        own = getattr(nn.Module, name)
        assert not convolves_last(made(by_timm, **{name: lambda self, *given, own=own: own(self, *given)}))
    hiding = made(by_timm)
    type(hiding).bias = None
    assert not convolves_last(hiding)
    for nameless in (lambda *given: F.conv2d(given[1], given[0].weight, given[0].bias), lambda: None):
        assert not convolves_last(made(nameless))
    assert not convolves_last(type("Transposed", (nn.ConvTranspose2d,), {"forward": by_timm})(6, 6, 3))
    listed = made(by_timm)
    listed.stride = [listed.weight]
    assert not convolves_last(listed)


def test_what_carries_hooks_is_left() -> None:
    model = drawn(lambda: nn.Sequential(made(by_timm), bn()))
    model[0].register_forward_hook(lambda *_: None)
    folds, (told,) = folded(model)
    assert folds is None and "0 carries hooks" in told


class Depthwise(nn.Conv2d):
    """As it is, of other arguments."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 3, groups=channels)


def own_inner(self: Any, x: Tensor, weight: Tensor, bias: Any) -> Any:
    return nn.Conv2d._conv_forward(self, x, weight, bias) * 2


SUBCLASSES: dict[str, tuple[type[nn.Module], bool]] = {
    "other arguments": (Depthwise, True),
    "an inner forward": (type("Inner", (Depthwise,), {"_conv_forward": own_inner}), False),
    "a call": (type("Called", (Depthwise,), {"__call__": lambda self, x: nn.Conv2d.__call__(self, x) * 2}), False),
}


@pytest.mark.parametrize("name", SUBCLASSES)
def test_a_subclass_that_computes_as_its_base_is_folded(name: str) -> None:
    cls, folds = SUBCLASSES[name]
    model = drawn(lambda: nn.Sequential(cls(6), bn(), nn.Sequential(Depthwise(6), bn())))  # type: ignore[call-arg]
    found, told = folded(model)
    assert type(found[2][0]) is Depthwise and type(found[2][1]) is nn.Identity
    assert (type(found[1]) is nn.Identity) == folds == (not told) and type(found[0]) is cls
    x = torch.randn(2, 6, 9, 8)
    with torch.no_grad():
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-4)


class NormAct(nn.BatchNorm2d):
    """As timm's, with an activation that no kernel has."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ELU()

    def forward(self, x: Tensor) -> Any:
        return self.act(
            F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps)
        )


def test_whatever_stands_behind_a_norm_stays() -> None:
    model = drawn(lambda: nn.Sequential(nn.Conv2d(6, 6, 3), NormAct(6)))
    found, told = folded(model)
    assert not told and [type(one) for one in found[1]] == [nn.ELU]
    x = torch.randn(2, 6, 9, 8)
    with torch.no_grad():
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-4)
