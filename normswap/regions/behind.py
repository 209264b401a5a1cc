"""What stands behind the norm of a region: a residual, a gain and a shift, an activation; and what reads that."""

from __future__ import annotations

import torch
from torch import nn

from normswap.kinds import NORMS
from normswap.regions.activations import called_activation, sigmoid_times
from normswap.regions.feeds import only_multiplies
from normswap.regions.flow import Constant, Op, is_literal
from normswap.regions.growing import ADDS, CHANNELS, ROWS, Growing, child_of, dims_of, is_own, only_user, passing, take

FEEDING = tuple(norm.name for norm in NORMS.values() if norm.widens)
"""Kinds that autocast runs in float32."""


def grow_behind(module: nn.Module, found: Growing, taken: set[int]) -> None:
    """Take in what is done with the norm's result, up to an activation and nothing of another region (``taken``)."""
    if found.activation is not None:
        return
    if (gated := sigmoid_times(found.last)) is not None:
        found.ops += gated
        found.steps += [("activation", gated[-1], gated[-1].args.index(gated[0].args[0]))]
        found.activation = ("silu", 0.0, 0.0)
        return
    permuted = _permuted(found)
    while (user := only_user(found.last)) is not None and id(user) not in taken:
        operand = user.args.index(found.last) if found.last in user.args else -1
        child = child_of(module, user)
        if operand < 0:
            return
        if permuted and user.target == ".permute()" and dims_of(user) == (0, 3, 1, 2):
            take(found, "permute back", user, 0)
            return
        if name := passing(module, user):
            found.passes.append(name)
            take(found, "pass", user, 0)
        elif not permuted and _behind(found, user, operand):
            continue
        elif (activation := called_activation(child, user)) is not None and not permuted:
            found.activation = activation
            take(found, "activation", user, 0)
            return
        else:
            return


def fed_by(module: nn.Module, found: Growing) -> tuple[str, ...]:
    """The children that the result goes through to one that autocast makes read it in 16 bits; none outside autocast,
    and where anything else may read it."""
    names: list[str] = []
    value = found.last
    if found.kind not in FEEDING or not any(map(torch.is_autocast_enabled, ("cuda", "cpu"))):
        return ()
    while (user := only_user(value)) is not None and user.args[:1] == (value,):
        child = child_of(module, user)
        names.append(str(user.target)[len("self.") :])
        if not passing(module, user):
            return tuple(names) if child is not None and only_multiplies(child) else ()
        value = user
    return ()


def _behind(found: Growing, user: Op, operand: int) -> bool:
    """Take in a residual, or the gain and shift of an adaptive norm."""
    done = {does for does, _, _ in found.steps}
    other = user.args[1 - operand] if len(user.args) == 2 and not user.keywords else None
    if other is None or isinstance(other, Constant):
        return False
    if found.kind in CHANNELS and not is_own(other) and user.target in (*ADDS, "+=") and "residual" not in done:
        return take(found, "residual", user, operand) if user.target != "+=" or operand == 0 else False
    if found.kind not in ROWS or "shift" in done:
        return False
    if user.target == "*" and "gain" not in done and isinstance(other, Op) and _is_one_plus(other, user):
        return take(found, "gain", user, operand)
    return user.target == "+" and "gain" in done and take(found, "shift", user, operand)


def _is_one_plus(value: Op, product: Op) -> bool:
    """``1 + s``, written in the product itself."""
    ones = [arg for arg in value.args if is_literal(arg) and arg.value == 1]
    written = value.node in (getattr(product.node, "left", None), getattr(product.node, "right", None))
    return value.target == "+" and len(ones) == 1 and len(value.users) == 1 and written


def _permuted(found: Growing) -> bool:
    """Whether the norm is of ``x.permute(0, 2, 3, 1)``, which nobody else uses."""
    before = found.x
    return (
        found.kind == "layer_norm"
        and isinstance(before, Op)
        and before.target == ".permute()"
        and before.users == [found.ops[0]]
        and dims_of(before) == (0, 2, 3, 1)
    )
