"""What other packages, where installed, have for a norm: Liger (liger-kernel) and quack (quack-kernels)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from workloads import Workload

Function = Callable[[Tensor], Tensor]
Offer = Callable[[Any], Function | None]

PACKAGES = {"Liger": ("liger_kernel", "liger-kernel"), "quack": ("quack", "quack-kernels")}
"""The module and the distribution of each."""


def versions() -> dict[str, str]:
    """The peers that are installed."""
    return {
        name: importlib.metadata.version(distribution)
        for name, (module, distribution) in PACKAGES.items()
        if importlib.util.find_spec(module) is not None
    }


def peers(workload: Workload) -> dict[str, Offer]:
    """What each installed peer makes of a ``workload.make()``: a function, or None where it has no such norm. Raises
    whatever an installation that does not work raises."""
    offers = {"Liger": _liger, "quack": _quack}
    return {name: partial(offers[name], workload) for name in versions()}


def _liger(workload: Workload, model: Any) -> Function | None:
    from liger_kernel.transformers import functional as liger

    rows = len(workload.shape) == 2
    if workload.name == "layer_norm" and rows:
        norm = model.ln
        return lambda x: liger.liger_layer_norm(x, norm.weight, norm.bias, norm.eps)
    if workload.name == "rms_norm" and rows:
        return lambda x: liger.liger_rms_norm(x, model.weight, model.eps, in_place=False)
    if workload.name == "group_norm" and workload.memory_format is torch.contiguous_format:
        norm = model.gn
        return lambda x: liger.liger_group_norm(x, norm.weight, norm.bias, norm.num_channels, norm.num_groups, norm.eps)
    return None


def _quack(workload: Workload, model: Any) -> Function | None:
    from quack.rmsnorm import layernorm_fwd, rmsnorm_fwd

    if len(workload.shape) != 2:
        return None
    if workload.name == "layer_norm":
        norm = model.ln
        weight, bias = norm.weight.detach().float(), norm.bias.detach().float()  # it takes no others
        return lambda x: layernorm_fwd(x, weight, bias, norm.eps)
    if workload.name == "rms_norm":
        return lambda x: rmsnorm_fwd(x, model.weight.detach(), eps=model.eps)[0]
    return None
