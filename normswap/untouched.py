"""Copies of one site that share nothing that can be changed, and a model that is left as it was found."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_CONTAINERS = (list, dict, set, OrderedDict)


def detached_copy(module: nn.Module, cls: type[nn.Module], dtype: torch.dtype | None = None) -> nn.Module:
    """``module`` as a ``cls``, without hooks: parameters detached (sharing storage unless ``dtype`` converts them),
    buffers cloned, children copied alike. What it computes, accumulates and updates stays in the copy."""
    copy: nn.Module = object.__new__(cls)
    copy.__dict__ = dict(module.__dict__)
    copy.__dict__.pop("_compiled_call_impl", None)  # it would call ``module``
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
    it was; lists, dicts and sets also what they held), training flags and gradients, and the random number generators
    of torch (the CPU's and those of the model's GPUs), of Python and of NumPy."""
    managed = _managed(model)
    with_gradients = [p for p in model.parameters() if p.is_leaf or p.retains_grad]  # a warning elsewhere
    steps: list[Callable[[], None]] = [_restoring_attributes(m, id(m) in managed) for m in model.modules()]
    steps += [partial(_restore_values, b, b.detach().clone()) for b in dict.fromkeys(model.buffers())]
    steps += [partial(setattr, parameter, "grad", parameter.grad) for parameter in with_gradients]
    steps += [partial(random.setstate, random.getstate()), partial(np.random.set_state, np.random.get_state())]
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    if not devices and torch.cuda.is_initialized():
        devices = [torch.cuda.current_device()]
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            try:
                every(steps)
            except BaseException:  # an interrupt, say
                every(steps)
                raise


def every(steps: Iterable[Callable[[], object]]) -> None:
    """Do every step, also after one raised; then raise the first exception."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


def _restoring_attributes(module: nn.Module, managed: bool) -> Callable[[], None]:
    """What gives a module the attributes it has now - parameters, buffers, children and hooks among them - and its
    containers what they hold; where it is ``managed``, its parameters are left to FSDP."""
    values = dict(module.__dict__)
    kept = (v for k, v in values.items() if not (managed and k == "_parameters"))
    held = [(v, v.copy()) for v in kept if type(v) in _CONTAINERS]

    def restore() -> None:
        for name in [k for k in module.__dict__ if k not in values]:
            del module.__dict__[name]
        module.__dict__.update(values)
        for container, before in held:
            if isinstance(container, list):
                container[:] = before
            else:
                container.clear()
                container.update(before)

    return restore


@torch.no_grad()
def _restore_values(buffer: Tensor, value: Tensor) -> None:
    if not same_values(buffer, value):
        buffer.copy_(value)


@torch.no_grad()
def restore_parameters(model: nn.Module, original: nn.Module) -> None:
    """Give the parameters of ``model``, a copy of ``original``, the values that they have there: its forward may have
    written into them."""
    given = dict(original.named_parameters())
    for name, mine in model.named_parameters():
        before = given.get(name)
        plain = type(mine) is nn.Parameter and mine.layout is torch.strided and not mine.is_meta
        if plain and before is not None and before.shape == mine.shape and not torch.equal(mine, before):
            mine.copy_(before)


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether the elements of two tensors of one shape are equal, NaN to NaN."""
    return one.is_meta or bool(((one == other) | (one.isnan() & other.isnan())).all())


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
    try:
        set_classes(modules)
        yield
    finally:
        _put_back(before)


@contextlib.contextmanager
def all_or_none(model: nn.Module) -> Iterator[None]:
    """Where the block raises, give each module of ``model`` the class back that it had before."""
    before = [(module, type(module)) for module in model.modules()]
    try:
        yield
    except BaseException:
        _put_back([(module, cls) for module, cls in before if type(module) is not cls])
        raise


def _put_back(before: Sequence[tuple[nn.Module, type[nn.Module]]]) -> None:
    """``set_classes``, done again when an interrupt comes in between."""
    try:
        set_classes(before)
    except BaseException:
        set_classes(before)
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
