"""What ``normswap env`` shows."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from normswap import builder, native, nodes
from normswap.builder import BuildError


def environment() -> dict[str, str]:
    """Versions, GPU, compilers, and where the libraries come from or why there are none."""
    found = native.status()
    driver = native.driver_cuda()
    return {
        "normswap": _version("normswap"),
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": torch.__version__,
        "torch CUDA": torch.version.cuda or "none (a CPU build)",
        "GPU": _gpus(),
        "driver CUDA": native.dotted(driver) if driver else "no NVIDIA driver",
        "nvcc": _told(lambda: _compiler(builder.find_toolkit().nvcc)),
        "host compiler": _told(lambda: _compiler(builder.host_compiler())),
        "library": found.origin if found.available else f"none: {found.reason}",
        "library path": str(found.path or "-"),
        "library digest": found.digest or "-",
        "cache": _told(lambda: str(native.cache_dir())),
        "NORMSWAP_BUILD": os.environ.get("NORMSWAP_BUILD", "not set"),
        "autograd nodes": nodes.status(),
    }


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none that torch can use"
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{device.name} (sm_{device.major}{device.minor})" for device in devices)


def _compiler(path: str | Path) -> str:
    return f"{path} ({builder.compiler_version(path)})"


def _told(question: Callable[[], str]) -> str:
    try:
        return question()
    except BuildError as error:
        return f"none: {error}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed (run from its sources)"
