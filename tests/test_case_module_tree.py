"""Where a norm may stand in a model, what may hang on it, and which norms are left alone with a reason."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable

import pytest
import torch
from models import L1, Projection, randomised
from norm_models import (
    assert_alike,
    assert_swaps_alike,
    by_kind,
    cotangent_of,
    drawn,
    made,
    swapped_copy,
)
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrizations, parametrize

import normswap
from normswap import modules
from normswap.plans import Reason


class Doubled(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def on_the_instance() -> nn.Module:
    norm = nn.LayerNorm(12)
    norm.forward = types.MethodType(lambda self, x: x + 1, norm)  # type: ignore[method-assign]
    return norm


class LazyNorm(LazyModuleMixin, nn.LayerNorm):  # type: ignore[misc]
    cls_to_become = nn.LayerNorm  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(12)
        self.weight = nn.UninitializedParameter()

    def initialize_parameters(self, input: Tensor) -> None:
        if self.has_uninitialized_params():
            self.weight.materialize((12,))
            nn.init.normal_(self.weight)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.LayerNorm(12))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Reason]] = {
    "own forward": (lambda: Doubled(12), Reason.SUBCLASS),
    "forward on the instance": (on_the_instance, Reason.INSTANCE_FORWARD),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.LayerNorm(12), dim=None), Reason.PARAMETRIZED),
    "parametrized": (
        lambda: parametrize.register_parametrization(nn.LayerNorm(12), "bias", nn.Tanh()),
        Reason.PARAMETRIZED,
    ),
    "lazy": (LazyNorm, Reason.LAZY),
    "scripted": (scripted, Reason.SCRIPTED),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.case("subclass-own-forward", "instance-forward", "parametrized", "lazy", "script-module")
def test_what_may_compute_something_else_is_left_alone_with_the_reason(name: str) -> None:
    make, reason = REFUSED[name]
    model = nn.Sequential(nn.LayerNorm(12), make()).eval()
    swapped = normswap.optimize(model, None)
    assert type(swapped[0]) is modules.LayerNorm and type(swapped[1]) is type(model[1])
    refused = {row["name"]: row for row in normswap.report(swapped).rows if row["status"] == "refused"}
    assert list(refused) == ["1"] and reason.sentence in refused["1"]["reason"]
    if reason is not Reason.LAZY:
        x = drawn((5, 12))
        # A copy of a ScriptModule, by copy.deepcopy as by optimize(), has no gradients of its own.
        assert_alike(model, swapped, x, None if reason is Reason.SCRIPTED else cotangent_of(model, x))


@pytest.mark.case("lazy")
def test_a_lazy_norm_is_swapped_once_it_has_shapes() -> None:
    model, x = nn.Sequential(LazyNorm(), nn.ReLU()).eval(), drawn((5, 12))
    model(x)
    assert type(model[0]) is nn.LayerNorm
    assert_swaps_alike(model, x)


@pytest.mark.case("parametrized")
def test_weight_norm_on_the_linear_beside_a_norm() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(7, 12)), randomised(nn.LayerNorm(12))).eval()
    assert_swaps_alike(model, drawn((5, 7)))


@pytest.mark.case("meta-device")
def test_a_meta_model_is_swapped_and_then_filled() -> None:
    model, x = made("layer_norm")
    with torch.device("meta"):
        skeleton = nn.LayerNorm(12).eval()
    swapped = swapped_copy(skeleton, None)
    assert swapped.weight.is_meta and swapped(torch.empty(5, 12, device="meta")).shape == (5, 12)
    swapped = swapped.to_empty(device="cpu")
    swapped.load_state_dict(model.state_dict())
    assert_alike(model, swapped, x, cotangent_of(model, x))


HOOKS: dict[str, Callable[[nn.Module, list[str]], object]] = {
    "pre": lambda m, seen: m.register_forward_pre_hook(lambda *_: seen.append("pre")),
    "pre with kwargs": lambda m, seen: m.register_forward_pre_hook(lambda *_: seen.append("kw"), with_kwargs=True),
    "changes the input": lambda m, seen: m.register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
    "changes the output": lambda m, seen: m.register_forward_hook(lambda _, args, out: out * 2),
    "always called": lambda m, seen: m.register_forward_hook(lambda *_: seen.append("always"), always_call=True),
    "backward pre": lambda m, seen: m.register_full_backward_pre_hook(lambda *_: seen.append("backward pre")),
    "backward": lambda m, seen: m.register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,)),
    "state_dict": lambda m, seen: m.register_state_dict_post_hook(lambda *_: seen.append("state_dict")),
    "load": lambda m, seen: m.register_load_state_dict_post_hook(lambda *_: seen.append("load")),
    "parameter": lambda m, seen: [p.register_hook(lambda g: g * 2) for p in m.parameters()],
}


@by_kind
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("later", (True, False))
@pytest.mark.case("hooks", "later-hooks")
def test_hooks_fire_as_often_and_change_as_much(kind: str, hook: str, later: bool) -> None:
    (plain, x), (model, _) = made(kind), made(kind)
    model.load_state_dict(plain.state_dict())
    expected: list[str] = []
    seen: list[str] = []
    HOOKS[hook](plain, expected)
    if not later:
        HOOKS[hook](model, seen)
    swapped_copy(model, x, inplace=True, validate="off")
    if later:
        HOOKS[hook](model, seen)
    assert modules.site_match(model) is not None and seen == []
    cotangent = cotangent_of(plain, x)
    expected.clear()
    assert_alike(plain, model, x, cotangent)
    plain.load_state_dict(plain.state_dict())
    model.load_state_dict(model.state_dict())
    assert seen == expected and (seen or hook in ("changes the input", "changes the output", "backward", "parameter"))


class Twice(nn.Module):
    """One norm under two names and in two parents, called in both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.again = self.norm
        self.block = nn.Sequential(nn.Linear(12, 12), self.norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.block(self.norm(x)))


@pytest.mark.case("shared-module")
def test_a_shared_norm_stays_shared() -> None:
    model, x = randomised(Twice()), drawn((5, 12))
    swapped = swapped_copy(model, x)
    assert swapped.norm is swapped.again is swapped.block[1] and type(swapped.norm) is modules.LayerNorm
    assert normswap.report(swapped).swapped == ("norm",)
    assert_alike(model, swapped, x, cotangent_of(model, x))


@pytest.mark.case("tied-parameters")
def test_tied_parameters_stay_tied() -> None:
    model = randomised(nn.Sequential(nn.LayerNorm(12), nn.RMSNorm(12, eps=1e-6), nn.LayerNorm(12)))
    model[1].weight = model[2].weight = model[0].weight
    x = drawn((5, 12))
    swapped = swapped_copy(model, x)
    assert swapped[0].weight is swapped[1].weight is swapped[2].weight
    assert_alike(model, swapped, x, cotangent_of(model, x))


class Containers(nn.Module):
    """Norms reached by index and by key, from outside the containers that hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ModuleList([nn.LayerNorm(12), nn.RMSNorm(12, eps=1e-6)])
        self.named = nn.ModuleDict({"norm": nn.LayerNorm(12), "l1": L1()})
        self.chained = nn.Sequential(nn.Linear(12, 12), nn.Sequential(nn.LayerNorm(12), nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.listed[1](self.chained[0](self.listed[0](x)))
        return self.named["l1"](self.named["norm"](self.chained[1][0](x)))


@pytest.mark.case("containers")
def test_norms_in_containers_indexed_from_outside() -> None:
    model, x = randomised(Containers()), drawn((5, 12))
    swapped = swapped_copy(model, x)
    norms = [row["name"] for row in normswap.report(swapped).rows if row["swapped"] and row["kind"] != "region"]
    assert norms == ["listed.0", "listed.1", "named.norm", "named.l1", "chained.1.0"]
    assert_alike(model, swapped, x, cotangent_of(model, x))


@by_kind
@pytest.mark.parametrize("inplace", (True, False))
@pytest.mark.case("root-is-norm")
def test_the_root_is_a_norm(kind: str, inplace: bool) -> None:
    model, x = made(kind)
    swapped = swapped_copy(model, x, inplace=inplace)
    assert (swapped is model) is inplace and modules.site_match(swapped) is not None
    assert (modules.site_match(model) is not None) is inplace


NO_AFFINE: tuple[tuple[Callable[[], nn.Module], tuple[int, ...]], ...] = (
    (lambda: nn.LayerNorm(12, elementwise_affine=False), (5, 12)),
    (lambda: nn.LayerNorm(12, bias=False), (5, 12)),
    (lambda: nn.RMSNorm(12, elementwise_affine=False), (5, 12)),
    (lambda: nn.GroupNorm(2, 6, affine=False), (4, 6, 5)),
)


@pytest.mark.parametrize(("make", "shape"), NO_AFFINE, ids=lambda v: repr(v()) if callable(v) else "")
@pytest.mark.case("no-affine")
def test_without_weight_or_bias(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    assert_swaps_alike(randomised(make()), drawn(shape))


@by_kind
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("frozen-parameters")
def test_frozen_parameters_stay_frozen(kind: str, training: bool) -> None:
    model, x = made(kind)
    model.train(training).requires_grad_(False)
    swapped = swapped_copy(model, x)
    assert not any(p.requires_grad for p in swapped.parameters())
    assert_alike(model, swapped, x, cotangent_of(model, x))
    with torch.no_grad():
        assert_alike(model, swapped, x)


@by_kind
@pytest.mark.case("optimizer-before-swap")
def test_an_optimizer_made_before_the_swap_trains_it(kind: str) -> None:
    model, x = made(kind)
    model = nn.Sequential(nn.Linear(x.shape[-1], x.shape[-1]), model).train()
    twin, _ = made(kind)
    twin = nn.Sequential(nn.Linear(x.shape[-1], x.shape[-1]), twin).train()
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (model, twin)]
    assert swapped_copy(model, x, inplace=True) is model
    cotangent = cotangent_of(twin, x)
    for _ in range(3):
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            (one(x) * cotangent).sum().backward()
            optimizer.step()
    for (name, ours), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    assert all(parameter in optimizers[0].state for parameter in model.parameters())


@pytest.mark.case("sync-batch-norm")
def test_a_sync_batch_norm_is_left_alone() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LayerNorm(7), randomised(Projection(7, 6))))
    assert type(model[1].bn) is nn.SyncBatchNorm
    swapped = swapped_copy(model.eval(), drawn((9, 7)))
    assert normswap.report(swapped).swapped == ("0",) and type(swapped[1]) is Projection
    assert type(swapped[1].bn) is nn.SyncBatchNorm
