"""One region on one set of inputs: ours, PyTorch's own and the region's own statements in float64.

The statements run step by step, with each intermediate rounded to the dtype it has there wherever our op rounds it too:
a sum before the norm, and what a residual or an activation is applied to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from normswap.compare import SLICE_ELEMENTS, Comparison, Cotangent, KernelWitness, Seen, spread, widest
from normswap.criterion import (
    FLOAT32_ROUNDING,
    SIXTEEN_BITS,
    RoundedStatistics,
    matmul_unit,
    own_rounding,
    rounds_further,
)
from normswap.kinds import KINDS, NORMS, Kind, kind_of
from normswap.lifted import Lifted, LiftedNorm, Rounded
from normswap.regions.bounds import Size, constants
from normswap.regions.convolution_error import MOST, takes_tf32, times_pytorchs
from normswap.regions.described import parameters_of
from normswap.regions.helper import Fused
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import Region, children_of
from normswap.sites import detached_copy
from normswap.verdict import Checks

_MOST_PIECES = 16


def compare_region(
    compiled: Compiled,
    fused: Fused,
    owner: nn.Module,
    packed: Any,
    gradients: bool,
    captured: bool = True,
    most_pieces: int = _MOST_PIECES,
    seen: Seen | None = None,
) -> Comparison:
    """Compare the region ``compiled`` of ``owner``, whose children are in their original classes, on ``packed``, under
    the present autocast. Of a large input slices of samples are compared, two where its like was ``seen``. Neither is
    changed. What was ``captured`` in a run of the model also says how a folded convolution's error compares with
    PyTorch's own."""
    with torch.inference_mode(False):
        region = compiled.region
        packed = _mapped(region, _detached, packed)
        x = compiled.unpack(packed)[0]
        sample = max(1, x.numel() // max(1, len(x))) if x.dim() else 1
        if region.linear:
            sample = max(sample, widest(owner.get_submodule(region.linear)))
        width = max(2 if kind_of(region.match).batched else 1, SLICE_ELEMENTS // sample)  # a batch has two
        if seen is not None and seen.before(x, id(compiled)):
            most_pieces = min(2, most_pieces)
        starts = spread(len(x), width, most_pieces) if x.dim() > 1 else []
        pieces = [_mapped(region, _cut(x.shape, start, width), packed) for start in starts] or [packed]
        found = [_Case(compiled, fused, owner, piece, captured).compared(gradients) for piece in pieces]
    share = min(1.0, len(starts) * width / len(x)) if starts else 1.0
    return replace(reduce(Comparison.worst, found), coverage=share)


def declined(x: Tensor) -> Comparison:
    """What is said of a call on ``x`` that ours does not take."""
    note = "the region's own statements run on these inputs"
    return Comparison(kernel_ran=False, note=note, declined=True, **_where(x))


def _where(x: Tensor) -> dict[str, Any]:
    return {"dtype": str(x.dtype).removeprefix("torch."), "device": str(x.device)}


def holder_of(region: Region, owner: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """A module that stands for ``owner`` in the snippet of ``region``: it holds copies of the children called there,
    which share parameters unless ``dtype`` converts them."""
    holder = nn.Module()
    for name in (*children_of(region), *region.feeds):
        child = owner._modules[name]
        if child is not None:
            holder._modules[name] = made = detached_copy(child, type(child), dtype)
            # Is not called, or listened to itself: as it will be once all is proved.
            if name in region.feeds or (name == region.norm and "behind" in region.attributes):
                made.__dict__.pop("forward", None)
    return holder


def _mapped(region: Region, function: Callable[[Any], Any], packed: Any) -> Any:
    """``packed`` with ``function`` of each value; where an expression is given a tensor twice, it is one still."""
    if region.kind not in KINDS:
        return tree_map(function, packed)
    made: dict[int, Any] = {}
    return tree_map(lambda v: made[id(v)] if id(v) in made else made.setdefault(id(v), function(v)), packed)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _cut(shape: torch.Size, start: int, width: int) -> Callable[[Any], Any]:
    """What takes the samples from ``start`` on of the tensors that have one a sample."""

    def cut(value: Any) -> Any:
        along = isinstance(value, Tensor) and value.dim() == len(shape) and len(value) == shape[0]
        return value[start : start + width] if along else value

    return cut


class _Case:
    """One comparison. The owner is replaced by a module that holds the region's children alone."""

    def __init__(self, compiled: Compiled, fused: Fused, owner: nn.Module, packed: Any, captured: bool) -> None:
        self.compiled, self.fused, self.packed, self.captured = compiled, fused, packed, captured
        self.region, self.owner = compiled.region, owner
        self.dtypes: list[torch.dtype] = []
        self.cotangents = [Cotangent(), Cotangent()]
        self.declined = False

    def compared(self, gradients: bool) -> Comparison:
        x = self.compiled.unpack(self.packed)[0]
        where = _where(x)
        self.eager_holder = holder_of(self.region, self.owner)
        gradients = gradients and not self._infers()
        eager = self._run(self._eager, self.eager_holder, self.packed, gradients)
        self.checks = Checks(*constants(self.region))
        runs, ran = [], False
        for path in (False, True) if gradients else (False,):
            witness, holder = KernelWitness(), holder_of(self.region, self.owner)
            try:
                with witness if x.is_cuda else contextlib.nullcontext():
                    ours = self._run(self._ours, holder, self.packed, path)
            except Exception as error:  # whatever ours raises where PyTorch does not is a mismatch like any other
                problem = f"raises {type(error).__name__}: {error}"
                return Comparison(kernel_ran=ran, problem=problem, **where)
            ran = ran or witness.ran
            runs.append((*ours, witness.ran, holder))
        if self.declined:
            return declined(x)
        self.matmul_unit = matmul_unit(x) if self.region.linear else 0.0
        expected, size = self._referee(x, gradients)
        for (outputs, found, by_kernel, holder), path in zip(runs, (False, True), strict=False):
            self._outputs(outputs, eager[0], expected[0], size)
            mine, theirs = (dict(of.named_buffers()) for of in (holder, self.eager_holder))
            self.checks.add_buffers(mine, theirs, self.expected_buffers, size.rows, by_kernel, f"{self.region.norm}.")
            if path:
                self._gradients(found, eager[1], expected[1], size, by_kernel)
        told: dict[str, Any] = {"problem": self.checks.problem, "note": self.checks.note}
        return Comparison(self.checks.share, self.checks.eager_share, ran, gradients, **where, **told)

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

    def _ours(self, holder: Any, packed: Any) -> Any:
        out = self.fused(holder._modules, packed)
        self.declined = self.declined or out is None
        if out is None:
            out = self._lowered(holder, packed, self.compiled.stepped(holder, packed, lambda _, value: value))
        return out

    def _lowered(self, holder: Any, packed: Any, out: Any) -> Any:
        """A result of the region's own statements as whoever reads it has it."""
        dtype = self.fused.dtype(holder._modules, self.compiled.unpack(packed)[0])
        if dtype is None:
            return out
        return (out[0], out[1].to(dtype)) if self.region.shared else out.to(dtype)

    def _run(
        self, function: Callable[[Any, Any], Any], holder: Any, packed: Any, gradients: bool
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The results, and the gradients of the inputs and of the children's parameters by name. What of the inputs is
        updated are copies, buffers of the ``holder`` then."""
        packed = self._with_buffers(holder, packed)
        if not gradients:
            with torch.no_grad():
                return [t.detach() for t in tree_leaves(function(holder, packed))], {}
        with torch.enable_grad():
            leaves: list[Tensor] = []
            buffers = {id(buffer) for buffer in holder.buffers(recurse=False)}
            packed = _mapped(self.region, lambda v: v if id(v) in buffers else _leaf(v, leaves), packed)
            outputs = tree_leaves(function(holder, packed))
            wanted = {f"input {i}": leaf for i, leaf in enumerate(leaves)}
            wanted |= {n: p for n, p in holder.named_parameters() if p.requires_grad}
            given = [c(o) for c, o in zip(self.cotangents, outputs, strict=False)]
            found = torch.autograd.grad(outputs, [*wanted.values()], given, allow_unused=True)
        kept = {name: g for name, g in zip(wanted, found, strict=True) if g is not None}
        return [t.detach() for t in outputs], kept

    def _updated(self, packed: Any) -> dict[int, str]:
        """The names of the inputs that the norm writes to, by their ids."""
        norm = NORMS.get(self.region.kind)
        updates = () if norm is None else norm.updates
        return {id(t): name for name, t in self._named(packed).items() if name in updates and t is not None}

    def _with_buffers(self, holder: Any, packed: Any) -> Any:
        updated = self._updated(packed)

        def kept(value: Any) -> Any:
            name = updated.get(id(value))
            if name is None:
                return value
            holder.register_buffer(name, value.clone())
            return getattr(holder, name)

        return _mapped(self.region, kept, packed)

    def _referee(self, x: Tensor, gradients: bool) -> tuple[tuple[list[Tensor], dict[str, Tensor]], Size]:
        """The statements in float64, outside autocast, and the magnitudes of what they give, of what autocast makes of
        the input of a convolution."""
        packed = self.packed
        if self.region.convolution:
            given, x = x, x.to(self.dtypes[0])
            packed = _mapped(self.region, lambda v: x if v is given else v, packed)
        wide = _mapped(self.region, _float64, packed)
        steps, dtypes, values = self.region.steps, self.dtypes, dict[str, Tensor]()

        def each(step: int, value: Tensor) -> Tensor:
            does, follows = steps[step].does, steps[step + 1].does if step + 1 < len(steps) else ""
            values[does] = value.detach()
            if self.region.convolution or dtypes[step] not in SIXTEEN_BITS:  # nothing is rounded on the way
                return value
            rounds = does == "sum" or follows in ("residual", "times", "activation")
            return Rounded.apply(value, dtypes[step]) if rounds else value

        def widened(holder: Any, packed: Any) -> Any:
            with self._as_in_the_original(packed, x.dtype):
                return self.compiled.stepped(holder, packed, each)

        with torch.autocast(x.device.type, enabled=False):
            holder = self._wide_holder(x.dtype)
            outputs, found = self._run(widened, holder, wide, gradients)
            lifted = f"{self.region.norm}.norm."
            found = {name.replace(lifted, f"{self.region.norm}."): gradient for name, gradient in found.items()}
            with torch.no_grad():
                self.expected_buffers = dict(holder.named_buffers())
                before = self._wide_holder(x.dtype)
                size = Size(self.compiled, before, wide, values, dtypes, x, self._rounds(), self.matmul_unit)
        return (outputs, found), size

    def _rounds(self) -> tuple[bool | None, ...]:
        """What the magnitudes of a norm that casts want to know beside its arguments."""
        expression = self.fused.expression
        if expression is None or not expression.kind.casts:
            return ()
        x, *_, given = self.compiled.unpack(self.packed)
        return (expression.rounds(x, given, self.packed),)

    def _as_in_the_original(self, wide: Any, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
        """What gives an expression on the float64 inputs ``wide`` the roundings that it has on the inputs."""
        kind = KINDS.get(self.region.kind)
        if kind is None:
            return contextlib.nullcontext()
        if not kind.casts:
            return RoundedStatistics(dtype)
        pairs = zip(tree_leaves(wide), tree_leaves(self.packed), strict=True)
        return Lifted({w: t.dtype for w, t in pairs if isinstance(t, Tensor)})

    def _leaves(self) -> Iterator[tuple[str, str]]:
        """(name among the gradients, role) of each tensor that the region is given."""
        roles = ("x", "before", "behind", "scale", "shift")
        *tensors, arguments = self.compiled.unpack(self.packed)
        by_id = {id(t): role for t, role in zip(tensors, roles, strict=True) if t is not None}
        by_id |= {id(t): f"argument {i}" for i, t in enumerate(arguments) if isinstance(t, Tensor)}
        updated = self._updated(self.packed)
        given = [v for v in tree_leaves(self.packed) if isinstance(v, Tensor) and v.is_floating_point()]
        leaves = [v for v in given if id(v) not in updated]
        if self.region.kind in KINDS:
            leaves = [*{id(leaf): leaf for leaf in leaves}.values()]
        for index, leaf in enumerate(leaves):
            yield f"input {index}", by_id[id(leaf)]

    def _wide_holder(self, dtype: torch.dtype) -> Any:
        """The children in float64; the norm rounds and defaults as the original does on tensors of ``dtype``."""
        holder: Any = holder_of(self.region, self.owner, torch.float64)
        if not self.region.type:
            return holder
        match, norm = self.region.match, holder._modules[self.region.norm]
        original: Any = self.owner._modules[self.region.norm]
        if match.registered or isinstance(kind_of(match), Kind):
            named = dict((*original.named_parameters(), *original.named_buffers()))
            holder._modules[self.region.norm] = LiftedNorm(norm, dtype, {n: t.dtype for n, t in named.items()})
        elif norm.eps is None:
            norm.eps = torch.finfo(torch.float32).eps
        return holder

    # --- checks ---------------------------------------------------------------------------------------------------

    def _outputs(self, ours: list[Tensor], eager: list[Tensor], expected: list[Tensor], size: Size) -> None:
        names = ("sum", "output") if self.region.shared else ("output",)
        if not self.checks.are_alike(ours, eager):
            return
        for name, mine, theirs, wide in zip(names, ours, eager, expected, strict=True):
            magnitude = size.output if name == "output" else wide.abs()
            self.checks.add(name, mine, theirs, wide, magnitude)
            times = times_pytorchs(mine, theirs, wide) if self.region.convolution and self.captured else 1.0
            if times > MOST and (mine.dtype in SIXTEEN_BITS or takes_tf32(mine)):
                self.checks.fail(f"{name}: error is {times:.3g} times PyTorch's own")

    def _gradients(
        self, ours: dict[str, Tensor], eager: dict[str, Tensor], expected: dict[str, Tensor], size: Size, ran: bool
    ) -> None:
        if not self.checks.reach_the_same(ours, eager):
            return
        roles, cotangents = dict(self._leaves()), [c.drawn for c in self.cotangents if c.drawn is not None]
        with torch.no_grad():
            terms = size.gradients([c.double() for c in cotangents])
        for name, gradient in ours.items():
            role = roles.get(name, name)
            magnitude = terms[role].expand(gradient.shape) if role in terms else expected[name].abs()
            by_kernel = ran and not size.broadcasts(role)
            # Operands of the backward matmuls round too.
            unit = own_rounding(gradient.dtype, by_kernel) + self.checks.c_gradient * self.matmul_unit
            extra = unit * magnitude
            error = self.checks.c_gradient * FLOAT32_ROUNDING * magnitude
            extra = extra + rounds_further(expected[name], error, gradient.dtype)
            of = f"gradient of {role}"
            self.checks.add(of, gradient, eager[name], expected[name], magnitude, extra, self.checks.c_gradient)


def _leaf(value: Any, leaves: list[Tensor]) -> Any:
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    leaf = value.detach().clone().requires_grad_()
    leaves.append(leaf)
    return leaf


def _float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
