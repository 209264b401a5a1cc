"""The table of expressions and traps on the GPU, with our kernels; staleness, torch.compile, CUDA graphs."""

from __future__ import annotations

import copy

import pytest
import torch
from expression_changes import CHANGES, check_no_staleness
from expression_checks import Trap, check
from expression_forwards import FEATURES, l1, plain_l1, written
from expression_forwards import block as block_forward
from expression_models import TABLE
from models import randomised
from torch import Tensor, nn

import normswap
from normswap import modules

SIZES = [FEATURES - 1, 4 * FEATURES]


@pytest.mark.case(
    "linear-called-twice",
    "linear-output-used-elsewhere",
    "one-linear-two-batch-norms",
    "in-place-and-aliases",
    "scale-forms",
    "scale-values",
    "l1-without-abs",
    "other-dim",
    "other-tensor",
    "sum-not-mean",
    "added-eps",
    "linear-3d-input",
    "attributes-changed-later",
    "bn-momentum",
    "bn-affine-false",
    "bn-no-running-stats",
    "bn-batches-tracked",
    "bn-frozen",
    "bn-unbiased-variance",
    "later-hooks",
    "later-lora",
    "later-weight-norm",
)
@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, trap in TABLE.items() for mode in trap.modes])
def test_it_is_swapped_and_equal_or_refused(name: str, mode: str) -> None:
    check(TABLE[name], mode, "cuda")


@pytest.mark.case("later-sync-batch-norm", "sync-batch-norm")
@pytest.mark.parametrize("name", ["sync_batch_norm", "later_sync_batch_norm"])
def test_sync_batch_norm_in_training(name: str, tmp_path: object) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        check(TABLE[name], "train", "cuda")
    finally:
        torch.distributed.destroy_process_group()


def block(training: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    return randomised(written(block_forward)()).to("cuda", dtype).train(training)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [n for n, t in TABLE.items() if t.plan and not t.later and n.startswith(("l1", "sc"))])
def test_swapped_forms_are_proved_in_16_bits(name: str, dtype: torch.dtype) -> None:
    trap: Trap = TABLE[name]
    for mode in trap.modes:
        model = randomised(trap.make()).to("cuda", dtype).train(mode == "train")
        x = torch.randn(64, *trap.shape[1:], device="cuda", dtype=dtype)
        normswap.optimize(model, x, inplace=True, on_mismatch="raise", validate="grad", min_speedup=None)


@pytest.mark.parametrize("rows", SIZES, ids=["few_rows", "many_rows"])
@pytest.mark.parametrize("name", CHANGES)
def test_nothing_of_the_weights_is_kept_between_calls(name: str, rows: int) -> None:
    check_no_staleness(CHANGES[name], rows, "cuda")


@pytest.mark.case("cuda-graph")
@pytest.mark.parametrize("rows", SIZES, ids=["few_rows", "many_rows"])
def test_a_captured_graph_reads_the_weights_of_the_moment(rows: int) -> None:
    original = block(training=False)
    swapped = normswap.optimize(
        original, torch.randn(rows, FEATURES, device="cuda"), on_mismatch="raise", min_speedup=None
    )
    assert modules.site_match(swapped) is not None
    x = torch.randn(rows, FEATURES, device="cuda")
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            swapped(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = swapped(x)
        for change in ("in_place", "data_in_place", "load_state_dict"):  # none of them moves a tensor
            x.normal_()
            for model in (swapped, original):
                CHANGES[change](model)
            graph.replay()
            torch.testing.assert_close(out, original(x), rtol=1e-4, atol=1e-4 * float(out.abs().max()))


@pytest.mark.case("torch-compile")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("training", [True, False])
def test_a_compiled_block_reads_its_weights_on_every_call(training: bool) -> None:
    original = block(training)
    swapped = copy.deepcopy(original)
    normswap.optimize(
        swapped, torch.randn(16, FEATURES, device="cuda"), inplace=True, on_mismatch="raise", min_speedup=None
    )
    torch._dynamo.reset()
    compiled = torch.compile(swapped, fullgraph=True, dynamic=True)
    # In training the gradient of the Linear's bias is rounding noise, of which Adam, unlike SGD, makes full steps.
    optimizer = "sgd" if training else "adam_fused"
    for rows in (16, 24, 4):
        x = torch.randn(rows, FEATURES, device="cuda")
        for change in ("data_in_place", "data_assigned", optimizer):
            with torch.no_grad():
                expected = original(x)
                torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
            for model in (swapped, original):
                CHANGES[change](model)
    for mine, theirs in zip(swapped.buffers(), original.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_our_kernels_run_in_the_forms_they_serve() -> None:
    """Training, where the BatchNorm is a site too, eval with many rows and with few, and the L1 norm along the last
    dim."""
    x = torch.randn(24, FEATURES, device="cuda")
    for model, given, sites in (
        *((block(True), x, ["batch_norm", "region"]), (block(False), x, ["region"]), (block(False), x[:3], ["region"])),
        (l1(plain_l1)(), x, ["l1_norm"]),
    ):
        swapped = normswap.optimize(model, given, on_mismatch="raise", min_speedup=None)
        rows = normswap.report(swapped).rows
        assert sorted((row["kind"], row["status"]) for row in rows) == [(kind, "proved") for kind in sites]
        assert "normswap::" in _ops_of(swapped, given)


def _ops_of(model: nn.Module, x: Tensor) -> str:
    from torch.profiler import ProfilerActivity, profile

    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(x)
    return " ".join(event.key for event in profiled.key_averages())


def test_a_frozen_batch_norm_learns_in_front_and_behind() -> None:
    """Eval with gradients and more rows than features: one autograd Function, against float64."""
    original = block(training=False)
    swapped = normswap.optimize(
        original, torch.randn(64, FEATURES, device="cuda"), on_mismatch="raise", min_speedup=None
    )
    exact = copy.deepcopy(original).double()
    x = torch.randn(64, FEATURES, device="cuda")
    for module, dtype in ((swapped, torch.float32), (exact, torch.float64)):
        module(x.to(dtype)).sin().sum().backward()
    for (name, mine), theirs in zip(swapped.named_parameters(), exact.parameters(), strict=True):
        atol = 1e-5 * float(theirs.grad.abs().max())
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=atol, msg=name)


@pytest.mark.parametrize("name", ["sequential_scale", "scale_before_parameter_c", "scale_twice_parameter_c"])
def test_fold(name: str) -> None:
    model = randomised(nn.Sequential(TABLE[name].make())).cuda().eval()
    x = torch.randn(24, FEATURES, device="cuda")
    expected = model(x)
    for folded in (normswap.fold(model), normswap.fold(normswap.optimize(model, x, min_speedup=None))):
        assert not any(isinstance(one, nn.BatchNorm1d) for one in folded.modules())
        torch.testing.assert_close(folded(x), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
