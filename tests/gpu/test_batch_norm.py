"""scale_batch_norm, affine and fold_linear on the GPU against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from limits import assert_within, same_bits, tensor
from torch import nn

from normswap import modules, ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCALES = ((), (1,), (96,), (1, 96))


def batch_norm_case(scale_shape: tuple[int, ...], dtype: torch.dtype, rows: int = 300, mean: float = 3.0):
    z, scale = tensor((rows, 96), dtype, mean), tensor((*scale_shape, 1), dtype, -0.5)[..., 0]
    weight, bias = tensor((96,), torch.float32, 0.5), tensor((96,), torch.float32, seed=3)
    running = tensor((96,), torch.float32, 1.0, seed=4), tensor((96,), torch.float32, seed=5).abs() + 0.5
    return z, scale, weight, bias, running


@pytest.mark.parametrize("scale_shape", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.case("bn-unbiased-variance")
def test_scale_batch_norm_training(scale_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for rows in (2, 7, 300, 5000):
        z, scale, weight, bias, (mean, var) = batch_norm_case(scale_shape, dtype, rows)
        ours_mean, ours_var = mean.clone(), var.clone()
        mean64, var64 = mean.double(), var.double()
        ours = ops.scale_batch_norm(z, scale, ours_mean, ours_var, weight, bias, True, 0.3, 1e-5)
        u = z.double() * scale.double()
        reference = F.batch_norm(u, mean64, var64, weight.double(), bias.double(), True, 0.3, 1e-5)
        rstd = (u.var(0, correction=0) + 1e-5).rsqrt()
        size = weight.double().abs() * rstd * (u.abs() + u.square().mean(0).sqrt()) + bias.double().abs()
        assert_within(ours, reference, size, f"rows {rows}")
        assert_within(ours_mean, mean64, mean64.abs() + u.abs().mean(0), "running_mean")
        assert_within(ours_var, var64, var64 + u.square().mean(0), "running_var")


@pytest.mark.parametrize("rows", (2, 300, 5000, 70_000))
@pytest.mark.case("constant-rows")
def test_batch_norm_of_constant_columns(rows: int) -> None:
    z = (torch.arange(96, device="cuda") / 3 - 10).expand(rows, 96).contiguous()
    mean, var = torch.zeros(96, device="cuda"), torch.ones(96, device="cuda")
    ours = ops.scale_batch_norm(z, torch.ones(96, device="cuda"), mean, var, None, None, True, 1.0, 1e-5)
    assert torch.equal(ours, torch.zeros_like(z))
    assert torch.equal(mean, z[0]) and torch.equal(var, torch.zeros_like(var))


@pytest.mark.parametrize("shape", ((1, 1), (33, 1), (1, 130), (1000, 3), (70_000, 8), (129, 4098)))
def test_affine_shapes(shape: tuple[int, int]) -> None:
    for dtype in DTYPES:
        z, scale = tensor(shape, dtype, 1.0), tensor(shape[1:], dtype, 0.5)
        weight, bias = tensor(shape[1:], torch.float32, 0.5), tensor(shape[1:], torch.float32, seed=3)
        mean, var = tensor(shape[1:], torch.float32, 1.0, seed=4), tensor(shape[1:], torch.float32).abs() + 0.5
        with torch.no_grad():
            ours = ops.scale_batch_norm(z, scale, mean, var, weight, bias, False, 0.0, 1e-5)
        wide = [t.double() for t in (z, scale, mean, var, weight, bias)]
        reference = F.batch_norm(wide[0] * wide[1], *wide[2:], False, 0.0, 1e-5)
        gain = (wide[4] * (wide[3] + 1e-5).rsqrt()).abs()
        assert_within(ours, reference, gain * ((wide[0] * wide[1]).abs() + wide[2].abs()) + wide[5].abs())
        if shape[0] > 1:
            trained = ops.scale_batch_norm(z, scale, None, None, weight, bias, True, 0.0, 1e-5)
            u = wide[0] * wide[1]
            exact = F.batch_norm(u, None, None, wide[4], wide[5], True, 0.0, 1e-5)
            rstd = (u.var(0, correction=0) + 1e-5).rsqrt()
            size = wide[4].abs() * rstd * (u.abs() + u.square().mean(0).sqrt()) + wide[5].abs()
            assert_within(trained, exact, size, f"train {shape} {dtype}")
            again = ops.scale_batch_norm(z, scale, None, None, weight, bias, True, 0.0, 1e-5)
            assert same_bits(trained, again)


@pytest.mark.parametrize("scale_shape", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.case("bn-frozen")
def test_gradients_by_running_statistics(scale_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for rows, zero in ((300, False), (5000, False), (300, True)):
        z, scale, weight, bias, (mean, var) = batch_norm_case(scale_shape, dtype, rows)
        scale = torch.zeros_like(scale) if zero else scale
        leaves = [t.detach().clone().requires_grad_() for t in (z, scale, weight, bias)]
        wide = [t.detach().double().requires_grad_() for t in (z, scale, weight, bias)]
        dy = tensor((rows, 96), dtype, seed=9)
        ours = ops.scale_batch_norm(*leaves[:2], mean, var, *leaves[2:], False, 0.0, 1e-2)
        assert ours.grad_fn is not None and ours.grad_fn.name() == "_BatchNormBackward"
        exact = F.batch_norm(wide[0] * wide[1], mean.double(), var.double(), *wide[2:], False, 0.0, 1e-2)
        found = torch.autograd.grad(ours, leaves, dy)
        step = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours.double(), exact, rtol=step, atol=16 * step)
        for mine, ref in zip(found, torch.autograd.grad(exact, wide, dy.double()), strict=True):
            assert mine.shape == ref.shape
            size = float(ref.abs().max() + 1e-3)
            torch.testing.assert_close(mine.double(), ref, rtol=step, atol=(step + 1e-4) * size)


@pytest.mark.parametrize("scale_shape", SCALES)
@pytest.mark.case("scale-values")
def test_scale_batch_norm_gradients(scale_shape: tuple[int, ...]) -> None:
    for scale_value in (None, 0.0):
        z, scale, weight, bias, _ = batch_norm_case(scale_shape, torch.float32)
        if scale_value is not None:
            scale = torch.full_like(scale, scale_value)
        dy = tensor(tuple(z.shape), torch.float32, seed=9)
        function = lambda z, s, w, b: ops.scale_batch_norm(z, s, None, None, w, b, True, 0.1, 1e-2)  # noqa: E731
        exact_function = lambda z, s, w, b: F.batch_norm(z * s, None, None, w, b, True, 0.1, 1e-2)  # noqa: E731
        leaves = [t.detach().clone().requires_grad_() for t in (z, scale, weight, bias)]
        wide = [t.detach().double().requires_grad_() for t in (z, scale, weight, bias)]
        ours = torch.autograd.grad(function(*leaves), leaves, dy)
        exact = torch.autograd.grad(exact_function(*wide), wide, dy.double())
        for mine, ref in zip(ours, exact, strict=True):
            assert mine.shape == ref.shape
            torch.testing.assert_close(mine.double(), ref, rtol=1e-4, atol=1e-4 * float(ref.abs().max() + 1e-3))


@pytest.mark.parametrize("scale_shape", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.case("bn-unbiased-variance", "offset-mean")
def test_an_input_bias_enters_the_running_mean_alone(scale_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for rows in (2, 300, 5000, 70_000):
        z, scale, weight, bias, (mean, var) = batch_norm_case(scale_shape, dtype, rows)
        shift = 1000 * tensor((96,), dtype, 1.0, seed=6)
        found = []
        for given in (None, shift, shift.repeat_interleave(2)[::2]):
            statistics = mean.clone(), var.clone()
            out = ops.scale_batch_norm(z, scale, *statistics, weight, bias, True, 0.3, 1e-5, input_bias=given)
            found.append((out, *statistics))
        for out, ours_mean, ours_var in found[1:]:
            assert torch.equal(out, found[0][0]) and torch.equal(ours_var, found[0][2])
            assert torch.equal(ours_mean, found[1][1])
        u = (z.double() + shift.double()) * scale.double()
        exact = 0.7 * mean.double() + 0.3 * u.mean(0)
        assert_within(found[1][1], exact, mean.double().abs() + u.abs().mean(0), f"rows {rows}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("linear_bias", (True, False))
def test_fold(dtype: torch.dtype, linear_bias: bool) -> None:
    for features in (64, 129):
        w, b = tensor((96, features), dtype), tensor((96,), dtype, seed=1) if linear_bias else None
        _, scale, weight, bias, (mean, var) = batch_norm_case((96,), dtype)
        ours = ops.fold_scale_batch_norm(w, b, scale, mean, var, weight, bias, 1e-5)
        gain = weight.double() * (var.double() + 1e-5).rsqrt()
        column = gain * scale.double()
        assert_within(ours[0], w.double() * column[:, None], (w.double() * column[:, None]).abs(), "weight")
        b64 = torch.zeros_like(gain) if b is None else b.double()
        size = (column * b64).abs() + bias.double().abs() + (gain * mean.double()).abs()
        assert_within(ours[1], column * b64 + bias.double() - gain * mean.double(), size, "bias")


@pytest.mark.parametrize("rows", (2, 64, 500))
def test_linear_scale_batch_norm_module(rows: int) -> None:
    module = modules.LinearScaleBatchNorm(64, 96).cuda()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
        module.bn.running_mean.normal_()
        module.bn.running_var.uniform_(0.5, 2.0)
    plain = nn.Sequential(module.gemm, nn.Identity(), module.bn)
    x = tensor((rows, 64), torch.float32)
    for training in (True, False):
        module.train(training)
        state = {k: v.clone() for k, v in module.state_dict().items()}
        with torch.no_grad():
            ours = module(x)
            after = {k: v.clone() for k, v in module.state_dict().items()}
            module.load_state_dict(state)
            expected = plain[2](module.gemm(x) * module.scale)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        for key, value in module.state_dict().items():
            torch.testing.assert_close(after[key], value, rtol=1e-5, atol=1e-5, msg=key)
