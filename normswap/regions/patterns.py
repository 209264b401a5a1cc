"""The regions of a forward: a norm, the sum before it, and the residual, scale and shift or activation behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from normswap.kinds import NORMS
from normswap.plans import Match
from normswap.regions.activations import CHILDREN
from normswap.regions.before import with_what_stands_before
from normswap.regions.behind import fed_by, grow_behind
from normswap.regions.described import described
from normswap.regions.flow import Constant, Flow, Op
from normswap.regions.formula import FORMULAS, Formula, Found
from normswap.regions.growing import CHANNELS, FUNCTIONS, PASSING, ROWS, Growing, child_of
from normswap.regions.moving import beside_of
from normswap.regions.spec import Region, qualified
from normswap.regions.successors import with_successors

_CALLED = {norm.name: Formula(norm.formula) for norm in NORMS.values()}

NAMES = frozenset({"mean", "norm", "vector_norm", "normalize", "var", *_CALLED})
"""A forward that names none of these computes no norm itself."""


def regions_of(module: nn.Module, flow: Flow, norm_of: Any, baked: bool = False) -> Iterator[Region]:
    """Every region of ``flow``, a reading of the forward of ``module``, none within another. ``norm_of(child)`` is the
    Match of a child that is a norm, else None. ``baked``: as ``normswap.fold`` takes them, with convolutions that pad
    in their own way, and norms alone that are apart from theirs."""
    taken, made = set[int](), list[Growing]()
    yield from _expressions(module, flow, norm_of, taken)
    for op in flow.ops:
        found = None if id(op) in taken else _core(module, op, norm_of)
        if found is None:
            continue
        grow_behind(module, found, taken)
        while found.steps[-1][0] == "pass":  # nothing behind it: a dropout that is on need not stop the rest
            found.ops.pop(), found.steps.pop(), found.passes.pop()
        found.feeds = fed_by(module, found)
        by_batch = found.kind == "batch_norm"
        for one in (*with_what_stands_before(module, found, taken, baked), found):
            left = one.type or (by_batch and not _may_train(module, one))  # is a site, or PyTorch's op is as fast
            alone = len(one.ops) == 1 and left and not one.feeds and not (baked and one.apart)
            if not alone and _stands(module, flow, one, norm_of):
                taken.update(map(id, one.ops))
                made.append(one)
                break
    stands: Callable[[Growing], bool] = lambda one: _stands(module, flow, one, norm_of)  # noqa: E731
    yield from with_successors(module, made, lambda one: described(flow, one), stands)


def _expressions(module: nn.Module, flow: Flow, norm_of: Any, taken: set[int]) -> Iterator[Region]:
    """Norms that are written out, the longest first: what is ``taken`` grows by their operations."""
    regions = []
    for op in reversed(flow.ops):
        for name, formula in FORMULAS.items() if id(op) not in taken else ():
            whole = formula.find(op)
            if whole is None or isinstance(whole.values["x"], Constant):
                continue
            ops = [*whole.ops - {op}, op]
            found = Growing(name, name, whole.values["x"], ops, [("norm", op, 0)], expression=whole)
            if _stands(module, flow, found, norm_of):
                taken.update(map(id, whole.ops))
                regions.append(described(flow, found))
                break
    return reversed(regions)


def _core(module: nn.Module, op: Op, norm_of: Any) -> Growing | None:
    if op.target in FUNCTIONS:
        kind, _ = FUNCTIONS[op.target]
        whole = _CALLED[kind].find(op)
        if whole is None:
            return None
        return Growing(kind, kind, whole.values["x"], [op], [("norm", op, 0)], expression=whole)
    child = child_of(module, op)
    if child is None or len(op.args) + len(op.keywords) != 1 or not {*op.keywords} <= {"input", "x"}:
        return None
    match = norm_of(child)
    if match is None or match.kind not in (*ROWS, *CHANNELS):
        return None
    cls = type(child)
    x, name = (*op.args, *op.keywords.values())[0], op.target[len("self.") :]
    expression = Found(frozenset([op]), {"x": x}) if op.keywords else Found()
    found = Growing(match.kind, name, x, [op], [("norm", op, 0)], match, expression=expression)
    found.type = qualified(cls)
    return _with_ending(child, found)


def _with_ending(norm: nn.Module, found: Growing) -> Growing | None:
    """``found`` with what ``norm`` itself calls behind the norm; None where that is more than is known."""
    assert found.match is not None
    ending = ending_of(found.norm, norm, found.match)
    if ending is None:
        return None
    found.passes, found.activation = ending
    return found


def ending_of(name: str, norm: nn.Module, match: Match) -> tuple[list[str], str | None] | None:
    """The children of the norm called ``name`` that it calls behind the norm, by their paths: those that hand on what
    they get, and the activation at the end; None where there are others."""
    inside = match.attributes.get("behind", "").split()
    kinds = [type(norm._modules[child]) for child in inside]
    paths = [f"{name}.{child}" for child in inside]
    activation = paths.pop() if kinds and kinds[-1] in CHILDREN else None
    return (paths, activation) if all(kind in PASSING for kind in kinds[: len(paths)]) else None


def _may_train(module: nn.Module, found: Growing) -> bool:
    """Whether a batch_norm may be by the statistics of the batch, as the module is."""
    training = found.expression.values.get("training")
    return module.training and not (isinstance(training, Constant) and training.value is False)


def _stands(module: nn.Module, flow: Flow, found: Growing, norm_of: Any) -> bool:
    """True where nobody can see that the operations are done together."""
    beside = beside_of(flow, found.ops, lambda op: child_of(module, op), norm_of, found.shared)
    found.beside = beside or {}
    return beside is not None
