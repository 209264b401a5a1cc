"""Whatever is called, and at whatever step it is stopped: the model is as it was, or the call is done and nothing but
what it is for has changed.

A step is a call of one of our functions, or an operation of torch. Stopped at are the first call of every function that
does more than read the model, and steps at equal distances; NORMSWAP_EVERY_STEP=1 stops at every one (twenty minutes).
"""

from __future__ import annotations

import functools
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import Every, randomised
from torch import nn
from traces import Stop, Trace, cluttered, raising_at_call, raising_at_op

import normswap
from normswap import modules

STRIDE = 1 if os.environ.get("NORMSWAP_EVERY_STEP") else 149

SITES = ("norm", "projection", "projection.bn", "l1", "group", "batch")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a few elements at a time
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)


def x() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def optimized() -> nn.Module:
    return normswap.optimize(cluttered(), x(), inplace=True)


def optimize_in_place(model: nn.Module) -> None:
    normswap.optimize(model, x(), inplace=True)


def optimize_a_copy(model: nn.Module) -> None:
    normswap.optimize(model, x())


def optimize_without_inputs(model: nn.Module) -> None:
    normswap.optimize(model, inplace=True)


def apply_in_place(model: nn.Module) -> None:
    normswap.apply(model, PLAN, inplace=True)


def validate(model: nn.Module) -> None:
    normswap.validate(model, x())


def disable(model: nn.Module) -> None:
    with normswap.disabled(model):
        pass


PLAN = normswap.plan(cluttered())

ACTIONS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], bool]] = {
    # name: (the model before, what is done, whether its classes are other ones afterwards)
    "optimize in place": (cluttered, optimize_in_place, True),
    "optimize a copy": (cluttered, optimize_a_copy, False),
    "optimize without inputs": (cluttered, optimize_without_inputs, True),
    "apply in place": (cluttered, apply_in_place, True),
    "revert": (optimized, normswap.revert, True),
    "validate": (optimized, validate, False),
    "disabled": (optimized, disable, False),
}
actions = pytest.mark.parametrize("name", ACTIONS)


@actions
def test_what_is_done_leaves_nothing_else(name: str) -> None:
    make, act, changes_classes = ACTIONS[name]
    model = make()
    before = Trace(model)
    act(model)
    before.assert_same(model, classes=not changes_classes)
    assert (before.classes != [type(module) for module in model.modules()]) == changes_classes


def chosen(called: list[str] | int) -> list[int]:
    """The steps to stop at."""
    if isinstance(called, int):
        return list(range(0, called, STRIDE))
    first = {name: i for i, name in reversed([*enumerate(called)]) if not name.startswith(("rules", "tracing"))}
    return sorted({*range(0, len(called), STRIDE), *first.values()})


def stop_everywhere(name: str, raising: Any) -> None:
    """Stop the action at each step chosen and see that the model is as before or, where the interpreter swallowed the
    exception (in a generator that was being closed), done."""
    make, act, _ = ACTIONS[name]
    known = make()  # while it lives, what the first call makes - classes, compiled forwards - is there for the next
    act(known)
    model, done = make(), 0
    with raising(10**9) as told:
        act(model)
    steps = chosen(told if isinstance(told, list) else told.seen)
    assert len(steps) > 5
    model = make()
    for step in steps:
        before = Trace(model)
        try:
            with raising(step):
                act(model)
        except Stop as stop:
            try:
                before.assert_same(model)
            except AssertionError as error:
                pytest.fail(f"stopped at step {step}, {stop}: {error}")
        else:
            before.assert_same(model, classes=False)
            model, done = make(), done + 1
    assert done < 0.1 * len(steps)


@pytest.fixture
def few_objects() -> Iterator[None]:
    """A copy of a model that trains asks every object whether it is its optimizer: not those of other tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("few_objects")
@actions
def test_stopped_at_any_call_of_ours(name: str) -> None:
    stop_everywhere(name, raising_at_call)


@pytest.mark.parametrize("name", ["optimize in place", "optimize a copy", "validate"])
def test_stopped_at_any_operation(name: str) -> None:
    stop_everywhere(name, raising_at_op)


def test_a_failure_of_ours_alone_puts_that_site_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in a swapped site is no reason to stop: the original runs there."""

    def fail(self: nn.LayerNorm, input: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(modules.LayerNorm, "forward", fail)
    model = cluttered()
    before = Trace(model)
    normswap.optimize(model, x(), inplace=True)
    before.assert_same(model, classes=False)
    assert normswap.report(model).swapped == SITES[1:]


def test_every_kind_without_a_trace() -> None:
    model = randomised(Every()).train()
    inputs = torch.randn(8, 6, 5)
    before = Trace(model)
    normswap.optimize(model, inputs, inplace=True)
    before.assert_same(model, classes=False)
    normswap.revert(model)
    before.assert_same(model)


class Codebook(nn.Module):
    """Writes into its parameters, as an exponential moving average of codes does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.codes, self.frozen = nn.LayerNorm(6), nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm(x) + self.codes
        self.codes.data.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        self.frozen.copy_(out.detach().mean(0)) if not self.frozen.requires_grad else None
        return out


@pytest.mark.filterwarnings("ignore:.*returns a copy.*")
@pytest.mark.parametrize("training", [False, True])
def test_what_a_forward_writes_into_its_parameters_is_not_in_a_copy(training: bool) -> None:
    model = Codebook().train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    swapped = normswap.optimize(model, torch.randn(4, 6))
    for one in (model, swapped):
        assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())
    assert normswap.report(swapped).swapped == ("norm",)
    x = torch.randn(4, 6)
    torch.testing.assert_close(swapped(x), model(x))
    assert torch.equal(swapped.codes, model.codes) and not torch.equal(model.codes, before["codes"])


class Kept:
    """Keys and values of the calls so far."""

    def __init__(self) -> None:
        self.all: list[torch.Tensor] = []


class Remembering(nn.Module):
    def __init__(self, own: Kept | None) -> None:
        super().__init__()
        self.norm, self.own, self.calls = nn.LayerNorm(6), own, torch.zeros(())
        self.register_buffer("edges", torch.eye(4).to_sparse())

    def forward(self, x: torch.Tensor, kept: Kept | None = None) -> torch.Tensor:
        self.calls += 1
        (kept or self.own).all.append(torch.sparse.mm(self.edges, self.norm(x)))  # type: ignore[union-attr]
        return torch.cat((kept or self.own).all) * self.calls  # type: ignore[union-attr]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("inplace", (False, True))
@pytest.mark.parametrize("given", (False, True))
def test_a_cache_of_the_models_or_in_its_inputs_is_as_before(given: bool, inplace: bool) -> None:
    kept = Kept()
    model = Remembering(None if given else kept).eval()
    swapped = normswap.optimize(model, torch.randn(4, 6), {"kept": kept} if given else None, inplace=inplace)
    assert normswap.report(swapped).swapped == ("norm",) and normswap.report(swapped).model["passed"]  # type: ignore[index]
    for one in (kept, kept if given else swapped.own):
        assert not one.all  # type: ignore[union-attr]
    assert model.calls == swapped.calls == 0


class Noting(nn.Module):
    """Keeps what it made in a list of its class, and a factor, once it is known."""

    losses: list[torch.Tensor] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gain = nn.LayerNorm(6), nn.Parameter(torch.ones(6))

    @functools.lru_cache  # noqa: B019
    def factor(self) -> torch.Tensor:
        return self.gain.exp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm(x) * self.factor()
        self.losses.append(out.mean())
        return out


class Seen:
    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []

    def hook(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.outputs.append(output)


OUTPUTS: list[torch.Tensor] = []


@pytest.mark.parametrize("inplace", (False, True))
def test_what_hooks_and_classes_keep_is_as_before(inplace: bool) -> None:
    model, seen, taken, count = Noting(), Seen(), dict[str, list[torch.Tensor]](), 0

    def counting(*_: Any) -> None:
        nonlocal count
        count += 1

    def keeping(into: dict[str, list[torch.Tensor]], module: nn.Module, args: Any, output: torch.Tensor) -> None:
        into.setdefault("norm", []).append(output)

    model.norm.register_forward_hook(seen.hook)
    model.norm.register_forward_hook(functools.partial(keeping, taken))
    model.norm.register_forward_hook(counting)
    model.norm.register_forward_hook(lambda module, args, output: OUTPUTS.append(output))
    swapped = normswap.optimize(model, torch.randn(4, 6), inplace=inplace, min_speedup=None)
    assert normswap.report(swapped).swapped == ("norm",)
    assert (Noting.losses, seen.outputs, taken, count, OUTPUTS) == ([], [], {}, 0, [])
    swapped(torch.randn(4, 6)).sum().backward()  # not by a factor of the proof, which learns nothing
    assert isinstance(swapped.gain.grad, torch.Tensor) and count == len(OUTPUTS) == len(Noting.losses) == 1
    OUTPUTS.clear(), Noting.losses.clear()
