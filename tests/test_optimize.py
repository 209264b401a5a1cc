"""optimize, report, validate and revert from outside: what is swapped, what is left alone, and no trace."""

from __future__ import annotations

import copy
import pickle
import queue
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import Every, Projection, randomised
from torch import Tensor, nn

import normswap
from normswap import modules
from normswap.proof.prove import SiteProof, prove

SITES = ("group", "layer", "projection", "projection.bn", "l1", "rms")
"""In training; in eval a BatchNorm is no site by itself."""
EVAL = tuple(name for name in SITES if name != "projection.bn")
X = (8, 6, 5)


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def model() -> nn.Module:
    return randomised(Every())


def state_of(model: nn.Module) -> dict[str, object]:
    """All that validation could leave behind."""
    return {
        "classes": [type(m) for m in model.modules()],
        "ids": [id(t) for t in (*model.parameters(), *model.buffers())],
        "values": [t.detach().clone() for t in (*model.parameters(), *model.buffers())],
        "grads": [p.grad for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "keys": list(model.state_dict()),
        "plain": [{k: v for k, v in m.__dict__.items() if isinstance(v, int | str)} for m in model.modules()],
        "rng": torch.get_rng_state(),
    }


def assert_same(before: dict[str, object], after: dict[str, object], *, classes: bool = True) -> None:
    for key, value in before.items():
        if key == "values":
            assert all(torch.equal(a, b) for a, b in zip(value, after[key], strict=True))  # type: ignore[call-overload]
        elif key == "rng":
            assert torch.equal(value, after[key])  # type: ignore[arg-type]
        elif key != "classes" or classes:
            assert value == after[key], key


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("inputs", (True, False))
def test_every_kind_is_swapped_checked_and_leaves_no_trace(model: nn.Module, training: bool, inputs: bool) -> None:
    model.train(training)
    x = torch.randn(X) if inputs else None
    before = state_of(model)
    swapped = normswap.optimize(model, x)
    assert_same(before, state_of(model))
    assert_same({k: v for k, v in before.items() if k not in ("ids", "grads")}, state_of(swapped), classes=False)
    report = normswap.report(swapped)
    assert report.swapped == (SITES if training else EVAL)
    assert {row["status"] for row in report.rows} == {"wiring"}
    assert {row["inputs"] for row in report.rows} == {"captured" if inputs else "synthesised"}
    assert all(row["gradients"] for row in report.rows)
    assert (report.model is not None) == inputs


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("train-eval")
def test_same_outputs_gradients_and_buffers(model: nn.Module, training: bool) -> None:
    model.train(training)
    swapped = normswap.optimize(model, torch.randn(X))
    outs = []
    for one in (model, swapped):
        torch.manual_seed(3)
        x = torch.randn(X, requires_grad=True)
        y = one(x)
        y.square().sum().backward()
        outs.append([y, x.grad, *(p.grad for p in one.parameters()), *one.buffers()])
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_inplace_keeps_the_objects_and_revert_undoes(model: nn.Module) -> None:
    x, before = torch.randn(X), state_of(model)
    assert normswap.optimize(model, x, inplace=True) is model
    assert_same(before, state_of(model), classes=False)
    assert sum(modules.site_match(m) is not None for m in model.modules()) == len(SITES)
    assert normswap.revert(model) is model
    assert_same(before, state_of(model))


def test_optimizing_twice_changes_nothing(model: nn.Module) -> None:
    once = normswap.optimize(model, torch.randn(X), inplace=True)
    report = normswap.report(once)
    assert normswap.report(normswap.optimize(once, torch.randn(X), inplace=True)).plan == report.plan
    assert sum(modules.site_match(m) is not None for m in model.modules()) == len(SITES)


@pytest.mark.parametrize("seen", (True, False))
@pytest.mark.case("pickle-deepcopy")
def test_copies_and_pickles_stay_swapped(model: nn.Module, seen: bool) -> None:
    swapped = normswap.optimize(model.eval(), torch.randn(X))
    x = torch.randn(X)
    for twin in (copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        assert torch.equal(twin(x), model(x))
        assert {row["status"] for row in normswap.report(twin).rows} == {"unchecked"}
        assert normswap.validate(twin, x).swapped == EVAL


def plant(monkeypatch: pytest.MonkeyPatch, original: type[nn.Module], forward: object) -> None:
    """Make the class that ``original`` is swapped for compute something else."""
    kind, swapped = modules._MODULE_CLASSES[original]
    wrong = type("Wrong", (swapped,), {"forward": forward})
    monkeypatch.setitem(modules._MODULE_CLASSES, original, (kind, wrong))


def wrong_eps(self: nn.LayerNorm, input: Tensor) -> Tensor:
    return nn.functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, 1e-3)


def test_a_wrong_site_is_put_back_alone(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, nn.LayerNorm, wrong_eps)
    with pytest.warns(UserWarning, match=r"1 sites do not match .* put back: layer \(layer_norm\)"):
        swapped = normswap.optimize(model, torch.randn(X))
    assert type(swapped.layer) is nn.LayerNorm
    report = normswap.report(swapped)
    assert report.swapped == tuple(name for name in SITES if name != "layer")
    assert [row["name"] for row in report.rows if row["status"] == "failed"] == ["layer"]


@pytest.mark.parametrize("device", ("cuda:0", "cpu"))
def test_a_site_that_every_call_leaves_to_the_original_is_put_back(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    def declined(*arguments: Any) -> list[SiteProof]:
        return [replace(p, declined=p.name == "layer", device=device) for p in prove(*arguments)]

    monkeypatch.setattr(sys.modules["normswap.pipeline"], "prove", declined)
    swapped = normswap.optimize(model, torch.randn(X), min_speedup=None)
    row = next(row for row in normswap.report(swapped).rows if row["name"] == "layer")
    if device == "cpu":  # where no kernel runs, all is left to PyTorch's ops
        assert row["swapped"] and row["status"] == "wiring"
        return
    assert type(swapped.layer) is nn.LayerNorm and not row["swapped"]
    assert (row["status"], row["code"]) == ("declined", "DECLINED")
    assert "put back: layer" in str(normswap.report(swapped))


def test_a_wrong_site_raises_or_is_kept_as_asked(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, nn.LayerNorm, wrong_eps)
    x, before = torch.randn(X), state_of(model)
    with pytest.raises(normswap.MismatchError, match="layer"):
        normswap.optimize(model, x, inplace=True, on_mismatch="raise")
    assert_same(before, state_of(model))
    with pytest.warns(UserWarning, match="kept"):
        kept = normswap.optimize(model, torch.randn(X), on_mismatch="warn")
    assert "layer" in normswap.report(kept).swapped


def test_one_wrong_site_of_fifty(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(nn.Sequential(*(nn.LayerNorm(24) for _ in range(50))))
    model[31].eps = 2e-5

    def wrong(self: nn.LayerNorm, input: Tensor) -> Tensor:
        eps = 1e-3 if self.eps == 2e-5 else self.eps
        return nn.functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, eps)

    plant(monkeypatch, nn.LayerNorm, wrong)
    with pytest.warns(UserWarning, match="1 sites do not match"):
        swapped = normswap.optimize(model, torch.randn(6, 24))
    assert [row["name"] for row in normswap.report(swapped).rows if row["status"] == "failed"] == ["31"]


def test_validate_puts_back_what_became_wrong(model: nn.Module) -> None:
    swapped = normswap.optimize(model, torch.randn(X))
    swapped.layer.__class__ = modules.LayerNorm
    normswap.validate(swapped, torch.randn(X))
    assert normswap.report(swapped).swapped == SITES


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        self.bn(self.norm(x))
        raise ArithmeticError("in the middle")


def test_an_error_in_the_model_leaves_it_as_it_was() -> None:
    model = randomised(Broken()).train()
    x, before = torch.randn(8, 4), state_of(model)
    with pytest.raises(ArithmeticError):
        normswap.optimize(model, x, inplace=True)
    assert_same(before, state_of(model))


def test_an_error_in_every_step_leaves_the_model_as_it_was(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    x, before = torch.randn(X), state_of(model)
    optimize_module, compare_module = sys.modules["normswap.pipeline"], sys.modules["normswap.proof.compare"]

    def fail(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    for owner, name in (
        (optimize_module.finding, "plan"),
        (optimize_module, "prove"),
        (optimize_module, "settle"),
        (optimize_module, "_reported"),
        (sys.modules["normswap.proof.comparison"], "verdict"),
        (compare_module, "Size"),
        (sys.modules["normswap.proof.whole_model"], "_outputs"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fail)
            with pytest.raises(KeyboardInterrupt):
                normswap.optimize(model, x, inplace=True)
        assert_same(before, state_of(model))


def test_filters(model: nn.Module) -> None:
    assert normswap.report(normswap.optimize(model, include="*ro*")).swapped == SITES[:1] + SITES[2:4]
    assert normswap.report(normswap.optimize(model, exclude=["re:l.*", "group"])).swapped == (
        "projection",
        "projection.bn",
        "rms",
    )
    only = normswap.optimize(model, include=lambda module, name: isinstance(module, nn.RMSNorm))
    assert normswap.report(only).swapped == ("rms",)


def test_nothing_to_swap() -> None:
    plain = nn.Sequential(nn.Linear(3, 3)).eval()
    with pytest.warns(UserWarning, match="nothing was swapped"):
        normswap.optimize(plain)
    with pytest.raises(normswap.NothingSwappedError):
        normswap.optimize(plain, on_empty="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        normswap.optimize(plain, on_empty="ignore")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"model": 3}, TypeError, "model must be a torch.nn.Module, got int"),
        ({"example_inputs": [torch.ones(2)]}, TypeError, "a tensor or a tuple .* got list"),
        ({"example_kwargs": [1]}, TypeError, "example_kwargs must be a dict, got list"),
        ({"validate": "yes"}, ValueError, "validate must be one of .*'auto'.* got 'yes'"),
        ({"on_mismatch": "no"}, ValueError, "on_mismatch must be one of"),
        ({"on_empty": "no"}, ValueError, "on_empty must be one of"),
        ({"include": 3}, TypeError, "include"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        normswap.optimize(**{"model": nn.LayerNorm(4), **arguments})  # type: ignore[arg-type]


@pytest.mark.case("root-is-norm", "shared-module", "frozen-parameters", "float64")
def test_root_shared_frozen_and_float64_models() -> None:
    root = normswap.optimize(randomised(nn.LayerNorm(6)), torch.randn(2, 6))
    assert type(root) is modules.LayerNorm
    shared = nn.LayerNorm(6)
    both = normswap.optimize(nn.Sequential(shared, nn.ReLU(), shared), torch.randn(2, 6))
    assert both[0] is both[2] and type(both[0]) is modules.LayerNorm
    frozen = randomised(nn.GroupNorm(2, 4)).requires_grad_(False)
    report = normswap.report(normswap.optimize(frozen, torch.randn(2, 4)))
    assert [row["gradients"] for row in report.rows] == [False]
    wide = randomised(nn.LayerNorm(6)).double()
    assert normswap.report(normswap.optimize(wide, torch.randn(2, 6).double())).swapped == ("",)


@pytest.mark.case("meta-device")
def test_kwargs_and_meta_models() -> None:
    model = randomised(nn.LayerNorm(6))
    swapped = normswap.optimize(model, example_kwargs={"input": torch.randn(2, 6)})
    assert [row["inputs"] for row in normswap.report(swapped).rows] == ["captured"]
    meta = normswap.optimize(nn.LayerNorm(6, device="meta"))
    assert [row["status"] for row in normswap.report(meta).rows] == ["unchecked"]


@pytest.mark.parametrize("momentum", (None, 0.0, 0.3))
@pytest.mark.case("bn-momentum", "bn-affine-false", "bn-frozen", "bn-batches-tracked", "bn-one-row")
def test_batch_norm_variants(momentum: float | None) -> None:
    for change in ("affine", "untracked", "frozen", "none"):
        model = randomised(Projection(7, 5, momentum)).train()
        if change == "affine":
            model.bn = nn.BatchNorm1d(5, momentum=momentum, affine=False)
        if change == "untracked":
            model.bn = nn.BatchNorm1d(5, momentum=momentum, track_running_stats=False)
        if change == "frozen":
            model.bn.eval()
        swapped = normswap.optimize(model, torch.randn(9, 7))
        assert normswap.report(swapped).swapped == (("",) if change == "frozen" else ("", "bn"))
        for _ in range(2):
            x = torch.randn(9, 7)
            torch.testing.assert_close(swapped(x), model(x))
        for a, b in zip(swapped.buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(a, b)
        if change == "none":
            with pytest.raises(ValueError, match="more than 1 value per channel"):
                swapped(torch.randn(1, 7))


def test_one_running_model_is_warned_about_its_optimizer(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"optimizer made before \(SGD\)"):
        warnings.simplefilter("always")
        normswap.optimize(model.train(), torch.randn(X))
    assert optimizer.param_groups


def test_names_are_functions_and_modules_import_too() -> None:
    from normswap.plans import Plan
    from normswap.reports import Report

    assert callable(normswap.plan) and callable(normswap.report) and callable(normswap.validate)
    assert normswap.Plan is Plan and normswap.Report is Report


class Energy(nn.Module):
    """Gives a result made of what a norm gives, by ``make``."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.norm, self.linear, self.batch, self.make = nn.LayerNorm(8), nn.Linear(8, 8), nn.BatchNorm1d(8), make

    def forward(self, x: Tensor) -> Any:
        x = x.requires_grad_()
        return self.make(torch.tanh(self.linear(self.batch(self.norm(x)))), x)


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a gradient": lambda out, x: torch.autograd.grad(out.sum(), x, create_graph=True)[0],
    "a backward": lambda out, x: (out.sum().backward(), out)[1],
    "sparse": lambda out, x: out.to_sparse(),
    "sparse rows": lambda out, x: out.relu().to_sparse_csr(),
    "complex": lambda out, x: torch.fft.fft(out),
    "nested": lambda out, x: torch.nested.nested_tensor([*out.detach()], layout=torch.jagged),
    "of integers": lambda out, x: (out > 0).sum(),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", OUTPUTS)
def test_what_a_model_may_give(name: str, training: bool, recwarn: pytest.WarningsRecorder) -> None:
    model, x = randomised(Energy(OUTPUTS[name])).train(training), torch.randn(4, 8)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    swapped = normswap.optimize(model, x, inplace=True)
    report = normswap.report(swapped)
    assert "norm" in report.swapped and report.model["passed"]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters()) and torch.is_grad_enabled()
    assert not [told for told in recwarn if "normswap" in str(told.message)]


class Physics(Energy):
    """By an input that wants a gradient already."""

    def forward(self, x: Tensor) -> Any:
        return self.make(torch.tanh(self.linear(self.batch(self.norm(x)))), x)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_model_may_differentiate_by_what_it_is_given(training: bool, gradients: bool) -> None:
    model, x = randomised(Physics(OUTPUTS["a gradient"])).train(training), torch.randn(4, 8, requires_grad=True)
    with torch.set_grad_enabled(gradients):
        swapped = normswap.optimize(model, x)
    assert "norm" in normswap.report(swapped).swapped and normswap.report(swapped).model["passed"]  # type: ignore[index]
    torch.testing.assert_close(swapped(x), model(x))
    assert x.grad is None and x.requires_grad


def test_an_error_of_the_model_about_gradients_is_told_once() -> None:
    calls: queue.SimpleQueue[bool] = queue.SimpleQueue()  # which nobody gives back as it was

    def fails(out: Tensor, x: Tensor) -> Any:
        calls.put(torch.is_grad_enabled())
        return torch.autograd.grad(out.detach().sum(), x)

    with pytest.raises(RuntimeError, match="does not require grad"):
        normswap.optimize(Energy(fails).eval(), torch.randn(4, 8))
    assert [calls.get_nowait() for _ in range(calls.qsize())] == [False, True]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_norm_of_nested_tensors_is_left_to_the_original(layout: torch.layout) -> None:
    model = nn.Sequential(randomised(nn.LayerNorm(8))).eval()
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)], layout=layout)
    swapped = normswap.optimize(model, x, min_speedup=None)
    for ours, theirs in zip(swapped(x).unbind(), model(x).unbind(), strict=True):
        assert torch.equal(ours, theirs)
    (row,) = normswap.report(swapped).rows
    assert (row["status"], row["reason"]) == ("wiring", "the region's own statements run on these inputs")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_leaves_out_what_is_padded() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = randomised(nn.TransformerEncoder(layer, 2)).eval()
    x, padded = torch.randn(3, 5, 16), torch.arange(5) >= torch.tensor([[3], [5], [4]])
    with torch.no_grad():
        swapped = normswap.optimize(model, (x,), {"src_key_padding_mask": padded}, min_speedup=None)
        assert torch.equal(swapped(x, src_key_padding_mask=padded), model(x, src_key_padding_mask=padded))
    rows = normswap.report(swapped).rows
    assert len(rows) == 4 and {row["status"] for row in rows} == {"wiring"}
