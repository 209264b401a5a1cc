"""Autograd's nodes in C++, an optional library beside the kernels: with it nothing of a swapped norm's backward is
Python, and of its forward less. It is bound to one version of torch, as the kernels are not, and compiled by
``normswap build --nodes`` alone; where there is none the autograd Functions of ``ops`` do the same."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch

from normswap import builder, native
from normswap.builder import BuildError
from normswap.nodes import formulas
from normswap.ops import dispatch

SOURCE = Path(__file__).with_name("nodes.cpp")
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
LIBRARIES = ("-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", "-Wl,-s")
NORMS = ("layer_norm", "rms_norm", "layer_norm_with_options", "rms_norm_with_options", "group_norm")
"""Whose native ops record gradients by themselves once the library is loaded."""

_reason = "the kernels are not loaded"


def library_name() -> str:
    """Of the library for this torch and these sources: another is never loaded."""
    text = "\0".join((*FLAGS, *LIBRARIES, torch.__version__, torch.version.git_version or "", platform.machine()))
    digest = hashlib.sha256(text.encode() + SOURCE.read_bytes()).hexdigest()[:16]
    return f"libnormswap_nodes-{torch.__version__}-{digest}.so"


def find() -> Path | None:
    """The library where it was compiled: in the package or in the cache."""
    folders = native.PACKAGE / "lib", native.cache_dir() / "nodes"
    return next((path for folder in folders if (path := folder / library_name()).is_file()), None)


def build(folder: Path | None = None) -> Path:
    """Compile the library into ``folder``, the user's cache if None, where one compiled before is taken as it is.

    Raises BuildError with the compiler's own text, or naming what is missing.
    """
    if folder is None and (found := find()) is not None:
        return found
    folder = folder or native.cache_dir() / "nodes"
    folder.mkdir(parents=True, exist_ok=True)
    headers, libraries = builder.torch_folder() / "include", builder.torch_folder() / "lib"
    includes = ("-isystem", str(headers), "-isystem", str(headers / "torch/csrc/api/include"))
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
        made = Path(scratch, "nodes.so")
        command = [
            builder.host_compiler(),
            *FLAGS,
            *includes,
            str(SOURCE),
            "-o",
            str(made),
            f"-L{libraries}",
            *LIBRARIES,
        ]
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0:
            raise BuildError(f"autograd's nodes do not compile here:\n{done.stdout.strip()}")
        os.replace(made, folder / library_name())
    return folder / library_name()


def load() -> None:
    """Use the library if there is one; to be called when the kernels are loaded."""
    global _reason
    _reason = "not compiled; `normswap build --nodes` does it"
    if (path := find()) is None:
        return
    try:
        formulas.register()
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        _reason = f"{path} cannot be loaded ({error}); compile it again: `normswap build --nodes`"
        return
    _reason = ""
    dispatch.record_natively(NORMS)


def status() -> str:
    """Where the library is, or why it does not serve."""
    native.status()
    return str(find()) if not _reason else f"none: {_reason}"
