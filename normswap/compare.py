"""One site on one input: ours, PyTorch's own and the original in float64, compared tensor by tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normswap import modules
from normswap.criterion import Magnitudes, RoundedStatistics, own_rounding
from normswap.kinds import Kind, Norm, kind_of, magnitudes
from normswap.lifted import Lifted
from normswap.plan import Match
from normswap.sites import detached_copy
from normswap.verdict import Checks

# 100 to 150 bytes an element are held while a slice is compared: 210 to 310 MB.
SLICE_ELEMENTS = 2**21
TOTAL_ELEMENTS = 2**25

# Not a seed a person would choose: inputs drawn with the same one would equal the cotangent, and their gradient cancel.
_SEED = 0x6E6F726D


@dataclass(frozen=True)
class Comparison:
    """``share`` and ``eager`` are the worst error, ours and PyTorch's own, as a share of its limit; ``kernel_ran``
    whether an op of ours did; ``coverage`` the share of the samples compared; ``finite`` whether PyTorch's output has
    a number in it; ``problem`` why they do not match, "" if they do; ``note`` what else is worth a word."""

    share: float = 0.0
    eager: float = 0.0
    kernel_ran: bool = True
    gradients: bool = False
    coverage: float = 1.0
    dtype: str = ""
    device: str = ""
    finite: bool = True
    problem: str = ""
    note: str = ""
    declined: bool = False  # what was swapped left it to the original's own code

    def worst(self, other: Comparison) -> Comparison:
        """Both as one: the worse of each."""
        return replace(
            other,
            share=max(self.share, other.share),
            eager=max(self.eager, other.eager),
            kernel_ran=self.kernel_ran and other.kernel_ran,
            gradients=self.gradients or other.gradients,
            coverage=min(self.coverage, other.coverage),
            finite=self.finite or other.finite,
            problem=self.problem or other.problem,
            declined=self.declined and other.declined,
            note=self.note or other.note,
        )


class Seen:
    """What was compared so far, by all but the values: of what is like it two slices of a large input are enough.
    ``told`` is called at each."""

    def __init__(self, told: Callable[[], object] = lambda: None) -> None:
        self._known: set[Hashable] = set()
        self._told = told

    def before(self, x: Tensor, *of: Hashable) -> bool:
        """Whether it was asked before of what ``of`` says and a tensor of the form of ``x``."""
        self._told()
        key = (*of, x.shape, x.stride(), x.dtype, x.device)
        known = key in self._known
        self._known.add(key)
        return known


def compare(match: Match, module: nn.Module, x: Tensor, gradients: bool, again: bool = False) -> Comparison:
    """Compare the swap ``match`` of ``module``, which is in its original class, on ``x``, under the present autocast.

    On a large input ours runs once, and slices of samples (of samples and groups for a GroupNorm or InstanceNorm) of
    its output are compared; gradients, and a BatchNorm's batches, are those of the slices. That holds less than 512 MB
    beyond the output, unless one sample or the weights alone are larger. ``again``: its like was compared before, two
    slices are enough. Neither ``module`` nor ``x`` is changed. What
    the original itself raises on ``x`` is raised; what ours raises is a problem.
    """
    with torch.inference_mode(False):
        x = x.detach()
        pieces, coverage = _pieces(match, module, x, 2 * SLICE_ELEMENTS if again else TOTAL_ELEMENTS)
        output = None
        if len(pieces) > 1 and not kind_of(match).batched:
            found = _ours(match, module, x, None)
            if isinstance(found, Comparison):
                return found
            output = found
        worst: Comparison | None = None
        for piece in pieces:
            ours = None if output is None else (_Run(output[0].site, piece.cut(output[0].output)), output[1])
            found = _compare_piece(match, piece.module, piece.cut(x), gradients, ours)
            worst = found if worst is None else worst.worst(found)
            if worst.problem:
                break
    return replace(worst or Comparison(problem="no input to compare on"), coverage=coverage)


@dataclass(frozen=True)
class _Piece:
    """A part of a site's input whose result depends on nothing else: the module that makes it, and what cuts it out of
    the input or the output."""

    module: nn.Module
    cut: Callable[[Tensor], Tensor] = lambda tensor: tensor


def _pieces(match: Match, module: Any, x: Tensor, most: int) -> tuple[list[_Piece], float]:
    """The pieces of ``x`` to compare - all of it, or the first, the last and some between, of ``most`` elements
    together - and the share covered."""
    kind, dims = kind_of(match), _independent_dims(match, module, x)
    dim = max(dims, key=lambda d: x.shape[d], default=0)
    size = x.shape[dim] if dims else 1
    sample = x.numel() // max(1, size)
    if not dims or size * sample <= SLICE_ELEMENTS:
        return [_Piece(module)], 1.0
    grouped = isinstance(kind, Norm) and not kind.rows and not kind.batched
    if grouped and sample > SLICE_ELEMENTS and not match.registered:
        return _groups(match, module, x, sample, most)
    least = 2 if kind.batched else 1  # a batch has two rows
    width = min(size, max(least, SLICE_ELEMENTS // sample))
    starts = spread(size, width, max(1, most // (width * sample)))
    pieces = [_Piece(module, partial(torch.narrow, dim=dim, start=start, length=width)) for start in starts]
    return pieces, min(1.0, len(pieces) * width / size)


def _groups(match: Match, module: Any, x: Tensor, sample: int, most: int) -> tuple[list[_Piece], float]:
    """The pieces of samples that are too large as a whole: some groups of one sample each; of an InstanceNorm, some
    channels."""
    groups = getattr(module, "num_groups", x.shape[1])
    channels = x.shape[1] // groups
    width = min(groups, max(1, SLICE_ELEMENTS * groups // sample))
    firsts = spread(groups, width, groups)
    found = []
    for place in spread(len(x) * len(firsts), 1, max(1, most * groups // (width * sample))):
        row, first = place // len(firsts), firsts[place % len(firsts)]
        part = detached_copy(module, type(module))
        norm = match.view(part)
        sizes = {"num_groups": width, "num_channels": width * channels, "num_features": width}
        norm.__dict__.update({name: size for name, size in sizes.items() if name in norm.__dict__})
        along = slice(first * channels, (first + width) * channels)
        for name, parameter in norm._parameters.items():
            if parameter is not None:
                norm._parameters[name] = nn.Parameter(parameter.detach()[along], parameter.requires_grad)
        found.append(_Piece(part, partial(_cut, where=(slice(row, row + 1), along))))
    return found, min(1.0, len(found) * width / (len(x) * groups))


def _cut(tensor: Tensor, where: tuple[slice, ...]) -> Tensor:
    return tensor[where]


def spread(size: int, width: int, most: int) -> list[int]:
    """At most ``most`` starts of ``width`` out of ``size``, the first and the last among them."""
    count = min(-(-size // width), most)
    return sorted({round(i * (size - width) / max(1, count - 1)) for i in range(count)})


def widest(module: nn.Module) -> int:
    """The most features a Linear in ``module`` makes of a sample."""
    return max((m.out_features for m in module.modules() if isinstance(m, nn.Linear)), default=0)


def _independent_dims(match: Match, module: Any, x: Tensor) -> list[int]:
    """The dims along which an element's result does not depend on other samples; for a BatchNorm, of whose batch a part
    is a batch too, the batch."""
    kind = kind_of(match)
    if isinstance(kind, Kind):
        return [d for d in range(x.dim()) if d != match.value(module, "dim") % x.dim()]
    if isinstance(kind, Norm) and kind.rows:
        return list(range(x.dim() - len(match.view(module).normalized_shape)))
    unbatched = getattr(module, "_get_no_batch_dim", None)
    return [] if unbatched is not None and x.dim() == unbatched() else [0]


class KernelWitness(TorchDispatchMode):
    """Sees whether an op of ours ran."""

    ran = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        declined = all(o is None for o in (out if isinstance(out, tuple | list) else (out,)))
        declined = declined and func.__name__.endswith(("_or_none.default", "_recorded.default"))
        self.ran = self.ran or (func.namespace == "normswap" and not declined)
        return out


class Cotangent:
    """One random cotangent for every run of a comparison, whatever the dtype of its output; the same every time."""

    def __init__(self) -> None:
        self.drawn: Tensor | None = None

    def __call__(self, output: Tensor) -> Tensor:
        if self.drawn is None:
            generator = torch.Generator(output.device).manual_seed(_SEED)
            self.drawn = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
        return self.drawn.to(output.dtype)


@dataclass
class _Run:
    """One execution of a copy of the site: its output, gradients by name, and the copy with its buffers afterwards."""

    site: nn.Module
    output: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)

    @property
    def buffers(self) -> dict[str, Tensor]:
        return dict(self.site.named_buffers())


_Around = Callable[[Tensor], contextlib.AbstractContextManager[Any]]


def _execute(
    site: nn.Module,
    x: Tensor,
    cotangent: Callable[[Tensor], Tensor] | None,
    around: _Around = lambda _: contextlib.nullcontext(),
) -> _Run:
    """Run ``site`` on ``x``, the call itself within ``around(x)``."""
    if cotangent is None:
        with torch.no_grad(), around(x):
            return _Run(site, site(x))
    with torch.enable_grad():
        leaf = x.clone().requires_grad_(x.is_floating_point())  # else the module's own error is to be heard
        with around(leaf):
            output = site(leaf)
        wanted = {"input": leaf, **{n: p for n, p in site.named_parameters() if p.requires_grad}}
        found = torch.autograd.grad(output, list(wanted.values()), cotangent(output), allow_unused=True)
    return _Run(site, output.detach(), {n: g for n, g in zip(wanted, found, strict=True) if g is not None})


def _ours(
    match: Match, module: nn.Module, x: Tensor, cotangent: Callable[[Tensor], Tensor] | None
) -> tuple[_Run, bool] | Comparison:
    """Ours, and whether our kernel ran; the problem when it raises."""
    swapped = modules.swapped_class(match.kind, type(module), match.attributes)
    witness = KernelWitness()
    try:
        # On a CPU no kernel of ours runs, and a dispatch mode would load torch._dynamo: a second.
        with witness if x.is_cuda else contextlib.nullcontext():
            run = _execute(detached_copy(module, swapped), x, cotangent)
    except Exception as error:  # whatever ours raises where PyTorch does not is a mismatch like any other
        return Comparison(kernel_ran=False, problem=f"raises {type(error).__name__}: {error}", **_where(x))
    return run, witness.ran


def _where(x: Tensor) -> dict[str, Any]:
    return {"dtype": str(x.dtype).removeprefix("torch."), "device": str(x.device)}


def _compare_piece(
    match: Match, module: nn.Module, x: Tensor, gradients: bool, ours: tuple[_Run, bool] | None
) -> Comparison:
    """Compare on one piece; ``ours`` is what ours made of it without gradients, if that is known."""
    cotangent = Cotangent() if gradients else None
    eager = _execute(detached_copy(module, type(module)), x, cotangent)
    referee, size = _referee(match, module, x, cotangent)
    checks = Checks(kind_of(match).c, kind_of(match).c_gradient)
    # What runs without gradients may be another path than what runs with them: both are compared.
    ran = False
    for path in (None, cotangent) if gradients else (None,):
        found = _ours(match, module, x, path) if ours is None or path is not None else ours
        if isinstance(found, Comparison):
            return replace(found, kernel_ran=ran)
        run, kernel_ran = found
        ran = ran or kernel_ran
        _add_run(checks, size, run, eager, referee, kernel_ran)
        if path is not None and not checks.problem:
            _add_gradients(checks, size, run, eager, referee, cotangent, kernel_ran)
    return Comparison(
        checks.share,
        checks.eager_share,
        ran,
        gradients,
        1.0,
        **_where(x),
        finite=bool(eager.output.isfinite().any()),
        problem=checks.problem,
        note=checks.note,
    )


def _referee(
    match: Match, module: nn.Module, x: Tensor, cotangent: Callable[[Tensor], Tensor] | None
) -> tuple[_Run, Magnitudes]:
    """The original site in float64, outside autocast; what depends on the dtype in the original is as it is there."""
    with torch.autocast(x.device.type, enabled=False):
        copy = _float64_copy(match, module, x)
        around = lambda leaf: _as_in_the_original(match, module, copy, x, leaf)  # noqa: E731
        run = _execute(copy, x.double(), cotangent, around)
        with torch.no_grad():
            size = magnitudes(match, _float64_copy(match, module, x), x.double(), x.dtype)
    return run, size


def _as_in_the_original(
    match: Match, module: nn.Module, copy: nn.Module, x: Tensor, leaf: Tensor
) -> contextlib.AbstractContextManager[Any]:
    """What gives the float64 ``copy`` of ``module`` the roundings that the original declares on ``x``."""
    kind = kind_of(match)
    if isinstance(kind, Kind) and not kind.casts:
        return RoundedStatistics(x.dtype)
    if not (match.registered or isinstance(kind, Kind)):
        return contextlib.nullcontext()
    named = dict((*module.named_parameters(), *module.named_buffers()))
    ours = dict((*copy.named_parameters(), *copy.named_buffers()))
    return Lifted({leaf: x.dtype, **{ours[name]: tensor.dtype for name, tensor in named.items()}})


def _float64_copy(match: Match, module: nn.Module, x: Tensor) -> nn.Module:
    copy: Any = detached_copy(module, type(module), torch.float64)
    plain = isinstance(kind_of(match), Norm) and not match.registered
    if plain and copy.eps is None and x.dtype is not torch.float64:
        copy.eps = torch.finfo(torch.float32).eps  # what PyTorch takes for None: the epsilon of what it computes in
    return copy


def _add_run(checks: Checks, size: Magnitudes, ours: _Run, eager: _Run, referee: _Run, kernel_ran: bool) -> None:
    """Output and buffers."""
    if checks.are_alike([ours.output], [eager.output]):
        checks.add("output", ours.output, eager.output, referee.output, size.output)
        checks.add_buffers(ours.buffers, eager.buffers, referee.buffers, size, kernel_ran)


def _add_gradients(
    checks: Checks, size: Magnitudes, ours: _Run, eager: _Run, referee: _Run, cotangent: Any, kernel_ran: bool
) -> None:
    """Gradients of the input and of every parameter."""
    if not checks.reach_the_same(ours.gradients, eager.gradients):
        return
    c = checks.c_gradient
    with torch.no_grad():
        terms = size.gradients(cotangent(referee.output))
    for name, gradient in ours.gradients.items():
        extra = own_rounding(gradient.dtype, kernel_ran) * terms[name]
        theirs, expected = eager.gradients[name], referee.gradients[name]
        checks.add(f"gradient of {name}", gradient, theirs, expected, terms[name], extra, c)
