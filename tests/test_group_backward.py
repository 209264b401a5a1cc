"""The backward of group_norm and instance_norm without a GPU: which gradients are asked for, and how groups are cut."""

from __future__ import annotations

import itertools

import batch_norm_stand_in
import group_norm_stand_in
import launch_plans
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normswap import ops, reference
from normswap.activation import CODES, NONE, Activation
from normswap.ops import dispatch

SHAPE, GROUPS = (2, 6, 5, 3), 3
LAYOUTS = (torch.contiguous_format, torch.channels_last)
ACTIVATIONS = [
    Activation(name, *{"leaky_relu": (0.1, 0.0), "clamp": (-0.5, 1.0)}.get(name, (0.0, 0.0))) for name in CODES
]
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=("contiguous", "channels_last"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return group_norm_stand_in.install(monkeypatch)


def leaves(layout: torch.memory_format = torch.contiguous_format) -> list[Tensor]:
    x, residual = (torch.randn(SHAPE).to(memory_format=layout) for _ in range(2))
    return [t.requires_grad_() for t in (x, torch.randn(6), torch.randn(6), residual)]


@by_layout
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=[*CODES])
@pytest.mark.parametrize("behind", (False, True), ids=("alone", "residual"))
def test_gradients_are_pytorch_s(
    activation: Activation, behind: bool, layout: torch.memory_format, calls: list[str]
) -> None:
    x, weight, bias, residual = leaves(layout)
    given = [x, weight, bias, *([residual] if behind else [])]
    out = ops.group_norm(x, GROUPS, weight, bias, 1e-5, activation, residual=residual if behind else None)
    normalised = F.group_norm(x, GROUPS, weight, bias)
    expected = activation(normalised + residual if behind else normalised)
    torch.testing.assert_close(out, expected)
    assert out.stride() == x.stride()
    dy = torch.randn(SHAPE)
    ours, theirs = (torch.autograd.grad(y, given, dy, retain_graph=True) for y in (out, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert calls == ["group_norm_recorded", "group_norm_backward_or_none"]
    second = []
    for y in (out, expected):
        first = torch.autograd.grad(y, given, dy, create_graph=True)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight)))
    for mine, other in zip(*second, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ("none", "relu", "silu"))
@pytest.mark.parametrize("declines", (False, True))
def test_a_recorded_call_without_more_gives_every_gradient(
    name: str, declines: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called as ``direct`` lets it be called: with the arguments of the native op."""
    x, weight, bias, residual = given = leaves()
    activation = Activation(name)
    if declines:
        monkeypatch.setitem(dispatch._native, "group_norm_backward_or_none", lambda *given: (None,) * 4)
    call = dispatch._recording["group_norm"]
    out = call(x, GROUPS, weight, bias, 1e-5, activation.code, 0.0, 0.0, residual, False)
    assert out is not None
    expected = activation(F.group_norm(x, GROUPS, weight, bias) + residual)
    dy = torch.randn(SHAPE)
    for ours, theirs in zip(*(torch.autograd.grad(y, given, dy) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ("none", "silu"))
@pytest.mark.parametrize("weighted", (True, False))
def test_without_a_bias(weighted: bool, name: str, calls: list[str]) -> None:
    x, weight, _, residual = leaves()
    activation, dy = Activation(name), torch.randn(SHAPE)
    given = [x, weight, residual] if weighted else [x, residual]
    out = ops.group_norm(x, GROUPS, weight if weighted else None, activation=activation, residual=residual)
    expected = activation(F.group_norm(x, GROUPS, weight if weighted else None) + residual)
    assert calls
    for ours, theirs in zip(*(torch.autograd.grad(y, given, dy) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_only_the_gradients_asked_for(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    backward = dispatch._native["group_norm_backward_or_none"]
    asked: list[set[str]] = []

    def noted(*given: object) -> object:
        names = group_norm_stand_in.arguments_of("group_norm_backward_or_none")
        asked.append({name for name, value in zip(names, given, strict=True) if name.startswith("of_") and value})
        return backward(*given)

    monkeypatch.setitem(dispatch._native, "group_norm_backward_or_none", noted)
    wanted_of = ("of_input", "of_weight", "of_bias", "of_residual")
    for wants in itertools.product((False, True), repeat=4):
        if not any(wants):
            continue
        given = [t.detach().requires_grad_(want) for t, want in zip(leaves(), wants, strict=True)]
        out = ops.group_norm(*given[:1], GROUPS, *given[1:3], activation=Activation("silu"), residual=given[3])
        out.backward(torch.randn(SHAPE))
        if wants != (False, False, False, True):  # that is PyTorch's
            assert asked.pop() == {name for name, want in zip(wanted_of, wants, strict=True) if want}
        assert [t.grad is not None for t in given] == [*wants]


def test_a_residual_without_an_activation_is_neither_kept_nor_computed(calls: list[str]) -> None:
    x, weight, bias, residual = leaves()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = ops.group_norm(x, GROUPS, weight, bias, residual=residual)
    assert not any(t.data_ptr() == residual.data_ptr() for t in kept)
    dy = torch.randn(SHAPE)
    out.backward(dy)
    assert residual.grad is not None and torch.equal(residual.grad, dy)


@pytest.mark.parametrize("op", ("group_norm", "batch_norm"))
@pytest.mark.parametrize("name", ("none", "relu", "silu"))
def test_nothing_is_kept_where_the_residual_alone_learns(
    name: str, op: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But what PyTorch's activation keeps."""
    calls += batch_norm_stand_in.install(monkeypatch) if op == "batch_norm" else []
    kept: list[Tensor] = []
    x, weight, bias, residual = (
        t.requires_grad_(learns) for t, learns in zip(leaves(), (False, False, False, True), strict=True)
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        if op == "group_norm":
            out = ops.group_norm(x, GROUPS, weight, bias, 1e-5, Activation(name), residual=residual)
            normalised = F.group_norm(x, GROUPS, weight, bias)
        else:
            out = ops.batch_norm(x, None, None, weight, bias, True, activation=Activation(name), residual=residual)
            normalised = F.batch_norm(x, None, None, weight, bias, True)
    (expected,) = torch.autograd.grad(Activation(name)(normalised + residual), residual, dy := torch.randn(SHAPE))
    x.add_(1.0)
    assert len(kept) == (name != "none")
    torch.testing.assert_close(*torch.autograd.grad(out, residual, dy), expected)


@pytest.mark.parametrize("create", (False, True))
def test_of_a_relu_behind_a_residual_what_it_gave_is_kept(create: bool, calls: list[str]) -> None:
    x, weight, bias, _ = given = leaves()
    residual, dy = torch.randn(SHAPE), torch.randn(SHAPE)
    out = ops.group_norm(x, GROUPS, weight, bias, activation=Activation("relu"), residual=residual)
    expected = F.relu(F.group_norm(x, GROUPS, weight, bias) + residual)
    residual.add_(1.0)
    pairs = (torch.autograd.grad(y, given[:3], dy, create_graph=create) for y in (out, expected))
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert calls


@by_layout
def test_the_gradient_may_lie_anywhere_and_is_not_written_to(layout: torch.memory_format, calls: list[str]) -> None:
    wide = torch.randn(2, 6, 5, 7)
    gradients = (
        wide[..., 2:5],
        torch.randn(SHAPE).to(memory_format=torch.channels_last),
        torch.randn(SHAPE),
        torch.ones(()).expand(SHAPE),
    )
    for dy in gradients:
        x, weight, bias, _ = leaves(layout)
        before = dy.clone()
        ours = torch.autograd.grad(ops.group_norm(x, GROUPS, weight, bias), (x, weight, bias), dy)
        theirs = torch.autograd.grad(F.group_norm(x, GROUPS, weight, bias), (x, weight, bias), dy)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
        assert torch.equal(dy, before) and ours[0].stride() == x.stride()


def test_a_float32_result_of_16_bits_without_a_cast(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As under autocast on a GPU."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: True)
    x, weight, bias = torch.randn(SHAPE).bfloat16().requires_grad_(), *leaves()[1:3]
    residual = torch.randn(SHAPE).bfloat16().requires_grad_()
    out = ops.group_norm(x, GROUPS, weight, bias, residual=residual, activation=Activation("relu"))
    expected = F.relu(F.group_norm(x.float(), GROUPS, weight, bias) + residual)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, expected)
    out.backward(dy := torch.randn(SHAPE))
    theirs = torch.autograd.grad(expected, (x, weight, bias, residual), dy)
    for leaf, other in zip((x, weight, bias, residual), theirs, strict=True):
        assert leaf.grad is not None and leaf.grad.dtype is leaf.dtype
        torch.testing.assert_close(leaf.grad, other, rtol=2e-2 if other.dtype is torch.bfloat16 else 1e-4, atol=1e-3)
    assert calls == ["group_norm_recorded", "group_norm_backward_or_none"]


def test_a_residual_of_a_wider_dtype_is_added_by_pytorch(calls: list[str]) -> None:
    x, residual = torch.randn(SHAPE).half(), torch.randn(SHAPE)
    out = ops.group_norm(x, GROUPS, residual=residual, activation=Activation("silu"))
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, F.silu(F.group_norm(x, GROUPS) + residual), rtol=1e-3, atol=1e-3)


@by_layout
def test_instance_norm_has_the_same_options(layout: torch.memory_format, calls: list[str]) -> None:
    x, weight, bias, residual = leaves(layout)
    for activation, behind in ((NONE, None), (Activation("leaky_relu", 0.2), residual)):
        out = ops.instance_norm(x, weight, bias, 1e-5, activation, residual=behind)
        expected = reference.instance_norm(x, weight, bias, 1e-5, activation, residual=behind)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        dy = torch.randn(SHAPE)
        for mine, other in zip(*(torch.autograd.grad(y, (x, weight, bias), dy) for y in (out, expected)), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert calls == ["group_norm_recorded", "group_norm_backward_or_none"] * 2


def test_a_residual_may_be_an_inference_tensor(calls: list[str]) -> None:
    x, weight, bias, _ = leaves()
    with torch.inference_mode():
        residual = torch.randn(SHAPE)
    found = []
    for norms in (ops, reference):
        out = norms.group_norm(x, GROUPS, weight, bias, 1e-5, Activation("silu"), residual=residual)
        found.append(torch.autograd.grad(out.sin().sum(), (x, weight, bias)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2


@pytest.mark.usefixtures("calls")
def test_an_empty_batch_gives_zeros() -> None:
    x, weight, bias = torch.randn(0, 6, 5, 3, requires_grad=True), *leaves()[1:3]
    ops.group_norm(x, GROUPS, weight, bias).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    for t in (weight, bias):
        assert t.grad is not None and torch.equal(t.grad, torch.zeros(6))


# --- plans ------------------------------------------------------------------------------------------------------------

GPUS = (
    {"clusters": True, "shared": 232448, "multiprocessors": 132},
    {"clusters": False, "shared": 166912, "multiprocessors": 108},
    {"clusters": False, "shared": 101376, "multiprocessors": 84},
)
SIZES = [
    (batch, channels, spatial, groups)
    for batch, channels, groups in ((1, 8, 2), (3, 30, 3), (64, 256, 32), (2, 2048, 1), (5, 96, 96))
    for spatial in (1, 2, 49, 196, 1001, 3136, 65536, 262144, 1_000_003)
]
TREE = ("vec", "lanes", "each", "units", "piece_lines", "piece_units", "line_pieces", "group_pieces")


def test_plans_cover_every_element_once_and_fit() -> None:
    ways = set()
    for sizes, gpu, (item, grad), regime in itertools.product(SIZES, GPUS, ((4, 4), (2, 2), (2, 4)), (0, 3, 4, 5)):
        p = launch_plans.group_backward_plan(*sizes, item, grad, regime=regime, **gpu)
        if p is None:
            assert regime in (3, 4)
            continue
        batch, channels, spatial, groups = sizes
        lines = channels // groups
        assert spatial % p["vec"] == 0 and p["units"] * p["lanes"] * p["each"] * p["vec"] >= spatial
        assert p["line_pieces"] == 1 or p["piece_lines"] == 1
        assert p["line_pieces"] * p["piece_units"] >= p["units"] > (p["line_pieces"] - 1) * p["piece_units"]
        covered = p["group_pieces"] // p["line_pieces"] * p["piece_lines"]
        assert covered >= lines > covered - p["piece_lines"]
        assert p["piece_lines"] * p["piece_units"] <= 512  # room for a piece's sums
        assert p["groups"] == batch * groups and p["shared"] <= gpu["shared"]
        ways.add((bool(p["held"]), p["cluster"] > 1))
        if p["held"]:
            pieces = p["group_pieces"] if p["cluster"] > 1 else p["groups"] * p["group_pieces"]
            blocks = p["cluster"] if p["cluster"] > 1 else p["grid"]
            assert blocks * p["block_pieces"] >= pieces > (blocks - 1) * p["block_pieces"]
        else:
            pieces = p["groups"] * p["group_pieces"]
            assert p["grid"] == 2 * gpu["multiprocessors"]
            assert p["group_pieces"] <= p["lag"] <= pieces  # a group's sums are on their way before its gradients wait
            assert p["lag"] in (pieces, p["group_pieces"] + p["grid"])
    assert ways == {(True, False), (True, True), (False, False)}


def test_the_tree_depends_on_the_shape_alone() -> None:
    for (_, *sizes), (item, grad) in itertools.product(SIZES, ((4, 4), (2, 2), (2, 4))):
        plans = [
            launch_plans.group_backward_plan(batch, *sizes, item, grad, regime=regime, **gpu)
            for batch, gpu, regime in itertools.product((1, 7), GPUS, (0, 3, 4, 5))
        ]
        assert len({tuple(p[name] for name in TREE) for p in plans if p is not None}) == 1


def test_a_group_that_no_block_holds_is_held_by_a_cluster() -> None:
    """Also where the sums of all its lines would have room in one piece, which no cluster can share."""
    for channels, spatial, cluster in ((256, 3136, 2), (64, 12544, 2), (256, 6272, 4)):
        p = launch_plans.group_backward_plan(64, channels, spatial, 32, 2, 4, **GPUS[0])
        assert p is not None and p["held"] and p["cluster"] == cluster, (channels, spatial, p)


COLUMNS = [*SIZES, *((16, 320, n, 32) for n in (256, 1024, 4096)), (64, 64, 12544, 32), (2, 4100, 25, 1), (3, 24, 5, 2)]
KEPT = ((4, 4, 4), (2, 2, 2), (2, 2, 4), (2, 4, 4))  # bytes of an element of x, of dy, and of dy behind an activation
CUT = (
    "threads",
    "vec",
    "width",
    "lanes",
    "side",
    "half_rows",
    "sum_rows",
    "thread_rows",
    "piece_rows",
    "strips",
    "pieces",
    "bunches",
)


def test_plans_of_columns_cover_every_element_once_and_fit() -> None:
    ways = set()
    for sizes, gpu, (item, grad, kept), regime in itertools.product(COLUMNS, GPUS, KEPT, (0, 5)):
        of = {"regime": regime, "channels_last": True, "kept_itemsize": kept, **gpu}
        p = launch_plans.group_backward_plan(*sizes, item, grad, **of)
        batch, channels, spatial, groups = sizes
        if p is None:
            assert channels // groups > 256
            continue
        assert channels % p["vec"] == 0 and p["width"] % p["vec"] == 0 and p["width"] % (channels // groups) == 0
        assert p["strips"] * p["width"] >= channels > (p["strips"] - 1) * p["width"]
        assert p["lanes"] * p["vec"] == p["width"] and p["slabs"] == batch * p["strips"]
        warps = p["threads"] // 32
        assert p["side"] == (warps * (32 // p["lanes"]) if p["lanes"] <= 32 else p["threads"] // p["lanes"])
        assert p["sum_rows"] == (warps if p["lanes"] <= 32 else p["side"])
        rows = max(1, 32 // p["lanes"])  # of a warp
        assert p["half_rows"] < rows <= max(1, 2 * p["half_rows"])
        assert p["piece_rows"] == p["side"] * p["thread_rows"]
        assert p["pieces"] * p["piece_rows"] >= spatial > (p["pieces"] - 1) * p["piece_rows"]
        assert p["shared"] <= gpu["shared"]
        ways.add((p["held_bytes"] > 0, p["pieces"] > 1))
        if p["held_bytes"]:
            items = p["slabs"] * p["pieces"]
            assert regime == 0 and p["pieces"] <= (4 if gpu["clusters"] else 1) and p["thread_rows"] <= 16
            at_once = (gpu["shared"] + 1024) // (p["shared"] + 1024) * gpu["multiprocessors"]
            assert p["blocks"] == items if p["pieces"] > 1 else p["blocks"] <= min(items, at_once)
            assert p["held_bytes"] == p["threads"] * p["thread_rows"] * p["vec"] * (item + kept)
        else:
            pieces = p["slabs"] * p["pieces"]
            assert p["pieces"] <= p["lag"] <= pieces and p["blocks"] == 2 * gpu["multiprocessors"]
    assert ways == {(True, False), (True, True), (False, False), (False, True)}


def test_the_cut_of_columns_depends_on_the_shape_alone() -> None:
    for (_, *sizes), (item, grad) in itertools.product(COLUMNS, ((4, 4), (2, 2), (2, 4))):
        plans = [
            launch_plans.group_backward_plan(batch, *sizes, item, grad, regime=regime, channels_last=True, **gpu)
            for batch, gpu, regime in itertools.product((1, 7), GPUS, (0, 5))
        ]
        assert len({tuple(p[name] for name in CUT) for p in plans if p is not None}) <= 1
