"""Linear -> scale -> BatchNorm among other statements and in an nn.Sequential: what is found computes what it did, is
proved, and is put back where it is wrong."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from linear_region_changes import CHANGED
from linear_region_look_alikes import LOOK_ALIKES
from linear_region_models import BATCH, FEATURES, FOUND, WIDTH, Factor, LinearParts
from models import randomised
from region_checks import Case, assert_same, check, regions_in, swap, written
from torch import Tensor, nn

import normswap
from normswap import ops
from normswap.plans import MismatchError, NormswapError
from normswap.regions import linear
from normswap.regions.spec import Region

TABLE: dict[str, Case] = {**FOUND, **LOOK_ALIKES, **CHANGED}
pytestmark = pytest.mark.filterwarnings("ignore:.*returns a copy.*")


@pytest.mark.case("linear-region", "linear-region-look-alikes", "linear-region-changed-later")
@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, case in TABLE.items() for mode in case.modes])
def test_what_is_found_computes_what_it_did(name: str, mode: str) -> None:
    check(TABLE[name], mode)


def made(case: Case, training: bool, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = randomised(written(case.forward, case.base)).train(training).to(dtype)
    return model, tuple(torch.randn(4 * BATCH, *shape[1:], dtype=dtype) for shape in case.shapes)


def optimized(model: nn.Module, inputs: Any, **options: Any) -> nn.Module:
    return normswap.optimize(model, inputs, **{"min_speedup": None, "on_mismatch": "raise", **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", [name for name in FOUND if name not in ("without_gradients", "under_autocast")])
def test_every_one_is_proved_with_its_gradients(name: str, training: bool, dtype: torch.dtype) -> None:
    model, inputs = made(FOUND[name], training, dtype)
    report = normswap.report(optimized(model, inputs, validate="grad"))
    rows = {row["name"]: row for row in report.rows}
    assert rows[""]["status"] == "wiring" and rows[""]["eager_error_share"] <= 1.0, rows[""]


@pytest.mark.parametrize("training", [True, False])
def test_it_is_proved_on_made_up_inputs(training: bool) -> None:
    for name in ("with_a_residual", "by_a_child", "without_a_scale"):
        model, _ = made(FOUND[name], training)
        (row,) = (row for row in normswap.report(optimized(model, None)).rows if row["name"] == "")
        assert row["status"] == "wiring" and row["inputs"] == "synthesised"


def test_what_has_three_dims_is_left_to_its_own_statements() -> None:
    model, inputs = made(FOUND["among_statements"], False)
    x, y = (one[:, None].expand(-1, WIDTH, -1).contiguous() for one in inputs)
    (row,) = (row for row in normswap.report(optimized(model, (x, y), on_empty="ignore")).rows if row["name"] == "")
    assert row["detail"] == "the region's own statements run on these inputs"


def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that are called."""
    seen: list[str] = []
    for name in ("scale_batch_norm", "folded_linear", "batch_norm_eval", "batch_norm"):
        real = getattr(ops, name)

        def noted(*args: Any, name: str = name, real: Any = real, **named: Any) -> Any:
            seen.append(name)
            return real(*args, **named)

        monkeypatch.setattr(ops, name, noted)
    return seen


@pytest.mark.parametrize(
    ("rows", "training", "op"),
    [(BATCH, True, "scale_batch_norm"), (BATCH, False, "folded_linear"), (2, False, "scale_batch_norm")],
)
@pytest.mark.parametrize("name", ["among_statements", "with_a_residual", "by_a_child", "by_a_literal", "in_a_loop"])
def test_one_op_computes_it(monkeypatch: pytest.MonkeyPatch, name: str, rows: int, training: bool, op: str) -> None:
    model, inputs = made(FOUND[name], training)
    fast, seen = swap(model), served(monkeypatch)
    with torch.no_grad():
        fast(*(x[:rows] for x in inputs))
    assert {*seen} == {op}


def test_what_it_cannot_compute_with_the_linear_is_the_norm_s_own_op(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = made(FOUND["by_a_literal"], False, torch.bfloat16)
    model.requires_grad_(False)
    fast, seen = swap(model), served(monkeypatch)
    fast(inputs[0].requires_grad_(), inputs[1])
    model, inputs = made(FOUND["under_autocast"], True)
    fast = swap(model)
    seen.clear()
    fast(*inputs)
    assert seen == ["batch_norm"]


@pytest.mark.parametrize("name", ["with_a_residual_that_broadcasts", "with_a_residual"])
def test_the_linear_is_not_computed_in_vain(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Where what stands behind the norm is left to the statements, they alone call it."""
    model, inputs = made(FOUND[name], True)
    fast, calls, real = swap(model), list[int](), torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: calls.append(1) or real(*args))
    with torch.no_grad():
        fast(*inputs)
    assert calls == [1]


# --- planted faults -------------------------------------------------------------------------------------------------


def changed(index: int, by: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``scale_batch_norm`` with another argument."""
    return lambda real: lambda *args, **named: real(*args[:index], by(args[index]), *args[index + 1 :], **named)


def named_as(**other: Any) -> Callable[[Any], Any]:
    return lambda real: lambda *args, **named: real(*args, **{**named, **other})


def untracked(real: Any) -> Any:
    return lambda *args, **named: real(*args, **{**named, "num_batches_tracked": None})


def without_a_gradient(real: Any) -> Any:
    return lambda *args, **named: real(args[0].detach(), *args[1:], **named)


FAULTS: dict[str, Callable[[Any], Any]] = {
    "no scale": changed(1, lambda scale: None),
    "scale a little off": changed(1, lambda scale: scale * 1.0001),
    "no running statistics": changed(2, lambda mean: None if mean is None else mean.clone()),
    "variance of another": changed(3, lambda var: None if var is None else var.clone()),
    "no weight": changed(4, lambda weight: None),
    "no bias": changed(5, lambda bias: None),
    "eps": changed(8, lambda eps: 10 * eps),
    "momentum": changed(7, lambda momentum: 0.5 * momentum),
    "no residual": named_as(residual=None),
    "no activation": named_as(activation=normswap.activation.NONE),
    "not counted": untracked,
    "no gradient of the input": without_a_gradient,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    model, inputs = made(FOUND["with_a_residual"], True)
    optimized(model, inputs, validate="grad")
    monkeypatch.setattr(ops, "scale_batch_norm", FAULTS[fault](ops.scale_batch_norm))
    with pytest.raises(MismatchError):
        optimized(model, inputs, validate="grad")
    report = normswap.report(optimized(model, inputs, validate="grad", on_mismatch="rollback", on_empty="ignore"))
    (row,) = (row for row in report.rows if row["name"] == "")
    assert row["status"] == "failed" and not row["swapped"]


@pytest.mark.parametrize("place", range(2, 9))
def test_a_fault_of_the_fold_is_found(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Bias, scale, statistics, gain, shift and eps of what is folded, each with another in its place."""
    model, inputs = made(FOUND["with_a_residual"], False)
    real, by = ops.folded_linear, 100.0 if place == 8 else 1.001
    spoiled = lambda *args: real(*args[:place], args[place] * by, *args[place + 1 :])  # noqa: E731
    monkeypatch.setattr(ops, "folded_linear", spoiled)
    with pytest.raises(MismatchError):
        optimized(model, inputs)


# --- a life --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_it_is_copied_saved_reverted_and_replayed(training: bool) -> None:
    model, inputs = made(FOUND["with_two_of_them"], training)
    fast = optimized(model, inputs)
    text = normswap.report(fast).plan.to_json()
    plan = normswap.Plan.from_json(text)
    assert plan.to_json() == text
    with normswap.disabled(fast):
        assert_same(copy.deepcopy(fast), copy.deepcopy(model), inputs)
    for again in (normswap.apply(model, plan), copy.deepcopy(fast)):
        assert_same(again, copy.deepcopy(model), inputs, exact=False)
    normswap.revert(fast)
    assert type(fast) is type(model) and fast.state_dict().keys() == model.state_dict().keys()


class Pickled(LinearParts):
    """Known to pickle by its name."""

    def forward(self, x, y):
        return self.act(self.bn(self.fc(x) * self.scale) + y)


def test_it_is_pickled() -> None:
    model = randomised(Pickled()).eval()
    inputs = torch.randn(BATCH, FEATURES), torch.randn(BATCH, WIDTH)
    again = pickle.loads(pickle.dumps(optimized(model, inputs)))
    assert regions_in(normswap.revert(copy.deepcopy(again))) == ("fc + scale + bn + residual + act",)
    assert_same(again, model, inputs, exact=False)


def test_a_region_survives_json() -> None:
    for name in ("by_a_child", "with_a_residual"):
        plan = normswap.plan(written(FOUND[name].forward, LinearParts).eval())
        (swapped,) = (s for s in plan.swaps if s.site.name == "")
        for data in swapped.match.attributes["regions"]:
            region = Region.from_json(data)
            assert Region.from_json(region.to_json()) == region and region.linear == "fc"


@pytest.mark.parametrize("name", ["among_statements", "by_a_child"])
def test_training_steps_track_the_original(name: str) -> None:
    model, inputs = made(FOUND[name], True)
    fast = optimized(model, inputs)
    torch.manual_seed(1)
    given = [tuple(torch.randn_like(x) for x in inputs) for _ in range(10)]
    for one in (model, fast):
        optimizer = torch.optim.SGD(one.parameters(), lr=1e-2)
        for batch in given:
            optimizer.zero_grad()
            one(*batch).square().mean().backward()
            optimizer.step()
    for (key, ours), theirs in zip(fast.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["among_statements", "with_a_residual", "in_an_if", "by_one_parameter"])
def test_it_is_proved_under_autocast(name: str, training: bool) -> None:
    model, inputs = made(FOUND[name], training)
    with torch.autocast("cpu", torch.bfloat16):
        report = normswap.report(optimized(model, inputs, validate="grad", on_empty="ignore"))
        (row,) = (row for row in report.rows if row["name"] == "")
        assert row["status"] in ("wiring", "declined") and row["eager_error_share"] <= 1.0, row
        fast = swap(model)
        with torch.no_grad():
            torch.testing.assert_close(fast(*inputs), copy.deepcopy(model)(*inputs))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", FOUND)
def test_without_a_scale_it_folds_into_one_linear(name: str, swapped: bool) -> None:
    model, inputs = made(FOUND[name], False)
    before = [(region, region.partition(" + bn")[0]) for region in regions_in(model)]
    plain = [region for region, linear in before if "scale" not in linear and "factor" not in linear]
    used = {node for region in regions_in(model) for node in region.split(" + ")[:1]}
    once = name != "same_linear_twice" and len(used) == len(regions_in(model))
    given = optimized(model, inputs) if swapped else model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not plain or not once:
            with pytest.raises(NormswapError, match="can be folded"):
                normswap.fold(given)
            return
        folded = normswap.fold(given)
    assert sum(isinstance(m, nn.Identity) for m in folded.modules()) == len(plain)
    with torch.no_grad():
        tolerance = 3e-2 if name == "under_autocast" else 1e-5
        torch.testing.assert_close(folded(*inputs), model(*inputs), rtol=tolerance, atol=tolerance)


# --- an nn.Sequential -----------------------------------------------------------------------------------------------


def layers() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        *(nn.Linear(WIDTH, WIDTH, bias=False), Factor(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.GELU()),
        *(nn.Linear(WIDTH, 8), nn.GroupNorm(2, 8), nn.SiLU()),
        *(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH)),
        *(nn.Linear(WIDTH, 4), nn.LayerNorm(4), nn.Tanh()),
    )


NAMES = ("0 + 1 + 2", "3 + 4 + 5 + 7", "9 + 10", "11 + 12", "14 + 15")


@pytest.mark.case("linear-sequential")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rows", [4, 32])
def test_every_norm_of_a_sequential_is_a_region_of_its_own(rows: int, training: bool) -> None:
    model = randomised(layers()).train(training)
    x = torch.randn(rows, FEATURES)
    assert regions_in(model) == NAMES
    fast = optimized(model, x, validate="grad")
    assert_same(fast, copy.deepcopy(model), (x,), exact=False)
    (swapped,) = (s for s in normswap.report(fast).plan.swaps if s.site.name == "")
    assert len(swapped.match.attributes["regions"]) == len(NAMES)


def test_a_region_of_a_sequential_is_left_out_with_its_norm() -> None:
    plan = normswap.plan(layers().train(), exclude=["1", "9"])
    (swapped,) = (s for s in plan.swaps if s.site.name == "")
    names = tuple(Region.from_json(data).name for data in swapped.match.attributes["regions"])
    assert names == ("3 + 4 + 5 + 7", "11 + 12", "14 + 15")


def test_a_fault_in_one_region_puts_back_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = randomised(layers()).eval(), torch.randn(32, FEATURES)
    real = ops.folded_linear
    monkeypatch.setattr(ops, "folded_linear", lambda *args: real(*args) + 0.01)
    with pytest.raises(MismatchError):
        optimized(model, x)


SPOILED: dict[str, Callable[[Any], Any]] = {
    "another child": lambda model: model.__setitem__(1, nn.Identity()),
    "a hook": lambda model: model[4].register_forward_hook(lambda module, args, out: out * 2),
    "one child less": lambda model: model.__delitem__(4),
    "one child more": lambda model: model.insert(1, nn.Tanh()),
    "another factor": lambda model: setattr(model[4], "weight", nn.Parameter(torch.full((1,), 3.0))),
    "no factor": lambda model: setattr(model[4], "weight", None),
    "a factor of another shape": lambda model: setattr(model[4], "weight", nn.Parameter(torch.ones(32, 1))),
    "train": lambda model: model.train(),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_sequential_that_changes_later_runs_what_it_is_now(what: str) -> None:
    model = randomised(layers()).eval()
    x = torch.randn(32, FEATURES)
    fast = optimized(model, x)
    for one in (fast, model):
        torch.manual_seed(4)
        SPOILED[what](one)
    assert_same(fast, model, (x,), exact=False)


class Number(nn.Module):
    """Multiplies by a number."""

    number = -0.5

    def forward(self, x):
        return self.number * x


def test_a_child_may_multiply_by_a_number() -> None:
    model = randomised(nn.Sequential(nn.Linear(FEATURES, WIDTH), Number(), nn.BatchNorm1d(WIDTH))).eval()
    assert regions_in(model) == ("0 + 1 + 2",)
    assert_same(optimized(model, None), model, (torch.randn(BATCH, FEATURES),), exact=False)


class Own(Tensor):
    """What a library may have in a tensor's place."""


def test_what_a_product_may_be_by() -> None:
    layer = nn.Linear(FEATURES, WIDTH)
    good = torch.ones(()), torch.ones(1), torch.ones(WIDTH), nn.Parameter(torch.ones(1, WIDTH)), 2, 0.5
    assert all(linear.has_shape_of_factor(one, layer) for one in good)
    bad = torch.ones(BATCH, 1), torch.ones(WIDTH, 1), torch.ones(1, 1, WIDTH), torch.ones(WIDTH).as_subclass(Own), True
    assert not any(linear.has_shape_of_factor(one, layer) for one in (*bad, "scale"))


class NonLinearity(nn.Module):
    """No Linear, whatever it is called."""

    def forward(self, x):
        return x.exp()


@pytest.mark.parametrize("training", [True, False])
def test_of_what_is_no_linear_nothing_is_said(training: bool) -> None:
    plan = normswap.plan(nn.Sequential(NonLinearity(), nn.BatchNorm1d(WIDTH)).train(training))
    assert plan.refused == () and [s.site.name for s in plan.swaps] == (["1"] if training else [])


@pytest.mark.parametrize("spoil", ["hook", "width", "parametrized"])
def test_a_sequential_without_one_says_why(spoil: str) -> None:
    model: Any = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH))
    if spoil == "hook":
        model[0].register_forward_hook(lambda *_: None)
    elif spoil == "width":
        model[1] = nn.BatchNorm1d(WIDTH + 1)
    else:
        nn.utils.parametrizations.weight_norm(model[0])
    (refused,) = (one for one in normswap.plan(model.eval()).refused if one.site.name == "")
    assert refused.refusal.kind == "linear_scale_batch_norm" and "self." in refused.refusal.detail


class ByItsStatistic(nn.Module):
    """What it multiplies by is written to by the norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.register_buffer("mean", self.bn.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.fc(x)) * self.mean  # type: ignore[no-any-return, operator]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_a_factor_that_is_a_running_statistic_is_read_after_its_update(dtype: torch.dtype) -> None:
    model, x = ByItsStatistic().to(dtype).train(), torch.randn(9, 6, dtype=dtype) + 2
    model.mean = model.bn.running_mean
    swapped = normswap.apply(model, normswap.plan(model))
    swapped.mean = swapped.bn.running_mean  # type: ignore[union-attr]
    torch.testing.assert_close(swapped(x), model(x), rtol=1e-5, atol=1e-5)
