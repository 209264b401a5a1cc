from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # the cores are shared with the other workers, and by what they start
    os.environ["OMP_NUM_THREADS"] = "1"

import torch

from normswap import builder, ops

KERNEL = """
#include <cuda_runtime.h>
__global__ void twice_kernel(float* x) { x[threadIdx.x] *= 2; }
cudaError_t twice(float* x, cudaStream_t stream) {
  twice_kernel<<<1, 32, 0, stream>>>(x);
  return cudaGetLastError();
}
"""

OPERATOR = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <cuda_runtime_api.h>
cudaError_t twice(float* x, cudaStream_t stream);
extern "C" __attribute__((visibility("default"))) int normswap_answer() { return 42; }
void twice_cuda(torch::stable::Tensor x) { twice(static_cast<float*>(x.mutable_data_ptr()), nullptr); }
STABLE_TORCH_LIBRARY(normswap_tiny, m) { m.def("twice(Tensor(a!) x) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(normswap_tiny, CUDA, m) { m.impl("twice", TORCH_BOX(&twice_cuda)); }
"""


def pytest_collectstart() -> None:
    """What a file of tests draws while it is imported is drawn from a seed too, whatever was imported before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How convolutions were folded so far."""
    seen: list[str] = []
    real = ops.convolution_batch_norm_eval
    monkeypatch.setattr(ops, "convolution_batch_norm_eval", lambda *a, **k: seen.append(k["folding"]) or real(*a, **k))
    return seen


@pytest.fixture
def nvcc() -> builder.Toolkit:
    """The CUDA toolkit of this machine; a test that compiles is skipped where there is none."""
    try:
        return builder.find_toolkit()
    except builder.BuildError as error:
        pytest.skip(f"this test compiles: {error}")


@pytest.fixture
def tiny_sources(tmp_path: Path) -> Path:
    """A csrc of the same build as ours - one kernel, one stable-ABI file - that compiles in seconds."""
    folder = tmp_path / "tiny sources" / "csrc"  # the space is there on purpose
    folder.mkdir(parents=True)
    (folder / "twice.cu").write_text(KERNEL)
    (folder / "register.cpp").write_text(OPERATOR)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache; child processes see it too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "normswap"


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with the module ``zoo``."""
    from checkpoints import ZOO, forget_zoo

    (tmp_path / "zoo.py").write_text(ZOO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget_zoo()
    yield tmp_path
    forget_zoo()


@pytest.fixture
def quiet() -> Iterator[None]:
    """Nobody is told that optimize returns a copy."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returns a copy.*")
        yield


@pytest.fixture
def fresh_caches() -> Iterator[None]:
    """Nothing is compiled before or after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
