"""A norm under autocast that only a product reads is rounded at once: where it may be, and that nobody can tell."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from casts_models import FEEDING, Skip, feeds, made
from torch import Tensor, nn

import normswap
from normswap import ops

LOW = torch.bfloat16


def outcome(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    out = model(leaf)
    outputs = out if isinstance(out, tuple) else (out,)
    used = list(model.parameters())
    found = torch.autograd.grad([o.float().sin().sum() for o in outputs], [leaf, *used], allow_unused=True)
    return [*outputs, *(g for g in found if g is not None)]


@pytest.mark.case("autocast", "region")
@pytest.mark.parametrize("name", FEEDING)
def test_what_is_fed_is_found_under_autocast_alone_and_computes_the_same(name: str) -> None:
    model, x = made(name)
    assert not any(feeds(normswap.plan(model)))
    with torch.autocast("cpu", LOW):
        plan = normswap.plan(model)
        assert feeds(plan) == FEEDING[name][2]
        swapped = normswap.apply(copy.deepcopy(model), normswap.Plan.from_json(plan.to_json()))
        for ours, theirs in zip(outcome(swapped, x), outcome(model, x), strict=True):
            assert torch.equal(ours, theirs) and ours.dtype is theirs.dtype
    for ours, theirs in zip(outcome(swapped, x), outcome(model, x), strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture
def dtypes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype | None]:
    """What the norms are asked to give."""
    asked: list[torch.dtype | None] = []
    for name in ("layer_norm", "group_norm"):
        real = getattr(ops, name)

        def op(*given: Any, real: Any = real, **named: Any) -> Any:
            asked.append(named.get("dtype"))
            return real(*given, **named)

        monkeypatch.setattr(ops, name, op)
    return asked


def swapped_block() -> tuple[Any, Tensor]:
    model, x = made("block")
    with torch.autocast("cpu", LOW):
        return normswap.apply(model, normswap.plan(model)), x


def test_it_is_rounded_at_once_only_under_autocast(dtypes: list[torch.dtype | None]) -> None:
    swapped, x = swapped_block()
    swapped(x)
    assert dtypes == [None, None]
    for dtype in (LOW, torch.float16):
        dtypes.clear()
        with torch.autocast("cpu", dtype):
            swapped(x)
        assert dtypes == [dtype, dtype]


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Watched(Tensor):
    """Weights that see the input of a product before autocast does, as torchao's do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def watched(module: Any) -> None:
    module.attn.qkv._parameters["weight"] = module.attn.qkv.weight.detach().as_subclass(Watched)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook on what reads it": lambda m: m.attn.register_forward_pre_hook(lambda module, args: None),
    "a hook on its Linear": lambda m: m.attn.qkv.register_forward_pre_hook(lambda module, args: None),
    "another Linear": lambda m: setattr(m.attn, "qkv", Doubled(8, 24)),
    "a forward of its own": lambda m: setattr(m.attn, "forward", lambda x: x.float()),
    "another child": lambda m: setattr(m, "attn", Skip()),
    "weights of another class": watched,
}


@pytest.mark.case("region-changed-later")
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_later_sees_float32(name: str, dtypes: list[torch.dtype | None]) -> None:
    swapped, x = swapped_block()
    CHANGES[name](swapped)
    with torch.autocast("cpu", LOW):
        swapped(x)
    assert dtypes == [None, LOW]


@pytest.mark.parametrize("name", [name for name, (_, _, found) in FEEDING.items() if any(found)])
def test_it_is_proved(name: str) -> None:
    model, x = made(name)
    with torch.autocast("cpu", LOW):
        report = normswap.report(normswap.optimize(model, x, min_speedup=None, on_mismatch="raise"))
    assert "" in report.swapped and any(feeds(report.plan))


def test_a_fault_in_what_is_rounded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.layer_norm

    def wrong(*given: Any, dtype: torch.dtype | None = None, **named: Any) -> Any:
        out = real(*given, **named)
        return out if dtype is None else (out * 1.01).to(dtype)

    model, x = made("linear")
    monkeypatch.setattr(ops, "layer_norm", wrong)
    with torch.autocast("cpu", LOW), pytest.warns(UserWarning):
        report = normswap.report(normswap.optimize(model, x, min_speedup=None))
    assert "" not in report.swapped


@pytest.mark.case("autocast")
def test_rms_norm_gives_float32_where_autocast_makes_pytorchs_do_so(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["normswap.ops.rms_norm"]
    monkeypatch.setattr(module, "_is_widened", lambda input: input.dtype is LOW)
    x, weight = torch.randn(3, 8).to(LOW), torch.randn(8)
    out = ops.rms_norm(x, (8,), weight, 1e-6)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, nn.functional.rms_norm(x.float(), (8,), weight, 1e-6))
