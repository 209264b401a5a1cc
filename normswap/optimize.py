"""The orchestrator: the one place that knows the order of plan, apply, proof, roll-back and report."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from normswap import again, footprint, hints, installed, native, nodes, sites, timing, walk, whole
from normswap import apply as _apply
from normswap import validate as _validate
from normswap.arguments import check_arguments, check_choice, check_model, check_speedup
from normswap.plan import NormswapError, NothingSwappedError, Plan, Site, Swap
from normswap.report import Report, make_report
from normswap.rollback import put_back, settle, without_declined
from normswap.uncompiled import uncompiled
from normswap.validate import SiteProof
from normswap.walk import Filter

OnMismatch = Literal["rollback", "raise", "warn"]
OnEmpty = Literal["warn", "raise", "ignore"]
Validate = Literal["auto", "forward", "grad", "off"]

native.on_load(nodes.load)

_reports: WeakKeyDictionary[nn.Module, Report] = WeakKeyDictionary()


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
    with what stands around it, and our kernel only where it is known to win there as well (``ops.dispatch.compiled``).

    Raises TypeError and ValueError for arguments of another kind, NormswapError when a copy would not fit on the GPU,
    and what the model itself raises on the inputs. On any exception the model given is as it was.
    """
    check_arguments(model, example_inputs, example_kwargs, validate, on_mismatch)
    check_choice("on_empty", on_empty, ("warn", "raise", "ignore"))
    check_choice("inplace", inplace, (True, False))
    check_choice("for_compile", for_compile, (True, False, None))
    check_speedup(min_speedup)
    target = model if inplace else _copied(model)
    found = walk.plan(target, include=include, exclude=exclude, undecided=True)
    already = _swaps_in(target)
    run = _runner(target, example_inputs, example_kwargs)
    if found.swaps:
        _load(target, example_inputs, example_kwargs)
    # The model given is kept also where it is not what runs: a hook of the copy may hold on to it.
    with contextlib.nullcontext() if inplace else sites.preserved(model):
        compiled = _is_compiled(model) if for_compile is None else for_compile
        known = run if found.swaps and _can_be_timed(target, example_inputs, example_kwargs) else None
        timed = min_speedup is not None and not compiled
        found = timing.decide_foldings(target, found, known, timed=timed)
        journal = _apply.apply(target, found)
        try:
            proofs = _proofs(target, found.swaps, run, validate, _first_tensor(example_inputs, example_kwargs))
            found = settle(target, found, proofs, on_mismatch, journal.undo)
            found = without_declined(found, proofs, journal.undo)
            decision = None
            if known is not None and min_speedup is not None and timed and found.swaps:
                decision = timing.decide_sites(target, found.swaps, known, min_speedup)
                found = put_back(target, found, decision, journal)
            run = run if validate != "off" else None
            report = _whole_report(target, found, proofs, run, example_inputs, decision)
            if already:
                earlier = _reports[model] if model in _reports else _unchecked_report(target, already)
                report = again.merged(earlier, report, already, [name for name, _ in target.named_modules()])
            _tell_empty(target, report, on_empty)
            _reports[target] = report
        except BaseException:
            journal.undo()
            raise
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
    target = model if inplace else _copied(model)
    if plan.swaps:
        _load(target, None, None)
    journal = _apply.apply(target, plan)
    try:
        if told := hints.measured_elsewhere(plan, hints.gpu_of(target)):
            warnings.warn(told, stacklevel=2)
        _reports[target] = _whole_report(target, plan, [_unchecked(swap) for swap in plan.swaps], None, None)
    except BaseException:
        journal.undo()
        raise
    return target


def plan(model: nn.Module, *, include: Filter = None, exclude: Filter = None) -> Plan:
    """What ``optimize`` would swap in ``model`` and what it would refuse, and why; nothing is changed or run."""
    return walk.plan(model, include=include, exclude=exclude)


def report(model: nn.Module) -> Report:
    """The report of the last optimize() or validate() of ``model``; for another swapped model (loaded, copied) its
    sites, unchecked. Raises TypeError when ``model`` is no nn.Module."""
    check_model(model)
    return _reports[model] if model in _reports else _unchecked_report(model, _swaps_in(model))


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
    check_arguments(model, example_inputs, example_kwargs, mode, on_mismatch)
    swaps = _swaps_in(model)
    run = _runner(model, example_inputs, example_kwargs)
    if swaps:
        _load(model, example_inputs, example_kwargs)
    before = [(module, type(module)) for module in model.modules()]
    try:
        proofs = _proofs(model, swaps, run, mode, _first_tensor(example_inputs, example_kwargs))
        undo = lambda name: _apply.revert(model.get_submodule(name))  # noqa: E731
        found = settle(model, Plan(swaps), proofs, on_mismatch, undo)
        made = _whole_report(model, found, proofs, run, example_inputs)
    except BaseException:
        sites.put_back(before)
        raise
    _reports[model] = made
    return made


def revert(model: nn.Module) -> nn.Module:
    """Put the original class back at every swapped site of ``model``, in place; returns ``model``."""
    check_model(model)
    _apply.revert(model)
    _reports.pop(model, None)
    return model


def disabled(model: nn.Module) -> contextlib.AbstractContextManager[nn.Module]:
    """``with normswap.disabled(model):`` runs the original code of every swapped site inside the block.

    Afterwards, also after an exception, all is as it was; blocks may be nested. What torch.compile has compiled is
    compiled anew, on entry and on exit. Raises TypeError when ``model`` is no nn.Module, NormswapError when the class
    of a swapped module was changed since it was swapped.
    """
    check_model(model)
    return _apply.disabled(model)


def _copied(model: nn.Module) -> nn.Module:
    if getattr(model, "training", False) and (held := hints.optimizers_of(model)):
        warnings.warn(
            f"normswap returns a copy: an optimizer made before ({', '.join(held)}) still holds the parameters of the "
            "model given; make it from the copy, or pass inplace=True",
            stacklevel=3,
        )
    footprint.check_copy_fits(model)
    with torch.inference_mode(False):  # else the copy could never be trained
        try:
            return copy.deepcopy(model)
        except Exception as error:  # whatever a module's own __deepcopy__ raises
            raise NormswapError(
                f"model cannot be copied ({type(error).__name__}: {_first_line(error)}); pass inplace=True"
            ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _runner(
    model: nn.Module, inputs: Tensor | tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[], Any] | None:
    """The model's call on copies of the example inputs; None when there are none, or nothing can be run."""
    if (inputs is None and not kwargs) or _is_meta(model):
        return None
    given = (inputs,) if isinstance(inputs, Tensor) else inputs or ()

    def run() -> Any:
        args, named = tree_map(_cloned, (given, dict(kwargs or {})))
        with uncompiled():
            return model(*args, **named)

    return run


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_meta(model: nn.Module) -> bool:
    """True when a parameter or buffer has no values, so that nothing can be run (or, if lazy, not without giving it
    some)."""
    tensors = (*model.parameters(), *model.buffers())
    return any(torch.nn.parameter.is_lazy(t) or t.is_meta for t in tensors)


def _first_tensor(inputs: Any, kwargs: Any) -> Tensor | None:
    leaves = tree_leaves((inputs, dict(kwargs or {})))
    return next((v for v in leaves if isinstance(v, Tensor) and v.is_floating_point()), None)


def _devices(model: nn.Module, inputs: Any, kwargs: Any) -> set[torch.device]:
    leaves = [*model.parameters(), *model.buffers(), *tree_leaves((inputs, dict(kwargs or {})))]
    return {v.device for v in leaves if isinstance(v, Tensor)}


def _load(model: nn.Module, inputs: Any, kwargs: Any) -> None:
    """The kernels and, beside them, autograd's nodes: compiled where there are none and the model runs on CUDA."""
    compiling = _on_cuda(model, inputs, kwargs)
    if native.load(build=compiling).available:
        nodes.load(compiling=compiling)


def _on_cuda(model: nn.Module, inputs: Any, kwargs: Any) -> bool:
    return any(device.type == "cuda" for device in _devices(model, inputs, kwargs))


def _can_be_timed(model: nn.Module, inputs: Any, kwargs: Any) -> bool:
    return any(timing.machine_for([device]) is not None for device in _devices(model, inputs, kwargs))


def _is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile(model) made it, or model.compile() was called."""
    return hasattr(model, "_orig_mod") or model._compiled_call_impl is not None


# --- proof --------------------------------------------------------------------------------------------------------


def _swaps_in(model: nn.Module) -> tuple[Swap, ...]:
    found = []
    for name, module in model.named_modules():
        if (match := installed.site_match(module)) is not None:
            original = installed.original_class(module)
            found.append(Swap(Site(name, f"{original.__module__}.{original.__qualname__}"), match))
    return tuple(found)


def _unchecked_report(model: nn.Module, swaps: tuple[Swap, ...]) -> Report:
    return _whole_report(model, Plan(swaps), [_unchecked(swap) for swap in swaps], None, None)


def _unchecked(swap: Swap) -> SiteProof:
    return SiteProof(swap.site.name, swap.match.kind, "unchecked")


_NO_VALUES = "tensors of the model have no values (meta or lazy), so that nothing could be run"


def _proofs(
    model: nn.Module, swaps: Sequence[Swap], run: Callable[[], Any] | None, mode: str, like: Tensor | None
) -> list[SiteProof]:
    if mode == "off":
        return [_unchecked(swap) for swap in swaps]
    if _is_meta(model):
        return [replace(_unchecked(swap), detail=_NO_VALUES) for swap in swaps]
    learns = any(p.requires_grad for p in model.parameters()) or (like is not None and like.requires_grad)
    gradients = mode == "grad" or (mode == "auto" and learns)
    reference = next((p for p in model.parameters() if p.is_floating_point()), like)
    with uncompiled():
        return _validate.prove_sites(model, swaps, run, gradients=gradients, like=reference)


def _whole_report(
    model: nn.Module,
    found: Plan,
    proofs: list[SiteProof],
    run: Callable[[], Any] | None,
    inputs: Any,
    decision: timing.Decision | None = None,
) -> Report:
    kept = [p.name for p in proofs if installed.site_match(model.get_submodule(p.name)) is not None]
    end_to_end = None
    if run is not None and kept:
        end_to_end = whole.compare_models(model, [model.get_submodule(name) for name in kept], run)
        if not end_to_end.passed:
            worst = sorted((p for p in proofs if p.name in kept), key=lambda p: -p.error_share)[:3]
            moved = f"its output moved by {end_to_end.max_error:.3g}, more than {end_to_end.limit:.3g}"
            warnings.warn(
                f"normswap: the whole model: {end_to_end.problem or moved}; swapped sites with the largest errors: "
                f"{', '.join(p.name or '(root)' for p in worst)}",
                stacklevel=3,
            )
    like = next((t for t in model.parameters() if t.is_floating_point()), _first_tensor(inputs, None))
    return make_report(
        found,
        proofs,
        kept,
        device="none" if like is None else _device_name(like.device),
        dtype="no parameters" if like is None else str(like.dtype).removeprefix("torch."),
        mode="train" if getattr(model, "training", False) else "eval",  # a frozen ScriptModule has no mode
        kernels=_kernels_line(),
        model=end_to_end,
        decision=decision,
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
    text = f"normswap: nothing was swapped ({hints.why_nothing(model, report)})"
    if on_empty == "raise":
        raise NothingSwappedError(text)
    warnings.warn(text, stacklevel=3)
