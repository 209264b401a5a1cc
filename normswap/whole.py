"""The swapped model against the original, end to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normswap import modules
from normswap.sites import classes, preserved

_SPREADS = 4.0
_SEEDS = (1, 2)
_FLOOR = {
    # Below these shares of the output's largest value a difference is rounding, whatever the jitter says: a few
    # dozen ulps of the dtype, as left by matmuls whose algorithm depends on alignment or workspace.
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}


@dataclass(frozen=True)
class ModelProof:
    """The largest difference of any output, the limit it was held against (4 times the spread of the original when
    the outputs of its sites move by one ulp) and the largest value of the original's output."""

    max_error: float
    limit: float
    largest: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        return not self.problem and self.max_error <= self.limit


def compare_models(model: nn.Module, sites: Sequence[nn.Module], run: Callable[[], Any]) -> ModelProof:
    """Run the original, the original with its site outputs jittered, and the swapped ``model``, all with the same
    random numbers and buffers; ``sites`` are the swapped modules. The model is left as it was."""
    original = [(site, modules.original_class(site) or type(site)) for site in sites]
    with classes(original):
        expected = _outputs(model, run)
        spread = max(_distance(_jittered(model, sites, run, seed), expected) for seed in _SEEDS)
    ours = _outputs(model, run)
    problem = _structure_problem(ours, expected)
    if problem:
        return ModelProof(0.0, 0.0, 0.0, problem)
    largest = max((_largest(t) for t in expected), default=0.0)
    floor = max((_FLOOR.get(t.dtype, 0.0) for t in expected), default=0.0) * largest
    return ModelProof(_distance(ours, expected), max(_SPREADS * spread, floor), largest)


def _outputs(model: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    with preserved(model), torch.no_grad():
        return [leaf.detach().clone() for leaf in tree_leaves(run()) if isinstance(leaf, Tensor)]


def _jittered(model: nn.Module, sites: Sequence[nn.Module], run: Callable[[], Any], seed: int) -> list[Tensor]:
    handles = []
    try:
        for site in sites:
            handles.append(site.register_forward_hook(_jitter(seed)))
        return _outputs(model, run)
    finally:
        for handle in handles:
            handle.remove()


def _jitter(seed: int) -> Callable[..., Any]:
    """A forward hook that moves each element by minus one, zero or one ulp."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        generator = torch.Generator(output.device).manual_seed(seed)
        steps = torch.randint(-1, 2, output.shape, generator=generator, device=output.device, dtype=torch.int8)
        return output + output * steps * torch.finfo(output.dtype).eps

    return hook


def _structure_problem(ours: list[Tensor], expected: list[Tensor]) -> str:
    if [(t.shape, t.dtype) for t in ours] != [(t.shape, t.dtype) for t in expected]:
        return "the outputs have other shapes or dtypes than the original's"
    for mine, theirs in zip(ours, expected, strict=True):
        if theirs.is_floating_point() and not torch.equal(mine.isfinite(), theirs.isfinite()):
            return "the outputs are not finite where the original's are, or the reverse"
    return ""


def _distance(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference between floating-point outputs, over elements finite in both."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a.is_floating_point()]
    pieces = (zip(_pieces(a), _pieces(b), strict=True) for a, b in pairs)
    return max((_largest(p.double() - q.double()) for piece in pieces for p, q in piece), default=0.0)


def _largest(tensor: Tensor) -> float:
    """The largest finite magnitude, 0 for an empty tensor."""
    if not tensor.is_floating_point():
        return 0.0
    return max((float(p.abs().nan_to_num(0.0, 0.0, 0.0).max()) for p in _pieces(tensor)), default=0.0)


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """The elements in runs small enough to be compared in float64."""
    return tensor.reshape(-1).split(2**25) if tensor.numel() else ()
