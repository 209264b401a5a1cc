"""Models with an activation behind a GroupNorm - a region, or a trap - for ``expression_models.check``, on a CPU and on
a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from expression_checks import Trap
from torch import Tensor, nn
from torch.nn.utils import parametrize

GROUPS, CHANNELS = 2, 6
FUSED, ALONE = "region", "group_norm"


class Written(nn.Module):
    """A module of one forward, given as a function, with all that some forward here calls."""

    def __init__(self, act: Callable[[], nn.Module] | None = None, affine: bool = True) -> None:
        super().__init__()
        self.gn = nn.GroupNorm(GROUPS, CHANNELS, affine=affine)
        if act is not None:
            self.act = act()


class NormAct(nn.GroupNorm):
    """timm's way."""

    def __init__(self, act: nn.Module | None = None, drop: nn.Module | None = None) -> None:
        super().__init__(GROUPS, CHANNELS)
        self.drop = drop or nn.Identity()
        self.act = act or nn.ReLU(inplace=True)
        self._fast_norm = False

    def forward(self, x):
        if self._fast_norm:
            x = -x
        else:
            x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        x = self.drop(x)
        x = self.act(x)
        return x


class Nested(nn.GroupNorm):
    def __init__(self) -> None:
        super().__init__(GROUPS, CHANNELS)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


class DoubledNormAct(NormAct):
    def forward(self, x):
        x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        x = self.act(x)
        x = self.act(x * 2)
        return x


class Backwards(nn.Sequential):
    def __iter__(self) -> Iterator[nn.Module]:
        return iter([*self._modules.values()][::-1])


class Named(nn.Sequential):
    """Adds nothing."""


def written(forward: Callable[..., Any], *args: Any, **options: Any) -> Callable[[], nn.Module]:
    """Makes modules with that forward."""
    cls = type("WrittenActivation", (Written,), {"forward": forward})
    return lambda: cls(*args, **options)


# --- what is fused ------------------------------------------------------------------------------------------------


def f_silu(self, x):
    return F.silu(self.gn(x))


def f_silu_in_place(self, x):
    return F.silu(self.gn(x), inplace=True)


def torch_relu(self, x):
    y = self.gn(x)
    return torch.relu(y)


def method_relu(self, x):
    return self.gn(x).relu()


def in_place_relu(self, x):
    return torch.relu_(self.gn(x))


def f_gelu(self, x):
    return nn.functional.gelu(self.gn(input=x))


def f_gelu_tanh(self, x):
    return F.gelu(self.gn(x), approximate="tanh")


def swish(self, x):
    y = self.gn(x)
    return y * torch.sigmoid(y)


def swish_reversed(self, x):
    x = self.gn(x)
    return torch.mul(x.sigmoid(), x)


def child(self, x):
    return self.act(self.gn(x))


# --- look-alikes: what they compute is another function -------------------------------------------------------------


def leaky(self, x):
    return F.leaky_relu(self.gn(x))


def gated_by_input(self, x):
    return self.gn(x) * torch.sigmoid(x)


def sigmoid_alone(self, x):
    return torch.sigmoid(self.gn(x))


def larger(self, x):
    return F.silu(self.gn(x)) + x


def norm_twice(self, x):
    return F.silu(self.gn(self.gn(x)))


def activation_first(self, x):
    return self.gn(F.silu(x))


def activation_of_input(self, x):
    _ = self.gn(x)
    return F.silu(x)


def squared(self, x):
    y = self.gn(x)
    return y * y


def in_training_only(self, x):
    return F.silu(self.gn(x)) if self.training else self.gn(x)


def no_grad_block(self, x):
    with torch.no_grad():
        y = self.gn(x)
    return F.silu(y)


# --- changes ------------------------------------------------------------------------------------------------------


def times_three(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 3 * output


class Times(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * x


def changed(make: Callable[[], nn.Module], change: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    """``make``'s module after ``change``."""

    def made() -> nn.Module:
        module = make()
        change(module)
        return module

    return made


def after(change: Callable[[Any], Any]) -> Callable[[Any], nn.Module]:
    """``change`` as what happens to a model later."""

    def later(model: Any) -> nn.Module:
        change(model)
        return model

    return later


def hook_norm(model: Any) -> None:
    model.gn.register_forward_hook(times_three)


def hook_act(model: Any) -> None:
    model.act.register_forward_hook(times_three)


def parametrize_norm(model: Any) -> None:
    parametrize.register_parametrization(model.gn, "weight", Times())


def replace_forward(name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.get_submodule(name).forward = torch.neg

    return change


def replace_child(name: str, make: Callable[[], nn.Module]) -> Callable[[Any], None]:
    return lambda model: setattr(model, name, make().to(next(model.parameters()).device))


def set_attribute(path: str, value: Any) -> Callable[[Any], None]:
    *parents, name = path.split(".")
    return lambda model: setattr(model.get_submodule(".".join(parents)), name, value)


def insert_convolution(model: Any) -> None:
    model.insert(2, nn.Conv1d(CHANNELS, CHANNELS, 1).to(next(model.parameters()).device))


def sequential(*act: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A convolution, a GroupNorm, what ``act`` makes and another convolution."""
    return lambda: nn.Sequential(
        nn.Conv1d(CHANNELS, CHANNELS, 1),
        nn.GroupNorm(GROUPS, CHANNELS),
        *(make() for make in act),
        nn.Conv1d(CHANNELS, 4, 1),
    )


def relu_in_place() -> nn.Module:
    return nn.ReLU(inplace=True)


def silu_in_place() -> nn.Module:
    return nn.SiLU(inplace=True)


def gelu_tanh() -> nn.Module:
    return nn.GELU("tanh")


def two_runs() -> nn.Module:
    return Named(
        nn.GroupNorm(GROUPS, CHANNELS),
        nn.SiLU(inplace=True),
        nn.Conv1d(CHANNELS, CHANNELS, 1),
        nn.GroupNorm(CHANNELS, CHANNELS, affine=False),
        nn.GELU("tanh"),
    )


def norm_in_two_places() -> nn.Module:
    norm = nn.GroupNorm(GROUPS, CHANNELS)
    return nn.Sequential(nn.Sequential(norm, nn.ReLU()), norm, nn.Conv1d(CHANNELS, 4, 1))


SHAPE = (3, CHANNELS, 5)
_RELU = written(child, nn.ReLU)
_SILU = written(child, silu_in_place)


def _fused(
    make: Callable[[], nn.Module], *cases: str, later: Callable[[Any], nn.Module] | None = None, norms: str = "gn"
) -> Trap:
    """A region of the root, with its ``norms`` as sites beside it."""
    plan = {"": FUSED} | dict.fromkeys(norms.split(), ALONE)
    return Trap(make, plan, cases or ("fused-activation",), SHAPE, later, ("train",))


def _alone(make: Callable[[], nn.Module], *cases: str, norm: str = "gn", alone: str = ALONE) -> Trap:
    """The norm is swapped by itself (``alone``)."""
    return Trap(make, {norm: alone}, cases or ("activation-look-alikes",), SHAPE, None, ("train", "eval"))


def _found(make: Callable[[], nn.Module], *cases: str, norms: str = "gn", modes: str = "train eval") -> Trap:
    """A region that runs its own statements, or is part of more."""
    return replace(_fused(make, *(cases or ("activation-look-alikes",)), norms=norms), modes=(*modes.split(),))


TABLE: dict[str, Trap] = {
    **{
        forward.__name__: _fused(written(forward))
        for forward in (f_silu, torch_relu, method_relu, f_gelu, f_gelu_tanh, swish)
    },
    "f_silu_in_place": _fused(written(f_silu_in_place), "in-place-activation"),
    "in_place_relu": _fused(written(in_place_relu), "in-place-activation"),
    "child_relu": _fused(_RELU),
    "child_relu_in_place": _fused(written(child, relu_in_place), "in-place-activation"),
    "child_silu_in_place": _fused(_SILU, "in-place-activation"),
    "child_gelu": _fused(written(child, nn.GELU)),
    "child_gelu_tanh": _fused(written(child, gelu_tanh)),
    "no_affine": _fused(written(f_silu, affine=False), "no-affine"),
    "frozen": _fused(changed(written(f_silu), lambda m: m.requires_grad_(False)), "frozen-parameters"),
    "norm_act": _fused(NormAct, norms=""),
    "norm_act_silu": _fused(lambda: NormAct(nn.SiLU(inplace=True)), norms=""),
    "norm_act_without_act": _fused(lambda: NormAct(nn.Identity()), norms=""),
    "nested_norm_act": _fused(Nested, norms=""),
    "sequential_silu": _fused(sequential(nn.SiLU), norms="1"),
    "sequential_relu_in_place": _fused(sequential(relu_in_place), "in-place-activation", norms="1"),
    "sequential_gelu": _fused(sequential(nn.GELU), norms="1"),
    "sequential_two_runs": _fused(two_runs, "containers", norms="0 3"),
    "sequential_inside": Trap(
        lambda: nn.ModuleDict({"a": nn.Sequential(two_runs(), nn.Conv1d(CHANNELS, 2, 1))})["a"],
        {"0": FUSED, "0.0": ALONE, "0.3": ALONE},
        ("containers",),
        SHAPE,
        None,
        ("train",),
    ),
    # looks like one
    **{
        forward.__name__: _alone(written(forward))
        for forward in (activation_first, in_training_only, gated_by_input, activation_of_input, squared)
    },
    "no_grad_block": replace(_alone(written(no_grad_block)), backward_raises=True),
    "swish_reversed": _alone(written(swish_reversed)),
    # part of more
    **{forward.__name__: _found(written(forward)) for forward in (leaky, sigmoid_alone, larger, norm_twice)},
    "child_leaky": _found(written(child, nn.LeakyReLU)),
    "sequential_leaky": _found(sequential(nn.LeakyReLU), norms="1"),
    "sequential_alone": _alone(sequential(), norm="1"),
    "sequential_backwards": _alone(lambda: Backwards(nn.GroupNorm(GROUPS, CHANNELS), nn.SiLU()), norm="0"),
    "norm_act_twice": _found(DoubledNormAct, "subclass-own-forward", norms=""),
    "norm_act_with_dropout": _found(
        lambda: NormAct(drop=nn.Dropout(0.5)), "subclass-own-forward", norms="", modes="eval"
    ),
    # what it calls is no plain module
    "hook_on_norm": _found(changed(_RELU, hook_norm), "hooks"),
    "hook_on_act": _found(changed(_RELU, hook_act), "hooks"),
    "hook_in_norm_act": _found(changed(NormAct, hook_act), "hooks", norms=""),
    "hook_in_sequential": _found(
        changed(sequential(nn.ReLU), lambda m: m[2].register_forward_hook(times_three)), "hooks", norms="1"
    ),
    "parametrized_norm": _alone(changed(_RELU, parametrize_norm), "parametrized", alone=f"{ALONE} PARAMETRIZED"),
    "forward_of_act": _found(changed(_RELU, replace_forward("act")), "instance-forward"),
    "forward_of_norm": _alone(
        changed(_RELU, replace_forward("gn")), "instance-forward", alone=f"{ALONE} INSTANCE_FORWARD"
    ),
    "forward_of_all": Trap(
        changed(_RELU, replace_forward("")),
        {"": f"{FUSED} INSTANCE_FORWARD", "gn": ALONE},
        ("instance-forward",),
        SHAPE,
    ),
    "norm_in_two_places": Trap(
        norm_in_two_places, {"0": FUSED, "0.0": ALONE}, ("shared-module",), SHAPE, None, ("train",)
    ),
    # changed after the swap
    "later_hook_on_norm": _fused(_RELU, "later-hooks", later=after(hook_norm)),
    "later_hook_on_act": _fused(_RELU, "later-hooks", later=after(hook_act)),
    "later_hook_in_norm_act": _fused(NormAct, "later-hooks", later=after(hook_act), norms=""),
    "later_hook_in_sequential": _fused(
        sequential(nn.ReLU),
        "later-hooks",
        later=after(lambda m: m[1].register_forward_pre_hook(lambda _, x: None)),
        norms="1",
    ),
    "later_parametrized": _fused(_RELU, "later-weight-norm", later=after(parametrize_norm)),
    "later_forward": _fused(_RELU, "attributes-changed-later", later=after(replace_forward("gn"))),
    "later_other_act": _fused(_SILU, "attributes-changed-later", later=after(replace_child("act", nn.GELU))),
    "later_foreign_act": _fused(_SILU, "attributes-changed-later", later=after(replace_child("act", nn.Tanh))),
    "later_other_norm": _fused(
        _SILU, "attributes-changed-later", later=after(replace_child("gn", lambda: nn.LayerNorm(SHAPE[-1])))
    ),
    "later_eps": _fused(_SILU, "attributes-changed-later", later=after(set_attribute("gn.eps", 0.5))),
    "later_groups": _fused(_SILU, "attributes-changed-later", later=after(set_attribute("gn.num_groups", 3))),
    "later_approximate": _fused(
        written(child, nn.GELU), "attributes-changed-later", later=after(set_attribute("act.approximate", "tanh"))
    ),
    "later_flag": _fused(NormAct, "attributes-changed-later", later=after(set_attribute("_fast_norm", True)), norms=""),
    "later_inserted": _fused(sequential(nn.ReLU), "later-add-module", later=after(insert_convolution), norms="1"),
    "later_appended": _fused(
        sequential(nn.ReLU), "later-add-module", later=after(lambda m: m.append(nn.Tanh())), norms="1"
    ),
}
"""Every form that is fused, and traps; the cases that each stands for."""
