"""Models with an expression in a forward - swapped, or a trap - and the check that each is equal to the original or
refused with a reason. Shared by the tests on a CPU and on a GPU."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from models import randomised
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import normswap
from normswap.plan import Plan

FEATURES, CHANNELS = 6, 5
EPS = 0.25
CALLS: list[int] = []

L1, LSB = "l1_norm", "linear_scale_batch_norm"


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
    swaps = {swap.site.name: swap.match.kind for swap in plan.swaps}
    return swaps | {one.site.name: f"{one.refusal.kind} {one.refusal.reason.name}" for one in plan.refused}


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
        for name, tensor in theirs.items():
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
    finite = theirs[theirs.isfinite()]
    atol = 1e-5 * (1 + float(finite.abs().max())) if finite.numel() else 0.0
    if name.endswith("scale"):  # before a BatchNorm its gradient is what is left of sums that nearly cancel
        atol *= 10
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=atol, equal_nan=True, msg=lambda told: f"{name}: {told}")


# --- how a model is put together ----------------------------------------------------------------------------------


class Written(nn.Module):
    """A module of one forward, given as a function; everything that some forward here reads."""

    dim = 1

    def __init__(self, scale: Any = (CHANNELS,), width: int = CHANNELS, **bn: Any) -> None:
        super().__init__()
        self.gemm = nn.Linear(FEATURES, width)
        self.bn = nn.BatchNorm1d(width, **bn)
        if isinstance(scale, tuple):
            self.scale = nn.Parameter(torch.empty(scale))
        elif isinstance(scale, Tensor):
            self.register_buffer("scale", scale)
        else:
            self.scale = scale
        self.eps, self.calls, self.config = 0.25, 0, {"eps": 0.25}


def written(forward: Callable[..., Any], *args: Any, bare: bool = False, **options: Any) -> Callable[[], nn.Module]:
    """Makes modules with that forward; ``bare`` ones have no children."""
    cls = type("Written", (Written,), {"forward": forward})

    def make() -> nn.Module:
        module = cls(*args, **options)
        if bare:
            del module.gemm, module.bn, module.scale
        return module

    return make


def l1(forward: Callable[..., Any], dim: int = 1) -> Callable[[], nn.Module]:
    make = written(forward, bare=True)

    def made() -> nn.Module:
        module = make()
        module.dim = dim
        return module

    return made


def block(self, x):
    return self.bn(self.gemm(x) * self.scale)


def plain_l1(self, x):
    return x / torch.mean(torch.abs(x), dim=1, keepdim=True)


def eps_l1(self, x):
    return x / (x.abs().mean(dim=self.dim, keepdim=True) + self.eps)


def changed(change: Callable[[Any], Any], **options: Any) -> Callable[[], nn.Module]:
    """The block after ``change``, before the swap."""

    def make() -> nn.Module:
        module = written(block, **options)()
        change(module)
        return module

    return make


class Scale(nn.Module):
    def __init__(self, scale: Any = None) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(CHANNELS)) if scale is None else scale

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


# --- look-alikes --------------------------------------------------------------------------------------------------


def linear_twice(self, x):
    return self.bn(self.gemm(x) * self.scale + self.gemm(x))


def linear_in_both(self, x):
    return self.bn(self.gemm(x) * self.gemm(x))


def output_elsewhere(self, x):
    y = self.gemm(x)
    return self.bn(y * self.scale) + y


def two_batch_norms(self, x):
    y = self.gemm(x)
    return self.bn(y * self.scale) + self.bn(y)


def in_place_l1(self, x):
    x /= x.abs().mean(1, keepdim=True)
    return x


def alias_l1(self, x):
    y = x.view_as(x)
    y.mul_(2)
    return x / x.abs().mean(1, keepdim=True)


def abs_in_place(self, x):
    return x / x.abs_().mean(1, keepdim=True)


def in_place_scale(self, x):
    y = self.gemm(x)
    y *= self.scale
    return self.bn(y)


def mul_in_place(self, x):
    return self.bn(self.gemm(x).mul_(self.scale))


def scale_first(self, x):
    return self.bn(self.scale * self.gemm(x))


def scale_behind(self, x):
    return self.bn(self.gemm(x)) * self.scale


def scale_twice(self, x):
    return self.scale * self.bn(self.gemm(x) * self.scale)


def literal(self, x):
    return self.bn(self.gemm(x) * -0.75)


def no_scale(self, x):
    return self.bn(self.gemm(x))


def no_abs(self, x):
    return x / x.mean(1, keepdim=True)


def two_dims(self, x):
    return x / x.abs().mean((0, 1), keepdim=True)


def no_keepdim(self, x):
    return x / x.abs().mean(1)


def another_tensor(self, x):
    return x / torch.tanh(x).abs().mean(1, keepdim=True)


def sum_not_mean(self, x):
    return x / x.abs().sum(1, keepdim=True)


def eps_everywhere(self, x):
    return x / (x.abs() + 0.5).mean(1, keepdim=True)


def eps_behind_bn(self, x):
    return self.bn(self.gemm(x) * self.scale + 0.5)


def on_data(self, x):
    return x / x.abs().mean(1, keepdim=True) if x.sum() > 0 else x


def while_loop(self, x):
    while x.abs().max() > 1:
        x = x / (x.abs().mean(1, keepdim=True) + 1)
    return x


def counting(self, x):
    self.calls += 1
    return self.bn(self.gemm(x) * self.scale)


def appending(self, x):
    CALLS.append(1)
    return x / x.abs().mean(1, keepdim=True)


def training_branch(self, x):
    return x / x.abs().mean(1, keepdim=True) if self.training else x


def training_flag(self, x):
    return self.bn(self.gemm(x) * (self.scale if self.training else 1.0))


def variadic(self, *args):
    return args[0] / args[0].abs().mean(1, keepdim=True)


def keyword_only(self, x, *, dim=1):
    return x / x.abs().mean(dim, keepdim=True)


def defaulted(self, x, mask=None):
    return self.bn(self.gemm(x) * self.scale)


# --- traps that trace cleanly ---------------------------------------------------------------------------------------


def no_grad_block(self, x):
    with torch.no_grad():
        size = x.abs().mean(1, keepdim=True)
    return x / size


def no_grad_linear(self, x):
    with torch.no_grad():
        y = self.gemm(x)
    return self.bn(y * self.scale)


@torch.no_grad()
def no_grad_decorator(self, x):
    return x / x.abs().mean(1, keepdim=True)


def detached(self, x):
    return x / x.detach().abs().mean(1, keepdim=True)


def autocast_block(self, x):
    with torch.autocast(x.device.type, enabled=False):
        return self.bn(self.gemm(x) * self.scale)


def grad_query(self, x):
    return x / (x.abs().mean(1, keepdim=True) + (0.5 if torch.is_grad_enabled() else 0.0))


def of_global(self, x):
    return x / (x.abs().mean(1, keepdim=True) + EPS)


def of_config(self, x):
    return x / (x.abs().mean(1, keepdim=True) + self.config["eps"])


def isinstance_query(self, x):
    if isinstance(x, Tensor):
        return x / x.abs().mean(1, keepdim=True)
    return x


def shape_after_in_place(self, x):
    y = x.clone()
    y.unsqueeze_(0)
    return x / x.abs().mean(y.dim() - 2, keepdim=True)


def only_the_size(self, x):
    return 1.0 / x.abs().mean(1, keepdim=True)


def gated(self, x):
    return F.silu(x) * (x / x.abs().mean(1, keepdim=True))


# --- changes after the swap -----------------------------------------------------------------------------------------


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features).to(base.weight.device))
        self.up = nn.Parameter(torch.randn(base.out_features, 2).to(base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def with_lora(model: Any) -> Any:
    model.gemm = LoRA(model.gemm)
    return model


def with_added_module(model: Any) -> Any:
    model.add_module("bn", nn.BatchNorm1d(CHANNELS, eps=0.5).to(model.gemm.weight.device).train(model.training))
    model.add_module("another", nn.LayerNorm(3).to(model.gemm.weight.device))
    return model


def with_hook(model: Any) -> Any:
    model.gemm.register_forward_hook(lambda module, args, output: output * 2)
    return model


def with_pre_hook(model: Any) -> Any:
    model.bn.register_forward_pre_hook(lambda module, args: (args[0] - 1,))
    return model


def with_backward_hook(model: Any) -> Any:
    model.bn.register_full_backward_hook(lambda module, given, taken: (given[0] * 3,))
    return model


def with_own_hook(model: Any) -> Any:
    model.register_forward_hook(lambda module, args, output: output + 1)
    return model


def with_weight_norm(model: Any) -> Any:
    parametrizations.weight_norm(model.gemm)
    return model


def with_parametrized_scale(model: Any) -> Any:
    parametrize.register_parametrization(model, "scale", nn.Tanh())
    return model


def with_sync_batch_norm(model: Any) -> Any:
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def with_instance_forward(model: Any) -> Any:
    model.gemm.forward = types.MethodType(lambda self, x: F.linear(x, self.weight) * 2, model.gemm)
    return model


def with_other_numbers(model: Any) -> Any:
    model.bn.momentum, model.bn.eps = None, 0.5
    model.scale = nn.Parameter(torch.full((1, CHANNELS), 0.5, device=model.gemm.weight.device))
    return model


def with_other_eps_and_dim(model: Any) -> Any:
    model.eps, model.dim = 1.5, 0
    return model


def with_tensor_eps(model: Any) -> Any:
    model.eps = torch.tensor(0.5)
    return model


def without_tracking(model: Any) -> Any:
    model.bn.track_running_stats = False
    return model


def with_bn_eval(model: Any) -> Any:
    model.bn.eval()
    return model


def frozen(model: Any) -> Any:
    return model.requires_grad_(False)


# --- the table ------------------------------------------------------------------------------------------------------

SWAPPED = {"": LSB}
CODE, PART, OTHER, CHILD = "NOT_STRAIGHT_LINE", "PART_OF_FORWARD", "UNSUPPORTED", "CHILD"


def l1_trap(forward: Callable[..., Any], plan: dict[str, str], *cases: str, **options: Any) -> Trap:
    return Trap(l1(forward), plan, cases, **options)


def refused(kind: str, reason: str) -> dict[str, str]:
    return {"": f"{kind} {reason}"}


def _nested(*children: nn.Module) -> nn.Module:
    return nn.Sequential(*children)


def _tied(module: Any) -> None:
    module.scale = module.bn.weight


def _shared() -> nn.Module:
    first = written(block, (), width=FEATURES)()
    model = nn.Sequential(first, nn.Tanh(), first)
    model.again = first
    del model.again
    return model


def _one_linear_in_two_blocks() -> nn.Module:
    first, second = written(block, width=FEATURES, scale=(1,))(), written(block, width=FEATURES, scale=())()
    second.gemm = first.gemm
    return nn.Sequential(first, second)


class InLists(nn.Module):
    """Blocks in a ModuleList and a ModuleDict, and an nn.Sequential whose children are called from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([written(block, width=FEATURES, scale=(FEATURES,))()])
        self.named = nn.ModuleDict({"norm": l1(plain_l1)()})
        self.run = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        for one in self.blocks:
            x = one(x)
        return self.named["norm"](self.run(x) + self.run[0](x))


class OwnForward(type(written(block)())):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Inherits(type(written(block)())):  # type: ignore[misc]
    """Says nothing of its own."""


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def _with_child(name: str, child: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return changed(lambda module: setattr(module, name, child()))


def _runs(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, CHANNELS), *middle, nn.BatchNorm1d(CHANNELS), nn.ReLU())


SCALES: dict[str, Any] = {
    "parameter_0d": (),
    "parameter_1": (1,),
    "parameter_c": (CHANNELS,),
    "parameter_1c": (1, CHANNELS),
    "buffer_0d": torch.tensor(0.5),
    "buffer_1": torch.ones(1),
    "buffer_c": torch.ones(CHANNELS),
    "buffer_1c": torch.ones(1, CHANNELS),
    "number": 0.75,
    "whole_number": -3,
}

FORMS = {"before": block, "first": scale_first, "behind": scale_behind, "twice": scale_twice}

BATCH_NORMS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "momentum_none": ({"momentum": None}, ("bn-momentum", "bn-batches-tracked", "bn-unbiased-variance")),
    "momentum_0": ({"momentum": 0.0}, ("bn-momentum", "bn-batches-tracked")),
    "momentum_03": ({"momentum": 0.3, "eps": 1e-2}, ("bn-momentum", "bn-batches-tracked", "bn-unbiased-variance")),
    "affine_false": ({"affine": False}, ("bn-affine-false",)),
    "untracked": ({"track_running_stats": False}, ("bn-no-running-stats",)),
}

TABLE: dict[str, Trap] = {
    **{
        f"scale_{form}_{name}": Trap(written(forward, scale), SWAPPED, ("scale-forms",))
        for form, forward in FORMS.items()
        for name, scale in SCALES.items()
    },
    "scale_absent": Trap(written(no_scale), SWAPPED, ("scale-forms",)),
    "scale_literal": Trap(written(literal), SWAPPED, ("scale-forms", "scale-values")),
    "scale_negative": Trap(written(block, -2.5), SWAPPED, ("scale-values",)),
    "scale_zero": Trap(written(block, 0.0), SWAPPED, ("scale-values",)),
    "scale_behind_zero": Trap(written(scale_behind, 0), SWAPPED, ("scale-values",)),
    **{f"bn_{name}": Trap(written(block, **options), SWAPPED, cases) for name, (options, cases) in BATCH_NORMS.items()},
    "bn_tracking_switched_off": Trap(
        changed(lambda m: setattr(m.bn, "track_running_stats", False)), SWAPPED, ("bn-no-running-stats",)
    ),
    "bn_tracking_switched_off_later": Trap(
        written(block), SWAPPED, ("bn-no-running-stats", "attributes-changed-later"), later=without_tracking
    ),
    "bn_frozen": Trap(written(block), SWAPPED, ("bn-frozen",), later=with_bn_eval),
    # sequential runs
    "sequential": Trap(lambda: _runs(), SWAPPED, ("scale-forms", "containers")),
    "sequential_scale": Trap(lambda: _runs(Scale()), SWAPPED, ("scale-forms", "containers")),
    "sequential_number": Trap(lambda: _runs(Scale(-0.5)), SWAPPED, ("scale-forms", "containers")),
    "sequential_dropout": Trap(lambda: _runs(nn.Dropout(0.0)), {}, ("containers",)),
    "in_lists_and_dicts": Trap(InLists, {"blocks.0": LSB, "named.norm": L1, "run": LSB}, ("containers",)),
    # Expressions
    "linear_twice": Trap(written(linear_twice), refused(LSB, PART), ("linear-called-twice",)),
    "linear_in_both": Trap(written(linear_in_both), refused(LSB, PART), ("linear-called-twice",)),
    "output_elsewhere": Trap(written(output_elsewhere), refused(LSB, PART), ("linear-output-used-elsewhere",)),
    "two_batch_norms": Trap(written(two_batch_norms), refused(LSB, PART), ("one-linear-two-batch-norms",)),
    "one_linear_in_two_blocks": Trap(
        _one_linear_in_two_blocks, {"0": LSB, "1": LSB}, ("one-linear-two-batch-norms", "shared-module")
    ),
    "in_place_l1": l1_trap(in_place_l1, refused(L1, CODE), "in-place-and-aliases", backward_raises=True),
    "alias_l1": l1_trap(alias_l1, refused(L1, CODE), "in-place-and-aliases"),
    "abs_in_place": l1_trap(abs_in_place, {}, "in-place-and-aliases"),
    "in_place_scale": Trap(written(in_place_scale), refused(LSB, CODE), ("in-place-and-aliases",)),
    "mul_in_place": Trap(written(mul_in_place), refused(LSB, PART), ("in-place-and-aliases",)),
    "no_abs": l1_trap(no_abs, {}, "l1-without-abs"),
    "two_dims": l1_trap(two_dims, refused(L1, OTHER), "other-dim"),
    "no_keepdim": l1_trap(no_keepdim, refused(L1, OTHER), "other-dim", shape=(6, 6)),
    **{f"l1_dim_{dim}": Trap(l1(eps_l1, dim), {"": L1}, ("other-dim",), shape=(3, 4, 5)) for dim in (0, 1, 2, -1, -3)},
    "another_tensor": l1_trap(another_tensor, refused(L1, PART), "other-tensor"),
    "sum_not_mean": l1_trap(sum_not_mean, {}, "sum-not-mean"),
    "l1_with_eps": l1_trap(eps_l1, {"": L1}, "added-eps"),
    "eps_everywhere": l1_trap(eps_everywhere, refused(L1, OTHER), "added-eps"),
    "eps_behind_linear": Trap(written(eps_behind_bn), refused(LSB, PART), ("added-eps",)),
    "linear_3d": Trap(
        written(block, (), width=4), SWAPPED, ("linear-3d-input",), shape=(3, 4, FEATURES), modes=("eval",)
    ),
    "on_data": l1_trap(on_data, refused(L1, "NOT_STRAIGHT_LINE"), "data-dependent-control-flow"),
    "while_loop": l1_trap(while_loop, refused(L1, CODE), "data-dependent-control-flow"),
    "counting": Trap(written(counting), refused(LSB, CODE), ("side-effects",), attributes=("calls",)),
    "appending": l1_trap(appending, refused(L1, CODE), "side-effects"),
    "training_branch": l1_trap(training_branch, refused(L1, CODE), "training-branches"),
    "training_flag": Trap(written(training_flag), refused(LSB, CODE), ("training-branches",)),
    "variadic": l1_trap(variadic, refused(L1, OTHER), "signatures"),
    "keyword_only": l1_trap(keyword_only, refused(L1, OTHER), "signatures"),
    "defaulted": Trap(written(defaulted), refused(LSB, OTHER), ("signatures",)),
    # Module tree
    "own_forward": Trap(OwnForward, {}, ("subclass-own-forward",)),
    "inherited_forward": Trap(Inherits, SWAPPED, ("subclass-own-forward",)),
    "own_linear": Trap(
        _with_child("gemm", lambda: OwnLinear(FEATURES, CHANNELS)), refused(LSB, CHILD), ("subclass-own-forward",)
    ),
    "instance_forward": Trap(changed(with_instance_forward), refused(LSB, CHILD), ("instance-forward",)),
    "parametrized_linear": Trap(changed(with_weight_norm), refused(LSB, CHILD), ("parametrized",)),
    "parametrized_scale": Trap(changed(with_parametrized_scale), refused(LSB, "PARAMETRIZED"), ("parametrized",)),
    "hooked_child": Trap(changed(with_hook), refused(LSB, CHILD), ("hooks",)),
    "hooked": Trap(changed(with_own_hook), SWAPPED, ("hooks",)),
    "shared": Trap(_shared, {"0": LSB}, ("shared-module",)),
    "tied": Trap(changed(_tied), SWAPPED, ("tied-parameters",)),
    "root": Trap(l1(plain_l1), {"": L1}, ("root-is-norm",)),
    "no_bias_no_affine": Trap(
        changed(lambda m: setattr(m, "gemm", nn.Linear(FEATURES, CHANNELS, bias=False)), affine=False),
        SWAPPED,
        ("no-affine",),
    ),
    "frozen_scale": Trap(changed(lambda m: m.scale.requires_grad_(False)), SWAPPED, ("frozen-parameters",)),
    "frozen_linear": Trap(changed(lambda m: m.gemm.requires_grad_(False)), SWAPPED, ("frozen-parameters",)),
    "frozen_all": Trap(changed(frozen), SWAPPED, ("frozen-parameters",)),
    "sync_batch_norm": Trap(
        _with_child("bn", lambda: nn.SyncBatchNorm(CHANNELS)), {}, ("sync-batch-norm",), modes=("eval",)
    ),
    # Traps that trace cleanly
    "no_grad_block": l1_trap(no_grad_block, refused(L1, CODE), "trap-no-grad-block"),
    "no_grad_linear": Trap(written(no_grad_linear), refused(LSB, CODE), ("trap-no-grad-block",)),
    "detached": l1_trap(detached, refused(L1, PART), "trap-no-grad-block"),
    "autocast_block": Trap(written(autocast_block), refused(LSB, CODE), ("trap-autocast-block",)),
    "grad_query": l1_trap(grad_query, refused(L1, CODE), "trap-grad-query"),
    "of_global": l1_trap(of_global, refused(L1, CODE), "trap-config-and-globals"),
    "of_config": l1_trap(of_config, refused(L1, PART), "trap-config-and-globals"),
    "isinstance": l1_trap(isinstance_query, refused(L1, CODE), "trap-isinstance"),
    "shape_after_in_place": l1_trap(shape_after_in_place, refused(L1, CODE), "trap-shape-after-in-place"),
    "only_the_size": l1_trap(only_the_size, refused(L1, OTHER), "trap-returns-rstd"),
    "gated": l1_trap(gated, refused(L1, PART), "trap-returns-rstd"),
    # Changes after the swap
    "later_number": l1_trap(eps_l1, {"": L1}, "attributes-changed-later", later=with_other_eps_and_dim),
    "later_tensor_eps": l1_trap(eps_l1, {"": L1}, "attributes-changed-later", later=with_tensor_eps),
    "later_settings": Trap(written(block), SWAPPED, ("attributes-changed-later",), later=with_other_numbers),
    "later_forward": Trap(written(block), SWAPPED, ("attributes-changed-later",), later=with_instance_forward),
    "later_add_module": Trap(written(block), SWAPPED, ("later-add-module",), later=with_added_module),
    "later_hook": Trap(written(block), SWAPPED, ("later-hooks",), later=with_hook),
    "later_pre_hook": Trap(written(block), SWAPPED, ("later-hooks",), later=with_pre_hook),
    "later_backward_hook": Trap(written(block), SWAPPED, ("later-hooks",), later=with_backward_hook),
    "later_own_hook": Trap(written(block), SWAPPED, ("later-hooks",), later=with_own_hook),
    "later_lora": Trap(written(block), SWAPPED, ("later-lora",), later=with_lora),
    "later_weight_norm": Trap(written(block), SWAPPED, ("later-weight-norm",), later=with_weight_norm),
    "later_parametrized_scale": Trap(written(block), SWAPPED, ("later-weight-norm",), later=with_parametrized_scale),
    "later_sync_batch_norm": Trap(
        written(block), SWAPPED, ("later-sync-batch-norm",), later=with_sync_batch_norm, modes=("eval",)
    ),
}


# --- staleness: what changes the weights between two calls -----------------------------------------------------------


def write_in_place(model: Any) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(1.5)


def write_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.add_(0.25)


def assign_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, 0.75)


def assign_parameter(model: Any) -> None:
    model.scale = nn.Parameter(model.scale.detach() * 2)
    model.gemm.weight = nn.Parameter(model.gemm.weight.detach() - 1)


def load_other(model: Any) -> None:
    model.load_state_dict(_other_state(model))


def load_by_assigning(model: Any) -> None:
    model.load_state_dict(_other_state(model), assign=True)


def _other_state(model: nn.Module) -> dict[str, Tensor]:
    return {k: t + 1 if t.is_floating_point() else t + 3 for k, t in model.state_dict().items()}


def to_float64(model: Any) -> None:
    model.double()


def swap_tensors(model: Any) -> None:
    torch.utils.swap_tensors(model.scale, nn.Parameter(torch.full_like(model.scale, 3.0)))


def _waves(device: torch.device) -> Tensor:
    return torch.arange(8.0 * FEATURES, device=device).view(8, FEATURES).sin()


def step(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Any], None]:
    def stepped(model: Any) -> None:
        optimizer = make(model.parameters())
        parameter = next(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(_waves(parameter.device)).sin().sum().backward()
            optimizer.step()

    return stepped


def average_in(model: Any) -> None:
    """Exponential moving averages swapped in, as for an evaluation."""
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(model)
    write_in_place(model)
    averaged.update_parameters(model)
    with torch.no_grad():
        for parameter, mean in zip(model.parameters(), averaged.module.parameters(), strict=True):
            parameter.copy_(mean)


def train_a_batch(model: Any) -> None:
    """Moves the running statistics."""
    model.train()(_waves(next(model.parameters()).device))
    model.eval()


CHANGES: dict[str, Callable[[Any], None]] = {
    "in_place": write_in_place,
    "data_in_place": write_data,
    "data_assigned": assign_data,
    "parameter_assigned": assign_parameter,
    "load_state_dict": load_other,
    "load_state_dict_assign": load_by_assigning,
    "to_float64": to_float64,
    "swap_tensors": swap_tensors,
    "sgd": step(lambda parameters: torch.optim.SGD(parameters, lr=0.01)),
    "adamw_foreach": step(lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True)),
    "adam_fused": step(lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True)),
    "ema": average_in,
    "running_statistics": train_a_batch,
}


def check_no_staleness(change: Callable[[Any], None], rows: int, device: str) -> None:
    """What a change of the weights between two calls does to the output, it does to the swapped model's."""
    original = randomised(written(block)()).to(device).eval()
    swapped = normswap.optimize(
        original, torch.randn(rows, FEATURES, device=device), on_mismatch="raise", min_speedup=None
    )
    x = torch.randn(rows, FEATURES, device=device)
    with torch.no_grad():
        before = swapped(x)
    assert_equal(swapped, original, x)
    change(original)
    change(swapped)
    x = x.to(next(original.parameters()).dtype)
    with torch.no_grad():
        assert not torch.equal(swapped(x), before.to(x.dtype))
    assert_equal(swapped, original, x)
