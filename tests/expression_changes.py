"""What may happen to a swapped model: changes of its parts, and of its weights between two calls."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from expression_checks import assert_equal
from expression_forwards import CHANNELS, FEATURES, block, written
from models import randomised
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import normswap

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
