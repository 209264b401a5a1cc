"""These tests need a CUDA device and the compiled library; without either they fail, they do not skip."""

from __future__ import annotations

import pytest
import torch

from normswap import native, nodes


@pytest.fixture(scope="session", autouse=True)
def library() -> None:
    assert torch.cuda.is_available(), "tests/gpu needs a CUDA device; run it through scripts/gpu_check"
    status = native.load(build=True)
    assert status.available, status.reason
    nodes.load(compiling=True)
    assert not nodes.status().startswith("none"), nodes.status()
