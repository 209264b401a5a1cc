"""The module whose forward is read, as the forward sees it: what stands for it, and what its attributes hold now."""

from __future__ import annotations

import ast
import copy
import dis
import functools
import inspect
import types
from typing import Any

import torch
from torch import nn

from normswap.attributes import is_hidden, own_tensors
from normswap.source import root_of

_UNKNOWN = object()
_COMPUTING = (
    *("LOAD_", "STORE_FAST", "RETURN_", "RESUME", "COMPARE_", "IS_OP", "CONTAINS_OP", "UNARY_", "BINARY_", "TO_BOOL"),
    *("POP_", "JUMP_", "COPY", "DUP_", "ROT_", "SWAP", "NOP", "CACHE", "EXTENDED_ARG", "BUILD_", "NOT_TAKEN"),
    *("LIST_EXTEND", "SET_UPDATE", "PRECALL", "KW_NAMES"),
)
"""How the instructions begin that only compute; what those of a subscript do, the class of what is held says."""
_CONSTANT = ("LOAD_CONST", "LOAD_SMALL_INT", "UNARY_NEGATIVE", "CACHE", "EXTENDED_ARG", "RESUME")
_PLAIN_HOLDERS = (tuple, list, dict, torch.Size)


def _computes(step: dis.Instruction) -> bool:
    in_place = step.opname == "BINARY_OP" and step.argrepr.endswith("=")
    return step.opname.startswith(_COMPUTING) and not in_place


def _is_subscript(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _attribute(owner: Any, name: str) -> Any:
    """``owner.name`` of a module or a tensor where reading that runs nobody's code, else unknown."""
    if type(owner) in (torch.Tensor, nn.Parameter):
        return getattr(owner, name, _UNKNOWN)
    static = inspect.getattr_static(type(owner), name, None)
    if not isinstance(owner, nn.Module) or hasattr(type(static), "__get__"):
        return _UNKNOWN
    own = {**owner._parameters, **owner._buffers, **owner._modules, **owner.__dict__}
    return own.get(name, _UNKNOWN if static is None else static)


class Owner:
    """``module`` under its ``name`` in the function ``tree``."""

    def __init__(self, module: nn.Module, tree: ast.FunctionDef, name: str) -> None:
        self.module, self.tree, self.name = module, tree, name

    def as_condition(self, test: ast.expr) -> str:
        """The source of a condition in which the module is called self."""
        renamed = copy.deepcopy(test)
        for node in ast.walk(renamed):
            if isinstance(node, ast.Name):
                node.id = "self"
        return ast.unparse(renamed)

    def decided(self, test: ast.expr) -> bool | None:
        """The truth of a condition on attributes of self that are None, children or flags; None for any other."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                known = self.decided(operand)
                return None if known is None else not known
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as how], comparators=[ast.Constant(value=None)]):
                found = self._plain(left)
                return None if found is _UNKNOWN else (found is None) == isinstance(how, ast.Is)
            case ast.Attribute():
                found = self._plain(test)
                return found if isinstance(found, bool) else None
        return None

    def _plain(self, node: ast.expr) -> Any:
        """The value of ``self.name`` where the instance holds it and no call of this forward changes it."""
        if isinstance(node, ast.Attribute) and self.is_it(node.value) and node.attr != "training":
            if inspect.getattr_static(type(self.module), node.attr, None) is not None or self._is_shared:
                return _UNKNOWN
            for where in (self.module._modules, self.module._parameters, self.module._buffers, self.module.__dict__):
                if node.attr in where:
                    return where[node.attr]
        return _UNKNOWN

    @functools.cached_property
    def _is_shared(self) -> bool:
        """Whether anything in the forward may change self: a store, a call of a method, or self handed to something."""
        reads = [n for n in ast.walk(self.tree) if isinstance(n, ast.Attribute) and self.is_it(n.value)]
        named = [n for n in ast.walk(self.tree) if self.is_it(n)]
        called = {n.func.attr for n in ast.walk(self.tree) if isinstance(n, ast.Call) and n.func in reads}  # type: ignore
        return (
            len(named) != len(reads)
            or any(not isinstance(n.ctx, ast.Load) for n in reads)
            or any(inspect.getattr_static(type(self.module), name, None) is not None for name in called)
        )

    def is_tensor(self, node: ast.expr) -> bool:
        """Whether it is an attribute of a parameter or buffer of self."""
        match node:
            case ast.Attribute(value=ast.Attribute(value=owner, attr=name)) if self.is_it(owner):
                return not is_hidden(self.module, name) and isinstance(own_tensors(self.module).get(name), torch.Tensor)
        return False

    def is_computed(self, path: str) -> bool:
        """Whether a module on the way has a property, or another descriptor, of that name."""
        return self._descriptor(path) is not None

    def may_write(self, path: str) -> bool:
        """Whether reading that may do more than compute: no method, and no property that only reads plain attributes
        and computes with them."""
        descriptor = self._descriptor(path)
        if isinstance(descriptor, (types.FunctionType, staticmethod, classmethod)):
            return False
        getter = getattr(descriptor, "fget", None)
        if not isinstance(getter, types.FunctionType):
            return True
        me, held = getter.__code__.co_varnames[:1], _UNKNOWN  # what was read of self last, attribute by attribute
        for step in dis.get_instructions(getter):
            if _is_subscript(step):
                if type(held) not in _PLAIN_HOLDERS:
                    return True
                held = _UNKNOWN
            elif not _computes(step):
                return True
            elif step.opname.startswith("LOAD_ATTR"):
                held = _attribute(held, step.argval)
                if held is _UNKNOWN:
                    return True
            elif step.opname.startswith("LOAD_FAST"):
                held = self.module if (step.argval,) == me else _UNKNOWN
            elif not step.opname.startswith(_CONSTANT):
                held = _UNKNOWN
        return False

    def _descriptor(self, path: str) -> Any:
        owner: Any = self.module
        for name in path.split("."):
            if not isinstance(owner, nn.Module):
                break
            if hasattr(type(static := inspect.getattr_static(type(owner), name, None)), "__get__"):
                return static
            own = {**owner._parameters, **owner._buffers, **owner._modules, **owner.__dict__}
            owner = own.get(name, static)
        return None

    def is_path(self, node: ast.expr) -> bool:
        """Whether it is an attribute of an attribute ... of it."""
        return self.is_it(root_of(node))

    def is_it(self, node: ast.AST) -> bool:
        """Whether it is the name."""
        return isinstance(node, ast.Name) and node.id == self.name
