"""The compiled library: find it, build it if asked, load it, and say why not.

Order: the prebuilt library in the package, the user's cache, and, where ``load(build=True)`` is called on a machine
with a GPU and nvcc, a build into that cache. A library is used only if it was compiled from the sources that ship with
this package. Nothing here runs inside a model's forward except ``available`` and, once, ``load(build=False)``.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import filelock
import platformdirs
import torch

from normswap import builder
from normswap.builder import LIBRARY, MANIFEST, BuildError

_LOCK_SECONDS = 1800.0


@dataclass(frozen=True)
class NativeStatus:
    """Whether our kernels can run, where the library came from, and, if they cannot, why and what to do."""

    available: bool
    origin: str  # "package", "cache", "built" or "none"
    path: Path | None
    reason: str
    digest: str


_lock = threading.RLock()
_status: NativeStatus | None = None
_available = False
_warned = False
_on_load: list[Callable[[], None]] = []


def on_load(callback: Callable[[], None]) -> None:
    """Call ``callback`` once when the library is loaded, now if it is already."""
    with _lock:
        if _available:
            callback()
        else:
            _on_load.append(callback)


def available() -> bool:
    """True when the library is loaded and the driver can run it. Cheap: asked on every call of an op."""
    return _available


def status() -> NativeStatus:
    """What is loaded, loading what can be had without compiling."""
    return load(build=False)


def load(*, build: bool = False) -> NativeStatus:
    """Load the library if it can be had; compile it for the local GPU first when ``build`` is true, CUDA is available,
    nvcc is found and NORMSWAP_BUILD is not "never". Repeated calls cost nothing. Where CUDA is available and no library
    can be had, one warning says why and PyTorch's ops serve."""
    global _status, _available
    with _lock:
        if _status is None or (build and not _status.available and _may_build()):
            _status = _find_and_load(build)
            if _status.available:
                while _on_load:
                    _on_load.pop()()
            _available = _status.available
        if build:
            _warn_once(_status)
        return _status


def _warn_once(status: NativeStatus) -> None:
    global _warned
    if torch.cuda.is_available() and not status.available and not _warned:
        _warned = True
        warnings.warn(f"normswap: PyTorch's own ops serve: {status.reason}", stacklevel=4)


def _find_and_load(build: bool) -> NativeStatus:
    try:
        digest = builder.source_digest(builder.source_dir())
    except BuildError as error:
        return NativeStatus(False, "none", None, str(error), "")
    path, origin, reason = _prebuilt(digest)
    if path is None and build and _may_build():
        path, origin, reason = _built()
    elif path is None and not reason:
        reason = _why_not_built()
    if path is None:
        return NativeStatus(False, "none", None, reason, digest)
    if too_old := driver_problem(_manifest_of(path.parent).get("cuda_runtime", "0")):
        return NativeStatus(False, "none", path, too_old, digest)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return NativeStatus(False, "none", path, f"the library {path} cannot be loaded: {error}", digest)
    return NativeStatus(True, origin, path, "", digest)


def _prebuilt(digest: str) -> tuple[Path | None, str, str]:
    """(path, origin, reason): the package's library or the cache's, if compiled from these very sources."""
    packaged = Path(__file__).resolve().parent / "lib"
    reason = ""
    for folder, origin in ((packaged, "package"), *((f, "cache") for f in _cached_folders(digest))):
        if not (folder / LIBRARY).is_file():
            continue
        manifest = _manifest_of(folder)
        if manifest.get("digest") != digest:
            reason = (
                f"{folder / LIBRARY} was compiled from other sources ({manifest.get('digest', 'unknown')}) than this "
                f"package ships ({digest}); run `normswap build` or reinstall normswap"
            )
        elif origin == "cache" and not _fits_gpu(manifest.get("archs", [])):
            continue
        else:
            return folder / LIBRARY, origin, ""
    return None, "none", reason


def _fits_gpu(archs: Sequence[str]) -> bool:
    """True when a library for ``archs`` holds code for the local GPU, or there is no GPU to ask."""
    return not torch.cuda.is_available() or local_arch() in archs


def local_arch() -> str:
    """The compute capability of the current GPU, as "90"."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


def _manifest_of(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def cache_dir() -> Path:
    """Where libraries built on this machine are kept."""
    return Path(platformdirs.user_cache_dir("normswap"))


def _cached_folders(digest: str) -> list[Path]:
    return sorted(cache_dir().glob(f"{digest}-*"))


def _may_build() -> bool:
    return (
        os.environ.get("NORMSWAP_BUILD") != "never"
        and torch.cuda.is_available()
        and builder.find_toolchain() is not None
    )


def _why_not_built() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device is available, and the package holds no prebuilt library"
    if os.environ.get("NORMSWAP_BUILD") == "never":
        return "no prebuilt library was found and NORMSWAP_BUILD=never forbids building one; run `normswap build`"
    if builder.find_toolchain() is None:
        return (
            "no prebuilt library was found and nvcc or g++ is missing; install the CUDA toolkit, or "
            "`pip install normswap[nvcc]`, or a wheel that holds the library"
        )
    return "the library is not built yet; normswap.optimize() on a CUDA model builds it, or run `normswap build`"


def _built() -> tuple[Path | None, str, str]:
    try:
        return build([local_arch()]), "built", ""
    except BuildError as error:
        return None, "none", str(error)


def build(
    archs: Sequence[str] | None = None,
    out: Path | None = None,
    *,
    progress: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> Path:
    """Compile the library for ``archs`` (default: the local GPU's, or those of the wheels where there is no GPU) into
    the folder ``out`` (default: the user's cache) and return its path. Only one process builds at a time; a build that
    the cache holds already is not repeated. Raises BuildError with the compiler's own text."""
    chosen = list(archs or ([local_arch()] if torch.cuda.is_available() else builder.WHEEL_ARCHS))
    if out is not None:
        return builder.build_library(chosen, Path(out), progress=progress)
    digest = builder.source_digest(builder.source_dir())
    folder = cache_dir() / f"{digest}-{'-'.join(chosen)}"
    cache_dir().mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock", timeout=_LOCK_SECONDS):
        if _manifest_of(folder).get("digest") == digest and (folder / LIBRARY).is_file():
            return folder / LIBRARY
        return builder.build_library(chosen, folder, progress=progress)


def driver_version() -> str | None:
    """The CUDA release the driver supports, as "13.0"; None without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def driver_problem(runtime: str) -> str:
    """Why a driver cannot run a library of CUDA ``runtime``, "" when it can or there is no driver to ask.

    A driver serves every runtime of its own major release and of older ones."""
    driver = driver_version()
    if driver is None or int(driver.split(".")[0]) >= int(runtime.split(".")[0]):
        return ""
    return (
        f"the NVIDIA driver supports CUDA {driver}, the library was compiled with CUDA {runtime}; update the driver, "
        "or build with an older toolkit: `CUDA_HOME=... normswap build`"
    )


def row_plan(rows: int, cols: int, itemsize: int, *, clusters: bool, regime: int = 0) -> dict[str, int] | None:
    """How the library would cut rows of ``cols`` elements of ``itemsize`` bytes and who would work on them; None when
    ``regime`` (0 chooses; 1 subwarp, 2 warp, 3 block, 4 cluster, 5 split) cannot do such rows. Needs no GPU."""
    found = load()
    if found.path is None or not found.available:
        raise BuildError(f"row_plan: the library is not loaded: {found.reason}")
    values = (ctypes.c_int64 * 8)()
    function = ctypes.CDLL(str(found.path)).normswap_row_plan
    function.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    if not function(rows, cols, itemsize, int(clusters), regime, values):
        return None
    names = ("regime", "vec", "lanes", "chunk_len", "chunks", "warps", "cluster", "grid")
    return dict(zip(names, values, strict=True))


def version() -> str:
    """The installed version of normswap."""
    try:
        return metadata.version("normswap")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def environment() -> dict[str, str]:
    """What `normswap env` prints: versions, GPU, driver, compilers, and the library's state with its cure."""
    found = status()
    toolchain = builder.find_toolchain()
    gpu = "none"
    if torch.cuda.is_available():
        gpu = f"{torch.cuda.get_device_name()} (compute capability {local_arch()})"
    return {
        "normswap": version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch CUDA": torch.version.cuda or "none (CPU build)",
        "GPU": gpu,
        "driver CUDA": driver_version() or "none",
        "nvcc": f"{toolchain.nvcc} ({toolchain.runtime_version()})" if toolchain else "not found",
        "host compiler": toolchain.cxx if toolchain else "not found",
        "library": f"{found.origin}: {found.path}" if found.available else f"none: {found.reason}",
        "sources": found.digest,
        "cache": str(cache_dir()),
        "NORMSWAP_BUILD": os.environ.get("NORMSWAP_BUILD", "(unset)"),
    }
