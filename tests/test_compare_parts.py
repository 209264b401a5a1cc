"""Which parts of a large input are compared, what is remembered between them, and how two findings become one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from accuracy import compared
from models import randomised
from torch import Tensor, nn

from normswap.plans import READ, Match, Site, Swap
from normswap.proof import compare, pieces, prove, runs
from normswap.proof.comparison import Comparison, Cotangent, KernelWitness
from normswap.proof.pieces import Pieces, _has_groups, _independent_dims, pieces_of, spread
from normswap.regions.sequential import by_itself


def test_starts_that_are_spread() -> None:
    assert spread(10, 10, 5) == [0] and spread(10, 3, 1) == [0]
    assert spread(10, 5, 9) == [0, 5] and spread(10, 4, 9) == [0, 3, 6]
    assert spread(100, 1, 3) == [0, 50, 99] and spread(7, 2, 2) == [0, 5]


@pytest.mark.parametrize(
    ("match", "module", "rank", "expected"),
    [
        (Match("layer_norm"), nn.LayerNorm(4), 3, [0, 1]),
        (Match("layer_norm"), nn.LayerNorm((3, 4)), 3, [0]),
        (Match("rms_norm"), nn.RMSNorm(4), 2, [0]),
        (Match("rms_norm", {"dim": 1, "eps": 1e-6}), nn.Module(), 3, [0, 2]),
        (Match("rms_norm", {"dim": -1, "eps": 1e-6}), nn.Module(), 3, [0, 1]),
        (Match("l1_norm", {"dim": 1}), nn.Module(), 3, [0, 2]),
        (Match("group_norm"), nn.GroupNorm(2, 4), 3, [0]),
        (Match("instance_norm"), nn.InstanceNorm1d(4), 3, [0]),
        (Match("instance_norm"), nn.InstanceNorm1d(4), 2, []),
        (Match("batch_norm"), nn.BatchNorm1d(4), 3, [0]),
    ],
)
def test_dims_along_which_nothing_is_shared(match: Match, module: Any, rank: int, expected: list[int]) -> None:
    compiled, owner = by_itself(module, match)
    assert _independent_dims(compiled, owner, torch.zeros((4,) * rank)) == expected


@pytest.mark.parametrize(
    ("match", "module", "packed", "expected"),
    [
        (Match("group_norm"), nn.GroupNorm(2, 4), (torch.zeros(2, 4, 3), 1.0), True),
        (Match("group_norm"), nn.GroupNorm(2, 4), (torch.zeros(2, 4, 3), torch.zeros(4, 1)), False),
        (Match("instance_norm"), nn.InstanceNorm1d(4), (torch.zeros(2, 4, 3),), True),
        (Match("batch_norm"), nn.BatchNorm1d(4), (torch.zeros(2, 4),), False),
        (Match("layer_norm"), nn.LayerNorm(4), (torch.zeros(2, 4),), False),
        (Match("l1_norm", {"dim": 1}), nn.Module(), (torch.zeros(2, 4),), False),
        (Match("group_norm", {f"{READ}{name}": name for name in ("num_groups", "weight", "bias", "eps")}),)
        + (nn.GroupNorm(2, 4), (torch.zeros(2, 4, 3),), False),
    ],
)
def test_which_samples_consist_of_groups(match: Match, module: nn.Module, packed: Any, expected: bool) -> None:
    assert _has_groups(by_itself(module, match)[0], packed) == expected


def cut(match: Match, module: nn.Module, x: Tensor, slices: int) -> Pieces:
    compiled, owner = by_itself(module, match)
    return pieces_of(compiled, owner, x, slices)


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer_norm": (lambda: nn.LayerNorm(8), (40, 3, 8)),
    "group_norm": (lambda: nn.GroupNorm(4, 8), (6, 8, 10)),
    "group_norm, nothing": (lambda: nn.GroupNorm(4, 8, affine=False), (6, 8, 10)),
    "instance_norm": (lambda: nn.InstanceNorm1d(8, affine=True), (6, 8, 10)),
    "batch_norm": (lambda: nn.BatchNorm1d(8), (40, 8)),
}


def test_what_has_no_samples_is_compared_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SLICE_ELEMENTS", 16)
    found = cut(Match("instance_norm"), nn.InstanceNorm1d(4), torch.zeros(4, 10), 4)
    assert (len(found.pieces), found.coverage) == (1, 1.0)


def test_a_part_of_a_batch_has_two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SLICE_ELEMENTS", 4)
    x = torch.zeros(6, 4)
    found = cut(Match("batch_norm"), nn.BatchNorm1d(4), x, 2)
    assert [len(piece.cut(x)) for piece in found.pieces] == [2] and not found.are_parts


def test_a_batch_of_large_samples_is_not_cut_into_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SLICE_ELEMENTS", 16)
    norm = nn.BatchNorm2d(4)
    found = cut(Match("batch_norm"), norm, torch.zeros(4, 4, 3, 3), 9)
    assert [piece.owner.norm is norm for piece in found.pieces] == [True] * 2


def test_the_eps_of_the_referee() -> None:
    """An eps of None is the epsilon of what PyTorch computes in."""
    x, none = torch.zeros(2, 4), torch.finfo(torch.float32).eps
    for norm, given, expected in (
        (nn.LayerNorm(4, eps=0.5), x, 0.5),
        (nn.RMSNorm(4, eps=0.5), x, 0.5),
        (nn.RMSNorm(4), x, none),
        (nn.RMSNorm(4), x.half(), none),
        (nn.RMSNorm(4), x.double(), None),
    ):
        match = Match("layer_norm" if isinstance(norm, nn.LayerNorm) else "rms_norm")
        compiled, owner = by_itself(norm, match)
        case = compare._Case(compiled, runs.Swapped(type(norm)), owner, given, True)
        assert case._wide_holder(given.dtype).norm.eps == expected


def test_a_sample_that_fits_is_not_cut_into_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SLICE_ELEMENTS", 16)
    norm = nn.GroupNorm(2, 4)
    found = cut(Match("group_norm"), norm, torch.zeros(3, 4, 4), 4)
    assert [piece.owner.norm is norm for piece in found.pieces] == [True] * 3 and found.coverage == 1.0


@pytest.mark.parametrize("elements", [16, 40, 10_000])
@pytest.mark.parametrize("name", NORMS)
def test_pieces_are_parts_whose_result_is_a_part(name: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SLICE_ELEMENTS", elements)
    made, shape = NORMS[name]
    kind, module, x = name.partition(",")[0], randomised(made()), torch.randn(shape)
    whole = module(x)
    found = cut(Match(kind), module, x, 4)
    sizes = [piece.cut(x).numel() for piece in found.pieces]
    if elements > x.numel():
        assert len(sizes) == 1 and found.coverage == 1.0 and found.pieces[0].owner.norm is module
    else:
        assert len(sizes) > 1 and sum(sizes) <= max(4 * elements, 2 * max(sizes)) and found.coverage < 1.0
        assert max(sizes) <= max(elements, 10 if "group" in kind else 24, 20 if kind == "group_norm" else 0, 16)
        assert found.coverage == pytest.approx(sum(sizes) / x.numel())
        assert found.are_parts == (kind != "batch_norm")
        ends = torch.zeros(shape)
        for piece in found.pieces:
            piece.cut(ends).fill_(1.0)
        assert ends.flatten()[0] == 1.0 and ends.flatten()[-1] == 1.0
    for piece in found.pieces if kind != "batch_norm" else ():
        torch.testing.assert_close(piece.owner.norm(piece.cut(x)), piece.cut(whole))
    if kind == "batch_norm":
        assert all(len(piece.cut(x)) >= 2 for piece in found.pieces)


def test_what_was_seen_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    slices: list[int | None] = []
    monkeypatch.setattr(prove, "compare_region", lambda *_, **more: slices.append(more["slices"]) or Comparison())
    seen: set[Any] = set()

    def compared(x: Tensor, norm: nn.Module) -> int | None:
        prover = prove.Prover(norm, type(norm), Match("layer_norm"), False, seen, lambda: told.append(1))
        prover.heard(prover.compiled[0], x)
        return slices.pop()

    x, norm = torch.zeros(2, 3), nn.LayerNorm(3)
    assert compared(x, norm) is None and compared(x + 1, nn.LayerNorm(3, eps=1.0)) == 1
    for other in (x.double(), x.t(), x[:1], torch.zeros(3, 2).t(), x.to("meta")):
        assert compared(other, norm) is None
    assert compared(x, type("Own", (nn.LayerNorm,), {})(3)) is None and len(told) == 8


def test_the_worse_of_each() -> None:
    good = Comparison(0.1, 0.2, True, False, 1.0, declined=True, finite=False)
    bad = Comparison(0.3, 0.1, False, True, 0.5, problem="p", note="n", finite=True)
    for found in (good.worst(bad), bad.worst(good)):
        assert (found.share, found.eager, found.kernel_ran, found.gradients, found.coverage) == (
            0.3,
            0.2,
            False,
            True,
            0.5,
        )
        assert (found.finite, found.problem, found.note, found.declined) == (True, "p", "n", False)
    assert Comparison(problem="first").worst(Comparison(problem="second")).problem == "first"
    assert Comparison(note="first").worst(Comparison(note="second")).note == "first"
    assert good.worst(good).declined and not good.worst(good).finite and good.worst(good).kernel_ran


def test_the_cotangent_is_one_for_every_dtype() -> None:
    cotangent, x = Cotangent(), torch.zeros(3, 4)
    first = cotangent(x)
    assert torch.equal(cotangent(x.double()), first.double()) and cotangent(x.half()).dtype is torch.float16
    assert torch.equal(Cotangent()(x), first) and first.std() > 0.3


def test_what_counts_as_an_op_of_ours() -> None:
    """One of another library does not, nor one of ours that declined."""

    class Packet:
        def __init__(self, namespace: str, name: str, out: Any) -> None:
            self.namespace, self.__name__, self.out = namespace, name, out

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.out

    out = torch.zeros(1)
    for namespace, name, given, ran in (
        ("normswap", "layer_norm.default", out, True),
        ("normswap", "layer_norm.default", None, True),
        ("normswap", "group_norm_or_none.default", out, True),
        ("normswap", "group_norm_or_none.default", None, False),
        ("normswap", "layer_norm_or_none.default", (None, None), False),
        ("normswap", "layer_norm_or_none.default", (out, None), True),
        ("aten", "native_layer_norm.default", out, False),
    ):
        witness = KernelWitness()
        witness.__torch_dispatch__(Packet(namespace, name, given), ())
        assert witness.ran == ran, (namespace, name, given)
        witness.__torch_dispatch__(Packet("aten", "add.Tensor", out), ())
        assert witness.ran == ran
    with KernelWitness():
        assert torch.zeros(2, dtype=torch.float64).dtype is torch.float64


@pytest.mark.parametrize("slices", [None, 2])
def test_slices_are_compared(slices: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SLICE_ELEMENTS", 16)
    monkeypatch.setattr(pieces, "SLICES", 4)
    x = torch.randn(32, 8)
    norm = randomised(nn.LayerNorm(8))
    compiled, owner = by_itself(norm, Match("layer_norm"))
    op = runs.swapped_op(compiled, type(norm), Match("layer_norm"))
    found = compare.compare_region(compiled, op, owner, x, True, slices=slices)
    assert found.coverage == (0.125 if slices else 0.25) and not found.problem and found.gradients


def wrong(buffers: bool) -> type[nn.Module]:
    class Wrong(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if buffers and self.num_batches_tracked is not None:
                self.num_batches_tracked += 1
            return out

    return Wrong


def test_a_gradient_that_is_missing_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.layer_norm(x, (4,), self.weight.detach(), self.bias, self.eps)

    monkeypatch.setattr(runs.modules, "swapped_class", lambda *_: Wrong)
    x = torch.randn(3, 4)
    found = compared(Match("layer_norm"), randomised(nn.LayerNorm(4)), x, True)
    assert found.problem == "gradients reach other tensors than PyTorch's: weight"
    assert not compared(Match("layer_norm"), randomised(nn.LayerNorm(4)), x, False).problem
    monkeypatch.setattr(runs.modules, "swapped_class", lambda *_: wrong(True))
    found = compared(Match("batch_norm"), randomised(nn.BatchNorm1d(4)), x, False)
    assert found.problem == "buffer num_batches_tracked differs from PyTorch's"
    monkeypatch.setattr(runs.modules, "swapped_class", lambda *_: wrong(False))
    assert not compared(Match("batch_norm"), randomised(nn.BatchNorm1d(4)), x, False).problem


def test_a_parameter_called_input_does_not_hide_the_input() -> None:
    compiled, owner = by_itself(nn.LayerNorm(4), Match("layer_norm"))
    case = compare._Case(compiled, runs.Swapped(nn.LayerNorm), owner, torch.zeros(2, 4), True)
    assert [case._called(name) for name in ("input", "norm.input", "norm.weight")] == ["input", "norm.input", "weight"]
    holder = nn.Module()
    holder.register_buffer("count", torch.ones(2))
    leaves, packed = case._leaves(holder, case.packed)
    assert [*leaves] == ["input"] and leaves["input"] is packed is not case.packed and packed.requires_grad
    case.compiled = replace(compiled, unpack=lambda packed: (*packed, None, None, ()))
    leaves, packed = case._leaves(holder, (torch.ones(2), holder.count, torch.ones(2, dtype=torch.int32)))
    assert [*leaves] == ["input"] and packed[1] is holder.count and not packed[2].requires_grad


@pytest.mark.parametrize(
    ("found", "status", "detail"),
    (
        ((), "unchecked", "its parameters are sharded, and no example input reached it"),
        ((Comparison(),), "proved", ""),
        ((Comparison(), Comparison(kernel_ran=False)), "wiring", ""),
        ((Comparison(problem="wrong", finite=False), Comparison(kernel_ran=False)), "failed", "wrong"),
        ((Comparison(finite=False),), "unchecked", "the original's output is nowhere finite on these inputs"),
        ((Comparison(note="large"),), "proved", "large"),
    ),
)
def test_what_comparisons_say_of_a_site(found: tuple[Comparison, ...], status: str, detail: str) -> None:
    swap = Swap(Site("at", "torch.nn.LayerNorm"), Match("layer_norm"))
    for training in (True, False):
        proof = prove._proof(swap, nn.LayerNorm(2).train(training), [*found], "captured")
        assert (proof.status, proof.detail) == (status, detail)
        assert not found or proof.mode == ("train" if training else "eval")
