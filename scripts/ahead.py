"""Code that torch.compile makes, made ahead: by several processes at once, in Inductor's cache on the disk."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import children


def compile_ahead(script: str, shares: Sequence[Sequence[str]], at_once: int) -> None:
    """Run ``script --compile-only`` with each of ``shares``. What one could not compile is told, and compiled again
    where it is timed."""
    started = time.time() - 1.0  # times of files are coarser
    command = [sys.executable, str(Path(__file__).with_name(script)), "--compile-only"]
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        for share, done in zip(shares, pool.map(lambda share: children.run([*command, *share]), shares), strict=True):
            if done.returncode != 0:
                print(f"not compiled ahead: {', '.join(share)}: {done.stderr[-1000:]}", flush=True)
    forget_fastest(started)


def forget_fastest(since: float) -> None:
    """Drop which variants of kernels were the fastest ``since`` then: they were timed beside others. The code stays."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for chosen in Path(cache_dir()).rglob("*.best_config"):
        with contextlib.suppress(FileNotFoundError):
            if chosen.stat().st_mtime >= since:
                chosen.unlink()
