"""What ONE module's own forward computes: its ATen graph, with every attribute it reads as an input of its own.

A graph does not show a value that Python read and burned in (a shape, a flag, a global), so a rule trusts one only
beside ``source.scan``, which lists everything that the forward reads and does.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from normswap.plan import Reason

_aten = torch.ops.aten

# Names that ATen keeps for one function: a graph has the second of each pair.
_SYNONYMS: dict[Any, Any] = {
    _aten.absolute.default: _aten.abs.default,
    _aten.divide.Tensor: _aten.div.Tensor,
    _aten.true_divide.Tensor: _aten.div.Tensor,
    _aten.multiply.Tensor: _aten.mul.Tensor,
}


@dataclass(frozen=True)
class Rejection:
    """Why a forward cannot be read or traced."""

    reason: Reason
    detail: str


@dataclass(frozen=True)
class Traced:
    """The ATen graph of one forward that takes and returns one tensor. ``inputs`` names the attribute path that feeds
    each placeholder (``"scale"``, ``"bn.weight"``); ``argument`` is the placeholder of the forward's own input."""

    graph: fx.Graph
    inputs: Mapping[fx.Node, str]
    argument: fx.Node

    @property
    def operations(self) -> list[fx.Node]:
        """Every node that computes something, in order."""
        return [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]

    @property
    def result(self) -> fx.Node:
        """The node whose value forward returns."""
        (outputs,) = self.graph.output_node().args
        return outputs[0] if isinstance(outputs, (list, tuple)) else outputs  # type: ignore[return-value]


def trace(
    module: nn.Module,
    reads: Sequence[str],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    training: bool,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    values: Mapping[str, Any] | None = None,
    fakes: Mapping[str, Tensor] | None = None,
    device: str = "cpu",
) -> Traced | Rejection:
    """The ATen graph of the module's class's forward for a fake input of ``shape`` and ``dtype`` in one mode.

    Forward runs on a twin that holds fakes of the attributes ``reads`` and the plain attributes ``values``, and nothing
    else, so the module, its hooks, its buffers and the random state are never touched, and reading anything more fails.
    Children read must be leaves; they get the mode ``training`` too, and ``settings`` (child -> attribute -> value) in
    place of their own. ``fakes`` lends tensors read the shape and dtype of others. All tensors are said to be on
    ``device``: on "meta" a move to any device that the code names shows. Whoever calls this must know from the source
    what forward does: it is run.
    """
    if (rejection := unreadable(module, reads)) is not None:
        return rejection
    tensors = {**_tensors(module, reads), **(fakes or {})}

    def forward(given: list[Tensor], x: Tensor) -> Any:
        twin = _twin(module, reads, dict(zip(tensors, given, strict=True)), training, settings or {})
        twin.__dict__.update(values or {})
        result = type(module).forward(twin, x)
        returned.append(type(result).__name__ if not isinstance(result, Tensor) else "")
        return result

    returned: list[str] = []
    try:
        with FakeTensorMode():
            given = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in tensors.values()]
            x = torch.empty(tuple(shape), dtype=dtype, device=device)
            graph = make_fx(forward, tracing_mode="fake", pre_dispatch=True)(given, x).graph
    except Exception as error:  # forward is the user's code: whatever it raises becomes the reason
        first_line = (str(error).splitlines() or [""])[0]
        return Rejection(Reason.TRACE, f"{type(error).__name__}: {first_line}")
    if returned[-1]:
        return Rejection(Reason.UNSUPPORTED, f"forward returns a {returned[-1]}, not a tensor")
    for node in graph.nodes:
        node.target = _SYNONYMS.get(node.target, node.target)
    *placeholders, argument = [node for node in graph.nodes if node.op == "placeholder"]
    return Traced(graph, dict(zip(placeholders, tensors, strict=True)), argument)


def unreadable(module: nn.Module, reads: Sequence[str]) -> Rejection | None:
    """Why reading an attribute of self may give something else than the parameter, buffer or leaf of that name."""
    if reads and (rejection := own_getattr(module)) is not None:
        return rejection
    for name in reads:
        child = module._modules.get(name)
        registered = child is not None or isinstance(own_tensors(module).get(name), Tensor)
        if not registered or name in module.__dict__ or inspect.getattr_static(type(module), name, None) is not None:
            return Rejection(Reason.UNSUPPORTED, f"self.{name} is not a Parameter, a buffer or a child")
        if child is not None and any(True for _ in child.children()):
            return Rejection(Reason.CHILD, f"self.{name} has children")
    return None


def own_getattr(module: nn.Module) -> Rejection | None:
    """Why no attribute of self can be trusted: the class looks them up in its own way."""
    cls: Any = type(module)
    if (cls.__getattr__, cls.__getattribute__) == (nn.Module.__getattr__, object.__getattribute__):
        return None
    return Rejection(Reason.UNSUPPORTED, f"{cls.__name__} has its own __getattr__")


def own_tensors(module: nn.Module) -> dict[str, Tensor | None]:
    """The parameters and buffers registered on ``module`` itself, by name."""
    return {**module._parameters, **module._buffers}


def _tensors(module: nn.Module, reads: Sequence[str]) -> dict[str, Tensor]:
    """Every tensor that the attributes read can reach, by path; tied ones appear once per path."""
    found: dict[str, Tensor | None] = {}
    for name in reads:
        child = module._modules.get(name)
        if child is None:
            found[name] = own_tensors(module)[name]
        else:
            found.update({f"{name}.{key}": value for key, value in own_tensors(child).items()})
    return {path: value for path, value in found.items() if value is not None}


def _twin(
    module: nn.Module,
    reads: Sequence[str],
    values: Mapping[str, Tensor],
    training: bool,
    settings: Mapping[str, Mapping[str, Any]],
) -> nn.Module:
    twin: nn.Module = object.__new__(type(module))
    nn.Module.__init__(twin)
    twin.__dict__["training"] = training
    for name in reads:
        child = module._modules.get(name)
        if child is None:
            twin._buffers[name] = values[name]
        else:
            leaf = _leaf_twin(child, name, values, training, settings.get(name, {}))
            twin.__dict__[name] = leaf.forward  # not the leaf: calling that would run global hooks
    return twin


def _leaf_twin(
    child: nn.Module, name: str, values: Mapping[str, Tensor], training: bool, settings: Mapping[str, Any]
) -> nn.Module:
    leaf: nn.Module = object.__new__(type(child))
    leaf.__dict__.update(child.__dict__)
    leaf.__dict__["_parameters"] = {key: values.get(f"{name}.{key}") for key in child._parameters}
    leaf.__dict__["_buffers"] = {key: values.get(f"{name}.{key}") for key in child._buffers}
    leaf.__dict__.update(settings, training=training)
    return leaf
