"""What the tests of the rules ask of an answer: a match is run, swapped and original must agree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normswap import modules, rules
from normswap.plans import Match, Reason, Refusal


def randomise(module: nn.Module) -> nn.Module:
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.5 if "var" in name else torch.randn_like(tensor))
    return module


def assert_refused(module: nn.Module, kind: str, reason: Reason, word: str = "") -> None:
    """What ``module`` as a whole is refused for; a region of it may be found all the same."""
    answer = rules.alone(module)
    assert isinstance(answer, Refusal), answer
    assert (answer.kind, answer.reason) == (kind, reason), answer
    assert word in answer.detail


def assert_swapped_is_equal(module: nn.Module, match: Match, x: Tensor) -> None:
    """The class that the match asks for computes what the module did, buffers and gradients included."""
    swapped = copy.deepcopy(module)
    swapped.__class__ = modules.swapped_class(match.kind, type(module), match.attributes)
    for _ in range(2):
        theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, got = module(theirs), swapped(ours)
        torch.testing.assert_close(got, expected)
        weight = torch.randn_like(expected)
        expected.backward(weight)
        got.backward(weight)
        torch.testing.assert_close(ours.grad, theirs.grad)
    for (name, mine), original in zip(swapped.state_dict().items(), module.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, original, msg=name)


class Expression(nn.Module):
    """A module of one forward, given as a function."""

    dim = 1


def expression(forward: Callable[..., Any]) -> nn.Module:
    return type("Written", (Expression,), {"forward": forward})()
