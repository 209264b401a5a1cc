"""A convolution in one method and its BatchNorm in another, as in DenseNets, as one plain convolution."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as cp
from convolution_models import drawn, regions_in
from norm_act_models import NormAct
from torch import Tensor, nn

import normswap
from normswap.folding import pairs_of
from normswap.uses import uses_in


class Layer(nn.Module):
    """torchvision's way."""

    def __init__(self, make: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm1, self.relu1, self.conv1 = make(6), nn.ReLU(), nn.Conv2d(6, 8, 1, bias=False)
        self.norm2, self.relu2, self.conv2 = make(8), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1, bias=False)
        self.memory_efficient, self.drop_rate = False, 0.0

    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        concated_features = torch.cat(inputs, 1)
        bottleneck_output = self.conv1(self.relu1(self.norm1(concated_features)))
        return bottleneck_output

    def any_requires_grad(self, input: list[Tensor]) -> bool:
        return any(tensor.requires_grad for tensor in input)

    @torch.jit.unused
    def call_checkpoint_bottleneck(self, input: list[Tensor]) -> Tensor:
        def closure(*inputs: Any) -> Tensor:
            return self.bn_function(inputs)  # type: ignore[arg-type]

        return cp.checkpoint(closure, *input, use_reentrant=False)

    def forward(self, input: Any) -> Tensor:
        if isinstance(input, Tensor):
            prev_features = [input]
        else:
            prev_features = input
        if self.memory_efficient and self.any_requires_grad(prev_features):
            bottleneck_output = self.call_checkpoint_bottleneck(prev_features)
        else:
            bottleneck_output = self.bn_function(prev_features)
        new_features = self.conv2(self.relu2(self.norm2(bottleneck_output)))
        if self.drop_rate > 0:
            new_features = F.dropout(new_features, p=self.drop_rate, training=self.training)
        return new_features


def thinly(function: Any, *args: Any, use_reentrant: bool | None = None) -> Any:
    """As timm wraps it."""
    if use_reentrant is None:
        use_reentrant = False
    return cp.checkpoint(function, *args, use_reentrant=use_reentrant)


def twice(function: Any, *args: Any) -> Any:
    return cp.checkpoint(function, *args, use_reentrant=False) * 2


def doubling(function: Any, *args: Any) -> Any:
    return 2 * function(*args)


class Thinly(Layer):
    def call_checkpoint_bottleneck(self, input: list[Tensor]) -> Tensor:
        def closure(*inputs: Any) -> Tensor:
            return self.bn_function(inputs)  # type: ignore[arg-type]

        return thinly(closure, *input)


class Twice(Layer):
    def call_checkpoint_bottleneck(self, input: list[Tensor]) -> Tensor:
        def closure(*inputs: Any) -> Tensor:
            return self.bn_function(inputs)  # type: ignore[arg-type]

        return twice(closure, *input)


class Doubling(Layer):
    def call_checkpoint_bottleneck(self, input: list[Tensor]) -> Tensor:
        def closure(*inputs: Any) -> Tensor:
            return self.bn_function(inputs)  # type: ignore[arg-type]

        return doubling(closure, *input)


class ClosureDoubles(Layer):
    def call_checkpoint_bottleneck(self, input: list[Tensor]) -> Tensor:
        def closure(*inputs: Any) -> Tensor:
            return 2 * self.bn_function(inputs)  # type: ignore[arg-type]

        return cp.checkpoint(closure, *input, use_reentrant=False)


class Simple(Layer):
    def forward(self, input: Any) -> Tensor:
        out = self.bn_function([input])
        return self.conv2(self.relu2(self.norm2(out)))


class Direct(Layer):
    def forward(self, input: Any) -> Tensor:
        return self.conv2(self.relu2(self.norm2(self.bn_function([input]))))


class ReadTwice(Layer):
    def forward(self, input: Any) -> Tensor:
        out = self.bn_function([input])
        return self.conv2(self.relu2(self.norm2(out))) + out.mean()


class CalledTwice(Layer):
    def forward(self, input: Any) -> Tensor:
        out = self.bn_function([input])
        return self.conv2(self.relu2(self.norm2(out))) + self.bn_function([input]).mean()


class NormedTwice(Layer):
    def forward(self, input: Any) -> Tensor:
        out = self.bn_function([input])
        return self.conv2(self.relu2(self.norm2(out))) + self.norm2(self.relu2(out * 1)).mean()


class AnotherValue(Layer):
    def forward(self, input: Any) -> Tensor:
        out = input.repeat(1, 2, 1, 1)[:, :8]
        if input.sum() < 1e9:
            out = self.bn_function([input])
        return self.conv2(self.relu2(self.norm2(out)))


class Augmented(Layer):
    def forward(self, input: Any) -> Tensor:
        out = self.bn_function([input])
        out += 1.0
        return self.conv2(self.relu2(self.norm2(out)))


class Argument(Layer):
    def forward(self, input: Any, out: Any = None) -> Tensor:
        out = self.bn_function([input]) if out is None else out
        return self.conv2(self.relu2(self.norm2(out)))


class Scaled(Layer):
    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1)))) * 2

    def forward(self, input: Any) -> Tensor:
        return self.conv2(self.relu2(self.norm2(self.bn_function([input]))))


class WeightRead(Direct):
    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        x = torch.cat(inputs, 1) * self.conv1.weight.mean()
        return self.conv1(self.relu1(self.norm1(x)))


class OneOfTwo(Direct):
    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        x = self.relu1(self.norm1(torch.cat(inputs, 1)))
        if x.sum() < 0:
            return x
        return self.conv1(x)


class Locals(Direct):
    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        out = self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))))
        assert "out" in locals()
        return out


class HandedOn(Direct):
    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1)))) + 0 * _convolved(self, inputs[0]).mean()


def _convolved(layer: Any, x: Tensor) -> Tensor:
    return layer.conv1(x)  # type: ignore[no-any-return]


class Inside(Direct):
    """Of another one's convolution."""

    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        def of(self: Any) -> Tensor:
            return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))))  # type: ignore[no-any-return]

        return of(self)


class Lowered(Direct):
    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1)))).float()


class Inherited(Direct):
    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        return super().bn_function(inputs)


class Property(Direct):
    @property
    def conv1(self) -> Any:
        return lambda x: 2 * self._modules["conv1"](x)  # type: ignore[misc]

    @conv1.setter
    def conv1(self, value: nn.Module) -> None:
        self._modules["conv1"] = value


class Recursive(Direct):
    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        if len(inputs) > 1:
            return self.bn_function([torch.cat(inputs, 1)])
        return self.conv1(self.relu1(self.norm1(inputs[0])))


class Named(Layer):
    """The function inside as the method, beside another one."""

    def closure(self, input: list[Tensor]) -> Tensor:
        def seen(x: Tensor) -> Tensor:
            return x

        def closure(*inputs: Any) -> Tensor:
            return self.bn_function(inputs)  # type: ignore[arg-type]

        return cp.checkpoint(closure, seen(input[0]), *input[1:], use_reentrant=False)

    def forward(self, input: Any) -> Tensor:
        out = self.closure([input])
        return self.conv2(self.relu2(self.norm2(out)))


class OneOfTwoConvolutions(Direct):
    def __init__(self) -> None:
        super().__init__()
        self.conv3 = nn.Conv2d(6, 8, 1)

    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        x = torch.cat(inputs, 1)
        if x.numel() > 0:
            return self.conv1(self.relu1(self.norm1(x)))
        return self.conv3(x)


class TheOtherOfTwo(OneOfTwoConvolutions):
    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        x = torch.cat(inputs, 1)
        if x.numel() == 0:
            return self.conv1(self.relu1(self.norm1(x)))
        return self.conv3(x)


class AnotherChild(Direct):
    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        return self.relu1(self.conv1(self.norm1(torch.cat(inputs, 1))))


class ByKeyword(Direct):
    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        return self.conv1(input=self.relu1(self.norm1(torch.cat(inputs, 1))))


class ToASize(Direct):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.ConvTranspose2d(6, 8, 1)

    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))), output_size=[5, 4])


class ToASizeByPlace(ToASize):
    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))), [5, 4])


def ones() -> Tensor:
    return torch.ones(2, 8, 5, 4)


class Made(Direct):
    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        if inputs[0].numel() > 0:
            return ones()
        return self.conv1(inputs[0])


class Nothing(Direct):
    def bn_function(self, inputs: list[Tensor]) -> Any:
        if inputs[0].numel() == 0:
            return
        return self.conv1(inputs[0])


class ByALambda(Direct):
    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        return cp.checkpoint(lambda x: self.conv1(x), inputs[0], use_reentrant=False)  # type: ignore[no-any-return]


class OneOfBoth(Direct):
    """All of a pair in one method."""

    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        return self.norm2(self.conv1(inputs[0]))  # type: ignore[no-any-return]

    def forward(self, x: Any) -> Tensor:
        return self.bn_function([x])


FOLDS = (Layer, Thinly, Simple, Direct, Recursive, Named)
LEFT = (
    *(Twice, Doubling, ClosureDoubles, ReadTwice, CalledTwice, NormedTwice, AnotherValue, Augmented, Argument, Scaled),
    *(WeightRead, OneOfTwo, Locals, HandedOn, Inside, Lowered, Inherited, OneOfTwoConvolutions, TheOtherOfTwo),
    *(AnotherChild, ByKeyword, ToASize, ToASizeByPlace, Made, Nothing, ByALambda),
)


def folded(layer: nn.Module) -> tuple[Any, list[str]]:
    """Behind a pair that can be folded in any case; and what was warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = normswap.fold(nn.Sequential(nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)), layer).eval())
    return made[1], [text for one in told if "is left as it is" in (text := str(one.message))]


def check(layer: nn.Module, made: nn.Module) -> None:
    x = torch.randn(2, 6, 5, 4)
    with torch.no_grad():
        torch.testing.assert_close(made(x), layer(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("cls", FOLDS, ids=lambda cls: cls.__name__)
def test_it_is_one_convolution(cls: type[Layer]) -> None:
    layer = drawn(cls)
    made, told = folded(layer)
    assert type(made.norm2) is nn.Identity and type(made.norm1) is nn.BatchNorm2d and not told
    check(layer, made)
    x = torch.randn(2, 6, 5, 4, requires_grad=True)
    for one in (layer, made):
        one.memory_efficient = True  # whichever way it goes
    torch.testing.assert_close(made(x), layer(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("cls", LEFT, ids=lambda cls: cls.__name__)
def test_what_is_left_as_it_is(cls: type[Layer]) -> None:
    layer = drawn(cls)
    made, told = folded(layer)
    assert type(made.norm2) is nn.BatchNorm2d and not told
    check(layer, made)


def test_names_that_are_hidden() -> None:
    layer = drawn(Direct)
    layer.__dict__["bn_function"] = lambda inputs: inputs[0].repeat(1, 2, 1, 1)[:, :8]
    assert type(folded(layer)[0].norm2) is nn.BatchNorm2d
    hidden = drawn(Property)
    assert type(folded(hidden)[0].norm2) is nn.BatchNorm2d


def test_a_norm_that_ends_in_an_activation() -> None:
    layer = drawn(lambda: Simple(lambda channels: NormAct(channels=channels)))
    made, told = folded(layer)
    assert not told and [type(child) for child in made.norm2] == [nn.Identity, nn.ReLU]
    check(layer, made)


class Halved(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def test_a_norm_of_its_own_stays() -> None:
    def hooked(channels: int) -> nn.Module:
        norm = NormAct(channels=channels)
        norm.register_forward_hook(lambda *_: None)
        return norm

    for make, spoken in ((Halved, 1), (hooked, 1), (partial(nn.BatchNorm2d, track_running_stats=False), 0)):
        layer = drawn(lambda make=make: Simple(make))
        made, told = folded(layer)
        assert type(made.norm2) is type(layer.norm2) and len(told) == spoken
        check(layer, made)


def test_each_pair_is_found_once() -> None:
    model = drawn(OneOfBoth)
    (found,) = pairs_of(model, uses_in(model))
    assert found[1].norm == "norm2" and not found[1].problem


def test_what_is_told_of() -> None:
    hooked = drawn(Layer)
    hooked.conv1.register_forward_hook(lambda *_: None)
    shared = drawn(lambda: nn.Sequential(Layer(), Layer()))
    shared[1].conv1 = shared[0].conv1
    of_its_own = drawn(Layer)
    of_its_own.norm2.register_forward_hook(lambda *_: None)
    for layer, count, why in (
        (hooked, 1, "conv1 carries hooks"),
        (shared, 2, "called elsewhere too"),
        (of_its_own, 1, "no plain one"),
    ):
        made, told = folded(layer)
        assert len(told) == count and all(why in one for one in told), told
        assert all(type(m.norm2) is nn.BatchNorm2d for m in made.modules() if isinstance(m, Layer))


def test_a_region_says_why_it_is_without_the_convolution() -> None:
    for make, why in ((Layer, "conv1 is called in another method"), (AnotherValue, "")):
        (region,) = (one for one in regions_in(normswap.plan(drawn(make))) if one.norm == "norm2")
        assert (region.name, region.apart) == ("norm2 + relu2", why)
    (region,) = (one for one in regions_in(normswap.plan(Layer())) if one.norm == "norm2")
    assert region.apart == ""
