"""What forwards take apart by inheritance, by another forward than the class's, or by weights: it stays."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from convolution_models import bn, conv, drawn
from torch import Tensor, nn
from uses_models import (
    Block,
    Model,
    Taps,
    adding,
    assert_part_stays,
    functions_in,
)


def wrapping(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


class Above(Taps):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 2


class ByName(Taps):
    def forward(self, x: Tensor) -> Any:
        return Taps.forward(self, x) * 2


class Later(Taps):
    def forward(self, x: Tensor) -> Any:
        return getattr(self, "_run")(x)  # noqa: B009

    def _run(self, x: Tensor) -> Any:
        return super().forward(x)


class NoGradients(Taps):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        return self.row[0](x) + self.row(x)


class Wrapped(Taps):
    @wrapping
    def forward(self, x: Tensor) -> Any:
        return self.row[0](x) + self.row(x)


class Partial(Taps):
    def _forward(self, x: Tensor, times: int) -> Any:
        return self.row(x) + times * self.row[0](x)

    forward = functools.partialmethod(_forward, times=2)  # type: ignore[assignment]


class Called(Model):
    forward = Model.whole

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) + self.row[0](x)


class CalledItself(Block):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) + self.conv(x)


SCOPE: dict[str, Any] = {}
exec("def without_source(self, x):\n    return self.row(x) + self.row[0](x)", SCOPE)


class WithoutSource(Taps):
    forward = SCOPE["without_source"]


class Lambda(Taps):
    forward = lambda self, x: self.row(x) + self.row[0](x)  # noqa: E731


class Forwarding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class UsesForwarding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wrapped = Forwarding()

    def forward(self, x: Tensor) -> Any:
        return self.wrapped(x) + self.wrapped.conv(x)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(conv(), bn(), nn.ReLU())
        self.child = Child(self)

    def forward(self, x: Tensor) -> Any:
        return self.child(self.row(x))


class Child(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parents = [parent]

    def forward(self, x: Tensor) -> Any:
        first: Any = self.parents[0]
        return first.row[0](x) + x


class Coder(nn.Module):
    """Without a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(conv(), bn())

    def encode(self, x: Tensor) -> Any:
        return self.row(x) + self.row[0](x)


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.coder = Coder()

    def forward(self, x: Tensor) -> Any:
        return self.coder.encode(x)


def with_a_forward_of_its_own(function: Any, make: Callable[[], Any] = Block) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = make()
        model.forward = types.MethodType(function, model)
        return nn.Sequential(Taps(), model)

    return made


def with_a_method_of_its_own() -> nn.Module:
    model: Any = adding(lambda self, x: 0)()
    model.more = types.MethodType(lambda self, x: self.row[0](x), model)
    return model  # type: ignore[no-any-return]


class Rows(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def traced(model: nn.Module) -> nn.Module:
    return nn.Sequential(torch.fx.GraphModule(model, Rows().trace(model)))


class Gate(nn.Module):
    """What reads weights of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv(), bn()
        self.alias = [self]

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) * self.gate(x)

    def gate(self, x: Tensor) -> Any:
        return self._of(self)

    @staticmethod
    def _of(module: Any) -> Any:
        return module.conv.weight.mean()


class Gates:
    def by_a_static_method(self: Any, x: Any) -> Any:
        return self._of(self)

    def by_a_computed_name(self: Any, x: Any) -> Any:
        return getattr(self, "co" + "nv").weight.mean()

    def by_a_state(self: Any, x: Any) -> Any:
        return self.state_dict()["conv.weight"].mean()

    def by_parameters(self: Any, x: Any) -> Any:
        return sum(p.sum() for p in self.parameters())

    def by_getattr(self: Any, x: Any) -> Any:
        return self.__getattr__("conv")(x)

    def by_an_alias(self: Any, x: Any) -> Any:
        return self.alias[0].conv(x)

    def by_a_parameter(self: Any, x: Any) -> Any:
        return self.get_parameter("conv.weight").mean()

    def by_a_buffer(self: Any, x: Any) -> Any:
        return self.bn.running_mean.mean()

    without_source = lambda self, x: self.state_dict()["conv.weight"].mean()  # noqa: E731


APART: dict[str, Callable[[], nn.Module]] = {
    **{f"gate {name}": type("Gated", (Gate,), {"gate": one}) for name, one in functions_in(Gates).items()},
    **{
        cls.__name__: cls
        for cls in (Above, ByName, Later, NoGradients, Wrapped, Partial, Called, CalledItself, WithoutSource, Lambda)
    },
    **{cls.__name__: cls for cls in (UsesForwarding, Parent, Encodes)},
    "a forward of its own": with_a_forward_of_its_own(lambda self, x: self.bn(self.conv(x)) + self.conv(x)),
    "a row's own forward": with_a_forward_of_its_own(
        lambda self, x: self[1](self[0](x)) + self[0](x), lambda: nn.Sequential(conv(), bn())
    ),
    "a parent's own forward": with_a_forward_of_its_own(lambda self, x: self.whole(x) + self.row[0](x), Model),
    "what torch.fx traced": lambda: traced(NoGradients()),
    "a method of its own": with_a_method_of_its_own,
}


@pytest.mark.parametrize("name", APART)
def test_what_takes_apart_is_seen(name: str) -> None:
    assert_part_stays(drawn(APART[name]))
