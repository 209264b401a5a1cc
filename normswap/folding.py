"""A model for deployment, in which Linear -> scale -> BatchNorm is one plain nn.Linear and convolution -> BatchNorm one
plain convolution."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from normswap import fold_convolution, modules, rules
from normswap.attributes import Rejection
from normswap.forwards import linear_scale_batch_norm as _lsb
from normswap.forwards.plain import calls_forward, is_plain, is_unhooked
from normswap.installed import class_before, site_match
from normswap.plans import Match, NormswapError
from normswap.regions.flow import Attribute, Constant
from normswap.regions.spec import Region
from normswap.regions.straight import straight
from normswap.untouched import classes


def fold(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """``model`` with every Linear -> scale -> BatchNorm1d replaced by the one ``nn.Linear`` it equals in eval, and
    every convolution (nn.Conv1d to 3d, nn.ConvTranspose1d to 3d) with a BatchNorm behind it by the one convolution.

    For inference: the model must be in eval mode, and its state_dict gets other keys. A module whose whole forward is
    the expression, or an nn.Sequential of nothing else, becomes an nn.Linear; in a longer nn.Sequential the Linear is
    replaced and nn.Identity takes the other places, as it takes that of a BatchNorm behind a convolution, or behind a
    Linear without a scale, in a larger forward. Weights are computed in float64 and rounded once. ``model`` may be
    swapped or not; it is left untouched and a copy is returned, unless ``inplace``. Other swapped modules stay swapped.

    The input of such a Linear must be (N, K), and nobody but the forward of the module that holds them may call its
    parts, or a convolution and its BatchNorm: BatchNorm1d takes (N, C, L) too and then normalises another axis, which a
    Linear cannot.

    What the forward branches on and reads besides weights is taken as it is now.

    A site that cannot be folded is left as it is, and a warning says why. Raises TypeError when ``model`` is no
    nn.Module and NormswapError when it is in train mode, when nothing can be folded, and with ``inplace`` when the
    model itself is what folds; ``model`` is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fold: model must be a torch.nn.Module, got {type(model).__name__}")
    if model.training:
        raise NormswapError("fold: the model is in train mode, where a BatchNorm goes by its batch; call .eval() first")
    with torch.inference_mode(False), torch.no_grad():
        target = model if inplace else copy.deepcopy(model)
        whole, within = _folded(target)
        convolved = _folded_pairs(target, whole)
        if not whole and not within and not convolved:
            raise NormswapError(
                "fold: no module of this model is a Linear -> scale -> BatchNorm1d, or a convolution -> BatchNorm, "
                "that can be folded"
            )
        if id(target) in whole:
            if inplace:
                raise NormswapError("fold: the model itself is what folds, which cannot be done in place")
            return whole[id(target)]
        for pair, convolution in convolved:
            fold_convolution.put(pair, convolution)
        for sequential, children in within:
            _put(sequential, children)
        for parent in list(target.modules()):
            for name, child in parent._modules.items():
                parent._modules[name] = whole.get(id(child), child)
    return target


def _folded_pairs(model: nn.Module, whole: Collection[int]) -> list[tuple[fold_convolution.Pair, nn.Module]]:
    """Each convolution or Linear with a BatchNorm behind it, and the one that the two equal, but in modules that are
    replaced as a ``whole``. Warns of each that stays."""
    found = []
    for name, pair in [*fold_convolution.pairs_of(model)]:
        if id(pair.owner) in whole:
            continue
        problem = pair.problem
        try:
            if not problem:
                found.append((pair, fold_convolution.convolution_of(pair)))
        except ValueError as reason:
            problem = str(reason)
        if problem:
            place = f"{name}.{pair.norm}" if name else pair.norm
            warnings.warn(f"fold: {place} is left as it is: {problem}", stacklevel=3)
    return found


def _folded(model: nn.Module) -> tuple[dict[int, nn.Linear], list[tuple[nn.Module, dict[str, nn.Module]]]]:
    """The Linear for each module that becomes one, by the module's id; and (nn.Sequential, its new children) for
    those of which a part does. Warns of each site that stays."""
    whole: dict[int, nn.Linear] = {}
    within: list[tuple[nn.Module, dict[str, nn.Module]]] = []
    for name, module in model.named_modules():
        children: dict[str, nn.Module] = {}
        for parts, names in _parts(module):
            try:
                linear = _linear(module, parts)
            except ValueError as reason:
                warnings.warn(f"fold: {name or '(root)'} is left as it is: {reason}", stacklevel=3)
                continue
            if names in ([], list(module._modules)):
                whole[id(module)] = linear
            else:
                children |= {part: nn.Identity().eval() for part in names} | {parts["linear"]: linear}
        if children:
            within.append((module, children))
    return whole, within


def _parts(module: nn.Module) -> list[tuple[Mapping[str, Any], list[str]]]:
    """The parts of each Linear -> scale -> BatchNorm that ``module`` is or, as an nn.Sequential, holds, and the names
    of its children there."""
    if type(module) is modules.LinearScaleBatchNorm:
        return [({"linear": "gemm", "scale": "scale", "batch_norm": "bn"}, [])]
    original = class_before(module)
    with classes([(module, original)]):  # what was swapped may have other children now: it is matched anew
        found = rules.find(module)
        data = found.attributes.get("regions", []) if isinstance(found, Match) else []
        regions = [region for region in map(Region.from_json, data) if region.linear]
        if original.forward is nn.Sequential.forward:
            return [(_children(one), [one.linear, *one.factor[:1], one.norm]) for one in regions]
        parts = [_whole(module, original.forward, region) for region in regions]
    return [(found, []) for found in parts if found is not None]


_OF_A_LINEAR = ("linear", "product", "factor", "norm", "times")
"""The steps of a region that one Linear equals."""


def _children(region: Region) -> dict[str, Any]:
    factor = dict(zip(("scale", "attribute"), region.factor, strict=False))
    return {"linear": region.linear, "batch_norm": region.norm, **factor}


def _whole(module: nn.Module, forward: Any, region: Region) -> dict[str, Any] | None:
    """The parts of ``region`` of ``module``, and what it multiplies by, where ``forward`` computes nothing else."""
    read = straight(module, forward)
    if isinstance(read, Rejection) or read.tested or len(read.ways) > 1:
        return None
    (way,), found = read.ways, _children(region)
    given = [(*op.args, *op.keywords.values()) for op in way.ops]
    if any(step.does not in _OF_A_LINEAR for step in region.steps):  # what stands behind it would be lost
        return None
    if len(given) != len(region.steps) or way.result is not way.ops[-1] or way.argument not in given[0]:
        return None
    for step, values in zip(region.steps, given, strict=True):
        if step.does in ("product", "times"):
            factor = values[1 - step.operand]
            if not isinstance(factor, (Attribute, Constant)):
                return None
            name = "scale" if step.does == "product" else "after"
            found[name] = factor.path if isinstance(factor, Attribute) else factor.value
    return found


def _put(sequential: nn.Module, children: Mapping[str, nn.Module]) -> None:
    """Replace children; a swapped nn.Sequential without a run left gets its own class back."""
    sequential._modules.update(children)
    match = site_match(sequential)
    if match is not None and all(region.get("linear") in children for region in match.attributes["regions"]):
        object.__setattr__(sequential, "__class__", class_before(sequential))


def _linear(module: nn.Module, parts: Mapping[str, Any]) -> nn.Linear:
    """The one Linear that the parts of ``module`` named by a match equal in eval. Raises ValueError."""
    linear, bn = getattr(module, parts["linear"]), getattr(module, parts["batch_norm"])
    owner: Any = module._modules[parts["scale"]] if "attribute" in parts else module
    scale, after = parts.get("attribute", parts.get("scale")), parts.get("after")
    if not (is_plain(linear, nn.Linear) and is_plain(bn, nn.BatchNorm1d)):
        raise ValueError("its Linear or BatchNorm1d is no plain one, or carries hooks")
    if not all(calls_forward(type(one)) and is_unhooked(one) for one in (module, owner)):
        raise ValueError("it carries hooks, or a forward of its own")
    if bn.training or bn.running_mean is None or bn.running_var is None:
        raise ValueError("its BatchNorm1d goes by its batch: it is in train mode or keeps no running statistics")
    before, behind = _factor(owner, scale, linear), _factor(module, after, linear)
    vectors = bn.weight, bn.bias, bn.running_mean, bn.running_var
    if not _lsb.tensors_fit(linear.weight, (linear.weight, linear.bias), vectors):
        raise ValueError("its tensors are of several dtypes or devices")
    return fold_convolution.folded(linear, bn, before, behind)


def _factor(owner: Any, factor: str | float | None, linear: nn.Linear) -> Tensor | None:
    """A factor in float64."""
    value: Any = attrgetter(factor)(owner) if isinstance(factor, str) else factor
    if value is None:
        return None
    if type(value) in (int, float):
        return torch.tensor(float(value), dtype=torch.float64, device=linear.weight.device)
    if not _lsb.is_factor(value, linear.weight, linear.out_features):
        raise ValueError("what it multiplies by is no tensor of one value or one per channel in the Linear's dtype")
    return value.double()
