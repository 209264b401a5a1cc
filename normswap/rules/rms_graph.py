"""Is an ATen graph an RMSNorm, and which: ``x / sqrt(mean(x^2, dim) + eps) * (offset + weight)``, cast by cast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from normswap.tracing import Traced

_aten = torch.ops.aten

_CASTS = frozenset(
    {
        *(_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten.to.other, _aten.to.prim_other),
        *(_aten.type_as.default, _aten._to_copy.default),
    }
)
_VIEWS = frozenset(
    {_aten.view.default, _aten.reshape.default, _aten.unsqueeze.default, _aten._unsafe_view.default, _aten.slice.Tensor}
)


@dataclass(frozen=True)
class Form:
    """One RMSNorm. ``eps`` and ``weight_offset`` are numbers, or the names of the attributes that hold them; ``weight``
    is an attribute, "" for none. As it meets x, the weight has ``weight_rank`` dims, of which ``weight_axis`` alone is
    not of size one; as it is stored it has ``weight_dim`` dims. ``rounds``: what is normalised is rounded to a 16-bit
    dtype of the input before the weight."""

    dim: int
    eps: str | float
    weight: str = ""
    weight_offset: str | float = 0.0
    weight_axis: int = -1
    weight_rank: int = 1
    weight_dim: int = 1
    rounds: bool = False


class AnotherFunction(Exception):
    """Where a graph departs from an RMSNorm."""


def form_of(traced: Traced, numbers: Mapping[float, str]) -> Form:
    """The RMSNorm that a graph is. ``numbers`` says which attribute a number in the graph stands for; any other number
    is a literal. Raises AnotherFunction when it is something else, or casts in an order that is not known."""
    return _Graph(traced, numbers).form()


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def _device(node: fx.Node) -> torch.device:
    return node.meta["val"].device


def _parts(node: object, *targets: object) -> tuple[object, ...] | None:
    """The arguments of a node of one of ``targets``; None for another node."""
    return node.args if isinstance(node, fx.Node) and node.target in targets else None


class _Graph:
    def __init__(self, traced: Traced, numbers: Mapping[float, str]) -> None:
        self.traced, self.numbers, self.x = traced, numbers, traced.argument

    def form(self) -> Form:
        for node in self.traced.operations:
            if _device(node) != _device(self.x):
                raise AnotherFunction(f"forward moves a tensor to {_device(node)}")
        result = self.traced.result
        if _dtype(result) is not _dtype(self.x):
            raise AnotherFunction(f"forward gives {_dtype(result)} for {_dtype(self.x)}")
        node = self._uncast(result)
        if (normalised := self._normalised(node)) is not None:
            return Form(*normalised)
        for one, other in self._factors(node):
            if (normalised := self._normalised(self._uncast(one))) is not None:
                return self._weighted(node, one, other, *normalised)
        raise AnotherFunction(self._described())

    def _described(self) -> str:
        computed = ", ".join(str(node.target).removeprefix("aten.") for node in self.traced.operations)
        return f"forward computes another function: {computed or 'nothing'}"

    def _uncast(self, node: fx.Node) -> fx.Node:
        """What ``node`` is without the casts, each between the input's dtype and float32."""
        while node.target in _CASTS:
            if _dtype(node) not in (_dtype(self.x), torch.float32):
                raise AnotherFunction(f"forward casts to {_dtype(node)}")
            node = node.args[0]  # type: ignore[assignment]
        return node

    def _same(self, node: object) -> object:
        """``node`` without casts that change nothing."""
        while (parts := _parts(node, *_CASTS)) is not None and _dtype(node) is _dtype(parts[0]):  # type: ignore[arg-type]
            node = parts[0]
        return node

    @staticmethod
    def _factors(node: object) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """Both orders of the factors of a product of tensors."""
        parts = _parts(node, _aten.mul.Tensor)
        if parts is None or not all(isinstance(part, fx.Node) for part in parts):
            return ()
        one, other = parts
        return (one, other), (other, one)  # type: ignore[return-value]

    def _number(self, value: object) -> str | float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise AnotherFunction(f"{value} stands where a number is needed")
        return self.numbers.get(value, value)

    # --- x / sqrt(mean(x^2) + eps) --------------------------------------------------------------------------------

    def _is_input(self, node: object) -> bool:
        """True for the input and its casts to float32 and back, which keep every value."""
        return isinstance(node, fx.Node) and self._uncast(node) is self.x

    def _normalised(self, node: fx.Node) -> tuple[int, str | float] | None:
        """(dim, eps) when ``node`` is the input divided by its root mean square, computed in float32; else None."""
        radicand: object = None
        for one, other in self._factors(node):
            if self._is_input(one):
                radicand = self._under_inverse_root(self._same(other))
        if (parts := _parts(node, _aten.div.Tensor)) is not None and self._is_input(parts[0]):
            root = _parts(self._same(parts[1]), _aten.sqrt.default)
            radicand = None if root is None else root[0]
        return None if radicand is None or node.kwargs else self._mean_square(self._same(radicand), node)

    def _under_inverse_root(self, node: object) -> object:
        if (parts := _parts(node, _aten.rsqrt.default)) is not None:
            return parts[0]
        if (parts := _parts(node, _aten.pow.Tensor_Scalar)) is not None and parts[1] == -0.5:
            return parts[0]
        if (parts := _parts(node, _aten.mul.Tensor)) is not None and parts[1] in (1, 1.0):  # 1 / root
            node = parts[0]
        if (parts := _parts(node, _aten.reciprocal.default)) is not None:
            root = _parts(self._same(parts[0]), _aten.sqrt.default)
            return None if root is None else root[0]
        return None

    def _mean_square(self, node: object, normalised: fx.Node) -> tuple[int, str | float]:
        eps: str | float = 0.0
        if (parts := _parts(node, _aten.add.Tensor)) is not None and not node.kwargs:  # type: ignore[attr-defined]
            node, eps = self._same(parts[0]), self._number(parts[1])
        parts = _parts(node, _aten.mean.dim)
        if parts is None:
            raise AnotherFunction(self._described())
        square, dims, keepdim = parts[0], parts[1], len(parts) > 2 and parts[2]
        if not self._is_square(self._same(square)):
            raise AnotherFunction(f"the mean is not of the input's square: {self._described()}")
        if not (isinstance(dims, (list, tuple)) and len(dims) == 1 and keepdim):
            detail = f"mean over dim={dims}, keepdim={bool(keepdim)}"
            raise AnotherFunction(f"{detail}; only one dim with keepdim=True is swapped")
        wide = (square, node, normalised)
        if any(_dtype(step) is not torch.float32 for step in wide):  # type: ignore[arg-type]
            raise AnotherFunction(f"forward computes in {_dtype(square)}")  # type: ignore[arg-type]
        return int(dims[0]), eps

    def _is_square(self, node: object) -> bool:
        if (parts := _parts(node, _aten.pow.Tensor_Scalar)) is not None:
            return parts[1] == 2 and self._is_input(parts[0])
        if (parts := _parts(node, _aten.square.default)) is not None:
            return self._is_input(parts[0])
        return any(self._is_input(one) and self._is_input(other) for one, other in self._factors(node)[:1])

    # --- times (offset + weight) ----------------------------------------------------------------------------------

    def _weighted(self, product: fx.Node, normalised: fx.Node, weight: fx.Node, dim: int, eps: str | float) -> Form:
        rounds = _dtype(normalised) is not torch.float32
        if not rounds and self._rounded_between(normalised):
            raise AnotherFunction("forward rounds what is normalised and widens it again")
        if _dtype(product) is not (_dtype(self.x) if rounds else torch.float32):
            raise AnotherFunction(f"the product with the weight is in {_dtype(product)}")
        name, offset, viewed, stored = self._weight(weight, rounds)
        shape, dims = tuple(viewed.meta["val"].shape), stored.meta["val"].dim()
        wide = [axis - len(shape) for axis, size in enumerate(shape) if size != 1]
        if len(wide) != 1 or (dim < 0 and wide[0] != dim) or (viewed is not stored and dims != 1):
            raise AnotherFunction(
                f"self.{name}, as {tuple(stored.meta['val'].shape)}, is not one value per index of dim"
            )
        return Form(dim, eps, name, offset, wide[0], len(shape), dims, rounds)

    def _rounded_between(self, node: fx.Node) -> bool:
        while node.target in _CASTS:
            if _dtype(node) is not torch.float32:
                return True
            node = node.args[0]  # type: ignore[assignment]
        return False

    def _weight(self, node: fx.Node, rounds: bool) -> tuple[str, str | float, fx.Node, fx.Node]:
        """(attribute, offset, the weight as it meets x, the weight as stored)."""
        met, offset, added = node, 0.0, False
        number: str | float = offset
        while node not in self.traced.inputs:
            parts = _parts(node, *_CASTS, *_VIEWS, _aten.add.Tensor)
            if parts is None or not isinstance(parts[0], fx.Node):
                raise AnotherFunction(self._described())
            if node.target in _CASTS and _dtype(node) not in (_dtype(parts[0]), torch.float32):
                raise AnotherFunction(f"the weight is rounded to {_dtype(node)}")
            if node.target is _aten.add.Tensor:
                if added or node.kwargs or rounds or _dtype(node) is not torch.float32:
                    raise AnotherFunction("the weight's offset is added in 16 bits, or more than once")
                number, added = self._number(parts[1]), True
            node = parts[0]
        return self.traced.inputs[node], number, node if met.meta["val"].shape == node.meta["val"].shape else met, node
