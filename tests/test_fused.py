"""The op of a region and what is asked before it (regions.helper), on regions of a line each: it gives what the
statements give, and leaves to them what was spoiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from linear_region_models import BATCH, FEATURES, WIDTH
from models import randomised
from norm_act_models import NormAct
from region_checks import IMAGES, ROWS, loaded
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import normswap
from normswap import rules
from normswap.plans import Match
from normswap.regions import activations, helper
from normswap.regions.helper import Fused, at_once_of, make_helper
from normswap.regions.rewrite import compile_regions
from normswap.regions.spec import Region, Step, qualified

HEAD = """
import torch
import torch.nn.functional as F
from linear_region_models import LinearParts
from region_checks import Parts

class Written({base}):
    def forward(self, x, y):
"""
OF_ROWS = {
    "alone": "return F.gelu(self.norm(x))",
    "relu6": "return F.relu6(self.norm(x))",
    "relu6, in place": "return F.relu6(self.norm(x), inplace=True)",
    "tanh": "return F.gelu(self.norm(x), approximate='tanh')",
    "dropout": "return self.act(self.drop(self.norm(x)))",
    "sum": "s = x + y|return s + self.act(self.norm(s))",
    "once": "return self.norm(x + y)",
    "viewed": "return self.norm((x + y).view(-1, 8))",
    "adaptive": "return self.rms(x) * (1 + y[:, :1]) + x[:, :1]",
    "function": "return F.gelu(F.layer_norm(x, (8,), self.weight, self.bias, 1e-5))",
    "whole": "return x / x.norm() + y",
    "written": "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight + y",
}
OF_IMAGES = {
    "residual": "return F.leaky_relu(self.gn(x) + y, 0.3)",
    "residual, in place": "return F.leaky_relu(self.gn(x) + y, 0.3, inplace=True)",
    "statistics": "return F.relu(F.batch_norm(x, self.bn.running_mean, self.bn.running_var, self.weight, self.bias))",
    "batch": "return F.relu(F.batch_norm(x, None, None, self.weight, training=self.bn.track_running_stats))",
    "permuted": "return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)",
    "convolution": "return F.relu(self.bn(self.conv(x)))",
    "convolution and residual": "return F.relu(self.bn(self.conv(x)) + y)",
}
OF_LINEARS = {
    "linear": "return F.relu(self.bn(self.fc(x) * self.scale))",
    "linear by a function": "return F.relu(self.bn(torch.mul(self.fc(x), self.scale)))",
}
BODIES = OF_ROWS | OF_IMAGES | OF_LINEARS


class Tagged(Tensor):
    """What a library may have in a tensor's place."""


class Made:
    """A module with the body ``what``, its one region compiled, and what the region is given there."""

    def __init__(self, what: str, folder: Path) -> None:
        # A name of its own: of two files Python tells apart size and second.
        file = folder / f"regions_of_{what.replace(' ', '_')}.py"
        lines = "".join(f"        {line}\n" for line in BODIES[what].split("|"))
        file.write_text(HEAD.format(base="LinearParts" if what in OF_LINEARS else "Parts") + lines)
        cls = loaded(file).Written
        self.module = randomised(cls()).eval().requires_grad_(False)
        plan = normswap.plan(self.module)
        data = [r for swap in plan.swaps if not swap.site.name for r in swap.match.attributes["regions"]]
        region = Region.from_json(data[0])
        region = replace(region, folding="folded" if region.convolution else "")
        (self.compiled,), make = compile_regions(cls.forward, [region])
        shape = IMAGES if what in OF_IMAGES else ROWS
        shapes = ((BATCH, FEATURES), (BATCH, WIDTH)) if what in OF_LINEARS else (shape, shape)
        torch.manual_seed(1)
        forward = make([self._given])
        forward(self.module, *map(torch.randn, shapes))

    def _given(self, owner: Any, packed: Any) -> Any:
        self.packed = packed
        return self.compiled.snippet(owner, packed)

    def fused(self) -> Any:
        return Fused(self.compiled)(self.module._modules, self.compiled.inner(self.packed))

    def statements(self) -> Any:
        return self.compiled.snippet(self.module, self.packed)


@pytest.fixture
def of(tmp_path: Path) -> Callable[[str], Made]:
    return lambda what: Made(what, tmp_path)


def assert_alike(ours: Any, theirs: Any) -> None:
    for mine, other in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(mine, other.reshape(mine.shape), rtol=1e-5, atol=1e-5)
        else:
            assert mine == other


@pytest.mark.parametrize("what", BODIES)
def test_it_is_what_the_statements_give(what: str, of: Callable[[str], Made]) -> None:
    made = of(what)
    assert_alike(made.fused(), made.statements())
    assert_alike(make_helper(made.compiled)(made.module, made.packed), made.statements())


Spoil = Callable[[Made], Any]


def first(change: Callable[[Tensor], Any]) -> Spoil:
    """What puts something else in the place of the first thing that the region is given."""

    def spoil(made: Made) -> None:
        made.packed = (change(made.packed[0]), *made.packed[1:]) if type(made.packed) is tuple else change(made.packed)

    return spoil


def second(change: Callable[[Tensor], Any]) -> Spoil:
    def spoil(made: Made) -> None:
        one, other, *rest = made.packed
        made.packed = (one, change(other), *rest)

    return spoil


def tagged(packed: Any) -> Any:
    return tree_map(lambda value: value.as_subclass(Tagged) if isinstance(value, Tensor) else value, packed)


def without(packed: Any, shape: tuple[int, ...]) -> Any:
    """None for all tensors of another shape."""
    return tree_map(lambda value: value if value.shape == shape else None, packed)


def child(name: str, value: Any) -> Spoil:
    return lambda made: made.module._modules.update({name: value})


def hooked(name: str) -> Spoil:
    return lambda made: getattr(made.module, name).register_forward_hook(lambda *_: None)


SPOILED: dict[str, tuple[str, Spoil]] = {
    "x of a subclass": ("alone", first(lambda x: x.as_subclass(Tagged))),
    "x is a number": ("alone", first(lambda x: 1.0)),
    "what is written out of a subclass": ("written", lambda made: setattr(made, "packed", tagged(made.packed))),
    "norm hooked": ("alone", hooked("norm")),
    "no norm": ("alone", child("norm", None)),
    "another norm": ("alone", child("norm", nn.Identity())),
    "activation hooked": ("sum", hooked("act")),
    "another activation": ("sum", child("act", nn.Softplus())),
    "a dropout that drops": ("dropout", child("drop", nn.Dropout(0.5).train())),
    "y is a number": ("sum", second(lambda y: 1.0)),
    "y elsewhere": ("once", second(lambda y: y.to("meta"))),
    "y of a subclass": ("once", second(lambda y: y.as_subclass(Tagged))),
    "no residual": ("residual", second(lambda y: None)),
    "no scale and shift": ("adaptive", lambda made: setattr(made, "packed", without(made.packed, ROWS))),
    "no factor": ("linear", lambda made: setattr(made, "packed", without(made.packed, (BATCH, FEATURES)))),
    "x of two summands in a view": ("viewed", lambda made: setattr(made, "packed", ((1.0, 2.0), (-1, 8)))),
    "convolution hooked": ("convolution", hooked("conv")),
    "its norm hooked": ("convolution", hooked("bn")),
    "linear hooked": ("linear", hooked("fc")),
}


@pytest.mark.parametrize("what", SPOILED)
def test_what_is_left_to_the_statements(what: str, of: Callable[[str], Made]) -> None:
    made = of(SPOILED[what][0])
    SPOILED[what][1](made)
    inner = made.compiled.inner(made.packed)
    assert inner is None or Fused(made.compiled)(made.module._modules, inner) is None


REPLACED = {"alone": "gelu", "function": "layer_norm", "relu6": "relu6", "written": "rsqrt"}


@pytest.mark.parametrize("what", REPLACED)
@pytest.mark.parametrize("before", (False, True))
def test_a_function_that_was_replaced(
    what: str, before: bool, of: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = of(what)
    fused = None if before else Fused(made.compiled)
    monkeypatch.setattr(torch if what == "written" else F, REPLACED[what], lambda x, *given: x * 0.5)
    fused = fused or Fused(made.compiled)
    assert fused(made.module._modules, made.packed) is None and fused.known is not before
    assert_alike(make_helper(made.compiled)(made.module, made.packed), made.statements())


@pytest.mark.parametrize("what", ("sum", "once"))
@pytest.mark.parametrize("learning", (False, True))
def test_a_sum_of_two_that_are_not_alike(what: str, learning: bool, of: Callable[[str], Made]) -> None:
    """It broadcasts, or is of two dtypes; where it is used elsewhere too the op adds the gradients."""
    made = of(what)
    x, y = made.packed
    for one, other in ((x, y[:1]), (y[:, :1], x), (x, y.bfloat16()), (x, y)):
        leaves = [[t.clone().requires_grad_(learning) for t in (one, other)] for _ in range(2)]
        found = []
        for run, given in zip((made.fused, made.statements), leaves, strict=True):
            made.packed = tuple(given)
            found.append(run())
        (ours, theirs), (mine, others) = found, leaves
        assert_alike(ours, theirs)
        if learning:
            for result in (ours, theirs):
                torch.autograd.backward([t.sin().sum() for t in tree_leaves(result)])
            assert_alike([t.grad for t in mine], [t.grad for t in others])


def test_a_linear_that_is_computed_apart(of: Callable[[str], Made]) -> None:
    made = of("linear")
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = made.fused(), made.statements()
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.05)


def test_what_autocast_would_cast(of: Callable[[str], Made]) -> None:
    made = of("alone")
    children, x = made.module._modules, made.packed
    fed = Fused(replace(made.compiled, region=replace(made.compiled.region, feeds=("drop", "lin"))))
    assert fed.dtype(children, x) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert fed.dtype(children, x) is torch.bfloat16 and Fused(made.compiled).dtype(children, x) is None
        made.module.drop.train()
        assert fed.dtype(children, x) is None
        made.module.drop.eval(), hooked("lin")(made)
        assert fed.dtype(children, x) is None
    for feeds, lowered in (((), None), (("drop", "lin"), fed.dtype)):
        norm = at_once_of(replace(made.compiled, region=replace(made.compiled.region, feeds=feeds)), fed.dtype).norm
        assert norm is not None and norm.lowered == lowered


def test_an_expression_is_judged_once_for_tensors_alike(of: Callable[[str], Made]) -> None:
    made = of("written")
    fused: Any = Fused(made.compiled)
    for count, change in ((1, torch.clone), (1, torch.neg), (2, lambda t: t.repeat(2, 1, 1) if t.dim() == 3 else t)):
        packed = tree_map(lambda v, change=change: change(v) if isinstance(v, Tensor) else v, made.packed)
        assert fused(made.module._modules, packed) is not None and len(fused.expression.verdicts) == count


def test_what_no_op_does_is_declined() -> None:
    step = Step("permute", (1, 0, 1, 1))
    for kind, steps, found in (("layer_norm", (step,), True), ("rms_norm", (step,), False), ("unknown", (), False)):
        assert (helper._op_of(Region(kind, "norm", steps)) is not helper._declines) == found


CALLEES: dict[tuple[str, Any], tuple[set[Any], set[Any]]] = {
    ("linear_scale_batch_norm", ("relu", 0.0, 0.0)): ({torch.mul, torch.add, F.relu}, {torch.div, F.gelu, print}),
    ("layer_norm", ("relu", 0.0, 0.0)): (
        {F.layer_norm, torch.add, F.relu},
        {F.group_norm, torch.mul, torch.sqrt},
    ),
    ("layer_norm", ("clamp", 0.0, 6.0)): ({F.relu6, F.hardtanh}, {F.relu}),
    ("layer_norm", ("gelu_tanh", 0.0, 0.0)): ({F.gelu}, {F.silu}),
    ("rms_norm_by_hand", None): ({torch.sqrt, torch.mul}, {F.relu, print}),
}


@pytest.mark.parametrize(("kind", "activation"), CALLEES)
def test_what_a_step_may_call(kind: str, activation: Any) -> None:
    region = Region(kind, "norm", (), activation=activation, linear="fc" if "linear" in kind else "")
    known, unknown = CALLEES[kind, activation]
    assert all(activations.is_of(region, function) for function in known)
    assert not any(activations.is_of(region, function) for function in unknown)


def test_the_norm_s_class_is_read_once_and_its_forward_looked_at_always(monkeypatch: pytest.MonkeyPatch) -> None:
    read = helper._reader(Region("batch_norm", "norm", (), qualified(nn.BatchNorm1d)))
    norm, x = nn.BatchNorm1d(3), torch.randn(2, 3, 4)
    assert read(norm, x) == (norm,) and helper._is_batch_norm_1d(norm)
    assert not helper._is_batch_norm_1d(nn.BatchNorm2d(3)) and not helper._is_batch_norm_1d(nn.Identity())
    monkeypatch.setattr(helper, "_reader_of", None)
    assert read(norm, x) == (norm,)
    monkeypatch.setattr(nn.BatchNorm1d, "forward", lambda self, x: x)
    assert read(norm, x) is None and not helper._is_batch_norm_1d(norm)
    monkeypatch.undo()
    monkeypatch.setattr(nn.BatchNorm1d, "forward", lambda self, x: x)  # before anybody reads it
    assert helper._reader(Region("batch_norm", "norm", (), qualified(nn.BatchNorm1d)))(norm, x) is None


def test_a_norm_that_ends_in_children_is_read_in_eval() -> None:
    norm, x = NormAct().eval(), torch.randn(2, 6, 3, 3)
    for behind, found in (("drop act", (norm,)), ("act", None)):
        read = helper._reader(Region("batch_norm", "norm", (), qualified(NormAct), {"behind": behind}))
        assert read(norm, x) == found and read(NormAct(), x) is None


class ByHand(nn.Module):
    """An RMSNorm that somebody wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-5

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def test_a_norm_by_hand_is_read_by_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, x = ByHand(), torch.randn(2, 8)
    match = rules.find(norm)
    assert isinstance(match, Match)
    read = helper._reader(Region(match.kind, "norm", (), qualified(ByHand), match.attributes))
    found = read(norm, x)
    assert found is not None and all(any(one is own for one in found) for own in (norm.weight, norm.eps))
    monkeypatch.setattr(ByHand, "forward", lambda self, x: x)
    assert read(norm, x) is None


ADDED = [
    ("sum", True, "y", True),
    ("sum", True, "y[:1]", True),
    ("sum", True, "y.bfloat16()", True),
    ("sum", True, "y.double()", False),
]
ADDED += [("sum", False, "y[:1]", False), ("once", True, "y[:1]", False), ("once", False, "y", True)]


@pytest.mark.parametrize(("what", "learning", "words", "by_the_op"), ADDED)
def test_who_adds(what: str, learning: bool, words: str, by_the_op: bool, of: Callable[[str], Made]) -> None:
    made, given = of(what), list[Any]()
    x, y = made.packed
    fused: Any = Fused(made.compiled)
    fused.call = lambda *arguments: given.append(arguments)
    with torch.set_grad_enabled(learning):
        assert fused(made.module._modules, (x, eval(words, {"y": y}))) is None
    ((one, _, before, *_),) = given
    assert (before is not None) == by_the_op and one.shape == x.shape


def test_when_the_helper_runs_the_statements(of: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch) -> None:
    made = of("viewed")
    (x, y), sizes = made.packed
    call, at_once = (
        make_helper(made.compiled),
        SimpleNamespace(norm=True, call=lambda owner, inner: ("at once", *inner)),
    )
    with monkeypatch.context() as patch:
        patch.setattr(helper.Fused, "__call__", lambda self, children, inner: ("fused", *inner))
        assert_alike(call(made.module, made.packed), ("fused", x.view(-1, 8), y.view(-1, 8)))
        patch.setattr(helper, "at_once_of", lambda *given: at_once)
        assert_alike(make_helper(made.compiled)(made.module, made.packed), ("at once", x.view(-1, 8), y.view(-1, 8)))
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert_alike(make_helper(made.compiled)(made.module, made.packed), made.statements())
    made.module.__dict__["norm"] = lambda x: x * 2.0  # it hides the child
    assert_alike(call(made.module, made.packed), (x + y) * 2.0)
    del made.module.__dict__["norm"]
    made.packed = (x, y[:, :1]), sizes
    assert_alike(call(made.module, made.packed), made.statements())
    made = of("alone")
    monkeypatch.setattr(helper, "at_once_of", lambda *given: at_once)
    monkeypatch.setattr(F, "gelu", lambda x: x)  # before it is swapped: not what the op does
    assert_alike(make_helper(made.compiled)(made.module, made.packed), made.statements())
