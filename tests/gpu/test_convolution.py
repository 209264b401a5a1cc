"""Convolution -> BatchNorm -> residual -> activation in eval on the GPU: every way to compute it, against float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolution_cases import CASES, PROVED
from convolution_models import Block, bn, conv, drawn, residual, swapped_with, undecided, written
from limits import same_bits
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import normswap
from normswap import ops
from normswap.activation import FUNCTIONS, NONE, Activation
from normswap.proof.product_bounds import MOST, times_pytorchs
from normswap.regions.foldings import is_scaled

DEVICE = "cuda"
RELU = Activation("relu")
by_dtype = pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
by_layout = pytest.mark.parametrize("last", (False, True), ids=("contiguous", "channels_last"))

FORMS: dict[str, dict[str, Any]] = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "pointwise": {"kernel_size": 1},
    "strided": {"kernel_size": 3, "padding": 1, "stride": 2, "bias": False},
    "dilated": {"kernel_size": 3, "padding": 2, "dilation": 2},
    "groups": {"kernel_size": 3, "padding": 1, "groups": 4},
    "depthwise": {"kernel_size": 3, "padding": 1, "groups": 16},
    "uneven": {"kernel_size": (1, 5), "padding": (0, 2), "stride": (2, 1), "bias": False},
    "odd channels": {"kernel_size": 3, "out_channels": 9},
}
FROM_ODD = {"in_channels": 9, "out_channels": 7, "kernel_size": 3, "padding": 1}  # rows of weights that no vector fits


def placed(model: nn.Module, x: Tensor, dtype: torch.dtype, last: bool) -> tuple[Any, Tensor]:
    layout = torch.channels_last if last else torch.contiguous_format
    return model.to(DEVICE, dtype).to(memory_format=layout), x.to(DEVICE, dtype).contiguous(memory_format=layout)


def made(form: str) -> Any:
    settings = {"in_channels": 16, "out_channels": 16, **(FROM_ODD if form == "from odd" else FORMS[form])}
    return drawn(lambda: Block(nn.Conv2d(**settings), nn.BatchNorm2d(settings["out_channels"])))


def arguments(model: Any) -> tuple[Any, ...]:
    c, b = model.conv, model.bn
    how = (c.weight, c.bias, c.stride, c.padding, c.dilation, c.groups)
    return (*how, b.running_mean, b.running_var, b.weight, b.bias, b.eps)


@by_dtype
@by_layout
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_every_way_is_as_exact_as_pytorchs_sequence(form: str, last: bool, dtype: torch.dtype) -> None:
    model, x = placed(made(form), torch.randn(5, 16, 15, 14).relu(), dtype, last)
    wide = copy.deepcopy(model).double()
    for act, residual_too in ((RELU, False), (RELU, True), (NONE, False), (Activation("silu"), True)):
        theirs = model.bn(model.conv(x))
        added = torch.randn_like(theirs) if residual_too else None
        theirs = act(theirs if added is None else theirs + added)
        expected = wide.bn(wide.conv(x.double()))
        expected = act(expected if added is None else expected + added.double())
        ways = ["folded", *(["fused"] if act == RELU else [])]
        ways += ["scaled"] if last and is_scaled(model.conv) else []
        for way in ways:
            assert ops.folding_serves(way, x, model.conv.weight)
            call = lambda way=way, act=act, added=added: ops.convolution_batch_norm_eval(  # noqa: E731
                x, *arguments(model), act, residual=added, folding=way
            )
            ours = call()
            assert ours.dtype is dtype and ours.stride() == theirs.stride(), way
            assert times_pytorchs(ours, theirs, expected) <= 1.2 * MOST, way  # of random data; the proof holds to 1
            assert all(same_bits(ours, call()) for _ in range(3)), way


@by_dtype
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_under_autocast_every_way_is_as_exact(form: str, dtype: torch.dtype) -> None:
    """Of float32 weights, folded before they are rounded, or scaled behind."""
    model, x = placed(made(form), torch.randn(5, 16, 15, 14).relu(), torch.float32, True)
    expected = copy.deepcopy(model).double()(x.to(dtype).double())
    with torch.autocast(DEVICE, dtype):
        for given in (x, x.to(dtype)):
            theirs = model(given)
            for way in ("folded", "fused", *(["scaled"] if is_scaled(model.conv) else [])):
                assert ops.folding_serves(way, given, model.conv.weight)
                ours = ops.convolution_batch_norm_eval(given, *arguments(model), RELU, folding=way)
                assert ours.dtype is theirs.dtype is dtype and ours.stride() == theirs.stride(), way
                assert times_pytorchs(ours, theirs, expected) <= 1.2 * MOST, way
        fast = normswap.optimize(model, x, min_speedup=None)
        rows = normswap.report(fast).rows
        assert rows and all(row["status"] == "proved" for row in rows), rows
        torch.testing.assert_close(fast(x), model(x), rtol=0.03, atol=0.05)


TRANSPOSED: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3},
    "doubles": {"kernel_size": 2, "stride": 2, "bias": False},
    "groups": {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1, "groups": 4},
    "depthwise": {"kernel_size": 4, "stride": 2, "padding": 1, "groups": 16},
    "dilated": {"kernel_size": (3, 2), "dilation": (2, 1)},
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@by_layout
@pytest.mark.parametrize("form", TRANSPOSED)
@torch.no_grad()
def test_transposed_convolutions_fold(form: str, last: bool, dtype: torch.dtype) -> None:
    made = drawn(lambda: Block(nn.ConvTranspose2d(16, 32, **TRANSPOSED[form]), nn.BatchNorm2d(32)))
    model, x = placed(made, torch.randn(5, 16, 9, 8), dtype, last)
    fast = swapped_with(model)
    rows = normswap.validate(fast, x, mode="forward", on_mismatch="warn").rows
    assert rows and all(row["error_share"] <= 1.0 for row in rows), rows
    ours, theirs = swapped_with(model)(x), model(x)
    assert ours.dtype is dtype and ours.stride() == theirs.stride() and same_bits(ours, swapped_with(model)(x))
    torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.05)
    torch.testing.assert_close(normswap.fold(model)(x), theirs, rtol=0.03, atol=0.05)


@by_dtype
@by_layout
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_the_fold_is_the_references_rounded_once(form: str, last: bool, dtype: torch.dtype) -> None:
    for kept in (dtype, torch.float32):
        model, _ = placed(made(form), torch.randn(1, 16, 4, 4), dtype, last)
        model.bn.to(kept)
        weight, bias, *_ = arguments(model)
        norm = arguments(model)[6:]
        folded, shift = torch.ops.normswap.fold_convolution_or_none(weight, bias, *norm)
        gain = (norm[1].double() + norm[4]).rsqrt() * norm[2].double()
        exact = weight.double() * gain.view(-1, 1, 1, 1)
        offset = norm[3].double() + gain * ((0.0 if bias is None else bias.double()) - norm[0].double())
        assert folded.stride() == weight.stride() and folded.dtype is shift.dtype is dtype
        for ours, wide in ((folded, exact), (shift, offset)):
            torch.testing.assert_close(ours.double(), wide, rtol=torch.finfo(dtype).eps * 0.51, atol=1e-6)


@torch.no_grad()
def test_what_the_fold_declines() -> None:
    weight, norm = torch.randn(4, 3, 2, 2, device=DEVICE), [torch.rand(4, device=DEVICE) for _ in range(4)]
    fold = torch.ops.normswap.fold_convolution_or_none
    for one in (weight.transpose(0, 1), weight[:, ::2], weight.double(), weight.expand(2, 4, 3, 2, 2)[0, :, :, :1]):
        assert fold(one, None, *norm[: 4 if one.shape[0] == 4 else 0] or norm, 1e-5) == (None, None)
    assert fold(weight, None, norm[0][:3], *norm[1:], 1e-5) == (None, None)
    assert fold(weight, None, norm[0].cpu(), *norm[1:], 1e-5) == (None, None)


@by_dtype
@pytest.mark.parametrize("name", PROVED)
def test_default_plans_and_all_ways_are_within_the_bound(name: str, dtype: torch.dtype) -> None:
    """A way that is within it and over 1.5 times PyTorch's error fails its proof, and optimize puts it back: a warning
    here."""
    case = CASES[name]
    model = drawn(case.make).to(DEVICE, dtype)
    x = torch.randn(case.shape, device=DEVICE).relu().to(dtype).contiguous(memory_format=case.layout)
    for plan in (normswap.plan(model), undecided(model, "folded"), undecided(model, "fused")):
        fast = normswap.apply(model, plan)
        rows = normswap.validate(fast, x, mode="forward", on_mismatch="warn").rows
        assert all(row["error_share"] <= 1.0 for row in rows), [row["detail"] for row in rows]
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=0.05, atol=0.1)


@torch.no_grad()
def test_a_region_is_one_fold_and_one_convolution() -> None:
    model, x = placed(drawn(lambda: written(residual)(conv(), bn())), torch.randn(4, 6, 16, 16), torch.float16, True)
    fast = swapped_with(model, "fused")
    fast(x)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        fast(x)
        torch.cuda.synchronize()
    names = [event.name for event in seen.events() if event.device_type.name == "CUDA"]
    assert sum("fold_rows" in name for name in names) == 1, names
    assert not [name for name in names if "elementwise" in name or "batch_norm" in name], names


@torch.no_grad()
def test_writes_and_switches_take_effect_at_once() -> None:
    model, x = placed(drawn(lambda: Block(conv(), bn())), torch.randn(4, 6, 16, 16), torch.float16, True)
    fast = swapped_with(model, "fused")
    changes = (
        lambda m: m.bn.running_mean.data.add_(1.0),
        lambda m: m.conv.weight.data.mul_(-1.0),
        lambda m: setattr(m.bn, "eps", 0.5),
        lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
        lambda m: m.conv.register_forward_hook(lambda *_: None),
        lambda m: m.bn.float(),
        lambda m: m.bfloat16(),
    )
    for change in changes:
        before = fast(x)
        for one in (model, fast):
            change(one)
        x = x.to(model.conv.weight.dtype)
        torch.testing.assert_close(fast(x), model(x), rtol=0.03, atol=0.05)
        assert not torch.equal(before.float(), fast(x).float()) or fast.conv._forward_hooks or before.dtype is x.dtype


@torch.no_grad()
def test_a_captured_graph_reads_weights_anew() -> None:
    model, x = placed(drawn(lambda: Block(conv(), bn())), torch.randn(4, 6, 16, 16), torch.float16, True)
    fast = swapped_with(model, "fused")
    fast(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast(x)
    model.bn.running_mean.add_(0.5)
    fast.bn.running_mean.add_(0.5)
    graph.replay()
    torch.testing.assert_close(out, model(x), rtol=0.02, atol=0.02)


@torch.no_grad()
def test_deterministic_algorithms_are_pytorchs() -> None:
    model, x = placed(drawn(lambda: Block(conv(), bn())), torch.randn(4, 6, 16, 16), torch.float16, True)
    was = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        assert not ops.folding_serves("fused", x, model.conv.weight)
    finally:
        torch.backends.cudnn.deterministic = was
    assert ops.folding_serves("fused", x, model.conv.weight)


def native(model: Any, x: Tensor, added: Tensor | None = None, act: Activation = RELU) -> Any:
    """The native op of a block, with what its modules have."""
    weight, bias, *how, groups = arguments(model)[:6]
    numbers = (*(number for pair in how for number in pair), groups)
    op = torch.ops.normswap.convolution_batch_norm_eval_or_none
    return op(x, weight, bias, *numbers, *arguments(model)[6:], added, act.code, act.low, act.high)


def in_a_relu(self: Any, x: Tensor) -> Tensor:
    return F.relu(self.bn(self.conv(x)))


def added_behind(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.relu(self.bn(self.conv(x)) + y)


def added_to(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.relu(y + self.bn(self.conv(x)))


@by_dtype
@by_layout
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_one_step_gives_what_its_parts_do(
    form: str, last: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fold and cuDNN's convolution, by C++: with a residual of either layout, as either operand of the sum."""
    model, x = placed(made(form), torch.randn(5, 16, 15, 14).relu(), dtype, last)
    added = torch.randn_like(model.conv(x))
    other = added.contiguous(memory_format=torch.contiguous_format if last else torch.channels_last)
    in_parts = ops.convolution_batch_norm_eval
    monkeypatch.setattr(ops, "convolution_batch_norm_eval", None)
    for forward, given in ((in_a_relu, ()), *((way, (y,)) for way in (added_behind, added_to) for y in (added, other))):
        model.__class__ = written(forward)
        ours, theirs = swapped_with(model, "fused")(x, *given), model(x, *given)
        expected = in_parts(x, *arguments(model), RELU, residual=given[0] if given else None, folding="fused")
        assert ours.stride() == theirs.stride(), forward
        assert torch.equal(ours, expected), forward


@torch.no_grad()
def test_what_the_native_op_declines() -> None:
    model, x = placed(made("3x3"), torch.randn(2, 16, 8, 8), torch.float16, True)
    assert native(model, x) is not None
    for odd in (x.float(), x[:, :8], x[0], x[:0], x.bfloat16(), x[:, :, :, :0]):
        assert native(model, odd) is None
    for added in (x.float(), x[:1], x.cpu(), x[:, :, 1:]):
        assert native(model, x, added) is None
    with torch.enable_grad():
        assert native(model, x) is None
    with torch.autocast(DEVICE, torch.float16):
        assert native(model, x) is None
    for change in (
        lambda: model.bn.double(),
        lambda: model.bn.bfloat16(),
        lambda: setattr(model.bn, "running_var", None),
    ):
        change()
        assert native(model, x) is None


@torch.no_grad()
def test_a_convolution_of_no_channels_is_declined() -> None:
    how: dict[str, Any] = {"device": DEVICE, "dtype": torch.float16, "memory_format": torch.channels_last}
    x, weight, values = torch.ones(2, 16, 8, 8).to(**how), torch.empty(0, 16, 3, 3, **how), torch.empty(0).to(DEVICE)
    op = torch.ops.normswap.convolution_batch_norm_eval_or_none
    given = (x, weight, None, 1, 1, 1, 1, 1, 1, 1, values, values, values, values, 1e-5, None, RELU.code, 0.0, 0.0)
    assert op(*given) is None


SIZES: dict[str, tuple[Any, ...]] = {  # channels, output channels, height, width, and what nn.Conv2d takes
    "narrow": (8, 8, 5, 7, {"kernel_size": 1}),
    "a tile and more": (64, 136, 23, 17, {"kernel_size": 1}),
    "deep": (1032, 24, 9, 9, {"kernel_size": 1, "bias": False}),
    "strided": (256, 512, 14, 15, {"kernel_size": 1, "stride": 2, "bias": False}),
    "3x3": (72, 64, 12, 12, {"kernel_size": 3, "padding": 1}),
    "all taps outside": (16, 72, 1, 1, {"kernel_size": 3, "padding": 3, "dilation": 3}),
    "depthwise": (24, 24, 13, 9, {"kernel_size": 3, "padding": 1, "groups": 24}),
    "depthwise, chunks of channels": (136, 136, 7, 7, {"kernel_size": 5, "padding": 2, "groups": 136, "bias": False}),
    "depthwise, strided": (72, 72, 20, 31, {"kernel_size": 3, "padding": 0, "stride": 2, "groups": 72}),
    "depthwise, large and strided": (8, 8, 12, 21, {"kernel_size": 5, "padding": (3, 1), "stride": 2, "groups": 8}),
    "groups of 24": (72, 72, 11, 13, {"kernel_size": 3, "padding": 1, "groups": 3, "bias": False}),
    "groups that widen": (32, 320, 9, 8, {"kernel_size": 3, "padding": 1, "stride": 2, "groups": 2}),
    "groups of 8": (64, 64, 7, 7, {"kernel_size": 3, "padding": 2, "dilation": 2, "groups": 8}),
    "uneven": (40, 80, 19, 11, {"kernel_size": (2, 5), "stride": (3, 1), "padding": (0, 4), "dilation": (1, 2)}),
}


@by_dtype
@pytest.mark.parametrize("name", SIZES)
@torch.no_grad()
def test_our_kernel_scales_exact_sums(name: str, dtype: torch.dtype) -> None:
    """Within the rounding of the result and of float32 sums, whatever the batch: and its bits do not depend on that."""
    channels, out_channels, height, width, how = SIZES[name]
    model = drawn(lambda: Block(nn.Conv2d(channels, out_channels, **how), nn.BatchNorm2d(out_channels)))
    whole = torch.randn(300, channels, height, width)
    model, whole = placed(model, whole, dtype, True)
    for kept in (dtype, torch.float32):
        model.bn.to(kept)
        wide = copy.deepcopy(model).double()
        for x in (whole, whole[:37], whole[3:4]):
            z = model.conv(x)
            added = torch.randn_like(whole[:, :1, :1, :1].expand(-1, *z.shape[1:]))[: x.shape[0]]
            added = added.contiguous(memory_format=torch.channels_last)
            exact = wide.bn(wide.conv(x.double()))
            gain = wide.bn.weight.abs() * (wide.bn.running_var + wide.bn.eps).rsqrt()
            sums = gain.view(-1, 1, 1) * nn.functional.conv2d(
                x.double().abs(), wide.conv.weight.abs(), None, *arguments(wide)[2:6]
            )
            sums += (gain * wide.bn.running_mean.abs() + wide.bn.bias.abs()).view(-1, 1, 1) + 1
            for residual_too, act in ((None, RELU), (added, RELU), (added, NONE), (None, NONE)):
                ours = native(model, x, residual_too, act)
                assert ours.stride() == z.stride() and ours.dtype is dtype
                expected = exact if residual_too is None else exact + residual_too.double()
                expected = act(expected)
                most = torch.finfo(dtype).eps * 0.51 * expected.abs() + 16 * 2.0**-24 * sums + torch.finfo(dtype).tiny
                assert ((ours.double() - expected).abs() <= most).all()
                assert same_bits(ours, native(model, x, residual_too, act))
                assert same_bits(ours[:1], native(model, x[:1], None if residual_too is None else added[:1], act))


@by_dtype
@pytest.mark.parametrize("name", FUNCTIONS)
@torch.no_grad()
def test_our_kernels_activation_is_of_the_rounded_sum(name: str, dtype: torch.dtype) -> None:
    act = Activation(name, *{"leaky_relu": (0.2, 0.0), "clamp": (-0.5, 0.75)}.get(name, (0.0, 0.0)))
    model, x = placed(made("3x3"), torch.randn(3, 16, 9, 9), dtype, True)
    before = native(model, x, act=NONE)
    torch.testing.assert_close(native(model, x, act=act), act(before), rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


@torch.no_grad()
def test_what_our_kernel_declines_and_hands_on() -> None:
    model, x = placed(made("3x3"), torch.randn(3, 16, 8, 8), torch.float16, True)
    assert native(model, x) is not None
    for odd in (x.contiguous(), x.float(), x[:, :8], x[:0], torch.cat((x, x), 1)[:, 4:20]):
        assert native(model, odd) is None
    assert native(model, x, x.contiguous()) is None
    for form in ("groups", "odd channels"):
        other, _ = placed(made(form), x, torch.float16, True)
        assert native(other, x) is None
    for bad in (float("nan"), float("inf")):
        odd = x.clone()
        odd[1, 3, 2, 2] = bad
        wide = copy.deepcopy(model).double()
        ours, exact = native(model, odd), wide.act(wide.bn(wide.conv(odd.double())))
        for mask in (Tensor.isnan, Tensor.isinf):
            differs = mask(ours) != mask(exact)
            assert not differs.any(), (differs.nonzero()[:4], ours[differs][:4], exact[differs][:4])
