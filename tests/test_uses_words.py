"""What the reader of uses makes of each way to name a module: what it counts as called, taken apart, read or asked."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from convolution_models import bn, conv
from region_checks import loaded
from torch import Tensor, nn

from normswap.uses import uses_in

HEAD = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
class Above(nn.Module):
    def helper(self, x):
        return self.row[0](x)
def calls(layer, x):
    return layer(x)
def takes(layer, x):
    return layer[0](x)
def asks(layer, x):
    return layer.stride
def of_all(net, x):
    return net.block.conv(x)
def rest(x, **several):
    return several["row"][0](x)
class Written(Above):
    def run(self, layer, x):
        return layer(x)
    def take(self, layer, x):
        return layer[0](x)
    def two():
        return 2
    def forward(self, x):
        """


class Block(nn.Module):
    number = 3

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.scale = conv(), bn(), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x))

    def pre(self, x: Tensor) -> Any:
        return self.conv(x)

    @property
    def first(self) -> Any:
        return self.conv


class Items(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([conv()])

    def __getitem__(self, index: int) -> Any:
        return self.layers[index]

    def __iter__(self) -> Any:
        return iter(self.layers)


class Getattr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(conv())

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


class Getattribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(conv())

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


def filled(model: Any) -> Any:
    model.row, model.block = nn.Sequential(conv(), bn()), Block()
    model.rows = nn.ModuleList([nn.Sequential(conv(), bn()) for _ in range(2)])
    model.named = nn.ModuleDict({"one": nn.Sequential(conv(), bn()), "two": conv()})
    model.conv, model.bn, model.scale = conv(), bn(), nn.Parameter(torch.ones(1))
    model.own_items, model.own_getattr, model.own_getattribute = Items(), Getattr(), Getattribute()
    model.kept_list, model.kept_dict, model.kept_number = [model.row], {"a": model.row}, 3
    model.method_of_row = model.row.extra_repr
    return model


KNOWN = Counter({"block.bn": 1, "block.conv": 1})
"""What a block calls anyway."""


def told(body: str, folder: Path) -> str:
    """What ``body`` is found to do, in words."""
    path = folder / "words.py"
    path.write_text(HEAD + body.replace("; ", "\n        ") + "\n")
    model = filled(loaded(path).Written())
    uses, names = uses_in(model), {id(module): name or "self" for name, module in model.named_modules()}
    below = {name for name in names.values() if name != "self"}
    apart, called = {names[one] for one in uses.apart}, Counter({names[one]: n for one, n in uses.calls.items()})
    found = {
        "apart": apart,
        "read": {names[one] for one in uses.read},
        "asked": {names[one] for one in uses.asked} - apart,
        "calls": {*(called - KNOWN)},
    }

    def listed(found: set[str]) -> str:
        if found >= below:
            return "all and self" if "self" in found else "all"
        return " ".join(sorted(found)) if len(found) < 8 else "several"

    return "; ".join(f"{key} {listed(several)}" for key, several in found.items() if several)


BODIES: dict[str, str] = {
    "self.row[0]": "asked row",
    "self.row[0](x)": "apart row.0; asked row; calls row.0",
    "self.row(x)": "calls row",
    "self.row[-1](x)": "apart row.0 row.1; asked row; calls row.0 row.1",
    "self.row[1:](x)": "apart row.0 row.1; asked row; calls row.0 row.1",
    "self.rows[0](x)": "asked rows; calls rows.0",
    "self.rows[0][1](x)": "apart rows.0.1; asked rows rows.0; calls rows.0.1",
    'self.named["one"](x)': "asked named; calls named.one",
    'self.named["one"][0](x)': "apart named.one.0; asked named named.one; calls named.one.0",
    'self.named.pop("one")(x)': "apart named named.one named.one.0 named.one.1 named.two",
    "self.named.one(x)": "asked named; calls named.one",
    "self.row.forward(x)": "calls row",
    "self.row.__call__(x)": "calls row",
    "self(x)": "",
    "self.forward(x)": "",
    "for one in self.rows: x = one(x)": "asked rows; calls rows.0 rows.1",
    "for one in self.row: x = one(x)": "apart row.0 row.1; asked row; calls row.0 row.1",
    "for one in self.rows[:1]: x = one(x)": "asked rows; calls rows.0 rows.1",
    "for key in self.named: x = self.named[key](x)": "asked named; calls named.one named.two",
    "for one in self.named.values(): x = one(x)": "asked named; calls named.one named.two",
    "for key, one in self.named.items(): x = one(x)": "asked named; calls named.one named.two",
    "for one in self.children(): x = one(x)": "calls several",
    "for one in self.modules(): x = one(x)": "apart all; calls all",
    "for one in self.row.children(): x = one(x)": "apart row.0 row.1; asked row; calls row.0 row.1",
    "for one in self.row.modules(): pass": "asked row",
    "for key, one in self.row.named_modules(): one(x)": "apart row.0 row.1; asked row; calls row.0 row.1",
    "for place, one in enumerate(self.rows): x = one(x) + place": "asked rows; calls rows.0 rows.1",
    "for place, one in enumerate(self.rows, start=1): x = one(x)": "asked rows; calls rows.0 rows.1",
    "for one, other in zip(self.rows, [1, 2]): x = one(x) * other": "asked rows; calls rows.0 rows.1",
    "for one, other in zip([1, 2], self.rows): x = other(x) * one": "asked rows; calls rows.0 rows.1",
    "for one, _ in zip(*self.rows): x = one(x)": "apart rows.0 rows.0.0 rows.0.1 rows.1 rows.1.0 rows.1.1; asked rows",
    "for one in reversed(list(self.rows)): x = one(x)": "asked rows; calls rows.0 rows.1",
    "for one in sorted(self.rows, key=len): x = one(x)": "apart rows rows.0 rows.0.0 rows.0.1 rows.1 rows.1.0 rows.1.1",
    "next(iter(self.rows))(x)": "apart rows.0 rows.0.0 rows.0.1 rows.1 rows.1.0 rows.1.1; asked rows",
    "next(iter([]), self.row)[0](x)": "apart row row.0 row.1",
    "[one(x) for one in self.rows]": "asked rows; calls rows.0 rows.1",
    "[one for one in self.row][0](x)": "apart row.0 row.1; asked row; calls row.0 row.1",
    '{k: one for k, one in self.named.items()}["one"](x)': "asked named; calls named.one named.two",
    '{"a": self.row}["a"](x)': "calls row",
    '{"a": self.row}["a"][0](x)': "apart row.0; asked row; calls row.0",
    "dict(a=self.row)": "apart row row.0 row.1",
    '{**{"a": self.row}}': "apart row row.0 row.1",
    "{self.row: 1}": "apart row row.0 row.1",
    "[self.row, self.block][1](x)": "calls block row",
    "(self.row, self.block)[1](x)": "calls block",
    "(self.row, self.block)[0][0](x)": "apart row.0; asked row; calls row.0",
    "(self.row, self.block)[-1].conv(x)": "apart block.conv; asked block; calls block.conv",
    "(self.row, self.block)[x][0](x)": "apart block.conv row.0; asked block row; calls block.conv row.0",
    "(*self.row, 1)[0](x)": "apart row.0 row.1; asked row; calls row.0 row.1",
    "(1, *self.row)[2](x)": "apart row.0 row.1; asked row; calls row.0 row.1",
    "for one in zip(*x, self.rows): one[2](x)": "asked rows; calls rows.0 rows.1",
    "a = self.row; a = (a, 1); a[0](x)": "apart row row.0 row.1; calls row row.0",
    "a, b = self.row, self.block; b.conv(x)": "apart block.conv; asked block; calls block.conv",
    "a, *b = self.row; b[0](x)": "apart row.0 row.1; asked row; calls row.0 row.1",
    "a = b = self.row; b[0](x)": "apart row.0; asked row; calls row.0",
    "a: object = self.row; a[0](x)": "apart row.0; asked row; calls row.0",
    "(a := self.row)[0](x); a(x)": "apart row.0; asked row; calls row row.0",
    "a = self.row if x else self.block; a(x)": "calls block row",
    "a = self.row or self.block; a(x)": "calls block row",
    "if self.row: pass": "",
    "if not self.row and self.row is not None: pass": "",
    "while self.row == x: break": "",
    "x = 1 if self.row is None else 2": "",
    'assert self.row, "there"': "",
    'f"{self.row}"': "apart row row.0 row.1",
    "self.row": "",
    "return self.row": "apart row row.0 row.1",
    "yield self.row": "apart row row.0 row.1",
    "lambda y=self.row: y": "apart row row.0 row.1",
    "lambda: self.row[0](x)": "apart row.0; asked row; calls row.0",
    "def inner(): return self.row[0](x)": "apart row.0; asked row; calls row.0",
    "with self.row: pass": "apart row row.0 row.1",
    "self.row = self.block": "apart block block.bn block.conv",
    "self.other = self.row": "apart row row.0 row.1",
    "self.row.other = 1": "apart row row.0 row.1",
    "self.row[0] = x": "apart row row.0 row.1",
    "x.kept = self.row": "apart row row.0 row.1",
    'kept = {}; kept["a"] = self.row; kept["a"](x)': "apart row row.0 row.1",
    "kept = []; kept.append(self.row); kept[0](x)": "apart row row.0 row.1",
    "kept = []; kept.extend(self.row); kept[0](x)": "apart row row.0 row.1",
    "kept = list(self.row); kept.pop()(x)": "apart row.0 row.1; asked row",
    "kept = list(self.row).copy(); kept[0](x)": "apart row.0 row.1; asked row",
    "kept = list(self.rows); kept.sort()": "apart rows.0 rows.0.0 rows.0.1 rows.1 rows.1.0 rows.1.1; asked rows",
    "kept = list(self.rows); kept[:1][0](x)": "asked rows; calls rows.0 rows.1",
    "kept = [[[[[[[[self.row]]]]]]]]": "apart row row.0 row.1",
    'kept = {"a": self.row}; kept.get("a")(x)': "calls row",
    'kept = {"a": self.row}; kept.keys()': "",
    'kept = {"a": self.row}; kept.setdefault("a")': "apart row row.0 row.1",
    'for one in {"a": self.row}.values(): one(x)': "calls row",
    'for key, one in {"a": self.row}.items(): one(x)': "calls row",
    "for one in self.kept_dict.values(): one(x)": "calls row",
    "self.kept_list[0](x)": "calls row",
    "self.kept_list[0][0](x)": "apart row.0; asked row; calls row.0",
    'self.kept_dict["a"](x)': "calls row",
    'self.kept_dict["a"][0](x)': "apart row.0; asked row; calls row.0",
    "for one in self.kept_list: one[0](x)": "apart row.0; asked row; calls row.0",
    "self.kept_number + 1": "",
    "self.method_of_row()": "apart row row.0 row.1",
    "isinstance(self.row, nn.Sequential)": "asked row",
    "isinstance(self.row[1], (nn.BatchNorm2d, nn.Identity))": "asked row row.1",
    "isinstance(self.row, kind)": "asked row",
    "isinstance(*[self.row, nn.Module])": "apart row row.0 row.1",
    "isinstance(self, nn.Module)": "asked self",
    "issubclass(type(self.row), nn.Module)": "asked row",
    "type(self.row)": "asked row",
    "len(self.row)": "asked row",
    "len(self.rows)": "asked rows",
    "print(self.row)": "apart row row.0 row.1",
    "print(self.row, file=x)": "apart row row.0 row.1",
    'hasattr(self.row, "a")': "asked row",
    'hasattr(self, "row")': "",
    "id(self)": "",
    "super(Written, self).extra_repr()": "",
    "super().helper(x)": "apart row.0; asked row; calls row.0",
    "Above.helper(self, x)": "apart row.0; asked row; calls row.0",
    "nn.Module.extra_repr(self)": "",
    "nn.Module.children(self)": "apart all and self",
    "Written.two()": "",
    'getattr(self, "row")(x)': "calls row",
    'getattr(self.row, "0")(x)': "apart row.0; asked row; calls row.0",
    "getattr(self, x)(x)": "apart row row.0 row.1; calls several",
    'getattr(self, f"ro{x}")(x)': "calls row rows",
    'getattr(self, f"kept_{x}")[0][0](x)': "apart row.0; asked row; calls row.0",
    "getattr(self.conv, x)": "apart conv",
    "getattr(self.block, x)(x)": "apart block block.bn block.conv",
    "getattr(x, self.row)": "apart row row.0 row.1",
    'getattr(self, "none", self.row)[0](x)': "apart row.0; asked row; calls row.0",
    'getattr([self.row], "pop")': "apart row row.0 row.1",
    'setattr(self, "a", x)': "apart all and self",
    'setattr(self.row, "a", x)': "apart row row.0 row.1",
    'setattr(self, "a", self.row)': "apart all and self",
    'delattr(self, "a")': "apart all and self",
    "checkpoint(self.row, x)": "calls row",
    "checkpoint(self.row[0], x)": "apart row.0; asked row; calls row.0",
    "checkpoint(self.row.__call__, x)": "calls row",
    "checkpoint([self.row], x)": "calls row",
    "load_checkpoint(self.row)": "apart row row.0 row.1",
    "hand(self.row)": "apart row row.0 row.1",
    "hand(x, self.row)": "apart row row.0 row.1",
    "hand(y=self.row)": "apart row row.0 row.1",
    "hand(*self.rows)": "apart rows.0 rows.0.0 rows.0.1 rows.1 rows.1.0 rows.1.1; asked rows",
    'hand(**{"y": self.row})': "apart row row.0 row.1",
    "hand(self)": "apart all and self",
    "calls(self.row, x)": "apart row; calls row",
    "calls(layer=x, x=self.row)": "apart row row.0 row.1",
    "rest(x, row=self.row)": "apart row row.0 row.1",
    "takes(self.row, x)": "apart row.0; asked row; calls row.0",
    "takes(x, x, self.row)": "apart row row.0 row.1",
    "nn.utils.parametrize.is_parametrized(self.row)": "apart row row.0 row.1",
    "asks(self.block.conv, x)": "asked block block.conv",
    "of_all(self, x)": "apart block.conv; asked block self; calls block.conv",
    "self.run(self.row, x)": "apart row; calls row",
    "self.take(self.row, x)": "apart row.0; asked row; calls row.0",
    "self.block.pre(x)": "apart block.conv; asked block; calls block.conv",
    "self.block.first(x)": "apart block.conv; asked block",
    "self.block.first": "apart block.conv; asked block",
    "self.block.scale": "read block; asked block",
    "self.block.number": "asked block",
    "self.block.conv(x)": "apart block.conv; asked block; calls block.conv",
    "self.block.conv": "asked block",
    "self.block.conv.weight": "apart block.conv; asked block",
    "self.block.conv.weight.dtype": "asked block block.conv",
    "self.block.conv.stride": "asked block block.conv",
    "self.block.bn.eps": "asked block block.bn",
    "self.block.bn.weight.shape": "asked block block.bn",
    "self.block.training": "",
    "self.block.nothing": "",
    "self.conv.weight": "read conv; asked conv",
    "self.conv.weight.to(x)": "read conv; asked conv",
    "self.conv.weight.size(0)": "asked conv",
    "self.conv.bias": "read conv; asked conv",
    "self.conv.stride": "asked conv",
    "self.conv(x)": "calls conv",
    "self.bn(self.conv(x))": "calls bn conv",
    "self.bn.running_mean": "read bn; asked bn",
    "self.bn.weight.shape": "asked bn",
    "self.scale": "",
    "self.parameters()": "apart all and self",
    "next(self.parameters()).dtype": "",
    "next(self.row.parameters()).device": "asked row",
    "self.row.state_dict()": "apart row row.0 row.1",
    "self.row.keys()": "",
    "self.rows.append(x)": "apart rows rows.0 rows.0.0 rows.0.1 rows.1 rows.1.0 rows.1.1",
    "self.row.extra_repr()": "asked row",
    "self.row.__class__": "asked row",
    "self.row.__dict__": "apart row row.0 row.1",
    'self.register_buffer("a", x)': "",
    'self.get_submodule("row.0")(x)': "apart all and self",
    'self._modules["row"](x)': "calls several",
    'self.row._modules["0"](x)': "apart row.0 row.1; asked row; calls row.0 row.1",
    "self.row._parameters": "apart row row.0 row.1",
    "self.block._buffers": "apart block block.bn block.conv",
    "for one in self._modules.values(): one(x)": "calls several",
    "self.own_items[0](x)": "apart own_items.layers own_items.layers.0; asked own_items; calls own_items.layers",
    "self.own_items.layers[0](x)": "apart own_items.layers.0; asked own_items own_items.layers; "
    "calls own_items.layers.0",
    "self.own_getattr.row[0](x)": "apart own_getattr.row.0; asked own_getattr own_getattr.row; calls own_getattr.row.0",
    "self.own_getattr.anything": "apart own_getattr own_getattr.row own_getattr.row.0",
    "self.row[0] @ x": "apart row.0; asked row",
    "x[self.row]": "apart row row.0 row.1",
    "self.row < x": "apart row row.0 row.1",
    "-self.row": "apart row row.0 row.1",
    "self.row in [x]": "",
    "x in self.named": "",
    "map(lambda one: one(x), self.rows)": "apart rows rows.0 rows.0.0 rows.0.1 rows.1 rows.1.0 rows.1.1",
    "self.row.apply": "apart row row.0 row.1",
    "self.row.named_children": "apart row row.0 row.1",
    "self.conv._parameters": "apart conv",
    "self._parameters": "",
    "self.own_getattribute.row": "apart own_getattribute own_getattribute.row own_getattribute.row.0",
    "for place, (a, b) in enumerate([self.row]): x = a(x)": "apart row.0 row.1; asked row; calls row.0 row.1",
}


@pytest.mark.parametrize("body", BODIES)
def test_what_a_body_does(body: str, tmp_path: Path) -> None:
    assert told(body, tmp_path) == BODIES[body]
