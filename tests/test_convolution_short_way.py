"""A Conv2d and a BatchNorm2d by one native op, which PyTorch stands for on a CPU: where all is as it mostly is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from convolution_cases import CASES, PROVED
from convolution_models import (
    Block,
    bn,
    conv,
    drawn,
    residual,
    swapped_with,
    undecided,
    written,
)
from convolution_stand_in import stand_in  # noqa: F401
from torch import Tensor, nn

from normswap.ops import dispatch
from normswap.regions.convolution import direct_way
from normswap.regions.install import compiled_of


def directly(model: Any, x: Tensor, folding: str = "fused") -> Any:
    """What the short way gives for the one region of a model, None where it declines, in the same function for all."""
    (swap,) = (one for one in undecided(model, folding).swaps if not one.site.name)
    (compiled,) = compiled_of(type(model), swap.match.attributes)
    way = direct_way(compiled)
    assert way is not None
    return lambda changed: way(changed._modules, (x, x) if compiled.region.has("residual") else x)


SHORT = ("plain", "no_bias", "strided", "groups", "channels_last", "in_place", "residual", "sequential", "in_a_method")


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.usefixtures("stand_in")
def test_the_short_way_is_the_same_function(name: str) -> None:
    case = CASES[name]
    model, x = drawn(case.make), torch.randn(case.shape)
    with torch.no_grad():
        torch.testing.assert_close(directly(model, x)(model), model(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("folding", ("fused", "matmul", "scaled"))
@pytest.mark.parametrize("name", [name for name in PROVED if CASES[name].dtype is torch.float32])
@pytest.mark.usefixtures("stand_in")
def test_no_region_gets_a_relu_that_it_has_not(name: str, folding: str) -> None:
    """Whatever its plan says."""
    case = CASES[name]
    model, x = drawn(case.make), torch.randn(case.shape)
    fast = swapped_with(model, folding)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-4)


LATER = [name for name, case in CASES.items() if case.later and case.dtype is torch.float32]


@pytest.mark.parametrize("name", LATER)
@pytest.mark.usefixtures("stand_in")
def test_the_short_way_sees_what_has_changed(name: str) -> None:
    case = CASES[name]
    model, x = drawn(case.make), torch.randn(case.shape)
    way = directly(model, x)
    case.later(model)  # type: ignore[misc]
    served = bool(case.folds) and type(model.conv) is nn.Conv2d
    with torch.no_grad():
        ours = way(model)
        if served:
            torch.testing.assert_close(ours, model(x), rtol=1e-5, atol=1e-4)
    assert (ours is not None) == served or name == "later_own_method"


class Tagged(Tensor):
    """What a library may have in a tensor's place."""


@pytest.mark.usefixtures("stand_in")
def test_the_short_way_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = drawn(lambda: Block(conv(), bn())), torch.randn(2, 6, 9, 8)
    with torch.no_grad():
        assert directly(block, x)(block) is not None
        assert directly(block, x.as_subclass(Tagged))(block) is None
        for where, name, value in ((Tensor, "is_cuda", False), (dispatch, "_direct", {})):
            with monkeypatch.context() as patch:
                patch.setattr(where, name, value)
                assert directly(block, x)(block) is None, name
    model = drawn(lambda: written(residual)(conv(), bn()))
    way = directly(model, x)
    assert way(model) is None  # gradients
    with torch.no_grad():
        assert way(model) is not None
        for odd in (x[:, :5], x[0], x[:0], x.double(), x[:, :, :1]):
            assert directly(model, odd)(model) is None or odd.shape[2] == 1
        for setting in (torch.use_deterministic_algorithms, _set_cudnn_deterministic):
            setting(True)
            assert way(model) is None
            setting(False)
        with torch.enable_grad():
            assert way(model) is None
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        assert way(model) is None
        handle.remove()
        assert way(model) is not None


@pytest.mark.usefixtures("stand_in")
def test_under_autocast_no_region_goes_the_short_way() -> None:
    model, x = drawn(lambda: Block(conv(), bn())), torch.randn(2, 6, 9, 8)
    way = directly(model, x)
    with torch.no_grad():
        assert way(model) is not None
        with torch.autocast("cpu", torch.bfloat16):
            assert way(model) is None


@pytest.mark.parametrize("activation", (nn.ReLU, nn.SiLU, nn.Hardswish, nn.Tanh))
@pytest.mark.usefixtures("stand_in")
def test_our_kernel_ends_in_what_a_child_is_now(activation: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the short way where nobody has changed it."""
    model, x = drawn(lambda: Block(conv(8), nn.BatchNorm2d(8), activation())), torch.randn(2, 6, 9, 8)
    fast = swapped_with(model, "scaled")
    short = direct_way(compiled_of(Block, undecided(model, "scaled").swaps[0].match.attributes)[0])
    assert short is not None
    with torch.no_grad():
        assert short(fast._modules, x) is not None
        torch.testing.assert_close(fast(x), model(x))
        for one in (model, fast):
            one.act = nn.SiLU()
        torch.testing.assert_close(fast(x), model(x))
        assert short(fast._modules, x) is not None
        fast.act.register_forward_hook(lambda *_: None)
        assert short(fast._modules, x) is None
        fast.act = model.act
        monkeypatch.setattr(nn.SiLU, "forward", lambda self, x: x)
        assert short(fast._modules, x) is None


def _set_cudnn_deterministic(to: bool) -> None:
    torch.backends.cudnn.deterministic = to
