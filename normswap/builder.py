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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LIBRARY = "libnormswap.so"
METADATA = "libnormswap.json"
WHEEL_ARCH = ("80", "90", "100", "120")
"""The GPU architectures of the library in a wheel."""

SOURCE_SUFFIXES = (".cpp", ".cu", ".cuh", ".h")
OF_A_DTYPE = re.compile(r"_(bf16|f16|f32)(?=\.cu$)")
"""How the source of one dtype's kernels ends: those of a kind are compiled side by side, or as one that takes less."""
FEW_CORES = 4
"""With fewer than so many all are at work to the end however the kernels are parted into units."""
LONGEST = (
    *("dim", "group_norm", "group_norm_behind", "layer_norm_backward", "row_options", "layer_norm", "rms_norm"),
    *("batch_norm", "column", "group_columns", "group_backward", "convolve", "rms_norm_backward"),
)
"""The kinds and folders of kernels in the order in which they are started: what is started last must not take long."""

TORCH_TARGET = "0x020a000000000000"
"""The stable ABI of torch 2.10: the library then loads on that version and on every later one."""

CXX_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden"),
    *(f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", "-DTORCH_STABLE_ONLY", "-DUSE_CUDA"),
)
FULL_NAMES = {"90": "90a"}
"""What an architecture is called with all that it alone has: its products of warpgroups."""
NVCC_FLAGS = ("-std=c++17", "-O1", "-Xcompiler=-fPIC,-fvisibility=hidden", "--threads=0")
COMPRESSED_SINCE = 12080
"""The CUDA whose nvcc knows --compress-mode=size: a tenth of the bytes, which the driver unpacks when it loads them."""
DEPENDENCY_FLAGS = ("-MMD", "-MF", "$out.d")
"""Which headers a file includes, for ninja; they do not change what is compiled."""
LINK_LIBRARIES = (
    # libtorch must stay in DT_NEEDED although no symbol of it is seen at link time: it brings libtorch_cuda into scope.
    *("-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"),
    *("-lcudart_static", "-lrt", "-lpthread", "-ldl", "-Wl,--exclude-libs,ALL", "-Wl,-s"),
)

NODES_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden")
NODES_LIBRARIES = ("-Wl,--no-as-needed", "-ltorch_cpu", "-ltorch_python", "-lc10", "-Wl,-s")


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
    """What lies as JSON beside a library: from which sources, for which GPUs and with what it was compiled. ``ptx``:
    whether it also holds PTX, which GPUs newer than the compiler can run."""

    digest: str
    arch: tuple[str, ...]
    ptx: bool
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
    """Every source and header in ``source_dir`` and its sub-folders, in the order the digest takes them."""
    found = [path for path in source_dir.rglob("*") if path.suffix in SOURCE_SUFFIXES and path.is_file()]
    if not any(path.suffix in (".cpp", ".cu") for path in found):
        raise BuildError(f"no .cpp or .cu file in {source_dir}; install normswap again")
    return sorted(found, key=lambda path: path.relative_to(source_dir).as_posix())


def digest(source_dir: Path, arch: Sequence[str], cuda: int, ptx: bool = False) -> str:
    """What a library compiled from ``source_dir`` for ``arch`` is known by: sha256 of sources, flags and target."""
    recipe = (*CXX_FLAGS, *nvcc_flags(arch, cuda, ptx), *LINK_LIBRARIES, str(cuda), platform.machine())
    total = hashlib.sha256("\0".join(recipe).encode())
    for path in sources(source_dir):
        content = path.read_bytes()
        total.update(f"\0{path.relative_to(source_dir).as_posix()}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


def nvcc_flags(arch: Sequence[str], cuda: int, ptx: bool) -> list[str]:
    """What the nvcc of CUDA ``cuda`` is called with for ``arch``, the newest also as PTX if ``ptx``."""
    compressed = "--compress-mode=size" if cuda >= COMPRESSED_SINCE else "-Xfatbin=-compress-all"
    full = [FULL_NAMES.get(name, name) for name in arch]
    targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in full]
    if ptx:
        targets.append(f"-gencode=arch=compute_{arch[-1]},code=compute_{arch[-1]}")
    # A library for one GPU is mostly compiled where it is used: there time counts, and bytes do not.
    return [*NVCC_FLAGS, *([compressed] if len(targets) > 1 else []), *targets]


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
    """Ask nvcc itself where its toolkit is: on PATH it may be a wrapper script, or a link, by which it may not know."""
    answer, top = _top_of(nvcc)
    if top is None and nvcc.is_symlink():
        nvcc = nvcc.resolve()
        answer, top = _top_of(nvcc)
    if top is None:
        raise BuildError(f"{nvcc} --dryrun does not name its toolkit; it answered: {answer.strip()}")
    home = Path(top).resolve()
    headers = _holding("cuda_runtime_api.h", [home / "include", *home.glob("targets/*/include"), Path("/usr/include")])
    system = Path("/usr/lib", f"{platform.machine()}-linux-gnu")
    lib = _holding("libcudart_static.a", [home / "lib64", home / "lib", *home.glob("targets/*/lib"), system])
    version = re.search(r"define\s+CUDART_VERSION\s+(\d+)", (headers / "cuda_runtime_api.h").read_text())
    if version is None:
        raise BuildError(f"{headers}/cuda_runtime_api.h names no CUDART_VERSION; install the CUDA toolkit again")
    return Toolkit(nvcc, headers, lib, int(version[1]))


def _top_of(nvcc: Path) -> tuple[str, str | None]:
    """What nvcc says it would run, and its toolkit's folder if that says it."""
    answer = _output([str(nvcc), "--dryrun", "-x", "cu", "-c", os.devnull])
    top = re.search(r"^#\$ TOP=(.+)$", answer, re.MULTILINE)
    return answer, top[1] if top else None


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


def torch_version() -> str:
    """Of the installed torch, as it says itself. Raises BuildError if it is absent or too old."""
    found = re.search(r"__version__ = '(.+)'", (torch_folder() / "version.py").read_text())
    return found[1] if found else "unknown"


def compile_library(
    source_dir: Path,
    arch: Sequence[str],
    toolkit: Toolkit,
    out: Path,
    progress: Callable[[str], None],
    *,
    work: Path,
    ptx: bool = False,
) -> Path:
    """Compile ``source_dir`` for ``arch`` and put libnormswap.so and libnormswap.json into the folder ``out``.

    Nothing appears in ``out`` unless everything compiled. ``progress`` is told in one line what is being done. With
    ``ptx`` the newest architecture also gets PTX. ``work``, which one caller at a time may use, keeps a copy of the
    sources and what was compiled of them, so that the next call compiles what changed; it is the folder of
    ``work_key``.

    Raises:
        BuildError: with the compiler's own text, or naming the tool that is missing.
        OSError: if ``out`` or ``work`` cannot be written.
    """
    arch = check_arch(arch)
    cxx, torch = host_compiler(), torch_folder()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=out) as scratch:
        folder = work.resolve()
        copied = folder / "csrc"
        _mirror(source_dir, copied)
        versions = compiler_version(toolkit.nvcc), compiler_version(cxx)
        metadata = Metadata(digest(copied, arch, toolkit.cuda, ptx), arch, ptx, toolkit.cuda, *versions)
        progress(f"compiling the kernels for sm_{', sm_'.join(arch)} with nvcc {metadata.nvcc} ...")
        flags = [*nvcc_flags(arch, toolkit.cuda, ptx), f"-I{copied}"]
        # Only torch's side of the library sees torch's headers: with them nvcc is slow.
        headers = [f"-I{copied}", "-isystem", f"{torch}/include", "-isystem", str(toolkit.include)]
        compilers = {".cpp": [cxx, *CXX_FLAGS, *headers], ".cu": [str(toolkit.nvcc), "-ccbin", cxx, *flags]}
        units = _units(copied, folder / "together", apart=len(arch) == 1 and _cores() >= FEW_CORES)
        linker = [cxx, f"-L{torch}/lib", f"-L{toolkit.lib}", *LINK_LIBRARIES]
        if said := _compile(folder, LIBRARY, compilers, units, linker):
            raise BuildError(f"the kernels do not compile here:\n{said.replace(str(copied), str(source_dir))}")
        shutil.copyfile(folder / LIBRARY, Path(scratch, LIBRARY))
        Path(scratch, METADATA).write_text(json.dumps(asdict(metadata), indent=2) + "\n")
        for name in (LIBRARY, METADATA):
            os.replace(Path(scratch, name), out / name)
    return out / LIBRARY


def nodes_name(source: Path) -> str:
    """The file that holds autograd's nodes of ``source``, and what lies beside it, for the installed torch, this Python
    and kernels that are called so; for any other it is another."""
    recipe = (*NODES_FLAGS, *NODES_LIBRARIES, platform.machine(), (torch_folder() / "version.py").read_text())
    python = f"{sysconfig.get_config_var('SOABI')} {Path(sysconfig.get_path('include'), 'Python.h').is_file()}"
    read = *_sources(source), *sorted(source.parent.glob("*.h")), *_calls(source)
    text = b"".join(one.read_bytes() for one in read)
    digest = hashlib.sha256("\0".join((*recipe, python)).encode() + text).hexdigest()
    return f"libnormswap_nodes-{digest[:16]}.so"


def compile_nodes(source: Path, out: Path) -> Path:
    """Compile autograd's nodes against the installed torch and put them into the folder ``out``.

    Raises:
        BuildError: with the compiler's own text, or naming the tool that is missing.
        OSError: if ``out`` cannot be written.
    """
    cxx, torch, name = host_compiler(), torch_folder(), nodes_name(source)
    out.mkdir(parents=True, exist_ok=True)
    folders = f"{torch}/include", f"{torch}/include/torch/csrc/api/include", sysconfig.get_path("include")
    ours = [f"-I{header.parent.parent}" for header in _calls(source)]
    compiler = [cxx, *NODES_FLAGS, *ours, *(word for folder in folders for word in ("-isystem", folder))]
    with tempfile.TemporaryDirectory(prefix=".build-", dir=out) as scratch:
        units = {one.name: one for one in _sources(source)}
        linker = [cxx, f"-L{torch}/lib", *NODES_LIBRARIES]
        if said := _compile(Path(scratch), name, {".cpp": compiler}, units, linker):
            raise BuildError(f"autograd's nodes do not compile here:\n{said}")
        os.replace(Path(scratch, name), out / name)
    return out / name


def _sources(source: Path) -> list[Path]:
    return sorted(source.parent.glob("*.cpp"))


def _calls(source: Path) -> list[Path]:
    """The header of what the nodes call in the kernels' library, whose sources lie in an installed package or beside
    it."""
    package = source.parent.parent
    found = (folder / "csrc/abi/calls.h" for folder in (package, package.parent))
    return [path for path in found if path.is_file()][:1]


def work_key(source_dir: Path, arch: Sequence[str], toolkit: Toolkit, ptx: bool = False) -> str:
    """What a ``work`` folder of compile_library is known by: where the sources lie, for what they are compiled, and
    what ninja does not look at: the versions of the compilers and of torch's headers."""
    torch = (torch_folder() / "version.py").read_text()
    compilers = compiler_version(toolkit.nvcc), compiler_version(host_compiler())
    known = (str(source_dir.resolve()), *nvcc_flags(arch, toolkit.cuda, ptx), *compilers, torch)
    return hashlib.sha256("\0".join(known).encode()).hexdigest()[:32]


def _cores() -> int:
    """Of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _mirror(source_dir: Path, copied: Path) -> None:
    """Make ``copied`` hold the sources of ``source_dir`` and no others. Ninja goes by a file's time, which packages
    bring along from elsewhere: what differs in content is written anew, what does not is not touched."""
    wanted = {path.relative_to(source_dir): path.read_bytes() for path in sources(source_dir)}
    for path in copied.rglob("*"):
        if path.is_file() and path.relative_to(copied) not in wanted:
            path.unlink()
    for name, content in wanted.items():
        path = copied / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _units(source_dir: Path, folder: Path, apart: bool) -> dict[str, Path]:
    """What is compiled as one, in ``folder`` where it is of several sources, longest first: those of a folder, which
    include much the same, and all dtypes of a kind, or each for itself if ``apart``: then the longest takes less, and
    all take more time and bytes."""
    groups: dict[str, list[str]] = {}
    for path in sources(source_dir):
        if path.suffix in (".cpp", ".cu"):
            name = path.relative_to(source_dir).as_posix()
            kind = OF_A_DTYPE.sub("", name)
            of_folder = f"{Path(name).parent.name or 'sources'}{path.suffix}"
            unit = of_folder if kind == name else name if apart else kind
            groups.setdefault(unit, []).append(name)
    together = {
        unit: "".join(f'#include "{one}"\n' for one in names) for unit, names in groups.items() if len(names) > 1
    }
    for path in folder.rglob("*"):  # what other sources left there would be included first
        if path.is_file() and path.relative_to(folder).as_posix() not in together:
            path.unlink()
    for unit, text in together.items():
        path = folder / unit
        if not (path.is_file() and path.read_text() == text):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def order(unit: str) -> tuple[bool, int]:
        name = Path(OF_A_DTYPE.sub("", unit)).stem
        return unit.endswith(".cpp"), LONGEST.index(name) if name in LONGEST else len(LONGEST)

    paths = {unit: folder / unit if unit in together else source_dir / names[0] for unit, names in groups.items()}
    return {unit: paths[unit] for unit in sorted(paths, key=order)}


def read_metadata(folder: Path) -> Metadata:
    """The metadata of the library in ``folder``. Raises ValueError if they are not what compile_library writes."""
    path = folder / METADATA
    try:
        fields = json.loads(path.read_text())
        read = {"arch": check_arch(fields["arch"]), "ptx": bool(fields["ptx"]), "cuda": int(fields["cuda"])}
        return Metadata(**{**fields, **read})
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ValueError(f"{path} does not describe a library: {error}") from error


def find_ninja() -> str:
    """The ninja beside this Python, where the PyPI package puts it, else the one on PATH. Raises BuildError."""
    found = shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")
    if found is None:
        raise BuildError("no ninja; `pip install ninja`")
    return found


def _compile(
    folder: Path,
    library: str,
    compilers: Mapping[str, Sequence[str]],
    units: Mapping[str, Path],
    linker: Sequence[str],
) -> str:
    """Make ``library`` in ``folder``, of what changed: of each of ``units`` an object of that name, by the compiler of
    its suffix. The compiler's text where it cannot be, or ""."""
    lines = []
    for suffix, compiler in compilers.items():
        command = f"{_escape(shlex.join(compiler))} {' '.join(DEPENDENCY_FLAGS)} -c $in -o $out"
        lines += [f"rule {suffix[1:]}", f"  command = {command}", "  depfile = $out.d", "  deps = gcc"]
    cxx, *flags = linker
    lines += ["rule link", f"  command = {_escape(cxx)} -shared $in -o $out {_escape(shlex.join(flags))}"]
    objects = {_escape(f"objects/{name}.o", path=True): unit for name, unit in units.items()}
    lines += [f"build {made}: {unit.suffix[1:]} {_escape(str(unit), path=True)}" for made, unit in objects.items()]
    lines += [f"build {library}: link {' '.join(objects)}", f"default {library}"]
    (folder / "build.ninja").write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [find_ninja(), "-C", str(folder)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.stdout.strip() if done.returncode else ""


def _escape(text: str, path: bool = False) -> str:
    return re.sub(r"[$ :]" if path else r"\$", r"$\g<0>", text)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    return done.stdout
