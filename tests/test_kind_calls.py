"""What the op of a kind is given, and what it leaves to the expression."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normswap.kinds import KINDS, group_norm, norm

X, W, COLUMN = torch.randn(2, 3, 5), torch.randn(5), torch.randn(3, 1)
FILTERS, GAIN = torch.randn(1, 4, 9), torch.randn(4)


def normalised(x: Tensor, dim: int, eps: float | None, weight: Tensor | None, offset: float | None) -> Tensor:
    n = x.float() * torch.rsqrt(x.float().pow(2).mean(dim, keepdim=True) + (eps or 0.0))
    return n if weight is None else n * (weight + (offset or 0.0))


EXPRESSION: dict[str, Callable[..., Tensor]] = {
    "frobenius_norm": lambda x: x / x.norm(),
    "l2_norm": lambda x, dim, eps: x / x.norm(dim=dim, keepdim=True).clamp(min=eps or 0.0),
    "l1_norm": lambda x, dim, eps, least: x / (x.abs().mean(dim, keepdim=True).clamp(min=least or 0.0) + (eps or 0.0)),
    "layer_norm_by_hand": lambda x, dim, eps, weight, bias, rounds: (
        normalised(x - x.mean(dim, keepdim=True), dim, eps, weight, 0.0) + (0.0 if bias is None else bias)
    ),
    "rms_norm_by_hand": lambda x, dim, eps, weight, offset, rounds: normalised(x, dim, eps, weight, offset).to(x.dtype),
    "weight_standardization": lambda x, *given: F.batch_norm(x, None, None, given[0], given[1], True, *given[2:]),
}
SERVED: list[tuple[str, Tensor, tuple[Any, ...]]] = [
    ("frobenius_norm", X, ()),
    *(("l2_norm", X, given) for given in ((-1, None), (1, 1e-3), (0, 2), (1, 0.0))),
    *(("l1_norm", X, given) for given in ((1, None, None), (-3, 1e-3, None), (2, None, 1))),
    *(("layer_norm_by_hand", X, (-1, 1e-5, weight, bias, False)) for weight in (None, W) for bias in (None, W)),
    ("layer_norm_by_hand", X, (1, 1, COLUMN, None, False)),
    *(("rms_norm_by_hand", X, (-1, eps, None, None, False)) for eps in (1e-5, None, 1)),
    ("rms_norm_by_hand", X * 1e-5, (-1, None, None, None, False)),
    *(("rms_norm_by_hand", X, (2, 1e-5, W, offset, False)) for offset in (None, 1, 0.5)),
    *(("rms_norm_by_hand", X, (1, 1e-5, COLUMN, offset, False)) for offset in (None, 1)),
    ("rms_norm_by_hand", X.transpose(0, 1), (-1, 1e-5, W, None, False)),
    ("rms_norm_by_hand", X.half(), (-1, 1e-5, W.half(), None, True)),
    *(
        ("weight_standardization", FILTERS, (weight, bias, 0.1, 1e-5))
        for weight in (None, GAIN)
        for bias in (None, GAIN)
    ),
]
LEFT: list[tuple[str, Tensor, tuple[Any, ...]]] = [
    ("frobenius_norm", torch.ones(()), ()),
    *(("l2_norm", X, given) for given in ((3, None), (-4, None), (True, None), (1, "eps"), (1, -1.0), (None, 1e-3))),
    *(("l1_norm", X, given) for given in ((3, None, None), (1, "eps", None), (1, None, W))),
    *(("layer_norm_by_hand", X, (dim, eps, None, None, False)) for dim, eps in ((3, 1e-5), (1, None), (1, W))),
    *(
        ("layer_norm_by_hand", X, (-1, 1e-5, *given))
        for given in ((W, W, True), (W[:1], None, False), (None, COLUMN, False))
    ),
    ("layer_norm_by_hand", X[:1].expand(2, 3, 5), (-1, 1e-5, None, None, False)),
    ("rms_norm_by_hand", X[:1].expand(2, 3, 5), (-1, 1e-5, None, None, False)),
    *(("rms_norm_by_hand", X, (dim, eps, None, None, False)) for dim, eps in ((3, 1e-5), (1, "eps"))),
    *(("rms_norm_by_hand", X, (-1, 1e-5, weight, "1", False)) for weight in (None, W)),
    ("rms_norm_by_hand", X, (-1, 1e-5, W[:1], None, False)),
    *(("rms_norm_by_hand", X, (-1, 1e-5, *given, True)) for given in ((None, None), (W, 1))),
    ("rms_norm_by_hand", X, (1, 1e-5, COLUMN, None, True)),
    ("rms_norm_by_hand", X.transpose(0, 1), (-1, 1e-5, W, None, True)),
    *(
        ("weight_standardization", x, (None, None, 0.1, 1e-5))
        for x in (torch.ones(()), FILTERS[0], X, FILTERS[..., :1])
    ),
    *(
        ("weight_standardization", FILTERS, (*given, 0.1, 1e-5))
        for given in ((W, None), (None, W), (2.0, None), (None, 2.0))
    ),
    *(("weight_standardization", FILTERS, (GAIN, None, *given)) for given in ((None, 1e-5), (0.1, None), (0.1, 0.0))),
]


@pytest.mark.parametrize(("kind", "x", "given"), SERVED)
def test_the_op_computes_the_expression(kind: str, x: Tensor, given: tuple[Any, ...]) -> None:
    out = KINDS[kind].call(x, *given)
    assert out is not None
    torch.testing.assert_close(out, EXPRESSION[kind](x, *given))


@pytest.mark.parametrize(("kind", "x", "given"), LEFT)
def test_what_is_left_to_the_expression(kind: str, x: Tensor, given: tuple[Any, ...]) -> None:
    assert KINDS[kind].call(x, *given) is None


@pytest.mark.parametrize(("kind", "given"), [("frobenius_norm", ()), ("l2_norm", (-1, None))])
def test_autocast_widens_the_norm_of_16_bits(kind: str, given: tuple[Any, ...]) -> None:
    call = KINDS[kind].call
    assert call(X.bfloat16(), *given) is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call(X, *given) is not None and call(X.bfloat16(), *given) is None


class Own(Tensor):
    """What a library may have in a tensor's place."""


def test_operands_like_the_input() -> None:
    assert norm.is_alike(X, None) and norm.is_alike(X, X + 1) and norm.is_alike(X, nn.Parameter(X))
    for other in (1.0, X.as_subclass(Own), X[:1], X.half(), X.to("meta")):
        assert not norm.is_alike(X, other)
    assert norm.are_of(X.dtype) and norm.are_of(X.dtype, X, W)
    for other in (None, X.as_subclass(Own), X.half()):
        assert not norm.are_of(X.dtype, X, other)


def test_operands_of_a_sample() -> None:
    for good in (X[:, :1], X[:1, :1]):
        assert norm.are_per_sample(X, good, good)
    one = X[:, :1]
    for other in (
        one.as_subclass(Own),
        X[:, 0],
        one.half(),
        one.to("meta"),
        X,
        X[:, :1, :1],
        one.repeat(2, 1, 1),
        None,
    ):
        assert not norm.are_per_sample(X, one, other)
    assert not norm.are_per_sample(X[0, 0], X[:1, 0])


def test_what_is_added_to_a_norm_that_autocast_widens(monkeypatch: pytest.MonkeyPatch) -> None:
    def adds(behind: Any, is_cuda: bool = True, dtype: torch.dtype = torch.float16) -> bool:
        x: Any = SimpleNamespace(shape=X.shape, device=X.device, dtype=dtype, is_cuda=is_cuda)
        return group_norm.adds_to_float32(x, behind)

    monkeypatch.setattr(group_norm, "autocasts", lambda x: True)
    assert adds(X) and adds(X.half())
    assert not adds(X, is_cuda=False) and not adds(X, dtype=torch.float64)
    for behind in (None, X.as_subclass(Own), X[:1], X.to("meta"), X.double()):
        assert not adds(behind)
    monkeypatch.setattr(group_norm, "autocasts", lambda x: False)
    assert not adds(X)
