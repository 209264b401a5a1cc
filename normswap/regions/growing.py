"""A region while it is found: a norm, and what stands behind it and before it, taken in one by one."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from normswap.attributes import is_hidden
from normswap.kinds import NORMS
from normswap.ops.at_once import PASSING
from normswap.regions.activations import LITERAL, called_activation, sigmoid_times
from normswap.regions.feeds import only_multiplies
from normswap.regions.flow import Attribute, Constant, Leaf, Op, Value, is_literal
from normswap.regions.foldings import convolution_in, is_foldable
from normswap.regions.formula import Found
from normswap.regions.spelling import PURE, SPELLED

ROWS = tuple(norm.name for norm in NORMS.values() if norm.rows)
CHANNELS = tuple(norm.name for norm in NORMS.values() if not norm.rows)
FEEDING = tuple(norm.name for norm in NORMS.values() if norm.widens)
"""Kinds that autocast runs in float32."""


@dataclass
class Growing:
    """A region while it grows: its ``steps``, from the first to the last, with the operation that each is, those
    ``inside`` steps, and what else ``Region`` wants."""

    kind: str
    norm: str
    x: Value
    steps: list[tuple[str, Op, int]]
    inside: tuple[Op, ...] = ()
    type: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    shared: bool = False
    seen: bool = False
    passes: list[str] = field(default_factory=list)
    activation: str | tuple[str, float, float] | None = None
    convolution: str = ""
    linear: str = ""
    factor: tuple[str, ...] = ()
    apart: str = ""
    feeds: tuple[str, ...] = ()
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    expression: Found = field(default_factory=Found)

    @property
    def ops(self) -> list[Op]:
        """All its operations, the last at the end."""
        return [*self.inside, *(op for _, op, _ in self.steps)]

    @property
    def last(self) -> Op:
        return self.steps[-1][1]


def child_called(op: Op) -> str:
    """``name`` of a call of ``self.name``; "" for any other operation."""
    is_one = isinstance(op.target, str) and op.target.startswith("self.")
    return op.target[len("self.") :] if is_one else ""


def child_of(module: nn.Module, op: Op) -> nn.Module | None:
    """The child of ``module`` that ``op`` calls."""
    name = child_called(op)
    return None if is_hidden(module, name) else module._modules.get(name)


def passing(module: nn.Module, op: Op) -> str:
    """The name of the child that ``op`` calls and that hands on what it gets, "" where it is none."""
    is_one = type(child_of(module, op)) in PASSING and len(op.args) == 1 and not op.keywords
    return child_called(op) if is_one else ""


def only_user(value: Op) -> Op | None:
    return value.users[0] if len(value.users) == 1 else None


def is_own(value: Value) -> bool:
    """Whether it is computed from attributes of self and constants alone: what a forward is given may be one a
    sample."""
    if isinstance(value, Leaf):
        return value.of is not None and is_own(value.of)
    return isinstance(value, (Attribute, Constant)) or (isinstance(value, Op) and all(map(is_own, value.args)))


# --- behind the norm ----------------------------------------------------------------------------------------------


def grow_behind(module: nn.Module, found: Growing, taken: set[int]) -> None:
    """Take in what is done with the norm's result, up to an activation and nothing of another region (``taken``)."""
    if found.activation is not None:
        return
    if (gated := sigmoid_times(found.last)) is not None:
        gate, product = gated
        found.steps.append(("activation", product, product.args.index(gate.args[0])))
        found.inside, found.activation = (*found.inside, gate), ("silu", 0.0, 0.0)
        return
    permuted = _is_permute(found.x, (0, 2, 3, 1)) and found.kind == "layer_norm" and found.x.users == [found.last]
    while (user := only_user(found.last)) is not None and id(user) not in taken and found.last in user.args:
        operand = user.args.index(found.last)
        if permuted and _is_permute(user, (0, 3, 1, 2)):
            found.steps.append(("permute back", user, 0))
            break
        if name := passing(module, user):
            found.passes.append(name)
            found.steps.append(("pass", user, 0))
        elif permuted:
            break
        elif does := _added_or_scaled(found, user, operand):
            found.steps.append((does, user, operand))
        else:
            activation = called_activation(child_of(module, user), user)
            if activation is not None and not _writes_residual_later(module, found, user):
                found.activation = activation
                found.steps.append(("activation", user, 0))
            break
    while found.steps[-1][0] == "pass":  # nothing behind it: a dropout that is on need not stop the rest
        found.steps.pop(), found.passes.pop()


def fed_by(module: nn.Module, found: Growing, undisturbed: Callable[[Sequence[Op]], bool]) -> tuple[str, ...]:
    """The children that the result goes through to one that autocast makes read it in 16 bits; none outside autocast,
    and where anything else may read it, or change what these do meanwhile. ``undisturbed(ops)``: nothing is done
    between them that could."""
    names: list[str] = []
    value, readers = found.last, [found.last]
    if found.kind not in FEEDING or not any(map(torch.is_autocast_enabled, ("cuda", "cpu"))):
        return ()
    while (user := only_user(value)) is not None and user.args[:1] == (value,):
        names.append(child_called(user))
        readers.append(user)
        if not passing(module, user):
            child = child_of(module, user)
            return tuple(names) if child is not None and only_multiplies(child) and undisturbed(readers) else ()
        value = user
    return ()


def _added_or_scaled(found: Growing, user: Op, operand: int) -> str:
    """Whether ``user`` adds a residual, or is the gain or shift of an adaptive norm; "" for none of them."""
    done = {does for does, _, _ in found.steps}
    other = user.args[1 - operand] if len(user.args) == 2 and not user.keywords else None
    if other is None or isinstance(other, Constant):
        return ""
    if found.kind in CHANNELS:
        adds = SPELLED.get(user.target) == "+" or (user.target == "+=" and operand == 0)
        return "residual" if adds and not is_own(other) and "residual" not in done else ""
    if "shift" in done:
        return ""
    if "gain" in done:
        return "shift" if user.target == "+" else ""
    return "gain" if user.target == "*" and isinstance(other, Op) and _is_one_plus(other, user) else ""


def _writes_residual_later(module: nn.Module, found: Growing, activation: Op) -> bool:
    """Whether the residual is written to behind the ``activation``: PyTorch's backward does without, ours may not."""
    residuals = [op.args[1 - operand] for does, op, operand in found.steps if does == "residual"]
    users = [user for value in residuals for user in value.users if user and user.order > activation.order]
    return any(user.args[:1] == (value,) and _is_in_place(module, user) for value in residuals for user in users)


def _is_in_place(module: nn.Module, op: Op) -> bool:
    """Whether ``op`` writes to its first operand."""
    child, flag = child_of(module, op), op.keywords.get("inplace")
    name = op.target if isinstance(op.target, str) else getattr(op.target, "__name__", "")
    return bool(
        name.removesuffix("()").endswith(("_", "="))
        or getattr(child, "inplace", False)
        or (isinstance(flag, Constant) and flag.value)
    )


def _is_one_plus(value: Op, product: Op) -> bool:
    """``1 + s``, written in the product itself."""
    ones = [arg for arg in value.args if is_literal(arg) and arg.value == 1]
    written = value.node in (getattr(product.node, "left", None), getattr(product.node, "right", None))
    return value.target == "+" and len(ones) == 1 and len(value.users) == 1 and written


def _is_permute(value: Value, dims: tuple[int, ...]) -> bool:
    """Whether it is ``something.permute(*dims)``."""
    if not isinstance(value, Op) or value.target != ".permute()":
        return False
    given = tuple(arg.value for arg in value.args[1:] if is_literal(arg))
    return given in (dims, (dims,))


# --- before it ----------------------------------------------------------------------------------------------------


def with_convolution(module: nn.Module, found: Growing, taken: set[int], baked: bool) -> Iterator[Growing]:
    """``found`` with the convolution whose output is normalised, if one can be taken in; ``baked`` as in
    ``patterns.regions_of``."""
    norm, before = found.steps[0][1], found.x
    child = child_of(module, before) if isinstance(before, Op) and id(before) not in taken else None
    if not isinstance(before, Op) or child is None or len(before.args) != 1 or before.keywords:
        return
    if not found.type or not is_foldable(module._modules[found.norm]):
        return
    name, apart = convolution_in(child_called(before), child, before.users == [norm], baked)
    found.apart = apart or found.apart
    if name:
        yield replace(found, convolution=name, steps=[("convolution", before, 0), *found.steps])


def with_sum(found: Growing, taken: set[int]) -> Iterator[Growing]:
    """``found`` with the sum that a LayerNorm or RMSNorm is of, or the permutation before it, if there is one."""
    norm, met = found.steps[0][1], found.x
    if not isinstance(met, Op) or met.stretch != norm.stretch or id(met) in taken:
        return
    does = {does for does, _, _ in found.steps}
    if "permute back" in does:
        yield replace(found, steps=[("permute", met, 0), *found.steps])
        return
    before, steps = met, found.steps
    if (inner := _viewed(met)) is not None and id(inner) not in taken:
        before, steps = inner, [("view", met, 0), *steps]
    sums = SPELLED.get(before.target) == "+" and len(before.args) == 2 and not before.keywords
    if found.kind not in ROWS or not sums or any(isinstance(arg, Constant) for arg in before.args):
        return
    others = [user for user in met.users if user is not norm]
    shared = bool(others)
    # Where others use the sum too, all is computed where that is: nothing that comes later may be needed.
    if shared or before is not met:
        simple = does <= {"norm", "pass", "activation"} and found.type
        if not simple or (shared and not _is_assigned(met)):
            return
    seen = any(user is None or not (user.target in PURE or _is_activation(user)) for user in others)
    yield replace(found, shared=shared, seen=seen, steps=[("sum", before, 0), *steps])


def _is_activation(op: Op) -> bool:
    """Whether it is an activation's function that gives a tensor of its own."""
    written = op.target if isinstance(op.target, str) else getattr(op.target, "__name__", "")
    own = len(op.args) == 1 and "inplace" not in op.keywords and not written.removesuffix("()").endswith("_")
    return op.target in LITERAL and own


def _viewed(op: Op) -> Op | None:
    """What ``op`` is a view of, where nobody else uses that."""
    inner = op.args[0] if op.target in (".view()", ".reshape()") and not op.keywords else None
    return inner if isinstance(inner, Op) and inner.users == [op] else None


def _is_assigned(op: Op) -> bool:
    """``name = <op>`` and nothing else."""
    statement = op.statement
    return isinstance(statement, ast.Assign) and statement.value is op.node
