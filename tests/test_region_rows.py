"""The short way through C++ of a region that is a norm of rows, over stand-ins for the native ops on the CPU: what it
computes, and all that makes it leave the region to the long way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from at_once_stand_in import CALLED, DECLINED, calls, compiled, needs_compiler, registered, short_way
from models import Flagged, randomised
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import normswap

__all__ = ["calls", "compiled", "registered", "short_way"]
pytestmark = [needs_compiler, pytest.mark.usefixtures("short_way")]

WIDTH = 8
Calls = list[tuple[Any, ...]]


class Before(nn.Module):
    """The sum is used by others too."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.out = norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        x = x + r
        return x + self.out(self.norm(x))


class Alone(Before):
    """Nobody else sees the sum."""

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return self.out(self.norm(x + r))


class GivenOut(Before):
    """Whoever calls it may ask for the gradient of the sum."""

    def forward(self, x: Tensor, r: Tensor) -> Any:
        x = x + r
        return x, self.norm(x)


class Gated(Before):
    """An activation of the sum sees no more of its gradient than PyTorch's sum does."""

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        x = x + r
        return self.norm(x) * F.silu(x)


class Listened(Before):
    """So may a hook of who is handed it."""

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        x = x + r
        return self.norm(x) + self.out(x)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH, eps=1e-6),
    "rms_norm of no eps": lambda: nn.RMSNorm(WIDTH),
}


def swapped(model: nn.Module) -> nn.Module:
    """With the region alone: the norm in it keeps its class."""
    return normswap.apply(model, normswap.plan(model, include=""))


def drawn(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 3, WIDTH, dtype=dtype)


@pytest.mark.parametrize("gradients", (False, True))
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("make", (Before, Alone))
def test_one_op_computes_it(make: type[Before], norm: str, gradients: bool) -> None:
    model = randomised(make(NORMS[norm]()))
    ours, x, r = swapped(model), drawn(), drawn()
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(ours(x, r), model(x, r))
    kind = norm.partition(" ")[0]
    assert [f"{kind}_with_options"] == CALLED


def test_a_sum_that_an_activation_sees_is_one_op_with_gradients_too() -> None:
    model = randomised(Gated(nn.LayerNorm(WIDTH)))
    ours, x, r = swapped(model), drawn().requires_grad_(), drawn()
    torch.testing.assert_close(ours(x, r), model(x, r))
    assert CALLED == ["layer_norm_with_options"]


@pytest.mark.parametrize("make", (GivenOut, Listened))
def test_a_sum_whose_gradient_may_be_asked_for_is_made_before(make: type[Before]) -> None:
    model = randomised(make(nn.LayerNorm(WIDTH)))
    ours, x, r = swapped(model), drawn().requires_grad_(), drawn()

    def gradient(module: nn.Module) -> Tensor | None:
        seen: list[Tensor] = []
        module.out.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        out = module(x, r)
        h, n = out if isinstance(out, tuple) else (*seen, out)
        h.retain_grad()
        n.square().sum().backward()
        return h.grad

    torch.testing.assert_close(gradient(ours), gradient(model))
    assert "layer_norm_with_options" not in CALLED
    with torch.no_grad():
        ours(x, r)
    assert CALLED == ["layer_norm_with_options"]


@pytest.mark.parametrize("alone", (False, True))
def test_a_subclass_that_may_be_another_is_asked(alone: bool, calls: Calls) -> None:
    model = randomised(Before(Flagged(WIDTH)))
    ours = swapped(model) if alone else normswap.apply(model, normswap.plan(model))
    x, r = drawn(), drawn()
    torch.testing.assert_close(ours(x, r), model(x, r))
    assert CALLED == ["layer_norm_with_options"]
    for one in (model, ours):
        one.norm.fast = True
    torch.testing.assert_close(ours(x, r), model(x, r))
    assert CALLED == ["layer_norm_with_options"]


@pytest.mark.parametrize("gradients", (False, True))
def test_a_sum_that_is_not_dense_is_made_before(gradients: bool, calls: Calls) -> None:
    model = randomised(Before(nn.LayerNorm(WIDTH)))
    ours, x, r = swapped(model), torch.randn(2, WIDTH, 3).transpose(1, 2), drawn()
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(ours(x, r), model(x, r))
        ((one, *given),) = calls
        found = one(*given)
    assert (found is None) == gradients  # then the sum's are added before they are rounded, which Python sees to
    if found is not None:
        assert found[0].stride() == (x + r).stride()


def test_a_swapped_norm_is_read_too() -> None:
    model = randomised(Before(nn.LayerNorm(WIDTH)))
    ours, x, r = normswap.apply(model, normswap.plan(model)), drawn(), drawn()
    assert type(ours.norm) is normswap.modules.LayerNorm
    torch.testing.assert_close(ours(x, r), model(x, r))
    assert CALLED == ["layer_norm_with_options"]


@pytest.mark.parametrize("gradients", (False, True))
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtypes", ((torch.float16, torch.float32), (torch.float32, torch.bfloat16)))
def test_sixteen_bits_are_added_to_float32_at_once(
    dtypes: tuple[torch.dtype, torch.dtype], norm: str, gradients: bool
) -> None:
    model = randomised(Before(NORMS[norm]()))
    ours, x, r = swapped(model), drawn(dtypes[0]), drawn(dtypes[1])
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(ours(x, r), model(x, r))
    assert [f"{norm.partition(' ')[0]}_with_options"] == CALLED


@pytest.mark.parametrize("change", ("both of 16 bits", "another shape", "not dense", "a number", "a wide number"))
def test_a_sum_of_other_dtypes_is_pytorch_s(change: str) -> None:
    model = randomised(Before(nn.LayerNorm(WIDTH)))
    x, r = drawn(torch.bfloat16), drawn()
    if change == "both of 16 bits":
        r = r.half()
    elif change == "another shape":
        r = r[:1]
    elif change == "not dense":
        r = torch.randn(2, WIDTH, 3).transpose(1, 2)
    elif change == "a number":
        x, r = x.float(), torch.tensor(0.5, dtype=torch.bfloat16)
    else:
        r = torch.tensor(0.5)
        model = model.to(torch.bfloat16)
    ours = swapped(model)
    out, expected = ours(x, r), model(x, r)
    torch.testing.assert_close(out, expected)
    assert out.stride() == expected.stride() and CALLED == ["layer_norm"]


def test_under_autocast_sixteen_bits_give_float32(calls: Calls) -> None:
    model = randomised(Before(nn.LayerNorm(WIDTH)))
    ours, x, r = swapped(model), drawn(torch.bfloat16), drawn(torch.bfloat16)
    ours(x.float(), r.float())
    ((one, *_),), CALLED[:] = calls, []
    torch.set_autocast_enabled("cuda", True)
    total, out = one(ours, (x, r))
    assert (total.dtype, out.dtype) == (torch.bfloat16, torch.float32) and CALLED == ["layer_norm_with_options"]
    assert torch.equal(total, x + r)


def _hooked(model: Any) -> None:
    model.norm.register_forward_hook(lambda *given: None)


def _hooked_behind(model: Any) -> None:
    model.norm.register_full_backward_hook(lambda *given: None)


def _own_forward(model: Any) -> None:
    model.norm.forward = lambda x: x * 2


def _another(model: Any) -> None:
    model.norm = nn.Identity()


def _another_size(model: Any) -> None:
    model.norm.normalized_shape = (2, 4)


def _weight_elsewhere(model: Any) -> None:
    """As pruning leaves it."""
    model.norm.weight_orig = model.norm._parameters.pop("weight")
    model.norm.weight = model.norm.weight_orig * 2


def _bias_elsewhere(model: Any) -> None:
    model.norm.bias_orig = model.norm._parameters.pop("bias")
    model.norm.bias = model.norm.bias_orig * 2


class _Subclass(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * 3


def _subclass(model: Any) -> None:
    model.norm.__class__ = _Subclass


CHANGES = (_hooked, _hooked_behind, _own_forward, _another, _another_size, _subclass)


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_left_to_the_long_way(change: Callable[[Any], None], calls: Calls) -> None:
    ours = swapped(randomised(Before(nn.LayerNorm(WIDTH))))
    x, r = drawn(), drawn()
    ours(x, r)
    ((one, *_),) = calls
    assert one(ours, (x, r)) is not None
    change(ours)
    assert one(ours, (x, r)) is None


@pytest.mark.parametrize("change", (_weight_elsewhere, _bias_elsewhere))
def test_a_parameter_kept_elsewhere_is_read_there(change: Callable[[Any], None], calls: Calls) -> None:
    model = randomised(Before(nn.LayerNorm(WIDTH)))
    ours, x, r = swapped(model), drawn(), drawn()
    for one in (model, ours):
        change(one)
    torch.testing.assert_close(ours(x, r), model(x, r))
    ((one, *given),) = calls
    assert one(*given) is not None


def test_a_forward_put_on_the_class_is_left_to_the_long_way(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = swapped(randomised(Before(nn.LayerNorm(WIDTH))))
    ours(drawn(), drawn())
    ((one, *_),) = calls
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x)
    assert one(ours, (drawn(), drawn())) is None


def test_a_global_hook_is_left_to_the_long_way(calls: Calls) -> None:
    ours = swapped(randomised(Before(nn.LayerNorm(WIDTH))))
    ours(drawn(), drawn())
    ((one, *_),) = calls
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        assert one(ours, (drawn(), drawn())) is None
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "given", (1.0, drawn().numpy(), torch.nn.Buffer(drawn()).as_subclass(type("T", (Tensor,), {})))
)
def test_what_is_no_plain_tensor_is_left_to_the_long_way(given: Any, calls: Calls) -> None:
    ours = swapped(randomised(Before(nn.LayerNorm(WIDTH))))
    ours(drawn(), drawn())
    ((one, *_),) = calls
    assert one(ours, (drawn(), given)) is None


def test_an_op_that_declines_is_left_to_the_long_way(calls: Calls) -> None:
    ours = swapped(randomised(Before(nn.LayerNorm(WIDTH))))
    ours(drawn(), drawn())
    ((one, *_),) = calls
    DECLINED.add("layer_norm_with_options")
    assert one(ours, (drawn(), drawn())) is None


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ("functorch", "forward AD", "a function mode", "a trace"))
def test_a_mode_that_has_a_say_is_left_to_the_long_way(mode: str, calls: Calls) -> None:
    ours, x, r = swapped(randomised(Before(nn.LayerNorm(WIDTH)))), drawn(), drawn()
    ours(x, r)
    ((one, *_),) = calls
    found: list[Any] = []

    def ask(given: Tensor = x) -> Tensor:
        found.append(one(ours, (x, r)))
        return given * 1

    with torch.no_grad():
        if mode == "functorch":
            torch.func.vmap(ask)(x)
        elif mode == "forward AD":
            with forward_ad.dual_level():
                ask()
        elif mode == "a function mode":
            with _Mode():
                ask()
        else:
            torch.jit.trace(ask, x, check_trace=False)
        assert found == [None]
        ask()
    assert found[-1] is not None
