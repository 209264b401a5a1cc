"""Compiling the libraries: what is kept, what is compiled again, what is left behind, and by how many processes."""

from __future__ import annotations

import importlib.metadata
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from normswap import builder, native, nodes_library

needs_nvcc = pytest.mark.usefixtures("nvcc")


def quiet(line: str) -> None:
    """A progress callback that tells nobody."""


LOAD = """
import ctypes, sys, torch
torch.ops.load_library(sys.argv[1])
print(torch.ops.normswap_tiny.twice.default._schema, ctypes.CDLL(sys.argv[1]).normswap_answer())
"""


def running(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@needs_nvcc
def test_built_library_loads_and_is_kept(tiny_sources: Path, cache: Path) -> None:
    told: list[str] = []
    path = native.build(["90", "80"], progress=told.append, sources=tiny_sources)
    assert path == cache / builder.digest(tiny_sources, ("80", "90"), builder.find_toolkit().cuda) / builder.LIBRARY
    assert len(told) == 1 and told[0].startswith("compiling the kernels for sm_80, sm_90 with nvcc ")
    metadata = builder.read_metadata(path.parent)
    assert metadata.digest == path.parent.name and metadata.arch == ("80", "90")
    assert metadata.host_compiler and metadata.nvcc
    assert sorted(p.name for p in path.parent.iterdir()) == [builder.METADATA, builder.LIBRARY]
    child = running(LOAD, path)
    assert child.communicate(timeout=120)[0].strip() == "normswap_tiny::twice(Tensor(a!) x) -> () 42"
    before = path.stat().st_mtime_ns
    assert native.build(["80", "90"], progress=told.append, sources=tiny_sources) == path
    assert len(told) == 1 and path.stat().st_mtime_ns == before


@needs_nvcc
def test_library_needs_only_libtorch_and_the_system(tiny_sources: Path, tmp_path: Path) -> None:
    path = native.build(["80"], tmp_path / "out", quiet, tiny_sources)
    dynamic = subprocess.run(["readelf", "-d", str(path)], text=True, capture_output=True, check=True).stdout
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert "libtorch.so" in needed
    assert needed <= {"libtorch.so", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libdl.so.2"} | {
        name for name in needed if name.startswith(("ld-linux", "librt.", "libpthread."))
    }


@needs_nvcc
@pytest.mark.parametrize("name", ["twice.cu", "register.cpp"])
def test_compiler_error_is_shown_and_leaves_nothing(tiny_sources: Path, cache: Path, tmp_path: Path, name: str) -> None:
    (tiny_sources / name).write_text((tiny_sources / name).read_text() + "int broken = undefined_name;\n")
    for out in (None, tmp_path / "out"):
        with pytest.raises(native.BuildError) as error:
            native.build(["90"], out, quiet, tiny_sources)
        assert f"{tiny_sources}/{name}" in str(error.value)  # the person's own file, not a copy of it
        assert "undefined_name" in str(error.value) and "error" in str(error.value)
    assert [p.name for p in cache.iterdir() if p.suffix != ".lock"] == ["build"]
    assert list((tmp_path / "out").iterdir()) == []


@needs_nvcc
def test_architecture_unknown_to_nvcc_is_its_error(tiny_sources: Path, cache: Path) -> None:
    with pytest.raises(native.BuildError, match="Unsupported gpu architecture 'compute_999'"):
        native.build(["999"], progress=quiet, sources=tiny_sources)


BUILD = """
import sys
from pathlib import Path
from normswap import native
print(native.build(["90"], sources=Path(sys.argv[1])))
"""


@needs_nvcc
def test_two_processes_compile_once(tiny_sources: Path, cache: Path) -> None:
    children = [running(BUILD, tiny_sources) for _ in range(2)]
    outputs = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert sum("compiling" in stderr for _, stderr in outputs) == 1


@needs_nvcc
def test_a_second_build_compiles_only_what_changed(
    tiny_sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def objects() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in cache.glob("build/*/objects/*.o")}

    first_path, first = native.build(["90"], progress=quiet, sources=tiny_sources), objects()
    with (tiny_sources / "twice.cu").open("a") as kernel:
        kernel.write("// changed\n")
    second_path, second = native.build(["90"], progress=quiet, sources=tiny_sources), objects()
    assert first_path != second_path and {name for name in first if first[name] != second[name]} == {"sources.cu.o"}

    compile_library = builder.compile_library

    def edited_meanwhile(*args: Any, **kwargs: Any) -> Path:
        with (tiny_sources / "twice.cu").open("a") as kernel:
            kernel.write("// and again\n")
        return compile_library(*args, **kwargs)

    monkeypatch.setattr(builder, "compile_library", edited_meanwhile)
    (tiny_sources / "new.h").write_text("")
    with pytest.raises(native.BuildError, match="was changed while it was being compiled"):
        native.build(["90"], progress=quiet, sources=tiny_sources)


HOLD = """
import sys, time
from filelock import FileLock
lock = FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


@needs_nvcc
def test_what_a_killed_build_leaves_is_no_obstacle(tiny_sources: Path, cache: Path) -> None:
    entry = cache / builder.digest(tiny_sources, ("90",), builder.find_toolkit().cuda)
    unfinished = entry.with_suffix(".unfinished")
    unfinished.mkdir(parents=True)
    (unfinished / builder.LIBRARY).write_bytes(b"half")
    entry.mkdir()
    holder = running(HOLD, entry.with_suffix(".lock"))
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert entry.with_suffix(".lock").exists()
    started = time.monotonic()
    path = native.build(["90"], progress=quiet, sources=tiny_sources)
    assert time.monotonic() - started < 100
    assert path.parent == entry and path.stat().st_size > 1000 and not unfinished.exists()


@needs_nvcc
def test_waiting_for_another_build_ends(tiny_sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LOCK_SECONDS", 0.2)
    cache.mkdir(parents=True)
    lock = cache / f"{builder.digest(tiny_sources, ('90',), builder.find_toolkit().cuda)}.lock"
    holder = running(HOLD, lock)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(native.BuildError, match=f"another process has been compiling.*{lock.name}"):
            native.build(["90"], progress=quiet, sources=tiny_sources)
    finally:
        holder.kill()
        holder.wait()


def test_what_only_compiles_does_without_pytorch() -> None:
    code = "import sys; import normswap.native, normswap.nodes_library; sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", f"import sys; sys.argv[0] = 'normswap'; {code}"]
    assert subprocess.run(command, timeout=100).returncode == 0


def test_the_nodes_need_no_metadata_of_pytorch(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", lambda name: pytest.fail(f"asked for {name}"))
    monkeypatch.setattr(builder, "compile_nodes", lambda source, out: out / "made")
    told = list[str]()
    assert nodes_library.build(progress=told.append) == cache / "nodes" / "made"
    assert told == [f"compiling autograd's nodes for torch {torch.__version__} ..."]
