"""The normalisation ops: argument checks, the choice between our kernels and PyTorch's own op, and autograd.

Every op here is differentiable any number of times and accepts what PyTorch's op accepts. Our kernels serve dense CUDA
tensors of float32, float16 and bfloat16 with shapes PyTorch's op would accept; everything else - other dtypes, CPU
tensors, functorch transforms, forward-mode AD, tensor subclasses, bad shapes (whose errors are then PyTorch's own), a
machine without the library - goes to ``reference``.
"""

from __future__ import annotations

from normswap.ops.batch_norm import batch_norm, batch_norm_eval
from normswap.ops.convolution import convolution_batch_norm_eval, convolved_shape, folding_serves, runs_directly
from normswap.ops.dispatch import autograd_only, native_serves
from normswap.ops.folded_linear import folded_linear
from normswap.ops.group_norm import group_norm
from normswap.ops.instance_norm import instance_norm
from normswap.ops.l1_norm import l1_norm
from normswap.ops.l2_norm import frobenius_norm, l2_norm
from normswap.ops.layer_norm import layer_norm
from normswap.ops.layer_norm_dim import layer_norm_dim
from normswap.ops.rms_norm import rms_norm, rms_norm_dim
from normswap.ops.scale_batch_norm import fold_scale_batch_norm, scale_batch_norm

__all__ = [
    "autograd_only",
    "batch_norm",
    "batch_norm_eval",
    "convolution_batch_norm_eval",
    "convolved_shape",
    "fold_scale_batch_norm",
    "folded_linear",
    "folding_serves",
    "frobenius_norm",
    "group_norm",
    "instance_norm",
    "l1_norm",
    "l2_norm",
    "layer_norm",
    "layer_norm_dim",
    "native_serves",
    "rms_norm",
    "rms_norm_dim",
    "runs_directly",
    "scale_batch_norm",
]
