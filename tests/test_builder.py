"""What a library is known by, and the toolkit it is compiled with."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from normswap import builder, native

needs_nvcc = pytest.mark.usefixtures("nvcc")


# The digest


def test_digest_follows_every_byte_the_target_and_the_runtime(tiny_sources: Path) -> None:
    def digest(arch: tuple[str, ...] = ("80", "90"), cuda: int = 13000) -> str:
        return builder.digest(tiny_sources, arch, cuda)

    first = digest()
    assert len(first) == 64 and digest() == first
    assert first not in (digest(arch=("90",)), digest(cuda=12080))
    (tiny_sources / "notes.txt").write_text("no source")
    assert digest() == first
    kernel = tiny_sources / "twice.cu"
    content = kernel.read_bytes()
    kernel.write_bytes(content.replace(b"*= 2", b"*= 3"))
    assert digest() != first
    kernel.write_bytes(content)
    assert digest() == first
    (tiny_sources / "new.cuh").write_text("")
    assert digest() != first


def test_digest_follows_the_flags(tiny_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = builder.digest(tiny_sources, ("90",), 13000)
    monkeypatch.setattr(builder, "NVCC_FLAGS", (*builder.NVCC_FLAGS, "-lineinfo"))
    assert builder.digest(tiny_sources, ("90",), 13000) != first


def test_digest_keeps_names_and_contents_apart(tmp_path: Path) -> None:
    for name, header in (("a", "ab"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.cu").write_text("c")
        (tmp_path / name / f"{header}.h").write_text("b" if header == "a" else "")
    assert builder.digest(tmp_path / "a", ("90",), 13000) != builder.digest(tmp_path / "b", ("90",), 13000)


def test_no_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(builder.BuildError, match=r"no \.cpp or \.cu file in .*install normswap again"):
        builder.digest(tmp_path, ("90",), 13000)


@pytest.mark.parametrize("arch", [[], [""], ["sm_90"], ["9.0"], ["90", "x"], ["90 "]])
def test_wrong_architectures_are_named(arch: list[str]) -> None:
    with pytest.raises(ValueError, match="an architecture is a number like 80, 90 or 120"):
        native.build(arch)


def test_the_newest_architecture_also_has_ptx() -> None:
    arch = builder.check_arch(["120", "80", "100", "90", "80"])
    assert arch == ("80", "90", "100", "120")
    assert builder.gencode(arch) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_120,code=[sm_120,compute_120]",
    ]


# The toolkit


def test_explicit_cuda_home_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(builder.BuildError, match=f"CUDA_HOME is {tmp_path}, which holds no bin/nvcc"):
        builder.find_toolkit()


def test_no_compiler_is_told_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(builder, "_nvcc_candidates", lambda: iter([Path("/nowhere/nvcc")]))
    with pytest.raises(builder.BuildError, match="no CUDA compiler .nvcc.; install a CUDA toolkit, or `pip install"):
        builder.find_toolkit()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(builder.BuildError, match=r"no C\+\+ compiler \(no-such-compiler\); install g\+\+"):
        builder.host_compiler()


def test_torch_is_needed_to_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(builder.BuildError, match="has no torch, whose headers the kernels need; install torch >= 2.10"):
        builder.torch_folder()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    importlib.invalidate_caches()
    with pytest.raises(builder.BuildError, match="has no stable-ABI headers; install torch >= 2.10"):
        builder.torch_folder()


@needs_nvcc
def test_toolkit_is_found_through_links_and_wrappers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builder.find_toolkit()
    wrapper, link = tmp_path / "a" / "nvcc", tmp_path / "b" / "nvcc"
    for path in (wrapper, link):
        path.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {real.nvcc} "$@"\n')
    wrapper.chmod(0o755)
    link.symlink_to(real.nvcc)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    for nvcc in (wrapper, link):
        monkeypatch.setenv("PATH", f"{nvcc.parent}:{os.environ['PATH']}")
        found = builder.find_toolkit()
        assert found == builder.Toolkit(nvcc, real.include, real.lib, real.cuda)


@needs_nvcc
def test_toolkit_without_its_runtime_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f'#!/bin/sh\necho "#$ TOP={tmp_path}/bin/.." >&2\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(builder.BuildError, match=r"lacks cuda_runtime_api\.h .*install its runtime development"):
        builder.find_toolkit()
