"""What a forward computes (tracing.trace)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normswap import source, tracing
from normswap.plan import Reason

aten = torch.ops.aten
FACTOR = 3.0


class Block(nn.Module):
    """bn(gemm(x) * scale), with everything random."""

    def __init__(self, features: int = 6, channels: int = 4, **batch_norm: Any) -> None:
        super().__init__()
        self.gemm = nn.Linear(features, channels)
        self.scale = nn.Parameter(torch.randn(channels))
        self.bn = nn.BatchNorm1d(channels, **batch_norm)
        self.unread = nn.Parameter(torch.randn(3))
        for tensor in self.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gemm(x) * self.scale
        return self.bn(y)


def _trace(module: nn.Module, **arguments: Any) -> tracing.Traced:
    scanned = source.scan(type(module).forward)
    assert isinstance(scanned, source.Scan), scanned
    traced = tracing.trace(module, scanned.reads, (3, 6), **{"training": True, **arguments})
    assert isinstance(traced, tracing.Traced), traced
    return traced


@pytest.mark.parametrize("training", [True, False])
def test_trace_gives_every_attribute_an_input_of_its_own(training: bool) -> None:
    traced = _trace(Block(), training=training)
    steps = [node for node in traced.operations if node.target is not aten.add_.Tensor]
    assert [node.target for node in steps] == [aten.linear.default, aten.mul.Tensor, aten.batch_norm.default]
    linear, product, normalised = steps
    assert linear.args[0] is traced.argument
    paths = [traced.inputs.get(node) for node in (*linear.args[1:], product.args[1], *normalised.args[1:5])]  # type: ignore[arg-type]
    expected = ["gemm.weight", "gemm.bias", "scale", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"]
    assert paths == expected
    assert normalised.args[5] is training
    assert traced.result is normalised
    assert "unread" not in traced.inputs.values()


def test_trace_keeps_tied_tensors_apart() -> None:
    block = Block()
    block.scale = block.bn.weight
    traced = _trace(block)
    product = next(node for node in traced.operations if node.target is aten.mul.Tensor)
    assert traced.inputs[product.args[1]] == "scale"  # type: ignore[index]


def test_trace_takes_settings_in_place_of_a_childs_own() -> None:
    block = Block(momentum=None)
    scanned = source.scan(Block.forward)
    assert isinstance(scanned, source.Scan)
    rejection = tracing.trace(block, scanned.reads, (3, 6), training=True)
    assert isinstance(rejection, tracing.Rejection) and rejection.reason is Reason.TRACE
    assert isinstance(_trace(block, settings={"bn": {"momentum": 1.0}}), tracing.Traced)
    assert block.bn.momentum is None


class _Fingerprint:
    """All that tracing might disturb."""

    def __init__(self, module: nn.Module) -> None:
        self.state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        self.versions = {name: tensor._version for name, tensor in module.state_dict(keep_vars=True).items()}
        self.ids = {name: id(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}
        self.training = [child.training for child in module.modules()]
        self.dicts = [copy.copy(child.__dict__) for child in module.modules()]
        self.random = torch.get_rng_state()
        self.modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())

    def assert_same(self, other: _Fingerprint) -> None:
        assert all(torch.equal(self.state[name], other.state[name]) for name in self.state)
        assert torch.equal(self.random, other.random)
        for name in ("versions", "ids", "training", "modes"):
            assert getattr(self, name) == getattr(other, name)
        for mine, theirs in zip(self.dicts, other.dicts, strict=True):
            assert mine.keys() == theirs.keys() and all(mine[key] is theirs[key] for key in mine)


@pytest.mark.parametrize("training", [True, False])
def test_trace_leaves_no_trace(training: bool) -> None:
    block = Block()
    block.gemm.eval()
    called: list[str] = []
    block.register_forward_hook(lambda *_: called.append("own"))
    block.bn.register_forward_pre_hook(lambda *_: called.append("child"))
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: called.append("global"))
    before = _Fingerprint(block)
    try:
        _trace(block, training=training)
    finally:
        everywhere.remove()
    before.assert_same(_Fingerprint(block))
    assert called == []


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.device("meta"),
    ],
    ids=["no_grad", "inference_mode", "autocast", "default_device"],
)
def test_trace_does_not_depend_on_where_it_is_called(mode: Any) -> None:
    block = Block()
    usual = [(node.target, str(node.args)) for node in _trace(block).operations]
    with mode:
        assert [(node.target, str(node.args)) for node in _trace(block).operations] == usual


class Fails(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.gemm(self.bn(x))


class Pair(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return (x.abs(),)


class Peeks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.ones(3)
        self.nested = nn.Sequential(nn.Linear(6, 6))
        self.none = None
        self.register_buffer("missing", None)
        self.register_buffer("shadowed", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.plain

    @property
    def answer(self) -> int:
        return 42


class OwnGetattr(Block):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


def test_trace_reports_what_forward_raises() -> None:
    rejection = tracing.trace(Fails(), ("gemm", "bn"), (3, 6), training=True)
    assert isinstance(rejection, tracing.Rejection) and rejection.reason is Reason.TRACE
    assert "Error" in rejection.detail and "\n" not in rejection.detail


def test_trace_fails_on_an_attribute_that_was_not_announced() -> None:
    rejection = tracing.trace(Block(), ("gemm", "bn"), (3, 6), training=True)
    assert isinstance(rejection, tracing.Rejection) and rejection.reason is Reason.TRACE
    assert "scale" in rejection.detail


def test_trace_rejects_a_tuple_of_one_tensor() -> None:
    rejection = tracing.trace(Pair(), (), (3, 6), training=True)
    assert rejection == tracing.Rejection(Reason.UNSUPPORTED, "forward returns a tuple, not a tensor")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *(("plain", Reason.UNSUPPORTED), ("none", Reason.UNSUPPORTED), ("missing", Reason.UNSUPPORTED)),
        *(("answer", Reason.UNSUPPORTED), ("training", Reason.UNSUPPORTED), ("nowhere", Reason.UNSUPPORTED)),
        *(("shadowed", Reason.UNSUPPORTED), ("nested", Reason.CHILD)),
    ],
)
def test_only_registered_tensors_and_leaves_can_be_read(name: str, reason: Reason) -> None:
    module = Peeks()
    module.__dict__["shadowed"] = 3
    rejection = tracing.unreadable(module, (name,))
    assert rejection is not None and rejection.reason is reason and f"self.{name}" in rejection.detail


def test_a_getattr_of_its_own_makes_a_module_unreadable() -> None:
    rejection = tracing.unreadable(OwnGetattr(), ("scale",))
    assert rejection is not None and "__getattr__" in rejection.detail
    assert tracing.unreadable(Block(), ("scale", "gemm", "bn")) is None
