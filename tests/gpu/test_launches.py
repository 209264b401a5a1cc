"""Launches beside others, after failed ones and where there is little room; arguments that no kernel may be given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from green_context import stream_of_few
from limits import same_bits
from row_checks import NO_OPTIONS
from torch import Tensor

COLS = 1 << 20
TEAM = 6
"""The regime of rows that many blocks hold together (row_plan.h)."""


def layer_norm(x: Tensor, regime: int = 0, **other: Any) -> Tensor:
    """The bare op, with nothing between."""
    given = {"weight": None, "bias": None, "out": torch.empty_like(x), "mean": None, "rstd": None, **other}
    affine = given["weight"], given["bias"]
    filled = given["out"], None, given["mean"], given["rstd"]
    torch.ops.normswap.layer_norm.default(x, 1, *affine, 1e-5, *NO_OPTIONS, *filled, regime)
    return given["out"]


def rows(count: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(count, COLS, generator=generator, device="cuda").to(dtype)


def test_teams_on_two_streams_at_once() -> None:
    """Each needs blocks that all run at once, and waits for them."""
    inputs = [rows(64, seed=1), rows(64, torch.bfloat16, seed=2)]
    expected = [layer_norm(x, TEAM) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    found: list[list[Tensor]] = [[], []]
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(layer_norm(inputs[i], TEAM))
    torch.cuda.synchronize()
    for mine, wanted in zip(found, expected, strict=True):
        assert all(same_bits(y, wanted) for y in mine)


def test_where_a_team_has_no_room_other_kernels_give_its_bits() -> None:
    x = rows(64)
    expected = layer_norm(x, TEAM)
    with stream_of_few(16) as stream, torch.cuda.stream(stream):
        assert same_bits(layer_norm(x), expected)
        stream.synchronize()


def test_a_good_call_after_one_that_could_not_be_launched() -> None:
    x = rows(64)
    with stream_of_few(16) as stream, torch.cuda.stream(stream):
        with pytest.raises(RuntimeError, match="too many blocks in cooperative launch"):
            layer_norm(x, TEAM)
        short = torch.randn(8, 256, device="cuda")
        torch.testing.assert_close(layer_norm(short), torch.nn.functional.layer_norm(short, (256,)))
        stream.synchronize()


WRONG: dict[str, tuple[Callable[[Tensor], dict[str, Any]], str]] = {
    "weight on the CPU": (lambda x: {"weight": torch.ones(256)}, "must be on the input's device"),
    "out on the CPU": (lambda x: {"out": torch.empty(x.shape)}, "out must be on the input's device"),
    "statistics on the CPU": (lambda x: {"mean": torch.empty(8)}, "statistics must be on the input's device"),
    "weight too short": (lambda x: {"weight": x.new_ones(255)}, "weight and bias must have the normalized dims"),
    "statistics too few": (lambda x: {"rstd": x.new_empty(7)}, "float32 with 8 elements, got 7"),
    "statistics of another dtype": (lambda x: {"mean": x.new_empty(8).half()}, "contiguous float32"),
    "out of another dtype": (lambda x: {"out": x.half()}, "out must have the input's dtype and size"),
    "out too small": (lambda x: {"out": x[:7].clone()}, "out must have the input's dtype and size"),
    "out with gaps": (lambda x: {"out": x.new_empty(8, 512)[:, ::2]}, "must be contiguous"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_kernel_may_be_given_is_refused(name: str) -> None:
    x = torch.randn(8, 256, device="cuda")
    other, message = WRONG[name]
    with pytest.raises(RuntimeError, match=message):
        layer_norm(x, **other(x))
    torch.testing.assert_close(layer_norm(x), torch.nn.functional.layer_norm(x, (256,)))
