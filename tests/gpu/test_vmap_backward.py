"""A backward under vmap of a graph that the kernels recorded, with nodes in C++ and without, and what it has saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normswap import ops
from normswap.activation import Activation
from normswap.ops import dispatch

SILU, RELU = Activation("silu"), Activation("relu")


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device="cuda").requires_grad_() for shape in shapes]


def image(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "layer_norm": (lambda x, w, b: ops.layer_norm(x, (8,), w, b), [(6, 8), (8,), (8,)]),
    "rms_norm": (lambda x, w: ops.rms_norm(x, (8,), w, 1e-6), [(6, 8), (8,)]),
    "rms_norm of a sum": (lambda x, r, w: ops.rms_norm(x, (8,), w, 1e-6, residual=r)[0], [(6, 8), (6, 8), (8,)]),
    "layer_norm, silu": (lambda x, w, b: ops.layer_norm(x, (8,), w, b, activation=SILU), [(6, 8), (8,), (8,)]),
    "l1_norm": (lambda x: ops.l1_norm(x), [(6, 8)]),
    "l2_norm": (lambda x: ops.l2_norm(x), [(6, 8)]),
    "rms_norm_dim": (lambda x, w: ops.rms_norm_dim(x, 1, w), [(3, 8, 5), (8,)]),
    "l1_norm of a dim": (lambda x: ops.l1_norm(x, 1), [(3, 8, 5)]),
    "group_norm": (lambda x, w, b: ops.group_norm(x, 2, w, b), [(3, 8, 5, 4), (8,), (8,)]),
    "group_norm, silu": (lambda x, w, b: ops.group_norm(image(x), 2, w, b, 1e-5, SILU), [(3, 8, 5, 4), (8,), (8,)]),
    "batch_norm": (lambda x, w, b: ops.batch_norm(x, None, None, w, b, True), [(3, 8, 5, 4), (8,), (8,)]),
    "batch_norm, add, relu": (
        lambda x, w, b, r: ops.batch_norm(x, None, None, w, b, True, 0.1, 1e-5, RELU, residual=r),
        [(3, 8, 5, 4), (8,), (8,), (3, 8, 5, 4)],
    ),
    "scale_batch_norm": (
        lambda x, s, w, b, c: ops.scale_batch_norm(x, s, None, None, w, b, True, input_bias=c),
        [(9, 8), (8,), (8,), (8,), (8,)],
    ),
    "scale_batch_norm by one": (
        lambda x, s, w, b: ops.scale_batch_norm(x, s, None, None, w, b, True),
        [(9, 8), (), (8,), (8,)],
    ),
}
by_call = pytest.mark.parametrize("name", CALLS)
by_node = pytest.mark.parametrize("nodes", (True, False), ids=("nodes", "functions"))


@by_call
@by_node
@pytest.mark.case("functorch")
def test_a_backward_under_vmap_is_that_of_each(name: str, nodes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not nodes:
        monkeypatch.setattr(dispatch, "_by_node", set())
    call, shapes = CALLS[name]
    given = leaves(*shapes)
    out = call(*given)
    dys = torch.randn(4, *out.shape, device="cuda")
    each = [torch.autograd.grad(out, given, dy, retain_graph=True) for dy in dys]
    expected = [torch.stack(found) for found in zip(*each, strict=True)]
    batched = torch.autograd.grad(out, given, dys, retain_graph=True, is_grads_batched=True)
    mapped = torch.func.vmap(lambda dy: torch.autograd.grad(out, given, dy, retain_graph=True))(dys)
    for found in (batched, mapped):
        for ours, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


def saved_by(function: Callable[[], Any]) -> list[Tensor]:
    found: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        function()
    return found


PLAIN: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (8,), w, b),
    "rms_norm of a sum": lambda x, r, w: F.rms_norm(x + r, (8,), w, 1e-6),
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "group_norm, silu": lambda x, w, b: F.silu(F.group_norm(image(x), 2, w, b)),
    "batch_norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    "batch_norm, add, relu": lambda x, w, b, r: F.relu(F.batch_norm(x, None, None, w, b, True) + r),
    "scale_batch_norm": lambda x, s, w, b, c: F.batch_norm((x + c) * s, None, None, w, b, True),
}


@pytest.mark.parametrize("name", PLAIN)
@by_node
def test_no_more_tensors_are_saved_than_by_pytorch(name: str, nodes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not nodes:
        monkeypatch.setattr(dispatch, "_by_node", set())
    call, shapes = CALLS[name]
    given = leaves(*shapes)
    ours, theirs = (saved_by(lambda f=f: f(*given)) for f in (call, PLAIN[name]))
    assert len(ours) <= len(theirs)
    coefficients = 2 * 4 * 8 if "batch_norm" in name else 0  # four floats a channel where PyTorch keeps two
    assert sum(t.nbytes for t in ours) <= sum(t.nbytes for t in theirs) + coefficients
