"""Code that torch.compile makes, made ahead: by several processes at once, in Inductor's cache on the disk."""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Sequence
from pathlib import Path

import children


def compile_ahead(script: str, shares: Sequence[Sequence[str]], at_once: int) -> None:
    """Run ``script --compile-only`` with each of ``shares``. What one could not compile is told, and compiled again
    where it is timed."""
    command = [sys.executable, str(Path(__file__).with_name(script)), "--compile-only"]
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        for share, done in zip(shares, pool.map(lambda share: children.run([*command, *share]), shares), strict=True):
            if done.returncode != 0:
                print(f"not compiled ahead: {', '.join(share)}: {done.stderr[-1000:]}", flush=True)
    forget_fastest()


def forget_fastest() -> None:
    """Drop which variant of a kernel was the fastest: it was timed beside others. The code itself stays."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for chosen in Path(cache_dir()).rglob("*.best_config"):
        chosen.unlink()
