"""The forward of a module with regions: its class's own, with helpers in their place."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from normswap.forwards.plain import TORCHS_CALLS, calls_are_torchs
from normswap.forwards.replaced import Read, Replaced, code_of, digest
from normswap.ops.at_once import Guarded
from normswap.plans import PlanError
from normswap.regions.children import Beside, Reached
from normswap.regions.ending import Short
from normswap.regions.helper import make_helper
from normswap.regions.rewrite import Compiled, Helper, compile_regions
from normswap.regions.sequential import compiled_run
from normswap.regions.spec import Region, children_of
from normswap.source import undecorated

_Forward: TypeAlias = Callable[..., Any]


def compiled_of(original: type[nn.Module], attributes: Mapping[str, Any]) -> list[Compiled]:
    """The regions that a match names, compiled for the class ``original``. Raises PlanError where they do not fit."""
    made: Any = original  # to mypy, a class is no hashable argument
    forward = getattr(made, method_of(attributes))
    return _compiled(made, forward, _codes(forward, _functions_of(forward, attributes)), _text(attributes))[0]


def method_of(attributes: Mapping[str, Any]) -> str:
    """The method that holds the regions of a match: ``forward``, or one that it calls."""
    return str(attributes.get("method", "forward"))


def make_forward(
    replaced: Replaced,
    attributes: Mapping[str, Any],
    helper_of: Callable[[Compiled], Helper] = make_helper,
    installed: bool = True,
) -> _Forward | Guarded:
    """The forward of the class made for a match with regions, or of another subclass of the original: with a helper for
    each region. The original's own runs where another was put on the class since, where its source is not what was read
    (a pickle outlives a version of a library), where it would branch in another way than it did, and, once
    ``installed``, where a child that is called in the middle of a region may do more than compute."""
    base_forward = replaced.function
    inner: Any = undecorated(base_forward)
    known, functions = getattr(inner, "__globals__", {}), _functions_of(base_forward, attributes)
    if "source" in attributes and attributes["source"] != digest([base_forward, *functions.values()]):
        return replaced.run
    compiled, make = _compiled(replaced.original, base_forward, _codes(inner, functions), _text(attributes))
    helpers = [helper_of(one) for one in compiled]
    rewritten = make(helpers)
    if "behind" in attributes and installed:
        rewritten = Short(replaced.original, attributes["behind"], compiled[0].callees).before(rewritten)
    conditions = tuple(dict.fromkeys(c for one in compiled for c in one.region.conditions))
    if not compiled or any(type(truth) is not bool for _, truth in conditions):
        raise PlanError("regions: a match must name one or more, and conditions with true or false")
    checks = [(_evaluator(text), truth) for text, truth in conditions]
    own, called = Read(inner), [(name, Read(function)) for name, function in functions.items()]
    beside = reached = None
    in_a_row = base_forward is nn.Sequential.forward  # which asks for no attribute
    if not in_a_row:
        reached = Reached(one.region for one in compiled)
    if any(one.region.beside for one in compiled):
        beside = Beside(one.region for one in compiled)

    def is_as_read(self: Any) -> bool:
        if not own.is_it(inner):
            return False
        for check, truth in checks:
            try:
                if bool(check(self)) is not truth:
                    return False
            except AttributeError:  # which the original raises itself, if it comes to ask
                return False
        for name, function in called:
            if not function.is_it(known.get(name)):
                return False
        if in_a_row and type(self).__iter__ is not nn.Sequential.__iter__:
            return False
        if not installed:
            return True
        if torch.compiler.is_compiling():  # the statements run, which read what there is; it fuses them anyway
            return beside is None
        if not calls_are_torchs() or (reached is not None and not reached.are_children(self)):
            return False
        return beside is None or beside.only_compute(self)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if replaced.is_on(self) and is_as_read(self):
            return rewritten(self, *args, **kwargs)
        return replaced.run(self, *args, **kwargs)

    return Guarded(
        *(rewritten, forward, replaced, own.known, tuple(checks), known),
        called=tuple((name, function.known) for name, function in called),
        in_a_row=vars(nn.Sequential)["__iter__"] if in_a_row else None,
        torchs=(nn.Module, *TORCHS_CALLS),
        reached=() if reached is None else tuple(reached.names),
        beside=None if beside is None else (beside.names, beside.known, beside.is_known),
    )


def _functions_of(forward: Any, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Those that were read as the line they return, by name."""
    known = getattr(undecorated(forward), "__globals__", {})
    return {name: known.get(name) for name in attributes.get("functions", "").split()}


def _codes(forward: Any, functions: Mapping[str, Any]) -> tuple[Any, ...]:
    """The code of all that is read of a forward: who reloads a file may put another into the same functions."""
    return tuple(map(code_of, (undecorated(forward), *functions.values())))


def _text(attributes: Mapping[str, Any]) -> str:
    return json.dumps(attributes["regions"], sort_keys=True)


@functools.cache
def _compiled(
    original: Any, base_forward: Any, codes: tuple[Any, ...], text: str
) -> tuple[list[Compiled], Callable[[Sequence[Helper]], _Forward]]:
    """The regions compiled, and what makes the forward from a helper for each."""
    regions = [Region.from_json(data) for data in json.loads(text)]
    if base_forward is not nn.Sequential.forward:
        return compile_regions(base_forward, regions)
    compiled = [compiled_run(region) for region in regions]
    return compiled, functools.partial(_sequential, compiled)


_IN_CONDITIONS = (ast.Expression, ast.UnaryOp, ast.Not, ast.Compare, ast.Is, ast.IsNot, ast.Attribute, ast.Name)


def _evaluator(text: str) -> Callable[[Any], Any]:
    """A condition on attributes of self as a function of it. Raises PlanError for any other text: a plan is data."""
    try:
        nodes = [*ast.walk(ast.parse(text, mode="eval"))]
    except SyntaxError:
        nodes = [ast.Pass()]
    for node in nodes:
        known = isinstance(node, (*_IN_CONDITIONS, ast.Load)) or (isinstance(node, ast.Constant) and node.value is None)
        if not known or (isinstance(node, ast.Name) and node.id != "self"):
            raise PlanError(f"regions: {text!r} is no condition on attributes of self")
    return eval(f"lambda self: {text}", {"__builtins__": {}})


def _sequential(compiled: Sequence[Compiled], helpers: Sequence[Helper]) -> _Forward:
    parts_of = [[*children_of(one.region)] for one in compiled]
    runs = {parts[0]: (parts, helper) for parts, helper in zip(parts_of, helpers, strict=True)}

    def forward(self: nn.Sequential, input: Tensor) -> Any:
        names, children = list(self._modules), self._modules
        position = 0
        while position < len(names):
            parts, helper = runs.get(names[position], ([], None))
            if helper is not None and names[position : position + len(parts)] == parts:
                input = helper(self, input)
                position += len(parts)
            else:
                input = children[names[position]](input)  # type: ignore[misc]
                position += 1
        return input

    return forward
