"""The short way through C++ on the CPU: stand-ins for the native ops that it calls, and what was called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from launch_stand_in import NO_OPTIONS, OF_NORMS, norms_by, told_with_options
from test_nodes import compiled, compiled_nodes, needs_compiler
from torch import Tensor

from normswap import nodes
from normswap.activation import CODES, Activation
from normswap.ops import at_once, dispatch
from normswap.ops.rows import can_add

__all__ = ["CALLED", "DECLINED", "called", "calls", "compiled", "needs_compiler", "registered", "short_way"]

CALLED: list[str] = []
"""The native ops, in the order of their calls, as ``told_with_options``; what is in ``DECLINED`` answers None."""
DECLINED: set[str] = set()


def _rows(norm: Callable[..., Tensor], x: Tensor, rest: tuple[Any, ...]) -> Any:
    residual, scale, shift, code, low, high, dtype = (*rest, *NO_OPTIONS[len(rest) :])
    total = None if residual is None else x + residual
    out = norm((x if total is None else total).float())
    if scale is not None:
        out = out * (1 + scale.float()) + shift.float()
    out = Activation([*CODES][code], low, high)(out)
    out = out.to(dtype or x.dtype)
    return out, total


def _layer_norm(x: Tensor, dims: int, w: Any, b: Any, eps: float, *rest: Any) -> Any:
    return _rows(lambda x: F.layer_norm(x, x.shape[-dims:], _float(w), _float(b), eps), x, rest)


def _rms_norm(x: Tensor, dims: int, w: Any, eps: float, offset: float, cast: bool, *rest: Any) -> Any:
    def norm(wide: Tensor) -> Tensor:
        out = F.rms_norm(wide, wide.shape[-dims:], None, eps)
        out = out.to(x.dtype).float() if cast else out
        return out if w is None else out * (offset + w.float())

    return _rows(norm, x, rest)


def _group_norm(
    x: Tensor, groups: int, w: Any, b: Any, eps: float, code: int, low: float, high: float, residual: Any, wide: bool
) -> Tensor:
    out = F.group_norm(x.float(), groups, _float(w), _float(b), eps)
    out = Activation([*CODES][code], low, high)(out if residual is None else out + residual)
    return out if wide else out.to(x.dtype)


def _batch_norm(
    x: Tensor, mean: Any, var: Any, count: Any, w: Any, b: Any, training: bool, momentum: float, eps: float, *rest: Any
) -> Tensor | None:
    residual, code, low, high, *more = rest
    assert training and not any(more)
    if any(t is not None and t.numel() != x.shape[1] for t in (mean, var, w, b)) or x.numel() == x.shape[1]:
        return None
    out = F.batch_norm(x, mean, var, w, b, True, momentum, eps)
    if count is not None:
        count += 1
    return Activation([*CODES][code], low, high)(out if residual is None else out + residual)


def _float(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.float()


_OPS: dict[str, Callable[..., Any]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
}


def called(name: str, *given: Any) -> Any:
    if name.endswith("_recorded"):
        return _recorded(name.removesuffix("_recorded"), *given)
    CALLED.append(told_with_options(name, given))
    x, place = given[0], {"layer_norm": 5, "rms_norm": 6, "group_norm": -2, "batch_norm": 9}[name]
    residual = given[place] if place < len(given) else None
    dtype = torch.float32 if name == "group_norm" and given[-1] else x.dtype
    taken = x.dtype in dispatch.DTYPES and (residual is None or residual.shape == x.shape)
    if name.startswith(("layer", "rms")):
        affine = [w for w in given[2 : 3 + (name == "layer_norm")] if w is not None]
        taken &= all(w.shape == x.shape[-given[1] :] and w.dtype in (x.dtype, torch.float32) for w in affine)
    if residual is not None:
        taken &= can_add(x, residual) if name.startswith(("layer", "rms")) else residual.dtype is dtype
    if CALLED[-1] in DECLINED or not taken or not x.is_contiguous():
        return None if name in ("group_norm", "batch_norm") else (None, None)
    return _OPS[name](*given)


def _recorded(name: str, *given: Any) -> tuple[Any, ...]:
    """With what the backward would need, which nobody asks for here."""
    found = called(name, *given)
    both = found if isinstance(found, tuple) else (found,)
    kept = None if both[0] is None else torch.zeros(1)
    return (*both, kept, None) if name == "batch_norm" else (*both, kept)


@pytest.fixture(scope="module")
def registered(compiled: torch.library.Library) -> None:
    """The native ops of CPU tensors, without and with gradients."""
    for name in _OPS:
        compiled.impl(f"{name}_or_none", lambda *given, name=name: called(name, *given), "CPU")
        compiled.impl(f"{name}_recorded", lambda *given, name=name: _recorded(name, *given), "CPU")


@pytest.fixture(params=("dispatched", "launched"))
def short_way(registered: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls go to C++, which takes CPU tensors for a GPU's, and from there to the ops or, past them, to launchers."""
    CALLED.clear()
    DECLINED.clear()
    monkeypatch.setattr(dispatch, "_direct", {})
    norms_by(called if request.param == "launched" else None)
    _serve()
    yield
    norms_by(None)
    nodes.call_at_once(compiled_nodes(), "cpu")
    at_once.serve(None)
    torch.set_autocast_enabled("cuda", False)


def _serve() -> None:
    nodes.call_at_once(compiled_nodes(), "cpu", OF_NORMS)


@pytest.fixture
def calls(short_way: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(the short way, owner, packed) of what was called last."""
    seen: list[tuple[Any, ...]] = []
    made = at_once.Norm.made

    def noted(self: at_once.Norm, calls: Any) -> Callable[[Any, Any], Any]:
        call = made(self, calls)

        def kept(owner: Any, packed: Any) -> Any:
            seen[:] = [(call, owner, packed)]
            return call(owner, packed)

        return kept

    monkeypatch.setattr(at_once.Norm, "made", noted)
    _serve()
    return seen
