"""Find or compile the library of autograd's nodes (``nodes`` says what it is), without importing PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from normswap import builder, native

SOURCE = native.PACKAGE / "nodes" / "nodes.cpp"


def _cache() -> Path:
    return native.cache_dir() / "nodes"


def find() -> Path | None:
    """The library for this torch where it was compiled: in the package or in the cache."""
    name, folders = builder.nodes_name(SOURCE), [native.PACKAGE / "lib"]
    with contextlib.suppress(builder.BuildError):  # of one who has no cache
        folders.append(_cache())
    return next((path for folder in folders if (path := folder / name).is_file()), None)


def build(out: Path | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """Compile the library into ``out``, the user's cache if None, where one compiled before is taken as it is.

    Raises BuildError with the compiler's own text, or naming what is missing.
    """
    with native.one_process(_cache() / "nodes.lock"):
        if out is None and (found := find()) is not None:
            return found
        (progress or native.say)(f"compiling autograd's nodes for torch {builder.torch_version()} ...")
        return builder.compile_nodes(SOURCE, out or _cache())


@contextlib.contextmanager
def built_beside(out: Path | None = None, progress: Callable[[str], None] | None = None) -> Iterator[Future[Path]]:
    """While the block compiles the kernels, ``build`` in a thread, which is done after the block."""
    with ThreadPoolExecutor(1) as beside:
        yield beside.submit(build, out, progress=progress)
