"""One region on one set of inputs: ours, PyTorch's own and the region's own statements in float64.

The statements run step by step, with each intermediate rounded to the dtype it has there wherever our op rounds it too:
a sum before the norm, and what a residual or an activation is applied to.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from normswap.criterion import (
    FLOAT32_ROUNDING,
    SIXTEEN_BITS,
    RoundedStatistics,
    matmul_unit,
    own_rounding,
    rounds_further,
)
from normswap.in_float64 import Lifted, Rounded, lift
from normswap.kinds import KINDS, NORMS, Kind, Norm, kind_of
from normswap.proof import pieces
from normswap.proof.comparison import Checks, Comparison, Cotangent, KernelWitness, worst_of
from normswap.proof.pieces import pieces_of
from normswap.proof.product_bounds import MOST, takes_tf32, times_pytorchs
from normswap.proof.runs import Run, Swapped, checksums
from normswap.proof.size import Size, constants
from normswap.regions.helper import Fused
from normswap.regions.listening import holder_of
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import Region, parameters_of

_ROLES = ("input", "before", "behind", "scale", "shift")


def compare_region(
    compiled: Compiled,
    fused: Fused | Swapped,
    owner: nn.Module,
    packed: Any,
    gradients: bool,
    *,
    captured: bool = True,
    slices: int | None = None,
) -> Comparison:
    """Compare the region ``compiled`` of ``owner``, whose children are in their original classes, on ``packed``, under
    the present autocast.

    On a large input ours runs once, and slices of samples (of samples and groups for a GroupNorm or InstanceNorm) of
    its output are compared; gradients, and a BatchNorm's batches, are those of the slices. That holds less than 512 MB
    beyond the output, unless one sample or the weights alone are larger. There are ``slices``, or many. What was
    ``captured`` in a run of the model also says how a folded convolution's error compares with PyTorch's own. Neither
    ``owner`` nor ``packed`` is changed. What the original itself raises is raised; what ours raises is a problem.
    """
    with torch.inference_mode(False):
        packed = _mapped(compiled.region, _detached, packed)
        parts = pieces_of(compiled, owner, packed, slices or pieces.SLICES)
        found: list[Comparison] = []
        try:
            whole = _Case(compiled, fused, owner, packed, captured).ours(False) if parts.are_parts else None
            for piece in parts.pieces:
                part = _mapped(compiled.region, piece.cut, packed)
                is_cut = parts.coverage < 1.0 or len(parts.pieces) > 1
                case = _Case(compiled, fused, piece.owner, part, captured, is_cut)
                found.append(case.compared(gradients, None if whole is None else whole.part(piece)))
                if found[-1].problem:
                    break
        except _NoResult as no:
            found.append(no.comparison)
    return replace(worst_of(found), coverage=parts.coverage)


def declined(x: Tensor) -> Comparison:
    """What is said of a call on ``x`` that ours does not take."""
    note = "the region's own statements run on these inputs"
    return Comparison(kernel_ran=False, note=note, declined=True, **_where(x))


def _where(x: Tensor) -> dict[str, Any]:
    return {"dtype": str(x.dtype).removeprefix("torch."), "device": str(x.device)}


def _mapped(region: Region, function: Callable[[Any], Any], packed: Any) -> Any:
    """``packed`` with ``function`` of each value; where an expression is given a tensor twice, it is one still."""
    if region.kind not in KINDS:
        return tree_map(function, packed)
    made: dict[int, Any] = {}
    return tree_map(lambda v: made[id(v)] if id(v) in made else made.setdefault(id(v), function(v)), packed)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


class _NoResult(Exception):
    """Ours gave none, and what there is to say of that."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison


class _Case:
    """One comparison. The owner is replaced by a module that holds the region's children alone."""

    def __init__(
        self,
        compiled: Compiled,
        fused: Fused | Swapped,
        owner: nn.Module,
        packed: Any,
        captured: bool,
        is_cut: bool = False,
    ) -> None:
        """``is_cut``: whether ``packed`` is a part of what the model has there."""
        self.compiled, self.fused, self.packed, self.captured = compiled, fused, packed, captured
        self.is_cut = is_cut
        self.region, self.owner = compiled.region, owner
        self.x: Tensor = compiled.unpack(packed)[0]
        self.by_itself = isinstance(fused, Swapped)
        self.dtypes: list[torch.dtype] = []
        self.cotangents = [Cotangent(), Cotangent(1)]
        self.checks = Checks(*constants(self.region))

    def compared(self, gradients: bool, known: Run | None = None) -> Comparison:
        """``known``: what ours makes of it without gradients, where that was run."""
        gradients = gradients and not self._infers()
        eager = self._run(self._eager, holder_of(self.region, self.owner), self.packed, gradients)
        given = [*tree_leaves(self.packed), *eager.holder.parameters()]
        before = checksums(given)
        # What runs without gradients may be another path than what runs with them: both are compared.
        plain, learning = self._runs(False, known), self._runs(True) if gradients else []
        if not torch.equal(checksums(given), before):  # with what was written all else would be compared
            self.checks.fail("writes to what it is given")
        runs = [*plain, *learning]
        ran = any(run.by_kernel for run in runs)
        self.matmul_unit = matmul_unit(self.x) if self.region.linear else 0.0
        expected, size = self._referee(bool(learning))
        for index, run in enumerate(runs):
            if not any(run.gives_what(other) for other in runs[:index]):
                self._check_outputs(run, eager, expected, size)
            self._check_buffers(run, eager, expected, size)
        for run in learning:
            self._check_gradients(run, eager, expected, size)
        finite = any(bool(output.isfinite().any()) for output in eager.outputs)
        return replace(self.checks.found, kernel_ran=ran, gradients=bool(learning), finite=finite, **_where(self.x))

    def _runs(self, gradients: bool, known: Run | None = None) -> list[Run]:
        """What ours makes of it, or is ``known`` to make, where a witness sees whether a kernel runs; and as the model
        runs it, in one step of C++ where that is loaded, which a witness keeps off: if that is not the same. None where
        ours leaves gradients to the region's own statements."""
        try:
            first = self.ours(gradients) if known is None else known
        except _NoResult as no:
            if gradients and no.comparison.declined:
                return []
            raise
        if not (self.x.is_cuda or self.fused.at_once.serves()):
            return [first]
        try:
            other = self.ours(gradients, witnessed=False)
        except _NoResult as no:
            if no.comparison.declined:
                return [first]
            raise
        return [first] if other.does_what(first) else [first, replace(other, by_kernel=first.by_kernel)]

    def ours(self, gradients: bool, witnessed: bool = True) -> Run:
        """What ours makes of it. Raises _NoResult where it raises, or leaves it to the region's own statements."""
        witness, function = (KernelWitness(), self._fused) if witnessed else (None, self._at_once)
        try:
            # On a CPU no kernel of ours runs, and a dispatch mode would load torch._dynamo: a second.
            with witness if witness and self.x.is_cuda else contextlib.nullcontext():
                run = self._run(function, holder_of(self.region, self.owner), self.packed, gradients)
        except _NoResult:
            raise
        except Exception as error:  # whatever ours raises where PyTorch does not is a mismatch like any other
            problem = f"raises {type(error).__name__}: {error}"
            raise _NoResult(Comparison(kernel_ran=False, problem=problem, **_where(self.x))) from error
        return replace(run, by_kernel=witness is not None and witness.ran)

    def _infers(self) -> bool:
        """Whether the region's own statements run where a gradient is recorded."""
        named = self._named(self.packed)
        return bool(self.region.convolution) or (self.region.kind == "batch_norm" and named.get("training") is False)

    def _named(self, packed: Any) -> dict[str, Any]:
        """What the norm takes behind its input, by name, where it is no child."""
        return dict(zip(parameters_of(self.region), self.compiled.unpack(packed)[-1], strict=False))

    # --- runs -----------------------------------------------------------------------------------------------------

    def _eager(self, holder: Any, packed: Any) -> Any:
        self.dtypes = []

        def each(step: int, value: Tensor) -> Tensor:
            self.dtypes.append(value.dtype)
            return value

        return self._lowered(holder, packed, self.compiled.stepped(holder, packed, each))

    def _fused(self, holder: Any, packed: Any) -> Any:
        out = self.fused(holder._modules, packed)
        if out is None:
            raise _NoResult(declined(self.x))
        return out

    def _at_once(self, holder: Any, packed: Any) -> Any:
        out = self.fused.at_once.call(holder, packed)
        if out is None and not self.x.is_cuda:  # where there is no witness either: that ran
            raise _NoResult(declined(self.x))
        return self._fused(holder, packed) if out is None else out

    def _lowered(self, holder: Any, packed: Any, out: Any) -> Any:
        """A result of the region's own statements as whoever reads it has it."""
        dtype = self.fused.dtype(holder._modules, self.compiled.unpack(packed)[0])
        if dtype is None:
            return out
        return (out[0], out[1].to(dtype)) if self.region.shared else out.to(dtype)

    def _run(self, function: Callable[[Any, Any], Any], holder: Any, packed: Any, gradients: bool) -> Run:
        """The gradients are those of the inputs and of the children's parameters. What of the inputs is updated are
        copies, buffers of the ``holder`` then."""
        packed = self._with_buffers(holder, packed)
        if not gradients:
            with torch.no_grad():
                return Run(holder, [t.detach() for t in tree_leaves(function(holder, packed))])
        with torch.enable_grad():
            wanted, packed = self._leaves(holder, packed)
            outputs = tree_leaves(function(holder, packed))
            wanted |= {self._called(n): p for n, p in holder.named_parameters() if p.requires_grad}
            given = [c(o) for c, o in zip(self.cotangents, outputs, strict=False)]
            found = torch.autograd.grad(outputs, [*wanted.values()], given, allow_unused=True)
        kept = {name: g for name, g in zip(wanted, found, strict=True) if g is not None}
        return Run(holder, [t.detach() for t in outputs], kept)

    def _leaves(self, holder: nn.Module, packed: Any) -> tuple[dict[str, Tensor], Any]:
        """What the region is given, as leaves of their own, by their roles; buffers of the ``holder`` are none."""
        *tensors, arguments = self.compiled.unpack(packed)
        roles = {id(t): role for t, role in zip(tensors, _ROLES, strict=True)}
        roles |= {id(t): f"argument {i}" for i, t in enumerate(arguments)}
        buffers = {id(buffer) for buffer in holder.buffers(recurse=False)}
        leaves: dict[str, Tensor] = {}

        def leaf(value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.is_floating_point()) or id(value) in buffers:
                return value
            # As it lies in the model, which ours may go by; what is cut out of that lies otherwise, or as no leaf can.
            same = value.detach()
            same = same.clone() if self.is_cut or same.is_inference() else same
            made = leaves[roles[id(value)]] = same.requires_grad_()
            return made

        packed = _mapped(self.region, leaf, packed)
        return leaves, packed

    def _called(self, name: str) -> str:
        """What a parameter or buffer is called for a person: that of a module by itself as it is there."""
        short = name.removeprefix(f"{self.region.norm}.") if self.by_itself else name
        return name if short == "input" else short

    def _with_buffers(self, holder: Any, packed: Any) -> Any:
        norm = NORMS.get(self.region.kind)
        updates = () if norm is None else norm.updates
        updated = {id(t): name for name, t in self._named(packed).items() if name in updates and t is not None}

        def kept(value: Any) -> Any:
            name = updated.get(id(value))
            if name is None:
                return value
            holder.register_buffer(name, value.clone())
            return getattr(holder, name)

        return _mapped(self.region, kept, packed)

    def _referee(self, gradients: bool) -> tuple[Run, Size]:
        """The statements in float64, outside autocast, and the magnitudes of what they give, of what autocast makes of
        the input of a convolution."""
        packed, x = self.packed, self.x
        if self.region.convolution:
            given, x = x, x.to(self.dtypes[0])
            packed = _mapped(self.region, lambda v: x if v is given else v, packed)
        wide = _mapped(self.region, _float64, packed)
        steps, dtypes, values = self.region.steps, self.dtypes, dict[str, Tensor]()

        def each(step: int, value: Tensor) -> Tensor:
            does, follows = steps[step].does, steps[step + 1].does if step + 1 < len(steps) else ""
            values[does] = value.detach()
            rounds = does == "sum" or follows in ("residual", "times", "activation")
            if rounds and dtypes[step] in SIXTEEN_BITS and not self.region.convolution:
                return Rounded.apply(value, dtypes[step])
            return value.clone() if follows else value  # the next step may write to it

        def widened(holder: Any, packed: Any) -> Any:
            with self._as_in_the_original(packed, x.dtype):
                return self.compiled.stepped(holder, packed, each)

        with torch.autocast(x.device.type, enabled=False):
            run = self._run(widened, self._wide_holder(x.dtype), wide, gradients)
            with torch.no_grad():
                before = self._wide_holder(x.dtype)
                size = Size(self.compiled, before, wide, values, dtypes, x, self._rounds(), self.matmul_unit)
        return run, size

    def _wide_holder(self, dtype: torch.dtype) -> Any:
        """The children in float64; the norm rounds and defaults as the original does on tensors of ``dtype``."""
        holder, name = holder_of(self.region, self.owner, torch.float64), self.region.norm
        match, kind = self.region.match, kind_of(self.region.match)
        if not self.region.type:
            return holder
        norm, original = holder._modules[name], self.owner._modules[name]
        assert original is not None
        if match.registered or (isinstance(kind, Kind) and kind.casts):
            named = (*original.named_parameters(), *original.named_buffers())
            lift(norm, dtype, {name: tensor.dtype for name, tensor in named})
        elif isinstance(kind, Norm) and norm.eps is None and dtype is not torch.float64:
            norm.eps = torch.finfo(torch.float32).eps  # what PyTorch takes for None: that of what it computes in
        return holder

    def _rounds(self) -> tuple[bool | None, ...]:
        """What the magnitudes of a norm that casts want to know beside its arguments."""
        expression = self.fused.expression
        if expression is None or not expression.kind.casts:
            return ()
        x, *_, given = self.compiled.unpack(self.packed)
        return (expression.rounds(x, given, self.packed),)

    def _as_in_the_original(self, wide: Any, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
        """What gives an expression on the float64 inputs ``wide`` the roundings that it has on the inputs."""
        kind = kind_of(self.region.match)
        if not isinstance(kind, Kind) or (kind.casts and self.region.type):
            return contextlib.nullcontext()
        if not kind.casts:
            return RoundedStatistics(dtype)
        pairs = zip(tree_leaves(wide), tree_leaves(self.packed), strict=True)
        return Lifted({w: t.dtype for w, t in pairs if isinstance(t, Tensor)})

    # --- checks ---------------------------------------------------------------------------------------------------

    def _check_outputs(self, ours: Run, eager: Run, expected: Run, size: Size) -> None:
        names = ("sum", "output") if self.region.shared else ("output",)
        if self.checks.are_alike(ours.outputs, eager.outputs):
            outputs = zip(names, ours.outputs, eager.outputs, expected.outputs, strict=True)
            for name, mine, theirs, wide in outputs:
                self._check_output(name, mine, theirs, wide, size)

    def _check_buffers(self, ours: Run, eager: Run, expected: Run, size: Size) -> None:
        buffers = [{self._called(n): b for n, b in run.holder.named_buffers()} for run in (ours, eager, expected)]
        prefix = "" if self.by_itself else f"{self.region.norm}."
        self.checks.add_buffers(buffers[0], buffers[1], buffers[2], size.rows, ours.by_kernel, prefix)

    def _check_output(self, name: str, ours: Tensor, eager: Tensor, expected: Tensor, size: Size) -> None:
        self.checks.add(name, ours, eager, expected, size.output if name == "output" else expected.abs())
        times = times_pytorchs(ours, eager, expected) if self.region.convolution and self.captured else 1.0
        if times > MOST and (ours.dtype in SIXTEEN_BITS or takes_tf32(ours)):
            self.checks.fail(f"{name}: error is {times:.3g} times PyTorch's own")

    def _check_gradients(self, ours: Run, eager: Run, expected: Run, size: Size) -> None:
        mine, theirs, wide = ours.gradients, eager.gradients, expected.gradients
        if not self.checks.reach_the_same(mine, theirs):
            return
        cotangents = [c.drawn.double() for c in self.cotangents if c.drawn is not None]

        @functools.cache
        def terms(bends: bool) -> dict[str, Tensor]:
            with torch.no_grad():
                return {self._called(name): sums for name, sums in size.gradients(cotangents, bends).items()}

        def magnitude_of(name: str, bends: bool) -> Tensor:
            found = terms(bends).get(name)
            return wide[name].abs() if found is None else found.expand(mine[name].shape)

        c = self.checks.c_gradient
        for name, gradient in mine.items():
            magnitude = magnitude_of(name, bends=True)
            by_kernel = ours.by_kernel and not size.broadcasts(name)
            # Operands of the backward matmuls round too.
            extra = rounds_further(wide[name], c * FLOAT32_ROUNDING * magnitude, gradient.dtype)
            if more := own_rounding(gradient.dtype, by_kernel) + c * self.matmul_unit:
                extra = extra + more * magnitude_of(name, bends=False)
            self.checks.add(f"gradient of {name}", gradient, theirs[name], wide[name], magnitude, extra, c)


def _float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
