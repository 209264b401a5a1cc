"""layer_norm, rms_norm and l1_norm on the GPU: the same bits of a row in every regime, batch and run."""

from __future__ import annotations

import itertools

import launch_plans
import pytest
import torch
from limits import gpu_of_plans, same_bits
from row_checks import DTYPES, LENGTHS, LONG, WEIGHTS, affine, forced, values
from torch import Tensor

from normswap.activation import Activation

CLUSTER = 4
"""A regime (row_plan.h)."""


@pytest.mark.parametrize("kind", tuple(WEIGHTS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_regime_gives_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    compared = 0
    for cols in (*(c for c in LENGTHS if c > 256), *LONG):
        x = values(4, cols, dtype, 3.0)
        weight, bias = affine(cols, dtype)
        automatic = forced(kind, x, weight, bias, 0)
        for regime in (2, 3, 4, 5, 6):  # 7 is for longer rows, below
            gpu = gpu_of_plans()
            of = {"weights": WEIGHTS[kind], "ragged": cols * x.element_size() % 16 > 0, "regime": regime}
            if launch_plans.row_plan(4, cols, x.element_size(), **of, **gpu) is None:
                continue
            assert same_bits(automatic, forced(kind, x, weight, bias, regime)), (cols, regime)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("kind", ("layer_norm", "rms_norm"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_chunk_and_a_part_of_one(kind: str, dtype: torch.dtype) -> None:
    """A warp each, where there are many, with parameters of their dtype or in float32: the bits of a block each."""
    for cols in (1032, 1152, 1280, 1288, 1536):
        rows = 4 * gpu_of_plans()["multiprocessors"] + 5
        x, (weight, bias) = values(rows, cols, dtype, 3.0), affine(cols, dtype)
        x[3], x[4, 5], x[5, -1] = 7.0, float("nan"), float("inf")
        plan = launch_plans.row_plan(rows, cols, x.element_size(), weights=WEIGHTS[kind], **gpu_of_plans())
        assert plan is not None and plan["regime"] == 2 and plan["chunks"] == 2
        for parameters in ((weight, bias), (weight.float(), bias.float())):
            first = forced(kind, x, *parameters, 0)
            assert same_bits(first, forced(kind, x, *parameters, 3)), cols
            assert all(
                same_bits(first[i : i + 1], forced(kind, x[i : i + 1], *parameters, 0)) for i in (0, 3, 4, 5, rows - 1)
            )


@pytest.mark.parametrize("kind", tuple(WEIGHTS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_that_share_rows(kind: str, dtype: torch.dtype) -> None:
    """The bits of the regime that reads the input twice, however many rows there are for a cluster or a team."""
    for cols in (17_000, 33_001, 65_536, 131_072, 140_000):
        for rows in (1, 7, 8, 9, 150):
            x = values(rows, cols, dtype, 3.0)
            weight, bias = affine(cols, dtype)
            expected = forced(kind, x, weight, bias, 5)
            for regime in (4, 6):
                assert same_bits(expected, forced(kind, x, weight, bias, regime)), (rows, cols, regime)


@pytest.mark.parametrize("kind", ("layer_norm", "rms_norm"))
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_clusters_that_take_row_after_row(kind: str, dtype: torch.dtype) -> None:
    """The bits of the regime that reads the input twice, in every run, of every row."""
    for cols in (70_000, 81_920, 131_072):
        plan = launch_plans.row_plan(4001, cols, 2, weights=WEIGHTS[kind], **gpu_of_plans())
        if plan is None or plan["regime"] != CLUSTER:
            pytest.skip("no clusters here")
        in_turns = plan["grid"] < 4001 * plan["blocks_a_row"]
        assert in_turns == (plan["shared"] > 0) == (cols != 70_000)  # where weights are kept, if all blocks are full
        few, parameters = values(17, cols, dtype, 3.0), affine(cols, dtype)
        expected, x = forced(kind, few, *parameters, 5), few.repeat(236, 1)[:4001]
        for weight, bias in (parameters, [p.float() for p in parameters]):
            for _ in range(3):
                ours = forced(kind, x, weight, bias, 0)
                assert all(same_bits(ours[i : i + 17], expected[: len(ours[i:])]) for i in range(0, 4001, 17)), cols


@pytest.mark.parametrize("kind", tuple(WEIGHTS))
def test_a_team_has_the_first_part_of_rows_that_it_cannot_hold(kind: str) -> None:
    """The bits of the regime that reads the input twice, in every run, whether or not blocks are filled."""
    gpu = gpu_of_plans()
    group, blocks, at_once = 16 * 1024, min(128, gpu["multiprocessors"]), gpu["multiprocessors"]
    groups = at_once // 2 + blocks  # between what a team holds and twice its blocks
    if launch_plans.row_plan(19, group * groups, 4, weights=WEIGHTS[kind], regime=7, **gpu) is None:
        pytest.skip("a multiprocessor here has no room for slices of two rows, or a team holds such rows")
    for cols in (group * groups, group * (groups - 1) + 4, 2 * group * blocks - 12):
        chosen = launch_plans.row_plan(19, cols, 4, weights=WEIGHTS[kind], **gpu)
        assert chosen is not None and chosen["regime"] == 7
        weight, bias = affine(cols, torch.float32)
        for rows in (1, 2, 3, 19):
            x = values(rows, cols, torch.float32, 3.0)
            expected = forced(kind, x, weight, bias, 5)
            for _ in range(5):
                assert same_bits(expected, forced(kind, x, weight, bias, 7)), (rows, cols)


@pytest.mark.parametrize("kind", tuple(WEIGHTS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_batch_or_the_run(kind: str, dtype: torch.dtype) -> None:
    for cols in (7, 64, 96, 130, 192, 256, 512, 769, 1001, 1280, 4096, 20_480, 65_535, 81_920, 300_001):
        x = values(6, cols, dtype, 3.0)
        x[0, :3] = torch.tensor([2e-38, -1e-37, 3e-39])  # quotients of few bits
        x[1] = 0.0
        weight, bias = affine(cols, dtype)
        whole = forced(kind, x, weight, bias, 0)
        for _ in range(50):
            assert same_bits(whole, forced(kind, x, weight, bias, 0)), cols
        assert same_bits(whole.repeat(40, 1), forced(kind, x.repeat(40, 1), weight, bias, 0)), cols
        for i in range(len(x)):
            alone = torch.empty(cols + 1, device="cuda", dtype=dtype)[1:].copy_(x[i]).reshape(1, cols)
            assert same_bits(whole[i : i + 1], forced(kind, alone, weight, bias, 0)), cols


ROWS = (1, 2, 5, 33, 35, 133)


def behind(rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for a result, and what follows it."""
    room = torch.full((rows * cols + 4096,), 7.0, device="cuda", dtype=dtype)
    return room[: rows * cols].view(rows, cols), room[rows * cols :]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ("none", "silu"))
def test_nothing_is_written_behind_the_last_row(name: str, dtype: torch.dtype) -> None:
    """Of short rows a block has several, the last one fewer than it could. And each has the bits that it has alone."""
    code = Activation(name).code
    for rows, cols in itertools.product(ROWS, (7, 8, 16, 24, 32, 48, 64, 96, 128, 136, 192, 256, 264)):
        x, (weight, bias) = values(rows, cols, dtype, 1.0), affine(cols, dtype)
        x[rows // 2] = 0.0
        for kind in ("layer_norm", "rms_norm", "l1_norm"):
            if kind == "l1_norm" and name != "none":
                continue
            outs = []
            for given in (x, x[-1:]):
                out, rest = behind(len(given), cols, dtype)
                of_rows = [torch.full((len(given),), 7.0, device="cuda") for _ in range(2)]
                options = (None, None, None, code, 0.0, 0.0)
                if kind == "layer_norm":
                    torch.ops.normswap.layer_norm(given, 1, weight, bias, 1e-5, *options, out, None, *of_rows, 0)
                elif kind == "rms_norm":
                    torch.ops.normswap.rms_norm(given, 1, weight, 1e-5, 0.0, False, *options, out, None, of_rows[1], 0)
                else:
                    torch.ops.normswap.l1_norm(given, cols, 0.0, 0.0, out, None, 0)
                assert bool((rest == 7.0).all()), (kind, rows, cols)
                outs.append((out, *of_rows))
            assert all(same_bits(all_of[-1:], alone) for all_of, alone in zip(*outs, strict=True)), (kind, rows, cols)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ("none", "silu"))
def test_nothing_is_written_behind_the_last_group(name: str, dtype: torch.dtype) -> None:
    for groups, cols in itertools.product(ROWS, (7, 16, 32, 64, 96, 128, 256)):
        x = values(groups, cols, dtype, 1.0).view(1, groups, cols)
        weight, bias = affine(groups, dtype)
        room, rest = behind(groups, cols, dtype)
        out = room.view(x.shape)
        torch.ops.normswap.group_norm(
            x, weight, bias, groups, 1e-5, False, Activation(name).code, 0.0, 0.0, None, out, None, None, 0
        )
        assert bool((rest == 7.0).all()) and bool((out[0, -1] != 7.0).any()), (groups, cols)
