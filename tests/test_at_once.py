"""The short way through C++ of modules that are norms, and of the walk over children beside a region: what it computes
over stand-ins on the CPU, and what makes it decline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import at_once_stand_in
import pytest
import torch
import torch.nn.functional as F
from at_once_stand_in import CALLED, DECLINED, calls, compiled, needs_compiler, registered, short_way
from casts_models import made
from models import Flagged, randomised
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import normswap
from normswap import ops
from normswap.ops import at_once, dispatch
from normswap.regions.children import Beside
from normswap.regions.spec import qualified

__all__ = ["calls", "compiled", "registered", "short_way"]
pytestmark = [needs_compiler, pytest.mark.usefixtures("short_way")]


@normswap.register_norm("rms_norm", weight="gain", eps="small")
class Told(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.small = nn.Parameter(torch.ones(width)), 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gain.shape, self.gain, self.small)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer_norm": (lambda: nn.LayerNorm((3, 8)), (2, 3, 8)),
    "layer_norm of no bias": (lambda: nn.LayerNorm(8, bias=False), (2, 8)),
    "layer_norm of nothing": (lambda: nn.LayerNorm(8, elementwise_affine=False), (2, 8)),
    "rms_norm": (lambda: nn.RMSNorm(8), (2, 8)),
    "rms_norm of an eps": (lambda: nn.RMSNorm(8, eps=1), (2, 8)),
    "group_norm": (lambda: nn.GroupNorm(2, 8), (2, 8, 3)),
    "rms_norm that was told": (lambda: Told(8), (2, 8)),
    "layer_norm that may be another": (lambda: Flagged(8), (2, 8)),
}


@pytest.mark.parametrize("gradients", (False, True))
@pytest.mark.parametrize("name", MODULES)
def test_one_op_computes_a_module(name: str, gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for op in ("layer_norm", "group_norm", "rms_norm"):
        monkeypatch.setattr(ops, op, lambda *_: pytest.fail("it went the long way"))
    make, shape = MODULES[name]
    model = randomised(make())
    ours, x = normswap.apply(model, normswap.plan(model)), torch.randn(shape)
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(ours(x), model(x))
    assert [name.partition(" ")[0]] == CALLED


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        s = x + 2 * x
        return s + F.relu(self.norm(s))


@pytest.mark.parametrize("make", (lambda: nn.LayerNorm(8), Summed))
def test_the_proof_runs_it(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with the short way alone is put back."""
    model, x = randomised(make()).requires_grad_(False), torch.randn(4, 8)
    right = at_once_stand_in._OPS["layer_norm"]
    wrong = lambda *given: tree_map_only(Tensor, lambda out: out * 1.001, right(*given))  # noqa: E731
    monkeypatch.setitem(at_once_stand_in._OPS, "layer_norm", wrong)
    with pytest.warns(UserWarning, match=r"do not match the original and were put back: .*: error is"):
        assert not normswap.report(normswap.optimize(model, x)).swapped
    assert CALLED


@pytest.mark.parametrize("name", MODULES)
def test_a_compiler_sees_the_long_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = MODULES[name]
    model = randomised(make())
    ours, x = normswap.apply(model, normswap.plan(model)), torch.randn(shape)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(ours(x), model(x))
    assert CALLED == []


class Standardised(nn.Conv2d):
    eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, eps=self.eps)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias)


@pytest.mark.parametrize("gradients", (False, True))
def test_one_op_standardises_a_weight(gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = randomised(Standardised(3, 4, 2)), torch.randn(2, 3, 5, 5)
    ours = normswap.apply(model, normswap.plan(model))
    with monkeypatch.context() as patched, torch.set_grad_enabled(gradients):
        patched.setattr(ops, "instance_norm", lambda *_: pytest.fail("it went the long way"))
        torch.testing.assert_close(ours(x), model(x))
    assert CALLED == ["group_norm"]


def test_a_weight_is_standardised_the_long_way_under_autocast(calls: list[Any]) -> None:
    model, x = randomised(Standardised(3, 4, 2)), torch.randn(2, 3, 5, 5)
    ours = normswap.apply(model, normswap.plan(model))
    ours(x)
    ((one, *given),) = calls
    assert one(*given) is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert one(*given) is None
        torch.testing.assert_close(ours(x), model(x))
    ours.eps = model.eps = 0.0
    with pytest.raises((ValueError, RuntimeError), match="eps"):  # PyTorch's, by its version
        ours(x)


@pytest.mark.parametrize("name", ("layer_norm", "group_norm"))
def test_under_autocast_sixteen_bits_become_float32(name: str) -> None:
    make, shape = MODULES[name]
    model = randomised(make())
    ours, x = normswap.apply(model, normswap.plan(model)), torch.randn(shape, dtype=torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    assert ours(x).dtype is torch.float32
    assert len(CALLED) == 1


class Fed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lin(self.norm(x))
        return out


@pytest.mark.parametrize("gradients", (False, True))
@pytest.mark.parametrize("low", (torch.bfloat16, torch.float16))
def test_what_a_product_reads_is_rounded_at_once(low: torch.dtype, gradients: bool) -> None:
    """Of rows whose results begin and end at multiples of 16 bytes; of others it is cast."""
    for width, op in ((8, "layer_norm_with_options"), (10, "layer_norm"), (12, "layer_norm")):
        model, x = randomised(Fed(width)), torch.randn(2, width)
        with torch.autocast("cpu", low), torch.set_grad_enabled(gradients):
            ours, expected = normswap.apply(model, normswap.plan(model)), model(x)
            torch.set_autocast_enabled("cuda", True)
            CALLED.clear()
            out = ours(x)
        torch.set_autocast_enabled("cuda", False)
        assert torch.equal(out, expected) and out.dtype is low and [op] == CALLED


def test_a_sum_of_two_dtypes_is_rounded_at_once() -> None:
    model, x = made("block")
    with torch.autocast("cpu", torch.bfloat16):
        ours, expected = normswap.apply(model, normswap.plan(model)), model(x)
        torch.set_autocast_enabled("cuda", True)
        assert torch.equal(ours(x), expected)
    assert CALLED == ["layer_norm_with_options"] * 2


def _put_back(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    model.__class__ = nn.LayerNorm


def _patched(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x)


def _of_other_code(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.LayerNorm.forward, "__code__", (lambda self, x: x).__code__)


def _of_another_size(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    model.normalized_shape = (4,)  # type: ignore[assignment]


def _without_eps(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    del model.eps


def _autocast_of_doubles(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    DECLINED.add("layer_norm")


CHANGES = (_put_back, _patched, _of_other_code, _of_another_size, _without_eps, _autocast_of_doubles)


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_left_to_the_long_way(
    change: Callable[[nn.Module, pytest.MonkeyPatch], None], calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = randomised(nn.LayerNorm(8))
    ours = normswap.apply(model, normswap.plan(model))
    ours(torch.randn(2, 8))
    ((one, *given),) = calls
    assert one(*given) is not None
    change(ours, monkeypatch)
    assert one(*given) is None


OTHER_LAYOUTS = {
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)]),
    "sparse": lambda: torch.randn(2, 8).to_sparse(),
}


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_another_layout_is_left_to_the_long_way(name: str, calls: list[Any]) -> None:
    model = randomised(nn.LayerNorm(8))
    ours = normswap.apply(model, normswap.plan(model))
    ours(torch.randn(2, 8))
    ((one, *given),) = calls
    other = OTHER_LAYOUTS[name]()
    assert one(*(other if isinstance(value, Tensor) else value for value in given)) is None


@pytest.mark.parametrize("what", ("a flag that is neither", "a size and an eps that are no numbers"))
def test_what_python_raises_comes_out(what: str) -> None:
    flagged = what.startswith("a flag")
    model, x = randomised(Flagged(8) if flagged else nn.LayerNorm(8)), torch.randn(2, 8)
    ours, errors = normswap.apply(model, normswap.plan(model)), []
    for one in (model, ours):
        one.__dict__.update({"fast": torch.zeros(2)} if flagged else {"normalized_shape": (8.0,), "eps": x})
        with pytest.raises((RuntimeError, TypeError)) as error:
            one(x)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


class Summing(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.relu(self.norm(x + residual))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_the_size_of_a_sum_is_asked(dtype: torch.dtype) -> None:
    """Which may be another than that of what is added."""
    model = Summing(nn.LayerNorm((1, 8), elementwise_affine=False))
    ours, x = normswap.apply(model, normswap.plan(model)), torch.randn(2, 8, 1).transpose(1, 2).to(dtype)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            for one in (model, ours):
                with pytest.raises(RuntimeError, match=r"expected input with shape \[\*, 1, 8\]"):
                    one(x, torch.randn(2, 3, 8))


WRONG: dict[str, tuple[str, Any]] = {
    "an integer that C++ does not hold": ("num_groups", 2**70),
    "no integer": ("num_groups", True),
    "an eps that C++ does not hold": ("eps", 10**400),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_pytorch_refuses_it_refuses_in_its_words(name: str) -> None:
    model, x = randomised(nn.GroupNorm(2, 8)), torch.randn(2, 8, 3)
    ours, errors = normswap.apply(model, normswap.plan(model)), []
    for one in (model, ours):
        setattr(one, *WRONG[name])
        with pytest.raises((ValueError, TypeError, OverflowError)) as error:
            one(x)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


def test_an_attribute_hides_a_parameter() -> None:
    model, x = randomised(nn.LayerNorm(8)), torch.randn(2, 8)
    ours = normswap.apply(model, normswap.plan(model))
    for one in (model, ours):
        one.__dict__["weight"] = torch.full((8,), 3.0)
    torch.testing.assert_close(ours(x), model(x))
    assert CALLED == ["layer_norm"]


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, residual: Any, scale: Tensor, shift: Tensor) -> Tensor:
        out: Tensor = self.norm(x + residual) * (1 + scale) + shift
        return out


def test_there_is_no_sum_with_none() -> None:
    model, given = randomised(Adaptive()), [torch.randn(2, 3, 8), torch.randn(2, 3, 8), *torch.randn(2, 2, 1, 8)]
    ours = normswap.apply(model, normswap.plan(model))
    torch.testing.assert_close(ours(*given), model(*given))
    assert CALLED == ["layer_norm_with_options"]
    given[1] = None  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unsupported operand"):
        ours(*given)


def test_of_a_nested_tensor_pytorch_has_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Python calls the native op."""
    model, x = randomised(nn.LayerNorm(8)), OTHER_LAYOUTS["nested"]()
    ours = normswap.apply(model, normswap.plan(model))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(dispatch, "_direct", {"layer_norm": torch.ops.normswap.layer_norm_or_none.default})
    with torch.no_grad():
        for found, expected in zip(ours(x).unbind(), model(x).unbind(), strict=True):
            assert torch.equal(found, expected)


def test_a_flag_is_asked(calls: list[Any]) -> None:
    model = randomised(Flagged(8))
    ours, x = normswap.apply(model, normswap.plan(model)), torch.randn(2, 8)
    assert not torch.equal(ours(x), x)
    ours.fast = True  # type: ignore[assignment]
    ((one, *given),) = calls
    assert one(*given) is None
    assert torch.equal(ours(x), x)


@pytest.mark.parametrize("name", ("layer_norm", "rms_norm of an eps"))
def test_rows_that_are_not_dense_are_copied(name: str) -> None:
    model = randomised(MODULES[name][0]())
    ours, x = normswap.apply(model, normswap.plan(model)), torch.randn(8, 3, 8).transpose(0, 1)
    if name == "layer_norm":
        x = torch.randn(2, 8, 3).transpose(1, 2)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), model(x))
    assert [name.partition(" ")[0]] == CALLED


# --- children beside a region --------------------------------------------------------------------------------------


class _Beside:
    def __init__(self, *names: str) -> None:
        self.beside = {name: [qualified(cls) for cls in (nn.Sequential, nn.Linear, nn.ReLU)] for name in names}


def _tree() -> Any:
    return nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU())), "b": nn.Linear(2, 2)})


def _global_hook(owner: Any) -> Any:
    return nn.modules.module.register_module_forward_pre_hook(lambda *given: None)


BESIDE: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "as it was": (True, lambda owner: None),
    "a hook": (False, lambda owner: owner["a"][1][0].register_forward_hook(lambda *given: None)),
    "a forward": (False, lambda owner: setattr(owner["a"][0], "forward", len)),
    "another class": (False, lambda owner: setattr(owner["a"][1], "0", nn.Tanh())),
    "none": (False, lambda owner: owner._modules.update(b=None)),
    "nothing": (False, lambda owner: owner._modules.pop("b")),
    "a global hook": (False, _global_hook),
}


@pytest.mark.parametrize("in_python", (False, True))
@pytest.mark.parametrize("name", BESIDE)
def test_children_that_only_compute(name: str, in_python: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_python:
        monkeypatch.setattr(at_once, "only_compute", None)
    owner, regions = _tree(), [_Beside("a", "b")]
    beside = Beside(regions)  # type: ignore[arg-type]
    expected, change = BESIDE[name]
    handle = change(owner)
    try:
        assert beside.only_compute(owner) is expected
    finally:
        if name == "a global hook":
            handle.remove()
