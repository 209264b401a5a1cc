"""Norms to write models with: torch.nn's with our ops in their forward, and two that torch.nn does not have."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm as _TorchInstanceNorm

from normswap import ops
from normswap.forwards import affine_of, registered
from normswap.forwards import linear_scale_batch_norm as _lsb
from normswap.forwards.replaced import Replaced, at_once_as

_layer_norm, _group_norm, _rms_norm = Replaced(nn.LayerNorm), Replaced(nn.GroupNorm), Replaced(nn.RMSNorm)
_instance_norm = Replaced(_TorchInstanceNorm, "_apply_instance_norm")
_layer_norm_at_once = at_once_as(_layer_norm, "layer_norm")
_group_norm_at_once = at_once_as(_group_norm, "group_norm")
_rms_norm_at_once = at_once_as(_rms_norm, "rms_norm")


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` on our kernel: same arguments, state_dict and results."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` (*, *normalized_shape); see ``normswap.ops.layer_norm``."""
        if torch.jit.is_scripting():
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        elif torch.compiler.is_compiling():
            return LayerNorm._computed(self, input)
        else:
            out = _layer_norm_at_once.call(self, input)
            return LayerNorm._computed(self, input) if out is None else out

    def _computed(self, input: Tensor) -> Tensor:
        if _layer_norm.is_on(self):
            return ops.layer_norm(input, self.normalized_shape, *affine_of(self), self.eps)
        return _layer_norm.run(self, input)

    @classmethod
    def from_torch(cls, module: nn.LayerNorm) -> LayerNorm:
        """A copy of ``module`` of this class, with weights of its own. Raises TypeError for another type."""
        return _copied_as(cls, module, nn.LayerNorm)


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm`` on our kernel: same arguments, state_dict and results; channels_last stays so."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` (N, C, *); see ``normswap.ops.group_norm``."""
        if torch.jit.is_scripting():
            return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
        elif torch.compiler.is_compiling():
            return GroupNorm._computed(self, input)
        else:
            out = _group_norm_at_once.call(self, input)
            return GroupNorm._computed(self, input) if out is None else out

    def _computed(self, input: Tensor) -> Tensor:
        if _group_norm.is_on(self):
            return ops.group_norm(input, self.num_groups, *affine_of(self), self.eps)
        return _group_norm.run(self, input)

    @classmethod
    def from_torch(cls, module: nn.GroupNorm) -> GroupNorm:
        """A copy of ``module`` of this class, with weights of its own. Raises TypeError for another type."""
        return _copied_as(cls, module, nn.GroupNorm)


class _InstanceNorm:
    """Mixin of the three below: checks and unbatched inputs stay torch.nn's, which then calls this."""

    def _apply_instance_norm(self: Any, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.instance_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.training or not self.track_running_stats,
                self.momentum if self.momentum is not None else 0.0,
                self.eps,
            )
        return self._instance_normalised(input)

    def _instance_normalised(self: Any, input: Tensor) -> Tensor:
        statistics = self.track_running_stats or self.running_mean is not None or self.running_var is not None
        if statistics or not _instance_norm.is_on(self):
            return _instance_norm.run(self, input)
        return ops.instance_norm(input, *affine_of(self), self.eps)

    @classmethod
    def from_torch(cls, module: nn.Module) -> Any:
        """A copy of ``module`` of this class, with weights of its own. Raises TypeError for another type."""
        return _copied_as(cls, module, cls.__mro__[2])


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """``torch.nn.InstanceNorm1d``, without running statistics on our kernel: same arguments, state_dict and results."""


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """``torch.nn.InstanceNorm2d``, without running statistics on our kernel: same arguments, state_dict and results."""


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """``torch.nn.InstanceNorm3d``, without running statistics on our kernel: same arguments, state_dict and results."""


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` on our kernel: same arguments, state_dict and results."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (*, *normalized_shape); see ``normswap.ops.rms_norm``."""
        if torch.jit.is_scripting():
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        elif torch.compiler.is_compiling():
            return RMSNorm._computed(self, x)
        else:
            out = _rms_norm_at_once.call(self, x)
            return RMSNorm._computed(self, x) if out is None else out

    def _computed(self, x: Tensor) -> Tensor:
        if _rms_norm.is_on(self):
            return ops.rms_norm(x, self.normalized_shape, registered(self, "_parameters", "weight"), self.eps)
        return _rms_norm.run(self, x)

    @classmethod
    def from_torch(cls, module: nn.RMSNorm) -> RMSNorm:
        """A copy of ``module`` of this class, with weights of its own. Raises TypeError for another type."""
        return _copied_as(cls, module, nn.RMSNorm)


_layer_norm.installed, _group_norm.installed, _rms_norm.installed = LayerNorm, GroupNorm, RMSNorm
_instance_norm.installed = _InstanceNorm


def _copied_as(cls: Any, module: nn.Module, expected: type[nn.Module]) -> Any:
    if type(module) not in (expected, cls):
        raise TypeError(
            f"{cls.__name__}.from_torch: module must be exactly a torch.nn.{expected.__name__}, "
            f"got {type(module).__name__}; a subclass may compute something else"
        )
    twin = copy.deepcopy(module)
    twin.__class__ = cls
    return twin


class L1Norm(nn.Module):
    """``x / torch.mean(torch.abs(x), dim=dim, keepdim=True)`` on our kernel. No parameters."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Divide ``x`` by its mean magnitude along ``dim``; see ``normswap.ops.l1_norm``."""
        return ops.l1_norm(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"

    @classmethod
    def from_torch(cls, module: nn.Module, dim: int | None = None) -> L1Norm:
        """An L1Norm for a torch ``module`` without parameters that computes the expression along ``dim``; None: along
        its own ``dim`` or, where it has none, along dim 1.

        Raises ValueError when ``module`` has parameters or buffers: it is then no plain L1 norm.
        """
        if module.state_dict():
            raise ValueError(f"L1Norm.from_torch: module must have no state, got keys {list(module.state_dict())}")
        return cls(getattr(module, "dim", 1) if dim is None else dim).train(module.training)


class LinearScaleBatchNorm(nn.Module):
    """``bn(gemm(x) * scale)``: a Linear, a learned scale and a BatchNorm1d. In eval, with more rows than features, it
    is one Linear with folded weights; else the Linear, and one kernel for the rest.

    Keys: ``gemm.weight``, ``gemm.bias``, ``scale``, ``bn.*``. ``scale_shape`` is (), (1,), (C,) or (1, C) with
    C = out_features; other arguments are those of nn.Linear and nn.BatchNorm1d.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scale_shape: tuple[int, ...] | None = None,
        *,
        bias: bool = True,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        shape = (out_features,) if scale_shape is None else tuple(scale_shape)
        if shape not in ((), (1,), (out_features,), (1, out_features)):
            raise ValueError(
                f"LinearScaleBatchNorm: scale_shape must be (), (1,), ({out_features},) or (1, {out_features}), "
                f"got {shape}"
            )
        self.gemm = nn.Linear(in_features, out_features, bias=bias, **where)
        self.scale = nn.Parameter(torch.ones(shape, **where))
        self.bn = nn.BatchNorm1d(out_features, eps, momentum, affine, track_running_stats, **where)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (N, in_features) to (N, out_features)."""
        out = _lsb.linear_scale_batch_norm(x, self.gemm, self.scale, self.bn)
        return self.bn(self.gemm(x) * self.scale) if out is None else out

    @classmethod
    def from_torch(cls, linear: nn.Linear, scale: Tensor, batch_norm: nn.BatchNorm1d) -> LinearScaleBatchNorm:
        """The module that computes ``batch_norm(linear(x) * scale)`` with copies of their weights and running stats.

        Raises TypeError when ``linear`` or ``batch_norm`` is not exactly of its type.
        """
        if type(linear) is not nn.Linear or type(batch_norm) is not nn.BatchNorm1d:
            raise TypeError(
                "LinearScaleBatchNorm.from_torch: needs exactly a torch.nn.Linear and a torch.nn.BatchNorm1d, got "
                f"{type(linear).__name__} and {type(batch_norm).__name__}"
            )
        new = cls(linear.in_features, linear.out_features, tuple(scale.shape), device="meta")
        new.gemm, new.bn = copy.deepcopy(linear), copy.deepcopy(batch_norm)
        new.scale = nn.Parameter(scale.detach().clone(), scale.requires_grad)
        new.training = batch_norm.training
        return new


def copy_weights(src: nn.Module, dst: nn.Module) -> None:
    """Copy every tensor of the state_dict of ``src`` into ``dst`` by name, keeping dst's own storage, dtype and device.

    Raises TypeError for what is no module, and ValueError, with nothing copied, when names or shapes differ.
    """
    if not (isinstance(src, nn.Module) and isinstance(dst, nn.Module)):
        raise TypeError(
            f"copy_weights: src and dst must be modules, got {type(src).__name__} and {type(dst).__name__}; "
            "load_state_dict takes a state_dict"
        )
    source, target = src.state_dict(), dst.state_dict()
    if missing := sorted(source.keys() ^ target.keys()):
        raise ValueError(f"copy_weights: src and dst must have the same keys; these are in one only: {missing[:10]}")
    for key, value in source.items():
        if isinstance(value, Tensor) and value.shape != target[key].shape:
            raise ValueError(
                f"copy_weights: {key} is {tuple(value.shape)} in src and {tuple(target[key].shape)} in dst"
            )
    with torch.no_grad():
        for key, value in source.items():
            if isinstance(value, Tensor):
                target[key].copy_(value)
