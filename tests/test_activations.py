"""An activation behind a GroupNorm, fused with it: the table of forms and traps, the op and its gradients, proofs."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import warnings
from pathlib import Path
from typing import Any

import group_norm_stand_in
import pytest
import torch
import torch.nn.functional as F
from activation_models import CHANNELS, FUSED, GROUPS, SHAPE, TABLE, f_silu, two_runs, written
from expression_checks import check, found
from libraries import import_timm
from models import randomised
from torch import Tensor, nn

import normswap
from normswap import modules, ops, reference
from normswap.activation import Activation
from normswap.checkpoint import convert
from normswap.plans import Plan, Reason

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
by_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
IN_THE_TABLE = pytest.mark.case(
    "fused-activation",
    "in-place-activation",
    "activation-look-alikes",
    "no-affine",
    "frozen-parameters",
    "containers",
    "subclass-own-forward",
    "hooks",
    "parametrized",
    "instance-forward",
    "shared-module",
    "later-hooks",
    "later-weight-norm",
    "later-add-module",
    "attributes-changed-later",
)


@IN_THE_TABLE
@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, trap in TABLE.items() for mode in trap.modes])
def test_it_is_fused_and_equal_or_refused(name: str, mode: str) -> None:
    check(TABLE[name], mode, "cpu")


def test_the_table_has_every_case_it_is_marked_with() -> None:
    assert {case for trap in TABLE.values() for case in trap.cases} == set(IN_THE_TABLE.mark.args)


def optimized(model: nn.Module, x: Tensor | None, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returns a copy.*")
        return normswap.optimize(model, x, **{"on_mismatch": "raise", **options})


FORMS = [
    name for name, trap in TABLE.items() if trap.plan.get("") == FUSED and not trap.later and trap.modes == ("train",)
]


@pytest.mark.case("dtypes", "pickle-deepcopy", "state-dict")
@pytest.mark.parametrize("dtype", (torch.float64, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_other_dtypes_copies_and_revert(name: str, dtype: torch.dtype) -> None:
    model, x = randomised(TABLE[name].make()).to(dtype), torch.randn(16, *SHAPE[1:]).to(dtype)
    swapped = optimized(model, x, validate="grad")
    match, expected = modules.site_match(swapped), swapped(x)
    assert match is not None and swapped.state_dict().keys() == model.state_dict().keys()
    for twin in (copy.deepcopy(swapped), pickled(swapped)):
        assert modules.site_match(twin) == match and torch.equal(twin(x), expected)
    again = normswap.apply(model.eval(), Plan.from_json(normswap.report(swapped).plan.to_json()))
    assert modules.site_match(again) == match and torch.equal(again(x), expected)
    reverted = normswap.revert(swapped)
    assert [type(m) for m in reverted.modules()] == [type(m) for m in model.modules()]


def pickled(model: nn.Module) -> nn.Module:
    """``model`` after a round trip; one of a class made in a function is copied instead."""
    if modules.original_class(model).__name__ == "WrittenActivation":
        return copy.deepcopy(model)
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


def test_what_is_left_out_is_in_no_region() -> None:
    model = nn.Sequential(written(f_silu)(), two_runs())
    assert found(normswap.plan(model, exclude="0.gn")) == {
        **{"0": f"{FUSED} EXCLUDED", "0.gn": "group_norm EXCLUDED"},
        **{"1": FUSED, "1.0": "group_norm", "1.3": "group_norm"},
    }
    plan = normswap.plan(model, exclude="1.3")
    assert found(plan)["1"] == FUSED and found(plan)["1.3"] == "group_norm EXCLUDED"
    (region,) = next(swap.match.attributes["regions"] for swap in plan.swaps if swap.site.name == "1")
    assert region["norm"] == "0"


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
def test_timm_s_norms_with_an_activation() -> None:
    layers = import_timm().layers
    for act, expected in (("relu", F.relu), (nn.SiLU, F.silu), (None, lambda x: x)):
        norm = layers.GroupNormAct(CHANNELS, GROUPS, act_layer=act or nn.ReLU, apply_act=act is not None)
        model, x = randomised(nn.Sequential(norm)), torch.randn(*SHAPE, 4)
        swapped = optimized(model, x)
        assert found(normswap.report(swapped).plan) == {"0": FUSED}
        torch.testing.assert_close(swapped(x), expected(F.group_norm(x, GROUPS, norm.weight, norm.bias)))


# --- the proof and the timing -----------------------------------------------------------------------------------------


def wrong(activation: str) -> Any:
    """The op, with another activation than asked for."""
    after = Activation(activation)
    return lambda x, groups, weight, bias, eps, _: reference.group_norm(x, groups, weight, bias, eps, after)


def not_rounded(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, activation: Activation) -> Tensor:
    wide = (t.float() for t in (weight, bias))
    return reference.group_norm(x.float(), groups, *wide, eps, activation).to(x.dtype)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(wrong("none"), torch.float32), (wrong("gelu"), torch.float32), (not_rounded, torch.bfloat16)],
    ids=("forgotten", "another", "not rounded before"),
)
def test_a_wrong_activation_is_caught(monkeypatch: pytest.MonkeyPatch, op: Any, dtype: torch.dtype) -> None:
    model, x = randomised(two_runs()).to(dtype).eval(), torch.randn(64, *SHAPE[1:]).to(dtype)
    assert "" in normswap.report(optimized(model, x)).swapped
    monkeypatch.setattr(ops, "group_norm", op)
    with pytest.warns(UserWarning, match="sites do not match the original"):
        swapped = normswap.optimize(model, x)
    assert type(swapped) is type(model)
    assert ("", Reason.MISMATCH) in [(r.site.name, r.refusal.reason) for r in normswap.report(swapped).plan.refused]


def test_a_checkpoint_is_converted_and_opened(tmp_path: Path) -> None:
    model = randomised(two_runs()).eval()
    torch.save(model.state_dict(), tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out", "activation_models:two_runs", inputs=torch.randn(SHAPE))
    opened, x = normswap.load_model(tmp_path / "out", trust_factory=True), torch.randn(SHAPE)
    assert modules.site_match(opened) is not None and opened.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(opened(x), model(x))


@pytest.mark.case("autocast")
def test_under_autocast() -> None:
    model, x = randomised(two_runs()), torch.randn(SHAPE)
    with torch.autocast("cpu", torch.bfloat16):
        swapped = optimized(model, x, validate="grad")
        assert modules.site_match(swapped) is not None and torch.equal(swapped(x), model(x))


# --- the op -----------------------------------------------------------------------------------------------------------


def arguments(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = ((2, 6, 5), (6,), (6,))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@by_activation
@pytest.mark.case("double-backward")
def test_the_op_is_the_norm_then_the_activation(activation: str) -> None:
    x, weight, bias = arguments()
    after = Activation(activation)
    found = ops.group_norm(x, 3, weight, bias, 1e-3, after)
    assert torch.equal(found, ACTIVATIONS[activation](F.group_norm(x, 3, weight, bias, 1e-3)))
    function = lambda *tensors: ops.group_norm(tensors[0], 3, *tensors[1:], 1e-3, after)  # noqa: E731
    assert torch.autograd.gradcheck(function, (x, weight, bias))
    assert torch.autograd.gradgradcheck(function, (x, weight, bias))


def test_an_unknown_activation_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="activation must be one of 'none', 'relu', .*got 'softmax'"):
        ops.group_norm(torch.randn(2, 4), 2, activation=Activation("softmax"))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas in the place of our kernels, under our autograd Function."""
    group_norm_stand_in.install(monkeypatch)


@by_activation
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last), ids=("contiguous", "channels_last"))
@pytest.mark.case("double-backward", "channels-last")
def test_the_backward_formula(activation: str, layout: torch.memory_format) -> None:
    shape = (2, 6, 5, 3)
    x = torch.randn(shape).to(memory_format=layout).requires_grad_()
    weight, bias = (torch.randn(6, requires_grad=True) for _ in range(2))
    dy, tensors = torch.randn(shape), (x, weight, bias)
    out = ops.group_norm(x, 3, weight, bias, 1e-5, Activation(activation))
    assert type(out.grad_fn).__name__ == "_GroupNormBackward"
    expected = ACTIVATIONS[activation](F.group_norm(x, 3, weight, bias))
    ours, theirs = (torch.autograd.grad(y, tensors, dy, retain_graph=True) for y in (out, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    second = []
    for y in (out, expected):
        (first,) = torch.autograd.grad(y, x, dy, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), (x, weight)))
    for mine, other in zip(*second, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


@pytest.mark.case("functorch", "forward-mode-ad")
@pytest.mark.parametrize("name", ("f_silu", "norm_act", "sequential_two_runs"))
def test_transforms_see_the_original_function(name: str) -> None:
    model, x = randomised(TABLE[name].make()), torch.randn(SHAPE)
    swapped = optimized(model, x)
    pairs = [torch.func.jvp(one, (x,), (torch.ones_like(x),)) for one in (swapped, model)]
    torch.testing.assert_close(*pairs)
    doubled = {name: parameter * 2 for name, parameter in model.named_parameters()}
    torch.testing.assert_close(*(torch.func.functional_call(one, doubled, (x,)) for one in (swapped, model)))


@pytest.mark.case("torch-compile", "torch-export")
@pytest.mark.parametrize("name", ("f_silu", "child_gelu_tanh", "norm_act", "sequential_two_runs"))
def test_compiled_and_exported(name: str) -> None:
    model, x = randomised(TABLE[name].make()).eval(), torch.randn(SHAPE)
    swapped = optimized(model, x)
    torch._dynamo.reset()
    compiled = torch.compile(swapped, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (3, 5):
        x = torch.randn(batch, *SHAPE[1:])
        torch.testing.assert_close(compiled(x), model(x))
    program = torch.export.export(swapped, (x,)).module()
    torch.testing.assert_close(program(x), model(x))
