"""Each op on the second GPU while the first is the current one, in a process of its own: what an op breaks there is not
taken for another's fault."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

CALLS = {
    "layer_norm": ((5, 12), "ops.layer_norm(x, (12,), w, w)", "F.layer_norm(x, (12,), w, w)"),
    "rms_norm": ((5, 12), "ops.rms_norm(x, (12,), w, 1e-6)", "F.rms_norm(x, (12,), w, 1e-6)"),
    "group_norm": ((4, 12, 5, 3), "ops.group_norm(x, 3, w, w)", "F.group_norm(x, 3, w, w)"),
    "instance_norm": ((4, 12, 5, 3), "ops.instance_norm(x, w, w)", "F.instance_norm(x, weight=w, bias=w)"),
    "l1_norm": ((5, 12), "ops.l1_norm(x) * w", "x / x.abs().mean(-1, keepdim=True) * w"),
}
RUN = """
import torch, torch.nn.functional as F
from normswap import native, ops
native.load(build=False)
shape, call, learning = {shape}, lambda: {call}, {learning}
x = torch.randn(shape, device="cuda:1", requires_grad=learning)
w = torch.randn(12, device="cuda:1", requires_grad=learning)
for _ in range(3):
    y = call()
    if learning:
        torch.autograd.grad(y, (x, w), torch.ones_like(y))
for device in (0, 1):
    torch.cuda.synchronize(device)
assert torch.cuda.current_device() == 0 and y.device == x.device and bool(y.isfinite().all())
"""


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("whose", ("ours", "pytorch"))
@pytest.mark.parametrize("learning", (False, True))
@pytest.mark.case("second-gpu")
def test_it_runs_where_its_tensors_are(name: str, whose: str, learning: bool) -> None:
    shape, ours, theirs = CALLS[name]
    code = RUN.format(shape=shape, call=ours if whose == "ours" else theirs, learning=learning)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
