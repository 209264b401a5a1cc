"""The short way of a region that is a norm of rows, over stand-ins for the native ops on the CPU: what it computes, and
all that makes it leave the region to the long way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import randomised
from torch import Tensor, nn

import normswap
from normswap import native
from normswap.ops import dispatch
from normswap.regions.rows import Rows

WIDTH = 8
CALLED: list[str] = []


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


def _layer_norm(x: Tensor, dims: int, w: Any, b: Any, eps: float, *rest: Any) -> Any:
    CALLED.append("layer_norm_with_options" if rest else "layer_norm")
    residual, wide = (rest[0], rest[-1]) if rest else (None, False)
    total = None if residual is None else x + residual
    out = F.layer_norm((x if total is None else total).float(), x.shape[-dims:], w.float(), b.float(), eps)
    out = out if wide else out.to(x.dtype)
    return (out, total) if rest else out


def _rms_norm(x: Tensor, dims: int, w: Any, eps: float, offset: float, cast: bool, *rest: Any) -> Any:
    assert (offset, cast) == (0.0, False)
    CALLED.append("rms_norm_with_options" if rest else "rms_norm")
    total = x + rest[0] if rest else None
    out = F.rms_norm(x if total is None else total, x.shape[-dims:], w, eps)
    return (out, total) if rest else out


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH, eps=1e-6),
    "rms_norm of no eps": lambda: nn.RMSNorm(WIDTH),
}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    CALLED.clear()
    native.load()  # which puts the ops themselves there
    for name, op in (("layer_norm", _layer_norm), ("rms_norm", _rms_norm)):
        monkeypatch.setitem(dispatch._direct, name, op)
        monkeypatch.setitem(dispatch._direct, f"{name}_with_options", op)
        monkeypatch.setitem(dispatch._recording, name, op)
        monkeypatch.setitem(dispatch._recording, f"{name}_with_options", op)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    yield
    torch.set_autocast_enabled("cuda", False)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Rows]:
    """The one that was called last."""
    called: list[Rows] = []
    call = Rows.__call__

    def kept(self: Rows, *given: Any) -> Any:
        called[:] = [self]
        return call(self, *given)

    monkeypatch.setattr(Rows, "__call__", kept)
    return called


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


def test_a_swapped_norm_is_read_too() -> None:
    model = randomised(Before(nn.LayerNorm(WIDTH)))
    ours, x, r = normswap.apply(model, normswap.plan(model)), drawn(), drawn()
    assert type(ours.norm) is normswap.modules.LayerNorm
    torch.testing.assert_close(ours(x, r), model(x, r))
    assert CALLED == ["layer_norm_with_options"]


@pytest.mark.parametrize("dtypes", ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)))
def test_a_sum_of_two_dtypes_is_pytorch_s(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    model = randomised(Before(nn.LayerNorm(WIDTH)))
    ours, x, r = swapped(model), drawn(dtypes[0]), drawn(dtypes[1])
    torch.testing.assert_close(ours(x, r), model(x, r))
    assert CALLED == ["layer_norm"]


def test_under_autocast_sixteen_bits_give_float32(rows: list[Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(Before(nn.LayerNorm(WIDTH)))
    ours, x, r = swapped(model), drawn(torch.bfloat16), drawn(torch.bfloat16)
    ours(x.float(), r.float())
    (one,), CALLED[:] = rows, []
    torch.set_autocast_enabled("cuda", True)
    total, out = one(ours._modules, (x, r))
    assert (total.dtype, out.dtype) == (torch.bfloat16, torch.float32) and CALLED == ["layer_norm_with_options"]
    assert torch.equal(total, x + r)
    monkeypatch.setattr(one, "dtype", lambda children, x: torch.bfloat16)  # nobody but a product reads it
    assert one(ours._modules, (x, r))[1].dtype is torch.bfloat16
    assert one(ours._modules, (x.float(), r.float()))[1].dtype is torch.bfloat16
    monkeypatch.setattr(one, "dtype", lambda children, x: torch.float16)
    assert one(ours._modules, (x, r)) is None


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
    model.norm.weight_orig = model.norm._parameters.pop("weight")
    model.norm.weight = model.norm.weight_orig * 2


def _bias_elsewhere(model: Any) -> None:
    """As pruning leaves it."""
    model.norm.bias_orig = model.norm._parameters.pop("bias")
    model.norm.bias = model.norm.bias_orig * 2


class _Subclass(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * 3


def _subclass(model: Any) -> None:
    model.norm.__class__ = _Subclass


CHANGES = (
    *(_hooked, _hooked_behind, _own_forward, _another, _another_size, _subclass),
    *(_weight_elsewhere, _bias_elsewhere),
)


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_left_to_the_long_way(change: Callable[[Any], None], rows: list[Rows]) -> None:
    ours = swapped(randomised(Before(nn.LayerNorm(WIDTH))))
    x, r = drawn(), drawn()
    ours(x, r)
    (one,) = rows
    assert one(ours._modules, (x, r)) is not None
    change(ours)
    assert one(ours._modules, (x, r)) is None


def test_a_forward_put_on_the_class_is_left_to_the_long_way(rows: list[Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = swapped(randomised(Before(nn.LayerNorm(WIDTH))))
    ours(drawn(), drawn())
    (one,) = rows
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x)
    assert one(ours._modules, (drawn(), drawn())) is None


def test_a_global_hook_is_left_to_the_long_way(rows: list[Rows]) -> None:
    ours = swapped(randomised(Before(nn.LayerNorm(WIDTH))))
    ours(drawn(), drawn())
    (one,) = rows
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        assert one(ours._modules, (drawn(), drawn())) is None
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "given", (1.0, drawn().numpy(), torch.nn.Buffer(drawn()).as_subclass(type("T", (Tensor,), {})))
)
def test_what_is_no_plain_tensor_is_left_to_the_long_way(given: Any, rows: list[Rows]) -> None:
    ours = swapped(randomised(Before(nn.LayerNorm(WIDTH))))
    ours(drawn(), drawn())
    (one,) = rows
    assert one(ours._modules, (drawn(), given)) is None


def test_an_op_that_declines_is_left_to_the_long_way(rows: list[Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = swapped(randomised(Before(nn.LayerNorm(WIDTH))))
    ours(drawn(), drawn())
    (one,) = rows
    for ways in (dispatch._recording, dispatch._direct):  # by its Function, or by itself where there is a node for it
        monkeypatch.setitem(ways, "layer_norm_with_options", lambda *given: (None, None))
    assert one(ours._modules, (drawn(), drawn())) is None
