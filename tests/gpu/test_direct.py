"""Calls that record no gradient go to one native op, which gives the bits of the general way or declines."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
from limits import same_bits
from torch import Tensor

from normswap import ops
from normswap.activation import CODES, Activation
from normswap.ops import dispatch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def both_ways(call: object, x: Tensor) -> tuple[Tensor, Tensor]:
    """Without a gradient, and with one to record."""
    assert callable(call)
    with torch.no_grad():
        direct = call(x)
    return direct, call(x.clone(memory_format=torch.preserve_format).requires_grad_()).detach()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_and_strides_are_those_of_the_general_way(dtype: torch.dtype) -> None:
    x, w, b = drawn(5, 7, 24, dtype=dtype), drawn(24, dtype=dtype), drawn(24).to(dtype)
    image, gw = drawn(3, 8, 6, 5, dtype=dtype), drawn(8, dtype=dtype)
    calls = [
        (lambda x: ops.layer_norm(x, (24,), w, b), x),
        (lambda x: ops.layer_norm(x, (24,), w.float()), x),
        (lambda x: ops.layer_norm(x, (7, 24)), x),
        (lambda x: ops.rms_norm(x, (24,), w, 1e-6, weight_offset=1.0, cast_before_weight=True), x),
        (lambda x: ops.rms_norm(x, (24,)), x),
        (lambda x: ops.l1_norm(x, -1, 1e-3, 0.1), x),
        (lambda x: ops.l1_norm(x, 2), x),
    ]
    for activation, layout in itertools.product(CODES, (torch.contiguous_format, torch.channels_last)):
        norm = lambda x, act=activation: ops.group_norm(x, 4, gw, gw, 1e-5, Activation(act))  # noqa: E731
        calls.append((norm, image.to(memory_format=layout)))
    for call, given in calls:
        direct, general = both_ways(call, given)
        assert same_bits(direct, general) and direct.stride() == general.stride() and not direct.requires_grad


def test_what_is_not_plain_is_declined() -> None:
    x, w = drawn(6, 24), drawn(24)
    group_norm = dispatch._direct["group_norm"]

    def layer_norm(*given: Any) -> Tensor | None:
        out, total = dispatch._direct["layer_norm"](*given)
        assert total is None
        return out

    assert layer_norm(x, 1, w, w, 1e-5) is not None
    for given in (x.double(), x[:, ::2], x[:0], x.int()):
        assert layer_norm(given, 1, None, None, 1e-5) is None
    assert layer_norm(x.t(), 1, None, None, 1e-5) is not None  # what is permuted has a kernel of its own
    for weight in (w.half(), w[:12], w.cpu(), w.double(), drawn(48)[::2], w[None]):
        assert layer_norm(x, 1, weight, None, 1e-5) is None
    assert layer_norm(x, 0, None, None, 1e-5) is None and layer_norm(x, 3, None, None, 1e-5) is None
    assert layer_norm(x.half(), 1, w, w.half(), 1e-5) is None
    image = drawn(2, 8, 4, 4)
    for given, groups in ((image, 3), (image, 0), (image[:, :, ::2], 4), (drawn(1, 8, 1, 1), 8), (drawn(8), 2)):
        assert group_norm(given, groups, None, None, 1e-5, 0, 0.0, 0.0, None, False) is None


def test_who_has_a_say_gets_the_general_way() -> None:
    x = drawn(6, 24)
    assert dispatch.direct("layer_norm", x) is not None
    leaf = x.clone().requires_grad_()
    for name in ("layer_norm", "rms_norm", "l1_norm", "group_norm"):
        ways = dispatch._direct if name in dispatch._by_node else dispatch._recording
        assert dispatch.direct(name, leaf) is ways[name]
        with torch.no_grad():
            assert dispatch.direct(name, leaf) is dispatch._direct[name]
    assert dispatch.direct("l2_norm", leaf) is None
    assert dispatch.direct("layer_norm", x, x.cpu()) is None
    with torch.autocast("cuda"):
        assert dispatch.direct("layer_norm", x) is None
    torch.func.vmap(lambda row: row if dispatch.direct("layer_norm", row) is None else pytest.fail("taken"))(x)


def test_no_memory_is_pytorchs_error() -> None:
    x = torch.empty(2**20, 24, device="cuda")
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + x.nbytes / 2) / total)
    try:
        with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
            ops.layer_norm(x, (24,))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(
    "call",
    ["ops.batch_norm(x, v, v.clone(), v, v, True)", "ops.batch_norm_eval(x, v, v.clone())", "ops.layer_norm(x, (24,))"],
)
@pytest.mark.parametrize("grad", [False, True])
def test_the_first_call_of_a_process_loads_the_library(call: str, grad: bool) -> None:
    code = (
        "import torch; from normswap import native, ops; "
        f"v = torch.ones(24, device='cuda'); x = torch.randn(6, 24, device='cuda', requires_grad={grad}); "
        f"assert not native.available(); {call}; assert native.available()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
