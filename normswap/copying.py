"""A copy of a model, and whether it fits beside it, which is asked before anything is copied."""

from __future__ import annotations

import copy
import gc
import warnings
from collections import defaultdict

import torch
from torch import nn
from torch.optim import Optimizer

from normswap.plans import NormswapError


def copy_of(model: nn.Module, cure: str = "pass inplace=True") -> nn.Module:
    """A deep copy. Raises NormswapError, with the ``cure``, where it cannot be made; warns of optimizers that hold the
    original's parameters."""
    if getattr(model, "training", False) and (held := _optimizers_of(model)):
        warnings.warn(
            f"normswap returns a copy: an optimizer made before ({', '.join(held)}) still holds the parameters of the "
            "model given; make it from the copy, or pass inplace=True",
            stacklevel=3,
        )
    check_copy_fits(model, cure)
    with torch.inference_mode(False):  # else the copy could never be trained
        try:
            return copy.deepcopy(model)
        except Exception as error:  # whatever a module's own __deepcopy__ raises
            told = next(iter(str(error).splitlines()), "")
            raise NormswapError(f"model cannot be copied ({type(error).__name__}: {told}); {cure}") from error


def _optimizers_of(model: nn.Module) -> list[str]:
    """The names of the classes of the optimizers that hold parameters of ``model``."""
    parameters = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    # By type(), which runs no code of the objects: some are proxies that do things when they are looked at.
    found = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)] if parameters else []
    held = [one for one in found if any(id(p) in parameters for group in one.param_groups for p in group["params"])]
    return sorted({type(one).__name__ for one in held})


def check_copy_fits(model: nn.Module, cure: str = "pass inplace=True") -> None:
    """Raise NormswapError, with the ``cure``, when a copy of parameters and buffers of ``model`` is larger than what
    is free on one of its GPUs, memory that PyTorch holds and does not use included."""
    for device, size in _sizes(model).items():
        free = free_bytes(device)
        if free is not None and size > free:
            raise NormswapError(
                f"model is {_gigabytes(size)} on {device}, {_gigabytes(free)} free, so that a copy does not fit: {cure}"
            )


def free_bytes(device: torch.device) -> int | None:
    """What can still be allocated on ``device``; None where that is not known."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _sizes(model: nn.Module) -> dict[torch.device, int]:
    """Bytes of the parameters and buffers on every device."""
    sizes = defaultdict[torch.device, int](int)
    for tensor in (*model.parameters(), *model.buffers()):
        if not torch.nn.parameter.is_lazy(tensor):
            sizes[tensor.device] += tensor.numel() * tensor.element_size()
    return sizes


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
