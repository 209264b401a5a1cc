"""What is put back after the proof and the choice, and the plan of what is left."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from normswap import swapping, timing
from normswap.plans import MismatchError, Plan, Reason, Refusal, Refused, Swap, listed
from normswap.proof.prove import SiteProof
from normswap.proof.whole_model import asked

_TOLD = 5


def settle(model: nn.Module, found: Plan, proofs: list[SiteProof], on_mismatch: str) -> Plan:
    """Put back, raise or warn for the sites whose proof failed; the plan of what is left."""
    failed = {proof.name: proof for proof in proofs if proof.status == "failed"}
    if not failed:
        return found
    told = "; ".join(f"{p.name or '(root)'} ({p.kind}): {p.detail}" for p in [*failed.values()][:_TOLD])
    told += f"; and {len(failed) - _TOLD} more, see the report" if len(failed) > _TOLD else ""
    if on_mismatch == "raise":
        raise MismatchError(f"{len(failed)} swapped sites do not match the original: {told}")
    if on_mismatch == "rollback":
        found = _without(model, found, {name: (Reason.MISMATCH, proof.detail) for name, proof in failed.items()})
    warnings.warn(
        f"normswap: {len(failed)} sites do not match the original and were "
        f"{'put back' if on_mismatch == 'rollback' else 'kept (on_mismatch=warn)'}: {told}",
        stacklevel=3,
    )
    return found


def without_declined(model: nn.Module, found: Plan, proofs: Sequence[SiteProof]) -> Plan:
    """Put back the sites on a GPU that were left to the original's code at every call; the plan of what is left."""
    declined = {p.name for p in proofs if p.declined and p.device.startswith("cuda") and p.status != "failed"}
    return _without(model, found, dict.fromkeys(declined, (Reason.DECLINED, "")))


def without_asked(model: nn.Module, found: Plan, run: Callable[[], Any] | None) -> Plan:
    """Put back the sites whose class ``run``, if any, asks for, and warn; the plan of what is left."""
    sites = [swap.site.name for swap in found.swaps]
    names = asked(model, sites, run) if sites and run is not None else []
    if names:
        told = listed([name or "(root)" for name in names], _TOLD)
        warnings.warn(f"normswap: put back: {told}: {Reason.IDENTITY.sentence}", stacklevel=3)
    return _without(model, found, dict.fromkeys(names, (Reason.IDENTITY, "")))


def put_back(model: nn.Module, found: Plan, decision: timing.Decision) -> Plan:
    """Put back the sites, and of some the regions, that are not worth it; the plan of what is left."""
    slower = [name for name, match in decision.left.items() if match is None]
    kept = _without(model, replace(found, gpu=gpu_of(model)), dict.fromkeys(slower, (Reason.SLOWER, "")))
    partly = {name: match for name, match in decision.left.items() if match is not None}
    swapping.revert(model, partly)
    swaps = tuple(Swap(swap.site, partly.get(swap.site.name, swap.match)) for swap in kept.swaps)
    swapping.apply(model, Plan(tuple(swap for swap in swaps if swap.site.name in partly)))
    return replace(kept, swaps=swaps)


def _without(model: nn.Module, found: Plan, why: Mapping[str, tuple[Reason, str]]) -> Plan:
    """Put back the sites named in ``why``; ``found`` with them refused for that reason."""
    swapping.revert(model, why)
    kept = tuple(swap for swap in found.swaps if swap.site.name not in why)
    refused = (
        Refused(swap.site, Refusal(swap.match.kind, *why[swap.site.name]))
        for swap in found.swaps
        if swap.site.name in why
    )
    return replace(found, swaps=kept, refused=(*found.refused, *refused))


def gpu_of(model: nn.Module) -> str:
    """The name of the GPU that ``model`` is on; "" where it is on none."""
    place = next((t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"), None)
    return "" if place is None else torch.cuda.get_device_name(place)


def measured_elsewhere(plan: Plan, model: nn.Module) -> str:
    """What to say where ``plan`` was chosen on another GPU than ``model`` is on; "" where it was not."""
    here = gpu_of(model)
    if not here or plan.gpu in ("", here):
        return ""
    again = "measure again with normswap.optimize(normswap.revert(model), example_inputs, inplace=True)"
    return f"normswap: what is swapped was chosen by its speed on {plan.gpu}, and this is {here}; {again}"
