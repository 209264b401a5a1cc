"""The importable modules and copy_weights: weights carried over, independent storage, same results."""

from __future__ import annotations

import pytest
import torch
from models import L1, Projection, randomised
from torch import nn

import normswap
from normswap import modules, ops

PAIRS = (
    (nn.LayerNorm(12), modules.LayerNorm, (4, 12)),
    (nn.GroupNorm(2, 6), modules.GroupNorm, (4, 6, 5)),
    (nn.RMSNorm(12, eps=1e-6), modules.RMSNorm, (4, 12)),
)


@pytest.mark.parametrize(("plain", "cls", "shape"), PAIRS, ids=lambda v: getattr(v, "__name__", ""))
def test_from_torch(plain: nn.Module, cls: type, shape: tuple[int, ...]) -> None:
    plain = randomised(plain)
    ours = cls.from_torch(plain)
    x = torch.randn(shape)
    assert type(ours) is cls and torch.equal(ours(x), plain(x))
    ours.weight.data.zero_()
    assert plain.weight.abs().sum() > 0
    with pytest.raises(TypeError, match="must be exactly"):
        cls.from_torch(nn.Linear(2, 2))


@pytest.mark.parametrize(("plain", "cls", "shape"), PAIRS, ids=lambda v: getattr(v, "__name__", ""))
def test_our_op_computes_it(
    plain: nn.Module, cls: type, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = cls.from_torch(plain)
    for name in ("layer_norm", "group_norm", "rms_norm"):
        monkeypatch.setattr(ops, name, lambda *given, name=name: name)
    assert ours(torch.randn(shape)).replace("_", "") == cls.__name__.lower()
    monkeypatch.setattr(type(plain), "forward", lambda self, x: "another")
    assert ours(torch.randn(shape)) == "another"


def test_l1_from_torch() -> None:
    x = torch.randn(4, 9)
    assert torch.equal(modules.L1Norm.from_torch(L1())(x), L1()(x))
    of_dim = nn.Module()
    of_dim.dim = 2  # type: ignore[assignment]
    for given, dims in ((None, [2, 1]), (3, [3, 3])):
        assert [modules.L1Norm.from_torch(one, given).dim for one in (of_dim, nn.Module())] == dims
    with pytest.raises(ValueError, match="no state"):
        modules.L1Norm.from_torch(nn.Linear(2, 2))


@pytest.mark.parametrize("shape", ((), (1,), (5,), (1, 5)))
def test_linear_scale_batch_norm_from_torch_and_state_dict(shape: tuple[int, ...]) -> None:
    old = randomised(Projection(7, 5))
    old.scale = nn.Parameter(torch.randn(shape))
    ours = modules.LinearScaleBatchNorm.from_torch(old.gemm, old.scale, old.bn)
    fresh = modules.LinearScaleBatchNorm(7, 5, shape)
    fresh.load_state_dict(old.state_dict())
    for training in (True, False):
        x = torch.randn(9, 7)
        for new in (ours, fresh):
            old.load_state_dict(new.state_dict())
            torch.testing.assert_close(new.train(training)(x), old.train(training)(x))
    assert ours.scale.requires_grad and modules.LinearScaleBatchNorm(7, 5).scale.shape == (5,)
    frozen = modules.LinearScaleBatchNorm.from_torch(old.gemm, old.scale.requires_grad_(False), old.bn)
    assert not frozen.scale.requires_grad and frozen.gemm.weight.requires_grad
    with pytest.raises(ValueError, match="scale_shape"):
        modules.LinearScaleBatchNorm(7, 5, (3,))
    for linear, norm in ((ours, old.bn), (old.gemm, nn.BatchNorm2d(5))):
        with pytest.raises(TypeError, match="exactly a torch.nn.Linear"):
            modules.LinearScaleBatchNorm.from_torch(linear, old.scale, norm)  # type: ignore[arg-type]


def test_in_eval_by_its_batch_no_batch_is_counted() -> None:
    model, x = randomised(modules.LinearScaleBatchNorm(7, 5)).eval(), torch.randn(9, 7)
    model.bn.running_mean = model.bn.running_var = None
    before = model.bn.num_batches_tracked.clone()
    torch.testing.assert_close(model(x), model.bn(model.gemm(x) * model.scale))
    assert torch.equal(model.bn.num_batches_tracked, before)


def test_copy_weights_has_its_own_storage_and_checks_first() -> None:
    src, dst = randomised(Projection(7, 5)), randomised(Projection(7, 5))
    normswap.copy_weights(src, dst)
    for a, b in zip(src.state_dict().values(), dst.state_dict().values(), strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()
    before = [p.clone() for p in dst.parameters()]
    with pytest.raises(ValueError, match="scale"):
        normswap.copy_weights(nn.Linear(7, 5), dst)
    with pytest.raises(ValueError, match=r"gemm.weight is \(5, 8\) in src"):
        normswap.copy_weights(Projection(8, 5), dst)
    assert all(torch.equal(a, b) for a, b in zip(before, dst.parameters(), strict=True))
    for given in ((src, dst.state_dict()), (src.state_dict(), dst)):
        with pytest.raises(TypeError, match="must be modules"):
            normswap.copy_weights(*given)  # type: ignore[arg-type]


def test_copy_weights_leaves_state_that_is_no_tensor() -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> str:
            return "counted"

    src, dst = Counting(3, 3), Counting(3, 3)
    normswap.copy_weights(src, dst)
    assert torch.equal(src.weight, dst.weight)


@pytest.mark.case("later-hooks", "attributes-changed-later")
def test_hooked_or_replaced_children_go_to_the_original_code() -> None:
    model = randomised(Projection(7, 5)).eval()
    swapped = normswap.optimize(model, torch.randn(9, 7))
    seen = []
    swapped.bn.register_forward_hook(lambda *args: seen.append("bn"))
    swapped.gemm.register_forward_hook(lambda *args: seen.append("gemm"))
    x = torch.randn(9, 7)
    assert torch.equal(swapped(x), model(x)) and seen == ["gemm", "bn"]
    swapped.bn = nn.BatchNorm1d(5, affine=False).eval()
    assert torch.equal(swapped(x), swapped.bn(swapped.gemm(x) * swapped.scale))
