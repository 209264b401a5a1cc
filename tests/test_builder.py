"""What a library is known by, and the toolkit it is compiled with."""

from __future__ import annotations

import dataclasses
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
    assert builder.digest(tiny_sources, ("90",), 13000, ptx=True) != first
    monkeypatch.setattr(builder, "NVCC_FLAGS", (*builder.NVCC_FLAGS, "-lineinfo"))
    assert builder.digest(tiny_sources, ("90",), 13000) != first


def test_digest_follows_sub_folders(tiny_sources: Path) -> None:
    def moved(name: str) -> str:
        header = tiny_sources / name
        header.parent.mkdir(exist_ok=True)
        header.write_text("// the same")
        found = builder.digest(tiny_sources, ("90",), 13000)
        header.unlink()
        return found

    assert len({moved("plan.h"), moved("plan/plan.h"), moved("abi/plan.h")}) == 3
    (tiny_sources / "row.cu").mkdir()  # a folder is no source, whatever it is called
    assert {path.name for path in builder.sources(tiny_sources)} == {"register.cpp", "twice.cu"}


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


def test_only_with_ptx_the_newest_architecture_has_it() -> None:
    arch = builder.check_arch(["120", "80", "100", "90", "80"])
    assert arch == ("80", "90", "100", "120")
    machine_code = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in ("80", "90a", "100", "120")]
    for ptx, more in ((False, []), (True, ["-gencode=arch=compute_120,code=compute_120"])):
        flags = builder.nvcc_flags(arch, 13000, ptx)
        assert [flag for flag in flags if flag.startswith("-gencode")] == [*machine_code, *more]
    flags = builder.nvcc_flags(("90",), 13000, True)
    for_all = "-gencode=arch=compute_90,code=compute_90"  # what 90a has would serve no later GPU
    assert [flag for flag in flags if flag.startswith("-gencode")] == [machine_code[1], for_all]


@pytest.mark.parametrize(
    ("cuda", "flag"),
    [(12040, "-Xfatbin=-compress-all"), (12080, "--compress-mode=size"), (13000, "--compress-mode=size")],
)
def test_device_code_is_compressed_as_nvcc_can(cuda: int, flag: str) -> None:
    for arch, ptx, expected in ((("90",), False, []), (("90",), True, [flag]), (("80", "90"), False, [flag])):
        flags = builder.nvcc_flags(arch, cuda, ptx)
        assert [found for found in flags if "compress" in found] == expected


# What is compiled again


@pytest.fixture
def nested(tiny_sources: Path) -> Path:
    """The tiny sources in sub-folders: two kernels, of which one includes a header of a third folder."""
    for folder in ("row", "column", "device", "abi"):
        (tiny_sources / folder).mkdir()
    kernel = (tiny_sources / "twice.cu").read_text()
    (tiny_sources / "twice.cu").unlink()
    (tiny_sources / "row/twice.cu").write_text('#include "device/factor.cuh"\n' + kernel.replace("*= 2", "*= FACTOR"))
    (tiny_sources / "device/factor.cuh").write_text("#define FACTOR 2\n")
    (tiny_sources / "column/other.cu").write_text("__global__ void other(float* x) { *x = 0; }\n")
    (tiny_sources / "register.cpp").rename(tiny_sources / "abi/register.cpp")
    return tiny_sources


def compiled(sources: Path, work: Path, arch: tuple[str, ...] = ("90",)) -> dict[str, int]:
    """When each object of a build in ``work`` was made."""
    out = work.parent / "out"
    builder.compile_library(sources, arch, builder.find_toolkit(), out, lambda line: None, work=work)
    assert sorted(path.name for path in out.iterdir()) == [builder.METADATA, builder.LIBRARY]
    assert builder.read_metadata(out).digest == builder.digest(sources, arch, builder.find_toolkit().cuda)
    return {path.name: path.stat().st_mtime_ns for path in (work / "objects").rglob("*.o")}


@needs_nvcc
def test_only_what_uses_a_header_is_compiled_again(nested: Path, tmp_path: Path) -> None:
    work = tmp_path / "a cache" / "work"
    work.mkdir(parents=True)
    first = compiled(nested, work)
    assert set(first) == {"row.cu.o", "column.cu.o", "abi.cpp.o"}
    os.utime(nested / "column/other.cu")
    assert compiled(nested, work) == first

    header = nested / "device/factor.cuh"
    header.write_text("#define FACTOR 3\n")
    os.utime(header, (0, 0))  # as a package brings it along
    second = compiled(nested, work)
    assert {name for name in first if first[name] != second[name]} == {"row.cu.o"}

    (nested / "column/other.cu").unlink()
    third = compiled(nested, work)
    assert not (work / "csrc/column/other.cu").exists()
    assert {name: third[name] for name in ("row.cu.o", "abi.cpp.o")} == {
        name: second[name] for name in ("row.cu.o", "abi.cpp.o")
    }


@needs_nvcc
def test_the_sources_of_a_folder_are_one_unit(nested: Path, tmp_path: Path) -> None:
    (nested / "row/more.cu").write_text("__global__ void more(float* x) { *x = 1; }\n")
    first = compiled(nested, tmp_path / "work")
    assert set(first) == {"row.cu.o", "column.cu.o", "abi.cpp.o"}
    (nested / "row/more.cu").write_text("__global__ void more(float* x) { *x = 2; }\n")
    second = compiled(nested, tmp_path / "work")
    assert {name for name in first if first[name] != second[name]} == {"row.cu.o"}


@needs_nvcc
def test_for_several_architectures_or_on_few_cores_the_dtypes_of_a_kind_are_one_unit(
    nested: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert builder._cores() > 0
    monkeypatch.setattr(builder, "_cores", lambda: builder.FEW_CORES)
    kernel = (nested / "row/twice.cu").read_text()
    (nested / "row/twice.cu").rename(nested / "row/twice_f32.cu")
    for dtype in ("f16", "bf16"):
        (nested / f"row/twice_{dtype}.cu").write_text(kernel.replace("twice", f"twice_{dtype}"))
    (nested / "column/other.cu").rename(nested / "column/other_f16.cu")
    apart, together = tmp_path / "apart/work", tmp_path / "together/work"
    kinds = {"twice.cu.o", "other.cu.o", "abi.cpp.o"}
    assert len(compiled(nested, apart)) == 5 and set(compiled(nested, together, ("80", "90"))) == kinds
    with monkeypatch.context() as few:
        few.setattr(builder, "_cores", lambda: builder.FEW_CORES - 1)
        assert set(compiled(nested, tmp_path / "few/work")) == kinds

    first = compiled(nested, together, ("80", "90"))
    (nested / "row/twice_f16.cu").write_text(kernel.replace("twice", "twice_f16") + "// changed")
    second = compiled(nested, together, ("80", "90"))
    assert {name for name in kinds if first[name] != second[name]} == {"twice.cu.o"}

    for path in (nested / "row").glob("twice_*.cu"):
        path.unlink()
    (nested / "row/twice.cu").write_text(kernel)  # where a file that included the others was
    (nested / "row/more.cu").write_text("__global__ void more(float* x) { *x = 1; }\n")
    assert "row.cu.o" in compiled(nested, together, ("80", "90"))


@needs_nvcc
def test_folders_may_be_given_relative_to_the_current_one(
    tiny_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    toolkit, out = builder.find_toolkit(), Path("out")
    sources = tiny_sources.relative_to(tmp_path)
    builder.compile_library(sources, ("90",), toolkit, out, lambda line: None, work=Path("work"))
    assert (tmp_path / "out" / builder.LIBRARY).stat().st_size > 1000


@needs_nvcc
def test_a_work_folder_is_of_one_target(tiny_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit = builder.find_toolkit()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    keys = [
        builder.work_key(tiny_sources, ("90",), toolkit),
        builder.work_key(tiny_sources, ("80",), toolkit),
        builder.work_key(tiny_sources, ("90",), toolkit, ptx=True),
        builder.work_key(elsewhere, ("90",), toolkit),
    ]
    assert builder.work_key(tiny_sources / ".." / tiny_sources.name, ("90",), toolkit) == keys[0]
    monkeypatch.setattr(builder, "compiler_version", lambda compiler: "another")
    keys.append(builder.work_key(tiny_sources, ("90",), toolkit))
    assert len(set(keys)) == len(keys)


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
        assert found == dataclasses.replace(real, nvcc=found.nvcc)
        assert found.nvcc in (nvcc, nvcc.resolve())


@needs_nvcc
def test_toolkit_is_found_through_a_link_by_which_nvcc_does_not_know_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = builder.find_toolkit()
    nvcc, link = tmp_path / "bin" / "nvcc", tmp_path / "links" / "nvcc"
    for path in (nvcc, link):
        path.parent.mkdir()
    nvcc.write_text(f'#!/bin/sh\n[ "$0" = {nvcc} ] && exec {real.nvcc} "$@"\n')
    nvcc.chmod(0o755)
    link.symlink_to(nvcc)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{link.parent}:{os.environ['PATH']}")
    assert builder.find_toolkit() == dataclasses.replace(real, nvcc=nvcc)


@needs_nvcc
def test_toolkit_without_its_runtime_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f'#!/bin/sh\necho "#$ TOP={tmp_path}/bin/.." >&2\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(builder.BuildError, match=r"lacks cuda_runtime_api\.h .*install its runtime development"):
        builder.find_toolkit()


def test_what_is_started_first_is_there() -> None:
    sources = builder.sources(Path(builder.__file__).parents[1] / "csrc")
    kinds = {path.with_name(builder.OF_A_DTYPE.sub("", path.name)).stem for path in sources if path.suffix == ".cu"}
    folders = {path.parent.name for path in sources}
    assert kinds | folders >= set(builder.LONGEST)
