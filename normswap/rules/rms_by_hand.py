"""A module whose whole forward is an RMSNorm written by hand: ``x / sqrt(mean(x^2) + eps) * weight`` in any spelling
and any order of casts, known by what it computes and not by its name."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from normswap import source
from normswap.attributes import own_tensors
from normswap.forwards import rms_norm as forwards
from normswap.forwards.replaced import digest
from normswap.plans import Match, Reason, Refusal
from normswap.regions.expression import rounds_before_weight
from normswap.regions.flow import Attribute
from normswap.regions.straight import function_of, method_of
from normswap.rules.expression_site import MULTIPLICATION, Flow, called_name, class_forward, names_in, not_rewritable
from normswap.rules.module_site import is_lazy
from normswap.rules.whole_forward import NotTheNorm, Whole, as_it_is_met, judged, small, within, without_values

KIND = "rms_norm"

_ROOTS = frozenset({"rsqrt", "sqrt"})
_SQUARES = frozenset({"pow", "square"})
_AVERAGES = frozenset({"mean", "sum"})
_SHAPE = (3,) * 6
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def match(module: nn.Module) -> Match | Refusal | None:
    """Match a module whose forward is an RMSNorm and nothing else; refuse one that holds it in another form."""
    forward = class_forward(module)
    functions = [] if forward is None else _functions(type(module), forward)
    if not _looks_like(functions):
        return None
    if is_lazy(module):
        return Refusal(KIND, Reason.LAZY)
    return not_rewritable(module, KIND) or judged(module, functions, "rms_norm_by_hand", KIND, _form)


# --- recognising --------------------------------------------------------------------------------------------------


def _functions(cls: type[nn.Module], forward: types.FunctionType) -> list[types.FunctionType]:
    """``forward``, the methods of the class's own and the functions beside it that it names, and those these name."""
    functions = [forward]
    for function in functions:  # grows on the way
        for name in names_in(function):
            for found in (method_of(cls, name), function_of(forward, name)):
                if found is not None and found not in (nn.Module.__dict__.get(name), *functions):
                    functions.append(found)
    return functions


def _looks_like(functions: list[types.FunctionType]) -> bool:
    """True when in one of ``functions``, which may call each other, a mean (or sum) of a square flows into a root.
    Without a source its names decide."""
    names = frozenset[str]().union(*map(names_in, functions))
    if not names & _AVERAGES:
        return False
    trees = [(f.__name__, source.source_tree(inspect.unwrap(f).__code__)) for f in functions]
    flows = {name: Flow(tree) for name, tree in trees if tree}
    if not all(tree for _, tree in trees):
        return bool(names & _ROOTS and names & _SQUARES)
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


def _form(module: nn.Module, whole: Whole) -> Match:
    """The match for what was read: what it takes, and the dtypes with which it rounds as the op does."""
    live = [name for name, value in whole.plain.items() if type(value) is float and name not in whole.read.tested]
    dim, eps, offset = (whole.number(name, of) for name, of in (("dim", ()), ("eps", live), ("offset", live)))
    weight = _weight(module, whole, dim)
    pairs = _served(module, whole, bool(weight))
    rounding = next((rounds for pair, rounds in pairs.items() if "16" in pair), False)
    served = [pair for pair, rounds in pairs.items() if "16" not in pair or rounds == rounding]
    attributes: dict[str, Any] = {"dim": dim, "eps": eps or 0.0, "dtypes": " ".join(served)}
    attributes |= {**weight, "cast_before_weight": rounding} if weight else {}
    attributes |= {"weight_offset": offset} if offset else {}
    pinned = {name: value for name, value in whole.plain.items() if name not in live}
    attributes |= {f"{forwards.SELF}{name}": value for name, value in pinned.items()}
    read = whole.read
    attributes |= {"methods": " ".join(read.methods)} if read.methods else {}
    attributes |= {"functions": " ".join(read.functions)} if read.functions else {}
    return Match(KIND, attributes | {"source": digest((read.forward, *read.called))})


def _weight(module: nn.Module, whole: Whole, dim: Any) -> dict[str, Any]:
    """The attribute that is the weight, and how it lies along ``dim``: as it meets x it has "weight_rank" dims, of
    which "weight_axis" alone is not of size one, as it is stored "weight_dim". Nothing without a weight."""
    ways = [found.get("weight") for found in whole.found]
    names = {one.path for value in ways if value for one in within(value) if isinstance(one, Attribute)}
    if {*whole.tensors} != names or len(names) > 1 or len({value is None for value in ways}) > 1:
        raise NotTheNorm(f"forward reads self.{', self.'.join(whole.tensors)} in another way")
    if not names:
        return {}
    (name,) = names
    stored = torch.empty(small(own_tensors(module)[name]), device="meta")  # type: ignore[arg-type]
    views = [as_it_is_met(value, stored) for value in ways if value]
    shape, *others = {() if view is None else tuple(view.shape) for view in views}
    wide = [axis - len(shape) for axis, size in enumerate(shape) if size != 1]
    if others or len(wide) != 1 or (dim < 0 and wide[0] != dim):
        raise NotTheNorm(f"self.{name}, as {tuple(stored.shape)}, is not one value per index of dim")
    found = {"weight": name, "weight_axis": wide[0], "weight_rank": len(shape), "weight_dim": stored.dim()}
    usual = {"weight_axis": -1, "weight_rank": 1, "weight_dim": 1}
    return {key: value for key, value in found.items() if usual.get(key) != value}


def _served(module: nn.Module, whole: Whole, weighted: bool) -> dict[str, bool]:
    """The dtypes with which all but the last steps are in float32, and whether what is normalised is then rounded
    before the weight: of the input, or "input*weight"."""
    found: dict[str, bool] = {}
    for x in _FLOATS:
        for weight in dict.fromkeys((x, torch.float32)) if weighted else (None,):
            answers = {_rounds(module, whole, x, weight or x, training) for training in (False, True)}
            if answers == {None} and not found:
                raise NotTheNorm("forward rounds, or computes in another dtype than float32")
            if len(answers) > 1:
                raise NotTheNorm("forward depends on its mode")
            if None not in answers:
                pair = "*".join(str(dtype).removeprefix("torch.") for dtype in (x, weight) if dtype is not None)
                found[pair] = bool(answers.pop())
    return found


def _rounds(module: nn.Module, whole: Whole, x: torch.dtype, weight: torch.dtype, training: bool) -> bool | None:
    own = own_tensors(module)
    shapes = {name: small(own[name]) for name in whole.tensors}  # type: ignore[arg-type]
    tensors = {name: torch.empty(shape, dtype=weight, device="meta") for name, shape in shapes.items()}
    twin, given = without_values(module, tensors, whole.plain, training), torch.empty(_SHAPE, dtype=x, device="meta")
    try:
        return rounds_before_weight(lambda: whole.read.forward(twin, given), given)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise NotTheNorm(f"{type(error).__name__}: {error}", Reason.TRACE) from error
