"""The check that a model with an expression in a forward, swapped or a trap, is equal to the original or refused with a
reason. Shared by the tests on a CPU and on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from expression_forwards import FEATURES
from models import randomised
from region_checks import assert_near
from torch import Tensor, nn

import normswap
from normswap.plans import Plan


@dataclass(frozen=True)
class Trap:
    """``plan``: what is found, by the site's name - a kind, or a kind and the Reason of its refusal. ``later`` changes
    the model after the swap and returns it; ``modes`` are those it runs in, ``attributes`` what its forward
    writes to itself, and ``backward_raises`` says that the original's own backward does."""

    make: Callable[[], nn.Module]
    plan: dict[str, str]
    cases: tuple[str, ...]
    shape: tuple[int, ...] = (8, FEATURES)
    later: Callable[[Any], nn.Module] | None = None
    modes: tuple[str, ...] = ("train", "eval")
    attributes: tuple[str, ...] = ()
    backward_raises: bool = False


def found(plan: Plan) -> dict[str, str]:
    """By name; but for a BatchNorm by itself, which in training is a site beside what its parent was refused for."""
    swaps = {swap.site.name: swap.match.kind for swap in plan.swaps}
    every = swaps | {one.site.name: f"{one.refusal.kind} {one.refusal.reason.name}" for one in plan.refused}
    return {name: what for name, what in every.items() if what.partition(" ")[0] != "batch_norm"}


def check(trap: Trap, mode: str, device: str) -> None:
    """The model is planned as the table says, and swapped it does what it did: outputs, gradients, buffers, what its
    forward writes into the input and its attributes, with and without gradients, called twice."""
    model = randomised(trap.make()).to(device).train(mode == "train")
    x = torch.randn(trap.shape, device=device)
    planned = normswap.plan(model)
    assert found(planned) == trap.plan, str(planned)
    original = copy.deepcopy(model)
    given = None if not trap.plan else x.clone()
    swapped = normswap.optimize(model, given, inplace=True, on_empty="ignore", on_mismatch="raise", min_speedup=None)
    if trap.later is not None:
        state = torch.random.get_rng_state()
        swapped = trap.later(swapped)
        torch.random.set_rng_state(state)
        original = trap.later(original)
    assert_equal(swapped, original, x, trap.backward_raises)
    for name in trap.attributes:
        assert getattr(swapped, name) == getattr(original, name) > 0


def assert_equal(swapped: nn.Module, original: nn.Module, x: Tensor, backward_raises: bool = False) -> None:
    for learning in (False, True, True):
        ours, theirs = (_outcome(module, x, learning) for module in (swapped, original))
        if isinstance(ours, str) or isinstance(theirs, str):
            assert ours == theirs and learning and backward_raises
            continue
        assert ours.keys() == theirs.keys()
        parameters = {name for name, _ in original.named_parameters()}
        exact = _call(copy.deepcopy(original).double(), x.double(), True) if learning and parameters else {}
        for name, tensor in theirs.items():
            if name in exact and name in parameters:
                assert_near(ours[name], tensor, partial(exact.__getitem__, name), name, 1e-4, _tolerance(tensor))
            else:
                _close(ours[name], tensor, name)
    mine, buffers = dict(swapped.named_buffers()), dict(original.named_buffers())
    assert mine.keys() == buffers.keys()
    for name, buffer in buffers.items():
        _close(mine[name], buffer, name)


def _outcome(module: nn.Module, x: Tensor, learning: bool) -> dict[str, Tensor] | str:
    try:
        return _call(module, x, learning)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def _call(module: nn.Module, x: Tensor, learning: bool) -> dict[str, Tensor]:
    """The output, the input afterwards and the gradients by name of one call."""
    leaf = x.clone().requires_grad_(learning)
    inner = leaf * 1  # a forward may write into it
    module.zero_grad()
    with torch.set_grad_enabled(learning):
        output = module(inner)
    result = {"output": output.detach(), "input": inner.detach()}
    if learning:
        output.backward(torch.cos(torch.arange(output.numel(), device=x.device)).view(output.shape))
        gradients = {"gradient of input": leaf.grad, **{n: p.grad for n, p in module.named_parameters()}}
        result |= {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}
    return result


def _close(ours: Tensor, theirs: Tensor, name: str) -> None:
    if not theirs.is_floating_point():
        assert torch.equal(ours, theirs), name
        return
    told = f"{name}: {{}}".format
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=_tolerance(theirs), equal_nan=True, msg=told)


def _tolerance(theirs: Tensor) -> float:
    """1e-5 of the largest value."""
    finite = theirs[theirs.isfinite()]
    return 1e-5 * (1 + float(finite.abs().max())) if finite.numel() else 0.0
