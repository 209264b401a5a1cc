"""A forward in the place of another: what reads functions by their source or their code finds the original's."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from normswap.forwards.replaced import Replaced
from normswap.ops.at_once import AtOnce, Guarded

_Forward = Callable[..., Any]


def in_the_place_of(replaced: Replaced, swapped: _Forward | Guarded) -> _Forward:
    """``swapped`` as a function that torch.jit.script, which reads the source of what is wrapped in the globals of what
    wraps it, takes for the original's, and torch.fx for one of its parameters. What torch.jit.trace writes down is the
    original."""
    base, tracing = replaced.function, torch._C._get_tracing_state
    pass_on: Callable[..., _Forward] = _passing_on
    given: tuple[Any, ...] = swapped, replaced.run, tracing
    if isinstance(swapped, Guarded):
        pass_on, general = _guarded, _passing_on(swapped.otherwise, replaced.run, tracing)
        given = AtOnce(replace(swapped, otherwise=general)), general, torch.compiler.is_compiling
    if not isinstance(base, types.FunctionType):
        return functools.wraps(base)(pass_on(*given))
    alike = _is_rewritten_by_fx(base)
    wrapper: Any = _with_parameters_of(base, pass_on)(*given) if alike else pass_on(*given)
    forward = types.FunctionType(wrapper.__code__, base.__globals__, base.__name__, None, wrapper.__closure__)
    if alike:
        forward.__defaults__, forward.__kwdefaults__ = base.__defaults__, base.__kwdefaults__
    return functools.wraps(base)(forward)


def _passing_on(_normswap_forward: _Forward, _normswap_original: _Forward, _normswap_asked: _Forward) -> _Forward:
    def forward(self, *_normswap_args, **_normswap_kwargs):  # type: ignore[no-untyped-def]
        chosen = _normswap_forward if _normswap_asked() is None else _normswap_original
        return chosen(self, *_normswap_args, **_normswap_kwargs)

    return forward


def _guarded(_normswap_forward: AtOnce, _normswap_original: _Forward, _normswap_asked: _Forward) -> _Forward:
    def forward(self, *_normswap_args, **_normswap_kwargs):  # type: ignore[no-untyped-def]
        chosen = _normswap_original if _normswap_asked() else _normswap_forward.call
        return chosen(self, *_normswap_args, **_normswap_kwargs)

    return forward


def _is_rewritten_by_fx(base: types.FunctionType) -> bool:
    """Whether torch.fx makes plain parameters of the keyword-only ones, *args and **kwargs of ``base``; not of one that
    says of itself that it has others."""
    code, starred = base.__code__, inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    plain = inspect.unwrap(base) is base and "__signature__" not in base.__dict__
    return plain and bool(code.co_kwonlyargcount or code.co_flags & starred)


_TEXT = """
def make(_normswap_forward, _normswap_original, _normswap_asked, _normswap_unpacked,
         _normswap_type=type, _normswap_tuple=tuple, _normswap_dict=dict):
    def forward({parameters}):
        if not ({packed}):
            return _normswap_unpacked({flat})
        _normswap_chosen = {chosen}
        return _normswap_chosen({arguments})
    return forward
"""
_CHOSEN = {
    _passing_on: "_normswap_forward if _normswap_asked() is None else _normswap_original",
    _guarded: "_normswap_original if _normswap_asked() else _normswap_forward.call",
}
_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
_TYPES: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "_normswap_tuple",
    inspect.Parameter.VAR_KEYWORD: "_normswap_dict",
}


def _with_parameters_of(base: types.FunctionType, pass_on: Callable[..., _Forward]) -> Callable[..., _Forward]:
    """``pass_on`` with the parameters of ``base``, in their order. Where torch.fx has made plain ones of *args and
    **kwargs, what comes in them is neither tuple nor dict: ``base``, changed in the same way, takes it."""
    given, code = inspect.signature(base).parameters.values(), base.__code__
    named = [p.replace(default=None if p.default is not p.empty else p.empty, annotation=p.empty) for p in given]
    count = code.co_argcount + code.co_kwonlyargcount + sum(p.kind in _STARS for p in given)
    text = _TEXT.format(
        parameters=str(inspect.Signature(named))[1:-1],
        packed=" and ".join(f"_normswap_type({p.name}) is {_TYPES[p.kind]}" for p in given if p.kind in _STARS)
        or "True",
        flat=", ".join(code.co_varnames[:count]),
        chosen=_CHOSEN[pass_on],
        arguments=", ".join(_passed(p) for p in given),
    )
    scope: dict[str, Any] = {}
    exec(text, {}, scope)

    def unpacked(*arguments: Any) -> Any:
        from torch.fx._symbolic_trace import _patch_function  # what changed the function that calls this

        return _patch_function(base, count)(*arguments)

    return functools.partial(scope["make"], _normswap_unpacked=unpacked)


def _passed(parameter: inspect.Parameter) -> str:
    name = parameter.name
    return f"{name}={name}" if parameter.kind is parameter.KEYWORD_ONLY else _STARS.get(parameter.kind, "") + name
