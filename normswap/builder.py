"""Compile csrc into one shared library on the LibTorch stable ABI.

We write the ninja file ourselves: torch.utils.cpp_extension refuses CUDA on a CPU build of torch, waits for ever on a
leftover lock file, and hides the compiler's text. Nothing here imports torch or anything of ours, so that building a
wheel can load this file alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LIBRARY = "libnormswap.so"
METADATA = "libnormswap.json"
WHEEL_ARCH = ("80", "90", "100", "120")
"""The GPU architectures of the library in a wheel."""

SOURCE_SUFFIXES = (".cpp", ".cu", ".cuh", ".h")
TORCH_TARGET = "0x020a000000000000"
"""The stable ABI of torch 2.10: the library then loads on that version and on every later one."""

CXX_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden"),
    *(f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", "-DTORCH_STABLE_ONLY", "-DUSE_CUDA"),
)
NVCC_FLAGS = ("-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", "--threads=0")
LINK_LIBRARIES = (
    # libtorch must stay in DT_NEEDED although no symbol of it is seen at link time: it brings libtorch_cuda into scope.
    *("-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"),
    *("-lcudart_static", "-lrt", "-lpthread", "-ldl", "-Wl,--exclude-libs,ALL", "-Wl,-s"),
)


class BuildError(RuntimeError):
    """The library could not be compiled; the message is the compiler's own or names what is missing."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: its compiler, where its headers and static runtime lie, and CUDART_VERSION (13000 is 13.0)."""

    nvcc: Path
    include: Path
    lib: Path
    cuda: int


@dataclass(frozen=True)
class Metadata:
    """What lies as JSON beside a library: from which sources, for which GPUs and with what it was compiled."""

    digest: str
    arch: tuple[str, ...]
    cuda: int
    nvcc: str
    host_compiler: str


def check_arch(arch: Sequence[str]) -> tuple[str, ...]:
    """The architectures in ascending order, each once.

    Raises:
        ValueError: if there is none, or one is not a number like 80, 90 or 120.
    """
    wrong = [name for name in arch if not re.fullmatch(r"\d{2,3}", name)]
    if wrong or not arch:
        raise ValueError(f"an architecture is a number like 80, 90 or 120; got {', '.join(wrong) or 'none'}")
    return tuple(sorted(set(arch), key=int))


def sources(source_dir: Path) -> list[Path]:
    """Every source and header in ``source_dir``, in the order the digest takes them."""
    found = sorted(path for path in source_dir.glob("*") if path.suffix in SOURCE_SUFFIXES)
    if not any(path.suffix in (".cpp", ".cu") for path in found):
        raise BuildError(f"no .cpp or .cu file in {source_dir}; install normswap again")
    return found


def digest(source_dir: Path, arch: Sequence[str], cuda: int) -> str:
    """What a library compiled from ``source_dir`` for ``arch`` is known by: sha256 of sources, flags and target."""
    recipe = (*CXX_FLAGS, *NVCC_FLAGS, *LINK_LIBRARIES, *gencode(arch), str(cuda), platform.machine())
    total = hashlib.sha256("\0".join(recipe).encode())
    for path in sources(source_dir):
        content = path.read_bytes()
        total.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


def gencode(arch: Sequence[str]) -> list[str]:
    """nvcc's flags for ``arch``; the newest also gets PTX, which GPUs newer than the compiler can run."""
    codes = {name: f"sm_{name}" for name in arch}
    codes[arch[-1]] = f"[sm_{arch[-1]},compute_{arch[-1]}]"
    return [f"-gencode=arch=compute_{name},code={code}" for name, code in codes.items()]


def find_toolkit() -> Toolkit:
    """The CUDA toolkit to compile with: CUDA_HOME's if that is set, else of the nvcc on PATH, of /usr/local/cuda, or
    of the one from PyPI.

    Raises:
        BuildError: if there is none, or it lacks its headers or the static runtime.
    """
    if home := os.environ.get("CUDA_HOME"):
        nvcc = Path(home, "bin", "nvcc")
        if not nvcc.is_file():
            raise BuildError(f"CUDA_HOME is {home}, which holds no bin/nvcc; correct or unset CUDA_HOME")
        return _toolkit(nvcc)
    for nvcc in _nvcc_candidates():
        if nvcc.is_file():
            return _toolkit(nvcc)
    raise BuildError("no CUDA compiler (nvcc); install a CUDA toolkit, or `pip install 'normswap[nvcc]'`")


def _nvcc_candidates() -> Iterator[Path]:
    if found := shutil.which("nvcc"):
        yield Path(found)
    yield Path("/usr/local/cuda/bin/nvcc")
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia.submodule_search_locations or []) if nvidia else []:
        yield Path(folder, "cu13", "bin", "nvcc")


def _toolkit(nvcc: Path) -> Toolkit:
    """Ask nvcc itself where its toolkit is: on PATH it may be a wrapper script or a link."""
    answer = _output([str(nvcc), "--dryrun", "-x", "cu", "-c", os.devnull])
    top = re.search(r"^#\$ TOP=(.+)$", answer, re.MULTILINE)
    if top is None:
        raise BuildError(f"{nvcc} --dryrun does not name its toolkit; it answered: {answer.strip()}")
    home = Path(top[1]).resolve()
    headers = _holding("cuda_runtime_api.h", [home / "include", *home.glob("targets/*/include"), Path("/usr/include")])
    system = Path("/usr/lib", f"{platform.machine()}-linux-gnu")
    lib = _holding("libcudart_static.a", [home / "lib64", home / "lib", *home.glob("targets/*/lib"), system])
    version = re.search(r"define\s+CUDART_VERSION\s+(\d+)", (headers / "cuda_runtime_api.h").read_text())
    if version is None:
        raise BuildError(f"{headers}/cuda_runtime_api.h names no CUDART_VERSION; install the CUDA toolkit again")
    return Toolkit(nvcc, headers, lib, int(version[1]))


def _holding(name: str, folders: Sequence[Path]) -> Path:
    for folder in folders:
        if (folder / name).is_file():
            return folder
    raise BuildError(
        f"the CUDA toolkit lacks {name} (looked in {', '.join(map(str, folders))}); install its runtime development "
        "files (cudart), or `pip install 'normswap[nvcc]'`"
    )


def host_compiler() -> str:
    """Path of the C++ compiler: $CXX or g++. Raises BuildError if it is not there."""
    name = os.environ.get("CXX") or "g++"
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"no C++ compiler ({name}); install g++, or name one in CXX")
    return found


def compiler_version(compiler: str | Path) -> str:
    """nvcc's version number, or the first line that another compiler says of itself."""
    said = _output([str(compiler), "--version"])
    release = re.search(r"release .*V([\d.]+)", said)
    return release[1] if release else said.partition("\n")[0]


def torch_folder() -> Path:
    """The installed torch, found without importing it. Raises BuildError if it is absent or too old."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(f"{sys.executable} has no torch, whose headers the kernels need; install torch >= 2.10")
    folder = Path(spec.submodule_search_locations[0])
    if not (folder / "include/torch/csrc/stable/library.h").is_file():
        raise BuildError(f"the torch in {folder} has no stable-ABI headers; install torch >= 2.10")
    return folder


def compile_library(
    source_dir: Path, arch: Sequence[str], toolkit: Toolkit, out: Path, progress: Callable[[str], None]
) -> Path:
    """Compile ``source_dir`` for ``arch`` and put libnormswap.so and libnormswap.json into the folder ``out``.

    Nothing appears in ``out`` unless everything compiled. ``progress`` is told in one line what is being done.

    Raises:
        BuildError: with the compiler's own text, or naming the tool that is missing.
        OSError: if ``out`` cannot be written.
    """
    arch = check_arch(arch)
    cxx, torch, ninja = host_compiler(), torch_folder(), find_ninja()
    metadata = Metadata(
        digest(source_dir, arch, toolkit.cuda),
        arch,
        toolkit.cuda,
        compiler_version(toolkit.nvcc),
        compiler_version(cxx),
    )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=out) as scratch:
        progress(f"compiling the kernels for sm_{', sm_'.join(arch)} with nvcc {metadata.nvcc} ...")
        Path(scratch, "build.ninja").write_text(_ninja_text(source_dir.resolve(), arch, toolkit, cxx, torch))
        Path(scratch, METADATA).write_text(json.dumps(asdict(metadata), indent=2) + "\n")
        _run_ninja(ninja, Path(scratch))
        for name in (LIBRARY, METADATA):
            os.replace(Path(scratch, name), out / name)
    return out / LIBRARY


def read_metadata(folder: Path) -> Metadata:
    """The metadata of the library in ``folder``. Raises ValueError if they are not what compile_library writes."""
    path = folder / METADATA
    try:
        fields = json.loads(path.read_text())
        return Metadata(**{**fields, "arch": check_arch(fields["arch"]), "cuda": int(fields["cuda"])})
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ValueError(f"{path} does not describe a library: {error}") from error


def find_ninja() -> str:
    """The ninja beside this Python, where the PyPI package puts it, else the one on PATH. Raises BuildError."""
    found = shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")
    if found is None:
        raise BuildError("no ninja; `pip install ninja`")
    return found


def _ninja_text(source_dir: Path, arch: Sequence[str], toolkit: Toolkit, cxx: str, torch: Path) -> str:
    """The build as a ninja file. Only torch's side of the library sees torch's headers: with them nvcc is slow."""
    includes = ["-isystem", f"{torch}/include", "-isystem", str(toolkit.include)]
    compile_cxx = shlex.join([cxx, *CXX_FLAGS, *includes])
    compile_cuda = shlex.join([str(toolkit.nvcc), "-ccbin", cxx, *NVCC_FLAGS, *gencode(arch)])
    folders = shlex.join([f"-L{torch}/lib", f"-L{toolkit.lib}"])
    lines = [
        *("rule cpp", f"  command = {_escape(compile_cxx)} -c $in -o $out"),
        *("rule cu", f"  command = {_escape(compile_cuda)} -c $in -o $out"),
        "rule link",
        f"  command = {_escape(cxx)} -shared $in -o $out {_escape(folders)} {shlex.join(LINK_LIBRARIES)}",
    ]
    translated = [path for path in sources(source_dir) if path.suffix in (".cpp", ".cu")]
    lines += [f"build {path.name}.o: {path.suffix[1:]} {_escape(str(path), path=True)}" for path in translated]
    lines += [f"build {LIBRARY}: link {' '.join(f'{path.name}.o' for path in translated)}", f"default {LIBRARY}"]
    return "\n".join(lines) + "\n"


def _escape(text: str, path: bool = False) -> str:
    return re.sub(r"[$ :]" if path else r"\$", r"$\g<0>", text)


def _run_ninja(ninja: str, folder: Path) -> None:
    done = subprocess.run(
        [ninja, "-C", str(folder)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"the kernels do not compile here:\n{done.stdout.strip()}")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    return done.stdout
