"""Subclasses of torch.nn's norms: swapped when they provably compute what their base class does, else refused."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normswap
from normswap import modules
from normswap.forwards.replaced import fingerprint
from normswap.plans import Reason


class Flagged(nn.LayerNorm):
    """timm's way."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._fast_norm = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._fast_norm:
            x = 2 * x
        else:
            x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x


class FlaggedGroup(nn.GroupNorm):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._fast_norm = False

    def forward(self, x):
        if self._fast_norm:
            return -x
        else:
            return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class Bare(nn.LayerNorm):
    pass


class Root(nn.RMSNorm):
    def forward(self, x):
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class Doubled(nn.LayerNorm):
    def forward(self, x):
        return 2 * F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class NoBias(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, None, self.eps)


class OtherEps(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-3)


class Permuted(nn.LayerNorm):
    def forward(self, x):
        x = x.permute(0, 2, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Swapped(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.bias, self.weight, self.eps)


class PropertyWeight(nn.LayerNorm):
    @property
    def eps(self):
        return 1e-2

    @eps.setter
    def eps(self, value):
        pass


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


CASES = (
    (Flagged(12), (4, 12), {"unless": "_fast_norm"}),
    (FlaggedGroup(3, 6), (4, 6, 5), {"unless": "_fast_norm"}),
    (Bare(12), (4, 12), {}),
    (Root(12), (4, 12), {}),
)


@pytest.mark.parametrize(("module", "shape", "attributes"), CASES, ids=lambda v: type(v).__name__)
@pytest.mark.case("pickle-deepcopy")
def test_swapped_and_equal(module: nn.Module, shape: tuple[int, ...], attributes: dict[str, str]) -> None:
    module, x = randomised(module), torch.randn(shape)
    swapped = normswap.optimize(module, x)
    match = modules.site_match(swapped)
    source = {"source": fingerprint(type(module).forward)} if "forward" in vars(type(module)) else {}
    assert match is not None and dict(match.attributes) == source | attributes
    name = next(iter(inspect.signature(module.forward).parameters))
    assert isinstance(swapped, type(module)) and type(swapped) is not type(module)
    for twin in (swapped, copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        assert torch.equal(twin(x), module(x)) and torch.equal(twin(**{name: x}), module(x))
        assert modules.site_match(twin) == match
    assert type(normswap.revert(swapped)) is type(module)


@pytest.mark.case("attributes-changed-later")
def test_the_flag_is_read_on_every_call() -> None:
    module, x = randomised(Flagged(12)), torch.randn(4, 12)
    swapped = normswap.optimize(module, x)
    swapped._fast_norm = True
    assert torch.equal(swapped(x), 2 * x)


@pytest.mark.parametrize("cls", (Doubled, NoBias, OtherEps, Permuted, Swapped, PropertyWeight))
@pytest.mark.case("subclass-own-forward")
def test_look_alikes_are_refused(cls: type[nn.LayerNorm]) -> None:
    model, x = randomised(cls(12)), torch.randn(4, 12, 12)
    # the class is no norm of ours; the F.layer_norm it calls is a region, with the operands it passes
    assert [swap.match.kind for swap in normswap.plan(model).swaps] == ["region"]
    torch.testing.assert_close(normswap.optimize(model, x)(x), model(x))


def test_a_forward_replaced_on_the_class_afterwards_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = randomised(Flagged(12)), torch.randn(4, 12)
    swapped = normswap.optimize(module, x)
    monkeypatch.setattr(Flagged, "forward", lambda self, x: x + 1)
    assert torch.equal(swapped(x), x + 1)


def test_subclasses_of_norms_with_other_attributes_are_refused() -> None:
    (refused,) = normswap.plan(type("Own", (nn.InstanceNorm2d,), {})(4)).refused
    assert refused.refusal.reason is Reason.SUBCLASS and "only the exact type" in refused.refusal.detail


def test_a_subclass_of_batch_norm_trains_as_the_function_that_its_forward_calls() -> None:
    own = type("Own", (nn.BatchNorm2d,), {})
    assert [swap.match.kind for swap in normswap.plan(own(4)).swaps] == ["region"]
    assert not normswap.plan(own(4).eval()).swaps and not normswap.plan(nn.SyncBatchNorm(4)).swaps
