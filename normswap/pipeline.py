"""The orchestrator: the one place that knows the order of plan, apply, proof, roll-back and report."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_args

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from normswap import finding, native, nodes, nodes_library, swapping, timing, untouched
from normswap.arguments import (
    Example,
    OnEmpty,
    OnMismatch,
    Validate,
    check_arguments,
    check_choice,
    check_model,
    check_speedup,
)
from normswap.attributes import modules_in
from normswap.copying import copy_of
from normswap.finding import Filter
from normswap.installed import site_match
from normswap.plans import NothingSwappedError, Plan
from normswap.proof.prove import SiteProof, prove, unchecked
from normswap.proof.whole_model import compare_models
from normswap.reports import Report, merged, notes_on, rows_of
from normswap.rollback import measured_elsewhere, put_back, settle, without_asked, without_declined

native.on_load(nodes.load)

# By the model itself: others may call themselves equal to it.
_reports: Any = WeakIdKeyDictionary()


def optimize(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    inplace: bool = False,
    include: Filter = None,
    exclude: Filter = None,
    validate: Validate = "auto",
    on_mismatch: OnMismatch = "rollback",
    on_empty: OnEmpty = "warn",
    min_speedup: float | None = 1.0,
    for_compile: bool | None = None,
) -> nn.Module:
    """Swap the normalisation layers of ``model`` for fast ones, prove that nothing else changed, return the result.

    ``example_inputs`` is a tensor or a tuple of positional arguments, ``example_kwargs`` a dict: what the model is
    called with, on its device. The proof runs the model on them in its present train or eval mode; without them sites
    are proved on made-up inputs. The model given is left untouched and a copy is returned, unless ``inplace``.

    include, exclude: a glob over module names, "re:..." (must match the whole name), ``fn(module, name) -> bool``, or a
    list of these. validate: "forward", "grad" (gradients too), "auto" (gradients where a parameter or input requires
    one) or "off". on_mismatch: what to do with a site that fails its proof - "rollback" (put it back), "raise"
    MismatchError, or "warn". on_empty: "warn", "raise" NothingSwappedError or "ignore" when nothing is swapped.
    min_speedup: on a GPU, with example inputs, a site is put back unless it is that many times as fast as the original
    where the model waits, for its device or for its host, and all are put back that make the whole model slower. Timed
    are forward and backward in train mode with gradients on, else the forward alone. None times nothing.
    for_compile: True says that what is returned will go through torch.compile; None takes that from whether ``model``
    already has. Nothing is timed then: compiled, a swapped site is the plain PyTorch formula, which the compiler fuses
    with what stands around it, and our kernel only where it is known to win there as well
    (``ops.dispatch.compiler_fuses``).

    Raises TypeError and ValueError for arguments of another kind, NormswapError when a copy would not fit on the GPU,
    and what the model itself raises on the inputs. On any exception the model given is as it was.
    """
    check_arguments(model, example_inputs, example_kwargs, on_mismatch, validate=validate)
    check_choice("on_empty", on_empty, get_args(OnEmpty))
    check_choice("inplace", inplace, (True, False))
    check_choice("for_compile", for_compile, (True, False, None))
    check_speedup(min_speedup)
    target = model if inplace else copy_of(model)
    example = Example(target, example_inputs, example_kwargs)
    found = finding.plan(target, include=include, exclude=exclude, undecided=True)
    already = swapping.swaps_in(target)
    if found.swaps:
        _load(example)
    # The model given is kept also where it is not what runs: a hook of the copy may hold on to it.
    with contextlib.nullcontext() if inplace else untouched.preserved(model), untouched.all_or_none(target):
        compiled = _is_compiled(model) if for_compile is None else for_compile
        known = example.run if found.swaps and timing.has_a_clock(example.devices) else None
        timed = min_speedup is not None and not compiled
        found = timing.decide_foldings(target, found, known, timed=timed)
        swapping.apply(target, found)
        proofs = prove(example, found.swaps, validate)
        found = settle(target, found, proofs, on_mismatch)
        found = without_declined(target, found, proofs)
        asking = example.run if validate != "off" else None
        found = without_asked(target, found, asking)
        decision = None
        if known is not None and min_speedup is not None and timed and found.swaps:
            decision = timing.decide_sites(target, found.swaps, known, min_speedup)
            found = without_asked(target, put_back(target, found, decision), asking)
        report = _reported(example, found, proofs, decision, compared=validate != "off")
        if already:
            earlier = _reports[model] if model in _reports else _unchecked_report(target, Plan(already))
            report = merged(earlier, report, already, [name for name, _ in modules_in(target)])
        _tell_empty(target, report, on_empty)
        if not inplace and example.run is not None:
            untouched.restore_parameters(target, model)
        _reports[target] = report
    return target


def apply(model: nn.Module, plan: Plan, *, inplace: bool = False) -> nn.Module:
    """Swap exactly the sites of ``plan`` in ``model`` - read back from JSON, say, or ``report(other).plan`` with what
    was measured there - and return the result, a copy unless ``inplace``. Nothing is run: ``validate`` proves it. On
    another GPU than that was measured on, a warning says so.

    Raises TypeError for a model or plan of another type, PlanError, which names the site, where the model's structure
    differs from the plan's, and NormswapError when a copy would not fit on the GPU; the model is then as it was.
    """
    check_model(model)
    if not isinstance(plan, Plan):
        cure = "pass report.plan" if isinstance(plan, Report) else "Plan.from_json reads one from text"
        raise TypeError(f"plan must be a normswap.Plan, got {type(plan).__name__}; {cure}")
    target = model if inplace else copy_of(model)
    if plan.swaps:
        _load(Example(target))
    with untouched.all_or_none(target):
        swapping.apply(target, plan)
        if told := measured_elsewhere(plan, target):
            warnings.warn(told, stacklevel=2)
        _reports[target] = _unchecked_report(target, plan)
    return target


def plan(model: nn.Module, *, include: Filter = None, exclude: Filter = None) -> Plan:
    """What ``optimize`` would swap in ``model`` and what it would refuse, and why; nothing is changed or run. Raises
    TypeError when ``model`` is no nn.Module, and for filters what ``optimize`` does."""
    check_model(model)
    return finding.plan(model, include=include, exclude=exclude)


def report(model: nn.Module) -> Report:
    """The report of the last optimize() or validate() of ``model``; for another swapped model (loaded, copied) its
    sites, unchecked. Raises TypeError when ``model`` is no nn.Module."""
    check_model(model)
    return _reports[model] if model in _reports else _unchecked_report(model, Plan(swapping.swaps_in(model)))


def validate(
    model: nn.Module,
    example_inputs: Tensor | tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    mode: Validate = "auto",
    on_mismatch: OnMismatch = "rollback",
) -> Report:
    """Prove the swapped sites of ``model`` where and as it is now: after ``.cuda()``, ``.half()``, ``.train()``.

    Arguments as in ``optimize``; ``mode`` is its ``validate``. Returns the report that ``report(model)`` then gives.
    """
    check_arguments(model, example_inputs, example_kwargs, on_mismatch, mode=mode)
    swaps, example = swapping.swaps_in(model), Example(model, example_inputs, example_kwargs)
    if swaps:
        _load(example)
    with untouched.all_or_none(model):
        proofs = prove(example, swaps, mode)
        found = settle(model, Plan(swaps), proofs, on_mismatch)
        found = without_asked(model, found, example.run if mode != "off" else None)
        made = _reported(example, found, proofs)
    _reports[model] = made
    return made


def revert(model: nn.Module) -> nn.Module:
    """Put the original class back at every swapped site of ``model``, in place; returns ``model``."""
    check_model(model)
    swapping.revert(model)
    _reports.pop(model, None)
    return model


def disabled(model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
    """``with normswap.disabled(model):`` runs the original code of every swapped site inside the block.

    Afterwards, also after an exception, all is as it was; blocks may be nested. What torch.compile has compiled is
    compiled anew, on entry and on exit. Raises TypeError when ``model`` is no nn.Module, NormswapError when the class
    of a swapped module was changed since it was swapped.
    """
    check_model(model)
    return swapping.disabled(model)


def _load(example: Example) -> None:
    """The kernels and, beside them, autograd's nodes: compiled where there are none and the model runs on CUDA."""
    compiling = any(device.type == "cuda" for device in example.devices)
    with nodes_library.built_beside() if compiling and native.would_compile() else contextlib.nullcontext():
        available = native.load(build=compiling).available
    if available:
        nodes.load(compiling=compiling)


def _is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile(model) made it, or model.compile() was called."""
    return hasattr(model, "_orig_mod") or model._compiled_call_impl is not None


def _unchecked_report(model: nn.Module, found: Plan) -> Report:
    return _reported(Example(model), found, [unchecked(swap) for swap in found.swaps])


def _reported(
    example: Example,
    found: Plan,
    proofs: list[SiteProof],
    decision: timing.Decision | None = None,
    compared: bool = True,
) -> Report:
    """The report of what is swapped now, for which the whole model is ``compared`` with the original."""
    model, like = example.model, example.typical
    kept = [p.name for p in proofs if site_match(model.get_submodule(p.name)) is not None]
    end_to_end = None
    if compared and example.run is not None and kept:
        end_to_end = compare_models(model, [model.get_submodule(name) for name in kept], example.run)
        if not end_to_end.passed:
            worst = sorted((p for p in proofs if p.name in kept), key=lambda p: -p.error_share)[:3]
            moved = f"its output moved by {end_to_end.max_error:.3g}, more than {end_to_end.limit:.3g}"
            warnings.warn(
                f"normswap: the whole model: {end_to_end.problem or moved}; swapped sites with the largest errors: "
                f"{', '.join(p.name or '(root)' for p in worst)}",
                stacklevel=3,
            )
    rows = rows_of(found, proofs, kept, {} if decision is None else decision.rows)
    return Report(
        tuple(rows),
        device="none" if like is None else _device_name(like.device),
        dtype="no parameters" if like is None else str(like.dtype).removeprefix("torch."),
        mode="train" if getattr(model, "training", False) else "eval",  # a frozen ScriptModule has no mode
        kernels=_kernels_line(),
        model=None if end_to_end is None else {**asdict(end_to_end), "passed": end_to_end.passed},
        notes=tuple(notes_on(rows)),
        plan=found,
        times=None if decision is None else decision.times,
    )


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _kernels_line() -> str:
    status = native.status()
    return {"package": "prebuilt", "cache": "built on this machine", "built": "built now"}.get(
        status.origin, f"none, PyTorch's ops serve: {status.reason}"
    )


def _tell_empty(model: nn.Module, report: Report, on_empty: str) -> None:
    if report.swapped or on_empty == "ignore":
        return
    text = f"normswap: nothing was swapped ({_why_nothing(model, report)})"
    if on_empty == "raise":
        raise NothingSwappedError(text)
    warnings.warn(text, stacklevel=3)


def _why_nothing(model: nn.Module, report: Report) -> str:
    """Why no site of ``model`` is swapped, in a few words."""
    if report.rows:
        became = {
            "slower": "put back, as they are not faster here",
            "declined": "put back, as the original's own statements run there",
            "identity": "put back, as the model asks for their class",
            "failed": "put back, as they did not match",
        }
        counts = {status: sum(row["status"] == status for row in report.rows) for status in (*became, "refused")}
        parts = [f"{count} {became.get(status, 'left alone')}" for status, count in counts.items() if count]
        return f"of {len(report.rows)} sites that were recognised {', '.join(parts)}; see normswap.report(model)"
    kinds = Counter(type(module).__name__ for module in model.modules() if "norm" in type(module).__name__.lower())
    if not kinds and isinstance(model, fx.GraphModule | torch.jit.ScriptModule):
        return "the model was scripted, traced or exported, and holds no modules any more: optimize it before that"
    if not kinds:
        return "the model holds no norm that is known"
    told = ", ".join(name if count == 1 else f"{name} ({count})" for name, count in kinds.items())
    return f"the model holds norms of no kind that is swapped, or not as they are here: {told}"
