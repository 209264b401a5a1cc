"""Each thing that the helper of a region asks on a call before its op may run, spoiled one at a time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normswap import ops
from normswap.activation import NONE, Activation
from normswap.installed import marks
from normswap.kinds import batch_norm, group_norm, instance_norm, layer_norm, rms_norm
from normswap.kinds.norm import are_of, are_per_sample, is_alike
from normswap.plans import Match
from normswap.regions import activations, children, helper
from normswap.regions.rewrite import of_summands
from normswap.regions.spec import Region

CHANNELS = 4
X = torch.randn(2, 3, CHANNELS, generator=torch.Generator().manual_seed(1))
IMAGE = torch.randn(2, CHANNELS, 3, 5, generator=torch.Generator().manual_seed(2))
ROW = (torch.randn(CHANNELS), torch.randn(CHANNELS))


class Tagged(Tensor):
    """What a library may have in a tensor's place."""


def others(like: Tensor) -> dict[str, Any]:
    """What is not a tensor like ``like``, each in one respect."""
    return {
        "a number": 2.0,
        "a subclass": like.as_subclass(Tagged),
        "wider": like.double(),
        "elsewhere": like.to("meta"),
        "shorter": like[:1],
        "another rank": like[None],
        "turned": like.transpose(-1, -2),
    }


OTHERS = sorted(others(X))


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_added_must_be_like_the_input(what: str) -> None:
    other = others(X)[what]
    assert not is_alike(X, other)
    assert helper._is_beside(X, other) == (what in ("wider", "shorter", "another rank", "turned"))
    assert are_of(X.dtype, X, other) == (what not in ("a number", "a subclass", "wider"))
    assert are_of(X.dtype, other, X) == are_of(X.dtype, X, other)


def test_what_is_like_the_input() -> None:
    for other in (X + 1, nn.Parameter(X)):
        assert is_alike(X, other) and helper._is_beside(X, other) and are_of(X.dtype, other, X)
    assert is_alike(X, None) and not helper._is_beside(X, None)


def test_a_sum_in_another_shape() -> None:
    one, other = of_summands(((X, nn.Parameter(X + 1)), (-1, CHANNELS)))
    assert one.shape == other.shape == (6, CHANNELS) and one.data_ptr() == X.data_ptr()
    for sizes in (((-1, CHANNELS),), ([-1, CHANNELS],), (torch.Size((6, CHANNELS)),)):
        assert of_summands(((X, X + 1), sizes))[0].shape == (6, CHANNELS)
    for what, wrong in (others(X) | {"alike, but turned": X.transpose(1, 2).contiguous().transpose(1, 2)}).items():
        if what not in ("wider", "elsewhere"):  # which the op is asked
            assert of_summands(((X, wrong), (-1, CHANNELS))) is of_summands(((wrong, X), (-1, CHANNELS))) is None, what
    for sizes in ((torch.int32,), (-1, 4.0), (-1, torch.tensor(4)), ((-1, True),)):
        assert of_summands(((X, X), sizes)) is None, sizes


SAMPLES = torch.randn(2, 1, CHANNELS)


@pytest.mark.parametrize(
    "what", sorted({*OTHERS, "of more rows", "of more samples", "narrower"} - {"shorter", "turned"})
)
def test_a_scale_must_be_one_value_a_sample_and_feature(what: str) -> None:
    more = {"of more rows": X, "of more samples": torch.randn(3, 1, CHANNELS), "narrower": SAMPLES[..., :1]}
    wrong = {**others(SAMPLES), **more}[what]
    for good in (SAMPLES, SAMPLES[:1]):
        assert are_per_sample(X, good, SAMPLES)
        assert not are_per_sample(X, wrong, good) and not are_per_sample(X, good, wrong)


@pytest.mark.parametrize("what", ["autocast is off", "not on a GPU", "nothing", *OTHERS, "int", "of an integer"])
def test_a_residual_that_is_added_in_float32(what: str) -> None:
    half = torch.zeros(2, 3, CHANNELS, dtype=torch.float16)
    on_gpu = SimpleNamespace(device=X.device, shape=X.shape, dtype=torch.float16, is_cuda=what != "not on a GPU")
    on_gpu.dtype = torch.int32 if what == "of an integer" else torch.float16
    given = {**others(half), "wider": half.double(), "nothing": None, "int": half.int()}.get(what, half)
    with torch.autocast("cpu", enabled=what != "autocast is off"):
        assert not group_norm.adds_to_float32(on_gpu, given)
        on_gpu.dtype, on_gpu.is_cuda = torch.float16, True
        if what != "autocast is off":
            assert group_norm.adds_to_float32(on_gpu, half) and group_norm.adds_to_float32(on_gpu, half.bfloat16())


# --- children -------------------------------------------------------------------------------------------------------


def hooked(child: nn.Module) -> nn.Module:
    child.register_forward_hook(lambda *_: None)
    return child


def changed(child: nn.Module, **attributes: Any) -> nn.Module:
    vars(child).update(attributes)
    return child


def derived(child: nn.Module) -> nn.Module:
    child.__class__ = type("Derived", (type(child),), {})
    return child


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def test_what_hands_on_its_input() -> None:
    for cls in DROPOUTS:
        assert children.hands_on(cls(0.5).eval()) and children.hands_on(cls(0.0).train())
        assert not children.hands_on(cls(0.5).train())
    assert children.hands_on(nn.Identity()) and not children.hands_on(None)
    wrong = (nn.ReLU(), nn.AlphaDropout(0.0).eval())
    spoiled = [spoil(cls()) for spoil in (hooked, derived) for cls in (*DROPOUTS, nn.Identity)]
    for child in (*wrong, *spoiled):
        assert not children.hands_on(child.eval()), child


ACTS = {
    "relu": (nn.ReLU(), Activation("relu")),
    "silu": (nn.SiLU(), Activation("silu")),
    "gelu": (nn.GELU(), Activation("gelu")),
    "gelu_tanh": (nn.GELU("tanh"), Activation("gelu_tanh")),
    "leaky": (nn.LeakyReLU(0.2), Activation("leaky_relu", 0.2)),
    "leaky, an int": (nn.LeakyReLU(2), Activation("leaky_relu", 2)),
    "relu6": (nn.ReLU6(), Activation("clamp", 0.0, 6.0)),
    "hardtanh": (nn.Hardtanh(-1, 2.5), Activation("clamp", -1, 2.5)),
    "one value": (changed(nn.Hardtanh(), min_val=1.0), Activation("clamp", 1.0, 1.0)),
    "hardswish": (nn.Hardswish(), Activation("hardswish")),
    "sigmoid": (nn.Sigmoid(), Activation("sigmoid")),
    "tanh": (nn.Tanh(), Activation("tanh")),
    "none": (nn.Identity(), NONE),
}


@pytest.mark.parametrize("name", ACTS)
def test_a_plain_activation_is_read(name: str) -> None:
    child, expected = ACTS[name]
    assert activations.activation_of(child) == expected
    assert torch.equal(expected(X), child(X))


WRONG_ACTS = {
    "nothing": lambda: None,
    "another": nn.ELU,
    "hooked": lambda: hooked(nn.ReLU()),
    "derived": lambda: derived(nn.SiLU()),
    "its own forward": lambda: changed(nn.Tanh(), forward=torch.tanh),
    "an approximation we do not know": lambda: changed(nn.GELU(), approximate="erf"),
    "a slope that is a tensor": lambda: nn.LeakyReLU(torch.tensor(0.2)),
    "a bound that is a tensor": lambda: changed(nn.Hardtanh(), max_val=torch.tensor(1.0)),
    "bounds the wrong way round": lambda: changed(nn.Hardtanh(), min_val=2.0),
}


@pytest.mark.parametrize("name", WRONG_ACTS)
def test_an_activation_that_is_not_plain_is_not_read(name: str) -> None:
    assert activations.activation_of(WRONG_ACTS[name]()) is None


# --- the norm that is a child ---------------------------------------------------------------------------------------


def reader(kind: str, cls: type[nn.Module], **more: Any) -> Any:
    """What reads the norm of a region that was found with a ``cls`` in it."""
    region = Region(kind, "norm", (), f"{cls.__module__}.{cls.__qualname__}", more)
    return helper._reader(region)


NORMS: dict[str, tuple[str, nn.Module, Tensor]] = {
    "layer_norm": ("layer_norm", nn.LayerNorm(CHANNELS, eps=1e-3), X),
    "rms_norm": ("rms_norm", nn.RMSNorm(CHANNELS, eps=1e-3), X),
    "group_norm": ("group_norm", nn.GroupNorm(2, CHANNELS, eps=1e-3), IMAGE),
    "instance_norm": ("instance_norm", nn.InstanceNorm2d(CHANNELS, affine=True), IMAGE),
    "batch_norm": ("batch_norm", nn.BatchNorm2d(CHANNELS), IMAGE),
}


@pytest.mark.parametrize("name", NORMS)
def test_the_norm_is_read_anew_and_by_its_class(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, norm, x = NORMS[name]
    cls = type(norm)
    read = reader(kind, cls)
    first = read(norm, x)
    if kind == "batch_norm":
        assert first == (norm,)
    else:
        assert first[-1] == norm.eps and any(value is norm.weight for value in first)
    assert read(nn.Identity(), x) is None and read(type("Derived", (cls,), {})(*_made_with(norm)), x) is None
    swapped = type("Swapped", (cls,), marks(cls, Match(kind)))(*_made_with(norm))
    assert read(swapped, x) is not None
    with monkeypatch.context() as patch:
        patch.setattr(cls, "forward", lambda self, x: x, raising=False)
        assert read(norm, x) is None
    assert read(norm, x) is not None


def _made_with(norm: Any) -> tuple[Any, ...]:
    return (2, CHANNELS) if isinstance(norm, nn.GroupNorm) else (CHANNELS,)


def test_a_flag_that_turns_the_norm_off() -> None:
    norm = changed(nn.LayerNorm(CHANNELS), off=False)
    read = reader("layer_norm", nn.LayerNorm, unless="off")
    assert read(norm, X) is not None
    assert read(changed(norm, off=True), X) is None


def test_a_class_of_another_kind_is_not_read() -> None:
    assert reader("group_norm", nn.LayerNorm)(nn.LayerNorm(CHANNELS), X) is None


@pytest.mark.parametrize(
    ("norm", "x"),
    [
        (nn.InstanceNorm2d(CHANNELS), IMAGE[0]),
        (nn.InstanceNorm1d(CHANNELS), IMAGE),
        (nn.InstanceNorm2d(CHANNELS + 1), IMAGE),
        (nn.InstanceNorm2d(CHANNELS, track_running_stats=True), IMAGE),
        (changed(nn.InstanceNorm2d(CHANNELS, track_running_stats=True), track_running_stats=False), IMAGE),
        (nn.BatchNorm2d(CHANNELS + 1), IMAGE),
        (nn.BatchNorm1d(CHANNELS), IMAGE),
        (nn.BatchNorm2d(CHANNELS), IMAGE[0]),
    ],
    ids=["no batch", "another rank", "channels", "tracks", "tracked", "bn channels", "bn rank", "bn no batch"],
)
def test_an_input_or_a_mode_that_the_op_does_not_take(norm: Any, x: Tensor) -> None:
    kind = "batch_norm" if isinstance(norm, nn.modules.batchnorm._BatchNorm) else "instance_norm"
    assert reader(kind, type(norm))(norm, x) is None
    good = type(norm)(CHANNELS).eval()
    rank = {nn.InstanceNorm1d: 3, nn.BatchNorm1d: 3}.get(type(good), 4)
    assert reader(kind, type(norm))(good, torch.randn(2, CHANNELS, *(3, 5)[: rank - 2])) is not None


# --- the ops --------------------------------------------------------------------------------------------------------


def call(op: Callable[..., Any], x: Tensor, given: Any, **more: Any) -> Any:
    names = ("before", "behind", "scale", "shift", "activation", "dtype")
    return op(x, given, *({"activation": NONE, **more}.get(name) for name in names))


@pytest.mark.parametrize("activation", [NONE, Activation("relu")])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_rows_are_as_their_formula(added: bool, scaled: bool, activation: Activation) -> None:
    more: dict[str, Any] = {"before": X.flip(0)} if added else {}
    more |= {"scale": SAMPLES, "shift": SAMPLES.flip(0)} if scaled else {}
    total = X + X.flip(0) if added else X
    for op, given, normed in (
        (layer_norm.fused, ((CHANNELS,), *ROW, 1e-3), F.layer_norm(total, (CHANNELS,), *ROW, 1e-3)),
        (rms_norm.fused, ((CHANNELS,), ROW[0], 1e-3), F.rms_norm(total, (CHANNELS,), ROW[0], 1e-3)),
        (rms_norm.fused, ((CHANNELS,), ROW[0], 1e-3, 1.0, True), F.rms_norm(total, (CHANNELS,), ROW[0] + 1, 1e-3)),
    ):
        expected = activation(normed * (1 + SAMPLES) + SAMPLES.flip(0) if scaled else normed)
        found = call(op, X, given, activation=activation, **more)
        out = found[0] if added else found
        torch.testing.assert_close(out, expected)
        if added:
            assert torch.equal(found[1], total)


@pytest.mark.parametrize("op", [layer_norm.fused, rms_norm.fused])
def test_rows_whose_scale_does_not_fit_are_left_alone(op: Callable[..., Any]) -> None:
    given = ((CHANNELS,), *ROW[: 2 if op is layer_norm.fused else 1], 1e-3)
    assert call(op, X, given, scale=X, shift=SAMPLES) is None
    assert call(op, X, given, scale=SAMPLES, shift=X) is None


@pytest.mark.parametrize("dtype", (torch.float64, torch.float16))
def test_weights_that_pytorch_refuses_are_left_to_it(dtype: torch.dtype) -> None:
    """The formula of the op would cast them."""
    scale = torch.randn(2, 1, CHANNELS)
    for weight, bias in ((ROW[0].to(dtype), None), (None, ROW[1].to(dtype))):
        given = (CHANNELS,), weight, bias, 1e-5
        assert layer_norm.fused(X, given, None, None, scale, scale, NONE, None) is None
        own = X.to(dtype), given, None, None, scale.to(dtype), scale.to(dtype)
        assert layer_norm.fused(*own, NONE, None).dtype is dtype
    wide = (CHANNELS,), *ROW, 1e-5
    assert (layer_norm.fused(own[0], wide, *own[2:], NONE, None) is None) == (dtype is torch.float64)
    assert layer_norm.fused(X.long(), wide, None, None, *(scale.long(),) * 2, NONE, None) is None


@pytest.mark.parametrize("op", [group_norm.fused, instance_norm.fused, batch_norm.fused])
def test_images_and_what_is_added_to_them(op: Callable[..., Any]) -> None:
    statistics = (IMAGE.mean((0, 2, 3)), IMAGE.var((0, 2, 3)))
    act = Activation("relu")
    if op is group_norm.fused:
        given: Any = (2, *ROW, 1e-3)
        normed = F.group_norm(IMAGE, *given)
    elif op is instance_norm.fused:
        given, normed = (*ROW, 1e-3), F.instance_norm(IMAGE, None, None, *ROW, True, 0.1, 1e-3)
    else:
        given, normed = (*statistics, *ROW, False, 0.1, 1e-3), F.batch_norm(IMAGE, *statistics, *ROW, False, 0.1, 1e-3)
    torch.testing.assert_close(call(op, IMAGE, given, activation=act), act(normed))
    torch.testing.assert_close(call(op, IMAGE, given, behind=IMAGE, activation=act), act(normed + IMAGE))
    for name, other in others(IMAGE).items():
        assert call(op, IMAGE, given, behind=other) is None, name


def test_a_batch_norm_that_is_a_call() -> None:
    """By running statistics only where they are there and nothing learns; by the batch's with a number as momentum."""
    good = (torch.zeros(CHANNELS), torch.ones(CHANNELS), *ROW, False, 0.1, 1e-3)
    assert call(batch_norm.fused, IMAGE, good) is not None
    for momentum in (0.1, 1, None, torch.tensor(0.1)):
        ours, theirs = ((torch.zeros(CHANNELS), torch.ones(CHANNELS), *ROW, True, momentum, 1e-3) for _ in range(2))
        found = call(batch_norm.fused, IMAGE, ours)
        if isinstance(momentum, (int, float)):
            torch.testing.assert_close(found, F.batch_norm(IMAGE, *theirs))
            torch.testing.assert_close(ours[:2], theirs[:2])
        else:
            assert found is None and torch.equal(ours[0], torch.zeros(CHANNELS))
    for index, wrong in ((0, None), (1, None)):
        given = (*good[:index], wrong, *good[index + 1 :])
        assert call(batch_norm.fused, IMAGE, given) is None, index
    for index in (2, 3):
        given = (*good[:index], nn.Parameter(good[index]), *good[index + 1 :])
        assert call(batch_norm.fused, IMAGE, given) is None, index
        bare = (*good[:index], None, *good[index + 1 :])
        assert call(batch_norm.fused, IMAGE, bare) is not None
        with torch.no_grad():
            assert call(batch_norm.fused, IMAGE, given) is not None, index
    learns = IMAGE.clone().requires_grad_()
    assert call(batch_norm.fused, learns, good) is None
    assert call(batch_norm.fused, IMAGE, good, behind=learns) is None
    norm = nn.BatchNorm2d(CHANNELS).eval()
    assert torch.equal(call(batch_norm.fused, IMAGE, (norm,)), norm(IMAGE))


def test_channels_as_rows_in_either_layout() -> None:
    given = ((CHANNELS,), *ROW, 1e-3)
    for image in (IMAGE, IMAGE.contiguous(memory_format=torch.channels_last)):
        found = call(layer_norm.permuted, image, given)
        expected = F.layer_norm(image.permute(0, 2, 3, 1), *given).permute(0, 3, 1, 2)
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()
        assert call(layer_norm.permuted, image, given, activation=Activation("relu")) is None
        assert call(layer_norm.permuted, image.transpose(2, 3), given) is None
    assert call(layer_norm.permuted, X, given) is None


def test_a_norm_by_hand_runs_outside_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(ops, "rms_norm", lambda *args, **keywords: seen.append(torch.is_autocast_enabled("cpu")))
    with torch.autocast("cpu", torch.bfloat16):
        call(rms_norm.fused, X, ((CHANNELS,), ROW[0], 1e-3))
        call(rms_norm.fused, X, ((CHANNELS,), ROW[0], 1e-3, 1.0, True))
    assert seen == [True, False]


def test_the_dtype_of_what_autocast_would_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain norm hands it to the op."""
    seen = []
    for name in ("layer_norm", "group_norm"):
        monkeypatch.setattr(ops, name, lambda *args, **keywords: seen.append(keywords["dtype"]))
    call(layer_norm.fused, X, ((CHANNELS,), *ROW, 1e-3), dtype=torch.bfloat16)
    call(layer_norm.fused, X, ((CHANNELS,), *ROW, 1e-3), before=X, dtype=torch.bfloat16)
    call(group_norm.fused, IMAGE, (2, *ROW, 1e-3), dtype=torch.bfloat16)
    assert seen == [torch.bfloat16] * 3
