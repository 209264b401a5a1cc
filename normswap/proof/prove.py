"""The proof: every swapped site against a float64 run of the original site, and the whole model against the original.

While the original runs once on the example inputs, each call of a site is done again three times on copies of it: as
it was (PyTorch's result), as it was in float64 (the referee), and swapped. Only numbers are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normswap.arguments import Example, uncompiled
from normswap.installed import class_before
from normswap.plans import REGION, Match, Swap
from normswap.progress import progress
from normswap.proof.compare import compare_region, declined
from normswap.proof.comparison import Comparison, worst_of
from normswap.proof.made_up import made_up
from normswap.proof.runs import swapped_op
from normswap.regions.listening import Listener, listening
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import Region, children_of, qualified
from normswap.untouched import classes, is_sharded, preserved

_NO_VALUES = "tensors of the model have no values (meta or lazy), so that nothing could be run"
_MAX_CALLS = 8


@dataclass(frozen=True)
class SiteProof:
    """What was found at one site. ``error_share`` is the worst error as a share of its limit, ``eager_error_share``
    PyTorch's own; ``status`` is "proved", "wiring" (matches, but our kernel did not run), "failed" or "unchecked"."""

    name: str
    kind: str
    status: str
    inputs: str = "none"  # "captured", "synthesised" or "none"
    mode: str = ""  # "train" or "eval"
    dtype: str = ""
    device: str = ""
    error_share: float = 0.0
    eager_error_share: float = 0.0
    gradients: bool = False
    coverage: float = 1.0  # share of the samples that were compared
    detail: str = ""
    declined: bool = False  # every call was left to the original's own code


def unchecked(swap: Swap, why: str = "") -> SiteProof:
    """What is known of a site of which nothing was compared."""
    return SiteProof(swap.site.name, swap.match.kind, "unchecked", detail=why)


def prove(example: Example, swaps: Sequence[Swap], mode: str) -> list[SiteProof]:
    """Prove every site of ``swaps`` in the swapped model of ``example``, with gradients as the ``mode`` says. Sites
    that a run on the example inputs does not reach get made-up ones. The model is left as it was."""
    if mode == "off":
        return [unchecked(swap) for swap in swaps]
    if not example.has_values:
        return [unchecked(swap, _NO_VALUES) for swap in swaps]
    gradients = mode == "grad" or (mode == "auto" and example.learns)
    shown = progress("proof", unit="calls")
    seen: set[Hashable] = set()
    modules = [example.model.get_submodule(swap.site.name) for swap in swaps]
    originals = [(module, class_before(module)) for module in modules]
    sites = [
        Prover(*original, s.match, gradients, seen, shown.update) for s, original in zip(swaps, originals, strict=True)
    ]
    with uncompiled(), shown, preserved(example.model), classes(originals):
        if example.run is not None:
            with listening(sites), torch.no_grad(), _explained("the ORIGINAL model, on these inputs"):
                example.run()
        captured = [site.captured for site in sites]
        for swap, site in zip(swaps, sites, strict=True):
            with _explained(f"site {swap.site.name or '(root)'} on made-up inputs; give example_inputs"):
                site.make_up(example.typical)
    return [
        _proof(swap, site.module, site.comparisons(), "captured" if reached else "synthesised")
        for swap, site, reached in zip(swaps, sites, captured, strict=True)
    ]


class Prover(Listener):
    """Compares each call of a site's regions with what is swapped. ``seen``: what was compared so far, by all but the
    values: of what is like it one slice of a large input is enough. ``told`` is called at each."""

    def __init__(
        self,
        module: nn.Module,
        original: type[nn.Module],
        match: Match,
        gradients: bool,
        seen: set[Hashable],
        told: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(module, original, match)
        self.gradients, self.seen, self.told = gradients, seen, told
        self.found: dict[int, list[Comparison]] = {id(one): [] for one in self.compiled}

    def heard(self, compiled: Compiled, packed: Any) -> None:
        """Compares."""
        found, inner = self.found[id(compiled)], compiled.inner(packed)
        x = tree_leaves(packed)[0] if inner is None else compiled.unpack(inner)[0]
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel() and len(found) < _MAX_CALLS:
            left = inner is None or x.is_nested  # to the original's code
            found.append(declined(x) if left else self._compared(compiled, inner))

    def _compared(self, compiled: Compiled, packed: Any, captured: bool = True) -> Comparison:
        self.told()
        x = compiled.unpack(packed)[0]
        call = id(self.original), repr(compiled.region), x.shape, x.stride(), x.dtype, x.device
        slices = 1 if call in self.seen else None
        self.seen.add(call)
        op = swapped_op(compiled, self.original, self.match)
        return compare_region(compiled, op, self.owner, packed, self.gradients, captured=captured, slices=slices)

    @property
    def captured(self) -> bool:
        """Whether every region was reached."""
        return all(self.found.values())

    def make_up(self, like: Tensor | None) -> None:
        """Compare on made-up inputs where a region was not reached."""
        sharded = is_sharded(self.module)
        if sharded and not any(self.found.values()):
            return
        for compiled in self.compiled:
            found = self.found[id(compiled)]
            if not found and not sharded and (self.match.kind != REGION or _stands(compiled.region, self.module)):
                found += [self._compared(compiled, packed, False) for packed in made_up(compiled, self.owner, like)]
            if not found:
                found.append(Comparison(kernel_ran=False, note="not reached by the example inputs"))

    def comparisons(self) -> list[Comparison]:
        """All of them, in the order of the regions."""
        return [comparison for one in self.compiled for comparison in self.found[id(one)]]


def _stands(region: Region, owner: nn.Module) -> bool:
    """Whether the children of ``region`` are still there, and its norm is one: else its statements run if anything."""
    if any(owner._modules.get(name) is None for name in children_of(region)):
        return False
    classes = type(owner._modules[region.norm]).__mro__ if region.type else ()
    return not region.type or any(qualified(cls) == region.type for cls in classes)


def _proof(swap: Swap, module: nn.Module, comparisons: list[Comparison], inputs: str) -> SiteProof:
    if not comparisons:
        return unchecked(swap, "its parameters are sharded, and no example input reached it")
    worst = worst_of(comparisons)
    status = "failed" if worst.problem else "proved" if worst.kernel_ran else "wiring"
    if not (worst.problem or worst.finite):
        status, worst = "unchecked", replace(worst, note="the original's output is nowhere finite on these inputs")
    return SiteProof(
        swap.site.name,
        swap.match.kind,
        status,
        inputs,
        "train" if module.training else "eval",
        worst.dtype,
        worst.device,
        worst.share,
        worst.eager,
        worst.gradients,
        worst.coverage,
        worst.problem or worst.note,
        worst.declined,
    )


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Add to an exception raised in the block that ``what`` failed, not something swapped."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"normswap: raised while running {what}; nothing was changed")
        raise
