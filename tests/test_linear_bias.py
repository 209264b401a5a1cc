"""Linear -> scale -> BatchNorm in training: where the Linear's bias goes, with a stand-in for the kernel on the CPU."""

from __future__ import annotations

import copy
import sys
from typing import Any

import batch_norm_stand_in
import pytest
import torch
import torch.nn.functional as F
from linear_bias import (
    CHANNELS,
    FEATURES,
    Parts,
    by_bias,
    by_options,
    by_scale,
    check_not_finite,
    check_rounding,
    check_training,
)
from torch import Tensor

from normswap import ops, reference


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels serve tensors of the CPU."""
    monkeypatch.setattr(ops, "native_serves", lambda *tensors: True)
    batch_norm_stand_in.install(monkeypatch)


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ``input_bias`` of every call of the op, in order."""
    found: list[Any] = []
    right = ops.scale_batch_norm

    def op(*args: Any, **rest: Any) -> Tensor:
        found.append(rest.get("input_bias"))
        return right(*args, **rest)

    monkeypatch.setattr(ops, "scale_batch_norm", op)
    return found


@by_bias
@by_scale
@by_options
@pytest.mark.usefixtures("kernel")
@pytest.mark.case("bn-momentum", "bn-no-running-stats", "bn-affine-false", "offset-mean")
def test_training_is_that_of_float64(
    bias: float | None, scale_shape: tuple[int, ...] | None, options: dict[str, Any], handed_over: list[Any]
) -> None:
    parts = Parts(bias, scale_shape, **options)
    check_training(parts)
    check_rounding(parts)
    assert len(handed_over) == 3 and all(given is parts.gemm.bias for given in handed_over)


@by_scale
@pytest.mark.usefixtures("kernel")
def test_a_bias_that_is_not_finite_spoils_its_column(scale_shape: tuple[int, ...] | None) -> None:
    check_not_finite(Parts(1.0, scale_shape))


@by_bias
@by_options
def test_without_the_kernels_the_linear_adds_its_bias(
    bias: float | None, options: dict[str, Any], handed_over: list[Any]
) -> None:
    ours = Parts(bias, (CHANNELS,), **options)
    theirs, x = copy.deepcopy(ours), torch.randn(9, FEATURES)
    assert torch.equal(ours.fused(x), theirs(x))
    assert all(torch.equal(*pair) for pair in zip(ours.buffers(), theirs.buffers(), strict=True))
    assert handed_over == [None]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_in_other_dtypes_the_linear_adds_its_bias(dtype: torch.dtype, handed_over: list[Any]) -> None:
    parts = Parts(100.0, (CHANNELS,)).to(dtype)
    x = torch.randn(9, FEATURES, dtype=dtype)
    affine = (parts.bn.weight, parts.bn.bias, True, 0.0, parts.bn.eps)
    assert torch.equal(parts.fused(x), ops.scale_batch_norm(parts.gemm(x), parts.scale, None, None, *affine))
    assert handed_over == [None, None]


@pytest.mark.skipif(
    torch.__version__ < (2, 11), reason="PyTorch 2.10 compiles as if it were exporting: the original code is compiled"
)
@pytest.mark.usefixtures("kernel")
@pytest.mark.case("torch-compile")
def test_under_torch_compile_the_linear_adds_its_bias(handed_over: list[Any]) -> None:
    parts, x = Parts(100.0, (CHANNELS,)), torch.randn(9, FEATURES)
    compiled = torch.compile(parts.fused, backend="eager", fullgraph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["normswap.ops.scale_batch_norm"], "native_serves", lambda *tensors: False)
        out = compiled(x)
    torch.testing.assert_close(out, parts(x), rtol=1e-4, atol=1e-4)
    assert handed_over == [None]


@pytest.mark.usefixtures("kernel")
@pytest.mark.case("bad-shapes")
def test_a_linear_with_a_bias_of_another_shape_runs_as_it_is(handed_over: list[Any]) -> None:
    parts = Parts(100.0, (CHANNELS,))
    parts.gemm.bias = torch.nn.Parameter(torch.randn(CHANNELS + 1))
    before = parts.bn.num_batches_tracked.clone()
    with pytest.raises(RuntimeError) as ours:
        parts.fused(torch.randn(9, FEATURES))
    with pytest.raises(RuntimeError) as theirs:
        parts.gemm(torch.randn(9, FEATURES))
    assert str(ours.value) == str(theirs.value)
    assert handed_over == [] and torch.equal(parts.bn.num_batches_tracked, before)


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("scale_shape", (None, (), (5,), (1, 5)))
def test_the_op_without_kernels_adds_the_bias_itself(scale_shape: tuple[int, ...] | None, training: bool) -> None:
    z, weight, bias, shift = torch.randn(9, 5), torch.randn(5), torch.randn(5), 100 * torch.randn(5)
    scale = None if scale_shape is None else torch.randn(scale_shape)
    ours, theirs = ([torch.zeros(5), torch.ones(5)] for _ in range(2))
    out = ops.scale_batch_norm(z, scale, *ours, weight, bias, training, 0.3, 1e-3, input_bias=shift)
    u = z + shift if scale is None else (z + shift) * scale
    assert torch.equal(out, F.batch_norm(u, *theirs, weight, bias, training, 0.3, 1e-3))
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.usefixtures("kernel")
@pytest.mark.case("double-backward")
def test_gradients_of_gradients_know_the_bias() -> None:
    z, shift, scale, weight, bias = (torch.randn(shape) for shape in ((9, 5), (5,), (5,), (5,), (5,)))
    dy = torch.randn(9, 5)
    found = []
    for function, dtype in ((ops.scale_batch_norm, torch.float32), (reference.scale_batch_norm, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (z, shift, scale, weight, bias)]
        out = function(leaves[0], leaves[2], None, None, *leaves[3:], True, 0.1, 1e-2, input_bias=leaves[1])
        first = torch.autograd.grad(out, leaves, dy.to(dtype), create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in first), leaves[:4])
        found.append([gradient.detach() for gradient in (*first, *twice)])
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max() + 0.1))


@pytest.mark.usefixtures("kernel")
def test_the_bias_may_change_before_backward() -> None:
    """As PyTorch lets it: no gradient depends on its value."""
    parts, x, dy = Parts(100.0, (CHANNELS,)), torch.randn(9, FEATURES), torch.randn(9, CHANNELS)
    gradients = []
    for out in (parts.fused(x), parts(x)):
        with torch.no_grad():
            parts.gemm.bias.add_(1.0)
        parts.zero_grad()
        out.backward(dy)
        gradients.append(parts.gemm.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("kernel")
def test_a_bias_that_learns_alone_or_not_at_all() -> None:
    for learns in (True, False):
        parts = Parts(100.0, (CHANNELS,)).requires_grad_(False)
        parts.gemm.bias.requires_grad_(learns)
        x = torch.randn(9, FEATURES, requires_grad=not learns)
        parts.fused(x).sum().backward()
        assert (parts.gemm.bias.grad is not None) == learns == (x.grad is None)


@pytest.mark.parametrize("scale_shape", (None, (), (5,), (1, 5)))
@pytest.mark.parametrize("zero", (False, True))
@pytest.mark.usefixtures("kernel")
@pytest.mark.case("bn-frozen")
def test_gradients_by_running_statistics(scale_shape: tuple[int, ...] | None, zero: bool) -> None:
    given = [torch.randn(9, 5), None if scale_shape is None else torch.randn(scale_shape), *torch.randn(2, 5)]
    if zero and given[1] is not None:
        given[1].zero_()
    (mean, var), dy, found = (torch.randn(5), torch.rand(5) + 0.1), torch.randn(9, 5), []
    for function, dtype in ((ops.scale_batch_norm, torch.float32), (reference.scale_batch_norm, torch.float64)):
        z, s, weight, bias = (None if t is None else t.to(dtype).requires_grad_() for t in given)
        out = function(z, s, mean.to(dtype), var.to(dtype), weight, bias, False, 0.0, 1e-2)
        leaves = [t for t in (z, s, weight, bias) if t is not None]
        found.append([out.detach(), *torch.autograd.grad(out, leaves, dy.to(dtype))])
    for ours, exact in zip(*found, strict=True):
        assert ours.shape == exact.shape
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)
