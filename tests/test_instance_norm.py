"""InstanceNorm without running statistics: a group norm with as many groups as channels."""

from __future__ import annotations

import copy
import pickle
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import randomised
from norm_models import assert_alike, assert_same_error, assert_swaps_alike, cotangent_of, swapped_copy
from torch import Tensor, nn

import normswap
from normswap import modules, ops, reference
from normswap.activation import CODES, NONE, Activation
from normswap.plans import Plan, Reason

SHAPES = {nn.InstanceNorm1d: (4, 6, 5), nn.InstanceNorm2d: (4, 6, 5, 3), nn.InstanceNorm3d: (2, 6, 5, 3, 2)}
OURS = {
    nn.InstanceNorm1d: modules.InstanceNorm1d,
    nn.InstanceNorm2d: modules.InstanceNorm2d,
    nn.InstanceNorm3d: modules.InstanceNorm3d,
}
ZEROS = torch.zeros(6)
by_rank = pytest.mark.parametrize("cls", SHAPES, ids=lambda cls: cls.__name__)


@by_rank
@pytest.mark.parametrize("affine", (True, False))
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("instance-norm", "unbatched-input", "no-affine")
def test_swapped_and_equal(cls: Any, affine: bool, training: bool) -> None:
    model = randomised(cls(6, affine=affine)).train(training)
    for shape in (SHAPES[cls], SHAPES[cls][1:]):
        assert_swaps_alike(model, torch.randn(shape) * 2 + 3)
    swapped = swapped_copy(model, None)
    assert type(swapped) is OURS[cls] and swapped.state_dict().keys() == model.state_dict().keys()


@by_rank
@pytest.mark.case("pickle-deepcopy", "state-dict")
def test_plans_copies_and_revert(cls: Any) -> None:
    model, x = randomised(nn.Sequential(cls(6, affine=True))).eval(), torch.randn(SHAPES[cls])
    swapped = swapped_copy(model, x)
    again = normswap.apply(model, Plan.from_json(normswap.report(swapped).plan.to_json()))
    for twin in (again, copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        assert type(twin[0]) is OURS[cls] and torch.equal(twin(x), model(x))
        twin.load_state_dict(model.state_dict())
    assert type(normswap.revert(swapped)[0]) is cls


@by_rank
def test_from_torch(cls: Any) -> None:
    module, x = randomised(cls(6, affine=True)), torch.randn(SHAPES[cls])
    copied = OURS[cls].from_torch(module)
    assert type(copied) is OURS[cls] and torch.equal(copied(x), module(x))
    assert copied.weight.data_ptr() != module.weight.data_ptr()
    with pytest.raises(TypeError, match=f"must be exactly a torch.nn.{cls.__name__}, got GroupNorm"):
        OURS[cls].from_torch(nn.GroupNorm(2, 6))


@by_rank
@pytest.mark.case("instance-norm-running-stats")
def test_with_running_statistics_it_is_refused(cls: Any) -> None:
    (refused,) = normswap.plan(cls(6, track_running_stats=True)).refused
    assert refused.refusal.reason is Reason.UNSUPPORTED and "running statistics" in str(refused.refusal)
    switched_off = cls(6, track_running_stats=True)
    switched_off.track_running_stats = False
    assert normswap.plan(switched_off).swaps == ()


@pytest.mark.case("instance-norm-running-stats", "attributes-changed-later")
def test_running_statistics_given_later_are_kept_as_pytorch_keeps_them() -> None:
    model, x = nn.InstanceNorm1d(6), torch.randn(4, 6, 5)
    swapped = swapped_copy(model, x)
    for one in (model, swapped):
        one.running_mean, one.running_var = torch.zeros(6), torch.ones(6)
    assert torch.equal(swapped(x), model(x))
    assert torch.equal(swapped.running_mean, model.running_mean) and swapped.running_mean.abs().max() > 0
    for one in (model, swapped):
        one.track_running_stats = True
        one.eval()
    assert torch.equal(swapped(x), model(x))


@pytest.mark.parametrize(("tracks", "mean", "var"), ((True, None, None), (False, ZEROS, None), (False, None, ZEROS)))
def test_half_of_the_running_statistics_is_pytorchs_error(tracks: bool, mean: Any, var: Any) -> None:
    model = nn.InstanceNorm1d(6).eval()
    swapped = swapped_copy(model, None)
    for one in (model, swapped):
        one.track_running_stats, one.running_mean, one.running_var = tracks, mean, var
    x = torch.randn(4, 6, 5)
    assert_same_error(lambda: swapped(x), lambda: model(x))


@pytest.mark.parametrize("momentum", (0.3, None))
@pytest.mark.filterwarnings("ignore")
def test_scripted_it_keeps_running_statistics(momentum: float | None) -> None:
    both = [cls(6, track_running_stats=True, momentum=momentum) for cls in (nn.InstanceNorm1d, modules.InstanceNorm1d)]
    theirs, ours = (torch.jit.script(one) for one in both)
    for training in (True, False):
        x = torch.randn(4, 6, 5) + 1
        assert torch.equal(ours.train(training)(x), theirs.train(training)(x))
        assert torch.equal(ours.running_mean, theirs.running_mean)
        assert bool(ours.running_mean.any()) == bool(momentum)


@by_rank
@pytest.mark.case("lazy", "subclass-own-forward", "parametrized", "instance-forward")
def test_other_forms_are_refused(cls: Any) -> None:
    lazy = getattr(nn, f"Lazy{cls.__name__}")(track_running_stats=False)
    own = type("Own", (cls,), {})(6)
    parametrized = nn.utils.parametrizations.weight_norm(cls(6, affine=True), dim=None)
    replaced = cls(6)
    replaced.forward = torch.neg
    reasons = {lazy: Reason.LAZY, own: Reason.SUBCLASS, parametrized: Reason.PARAMETRIZED}
    for module, reason in {**reasons, replaced: Reason.INSTANCE_FORWARD}.items():
        (refused,) = normswap.plan(module).refused
        assert refused.refusal.reason is reason, type(module)
    lazy(torch.randn(SHAPES[cls]))
    assert len(normswap.plan(lazy).swaps) == 1


@pytest.mark.case("one-value-per-channel", "bad-shapes", "empty-batch")
@pytest.mark.parametrize("training", (True, False))
def test_errors_and_warnings_are_pytorch_s(training: bool) -> None:
    model = nn.InstanceNorm2d(6, affine=True).train(training)
    swapped = swapped_copy(model, torch.randn(4, 6, 5, 3))
    for shape in ((4, 6, 1, 1), (6, 1, 1), (4, 5, 5, 3), (4, 6), (4, 6, 5, 3, 2), (0, 6, 5, 3)):
        x = torch.randn(shape)
        assert_same_error(lambda x=x: swapped(x), lambda x=x: model(x))
    plain = nn.InstanceNorm2d(6).train(training)
    swapped, x = swapped_copy(plain, torch.randn(4, 6, 5, 3)), torch.randn(4, 5, 5, 3)
    with pytest.warns(UserWarning, match="does not match num_features"):
        ours = swapped(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(ours, plain(x))


@pytest.mark.parametrize("dtype", (torch.float64, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("weights", (torch.float32, None), ids=("float32 weights", "its weights"))
@pytest.mark.case("dtypes", "mixed-weights", "float64")
def test_dtypes(dtype: torch.dtype, weights: torch.dtype | None) -> None:
    if dtype is torch.float64 and weights is not None:
        pytest.skip("PyTorch refuses it")
    model = randomised(nn.InstanceNorm2d(6, affine=True)).to(weights or dtype)
    assert_swaps_alike(model, torch.randn(4, 6, 5, 3).to(dtype))


def test_large_samples_are_compared_by_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normswap.proof.pieces.SLICE_ELEMENTS", 64)
    monkeypatch.setattr("normswap.proof.pieces.SLICES", 2)
    report = normswap.report(swapped_copy(randomised(nn.InstanceNorm1d(6, affine=True)), torch.randn(3, 6, 40)))
    assert report.rows[0]["coverage"] < 1.0


@pytest.mark.parametrize("wrong", ({"eps": 1e-2}, {"bias": None}), ids=str)
def test_a_wrong_one_is_caught(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]) -> None:
    def op(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return reference.instance_norm(x, **{"weight": weight, "bias": bias, "eps": eps, **wrong})

    monkeypatch.setattr(ops, "instance_norm", op)
    model = randomised(nn.Sequential(nn.InstanceNorm2d(6, affine=True))).eval()
    with pytest.warns(UserWarning, match="1 sites do not match the original"):
        swapped = normswap.optimize(model, torch.randn(4, 6, 5, 3), on_empty="ignore")
    assert type(swapped[0]) is nn.InstanceNorm2d


@pytest.mark.case("double-backward")
def test_the_op_and_its_gradients() -> None:
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (3,), (3,)))
    assert torch.equal(ops.instance_norm(x, weight, bias, 1e-3), F.instance_norm(x, weight=weight, bias=bias, eps=1e-3))
    function = lambda *tensors: ops.instance_norm(*tensors, 1e-3)  # noqa: E731
    assert torch.autograd.gradcheck(function, (x, weight, bias))
    assert torch.autograd.gradgradcheck(function, (x, weight, bias))


def test_the_kernel_is_group_norm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernels serve: one group a channel, with the input as it is, and PyTorch's op for what it refuses."""
    asked: list[tuple[Any, ...]] = []

    def kernel(input: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, *behind: Any) -> Tensor:
        asked.append((groups, eps, *behind))
        return F.group_norm(input, groups, weight, bias, eps)

    module = sys.modules["normswap.ops.group_norm"]  # normswap.ops.group_norm is the function
    monkeypatch.setattr(module, "native_serves", lambda *tensors, **given: True)
    monkeypatch.setattr(module, "native_group_norm", kernel)
    model = randomised(nn.InstanceNorm2d(6, eps=1e-3, affine=True))
    swapped = swapped_copy(model, None)
    asked.clear()
    for shape in ((4, 6, 5, 3), (6, 5, 3)):
        x = torch.randn(shape)
        assert_alike(model, swapped, x, cotangent_of(model, x))
    assert asked == [(6, 1e-3, NONE, None, torch.float32)] * 2
    for shape in ((4, 6, 1, 1), (0, 6, 5, 3)):
        x = torch.randn(shape)
        assert_same_error(lambda x=x: swapped(x), lambda x=x: model(x))
    assert len(asked) == 2


def test_a_direct_call_is_group_norm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments that the schema has."""
    declared = (Path(__file__).parent.parent / "csrc/abi/register.cpp").read_text().replace('"\n      "', "")
    (schema,) = re.findall(r"group_norm_or_none\((.*?)\)", declared)
    asked: list[tuple[Any, ...]] = []

    def op(*given: Any) -> Tensor:
        asked.append(given)
        input, groups, weight, bias, eps, activation, low, high, residual, wide = given
        assert not wide
        after = Activation([*CODES][activation], low, high)
        return reference.group_norm(input, groups, weight, bias, eps, after, residual=residual)

    monkeypatch.setattr(sys.modules["normswap.ops.group_norm"], "direct", lambda *tensors: op)
    x, weight, bias = torch.randn(4, 6, 5), torch.randn(6), torch.randn(6)
    torch.testing.assert_close(ops.instance_norm(x, weight, bias, 1e-3), reference.instance_norm(x, weight, bias, 1e-3))
    assert [len(given) for given in asked] == [len(schema.split(", "))]
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        ops.instance_norm(x[..., :1])
