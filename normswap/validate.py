"""The proof: every swapped site against a float64 run of the original site, and the whole model against the original.

While the original runs once on the example inputs, each call of a site is done again three times on copies of it: as
it was (PyTorch's result), as it was in float64 (the referee), and swapped. Only numbers are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normswap.compare import Comparison, Seen, compare
from normswap.example import Example
from normswap.installed import class_before
from normswap.kinds import sample
from normswap.plan import Match, Swap
from normswap.progress import progress
from normswap.regions.listening import listening
from normswap.regions.prove import RegionProof
from normswap.sites import classes, is_sharded, preserved, told
from normswap.uncompiled import uncompiled

MODES = ("auto", "forward", "grad", "off")

_NO_VALUES = "tensors of the model have no values (meta or lazy), so that nothing could be run"
_MAX_CALLS = 8
_SYNTHETIC_MEANS = (0.0, 1.0, 100.0, 1000.0)


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
    """Prove every site of ``swaps`` in the swapped model of ``example``, with gradients as the ``mode`` says."""
    if mode == "off":
        return [unchecked(swap) for swap in swaps]
    if not example.has_values:
        return [unchecked(swap, _NO_VALUES) for swap in swaps]
    gradients = mode == "grad" or (mode == "auto" and example.learns)
    with uncompiled():
        return prove_sites(example.model, swaps, example.run, gradients=gradients, like=example.typical)


def prove_sites(
    model: nn.Module,
    swaps: Sequence[Swap],
    run: Callable[[], Any] | None,
    *,
    gradients: bool,
    like: Tensor | None = None,
) -> list[SiteProof]:
    """Prove every site of ``swaps`` in the swapped ``model``; ``run`` runs the model on its example inputs, None
    when there are none. Sites that the run does not reach get synthesised inputs of the dtype and device of their
    parameters, or of ``like``. The model is left as it was."""
    shown = progress("proof", unit="calls")
    seen = Seen(shown.update)
    every = [(swap, model.get_submodule(swap.site.name)) for swap in swaps]
    regions = {
        swap.site.name: RegionProof(module, class_before(module), swap.match, gradients, seen)
        for swap, module in every
        if swap.match.kind == "region"
    }
    sites = [(swap, module) for swap, module in every if swap.site.name not in regions]
    found: dict[str, list[Comparison]] = {swap.site.name: [] for swap, _ in sites}
    with shown, preserved(model), classes([(m, class_before(m)) for _, m in every]):
        if run is not None:
            with (
                listening(regions.values()),
                _comparing(sites, found, gradients, seen),
                torch.no_grad(),
                _explained("the ORIGINAL model, on these inputs"),
            ):
                run()
        captured = {name for name, comparisons in found.items() if comparisons}
        captured |= {name for name, proof in regions.items() if proof.captured}
        for name, proof in regions.items():
            with _explained(f"the regions of {name or '(root)'} on made-up inputs; give example_inputs"):
                proof.synthesise(like)
        for swap, module in sites:
            if found[swap.site.name] or is_sharded(module):
                continue
            with _explained(f"site {swap.site.name or '(root)'} on made-up inputs; give example_inputs"):
                for x in _synthesised(swap.match, module, like):
                    found[swap.site.name].append(compare(swap.match, module, x, gradients))
    return [
        _proof(
            swap,
            module,
            regions[swap.site.name].comparisons() if swap.site.name in regions else found[swap.site.name],
            "captured" if swap.site.name in captured else "synthesised",
        )
        for swap, module in every
    ]


def _proof(swap: Swap, module: nn.Module, comparisons: list[Comparison], inputs: str) -> SiteProof:
    if not comparisons:
        return unchecked(swap, "its parameters are sharded, and no example input reached it")
    worst = comparisons[0]
    for comparison in comparisons[1:]:
        worst = worst.worst(comparison)
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


def _comparing(
    sites: Sequence[tuple[Swap, nn.Module]], found: dict[str, list[Comparison]], gradients: bool, seen: Seen
) -> contextlib.AbstractContextManager[None]:
    """Compare at every call of every site in the block, before the original sees the input."""
    return told((module, _hook(swap.match, module, found[swap.site.name], gradients, seen)) for swap, module in sites)


def _hook(
    match: Match, module: nn.Module, comparisons: list[Comparison], gradients: bool, seen: Seen
) -> Callable[..., None]:
    def on_call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        if x is not None and x.numel() and len(comparisons) < _MAX_CALLS:
            again = seen.before(x, id(type(module)), match.kind, repr(match.attributes))
            comparisons.append(compare(match, module, x, gradients, again))

    return on_call


# --- synthesised inputs -------------------------------------------------------------------------------------------


def _synthesised(match: Match, module: Any, like: Tensor | None) -> Iterator[Tensor]:
    """Inputs for a site that no example reached: unit spread about means of 0 to 1000."""
    parameter = next((p for p in module.parameters() if p.is_floating_point()), like)
    dtype, device = (torch.float32, torch.device("cpu")) if parameter is None else (parameter.dtype, parameter.device)
    generator = torch.Generator().manual_seed(0)
    for mean in _SYNTHETIC_MEANS:
        x = torch.randn(sample(match, module), generator=generator, dtype=torch.float64) + mean
        yield x.to(device, dtype)
