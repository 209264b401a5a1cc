"""The backward of layer_norm, rms_norm and l1_norm without a GPU: its formulas, and the autograd around stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from launch_stand_in import NO_OPTIONS, told_with_options
from row_gradients import l1_norm_gradients, layer_norm_gradients, rms_norm_gradients
from torch import Tensor

from normswap import ops, reference
from normswap.activation import Activation
from normswap.criterion import error_share
from normswap.ops import dispatch
from normswap.ops.dispatch import native_op as the_native_op

# --- the formulas ----------------------------------------------------------------------------------------------------


def test_the_closed_forms_are_autograd_s() -> None:
    """What the tests on the GPU compare with, in float64."""
    x, w, b, dy = (
        torch.randn(6, 9).double() + 3,
        torch.randn(9).double(),
        torch.randn(9).double(),
        torch.randn(6, 9).double(),
    )
    x[1] *= 1e-3  # below a minimum
    x[2, 4] = 0.0
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    pairs = [
        (layer_norm_gradients(x, w, dy, 1e-5), F.layer_norm(leaves[0], (9,), *leaves[1:], 1e-5), leaves),
        (rms_norm_gradients(x, w + 1, dy, 1e-6), F.rms_norm(leaves[0], (9,), leaves[1] + 1, 1e-6), leaves[:2]),
    ]
    for eps, minimum in ((0.0, None), (1e-3, None), (0.0, 0.5), (0.25, 0.5)):
        out = reference.l1_norm(leaves[0], -1, eps, minimum)
        pairs.append((l1_norm_gradients(x, dy, eps, minimum), out, leaves[:1]))
    for ours, out, given in pairs:
        expected = torch.autograd.grad(out, given, dy)
        for (value, magnitude), theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(value, theirs)
            assert (magnitude >= value.abs() * (1 - 1e-12)).all()


# --- the autograd around them ----------------------------------------------------------------------------------------


def _gradients(
    formula: Callable[..., Tensor], tensors: tuple[Any, ...], dy: Tensor, wanted: tuple[bool, ...], more: Any = None
) -> list[Any]:
    """By PyTorch, in float64; ``more`` is added to the first."""
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
        asked = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        found = iter(torch.autograd.grad(formula(*leaves), asked, dy.double()))
    made = [next(found) if want else None for want in wanted]
    if more is not None:
        made[0] += more.double()
    return [None if g is None else g.to(t.dtype) for g, t in zip(made, tensors, strict=True)]


def _recorded(norm: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], x: Tensor, dims: int, rest: Any) -> Any:
    """Output, sum and statistics by ``norm`` of the tensor and its rows."""
    residual, scale, shift, code, low, high, dtype = (*rest, *NO_OPTIONS[len(rest) :])
    if not all(t is None or t.is_contiguous() for t in (x, residual)):
        return None, None, None
    total = None if residual is None else x + residual
    x = x if total is None else total
    out, statistics = norm(x, x.flatten(-dims).flatten(0, -2))
    if scale is not None:
        out = out * (1 + scale) + shift
    out = out.to(dtype or out.dtype)
    return Activation.of(code, low, high)(out), total, statistics


class StandIns:
    """What the native ops say and take, on the CPU."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.declines: set[str] = set()

    def __call__(self, name: str) -> Callable[..., Any]:
        def op(*args: Any) -> Any:
            kind, forward, _ = name.partition("_recorded")
            self.called.append(told_with_options(kind, args) + forward if forward else name)
            if self.called[-1] in self.declines:
                return None if name == "l1_norm_backward" else (None,) * (2 if name == "l1_norm_recorded" else 3)
            return getattr(self, name)(*args)

        return op

    def layer_norm_recorded(self, x: Tensor, dims: int, w: Any, b: Any, eps: float, *rest: Any) -> Any:
        def norm(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            statistics = torch.stack([rows.mean(-1), (rows.var(-1, correction=0) + eps).rsqrt()])
            return F.layer_norm(x, x.shape[-dims:], w, b, eps), statistics

        return _recorded(norm, x, dims, rest)

    def layer_norm_backward(self, *args: Any) -> Any:
        dy, x, w, b, statistics, sum_grad, cols, code, low, high, *wanted, passes = args
        assert passes == 0 and statistics.numel() == 2 * x.numel() // cols
        shape, act = w.shape if w is not None else (cols,), Activation.of(code, low, high)
        formula = lambda x, w, b: act(F.layer_norm(x.reshape(-1, *shape), shape, w, b)).reshape(x.shape)  # noqa: E731
        return _gradients(formula, (x, w, b), dy, tuple(wanted), sum_grad)

    def rms_norm_recorded(self, x: Tensor, dims: int, w: Any, eps: float, offset: float, cast: bool, *rest: Any) -> Any:
        def norm(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            order = {"weight_offset": offset, "cast_before_weight": cast}
            return reference.rms_norm(x, x.shape[-dims:], w, eps, **order), (rows.square().mean(-1) + eps).rsqrt()

        return _recorded(norm, x, dims, rest)

    def rms_norm_backward(self, *args: Any) -> Any:
        dy, x, w, statistics, sum_grad, cols, offset, _cast, code, low, high, of_input, of_weight, _ = args
        assert statistics.numel() == x.numel() // cols
        act = Activation.of(code, low, high)
        formula = lambda x, w: act(F.rms_norm(x, (cols,), w + offset, 1e-6))  # noqa: E731
        return *_gradients(formula, (x, w), dy, (of_input, of_weight), sum_grad), None

    def l1_norm_recorded(self, x: Tensor, eps: float, minimum: float) -> Any:
        if not x.is_contiguous():
            return None, None
        return reference.l1_norm(x, -1, eps, minimum or None), x.abs().mean(-1)

    def l1_norm_backward(
        self, dy: Tensor, x: Tensor, mean: Tensor, cols: int, eps: float, minimum: float, _: int
    ) -> Any:
        assert mean.numel() == x.numel() // cols
        return _gradients(lambda x: reference.l1_norm(x, -1, eps, minimum or None), (x,), dy, (True,))[0]


KINDS = ("layer_norm", "rms_norm", "l1_norm")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """In the place of the native ops, under our autograd Functions; the direct way is open too."""
    made = StandIns()

    def recorded(name: str, *tensors: Tensor | None, autocast: bool = False) -> Any:
        return dispatch._recording[name] if dispatch.needs_grad(*tensors) else None

    monkeypatch.setattr(dispatch, "_native", SimpleNamespace(get=made))
    for name in ("rows", "l1_norm"):
        monkeypatch.setattr(sys.modules[f"normswap.ops.{name}"], "native_serves", lambda *tensors, **elements: True)
    for kind in KINDS:
        monkeypatch.setattr(sys.modules[f"normswap.ops.{kind}"], "direct", recorded)
    return made


def call(kind: str, x: Tensor, w: Any, b: Any) -> Tensor:
    if kind == "layer_norm":
        return ops.layer_norm(x, x.shape[-1:], w, b)
    return ops.rms_norm(x, x.shape[-1:], w, 1e-6) if kind == "rms_norm" else ops.l1_norm(x)


def plain(kind: str, x: Tensor, w: Any, b: Any) -> Tensor:
    if kind == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], w, b)
    return F.rms_norm(x, x.shape[-1:], w, 1e-6) if kind == "rms_norm" else reference.l1_norm(x)


def drawn(kind: str) -> list[Tensor]:
    tensors = [torch.randn(3, 5, 8), torch.randn(8), torch.randn(8)]
    return tensors[: {"layer_norm": 3, "rms_norm": 2, "l1_norm": 1}[kind]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", range(1, 8))
def test_only_gradients_asked_for_are_computed(kind: str, asked: int, stand_ins: StandIns) -> None:
    tensors = drawn(kind)
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(bool(asked >> i & 1))
    wanted = [t for t in tensors if t.requires_grad]
    if not wanted:
        return
    padded = (*tensors, None, None)[:3]
    out, expected = call(kind, *padded), plain(kind, *padded)
    dy = torch.randn(out.shape)
    for ours, theirs in zip(*(torch.autograd.grad(y, wanted, dy) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert stand_ins.called == [f"{kind}_recorded", f"{kind}_backward"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.case("double-backward")
def test_double_backward_is_the_formula_s(kind: str, stand_ins: StandIns) -> None:
    tensors = [t.requires_grad_() for t in drawn(kind)]
    padded, second = (*tensors, None, None)[:3], []
    for y in (call(kind, *padded), plain(kind, *padded)):
        (first,) = torch.autograd.grad(y.pow(3).sum(), tensors[0], create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), tensors, allow_unused=True))
    for ours, theirs in zip(*second, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert stand_ins.called.count(f"{kind}_backward") == 1  # through the output again, with no graph to make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.case("functorch")
def test_a_backward_under_vmap_is_the_formula_s(kind: str, stand_ins: StandIns) -> None:
    """For the kernels vmap has no rule."""
    tensors = [t.requires_grad_() for t in drawn(kind)]
    if kind == "rms_norm":  # what is saved of a sum is an output
        total, w, dys = torch.randn(3, 8).requires_grad_(), tensors[1], torch.randn(4, 3, 8)
        found = []
        for norms in (ops, reference):
            y = norms.rms_norm(total, (8,), w, 1e-6, residual=torch.ones(3, 8))[0]
            each = lambda dy, y=y: torch.autograd.grad(y, (total, w), dy, retain_graph=True)  # noqa: E731
            found.append(torch.func.vmap(each)(dys))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
        stand_ins.called.clear()
    padded, dys, found = (*tensors, None, None)[:3], torch.randn(4, 3, 5, 8), []
    for y in (call(kind, *padded), plain(kind, *padded)):
        found.append(torch.autograd.grad(y, tensors, dys, retain_graph=True, is_grads_batched=True))
        found.append(torch.func.vmap(lambda dy, y=y: torch.autograd.grad(y, tensors, dy, retain_graph=True))(dys))
    for others in found[:-1]:
        for ours, theirs in zip(others, found[-1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert stand_ins.called == [f"{kind}_recorded"]


OPTIONS: tuple[tuple[str, ...], ...] = (
    ("residual",),
    ("activation",),
    ("residual", "activation"),
    ("residual", "scale"),
)


@pytest.mark.parametrize("given", OPTIONS)
@pytest.mark.parametrize("used", ("output", "sum", "both"))
@pytest.mark.parametrize("kind", KINDS[:2])
def test_options_in_one_native_call(kind: str, given: tuple[str, ...], used: str, stand_ins: StandIns) -> None:
    """A scale by the formula; where nothing but the sum is used there is nothing to compute."""
    if used != "output" and "residual" not in given:
        return
    x, residual, scale, shift = torch.randn(3, 5, 8), torch.randn(3, 5, 8), torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    options: dict[str, Any] = {}
    if "residual" in given:
        options["residual"] = residual
    if "scale" in given:
        options |= {"scale": scale, "shift": shift}
    if "activation" in given:
        options["activation"] = Activation("silu")
    affine = [torch.randn(8) for _ in range(2 if kind == "layer_norm" else 1)]
    tensors = [x, *affine, *(t for t in options.values() if isinstance(t, Tensor))]
    for tensor in tensors:
        tensor.requires_grad_()
    more, found = {} if kind == "layer_norm" else {"eps": 1e-6}, []
    for norms in (ops, reference):
        results = getattr(norms, kind)(x, (8,), *affine, **more, **options)
        results = results if isinstance(results, tuple) else (results,)
        kept = {"output": results[:1], "sum": results[1:], "both": results}[used]
        loss = sum((r * torch.arange(1.0, 9.0)).sum() for r in kept)
        found.append(torch.autograd.grad(loss, tensors, allow_unused=True))
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    native = used != "sum" and "scale" not in given
    assert stand_ins.called == [f"{kind}_with_options_recorded", *([f"{kind}_backward"] if native else [])]


@pytest.mark.case("autocast", "double-backward")
def test_a_norm_of_float32_rounded_at_once_has_the_gradients_of_the_cast(stand_ins: StandIns) -> None:
    tensors = [t.requires_grad_() for t in drawn("layer_norm")]
    dy, found = torch.randn(4, 3, 5, 8).bfloat16(), []
    for out in (
        ops.layer_norm(tensors[0], (8,), *tensors[1:], dtype=torch.bfloat16),
        reference.layer_norm(tensors[0], (8,), *tensors[1:]).bfloat16(),
    ):
        first = torch.autograd.grad(out, tensors, dy[0], retain_graph=True)
        batched = torch.autograd.grad(out, tensors, dy, retain_graph=True, is_grads_batched=True)
        (once,) = torch.autograd.grad(out.float().pow(3).sum(), tensors[0], create_graph=True)
        twice = torch.autograd.grad(once.square().sum(), tensors[:2])
        found.append([out, *first, *batched, *twice])
    assert [t.dtype for t in found[0]] == [torch.bfloat16, *[torch.float32] * 8]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert stand_ins.called[:2] == ["layer_norm_with_options_recorded", "layer_norm_backward"]


def test_what_cannot_be_rounded_at_once_is_cast(stand_ins: StandIns) -> None:
    """Where the op declines, and what is not asked of it."""
    x, w, b = (t.requires_grad_() for t in drawn("layer_norm"))
    expected = F.layer_norm(x, (8,), w, b)
    stand_ins.declines.add("layer_norm_with_options_recorded")
    out = ops.layer_norm(x, (8,), w, b, dtype=torch.bfloat16)
    assert torch.equal(out, expected.bfloat16())
    assert {*stand_ins.called} == {"layer_norm_with_options_recorded", "layer_norm_recorded"}
    stand_ins.declines.clear()
    for given, options in ((x.transpose(0, 1), {}), (x, {"activation": Activation("silu")})):
        stand_ins.called.clear()
        out = ops.layer_norm(given, (8,), w, b, dtype=torch.float16, **options)
        theirs = reference.layer_norm(given, (8,), w, b, **options)
        torch.testing.assert_close(out, theirs.half())
        assert stand_ins.called[-1] == f"layer_norm{'_with_options' if options else ''}_recorded"
    assert ops.layer_norm(x, (8,), w, b, dtype=torch.float64).dtype is torch.float64


def test_a_scale_may_be_an_inference_tensor(stand_ins: StandIns) -> None:
    """PyTorch keeps what one is added to, and no node may keep such a tensor itself."""
    x, weight = torch.randn(3, 5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    with torch.inference_mode():
        residual, scale, shift = torch.randn(3, 5, 8), *torch.randn(2, 3, 1, 8).clone().unbind()
    found = []
    for norms in (ops, reference):
        out, _ = norms.rms_norm(x, (8,), weight, 1e-6, residual=residual, scale=scale, shift=shift)
        found.append(torch.autograd.grad(out.sin().sum(), (x, weight)))
    torch.testing.assert_close(*found)
    assert stand_ins.called == ["rms_norm_with_options_recorded"]


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("adaptive", (False, True))
@pytest.mark.parametrize("transposed", ("input", "residual", "both", "neither"))
def test_the_gradient_of_a_sum_is_rounded_once(kind: str, adaptive: bool, transposed: str, stand_ins: StandIns) -> None:
    """That of the norm and that of whatever else reads the sum are added before it."""
    w, scale, shift = torch.randn(8).bfloat16(), *torch.randn(2, 3, 1, 8).bfloat16()
    eps = 1e-5 if kind == "layer_norm" else 1e-6  # those of the stand-ins
    tensors = [torch.randn(3, 8, 8).bfloat16() for _ in range(2)]
    for i, name in enumerate(("input", "residual")):
        if transposed in (name, "both"):
            tensors[i] = tensors[i].transpose(1, 2)
        tensors[i].requires_grad_()
    options = {"scale": scale, "shift": shift} if adaptive else {}
    out, total = getattr(ops, kind)(tensors[0], (8,), w, eps=eps, residual=tensors[1], **options)
    assert torch.equal(total, tensors[0] + tensors[1]) and total.stride() == (tensors[0] + tensors[1]).stride()
    grads = [torch.randn(3, 8, 8).bfloat16() for _ in range(2)]
    found = torch.autograd.grad((out, total), tensors, grads)
    x = total.detach().double().requires_grad_()
    adapted = getattr(reference, kind)(x, (8,), w.double(), eps=eps, **{k: t.double() for k, t in options.items()})
    (exact,) = torch.autograd.grad((adapted, x * 1.0), x, [g.double() for g in grads])
    for gradient in found:
        assert error_share(gradient, exact, exact.abs() + 10, 4.0) <= 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_without_memory_is_left_to_pytorch(kind: str, stand_ins: StandIns) -> None:
    stand_ins.declines.add(f"{kind}_backward")
    tensors = [t.requires_grad_() for t in drawn(kind)]
    padded, dy = (*tensors, None, None)[:3], torch.randn(3, 5, 8)
    found = (torch.autograd.grad(y, tensors, dy) for y in (call(kind, *padded), plain(kind, *padded)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_function_declines_is_left_to_pytorch(kind: str, stand_ins: StandIns) -> None:
    """A lack of memory is PyTorch's error."""
    stand_ins.declines.add(f"{kind}_recorded")
    tensors = [t.requires_grad_() for t in drawn(kind)]
    padded, dy = (*tensors, None, None)[:3], torch.randn(3, 5, 8)
    found = (torch.autograd.grad(y, tensors, dy) for y in (call(kind, *padded), plain(kind, *padded)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert set(stand_ins.called) == {f"{kind}_recorded"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_otherwise_is_laid_out_and_kept_as_it_is(kind: str, stand_ins: StandIns) -> None:
    tensors = [t.requires_grad_() for t in drawn(kind)]
    x, dy = torch.randn(3, 5, 16)[..., ::2].requires_grad_(), torch.randn(3, 5, 8)
    padded, saved = (x, *tensors[1:], None, None)[:3], list[int]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        out = call(kind, *padded)
    assert x.data_ptr() in saved
    found = (torch.autograd.grad(y, (x, *tensors[1:]), dy) for y in (out, plain(kind, *padded)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert {*stand_ins.called} == {f"{kind}_recorded", f"{kind}_backward"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.case("strided-input")
def test_no_more_is_saved_than_pytorch_saves(kind: str, stand_ins: StandIns) -> None:
    saved: list[list[int]] = []
    padded = (*(t.requires_grad_() for t in drawn(kind)), None, None)[:3]
    for function in (call, plain):
        bytes_of: dict[int, int] = {}

        def pack(t: Tensor, bytes_of: dict[int, int] = bytes_of) -> Tensor:
            bytes_of[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            function(kind, *padded)
        saved.append([sum(bytes_of.values())])
    assert saved[0] <= saved[1]


def test_a_native_op_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dispatch._native, "layer_norm_backward", len)
    assert the_native_op("layer_norm_backward") is len
