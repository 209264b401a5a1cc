"""What every rule about a torch.nn module asks: is calling it exactly what the class of torch.nn does?"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from normswap import modules
from normswap.attributes import own_getattr
from normswap.forwards.replaced import fingerprint
from normswap.installed import is_installed
from normswap.kinds import NORMS, Norm
from normswap.plans import Match, Reason, Refusal
from normswap.source import definition, global_named, takes_another_argument

_TENSORS = ("weight", "bias", "running_mean", "running_var")
"""What a norm or a Linear keeps as parameters and buffers."""


def match_exact(module: nn.Module, expected: type[nn.Module], kind: str) -> Match | Refusal | None:
    """Match a module whose type is exactly ``expected``, or a subclass that provably computes the same; refuse one that
    is an ``expected`` in another guise."""
    if isinstance(module, torch.jit.ScriptModule):
        scripted = getattr(module, "original_name", None) == expected.__name__
        return Refusal(kind, Reason.SCRIPTED) if scripted else None
    if not isinstance(module, expected) or is_ours(module):
        return None
    difference = why_not_exact(module, expected)
    if difference is None:
        return Match(kind)
    alike = match_subclass(module, kind) if difference[0] is Reason.SUBCLASS else None
    return alike or Refusal(kind, *difference)


def match_norm(module: nn.Module, norm: Norm) -> Match | Refusal | None:
    """``match_exact`` for the classes of ``norm``; refuse a lazy one that will be of them, and one that is none by
    itself."""
    lazy = is_lazy(module) and settled_type(module) in norm.classes
    found = (match_exact(module, cls, norm.name) for cls in norm.classes)
    answer = Refusal(norm.name, Reason.LAZY) if lazy else next((one for one in found if one is not None), None)
    why = "" if answer is None else norm.alone(module)  # a frozen ScriptModule has no mode to be asked for
    if why is None:
        return None
    return Refusal(norm.name, Reason.UNSUPPORTED, why) if why and isinstance(answer, Match) else answer


def why_not_exact(module: nn.Module, expected: type[nn.Module]) -> tuple[Reason, str] | None:
    """Why calling ``module``, an instance of ``expected``, may do something else than ``expected.forward``; hooks on
    the module are not looked at."""
    cls = type(module)
    if parametrize.is_parametrized(module):
        return Reason.PARAMETRIZED, parametrized_names(module)
    if is_lazy(module):
        return Reason.LAZY, ""
    if cls is not expected:
        own = cls.forward is not expected.forward
        return Reason.SUBCLASS, cls.__name__ if own else f"{cls.__name__}: only the exact type is swapped"
    if (replaced := why_replaced(module)) is not None:
        return replaced, ""
    if (plain := next((name for name in _TENSORS if name in module.__dict__), None)) is not None:
        return Reason.UNSUPPORTED, f"its {plain} is a plain attribute, neither a Parameter nor a buffer"
    if not has_torchs_forward(expected):
        return Reason.UNSUPPORTED, f"torch.nn.{expected.__name__}.forward was replaced on the class"
    return None


def why_replaced(module: nn.Module) -> Reason | None:
    """Why another forward than the class's runs at ``module``."""
    if "forward" not in module.__dict__:
        return None
    return Reason.DISPATCHED if "_hf_hook" in module.__dict__ else Reason.INSTANCE_FORWARD


def parametrized_names(module: nn.Module) -> str:
    """The parametrized tensors of a parametrized module, for a report."""
    return ", ".join(name for name, _ in module.get_submodule("parametrizations").named_children())


def is_ours(module: nn.Module) -> bool:
    """True for a swapped module (parametrized or not since then), and for one of ``normswap.modules``' own."""
    return is_installed(type(module)) or isinstance(module, modules.L1Norm | modules.LinearScaleBatchNorm)


def settled_type(module: nn.Module) -> type[nn.Module]:
    """The type of ``module``; for a lazy one, the type it will have after its first input."""
    return (module.cls_to_become if isinstance(module, LazyModuleMixin) else None) or type(module)


def is_lazy(module: nn.Module) -> bool:
    """True while a lazy module waits for its first input."""
    return isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()


def match_subclass(module: nn.Module, kind: str) -> Match | None:
    """A Match when ``module``, of a subclass of the kind's torch.nn class, provably computes what that class does;
    its attribute "unless" names the flag under which it does not, if there is one. None: not provable."""
    norm, cls = NORMS[kind], type(module)
    expected = norm.classes[0]
    described = not norm.reads or any(inspect.getattr_static(cls, name, None) is not None for name in norm.parameters)
    called = (cls.__call__, cls._call_impl) == (nn.Module.__call__, nn.Module._call_impl)
    if described or not called or "forward" in module.__dict__ or own_getattr(module) is not None:
        return None
    if cls.forward is expected.forward:
        return Match(kind) if has_torchs_forward(expected) else None
    flag = _flag_of(cls.forward, norm)
    if flag is None or (flag and not isinstance(module.__dict__.get(flag), bool)):
        return None
    return Match(kind, {"source": fingerprint(cls.forward)} | ({"unless": flag} if flag else {}))


def has_torchs_forward(expected: Any) -> bool:
    """False when some library replaced ``expected.forward`` for the whole process: its globals are then its own."""
    forward = expected.forward
    return isinstance(forward, types.FunctionType) and forward.__globals__ is sys.modules[expected.__module__].__dict__


def _flag_of(forward: Any, norm: Norm) -> str | None:
    """The attribute of self unless which ``forward`` returns the norm's function of its argument and all that the class
    keeps for it; "" where it always does, None where it does something else."""
    tree = definition(forward) if isinstance(forward, types.FunctionType) else None
    if not isinstance(tree, ast.FunctionDef) or takes_another_argument(forward) is not None:
        return None
    me, argument = forward.__code__.co_varnames[:2]
    flag, statements = "", tree.body[ast.get_docstring(tree) is not None :]
    match statements:
        case [ast.If(test=ast.Attribute(value=ast.Name(id=owner), attr=flag), orelse=otherwise), *rest] if owner == me:
            statements = [*otherwise, *rest]
    match statements:
        case [ast.Return(value=ast.Call() as call)]:
            pass
        case [ast.Assign(targets=[ast.Name(id=stored)], value=ast.Call() as call), ast.Return(value=ast.Name(id=name))]:
            if stored != name:
                return None
        case _:
            return None
    given = [argument, *(f"{me}.{name}" for name in norm.parameters)]
    same = [*map(ast.unparse, (*call.args, *call.keywords))] == given
    return flag if same and global_named(call.func, forward) is norm.function else None
