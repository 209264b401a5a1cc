"""One site on one input: ours, PyTorch's own and the original in float64, compared tensor by tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normswap import modules
from normswap.criterion import (
    C_GRADIENT,
    C,
    Magnitudes,
    RoundedMeans,
    error_share,
    excused,
    magnitudes,
    mask_mismatch,
    matmul_unit,
    own_rounding,
)
from normswap.lifted import Lifted
from normswap.plan import Match, is_by_hand
from normswap.sites import detached_copy

_SLICE_ELEMENTS = 2**25
_TOTAL_ELEMENTS = 2**27

# Not a seed a person would choose: inputs drawn with the same one would equal the cotangent, and their gradient cancel.
_SEED = 0x6E6F726D


@dataclass(frozen=True)
class Comparison:
    """``share`` and ``eager`` are the worst error, ours and PyTorch's own, as a share of its limit; ``kernel_ran``
    whether an op of ours did; ``coverage`` the share of the samples compared; ``problem`` why they do not match, "" if
    they do; ``note`` what else is worth a word."""

    share: float = 0.0
    eager: float = 0.0
    kernel_ran: bool = True
    gradients: bool = False
    coverage: float = 1.0
    dtype: str = ""
    device: str = ""
    problem: str = ""
    note: str = ""

    def worst(self, other: Comparison) -> Comparison:
        """Both as one: the worse of each."""
        return replace(
            other,
            share=max(self.share, other.share),
            eager=max(self.eager, other.eager),
            kernel_ran=self.kernel_ran and other.kernel_ran,
            gradients=self.gradients or other.gradients,
            coverage=min(self.coverage, other.coverage),
            problem=self.problem or other.problem,
            note=self.note or other.note,
        )


def compare(match: Match, module: nn.Module, x: Tensor, gradients: bool) -> Comparison:
    """Compare the swap ``match`` of ``module``, which is in its original class, on ``x``, under the present autocast.

    Large inputs whose samples are independent are compared on slices of them. Neither ``module`` nor ``x`` is changed.
    What the original itself raises on ``x`` is raised; what ours raises is a problem.
    """
    with torch.inference_mode(False):
        dim, starts, width = _slices(match, module, x)
        worst: Comparison | None = None
        for start in starts:
            found = _compare_piece(
                match, module, x.detach().narrow(dim, start, width) if width else x.detach(), gradients
            )
            worst = found if worst is None else worst.worst(found)
            if worst.problem:
                break
    coverage = min(1.0, len(starts) * width / x.shape[dim]) if width else 1.0
    return replace(worst or Comparison(problem="no input to compare on"), coverage=coverage)


def _slices(match: Match, module: nn.Module, x: Tensor) -> tuple[int, list[int], int]:
    """(dim, starts, width) of the slices of ``x`` to compare: first, last and some between. Width 0: all of it."""
    dims = _independent_dims(match, module, x)
    if x.numel() <= _SLICE_ELEMENTS or not dims:
        return 0, [0], 0
    dim = max(dims, key=lambda d: x.shape[d])
    size = x.shape[dim]
    sample = x.numel() // size
    width = min(size, max(1, _SLICE_ELEMENTS // sample))
    count = min(-(-size // width), max(1, _TOTAL_ELEMENTS // (width * sample)))
    starts = sorted({round(i * (size - width) / max(1, count - 1)) for i in range(count)})
    return dim, starts, width


def _independent_dims(match: Match, module: Any, x: Tensor) -> list[int]:
    """The dims along which an element's result does not depend on other samples."""
    if match.kind == "group_norm":
        return [0]
    if match.kind == "l1_norm" or is_by_hand(match.kind, match.attributes):
        return [d for d in range(x.dim()) if d != match.value(module, "dim") % x.dim()]
    if match.kind in ("layer_norm", "rms_norm"):
        return list(range(x.dim() - len(module.normalized_shape)))
    return []


class _KernelWitness(TorchDispatchMode):
    """Sees whether an op of ours ran."""

    ran = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran = self.ran or func.namespace == "normswap"
        return func(*args, **(kwargs or {}))


class _Cotangent:
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
        leaf = x.clone().requires_grad_()
        with around(leaf):
            output = site(leaf)
        wanted = {"input": leaf, **{n: p for n, p in site.named_parameters() if p.requires_grad}}
        found = torch.autograd.grad(output, list(wanted.values()), cotangent(output), allow_unused=True)
    return _Run(site, output.detach(), {n: g for n, g in zip(wanted, found, strict=True) if g is not None})


def _compare_piece(match: Match, module: nn.Module, x: Tensor, gradients: bool) -> Comparison:
    cls = type(module)
    swapped = modules.swapped_class(match.kind, cls, match.attributes)
    cotangent = _Cotangent() if gradients else None
    where: dict[str, Any] = {"dtype": str(x.dtype).removeprefix("torch."), "device": str(x.device)}
    eager = _execute(detached_copy(module, cls), x, cotangent)
    referee, size = _referee(match, module, x, cotangent)
    checks = _Checks(match.kind, size)
    # What runs without gradients may be another path than what runs with them: both are compared.
    paths = (None, cotangent) if gradients else (None,)
    ran = False
    for path in paths:
        try:
            with _KernelWitness() as witness:
                ours = _execute(detached_copy(module, swapped), x, path)
        except Exception as error:  # whatever ours raises where PyTorch does not is a mismatch like any other
            return Comparison(kernel_ran=ran, problem=f"raises {type(error).__name__}: {error}", **where)
        ran = ran or witness.ran
        checks.add_run(ours, eager, referee, witness.ran)
        if path is not None and not checks.problem:
            checks.add_gradients(ours.gradients, eager, referee, cotangent, witness.ran)
    return Comparison(checks.ours, checks.eager, ran, gradients, 1.0, **where, problem=checks.problem, note=checks.note)


def _referee(
    match: Match, module: nn.Module, x: Tensor, cotangent: Callable[[Tensor], Tensor] | None
) -> tuple[_Run, Magnitudes]:
    """The original site in float64, outside autocast; what depends on the dtype in the original is as it is there."""
    unit = matmul_unit(x)
    with torch.autocast(x.device.type, enabled=False):
        copy = _float64_copy(match, module, x)
        run = _execute(copy, x.double(), cotangent, lambda leaf: _as_in_the_original(match, module, copy, x, leaf))
        with torch.no_grad():
            size = magnitudes(match, _float64_copy(match, module, x), x.double(), x.dtype, unit)
    return run, size


def _as_in_the_original(
    match: Match, module: nn.Module, copy: nn.Module, x: Tensor, leaf: Tensor
) -> contextlib.AbstractContextManager[Any]:
    """What gives the float64 ``copy`` of ``module`` the roundings that the original declares on ``x``."""
    if match.kind == "l1_norm":
        return RoundedMeans(x.dtype)
    if not is_by_hand(match.kind, match.attributes):
        return contextlib.nullcontext()
    named = dict((*module.named_parameters(), *module.named_buffers()))
    ours = dict((*copy.named_parameters(), *copy.named_buffers()))
    return Lifted({leaf: x.dtype, **{ours[name]: tensor.dtype for name, tensor in named.items()}})


def _float64_copy(match: Match, module: nn.Module, x: Tensor) -> nn.Module:
    copy: Any = detached_copy(module, type(module), torch.float64)
    by_hand = is_by_hand(match.kind, match.attributes)
    if match.kind == "rms_norm" and not by_hand and copy.eps is None and x.dtype is not torch.float64:
        copy.eps = torch.finfo(torch.float32).eps  # what PyTorch takes for None: the epsilon of what it computes in
    return copy


class _Checks:
    """The tensors compared so far: the worst shares of the limit, ours and PyTorch's, and the first problem."""

    def __init__(self, kind: str, size: Magnitudes) -> None:
        self.c, self.c_gradient, self.size = C[kind], C_GRADIENT[kind], size
        self.ours = self.eager = 0.0
        self.problem = self.note = ""

    def add_run(self, ours: _Run, eager: _Run, referee: _Run, kernel_ran: bool) -> None:
        """Output and buffers."""
        size, coarse = self.size, self.size.coarse
        if (ours.output.shape, ours.output.dtype) != (eager.output.shape, eager.output.dtype):
            self._fail(f"output is {_form(ours.output)}, PyTorch's {_form(eager.output)}")
            return
        extra = 0.0 if coarse is None else self.c * size.coarse_unit * coarse
        self._add("output", ours.output, eager.output, referee.output, self.c, size.output, extra)
        expected, mine = referee.buffers, ours.buffers
        for name, buffer in eager.buffers.items():
            if not buffer.is_floating_point():
                if not torch.equal(mine[name], buffer):
                    self._fail(f"buffer {name} differs from PyTorch's")
                continue
            magnitude = size.buffers.get(name, expected[name].abs())
            moved = size.coarse_buffers.get(name, torch.zeros_like(magnitude))
            extra = own_rounding(buffer.dtype, kernel_ran) * magnitude + self.c * size.coarse_unit * moved
            self._add(f"buffer {name}", mine[name], buffer, expected[name], self.c, magnitude, extra)

    def add_gradients(
        self, ours: Mapping[str, Tensor], eager: _Run, referee: _Run, cotangent: Any, kernel_ran: bool
    ) -> None:
        """Gradients of the input and of every parameter."""
        if missing := sorted(ours.keys() ^ eager.gradients.keys()):
            self._fail(f"gradients reach other tensors than PyTorch's: {', '.join(missing)}")
            return
        c = self.c_gradient
        with torch.no_grad():
            terms = self.size.gradients(cotangent(referee.output))
        for name, gradient in ours.items():
            # Operands of the backward matmuls round too.
            extra = (own_rounding(gradient.dtype, kernel_ran) + c * self.size.coarse_unit) * terms[name]
            theirs, expected = eager.gradients[name], referee.gradients[name]
            self._add(f"gradient of {name}", gradient, theirs, expected, c, terms[name], extra)

    def _add(
        self,
        what: str,
        ours: Tensor,
        eager: Tensor,
        reference: Tensor,
        c: float,
        magnitude: Tensor,
        extra: Tensor | float,
    ) -> None:
        share = error_share(ours, reference, magnitude, c, extra)
        theirs = error_share(eager, reference, magnitude, c, extra)
        if share > 1.0:  # an element that is PyTorch's own, bit for bit, is not held against ours
            changed = ~((ours == eager) | (ours.isnan() & eager.isnan()))
            limits = (
                t.expand(ours.shape)[changed] for t in (reference, magnitude, torch.as_tensor(extra).to(reference))
            )
            expected, size, added = limits
            share = error_share(ours[changed], expected, size, c, added)
        self.ours, self.eager = max(self.ours, share), max(self.eager, theirs)
        if wrong := int(excused(eager, reference).sum()):
            self.note = self.note or f"{what}: PyTorch's is not finite in {wrong} elements that float64 has finite"
        elif theirs > 1.0:
            self.note = self.note or f"{what}: PyTorch's own error is {theirs:.3g} times the limit"
        if differs := mask_mismatch(ours, eager, reference):
            self._fail(f"{what}: {differs}")
        elif share > 1.0:
            self._fail(f"{what}: error is {share:.3g} times its limit")

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or problem


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
