"""The normalisation ops: argument checks, the choice between our kernels and PyTorch's own op, and autograd.

Every op here is differentiable any number of times and accepts what PyTorch's op accepts. Our kernels serve dense CUDA
tensors of float32, float16 and bfloat16 with shapes PyTorch's op would accept; everything else - other dtypes, CPU
tensors, functorch transforms, forward-mode AD, tensor subclasses, bad shapes (whose errors are then PyTorch's own), a
machine without the library - goes to ``reference``.
"""

from __future__ import annotations

from normswap.ops.batch_norm import batch_norm as batch_norm
from normswap.ops.batch_norm import batch_norm_eval as batch_norm_eval
from normswap.ops.convolution import convolution_batch_norm_eval as convolution_batch_norm_eval
from normswap.ops.convolution import convolved_shape as convolved_shape
from normswap.ops.convolution import folding_serves as folding_serves
from normswap.ops.dispatch import autograd_only as autograd_only
from normswap.ops.dispatch import native_serves as native_serves
from normswap.ops.dispatch import runs_directly as runs_directly
from normswap.ops.group_norm import group_norm as group_norm
from normswap.ops.group_norm import instance_norm as instance_norm
from normswap.ops.l1_norm import l1_norm as l1_norm
from normswap.ops.l2_norm import frobenius_norm as frobenius_norm
from normswap.ops.l2_norm import l2_norm as l2_norm
from normswap.ops.layer_norm import layer_norm as layer_norm
from normswap.ops.layer_norm import layer_norm_dim as layer_norm_dim
from normswap.ops.rms_norm import rms_norm as rms_norm
from normswap.ops.rms_norm import rms_norm_dim as rms_norm_dim
from normswap.ops.scale_batch_norm import fold_scale_batch_norm as fold_scale_batch_norm
from normswap.ops.scale_batch_norm import folded_linear as folded_linear
from normswap.ops.scale_batch_norm import scale_batch_norm as scale_batch_norm
