"""The swapped model against the original, end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normswap.installed import class_before
from normswap.untouched import classes, preserved

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
    """The largest difference in the output tensor that comes closest to its limit, that limit (4 times the spread of
    the original when the outputs of its sites move by one ulp) and the largest value of the original's tensor."""

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
    original = [(site, class_before(site)) for site in sites]
    with classes(original):
        expected = _outputs(model, run)
        moved = [_jittered(model, sites, run, seed) for seed in _SEEDS]
    ours = _outputs(model, run)
    if problem := _structure_problem(ours, expected, moved):
        return ModelProof(0.0, 0.0, 0.0, problem)
    outputs = zip(ours, expected, *moved, strict=True)
    proofs = [_compare(*tensors) for tensors in outputs if tensors[0].is_floating_point()]
    none = ModelProof(0.0, 0.0, 0.0)
    return max(proofs, key=lambda proof: proof.max_error / max(proof.limit, 1e-300), default=none)


def _compare(ours: Tensor, expected: Tensor, *moved: Tensor) -> ModelProof:
    """One output tensor: a large one beside it must not lend it its limit."""
    largest = _largest(expected)
    spread = max(_distance(one, expected) for one in moved)
    floor = _FLOOR.get(expected.dtype, 0.0) * largest
    return ModelProof(_distance(ours, expected), max(_SPREADS * spread, floor), largest)


def _outputs(model: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    with preserved(model), torch.no_grad():
        return [tensor.detach().clone() for tensor in tensors_in(run())]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for one in fields(leaf):
                yield from tensors_in(getattr(leaf, one.name))


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
        if not (isinstance(output, Tensor) and output.is_floating_point()):
            return output
        generator = torch.Generator(output.device).manual_seed(seed)
        steps = torch.randint(-1, 2, output.shape, generator=generator, device=output.device, dtype=torch.int8)
        return output + output * steps * torch.finfo(output.dtype).eps

    return hook


def _structure_problem(ours: list[Tensor], expected: list[Tensor], moved: list[list[Tensor]]) -> str:
    if not expected:
        return "the output holds no tensor to compare"
    if _forms(ours) != _forms(expected):
        return "the outputs have other shapes or dtypes than the original's"
    if any(_forms(one) != _forms(expected) for one in moved):
        return "the original's own output changes its shape when its norms move by one ulp: nothing to compare"
    floating = [tensor for tensor in expected if tensor.is_floating_point() and tensor.numel()]
    if floating and not any(tensor.isfinite().any() for tensor in floating):
        return "the original's output is nowhere finite: nothing to compare"
    if all(torch.equal(mine.isfinite(), theirs.isfinite()) for mine, theirs in zip(ours, expected, strict=True)):
        return ""
    return "the outputs are not finite where the original's are, or the reverse"


def _forms(tensors: list[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(t.shape, t.dtype) for t in tensors]


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference between floating-point tensors, over elements finite in both."""
    pairs = zip(_pieces(one), _pieces(other), strict=True)
    return max((_largest(p.double() - q.double()) for p, q in pairs), default=0.0)


def _largest(tensor: Tensor) -> float:
    """The largest finite magnitude, 0 for an empty tensor."""
    return max((float(p.abs().nan_to_num(0.0, 0.0, 0.0).max()) for p in _pieces(tensor)), default=0.0)


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """The elements in runs small enough to be compared in float64."""
    return tensor.reshape(-1).split(2**25) if tensor.numel() else ()
