"""The swapped model against the original, end to end, and whether it asks for the class of what is swapped in it, as
``type(self.block) is Block`` does: which sites change what it computes by having another class, whatever that does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normswap.held import same_values
from normswap.installed import class_before, installed_class, marks, unannounced
from normswap.modules import Rewritten
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
    floor = _FLOOR.get(expected.dtype, torch.finfo(expected.dtype).eps) * largest
    return ModelProof(_distance(ours, expected), max(_SPREADS * spread, floor), largest)


def _outputs(model: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    with preserved(model), torch.no_grad():
        return _copies_in(run())


def _copies_in(value: Any) -> list[Tensor]:
    """Copies of ``tensors_in``, dense ones of what is sparse, quantized or nested, real ones of what is complex."""
    return [copy for tensor in tensors_in(value) for copy in _dense(tensor.detach().clone())]


def _dense(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.is_quantized:
        return (tensor.dequantize(),)
    if tensor.is_complex():
        return (torch.view_as_real(tensor.to_dense().resolve_conj()),)
    return (tensor if tensor.layout is torch.strided else tensor.to_dense(),)


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
        if not isinstance(output, Tensor) or not output.is_floating_point() or output.is_nested:
            return output  # a nested one is of the original's code
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
    if floating and not any(_isfinite(tensor).any() for tensor in floating):
        return "the original's output is nowhere finite: nothing to compare"
    if all(torch.equal(_isfinite(mine), _isfinite(theirs)) for mine, theirs in zip(ours, expected, strict=True)):
        return ""
    return "the outputs are not finite where the original's are, or the reverse"


def _isfinite(tensor: Tensor) -> Tensor:
    """PyTorch has it for no float of eight bits."""
    return (tensor.float() if tensor.element_size() == 1 else tensor).isfinite()


def _forms(result: Sequence[Any]) -> list[Any]:
    return [(v.shape, v.dtype) if isinstance(v, Tensor) else type(v) for v in result]


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference between floating-point tensors, over elements finite in both."""
    pairs = zip(_pieces(one), _pieces(other), strict=True)
    return max((_largest(p.double() - q.double()) for p, q in pairs), default=0.0)


def _largest(tensor: Tensor) -> float:
    """The largest finite magnitude, 0 for an empty tensor."""
    return max((float(p.double().abs().nan_to_num(0.0, 0.0, 0.0).max()) for p in _pieces(tensor)), default=0.0)


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """The elements in runs small enough to be compared in float64."""
    return tensor.reshape(-1).split(2**25) if tensor.numel() else ()


MOST_RUNS = 32
"""Of the model in search of the sites that are asked; all are taken to be that are not found innocent by then."""

_PLAIN = (bool, int, float, str)


def asked(model: nn.Module, sites: Sequence[str], run: Callable[[], Any]) -> list[str]:
    """Which of the swapped ``sites``, by their names, must have their original class for ``run``, a run of ``model``,
    to give what it gave. The original computes at all of them meanwhile, so that every bit must be the same; of a model
    that is not the same from run to run, the forms. The model is left as it was."""
    search = _Search(model, sites, run)
    found: list[str] = []
    left = [*sites]
    while left and search.disturb(left):
        found += search.within(left)
        left = [site for site in left if site not in found]
    return found


class _Search:
    def __init__(self, model: nn.Module, sites: Sequence[str], run: Callable[[], Any]) -> None:
        self.model, self.run, self.runs = model, run, 0
        modules = {name: model.get_submodule(name) for name in sites}
        self.originals = [(module, class_before(module)) for module in modules.values()]
        installed = {name: installed_class(module) for name, module in modules.items()}
        other = {cls: _stand_in(cls) for cls in {*installed.values()}}  # what has one class asks for one
        self.others = {name: (module, other[installed[name]]) for name, module in modules.items()}
        self.expected = self._result([])
        self.repeats: tuple[bool, bool] | None = None  # in its forms, in its bits; not known before it matters

    def disturb(self, sites: Sequence[str]) -> bool:
        """Whether another class at all ``sites`` is noticed."""
        self.runs += 1
        if self.runs > MOST_RUNS:
            return True
        found = self._result_or_none(sites)
        if found is not None and _forms(found) == _forms(self.expected) and _same(found, self.expected):
            return False
        if self.repeats is None:
            self.runs += 1
            again = self._result_or_none([])
            alike = again is not None and _forms(again) == _forms(self.expected)
            self.repeats = alike, alike and _same(again or [], self.expected)
        forms, bits = self.repeats
        return bits or (forms and (found is None or _forms(found) != _forms(self.expected)))

    def _result_or_none(self, sites: Sequence[str]) -> list[Any] | None:
        """None where the model raises, which is what it says to a class that it does not know."""
        try:
            return self._result(sites)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return None

    def within(self, sites: Sequence[str]) -> list[str]:
        """Those of ``sites``, which disturb together, that do so in fewer; all where none do."""
        if len(sites) == 1:
            return [*sites]
        halves = sites[: len(sites) // 2], sites[len(sites) // 2 :]
        return [site for half in halves if self.disturb(half) for site in self.within(half)] or [*sites]

    def _result(self, sites: Sequence[str]) -> list[Any]:
        """What the original gives, tensors and plain values, with another class at ``sites``."""
        others = [self.others[name] for name in sites]
        with classes(self.originals), classes(others), preserved(self.model), torch.no_grad():
            out = self.run()
            return _copies_in(out) + [v for v in tree_leaves(out) if type(v) in _PLAIN]


def _stand_in(installed: Any) -> type[nn.Module]:
    """Another class than the one that ``installed`` was put in the place of, which computes what that does, by a
    forward with the parameters that ``installed`` has, for who reads them off its code."""
    original = installed._normswap_original
    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    body = {**names, **marks(original, installed._normswap_match)}
    if _parameters(installed.forward) != _parameters(original.forward):
        body["forward"] = functools.wraps(original.forward)(lambda *args, **kwargs: original.forward(*args, **kwargs))
    made: type[nn.Module] = unannounced(type(original), original.__name__, (Rewritten, original), body)
    return made


def _parameters(forward: Any) -> tuple[str, ...]:
    code = getattr(forward, "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount]


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(_equal(*pair) for pair in zip(one, other, strict=True))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return same_values(one, other)
    return bool(one == other or (one != one and other != other))
