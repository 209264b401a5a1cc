"""The proof: every swapped site against a float64 run of the original site, and the whole model against the original.

While the original runs once on the example inputs, each call of a site is done again three times on copies of it: as
it was (PyTorch's result), as it was in float64 (the referee), and swapped. Only numbers are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normswap import modules
from normswap.criterion import C, Magnitudes, RoundedMeans, error_share, magnitudes, mask_mismatch
from normswap.plan import Match, Swap
from normswap.sites import classes, detached_copy, preserved

MODES = ("auto", "forward", "grad", "off")

_MAX_CALLS = 8
_SLICE_ELEMENTS = 2**25
_TOTAL_ELEMENTS = 2**27
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


@dataclass(frozen=True)
class _Comparison:
    share: float = 0.0
    eager: float = 0.0
    kernel_ran: bool = True
    gradients: bool = False
    coverage: float = 1.0
    dtype: str = ""
    device: str = ""
    problem: str = ""

    def worst(self, other: _Comparison) -> _Comparison:
        return replace(
            other,
            share=max(self.share, other.share),
            eager=max(self.eager, other.eager),
            kernel_ran=self.kernel_ran and other.kernel_ran,
            gradients=self.gradients or other.gradients,
            coverage=min(self.coverage, other.coverage),
            problem=self.problem or other.problem,
        )


class _KernelWitness(TorchDispatchMode):
    """Sees whether an op of ours ran."""

    ran = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran = self.ran or func.namespace == "normswap"
        return func(*args, **(kwargs or {}))


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
    sites = [(swap, model.get_submodule(swap.site.name)) for swap in swaps]
    found: dict[str, list[_Comparison]] = {swap.site.name: [] for swap in swaps}
    with preserved(model), classes([(m, _original(m)) for _, m in sites]):
        if run is not None:
            with _comparing(sites, found, gradients), torch.no_grad():
                run()
        captured = {name for name, comparisons in found.items() if comparisons}
        for swap, module in sites:
            if swap.site.name not in captured:
                for x in _synthesised(swap.match, module, like):
                    found[swap.site.name].append(_compare(swap.match, module, x, gradients))
    return [
        _proof(swap, module, found[swap.site.name], "captured" if swap.site.name in captured else "synthesised")
        for swap, module in sites
    ]


def _original(module: nn.Module) -> type[nn.Module]:
    return modules.original_class(module) or type(module)


def _proof(swap: Swap, module: nn.Module, comparisons: list[_Comparison], inputs: str) -> SiteProof:
    worst = comparisons[0]
    for comparison in comparisons[1:]:
        worst = worst.worst(comparison)
    # A site on which PyTorch itself misses the limit (it may on a CPU) must not be worse than PyTorch.
    failed = bool(worst.problem) or worst.share > max(1.0, worst.eager)
    status = "failed" if failed else "proved" if worst.kernel_ran else "wiring"
    detail = worst.problem or (f"error is {worst.share:.3g} times its limit" if failed else "")
    return SiteProof(
        swap.site.name,
        swap.match.kind,
        status,
        inputs,
        "train" if _batch_mode(swap.match, module) else "eval",
        worst.dtype,
        worst.device,
        worst.share,
        worst.eager,
        worst.gradients,
        worst.coverage,
        detail,
    )


def _batch_mode(match: Match, module: nn.Module) -> bool:
    name = match.attributes.get("batch_norm")
    return bool(getattr(module, name).training) if name else module.training


@contextlib.contextmanager
def _comparing(
    sites: Sequence[tuple[Swap, nn.Module]], found: dict[str, list[_Comparison]], gradients: bool
) -> Iterator[None]:
    """Compare at every call of every site in the block, before the original sees the input."""
    handles = []
    try:
        for swap, module in sites:
            hook = _hook(swap, found[swap.site.name], gradients)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(swap: Swap, comparisons: list[_Comparison], gradients: bool) -> Callable[..., None]:
    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        if x is not None and x.numel() > 0 and len(comparisons) < _MAX_CALLS:
            comparisons.append(_compare(swap.match, module, x, gradients))

    return compare


# --- one site, one input ------------------------------------------------------------------------------------------


def _compare(match: Match, module: nn.Module, x: Tensor, gradients: bool) -> _Comparison:
    """Ours, PyTorch's and the referee's result on ``x``; ``module`` is in its original class."""
    pieces, coverage = _pieces(match, module, x)
    worst: _Comparison | None = None
    for piece in pieces:
        found = replace(_compare_piece(match, module, piece.detach(), gradients), coverage=coverage)
        worst = found if worst is None else worst.worst(found)
        if worst.problem:
            break
    return worst or _Comparison(problem="no input to compare on")


def _pieces(match: Match, module: Any, x: Tensor) -> tuple[list[Tensor], float]:
    """``x`` itself, or, where it is large and its samples are independent, slices of samples: first, last, spread."""
    if x.numel() <= _SLICE_ELEMENTS or not _samples_independent(match, module, x):
        return [x], 1.0
    sample = x[0].numel()
    width = max(1, _SLICE_ELEMENTS // sample)
    count = min(-(-len(x) // width), max(1, _TOTAL_ELEMENTS // (width * sample)))
    starts = sorted({round(i * (len(x) - width) / max(1, count - 1)) for i in range(count)})
    return [x[start : start + width] for start in starts], min(1.0, len(starts) * width / len(x))


def _samples_independent(match: Match, module: Any, x: Tensor) -> bool:
    if match.kind == "group_norm":
        return True
    if match.kind in ("layer_norm", "rms_norm"):
        return x.dim() > len(module.normalized_shape)
    return match.kind == "l1_norm" and x.dim() > 1 and match.attributes["dim"] not in (0, -x.dim())


@dataclass
class _Run:
    """One execution of a copy of the site: its output, gradients by name, and buffers afterwards."""

    site: nn.Module
    output: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)

    @property
    def buffers(self) -> dict[str, Tensor]:
        return dict(self.site.named_buffers())


def _execute(site: nn.Module, x: Tensor, cotangent: Callable[[Tensor], Tensor] | None) -> _Run:
    if cotangent is None:
        with torch.no_grad():
            return _Run(site, site(x))
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        output = site(leaf)
        wanted = {"input": leaf, **{n: p for n, p in site.named_parameters() if p.requires_grad}}
        found = torch.autograd.grad(output, list(wanted.values()), cotangent(output), allow_unused=True)
    return _Run(site, output.detach(), {n: g for n, g in zip(wanted, found, strict=True) if g is not None})


def _compare_piece(match: Match, module: nn.Module, x: Tensor, gradients: bool) -> _Comparison:
    cls = type(module)
    swapped = modules.swapped_class(match.kind, cls, match.attributes)
    eager = _execute(detached_copy(module, cls), x, None)
    dy = torch.randn_like(eager.output) if gradients else None
    cotangent = None if dy is None else (lambda out: dy.to(out.dtype))
    if gradients:
        eager = _execute(detached_copy(module, cls), x, cotangent)
    with _KernelWitness() as witness:
        ours = _execute(detached_copy(module, swapped), x, cotangent)
    if (ours.output.shape, ours.output.dtype) != (eager.output.shape, eager.output.dtype):
        return _Comparison(problem=f"output is {ours.output.dtype} {tuple(ours.output.shape)}, PyTorch's differs")
    forward_ran = witness.ran
    if gradients:  # what runs without gradients may be another path
        with _KernelWitness() as witness:
            plain = _execute(detached_copy(module, swapped), x, None)
        forward_ran = forward_ran and witness.ran
    referee, size = _referee(match, module, x, cotangent)
    shares = _Shares(match, x.dtype, size)
    shares.add(ours.output, eager.output, referee.output, size.output)
    if gradients:
        shares.add(plain.output, eager.output, referee.output, size.output)
        with torch.no_grad():
            terms = size.gradients(dy.double())  # type: ignore[union-attr]
        for name, magnitude in terms.items():
            if name in referee.gradients:
                shares.add_gradient(name, ours.gradients, eager.gradients, referee.gradients[name], magnitude)
    problem = shares.problem or _buffer_problem(ours.buffers, eager.buffers)
    where = str(x.dtype).removeprefix("torch."), str(x.device)
    return _Comparison(shares.ours, shares.eager, forward_ran, gradients, 1.0, *where, problem)


def _referee(
    match: Match, module: nn.Module, x: Tensor, cotangent: Callable[[Tensor], Tensor] | None
) -> tuple[_Run, Magnitudes]:
    """The original site in float64, outside autocast; an L1 norm of 16 bits rounds its mean as the original does."""
    rounds = match.kind == "l1_norm" and x.dtype is not torch.float32
    rounding = RoundedMeans(x.dtype) if rounds else contextlib.nullcontext()
    with torch.autocast(x.device.type, enabled=False):
        with rounding:
            run = _execute(detached_copy(module, type(module), torch.float64), x.double(), cotangent)
        with torch.no_grad():
            before = detached_copy(module, type(module), torch.float64)
            size = magnitudes(match, before, x.double(), x.dtype, _matmul_unit(x))
    return run, size


def _matmul_unit(x: Tensor) -> float:
    """The unit roundoff of a matmul of ``x``'s dtype where it is coarser than float32's, else 0."""
    if x.dtype in (torch.float16, torch.bfloat16):
        return torch.finfo(x.dtype).eps / 2
    return 2.0**-11 if x.is_cuda and torch.backends.cuda.matmul.allow_tf32 else 0.0


class _Shares:
    """The worst shares of the limit so far, ours and PyTorch's."""

    def __init__(self, match: Match, dtype: torch.dtype, size: Magnitudes) -> None:
        self.c, self.size, self.coarse = C[match.kind], size, size.coarse_unit
        self.ours = self.eager = 0.0
        self.problem = ""

    def add(self, ours: Tensor, eager: Tensor, reference: Tensor, magnitude: Tensor) -> None:
        extra = 0.0 if self.size.coarse is None else self.c * self.coarse * self.size.coarse
        self.problem = self.problem or mask_mismatch(ours, eager, reference)
        self.ours = max(self.ours, error_share(ours, reference, magnitude, self.c, extra))
        self.eager = max(self.eager, error_share(eager, reference, magnitude, self.c, extra))

    def add_gradient(
        self,
        name: str,
        ours: Mapping[str, Tensor],
        eager: Mapping[str, Tensor],
        reference: Tensor,
        magnitude: Tensor,
    ) -> None:
        if name not in ours:
            self.problem = self.problem or f"no gradient reaches {name}"
            return
        extra = self.c * self.coarse * magnitude  # operands of the backward matmuls round too
        self.problem = self.problem or mask_mismatch(ours[name], eager[name], reference)
        self.ours = max(self.ours, error_share(ours[name], reference, magnitude, self.c, extra))
        self.eager = max(self.eager, error_share(eager[name], reference, magnitude, self.c, extra))


def _buffer_problem(ours: Mapping[str, Tensor], eager: Mapping[str, Tensor]) -> str:
    """Running statistics must move as PyTorch's do: to a few float32 roundings, counters exactly."""
    for name, buffer in eager.items():
        mine = ours[name]
        coarse = (
            1e-2 if torch.backends.cuda.matmul.allow_tf32 or buffer.dtype in (torch.float16, torch.bfloat16) else 1e-4
        )
        if not buffer.is_floating_point():
            if not torch.equal(mine, buffer):
                return f"buffer {name} differs from PyTorch's"
        elif not torch.allclose(mine, buffer, rtol=coarse, atol=coarse * float(buffer.abs().mean()), equal_nan=True):
            return f"buffer {name} differs from PyTorch's"
    return ""


# --- synthesised inputs -------------------------------------------------------------------------------------------


def _synthesised(match: Match, module: Any, like: Tensor | None) -> Iterator[Tensor]:
    """Inputs for a site that no example reached: unit spread about means of 0 to 1000."""
    parameter = next((p for p in module.parameters() if p.is_floating_point()), like)
    dtype, device = (torch.float32, torch.device("cpu")) if parameter is None else (parameter.dtype, parameter.device)
    generator = torch.Generator().manual_seed(0)
    means = _SYNTHETIC_MEANS[:2] if match.kind == "linear_scale_batch_norm" else _SYNTHETIC_MEANS
    for mean in means:
        x = torch.randn(_synthetic_shape(match, module), generator=generator, dtype=torch.float64) + mean
        yield x.to(device, dtype)


def _synthetic_shape(match: Match, module: Any) -> tuple[int, ...]:
    if match.kind == "group_norm":
        return (2, module.num_channels, 6, 5)
    if match.kind == "l1_norm":
        return (4, 33)
    if match.kind == "linear_scale_batch_norm":
        return (24, getattr(module, match.attributes["linear"]).in_features)
    return (4, 3, *module.normalized_shape)
