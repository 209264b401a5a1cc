"""Compile csrc/ into one shared library with ninja, g++ and nvcc.

The library is built on LibTorch's stable ABI: one file serves every torch from 2.10 on, CPU and CUDA builds alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

LIBRARY = "libnormswap.so"
MANIFEST = "libnormswap.json"
WHEEL_ARCHS = ("80", "90", "100", "120")

# torch 2.10: the oldest release whose stable ABI has what csrc/ uses.
_CXX_FLAGS = (
    "-std=c++17 -O3 -fPIC -fvisibility=hidden -DTORCH_TARGET_VERSION=0x020a000000000000 -DTORCH_STABLE_ONLY -DUSE_CUDA"
)
_NVCC_FLAGS = "-std=c++17 -O3 -Xcompiler -fPIC,-fvisibility=hidden --threads 0"
# g++ links, not nvcc: nvcc reorders -l, and --as-needed then drops libtorch.so.
_LINK_FLAGS = "-lcudart_static -lrt -lpthread -ldl -Wl,--exclude-libs,ALL -Wl,-s"


class BuildError(RuntimeError):
    """The library could not be compiled; the message holds the compiler's own output."""


@dataclass(frozen=True)
class Toolchain:
    """What compiles the library. ``cuda_home`` holds bin/nvcc, include/ and lib64/ or lib/."""

    cuda_home: Path
    cxx: str

    @property
    def nvcc(self) -> Path:
        return self.cuda_home / "bin" / "nvcc"

    @property
    def cuda_libraries(self) -> Path:
        return next((d for d in (self.cuda_home / "lib64", self.cuda_home / "lib") if d.is_dir()), self.cuda_home)

    def runtime_version(self) -> str:
        """The CUDA release of the toolkit, as "13.0"."""
        text = subprocess.run([str(self.nvcc), "--version"], capture_output=True, text=True, check=True).stdout
        return text.split("release ")[1].split(",")[0]


def source_dir() -> Path:
    """csrc/: beside the package in a checkout, inside it in an installed wheel. Raises BuildError when neither is."""
    package = Path(__file__).resolve().parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / "register.cpp").is_file():
            return folder
    raise BuildError(f"normswap's C++ and CUDA sources are missing beside {package}; reinstall normswap")


def source_digest(sources: Path) -> str:
    """A hash of every source file and of the flags: a library is good for exactly one of these."""
    digest = hashlib.sha256(f"{_CXX_FLAGS}\n{_NVCC_FLAGS}\n{_LINK_FLAGS}".encode())
    for file in sorted(p for p in sources.iterdir() if p.suffix in (".cpp", ".cu", ".h", ".cuh")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_toolchain() -> Toolchain | None:
    """nvcc (CUDA_HOME, PATH, /usr/local/cuda, the ``nvcc`` extra's packages) and g++; None when one is missing."""
    cxx = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    on_path = shutil.which("nvcc")
    homes = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
    homes.append(Path("/usr/local/cuda"))
    homes += [Path(folder) / "nvidia" / "cu13" for folder in sys.path if folder.endswith("-packages")]
    home = next(
        (h for h in homes if (h / "bin" / "nvcc").is_file() and (h / "include" / "cuda_runtime_api.h").is_file()), None
    )
    return Toolchain(home, cxx) if home is not None and cxx else None


def build_library(
    archs: Sequence[str],
    destination: Path,
    *,
    sources: Path | None = None,
    toolchain: Toolchain | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """Compile ``sources`` for the compute capabilities ``archs`` ("90" is 9.0) into ``destination``, a folder.

    Writes LIBRARY and MANIFEST there, each by an atomic rename, the library last; a failure leaves nothing behind.
    The newest architecture carries PTX too when it is 120 or above. Raises BuildError with the compiler's text, or
    naming what is missing, and ValueError for an architecture that is not a number.
    """
    sources = sources or source_dir()
    toolchain = toolchain or find_toolchain()
    if toolchain is None:
        raise BuildError(
            "the library needs nvcc and g++ to be compiled, and one of them was not found; install the CUDA toolkit "
            "(or `pip install normswap[nvcc]`) and set CUDA_HOME"
        )
    gencode = _gencode(archs)
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination, prefix=".build-") as work:
        folder = Path(work)
        (folder / "build.ninja").write_text(_ninja_file(sources, toolchain, gencode))
        progress(f"normswap: compiling CUDA kernels for {', '.join(f'sm_{a}' for a in archs)}; about a minute, once")
        _run_ninja(folder)
        manifest = {
            "digest": source_digest(sources),
            "archs": list(archs),
            "cuda_runtime": toolchain.runtime_version(),
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        os.replace(folder / MANIFEST, destination / MANIFEST)
        os.replace(folder / LIBRARY, destination / LIBRARY)
    return destination / LIBRARY


def _gencode(archs: Sequence[str]) -> str:
    if not archs or not all(a.isdigit() for a in archs):
        raise ValueError(f"build: arch must be compute capabilities such as 80,90, got {','.join(archs)!r}")
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    newest = max(archs, key=int)
    if int(newest) >= 120:
        flags.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    return " ".join(flags)


def _ninja_file(sources: Path, toolchain: Toolchain, gencode: str) -> str:
    import torch

    root = Path(torch.__file__).resolve().parent
    lines = [
        f"cxx = {toolchain.cxx}",
        f"nvcc = {toolchain.nvcc}",
        f"link = -L{toolchain.cuda_libraries} {_LINK_FLAGS}",
        "rule cpp",
        f"  command = $cxx {_CXX_FLAGS} -isystem {root}/include -isystem {toolchain.cuda_home}/include -c $in -o $out",
        "rule cuda",
        f"  command = $nvcc {_NVCC_FLAGS} -ccbin $cxx {gencode} -c $in -o $out",
        "rule link",
        f"  command = $cxx -shared $in -o $out -Wl,--no-as-needed -L{root}/lib -ltorch -Wl,--as-needed $link",
    ]
    objects = []
    for pattern, rule in (("*.cu", "cuda"), ("*.cpp", "cpp")):
        for file in sorted(sources.glob(pattern)):
            objects.append(f"{file.name}.o")
            lines.append(f"build {objects[-1]}: {rule} {_escaped(file)}")
    lines.append(f"build {LIBRARY}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def _escaped(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _run_ninja(folder: Path) -> None:
    import ninja

    done = subprocess.run(
        [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(folder), LIBRARY], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"compiling normswap's CUDA library failed:\n{done.stdout}{done.stderr}".rstrip())
