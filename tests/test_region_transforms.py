"""Regions under transforms, and beside the modes of others, which see no more than they did."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import randomised
from region_checks import swap
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


class Squared(nn.Module):
    """An RMSNorm among other statements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.fc = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return h * x


class Seen(TorchDispatchMode):
    """Notes on what devices operations made tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.devices |= {t.device.type for t in tree_leaves(out) if isinstance(t, Tensor)}
        return out


class Called(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_no_mode_sees_how_an_expression_is_judged() -> None:
    swapped, x = swap(randomised(Squared())), torch.randn(3, 8)
    with Seen() as seen, Called() as called:
        swapped(x)
        first = [*called.functions]
        called.functions.clear()
        swapped(x)
    assert seen.devices == {"cpu"} and first == called.functions


def test_selective_checkpointing_of_an_expression() -> None:
    """A second forward sees what the first one saw, though only that is judged."""
    model = randomised(Squared())
    swapped, saves = swap(model), torch.ops.aten.mul.Tensor

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is saves else CheckpointPolicy.PREFER_RECOMPUTE

    def gradients(one: nn.Module, x: Tensor) -> list[Tensor]:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        out = checkpoint(one, x, use_reentrant=False, context_fn=contexts)
        return [*torch.autograd.grad(out.sin().sum(), [x, *one.parameters()])]

    for rows in (5, 5, 6):
        x = torch.randn(rows, 8, requires_grad=True)
        torch.testing.assert_close(gradients(swapped, x), gradients(model, x))


def first_of_a_sum(self: Any, x: Tensor) -> Tensor:
    return F.relu(x + self.norm(x))


def over_channels(self: Any, x: Tensor) -> Tensor:
    return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


IMAGES = {first_of_a_sum: nn.GroupNorm(2, 8), over_channels: nn.LayerNorm(8)}


@pytest.mark.parametrize("forward", IMAGES)
@pytest.mark.parametrize("dim", (0, 1))
def test_vmap_of_images(forward: Any, dim: int) -> None:
    """It does not say of every layout how they lie."""
    model = nn.Module()
    model.__class__ = type("Image", (nn.Module,), {"forward": forward})
    model.norm = IMAGES[forward]
    swapped = swap(randomised(model))
    x = torch.randn(3, 2, 8, 5, 5)  # with 1, what it maps over lies between the others
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(swapped, dim)(x), torch.vmap(model, dim)(x))
    gradients = [torch.func.grad(lambda x, one=one: torch.vmap(one, dim)(x).sin().sum())(x) for one in (swapped, model)]
    torch.testing.assert_close(*gradients)
