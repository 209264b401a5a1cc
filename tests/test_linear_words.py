"""Which Linear a BatchNorm1d is computed with (regions.linear), by the words of forwards; what multiplies in between;
and what a call makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from linear_region_models import FEATURES, WIDTH, Factor, LinearParts
from region_checks import loaded
from torch import Tensor, nn

import normswap
from normswap.activation import Activation
from normswap.forwards.replaced import fingerprint
from normswap.regions.linear import factor_of
from normswap.regions.projected import Projected
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import Region, Step
from normswap.rules import alone
from normswap.rules.region import readings

HEAD = """
import torch
import torch.nn.functional as F
from linear_region_models import LinearParts
from torch import nn

def times(x, by):
    return x * by

class Child(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.number, self.name, self.flag = nn.Parameter(torch.ones(5)), 0.5, "name", True
        self.nothing = None

"""
CHILDREN: dict[str, str] = {
    "return x * self.weight": "weight",
    "return self.weight * x": "weight",
    "return x.mul(self.number)": "number",
    "return torch.mul(self.weight, x)": "weight",
    "return x + self.weight": "",
    "return x": "",
    "return x * 2.0": "",
    "return x * x": "",
    "return self.weight * self.number": "",
    "return 2.0 * self.weight": "",
    "return x * self.number if self.number else x": "",
    "return (x + 1) * self.weight": "",
    "return x * self.name": "",
    "return x * self.nothing": "",
    "return x * self.weight.data": "",
    "y = x.add_(1)|return x * self.weight": "",
    "y = self.number|return x * self.weight": "",
    "return x * self.weight if self.flag else x": "",
    "return x * self.weight if x.dtype is torch.float16 else x": "",
    "return times(x, self.weight)": "",
    "with torch.no_grad():|    return x * self.weight": "",
}
ELSEWHERE = " (fc has an output that is used elsewhere too)"
RMS = "self.row * torch.rsqrt(self.row.pow(2).mean(-1, keepdim=True) + 1e-6)"
BODIES: dict[str, str] = {
    "return self.act(self.bn(self.fc(x)))": "fc + bn + act",
    "return self.act(self.bn(self.fc(x) * self.scale))": "fc + scale + bn + act",
    "return self.act(self.bn(self.scale * self.fc(x)))": "fc + scale + bn + act",
    "return self.act(self.bn((1 + self.scale) * self.fc(x)))": "fc + scale + bn + act",
    "return self.act(self.bn(self.fc(x).mul(self.scale)))": "fc + scale + bn + act",
    "return self.act(self.bn(self.fc(x) * (1 + self.scale)))": "fc + scale + bn + act",
    "return self.act(self.bn(self.fc(x) * self.scale[None]))": "fc + scale + bn + act",
    "return self.act(self.bn(self.factor(self.fc(x))))": "fc + factor + bn + act",
    "return self.act(self.bn(x))": "bn + act",
    "return self.act(self.bn(self.act(x)))": "bn + act",
    "return self.act(self.bn(x * self.scale))": "bn + act",
    "return self.act(self.bn(self.fc(x) * y))": "bn + act",
    "return self.act(self.bn(self.fc(x) * (self.scale + y)))": "bn + act",
    "return self.act(self.bn(self.fc(x) * y[0]))": "bn + act",
    "return self.act(self.bn(self.fc(x) * self.fc2(x)))": "bn + act",
    "return self.act(self.bn(torch.mul(self.fc(x), other=self.scale)))": "fc + scale + bn + act",
    "return self.act(self.bn(torch.mul(input=self.scale, other=self.fc(x))))": "fc + scale + bn + act",
    "return self.act(self.bn(self.fc(x).add(self.scale)))": "bn + act",
    "return self.act(self.bn(self.fc(input=x)))": "fc + bn + act",
    "return self.bn(self.fc(x)) * self.scale": "fc + bn + scale",
    "return self.number * self.bn(input=self.fc(x))": "fc + bn + scale",
    "return self.bn(self.fc(x) * self.scale).mul(2.0)": "fc + scale + bn + scale",
    "return self.act(self.bn(self.fc(x)) * self.one)": "fc + bn + scale",
    "return self.bn(self.fc(x)) * self.scale * 2": "fc + bn + scale",
    "return self.bn(self.fc(x)) * self.bn.running_mean": "fc + bn",
    "return self.bn(self.fc(x)) * self.factor.weight": "fc + bn",
    "return self.bn(self.fc(x)) * self.fc.weight": "fc + bn",
    "return self.bn(self.fc(x)) * (1 + self.scale)": "fc + bn",
    "return self.bn(self.fc(x)) * y": "fc + bn",
    "h = self.bn(self.fc(x))|return h * h": "fc + bn",
    "h = self.bn(self.fc(x))|return h * self.scale + h": "fc + bn",
    "h = self.bn(self.fc(x))|h *= self.scale|return h": "fc + bn",
    "h = self.bn(self.fc(x))|self.scale.data.mul_(2)|return h * self.scale": "fc + bn",
    "return self.act(self.bn(self.fc(x, y)))": "bn + act",
    "return self.act(self.bn(self.fc(x, y=y)))": "bn + act",
    "return self.act(self.bn(torch.mul(self.fc(x))))": "bn + act",
    "return self.act(self.bn(self.factor(x)))": "bn + act",
    "return self.act(self.bn(self.factor(self.fc(x), y=y)))": "bn + act",
    "return self.act(self.bn(self.act(self.fc(x))))": "bn + act",
    "return self.act(self.ln(self.fc(x)))": "ln + act",
    "return self.act(F.batch_norm(self.fc(x), self.bn.running_mean, self.bn.running_var))": "batch_norm + act",
    "h = self.fc(x)|return self.act(self.bn(h)) + h": "bn + act" + ELSEWHERE,
    "h = self.fc(x)|return self.act(self.bn(h * self.scale)) + h": "bn + act" + ELSEWHERE,
    "h = self.fc(x) * self.scale|return self.act(self.bn(h)) + h": "bn + act" + ELSEWHERE,
    f"h = self.fc(x)|return self.act(self.bn({RMS} * h))": "rms_norm_by_hand, fc + scale + bn + act",
    "h = self.fc(x)|for _ in y:|    h = self.act(self.bn(h))|return h": "bn + act",
}


def written(body: str, folder: Path, head: str) -> Any:
    """The class whose forward has these lines, separated by "|"."""
    file = folder / "linears_by_their_words.py"
    lines = "".join(f"        {line}\n" for line in body.split("|"))
    file.write_text(f"{HEAD}{head}\n{lines}")
    return loaded(file)


def run_before(norm: nn.Module, children: list[tuple[str, nn.Module | None]]) -> tuple[str, tuple[str, ...], str]:
    """What an nn.Sequential of ``children`` and ``norm`` is found to have before that: the Linear, the factor and why
    they are apart."""
    row = nn.Sequential()
    row._modules.update([*children, ("norm", norm)])
    regions = [region for reading in readings(row, alone, baked=True) for region in reading.regions]
    return next(((region.linear, region.factor, region.apart) for region in regions), ("", (), ""))


@pytest.mark.parametrize("body", CHILDREN)
def test_what_a_child_multiplies_by(body: str, tmp_path: Path) -> None:
    child = written(body, tmp_path, "    def forward(self, x):").Child()
    expected = ("by", CHILDREN[body], fingerprint(type(child).forward)) if CHILDREN[body] else ()
    assert factor_of("by", child) == expected
    linear, norm = ("fc", nn.Linear(FEATURES, WIDTH)), nn.BatchNorm1d(WIDTH)
    assert run_before(norm, [linear, ("by", child)]) == (("fc", expected, "") if expected else ("", (), ""))


def test_what_no_child_multiplies_by() -> None:
    inner = Factor()
    inner.more = nn.Identity()
    own = type("Own", (Factor,), {"__getattr__": lambda self, name: nn.Module.__getattr__(self, name)})()
    static = type("Static", (Factor,), {"forward": staticmethod(torch.relu)})()
    for child in (None, inner, own, static, nn.Identity()):
        assert factor_of("by", child) == ()
        assert run_before(nn.BatchNorm1d(WIDTH), [("fc", nn.Linear(FEATURES, WIDTH)), ("by", child)]) == ("", (), "")
    assert run_before(nn.BatchNorm1d(WIDTH), [("fc", nn.Linear(FEATURES, WIDTH))]) == ("fc", (), "")
    for children in ([], [("by", Factor())]):
        assert run_before(nn.BatchNorm1d(WIDTH), children) == ("", (), "")


def found_in(module: nn.Module) -> str:
    regions = [r for swap in normswap.plan(module).swaps for r in swap.match.attributes.get("regions", ())]
    found = [(region.name, region.apart) for region in map(Region.from_json, regions)]
    return ", ".join(f"{name} ({apart})" if apart else name for name, apart in found)


@pytest.mark.parametrize("body", BODIES)
def test_the_linear_that_is_taken_in(body: str, tmp_path: Path) -> None:
    module = written(body, tmp_path, "class Written(LinearParts):\n    def forward(self, x, y):")
    assert found_in(module.Written()) == BODIES[body]


class Dense(nn.Linear):
    """One by another name."""


class LinearLike(nn.Module):
    """None, which is called so."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def hooked(child: nn.Module) -> nn.Module:
    child.register_forward_hook(lambda *_: None)
    return child


APART: dict[str, tuple[Callable[[Any], object], str]] = {
    "nothing": (lambda parts: None, "fc + factor + bn + act"),
    "a subclass": (lambda parts: setattr(parts, "fc", Dense(FEATURES, WIDTH)), "bn + act (fc is a "),
    "another class": (lambda parts: setattr(parts, "fc", LinearLike()), "bn + act (fc is a "),
    "hooked": (lambda parts: hooked(parts.fc), "bn + act (fc carries hooks"),
    "factor hooked": (lambda parts: hooked(parts.factor), "bn + act (factor carries hooks"),
    "width": (lambda parts: setattr(parts, "bn", nn.BatchNorm1d(WIDTH + 1)), "bn + act (fc gives other channels"),
}


class ByAChild(LinearParts):
    def forward(self, x, y):
        return self.act(self.bn(self.factor(self.fc(x))))


@pytest.mark.parametrize("what", APART)
def test_why_it_stays_apart(what: str) -> None:
    change, expected = APART[what]
    parts = ByAChild()
    change(parts)
    assert found_in(parts).startswith(expected)
    told = run_before(parts.bn, [("fc", parts.fc), ("factor", parts.factor)])[2]
    assert expected.endswith(told) if not told else told.startswith(expected.partition("(")[2])


# --- on every call --------------------------------------------------------------------------------------------------

X, SCALE, RELU = torch.randn(8, FEATURES), torch.randn(WIDTH), Activation("relu")
BEHIND = torch.randn(8, WIDTH)


def called(
    parts: Any, x: Any = X, scale: Any = SCALE, behind: Any = BEHIND, read: bool = True, by_child: bool = False
) -> Any:
    """What a region gives: where the norm is computed apart, what it is given."""
    factor = ("factor", "weight", fingerprint(Factor.forward)) if by_child else ()
    products = ["product"] if scale is not None else []
    steps = ["linear", *products, "norm", *(["residual"] if behind is not None else []), "activation"]
    at = tuple(Step(does, (0, 0, 0, 0)) for does in steps)
    region = Region("batch_norm", "bn", at, linear="fc", factor=factor, activation=("relu", 0.0, 0.0))
    own: Any = None
    compiled = Compiled(region, own, own, lambda packed: packed)
    one = Projected(compiled, lambda norm: read, lambda norm, z, behind, activation: (z, behind, activation))
    return one(parts._modules, (x, None, behind, scale, None, ()))


@torch.no_grad()
def test_what_a_call_computes() -> None:
    parts = LinearParts()
    nn.init.normal_(parts.factor.weight)
    parts.eval()
    for scale, by_child in ((SCALE, False), (2, False), (None, False), (None, True)):
        by = parts.factor.weight if by_child else scale
        z = parts.fc(X) if by is None else parts.fc(X) * by
        out = called(parts, scale=scale, by_child=by_child)
        torch.testing.assert_close(out, (parts.bn(z) + BEHIND).relu())
        with torch.autocast("cpu", torch.bfloat16):  # where the norm is computed apart
            for behind in (BEHIND, None):
                x, added, activation = called(parts, scale=scale, behind=behind, by_child=by_child)
                assert torch.equal(x, parts.fc(X) if by is None else parts.fc(X) * by)
                assert added is behind and activation == RELU


LEFT: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "linear hooked": lambda parts, given: hooked(parts.fc),
    "no linear": lambda parts, given: parts._modules.pop("fc"),
    "three dims": lambda parts, given: given.update(x=X[None], behind=None),
    "norm": lambda parts, given: given.update(read=False),
    "residual of another shape": lambda parts, given: given.update(behind=SCALE),
    "residual of a subclass": lambda parts, given: given.update(behind=BEHIND.as_subclass(Own)),
    "residual is a number": lambda parts, given: given.update(behind=1.0),
    "scale a sample": lambda parts, given: given.update(scale=X[:, :1]),
    "scale is a truth": lambda parts, given: given.update(scale=True),
    "no factor": lambda parts, given: parts._modules.pop("factor"),
    "factor hooked": lambda parts, given: hooked(parts.factor),
    "factor without a weight": lambda parts, given: setattr(parts.factor, "weight", None),
}


class Own(Tensor):
    """What a library may have in a tensor's place."""


@pytest.mark.parametrize("what", LEFT)
@torch.no_grad()
def test_what_a_call_leaves_to_the_statements(what: str) -> None:
    parts, given = LinearParts().eval(), dict[str, Any](x=X, scale=SCALE, behind=BEHIND, read=True)
    LEFT[what](parts, given)
    if by_child := "factor" in what:
        given["scale"] = None
    for cast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            assert called(parts, **given, by_child=by_child) is None
