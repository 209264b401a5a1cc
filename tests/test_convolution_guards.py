"""What a convolution and the norm behind it are asked on a call before they are computed together, spoiled one at a
time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normswap import ops
from normswap.activation import NONE, Activation
from normswap.regions import convolution as conv
from normswap.regions.spec import Region, Step

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


CALLED = [(nn.Conv2d, "forward"), (nn.Conv2d, "_conv_forward"), (nn.BatchNorm2d, "forward"), (nn.ReLU, "forward")]
CALLED.append((nn.Identity, "forward"))


@pytest.mark.parametrize(("cls", "name"), CALLED, ids=lambda v: getattr(v, "__name__", v))
def test_a_forward_of_torch_that_was_replaced(cls: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert conv._calls_what_it_did()
    original = getattr(cls, name)
    with monkeypatch.context() as patch:
        patch.setattr(cls, name, lambda self, *given: original(self, *given))
        assert not conv._calls_what_it_did()
    with monkeypatch.context() as patch:
        patch.setattr(original, "__code__", (lambda self, *given: given).__code__)
        assert not conv._calls_what_it_did()
    assert conv._calls_what_it_did()


def test_when_the_native_op_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(ops, "runs_directly", lambda by_cudnn: asked.append(by_cudnn) or True)
    assert conv.may_run(True) and conv.may_run(False) and asked == [True, False]
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not conv.may_run(True)
    handle.remove()
    with monkeypatch.context() as patch:
        patch.setattr(nn.ReLU, "forward", lambda self, x: x)
        assert not conv.may_run(True)
    monkeypatch.setattr(ops, "runs_directly", lambda by_cudnn: False)
    assert not conv.may_run(True)


def test_settings_that_the_op_takes() -> None:
    pairs = ((1, 2), (0, 1), (1, 1))
    assert conv._geometry(*pairs, 4, "zeros") == (1, 2, 0, 1, 1, 1, 4)
    assert conv._geometry(*pairs, 4, "reflect") == ()
    for wrong in ("same", (1,), [1, 1], (1, 1, 1)):
        assert conv._geometry(pairs[0], wrong, pairs[2], 1, "zeros") == ()


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
        ("matmul", convolution, X, None, RELU, True),
        ("matmul", convolution, X, None, NONE, True),
        ("matmul", convolution, X, None, SILU, False),
        ("matmul", convolution, X, X, RELU, False),
        ("matmul", wide, X, None, RELU, False),
        ("scaled", convolution, X, None, SILU, True),
        ("scaled", narrow, X[:, :4].contiguous(), None, SILU, False),
        ("folded", wide, X, X, SILU, True),
        ("folded", halving, X, X[..., :2, :2], SILU, True),
        ("folded", doubling, X, X.repeat(1, 1, 2, 2), SILU, True),
        ("folded", TRANSPOSED().requires_grad_(False), X, X, SILU, True),
        ("fused", TRANSPOSED().requires_grad_(False), X, None, RELU, False),
        ("matmul", TRANSPOSED().requires_grad_(False), X, None, RELU, False),
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


# --- the short way --------------------------------------------------------------------------------------------------


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
        ({"activation": None, "folding": "matmul"}, True),
        ({"activation": ("silu", 0.0, 0.0), "folding": "matmul"}, False),
        ({"activation": ("relu", 0.0, 0.0), "folding": "matmul"}, True),
    ],
)
def test_regions_that_have_a_short_way(more: Any, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (conv.direct_way(compiled("convolution", "norm", **more)) is not None) == served
    found = conv.direct_way(compiled("convolution", "norm", "residual", **more))
    assert (found is not None) == (served and more.get("folding") != "matmul")
    assert conv.direct_way(compiled("convolution", "norm", callees=lambda: (torch.sigmoid,), **more)) is None
    monkeypatch.setattr(ops.convolution, "FUSED", (torch.float16,))
    found = conv.direct_way(compiled("convolution", "norm", **more))
    assert (found is not None) == (served and more.get("folding", "fused") != "fused")


LATER: dict[str, Callable[[dict[str, Any]], object]] = {
    "no convolution": lambda c: c.pop("conv"),
    "another convolution": lambda c: c.update(conv=nn.Conv1d(8, 8, 1)),
    "another norm": lambda c: c.update(norm=nn.GroupNorm(2, 8)),
    "a subclass of the norm": lambda c: c.update(norm=type("Own", (nn.BatchNorm2d,), {})(8).eval()),
    "norm in training": lambda c: c["norm"].train(),
    "eps below zero": lambda c: changed(c["norm"], eps=-1e-12),
    "convolution hooked": lambda c: hooked(c["conv"]),
    "norm hooked": lambda c: hooked(c["norm"]),
    "its own inner forward": lambda c: changed(c["conv"], _conv_forward=lambda *given: given[0]),
    "activation hooked": lambda c: hooked(c["act"]),
    "another activation": lambda c: c.update(act=nn.SiLU()),
    "what is passed hooked": lambda c: hooked(c["pass"]),
    "what is passed is another": lambda c: c.update({"pass": nn.Dropout(0.0)}),
    "padding by a word": lambda c: changed(c["conv"], padding="same"),
    "weight of another class": lambda c: c["conv"]._parameters.update(weight=c["conv"].weight.as_subclass(Own)),
    "no weight": lambda c: c["conv"]._parameters.update(weight=None),
    "mean of another class": lambda c: c["norm"]._buffers.update(running_mean=torch.ones(8).as_subclass(Own)),
    "weight elsewhere": lambda c: c["conv"]._parameters.pop("weight"),
    "variance elsewhere": lambda c: c["norm"]._buffers.pop("running_var"),
}


class Own(Tensor):
    """What a library may have in a tensor's place."""


def children() -> dict[str, Any]:
    convolution, norm = parts()
    return {"conv": convolution, "norm": norm, "act": nn.ReLU(), "pass": nn.Identity()}


@pytest.mark.parametrize("what", LATER)
def test_the_short_way_is_left_where_something_is_another(what: str) -> None:
    called = [torch.add]
    steps = ("convolution", "norm", "pass", "residual", "activation")
    more = {"activation": "act", "passes": ("pass",), "callees": lambda: tuple(called)}
    way: Any = conv.direct_way(compiled(*steps, **more))
    good = children()
    read: list[Any] = []
    for _ in range(2):
        tensors, numbers, (eps, low, high), behind = way.site(good, (X + 1, X))
        read.append(numbers)
        convolution, norm = good["conv"], good["norm"]
        expected = (convolution.weight, convolution.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias)
        assert all(mine is other for mine, other in zip(tensors, expected, strict=True))
        assert numbers == (1, 1, 0, 0, 1, 1, 1, RELU.code, 0) and (eps, low, high) == (norm.eps, 0.0, 0.0)
        assert torch.equal(behind, X + 1)
    assert read[0] is read[1]  # the settings are looked at once
    assert way.site(good, (None, X)) is None
    assert way.site(good, (X.as_subclass(Own), X)) is None
    assert torch.equal(way.given((X, 0), 5)[0], X) and way.given((X, 0), 5)[1] == 5
    LATER[what](good)
    assert way.site(good, (X, X)) is None
    called[0] = torch.sigmoid
    assert way.site(children(), (X, X)) is None
    assert way(children(), (X, X)) is None  # not on a GPU


def test_activations_of_the_short_way() -> None:
    scaled: Any = conv.direct_way(compiled("convolution", "norm", folding="scaled", activation="act"))
    fused: Any = conv.direct_way(compiled("convolution", "norm", activation="act"))
    for way, act, expected in (
        (fused, nn.ReLU(), RELU),
        (fused, nn.SiLU(), None),
        (scaled, nn.ReLU(), RELU),
        (scaled, nn.SiLU(), SILU),
        (scaled, nn.Hardswish(), Activation("hardswish")),
        (scaled, nn.ReLU6(), Activation("clamp", 0.0, 6.0)),
        (scaled, nn.LeakyReLU(0.3), Activation("leaky_relu", 0.3)),
        (scaled, nn.Softplus(), None),
        (scaled, hooked(nn.SiLU()), None),
        (scaled, hooked(nn.ReLU()), None),
        (scaled, None, None),
    ):
        assert way._activation_of(act) == expected, act
