"""What an operation of a forward is called in a pattern, and which functions are read as the line that they return."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from normswap.regions.flow import Attribute, Constant, Op, Value
from normswap.regions.inline import inlined
from normswap.regions.spelling import cast, constant, spelled

X, OTHER = Value(), Value()


def op(target: Any, *args: Any, **keywords: Any) -> Op:
    def value(given: Any) -> Value:
        return given if isinstance(given, Value) else Constant(value=given)

    return Op(target=target, args=tuple(map(value, args)), keywords={k: value(v) for k, v in keywords.items()})


def plain(found: Any) -> Any:
    """A spelled operation with constants as what they are."""
    if found is None:
        return None
    name, bound = found
    return name, {key: value.value if isinstance(value, Constant) else value for key, value in bound.items()}


SQUARE = ("**", {"input": X, "other": 2})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (op(torch.square, X), SQUARE),
        (op(".square()", X), SQUARE),
        (op(torch.square, X, OTHER), None),
        (op(torch.square, X, out=OTHER), None),
        (op("*", X, X), SQUARE),
        (op("*", X, OTHER), ("*", {"input": X, "other": OTHER})),
        (op("/", X, X), ("/", {"input": X, "other": X})),
        (op(torch.reciprocal, X), ("/", {"input": 1, "other": X})),
        (op(torch.pow, X, exponent=3), ("**", {"input": X, "other": 3})),
        (op(torch.add, X, OTHER, alpha=2), None),
        (op(torch.add, X), None),
        (op(torch.add, X, OTHER, OTHER), None),
        (op(torch.add, X, OTHER, other=OTHER), None),
        (op(torch.roll, X), None),
        (op(".mean()", X, -1, True), ("mean", {"input": X, "dim": -1, "keepdim": True})),
        (op(torch.mean, X, axis=1), ("mean", {"input": X, "dim": 1, "keepdim": False})),
        (op(torch.var, X, -1, unbiased=False), ("var", {"input": X, "dim": -1, "correction": 0, "keepdim": False})),
        (op(torch.var, X), ("var", {"input": X, "dim": None, "correction": 1, "keepdim": False})),
        (op(torch.var, X, correction=0.5), ("var", {"input": X, "dim": None, "correction": None, "keepdim": False})),
        (op(torch.norm, X), ("norm", {"input": X, "p": 2, "dim": None, "keepdim": False})),
        (op(torch.norm, X, "fro"), ("norm", {"input": X, "p": 2, "dim": None, "keepdim": False})),
        (op(torch.norm, X, 1), None),
        (op(torch.norm, X, True), None),
        (op(torch.linalg.norm, X), ("norm", {"input": X, "p": 2, "dim": None, "keepdim": False})),
        (op(torch.linalg.norm, X, 2), None),
        (op(torch.linalg.norm, X, 2, dim=1), ("norm", {"input": X, "p": 2, "dim": 1, "keepdim": False})),
        (op(torch.linalg.norm, X, 1, dim=1), None),
        (op(torch.linalg.vector_norm, X, dim=1), ("norm", {"input": X, "p": 2, "dim": 1, "keepdim": False})),
        (op(torch.linalg.vector_norm, X, "fro"), None),
        (op(torch.linalg.vector_norm, X, 3), None),
        (op(F.normalize, X, p=1), ("normalize", {"input": X, "p": 1, "dim": 1, "eps": 1e-12})),
        (op(torch.clamp, X, min=0.1), ("clamp", {"input": X, "min": 0.1, "max": None})),
    ],
)
def test_what_an_operation_is_called(given: Op, expected: Any) -> None:
    assert plain(spelled(given)) == expected


def test_a_constant_that_is_always_the_same() -> None:
    assert constant(Constant(value=3)) == 3 and constant(Constant(value=(1,))) == 1
    assert constant(Constant(value=(1, 2))) == (1, 2) and constant(Constant(value=(1.5,))) == (1.5,)
    for value in (X, Constant(value=3, named=True), Attribute(path="dim")):
        assert constant(value) not in (3, 1)


@pytest.mark.parametrize(
    ("given", "casts"),
    [
        (op(".float()", X), True),
        (op(".float()", X, OTHER), False),
        (op(".to()", X, torch.float32), True),
        (op(".to()", X, dtype=torch.float32), True),
        (op(".to()", X, device=torch.float32), False),
        (op(".to()", X, torch.float32, True), False),
        (op(".to()", X, 3), False),
        (op(".to()", X, OTHER), False),
        (op(".type_as()", X, OTHER), True),
        (op(".to()", X, op(".dtype", OTHER)), True),
        (op(".to()", X, op(".device", OTHER)), True),
        (op(".to()", X, op(".shape", OTHER)), False),
        (op(".to()", X, Attribute(path="weight.dtype")), True),
        (op(".to()", X, Attribute(path="weight")), False),
        (op(".half()", X), False),
    ],
)
def test_what_is_a_cast(given: Op, casts: bool) -> None:
    assert (cast(given) is X) == casts and (casts or cast(given) is None)


# --- a function of one line -----------------------------------------------------------------------------------------


def modulate(x, shift, scale):
    """Described."""
    return x * (1 + scale.unsqueeze(1)) + shift[:, None]


def one_last(x, scale, shift):
    return x * (scale + 1) + shift


def with_default(x, scale, shift=0.0):
    return x * (1 + scale) + shift


def of_two_lines(x, scale, shift):
    scale = scale * 2
    return x * (1 + scale) + shift


def of_three(x, scale, shift):
    """Described."""
    scale = scale * 2
    return x * (1 + scale) + shift


def first_is_another(scale, x, shift):
    return x * (1 + scale) + shift


def twice(x, scale, shift):
    return x * (1 + scale) + scale


def by_two(x, scale, shift):
    return x * (2 + scale) + shift


def subtracted(x, scale, shift):
    return x * (1 + scale) - shift


def unsqueezed_elsewhere(x, scale, shift):
    return x * (1 + scale.unsqueeze(0)) + shift


def nothing_returned(x, scale, shift):
    x * (1 + scale) + shift


def by_keyword(x, *, scale=1, shift=2):
    return x * (1 + scale) + shift


def calls(text: str, **names: Callable[..., Any]) -> set[str]:
    """The functions whose calls in ``text`` are read as their line; what is made of it computes the same."""
    source = f"def forward(x, a, b):\n{textwrap.indent(text, '    ')}\n"
    tree: Any = ast.parse(source).body[0]
    made, found = inlined(tree, names)
    given = torch.randn(2, 3, 4), torch.randn(2, 4), torch.randn(2, 4)
    results = []
    for each in (tree, made):
        space: dict[str, Any] = dict(names)
        exec(compile(ast.fix_missing_locations(ast.Module([each], [])), "here", "exec"), space)
        try:
            results.append(space["forward"](*given))
        except Exception as error:
            results.append(type(error))
    assert results[0] is results[1] or torch.equal(*results), text
    return set(found)


@pytest.mark.parametrize("function", [modulate, one_last], ids=lambda f: f.__name__)
def test_a_line_that_scales_and_shifts_is_read(function: types.FunctionType) -> None:
    names = {function.__name__: function}
    scale, shift = ("a", "b") if function is modulate else ("a[:, None]", "b[:, None]")
    for text in (
        f"return {function.__name__}(x, shift={shift}, scale={scale})",
        f"return {function.__name__}(x + 1, {shift}, {scale}) + 2",
    ):
        assert calls(text, **names) == {function.__name__}
    for text in (
        f"return {function.__name__}(x, {shift})",
        f"return {function.__name__}(x, {shift}, shift={scale}, scale={scale})",
        f"return {function.__name__}(x, {shift}, {scale} + 1)",
        f"return {function.__name__}(x=x, shift={shift}, scale={scale})",
        f"return [{function.__name__}][0](x, {shift}, {scale})",
        f"{function.__name__} = lambda *given: given[0]\nreturn {function.__name__}(x, {shift}, {scale})",
        f"def {function.__name__}(*given): return given[0]\nreturn {function.__name__}(x, {shift}, {scale})",
        f"from operator import add as {function.__name__}\nreturn {function.__name__}(x, {shift}, {scale})",
        f"return (lambda {function.__name__}: {function.__name__}(x, {shift}, {scale}))(torch.addcmul)",
    ):
        assert calls(text, **names) == set(), text


def test_a_function_of_no_module_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modulate, "__module__", None)
    assert calls("return modulate(x, a, b)", modulate=modulate) == {"modulate"}


OTHERS = [with_default, of_two_lines, of_three, first_is_another, twice, by_two, subtracted]
OTHERS += [unsqueezed_elsewhere, nothing_returned]


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_another_line_is_not_read(function: types.FunctionType) -> None:
    names = list(inspect.signature(function).parameters)
    assert calls(f"return f(x, {', '.join(['a[:, None]'] * (len(names) - 1))})", f=function) == set()
    assert calls("return f(x, scale=a[:, None], shift=b[:, None])", f=by_keyword) == set()
    assert calls("return f(x, a, b)", f=torch.addcmul) == set()
