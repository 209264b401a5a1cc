"""The ops without a GPU: PyTorch's op serves, weight mathematics, launch plans of the compiled library."""

from __future__ import annotations

import itertools
import math
from typing import Any

import launch_plans
import pytest
import torch
import torch.nn.functional as F
from models import Projection, randomised
from test_overlap import CHAINS

from normswap import native, ops, reference
from normswap.ops import dispatch
from normswap.ops.l1_norm import gradient as l1_gradient


def test_cpu_tensors_go_to_pytorch() -> None:
    x, w, b = torch.randn(4, 6, 5), torch.randn(5), torch.randn(5)
    assert not ops.native_serves(x, w, b)
    assert torch.equal(ops.layer_norm(x, (5,), w, b), F.layer_norm(x, (5,), w, b))
    assert torch.equal(ops.rms_norm(x, (5,), w, 1e-6), F.rms_norm(x, (5,), w, 1e-6))
    assert torch.equal(ops.group_norm(x, 3), F.group_norm(x, 3))
    assert torch.equal(ops.l1_norm(x, 1), x / x.abs().mean(1, keepdim=True))
    with pytest.raises(RuntimeError, match="num_groups"):
        ops.group_norm(x, 4)


@pytest.mark.case("zero-rows")
def test_a_zero_row_is_nan_where_pytorch_has_nan() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, -3.0]])
    assert torch.equal(ops.l1_norm(x).isnan(), torch.tensor([[True, True], [False, False]]))


@pytest.mark.case("rms-cast-orders")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_rms_norm_adds_the_offset_in_float32_and_rounds_where_told(dtype: torch.dtype) -> None:
    x, w = torch.randn(7, 33).mul(5).to(dtype), torch.randn(33).to(dtype)
    wide = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    llama = w * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(dtype)
    gemma = (wide * (1 + w.double())).to(dtype)
    assert torch.equal(ops.rms_norm(x, (33,), w, 1e-6, cast_before_weight=True), llama)
    ours = ops.rms_norm(x, (33,), w, 1e-6, weight_offset=1.0)
    assert ours.dtype == dtype
    roundings = 4 if dtype is torch.float32 else 1  # mean, rsqrt and two products, where the result is no narrower
    torch.testing.assert_close(ours, gemma, rtol=roundings * torch.finfo(dtype).eps, atol=1e-7)
    if dtype is not torch.float32:  # the cast orders are told apart
        assert not torch.equal(llama, (wide * w.double()).to(dtype))
        assert not torch.equal(gemma, (wide * (1 + w).double()).to(dtype))


@pytest.mark.case("bad-shapes")
def test_rms_norm_with_a_cast_or_offset_raises_what_pytorch_raises() -> None:
    x = torch.randn(4, 6)
    for shape, weight in (((5,), None), ((6,), torch.randn(5)), ((), None)):
        for options in ({"weight_offset": 1.0}, {"cast_before_weight": True}):
            with pytest.raises(RuntimeError) as expected:
                F.rms_norm(x, list(shape), weight)
            with pytest.raises(RuntimeError) as ours:
                ops.rms_norm(x, shape, weight, **options)
            assert str(ours.value) == str(expected.value)


@pytest.mark.case("other-dim", "empty-batch", "one-element")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("shape", ((2, 6, 3, 5), (4, 6), (6,), (0, 6, 2), (3, 1, 4)))
def test_rms_norm_dim_along_every_dim(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) + 1).to(dtype)
    for dim in range(-len(shape), len(shape)):
        weight = torch.randn(shape[dim])
        column = weight.view(*(-1 if d == dim % len(shape) else 1 for d in range(len(shape))))
        expected = x.double() / torch.sqrt(torch.mean(x.double() ** 2, dim=dim, keepdim=True) + 1e-5)
        tolerance = {"rtol": max(torch.finfo(dtype).eps, 1e-6), "atol": 1e-7}
        ours = ops.rms_norm_dim(x, dim, eps=1e-5)
        assert ours.dtype == dtype and ours.stride() == x.stride()
        torch.testing.assert_close(ours.double(), expected, **tolerance)
        weighted = ops.rms_norm_dim(x, dim, weight, 1e-5)
        torch.testing.assert_close(weighted.double(), expected * column.double(), **tolerance)


@pytest.mark.case("double-backward", "forward-mode-ad", "functorch")
def test_rms_norm_dim_is_differentiable() -> None:
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: ops.rms_norm_dim(x, 1, w), (x, weight), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x, w: ops.rms_norm_dim(x, 1, w), (x, weight))
    over_last = torch.vmap(lambda row: ops.rms_norm_dim(row, 1, weight), in_dims=2, out_dims=2)
    torch.testing.assert_close(over_last(x), ops.rms_norm_dim(x, 1, weight))


@pytest.mark.case("bad-shapes")
def test_rms_norm_dim_says_what_is_wrong() -> None:
    x = torch.randn(2, 5, 3)
    with pytest.raises(ValueError, match=r"weight must have shape \(5,\).*got \(3,\)"):
        ops.rms_norm_dim(x, 1, torch.randn(3))
    with pytest.raises(ValueError, match=r"weight must have shape \(5,\).*got \(1,\)"):
        ops.rms_norm_dim(x, 1, torch.randn(1))
    with pytest.raises(TypeError, match=r"floating-point, got torch.int64"):
        ops.rms_norm_dim(torch.ones(2, 5, dtype=torch.int64), 1)
    with pytest.raises(IndexError, match="Dimension out of range"):
        ops.rms_norm_dim(x, 3)


L1_VARIANTS = [(0.0, None), (1e-3, None), (-0.5, None), (0.0, 0.75), (0.25, 0.75)]


@pytest.mark.parametrize(("eps", "minimum"), L1_VARIANTS)
@pytest.mark.parametrize(("dtype", "tiny"), [(torch.float64, 1e-200), (torch.float32, 1e-25)])
def test_the_l1_gradient_in_closed_form_is_autograd_s(
    dtype: torch.dtype, tiny: float, eps: float, minimum: float | None
) -> None:
    x = torch.randn(4, 5, 6, dtype=dtype)
    x[1] *= tiny  # a square of these underflows
    x[3, 2], x[3, :, 3] = 0.0, 0.0
    for dim in (0, 1, 2, -1):
        leaf = x.clone().requires_grad_()
        dy = torch.randn_like(x)
        (expected,) = torch.autograd.grad(reference.l1_norm(leaf, dim, eps, minimum), leaf, dy)
        mean = x.abs().mean(dim, keepdim=True)
        ours = l1_gradient(dy, x, mean, dim, eps, minimum)
        assert torch.equal(ours.isfinite(), expected.isfinite())
        if dtype is torch.float64:
            torch.testing.assert_close(ours, expected, equal_nan=True)


@pytest.mark.parametrize("bias", (True, False))
def test_fold_equals_the_chain(bias: bool) -> None:
    model = randomised(Projection(7, 5)).eval().double()
    if not bias:
        model.gemm.bias = None
    bn = model.bn
    weight, shift = reference.fold_scale_batch_norm(
        model.gemm.weight, model.gemm.bias, model.scale, bn.running_mean, bn.running_var, bn.weight, bn.bias, bn.eps
    )
    x = torch.randn(9, 7, dtype=torch.float64)
    torch.testing.assert_close(F.linear(x, weight, shift), model(x), rtol=1e-12, atol=1e-12)


@pytest.fixture
def library() -> None:
    if not native.status().available:
        pytest.skip(f"the compiled library is not here: {native.status().reason}")


GPUS: tuple[dict[str, Any], ...] = (
    {"clusters": True, "shared": 232_448, "multiprocessors": 132},  # H100
    {"clusters": False, "shared": 166_912, "multiprocessors": 108},  # A100
    {"clusters": False, "shared": 101_376, "multiprocessors": 128},  # RTX 4090
    {"clusters": True, "shared": 232_448, "multiprocessors": 0},  # no cooperative launches
)


@pytest.mark.usefixtures("library")
def test_row_plans_cover_the_row_and_fit_the_gpu() -> None:
    seen = set()
    lengths = (*range(1, 300), *(2**k + d for k in range(8, 23) for d in (-1, 0, 1, 2)), 1280, 1536, 65535, 3 * 10**8)
    for cols in lengths:
        for rows in (1, 7, 100_000):
            for itemsize in (2, 4):
                if rows * cols * itemsize > 80e9:
                    continue
                for gpu, weights in itertools.product(GPUS, (0, 1, 2)):
                    p = launch_plans.row_plan(
                        rows, cols, itemsize, weights=weights, ragged=cols * itemsize % 16 > 0, **gpu
                    )
                    assert p is not None
                    assert p["vec"] * itemsize == 16
                    assert (p["chunks"] - 1) * p["chunk_len"] < cols <= p["chunks"] * p["chunk_len"]
                    assert p["chunks"] == 1 or p["chunk_len"] % (p["vec"] * p["lanes"]) == 0
                    assert p["chunk_len"] <= 32 * p["lanes"]  # registers of a lane
                    assert 1 <= p["warps"] <= 18 and 1 <= p["grid"] < 2**31
                    at_once = p["grid"] * p["warps"] * (32 // p["lanes"])
                    assert p["shared"] + 8192 <= gpu["shared"]
                    blocks, shared = p["blocks_a_row"], p["shared"]
                    if p["regime"] == 6:
                        apart = p["warps"] - p["block_chunks"]  # exchange the statistics
                        assert p["grid"] % blocks == 0 and 2 <= p["slots"] <= 6 and apart in (0, 2)
                        lean = itemsize == 2 and weights == 0 and cols % 8 == 0
                        each = 2 if lean and apart == 0 else 1  # blocks on a multiprocessor
                        assert lean or apart == 0
                        assert p["grid"] <= each * gpu["multiprocessors"]  # all run at once
                        assert each * (shared + 8192) <= gpu["shared"]
                    elif p["regime"] == 7:
                        held = blocks * p["block_chunks"]
                        assert itemsize == 4 and rows >= 6 and held < p["chunks"] <= 2 * held
                        assert blocks <= min(128, gpu["multiprocessors"]) and 2 <= p["slots"] <= 6
                        assert p["grid"] == rows * -(-(p["chunks"] - held) // 16)
                    elif p["regime"] != 5:
                        assert 1 <= blocks <= (8 if gpu["clusters"] else 1)
                    assert p["regime"] == 7 or blocks * p["block_chunks"] >= p["chunks"]
                    seen.add(p["regime"])
                    kept = 0  # bytes of weights that a cluster keeps for several rows
                    if p["held"] > 0:
                        enough = rows >= 4 * (4 * (2 * gpu["multiprocessors"] // blocks) + 1)
                        if p["held"] == 4 and itemsize == 2 and cols % (16 * 1024) == 0 and enough:
                            kept = 16 * 1024 * 2 * weights
                        assert shared == kept and p["warps"] == p["block_chunks"] <= (8 if p["held"] == 3 else 16)
                        assert p["held"] != 4 or p["block_chunks"] == 16  # who unites its chunks has a group of them
                    if kept > 0:
                        clusters = p["grid"] // blocks
                        assert 2 * (shared + 2048) <= gpu["shared"] and p["grid"] % blocks == 0  # two run at once
                        assert (
                            3 * clusters < rows <= 8 * clusters and p["grid"] >= 8 * gpu["multiprocessors"] - 8 * blocks
                        )
                    elif shared > 0 and p["regime"] > 2:
                        slots = max(1, p["slots"])  # rows of which a team holds slices
                        assert shared >= slots * p["block_chunks"] * (p["chunk_len"] * itemsize + 15)
                    else:
                        assert at_once >= rows * (1 if p["regime"] == 2 else p["chunks"])
    assert seen == set(range(1, 8))


@pytest.mark.usefixtures("library")
def test_few_lanes_share_a_short_row() -> None:
    """Of whole vectors, where elements have weights or there are options; also of misaligned rows."""
    for cols, itemsize, more in itertools.product(
        range(4, 1025, 4), (2, 4), ({}, {"weights": 1}, {"weights": 2}, {"options": True})
    ):
        several = cols * itemsize % 16 == 0 and bool(more)
        vectors = -(-cols * itemsize // 16)
        lanes = (8 if vectors <= 32 else 32) if several else 8 if vectors <= 8 else 16 if vectors <= 16 else 32
        for ragged in (False, True):
            plan = launch_plans.row_plan(4001, cols, itemsize, ragged=ragged, **more, **GPUS[0])
            assert plan is not None and plan["lanes"] == lanes, (cols, itemsize, more)
            assert plan["regime"] == (1 if lanes < 32 else 2)


@pytest.mark.usefixtures("library")
def test_a_warp_has_a_chunk_and_no_more_than_half_of_one() -> None:
    """Of elements with weights of their own, in rows that begin at vectors and are enough for a block each."""
    gpu = GPUS[0]
    few, enough = 4 * gpu["multiprocessors"], 4 * gpu["multiprocessors"] + 1
    for cols, itemsize, weights in itertools.product((1032, 1280, 1536, 1544, 2048), (2, 4), (0, 1, 2)):
        of = {"weights": weights, **gpu}
        fits = cols <= 1536 and weights > 0
        for more, regime in (
            ({}, 2),
            ({"options": True, "adds": True}, 2),
            ({"ragged": True}, 3),
            ({"options": True}, 3),
        ):
            plan = launch_plans.row_plan(enough, cols, itemsize, **of, **more)
            adds = cols <= 1536 and "adds" in more  # a residual before a norm that has weights of its own
            assert plan is not None and plan["chunks"] == plan["block_chunks"] == 2
            assert plan["regime"] == (regime if fits or adds else 3), (cols, more)
            plan = launch_plans.row_plan(few, cols, itemsize, **of, **more)
            assert plan is not None and plan["regime"] == 3
            forced = launch_plans.row_plan(few, cols, itemsize, regime=2, **of, **more)
            assert (forced is not None) == (regime == 2 and (fits or adds))


@pytest.mark.usefixtures("library")
def test_registers_hold_rows_that_fit_a_cluster() -> None:
    """However many rows; blocks have equally many chunks where that takes no more than twice as many blocks."""
    for cols, itemsize, held, blocks, chunks in (
        *((4096, 2, 2, 1, 4), (16_384, 2, 2, 1, 16), (8192, 4, 2, 1, 8), (8193, 4, 3, 3, 3)),
        *((20_480, 2, 3, 4, 5), (32_768, 2, 3, 4, 8), (17 * 1024, 2, 3, 3, 6), (65_536, 4, 3, 8, 8)),
        *((81_920, 2, 4, 5, 16), (131_072, 2, 4, 8, 16), (131_072, 4, 4, 8, 16), (131_073, 4, 0, 9, 16)),
    ):
        for rows in (2, 100_000):
            plan = launch_plans.row_plan(rows, cols, itemsize, **GPUS[0])
            assert plan is not None
            alone = held == 2 and rows == 2  # a block with a multiprocessor of its own loads its weights at once
            expected = [1 if alone else held, blocks, chunks]
            assert [plan[key] for key in ("held", "blocks_a_row", "block_chunks")] == expected, cols
    without = launch_plans.row_plan(2, 32_768, 2, **GPUS[1])
    assert without is not None and (without["regime"], without["held"]) == (3, 0)


@pytest.mark.usefixtures("library")
def test_warps_apart_exchange_the_statistics_of_16_bit_groups() -> None:
    """Two blocks share a multiprocessor, without such warps, where one each would be too few."""
    for groups, itemsize, ragged, regime, warps, grid in (
        *((64, 2, False, 6, 18, 128), (64, 2, True, 6, 16, 128), (132, 2, False, 6, 18, 132)),
        *((70, 2, False, 6, 16, 210), (133, 2, False, 6, 16, 133), (64, 4, False, 6, 16, 128)),
    ):
        plan = launch_plans.row_plan(256, groups * 16_384, itemsize, ragged=ragged, **GPUS[0])
        assert plan is not None and [plan[key] for key in ("regime", "warps", "grid")] == [regime, warps, grid], groups


@pytest.mark.usefixtures("library")
def test_a_team_has_few_lean_rows_that_clusters_would_stage() -> None:
    for rows, weights, ragged, regime in (
        *((2, 0, False, 4), (32, 0, False, 6), (49, 0, False, 6), (50, 0, False, 4)),
        *((32, 2, False, 4), (32, 0, True, 4)),
    ):
        plan = launch_plans.row_plan(rows, 262_144, 2, weights=weights, ragged=ragged, **GPUS[0])
        assert plan is not None and plan["regime"] == regime, (rows, weights, ragged)


@pytest.mark.usefixtures("library")
def test_a_team_has_the_first_part_of_rows_that_it_cannot_hold() -> None:
    for cols, rows, regime, blocks in (
        *((132 * 16_384, 16, 6, 132), (132 * 16_384 + 4, 16, 7, 128), (132 * 16_384 + 4, 5, 5, 133)),
        *((256 * 16_384, 6, 7, 128), (256 * 16_384 + 4, 6, 5, 257)),
    ):
        plan = launch_plans.row_plan(rows, cols, 4, weights=2, **GPUS[0])
        assert plan is not None and (plan["regime"], plan["blocks_a_row"]) == (regime, blocks), cols
    assert launch_plans.row_plan(16, 140 * 16_384, 2, weights=2, regime=7, **GPUS[0]) is None
    assert launch_plans.row_plan(16, 140 * 16_384, 4, ragged=True, regime=7, **GPUS[0]) is None


@pytest.mark.usefixtures("library")
def test_chains_on_the_gpu_run_in_the_regimes_of_their_names() -> None:
    """What tests/gpu/test_overlap.py runs on an H100."""
    expected = {  # of the layers, with who holds a row in registers
        **{"small": {(2, 0)}, "tiny": {(1, 0)}, "many tiny": {(1, 0)}, "short": {(1, 0)}, "pair": {(2, 0)}},
        **{"odd": {(2, 0)}, "held": {(3, 2)}},
        **{"cluster of two": {(4, 3)}, "cluster": {(4, 3)}, "clusters in turn": {(4, 3)}},
        **{"cluster of groups": {(4, 4)}, "shared memory": {(4, 0)}, "split": {(5, 0)}},
        **{"groups": {(4, 3), (4, 4)}, "groups, team": {(6, 0)}, "team": {(6, 0)}, "team, split": {(7, 0)}},
    }
    assert set(CHAINS) - set(expected) == {"channels", "batch norm"}  # not all of row norms
    for name, regimes in expected.items():
        shape, dtype, make = CHAINS[name]
        found = set()
        for layer in make():
            groups = getattr(layer, "num_groups", None)
            rows, weights = (shape[0] * groups, 0) if groups else (shape[0], len(list(layer.parameters())))
            cols = math.prod(shape) // rows
            ragged = cols * dtype.itemsize % 16 > 0
            plan = launch_plans.row_plan(rows, cols, dtype.itemsize, weights=weights, ragged=ragged, **GPUS[0])
            assert plan is not None, name
            found.add((plan["regime"], plan["held"]))
        assert found == regimes, name


@pytest.mark.usefixtures("library")
def test_the_reduction_tree_depends_on_row_length_and_dtype_alone() -> None:
    """And, of rows of up to 32 vectors, on whether elements have weights of their own or there are options."""
    tree = ("vec", "lanes", "chunk_len", "chunks")
    kinds: tuple[tuple[dict[str, int], ...], ...] = (
        ({"weights": 0},),
        ({"weights": 1}, {"weights": 2}, {"options": 1}, {"options": 1, "adds": 1}),
    )
    for cols, itemsize in itertools.product(
        (5, 24, 64, 96, 128, 129, 192, 256, 264, 512, 1000, 1001, 1280, 5000, 65535, 262144, 4_194_304), (2, 4)
    ):
        trees = [
            {
                tuple(p[key] for key in tree)
                for of, ragged, rows, gpu, regime in itertools.product(
                    kind, (False, True), (1, 16, 5000), GPUS, range(8)
                )
                if (p := launch_plans.row_plan(rows, cols, itemsize, ragged=ragged, regime=regime, **of, **gpu))
            }
            for kind in kinds
        ]
        assert [len(one) for one in trees] == [1, 1], cols
        assert trees[0] == trees[1] or 8 < cols * itemsize / 16 <= 32, cols


COLUMN_GPUS: tuple[dict[str, Any], ...] = (
    {"clusters": True, "shared": 232_448, "multiprocessors": 132},  # H100
    {"clusters": False, "shared": 166_912, "multiprocessors": 108},  # A100
    {"clusters": False, "shared": 101_376, "multiprocessors": 128},  # RTX 4090
)
COLUMNS = (  # rows, channels, num_groups
    *((rows, 320, 32) for rows in (1, 2, 31, 64, 1000, 4096, 4097, 65_536, 1 << 20)),
    *((262_144, channels, 32) for channels in (64, 128, 256, 512, 960)),
    *((784, channels, 32) for channels in (128, 512)),
    *((rows, channels, channels) for rows in (2, 129, 16_384, 70_000) for channels in (1, 3, 33, 96, 4096, 4098)),
    *((20_000, channels, channels) for channels in (8, 16)),
    *((49, channels, groups) for channels, groups in ((2048, 32), (1001, 7), (1024, 1), (6, 2), (30, 3), (12, 12))),
)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("itemsize", [2, 4])
def test_column_plans_cover_the_columns_and_fit_the_gpu(itemsize: int) -> None:
    regimes = set()
    for rows, channels, groups in COLUMNS:
        for gpu in COLUMN_GPUS:
            for batch, regime in ((1, 0), (3, 0), (500, 0), (3, 3), (3, 4), (3, 5)):
                p = launch_plans.column_plan(batch, rows, channels, groups, itemsize, regime=regime, **gpu)
                if p is None:
                    assert regime in (3, 4)  # automatic and split serve them all
                    continue
                regimes.add(p["regime"])
                assert p["vec"] * itemsize == 16 or (p["vec"] == 1 and channels * itemsize % 16 != 0)
                assert p["width"] % p["vec"] == 0 and p["width"] % (channels // groups) == 0
                assert p["width"] == p["groups"] * (channels // groups)
                assert p["width"] == p["lanes"] * p["vec"] and p["lanes"] <= 512
                side, left = divmod(p["piece_rows"], p["slots"])
                across = side << (p["lanes"] - 1).bit_length()  # threads of a block
                assert left == 0 and across in ((128, 256, 512) if rows <= 64 else (256, 512))
                assert across < 512 or p["slots"] <= 8
                assert (p["strips"] - 1) * p["width"] < channels <= p["strips"] * p["width"]
                assert p["slots"] * across <= 4096  # vectors that shared memory holds
                assert (p["pieces"] - 1) * p["piece_rows"] < rows <= p["pieces"] * p["piece_rows"]
                assert p["items"] == batch * p["strips"] * p["pieces"]
                assert p["piece_rows"] * p["width"] * itemsize < p["shared"] <= gpu["shared"]
                assert 1 <= p["grid"] <= p["items"]
                if p["regime"] in (3, 4):
                    assert p["grid"] == p["items"] and p["workspace"] == 0
                    assert p["pieces"] <= (8 if p["regime"] == 4 and gpu["clusters"] else 1)
                else:
                    assert p["workspace"] >= 8 * batch * p["strips"] * p["groups"] * (p["pieces"] + 1)
    assert regimes == {3, 4, 5}


@pytest.mark.usefixtures("library")
def test_the_reduction_tree_of_columns_depends_on_neither_batch_nor_gpu() -> None:
    tree = ("vec", "width", "lanes", "parts", "slots", "piece_rows", "pieces")
    for rows, channels, groups in COLUMNS:
        plans = [
            launch_plans.column_plan(batch, rows, channels, groups, 2, regime=regime, **gpu)
            for batch in (1, 7, 300)
            for gpu in COLUMN_GPUS
            for regime in (0, 3, 4, 5)
        ]
        assert len({tuple(p[key] for key in tree) for p in plans if p is not None}) == 1


@pytest.mark.usefixtures("library")
def test_columns_that_no_cluster_holds_are_read_by_three_blocks_a_multiprocessor() -> None:
    """Of 256 threads; of 512, and two, where a group is too wide for so few."""
    gpu = COLUMN_GPUS[0]
    for rows, channels, groups, itemsize, threads, slots in (
        *((12_544, 64, 32, 2, 256, 16), (262_144, 128, 32, 2, 256, 16), (262_144, 128, 32, 4, 256, 16)),
        *((12_544, 64, 64, 2, 256, 14), (1000, 2048, 1, 2, 256, 16), (1000, 4096, 1, 2, 512, 8)),
    ):
        p = launch_plans.column_plan(64, rows, channels, groups, itemsize, **gpu)
        blocks = 3 if threads == 256 else 2
        assert p is not None and (p["regime"], p["slots"]) == (5, slots), (rows, channels, groups)
        assert p["piece_rows"] // slots * p["lanes"] == threads
        assert p["grid"] == blocks * gpu["multiprocessors"] and blocks * (p["shared"] + 1024) <= gpu["shared"] + 1024


@pytest.mark.usefixtures("library")
def test_few_rows_have_small_blocks_where_these_are_no_more_pieces() -> None:
    for rows, channels, groups, itemsize, threads, pieces in (
        *((49, 2048, 32, 2, 128, 1), (9, 512, 1, 2, 128, 1), (32, 1024, 2, 2, 256, 1), (64, 256, 1, 2, 256, 1)),
        *((49, 2048, 8, 4, 256, 1), (32, 512, 2, 4, 256, 1), (9, 1024, 2, 4, 256, 1)),
    ):
        p = launch_plans.column_plan(64, rows, channels, groups, itemsize, **COLUMN_GPUS[0])
        assert p is not None and p["piece_rows"] // p["slots"] * p["lanes"] == threads, (rows, channels, groups)
        assert p["pieces"] == pieces


@pytest.mark.usefixtures("library")
def test_groups_too_wide_for_a_block_have_no_plan() -> None:
    assert launch_plans.column_plan(1, 9, 4096, 1, 2, **COLUMN_GPUS[0]) is not None
    assert launch_plans.column_plan(1, 9, 8192, 1, 2, **COLUMN_GPUS[0]) is None
    assert launch_plans.column_plan(1, 9, 1001, 1, 2, **COLUMN_GPUS[0]) is None


def test_the_longest_dim_with_a_backward_kernel_is_one_number() -> None:
    header = (native.source_dir() / "abi/kernels.h").read_text()
    assert f"kMaxDimBackward = {dispatch.MAX_DIM_BACKWARD};" in header
