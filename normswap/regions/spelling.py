"""The ways in which people write one operation: what an operation of a flow is called in a pattern, and its arguments
by name."""

from __future__ import annotations

import ast
from typing import Any

import torch
import torch.nn.functional as F

from normswap.kinds import NORMS
from normswap.regions.flow import Attribute, Constant, Op, Value

NOT_CONSTANT: Any = object()
_ONE, _TWO = ("input",), ("input", "other")

# Each parameter as it is called in a pattern; "=": its default.
_SIGNATURES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("abs", "sqrt", "rsqrt"), _ONE),
    **dict.fromkeys(("+", "-", "*", "/", "**"), _TWO),
    "mean": ("input", "dim=None", "keepdim=False"),
    "var": ("input", "dim=None", "correction=1", "keepdim=False"),
    "norm": ("input", "p=2", "dim=None", "keepdim=False"),
    "linalg.norm": ("input", "p=None", "dim=None", "keepdim=False"),
    "linalg.vector_norm": ("input", "p=2", "dim=None", "keepdim=False"),
    "clamp": ("input", "min=None", "max=None"),
    "normalize": ("input", "p=2.0", "dim=1", "eps=1e-12"),
    **{norm.name: ("input", *norm.signature) for norm in NORMS.values()},
}
_ALIASES = {
    **{"exponent": "other", "self": "input", "x": "input", "A": "input"},
    **{"axis": "dim", "ord": "p", "unbiased": "correction"},
}

_WORDS = {
    **{"abs": "abs absolute", "/": "div divide true_divide", "*": "mul multiply", "+": "add", "-": "sub subtract"},
    **{"**": "pow", "clamp": "clamp clip clamp_min"},
    **{word: word for word in ("square", "sqrt", "rsqrt", "reciprocal", "mean", "var", "norm")},
}
"""Each operation's functions of torch, which are methods too."""
SPELLED: dict[Any, str] = {
    **{symbol: symbol for symbol in ("+", "-", "*", "/", "**")},
    **{getattr(torch, word): name for name, words in _WORDS.items() for word in words.split()},
    **{f".{word}()": name for name, words in _WORDS.items() for word in words.split()},
    abs: "abs",
    torch.linalg.norm: "linalg.norm",
    torch.linalg.vector_norm: "linalg.vector_norm",
    F.normalize: "normalize",
    **{norm.function: norm.name for norm in NORMS.values()},
}
"""The targets of operations that patterns know, and what they are called there."""
PURE = SPELLED.keys() - {F.batch_norm}
"""Those that neither write into what they are given nor draw random numbers."""


def spelled(op: Op) -> tuple[str, dict[str, Value]] | None:
    """What ``op`` is called in a pattern, and all its arguments by name; None where that is not known."""
    name = SPELLED.get(op.target)
    if name is None:
        return None
    if name in ("square", "reciprocal"):
        (x,) = op.args if len(op.args) == 1 else (None,)
        if x is None or op.keywords:
            return None
        one, two = Constant(value=1), Constant(value=2)
        return ("**", {"input": x, "other": two}) if name == "square" else ("/", {"input": one, "other": x})
    bound = _bound(name, op)
    if bound is None:
        return None
    if name == "*" and bound["input"] is bound["other"]:
        return "**", {"input": bound["input"], "other": Constant(value=2)}
    if name == "var":
        found = constant(bound["correction"])  # or ``unbiased``, a truth
        return name, {**bound, "correction": Constant(value=int(found) if type(found) in (bool, int) else None)}
    return _euclidean(name, bound) if "norm" in name and "p" in bound and name != "normalize" else (name, bound)


def parameters(name: str) -> dict[str, Any]:
    """The parameters of an operation in order, with their defaults; ``NOT_CONSTANT`` for those that have none."""
    pairs = [parameter.partition("=") for parameter in _SIGNATURES[name]]
    return {key: ast.literal_eval(default) if has else NOT_CONSTANT for key, has, default in pairs}


def _bound(name: str, op: Op) -> dict[str, Value] | None:
    known = parameters(name)
    named = {_ALIASES.get(k, k): v for k, v in op.keywords.items()}
    given = dict(zip(known, op.args, strict=False)) | named
    if len(op.args) > len(known) or not {*given} <= {*known} or len(given) < len(op.args) + len(op.keywords):
        return None
    rest = {key: default for key, default in known.items() if key not in given}
    if NOT_CONSTANT in rest.values():
        return None
    return given | {key: Constant(value=default) for key, default in rest.items()}


def constant(value: Value) -> Any:
    """The value of a constant that is always the same, one dim in a tuple as the dim itself; ``NOT_CONSTANT`` for
    anything else."""
    if not isinstance(value, Constant) or value.named:
        return NOT_CONSTANT
    return one_dim(value.value)


def one_dim(found: Any) -> Any:
    """``found``, a tuple of one dim as the dim itself."""
    return found[0] if isinstance(found, tuple) and len(found) == 1 and type(found[0]) is int else found


def _euclidean(name: str, bound: dict[str, Value]) -> tuple[str, dict[str, Value]] | None:
    """The three functions as one ``norm`` where they are the root of the sum of squares."""
    p, whole = constant(bound["p"]), constant(bound["dim"]) is None
    if name == "linalg.norm":
        fits = p is None or (not whole and p == 2)  # of a whole matrix, the norm of order 2 is its largest value
    else:
        fits = p == 2 or (name == "norm" and p == "fro")
    return ("norm", {**bound, "p": Constant(value=2)}) if fits and type(p) is not bool else None


def cast(op: Op) -> Value | None:
    """What is cast by ``op``, ``x.float()``, ``x.to(dtype)`` or ``x.type_as(y)``, or moved to the device of something;
    None for any other operation."""
    rest = [*op.args[1:], *op.keywords.values()]
    if op.target == ".float()":
        return op.args[0] if not rest else None
    if op.target in (".to()", ".type()", ".type_as()") and len(rest) == 1 and {*op.keywords} <= {"dtype"}:
        is_dtype = isinstance(rest[0], Constant) and isinstance(rest[0].value, torch.dtype)
        reads_dtype = isinstance(rest[0], Op) and rest[0].target in (".dtype", ".device")
        reads_dtype |= isinstance(rest[0], Attribute) and rest[0].path.endswith((".dtype", ".device"))
        return op.args[0] if is_dtype or reads_dtype or op.target == ".type_as()" else None
    return None
