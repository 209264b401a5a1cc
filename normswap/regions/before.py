"""What stands before the norm of a region: a sum, a permutation, a convolution, a Linear."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from normswap.regions.flow import Constant, Op
from normswap.regions.foldings import convolution_in, is_foldable
from normswap.regions.growing import ADDS, ROWS, Growing, child_of
from normswap.regions.linear import with_linear
from normswap.regions.views import METHODS


def with_what_stands_before(module: nn.Module, found: Growing, taken: set[int], baked: bool) -> Iterator[Growing]:
    """``found`` with each that its norm may be taken together with; ``baked`` as in ``patterns.regions_of``."""
    if found.kind != "batch_norm":
        before = [_with_sum(found, taken)]
    else:
        before = [*with_linear(module, found, taken), _with_convolution(module, found, taken, baked)]
    yield from filter(None, before)


def _with_convolution(module: nn.Module, found: Growing, taken: set[int], baked: bool) -> Growing | None:
    """``found`` and the convolution whose output is normalised; None where none can be taken in."""
    norm, before = found.ops[0], found.x
    child = child_of(module, before) if isinstance(before, Op) and id(before) not in taken else None
    if not isinstance(before, Op) or child is None or len(before.args) != 1 or before.keywords:
        return None
    if not found.type or not is_foldable(module._modules[found.norm]):
        return None
    name, apart = convolution_in(before.target[len("self.") :], child, before.users == [norm], baked)
    found.apart = apart or found.apart
    if not name:
        return None
    return replace(found, convolution=name, ops=[before, *found.ops], steps=[("convolution", before, 0), *found.steps])


def _with_sum(found: Growing, taken: set[int]) -> Growing | None:
    """``found`` and the sum that a LayerNorm or RMSNorm is of, or the permutation before it; None where none is."""
    norm, before = found.ops[0], found.x
    if not isinstance(before, Op) or before.stretch != norm.stretch or id(before) in taken:
        return None
    if any(does == "permute back" for does, _, _ in found.steps):
        return replace(found, ops=[before, *found.ops], steps=[("permute", before, 0), *found.steps])
    met, inner, view = before, _viewed(before), list[Op]()
    if inner is not None and id(inner) not in taken:
        before, view = inner, [met]
    operands = [arg for arg in before.args if not isinstance(arg, Constant)]
    if found.kind not in ROWS or before.target not in ADDS or len(before.args) != 2 or before.keywords:
        return None
    if len(operands) != 2:
        return None
    others = [user for user in met.users if user is not norm]
    # Where others use the sum too, all is computed where that is: nothing that comes later may be needed.
    if (others or view) and not (_is_simple(found) and found.type and (_is_assigned(met) or not others)):
        return None
    steps = [("sum", before, 0), *(("view", op, 0) for op in view), *found.steps]
    return replace(found, shared=bool(others), ops=[before, *view, *found.ops], steps=steps)


def _viewed(op: Op) -> Op | None:
    """What ``op`` is a view of, where nobody else uses that."""
    inner = op.args[0] if op.target in METHODS and not op.keywords else None
    return inner if isinstance(inner, Op) and inner.users == [op] else None


def _is_simple(found: Growing) -> bool:
    return all(does in ("norm", "pass", "activation") for does, _, _ in found.steps)


def _is_assigned(op: Op) -> bool:
    """``name = <op>`` and nothing else."""
    statement = op.statement
    return isinstance(statement, ast.Assign) and statement.value is op.node
