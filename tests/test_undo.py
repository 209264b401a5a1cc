"""disabled(), apply() with a plan, and copies that would not fit."""

from __future__ import annotations

import copy
import threading
import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
from models import Every, Projection, randomised
from torch import nn
from torch.nn.utils import parametrize

import normswap
from normswap import copying, modules, ops, swapping
from normswap.plans import NormswapError, Plan, PlanError

X = (8, 6, 5)
SITES = ("group", "layer", "projection", "l1", "rms")


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def swapped() -> nn.Module:
    return normswap.optimize(randomised(Every()).eval(), torch.randn(X))


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def swapped_count(model: nn.Module) -> int:
    return sum(modules.site_match(module) is not None for module in model.modules())


# --- disabled -----------------------------------------------------------------------------------------------------


def test_inside_the_block_the_original_runs(swapped: nn.Module) -> None:
    before, calls = classes(swapped), []
    op = ops.layer_norm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "layer_norm", lambda *args: calls.append(1) or op(*args))
        x = torch.randn(X)
        ours = swapped(x)
        assert calls == [1]
        with normswap.disabled(swapped) as model:
            assert model is swapped and swapped_count(swapped) == 0
            torch.testing.assert_close(swapped(x), ours)
            assert calls == [1]
    assert classes(swapped) == before and swapped_count(swapped) == 5


def test_nested_after_exceptions_and_on_parts(swapped: nn.Module) -> None:
    before = classes(swapped)
    with normswap.disabled(swapped.layer):
        assert swapped_count(swapped) == 4
        with pytest.raises(ArithmeticError), normswap.disabled(swapped):
            assert swapped_count(swapped) == 0
            with normswap.disabled(swapped):
                assert swapped_count(swapped) == 0
            assert swapped_count(swapped) == 0
            raise ArithmeticError
        assert swapped_count(swapped) == 4
    assert classes(swapped) == before
    assert normswap.report(swapped).swapped == SITES


@pytest.mark.parametrize("first", [0, 1])
def test_the_last_of_the_threads_that_enter_at_once_switches_back(
    swapped: nn.Module, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_look, both_in, first_is_out = threading.Barrier(2), threading.Barrier(2), threading.Event()
    state_of, before, counts = swapping._state_of, classes(swapped), dict[int, int]()
    *_, last = swapped.modules()

    def looking(module: nn.Module) -> Any:
        state = state_of(module)
        if module is last:
            with suppress(threading.BrokenBarrierError):
                both_look.wait(0.2)
        return state

    def block(number: int) -> None:
        with normswap.disabled(swapped):
            both_in.wait()
            if number != first:
                first_is_out.wait()
            counts[number] = swapped_count(swapped)
        first_is_out.set()

    monkeypatch.setattr(swapping, "_state_of", looking)
    threads = [threading.Thread(target=block, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == {0: 0, 1: 0}
    assert classes(swapped) == before


def test_a_model_that_is_not_swapped() -> None:
    model = randomised(Every())
    before = classes(model)
    with normswap.disabled(model):
        pass
    assert classes(model) == before
    with pytest.raises(TypeError, match="model must be"):
        normswap.disabled(3)  # type: ignore[arg-type]


def test_what_is_changed_inside_the_block_keeps_its_class_and_is_named(swapped: nn.Module) -> None:
    with pytest.raises(NormswapError, match="layer is now a ParametrizedLayerNorm"), normswap.disabled(swapped):
        parametrize.register_parametrization(swapped.layer, "weight", nn.Identity())
    assert type(swapped.layer).__name__ == "ParametrizedLayerNorm" and swapped_count(swapped) == 4


def test_what_was_put_over_our_class_before_the_block_stays(swapped: nn.Module) -> None:
    parametrize.register_parametrization(swapped.layer, "weight", nn.Identity())
    before, x = classes(swapped), torch.randn(X)
    ours = swapped(x)
    with normswap.disabled(swapped):
        assert swapped_count(swapped) == 0 and parametrize.is_parametrized(swapped.layer)
        torch.testing.assert_close(swapped(x), ours)
    assert classes(swapped) == before


def test_a_class_that_cannot_be_put_over_another_is_refused(swapped: nn.Module) -> None:
    class Over(type(swapped.layer)):  # type: ignore[misc]
        def extra_repr(self) -> str:
            return f"over {super().extra_repr()}"

    swapped.layer.__class__ = Over
    before = classes(swapped)
    for refused in (lambda: normswap.disabled(swapped).__enter__(), lambda: normswap.revert(swapped)):
        with pytest.raises(NormswapError, match="a .*Over was put over the class that was installed.*undo that first"):
            refused()
        assert classes(swapped) == before


def test_compiled_code_follows() -> None:
    class Doubled(modules.LayerNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(randomised(nn.LayerNorm(4)), nn.ReLU()).eval()
    x, plain = torch.randn(3, 4), nn.Sequential(nn.ReLU())(model(torch.zeros(1, 4)))
    assert plain.shape == (1, 4)
    expected = model(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(modules._MODULE_CLASSES, nn.LayerNorm, ("layer_norm", Doubled))
        swapped = normswap.optimize(model, validate="off", inplace=True)
        compiled = torch.compile(swapped, backend="eager")
        assert torch.equal(compiled(x), 2 * expected)
        with normswap.disabled(swapped):
            assert torch.equal(compiled(x), expected)
        assert torch.equal(compiled(x), 2 * expected)
        normswap.revert(swapped)
        assert torch.equal(compiled(x), expected)


# --- apply --------------------------------------------------------------------------------------------------------


def test_a_plan_is_replayed_on_a_copy_or_in_place(swapped: nn.Module) -> None:
    plan = Plan.from_json(normswap.report(swapped).plan.to_json())
    assert plan == normswap.report(swapped).plan
    model = randomised(Every()).eval()
    before = classes(model)
    copied = normswap.apply(model, plan)
    assert classes(model) == before and classes(copied) == classes(swapped)
    assert normswap.apply(model, plan, inplace=True) is model
    assert classes(model) == classes(swapped)
    report = normswap.report(model)
    assert report.swapped == SITES and {row["status"] for row in report.rows} == {"unchecked"}
    assert "unproved: 5 of 5: no proof was asked for" in str(report)
    assert {row["status"] for row in normswap.validate(model, torch.randn(X)).rows} == {"wiring"}


def test_another_structure_is_refused_and_the_place_named(swapped: nn.Module) -> None:
    plan = normswap.report(swapped).plan
    model = randomised(Every())
    model.projection = nn.Linear(30, 16)
    before = classes(model)
    for inplace in (True, False):
        with pytest.raises(PlanError, match="projection must be a models.Projection, got torch.nn.*Linear"):
            normswap.apply(model, plan, inplace=inplace)
    del model.group
    with pytest.raises(PlanError, match="no module group"):
        normswap.apply(model, plan, inplace=True)
    assert classes(model) == [c for c in before if c is not nn.GroupNorm]
    with pytest.raises(TypeError, match="plan must be a normswap.Plan, got str"):
        normswap.apply(model, plan.to_json())  # type: ignore[arg-type]


def test_what_failed_is_in_the_plan_and_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(Every()).eval()
    wrong = type("Wrong", (modules.LayerNorm,), {"forward": lambda self, x: 1.01 * nn.LayerNorm.forward(self, x)})
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setitem(modules._MODULE_CLASSES, nn.LayerNorm, ("layer_norm", wrong))
        report = normswap.report(normswap.optimize(model, torch.randn(X)))
    assert [(r.site.name, r.refusal.reason.name) for r in report.plan.refused] == [("layer", "MISMATCH")]
    assert "rolled back: layer: did not match the original in float64 (output: error is" in str(report)
    assert type(normswap.apply(model, report.plan).layer) is nn.LayerNorm


# --- copies that do not fit ---------------------------------------------------------------------------------------


def test_a_copy_that_does_not_fit_is_refused_before_anything_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024)).eval()
    monkeypatch.setattr(copying, "free_bytes", lambda device: 2_000_000)
    with monkeypatch.context() as patched:
        patched.setattr(copy, "deepcopy", lambda *args: pytest.fail("copied"))
        with pytest.raises(NormswapError, match=r"model is 4\.2 MB on cpu, 2\.0 MB free.*pass inplace=True"):
            normswap.optimize(model)
    assert normswap.report(normswap.optimize(model, inplace=True)).swapped == ("1",)


def test_tied_parameters_count_once_and_lazy_and_meta_ones_not() -> None:
    tied = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    tied[1].weight = tied[0].weight
    assert copying._sizes(tied) == {torch.device("cpu"): 256}
    assert copying._sizes(nn.Sequential(nn.LazyLinear(3))) == {}
    copying.check_copy_fits(tied)


def test_a_lazy_model_is_swapped_without_being_run() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.LayerNorm(8)).eval()
    swapped = normswap.optimize(model, torch.randn(2, 3))
    assert {row["status"] for row in normswap.report(swapped).rows} == {"unchecked"}
    assert type(swapped[0]) is nn.LazyLinear
    assert Projection(2, 3)(torch.randn(4, 2)).shape == (4, 3)


# --- models and modules that call themselves equal ------------------------------------------------------------------


class Same(nn.LayerNorm):
    """Equal to all of its class."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return 1


def test_equal_modules_are_put_back_one_and_all() -> None:
    model = normswap.optimize(nn.Sequential(Same(4), nn.Sequential(Same(4))), torch.randn(2, 4))
    before = classes(model)
    assert [type(model[0]), type(model[1][0])] != [Same, Same] and len(swapping.swaps_in(model)) == 2
    with normswap.disabled(model):
        assert [type(model[0]), type(model[1][0])] == [Same, Same]
    assert classes(model) == before
    normswap.revert(model)
    assert [type(model[0]), type(model[1][0])] == [Same, Same]


def test_a_report_is_of_the_model_itself() -> None:
    one, other = (normswap.optimize(Same(4), torch.randn(2, 4)) for _ in range(2))
    assert one == other and normswap.report(one) is not normswap.report(other)
    normswap.revert(one)
    assert normswap.report(other).swapped == ("",)
