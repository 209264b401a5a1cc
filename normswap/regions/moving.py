"""What lies between the operations of a region, which are done together: nothing that could tell."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor, nn

from normswap.forwards.plain import CONVOLUTIONS
from normswap.kinds import NORMS
from normswap.regions.flow import Attribute, Constant, Flow, Leaf, Op, Value, is_torchs
from normswap.regions.spec import qualified
from normswap.regions.spelling import PURE

_PURE_METHODS = frozenset(
    {
        *(".unsqueeze()", ".squeeze()", ".permute()", ".transpose()", ".view()", ".reshape()", ".flatten()"),
        ".chunk()",
        *(".size()", ".dim()", ".contiguous()", ".expand()", ".to()", ".float()", ".type_as()", ".split()", ".numel()"),
        *("+", "-", "*", "/", "**"),
    }
)
_ONLY_COMPUTE = (
    *(nn.Linear, *CONVOLUTIONS, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.Sequential, nn.Identity, nn.MaxPool2d, nn.AvgPool2d, nn.Upsample),
)
_ChildOf = Callable[[Op], nn.Module | None]


def beside_of(
    module: nn.Module, flow: Flow, ops: Sequence[Op], child_of: _ChildOf, norm_of: Any, shared: bool
) -> Mapping[str, tuple[str, ...]] | None:
    """The children that are called between ``ops``, with the classes in them. None where somebody can see that those
    are done together: something with an effect lies between them, or code inside the function reads the names they are
    assigned to. ``shared``: all are done where the first is."""
    first, last = min(op.order for op in ops), ops[-1].order
    own = {id(op) for op in ops}
    if flow.opaque_between(first, last):
        return None
    between = [op for op in flow.ops if first < op.order < last and id(op) not in own]
    called, inside = _called(between, child_of), _called(ops, child_of)
    read = _paths_of(value for op in between for value in (*op.args, *op.keywords.values()))
    # A BatchNorm in training writes its running statistics, whatever name they are read by.
    shares_state = not _modules_of(called).isdisjoint(_modules_of(inside)) or any(
        path == name or path.startswith(f"{name}.") for path in read for name in inside
    )
    shares_state = shares_state or any(_may_lead_to(module, path, inside.values()) for path in read)
    if shares_state or (between and any(map(_updates, ops))):
        return None
    if not all(_is_pure(op) or (not shared and _only_computes(child_of(op), norm_of)) for op in between):
        return None
    targets = (t for op in ops for t in (*getattr(op.statement, "targets", ()), getattr(op.statement, "target", None)))
    if any(isinstance(target, ast.Name) and target.id in flow.captured for target in targets):
        return None
    return {name: tuple(sorted({qualified(type(m)) for m in child.modules()})) for name, child in called.items()}


def only_computes_between(flow: Flow, ops: Sequence[Op], child_of: _ChildOf) -> bool:
    """Whether nothing between ``ops`` may change what the last of them calls, or autocast: it is pure, a child's call,
    or a function of torch."""
    first, last = ops[0].order, ops[-1].order
    between = [op for op in flow.ops if first < op.order < last]
    return not flow.opaque_between(first, last) and all(
        _is_pure(op) or child_of(op) is not None or (is_torchs(op.target) and "autocast" not in op.target.__name__)
        for op in between
    )


def _called(ops: Sequence[Op], child_of: _ChildOf) -> dict[str, nn.Module]:
    """The children that they call, by name."""
    return {str(op.target)[len("self.") :]: child for op in ops if (child := child_of(op)) is not None}


def _modules_of(children: Mapping[str, nn.Module]) -> set[int]:
    return {id(module) for child in children.values() for module in child.modules()}


def _updates(op: Op) -> bool:
    """Whether it is a function that may write to what it is given, under whatever name others read that."""
    norm = next((norm for norm in NORMS.values() if norm.updates and norm.function is op.target), None)
    if norm is None:
        return False
    given = {**dict(zip(norm.parameters, op.args[1:], strict=False)), **op.keywords}
    written = any(not _is(given.get(name), None) for name in norm.updates if name in given)
    return written and "training" in given and not _is(given["training"], False)


def _is(value: Value | None, constant: Any) -> bool:
    return isinstance(value, Constant) and value.value is constant


def _paths_of(values: Iterable[Value]) -> set[str]:
    """The paths of the attributes of self that ``values`` are, or are a part or a view of."""
    found, waiting, met = set[str](), [*values], set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in met:
            continue
        met.add(id(value))
        if isinstance(value, Attribute) and value.path:
            found.add(value.path)
        elif isinstance(value, Leaf) and value.of is not None:
            waiting.append(value.of)
        elif isinstance(value, Op) and value.target not in PURE:
            waiting += [*value.args, *value.keywords.values()]
            held, _, method = str(value.target).rpartition(".")
            if method and held.startswith("self."):  # a method of what self has gives a view of that at most
                found.add(held[len("self.") :])
    return found


def _may_lead_to(module: nn.Module, path: str, children: Iterable[nn.Module]) -> bool:
    """Whether what ``module.path`` is may be a buffer of ``children``, or hold one."""
    buffers = {_memory_of(buffer) for child in children for buffer in child.buffers()}
    if not buffers:
        return False
    value: Any = module
    for name in path.split("."):
        own = {**value._parameters, **value._buffers, **value._modules, **value.__dict__}
        value = own.get(name, getattr_static(type(value), name, None))
        if not isinstance(value, nn.Module):  # of a tensor, the rest of the path gives a view at most
            break
    if isinstance(value, nn.Module):
        return any(_memory_of(buffer) in buffers for buffer in value.buffers())
    return _memory_of(value) in buffers if isinstance(value, Tensor) else not _is_plain(value)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (isinstance(value, tuple) and all(map(_is_plain, value)))


_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def _memory_of(tensor: Tensor) -> Any:
    """What tensors that share values have in common."""
    stored = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    return tensor.untyped_storage()._cdata if stored else id(tensor)


def _is_pure(op: Op) -> bool:
    """Whether it is all the same if ``op`` runs before or after what the region computes."""
    is_attribute = isinstance(op.target, str) and op.target.startswith(".") and not op.target.endswith("()")
    return op.target in _PURE_METHODS or op.target in PURE or is_attribute


def _only_computes(child: nn.Module | None, norm_of: Any) -> bool:
    """Whether it neither writes into what it is given nor draws random numbers."""
    return child is not None and all(type(m) in _ONLY_COMPUTE or norm_of(m) is not None for m in child.modules())
