"""What modules and other values hold, and how it is given back: attributes, what containers contain, values of tensors
and arrays, states of random number generators."""

from __future__ import annotations

import array
import contextlib
import operator
import random
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import _lru_cache_wrapper, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_Step = Callable[[], None]
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque, tuple)
"""The first that a value is of says how it is read and filled (a tuple never is): what a subclass makes of that is its
own."""
_LEFT = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType)
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "accelerate", "deepspeed")
"""Whose objects and functions, modules apart, are no part of a model: what runs it, and holds it and its data."""
_SHARED = sys.stdlib_module_names - {"builtins", "collections", "types", "typing", "abc", "enum", "argparse"}
"""Python's own libraries but for those whose classes hold values alone. What they make - a queue, a thread, a file, a
logger - somebody else may be at meanwhile: it is left, and so is what is built on it or has a lock."""
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)


class Held:
    """What values hold, that included which those hold in turn. ``steps`` give all of it back: what is another by then
    is written, nothing else. Parameters keep the values that they have."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self._seen: dict[int, Any] = {}  # with the values, which else could end and leave their ids to others
        self._kinds: dict[type, _Kind] = {}

    def note(self, values: Iterable[Any]) -> None:
        """Take down what ``values`` hold now."""
        waiting, seen, kinds = [*values], self._seen, self._kinds
        while waiting:
            value = waiting.pop()
            kind = kinds.get(type(value)) or kinds.setdefault(type(value), _Kind(type(value)))
            if kind.holds and id(value) not in seen:
                seen[id(value)] = value
                waiting += kind.noted(value, self.steps)

    def leave(self, value: Any) -> None:
        """Take nothing down of ``value`` itself."""
        self._seen[id(value)] = value


@contextlib.contextmanager
def ending_in(steps: Iterable[Callable[[], object]]) -> Iterator[None]:
    """Do ``every`` one of ``steps`` at the end of the block, whatever happens."""
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


class _Kind:
    """What instances of a class hold."""

    def __init__(self, cls: type) -> None:
        made_by = [str(base.__module__).partition(".")[0] for base in cls.__mro__]
        self.is_module = issubclass(cls, nn.Module)
        self.parts = _PARTS.get(cls)
        self.of_class = [*_of_class(cls)] if self.is_module else []
        self.restoring = next((make for one, make in _RESTORING.items() if issubclass(cls, one)), None)
        left = issubclass(cls, _LEFT) or not (self.is_module or _SHARED.isdisjoint(made_by))
        self.base = None if left else next((one for one in _CONTAINERS if issubclass(cls, one)), None)
        foreign = made_by[0] in _LIBRARIES and not self.is_module
        self.has_attributes = not (left or foreign or self.restoring or cls in _CONTAINERS)
        slotted = [vars(base) for base in cls.__mro__ if "__slots__" in vars(base)] if self.has_attributes else []
        self.slots = [one for own in slotted for one in own.values() if isinstance(one, _SLOT)]
        self.holds = bool(self.parts or self.restoring or self.base or self.has_attributes)

    def noted(self, value: Any, steps: list[_Step]) -> Iterable[Any]:
        """What ``value`` holds; ``steps`` get what gives it back."""
        if self.parts is not None:
            return self.parts(value, steps)
        if self.restoring is not None:
            steps.append(self.restoring(value))
            return ()
        inner: Iterable[Any] = ()
        if self.base is not None:
            keys, inner = _read(self.base, value)
            steps.append(partial(_refill, self.base, value, keys, inner))
        if not self.has_attributes:
            return inner
        own, slots = _attributes_of(value), {slot: _in_slot(slot, value) for slot in self.slots}
        before = dict(own)
        held = (*before.values(), *slots.values())
        if not self.is_module and any(isinstance(one, _LOCKS) for one in held):
            return ()
        steps.append(partial(_restore_attributes, own, before))
        if slots:
            steps.append(partial(_restore_slots, value, slots))
        return (*inner, *held, *self.of_class)


_EMPTY = object()
"""In the place of what a slot or a cell does not hold."""


def _of_class(cls: type) -> Iterator[Any]:
    """What a class of modules and its bases hold for all of them that code can change: containers, tensors, caches."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] not in (*_LIBRARIES, "builtins"):
            for name, value in vars(base).items():
                if not name.startswith("__") and isinstance(value, (*_CONTAINERS, *_RESTORING)):
                    yield value


def _parts_of_function(function: types.FunctionType, steps: list[_Step]) -> Iterable[Any]:
    """What it has of the functions around it, its defaults and attributes, and what global names it reads hold as
    containers and tensors; of a library's function nothing."""
    if str(function.__module__).partition(".")[0] in (*_LIBRARIES, *_SHARED, "normswap"):
        return ()
    cells, own = function.__closure__ or (), vars(function)
    before, attributes = [_in_slot(_CONTENT, cell) for cell in cells], dict(own)
    steps += [partial(_restore_slots, cell, {_CONTENT: one}) for cell, one in zip(cells, before, strict=True)]
    steps.append(partial(_restore_attributes, own, attributes))
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    outer = [value for value in named if isinstance(value, (*_CONTAINERS, *_RESTORING))]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return *before, *outer, *defaults, *attributes.values()


_PARTS: Mapping[type, Callable[[Any, list[_Step]], Iterable[Any]]] = {
    types.FunctionType: _parts_of_function,
    types.MethodType: lambda method, steps: (method.__self__, method.__func__),
    partial: lambda call, steps: (call.func, *call.args, *call.keywords.values()),
}
"""What is called, by its class, and what gives what it holds."""


_CONTENT: Any = types.CellType.cell_contents
"""What a cell holds is a slot of it."""


def _in_slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except (AttributeError, ValueError):
        return _EMPTY


def _restore_slots(value: Any, before: Mapping[Any, Any]) -> None:
    for slot, one in before.items():
        if _in_slot(slot, value) is one:
            continue
        if one is _EMPTY:
            slot.__delete__(value)
        else:
            slot.__set__(value, one)


def _attributes_of(value: Any) -> dict[str, Any]:
    """Its ``__dict__``, for which no code of a proxy is run; none where it has slots alone."""
    try:
        return object.__getattribute__(value, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return {}


def held_by(value: Any) -> list[Any]:
    """What its attributes and slots hold, for which no code of its class is run."""
    slots = [one for cls in type(value).__mro__ for one in vars(cls).values() if isinstance(one, _SLOT)]
    return [*_attributes_of(value).values(), *(_in_slot(slot, value) for slot in slots)]


_SLOT = types.MemberDescriptorType


def _read(base: Any, value: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The keys, of what has keys, and the values."""
    if not base.__len__(value):
        return (), ()
    found = [*base.__iter__(value)]
    return (found, [*base.values(value)]) if issubclass(base, dict) else ((), found)


def _refill(base: Any, value: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
    if all(map(_alike, _read(base, value), (keys, values))):
        return
    base.clear(value)
    if issubclass(base, dict):
        for key, one in zip(keys, values, strict=True):
            base.__setitem__(value, key, one)
    else:
        (base.update if base is set else base.extend)(value, values)


def _alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _restore_attributes(own: dict[str, Any], before: dict[str, Any]) -> None:
    for name in [name for name in own if name not in before]:
        del own[name]
    own.update(before)


def _restoring_values(tensor: Tensor) -> _Step:
    if isinstance(tensor, nn.Parameter):
        return lambda: None
    return partial(_restore_values, tensor, tensor.detach().clone())


@torch.no_grad()
def _restore_values(tensor: Tensor, value: Tensor) -> None:
    if tensor.dtype is not value.dtype or not (tensor.is_nested or tensor.shape == value.shape):
        tensor.data = value
    elif not same_values(tensor, value):
        tensor.copy_(value)


def _restore_array(one: Any, value: Any) -> None:
    if one.shape != value.shape:
        one.resize(value.shape, refcheck=False)
    if one.tobytes() != value.tobytes():
        one[...] = value


def _restore_elements(value: Any, before: Any) -> None:
    if value != before:
        value[:] = before


def _restoring_cache(function: Any) -> _Step:
    return partial(_clear_if_filled, function, function.cache_info().misses)


def _clear_if_filled(function: Any, misses: int) -> None:
    if function.cache_info().misses != misses:  # what it has learned without gradients, say
        function.cache_clear()


def _restoring_state(generator: Any) -> _Step:
    return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)


_RESTORING: Mapping[type, Callable[[Any], _Step]] = {
    Tensor: _restoring_values,
    np.memmap: lambda one: lambda: None,  # a file, which may be larger than memory
    np.ndarray: lambda one: partial(_restore_array, one, one.copy()),
    bytearray: lambda value: partial(_restore_elements, value, bytearray(value)),
    array.array: lambda value: partial(_restore_elements, value, value[:]),
    torch.Generator: lambda generator: partial(generator.set_state, generator.get_state()),
    random.SystemRandom: lambda generator: lambda: None,
    random.Random: lambda generator: partial(generator.setstate, generator.getstate()),
    np.random.RandomState: lambda generator: partial(generator.set_state, generator.get_state()),
    np.random.Generator: _restoring_state,
    _lru_cache_wrapper: _restoring_cache,
}


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether the elements of two tensors of one layout are equal, NaN to NaN."""
    if one.is_meta:
        return True
    mine, others = strided(one), strided(other)
    if [tensor.shape for tensor in mine] != [tensor.shape for tensor in others]:
        return False
    return all(bool(((p == q) | (p.isnan() & q.isnan())).all()) for p, q in zip(mine, others, strict=True))


def strided(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that a sparse, quantized or nested one is made of."""
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.is_quantized:
        return (tensor.int_repr(),)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.to_dense(),)
