"""Forwards with Linear -> scale -> BatchNorm among other statements, those that only look so, and what may change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from region_checks import Case
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

FEATURES, WIDTH, BATCH = 6, 5, 9


class Factor(nn.Module):
    """Multiplies by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.weight


class LinearParts(nn.Module):
    """All that some forward here calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.fc2 = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, WIDTH, bias=False)
        self.bn, self.bn2 = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, affine=False, momentum=None)
        self.scale, self.one = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(()))
        self.register_buffer("row", torch.ones(1, WIDTH))
        self.number, self.flag, self.times, self.factor = 0.75, True, 2, Factor()
        self.act, self.act_, self.drop, self.ln = nn.GELU(), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.LayerNorm(WIDTH)
        self.extra: Any = None

    def project(self, x):
        return F.relu(self.bn(self.fc(x) * self.scale))


# --- right ones -----------------------------------------------------------------------------------------------------


def among_statements(self, x, y):
    h = self.bn(self.fc(x) * self.scale)
    return F.relu(h) + y


def without_an_activation(self, x, y):
    h = self.bn(self.fc(x) * self.scale)
    return h * y


def without_a_scale(self, x, y):
    return torch.tanh(self.bn(self.fc(x))) * y


def scale_first(self, x, y):
    return self.act(self.bn(self.scale * self.fc(x))) - y


def by_a_method(self, x, y):
    return F.silu(self.bn(self.fc(x).mul(self.scale))) - y


def by_a_function(self, x, y):
    return F.leaky_relu(self.bn(torch.mul(self.scale, self.fc(x))), 0.3) - y


def by_a_literal(self, x, y):
    return self.bn(self.fc(x) * 2.0) - y


def by_a_number(self, x, y):
    return F.relu(self.bn2(self.number * self.fc2(x))) - y


def by_a_buffer(self, x, y):
    return F.relu(self.bn2(self.fc2(x) * self.row)) - y


def by_one_parameter(self, x, y):
    return F.relu(self.bn(self.fc2(x) * self.one)) - y


def by_a_sum(self, x, y):
    return F.hardswish(self.bn(self.fc(x) * (1 + self.scale))) - y


def by_a_row_of_it(self, x, y):
    return F.relu(self.bn(self.fc(x) * self.scale[None])) + y


def by_a_child(self, x, y):
    return F.relu(self.bn(self.factor(self.fc(x)))) + y


def with_a_residual(self, x, y):
    h = self.fc(x)
    h = self.bn(h * self.scale)
    h += y
    return self.act_(h)


def with_a_residual_first(self, x, y):
    return torch.sigmoid(y * 2 + self.bn(self.fc(x)))


def with_a_residual_that_broadcasts(self, x, y):
    return F.relu(self.bn(self.fc(x)) + y[:1])


def with_a_vector_added(self, x, y):
    return F.relu(self.bn(self.fc(x)) + self.scale) + y


def with_a_number_added(self, x, y):
    return F.relu(self.bn(self.fc(x) * self.scale) + self.number) + y


def with_two_of_them(self, x, y):
    return F.relu(self.bn(self.fc(x) * self.scale)) + F.silu(self.bn2(self.fc2(x))) + y


def with_a_dropout(self, x, y):
    return F.relu(self.drop(self.bn(self.fc(x)))) + y


def result_used_twice(self, x, y):
    h = self.bn(self.fc(x) * self.scale)
    return F.relu(h) + h


def called_by_name(self, x, y):
    return F.relu(self.bn(input=self.fc(x) * self.scale)) + y


def in_an_if(self, x, y):
    if self.extra is not None:
        y = self.extra(y)
    h = self.bn(self.fc(x) * self.scale)
    if self.flag:
        h = F.relu(h)
    return h + y


def in_a_loop(self, x, y):
    for _ in range(self.times):
        h = self.bn(self.fc(x) * self.scale)
        y = y + F.relu(h)
    return y


def in_a_with(self, x, y):
    with contextlib.nullcontext():
        h = F.relu(self.bn(self.fc(x) * self.scale))
    return h + y


def under_autocast(self, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        h = F.relu(self.bn(self.fc(x)))
    return h.float() + y


def without_gradients(self, x, y):
    with torch.no_grad():
        h = F.relu(self.bn(self.fc(x) * self.scale))
    return h + y


def same_linear_twice(self, x, y):
    return self.bn(self.fc(x) * self.scale) * self.bn2(self.fc(x + 1))


_ACT, _SHAPES = ("fc + scale + bn + relu",), ((BATCH, FEATURES), (BATCH, WIDTH))
_SIGNED = {
    among_statements: _ACT,
    without_an_activation: ("fc + scale + bn",),
    without_a_scale: ("fc + bn + tanh",),
    scale_first: ("fc + scale + bn + act",),
    by_a_method: ("fc + scale + bn + silu",),
    by_a_function: ("fc + scale + bn + leaky_relu",),
    by_a_literal: ("fc + scale + bn",),
    by_a_number: ("fc2 + scale + bn2 + relu",),
    by_a_buffer: ("fc2 + scale + bn2 + relu",),
    by_one_parameter: ("fc2 + scale + bn + relu",),
    by_a_sum: ("fc + scale + bn + hardswish",),
    by_a_row_of_it: _ACT,
    by_a_child: ("fc + factor + bn + relu",),
    with_a_residual: ("fc + scale + bn + residual + act_",),
    with_a_residual_first: ("fc + bn + residual + sigmoid",),
    with_a_residual_that_broadcasts: ("fc + bn + residual + relu",),
    with_a_vector_added: ("fc + bn",),
    with_a_number_added: ("fc + scale + bn",),
    with_two_of_them: ("fc + scale + bn + relu", "fc2 + bn2 + silu"),
    with_a_dropout: ("fc + bn + relu",),
    result_used_twice: ("fc + scale + bn",),
    called_by_name: _ACT,
    in_an_if: _ACT,
    in_a_loop: ("fc + scale + bn",),  # what a body binds may be read behind it
    in_a_with: _ACT,
    under_autocast: ("fc + bn + relu",),
    without_gradients: _ACT,
    same_linear_twice: ("fc + scale + bn", "fc + bn2"),
}


def case(forward: Callable[..., Any], found: tuple[str, ...], **options: Any) -> Case:
    return Case(forward, found, **{"shapes": _SHAPES, "exact": False, "base": LinearParts, **options})


FOUND: dict[str, Case] = {forward.__name__: case(forward, found) for forward, found in _SIGNED.items()}


# --- look-alikes ----------------------------------------------------------------------------------------------------


def by_a_row_of_the_input(self, x, y):
    return F.relu(self.bn(self.fc(x) * y[:1]))


def by_another_linear(self, x, y):
    return F.relu(self.bn(self.fc(x) * self.fc2(x)))


def by_a_value_a_sample(self, x, y):
    return F.relu(self.bn(self.fc(x) * y))


def output_used_elsewhere(self, x, y):
    h = self.fc(x)
    return F.relu(self.bn(h * self.scale)) + h


def product_used_elsewhere(self, x, y):
    h = self.fc(x) * self.scale
    return F.relu(self.bn(h)) + h


def squared(self, x, y):
    h = self.fc(x)
    return F.relu(self.bn(h * h))


def divided(self, x, y):
    return F.relu(self.bn(self.fc(x) / self.scale))


def shifted(self, x, y):
    return F.relu(self.bn(self.fc(x) * self.scale + 1))


def scaled_twice(self, x, y):
    return F.relu(self.bn(self.fc(x) * self.scale * 2))


def scaled_in_place(self, x, y):
    h = self.fc(x)
    h *= self.scale
    return F.relu(self.bn(h))


def scaled_by_a_method_in_place(self, x, y):
    return F.relu(self.bn(self.fc(x).mul_(self.scale)))


def scale_changed_between(self, x, y):
    h = self.fc(x)
    self.scale.data.mul_(1.5)
    return F.relu(self.bn(h * self.scale))


def input_changed_between(self, x, y):
    h = self.fc(x)
    x.add_(1)
    return F.relu(self.bn(h * self.scale)) * x.sum()


def without_gradients_of_the_linear(self, x, y):
    with torch.no_grad():
        h = self.fc(x)
    return F.relu(self.bn(h * self.scale))


def captured(self, x, y):
    h = self.fc(x)
    later = lambda: h  # noqa: E731
    return F.relu(self.bn(h)) + later()


def in_a_branch_of_a_tensor(self, x, y):
    h = self.fc(x)
    if bool(x.sum() > 0):
        h = h * self.scale
    return F.relu(self.bn(h))


def linear_called_by_name(self, x, y):
    return F.relu(self.bn(self.fc(input=x))) + y


def norm_first(self, x, y):
    return self.bn(y) + self.fc(x)


def norm_called_between(self, x, y):
    h = self.bn(self.fc(x) * self.scale)
    other = self.bn(y)
    return F.relu(h) + other


def statistics_read_between(self, x, y):
    h = self.bn(self.fc(x) * self.scale)
    mean = self.bn.running_mean + 1
    return F.relu(h) + mean


def another_norm(self, x, y):
    return F.relu(self.ln(self.fc(x) * self.scale)) + y


def viewed(self, x, y):
    return F.relu(self.bn(self.fc(x).view(-1, WIDTH) * self.scale))


def two_arguments(self, x, y):
    return F.relu(self.bn(torch.mul(self.fc(x), other=self.scale)))


_NORM = ("bn + relu",)
_UNLIKE: dict[Callable[..., Any], tuple[str, ...]] = {
    by_a_row_of_the_input: _NORM,
    by_another_linear: _NORM,
    by_a_value_a_sample: _NORM,
    output_used_elsewhere: _NORM,
    product_used_elsewhere: _NORM,
    squared: _NORM,
    divided: _NORM,
    shifted: _NORM,
    scaled_twice: _NORM,
    scaled_in_place: _NORM,
    scaled_by_a_method_in_place: _NORM,
    scale_changed_between: _NORM,
    input_changed_between: _NORM,
    without_gradients_of_the_linear: _NORM,
    captured: _NORM,
    in_a_branch_of_a_tensor: _NORM,
    linear_called_by_name: _NORM,
    norm_first: ("bn + residual",),
    norm_called_between: (),
    statistics_read_between: (),
    another_norm: ("ln + relu",),
    viewed: _NORM,
    two_arguments: _NORM,
}

# --- changes --------------------------------------------------------------------------------------------------------


def hook(name: str, register: str = "register_forward_hook") -> Callable[[Any], None]:
    def hooked(model: Any) -> None:
        function = (lambda module, args: (args[0] * 2,)) if "pre" in register else lambda module, args, out: out * 3
        getattr(model.get_submodule(name), register)(function)

    return hooked


def put(path: str, make: Callable[[], Any]) -> Callable[[Any], None]:
    *parents, name = path.split(".")
    return lambda model: setattr(model.get_submodule(".".join(parents)), name, make())


class LoRA(nn.Module):
    """What peft puts in a Linear's place."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(FEATURES, 2), nn.Linear(2, WIDTH)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


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
    "a pre-hook of the linear": hook("fc", "register_forward_pre_hook"),
    "a hook of the norm": hook("bn"),
    "a pre-hook of the norm": hook("bn", "register_forward_pre_hook"),
    "LoRA": wrapped,
    "weight_norm": normed,
    "another linear": put("fc", lambda: nn.Linear(FEATURES, WIDTH, bias=False).requires_grad_(False)),
    "another width": put("fc", lambda: nn.Linear(FEATURES, WIDTH + 1)),
    "another norm": put("bn", lambda: nn.LayerNorm(WIDTH)),
    "no norm": put("bn", nn.Identity),
    "another forward of the linear": put("fc.forward", lambda: lambda x: x[:, :WIDTH]),
    "no scale": put("scale", lambda: None),
    "a scale a sample": put("scale", lambda: nn.Parameter(torch.linspace(-1, 1, BATCH)[:, None])),
    "a wide scale": put("scale", lambda: nn.Parameter(torch.ones(1, 1, WIDTH))),
    "a scale in float64": put("scale", lambda: nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))),
    "a scale of one value": put("scale", lambda: nn.Parameter(torch.full((1,), -0.5))),
    "another eps": put("bn.eps", lambda: 0.5),
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

LOOK_ALIKES: dict[str, Case] = {
    **{forward.__name__: case(forward, found) for forward, found in _UNLIKE.items()},
    "hooked before": case(among_statements, _NORM, change=hook("fc")),
    "norm hooked before": case(among_statements, (), change=hook("bn")),
    "wrapped before": case(among_statements, _NORM, change=wrapped),
    "quantized before": case(among_statements, _NORM, change=quantized, modes=("eval",)),
    "weight_norm before": case(among_statements, _NORM, change=normed),
    "three dims": case(among_statements, _ACT, shapes=((BATCH, WIDTH, FEATURES), (BATCH, WIDTH, WIDTH))),
    "one row": case(among_statements, _ACT, shapes=((1, FEATURES), (1, WIDTH))),
    "no rows": case(among_statements, _ACT, shapes=((0, FEATURES), (0, WIDTH))),
    "few rows": case(among_statements, _ACT, shapes=((4, FEATURES), (4, WIDTH))),
    "a bad width": case(among_statements, _ACT, shapes=((BATCH, FEATURES + 1), (BATCH, WIDTH))),
}
CHANGED: dict[str, Case] = {
    **{name: case(among_statements, _ACT, later=change) for name, change in CHANGES.items()},
    "quantized": case(among_statements, _ACT, later=quantized, modes=("eval",)),
    "LoRA and a residual": case(with_a_residual, ("fc + scale + bn + residual + act_",), later=wrapped),
    "factor hooked": case(by_a_child, ("fc + factor + bn + relu",), later=hook("factor")),
    "factor of another class": case(by_a_child, ("fc + factor + bn + relu",), later=put("factor", nn.Softplus)),
    "a branch": case(in_an_if, _ACT, later=put("flag", lambda: False)),
}
