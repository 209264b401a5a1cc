"""The comparison of whole models: what is a difference, and between which outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normswap.proof import whole_model as whole

ONES, NAN = torch.ones(4), torch.full((4,), torch.nan)
PARTLY = torch.tensor([1.0, torch.nan, torch.inf, 1.0])


@dataclass
class Out:
    hidden: Any


def proof(ours: Any, expected: Any, moved: Any = None) -> whole.ModelProof:
    """Of a model that gives this swapped, else that, and with its norms ``moved`` the third."""
    jittered = expected if moved is None else moved
    given = iter((expected, jittered, jittered, ours))
    return whole.compare_models(nn.Identity(), (), lambda: next(given))


def test_the_tensors_of_an_output() -> None:
    one, other = torch.ones(1), torch.ones(2)
    found = [*whole.tensors_in({"a": [one, 3], "b": Out((other, Out(None))), "c": Out})]
    assert [id(tensor) for tensor in found] == [id(one), id(other)]


@pytest.mark.parametrize(
    ("ours", "expected", "moved", "problem"),
    [
        *((3, 3, None, "holds no tensor"), (ONES[:3], ONES, None, "other shapes"), (ONES.half(), ONES, None, "dtypes")),
        *((ONES, ONES, ONES[:3], "changes its shape"), (NAN, NAN, None, "nowhere finite")),
        *(((NAN, ONES.int()), (NAN, ONES.int()), None, "nowhere finite"), (PARTLY, ONES, None, "not finite where")),
        *((ONES, PARTLY, None, "not finite where"), (PARTLY, PARTLY, None, ""), (ONES.int(), ONES.int(), None, "")),
        *((ONES[:0], ONES[:0], None, ""), ((NAN, ONES), (NAN, ONES), None, "")),
        *((NAN * 1j, NAN * 1j, None, "nowhere finite"), (PARTLY * 1j, ONES * 1j, None, "not finite where")),
        (NAN.to(torch.float8_e4m3fn), NAN.to(torch.float8_e4m3fn), None, "nowhere finite"),
    ],
)
def test_what_cannot_be_compared_is_said(ours: Any, expected: Any, moved: Any, problem: str) -> None:
    found = proof(ours, expected, moved)
    assert problem in found.problem and bool(found.problem) == bool(problem) and found.passed == (not problem)


@pytest.mark.parametrize(
    ("ours", "expected", "moved", "error", "limit"),
    [
        (ONES, ONES, None, 0.0, 1e-5),
        (ONES * 2, ONES, None, 1.0, 1e-5),
        (ONES, ONES * 0, ONES * 0.25, 1.0, 1.0),  # at the limit
        (ONES * 1.5, ONES * 0, ONES * 0.25, 1.5, 1.0),
        ((ONES, ONES + 1e-3), (ONES * 0, ONES), (ONES, ONES), 1e-3, 1e-5),  # the first is further off, within its limit
        ((ONES * 1e-9, ONES), (ONES * 0, ONES), None, 1e-9, 0.0),
        ((ONES.int() * 9, ONES), (ONES.int(), ONES), None, 0.0, 1e-5),
        (ONES.half() * 1.25, ONES.half(), None, 0.25, 2e-2),
        ((ONES * 1.25).to(torch.float8_e4m3fn), ONES.to(torch.float8_e4m3fn), None, 0.25, 0.125),
        (ONES * 2j, ONES * 1j, None, 1.0, 1e-5),
    ],
)
def test_the_output_that_comes_closest_to_its_limit_decides(
    ours: Any, expected: Any, moved: Any, error: float, limit: float
) -> None:
    found = proof(ours, expected, moved)
    assert (found.max_error, found.limit) == pytest.approx((error, limit), rel=1e-4) and not found.problem
    assert found.passed == (error <= limit)


def test_a_site_is_jittered_by_one_ulp_where_it_gives_a_tensor_of_floats() -> None:
    x = torch.rand(500) + 1
    moved = [whole._jitter(seed)(None, None, x) for seed in (1, 2)]
    for one in moved:
        assert {-1, 0, 1} == {*(((one - x) / x).double() / torch.finfo(x.dtype).eps).round().int().tolist()}
    assert not torch.equal(*moved)
    for given in ((x,), x.int()):
        assert whole._jitter(1)(None, None, given) is given


def test_the_spread_is_that_of_the_original_and_no_hook_is_left() -> None:
    model, x = nn.Sequential(nn.LayerNorm(8)), torch.randn(4, 8)
    found = whole.compare_models(model, [model[0]], lambda: model(x) - nn.functional.layer_norm(x, (8,)))
    assert found.passed and found.max_error == found.largest == 0.0 < found.limit
    assert not model[0]._forward_hooks

    def fails() -> Tensor:
        assert not model[0]._forward_hooks, "jittered"
        return model(x)

    with pytest.raises(AssertionError, match="jittered"):
        whole.compare_models(model, [model[0]], fails)
    assert not model[0]._forward_hooks
