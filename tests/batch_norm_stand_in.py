"""The native ops of BatchNorm in training, by the formulas of csrc/batch_norm/batch_norm_backward.cuh in the dtype of
the tensors, with the arguments that the schemas have."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from group_norm_stand_in import NAMES, arguments_of, slope_times
from torch import Tensor

from normswap.activation import Activation
from normswap.ops import dispatch

VECTOR = 4


def column(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape(1, -1, *(1,) * (x.dim() - 2))


def batch_norm_recorded(
    input: Tensor,
    running_mean: Any,
    running_var: Any,
    batches: Any,
    weight: Any,
    bias: Any,
    training: bool,
    momentum: float,
    eps: float,
    residual: Any,
    activation: int,
    low: float,
    high: float,
    scale: Any = None,
    input_bias: Any = None,
) -> tuple[Any, Any, Any]:
    count = input.numel() // max(1, input.shape[1])
    if input.numel() == 0 or (training and count < 2) or (not training and running_mean is None):
        return None, None, None
    kept = [d for d in range(input.dim()) if d != 1]
    mean, var = (input.mean(kept), input.var(kept, correction=0)) if training else (running_mean, running_var)
    factor = torch.ones_like(mean) if scale is None else scale.reshape(-1).expand(input.shape[1])
    if input_bias is not None:
        factor = torch.where(input_bias.isfinite(), factor, torch.nan)
    if training and running_mean is not None:
        running_mean.lerp_(factor * (mean if input_bias is None else mean + input_bias), momentum)
        running_var.lerp_(factor**2 * input.var(kept), momentum)
    if training and batches is not None:
        batches += 1
    rstd = ((factor**2 if training else 1.0) * var + eps).rsqrt() * factor
    if not training and scale is not None:
        bias = (0.0 if bias is None else bias) - mean * (var + eps).rsqrt() * (1.0 if weight is None else weight)
        mean = torch.zeros_like(mean)
    gain = rstd if weight is None else rstd * weight
    coefficients = torch.stack([mean, gain, torch.zeros_like(mean) if bias is None else bias, rstd], 1)
    z = (input - column(mean, input)) * column(gain, input) + column(coefficients[:, 2], input)
    z = z if residual is None else z + residual
    y = torch.empty_like(input).copy_(Activation(NAMES[activation], low, high)(z))
    signs = None
    if residual is not None and NAMES[activation] == "relu":
        each = VECTOR if input.numel() % VECTOR == 0 else 1
        flat = torch.empty_like(input).copy_(z).as_strided((input.numel(),), (1,))
        bits = (flat > 0).reshape(-1, each).to(torch.uint8)
        signs = (bits << torch.arange(each, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
    return y, coefficients, signs


def batch_norm_backward(
    grad: Tensor,
    input: Tensor,
    coefficients: Tensor,
    signs: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    training: bool,
    activation: int,
    low: float,
    high: float,
    of_input: bool,
    of_weight: bool,
    of_bias: bool,
    of_residual: bool,
    scale: Any = None,
    input_bias: Any = None,
    eps: float = 0.0,
    of_scale: bool = False,
    of_input_bias: bool = False,
    running_mean: Any = None,
    running_var: Any = None,
) -> tuple[Any, ...]:
    assert grad.stride() == input.stride() and grad.dtype == input.dtype
    kept = [d for d in range(input.dim()) if d != 1]
    mean, gain, shift, rstd = (column(values, input) for values in coefficients.unbind(1))
    d, g = input - mean, grad
    if signs is not None:
        from normswap.ops.batch_norm import bits_of

        assert residual is None
        g = torch.where(bits_of(signs, input), grad, 0.0)
    elif activation:
        z = d * gain + shift
        g = slope_times(Activation(NAMES[activation], low, high), z if residual is None else z + residual, grad)
    a, b = g.mean(kept, keepdim=True), (g * d).mean(kept, keepdim=True) * rstd**2
    dx = gain * (g - a - d * b) if training else gain * g
    dw, db = (g * d * rstd).sum(kept), g.sum(kept)
    if not training and scale is not None:
        own = (running_var + eps).rsqrt()
        dw = own * (scale.reshape(-1) * (g * d).sum(kept) - running_mean * g.sum(kept))
    factor = torch.ones(()) if scale is None else scale.reshape(-1)
    own = torch.where(factor == 0, eps**-0.5 if eps else 0.0, rstd.flatten() / factor)
    ds = eps * own**3 * (g * d).sum(kept) * (1.0 if weight is None else weight)
    if not training and scale is not None:
        ds = (running_var + eps).rsqrt() * (g * d).sum(kept) * (1.0 if weight is None else weight)
    ds = ds if scale is None or scale.numel() < len(ds) else ds.reshape(scale.shape)
    of_rows = (of_scale, ds), (of_input_bias, 0 * dx.sum(kept))
    asked = (of_input, dx), (of_weight, dw), (of_bias, db), (of_residual, g), *of_rows
    return tuple(t if wanted else None for wanted, t in asked)


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let CPU tensors go where CUDA tensors do, and to these ops; the names of those that were called."""
    calls: list[str] = []

    def counted(function: Any) -> Any:
        def call(*given: Any) -> Any:
            calls.append(function.__name__)
            assert len(given) <= len(arguments_of(function.__name__))
            with torch.no_grad():
                return function(*given)

        return call

    for function in (batch_norm_recorded, batch_norm_backward):
        monkeypatch.setitem(dispatch._native, function.__name__, counted(function))

    def direct(name: str, *tensors: Any, autocast: bool = False) -> Any:
        recorded = dispatch._recording["batch_norm"]
        if name != "batch_norm" or torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        return recorded if learns else lambda *given: counted(batch_norm_recorded)(*given)[0]

    for name in ("batch_norm", "scale_batch_norm"):
        module = sys.modules[f"normswap.ops.{name}"]  # normswap.ops.batch_norm is the function
        monkeypatch.setattr(module, "direct", direct)
        monkeypatch.setattr(module, "DTYPES", (torch.float32, torch.float64))
    return calls
