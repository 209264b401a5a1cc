"""Expressions inside a forward, and what looks like one: equal to the original or refused with a reason."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from expression_changes import CHANGES, check_no_staleness
from expression_checks import assert_equal, check, found
from expression_forwards import CHANNELS, FEATURES, block, l1, plain_l1, written
from expression_models import TABLE
from models import randomised
from region_checks import assert_near
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import normswap
from normswap import modules
from normswap.forwards.linear_scale_batch_norm import linear_scale_batch_norm

IN_THE_TABLE = pytest.mark.case(
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
    "data-dependent-control-flow",
    "side-effects",
    "attributes-changed-later",
    "training-branches",
    "signatures",
    "bn-momentum",
    "bn-affine-false",
    "bn-no-running-stats",
    "bn-batches-tracked",
    "bn-frozen",
    "bn-unbiased-variance",
    "subclass-own-forward",
    "instance-forward",
    "parametrized",
    "hooks",
    "shared-module",
    "tied-parameters",
    "containers",
    "root-is-norm",
    "no-affine",
    "frozen-parameters",
    "sync-batch-norm",
    "trap-no-grad-block",
    "trap-autocast-block",
    "trap-grad-query",
    "trap-config-and-globals",
    "trap-isinstance",
    "trap-shape-after-in-place",
    "trap-returns-rstd",
    "later-add-module",
    "later-hooks",
    "later-lora",
    "later-weight-norm",
    "later-sync-batch-norm",
)


@pytest.mark.parametrize(
    ("ours", "theirs", "raises"),
    [
        (2e-6, 0.0, ""),  # the tolerance
        (5e-6, -4e-6, ""),  # no further than twice PyTorch's own error and that
        (1.5e-5, -4e-6, "gain, PyTorch 4e-06 off"),
        (5e-6, 0.0, "gain, PyTorch 0 off"),
        (5e-3, 4e-3, "own error"),
    ],
)
def test_a_gradient_is_as_near_to_float64_as_pytorchs(ours: float, theirs: float, raises: str) -> None:
    exact = torch.tensor([0.25, 0.0], dtype=torch.float64)
    given = [torch.tensor([0.25, error]) for error in (ours, theirs)]
    with pytest.raises(AssertionError, match=raises) if raises else contextlib.nullcontext():
        assert_near(*given, lambda: exact, "gain", 0.0, 3e-6)


@IN_THE_TABLE
@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, trap in TABLE.items() for mode in trap.modes])
def test_it_is_swapped_and_equal_or_refused(name: str, mode: str) -> None:
    check(TABLE[name], mode, "cpu")


def test_the_table_has_every_case_it_is_marked_with() -> None:
    assert {case for trap in TABLE.values() for case in trap.cases} == set(IN_THE_TABLE.mark.args)


def swapped_block(rows: int = 8, training: bool = True, **options: Any) -> tuple[nn.Module, nn.Module, Tensor]:
    """(swapped, original, input)."""
    original = randomised(written(block, **options)()).train(training)
    x = torch.randn(rows, FEATURES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a copy in train mode leaves its optimizer behind
        swapped = normswap.optimize(original, x, on_mismatch="raise")
    assert modules.site_match(swapped) is not None
    return swapped, original, x


@pytest.mark.case("dtypes")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "name", ["scale_before_number", "scale_behind_number", "scale_twice_parameter_c", "l1_dim_0", "l1_with_eps"]
)
def test_swapped_forms_are_proved_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    for mode in ("train", "eval"):
        model = randomised(TABLE[name].make()).to(dtype).train(mode == "train")
        x = torch.randn(64, *TABLE[name].shape[1:], dtype=dtype)
        normswap.optimize(model, x, inplace=True, on_mismatch="raise", validate="grad")


@pytest.mark.parametrize(
    ("number", "held"),
    [(0.125, True), (-3, True), (100, True), (0.1, False), (1e-7, False), (257, False), (1e6, False)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_number_that_16_bits_cannot_hold_is_not_rounded(number: float, held: bool, dtype: torch.dtype) -> None:
    model = randomised(written(block, number)()).to(dtype).eval()
    x = torch.randn(64, FEATURES, dtype=dtype)
    with torch.no_grad():
        out = linear_scale_batch_norm(x, model.gemm, number, model.bn)
    assert (out is not None) == held


@pytest.mark.case("bn-one-row")
def test_one_row_in_training_raises_pytorch_s_error_and_counts_as_it_does() -> None:
    swapped, original, _ = swapped_block()
    row = torch.randn(1, FEATURES)
    for _ in range(2):
        told = []
        for module in (swapped, original):
            with pytest.raises(ValueError, match="more than 1 value per channel") as error:
                module(row)
            told.append(str(error.value))
        assert told[0] == told[1]
    assert all(torch.equal(a, b) for a, b in zip(swapped.buffers(), original.buffers(), strict=True))
    assert_equal(swapped.eval(), original.eval(), row)


def test_calls_that_the_original_refuses_are_refused() -> None:
    block_, original, x = swapped_block()
    for module in (block_, normswap.optimize(l1(plain_l1)(), x), original):
        for arguments, named in (((), {}), ((x, x), {}), ((x,), {"y": x}), ((), {"y": x})):
            with pytest.raises(TypeError):
                module(*arguments, **named)
        assert torch.equal(module(x=x), module(x=x)) or module.training


def test_bad_shapes_and_dtypes_raise_what_the_original_raises() -> None:
    swapped, original, _ = swapped_block(training=False)
    for wrong in (torch.randn(9, FEATURES + 1), torch.randn(9, FEATURES).double(), torch.randn(FEATURES)):
        with pytest.raises((RuntimeError, ValueError)) as expected:
            original(wrong)
        with pytest.raises(expected.type) as got:
            swapped(wrong)
        assert str(got.value) == str(expected.value)


@pytest.mark.case("lazy")
def test_lazy_parts_are_refused_and_swapped_after_a_batch() -> None:
    model = written(block)()
    model.gemm, model.bn = nn.LazyLinear(CHANNELS), nn.LazyBatchNorm1d()
    assert found(normswap.plan(model)) == {"": "linear_scale_batch_norm LAZY"}
    x = torch.randn(8, FEATURES)
    model(x)
    randomised(model)
    assert found(normswap.plan(model)) == {"": "region"}
    assert_equal(normswap.optimize(model, x, on_mismatch="raise"), model, x)


@pytest.mark.case("meta-device")
def test_on_the_meta_device_it_is_swapped_and_computes_shapes() -> None:
    model = normswap.optimize(written(block)().to("meta"))
    out = model(torch.randn(8, FEATURES, device="meta"))
    assert modules.site_match(model) is not None and out.is_meta and out.shape == (8, CHANNELS)
    model = normswap.optimize(l1(plain_l1)())
    assert model(torch.randn(8, FEATURES, device="meta")).is_meta


@pytest.mark.case("script-module")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_modules_are_left_alone() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = torch.jit.trace(randomised(written(block)()).eval(), torch.randn(8, FEATURES))

        def forward(self, x: Tensor) -> Tensor:
            return self.held(x)

    model, x = Held().eval(), torch.randn(8, FEATURES)
    assert torch.equal(normswap.optimize(model, x, on_empty="ignore")(x), model(x))
    assert normswap.plan(model).swaps == ()


@pytest.mark.case("optimizer-before-swap")
def test_an_optimizer_made_before_an_in_place_swap_trains_the_swapped_model() -> None:
    models = [randomised(written(block)())]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    x = torch.randn(16, FEATURES)
    normswap.optimize(models[0], x, inplace=True, on_mismatch="raise")
    for _ in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).sin().sum().backward()
            optimizer.step()
    for (name, mine), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if name != "gemm.bias":  # a BatchNorm takes it away: its gradient is rounding, which Adam scales up
            torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2, msg=name)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.case("data-parallel")
@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel() -> None:
    swapped, original, x = swapped_block()
    assert_equal(DistributedDataParallel(swapped), DistributedDataParallel(original), x)


@pytest.mark.case("later-fully-shard", "data-parallel")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("training", [True, False])
def test_fully_shard_after_the_swap(training: bool) -> None:
    swapped, original, x = swapped_block(training=training)
    mesh = init_device_mesh("cpu", (1,))
    for module in (swapped, original):
        fully_shard(module, mesh=mesh)
    for _ in range(2):
        mine, theirs = swapped(x), original(x)
        torch.testing.assert_close(mine, theirs)
        mine.sin().sum().backward()
        theirs.sin().sum().backward()
    for (name, ours), other in zip(swapped.named_parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), other.grad.full_tensor(), rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.case("later-quantize")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantize_dynamic_after_the_swap() -> None:
    swapped, original, x = swapped_block(training=False)
    ours, theirs = (torch.ao.quantization.quantize_dynamic(m, {nn.Linear}, torch.qint8) for m in (swapped, original))
    assert type(ours.gemm) is not nn.Linear
    assert torch.equal(ours(x), theirs(x))


# --- staleness ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [FEATURES - 1, 4 * FEATURES], ids=["few_rows", "many_rows"])
@pytest.mark.parametrize("name", CHANGES)
def test_nothing_of_the_weights_is_kept_between_calls(name: str, rows: int) -> None:
    check_no_staleness(CHANGES[name], rows, "cpu")


def test_inference_tensors_and_a_write_between_calls() -> None:
    with torch.inference_mode():
        original = randomised(written(block)()).eval()
        swapped = normswap.optimize(original, torch.randn(16, FEATURES), inplace=False, on_mismatch="raise")
        x = torch.randn(16, FEATURES)
        torch.testing.assert_close(swapped(x), original(x))
        for model in (swapped, original):
            model.gemm.weight.mul_(2)
            model.bn.running_mean.add_(1)
        torch.testing.assert_close(swapped(x), original(x))


@pytest.mark.case("torch-compile")
@pytest.mark.parametrize("training", [True, False])
def test_a_compiled_block_reads_its_weights_on_every_call(training: bool) -> None:
    swapped, original, _ = swapped_block(training=training)
    torch._dynamo.reset()
    compiled = torch.compile(swapped, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (16, 24, 4):
        x = torch.randn(rows, FEATURES)
        for change in ("data_in_place", "data_assigned", "adam_fused"):
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), original(x), rtol=1e-4, atol=1e-4)
            for model in (swapped, original):
                CHANGES[change](model)
    for mine, theirs in zip(swapped.buffers(), original.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.case("torch-export")
def test_an_exported_block_takes_any_number_of_rows() -> None:
    for model in (swapped_block(training=False)[0], normswap.optimize(l1(plain_l1)(), torch.randn(8, FEATURES))):
        rows = torch.export.Dim("rows", min=1, max=4096)
        program = torch.export.export(model, (torch.randn(8, FEATURES),), dynamic_shapes=({0: rows},)).module()
        for count in (1, 4, 100):
            x = torch.randn(count, FEATURES)
            torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_block_takes_any_number_of_rows() -> None:
    swapped, original, x = swapped_block(training=False)
    traced = torch.jit.trace(swapped, x)
    for rows in (1, 100):
        x = torch.randn(rows, FEATURES)
        torch.testing.assert_close(traced(x), original(x))


@pytest.mark.case("functorch", "forward-mode-ad", "double-backward")
@pytest.mark.parametrize("training", [True, False])
def test_transforms_see_the_original_function(training: bool) -> None:
    swapped, original, x = swapped_block(rows=16, training=training, track_running_stats=training)
    swapped, original = (model.eval() if not training else model for model in (swapped, original))
    tangent = torch.randn_like(x)
    for module in (swapped, original):
        module.bn.track_running_stats = False
    ours, theirs = (torch.func.jvp(module, (x,), (tangent,)) for module in (swapped, original))
    torch.testing.assert_close(ours, theirs)
    parameters = {name: parameter * 2 for name, parameter in original.named_parameters()}
    ours, theirs = (torch.func.functional_call(module, parameters, (x,)) for module in (swapped, original))
    torch.testing.assert_close(ours, theirs)
    leaf = x.clone().requires_grad_()
    found_ = []
    for module in (swapped, original):
        (first,) = torch.autograd.grad(module(leaf).sin().sum(), leaf, create_graph=True)
        found_.append(torch.autograd.grad(first.square().sum(), [leaf, module.scale, module.gemm.weight]))
    torch.testing.assert_close(found_[0], found_[1], rtol=1e-3, atol=1e-3)
