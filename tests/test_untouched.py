"""Copies that share nothing that can be changed, and what is put back at the end of a block."""

from __future__ import annotations

import contextlib
import logging.handlers
import pickle
import queue
import random
import sys
import threading
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from normswap.held import every
from normswap.untouched import detached_copy, is_sharded, preserved, set_in


class Holding(nn.Module):
    """What a module may hold beside parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.child, self.absent = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_module("absent", None)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("none", None)
        self.webhooks, self.order = ["a"], OrderedDict(a=1)


@pytest.mark.parametrize("dtype", (None, torch.float64))
def test_a_copy_holds_the_same_and_no_hooks(dtype: torch.dtype | None) -> None:
    module = Holding()
    module.register_forward_hook(lambda *_: None)
    copied: Any = detached_copy(module, Holding, dtype)
    assert not copied._forward_hooks and module._forward_hooks
    assert copied.webhooks is module.webhooks and copied.order is module.order
    assert copied.absent is None and copied.none is None and type(copied.child) is nn.Linear
    wanted = dtype or torch.float32
    assert copied.child.weight.dtype is copied.mean.dtype is wanted and copied.count.dtype is torch.long
    assert copied.child.weight.is_leaf and copied.mean is not module.mean


class Frozen(nn.LayerNorm):
    """Lets nobody set anything once it is made, and has no length."""

    def __init__(self) -> None:
        super().__init__(2)
        self.__dict__["made"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "made" in self.__dict__:
            raise AttributeError(name)
        super().__setattr__(name, value)

    def __len__(self) -> int:
        return 0


def test_a_copy_of_what_holds_itself_and_may_not_be_written_to() -> None:
    module = Frozen()
    module._modules["parent"] = nn.Sequential(module, nn.Linear(2, 2))
    copied: Any = detached_copy(module, Frozen)
    assert copied is not module and type(copied) is Frozen
    assert copied._modules["parent"][0] is copied and copied._modules["parent"][1] is not module._modules["parent"][1]


def test_every_step_is_done_and_the_first_error_raised() -> None:
    done = []

    def failing(error: BaseException) -> None:
        done.append(error)
        raise error

    first, second = KeyError("first"), KeyboardInterrupt()
    with pytest.raises(KeyError) as raised:
        every([lambda: failing(first), lambda: failing(second), lambda: done.append(first)])
    assert raised.value is first and done == [first, second, first]


def test_buffers_that_were_not_changed_are_not_written() -> None:
    model = Holding()
    model.register_buffer("nowhere", torch.zeros(2, device="meta"))
    versions = model.mean._version, model.count._version
    with preserved(model):
        model.count += 1
    assert (model.mean._version, model.count._version) == (versions[0], versions[1] + 2) and model.count == 0


def test_gradients_of_what_is_computed_are_put_back_where_they_are_kept() -> None:
    model = nn.Linear(2, 2)
    for keep in (True, False):
        weight: Any = torch.ones(2, 2, requires_grad=True) * 2
        if keep:
            weight.retain_grad()
        model._parameters["weight"] = weight
        with preserved(model):
            model(torch.ones(1, 2)).sum().backward()
        assert model.bias.grad is None and (not keep or weight.grad is None)


@pytest.mark.parametrize(("initialized", "devices"), ((True, [3]), (False, [])))
def test_the_present_gpus_generator_is_put_back_where_a_model_is_on_none(
    initialized: bool, devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, real = [], torch.random.fork_rng
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: seen.append(devices) or real([]))
    with preserved(nn.Linear(2, 2)):
        pass
    assert seen == [devices]


@pytest.mark.parametrize("half", (False, True))
def test_nothing_is_sharded_where_torch_distributed_is_not_loaded(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or another thread is just importing it."""
    for name in ("torch.distributed.tensor", "torch.distributed.fsdp"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        if half:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    model = nn.Linear(2, 2)
    with preserved(model):
        assert not is_sharded(model)


def test_names_are_set_for_a_block() -> None:
    names = {"one": 1, "two": 2}
    with contextlib.suppress(KeyError), set_in(names, {"two": 3, "three": 4}):
        assert names == {"one": 1, "two": 3, "three": 4}
        del names["three"]
        raise KeyError
    assert [*names.items()] == [("one", 1), ("two", 2)]


class Cache:
    """An object of a model's own."""

    def __init__(self) -> None:
        self.kept, self.count, self.deeper = [torch.zeros(2)], 0, {"more": [{"set": {1}}]}


class Words(OrderedDict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("made once")


def fill(cache: Cache) -> None:
    cache.kept[0] += 1
    cache.kept.append(torch.ones(1))
    cache.count += 1
    cache.deeper["more"][0]["set"].add(2)
    del cache.deeper["more"][0]
    cache.new = cache  # type: ignore[attr-defined]


def words() -> Words:
    made = Words()
    OrderedDict.__setitem__(made, "one", [1])
    return made


def spoil(words: Words) -> None:
    words["one"].append(2)
    words.clear()


def ring() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


class Slotted:
    __slots__ = ("absent", "deeper", "steps")

    def __init__(self) -> None:
        self.steps, self.deeper = 0, [1]

    def step(self) -> None:
        self.steps += 1
        self.deeper.append(2)
        self.absent = self


class SlottedToo(Slotted):
    """With a ``__dict__``, and a slot of its own."""

    __slots__ = ("__dict__", "last")

    def step(self) -> None:
        super().step()
        self.last = self.steps


@dataclass(slots=True, frozen=True)
class FrozenSlots:
    kept: list[int]


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "nested": (lambda: {"a": [1, ([2],)]}, lambda v: (v["a"][1][0].append(3), v.update(b=1))),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda v: v.append(3)),
    "defaultdict": (lambda: defaultdict(int, a=1), lambda v: v["b"]),
    "a subclass that refuses": (words, spoil),
    "object": (Cache, fill),
    "itself": (lambda: [Cache()], lambda v: (fill(v[0]), v.append(v))),
    "itself from the start": (ring, lambda v: v.append(1)),
    "array": (lambda: np.zeros(2), lambda v: v.__iadd__(1)),
    "resized array": (lambda: np.arange(6.0), lambda v: (v.__iadd__(1), v.resize((4, 3), refcheck=False))),
    "array of another shape": (lambda: np.arange(6.0)[:], lambda v: v.resize((2, 3), refcheck=False)),
    "bytes": (lambda: bytearray(b"ab"), lambda v: (v.append(3), v.__setitem__(0, 1))),
    "array of Python's": (lambda: array("i", [1, 2]), lambda v: (v.pop(), v.__setitem__(0, 5))),
    "slots": (Slotted, lambda v: v.step()),
    "slots and attributes": (SlottedToo, lambda v: (v.step(), setattr(v, "more", 1))),
    "slots that are frozen": (
        lambda: FrozenSlots([1]),
        lambda v: (v.kept.append(2), object.__setattr__(v, "kept", [3])),
    ),
    "generator": (lambda: torch.Generator().manual_seed(1), lambda v: torch.rand(1, generator=v)),
    "Python's generator": (lambda: random.Random(1), lambda v: v.random()),
    "NumPy's generator": (lambda: np.random.default_rng(1), lambda v: v.random()),
    "NumPy's old generator": (lambda: np.random.RandomState(1), lambda v: v.rand()),
}


def in_slots(value: Any) -> Any:
    names = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ()) if name != "__dict__"]
    return {name: getattr(value, name, "empty") for name in names}, getattr(value, "__dict__", None)


def large(make: Callable[..., torch.Tensor]) -> torch.Tensor:
    """One value in 2**40."""
    compressed = torch.ones(2**20 + 1, dtype=torch.long)
    compressed[0] = 0
    return make(compressed, torch.tensor([1]), torch.tensor([1.0]), size=(2**20, 2**20))


TENSORS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[Any], Any]]] = {
    "tensor": (lambda: torch.zeros(3), lambda v: v.add_(1)),
    "another dtype": (lambda: torch.zeros(3), lambda v: setattr(v, "data", v.data.double())),
    "resized": (lambda: torch.zeros(3), lambda v: v.resize_(5)),
    "sparse": (lambda: torch.eye(3).to_sparse(), lambda v: v.add_(torch.ones(3, 3).to_sparse())),
    "sparse, too large": (lambda: torch.sparse_coo_tensor([[1]], [1.0], (2**44,)), lambda v: v._values().mul_(2)),
    "sparse rows, too large": (lambda: large(torch.sparse_csr_tensor), lambda v: v.values().mul_(2)),
    "sparse columns, too large": (lambda: large(torch.sparse_csc_tensor), lambda v: v.values().mul_(2)),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), lambda v: v.mul_(2)),
    "sparse columns": (lambda: torch.eye(3).to_sparse_csc(), lambda v: v.values().mul_(2)),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), lambda v: v.mul_(2)),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), lambda v: v.mul_(2)),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), lambda v: v.fill_(2.0)),
}


def shown(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return str(value.get_state().tolist())
    return str(pickle.dumps(value) if type(value).__module__ == "numpy.random._generator" else shown_by(value))


def shown_by(value: Any) -> Any:
    state = getattr(value, "getstate", getattr(value, "get_state", None))
    if state is not None:
        return state()
    if isinstance(value, Slotted | FrozenSlots):
        return in_slots(value)
    return (vars(value), value.deeper) if isinstance(value, Cache) else value


@pytest.mark.parametrize("hidden", (False, True))
@pytest.mark.parametrize("name", HELD)
def test_what_an_attribute_holds_is_put_back(name: str, hidden: bool) -> None:
    model = module = Holding()
    if hidden:
        module = Holding()
        model.hidden = [module]
    make, change = HELD[name]
    module.held = value = make()
    before = shown(value)
    with preserved(model):
        change(value)
        assert shown(value) != before
        module.held = None
    assert module.held is value and shown(value) == before


@pytest.mark.filterwarnings("ignore")  # sparse, quantized and nested tensors all announce something
@pytest.mark.parametrize("buffer", (False, True))
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_any_layout_is_put_back(name: str, buffer: bool) -> None:
    make, change = TENSORS[name]
    model, value = Holding(), make()
    if buffer:
        model.register_buffer("held", value)
    else:
        model.held = value
    before = shown(value)
    with preserved(model):
        change(value)
        assert shown(value) != before
        model.held = None
    assert model.held is value and shown(value) == before


def test_what_is_not_the_models_is_left() -> None:
    """A parameter's values, what a library that runs the model has, classes, and what was not changed."""
    model: Any = Holding()
    model.optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model.cls, model.still = Cache, torch.zeros(2)
    with preserved(model):
        model.child.weight.data.fill_(3)
        model.optimizer.param_groups[0]["lr"] = 0.2
        Cache.note = 1  # type: ignore[attr-defined]
    assert (model.child.weight == 3).all() and model.optimizer.param_groups[0]["lr"] == 0.2 and Cache.note == 1  # type: ignore[attr-defined]
    assert model.still._version == 0


class Locked:
    def __init__(self) -> None:
        self.lock, self.count = threading.Lock(), 0


class Worker(threading.Thread):
    count = 0


def test_what_others_may_be_at_is_left(tmp_path: Path) -> None:
    """Threads put into a queue, count and log while the model runs: none of that is taken back. A file is not read."""
    model: Any = Holding()
    model.queue, model.locked, model.worker = queue.Queue(), Locked(), Worker()
    model.log = logging.Logger("model")
    model.log.addHandler(handler := logging.handlers.BufferingHandler(10))
    model.file = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(2,))
    with preserved(model):
        model.queue.put(1)
        model.locked.count = model.worker.count = 1
        model.log.warning("said")
        model.file[0] = 1.0
    assert model.queue.qsize() == model.locked.count == model.worker.count == len(handler.buffer) == model.file[0] == 1
    assert model.queue.unfinished_tasks == 1


class Mixed(nn.Module, contextlib.ContextDecorator):
    """A module, though one of Python's own classes is among its bases."""


class Rows(list, logging.Handler):  # type: ignore[type-arg]
    __hash__ = logging.Handler.__hash__  # type: ignore[assignment]

    def __init__(self) -> None:
        logging.Handler.__init__(self)


class Batch(dict):  # type: ignore[type-arg]
    """A library's."""

    __module__ = "lightning.pytorch"


def test_modules_are_put_back_whatever_they_are_besides() -> None:
    """What a plain one of PyTorch's was given, one of Python's own bases, and one that has a lock."""
    model: Any = Holding()
    model.mixed, model.locked = Mixed(), nn.Module()
    model.locked.lock, model.locked.count = threading.Lock(), 0
    with preserved(model):
        model.child.note = model.mixed.note = model.locked.count = 1
    assert not hasattr(model.child, "note") and not hasattr(model.mixed, "note") and model.locked.count == 0


def test_a_container_of_others_is_put_back_as_far_as_it_is_the_models() -> None:
    model: Any = Holding()
    model.rows, model.batch = Rows(), Batch(a=1)
    model.batch.device = "cpu"
    with preserved(model):
        model.rows.append(1)
        model.batch["a"], model.batch.device = 2, "cuda"
    assert model.rows == [1]  # of a handler, which others may be at
    assert model.batch == {"a": 1} and model.batch.device == "cuda"


def test_what_is_the_same_is_not_written() -> None:
    model: Any = Holding()
    model.recent, model.table = deque([1, 2]), np.zeros(2)
    model.table.setflags(write=False)
    following = iter(model.recent)
    with preserved(model):
        assert next(following) == 1
    assert next(following) == 2  # which it refuses once the deque was written to


def test_who_learns_is_put_back() -> None:
    model = Holding()
    model.child.bias.requires_grad_(False)
    with preserved(model):
        model.child.weight.requires_grad_(False)
        model.child.bias.requires_grad_(True)
    assert model.child.weight.requires_grad and not model.child.bias.requires_grad
