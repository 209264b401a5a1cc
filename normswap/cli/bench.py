"""How long a model takes as it was and swapped, in turns: the whole of it, and each swapped site."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from normswap.checkpoint.errors import failing
from normswap.regions.spec import Region, children_of
from normswap.reports import Report
from normswap.timing import clock

_WARM_UP = 3


@dataclass(frozen=True)
class Timing:
    """Medians over ``rounds`` forward passes each, in milliseconds, interleaved.

    ``rows`` has one per swapped site: name, kind, and the same two figures for what it takes in one pass, 0 for a norm
    that is part of a region, and timed there. Sites are timed in passes of their own, with a look at the clock around
    each call; on a GPU it is the GPU's clock.
    """

    device: str
    rounds: int
    eager_ms: float
    optimized_ms: float
    rows: tuple[dict[str, Any], ...] = ()

    @property
    def speedup(self) -> float:
        return self.eager_ms / self.optimized_ms

    def to_dict(self) -> dict[str, Any]:
        """The timing as plain data."""
        return {**asdict(self), "speedup": self.speedup}

    def __str__(self) -> str:
        rows = [_shown("(whole model)", "", self.eager_ms, self.optimized_ms)]
        rows += [_shown(r["name"] or "(root)", r["kind"], r["eager_ms"], r["optimized_ms"]) for r in self.rows]
        head = f"median of {self.rounds} forward passes on {self.device}, milliseconds"
        table = tabulate(rows, ("module", "kind", "eager", "normswap", "speedup"), disable_numparse=True)
        return f"{head}\n{table}"


def bench(
    eager: nn.Module,
    optimized: nn.Module,
    report: Report,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    rounds: int = 20,
) -> Timing:
    """Time the forward of both models on the inputs, in turns. Raises CheckpointError when one fails on them."""
    device = next((p.device for p in eager.parameters()), torch.device("cpu"))
    models = {"eager_ms": eager, "optimized_ms": optimized}
    runs = {name: _run(model, inputs, kwargs) for name, model in models.items()}
    for run in [*runs.values()] * _WARM_UP:
        run()
    machine = clock.clock_of(device)
    whole = clock.medians_us([*runs.values()], machine, rounds)
    swapped = [row for row in report.rows if row["swapped"]]
    inside = _inside_regions(report)  # a hook on one of these, and the region is no longer one op
    timed = [row["name"] for row in swapped if row["name"] not in inside]
    sites: dict[str, dict[str, list[float]]] = {name: {site: [] for site in timed} for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            with _clocked(model, sites[name], machine):
                runs[name]()
    medians = {name: {site: statistics.median(times) for site, times in sites[name].items()} for name in models}
    rows = [
        {"name": row["name"], "kind": row["kind"]} | {name: of.get(row["name"], 0.0) for name, of in medians.items()}
        for row in swapped
    ]
    eager_ms, optimized_ms = (us / 1000 for us in whole)
    return Timing(str(device), rounds, eager_ms, optimized_ms, tuple(rows))


def _inside_regions(report: Report) -> set[str]:
    """The names of the children that are called by a region of their parent's forward."""
    found = set[str]()
    for swap in report.plan.swaps:
        for data in swap.match.attributes.get("regions", ()):
            found |= {f"{swap.site.name}.{child}".lstrip(".") for child in children_of(Region.from_json(data))}
    return found


def _run(model: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    def run() -> Any:
        with failing(f"{type(model).__name__} could not be run", form="{}: {}"), torch.no_grad():
            return model(*inputs, **kwargs)

    return run


@contextmanager
def _clocked(model: nn.Module, taken: Mapping[str, list[float]], machine: clock.Machine) -> Iterator[None]:
    """At the end of the block, what each module of ``taken`` took in it, all its calls together, is appended there."""
    marks: dict[str, list[Any]] = {name: [] for name in taken}
    handles = []
    for name in taken:
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: marks[name].append(machine.mark())))  # type: ignore[misc]
        handles.append(module.register_forward_hook(lambda *_, name=name: marks[name].append(machine.mark())))  # type: ignore[misc]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for name, seen in marks.items():
        taken[name].append(sum(machine.between_us(*pair) for pair in zip(seen[::2], seen[1::2], strict=True)) / 1000)


def _shown(name: str, kind: str, eager: float, optimized: float) -> tuple[str, ...]:
    speedup = f"{eager / optimized:.2f}x" if optimized else "-"  # a site that the inputs do not reach takes no time
    return name, kind, *(f"{ms:.3f}" if ms else "-" for ms in (eager, optimized)), speedup
