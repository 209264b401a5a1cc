"""Find, compile and load the library of CUDA kernels.

The library comes from the package (a wheel built where nvcc was), else from the user's cache, else it is compiled once
for the GPUs of this machine. A library is taken only if it was compiled from exactly the sources that ship with this
package, for these GPUs, with a CUDA runtime that the driver can serve. Where none can be had, PyTorch's own ops serve
and one warning says why. What only compiles does without PyTorch, whose import takes seconds.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from normswap import builder
from normswap.builder import LIBRARY, METADATA, BuildError, Metadata, Toolkit

PACKAGE = Path(__file__).parent
CLUSTERS = (9, 10)
"""The major architectures whose kernels are launched in clusters of blocks."""
LINUX = sys.platform == "linux"
LOCK_SECONDS = 600.0
"""How long to wait for another process that compiles the same library."""


@dataclass(frozen=True)
class NativeStatus:
    """Where the library came from ("package", "cache", "built" or "none"), or the reason and cure if there is none."""

    available: bool
    origin: str
    path: Path | None
    reason: str
    digest: str


_STALE = "it was compiled from other sources than this package ships; run `normswap build`"

_mutex = threading.RLock()
_status: NativeStatus | None = None
_available = False
_compiled_in_vain = False
_warned = False
_on_load: list[Callable[[], None]] = []


def on_load(callback: Callable[[], None]) -> None:
    """Call ``callback`` once, when the library is loaded; now if it is already."""
    with _mutex:
        if _available:
            callback()
        else:
            _on_load.append(callback)


def available() -> bool:
    """Whether the library is loaded, with a CUDA runtime no newer than the driver's. Costs nothing to ask."""
    return _available


def status() -> NativeStatus:
    """What load() found; looks for the library, without compiling, if nobody has yet."""
    return _resolve(build=False)


def load(*, build: bool = False) -> NativeStatus:
    """Load the library if there is one and, with ``build``, compile it for the local GPUs if there is none.

    Can be called any number of times, from any thread. Never raises because a library cannot be had: the status says
    why, and so does one Python warning if CUDA is available. Compiles only where CUDA is available, NORMSWAP_BUILD is
    not "never", and not again after a failure in the same process.
    """
    global _warned
    found = _resolve(build)
    if not found.available and not _warned and _cuda_available():
        _warned = True
        warnings.warn(f"normswap's kernels cannot run, PyTorch's own ops serve: {found.reason}", stacklevel=2)
    return found


def _resolve(build: bool) -> NativeStatus:
    global _status, _available, _compiled_in_vain
    with _mutex:
        if _status is None or (build and not _status.available and not _compiled_in_vain):
            compiling = build and _may_compile()
            _status = _find(compiling)
            if _status.available:
                while _on_load:
                    _on_load.pop(0)()
            _available = _status.available
            _compiled_in_vain = compiling and not _available
        return _status


def would_compile() -> bool:
    """Whether ``load(build=True)`` would compile the library now."""
    return not status().available and not _compiled_in_vain and _may_compile()


def _may_compile() -> bool:
    return _cuda_available() and LINUX and not forbidden()


def _find(compiling: bool) -> NativeStatus:
    """Load the first library that fits, from the package, the cache or, if ``compiling``, the compiler."""
    reasons, folders = list[str](), [("package", PACKAGE / "lib")]
    try:
        folders += [("cache", path.parent) for path in sorted(cache_dir().glob(f"*/{LIBRARY}"))]
    except BuildError as error:
        reasons.append(str(error))
    for origin, folder in folders:
        if not (folder / LIBRARY).is_file():
            continue
        reason = _misfit(folder) or _open(folder / LIBRARY)
        if not reason:
            return _loaded(origin, folder)
        if origin == "package" or reason != _STALE:
            reasons.append(f"{folder / LIBRARY}: {reason}")
    if compiling:
        try:
            return _loaded("built", _compile_here())
        except (BuildError, OSError) as error:
            reasons.append(str(error))
    else:
        reasons.append(_why_not_compiled())
    return NativeStatus(False, "none", None, "; ".join(reasons), "")


def _loaded(origin: str, folder: Path) -> NativeStatus:
    return NativeStatus(True, origin, folder / LIBRARY, "", builder.read_metadata(folder).digest)


def _compile_here() -> Path:
    """Compile for the local GPUs, into the cache, and load the result."""
    reason = _driver_too_old(builder.find_toolkit().cuda)
    if not reason:
        path = build()
        reason = _open(path)
    if reason:
        raise BuildError(reason)
    return path.parent


def _why_not_compiled() -> str:
    if not LINUX:
        return f"the kernels are compiled on Linux only, and this is {platform.system()}"
    if not _cuda_available():
        return "not compiled, and no GPU here to compile for; `normswap build --arch 80,90,100,120` names some"
    if forbidden():
        return "not compiled, and NORMSWAP_BUILD=never forbids it; unset that, or run `normswap build`"
    return "not compiled yet; normswap.optimize does it for a model on CUDA, and so does `normswap build`"


def forbidden() -> bool:
    """Whether nothing may be compiled unless it is asked for by name."""
    return os.environ.get("NORMSWAP_BUILD") == "never"


def _cuda_available() -> bool:
    """On ROCm too torch.cuda is available; our kernels are not for it."""
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()


def _open(path: Path) -> str:
    """Load the library into this process; why it cannot be, or ""."""
    import torch

    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return f"it cannot be loaded ({error}); run `normswap build`"
    return ""


def _misfit(folder: Path) -> str:
    """Why the library in ``folder`` is not for these sources or this machine, or ""."""
    try:
        metadata = builder.read_metadata(folder)
        current = builder.digest(source_dir(), metadata.arch, metadata.cuda, metadata.ptx)
    except (ValueError, BuildError) as error:
        return str(error)
    if metadata.digest != current:
        return _STALE
    return _driver_too_old(metadata.cuda) or _wrong_gpu(metadata)


def _driver_too_old(cuda: int) -> str:
    """CUDA promises that a driver runs every runtime of its own major version and of those before."""
    driver = driver_cuda()
    if driver == 0 or driver // 1000 >= cuda // 1000:
        return ""
    return (
        f"the NVIDIA driver serves CUDA {dotted(driver)} and the library needs {dotted(cuda)}; update the driver, "
        f"or compile with a CUDA {driver // 1000} toolkit: CUDA_HOME=... normswap build"
    )


def _wrong_gpu(metadata: Metadata) -> str:
    missing = [arch for arch in local_arch() if not _serves(metadata, int(arch))]
    if not missing:
        return ""
    return (
        f"it was compiled for sm_{', sm_'.join(metadata.arch)} and a GPU here is sm_{missing[0]}; run `normswap build`"
    )


def _serves(metadata: Metadata, gpu: int) -> bool:
    """Machine code runs within its major version; the newest's PTX, if the library has it, on all later GPUs whose
    driver knows its CUDA. But code for GPUs without clusters of blocks does not do what those that have them are asked
    for."""
    codes = [int(arch) for arch in metadata.arch]
    same_major = any(code // 10 == gpu // 10 and code <= gpu for code in codes)
    portable = codes[-1] <= gpu and (gpu // 10 not in CLUSTERS or codes[-1] // 10 in CLUSTERS)
    return same_major or (metadata.ptx and portable and driver_cuda() >= metadata.cuda)


def local_arch() -> tuple[str, ...]:
    """The architectures of the GPUs of this machine, such as ("90",); none without CUDA."""
    if not _cuda_available():
        return ()
    import torch

    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return tuple(f"{major}{minor}" for major, minor in sorted(capabilities))


def driver_cuda() -> int:
    """The newest CUDA version that the NVIDIA driver serves, as 13000 for 13.0; 0 if there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int(0)
    return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0


def source_dir() -> Path:
    """Where the sources of the kernels lie: inside an installed package, beside it in a checkout."""
    packaged = PACKAGE / "csrc"
    return packaged if packaged.is_dir() else PACKAGE.parent / "csrc"


def cache_dir() -> Path:
    """The folder of compiled libraries, each in a folder named by its digest; XDG_CACHE_HOME moves it. Raises
    BuildError where the user has none."""
    try:
        return user_cache_path("normswap")
    except RuntimeError as error:
        raise BuildError(f"no folder to keep compiled libraries in ({error}); set HOME or XDG_CACHE_HOME") from error


def build(
    arch: Sequence[str] | None = None,
    out: Path | None = None,
    progress: Callable[[str], None] | None = None,
    sources: Path | None = None,
) -> Path:
    """Compile the library and return its path.

    Args:
        arch: GPU architectures, such as ["80", "90"]; those of the GPUs here if None.
        out: The folder for it; the user's cache if None, where a library compiled before is taken as it is.
        progress: Told in one line what is being compiled; prints to stderr if None.
        sources: The folder of the sources; those of this package if None.

    Raises:
        BuildError: with the compiler's own text, or naming what is missing and the cure.
        ValueError: if an architecture is not a number like 90.
    """
    wanted = builder.check_arch(arch if arch is not None else _arch_here())
    source = sources or source_dir()
    toolkit = builder.find_toolkit()
    progress = progress or say
    if out is not None:
        return _compile(source, wanted, toolkit, out, progress)
    return _build_into_cache(source, wanted, toolkit, progress)


def _arch_here() -> tuple[str, ...]:
    found = local_arch()
    if not found:
        raise BuildError("no GPU here to compile for; name architectures: `normswap build --arch 80,90,100,120`")
    return found


def _build_into_cache(source: Path, arch: Sequence[str], toolkit: Toolkit, progress: Callable[[str], None]) -> Path:
    """Compile beside the cache entry and rename: a reader sees a whole entry or none. Under the lock a leftover of a
    killed build is cleared away."""
    entry = cache_dir() / builder.digest(source, arch, toolkit.cuda)
    with one_process(entry.with_suffix(".lock")):
        if (entry / LIBRARY).is_file() and (entry / METADATA).is_file():
            return entry / LIBRARY
        unfinished = entry.with_suffix(".unfinished")
        for leftover in (entry, unfinished):
            if leftover.exists():
                shutil.rmtree(leftover)
        try:
            _compile(source, arch, toolkit, unfinished, progress)
            if builder.read_metadata(unfinished).digest != entry.name:
                raise BuildError(f"{source} was changed while it was being compiled; run `normswap build` again")
            unfinished.rename(entry)
        finally:
            if unfinished.exists():
                shutil.rmtree(unfinished)
    return entry / LIBRARY


def _compile(source: Path, arch: Sequence[str], toolkit: Toolkit, out: Path, progress: Callable[[str], None]) -> Path:
    """Compile into ``out`` what has changed since the last time: the cache keeps the objects of each sources folder."""
    work = cache_dir() / "build" / builder.work_key(source, arch, toolkit)
    with one_process(work.with_suffix(".lock")):
        return builder.compile_library(source, arch, toolkit, out, progress, work=work)


@contextmanager
def one_process(lock: Path) -> Iterator[None]:
    """Wait until no other process is in a block of the same ``lock``. The lock is the system's, so it dies with its
    process. Raises BuildError after LOCK_SECONDS, OSError where the cache cannot be written."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(lock)
    try:
        held.acquire(timeout=LOCK_SECONDS)
    except Timeout as error:
        raise BuildError(
            f"another process has been compiling the kernels for {LOCK_SECONDS:.0f} s; "
            f"end the one that holds {error.lock_file}"
        ) from error
    try:
        yield
    finally:
        held.release()


def say(line: str) -> None:
    """Tell a line on stderr."""
    print(f"normswap: {line}", file=sys.stderr, flush=True)


def dotted(cuda: int) -> str:
    """13.0 for 13000."""
    return f"{cuda // 1000}.{cuda % 1000 // 10}"
