"""Finding and loading the library: what is taken, and what is refused and why."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from normswap import builder, native, nodes, nodes_library, pipeline
from normswap.environment import environment as environment_shown

needs_nvcc = pytest.mark.usefixtures("nvcc")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, tiny_sources: Path) -> Path:
    """native as in a new process: nothing loaded, an empty cache, a package folder that holds only the tiny sources.
    Loading is left out, since what is loaded cannot be unloaded; the paths loaded are listed in native.opened."""
    package = tmp_path / "package"
    shutil.copytree(tiny_sources, package / "csrc")
    opened: list[Path] = []
    for name, value in {"_status": None, "_available": False, "_compiled_in_vain": False, "_warned": False}.items():
        monkeypatch.setattr(native, name, value)
    monkeypatch.setattr(native, "_on_load", [])
    monkeypatch.setattr(native, "PACKAGE", package)
    monkeypatch.setattr(native, "opened", opened, raising=False)
    monkeypatch.setattr(native, "_open", lambda path: opened.append(path) or "")
    monkeypatch.delenv("NORMSWAP_BUILD", raising=False)
    return package


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, arch: str = "90", driver: int = 13000) -> None:
    monkeypatch.setattr(native, "_cuda_available", lambda: True)
    monkeypatch.setattr(native, "local_arch", lambda: (arch,))
    monkeypatch.setattr(native, "driver_cuda", lambda: driver)


def put_library(
    folder: Path, sources: Path, arch: tuple[str, ...] = ("90",), cuda: int = 13000, ptx: bool = False
) -> Path:
    """A file in the place of a library, with the metadata of one compiled from ``sources``."""
    folder.mkdir(parents=True)
    metadata = {"digest": builder.digest(sources, arch, cuda, ptx), "arch": arch, "cuda": cuda, "ptx": ptx}
    (folder / builder.METADATA).write_text(json.dumps({**metadata, "nvcc": "13.0", "host_compiler": "g++"}))
    (folder / builder.LIBRARY).write_bytes(b"not read in these tests")
    return folder / builder.LIBRARY


def cached(cache: Path, sources: Path, arch: tuple[str, ...] = ("90",), cuda: int = 13000, ptx: bool = False) -> Path:
    return put_library(cache / builder.digest(sources, arch, cuda, ptx), sources, arch, cuda, ptx)


# What is found


def test_package_comes_before_cache(fresh: Path, cache: Path) -> None:
    in_cache = cached(cache, fresh / "csrc")
    found = native.load()
    assert (found.available, found.origin, found.path, found.reason) == (True, "cache", in_cache, "")
    assert found.digest == in_cache.parent.name and native.available() and native.status() is found
    native._status = None
    in_package = put_library(fresh / "lib", fresh / "csrc", ("80", "120"))
    assert (native.load().origin, native.load().path) == ("package", in_package)
    assert native.opened == [in_cache, in_package]  # type: ignore[attr-defined]


def test_callbacks_run_once_when_the_library_is_there(fresh: Path, cache: Path) -> None:
    calls: list[str] = []
    native.on_load(lambda: calls.append("first"))  # which what comes later builds upon
    native.on_load(lambda: calls.append("before"))
    native.load()
    assert calls == [] and not native.available()
    cached(cache, fresh / "csrc")
    native._status = None
    native.load()
    native.load()
    assert calls == ["first", "before"]
    native.on_load(lambda: calls.append("after"))
    assert calls == ["first", "before", "after"]


def test_library_of_other_sources_is_refused(fresh: Path, cache: Path) -> None:
    in_package = put_library(fresh / "lib", fresh / "csrc")
    cached(cache, fresh / "csrc")
    (fresh / "csrc" / "twice.cu").write_text("// changed")
    found = native.load()
    assert not found.available and not native.available() and found.path is None and found.origin == "none"
    assert f"{in_package}: it was compiled from other sources than this package ships; run `normswap build`" in (
        found.reason
    )
    assert str(cache) not in found.reason  # what the cache still holds for older sources concerns nobody
    assert native.opened == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"digest": 1}', '{"arch": ["x"]}'])
def test_unreadable_metadata_is_refused(fresh: Path, content: str) -> None:
    library = put_library(fresh / "lib", fresh / "csrc")
    library.with_suffix(".json").write_text(content)
    found = native.load()
    assert not found.available and "libnormswap.json does not describe a library" in found.reason


def test_library_without_metadata_is_refused(fresh: Path) -> None:
    put_library(fresh / "lib", fresh / "csrc").with_suffix(".json").unlink()
    assert "libnormswap.json does not describe a library" in native.load().reason


@pytest.mark.parametrize(
    ("driver", "cuda", "runs"),
    [(13000, 13000, True), (13000, 13020, True), (13020, 12080, True), (12080, 13000, False)],
)
def test_driver_must_serve_the_runtime(
    fresh: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, driver: int, cuda: int, runs: bool
) -> None:
    pretend_gpu(monkeypatch, driver=driver)
    monkeypatch.setenv("NORMSWAP_BUILD", "never")
    cached(cache, fresh / "csrc", cuda=cuda)
    if runs:
        assert native.load().available
        return
    with pytest.warns(UserWarning, match="PyTorch's own ops serve"):
        found = native.load()
    assert not native.available()
    assert "the NVIDIA driver serves CUDA 12.8 and the library needs 13.0; update the driver" in found.reason


def test_old_driver_stops_the_compiler_too(fresh: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, driver=12040)
    monkeypatch.setattr(builder, "find_toolkit", lambda: builder.Toolkit(Path("nvcc"), Path(), Path(), 13000))
    monkeypatch.setattr(native, "build", lambda: pytest.fail("compiled for a driver that cannot run it"))
    with pytest.warns(UserWarning, match="driver serves CUDA 12.4"):
        native.load(build=True)


@pytest.mark.parametrize(
    ("arch", "ptx", "gpu", "driver", "runs"),
    [
        (("80", "90"), False, "90", 13000, True),
        (("80",), False, "86", 13000, True),  # machine code of 8.0 runs on 8.6
        (("86",), True, "80", 13000, False),
        (("90",), True, "80", 13000, False),
        (("80", "90"), True, "100", 13000, True),  # by the PTX of 9.0
        (("80", "90"), False, "100", 13000, False),  # of which there is none
        (("80", "90"), True, "100", 12080, False),  # which a driver older than the compiler does not understand
        (("80", "120"), True, "90", 13000, False),
        (("80",), True, "90", 13000, False),  # PTX that knows nothing of clusters
        (("80",), True, "120", 13000, True),
        (("80",), False, "120", 13000, False),
        (("100", "120"), True, "103", 13000, True),
    ],
)
def test_library_must_hold_code_for_the_gpu(
    fresh: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    arch: tuple[str, ...],
    ptx: bool,
    gpu: str,
    driver: int,
    runs: bool,
) -> None:
    pretend_gpu(monkeypatch, gpu, driver)
    cached(cache, fresh / "csrc", arch, 12090, ptx)
    if runs:
        assert native.load().available
        return
    with pytest.warns(UserWarning, match=f"compiled for sm_.* and a GPU here is sm_{gpu}"):
        native.load()


# What is compiled, and when


def test_never_means_never(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    monkeypatch.setenv("NORMSWAP_BUILD", "never")
    monkeypatch.setattr(native, "build", lambda: pytest.fail("compiled under NORMSWAP_BUILD=never"))
    with pytest.warns(UserWarning, match="NORMSWAP_BUILD=never forbids it; unset that, or run `normswap build`"):
        assert not native.load(build=True).available


def test_nothing_is_compiled_unless_asked_for_or_without_a_gpu(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "build", lambda: pytest.fail("compiled"))
    monkeypatch.setattr(native, "_cuda_available", lambda: False)
    assert "no GPU here to compile for" in native.load(build=True).reason
    pretend_gpu(monkeypatch)
    native._status = None
    with pytest.warns(UserWarning, match=r"not compiled yet; normswap\.optimize does it"):
        native.load(build=False)


def test_one_warning_and_one_failed_compilation_a_process(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(builder, "find_toolkit", lambda: builder.Toolkit(Path("nvcc"), Path(), Path(), 13000))
    tried: list[str] = []

    def failing() -> Path:
        tried.append("")
        raise builder.BuildError("twice.cu(3): error: a ';' is expected")

    monkeypatch.setattr(native, "build", failing)
    for _ in range(3):
        assert "twice.cu(3): error: a ';' is expected" in native.load(build=True).reason
    assert len(tried) == 1
    assert len([w for w in recwarn if "normswap" in str(w.message)]) == 1


def _example(device: str) -> Any:
    return SimpleNamespace(devices=[torch.device(device)])


def test_optimize_compiles_the_nodes_beside_the_kernels(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    both = threading.Barrier(2)
    loaded: list[bool] = []

    def kernels() -> Path:
        both.wait(10.0)  # until the other is under way
        return put_library(fresh / "lib", fresh / "csrc")

    monkeypatch.setattr(native, "build", kernels)
    monkeypatch.setattr(nodes_library, "build", lambda out=None, **_: both.wait(10.0))
    monkeypatch.setattr(nodes, "load", lambda compiling: loaded.append(compiling))
    monkeypatch.setattr(builder, "find_toolkit", lambda: builder.Toolkit(Path("nvcc"), Path(), Path(), 13000))
    pipeline._load(_example("cuda"))
    assert loaded == [True] and native.status().origin == "built"


def test_nothing_is_compiled_for_a_model_on_the_cpu(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    for one in (native, nodes_library):
        monkeypatch.setattr(one, "build", lambda *_, **__: pytest.fail("compiled"))
    with pytest.warns(UserWarning, match="not compiled yet"):
        pipeline._load(_example("cpu"))


@pytest.mark.parametrize("why", ("loaded", "never", "in vain"))
def test_nothing_would_be_compiled(fresh: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    pretend_gpu(monkeypatch)
    assert native.would_compile()
    if why == "loaded":
        put_library(fresh / "lib", fresh / "csrc")
        native._status = None
    elif why == "never":
        monkeypatch.setenv("NORMSWAP_BUILD", "never")
    else:
        monkeypatch.setattr(native, "_compiled_in_vain", True)
    assert not native.would_compile()


def test_a_library_that_comes_later_is_found_by_optimize(
    fresh: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch)
    with pytest.warns(UserWarning, match="not compiled yet"):
        native.load()
    cached(cache, fresh / "csrc")
    assert not native.load().available
    assert native.load(build=True).origin == "cache"


def test_without_a_gpu_architectures_must_be_named(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "local_arch", lambda: ())
    with pytest.raises(native.BuildError, match="no GPU here to compile for; name architectures: `normswap build"):
        native.build()


# Compiling for real


@needs_nvcc
def test_a_cache_that_cannot_be_written_is_a_reason(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_gpu(monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="PyTorch's own ops serve.*Not a directory"):
        assert not native.load(build=True).available


def test_who_has_no_home_has_no_cache(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(_: str) -> Path:
        raise RuntimeError("could not determine the home directory")

    pretend_gpu(monkeypatch)
    monkeypatch.setattr(native, "user_cache_path", homeless)
    with pytest.warns(UserWarning, match=r"could not determine the home directory\); set HOME or XDG_CACHE_HOME"):
        assert not native.load(build=True).available
    assert nodes_library.find() is None
    assert environment_shown()["cache"].endswith("set HOME or XDG_CACHE_HOME")
    put_library(fresh / "lib", fresh / "csrc")
    native._status = None
    assert native.load().origin == "package"


@needs_nvcc
def test_load_compiles_for_the_gpu_and_loads_that(fresh: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, "86")
    found = native.load(build=True)
    assert (found.origin, found.reason) == ("built", "") and found.path is not None
    assert native.opened == [found.path]  # type: ignore[attr-defined]
    assert builder.read_metadata(found.path.parent).arch == ("86",) and found.digest == found.path.parent.name


# What the person sees


def test_environment_names_everything(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMSWAP_BUILD", "never")
    monkeypatch.setenv("CXX", "no-such-compiler")
    shown = environment_shown()
    assert list(shown) == [
        *("normswap", "python", "torch", "torch CUDA", "GPU", "driver CUDA", "nvcc", "host compiler"),
        *("library", "library path", "library digest", "cache", "NORMSWAP_BUILD", "autograd nodes"),
    ]
    assert all(isinstance(value, str) and value for value in shown.values())
    assert shown["torch"] == torch.__version__ and shown["NORMSWAP_BUILD"] == "never"
    assert shown["host compiler"].startswith("none: no C++ compiler (no-such-compiler)")
    assert shown["library"].startswith("none: not compiled") and shown["library path"] == "-"


def test_environment_shows_the_library(fresh: Path, cache: Path) -> None:
    library = cached(cache, fresh / "csrc")
    shown = environment_shown()
    assert (shown["library"], shown["library path"], shown["library digest"]) == (
        "cache",
        str(library),
        library.parent.name,
    )


def test_a_file_that_is_no_library_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / builder.LIBRARY).write_bytes(b"no library")
    assert "it cannot be loaded" in native._open(tmp_path / builder.LIBRARY)
