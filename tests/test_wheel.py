"""What `pip wheel .` makes: with nvcc a wheel that holds the library, without it a pure one; both hold the sources."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from normswap import builder

ROOT = Path(__file__).resolve().parent.parent


needs_nvcc = pytest.mark.usefixtures("nvcc")


@pytest.fixture
def project(tmp_path: Path, tiny_sources: Path) -> Path:
    """This repository's packaging around a csrc that compiles in seconds and a package that imports little."""
    folder = tmp_path / "project"
    files = ["pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "scripts/build_library.py", "scripts/build_wheel"]
    for name in [
        *files,
        *(f"normswap/{f}" for f in ("builder.py", "native.py", "py.typed", "ops/__init__.py", "rules/__init__.py")),
    ]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "normswap/__init__.py").write_text("")
    (folder / "normswap/rules/__init__.py").write_text("")
    (folder / "normswap/nodes").mkdir()
    (folder / "normswap/nodes/__init__.py").write_text("")
    (folder / "normswap/nodes/nodes.cpp").write_text('extern "C" int nodes() { return 1; }\n')
    shutil.copytree(tiny_sources, folder / "csrc")
    (folder / "csrc/row").mkdir()
    (folder / "csrc/twice.cu").rename(folder / "csrc/row/twice.cu")
    return folder


def pip_wheel(project: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-v", "-w", "dist"]
    env = {name: value for name, value in os.environ.items() if name not in ("NORMSWAP_BUILD", "NORMSWAP_ARCH")}
    return subprocess.run(
        command, cwd=project, env={**env, **environment}, text=True, capture_output=True, check=False, timeout=500
    )


def the_wheel(project: Path) -> zipfile.ZipFile:
    (wheel,) = (project / "dist").glob("*.whl")
    return zipfile.ZipFile(wheel)


def read(wheel: zipfile.ZipFile, end: str) -> str:
    """The text of the one file whose name ends so."""
    (name,) = [name for name in wheel.namelist() if name.endswith(end)]
    return wheel.read(name).decode()


def libraries(project: Path) -> tuple[str, str]:
    """The kernels' and that of autograd's nodes, for the torch that is here."""
    return builder.LIBRARY, builder.nodes_name(project / "normswap/nodes/nodes.cpp")


SOURCES = {"normswap/nodes/nodes.cpp", "normswap/csrc/register.cpp", "normswap/csrc/row/twice.cu"}


@pytest.mark.parametrize(
    ("environment", "reason"),
    [({"CUDA_HOME": "/nowhere"}, "CUDA_HOME is /nowhere, which holds no bin/nvcc"), ({"NORMSWAP_BUILD": "never"}, "")],
)
def test_without_a_compiler_the_wheel_is_pure(project: Path, environment: dict[str, str], reason: str) -> None:
    (project / "normswap/lib").mkdir()  # what `normswap build --out` left in the checkout stays there
    (project / "normswap/lib" / builder.LIBRARY).write_bytes(b"")
    done = pip_wheel(project, **environment)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert f"a pure wheel, without the compiled kernels: {reason}" in said and "--no-build-isolation" in said
    wheel = the_wheel(project)
    assert str(wheel.filename).endswith("-py3-none-any.whl")
    names = set(wheel.namelist())
    assert names >= SOURCES | {"normswap/native.py", "normswap/rules/__init__.py", "normswap/py.typed"}
    assert not [name for name in names if name.startswith(("normswap/lib", "scripts", "tests"))]
    assert "Root-Is-Purelib: true" in read(wheel, "/WHEEL")
    assert "License-Expression: Apache-2.0" in read(wheel, "/METADATA")
    assert read(wheel, "/licenses/LICENSE") == (ROOT / "LICENSE").read_text()


LOAD = """
from normswap import native
found = native.load()
print(found.available, found.origin, found.path, found.reason)
"""


@needs_nvcc
def test_with_nvcc_the_wheel_holds_a_library_that_loads(project: Path, tmp_path: Path, cache: Path) -> None:
    done = pip_wheel(project)
    assert done.returncode == 0, done.stdout + done.stderr
    wheel = the_wheel(project)
    assert str(wheel.filename).endswith(f"-py3-none-linux_{platform.machine()}.whl")
    names = set(wheel.namelist())
    assert names >= SOURCES | {f"normswap/lib/{name}" for name in (*libraries(project), builder.METADATA)}
    assert "Root-Is-Purelib: false" in read(wheel, "/WHEEL")

    installed = tmp_path / "installed"
    wheel.extractall(installed)
    metadata = builder.read_metadata(installed / "normswap/lib")
    assert metadata.arch == builder.WHEEL_ARCH and not metadata.ptx
    assert loaded_from(installed) == f"True package {installed}/normswap/lib/{builder.LIBRARY} "
    assert not cache.exists()

    with (installed / "normswap/csrc/row/twice.cu").open("a") as kernel:
        kernel.write("// changed\n")
    assert loaded_from(installed).startswith("False none None")
    assert "compiled from other sources than this package ships" in loaded_from(installed)


def loaded_from(folder: Path) -> str:
    """What a process that has ``folder`` as its site-packages finds, NVCC or not."""
    env = {**os.environ, "PYTHONPATH": str(folder), "NORMSWAP_BUILD": "never"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD], cwd=folder, env=env, text=True, capture_output=True, check=True, timeout=120
    )
    return done.stdout.rstrip("\n")


def build_wheel(project: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What scripts/build_wheel does there, into the folder dist."""
    env = {**os.environ, "PYTHON": sys.executable, "NORMSWAP_ARCH": "90", **environment}
    return subprocess.run(
        [project / "scripts/build_wheel"], env=env, text=True, capture_output=True, check=False, timeout=500
    )


@needs_nvcc
def test_a_manylinux_wheel_brings_no_library_of_torch_s(project: Path, tmp_path: Path, cache: Path) -> None:
    done = build_wheel(project, NORMSWAP_ARCH="90+PTX")
    assert done.returncode == 0, done.stdout + done.stderr
    wheel = the_wheel(project)
    assert re.search(
        rf"-py3-none-(manylinux_2_\d+_{platform.machine()}\.)*manylinux_2_34_{platform.machine()}", str(wheel.filename)
    )
    assert {name for name in wheel.namelist() if ".so" in name} == {
        f"normswap/lib/{name}" for name in libraries(project)
    }
    installed = tmp_path / "installed"
    wheel.extractall(installed)
    metadata = builder.read_metadata(installed / "normswap/lib")
    assert metadata.arch == ("90",) and metadata.ptx
    assert loaded_from(installed) == f"True package {installed}/normswap/lib/{builder.LIBRARY} "


def test_without_a_compiler_there_is_no_manylinux_wheel(project: Path) -> None:
    done = build_wheel(project, CUDA_HOME="/nowhere")
    assert done.returncode == 1 and "the kernels were not compiled" in done.stderr
    assert not (project / "dist").exists()


@needs_nvcc
def test_a_compiler_error_stops_the_wheel(project: Path) -> None:
    with (project / "csrc/row/twice.cu").open("a") as kernel:
        kernel.write("int broken = undefined_name;\n")
    done = pip_wheel(project, NORMSWAP_ARCH="90")
    assert done.returncode != 0 and not list(project.glob("dist/*.whl"))
    assert 'identifier "undefined_name" is undefined' in done.stdout + done.stderr


def test_sdist_holds_what_the_wheel_needs(project: Path) -> None:
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation"]
    subprocess.run(command, cwd=project, capture_output=True, check=True, timeout=120)
    (archive,) = (project / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert names >= {
        "LICENSE",
        "normswap/nodes/nodes.cpp",
        "scripts/build_wheel",
        "csrc/row/twice.cu",
        "csrc/register.cpp",
        "scripts/build_library.py",
        "pyproject.toml",
    }
