"""A model for deployment, in which Linear -> scale -> BatchNorm is one plain nn.Linear and convolution -> BatchNorm one
plain convolution."""

from __future__ import annotations

import copy
import warnings
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from normswap import modules, reference, rules
from normswap.arguments import check_arguments
from normswap.attributes import Rejection
from normswap.copying import copy_of
from normswap.forwards import linear_scale_batch_norm as _lsb
from normswap.forwards.batch_norm import RANKS
from normswap.forwards.plain import TRANSPOSED, calls_forward, is_plain, is_unhooked
from normswap.installed import class_before, site_match
from normswap.plans import Match, NormswapError
from normswap.regions.ending import children_behind
from normswap.regions.flow import Attribute, Constant
from normswap.regions.foldings import is_foldable, why_apart
from normswap.regions.spec import Region
from normswap.regions.straight import straight
from normswap.regions.through_methods import through_methods
from normswap.rules import region as region_rule
from normswap.rules.expression_site import class_forward
from normswap.untouched import classes
from normswap.uses import Uses, uses_in


def fold(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    inplace: bool = False,
) -> nn.Module:
    """``model`` with every Linear -> scale -> BatchNorm1d replaced by the one ``nn.Linear`` it equals in eval, and
    every convolution (nn.Conv1d to 3d, nn.ConvTranspose1d to 3d) with a BatchNorm, or SyncBatchNorm, behind it by the
    one convolution.

    For inference: the model must be in eval mode, and its state_dict gets other keys. A module whose whole forward is
    the expression, or an nn.Sequential of nothing else, becomes an nn.Linear; in a longer nn.Sequential the Linear is
    replaced and nn.Identity takes the other places, as it takes that of a BatchNorm behind a convolution, or behind a
    Linear without a scale, in a larger forward. Weights are computed in float64 and rounded once. ``model`` may be
    swapped or not; it is left untouched and a copy is returned, unless ``inplace``. Other swapped modules stay swapped.

    The input of such a Linear must be (N, K), and nobody but the forward of the module that holds them may call its
    parts, or a convolution and its BatchNorm: BatchNorm1d takes (N, C, L) too and then normalises another axis, which a
    Linear cannot. The input of such an nn.Conv1d or nn.ConvTranspose1d must be (N, C, L): what it gives of (C, L)
    BatchNorm1d takes for (N, C).

    What the forward branches on and reads besides weights is taken as it is now. What code outside of the model, which
    it does not call, does with its modules is not seen. With example inputs, taken as ``optimize`` takes them, a copy
    of the model and what is made of that are compared on these in float64.

    A site that cannot be folded is left as it is, and a warning says why; one more names the BatchNorms behind which
    no such site was found. Raises TypeError when ``model`` is no nn.Module or example inputs are of another kind, and
    NormswapError when it is in train mode or cannot be copied, when nothing can be folded, when outputs differ by more
    than float64 rounds, and with ``inplace`` when the model itself is what folds; ``model`` is then as it was.
    """
    check_arguments(model, example_inputs, example_kwargs)
    if model.training:
        raise NormswapError("fold: the model is in train mode, where a BatchNorm goes by its batch; call .eval() first")
    if example_inputs is not None or example_kwargs is not None:
        error = difference(model, example_inputs, example_kwargs)
        if not error <= LIMIT:
            raise NormswapError(
                f"fold: its outputs would differ by {error:.3g} of the largest in float64: code that is not read takes "
                "a part of what is folded by itself"
            )
    with torch.inference_mode(False), torch.no_grad():
        target = model if inplace else copy_of(model)
        uses = uses_in(target)
        left: list[Left] = []
        whole, within = _folded(target, uses, left)
        convolved = _folded_pairs(target, whole, uses, left)
        for one in left:
            warnings.warn(f"fold: {one.place} is left as it is: {one.reason}", stacklevel=2)
        if not whole and not within and not convolved:
            raise NormswapError(
                "fold: no module of this model is a Linear -> scale -> BatchNorm1d, or a convolution -> BatchNorm, "
                "that can be folded"
            )
        if id(target) in whole:
            if inplace:
                raise NormswapError("fold: the model itself is what folds, which cannot be done in place")
            return whole[id(target)]
        gone = {id(pair.owner._modules[pair.norm]) for pair, _ in convolved}
        gone |= {id(sequential._modules[name]) for sequential, children in within for name in children}
        gone |= {id(part) for one in target.modules() if id(one) in whole for part in one.modules()}
        if stay := _alone(target, gone | {id(one.norm) for one in left}):
            some = ", ".join(stay[:3]) + (", ..." if len(stay) > 3 else "")
            warnings.warn(
                f"fold: {len(stay)} BatchNorms stay ({some}): no convolution or Linear was found that hands its output "
                "to one of them alone",
                stacklevel=2,
            )
        for pair, convolution in convolved:
            _put_pair(pair, convolution)
        for sequential, children in within:
            _put_children(sequential, children)
        for parent in list(target.modules()):
            for name, child in parent._modules.items():
                parent._modules[name] = whole.get(id(child), child)
    return target


@dataclass(frozen=True)
class Left:
    """A site that is left as it is: its name, its BatchNorm and why."""

    place: str
    norm: nn.Module | None
    reason: str


def _alone(model: nn.Module, known: Collection[int]) -> list[str]:
    """The names of the BatchNorms in ``model`` but for those that are ``known``."""
    found = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    return [name for name, one in found if id(one) not in known]


LIMIT = 1e-9
"""Of the largest output: rounding in float64 moves that of a deep model by 1e-13."""


def difference(
    model: nn.Module, inputs: Tensor | tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None = None
) -> float:
    """How far ``fold`` moves the outputs of a copy of ``model`` in float64 on these inputs, of the largest of them that
    is finite. Raises what the model raises there, what ``fold`` does, and NormswapError where none is."""
    given = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,), dict(kwargs or {})
    args, named = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, given)
    found = []
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fold itself says what stays
        exact = copy_of(model, "its folds are compared on a copy: fold it without example inputs").double()
        for one in (exact, fold(exact)):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                leaves = tree_leaves(one(*args, **named))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_meta]
            found.append([leaf.ravel().to(torch.complex128) for leaf in tensors])
    if not any(leaf.isfinite().any() for leaf in found[0]):
        gives = f"{type(model).__name__} gives no tensor with a finite number on these inputs"
        raise NormswapError(f"fold: {gives}, and nothing can be compared; give others")
    whole, plain = map(torch.cat, found)
    same = (whole == plain) | (whole.isnan() & plain.isnan())
    largest = whole.abs().nan_to_num(0.0, 0.0).max()
    return float((whole - plain).abs().masked_fill(same, 0.0).max() / (largest or 1.0))


def _folded_pairs(
    model: nn.Module, whole: Collection[int], uses: Uses, left: list[Left]
) -> list[tuple[Pair, nn.Module]]:
    """Each convolution or Linear with a BatchNorm behind it, and the one that the two equal, but in modules that are
    replaced as a ``whole``. Those that stay are added to ``left``."""
    found = []
    for name, pair in [*pairs_of(model, uses)]:
        if id(pair.owner) in whole:
            continue
        problem = pair.problem
        try:
            if not problem:
                found.append((pair, convolution_of(pair)))
        except ValueError as reason:
            problem = str(reason)
        if problem:
            left.append(Left(f"{name}.{pair.norm}" if name else pair.norm, pair.owner._modules[pair.norm], problem))
    return found


def _folded(
    model: nn.Module, uses: Uses, left: list[Left]
) -> tuple[dict[int, nn.Linear], list[tuple[nn.Module, dict[str, nn.Module]]]]:
    """The Linear for each module that becomes one, by the module's id; and (nn.Sequential, its new children) for
    those of which a part does. Sites that stay are added to ``left``."""
    whole: dict[int, nn.Linear] = {}
    within: list[tuple[nn.Module, dict[str, nn.Module]]] = []
    for name, module in model.named_modules():
        children: dict[str, nn.Module] = {}
        for parts, names in _parts(module):
            try:
                if any(id(module._modules.get(name)) in uses.apart for name in (parts["linear"], parts["batch_norm"])):
                    raise ValueError(ELSEWHERE)
                if names in ([], list(module._modules)) and uses.would_tell(module, nn.Linear):
                    raise ValueError("code that uses it would see that it is an nn.Linear then")
                linear = _linear(module, parts)
            except ValueError as reason:
                left.append(Left(name or "(root)", module._modules.get(parts["batch_norm"]), str(reason)))
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
    if isinstance(module, torch.jit.ScriptModule):  # a graph says what it computes
        return []
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


def _put_children(sequential: nn.Module, children: Mapping[str, nn.Module]) -> None:
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
    return _one_layer(linear, bn, before, behind)


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


ELSEWHERE = "one of them is called elsewhere too"


def pairs_of(model: nn.Module, uses: Uses) -> Iterator[tuple[str, Pair]]:
    """Every BatchNorm in eval behind a convolution in ``model``, with the name of the module that calls the two, by the
    dataflow of its code. ``uses``: those in it."""
    places = Counter(id(child) for module in model.modules() for child in module._modules.values())
    for name, owner in model.named_modules():
        read = [(one, class_before(one)) for one in owner.modules()]
        with classes(read):  # what was swapped is read as it was
            found = [*region_rule.readings(owner, lambda child: None, baked=True)]
            joined = dict.fromkeys(pair for reading in found for pair in _pairs(owner, reading))
            apart = [*_through_methods(owner, {pair.norm for pair in joined})]
        for pair in (*joined, *apart):
            parts = {id(one) for path in (pair.convolution, pair.norm) for one in _along(path, owner)}
            several = any(places[one] > 1 for one in parts) or not parts.isdisjoint(uses.apart | uses.read)
            if pair.problem:
                yield name, pair
            elif several or not (pair in apart or _are_called_there(pair, found, uses)):
                yield name, replace(pair, problem=ELSEWHERE)
            else:
                yield name, replace(pair, problem=_problem(pair, uses))


def _problem(pair: Pair, uses: Uses) -> str:
    """Why what was read of the owner, or of who uses the norm, says too little; "" for nothing."""
    owner, norm = pair.owner, pair.owner._modules[pair.norm]
    forward = class_forward(owner)
    read = region_rule.methods_of(owner, forward) if forward is not None else {}
    if not calls_forward(type(owner)) or not owner.__dict__.keys().isdisjoint(read):
        return "who calls the two is called in a way of its own, or has a forward or a method of its own"
    if norm is not None and uses.would_tell(norm, nn.Identity):
        return "code that uses its BatchNorm would see that it is an nn.Identity then"
    return ""


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


def _are_called_there(pair: Pair, readings: list[region_rule.Reading], uses: Uses) -> bool:
    """Whether the owner calls the two only where the one follows the other; an nn.Sequential does so unread."""
    regions = [(reading, region) for reading in readings for region in reading.regions]
    count = sum((_first(region, reading), region.norm) == (pair.convolution, pair.norm) for reading, region in regions)
    count = 0 if class_before(pair.owner).forward is nn.Sequential.forward else count
    parts = pair.owner._modules[pair.convolution.partition(".")[0]], pair.owner._modules[pair.norm]
    return all(uses.calls[id(part)] == count for part in parts)


def convolution_of(pair: Pair) -> nn.Module:
    """The plain convolution, or Linear, that ``pair`` equals in eval, its weights from float64, rounded once. Raises
    ValueError with the reason where there is none."""
    *_, convolution = _along(pair.convolution, pair.owner)
    norm: Any = pair.owner._modules[pair.norm]
    width = convolution.out_features if isinstance(convolution, nn.Linear) else convolution.out_channels
    if not _is_plain_norm(norm, pair.behind) or norm.num_features != width:
        raise ValueError("its BatchNorm is no plain one, or of another width")
    if not is_foldable(norm):  # that behind a Linear is one of a region in training too
        raise ValueError("its BatchNorm goes by its batch: it is in train mode or keeps no running statistics")
    given = (convolution.weight, convolution.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    if len({t.device for t in given if t is not None}) > 1:
        raise ValueError("its tensors are on several devices")
    return _one_layer(convolution, norm)


def _one_layer(layer: Any, norm: Any, scale: Tensor | None = None, after: Tensor | None = None) -> Any:
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


def _is_plain_norm(norm: nn.Module, behind: tuple[str, ...]) -> bool:
    """Whether calling ``norm`` runs what was read and no more."""
    if type(norm) in RANKS or type(norm) is nn.SyncBatchNorm:
        return is_plain(norm, type(norm))
    with classes([(norm, class_before(norm))]):
        return is_unhooked(norm) and children_behind(norm) == behind


def _put_pair(pair: Pair, made: nn.Module) -> None:
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
