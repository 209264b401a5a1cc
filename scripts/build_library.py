"""Build steps of the wheel: csrc/ goes in as package data, and the compiled library too where nvcc and torch are there.

With the library the wheel is py3-none-linux_x86_64 (no Python ABI is used), without it py3-none-any.
"""

import functools
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (".cpp", ".cu", ".cuh", ".h")


def load_builder():
    """normswap/builder.py alone: importing the package would import torch and every dependency."""
    spec = importlib.util.spec_from_file_location("normswap_builder", ROOT / "normswap" / "builder.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def why_not() -> str:
    """Why the library cannot be compiled here, "" when it can."""
    if os.environ.get("NORMSWAP_BUILD") == "never":
        return "NORMSWAP_BUILD=never"
    builder = load_builder()
    try:
        builder.find_toolkit()
        builder.host_compiler()
    except builder.BuildError as error:
        return str(error)
    for module, package in (("torch", "torch"), ("ninja", "ninja")):
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed in the build environment; use --no-build-isolation"
    return ""


class BuildPy(build_py):
    """Copy csrc/ into the package, and compile it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "normswap"
        shutil.rmtree(package / "csrc", ignore_errors=True)
        (package / "csrc").mkdir(parents=True)
        for file in sorted((ROOT / "csrc").iterdir()):
            if file.suffix in SOURCES:
                shutil.copy2(file, package / "csrc" / file.name)
        shutil.rmtree(package / "lib", ignore_errors=True)
        reason = why_not()
        if reason:
            print(f"normswap: a pure wheel, without the compiled library: {reason}", file=sys.stderr)
            return
        builder = load_builder()
        arch = os.environ.get("NORMSWAP_ARCH", ",".join(builder.WHEEL_ARCH)).split(",")
        tell = functools.partial(print, "normswap:", file=sys.stderr, flush=True)
        builder.compile_library(ROOT / "csrc", builder.check_arch(arch), builder.find_toolkit(), package / "lib", tell)


class BdistWheel(bdist_wheel):
    """Tag the wheel for the platform when it holds the library."""

    def get_tag(self) -> tuple[str, str, str]:
        if (Path(self.bdist_dir) / "normswap" / "lib").is_dir() or not why_not():
            return "py3", "none", "linux_x86_64"
        return "py3", "none", "any"
