"""How convolutions are computed is chosen by what is right and fastest on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from convolution_models import Block, bn, conv, drawn, regions_in, residual, written
from torch import nn

from normswap import finding
from normswap.installed import site_match
from normswap.plans import Plan
from normswap.timing import decide_foldings, foldings
from normswap.timing.candidates import Use
from normswap.timing.clock import Budget, Cost, Machine, OutOfTime
from normswap.timing.model import Compared

IMAGE = (2, 6, 9, 8)


def made() -> nn.Module:
    """Two blocks alike, one with a residual, a convolution without an activation, and one that cuDNN does not fuse."""
    blocks = [Block(conv(), bn()), Block(conv(), bn()), written(residual)(conv(), bn())]
    last = nn.Sequential(conv(kernel=1, padding=0), bn()), nn.Sequential(conv(groups=6), bn(), nn.SiLU())
    return nn.Sequential(*blocks, *last)


def ways_of(use: Use) -> tuple[str, ...]:
    """What is timed of it, in order."""
    (ways, _), *_ = use.key  # type: ignore[misc]
    return ways


def timed_as(monkeypatch: pytest.MonkeyPatch, us: dict[str, float]) -> list[Any]:
    """Every way takes what ``us`` says, 9 where it says nothing; the calls that were timed."""
    calls: list[Any] = []

    def costs(use: Use, budget: Budget) -> list[Cost]:
        calls.append(use)
        return [Cost(us.get(way, 9.0), us.get(way, 9.0)) for way in ways_of(use)]

    monkeypatch.setattr(foldings, "time_use", costs)
    monkeypatch.setattr(foldings, "machine_for", lambda devices: Machine() if devices else None)
    return calls


def clock(monkeypatch: pytest.MonkeyPatch, model: nn.Module, us: Callable[[dict[str, str]], float]) -> list[Any]:
    """A run of ``model`` takes ``us`` of how the convolutions of its children are computed: by their names, the way, ""
    where it is left alone. What was timed."""
    tried: list[Any] = []

    def compare(machine: Any, ways: Any) -> Compared:
        for within, run in ways:
            with within():
                run()
                found = {name: site_match(child) for name, child in model.named_children()}
                regions = {name: [*map(dict, match.attributes["regions"])] for name, match in found.items() if match}
                tried.append({name: regions[name][0]["folding"] if name in regions else "" for name in found})
        return Compared(tuple(us(one) for one in tried), 0.0)

    monkeypatch.setattr(foldings, "compare", compare)
    return tried


def decided(model: nn.Module, timed: bool = True, x: Any = None) -> tuple[Plan, Iterator[str]]:
    given = torch.randn(IMAGE) if x is None else x
    plan = decide_foldings(model, finding.plan(model, undecided=True), lambda: model(given), timed=timed)
    names = [swap.site.name for swap in plan.swaps]
    return plan, [f"{name}: {r.name} {r.folding}".strip() for name in names for r in regions_in(plan, name)]


def test_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = drawn(made)
    calls = timed_as(monkeypatch, {"folded": 1.0})
    _, found = decided(model)
    names = ("conv + bn + act", "conv + bn + act", "conv + bn + residual + act", "0 + 1", "0 + 1 + 2")
    assert found == [f"{index}: {name} folded" for index, name in enumerate(names)]
    assert len(calls) == 4  # the first two are alike


def test_apart_loses_the_convolution_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_as(monkeypatch, {"apart": 1.0, "statements": 2.0})
    _, found = decided(drawn(made))
    assert found == ["0: bn + act", "1: bn + act", "2: bn + residual + act", "4: 1 + 2"]


def test_statements_lose_the_region(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_as(monkeypatch, {"statements": 1.0})
    assert decided(drawn(made))[0].swaps == ()


@pytest.mark.parametrize("fastest", ("folded", ""))
def test_the_whole_model_says_whether_the_device_or_the_host_is_served(
    monkeypatch: pytest.MonkeyPatch, fastest: str
) -> None:
    """``folded`` costs the device 20 us and the host 20, every other way the device 10 and the host 40."""
    timed_as(monkeypatch, {})
    ways = {"folded": Cost(20.0, 20.0), "apart": Cost(10.0, 40.0), "statements": Cost(10.0, 40.0)}
    monkeypatch.setattr(foldings, "time_use", lambda use, _: [ways[way] for way in ways_of(use)])
    model = drawn(lambda: nn.Sequential(Block(conv(), bn())))
    tried = clock(monkeypatch, model, lambda way: 1.0 if way["0"] == fastest else 2.0)
    _, found = decided(model)
    assert tried == [{"0": ""}, {"0": "folded"}]
    assert found == (["0: conv + bn + act folded"] if fastest else ["0: bn + act"])


def test_each_may_serve_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two blocks gains the host 20 us for 2 of the device's, the other for 200: between the two views of all
    there is one of each."""
    timed_as(monkeypatch, {})

    def by_residual(use: Use, budget: Budget) -> list[Cost]:
        folded = Cost(210.0 if "residual" in repr(use.key) else 12.0, 10.0)
        return [folded if way == "folded" else Cost(10.0, 30.0) for way in ways_of(use)]

    monkeypatch.setattr(foldings, "time_use", by_residual)
    model = drawn(lambda: nn.Sequential(Block(conv(), bn()), written(residual)(conv(), bn())))
    tried = clock(monkeypatch, model, lambda way: 1.0 if (way["0"], way["1"]) == ("folded", "") else 2.0)
    _, found = decided(model)
    assert tried == [{"0": "", "1": ""}, {"0": "folded", "1": ""}, {"0": "folded", "1": "folded"}]
    assert found == ["0: conv + bn + act folded", "1: bn + residual + act"]
    assert all(site_match(child) is None for child in model)


def test_what_does_not_run_as_a_whole_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each convolution was compared by itself."""
    for works, chosen in (("none", ["0: conv + bn + act "]), ("folded", ["0: conv + bn + act folded"])):
        timed_as(monkeypatch, {})
        ways = {"folded": Cost(20.0, 20.0), "apart": Cost(10.0, 40.0), "statements": Cost(10.0, 40.0)}
        monkeypatch.setattr(foldings, "time_use", lambda use, _, ways=ways: [ways[way] for way in ways_of(use)])
        monkeypatch.setattr(foldings, "by_default", lambda region, owner: replace(region, folding=""))
        model = drawn(lambda: nn.Sequential(Block(conv(), bn())))
        clock(monkeypatch, model, lambda way: 1.0)
        given = torch.randn(IMAGE)

        def run(model: nn.Module = model, given: Any = given, works: str = works) -> Any:
            match = site_match(model[0])
            if match is not None and match.attributes["regions"][0]["folding"] != works:
                raise RuntimeError("no plan")
            return model(given)

        with pytest.warns(UserWarning, match="is not taken, it raised RuntimeError: no plan"):
            plan = decide_foldings(model, finding.plan(model, undecided=True), run, timed=True)
        assert [f"0: {r.name} {r.folding}" for r in regions_in(plan, "0")] == chosen


def test_of_the_alike_the_same_one_is_taken_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for noise in (0.99, 1.01):
        timed_as(monkeypatch, {"folded": 1.0, "apart": noise, "statements": noise})
        assert all(line.endswith("folded") for line in decided(drawn(made))[1])


def test_what_is_not_right_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    real = foldings.compare_region

    def wrong(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(compiled, *args, **kwargs)
        return found if compiled.region.has("residual") else type(found)(problem="wrong")

    monkeypatch.setattr(foldings, "compare_region", wrong)
    timed_as(monkeypatch, {"folded": 1.0, "apart": 2.0})
    _, found = decided(drawn(made))
    assert found == ["0: bn + act", "1: bn + act", "2: conv + bn + residual + act folded", "4: 1 + 2"]


def test_untimed_or_unreached_it_is_the_default() -> None:
    model = drawn(made)
    plan, found = decided(model, timed=False)
    assert found == ["0: bn + act", "1: bn + act", "2: bn + residual + act", "4: 1 + 2"]  # no cuDNN here: not right
    fused = ["conv + bn + act fused", "conv + bn + act fused", "conv + bn + residual + act fused"]
    for run in (None, lambda: None):
        plan = decide_foldings(model, finding.plan(model, undecided=True), run, timed=True)
        assert [f"{r.name} {r.folding}" for n in "012" for r in regions_in(plan, n)] == fused
        assert [r.name for r in regions_in(plan, "4")] == ["1 + 2"] and not regions_in(plan, "3")


def test_a_model_that_learns_calls_its_convolutions() -> None:
    model = drawn(made)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    plan = decide_foldings(model, finding.plan(model, undecided=True), lambda: model(torch.randn(IMAGE)), timed=True)
    assert not any(region.convolution for swap in plan.swaps for region in regions_in(plan, swap.site.name))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, OutOfTime])
def test_no_memory_no_time_and_other_errors(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    model = drawn(made)

    def fails(*_: Any) -> Any:
        raise error

    timed_as(monkeypatch, {})
    monkeypatch.setattr(foldings, "time_use", fails)
    assert [*decided(model)[1]] == [*decided(model, timed=False)[1]]
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(RuntimeError):
        decided(model, x=torch.randn(2, 5, 9, 8))
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


def test_the_model_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = drawn(made)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    timed_as(monkeypatch, {})
    random = torch.get_rng_state()
    plan, _ = decided(model, x=torch.zeros(IMAGE))
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    assert all("forward" not in module.__dict__ for module in model.modules())
