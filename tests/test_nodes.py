"""Autograd's nodes in C++, compiled here, over stand-ins for the native ops: what the autograd Functions are asked in
test_row_backward.py and test_group_backward.py, they are asked too."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import batch_norm_stand_in
import group_norm_stand_in
import pytest
import test_row_backward
import torch
import torch.nn.functional as F
from launch_stand_in import OF_NORMS, norms_by
from test_row_backward import (
    StandIns,
    test_a_backward_under_vmap_is_the_formula_s,
    test_a_norm_of_float32_rounded_at_once_has_the_gradients_of_the_cast,
    test_a_scale_may_be_an_inference_tensor,
    test_double_backward_is_the_formula_s,
    test_no_more_is_saved_than_pytorch_saves,
    test_only_gradients_asked_for_are_computed,
    test_options_in_one_native_call,
    test_the_gradient_of_a_sum_is_rounded_once,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from normswap import native, nodes, nodes_library
from normswap.activation import CODES, Activation
from normswap.ops import at_once, dispatch

__all__ = [
    "test_a_backward_under_vmap_is_the_formula_s",
    "test_a_norm_of_float32_rounded_at_once_has_the_gradients_of_the_cast",
    "test_a_scale_may_be_an_inference_tensor",
    "test_double_backward_is_the_formula_s",
    "test_no_more_is_saved_than_pytorch_saves",
    "test_only_gradients_asked_for_are_computed",
    "test_options_in_one_native_call",
    "test_the_gradient_of_a_sum_is_rounded_once",
]
ROWS = ("layer_norm", "rms_norm")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler to compile the nodes with")


@functools.cache
def declare() -> torch.library.Library:
    """The native ops' schemas, where no library of ours brings them: for good, as C++ keeps hold of them."""
    library = torch.library.Library("normswap", "FRAGMENT")
    text = re.sub(r'"\s*\n\s*"', "", (Path(__file__).parent.parent / "csrc/abi/register.cpp").read_text())
    for schema in re.findall(r"m\.def\(\s*\"(.*?)\"\s*\);", text):
        library.define(schema)
    return library


@functools.cache
def compiled_nodes() -> Path:
    """The library that a user has, else one of our own."""
    return nodes_library.find() or nodes_library.build(Path(tempfile.mkdtemp(prefix="nodes-")))


@pytest.fixture(scope="module")
def compiled() -> Iterator[torch.library.Library]:
    """The library, loaded; where the native ops of CPU tensors are put."""
    if not native.load().available:
        declare()
    nodes.register_formula()
    if nodes.status().startswith("none"):
        torch.ops.load_library(str(compiled_nodes()))
    implemented = torch.library.Library("normswap", "IMPL")
    yield implemented
    implemented._destroy()


@pytest.fixture
def stand_ins(compiled: torch.library.Library, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """As in test_row_backward.py, under the nodes; those of l1_norm under its Function."""
    made, implemented = StandIns(), _implemented(compiled)
    for name in ("recorded", "backward"):
        for kind in ROWS:
            implemented[f"{kind}_{name}"] = made(f"{kind}_{name}")
    by_node = {name: getattr(torch.ops.normswap, f"{name}_or_none").default for name in nodes.NORMS}

    def recorded(name: str, *tensors: Tensor | None, autocast: bool = False) -> Any:
        return {**dispatch._recording, **by_node}[name] if dispatch.needs_grad(*tensors) else None

    monkeypatch.setattr(dispatch, "_native", SimpleNamespace(get=made))
    for name in ("rows", "l1_norm"):
        monkeypatch.setattr(sys.modules[f"normswap.ops.{name}"], "native_serves", lambda *tensors, **elements: True)
    for kind in test_row_backward.KINDS:
        monkeypatch.setattr(sys.modules[f"normswap.ops.{kind}"], "direct", recorded)
    return made


_ops: dict[str, Callable[..., Any]] = {}


def _implemented(library: torch.library.Library) -> dict[str, Callable[..., Any]]:
    """What the dispatcher calls, by name: registered once, to be filled anew."""
    if not _ops:
        names = [f"{kind}{rest}" for kind in ROWS for rest in ("_recorded", "_backward")]
        groups, batch = (
            ("group_norm_recorded", "group_norm_backward_or_none"),
            ("batch_norm_recorded", "batch_norm_backward"),
        )
        for name in (*names, *groups, *batch):
            _ops[name] = len
            library.impl(name, lambda *given, name=name: _as_returned(_called(_ops[name], given)), "CPU")
    return _ops


def _called(function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """A stand-in computes by autograd, which a kernel, called below it, does without."""
    include, nothing = torch._C._dispatch_tls_local_include_set(), torch._C.DispatchKeySet.from_raw_repr(0)
    with torch._C._ForceDispatchKeyGuard(include, nothing), torch.no_grad():
        return function(*given)


def _as_returned(found: Any) -> Any:
    return tuple(t.contiguous() if isinstance(t, Tensor) else t for t in found)


pytestmark = needs_compiler
LAUNCHED: list[str] = []
"""What was asked of the launchers, past the dispatcher."""


@pytest.fixture(autouse=True, params=("dispatched", "launched"))
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How the nodes come to the kernels: by the native ops, or past the dispatcher."""

    def launch(name: str, *given: Any) -> Any:
        LAUNCHED.append(name)
        return _as_returned(_called(_ops[name], given))

    LAUNCHED.clear()
    if request.param == "launched":
        norms_by(launch)
        nodes.call_at_once(compiled_nodes(), "cpu", OF_NORMS)
    yield request.param
    norms_by(None)
    nodes.call_at_once(compiled_nodes(), "cpu")
    at_once.serve(None)


@pytest.mark.parametrize("name", ("none", "relu", "silu"))
@pytest.mark.parametrize("declines", (False, True))
@pytest.mark.parametrize("asked", (1, 6, 8, 9, 15))
def test_every_gradient_of_group_norm(
    name: str, declines: bool, asked: int, way: str, compiled: torch.library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    group_norm_stand_in.install(monkeypatch)  # for what lies otherwise
    implemented = _implemented(compiled)
    implemented["group_norm_recorded"] = group_norm_stand_in.group_norm_recorded
    implemented["group_norm_backward_or_none"] = lambda *given: (
        (None,) * 4 if declines else group_norm_stand_in.group_norm_backward_or_none(*given)
    )
    given = [torch.randn(2, 8, 3, 3), torch.randn(8), torch.randn(8), torch.randn(2, 8, 3, 3)]
    for i, tensor in enumerate(given):
        tensor.requires_grad_(bool(asked >> i & 1))
    x, weight, bias, residual = given
    activation = Activation(name)
    op, dy = torch.ops.normswap.group_norm_or_none.default, torch.randn(2, 8, 3, 3)
    for b in (bias, None):
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            out = op(x, 4, weight, b, 1e-5, activation.code, 0.0, 0.0, residual, False)
        if asked == 8 and name != "none":  # PyTorch's ops keep less
            assert out is None
            continue
        keeps = {"none": asked != 8, "relu": True, "silu": True}[name]
        assert bool(kept) is keeps and any(t.data_ptr() == residual.data_ptr() for t in kept) is (name == "silu")
        expected = activation(F.group_norm(x, 4, weight, b) + residual)
        wanted = [t for t in (x, weight, b, residual) if t is not None and t.requires_grad]
        for create in (False, True):
            pairs = (
                torch.autograd.grad(y, wanted, dy, retain_graph=True, create_graph=create) for y in (out, expected)
            )
            for ours, theirs in zip(*pairs, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    if asked == 8 and name != "none":
        return
    expected_calls = ["group_norm_recorded", *(["group_norm_backward_or_none"] if keeps else [])] * 2
    assert (expected_calls if way == "launched" else []) == LAUNCHED


def packed(t: Tensor) -> Tensor:
    """As ``torch.autograd.graph.save_on_cpu(pin_memory=True)`` does it: its layout is lost."""
    return torch.empty(t.size(), dtype=t.dtype).copy_(t)


@pytest.mark.parametrize("recording", ("nodes", "Functions"))
@pytest.mark.parametrize("create", (False, True))
def test_signs_are_those_of_the_layout_that_the_input_had(
    create: bool, recording: str, compiled: torch.library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    implemented = _implemented(compiled)
    implemented["batch_norm_recorded"] = batch_norm_stand_in.batch_norm_recorded
    implemented["batch_norm_backward"] = batch_norm_stand_in.batch_norm_backward
    if recording == "Functions":
        batch_norm_stand_in.install(monkeypatch)
    op = {"nodes": torch.ops.normswap.batch_norm_or_none.default, "Functions": dispatch._recording["batch_norm"]}
    x, residual, dy = (torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last) for _ in range(3))
    given, found = [x, residual, *torch.randn(2, 8)], []
    given = [t.detach().requires_grad_() for t in given]
    x, residual, weight, bias = given
    for ours in (True, False):
        with torch.autograd.graph.saved_tensors_hooks(packed, lambda t: t):
            if ours:
                numbers = True, 0.1, 1e-5, residual, CODES["relu"], 0.0, 0.0
                out = op[recording](x, None, None, None, weight, bias, *numbers)
            else:
                out = F.relu(F.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5) + residual)
        found.append(torch.autograd.grad(out, given, dy, create_graph=create))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_row_is_launched_both_ways(stand_ins: StandIns, way: str) -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    out = torch.ops.normswap.rms_norm_or_none.default(x, 1, weight, 1e-5, 0.0, False)[0]
    out.backward(torch.ones_like(out))
    expected = ["rms_norm_recorded", "rms_norm_backward"]
    assert stand_ins.called == expected and (expected if way == "launched" else []) == LAUNCHED


@pytest.mark.parametrize("asked", (1, 2, 3))
@pytest.mark.parametrize("name", ("layer_norm", "rms_norm"))
@pytest.mark.parametrize("low", (torch.float16, torch.bfloat16))
def test_a_residual_of_16_bits_has_a_gradient_of_its_own(
    low: torch.dtype, name: str, asked: int, stand_ins: StandIns, way: str
) -> None:
    weight = torch.randn(8, requires_grad=True)
    x = torch.randn(3, 8, requires_grad=bool(asked & 1))
    residual = torch.randn(3, 8, dtype=low, requires_grad=bool(asked & 2))
    options = residual, None, None, 0, 0.0, 0.0
    of_rows = (x, 1, weight, None, 1e-5) if name == "layer_norm" else (x, 1, weight, 1e-5, 0.0, False)
    found = []
    for ours in (True, False):
        if ours:
            out, total = getattr(torch.ops.normswap, f"{name}_or_none").default(*of_rows, *options)
        else:
            total = x + residual
            out = getattr(F, name)(total, (8,), weight, eps=1e-5)
        wanted = [t for t in (x, residual, weight) if t.requires_grad]
        found.append(torch.autograd.grad((out.sin() + total.square()).sum(), wanted))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert len(LAUNCHED) == (2 if way == "launched" else 0)


class Told(TorchDispatchMode):
    """A mode that is told of every op."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += [func._opname] if func.namespace == "normswap" else []
        return func(*args, **(kwargs or {}))


def _of_groups(x: Tensor) -> Tensor:
    return torch.ops.normswap.group_norm_or_none.default(x, 4, None, None, 1e-5, 0, 0.0, 0.0, None, False)


def test_a_mode_is_told_of_the_ops(compiled: torch.library.Library) -> None:
    implemented = _implemented(compiled)
    implemented["group_norm_recorded"] = group_norm_stand_in.group_norm_recorded
    implemented["group_norm_backward_or_none"] = group_norm_stand_in.group_norm_backward_or_none
    x = torch.randn(2, 8, 3, 3, requires_grad=True)
    with Told() as forward:
        out = _of_groups(x)
    with Told() as backward:
        out.backward(torch.ones_like(out))
    assert (forward.ops, backward.ops) == (["group_norm_recorded"], ["group_norm_backward_or_none"])
    assert LAUNCHED == []


@pytest.mark.parametrize("lies", ("negated", "elsewhere", "another layout"))
def test_what_cannot_be_read_as_it_lies_goes_by_the_op(lies: str, compiled: torch.library.Library) -> None:
    implemented = _implemented(compiled)
    implemented["group_norm_recorded"] = group_norm_stand_in.group_norm_recorded
    implemented["group_norm_backward_or_none"] = lambda *given: (None,) * 4  # then the formula's
    x, dy = torch.randn(2, 8, 3, 3, requires_grad=True), torch.randn(2, 8, 3, 3)
    dy = {
        "negated": torch._neg_view(dy),
        "elsewhere": torch.cat([dy.new_zeros(1), dy.flatten()])[1:].view_as(dy),
        "another layout": dy.to(memory_format=torch.channels_last),
    }[lies]
    (found,) = torch.autograd.grad(_of_groups(x), x, dy)
    (expected,) = torch.autograd.grad(F.group_norm(x, 4), x, dy.resolve_neg())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert lies != "negated" or "group_norm_backward_or_none" not in LAUNCHED


def test_a_residual_may_be_an_inference_tensor(compiled: torch.library.Library) -> None:
    implemented = _implemented(compiled)
    implemented["group_norm_recorded"] = group_norm_stand_in.group_norm_recorded
    implemented["group_norm_backward_or_none"] = group_norm_stand_in.group_norm_backward_or_none
    x, silu = torch.randn(2, 8, 3, 3, requires_grad=True), Activation("silu")
    with torch.inference_mode():
        residual = torch.randn(2, 8, 3, 3)
    op = torch.ops.normswap.group_norm_or_none.default
    found = [op(x, 4, None, None, 1e-5, silu.code, 0.0, 0.0, residual, False), silu(F.group_norm(x, 4) + residual)]
    torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), x) for out in found), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("name", ("none", "relu", "silu"))
@pytest.mark.parametrize("declines", (False, True))
def test_every_gradient_of_batch_norm(
    name: str, declines: bool, training: bool, way: str, compiled: torch.library.Library
) -> None:
    implemented = _implemented(compiled)
    implemented["batch_norm_recorded"] = batch_norm_stand_in.batch_norm_recorded
    implemented["batch_norm_backward"] = lambda *given: (
        (None,) * 6 if declines else batch_norm_stand_in.batch_norm_backward(*given)
    )
    given = [torch.randn(3, 8, 4).requires_grad_() for _ in range(2)]
    weight, bias, mean, var = torch.rand(4, 8) + 0.5
    given += [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    activation, dy, batches = Activation(name), torch.randn(3, 4, 8).transpose(1, 2), torch.tensor(2)
    for asked in (15, 1, 2, 4, 11):
        x, residual, weight, bias = (t.detach().requires_grad_(bool(asked >> i & 1)) for i, t in enumerate(given))
        tensors, numbers = (x, mean.clone(), var.clone(), batches, weight, bias), (activation.code, 0.0, 0.0)
        op = torch.ops.normswap.batch_norm_or_none.default
        out = op(*tensors, training, 0.1, 1e-5, residual, *numbers)
        if asked == 2 and name != "none":  # PyTorch's ops keep less
            assert out is None
            continue
        expected = activation(F.batch_norm(x, mean.clone(), var.clone(), weight, bias, training, 0.1, 1e-5) + residual)
        wanted = [t for t in (x, residual, weight, bias) if t.requires_grad]
        for create in (False, True):
            pairs = (
                torch.autograd.grad(y, wanted, dy, retain_graph=True, create_graph=create) for y in (out, expected)
            )
            for ours, theirs in zip(*pairs, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert int(batches) == (7 - (name != "none") if training else 2)
    assert {"batch_norm_recorded", "batch_norm_backward"} == {*LAUNCHED} if way == "launched" else LAUNCHED == []


def test_hooks_of_what_is_saved_and_of_the_node(stand_ins: StandIns) -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t.clone(), lambda t: t):
        out, _ = torch.ops.normswap.layer_norm_or_none(x, 1, weight, None, 1e-5)
    assert [t.shape for t in saved] == [x.shape, weight.shape, (2, 3)]
    out.grad_fn.register_hook(lambda grads, _: tuple(None if g is None else 2 * g for g in grads))
    expected = torch.autograd.grad(F.layer_norm(x, (8,), weight).sum(), (x, weight))
    for ours, theirs in zip(torch.autograd.grad(out.sum(), (x, weight)), expected, strict=True):
        torch.testing.assert_close(ours, 2 * theirs)


def test_compiled_autograd(stand_ins: StandIns) -> None:
    """It stands in the graph of a backward as one call."""
    from torch._dynamo import compiled_autograd

    found = []
    for compiling in (False, True):
        x, weight, residual = torch.ones(3, 8).cumsum(1).requires_grad_(), torch.full((8,), 2.0), torch.ones(3, 8)
        options = residual.requires_grad_(), None, None, 2, 0.0, 0.0
        weight.requires_grad_()
        out, total = torch.ops.normswap.rms_norm_or_none(x, 1, weight, 1e-5, 0.0, False, *options)
        compiler = compiled_autograd._enable(torch.compile(backend="eager")) if compiling else contextlib.nullcontext()
        with compiler:
            (out.square().sum() + total.sum()).backward()
        found.append((x.grad, weight.grad, residual.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_compiled_autograd_tells_norms_apart(stand_ins: StandIns) -> None:
    """The graph of one, compiled, is not taken for another's that has as many tensors and the same numbers."""
    from torch._dynamo import compiled_autograd

    x, weight = torch.randn(3, 8).add_(3).requires_grad_(), torch.rand(8).requires_grad_()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        torch.ops.normswap.layer_norm_or_none(x, 1, weight, None, 1e-5)[0].sin().sum().backward()
        x.grad = weight.grad = None
        torch.ops.normswap.rms_norm_or_none(x, 1, weight, 1e-5, 0.0, False)[0].sin().sum().backward()
    expected = torch.autograd.grad(F.rms_norm(x, (8,), weight, 1e-5).sin().sum(), (x, weight))
    for ours, theirs in zip((x.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_node_holds_what_is_saved_as_pytorch_s_do(stand_ins: StandIns) -> None:
    """Freed after a backward, and refused where it was written to since."""
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    op = torch.ops.normswap.layer_norm_or_none.default
    out, _ = op(x, 1, weight, None, 1e-5)
    assert out.grad_fn is not None and out.grad_fn.name() == "_LayerNormBackward"
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    out, _ = op(x, 1, weight, None, 1e-5)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_declines_leaves_no_node(compiled: torch.library.Library) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    for kind in ROWS:
        _implemented(compiled)[f"{kind}_recorded"] = lambda *given: (None, None, None)
    assert torch.ops.normswap.layer_norm_or_none(x, 1, None, None, 1e-5) == (None, None)
    options = None, None, None, 1, 0.0, 0.0
    assert torch.ops.normswap.rms_norm_or_none(x, 1, None, 1e-5, 0.0, False, *options) == (None, None)


def test_gradients_under_checkpointing(stand_ins: StandIns) -> None:
    from torch.utils.checkpoint import checkpoint

    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    run = lambda x: torch.ops.normswap.rms_norm_or_none(x, 1, weight, 1e-6, 0.0, False)[0]  # noqa: E731
    grads = [torch.autograd.grad(y.sum(), (x, weight)) for y in (checkpoint(run, x, use_reentrant=False), run(x))]
    for ours, theirs in zip(*grads, strict=True):
        assert torch.equal(ours, theirs)
