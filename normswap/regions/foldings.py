"""Which convolutions a norm behind them can be folded into, and in what ways; regions with and without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from normswap.activation import Activation
from normswap.forwards.plain import CONVOLUTIONS, calls_forward, is_bare, is_plain_itself
from normswap.regions.children import child_at
from normswap.regions.padding import convolves_last
from normswap.regions.spec import FOLDINGS, Region

RELU = Activation("relu")


def is_convolution(child: nn.Module | None) -> bool:
    """Whether it is one, or goes by that name: quantized and wrapped ones are to be told of too."""
    return isinstance(child, _ConvNd) or "Conv" in type(child).__name__


def is_foldable(norm: Any) -> bool:
    """Whether a BatchNorm goes by running statistics, which can be folded into a convolution before it."""
    return not norm.training and norm.running_mean is not None and norm.running_var is not None and norm.eps > 0


def why_apart(
    child: nn.Module | None, used_once: bool, padded: bool = False, classes: tuple[type[nn.Module], ...] = CONVOLUTIONS
) -> str:
    """Why a norm is not folded into the ``child`` before it, a convolution or one of other ``classes``, "" where it can
    be; ``padded``: also into one that pads in its own way, a subclass too."""
    cls: Any = type(child)
    if cls not in classes and not (padded and convolves_last(child)):
        return f"is a {cls.__module__}.{cls.__qualname__}, which may compute in its own way"
    plain = is_plain_itself(child) if cls in classes else child is not None and is_bare(child.__dict__)
    own = isinstance(child, _ConvNd) and "_conv_forward" in child.__dict__  # which its forward calls
    if own or not plain:
        return "carries hooks, or a forward of its own"
    if isinstance(child, _ConvNd) and not padded:
        if child.padding_mode != "zeros":
            return f"pads by its mode {child.padding_mode!r}"
        if isinstance(child.padding, str):
            return f"pads by {child.padding!r}"
    return "" if used_once else "has an output that is used elsewhere too"


def convolution_in(name: str, child: nn.Module | None, used_once: bool = True, baked: bool = False) -> tuple[str, str]:
    """The convolution that gives what the ``child`` called ``name`` does, by its path: the child itself, or the last of
    nn.Sequentials within one another; or why a norm is not folded into it. ``baked``: as ``normswap.fold`` takes them,
    with those that pad in their own way or stand in an nn.Sequential."""
    around = list[Any]()
    while isinstance(child, nn.Sequential) and type(child).forward is nn.Sequential.forward and child._modules:
        around.append(child)
        last = [*child._modules][-1]
        name, child = f"{name}.{last}", child._modules[last]
    if not is_convolution(child):
        return "", ""
    reason = why_apart(child, used_once, padded=baked)
    if not all(
        is_bare(one.__dict__) and calls_forward(type(one)) and type(one).__iter__ is nn.Sequential.__iter__
        for one in around
    ):
        reason = "is in an nn.Sequential that carries hooks, or goes through its children in its own way"
    elif around and not baked:
        reason = reason or "is called inside an nn.Sequential"
    return ("", f"{name} {reason}") if reason else (name, "")


def foldings_of(region: Region, owner: nn.Module) -> tuple[str, ...]:
    """The ways in which ``region`` of ``owner``, with a convolution, may be computed."""
    convolution, acting = owner._modules[region.convolution], region.activation
    if isinstance(acting, str):
        is_relu = type(child_at(owner._modules, acting)) is nn.ReLU
        activation = RELU if is_relu else None
    else:
        activation = region.literal_activation()
    return tuple(way for way in FOLDINGS if takes(way, convolution, activation))


def takes(folding: str, convolution: Any, activation: Activation | None) -> bool:
    """Whether that is a way to compute ``convolution`` with a norm and this activation behind it, None for one that is
    no ReLU."""
    if folding == "folded" or type(convolution) is not nn.Conv2d:
        return folding == "folded"
    if folding == "scaled":
        return is_scaled(convolution)
    return folding == "fused" and activation == RELU


def is_scaled(convolution: nn.Conv2d) -> bool:
    """Whether it is one as our kernels take them: of eights of channels, in each group if it is not depthwise."""
    of_group = 1 if is_depthwise(convolution) else convolution.groups
    channels = convolution.in_channels, convolution.out_channels
    return all(count // of_group % 8 == 0 for count in channels)


def is_depthwise(convolution: nn.Conv2d) -> bool:
    """Whether it has a group a channel, and a form that our kernel takes."""
    form = convolution.kernel_size, convolution.stride, convolution.dilation
    known = form in {((k, k), (s, s), (1, 1)) for k in (3, 5) for s in (1, 2)}
    return known and convolution.groups == convolution.in_channels == convolution.out_channels


def by_default(region: Region, owner: nn.Module) -> Region | None:
    """``region`` as it is planned where nothing is timed: with a convolution that cuDNN can fuse, unless it has groups,
    which may make that many times slower."""
    if not region.convolution:
        return region
    convolution = owner._modules[region.convolution]
    if "fused" in foldings_of(region, owner) and getattr(convolution, "groups", 0) == 1:
        return replace(region, folding="fused")
    return without_convolution(region)


def without_convolution(region: Region) -> Region | None:
    """The rest of a region; None where a norm alone is left."""
    steps = tuple(step for step in region.steps if step.does != "convolution")
    rest = replace(region, steps=steps, convolution="", folding="")
    return rest if len(steps) > 1 else None
