"""What a convolution and the norm behind it are asked on a call before they are computed together, spoiled one at a
time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from norm_act_models import NormAct
from torch import Tensor, nn

from normswap import ops
from normswap.activation import NONE, Activation
from normswap.regions import convolution as conv
from normswap.regions.spec import Region, Step, qualified

RELU, SILU = Activation("relu"), Activation("silu")
HERE = (1, 0, 1, 1)
X = torch.randn(2, 8, 5, 5)


def hooked(child: nn.Module) -> Any:
    child.register_forward_hook(lambda *_: None)
    return child


def changed(child: nn.Module, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(child, name, value)
    return child


def parts(**options: Any) -> tuple[Any, Any]:
    return nn.Conv2d(8, 8, 1, **options).requires_grad_(False), nn.BatchNorm2d(8).eval().requires_grad_(False)


class Doubled(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


TRANSPOSED: Any = lambda: nn.ConvTranspose2d(8, 8, 1)  # noqa: E731

SPOILED: dict[str, Callable[[Any], Any]] = {
    "hooked": hooked,
    "its own forward": lambda child: changed(child, forward=lambda x: x),
    "its own inner forward": lambda child: changed(child, _conv_forward=lambda *given: given[0]),
    "pads by its mode": lambda child: changed(child, padding_mode="reflect"),
    "pads by a word": lambda child: changed(child, padding="same"),
    "a number for a pair": lambda child: changed(child, stride=1),
    "another class": lambda child: Doubled(8, 8, 1),
    "an output padding for none": lambda child: changed(child, output_padding=0),
    "transposed, with its own inner method": lambda child: changed(TRANSPOSED(), _output_padding=lambda *given: [0, 0]),
    "transposed, with a number for a pair": lambda child: changed(TRANSPOSED(), output_padding=1),
    "transposed, hooked": lambda child: hooked(TRANSPOSED()),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_convolution_that_is_another_by_now(what: str) -> None:
    assert all(map(conv._is_as_read, (parts()[0], nn.Conv1d(2, 2, 1), TRANSPOSED())))
    assert not conv._is_as_read(SPOILED[what](parts()[0])) and not conv._is_as_read(None)


def test_an_inner_forward_of_torch_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", lambda self, *given: given[0])
    assert not conv._is_as_read(parts()[0]) and conv._is_as_read(TRANSPOSED())
    monkeypatch.setattr(nn.ConvTranspose2d, "_output_padding", lambda self, *given: [0, 0])
    assert not conv._is_as_read(TRANSPOSED())


def test_who_learns() -> None:
    convolution, norm = parts()
    assert not conv._learns(X, convolution, norm, None) and not conv._learns(X, convolution, norm, X)
    leaf = X.clone().requires_grad_()
    assert conv._learns(leaf, convolution, norm, None) and conv._learns(X, convolution, norm, leaf)
    for part in (convolution, norm):
        for parameter in part.parameters():
            parameter.requires_grad_(True)
            assert conv._learns(X, convolution, norm, None)
            with torch.no_grad():
                assert not conv._learns(X, convolution, norm, None)
            parameter.requires_grad_(False)
    bare = nn.Conv2d(8, 8, 1, bias=False).requires_grad_(False)
    assert not conv._learns(X, bare, nn.BatchNorm2d(8, affine=False), None)


def test_what_pytorch_takes_together() -> None:
    wide, half = torch.float32, torch.float16
    assert conv._fit(*parts(), wide) and conv._fit(parts()[0].half(), parts()[1], half)
    assert conv._fit(parts()[0].half(), parts()[1].half(), half)
    assert conv._fit(parts()[0], parts()[1].half(), half)  # by autocast
    assert not conv._fit(parts()[0], parts()[1].half(), wide)
    assert not conv._fit(parts()[0].half(), parts()[1].bfloat16(), half)
    for name in ("running_var", "weight", "bias"):
        convolution, norm = parts()
        tensor = getattr(norm, name).half()
        setattr(norm, name, tensor if name == "running_var" else nn.Parameter(tensor))
        assert not conv._fit(convolution, norm, half), name
    for name in ("running_mean", "running_var", "weight", "bias"):
        convolution, norm = parts()
        tensor = getattr(norm, name)[:1].detach()
        setattr(norm, name, tensor if name.startswith("running") else nn.Parameter(tensor))
        assert not conv._fit(convolution, norm, wide), name
    convolution, norm = parts()
    convolution.bias = nn.Parameter(convolution.bias.half())
    assert not conv._fit(convolution, norm, wide)
    assert conv._fit(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8, affine=False), wide)
    double = torch.float64
    assert conv._fit(parts()[0].double(), parts()[1].double(), double)
    assert not conv._fit(parts()[0].double(), parts()[1], double)


@pytest.mark.parametrize("make", (lambda: parts()[0], TRANSPOSED))
def test_weights_and_biases_that_a_fold_would_spread(make: Any) -> None:
    """PyTorch refuses them, or gives other channels."""
    for name, spread in (("bias", (1,)), ("bias", (1, 8)), ("weight", (1, 8, 1, 1)), ("weight", (8, 1, 1, 1))):
        convolution = make()
        assert conv._fit(convolution, parts()[1], torch.float32)
        setattr(convolution, name, nn.Parameter(torch.ones(spread)))
        of_outputs = spread[1:2] == (1,) if type(convolution) is nn.ConvTranspose2d else spread[:1] == (1,)
        assert conv._fit(convolution, parts()[1], torch.float32) is not (name == "bias" or of_outputs), (name, spread)


def convolved(folding: str = "folded", read: Any = lambda norm, form: ()) -> conv.Convolved:
    return conv.Convolved(Region("batch_norm", "norm", (), convolution="conv", folding=folding), read)


def test_what_is_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    convolution, norm = parts()
    folds = convolved()._folds
    assert folds(convolution, norm, X, None, NONE) and folds(convolution, norm, X, X, RELU)
    for x in (X.double(), X.to("meta"), X[0], X[:, :4], torch.randn(8, 8, 5)):
        assert not folds(convolution, norm, x, None, NONE)
    assert not folds(convolution, norm.half(), X, None, NONE)
    convolution, norm = parts()
    for behind in (X.double(), X.to("meta"), X[:1], X[..., :1]):
        assert not folds(convolution, norm, X, behind, NONE)
    with torch.autocast("cpu", torch.bfloat16):
        assert folds(convolution, norm, X, None, NONE) and folds(convolution, norm, X, X.bfloat16(), NONE)
        assert not folds(convolution, norm, X, X, NONE)
        for x in (X.double(), X.int()):
            assert not folds(convolution, norm, x, None, NONE)
        assert not folds(parts()[0].double(), norm, X, None, NONE)
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.float32)
        assert not folds(convolution, norm, X, None, NONE)
    serves = convolved().serves
    assert serves({"conv": convolution}, X) and not serves({"conv": convolution}, X.double())
    monkeypatch.setattr(ops, "folding_serves", lambda *given: False)
    assert not folds(convolution, norm, X, None, NONE) and not serves({"conv": convolution}, X)


def test_ways_that_take_some_activations_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "folding_serves", lambda *given: True)
    convolution, norm = parts()
    wide = nn.Conv2d(8, 8, 3, padding=1).requires_grad_(False)
    narrow = nn.Conv2d(4, 8, 1).requires_grad_(False)
    halving, doubling = (cls(8, 8, 2, 2).requires_grad_(False) for cls in (nn.Conv2d, nn.ConvTranspose2d))
    for way, child, x, behind, activation, folds in (
        ("fused", convolution, X, None, RELU, True),
        ("fused", convolution, X, None, SILU, False),
        ("fused", convolution, X, None, NONE, False),
        ("fused", convolution, X, X, RELU, True),
        ("another", convolution, X, None, RELU, False),
        ("scaled", convolution, X, None, SILU, True),
        ("scaled", narrow, X[:, :4].contiguous(), None, SILU, False),
        ("folded", wide, X, X, SILU, True),
        ("folded", halving, X, X[..., :2, :2], SILU, True),
        ("folded", doubling, X, X.repeat(1, 1, 2, 2), SILU, True),
        ("folded", TRANSPOSED().requires_grad_(False), X, X, SILU, True),
        ("fused", TRANSPOSED().requires_grad_(False), X, None, RELU, False),
        ("scaled", TRANSPOSED().requires_grad_(False), X, None, RELU, False),
    ):
        assert convolved(way)._folds(child, norm, x, behind, activation) == folds, (way, activation)


def test_what_becomes_of_a_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    convolution, norm = parts()
    one = convolved()
    x, out = one({"conv": convolution}, norm, X, None, RELU)
    assert x is X
    torch.testing.assert_close(out, norm(convolution(X)).relu())
    nothing = (None, None)
    assert one({"conv": hooked(parts()[0])}, norm, X, None, RELU) == nothing
    assert one({}, norm, X, None, RELU) == nothing
    assert one({"conv": convolution}, nn.BatchNorm2d(8), X, None, RELU) == nothing
    assert one({"conv": convolution}, norm, X.clone().requires_grad_(), None, RELU) == nothing
    seen: list[Any] = []
    refusing = convolved(read=lambda norm, form: seen.append((form.dim(), form.shape)))
    assert refusing({"conv": convolution}, norm, X, None, RELU) == nothing and seen == [(4, (0, 8))]
    monkeypatch.setattr(one, "_folds", lambda *given: False)
    x, out = one({"conv": convolution}, norm, X, None, RELU)
    assert out is None and torch.equal(x, convolution(X))


@pytest.fixture(autouse=True)
def cudnn_fuses_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is no cuDNN."""
    monkeypatch.setattr(ops.convolution, "FUSED", (torch.float16, torch.bfloat16))


# --- in one step of C++ ---------------------------------------------------------------------------------------------


def compiled(*does: str, callees: Any = tuple, **more: Any) -> Any:
    steps = tuple(Step(name, HERE, operand=1 if name == "residual" else 0) for name in does)
    given = {"type": conv._BATCH_NORM_2D, "convolution": "conv", "folding": "fused", "activation": ("relu", 0.0, 0.0)}
    return SimpleNamespace(region=Region("batch_norm", "norm", steps, **{**given, **more}), callees=callees)


@pytest.mark.parametrize(
    ("more", "served"),
    [
        ({}, True),
        ({"folding": "folded"}, False),
        ({"type": "torch.nn.modules.batchnorm.BatchNorm3d"}, False),
        ({"activation": "act"}, True),
        ({"activation": ("silu", 0.0, 0.0)}, False),
        ({"activation": ("silu", 0.0, 0.0), "folding": "scaled"}, True),
        ({"activation": None}, False),
    ],
)
def test_regions_that_are_called_in_one_step(more: Any, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*does: str, **others: Any) -> Any:
        return conv.at_once_of_convolution(compiled("convolution", "norm", *does, **more, **others)).norm

    fuses = served and more.get("folding") != "scaled"
    for place, found in ((-1, step()), (1, step("residual"))):
        assert (found is not None) == served
        assert not served or (found.fuses == fuses and found.place == place)
    assert step(callees=lambda: (torch.sigmoid,)) is None
    monkeypatch.setattr(ops.convolution, "FUSED", (torch.float16,))
    assert (step() is not None) == (served and not fuses)


def test_a_norm_that_stands_for_another_forward() -> None:
    plain = conv.at_once_of_convolution(compiled("convolution", "norm")).norm
    more = {"type": qualified(NormAct), "attributes": {"behind": "drop act"}}
    ending = conv.at_once_of_convolution(compiled("convolution", "norm", **more)).norm
    for step, norm, other in ((plain, nn.BatchNorm2d(8), NormAct()), (ending, NormAct(), nn.BatchNorm2d(8))):
        assert step.stands(norm)[0] is type(norm) and step.stands(other) is None


def test_what_lies_in_a_format() -> None:
    image, volume, line = torch.randn(2, 4, 5, 6), torch.randn(2, 3, 4, 5, 6), torch.randn(2, 4, 5)
    for x in (image, volume, line, image.to(memory_format=torch.channels_last)):
        assert conv.lies_in_a_format(x)
    assert conv.lies_in_a_format(volume.to(memory_format=torch.channels_last_3d))
    for x in (image.transpose(2, 3), volume.transpose(1, 2), line.transpose(1, 2)):
        assert not conv.lies_in_a_format(x)
