"""A module whose whole forward is an RMSNorm written by hand: ``x / sqrt(mean(x^2) + eps) * weight`` in any spelling
and any order of casts, known by what it computes and not by its name."""

from __future__ import annotations

import ast
import inspect
import types
import weakref
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normswap import source, tracing
from normswap.forwards import rms_norm as forwards
from normswap.plan import Match, Reason, Refusal
from normswap.rules import reading
from normswap.rules.expression_site import (
    DIVISION,
    MULTIPLICATION,
    Flow,
    called_name,
    class_forward,
    names_in,
    not_rewritable,
)
from normswap.rules.module_site import is_lazy
from normswap.rules.rms_graph import AnotherFunction, Form, form_of

KIND = "rms_norm"

_ROOTS = frozenset({"rsqrt", "sqrt"})
_AVERAGES = frozenset({"mean", "sum"})
_SQUARES = frozenset({"pow", "square"})
# What a graph shows without a doubt. Not among them: all that reads a size, a device's name or a mode.
_UNDERSTOOD = frozenset(
    {
        *(DIVISION | MULTIPLICATION | _ROOTS | _SQUARES),
        *("/", "*", "**", "+", "add", "mean", "reciprocal"),
        *("to", "float", "type", "type_as", ".dtype", ".device"),
        *("view", "reshape", "unsqueeze", "[]"),
    }
)
_PLAIN = (type(None), bool, int, str, float)
_RANK = 6
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Attributes:
    """What the attributes of self that a forward reads are: tensors, numbers that are read live, and the rest, whose
    values are part of what the match stands on."""

    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    settings: Mapping[str, Any]


# By class: is there something to speak of, and what tracing said, by all of a module that a graph depends on.
_recognised: weakref.WeakKeyDictionary[type, tuple[types.CodeType, bool]] = weakref.WeakKeyDictionary()
_traced: weakref.WeakKeyDictionary[type, dict[Hashable, Match | Refusal]] = weakref.WeakKeyDictionary()


def match(module: nn.Module) -> Match | Refusal | None:
    """Match a module whose forward is an RMSNorm and nothing else; refuse one that holds it in another form."""
    forward = class_forward(module)
    if forward is None or not _is_recognised(type(module), forward):
        return None
    if is_lazy(module):
        return Refusal(KIND, Reason.LAZY)
    return not_rewritable(module, KIND) or _judge(module, forward)


# --- recognising --------------------------------------------------------------------------------------------------


def _is_recognised(cls: type[nn.Module], forward: types.FunctionType) -> bool:
    known = _recognised.get(cls)
    if known is None or known[0] is not forward.__code__:
        seen = _looks_like([*_functions(cls, forward)])
        known = _recognised[cls] = (forward.__code__, seen)
    return known[1]


def _functions(cls: type[nn.Module], forward: types.FunctionType) -> Iterator[types.FunctionType]:
    """``forward``, the methods of the class's own and the functions beside it that it names, and those these name."""
    waiting, seen = [forward], {forward}
    while waiting:
        function = waiting.pop()
        yield function
        for name in names_in(function):
            method = None if name in nn.Module.__dict__ else reading.method_of(cls, name)
            for found in (method, reading.function_of(forward, name)):
                if found is not None and found not in seen:
                    seen.add(found)
                    waiting.append(found)


def _looks_like(functions: list[types.FunctionType]) -> bool:
    """True when in one of ``functions``, which may call each other, a mean (or sum) of a square flows into a root.
    Without a source its names decide."""
    names = frozenset[str]().union(*map(names_in, functions))
    if not names & _AVERAGES:
        return False
    trees = {f.__name__: source.source_tree(inspect.unwrap(f).__code__) for f in functions}
    if None in trees.values():
        return bool(names & _ROOTS and names & _SQUARES)
    flows = {name: Flow(tree) for name, tree in trees.items() if tree is not None}
    squaring = frozenset(name for name, flow in flows.items() if any(map(_is_square, flow.nodes)))
    averaging = frozenset(name for name, flow in flows.items() if _averages(flow, squaring, flow.nodes[0]))
    return any(_averages(flow, squaring, root, averaging) for flow in flows.values() for root in _roots(flow))


def _averages(flow: Flow, squaring: frozenset[str], within: ast.AST, averaging: frozenset[str] = frozenset()) -> bool:
    """True when a mean of a square that is no variance flows into ``within``; ``squaring`` and ``averaging`` are
    methods that give a square and such a mean."""
    for call in flow.calls(_AVERAGES | averaging, within):
        if called_name(call) in averaging:
            return True
        square = any(_is_square(node) for node in flow.into(call)) or any(flow.calls(squaring, call))
        if square and not _centred(flow, call):
            return True
    return False


def _roots(flow: Flow) -> Iterator[ast.AST]:
    yield from flow.calls(_ROOTS, *flow.nodes[:1])
    for node in flow.nodes:
        power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "pow"
        if (power or called) and not _is_square(node):
            yield node


def _is_square(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow):
            return isinstance(node.right, ast.Constant) and node.right.value == 2
        return isinstance(node.op, ast.Mult) and ast.dump(node.left) == ast.dump(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        squared = any(isinstance(value, ast.Constant) and value.value == 2 for value in values)
        twice = len(values) == 2 and ast.dump(values[0]) == ast.dump(values[1])
        return name == "square" or (name == "pow" and squared) or (name in MULTIPLICATION and twice)
    return False


def _centred(flow: Flow, average: ast.AST) -> bool:
    """True where a difference is averaged: a variance, and so a LayerNorm."""
    return any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) for node in flow.into(average))


# --- judging ------------------------------------------------------------------------------------------------------


def _judge(module: nn.Module, forward: types.FunctionType) -> Match | Refusal:
    read = reading.read(type(module), forward)
    if isinstance(read, tracing.Rejection):
        return Refusal(KIND, read.reason, read.detail)
    called = {*(f"self.{name}()" for name in read.methods), *(f"{name}()" for name in read.functions)}
    if extra := [*dict.fromkeys(o for o in read.operations if o not in _UNDERSTOOD and o not in called)]:
        return Refusal(KIND, Reason.PART_OF_FORWARD, f"besides an RMSNorm, forward does {', '.join(extra)}")
    if any(name in module.__dict__ for name in read.methods):
        return Refusal(KIND, Reason.UNSUPPORTED, "a method was replaced on the instance")
    attributes = _attributes(module, read)
    if isinstance(attributes, Refusal):
        return attributes
    known = _traced.setdefault(type(module), {})
    key = _key(module, forward, read, attributes)
    if key not in known:
        known[key] = _judge_traces(module, forward, read, attributes)
    return known[key]


def _attributes(module: nn.Module, read: reading.Reading) -> _Attributes | Refusal:
    own = tracing.own_tensors(module)
    tensors = tuple(name for name in read.reads if isinstance(own.get(name), Tensor))
    if (rejection := tracing.unreadable(module, tensors) or tracing.own_getattr(module)) is not None:
        return Refusal(KIND, rejection.reason, rejection.detail)
    numbers, settings = [], {}
    for name in read.reads:
        if name in tensors or name == "training":
            continue
        value = _plain_value(module, name, own)
        if value is _UNKNOWN:
            continue  # it has no such attribute: where forward reads it all the same, tracing fails
        if type(value) not in _PLAIN:
            return Refusal(KIND, Reason.UNSUPPORTED, f"forward reads self.{name}, which is no tensor, number or flag")
        if type(value) is float and name not in read.tested:
            numbers.append(name)
        else:
            settings[name] = value
    return _Attributes(tensors, tuple(numbers), settings)


_UNKNOWN = object()


def _plain_value(module: nn.Module, name: str, own: Mapping[str, Tensor | None]) -> object:
    """The value of a plain attribute: the instance's, a parameter or buffer that is None, or the class's."""
    on_class = inspect.getattr_static(type(module), name, _UNKNOWN)
    if name in module.__dict__ and not hasattr(type(on_class), "__set__"):
        return module.__dict__[name]
    return own[name] if name in own and on_class is _UNKNOWN else on_class


def _key(module: nn.Module, forward: types.FunctionType, read: reading.Reading, found: _Attributes) -> Hashable:
    """All of a module that its traces depend on: sizes are no part of it, since no size is read."""
    own = tracing.own_tensors(module)
    shapes = tuple((name, _small(own[name])) for name in found.tensors)
    settings = tuple((name, type(value), value) for name, value in found.settings.items())
    return forward.__code__, reading.codes_of(read.called), shapes, found.numbers, settings


def _small(tensor: Tensor | None) -> tuple[int, ...]:
    return () if tensor is None else tuple(3 if size > 1 else 1 for size in tensor.shape)


def _judge_traces(
    module: nn.Module, forward: types.FunctionType, read: reading.Reading, found: _Attributes
) -> Match | Refusal:
    """The match that every trace agrees on: of each mode, with each pair of dtypes, numbers other in every trace."""
    if len(found.tensors) > 1:
        return Refusal(KIND, Reason.UNSUPPORTED, f"forward reads self.{', self.'.join(found.tensors)}")
    forms: dict[str, Form] = {}
    modes = (False, True) if "training" in read.reads else (False,)
    for count, (x, weight) in enumerate(_pairs(bool(found.tensors))):
        variants = (count, -1) if count == 0 and found.numbers else (count,)
        answers = [
            _traced_form(module, read, found, x, weight or x, training, variant)
            for training in modes
            for variant in variants
        ]
        refusal = next((answer for answer in answers if isinstance(answer, Refusal)), None)
        if refusal is None and len({*answers}) > 1:
            detail = "forward depends on its mode, or on an attribute's value in another way than as its eps"
            refusal = Refusal(KIND, Reason.UNSUPPORTED, detail)
        if count == 0 and refusal is not None:
            return refusal
        if refusal is None and isinstance(answers[0], Form):
            forms[_name(x) if weight in (None, x) else f"{_name(x)}*{_name(weight)}"] = answers[0]
    return _agreed(forms, forward, read, found)


def _agreed(
    forms: Mapping[str, Form], forward: types.FunctionType, read: reading.Reading, found: _Attributes
) -> Match | Refusal:
    first = forms[_name(torch.float32)]
    agreeing = {pair: form for pair, form in forms.items() if replace(form, rounds=False) == first}
    if [*found.tensors] != ([first.weight] if first.weight else []):
        return Refusal(
            KIND, Reason.UNSUPPORTED, f"forward reads self.{', self.'.join(found.tensors)} and does not use it"
        )
    rounding = next((form.rounds for pair, form in agreeing.items() if "16" in pair), False)
    served = [pair for pair, form in agreeing.items() if "16" not in pair or form.rounds == rounding]
    both = [pair if "*" in pair or not first.weight else f"{pair}*{pair}" for pair in served]
    attributes: dict[str, Any] = {"dim": first.dim, "eps": first.eps, "dtypes": " ".join(both)}
    if first.weight:
        attributes |= {"weight": first.weight, "cast_before_weight": rounding}
        optional = ("weight_offset", "weight_axis", "weight_rank", "weight_dim")
        attributes |= {name: getattr(first, name) for name in optional if getattr(first, name) != getattr(Form, name)}
    attributes |= {f"{forwards.SELF}{name}": value for name, value in found.settings.items()}
    attributes |= {"methods": " ".join(read.methods)} if read.methods else {}
    attributes |= {"functions": " ".join(read.functions)} if read.functions else {}
    return Match(KIND, attributes | {"source": forwards.digest((forward, *read.called))})


def _pairs(weighted: bool) -> Iterator[tuple[torch.dtype, torch.dtype | None]]:
    """(dtype of the input, dtype of the weight), float32 first."""
    for dtype in _FLOATS:
        yield dtype, dtype if weighted else None
        if weighted and dtype is not torch.float32:
            yield dtype, torch.float32


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _traced_form(
    module: nn.Module,
    read: reading.Reading,
    found: _Attributes,
    x: torch.dtype,
    weight: torch.dtype,
    training: bool,
    count: int,
) -> Form | Refusal:
    numbers = {name: 0.371 + 0.0137 * index + 0.00119 * (1 + count) for index, name in enumerate(found.numbers)}
    own = tracing.own_tensors(module)
    fakes = {name: torch.empty(_small(own[name]), dtype=weight, device="meta") for name in found.tensors}
    values = {**found.settings, **numbers}
    shape = (3,) * _RANK
    traced = tracing.trace(
        module, found.tensors, shape, x, training=training, values=values, fakes=fakes, device="meta"
    )
    if isinstance(traced, tracing.Rejection):
        return Refusal(KIND, traced.reason, traced.detail)
    try:
        return form_of(traced, {number: name for name, number in numbers.items()})
    except AnotherFunction as difference:
        return Refusal(KIND, Reason.UNSUPPORTED, str(difference))
