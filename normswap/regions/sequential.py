"""An nn.Sequential: its children in a row as the operations of a forward, and what calls a region of them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from torch import nn

from normswap.plans import Match
from normswap.regions.flow import Flow, Leaf, Op, Value
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import Region, Step, children_of, qualified


def in_a_row(module: nn.Module) -> Flow:
    """The flow of the forward of an nn.Sequential, whose operations stand nowhere."""
    tree: Any = ast.parse("def forward(self, input): pass").body[0]
    nowhere = ast.expr(lineno=tree.lineno, col_offset=0, end_lineno=tree.lineno, end_col_offset=0)
    value: Value = Leaf()
    ops: list[Op] = []
    for name in module._modules:
        op = Op([], f"self.{name}", (value,), node=nowhere, order=len(ops))
        value.users.append(op)
        ops.append(op)
        value = op
    value.users.append(None)
    forward: Any = nn.Sequential.forward
    return Flow(tree, forward, ops, [], [], frozenset(), {}, frozenset())


def compiled_run(region: Region) -> Compiled:
    """The children called one by one."""
    names = [*children_of(region)]

    def stepped(self: Any, packed: Any, each: Callable[[int, Any], Any]) -> Any:
        for index, name in enumerate(names):
            packed = each(index, self._modules[name](packed))
        return packed

    def snippet(self: Any, packed: Any) -> Any:
        for name in names:
            packed = self._modules[name](packed)
        return packed

    return Compiled(region, snippet, stepped, lambda packed: (packed, None, None, None, None, ()))


def by_itself(module: nn.Module, match: Match) -> tuple[Compiled, nn.Module]:
    """A whole ``module`` that is the norm of ``match`` as a region, and the owner of that."""
    owner = nn.Module()
    owner._modules["norm"] = module
    region = Region(match.kind, "norm", (Step("norm", (0, 0, 0, 0)),), qualified(type(module)), dict(match.attributes))
    return compiled_run(region), owner
