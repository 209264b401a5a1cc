"""The wheel's build steps (named in pyproject.toml): csrc/ goes into the package, and where nvcc and torch are, the
compiled libraries too: the kernels, for any torch, and autograd's nodes, for the installed one.

With the library the wheel is py3-none-linux_x86_64 (it uses no Python ABI), without it py3-none-any.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def load_builder() -> ModuleType:
    """normswap/builder.py alone: importing the package would import torch and every dependency."""
    spec = importlib.util.spec_from_file_location("normswap_builder", ROOT / "normswap" / "builder.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{ROOT}/normswap/builder.py cannot be loaded")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def why_pure() -> str:
    """Why the library cannot be compiled here, or ""."""
    if os.environ.get("NORMSWAP_BUILD") == "never":
        return "NORMSWAP_BUILD=never"
    builder = load_builder()
    try:
        builder.find_toolkit()
        builder.host_compiler()
        builder.torch_folder()
        builder.find_ninja()
    except builder.BuildError as error:
        return str(error)
    return ""


class BuildPy(build_py):
    """Copy csrc/ into the package and compile it. An editable install finds csrc/ where it is."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib, "normswap")
        for folder in (package / "csrc", package / "lib"):
            if folder.exists():  # of an earlier build in this folder
                shutil.rmtree(folder)
        for source in load_builder().sources(ROOT / "csrc"):
            copied = package / source.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copied)
        if reason := why_pure():
            tell(f"a pure wheel, without the compiled kernels: {reason}")
            tell("for a wheel with them: `pip install torch ninja`, then `pip wheel . --no-build-isolation --no-deps`")
        else:
            compile_into(package / "lib")


def compile_into(folder: Path) -> None:
    """Compile for NORMSWAP_ARCH, by default every architecture the wheels serve. "80,90+PTX" runs on later GPUs too,
    for the bytes of one architecture more."""
    builder, source = load_builder(), ROOT / "csrc"
    wanted, plus, _ = os.environ.get("NORMSWAP_ARCH", ",".join(builder.WHEEL_ARCH)).partition("+PTX")
    arch, ptx, toolkit = wanted.split(","), bool(plus), builder.find_toolkit()
    work = ROOT / "build" / builder.work_key(source, arch, toolkit, ptx)  # a second wheel compiles what changed
    builder.compile_library(source, arch, toolkit, folder, tell, ptx=ptx, work=work)
    tell("compiling autograd's nodes for the torch that is installed ...")
    builder.compile_nodes(ROOT / "normswap" / "nodes" / "nodes.cpp", folder)


def tell(line: str) -> None:
    print(f"normswap: {line}", file=sys.stderr, flush=True)


class BdistWheel(bdist_wheel):
    """Tag the wheel for the platform, and for every Python 3, when it holds the library."""

    def finalize_options(self) -> None:
        if not why_pure():
            self.distribution.has_ext_modules = lambda: True
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]
