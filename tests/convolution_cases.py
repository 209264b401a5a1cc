"""Where a BatchNorm stands behind a convolution, or nearly so, and what is to become of it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from convolution_models import (
    IMAGE,
    Block,
    DeepStem,
    Stem,
    bn,
    broadcast,
    called_with_more,
    conv,
    convolved_twice,
    drawn,
    effect_between,
    in_a_branch,
    input_written_between,
    number_added,
    of_two,
    residual,
    residual_alone,
    residual_alone_of_two,
    residual_downsampled,
    scaled_between,
    through_dropout,
    to_a_size,
    two_norms,
    used_twice,
    without_activation,
    written,
)
from norm_act_models import LOOK_ALIKES, Alone, NormAct, Short
from torch import Tensor, nn
from torch.ao.nn import qat
from torch.ao.quantization import default_qat_qconfig, disable_observer

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Case:
    """``found``: the names of the regions with all convolutions that can be taken in; ``folds``: how many are folded in
    one call; ``apart``: the reason told of the one that is not; ``later`` comes after the swap; ``exact``: bit for bit
    what the original gives."""

    make: Callable[[], nn.Module]
    found: tuple[str, ...] = ("conv + bn + act",)
    folds: int = 1
    apart: str = ""
    shape: tuple[int, ...] = IMAGE
    later: Change | None = None
    dtype: torch.dtype = torch.float32
    exact: bool = False
    layout: torch.memory_format = torch.contiguous_format


def block(
    forward: Callable[..., Any] | None = None, out: int = 6, act: nn.Module | None = None, **settings: Any
) -> Any:
    """What makes a block of a Conv2d and a BatchNorm2d."""
    cls = Block if forward is None else written(forward)
    return lambda: cls(conv(out, **settings), nn.BatchNorm2d(out), act)


def changed(change: Change, make: Callable[[], Any] | None = None) -> Callable[[], Any]:
    def made() -> Any:
        model = (make or block())()
        change(model)
        return model

    return made


def of_norm(norm: Callable[[], nn.Module]) -> Callable[[], Any]:
    return lambda: Block(conv(), norm())


def transposed(out: int, kernel: Any, **settings: Any) -> Callable[[], Any]:
    """What makes a block of a ConvTranspose2d and a BatchNorm2d."""
    return lambda: Block(nn.ConvTranspose2d(6, out, kernel, **settings), nn.BatchNorm2d(out))


def of(convolution: Callable[[], nn.Module], norm: nn.Module | None = None) -> Callable[[], Any]:
    return lambda: Block(convolution(), copy.deepcopy(norm) if norm is not None else nn.BatchNorm2d(6))


def ending(
    norm: Callable[..., nn.Module],
    act: nn.Module | None = None,
    forward: Callable[..., Any] = of_two,
    drop: nn.Module | None = None,
    **settings: Any,
) -> Callable[[], Any]:
    """What makes a block of a Conv2d and a norm that ends in an activation."""
    return lambda: written(forward)(conv(**settings), norm(copy.deepcopy(act), copy.deepcopy(drop)))


def sequence(*children: Callable[[], nn.Module]) -> Callable[[], Any]:
    return lambda: nn.Sequential(*(child() for child in children))


class Adapted(nn.Module):
    """As LoRA wraps a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.extra = base, nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.extra(x)


class AdaptedConv2d(Adapted):
    pass


class Doubled(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Padded(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(F.pad(input, (0, 1, 1, 2)), self.weight, self.bias, self.stride)


def in_a_row(*more: Callable[[], nn.Module]) -> Callable[[], Any]:
    """What makes a block whose convolution is the last of an nn.Sequential, as in the stem of a ResNet-D."""
    return of(sequence(conv, bn, nn.ReLU, *more))


def shared_modules() -> nn.Module:
    one = Block(conv(), bn())
    return nn.Sequential(one, one)


def shared_convolution() -> nn.Module:
    first, second = Block(conv(), bn()), Block(conv(), bn())
    second.conv = first.conv
    return nn.Sequential(first, second)


def hook(name: str, how: str = "register_forward_hook") -> Change:
    return lambda model: getattr(getattr(model, name), how)(lambda *_: None)


def put(name: str, make: Callable[[Any], Any]) -> Change:
    return lambda model: setattr(model, name, make(getattr(model, name)))


def filled(child: str, name: str, value: float) -> Change:
    return lambda model: getattr(getattr(model, child), name).data.fill_(value)


def loaded(model: Any) -> None:
    torch.manual_seed(3)
    state = model.state_dict()
    model.load_state_dict({k: torch.rand_like(v) + 0.5 if v.is_floating_point() else v for k, v in state.items()})


def weight_normed(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.conv)


def weight_normed_by_hook(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and in use
        torch.nn.utils.weight_norm(model.conv)


def spectral(model: Any) -> None:
    torch.nn.utils.parametrizations.spectral_norm(model.conv)


def own_forward(model: Any) -> None:
    model.conv.forward = partial(nn.Conv2d.forward, model.conv)


def own_inner(model: Any) -> None:
    model.conv._conv_forward = lambda x, w, b: 2 * F.conv2d(x, w, b, padding=1)


def shortcut(model: Any) -> None:
    model.shortcut = nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6))


def statistics_gone(model: Any) -> None:
    model.bn.running_mean = model.bn.running_var = None


def norm_of_another_dtype(model: Any) -> None:
    model.bn.to(torch.float64)


NONE: tuple[str, ...] = ()
REST = ("bn + act",)
_1D, _3D = nn.BatchNorm1d(6), nn.BatchNorm3d(6)

CASES: dict[str, Case] = {
    "plain": Case(block()),
    "no_bias": Case(block(bias=False)),
    "strided": Case(block(stride=2)),
    "wider": Case(block(out=10)),
    "one_channel": Case(block(out=1)),
    "pointwise": Case(block(kernel=1, padding=0)),
    "uneven_kernel": Case(block(kernel=(1, 3), padding=(0, 1), stride=(2, 1))),
    "dilated": Case(block(dilation=2, padding=2)),
    "groups": Case(block(groups=3)),
    "depthwise": Case(block(groups=6)),
    "channels_last": Case(block(), layout=torch.channels_last),
    "bfloat16": Case(block(), dtype=torch.bfloat16),
    "float16": Case(block(), dtype=torch.float16),
    "float64": Case(block(), dtype=torch.float64),
    "conv1d": Case(of(lambda: nn.Conv1d(6, 6, 3), _1D), shape=(3, 6, 11)),
    "conv3d": Case(of(lambda: nn.Conv3d(6, 6, 2), _3D), shape=(2, 6, 4, 5, 3)),
    "batch_of_none": Case(block(), shape=(0, 6, 9, 8)),
    "silu": Case(block(act=nn.SiLU())),
    "relu6": Case(block(act=nn.ReLU6(inplace=True))),
    "in_place": Case(block(act=nn.ReLU(inplace=True))),
    "residual": Case(block(residual), ("conv + bn + residual + act",)),
    "residual_of_a_convolution": Case(
        changed(shortcut, block(residual_downsampled)), ("conv + bn + residual + relu",), 2
    ),
    "residual_alone": Case(block(residual_alone), ("conv + bn + residual",)),
    "residual_that_broadcasts": Case(
        block(broadcast, kernel=1, padding=0), ("conv + bn + residual + act",), 0, exact=True
    ),
    "number_added": Case(block(number_added), ("conv + bn",)),
    "no_activation": Case(block(without_activation), ("conv + bn",)),
    "dropout_that_is_off": Case(block(through_dropout), ("conv + bn + silu",)),
    "used_twice": Case(block(used_twice), ("bn + relu",), 0, "conv has an output that is used elsewhere too"),
    "two_norms": Case(
        block(two_norms), ("bn + relu", "bn2 + relu"), 0, "conv has an output that is used elsewhere too"
    ),
    "convolved_twice": Case(block(convolved_twice), ("conv + bn + relu", "conv + bn2 + relu"), 2),
    "effect_between": Case(block(effect_between), ("bn + relu",), 0),
    "input_written_between": Case(block(input_written_between), ("bn + relu",), 0),
    "scaled_between": Case(block(scaled_between), ("bn + relu",), 0),
    "by_keyword": Case(block(called_with_more), ("bn + relu",), 0),
    "in_a_method": Case(lambda: Stem(conv(), bn())),
    "in_a_method_of_a_method": Case(lambda: DeepStem(conv(), bn())),
    "in_a_branch": Case(block(in_a_branch), ("conv + bn + relu",)),
    "not_affine": Case(of_norm(lambda: nn.BatchNorm2d(6, affine=False))),
    "momentum_none": Case(of_norm(lambda: nn.BatchNorm2d(6, momentum=None))),
    "momentum_0": Case(of_norm(lambda: nn.BatchNorm2d(6, momentum=0.0))),
    "large_eps": Case(of_norm(lambda: nn.BatchNorm2d(6, eps=0.3))),
    "no_statistics": Case(of_norm(lambda: nn.BatchNorm2d(6, track_running_stats=False)), REST, 0, exact=True),
    "padding_reflect": Case(block(padding_mode="reflect"), REST, 0, "conv pads by its mode 'reflect'"),
    "padding_circular": Case(block(padding_mode="circular"), REST, 0, "conv pads by its mode 'circular'"),
    "padding_same": Case(block(padding="same"), REST, 0, "conv pads by 'same'"),
    "transposed": Case(of(lambda: nn.ConvTranspose2d(6, 6, 3))),
    "transposed_no_bias": Case(of(lambda: nn.ConvTranspose2d(6, 6, (3, 2), bias=False))),
    "transposed_groups": Case(transposed(12, 3, stride=2, padding=1, output_padding=(1, 0), groups=3)),
    "transposed_depthwise": Case(transposed(6, 4, stride=2, padding=1, groups=6)),
    "transposed_dilated": Case(transposed(4, 3, stride=(1, 3), padding=(0, 2), output_padding=(0, 2), dilation=(2, 1))),
    "transposed_pointwise": Case(transposed(10, 1)),
    "transposed_channels_last": Case(transposed(8, 2, stride=2), layout=torch.channels_last),
    "transposed_bfloat16": Case(transposed(6, 2, stride=2), dtype=torch.bfloat16),
    "transposed_float64": Case(transposed(6, 2, stride=2), dtype=torch.float64),
    "transposed_1d": Case(of(lambda: nn.ConvTranspose1d(6, 6, 4, stride=2, groups=2), _1D), shape=(3, 6, 11)),
    "transposed_3d": Case(of(lambda: nn.ConvTranspose3d(6, 6, 2, stride=2), _3D), shape=(2, 6, 4, 5, 3)),
    "transposed_residual": Case(
        lambda: written(residual)(nn.ConvTranspose2d(6, 6, 3, padding=1), bn()), ("conv + bn + residual + act",)
    ),
    "transposed_to_a_size": Case(
        lambda: written(to_a_size)(nn.ConvTranspose2d(6, 6, 3, stride=2), bn()), REST, 0, exact=True
    ),
    "transposed_sequential": Case(sequence(partial(nn.ConvTranspose2d, 6, 6, 2), bn, nn.ReLU), ("0 + 1 + 2",)),
    "transposed_hooked": Case(
        changed(hook("conv"), of(lambda: nn.ConvTranspose2d(6, 6, 3))), REST, 0, "conv carries hooks"
    ),
    "transposed_weight_norm": Case(
        changed(weight_normed, of(lambda: nn.ConvTranspose2d(6, 6, 3))), REST, 0, "conv is a"
    ),
    "subclass": Case(of(lambda: Doubled(6, 6, 3)), REST, 0, "conv is a convolution_cases.Doubled"),
    "pads_by_itself": Case(of(lambda: Padded(6, 6, 3)), REST, 0, "conv is a convolution_cases.Padded"),
    "in_a_sequential": Case(in_a_row(conv), REST, 1, "conv.3 is called inside an nn.Sequential"),
    "in_sequentials": Case(in_a_row(sequence(nn.ReLU, conv)), REST, 1, "conv.3.1 is called inside an nn.Sequential"),
    "sequential_in_a_sequential": Case(
        sequence(sequence(conv, nn.ReLU, conv), bn, nn.ReLU), ("1 + 2",), 0, "0.2 is called inside an nn.Sequential"
    ),
    "in_a_hooked_sequential": Case(
        changed(hook("conv"), in_a_row(conv)), REST, 1, "conv.3 is in an nn.Sequential that carries hooks"
    ),
    "in_a_sequential_before_others": Case(in_a_row(conv, nn.ReLU), REST),
    "wrapped": Case(
        of(lambda: AdaptedConv2d(nn.Conv2d(6, 6, 1))), REST, 0, "conv is a convolution_cases.AdaptedConv2d"
    ),
    "quantization_aware": Case(
        of(lambda: qat.Conv2d(6, 6, 3, qconfig=default_qat_qconfig).apply(disable_observer)),
        REST,
        0,
        "conv is a torch.ao.nn.qat",
    ),
    "hooked": Case(changed(hook("conv")), REST, 0, "conv carries hooks, or a forward of its own"),
    "hooked_before": Case(changed(hook("conv", "register_forward_pre_hook")), REST, 0, "conv carries hooks"),
    "own_forward": Case(changed(own_forward), REST, 0, "conv carries hooks, or a forward of its own"),
    "norm_hooked": Case(changed(hook("bn")), NONE, 0, exact=True),
    "weight_norm": Case(changed(weight_normed), REST, 0, "conv is a"),
    "weight_norm_by_hook": Case(changed(weight_normed_by_hook), REST, 0, "conv carries hooks"),
    "spectral_norm": Case(changed(spectral), REST, 0, "conv is a"),
    "frozen": Case(changed(lambda m: m.requires_grad_(False))),
    "sequential": Case(sequence(conv, bn, nn.ReLU), ("0 + 1 + 2",)),
    "sequential_without_activation": Case(sequence(conv, bn), ("0 + 1",)),
    "sequential_mobilenet": Case(
        sequence(partial(conv, kernel=1, padding=0), bn, nn.ReLU6, partial(conv, groups=6), bn, nn.ReLU6, conv, bn),
        ("0 + 1 + 2", "3 + 4 + 5", "6 + 7"),
        3,
    ),
    "sequential_padded": Case(
        sequence(partial(conv, padding_mode="replicate"), bn, nn.ReLU), ("1 + 2",), 0, "0 pads by its mode 'replicate'"
    ),
    "sequential_of_other_order": Case(sequence(bn, nn.ReLU, conv), ("0 + 1",), 0),
    "shared_modules": Case(shared_modules, NONE, 2),
    "shared_convolution": Case(shared_convolution, NONE, 2),
    # What happens after the swap.
    "later_transposed": Case(block(), later=put("conv", lambda _: nn.ConvTranspose2d(6, 6, 3))),
    "later_no_longer_transposed": Case(
        of(lambda: nn.ConvTranspose2d(6, 6, 3)), later=put("conv", lambda _: nn.Conv2d(6, 6, 3))
    ),
    "later_transposed_data": Case(of(lambda: nn.ConvTranspose2d(6, 6, 3)), later=filled("conv", "weight", 0.25)),
    "later_transposed_output_padding": Case(
        transposed(6, 3, stride=2), later=lambda m: setattr(m.conv, "output_padding", (1, 1))
    ),
    "later_transposed_own_inner": Case(
        transposed(6, 3), folds=0, later=lambda m: setattr(m.conv, "_output_padding", lambda *_: [0, 0]), exact=True
    ),
    "later_hook": Case(block(), folds=0, later=hook("conv"), exact=True),
    "later_hook_on_the_norm": Case(block(), folds=0, later=hook("bn"), exact=True),
    "later_weight_norm": Case(block(), folds=0, later=weight_normed, exact=True),
    "later_spectral_norm": Case(block(), folds=0, later=spectral),
    "later_wrapped": Case(block(), folds=0, later=put("conv", AdaptedConv2d), exact=True),
    "later_another_norm": Case(block(), folds=0, later=put("bn", lambda _: nn.GroupNorm(2, 6)), exact=True),
    "later_another_norm_in_eval": Case(
        block(), folds=0, later=put("bn", lambda _: nn.GroupNorm(2, 6).eval()), exact=True
    ),
    "later_no_norm": Case(block(), folds=0, later=put("bn", lambda _: nn.Identity().eval()), exact=True),
    "later_none_for_a_norm": Case(block(), folds=0, later=put("bn", lambda _: None), exact=True),
    "later_padding_mode": Case(
        block(),
        folds=0,
        later=lambda m: m.conv.__setstate__({**m.conv.__dict__, "padding_mode": "reflect"}),
        exact=True,
    ),
    "later_own_inner_forward": Case(block(), folds=0, later=own_inner, exact=True),
    "later_statistics_gone": Case(block(), folds=0, later=statistics_gone, exact=True),
    "later_training": Case(block(), folds=0, later=lambda m: m.train(), exact=True),
    "later_float64_norm": Case(block(), folds=0, later=norm_of_another_dtype),
    "later_weight_data": Case(block(), later=filled("conv", "weight", 0.25)),
    "later_running_var_data": Case(block(), later=filled("bn", "running_var", 2.0)),
    "later_running_mean_data": Case(block(), later=filled("bn", "running_mean", -1.5)),
    "later_eps": Case(block(), later=lambda m: setattr(m.bn, "eps", 0.5)),
    "later_eps_below_zero": Case(block(), folds=0, later=lambda m: setattr(m.bn, "eps", -1e-12), exact=True),
    "later_eps_zero": Case(block(), folds=0, later=lambda m: setattr(m.bn, "eps", 0.0), exact=True),
    "later_mean_of_one_value": Case(
        block(), folds=0, later=lambda m: setattr(m.bn, "running_mean", torch.ones(1)), exact=True
    ),
    "later_weight_of_one_value": Case(
        block(), folds=0, later=lambda m: setattr(m.bn, "weight", nn.Parameter(torch.ones(1))), exact=True
    ),
    "later_stride": Case(block(), later=lambda m: setattr(m.conv, "stride", (2, 1))),
    "later_state_dict": Case(block(), later=loaded),
    "later_own_method": Case(
        lambda: Stem(conv(), bn()), folds=0, later=lambda m: setattr(m, "_forward_impl", torch.neg), exact=True
    ),
    "later_another_convolution": Case(block(), later=put("conv", lambda _: nn.Conv2d(6, 6, 5))),
    "later_half": Case(block(), later=lambda m: m.bfloat16(), dtype=torch.bfloat16),
    # A norm that ends in an activation, or looks like one.
    "ends_in_relu": Case(ending(NormAct), ("conv + bn",)),
    "ends_in_silu": Case(ending(NormAct, nn.SiLU()), ("conv + bn",)),
    "ends_in_hardswish_depthwise": Case(ending(NormAct, nn.Hardswish(), groups=6), ("conv + bn",)),
    "ends_in_relu6_channels_last": Case(ending(NormAct, nn.ReLU6()), ("conv + bn",), layout=torch.channels_last),
    "ends_in_other_words": Case(ending(Short), ("conv + bn",)),
    "ends_in_nothing": Case(ending(NormAct, nn.Identity()), ("conv + bn",)),
    "ends_in_the_norm": Case(ending(Alone), ("conv + bn",)),
    "ends_in_nothing_and_a_residual": Case(
        ending(NormAct, nn.Identity(), residual_alone_of_two), ("conv + bn + residual",)
    ),
    "ends_in_relu_and_a_residual": Case(ending(NormAct, nn.ReLU(), residual_alone_of_two), ("conv + bn",)),
    "ends_in_dropout_and_silu": Case(ending(NormAct, nn.SiLU(), drop=nn.Dropout(0.5)), ("conv + bn",)),
    "ends_in_bfloat16": Case(ending(NormAct, nn.SiLU()), ("conv + bn",), dtype=torch.bfloat16),
    "ends_in_a_sequential": Case(sequence(conv, NormAct), ("0 + 1",)),
    "ends_in_softplus": Case(ending(NormAct, nn.Softplus()), NONE, 0, exact=True),
    "ends_in_softplus_after_relu": Case(ending(NormAct, nn.Softplus(), drop=nn.ReLU()), NONE, 0, exact=True),
    "ends_in_a_hook": Case(changed(lambda m: hook("act")(m.bn), ending(NormAct)), ("conv + bn",), 0, exact=True),
    "ends_hooked": Case(changed(hook("bn"), ending(NormAct)), NONE, 0, exact=True),
    "ends_without_statistics": Case(changed(statistics_gone, ending(NormAct)), NONE, 0, exact=True),
    **{f"ends_as_{cls.__name__}": Case(ending(cls), NONE, 0, exact=True) for cls in LOOK_ALIKES},
    "ends_later_in_relu": Case(
        ending(NormAct, nn.SiLU()), ("conv + bn",), later=lambda m: setattr(m.bn, "act", nn.ReLU())
    ),
    "ends_later_in_softplus": Case(
        ending(NormAct), ("conv + bn",), 0, later=lambda m: setattr(m.bn, "act", nn.Softplus()), exact=True
    ),
    "ends_later_hooked": Case(ending(NormAct), ("conv + bn",), 0, later=hook("bn"), exact=True),
    "ends_later_in_a_hook": Case(ending(NormAct), ("conv + bn",), 0, later=lambda m: hook("act")(m.bn), exact=True),
    "ends_later_in_its_own": Case(
        ending(NormAct), ("conv + bn",), 0, later=lambda m: m.bn.__dict__.update(act=torch.neg), exact=True
    ),
    "ends_later_in_training": Case(ending(NormAct), ("conv + bn",), 0, later=lambda m: m.train(), exact=True),
    "ends_later_without_statistics": Case(ending(NormAct), ("conv + bn",), 0, later=statistics_gone, exact=True),
    "ends_later_in_a_dropout": Case(
        ending(NormAct), ("conv + bn",), 0, later=lambda m: setattr(m.bn, "drop", nn.Dropout(0.5).train()), exact=True
    ),
    "ends_later_another": Case(ending(NormAct), ("conv + bn",), 0, later=put("bn", lambda _: drawn(bn)), exact=True),
    "ends_later_mean_data": Case(ending(NormAct), ("conv + bn",), later=filled("bn", "running_mean", -1.5)),
}

PROVED = [
    name
    for name, case in CASES.items()
    if case.folds and not case.later and case.dtype is not torch.float64 and 0 not in case.shape
]
"""The cases whose folded convolutions have something to prove: values, in a dtype that the kernels take."""
