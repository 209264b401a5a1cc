"""What of PyTorch's own tools becomes of a swapped model."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tool_table import (
    IN_ORDER,
    ORIGINAL,
    REFUSED,
    WORKS,
    Seen,
    compared,
    left_alone,
    model_on,
    optimized,
    pair,
    refusal,
    row,
    same,
    same_step,
    who_runs,
    x_on,
)
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import normswap

CPU, GPU = ("cpu",), ("cuda",)


# --- capture ------------------------------------------------------------------------------------------------------


@row("torch.fx.symbolic_trace", "optimize, trace")
def fx_trace(device: str) -> Seen:
    model, fast, x = pair(device)
    return compared(torch.fx.symbolic_trace(fast), model, x)


@row("torch.jit.script", "optimize, script", ORIGINAL)
def jit_script(device: str) -> Seen:
    model, fast, x = pair(device)
    return compared(torch.jit.script(fast), model, x)


@row("torch.jit.trace", "optimize, trace", ORIGINAL)
def jit_trace(device: str) -> Seen:
    model, fast, x = pair(device)
    return compared(torch.jit.trace(fast, x), model, x)


def exported(device: str, strict: bool) -> Seen:
    model, fast, x = pair(device)
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    program = torch.export.export(fast, (x,), dynamic_shapes=(batch,), strict=strict)
    assert not [node for node in program.graph.nodes if "normswap" in str(node.target)]
    return compared(program.module(), model, x_on(device, 9))


@row("torch.export", "optimize, export", ORIGINAL)
def export(device: str) -> Seen:
    return exported(device, False)


@row("torch.export, strict=True", "optimize, export", ORIGINAL)
def export_strict(device: str) -> Seen:
    return exported(device, True)


@row("AOTInductor", "optimize, export, aoti_compile_and_package", ORIGINAL, devices=CPU)
def aot_inductor(device: str) -> Seen:
    model, x = model_on(device, 1), x_on(device)
    fast = optimized(model, x)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        program = torch.export.export(fast, (x,))
        file = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2")
        return compared(torch._inductor.aoti_load_package(file), model, x)


# --- torch.compile ------------------------------------------------------------------------------------------------


def compiled(device: str, mode: str) -> Seen:
    torch._dynamo.reset()
    model, x = model_on(device, 1), x_on(device)
    fast = torch.compile(optimized(model, x, for_compile=True), mode=mode, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):  # with CUDA graphs: warm up, record, replay
            same(fast(x), model(x), 1e-3)
    return Seen(WORKS)


@row("torch.compile", "optimize(for_compile=True), compile")
def compile_default(device: str) -> Seen:
    return compiled(device, "default")


@row('torch.compile, mode="reduce-overhead"', "optimize(for_compile=True), compile")
def compile_reduce_overhead(device: str) -> Seen:
    return compiled(device, "reduce-overhead")


@row('torch.compile, mode="max-autotune"', "optimize(for_compile=True), compile")
def compile_max_autotune(device: str) -> Seen:
    return compiled(device, "max-autotune")


@row('torch.compile, mode="max-autotune-no-cudagraphs"', "optimize(for_compile=True), compile")
def compile_max_autotune_no_cudagraphs(device: str) -> Seen:
    return compiled(device, "max-autotune-no-cudagraphs")


@row("torch.compile, training", "optimize(for_compile=True), compile, backward")
def compile_training(device: str) -> Seen:
    torch._dynamo.reset()
    model, x = model_on(device, 1).train(), x_on(device)
    same_step(torch.compile(optimized(model, x, for_compile=True), fullgraph=True), model, x)
    return Seen(WORKS)


@row("a compiled model", "compile, optimize")
def compile_first(device: str) -> Seen:
    torch._dynamo.reset()
    model, x = model_on(device), x_on(device)
    fast = optimized(torch.compile(model, backend="eager"), x)
    same(fast(x), model(x))
    return Seen(WORKS)


# --- CUDA graphs --------------------------------------------------------------------------------------------------


@row("torch.cuda.make_graphed_callables", "optimize, make_graphed_callables", devices=GPU)
def graphed_callables(device: str) -> Seen:
    model, fast, x = pair(device, train=True)
    seen = who_runs(lambda: fast(x))
    graphed = torch.cuda.make_graphed_callables(fast, (x.clone().requires_grad_(),))
    same_step(graphed, model, x)
    return Seen(seen)


@row("torch.cuda.graph", "optimize, capture a whole training step", devices=GPU)
def graphed_step(device: str) -> Seen:
    model, fast, x = pair(device, train=True)
    steps = [torch.optim.SGD(one.parameters(), lr=1e-2) for one in (model, fast)]

    def step(one: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)
        one(x).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(fast, steps[1])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(fast, steps[1])
    for _ in range(3):
        step(model, steps[0])
    for _ in range(2):  # what is captured does not run
        graph.replay()
        step(model, steps[0])
    for (name, ours), theirs in zip(fast.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3, msg=name)
    return Seen(who_runs(lambda: fast(x)))


# --- training -----------------------------------------------------------------------------------------------------


def checkpointed(device: str, reentrant: bool) -> Seen:
    model, fast, x = pair(device, train=True)
    run = lambda leaf: checkpoint(fast, leaf, use_reentrant=reentrant)  # noqa: E731
    if not reentrant:
        same_step(run, model, x)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for out in (run(leaves[0]), model(leaves[1])):
        out.square().sum().backward()
    same(leaves[0].grad, leaves[1].grad, 1e-3)
    return Seen(who_runs(lambda: run(x)))


@row("activation checkpointing", "optimize, checkpoint(use_reentrant=False)")
def checkpointing(device: str) -> Seen:
    return checkpointed(device, False)


@row("activation checkpointing", "optimize, checkpoint(use_reentrant=True)")
def checkpointing_reentrant(device: str) -> Seen:
    return checkpointed(device, True)


@row("torch.optim.swa_utils", "optimize, AveragedModel (SWA and EMA)")
def averaged(device: str) -> Seen:
    model, fast, x = pair(device)
    averages = []
    for one in (model, fast):
        average = torch.optim.swa_utils.AveragedModel(one, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        average.update_parameters(one)
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.add_(1)
        average.update_parameters(one)
        averages.append(average)
    return compared(averages[1], averages[0], x)


@row("a profiler that counts calls", "optimize, put counting functions into torch.nn.functional")
def counted(device: str) -> Seen:
    model, fast, x = pair(device)
    names, counts = ("layer_norm", "group_norm", "linear", "silu"), list[list[str]]()
    for one in (model, fast):
        counts.append([])
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setattr(F, name, counting(name, getattr(F, name), counts[-1]))
            one(x)
    assert counts[0] == counts[1] and {*counts[0]} == {*names}
    return compared(fast, model, x)


def counting(name: str, function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        calls.append(name)
        return function(*given, **named)

    return call


@row("torch.nn.utils.prune", "optimize, prune", text="refused: pass inplace=True", verdict=IN_ORDER)
def pruned(device: str) -> Seen:
    model, fast, x = pair(device)
    for one in (model, fast):
        prune.l1_unstructured(one[0].fc, "weight", 0.5)
        prune.random_unstructured(one[0].norm, "weight", 0.0)
    seen = compared(fast, model, x)
    text = refusal(lambda: normswap.optimize(model, x))
    return Seen(IN_ORDER if seen.verdict == WORKS else seen.verdict, f"refused: {text.rpartition('; ')[2]}")


@row(
    "torch.nn.utils.parametrize",
    "optimize, register_parametrization",
    IN_ORDER,
    "left alone: remove the parametrization, or apply it after optimize()",
)
def parametrized(device: str) -> Seen:
    model, fast, x = pair(device)
    for one in (model, fast):
        parametrize.register_parametrization(one[0].norm, "weight", nn.Tanh())
    assert compared(fast, model, x) == Seen(WORKS)
    norm = nn.Sequential(model[0].norm)
    return Seen(IN_ORDER, left_alone(norm, x))


@row("torch.nn.utils.parametrizations.weight_norm", "optimize, weight_norm")
def weight_norm(device: str) -> Seen:
    model, fast, x = pair(device)
    for one in (model, fast):
        parametrizations.weight_norm(one[0].fc)
    seen = compared(fast, model, x)
    return seen if optimized(model, x) is not None else Seen(REFUSED)


@row("torch.nn.utils.weight_norm", "optimize, weight_norm", IN_ORDER, "refused: pass inplace=True")
def weight_norm_by_hooks(device: str) -> Seen:
    model, fast, x = pair(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for one in (model, fast):
            nn.utils.weight_norm(one[0].fc)
    assert compared(fast, model, x) == Seen(WORKS)
    text = refusal(lambda: normswap.optimize(model, x))
    assert compared(optimized(model, x, inplace=True), fast, x) == Seen(WORKS)
    return Seen(IN_ORDER, f"refused: {text.rpartition('; ')[2]}")


@row("torch.ao.quantization.quantize_dynamic", "optimize, quantize_dynamic(int8)", devices=CPU)
def quantized_dynamically(device: str) -> Seen:
    model, fast, x = pair(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        quantized = [torch.ao.quantization.quantize_dynamic(one, {nn.Linear}, torch.qint8) for one in (model, fast)]
    seen = compared(quantized[1], quantized[0], x)
    assert compared(optimized(quantized[0], x), quantized[1], x) == seen
    return seen


# --- several processes --------------------------------------------------------------------------------------------


@contextmanager
def group(device: str) -> Iterator[DeviceMesh]:
    """A process group of this one process, and the mesh of its devices."""
    backend = {"cuda": "nccl", "cpu": "gloo"}[device]
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield init_device_mesh(device, (1,))
        finally:
            dist.destroy_process_group()


@row("DistributedDataParallel", "optimize, DistributedDataParallel")
def ddp(device: str) -> Seen:
    model, fast, x = pair(device, train=True)
    with group(device):
        wrapped = [DistributedDataParallel(one) for one in (model, fast)]
        same_step(wrapped[1], wrapped[0], x)
        return compared(wrapped[1], model, x)


@row("DataParallel", "optimize, DataParallel")
def data_parallel(device: str) -> Seen:
    model, fast, x = pair(device, train=True)
    same_step(DataParallel(fast), model, x)
    return compared(DataParallel(fast), model, x)


@row(
    "fully_shard (FSDP2)",
    "optimize, fully_shard",
    IN_ORDER,
    "left alone: call optimize() before fully_shard or parallelize_module",
)
def fsdp(device: str) -> Seen:
    model, fast, x = pair(device)
    with group(device) as mesh:
        expected = model(x)
        for one in (fast, model):
            for part in (*one, one):
                fully_shard(part, mesh=mesh)
        same(fast(x), expected)
        assert who_runs(lambda: fast(x)) == WORKS
        return Seen(IN_ORDER, left_alone(model, x))


@row("parallelize_module (DTensor)", "optimize, parallelize_module")
def tensor_parallel(device: str) -> Seen:
    model, fast, x = pair(device)
    with group(device) as mesh:
        expected = model(x)
        plan = {"norm": SequenceParallel(use_local_output=True), "fc": ColwiseParallel(output_layouts=Replicate())}
        for block in fast:
            parallelize_module(block, mesh, plan)
        same(fast(x), expected)
        return Seen(who_runs(lambda: fast(x)))


@row("torch.distributed.pipelining", "optimize, pipeline", ORIGINAL)
def pipelined(device: str) -> Seen:
    model, fast, x = pair(device)
    with group(device):
        pipe = pipelining.pipeline(fast, (x,), split_spec={"1": pipelining.SplitPoint.BEGINNING})
        assert pipe.num_stages == 2
        return compared(lambda x: pipe(x)[0], model, x)


@row("torch.distributed.pipelining", "optimize, PipelineStage of a part")
def pipeline_stage(device: str) -> Seen:
    model, fast, x = pair(device)
    with group(device):
        stage = pipelining.PipelineStage(fast, 0, 1, torch.device(device))
        schedule = pipelining.ScheduleGPipe(stage, 2)
        same(schedule.step(x), model(x))
        return Seen(who_runs(lambda: fast(x)))


# --- copies -------------------------------------------------------------------------------------------------------


@row("copy.deepcopy", "optimize, deepcopy")
def deep_copied(device: str) -> Seen:
    model, fast, x = pair(device)
    return compared(copy.deepcopy(fast), model, x)


@row("pickle", "optimize, pickle")
def pickled(device: str) -> Seen:
    model, fast, x = pair(device)
    return compared(pickle.loads(pickle.dumps(fast)), model, x)


@row("torch.save of a whole model", "optimize, save, load(weights_only=False)")
def saved(device: str) -> Seen:
    model, fast, x = pair(device)
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    return compared(torch.load(file, weights_only=False), model, x)


@row("state_dict", "optimize, state_dict, load_state_dict of the original")
def state_dict(device: str) -> Seen:
    model, fast, x = pair(device)
    other = model_on(device)
    other.load_state_dict(fast.state_dict())
    assert list(fast.state_dict()) == list(model.state_dict())
    return compared(fast, other, x)


def _answer(fast: nn.Module, x: Tensor, answers: Any) -> None:
    answers.put((fast(x).tolist(), who_runs(lambda: fast(x))))


@row("torch.multiprocessing, spawn", "optimize, spawn", devices=CPU)
def spawned(device: str) -> Seen:
    model, fast, x = pair(device)
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=_answer, args=(fast, x, answers))
    process.start()
    out, seen = answers.get()
    process.join(60)
    same(torch.tensor(out), model(x))
    return Seen(seen)
