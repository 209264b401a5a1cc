"""What regions.flow makes of a forward, by the words of its body: its operations and what else happens, in order."""

from __future__ import annotations

import itertools
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from region_checks import loaded
from torch import nn

from normswap.attributes import Rejection
from normswap.plans import Reason
from normswap.regions.flow import Attribute, Constant, Flow, Leaf, is_literal, is_torchs, read

HEAD = """
import math
import torch
import torch.nn.functional as F

def halved(x):
    return x / 2

halved.inner = torch.abs

def modulate(x, shift, scale):
    return x * (1 + scale) + shift

def told(x, shift, scale):
    "What it is."
    return x * (1 + scale) + shift

def counted(x, shift, scale):
    x.numel()
    return x * (1 + scale) + shift

def named(x):
    y = x / 2
    return y

"""
BODIES: dict[str, str] = {
    "return torch.abs(x) + y": "1 abs(_); 2 +(1, _)!",
    "return abs(x)": "1 abs(_)!",
    "return -2 * x": "1 *(-2, _)!",
    "return -x": "~",
    "return x ** 2 - y @ x": "1 **(_, 2); ~; 2 -(1, _)!",
    "y = x + 1|return y * y": "1 +(_, 1); 2 *(1, 1)!",
    "y: int = x + 1|return y": "1 +(_, 1)!",
    "y: int|return x": "~",
    "p = 2|return x ** p": "1 **(_, 2')!",
    "p = (1, 2)|return x.mean(p)": "1 .mean()(_, (1, 2)')!",
    "return x.mean((1, -2))": "1 .mean()(_, (1, -2))!",
    "return x.mean([1, y])": "1 .mean()(_, _)!",
    "return F.relu(x)": "1 relu(_)!",
    "return F.layer_norm(x, (4,), eps=1e-5)": "1 layer_norm(_, (4,), eps=1e-05)!",
    "return math.sqrt(x)": "1 .sqrt(_)!; ~",
    "return math.pi * x": "1 .pi(_); 2 *(1, _)!",
    "return halved(x)": "1 halved(_)!",
    "return halved.inner(x)": "~",
    "return modulate(x, y, self.weight)": "1 +(1, self.weight); 2 *(_, 1); 3 +(2, _)!",
    "return told(x, y, self.weight)": "1 +(1, self.weight); 2 *(_, 1); 3 +(2, _)!",
    "return counted(x, y, self.weight)": "1 counted(_, _, self.weight)!",
    "return torch.os.getcwd() * x": "1 .getcwd(_)!; ~; 2 *(_, _)!",
    "return torch.float16(x)": "~",
    "return named(x)": "1 named(_)!",
    "return self.norm(x)": "1 self.norm(_)!",
    "return self.norm.forward(x)": "1 self.norm.forward(_)!",
    "return self(x)": "~",
    "return self.weight.abs() + x": "1 .abs()(self.weight); 2 +(1, _)!",
    "return self.weight.shape": "",
    "return self.computed.abs()": "1 self.computed.abs()!",
    "return self.written.abs()": "~; 1 self.written.abs()!",
    "return self.plain.abs()": "1 self.plain.abs()!",
    "return self.leads_on.abs()": "~; 1 self.leads_on.abs()!",
    "return self.filled.abs()": "~; 1 self.filled.abs()!",
    "return self.looked_up.abs()": "~; 1 self.looked_up.abs()!",
    "return self.extra.more(x)": "1 self.extra.more(_)!",
    "return x.abs().sum()": "1 .abs()(_); 2 .sum()(1)!",
    "return x.shape[0]": "1 .shape(_)!",
    "return x[y.abs(), 1:y.sum()]": "1 .abs()(_)!; 2 .sum()(_)!",
    "a = [x, y]|return x + y": "1 +(_, _)!",
    "x, y = y, x|return x + y": "~; 1 +(_, _)!",
    "if not self.flag:|    return x": "if not self.flag is False",
    "return x[1:, None] + y[x]": "1 +(_[], _[])!",
    "return x[self.norm(y):x:1]": "1 self.norm(_)!",
    "f = torch.abs|return f(x)": "~",
    "f = self.norm|return f(x)": "~",
    "return torch.abs(x, out=y)": "~",
    "return torch.add(*x)": "~",
    "return torch.add(*self.norm(x))": "1 self.norm(_)!; ~",
    "return torch.add(x, **y)": "~",
    "return torch.add(x, other=y)": "1 add(_, other=_)!",
    "return x.y.abs()": "1 .y(_); 2 .abs()(1)!",
    "return (lambda: x)() + y": "~; 1 +(_, _)!",
    "return [z for z in x]": "~",
    "a, b = x|return a + b": "~; 1 +(_, _)!",
    "a, b = x + y|return a + b": "1 +(_, _)!; 2 +(_, _)!",
    "a, b = torch.abs(x)|return a": "1 abs(_)!",
    "a, self.c = x + y|return a": "~",
    "z = x + 1|y = -z|return z * 2": "1 +(_, 1)!; ~; 2 *(1, 2)!",
    "z = x + 1|y = -(z := x)|return z * 2": "1 +(_, 1)!; ~; 2 *(_, 2)!",
    "a = b = x + y|return a": "~",
    "x += y|return x": "1 +=(_, _)!",
    "x @= y|return x": "~",
    "self.c = x|return x": "~",
    "x[0] = y|return x": "~",
    "return": "",
    "x + y|pass": "1 +(_, _)",
    "if self.flag:|    x = x + 1|else:|    x = x + 2|return x": "if self.flag is True; 1 +(_, 1)?!",
    "if self.extra is not None:|    x = x + 1|else:|    x = x + 2|return x": (
        "if self.extra is not None is False; 1 +(_, 2)?!"
    ),
    "if self.flag:|    return x + 1|return x + 2": "if self.flag is True; 1 +(_, 1)?!; ~; / 2 +(_, 2)!",
    "if x:|    x = x + 1|else:|    y = x + 2|return x + y": "~; 1 +(_, 1)!; ~; / 2 +(_, 2)!; ~; / 3 +(_, _)!",
    "for z in x:|    y = y + z|else:|    y = y + 1|return y": "~; 1 +(_, _)!; ~; / 2 +(_, 1)!; ~",
    "while x:|    x = x + 1|return x": "~; 1 +(_, 1)!; ~",
    "with x as z:|    z = z + 1|return z": "~; 1 +(_, 1)!; ~",
    "try:|    x = x + 1|except ValueError:|    x = x + 2|else:|    x = x + 3|finally:|    x = x + 4|return x": (
        "~; 1 +(_, 3)!; ~; / 2 +(_, 4)!; ~; / 3 +(_, 2)!; ~"
    ),
    "match x:|    case 1:|        x = x + 1|return x": "~; 1 +(_, 1)!; ~",
    "def of():|    return x + 1|return x": "~",
    "class Of:|    z = x + 1|return x": "~",
    "assert x + y|return x": "~",
    "return (z := x + y) * z": "~; 1 *(_, _)!",
    "return x + y if x else y": "~",
}


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(4), nn.Parameter(torch.ones(4))
        self.extra, self.flag = None, True

    @property
    def computed(self) -> Any:
        return self.weight

    @property
    def written(self) -> Any:
        self.flag = False
        return self.weight

    @property
    def plain(self) -> Any:
        return [self.weight.dtype, self.norm.weight.shape[-1], self.norm.eps if self.flag else 1.0]

    @property
    def leads_on(self) -> Any:
        return self.written

    @property
    def filled(self) -> Any:
        self.weight[:] = 0.0
        return self.weight

    @property
    def looked_up(self) -> Any:
        return self.extra["weight"]


def flow_of(body: str, folder: Path, head: str = "def forward(self, x, y):", cls: type[nn.Module] = Parts) -> Any:
    """The flow of a forward with these lines, separated by "|"."""
    file = folder / "flows_by_their_words.py"
    file.write_text(f"{HEAD}{head}\n" + "".join(f"    {line}\n" for line in body.split("|")))
    forward = loaded(file).forward
    return read(type("Written", (cls,), {"forward": forward})(), forward)


def told(flow: Flow) -> str:
    """The operations as "number target(operands)", those in a branch with "?", those that somebody else may use with
    "!"; "~" for moments at which anything may happen, "if" for that of a condition, "/" before another stretch."""
    numbers = {id(op): str(number) for number, op in enumerate(flow.ops, 1)}

    def word(value: Any) -> str:
        match value:
            case Attribute(path=path, computed=computed):
                return f"self.{path}" + "()" * computed
            case Constant(value=constant, named=named):
                return getattr(constant, "__name__", repr(constant)) + "'" * named
            case Leaf(of=of):
                return "_" if of is None else f"{word(of)}[]"
        return numbers[id(value)]

    events: dict[int, str] = dict.fromkeys(flow.effects, "~")
    events |= {order: f"if {text} is {truth}" for order, text, truth in flow.conditions}
    stretch = flow.ops[0].stretch if flow.ops else 0
    for op in flow.ops:
        name = op.target if isinstance(op.target, str) else op.target.__name__
        given = [*map(word, op.args), *(f"{key}={word(value)}" for key, value in op.keywords.items())]
        marks = "?" * op.conditional + "!" * (None in op.users)
        events[op.order] = f"{'/ ' * (op.stretch > stretch)}{numbers[id(op)]} {name}({', '.join(given)}){marks}"
        stretch = op.stretch
    texts = [text for _, text in sorted(events.items(), key=operator.itemgetter(0))]
    return "; ".join(text for text, _ in itertools.groupby(texts))


@pytest.mark.parametrize("body", BODIES)
def test_what_a_body_does(body: str, tmp_path: Path) -> None:
    found = flow_of(body, tmp_path)
    assert isinstance(found, Flow) and told(found) == BODIES[body]


REJECTED = {
    ("yield x", "def forward(self, x):"): Reason.NOT_STRAIGHT_LINE,
    ("return x", "async def forward(self, x):"): Reason.SOURCE,
    ("return 1", "def forward():"): Reason.UNSUPPORTED,
    ("self = x|return x", "def forward(self, x):"): Reason.NOT_STRAIGHT_LINE,
    ("return locals()", "def forward(self, x):"): Reason.NOT_STRAIGHT_LINE,
}


@pytest.mark.parametrize(("body", "head"), REJECTED)
def test_what_cannot_be_rewritten(body: str, head: str, tmp_path: Path) -> None:
    found = flow_of(body, tmp_path, head)
    assert isinstance(found, Rejection) and found.reason is REJECTED[body, head]


def test_an_attribute_that_is_looked_up_in_its_own_way(tmp_path: Path) -> None:
    own = type("Own", (Parts,), {"__getattr__": lambda self, name: nn.Module.__getattr__(self, name)})
    assert isinstance(flow_of("return self.norm(x)", tmp_path, cls=own), Rejection)


CAPTURED = {
    "f = lambda z: x + z|return f(y)": {"x", "z"},
    "def f():|    return y|return f()": {"y"},
    "return [x for z in y]": {"x", "y", "z"},
    "return sum(x for z in y)": {"x", "y", "z"},
    "global z|z = 1|return x + y": {"z"},
    "z = x + y|return z": set(),
}


@pytest.mark.parametrize("body", CAPTURED)
def test_what_code_inside_may_read(body: str, tmp_path: Path) -> None:
    assert flow_of(body, tmp_path).captured == CAPTURED[body]


def test_what_happens_between_two_moments(tmp_path: Path) -> None:
    flow = flow_of("z = x + y|print(z)|return z * 2", tmp_path)
    before, behind = (op.order for op in flow.ops)
    assert flow.opaque_between(before, behind) and not flow.opaque_between(before, before + 1)
    assert not flow.opaque_between(before + 1, behind) and not flow.opaque_between(behind, behind + 9)


def test_what_is_known_of_torch() -> None:
    assert all(map(is_torchs, (torch, nn.functional, torch.abs, torch.float16, abs, torch.linalg.vector_norm)))
    assert not any(map(is_torchs, (operator, operator.abs, print, len, 1, None, torch.distributed)))
    assert is_literal(Constant(value=1)) and not is_literal(Constant(value=1, named=True)) and not is_literal(Leaf())
