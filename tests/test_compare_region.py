"""The comparison of one region with its own statements (proof.compare): what is right passes, what is spoiled on the
way is told of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from linear_region_models import BATCH
from test_compare import Scaled
from test_fused import BODIES, Made
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from normswap.kinds import NORMS
from normswap.proof import compare, comparison, pieces, size
from normswap.proof.compare import compare_region
from normswap.proof.comparison import Comparison
from normswap.regions.helper import Fused
from normswap.regions.listening import holder_of
from normswap.regions.spec import Region


class Spoiled(Fused):
    """The op of a region, and what becomes of its results."""

    change: Any = staticmethod(lambda out: out)

    def __call__(self, children: Any, packed: Any) -> Any:
        return self.change(super().__call__(children, packed))


@pytest.fixture
def of(tmp_path: Path) -> Callable[[str], Made]:
    return lambda what: Made(what, tmp_path)


def compared(made: Made, change: Any = None, gradients: bool = False, at_once: Any = None, **more: Any) -> Comparison:
    fused = Spoiled(made.compiled)
    if at_once is not None:
        fused.at_once = SimpleNamespace(serves=lambda: True, call=at_once)  # type: ignore[assignment]
    if change is not None:
        fused.change = change
    made.module.requires_grad_(True)
    packed = made.compiled.inner(made.packed)
    return compare_region(made.compiled, fused, made.module, packed, gradients, **more)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("what", BODIES)
def test_what_is_right_passes(what: str, dtype: torch.dtype, of: Callable[[str], Made]) -> None:
    made = of(what)
    made.module.to(dtype)
    made.packed = compare._mapped(made.compiled.region, lambda v: v.to(dtype) if torch.is_tensor(v) else v, made.packed)
    before = {name: tensor.clone() for name, tensor in made.module.state_dict().items()}
    found = compared(made, gradients=True)
    assert not found.problem and not found.kernel_ran and 0.0 <= found.share <= 1.0
    assert found.declined == (what == "written" and dtype is torch.bfloat16)
    assert found.coverage == 1.0 and found.dtype == str(dtype).removeprefix("torch.") and found.device == "cpu"
    assert found.gradients == ("convolution" not in what and what != "statistics" and not found.declined)
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.module.state_dict().items())


@pytest.mark.parametrize("lowered", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("what", ("alone", "once", "residual", "convolution", "convolution and residual"))
def test_what_is_right_passes_under_autocast(what: str, lowered: torch.dtype, of: Callable[[str], Made]) -> None:
    made = of(what)
    if "and" in what:
        made.packed = made.packed[0], made.packed[1].to(lowered)
    with torch.autocast("cpu", lowered):
        found = compared(made, captured=False)
    assert not found.problem and not found.declined and found.share <= 1.0


def raising(out: Any) -> Any:
    raise ValueError("for once")


FAULTS: dict[str, tuple[Any, str]] = {
    "off": (lambda out: tree_map(lambda t: t + 1e-3, out), "output"),
    "one element off": (lambda out: tree_map(lambda t: t.index_fill(-1, torch.tensor([0]), 3.0), out), "output"),
    "not finite": (lambda out: tree_map(lambda t: t / 0, out), ""),
    "of another dtype": (lambda out: tree_map(lambda t: t.double(), out), ""),
    "of another shape": (lambda out: tree_map(lambda t: t[:1], out), ""),
    "raising": (raising, "raises ValueError: for once"),
    "gradient off": (lambda out: tree_map(Scaled.apply, out), "gradient"),
    "no gradient": (lambda out: tree_map(Tensor.detach, out), ""),
}


@pytest.mark.parametrize("what", ("alone", "once", "sum", "adaptive", "residual", "written", "function"))
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_told_of(what: str, fault: str, of: Callable[[str], Made]) -> None:
    change, word = FAULTS[fault]
    found = compared(of(what), change, gradients=True)
    assert found.problem and word.replace("output", "sum" if what == "sum" else "output") in found.problem


def test_a_sum_and_what_is_made_of_it_are_both_looked_at(of: Callable[[str], Made]) -> None:
    for name, change in (("sum", lambda out: (out[0] + 1e-3, out[1])), ("output", lambda out: (out[0], out[1] + 1e-3))):
        assert compared(of("sum"), change).problem.startswith(name)


@pytest.mark.parametrize(
    ("change", "word"), [(torch.clone, ""), (lambda out: out * 1.001, "output: "), (Scaled.apply, "gradient of ")]
)
def test_what_the_model_runs_is_compared_too(change: Any, word: str, of: Callable[[str], Made]) -> None:
    found = compared(of("alone"), gradients=True, at_once=lambda owner, x: change(F.gelu(owner.norm(x))))
    assert found.problem.startswith(word) and bool(found.problem) == bool(word)
    assert not compared(of("alone"), gradients=True, at_once=lambda *_: None).problem  # it declines


@pytest.mark.parametrize("slices", (1, 2))
def test_with_gradients_a_slice_is_a_copy(
    slices: int, of: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = of("alone"), list[bool]()
    made.packed = torch.randn(4, 64, 8)
    monkeypatch.setattr(pieces, "SLICE_ELEMENTS", 64)

    def once(owner: Any, x: Tensor) -> Tensor:
        seen.append(x.is_contiguous())
        return F.gelu(owner.norm(x))

    assert not compared(made, gradients=True, at_once=once, slices=slices).problem
    assert seen == [False, True] * slices  # contiguous, as the whole


@pytest.mark.parametrize("what", ("relu6", "residual"))
def test_what_an_activation_writes_to_has_the_same_limits(
    what: str, of: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm's result that is zero, as in place of it ReLU leaves it, would be at ReLU's kink."""
    limits: list[Any] = []
    monkeypatch.setattr(comparison, "verdict", lambda *given: limits.append(given[4:]) or Comparison())
    for name in (what, f"{what}, in place"):
        torch.manual_seed(0)
        compared(of(name), gradients=True)
    half = len(limits) // 2
    assert half > 3
    for one, in_place in zip(limits[:half], limits[half:], strict=True):
        torch.testing.assert_close(in_place, one, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("what", ("alone", "residual", "linear"))
def test_what_a_slope_may_be_off_is_counted_once(
    what: str, dtype: torch.dtype, of: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a tie or a kink leaves open which slope it is, and not once more in roundings of 16 bits: a limit is a few
    times what is steepest."""
    monkeypatch.setattr(size.Size, "_rounded", lambda self, value, error, does: (value, torch.full_like(error, 9.0)))
    made, limits = of(what), list[Tensor]()
    made.module.to(dtype)
    made.packed = compare._mapped(made.compiled.region, lambda v: v.to(dtype) if torch.is_tensor(v) else v, made.packed)

    def noted(what: str, ours: Tensor, eager: Tensor, wide: Tensor, size: Tensor, c: float, extra: Any) -> Comparison:
        if what == "gradient of behind" or what.endswith("bias"):
            limits.append(comparison.limit_of(wide, ours.dtype, size, c, extra))
        return Comparison()

    monkeypatch.setattr(comparison, "verdict", noted)
    compared(made, gradients=True)
    assert limits and max(float(limit.max()) for limit in limits) < 100 * BATCH


class Mixed(torch.autograd.Function):
    """Two tensors, each with the other's gradient."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return one.view_as(one), other.view_as(other)

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Any:  # type: ignore[override]
        return other, one


def test_gradients_of_a_sum_and_of_what_is_made_of_it_are_told_apart(of: Callable[[str], Made]) -> None:
    found = compared(of("sum"), lambda out: Mixed.apply(*out), gradients=True)
    assert found.problem.startswith("gradient")


@pytest.mark.parametrize("lies", ("apart", "unaligned", "spread"))
def test_with_gradients_too_an_input_lies_as_it_does(lies: str, of: Callable[[str], Made]) -> None:
    made, values = of("alone"), torch.randn(2, 3, 17)
    x = {"apart": values[..., :8], "unaligned": values.flatten()[1:49].view(2, 3, 8), "spread": values[:1, :, :8]}[lies]
    made.packed = x = x.expand(2, 3, 8)
    seen: list[Tensor] = []

    class Seeing(Fused):
        def __call__(self, children: Any, packed: Any) -> Any:
            seen.append(self.unpack(packed)[0])
            return super().__call__(children, packed)

    found = compare_region(made.compiled, Seeing(made.compiled), made.module, x, gradients=True)
    assert not found.problem and [one.requires_grad for one in seen] == [False, True]
    assert {(one.stride(), one.data_ptr()) for one in seen} == {(x.stride(), x.data_ptr())}


@pytest.mark.parametrize(("what", "given"), (("alone", "input"), ("alone", "weight"), ("whole", "input")))
def test_what_writes_to_what_it_is_given_is_told_of(what: str, given: str, of: Callable[[str], Made]) -> None:
    """The norm of a norm is that norm."""

    class Writing(Fused):
        def __call__(self, children: Any, packed: Any) -> Any:
            out = super().__call__(children, packed)
            with torch.no_grad():
                (self.unpack(packed)[0] if given == "input" else next(children["norm"].parameters())).mul_(2)
            return out

    made = of(what)
    packed = made.compiled.inner(made.packed)
    found = compare_region(made.compiled, Writing(made.compiled), made.module, packed, gradients=False)
    assert found.problem == "writes to what it is given"


@pytest.mark.parametrize(("factor", "right"), ((1.0, True), (1.01, False)))
def test_what_declines_with_gradients_is_compared_without(
    factor: float, right: bool, of: Callable[[str], Made]
) -> None:
    found = compared(of("alone"), lambda out: None if out.requires_grad else out * factor, gradients=True)
    assert bool(found.problem) != right and not found.declined and not found.gradients


def test_what_ours_does_not_take_is_declined(of: Callable[[str], Made]) -> None:
    found = compared(of("alone"), lambda out: None)
    assert found.declined and not found.problem and "statements" in found.note
    found = compared(of("alone"))
    assert not found.declined and not found.gradients and not found.note


def test_of_what_is_large_slices_are_compared(of: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch) -> None:
    made = of("alone")
    made.packed = torch.randn(64, 8)
    last = made.packed[-1].clone()
    made.module.lin = nn.Linear(8, 100)  # no part of it
    monkeypatch.setattr(pieces, "SLICE_ELEMENTS", 8)
    assert compared(made, slices=4).coverage == 4 / 64
    monkeypatch.setattr(pieces, "SLICE_ELEMENTS", 16)
    assert compared(made, slices=4).coverage == 4 * 2 / 64
    assert compared(made, slices=2).coverage == 2 * 2 / 64 and compared(made, slices=1).coverage == 2 / 64
    assert compared(made, lambda out: out + 1e-3 * (out.shape == (64, 8)), slices=4).problem  # of all of it
    assert torch.equal(made.packed[-1], last)
    made.packed = torch.randn(2, 8)
    assert compared(made).coverage == 1.0
    with monkeypatch.context() as patch:
        patch.setattr(pieces, "SLICE_ELEMENTS", 2)
        made.packed = torch.randn(8)  # one sample
        assert compared(made).coverage == 1.0 and not compared(made).problem
    made = of("whole")
    made.packed = compare._mapped(made.compiled.region, lambda v: v[0, 0, 0], made.packed)
    assert compared(made).coverage == 1.0 and not compared(made).problem
    made = of("once")
    made.packed = torch.randn(64, 8), torch.randn(64, 8)
    assert compared(made).coverage == pieces.SLICES * 2 / 64
    made = of("linear")
    monkeypatch.setattr(pieces, "SLICE_ELEMENTS", 60)
    assert compared(made).coverage == 1.0
    monkeypatch.setattr(made.module.fc, "out_features", 20)  # of as many elements as the Linear makes of a row
    assert compared(made, slices=2).coverage == 2 * 3 / 9
    monkeypatch.setattr(pieces, "SLICE_ELEMENTS", 1)  # a batch has two rows
    assert compared(made, slices=2).coverage == 2 / 9


def test_who_stands_in_for_the_owner(of: Callable[[str], Made]) -> None:
    made = of("sum")
    holder = holder_of(made.compiled.region, made.module)
    assert {*holder._modules} == {"norm", "act"} and holder.norm is not made.module.norm
    assert holder.norm.weight.data_ptr() == made.module.norm.weight.data_ptr()
    wide = holder_of(made.compiled.region, made.module, torch.float64)
    assert wide.norm.weight.dtype is torch.float64 and made.module.norm.weight.dtype is torch.float32
    made.module._modules["act"] = None
    assert {*holder_of(made.compiled.region, made.module)._modules} == {"norm"}


def test_a_forward_by_which_a_child_is_listened_to_is_left_out(of: Callable[[str], Made]) -> None:
    """That of a norm that calls children itself, and of what the result is given to."""
    made = of("sum")
    region = replace(made.compiled.region, feeds=("lin",))
    for name in ("norm", "act", "lin"):
        made.module._modules[name].__dict__["forward"] = torch.neg
    for attributes, own in (({}, {"norm", "act"}), ({"behind": ""}, {"act"})):
        holder = holder_of(replace(region, attributes=attributes), made.module)
        assert {name for name, child in holder._modules.items() if "forward" in child.__dict__} == own


@pytest.mark.parametrize("what", ("alone", "sum"))
def test_what_autocast_would_cast_is_compared_as_it_is_read(what: str, of: Callable[[str], Made]) -> None:
    made = of(what)
    made.compiled = replace(made.compiled, region=replace(made.compiled.region, feeds=("lin",)))
    with torch.autocast("cpu", torch.bfloat16):
        assert not compared(made).problem
        assert compared(made, lambda out: tree_map(Tensor.double, out)).problem.startswith("outputs are ")


def test_weights_that_do_not_learn(of: Callable[[str], Made]) -> None:
    made = of("alone")
    fused = Fused(made.compiled)
    for learning in (False, True):
        made.module.norm.weight.requires_grad_(learning)
        found = compare_region(made.compiled, fused, made.module, made.packed, gradients=True)
        assert found.gradients and not found.problem


@pytest.mark.parametrize("ran", ((True, False), (False, True)))
def test_a_kernel_that_ran_once_ran(
    ran: tuple[bool, ...], of: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter(ran)
    monkeypatch.setattr(compare, "KernelWitness", lambda: SimpleNamespace(ran=next(runs)))
    assert compared(of("alone"), gradients=True).kernel_ran


def test_what_becomes_of_what_a_region_is_given() -> None:
    leaf = torch.ones(4, 3, requires_grad=True)
    assert not compare._detached(leaf).requires_grad and compare._detached(1.0) == 1.0
    assert compare._float64(leaf).dtype is torch.float64 and compare._float64(leaf.int()).dtype is torch.int32
    assert compare._float64(1.0) == 1.0
    for dim, part in ((0, leaf[1:3]), (1, leaf[:, 1:3])):
        cut = partial(pieces._narrowed, like=leaf, dim=dim, start=1, length=2)
        assert torch.equal(cut(leaf), part) and cut(1.0) == 1.0
        for other in (torch.ones(4), torch.ones(5, 5), torch.ones(4, 3, 1)):
            assert cut(other) is other


def test_a_tensor_that_an_expression_is_given_twice_is_one(of: Callable[[str], Made]) -> None:
    for what, count in (("whole", 1), ("once", 2)):
        x = torch.randn(3)
        assert len({*map(id, compare._mapped(of(what).compiled.region, torch.clone, (x, x)))}) == count


def test_what_an_error_may_be_in_units_of_the_magnitude() -> None:
    region, kind = Region("batch_norm", "norm", ()), NORMS["batch_norm"]
    assert size.constants(region) == (kind.c, kind.c_gradient) != (size.C_LINEAR,) * 2
    assert size.constants(replace(region, linear="gemm")) == (size.C_LINEAR,) * 2
