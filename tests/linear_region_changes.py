"""What may happen to a module with Linear -> scale -> BatchNorm in its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from expression_changes import LoRA
from linear_region_models import (
    ACT,
    BATCH,
    FEATURES,
    WIDTH,
    among_statements,
    by_a_child,
    case,
    in_an_if,
    with_a_residual,
)
from region_checks import Case, hook, overlaid, pre_hook, put
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


def wrapped(model: Any) -> None:
    torch.manual_seed(3)
    model.fc = LoRA(model.fc)


def quantized(model: Any) -> None:
    model.eval()
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)


def normed(model: Any) -> None:
    weight_norm(model.fc)


def without_statistics(model: Any) -> None:
    model.bn.running_mean = model.bn.running_var = None


def frozen(model: Any) -> None:
    model.bn.eval()
    model.requires_grad_(False)


def halved(model: Any) -> None:
    model.fc.half()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook of the linear": hook("fc"),
    "a pre-hook of the linear": pre_hook("fc"),
    "a hook of the norm": hook("bn"),
    "a pre-hook of the norm": pre_hook("bn"),
    "LoRA": wrapped,
    "weight_norm": normed,
    "another linear": put("fc", lambda: nn.Linear(FEATURES, WIDTH, bias=False).requires_grad_(False)),
    "another width": put("fc", lambda: nn.Linear(FEATURES, WIDTH + 1)),
    "another norm": put("bn", lambda: nn.LayerNorm(WIDTH)),
    "no norm": put("bn", nn.Identity),
    "no norm in eval": put("bn", lambda: nn.Identity().eval()),
    "None for a norm": put("bn", lambda: None),
    "another forward of the linear": put("fc.forward", lambda: lambda x: x[:, :WIDTH]),
    "no scale": put("scale", lambda: None),
    "a scale a sample": put("scale", lambda: nn.Parameter(torch.linspace(-1, 1, BATCH)[:, None])),
    "a wide scale": put("scale", lambda: nn.Parameter(torch.ones(1, 1, WIDTH))),
    "a scale in float64": put("scale", lambda: nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))),
    "a scale of one value": put("scale", lambda: nn.Parameter(torch.full((1,), -0.5))),
    "another eps": put("bn.eps", lambda: 0.5),
    "an eps below zero": put("bn.eps", lambda: -1e-12),
    "an eps of nothing": put("bn.eps", lambda: 0.0),
    "a mean of one value": put("bn.running_mean", lambda: torch.ones(1)),
    "a variance of one value": put("bn.running_var", lambda: torch.ones(1)),
    "a forward over the norm": overlaid("bn", forward=lambda self, x: x * 3),
    "a weight of one value": put("bn.weight", lambda: nn.Parameter(torch.ones(1))),
    "a bias of one value": put("bn.bias", lambda: nn.Parameter(torch.ones(()))),
    "a linear's weight of one value": put("fc.weight", lambda: nn.Parameter(torch.ones(1, FEATURES))),
    "a bias of rows": put("fc.bias", lambda: nn.Parameter(torch.ones(1, WIDTH))),
    "momentum": put("bn.momentum", lambda: 0.3),
    "no momentum": put("bn.momentum", lambda: None),
    "momentum 0": put("bn.momentum", lambda: 0.0),
    "no tracking": put("bn.track_running_stats", lambda: False),
    "no statistics": without_statistics,
    "frozen": frozen,
    "eval": lambda model: model.eval(),
    "train": lambda model: model.train(),
    "float64": lambda model: model.double(),
    "a linear in float16": halved,
}

CHANGED: dict[str, Case] = {
    **{name: case(among_statements, ACT, later=change) for name, change in CHANGES.items()},
    "quantized": case(among_statements, ACT, later=quantized, modes=("eval",)),
    "LoRA and a residual": case(with_a_residual, ("fc + scale + bn + residual + act_",), later=wrapped),
    "factor hooked": case(by_a_child, ("fc + factor + bn + relu",), later=hook("factor")),
    "factor of another class": case(by_a_child, ("fc + factor + bn + relu",), later=put("factor", nn.Softplus)),
    "a branch": case(in_an_if, ACT, later=put("flag", lambda: False)),
}
