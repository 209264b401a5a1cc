"""Copies that share nothing that can be changed, and what is put back at the end of a block."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from normswap.untouched import detached_copy, every, is_sharded, preserved, set_in


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
