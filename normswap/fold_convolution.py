"""Convolutions, and Linears in a forward, with a BatchNorm behind them, for deployment: which pairs there are, and the
one that each equals."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normswap import reference
from normswap.forwards.batch_norm import RANKS
from normswap.forwards.plain import TRANSPOSED, is_plain, is_unhooked
from normswap.installed import class_before
from normswap.regions.ending import children_behind
from normswap.regions.foldings import is_foldable, why_apart
from normswap.regions.spec import Region
from normswap.regions.through_methods import attributes_in, may_be_any, through_methods
from normswap.rules import region as region_rule
from normswap.rules.expression_site import class_forward
from normswap.untouched import classes


@dataclass(frozen=True)
class Pair:
    """A child of ``owner``, or the last of an nn.Sequential that is one, by its path, and a child: all that
    ``convolution``, or that Linear, gives goes to ``norm``, and nothing else does.
    ``problem``: why they are left as they are, "" if they can be one; ``behind``: the children that the norm itself
    calls on what it computes."""

    owner: nn.Module
    convolution: str
    norm: str
    problem: str = ""
    behind: tuple[str, ...] = ()


def pairs_of(model: nn.Module) -> Iterator[tuple[str, Pair]]:
    """Every BatchNorm in eval behind a convolution in ``model``, with the name of the module that calls the two, by the
    dataflow of its code."""
    places = Counter(id(child) for module in model.modules() for child in module._modules.values())
    for name, owner in model.named_modules():
        read = [(one, class_before(one)) for one in owner.modules()]
        with classes(read):  # what was swapped is read as it was
            found = [*region_rule.readings(owner, lambda child: None, baked=True)]
            joined = dict.fromkeys(pair for reading in found for pair in _pairs(owner, reading))
            apart = [*_through_methods(owner, {pair.norm for pair in joined})]
        for pair in (*joined, *apart):
            several = any(places[id(one)] > 1 for path in (pair.convolution, pair.norm) for one in _along(path, owner))
            alone = pair in apart or all(_only_there(pair, reading) for reading in found)
            problem = pair.problem or ("" if alone and not several else "one of them is called elsewhere too")
            yield name, replace(pair, problem=problem)


def _along(path: str, owner: Any) -> Iterator[Any]:
    """What a call of the child ``path`` of ``owner`` calls, from the outside in."""
    for name in filter(None, path.split(".")):
        owner = owner._modules[name]
        yield owner


def _through_methods(owner: nn.Module, known: set[str]) -> Iterator[Pair]:
    """Those whose norm is none of the ``known`` and whose convolution another method calls."""
    children = [(name, child) for name, child in owner._modules.items() if name not in known]
    norms: dict[str, Any] = {
        name: child for name, child in children if isinstance(child, tuple(RANKS)) and is_foldable(child)
    }
    forward = class_forward(owner)
    functions = region_rule.methods_of(owner, forward) if forward is not None else {}
    for convolution, norm in through_methods(owner, functions, norms) if len(functions) > 1 else ():
        reason = why_apart(owner._modules[convolution], used_once=True, padded=True)
        behind = () if type(norms[norm]) in RANKS else children_behind(norms[norm])
        yield Pair(owner, convolution, norm, f"{convolution} {reason}" if reason else "", behind or ())


def _pairs(owner: nn.Module, reading: region_rule.Reading) -> Iterator[Pair]:
    for region in reading.regions:
        if (first := _first(region, reading)) or region.apart:
            behind = tuple(region.attributes.get("behind", "").split())
            yield Pair(owner, first, region.norm, region.apart, behind)


def _first(region: Region, reading: region_rule.Reading) -> str:
    """The convolution, or the Linear without a scale behind it, of a ``region``; "" for none."""
    scaled = region.has("product") or region.factor or reading.tree is None  # an nn.Sequential is folded as a whole
    return region.convolution or ("" if scaled else region.linear)


def _only_there(pair: Pair, reading: region_rule.Reading) -> bool:
    """Whether a function mentions the two only where the one follows the other."""
    first = pair.convolution.partition(".")[0]
    if reading.tree is None:
        return not ({first, pair.norm} & reading.names or may_be_any(reading.names))
    named = attributes_in(reading.tree)
    both = sum((_first(region, reading), region.norm) == (pair.convolution, pair.norm) for region in reading.regions)
    return named is not None and named[first] == named[pair.norm] == both


def convolution_of(pair: Pair) -> nn.Module:
    """The plain convolution, or Linear, that ``pair`` equals in eval, its weights from float64, rounded once. Raises
    ValueError with the reason where there is none."""
    *_, convolution = _along(pair.convolution, pair.owner)
    norm: Any = pair.owner._modules[pair.norm]
    width = convolution.out_features if isinstance(convolution, nn.Linear) else convolution.out_channels
    if not _is_plain(norm, pair.behind) or norm.num_features != width:
        raise ValueError("its BatchNorm is no plain one, or of another width")
    given = (convolution.weight, convolution.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    if len({t.device for t in given if t is not None}) > 1:
        raise ValueError("its tensors are on several devices")
    return folded(convolution, norm)


def folded(layer: Any, norm: Any, scale: Tensor | None = None, after: Tensor | None = None) -> Any:
    """The Linear or convolution that equals ``norm(layer(x) * scale) * after`` in eval, its weights from float64 and
    rounded once. Raises ValueError where they are not finite."""
    given = (layer.weight, layer.bias, scale, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    wide: list[Any] = [None if t is None else t.double() for t in given]
    if transposed := type(layer) in TRANSPOSED:
        wide[0] = reference.by_output(wide[0], layer.groups)
    fold: Any = reference.fold_scale_batch_norm
    weight, bias = fold(*wide, norm.eps)
    weight = reference.by_output(weight, layer.groups) if transposed else weight
    if after is not None:
        weight, bias = weight * after.reshape(-1, 1), bias * after.reshape(-1)
    dtype, learns = layer.weight.dtype, layer.weight.requires_grad
    new = nn.Parameter(torch.empty_like(layer.weight).copy_(weight), learns)  # laid out alike
    made = copy.deepcopy(layer, {id(layer.weight): new}).eval()
    made.bias = nn.Parameter(bias.to(dtype), learns)
    if not (made.weight.is_meta or (made.weight.isfinite().all() and made.bias.isfinite().all())):
        raise ValueError(f"folded, its weights are not finite in {str(made.weight.dtype).removeprefix('torch.')}")
    return made


def _is_plain(norm: nn.Module, behind: tuple[str, ...]) -> bool:
    """Whether calling ``norm`` runs what was read and no more."""
    if type(norm) in RANKS:
        return is_plain(norm, type(norm))
    with classes([(norm, class_before(norm))]):
        return is_unhooked(norm) and children_behind(norm) == behind


def put(pair: Pair, made: nn.Module) -> None:
    """Put ``made``, the one convolution, in the place of the first, and what the norm itself calls behind it in that of
    the norm, nn.Identity where that is nothing: the code that calls it still names it."""
    norm = pair.owner._modules[pair.norm]
    assert norm is not None
    behind = OrderedDict((name, norm._modules[name]) for name in pair.behind)
    rest = nn.Sequential(behind) if behind else nn.Identity()  # type: ignore[arg-type]
    rest.training = False
    *_, parent, _ = pair.owner, *_along(pair.convolution, pair.owner)
    parent._modules[pair.convolution.rpartition(".")[2]] = made
    pair.owner._modules[pair.norm] = rest
    # No regions are left of what it was swapped for.
    object.__setattr__(pair.owner, "__class__", class_before(pair.owner))
