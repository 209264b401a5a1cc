"""The ops without a GPU: PyTorch's op serves, weight mathematics, launch plans of the compiled library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Projection, randomised

from normswap import native, ops, reference


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
    {"clusters": True, "shared": 232_448, "resident": 396},  # H100
    {"clusters": False, "shared": 166_912, "resident": 216},  # A100
    {"clusters": False, "shared": 101_376, "resident": 128},  # RTX 4090
    {"clusters": True, "shared": 232_448, "resident": 0},  # no cooperative launches
)


@pytest.mark.usefixtures("library")
def test_row_plans_cover_the_row_and_fit_the_gpu() -> None:
    for cols in (*range(1, 300), *(2**k + d for k in range(8, 23) for d in (-1, 0, 1, 2)), 65535, 3 * 10**8):
        for rows in (1, 7, 100_000):
            for itemsize in (2, 4):
                if rows * cols * itemsize > 80e9:
                    continue
                for gpu in GPUS:
                    p = native.row_plan(rows, cols, itemsize, **gpu)
                    assert p is not None
                    assert p["vec"] * itemsize == 16
                    assert (p["chunks"] - 1) * p["chunk_len"] < cols <= p["chunks"] * p["chunk_len"]
                    assert p["chunk_len"] % (p["vec"] * (p["lanes"] if p["chunks"] > 1 else 1)) == 0
                    assert p["chunk_len"] <= 32 * p["lanes"]  # registers of a lane
                    assert 1 <= p["warps"] <= 16 and 1 <= p["grid"] < 2**31
                    at_once = p["grid"] * p["warps"] * (32 // p["lanes"])
                    assert p["shared"] + 8192 <= gpu["shared"]
                    if p["regime"] == 6:
                        assert p["grid"] <= gpu["resident"] and p["grid"] % p["cluster"] == 0
                    else:
                        assert 1 <= p["cluster"] <= (8 if gpu["clusters"] else 1)
                    if p["regime"] in (3, 4, 6):
                        assert p["shared"] >= p["block_chunks"] * (p["chunk_len"] * itemsize + 15)
                        assert p["cluster"] * p["block_chunks"] >= p["chunks"]
                    else:
                        assert at_once >= rows * p["chunks"]


@pytest.mark.usefixtures("library")
def test_the_reduction_tree_depends_on_row_length_and_dtype_alone() -> None:
    tree = ("vec", "lanes", "chunk_len", "chunks")
    for cols in (5, 64, 129, 1000, 1001, 5000, 65535, 262144, 4_194_304):
        for itemsize in (2, 4):
            plans = [
                native.row_plan(rows, cols, itemsize, regime=regime, **gpu)
                for rows in (1, 16, 5000)
                for gpu in GPUS
                for regime in range(7)
            ]
            assert len({tuple(p[key] for key in tree) for p in plans if p is not None}) == 1
