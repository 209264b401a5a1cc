"""The swapped modules: torch.nn classes whose forward calls our ops, and subclasses made for expression sites.

A module is swapped by giving it one of these classes; parameters, buffers, hooks, children and keys stay as they are.
"""

from __future__ import annotations

import copy
import copyreg
import inspect
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm as _TorchInstanceNorm
from torch.utils.weak import WeakIdKeyDictionary

from normswap import install_table, ops
from normswap.forwards import affine_of, only_argument
from normswap.forwards import batch_norm as _batch
from normswap.forwards import l1_norm as _l1
from normswap.forwards import linear_scale_batch_norm as _lsb
from normswap.forwards.placed import in_the_place_of
from normswap.forwards.registered import registered_forward
from normswap.forwards.replaced import Replaced
from normswap.forwards.rms_norm import by_hand_forward
from normswap.plan import Match, NormswapError, PlanError, is_by_hand
from normswap.regions import install as regions
from normswap.regions.helper import make_helper

_Forward = Callable[..., Tensor]

_layer_norm, _group_norm, _rms_norm = Replaced(nn.LayerNorm), Replaced(nn.GroupNorm), Replaced(nn.RMSNorm)
_instance_norm = Replaced(_TorchInstanceNorm, "_apply_instance_norm")


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` on our kernel: same arguments, state_dict and results."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` (*, *normalized_shape); see ``normswap.ops.layer_norm``."""
        if torch.jit.is_scripting():
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        elif _layer_norm.is_on(self):
            return ops.layer_norm(input, self.normalized_shape, *affine_of(self), self.eps)
        else:
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
        elif _group_norm.is_on(self):
            return ops.group_norm(input, self.num_groups, *affine_of(self), self.eps)
        else:
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
        elif _rms_norm.is_on(self):
            return ops.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        else:
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
    def from_torch(cls, module: nn.Module, dim: int = 1) -> L1Norm:
        """An L1Norm for a torch ``module`` without parameters that computes the expression along ``dim``.

        Raises ValueError when ``module`` has parameters or buffers: it is then no plain L1 norm.
        """
        if module.state_dict():
            raise ValueError(f"L1Norm.from_torch: module must have no state, got keys {list(module.state_dict())}")
        return cls(getattr(module, "dim", dim)).train(module.training)


class LinearScaleBatchNorm(nn.Module):
    """``bn(gemm(x) * scale)``: a Linear, a learned scale and a BatchNorm1d, with the product never stored.

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
        new.scale = nn.Parameter(scale.detach().clone(), scale.requires_grad or isinstance(scale, nn.Parameter))
        new.training = batch_norm.training
        return new


# --- the classes installed at sites -----------------------------------------------------------------------------

_MODULE_CLASSES: dict[type[nn.Module], tuple[str, type[nn.Module]]] = {
    nn.LayerNorm: ("layer_norm", LayerNorm),
    nn.GroupNorm: ("group_norm", GroupNorm),
    nn.InstanceNorm1d: ("instance_norm", InstanceNorm1d),
    nn.InstanceNorm2d: ("instance_norm", InstanceNorm2d),
    nn.InstanceNorm3d: ("instance_norm", InstanceNorm3d),
    nn.RMSNorm: ("rms_norm", RMSNorm),
}


class Rewritten:
    """Mixin of the classes made for expression sites: what they replace, and that nobody is told of them."""

    _normswap_original: ClassVar[type[nn.Module]]
    _normswap_match: ClassVar[Match]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "_normswap_match" not in vars(cls):
            super().__init_subclass__(**kwargs)


INSTALLED: tuple[type, ...] = (*(swapped for _, swapped in _MODULE_CLASSES.values()), Rewritten)
"""Every class that swapping installs is one of these or a subclass."""


def _reduced(self: nn.Module, protocol: Any) -> Any:
    """Pickle and deepcopy a swapped module by the original class and the match: its class bears the original's name."""
    reduced: Any = nn.Module.__reduce_ex__(self, protocol)
    match, original = site_match(self), original_class(self)
    exact = match is not None and original is not None and install_table.covered_class(self) in (None, type(self))
    if not exact or not isinstance(reduced, tuple) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return reduced
    return (_rebuild, (original, match.kind, dict(match.attributes)), *reduced[2:])  # type: ignore[union-attr]


for _original, (_, _swapped) in _MODULE_CLASSES.items():
    _swapped.__module__ = _original.__module__  # torch.fx takes for a leaf what torch.nn has made
    _swapped.__reduce_ex__ = _reduced  # type: ignore[assignment]
Rewritten.__reduce_ex__ = _reduced  # type: ignore[assignment]


def _rebuild(original: type[nn.Module], kind: str, attributes: Mapping[str, Any]) -> nn.Module:
    cls = swapped_class(kind, original, attributes)
    module: nn.Module = object.__new__(cls)
    install_table.remember(module, cls)
    return module


def swapped_class(kind: str, original: type[nn.Module], attributes: Mapping[str, Any]) -> type[nn.Module]:
    """The class to install at a site of ``kind`` whose module has the class ``original``.

    For torch.nn's own norms that is the importable class; for their subclasses and for expression kinds a subclass of
    ``original``, made once per (original, its forward, attributes), that has its name. Raises PlanError when they do
    not fit.
    """
    known, swapped = _MODULE_CLASSES.get(original, ("", nn.Module))
    if known == kind and not attributes:
        return swapped
    expected = next((cls for cls, (of, _) in _MODULE_CLASSES.items() if of == kind), nn.Module)
    found = is_by_hand(kind, attributes) or Match(kind, attributes).registered
    if kind not in _FORWARDS or not (found or issubclass(original, expected)):
        raise PlanError(f"{kind}: no swap of this kind for a {original.__name__}")
    text = json.dumps(dict(attributes), sort_keys=True)
    replaced = Replaced(original, regions.method_of(attributes))
    # What is made holds on to the forward and its code: while it lives, nothing else has their ids.
    key = (kind, text, id(replaced.function), id(replaced.code))
    made = _made.setdefault(original, WeakValueDictionary())
    cls: type[nn.Module] | None = made.get(key)
    if cls is None:
        cls = made[key] = _rewritten_class(Match(kind, json.loads(text)), replaced)
    return cls


# By the original, and by all that a class is made of.
_made: Any = WeakIdKeyDictionary()


def _rewritten_class(match: Match, replaced: Replaced) -> type[nn.Module]:
    original: type[nn.Module] = replaced.original
    make = registered_forward(match.kind) if match.registered else _FORWARDS[match.kind]
    body = {
        replaced.name: in_the_place_of(replaced, make(replaced, match.attributes)),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_normswap_original": original,
        "_normswap_match": match,
    }
    made: type[nn.Module] = install_table.unannounced(type(original), original.__name__, (Rewritten, original), body)
    replaced.installed = made
    return made


def _only_argument(replaced: Replaced) -> str:
    """The name of the one input of a forward(self, input)."""
    return list(inspect.signature(replaced.function).parameters)[1]


def _region_forward(replaced: Replaced, attributes: Mapping[str, Any]) -> _Forward:
    return regions.with_helpers(
        replaced, attributes, lambda compiled: make_helper(compiled, original_class), original_class
    )


def _subclass_forward(op: Callable[[Tensor, Any], Tensor]) -> Callable[[Replaced, Mapping[str, Any]], _Forward]:
    """The forward of a subclass of a torch.nn norm that computes what its base class does unless a flag is set, by
    ``op`` of the input and the norm."""

    def make(replaced: Replaced, attributes: Mapping[str, Any]) -> _Forward:
        flag, argument = attributes.get("unless"), _only_argument(replaced)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            x = args[0] if len(args) == 1 and not kwargs else only_argument(args, kwargs, argument)
            if isinstance(x, Tensor) and replaced.is_on(self) and not (flag and getattr(self, flag)):
                return op(x, self)
            return replaced.run(self, *args, **kwargs)  # type: ignore[no-any-return]

        return forward

    return make


_rms_norm_subclass = _subclass_forward(lambda x, norm: ops.rms_norm(x, norm.normalized_shape, norm.weight, norm.eps))


def _rms_norm_forward(replaced: Replaced, attributes: Mapping[str, Any]) -> _Forward:
    if is_by_hand("rms_norm", attributes):
        return by_hand_forward(replaced, attributes)
    return _rms_norm_subclass(replaced, attributes)


_FORWARDS: dict[str, Callable[[Replaced, Mapping[str, Any]], _Forward]] = {
    "layer_norm": _subclass_forward(
        lambda x, norm: ops.layer_norm(x, norm.normalized_shape, *affine_of(norm), norm.eps)
    ),
    "rms_norm": _rms_norm_forward,
    "group_norm": _subclass_forward(lambda x, norm: ops.group_norm(x, norm.num_groups, *affine_of(norm), norm.eps)),
    "batch_norm": lambda replaced, attributes: _batch.make_forward(replaced, attributes, _only_argument(replaced)),
    "l1_norm": lambda replaced, attributes: _l1.make_forward(replaced, attributes, _only_argument(replaced)),
    "linear_scale_batch_norm": (
        lambda replaced, attributes: _lsb.make_forward(replaced, attributes, _only_argument(replaced))
    ),
    "region": _region_forward,
}

_RUN_NAMES: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "linear_scale_batch_norm": _lsb.run_names,
}


def installed_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that swapping installed at ``module``, its own or one that another tool has put its own over since;
    None where there is none."""
    cls = type(module)
    if "_normswap_match" in vars(cls) or any(cls is swapped for _, swapped in _MODULE_CLASSES.values()):
        return cls
    return install_table.covered_class(module)


def original_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that was replaced at ``module``; None when none was, or it was put back."""
    cls = installed_class(module)
    if cls is None or "_normswap_match" in vars(cls):
        return None if cls is None else cls._normswap_original  # type: ignore[attr-defined,no-any-return]
    return next((original for original, (_, swapped) in _MODULE_CLASSES.items() if cls is swapped), None)


def class_before(module: nn.Module) -> type[nn.Module] | None:
    """The class that puts ``module`` back: the one that was replaced, under what another tool has put over ours since;
    None when it is not swapped. Raises NormswapError where that tool's class cannot be put over another."""
    installed, original = installed_class(module), original_class(module)
    if installed is None or original is None:
        return None
    try:
        return install_table.rebased(type(module), installed, original)
    except install_table.Covered as error:
        raise NormswapError(
            f"a {type(module).__qualname__} was put over the class that was installed, and cannot be put over another "
            f"({error}); undo that first"
        ) from error


def site_match(module: nn.Module) -> Match | None:
    """What was swapped at ``module``: its kind and attributes; None when it is not swapped."""
    cls = installed_class(module)
    if cls is None or "_normswap_match" in vars(cls):
        return None if cls is None else cls._normswap_match  # type: ignore[attr-defined,no-any-return]
    return next((Match(kind) for kind, swapped in _MODULE_CLASSES.values() if cls is swapped), None)


def pieces(module: nn.Module, match: Match) -> list[tuple[Match, nn.Module, nn.Module]]:
    """What is proved at a site: (match, module, the module whose input it takes) - the site itself, or each run of an
    nn.Sequential as an nn.Sequential of its own, with the same children under the same names."""
    if match.kind == "region":
        return []
    if "runs" not in match.attributes:
        return [(match, module, module)]
    found: list[tuple[Match, nn.Module, nn.Module]] = []
    for run in match.attributes["runs"]:
        names = _RUN_NAMES[match.kind](run)
        children = OrderedDict((name, module.get_submodule(name)) for name in names)
        found.append((Match(match.kind, {"runs": [run]}), nn.Sequential(children), children[names[0]]))
    return found


def copy_weights(src: nn.Module, dst: nn.Module) -> None:
    """Copy every parameter and buffer of ``src`` into ``dst`` by name, keeping dst's own storage, dtype and device.

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
