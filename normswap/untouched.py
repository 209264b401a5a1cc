"""Copies of one site that share nothing that can be changed, and a model that is left as it was found."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normswap.attributes import modules_in
from normswap.held import Held, ending_in, same_values


def detached_copy(
    module: nn.Module,
    cls: type[nn.Module],
    dtype: torch.dtype | None = None,
    made: dict[int, nn.Module] | None = None,
) -> nn.Module:
    """``module`` as a ``cls``, without hooks: parameters detached (sharing storage unless ``dtype`` converts them),
    buffers and tensors that are plain attributes cloned, children copied alike. What it computes, accumulates and
    updates stays in the copy. ``made``: the copies by the ids of what is copied already, as a child may hold its
    parent."""
    made = {} if made is None else made
    made[id(module)] = copy = object.__new__(cls)
    own = dict(module.__dict__)
    for called in ("_call_impl", "_compiled_call_impl"):
        own.pop(called, None)  # it would call ``module``
    for name, value in module.__dict__.items():
        if isinstance(value, OrderedDict) and "hooks" in name:
            own[name] = OrderedDict()
        elif isinstance(value, Tensor):  # a weight or statistic that is not registered
            copied = _converted(value.detach().clone(), dtype).requires_grad_(value.requires_grad)
            own[name] = nn.Parameter(copied, value.requires_grad) if isinstance(value, nn.Parameter) else copied
    own["_parameters"] = {k: _parameter(p, dtype) for k, p in module._parameters.items()}
    own["_buffers"] = {
        k: None if b is None else _converted(b.detach().clone(), dtype) for k, b in module._buffers.items()
    }
    own["_modules"] = children = {}
    copy.__dict__.update(own)  # a module's own __setattr__ has no say in it
    for name, child in module._modules.items():
        if child is not None and id(child) not in made:
            detached_copy(child, type(child), dtype, made)
        children[name] = None if child is None else made[id(child)]
    return copy


def _parameter(parameter: Tensor | None, dtype: torch.dtype | None) -> nn.Parameter | None:
    if parameter is None:
        return None
    values = parameter.detach()
    if values.is_inference():  # made in inference mode: such a tensor can take no part in a backward
        values = values.clone()
    return nn.Parameter(_converted(values, dtype), requires_grad=parameter.requires_grad)


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def is_sharded(module: nn.Module) -> bool:
    """True while parameters of ``module`` are DTensors, as fully_shard leaves them between forwards."""
    dtensor = _loaded("torch.distributed.tensor", "DTensor")
    return dtensor is not None and any(isinstance(parameter, dtensor) for parameter in module.parameters())


def _managed(model: nn.Module) -> set[int]:
    """The ids of the modules of ``model`` whose parameters FSDP exchanges when it gathers and shards them."""
    fsdp = _loaded("torch.distributed.fsdp", "FSDPModule")
    if fsdp is None:
        return set()
    return {id(child) for module in model.modules() if isinstance(module, fsdp) for child in module.modules()}


def _loaded(module: str, name: str) -> Any:
    """What ``module`` calls ``name``; None where it is not imported, or another thread is at it."""
    return getattr(sys.modules.get(module), name, None)


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore, at the end and whatever happens, the model's buffers (objects and values), every other attribute (what
    it was and what it held, as ``Held`` says), training flags, which parameters learn and their gradients, and the
    random number generators of torch (the CPU's and those of the model's GPUs), of Python and of NumPy."""
    held, managed = Held(), _managed(model)
    modules = [module for _, module in modules_in(model)]
    for module in modules:
        if id(module) in managed:
            held.leave(module._parameters)
    held.note((*modules, *model.buffers()))
    parameters = [p for p in model.parameters() if p.is_leaf or p.retains_grad]  # a warning elsewhere
    steps: list[Callable[[], object]] = [
        *held.steps,
        *(partial(_restore_gradient, p, p.requires_grad, p.grad) for p in parameters),
    ]
    steps += [partial(random.setstate, random.getstate()), partial(np.random.set_state, np.random.get_state())]
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    if not devices and torch.cuda.is_initialized():
        devices = [torch.cuda.current_device()]
    with torch.random.fork_rng(devices=devices), ending_in(steps):
        yield


def _restore_gradient(parameter: Tensor, learns: bool, gradient: Tensor | None) -> None:
    if parameter.requires_grad != learns:
        parameter.requires_grad_(learns)
    parameter.grad = gradient


@torch.no_grad()
def restore_parameters(model: nn.Module, original: nn.Module) -> None:
    """Give the parameters of ``model``, a copy of ``original``, the values that they have there: its forward may have
    written into them."""
    given = dict(original.named_parameters())
    for name, mine in model.named_parameters():
        before = given.get(name)
        plain = type(mine) is nn.Parameter and mine.layout is torch.strided and not mine.is_meta
        if plain and before is not None and before.shape == mine.shape and not same_values(mine, before):
            mine.copy_(before)


@contextlib.contextmanager
def set_in(names: MutableMapping[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """The ``values`` under their names - of attributes, of the environment - in the block."""
    before = {name: names[name] for name in values if name in names}
    try:
        names.update(values)
        yield
    finally:
        names.update(before)
        for name in values.keys() - before.keys():
            names.pop(name, None)


@contextlib.contextmanager
def classes(modules: list[tuple[nn.Module, type[nn.Module]]]) -> Iterator[None]:
    """Give each module the class named beside it for the block."""
    before = [(module, type(module)) for module, _ in modules]
    with ending_in([partial(set_classes, before)]):
        set_classes(modules)
        yield


@contextlib.contextmanager
def all_or_none(model: nn.Module) -> Iterator[None]:
    """Where the block raises, give each module of ``model`` the class back that it had before."""
    before = [(module, type(module)) for _, module in modules_in(model)]
    try:
        yield
    except BaseException:
        with ending_in([partial(set_classes, [(module, cls) for module, cls in before if type(module) is not cls])]):
            raise


def set_classes(modules: Iterable[tuple[nn.Module, type[nn.Module]]]) -> None:
    """Give each module the class beside it; a model's own ``__setattr__`` has no say in it. Code that torch.compile
    made of such a module is compiled anew, that of others is kept."""
    for module, cls in modules:
        object.__setattr__(module, "__class__", cls)
        # torch.compile asks for a module's class, but some versions not while its dict is the one they have seen.
        module.__dict__[_SEEN] = None
        del module.__dict__[_SEEN]


_SEEN = "_normswap_seen"
