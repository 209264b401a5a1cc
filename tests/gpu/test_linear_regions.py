"""Linear -> scale -> BatchNorm as regions on the GPU: the tables of tests/linear_region_*.py, and that our kernels
compute them, with what stands behind them in one launch in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from linear_region_changes import CHANGED
from linear_region_look_alikes import LOOK_ALIKES
from linear_region_models import BATCH, FOUND, Factor
from models import randomised
from norm_models import DTYPES
from region_checks import Case, assert_same, check, written
from torch import Tensor, nn

import normswap

ON_A_CPU = ("under_autocast", "quantized", "quantized before")
TABLE: dict[str, Case] = {n: case for n, case in (FOUND | LOOK_ALIKES | CHANGED).items() if n not in ON_A_CPU}
PROVED = [name for name in FOUND if name not in (*ON_A_CPU, "without_gradients")]
pytestmark = pytest.mark.filterwarnings("ignore:.*returns a copy.*")


@pytest.fixture(autouse=True)
def _products_in_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.case("linear-region", "linear-region-look-alikes", "linear-region-changed-later")
@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, case in TABLE.items() for mode in case.modes])
def test_what_is_found_computes_what_it_did(name: str, mode: str) -> None:
    check(TABLE[name], mode, "cuda")


def made(case: Case, training: bool, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = randomised(written(case.forward, case.base)).train(training).to("cuda", dtype)
    return model, tuple(torch.randn(8 * BATCH, *shape[1:], device="cuda").to(dtype) for shape in case.shapes)


def proved(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """The row of the model itself, which must not fail."""
    fast = normswap.optimize(model, inputs, validate="grad", on_mismatch="raise", min_speedup=None, on_empty="ignore")
    (row,) = (row for row in normswap.report(fast).rows if row["name"] == "")
    assert row["eager_error_share"] <= 1.0, row
    return row


@pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PROVED)
def test_every_one_is_proved_with_its_gradients(name: str, dtype: torch.dtype, training: bool) -> None:
    row = proved(*made(FOUND[name], training, dtype))
    assert row["status"] == "proved" or row["code"] == "DECLINED", row


@pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", ("among_statements", "with_a_residual", "without_a_scale", "by_a_child"))
@pytest.mark.case("linear-region", "autocast")
def test_it_is_proved_under_autocast(name: str, dtype: torch.dtype, training: bool) -> None:
    model, inputs = made(FOUND[name], training, torch.float32)
    with torch.autocast("cuda", dtype):
        proved(model, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ("with_a_residual", "without_a_scale", "by_one_parameter", "scale_first"))
def test_in_training_one_kernel_stands_behind_the_linear(name: str, dtype: torch.dtype) -> None:
    model, inputs = made(FOUND[name], True, dtype)
    fast = normswap.apply(model, normswap.plan(model))
    with torch.no_grad():
        fast(*inputs)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            fast(*inputs)
    called = [event.name for event in seen.events()]
    assert any(name.startswith("normswap::batch_norm") for name in called)
    apart = {"aten::relu", "aten::gelu", "aten::tanh", "aten::batch_norm", "aten::native_batch_norm", "aten::add"}
    assert not apart & {*called}, called


@pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))
@pytest.mark.parametrize("rows", (4, 256))
@pytest.mark.case("linear-sequential")
def test_several_in_a_sequential(rows: int, training: bool) -> None:
    layers = (
        *(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU()),
        *(nn.Linear(96, 128, bias=False), nn.BatchNorm1d(128), nn.GELU()),
        *(nn.Linear(128, 64), nn.GroupNorm(4, 64), nn.SiLU(), nn.Linear(64, 5), Factor(), nn.BatchNorm1d(5)),
    )
    model = randomised(nn.Sequential(*layers)).train(training).cuda()
    x = torch.randn(rows, 64, device="cuda")
    assert proved(model, x)["status"] == "proved"
    fast = normswap.apply(model, normswap.plan(model))
    assert_same(fast, model, (x,), exact=False)


@pytest.mark.parametrize("rows", (4, 256))
def test_a_captured_graph_follows_what_is_written_into_it(rows: int) -> None:
    model, _ = made(FOUND["with_a_residual"], False, torch.float32)
    inputs = torch.randn(rows, 6, device="cuda"), torch.randn(rows, 5, device="cuda")
    fast = normswap.apply(model, normswap.plan(model))
    with torch.no_grad():
        for _ in range(3):
            fast(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fast(*inputs)
        for one in (model, fast):
            one.bn.running_mean.add_(1.0)  # type: ignore[union-attr, operator]
            one.scale.mul_(0.5)  # type: ignore[union-attr, operator]
        graph.replay()
        torch.testing.assert_close(out, model(*inputs), rtol=1e-4, atol=2e-5)
