"""The small parts of regions by themselves: what is made up for the proof, what stands beside, how a norm goes into a
convolution."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolution_models import regions_in
from long_way import go_the_long_way
from models import randomised
from norm_act_models import NormAct
from region_checks import written
from region_views import WINDOWS, transposed
from torch import Tensor, nn

import normswap
from normswap import rules
from normswap.arguments import Example
from normswap.installed import marks
from normswap.plans import Match, PlanError
from normswap.proof import made_up, prove
from normswap.regions import foldings
from normswap.regions.children import Beside, Reached
from normswap.regions.expression import _fits
from normswap.regions.growing import FEEDING, child_of
from normswap.regions.install import _evaluator
from normswap.regions.spec import Region, Step, children_of
from normswap.rules import region as region_rule

HERE = (1, 0, 1, 1)


def region(kind: str, *does: str, **more: Any) -> Region:
    return Region(kind, "norm", tuple(Step(name, HERE) for name in does or ("norm",)), **more)


@pytest.mark.parametrize(
    ("given", "depthwise"),
    (
        ({}, True),
        ({"out_channels": 12}, False),
        ({"groups": 2}, False),
        *(({"kernel_size": size}, size == 5) for size in (5, 7, (3, 5))),
        *(({"stride": stride}, stride == 2) for stride in (2, 3, (1, 2))),
        ({"dilation": 2}, False),
    ),
)
def test_what_our_kernel_takes_of_a_group_a_channel(given: dict[str, Any], depthwise: bool) -> None:
    settings = {"in_channels": 6, "out_channels": 6, "kernel_size": 3, "groups": 6} | given
    assert foldings.is_depthwise(nn.Conv2d(**settings)) == depthwise


def test_what_a_norm_itself_calls_is_no_step_of_a_sequential() -> None:
    (found,) = regions_in(normswap.plan(nn.Sequential(nn.Conv2d(3, 6, 1), NormAct()).eval()))
    assert [step.does for step in found.steps] == ["convolution", "norm"]
    assert (found.passes, found.activation) == (("1.drop",), "1.act")


def test_a_plan_can_ask_for_attributes_of_self_and_nothing_else() -> None:
    owner = SimpleNamespace(a=None, b=SimpleNamespace(c=1))
    for text, holds in (("self.a is None", True), ("self.b.c is None", False), ("not self.a", True), ("self.b.c", 1)):
        assert _evaluator(text)(owner) == holds
    for text in (
        "owner.a",
        "self.a()",
        "self.a == 1",
        "1",
        "self.b['c']",
        "not print",
        "self.a or self.b",
        "self is x",
    ):
        with pytest.raises(PlanError, match="is no condition on attributes of self"):
            _evaluator(text)


class Hides(nn.Module):
    one = staticmethod(F.relu)

    def __init__(self) -> None:
        super().__init__()
        self._modules.update({name: nn.ReLU() for name in ("one", "other", "seen")})
        self.__dict__["other"] = F.relu


def test_a_child_behind_an_attribute_is_not_what_is_called() -> None:
    owner: Any = Hides()
    for target, seen in (
        ("self.one", False),
        ("self.other", False),
        ("self.seen", True),
        ("seen", False),
        (F.relu, False),
    ):
        assert (child_of(owner, SimpleNamespace(target=target)) is not None) == seen  # type: ignore[arg-type]


def test_of_a_path_no_child_is_looked_at() -> None:
    one = region("batch_norm", type="BatchNorm1d", linear="0.1", passes=("drop", "more.drop"), activation="more.act")
    assert children_of(one) == ("norm", "drop")


# --- what is made up ------------------------------------------------------------------------------------------------

ONES = torch.ones(6)


@pytest.mark.parametrize(
    ("kind", "norm", "arguments", "shape"),
    [
        ("layer_norm", nn.LayerNorm((4, 6)), (), (4, 3, 4, 6)),
        ("layer_norm", nn.LayerNorm(6, elementwise_affine=False), (), (4, 3, 6)),
        ("by hand", SimpleNamespace(weight=ONES), (), (3, 4, 6)),
        ("by hand", SimpleNamespace(weight=None), (), (3, 4, 33)),
        ("rms_norm", nn.RMSNorm((4, 6)), (), (4, 3, 4, 6)),
        ("layer_norm", None, ((5,), None, None, 1e-5), (4, 3, 5)),
        ("batch_norm", nn.BatchNorm1d(6), (), (3, 6, 5)),
        ("batch_norm", nn.BatchNorm2d(6), (), (3, 6, 5, 4)),
        ("batch_norm", nn.BatchNorm3d(6), (), (3, 6, 5, 4, 3)),
        ("instance_norm", None, (None, None, 1e-5), (2, 5, 6, 5)),
        ("instance_norm", None, (ONES, None, 1e-5), (2, 6, 6, 5)),
        ("instance_norm", nn.InstanceNorm1d(6), (), (2, 6, 6)),
        ("instance_norm", nn.InstanceNorm2d(6), (), (2, 6, 6, 5)),
        ("group_norm", nn.GroupNorm(2, 6), (), (2, 6, 6, 5)),
        ("group_norm", None, (2, None, None, 1e-5), (2, 6, 6, 5)),
        ("group_norm", None, (2, torch.ones(8), None, 1e-5), (2, 8, 6, 5)),
        ("batch_norm", None, (None, None, None, None, True, 0.1, 1e-5), (3, 5, 5, 4)),
        ("batch_norm", None, (None, None, ONES, None, True, 0.1, 1e-5), (3, 6, 5, 4)),
        ("batch_norm", None, (ONES, ONES, None, None, True, 0.1, 1e-5), (3, 6, 5, 4)),
    ],
)
def test_shapes_that_are_made_up(kind: str, norm: Any, arguments: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    by_hand = {"attributes": {"dim": -1, "eps": 1e-5, "weight": "weight"}} if kind == "by hand" else {}
    assert made_up._shape(region("rms_norm" if by_hand else kind, **by_hand), norm, arguments) == shape


def test_channels_that_are_rows_are_made_up_as_images() -> None:
    found = made_up._shape(region("layer_norm", "permute", "norm", "permute back"), nn.LayerNorm(6), ())
    assert found == (2, 6, 6, 5)
    registered = {f"read.{name}": given for name, given in (("normalized_shape", "sizes"), ("weight", "gain"))}
    declared = region("layer_norm", "permute", "norm", "permute back", attributes=registered)
    assert made_up._shape(declared, SimpleNamespace(sizes=7, gain=None), ()) == (2, 7, 6, 5)


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"padding": 1}, {"dilation": 2}, {"stride": 3, "padding": 2}])
def test_what_goes_into_a_convolution_is_made_up(options: dict[str, Any]) -> None:
    convolution = nn.Conv2d(4, 6, (3, 2), **options)
    given, shape = made_up._convolved(convolution, (3, 6, 5, 4))
    assert convolution(torch.zeros(given)).shape == shape == (3, 6, 5, 4)


@pytest.mark.parametrize("most", [{}, {"padding": 2}, {"output_padding": 1, "stride": 2}, {"dilation": 2, "stride": 7}])
def test_what_goes_into_a_transposed_convolution_is_made_up(most: dict[str, Any]) -> None:
    convolution = nn.ConvTranspose2d(4, 6, (3, 2), **most)
    given, shape = made_up._convolved(convolution, (3, 6, 5, 4))
    assert convolution(torch.zeros(given)).shape == shape
    stride = most.get("stride", 1)
    assert shape[:2] == (3, 6) and all(
        0 <= made - n < max(stride, 3) for made, n in zip(shape[2:], (5, 4), strict=True)
    )


def test_what_a_helper_is_given_is_packed_as_the_source_has_it() -> None:
    steps = (Step("sum", HERE, operand=1), Step("norm", HERE), Step("gain", HERE), Step("shift", HERE, operand=1))
    roles = {name: torch.full((1,), float(value)) for value, name in enumerate(("x", "before", "scale", "shift"))}
    packed = made_up.packed_of(Region("layer_norm", "norm", steps), roles, ())
    shift, (total, scale) = packed
    assert [float(t) for t in (*total, scale, shift)] == [1.0, 0.0, 2.0, 3.0]


def test_torchs_own_norms_are_no_regions_of_their_own() -> None:
    """They are sites by themselves; a subclass that computes more is read."""
    for module in (nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)):
        assert region_rule.match(module, rules.alone) is None

    class Acting(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps))

    assert region_rule.match(Acting(4), rules.alone) is not None


# --- what stands beside ---------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.second = nn.Identity()


CLASSES = tuple(f"{cls.__module__}.{cls.__qualname__}" for cls in (nn.Sequential, nn.Linear, nn.ReLU, nn.Identity))


def beside() -> Beside:
    return Beside([region("layer_norm", beside={"first": CLASSES[:3], "second": CLASSES[3:]})])


def test_children_beside_a_region_are_asked_on_every_call() -> None:
    pair, asked = Pair(), beside()
    assert asked.names == ("first", "second") and asked.only_compute(pair)
    hooks = (pair.second.register_forward_hook, pair.first[1].register_forward_pre_hook)
    for register in hooks:
        handle = register(lambda *_: None)
        assert not asked.only_compute(pair)
        handle.remove()
        assert asked.only_compute(pair)
    vars(pair.second)["forward"] = lambda x: x
    assert not asked.only_compute(pair)
    del pair.second.forward
    assert asked.only_compute(pair)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not asked.only_compute(pair)
    handle.remove()
    pair.first[1] = nn.GELU()
    assert not asked.only_compute(pair)
    pair.first[1] = nn.ReLU()
    for nothing in (None, lambda x: x):
        pair._modules["second"] = nothing  # type: ignore[assignment]
        assert not asked.only_compute(pair)


def test_a_child_beside_a_region_that_was_swapped_is_known_by_what_it_was() -> None:
    pair = Pair()
    for original in (nn.Identity, nn.GELU):
        pair.second = type("Swapped", (nn.Identity,), marks(original, Match("layer_norm")))()
        assert beside().only_compute(pair) == (original is nn.Identity)
    pair.second = type("Subclass", (nn.Identity,), {})()
    assert not beside().only_compute(pair)


def test_what_hides_the_children_of_a_region() -> None:
    owner = type("Owner", (Pair,), {})()
    reached = Reached([region("layer_norm", beside={"first": CLASSES}, feeds=("second",))])
    assert reached.are_children(owner)
    for name in ("first", "second"):
        vars(owner)[name] = nn.Identity()
        assert not reached.are_children(owner)
        del vars(owner)[name]
    for cls in (type(owner), Pair):
        for name in ("first", "second", "__getattr__", "__getattribute__"):
            setattr(cls, name, getattr(nn.Module, name, None))
            assert not reached.are_children(owner), name
            delattr(cls, name)
    assert reached.are_children(owner)


def test_what_was_written_before_anybody_asked_for_the_gradient_of_a_sum() -> None:
    for shared in (True, False):
        data = region("layer_norm", shared=shared).to_json()
        assert not Region.from_json(data).seen
        del data["seen"]
        assert Region.from_json(data).seen is shared


# --- what an expression is given ------------------------------------------------------------------------------------


def test_what_the_op_of_an_expression_takes() -> None:
    x = torch.ones(2)
    for value in (1, 2.0, True, torch.float16, torch.device("cpu"), x.double(), nn.Parameter(x)):
        assert _fits(value, x), value
    for value in (None, "1", torch.device("meta"), x.to("meta"), x.as_subclass(type("Own", (Tensor,), {})), [1]):
        assert not _fits(value, x), value


# --- foldings -------------------------------------------------------------------------------------------------------


def owner(convolution: nn.Module, act: nn.Module | None = None) -> nn.Module:
    made = nn.Module()
    made.conv, made.act = convolution, act
    return made


POINT, WIDE = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3)


@pytest.mark.parametrize(
    ("convolution", "activation", "act", "residual", "expected"),
    [
        (POINT, None, None, False, ("folded",)),
        (POINT, None, None, True, ("folded",)),
        (POINT, "act", nn.ReLU(), False, ("fused", "folded")),
        (POINT, "act", nn.ReLU(), True, ("fused", "folded")),
        (POINT, "act", nn.SiLU(), False, ("folded",)),
        (POINT, ("relu", 0.0, 0.0), None, False, ("fused", "folded")),
        (POINT, ("silu", 0.0, 0.0), None, False, ("folded",)),
        (POINT, ("silu", 0.0, 0.0), nn.ReLU(), False, ("folded",)),
        (WIDE, "act", nn.ReLU(), False, ("fused", "folded")),
        (WIDE, None, None, False, ("folded",)),
        (nn.Conv2d(4, 4, 1, stride=2), None, None, False, ("folded",)),
        (nn.Conv2d(4, 4, 1, padding=1), None, None, False, ("folded",)),
        (nn.Conv2d(4, 4, 1, groups=2), None, None, False, ("folded",)),
        (nn.Conv1d(4, 4, 1), "act", nn.ReLU(), False, ("folded",)),
    ],
)
def test_ways_to_compute_a_convolution_and_a_norm(
    convolution: nn.Module, activation: Any, act: Any, residual: bool, expected: tuple[str, ...]
) -> None:
    does = ("convolution", "norm", *(["residual"] if residual else []), *(["activation"] if activation else []))
    found = region("batch_norm", *does, convolution="conv", activation=activation)
    assert foldings.foldings_of(found, owner(convolution, act)) == expected


def test_a_convolution_that_is_taken_in_by_default() -> None:
    found = region("batch_norm", "convolution", "norm", "activation", convolution="conv", activation="act")
    fused = foldings.by_default(found, owner(WIDE, nn.ReLU()))
    assert fused is not None and (fused.convolution, fused.folding) == ("conv", "fused")
    for child in (nn.Conv2d(4, 4, 3, groups=2), nn.Conv1d(4, 4, 3)):
        rest = foldings.by_default(found, owner(child, nn.ReLU()))
        assert rest is not None and (rest.convolution, rest.folding, len(rest.steps)) == ("", "", 2)
    alone = region("batch_norm", "convolution", "norm", convolution="conv")
    assert foldings.by_default(alone, owner(WIDE)) is None
    apart = region("batch_norm", "norm", "activation", activation="act")
    assert foldings.by_default(apart, owner(WIDE, nn.ReLU())) is apart


@pytest.mark.parametrize(
    ("child", "used_once", "word"),
    [
        (WIDE, True, ""),
        (WIDE, False, "used elsewhere"),
        (nn.Conv3d(2, 2, 1), True, ""),
        (nn.ConvTranspose2d(4, 4, 3), True, ""),
        (nn.LazyConv2d(4, 3), True, "is a torch.nn.modules.conv.LazyConv2d"),
        (nn.Conv2d(4, 4, 3, padding="same"), True, "pads by 'same'"),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), True, "pads by its mode 'reflect'"),
        (None, True, "NoneType"),
    ],
)
def test_why_a_convolution_stays_apart(child: Any, used_once: bool, word: str) -> None:
    why = foldings.why_apart(child, used_once)
    assert word in why and bool(why) == bool(word)
    hooked = nn.Conv2d(4, 4, 3)
    hooked.register_forward_hook(lambda *_: None)
    assert "hooks" in foldings.why_apart(hooked, True)


def test_why_a_convolution_in_a_row_stays_apart() -> None:
    row = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3))
    assert foldings.convolution_in("conv", row) == ("", "conv.1 is called inside an nn.Sequential")
    assert foldings.convolution_in("conv", row, baked=True) == ("conv.1", "")
    row[1].register_forward_hook(lambda *_: None)
    assert foldings.convolution_in("conv", row) == ("", "conv.1 carries hooks, or a forward of its own")


def test_what_goes_by_running_statistics_and_what_is_called_a_convolution() -> None:
    norm = nn.BatchNorm2d(4).eval()
    assert foldings.is_foldable(norm) and not foldings.is_foldable(nn.BatchNorm2d(4))
    for name in ("running_mean", "running_var"):
        lacking = nn.BatchNorm2d(4).eval()
        setattr(lacking, name, None)
        assert not foldings.is_foldable(lacking)
    assert not foldings.is_foldable(nn.BatchNorm2d(4, eps=0.0).eval())
    named = type("QConv", (nn.Module,), {})()
    assert foldings.is_convolution(named) and foldings.is_convolution(type("Own", (nn.Conv2d,), {})(4, 4, 1))
    assert not foldings.is_convolution(nn.Linear(2, 2)) and not foldings.is_convolution(None)


def test_a_view_that_is_not_of_both_summands_is_reported_as_declined() -> None:
    """Its statements run at every call, so that on a GPU it is put back."""
    model, x = randomised(written(transposed)).eval(), torch.randn(WINDOWS)
    swapped = normswap.apply(model, normswap.plan(model))
    (swap,) = (swap for swap in normswap.report(swapped).plan.swaps if swap.site.name == "")
    (proof,) = prove.prove(Example(swapped, (x, x)), [swap], "forward")
    assert proof.declined and proof.device == "cpu" and proof.status == "wiring"


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gn, self.gn2 = nn.GroupNorm(2, 6), nn.GroupNorm(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return F.relu(self.gn(x))
        return F.relu(self.gn2(x))


def test_a_region_of_what_is_sharded_that_no_input_reaches_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "is_sharded", lambda owner: True)
    rows = normswap.report(normswap.optimize(Either().eval(), torch.randn(4, 6), min_speedup=None)).rows
    assert [row["detail"] for row in rows if row["name"] == ""] == ["not reached by the example inputs"]


class WithOneBeside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gn, self.lin = nn.GroupNorm(2, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        z = self.gn(x)
        t = self.lin(x)
        return F.relu(z) + t


def test_what_stands_beside_is_looked_at_on_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    go_the_long_way(monkeypatch)
    looked: list[Any] = []
    monkeypatch.setattr(Beside, "only_compute", lambda self, owner: looked.append(owner) or True)
    model, x = WithOneBeside().eval(), torch.randn(4, 6)
    swapped = normswap.apply(model, normswap.plan(model))
    for count in (1, 2):
        torch.testing.assert_close(swapped(x), model(x))
        assert looked == [swapped] * count


def test_what_autocast_computes_in_float32_anyway() -> None:
    assert FEEDING == ("group_norm", "layer_norm")
