"""The library of autograd's nodes: its name, where it is found, and what is done where it cannot be compiled."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from test_nodes import needs_compiler

import normswap
from normswap import builder, native, nodes, nodes_library
from normswap.arguments import Example
from normswap.builder import BuildError
from normswap.ops import dispatch

pytestmark = needs_compiler


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache where there is none yet, in a process that has loaded none."""
    monkeypatch.setattr(native, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(native, "PACKAGE", tmp_path / "package")
    for name, value in (("_loaded", None), ("_compiled_in_vain", False)):
        monkeypatch.setattr(nodes, name, value)
    monkeypatch.setattr(dispatch, "_by_node", set())
    monkeypatch.delenv("NORMSWAP_BUILD", raising=False)
    return tmp_path / "nodes"


def forged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> Path:
    """Other sources."""
    source = tmp_path / "nodes.cpp"
    source.write_text(text)
    monkeypatch.setattr(nodes_library, "SOURCE", source)
    return source


def test_a_name_says_torch_and_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, name, original = (
        nodes_library.SOURCE.parent,
        builder.nodes_name(nodes_library.SOURCE),
        nodes_library.SOURCE.read_text(),
    )
    copied, header = tmp_path / "normswap/nodes", "csrc/abi/calls.h"
    shutil.copytree(folder, copied)
    (tmp_path / header).parent.mkdir(parents=True)
    shutil.copy(native.source_dir().parent / header, tmp_path / header)
    changed = forged(monkeypatch, copied, original + "//\n")
    assert builder.nodes_name(changed) != name
    changed.write_text(original)
    assert builder.nodes_name(changed) == name
    for one, kept in (
        (copied / "python.h", folder / "python.h"),
        (tmp_path / header, native.source_dir().parent / header),
    ):
        one.write_text("")
        assert builder.nodes_name(changed) != name
        shutil.copy(kept, one)
    monkeypatch.setattr(sysconfig, "get_config_var", {"SOABI": "cpython-399"}.get)
    assert builder.nodes_name(changed) != name
    monkeypatch.undo()
    (tmp_path / "version.py").write_text("__version__ = '2.99.0'\n")
    monkeypatch.setattr(builder, "torch_folder", lambda: tmp_path)
    assert builder.nodes_name(changed) != name


def test_what_does_not_compile_says_why_and_leaves_nothing(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not tried again in the same process."""
    forged(monkeypatch, tmp_path, "int main() { return undeclared; }\n")
    with pytest.raises(BuildError, match="undeclared"):
        nodes_library.build(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    nodes.load(compiling=True)
    assert "undeclared" in nodes.status() and "undeclared" in capsys.readouterr().err
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("compiled again"))
    nodes.load(compiling=True)
    assert dispatch._by_node == set()


def test_one_in_the_cache_is_taken(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("compiled"))
    assert nodes_library.find() is None
    elsewhere.mkdir()
    (elsewhere / builder.nodes_name(nodes_library.SOURCE)).write_text("")
    assert nodes_library.build() == nodes_library.find() == elsewhere / builder.nodes_name(nodes_library.SOURCE)


@pytest.mark.parametrize("there", (False, True))
def test_without_one_that_loads_the_functions_serve(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, there: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong is told, not raised; nothing is compiled unless it may be."""
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("compiled"))
    if there:
        elsewhere.mkdir()
        (elsewhere / builder.nodes_name(nodes_library.SOURCE)).write_text("no library")
    nodes.load()
    monkeypatch.setenv("NORMSWAP_BUILD", "never")
    nodes.load(compiling=True)
    assert dispatch._by_node == set()
    assert ("not compiled yet" in nodes.status()) != there
    assert ("without autograd's nodes" in capsys.readouterr().err) == there


@pytest.mark.parametrize("training", (False, True))
def test_a_model_on_cuda_has_it_compiled(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(nodes, "load", lambda *, compiling=False: asked.append(compiling))
    monkeypatch.setattr(native, "load", lambda *, build=False: native.NativeStatus(True, "", None, "", ""))
    monkeypatch.setattr(Example, "devices", {torch.device("cuda")})
    model = torch.nn.Sequential(torch.nn.LayerNorm(8)).train(training)
    normswap.apply(model, normswap.plan(model))
    assert asked == [True]
