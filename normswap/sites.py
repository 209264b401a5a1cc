"""Copies of one site that share nothing that can be changed, and a model that is left as it was found."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_OWN = ("_parameters", "_buffers", "_modules")
"""What a module keeps in its __dict__ and is restored by its own means, or never changes."""


def detached_copy(module: nn.Module, cls: type[nn.Module], dtype: torch.dtype | None = None) -> nn.Module:
    """``module`` as a ``cls``, without hooks: parameters detached (sharing storage unless ``dtype`` converts them),
    buffers cloned, children copied alike. What it computes, accumulates and updates stays in the copy."""
    copy = cls.__new__(cls)
    copy.__dict__ = dict(module.__dict__)
    for name, value in module.__dict__.items():
        if isinstance(value, OrderedDict) and "hooks" in name:
            copy.__dict__[name] = OrderedDict()
    copy._parameters = {k: _parameter(p, dtype) for k, p in module._parameters.items()}
    copy._buffers = {
        k: None if b is None else _converted(b.detach().clone(), dtype) for k, b in module._buffers.items()
    }
    copy._modules = {
        k: None if child is None else detached_copy(child, type(child), dtype) for k, child in module._modules.items()
    }
    return copy


def _parameter(parameter: Tensor | None, dtype: torch.dtype | None) -> nn.Parameter | None:
    if parameter is None:
        return None
    values = parameter.detach()
    if values.is_inference():  # made in inference mode: such a tensor can take no part in a backward
        values = values.clone()
    return nn.Parameter(_converted(values, dtype), requires_grad=parameter.requires_grad)


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore, at the end and whatever happens, the model's buffers (objects and values), every other attribute (what
    it was; lists, dicts and sets also what they held), training flags and gradients, and the random number generators
    of the CPU and of the model's GPUs."""
    modules = list(model.modules())
    attributes = [(m, _Attributes(m)) for m in modules]
    buffers = [
        (m, dict(m._buffers), {k: b.detach().clone() for k, b in m._buffers.items() if b is not None}) for m in modules
    ]
    gradients = [(p, p.grad) for p in model.parameters()]
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    if not devices and torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = [torch.cuda.current_device()]
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for module, before in attributes:
                before.restore(module)
            for module, objects, values in buffers:
                _restore_buffers(module, objects, values)
            for parameter, gradient in gradients:
                parameter.grad = gradient


class _Attributes:
    """The attributes a module had, parameters, buffers and children apart, and what the containers among them held."""

    def __init__(self, module: nn.Module) -> None:
        self.values = {k: v for k, v in module.__dict__.items() if k not in _OWN}
        self.held = [(v, v.copy()) for v in self.values.values() if type(v) in (list, dict, set)]

    def restore(self, module: nn.Module) -> None:
        for name in [k for k in module.__dict__ if k not in _OWN and k not in self.values]:
            del module.__dict__[name]
        module.__dict__.update(self.values)
        for container, before in self.held:
            if isinstance(container, list):
                container[:] = before
            else:
                container.clear()
                container.update(before)


def _restore_buffers(module: nn.Module, objects: dict[str, Any], values: dict[str, Tensor]) -> None:
    if not isinstance(module, torch.jit.ScriptModule):  # which always keeps the same ones
        module._buffers.clear()
        module._buffers.update(objects)
    with torch.no_grad():
        for name, value in values.items():
            buffer = objects[name]
            if not _same_values(buffer, value):
                buffer.copy_(value)


def _same_values(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


@contextlib.contextmanager
def classes(modules: list[tuple[nn.Module, type[nn.Module]]]) -> Iterator[None]:
    """Give each module the class named beside it for the block."""
    before = [(module, type(module)) for module, _ in modules]
    try:
        for module, cls in modules:
            object.__setattr__(module, "__class__", cls)
        yield
    finally:
        for module, cls in before:
            object.__setattr__(module, "__class__", cls)
