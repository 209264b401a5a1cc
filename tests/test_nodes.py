"""Autograd's nodes in C++, compiled here, over stand-ins for the native ops: what the autograd Functions are asked in
test_row_backward.py and test_group_backward.py, they are asked too."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import group_norm_stand_in
import pytest
import test_row_backward
import torch
import torch.nn.functional as F
from test_row_backward import (
    StandIns,
    test_double_backward_is_the_formula_s,
    test_no_more_is_saved_than_pytorch_saves,
    test_only_gradients_asked_for_are_computed,
    test_options_in_one_native_call,
    test_the_gradient_of_a_sum_is_rounded_once,
)
from torch import Tensor

from normswap import native, nodes
from normswap.activation import Activation
from normswap.builder import BuildError
from normswap.nodes import formulas
from normswap.ops import dispatch

__all__ = [
    "test_double_backward_is_the_formula_s",
    "test_no_more_is_saved_than_pytorch_saves",
    "test_only_gradients_asked_for_are_computed",
    "test_options_in_one_native_call",
    "test_the_gradient_of_a_sum_is_rounded_once",
]
ROWS = ("layer_norm", "rms_norm")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler to compile the nodes with")


def declare() -> torch.library.Library:
    """The native ops' schemas, where no library of ours brings them."""
    library = torch.library.Library("normswap", "FRAGMENT")
    text = re.sub(r'"\s*\n\s*"', "", (Path(__file__).parent.parent / "csrc/register.cpp").read_text())
    for schema in re.findall(r"m\.def\(\s*\"(.*?)\"\s*\);", text):
        library.define(schema)
    return library


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.library.Library]:
    """The library, loaded; where the native ops of CPU tensors are put."""
    path = nodes.build(tmp_path_factory.mktemp("nodes"))
    declared = None if native.load().available else declare()
    formulas.register()
    torch.ops.load_library(str(path))
    library = torch.library.Library("normswap", "IMPL")
    yield library
    library._destroy()
    del declared


@pytest.fixture
def stand_ins(compiled: torch.library.Library, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """As in test_row_backward.py, under the nodes; those of l1_norm under its Function."""
    made, implemented = StandIns(), _implemented(compiled)
    for name in ("recorded", "with_options_recorded", "backward"):
        for kind in ROWS:
            implemented[f"{kind}_{name}"] = made(f"{kind}_{name}")
    by_node = {name: getattr(torch.ops.normswap, f"{name}_or_none").default for name in nodes.NORMS}

    def recorded(name: str, *tensors: Tensor | None, autocast: bool = False) -> Any:
        return {**dispatch._recording, **by_node}[name] if dispatch.needs_grad(*tensors) else None

    monkeypatch.setattr("normswap.ops.options.native_serves", lambda *tensors: True)
    for kind in test_row_backward.KINDS:
        module = sys.modules[f"normswap.ops.{kind}"]
        monkeypatch.setattr(module, "native_op", made)
        monkeypatch.setattr(module, "native_serves", lambda *tensors, **elements: True)
        monkeypatch.setattr(module, "direct", recorded)
    return made


_ops: dict[str, Callable[..., Any]] = {}


def _implemented(library: torch.library.Library) -> dict[str, Callable[..., Any]]:
    """What the dispatcher calls, by name: registered once, to be filled anew."""
    if not _ops:
        names = [f"{kind}{rest}" for kind in ROWS for rest in ("_recorded", "_with_options_recorded", "_backward")]
        for name in (*names, "group_norm_recorded", "group_norm_backward_or_none"):
            _ops[name] = len
            library.impl(name, lambda *given, name=name: _as_returned(_ops[name](*given)), "CPU")
    return _ops


def _as_returned(found: Any) -> Any:
    return tuple(t.contiguous() if isinstance(t, Tensor) else t for t in found)


pytestmark = needs_compiler


@pytest.mark.parametrize("name", ("none", "silu"))
@pytest.mark.parametrize("declines", (False, True))
@pytest.mark.parametrize("asked", (1, 6, 9, 15))
def test_every_gradient_of_group_norm(
    name: str, declines: bool, asked: int, compiled: torch.library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    group_norm_stand_in.install(monkeypatch)  # for what the kernels decline
    implemented = _implemented(compiled)
    implemented["group_norm_recorded"] = group_norm_stand_in.recorded
    implemented["group_norm_backward_or_none"] = lambda *given: (
        (None,) * 4 if declines else group_norm_stand_in.gradients(*given)
    )
    given = [torch.randn(2, 8, 3, 3), torch.randn(8), torch.randn(8), torch.randn(2, 8, 3, 3)]
    for i, tensor in enumerate(given):
        tensor.requires_grad_(bool(asked >> i & 1))
    x, weight, bias, residual = given
    activation = Activation(name)
    op = torch.ops.normswap.group_norm_or_none.default
    out = op(x, 4, weight, bias, 1e-5, activation.code, 0.0, 0.0, residual, False)
    expected = activation(F.group_norm(x, 4, weight, bias) + residual)
    wanted, dy = [t for t in given if t.requires_grad], torch.randn(2, 8, 3, 3)
    for create in (False, True):
        pairs = (torch.autograd.grad(y, wanted, dy, retain_graph=True, create_graph=create) for y in (out, expected))
        for ours, theirs in zip(*pairs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_node_holds_what_is_saved_as_pytorch_s_do(stand_ins: StandIns) -> None:
    """Freed after a backward, and refused where it was written to since."""
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    op = torch.ops.normswap.layer_norm_or_none.default
    out = op(x, 1, weight, None, 1e-5)
    assert out.grad_fn is not None and "RowNorm" in out.grad_fn.name()
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    out = op(x, 1, weight, None, 1e-5)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_declines_leaves_no_node(compiled: torch.library.Library) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    _implemented(compiled)["layer_norm_recorded"] = lambda *given: (None, None)
    _implemented(compiled)["rms_norm_with_options_recorded"] = lambda *given: (None, None, None)
    assert torch.ops.normswap.layer_norm_or_none(x, 1, None, None, 1e-5) is None
    options = None, None, None, 1, 0.0, 0.0
    found = torch.ops.normswap.rms_norm_with_options_or_none(x, 1, None, 1e-5, 0.0, False, *options)
    assert found == (None, None)


def test_gradients_under_checkpointing(stand_ins: StandIns) -> None:
    from torch.utils.checkpoint import checkpoint

    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    run = lambda x: torch.ops.normswap.rms_norm_or_none(x, 1, weight, 1e-6, 0.0, False)  # noqa: E731
    grads = [torch.autograd.grad(y.sum(), (x, weight)) for y in (checkpoint(run, x, use_reentrant=False), run(x))]
    for ours, theirs in zip(*grads, strict=True):
        assert torch.equal(ours, theirs)


# --- the library ------------------------------------------------------------------------------------------------------


def test_a_name_says_torch_and_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = nodes.library_name()
    assert torch.__version__ in name
    changed = tmp_path / "nodes.cpp"
    changed.write_text(nodes.SOURCE.read_text() + "//\n")
    monkeypatch.setattr(nodes, "SOURCE", changed)
    assert nodes.library_name() != name
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert "2.99.0" in nodes.library_name()


def test_what_does_not_compile_says_why_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "nodes.cpp"
    broken.write_text("int main() { return undeclared; }\n")
    monkeypatch.setattr(nodes, "SOURCE", broken)
    with pytest.raises(BuildError, match="undeclared"):
        nodes.build(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_one_in_the_cache_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(native, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("compiled"))
    assert nodes.find() is None
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / nodes.library_name()).write_text("")
    assert nodes.build() == nodes.find() == tmp_path / "nodes" / nodes.library_name()


@pytest.mark.parametrize("there", (False, True))
def test_without_one_that_loads_the_functions_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: bool
) -> None:
    """What is wrong is told, not raised."""
    broken = tmp_path / "nodes.so"
    broken.write_text("no library")
    monkeypatch.setattr(nodes, "find", lambda: broken if there else None)
    monkeypatch.setattr(nodes, "_reason", "")
    monkeypatch.setattr(dispatch, "_by_node", set())
    nodes.load()
    assert dispatch._by_node == set()
    assert "normswap build --nodes" in nodes.status()
    assert ("cannot be loaded" in nodes.status()) == there
