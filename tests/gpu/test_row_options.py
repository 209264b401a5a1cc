"""layer_norm and rms_norm with a residual, a scale and shift and an activation on the GPU: every regime, dtype, shape
and layout against float64, and the bits of what stands alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import launch_plans
import pytest
import torch
import torch.nn.functional as F
from limits import assert_within, gpu_of_plans, kernels, same_bits, tensor
from torch import Tensor

from normswap import ops
from normswap.activation import NONE, Activation
from normswap.ops import dispatch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (
    *(1, 2, 7, 31, 33, 64, 65, 96, 128, 130, 192, 255, 256, 258, 512, 769),
    *(1000, 1001, 1024, 1025, 1280, 1536, 2050, 4096, 4097, 8192),
)
VECTORS = (
    8,
    24,
    64,
    128,
    136,
    256,
    264,
    384,
    512,
    640,
    768,
    1000,
    1024,
    2048,
    2056,
    4096,
    8192,
    16_384,
    16_392,
    65_544,
)
"""Rows that begin and end at multiples of 16 bytes: of one chunk, of whole ones and not."""
LONG = (16_386, 20_480, 32_768, 65_535, 65_536, 131_072, 131_073, 262_144)
ACTIVATIONS = (
    *(Activation(name) for name in ("relu", "silu", "gelu", "gelu_tanh", "hardswish", "sigmoid", "tanh")),
    *(Activation("leaky_relu", 0.2), Activation("clamp", -0.5, 1.0), Activation("clamp", 0.0, 6.0)),
)
by_dtype = pytest.mark.parametrize("dtype", DTYPES)
by_kind = pytest.mark.parametrize("kind", ("layer_norm", "rms_norm"))


def affine(cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tensor((cols,), dtype, 0.5, seed=1), tensor((cols,), dtype, seed=2)


def adaptive(batch: int, cols: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """As a chunked projection gives them: neighbours in memory belong to another sample's other vectors."""
    shift, scale, _ = tensor((batch, 3 * cols), dtype, seed=3).unsqueeze(1).chunk(3, -1)
    return {"scale": scale, "shift": shift}


def call(kind: str, x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Any:
    if kind == "layer_norm":
        return ops.layer_norm(x, x.shape[-1:], weight, bias, 1e-5, **options)
    return ops.rms_norm(x, x.shape[-1:], weight, 1e-6, weight_offset=1.0, **options)


def check(
    kind: str, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, scale: Any = None, shift: Any = None
) -> None:
    """``out`` against float64 by the criterion; the limit grows by a fourth with every rounding that options add."""
    x64, w64, b64 = x.double(), weight.double(), bias.double()
    size, more = x.shape[-1:], 0
    if kind == "layer_norm":
        rstd = (x64.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
        magnitude = w64.abs() * rstd * (x64.abs() + x64.square().mean(-1, keepdim=True).sqrt()) + b64.abs()
        exact = F.layer_norm(x64, size, w64, b64, 1e-5)
    else:
        exact, more = F.rms_norm(x64, size, 1 + w64, 1e-6), 1  # 1 + weight
        magnitude = exact.abs()
    if scale is not None:
        exact, more = exact * (1 + scale.double()) + shift.double(), more + 2
        magnitude = magnitude * (1 + scale.double()).abs() + shift.double().abs()
    what = f"{kind} {tuple(x.shape)} {x.dtype} {'adaptive' if scale is not None else ''}"
    assert_within(out, exact, magnitude * (1 + more / 4), what)


@by_kind
@by_dtype
@pytest.mark.parametrize("mean", (0.0, 100.0, 1000.0))
@pytest.mark.case("ragged-rows", "long-row", "dtypes", "one-element")
def test_residual_and_adaptive_against_float64(kind: str, dtype: torch.dtype, mean: float) -> None:
    for cols in (*LENGTHS, *LONG):
        batch, rows = (3, 11) if cols < 10_000 else (2, 2)
        x = tensor((batch, rows, cols), dtype, mean)
        residual = tensor((batch, rows, cols), dtype, seed=4)
        for of in {dtype, torch.float32}:
            weight, bias = affine(cols, of)
            adapts = adaptive(batch, cols, of)
            out, total = call(kind, x, weight, bias, residual=residual)
            assert same_bits(total, x + residual), cols
            check(kind, out, total, weight, bias)
            check(kind, call(kind, x, weight, bias, **adapts), x, weight, bias, **adapts)
            out, total = call(kind, x, weight, bias, residual=residual, **adapts)
            check(kind, out, total, weight, bias, **adapts)


@by_kind
@by_dtype
def test_a_residual_gives_the_bits_of_the_norm_of_the_sum(kind: str, dtype: torch.dtype) -> None:
    """The statistics are those of the rounded sum, by the same tree in every regime."""
    many = 4 * torch.cuda.get_device_properties(0).multi_processor_count + 5
    for cols in (*LENGTHS, *LONG):
        for rows, of_parameters in (
            ((5, dtype), (many, dtype), (many, torch.float32)) if 1024 < cols < 2048 else ((5, dtype),)
        ):
            x, residual = tensor((rows, cols), dtype, 2.0), tensor((rows, cols), dtype, seed=4)
            weight, bias = affine(cols, of_parameters)
            out, total = call(kind, x, weight, bias, residual=residual)
            assert same_bits(total, x + residual) and same_bits(out, call(kind, total, weight, bias)), (rows, cols)


@by_kind
@pytest.mark.parametrize("low", DTYPES[1:])
def test_a_residual_of_16_bits_gives_the_bits_of_the_norm_of_the_sum(kind: str, low: torch.dtype) -> None:
    for cols in (*LENGTHS, *VECTORS, *LONG):
        x, residual = tensor((5, cols), torch.float32, 2.0), tensor((5, cols), low, seed=4)
        weight, bias = affine(cols, torch.float32)
        adapts = adaptive(5, cols, torch.float32) if cols < 10_000 else {}
        for given in ((weight, bias), (weight, None), (None, None)):
            out, total = call(kind, x, *given, residual=residual)
            assert same_bits(total, x + residual) and same_bits(out, call(kind, total, *given)), cols
            if kind == "layer_norm":
                lowered, total = call(kind, x, *given, residual=residual, dtype=low)
                assert same_bits(total, x + residual) and same_bits(lowered, out.to(low)), cols
        rows = x.view(5, 1, cols), residual.view(5, 1, cols)
        if adapts:
            out, total = call(kind, rows[0], weight, bias, residual=rows[1], **adapts)
            assert same_bits(out, call(kind, total, weight, bias, **adapts)), cols


@by_kind
@pytest.mark.parametrize("low", DTYPES[1:])
def test_a_residual_of_16_bits_is_added_by_one_kernel(kind: str, low: torch.dtype) -> None:
    for cols in (96, 768, 1280, 4096, 8192):
        x, residual = tensor((300, cols), torch.float32), tensor((300, cols), low, seed=4)
        weight, bias = affine(cols, torch.float32)
        for to in ({}, {"dtype": low}) if kind == "layer_norm" else ({},):
            names = kernels(partial(call, kind, x, weight, bias, residual=residual, **to))
            ours = ["normswap" in name for name in names if "::" in name]  # the others are calls of the host
            assert ours == [True], (cols, names)


def with_statistics(
    kind: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cast: bool,
    activation: Activation,
) -> list[Tensor]:
    """Output, sum and what is saved of each row."""
    found = [torch.full_like(x, float("nan")) for _ in range(2)]
    found += [
        x.new_full(x.shape[:1], float("nan"), dtype=torch.float32) for _ in range(2 if kind == "layer_norm" else 1)
    ]
    options = (residual, None, None, activation.code, activation.low, activation.high)
    if kind == "layer_norm":
        torch.ops.normswap.layer_norm(x, 1, weight, bias, 1e-5, *options, *found, 0)
    else:
        torch.ops.normswap.rms_norm(x, 1, weight, 1e-6, 1.0, cast, *options, *found, 0)
    return found


def as_integers(t: Tensor) -> Tensor:
    return t.view(torch.int32 if t.element_size() == 4 else torch.int16)


@by_kind
@by_dtype
def test_a_residual_alone_gives_the_bits_of_all_options(kind: str, dtype: torch.dtype) -> None:
    """The kernels of the norm alone add it, to rows at vectors. Those of all options do so elsewhere, and before an
    activation: here one that changes nothing."""
    unbounded = Activation("clamp", float("-inf"), float("inf"))
    for cols in (*VECTORS, *(c for c in LONG if c % 8 == 0)):
        x, residual = tensor((5, cols), dtype, 2.0), tensor((5, cols), dtype, seed=4)
        x[1], residual[1] = -0.0, -0.0
        x[2, ::2], residual[2] = -x[2, ::2], 0.0
        elsewhere = [t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t) for t in (x, residual)]
        for of in {dtype, torch.float32}:
            weight, bias = affine(cols, of)
            weight[::3], bias[::3] = -0.0, -0.0
            for given in ((weight, bias), (weight, None), (None, bias), (None, None)):
                for cast in (False, True):
                    alone = with_statistics(kind, x, residual, *given, cast, NONE)
                    assert same_bits(alone[1], x + residual), cols
                    for others in (
                        with_statistics(kind, x, residual, *given, cast, unbounded),
                        with_statistics(kind, elsewhere[0], elsewhere[1], *given, cast, NONE),
                    ):
                        for one, other in zip(alone, others, strict=True):
                            assert torch.equal(as_integers(one), as_integers(other)), (cols, of, cast)


def test_a_residual_alone_is_added_by_the_kernels_of_the_norm_alone() -> None:
    for cols in (64, 768, 2048, 2056, 32_768, 65_536):
        x, w = tensor((5, cols), torch.bfloat16), tensor((cols,), torch.bfloat16)
        for kind, policy in (("layer_norm", "LayerNormPolicy"), ("rms_norm", "RMSNormPolicy")):
            found = kernels(lambda x=x, w=w, kind=kind: call(kind, x, w, w, residual=x))
            assert any(policy in name for name in found), (cols, found)
            found = kernels(lambda x=x, w=w, kind=kind: call(kind, x, w, w, residual=x, activation=Activation("silu")))
            assert any("OptionsPolicy" in name for name in found), (cols, found)


def forced(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, regime: int) -> tuple[Tensor, Tensor]:
    out, total = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    options = (residual, None, None, Activation("silu").code, 0.0, 0.0)
    torch.ops.normswap.layer_norm(x, 1, weight, bias, 1e-5, *options, out, total, None, None, regime)
    return out, total


@by_dtype
def test_every_regime_gives_the_same_bits(dtype: torch.dtype) -> None:
    compared, gpu = set(), gpu_of_plans()
    for cols in (258, 1000, 1001, *(c for c in (*LENGTHS, *LONG) if c >= 1024)):
        x, residual = tensor((5, cols), dtype, 3.0), tensor((5, cols), dtype, seed=4)
        weight, bias = affine(cols, dtype)
        first = forced(x, residual, weight, bias, 0)
        ragged = cols * x.element_size() % 16 > 0
        for regime in range(1, 8):
            if (
                launch_plans.row_plan(5, cols, x.element_size(), ragged=ragged, options=True, regime=regime, **gpu)
                is not None
            ):
                compared.add(regime)
                assert all(map(same_bits, forced(x, residual, weight, bias, regime), first)), (cols, regime)
    assert compared == {2, 3, 4, 5}


@by_kind
@by_dtype
@pytest.mark.case("misaligned", "never-writes-input")
def test_bits_depend_on_neither_address_nor_batch_nor_run(kind: str, dtype: torch.dtype) -> None:
    for cols in (64, 130, 1001, 4096, 20_480, 131_072):
        x, residual = tensor((3, 3, cols), dtype, 3.0), tensor((3, 3, cols), dtype, seed=4)
        weight, bias = affine(cols, dtype)
        options = {**adaptive(3, cols, dtype), "activation": Activation("silu")}
        out, total = call(kind, x, weight, bias, residual=residual, **options)
        before = x.clone(), residual.clone()
        again = call(kind, x, weight, bias, residual=residual, **options)
        assert same_bits(out, again[0]) and same_bits(total, again[1])
        assert same_bits(x, before[0]) and same_bits(residual, before[1])
        shifted = [torch.empty(t.numel() + 1, dtype=dtype, device="cuda")[1:].view(t.shape).copy_(t) for t in before]
        moved = call(kind, shifted[0], weight, bias, residual=shifted[1], **options)
        assert same_bits(moved[0], out) and same_bits(moved[1], total), cols
        scale = options["scale"][1:2].clone(), options["shift"][1:2].clone()
        one = call(
            kind, x[1:2, 2:], weight, bias, residual=residual[1:2, 2:],
            scale=scale[0], shift=scale[1], activation=Activation("silu"),
        )  # fmt: skip
        assert same_bits(one[0], out[1:2, 2:]) and same_bits(one[1], total[1:2, 2:]), cols


@by_kind
@by_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations_are_pytorch_s_of_the_rounded_norm(kind: str, dtype: torch.dtype, activation: Activation) -> None:
    for cols in (64, 1001, 4096, 40_000):
        x, (weight, bias) = tensor((7, cols), dtype, 0.3), affine(cols, dtype)
        given = call(kind, x, weight, bias).double()
        exact, ours = activation(given), call(kind, x, weight, bias, activation=activation)
        assert ours.dtype == dtype
        # Sums in them, as 1 + erf(x) is one, may cancel: what is left has the error of their terms.
        assert_within(ours, exact, 2 * given.abs() + exact.abs(), f"{activation} {cols}")


@by_dtype
def test_many_dims_and_one_scale_for_all(dtype: torch.dtype) -> None:
    x, residual = tensor((4, 5, 6, 32), dtype), tensor((4, 5, 6, 32), dtype, seed=4)
    weight, bias = tensor((6, 32), dtype, 0.5, seed=1), tensor((6, 32), dtype, seed=2)
    scale, shift = tensor((1, 1, 6, 32), dtype, seed=3), tensor((1, 1, 6, 32), dtype, seed=5)
    for given in (scale, scale.expand(4, 1, 6, 32), scale.expand(4, 1, 6, 32).contiguous()):
        out, total = ops.layer_norm(x, (6, 32), weight, bias, residual=residual, scale=given, shift=shift)
        flat = [t.flatten(-2) for t in (total, weight, bias, scale, shift)]
        check("layer_norm", out.flatten(-2), *flat)


@by_dtype
@pytest.mark.case("strided-input", "output-strides", "empty-batch")
def test_layouts_and_empty_inputs(dtype: torch.dtype) -> None:
    weight, bias = affine(24, dtype)
    x, residual = tensor((3, 24, 5), dtype).mT, tensor((3, 5, 24), dtype, seed=4)
    out, total = ops.layer_norm(x, (24,), weight, bias, residual=residual)
    assert same_bits(total, x + residual) and total.stride() == (x + residual).stride()
    check("layer_norm", out, total, weight, bias)
    empty = x[:0].contiguous()
    out, total = ops.rms_norm(empty, (24,), weight, residual=empty)
    assert out.shape == total.shape == (0, 5, 24)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_autocast_reads_16_bits_and_writes_float32(dtype: torch.dtype) -> None:
    for cols in (64, 768, 1001, 16_384):
        x, residual = tensor((3, 7, cols), dtype, 2.0), tensor((3, 7, cols), dtype, seed=4)
        weight, bias = affine(cols, torch.float32)
        adapts = adaptive(3, cols, dtype)
        with torch.no_grad(), torch.autocast("cuda", dtype):
            plain = ops.layer_norm(x, (cols,), weight, bias)
            out, total = ops.layer_norm(x, (cols,), weight, bias, residual=residual, **adapts)
            active = ops.layer_norm(x, (cols,), weight, bias, activation=Activation("relu"))
            assert F.layer_norm(x, (cols,), weight, bias).dtype == plain.dtype == out.dtype == torch.float32
        assert total.dtype == dtype and same_bits(total, x + residual) and same_bits(active, plain.relu())
        check("layer_norm", plain, x, weight, bias)
        check("layer_norm", out, total, weight, bias, **adapts)


@by_kind
@pytest.mark.case("requires-grad-each")
def test_gradients_are_those_of_the_composition(kind: str) -> None:
    tensors = [tensor((3, 5, 40), torch.float32, seed=i) for i in range(2)]
    tensors += [tensor((40,), torch.float32, seed=i) for i in range(2, 4)]
    tensors += [tensor((3, 1, 40), torch.float32, seed=i) for i in range(4, 6)]
    upstream = tensor((3, 5, 40), torch.float32, seed=7), tensor((3, 5, 40), torch.float32, seed=8)

    def found(dtype: torch.dtype, wanted: int, sums: bool) -> list[Tensor]:
        x, r, w, b, scale, shift = leaves = [t.to(dtype, copy=True) for t in tensors]
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(bool(wanted >> i & 1))
        outs = call(kind, x, w, b, residual=r, scale=scale, shift=shift, activation=Activation("silu"))
        pairs = [(o, g.to(dtype)) for o, g in zip(outs, upstream, strict=True)][: 2 if sums else 1]
        needed = [t for t in leaves if t.requires_grad and (kind == "layer_norm" or t is not b)]
        return list(torch.autograd.grad([o for o, _ in pairs], needed, [g for _, g in pairs]))

    for wanted, sums in ((0b111111, True), (0b111111, False), (0b000001, True), (0b000010, True), (0b110100, False)):
        for ours, exact in zip(found(torch.float32, wanted, sums), found(torch.float64, wanted, sums), strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_one_native_op_does_all_of_a_call_without_gradients() -> None:
    """And gives the bits of the general way; it declines what kernels do not take."""
    x, w = tensor((3, 5, 24), torch.float32), tensor((24,), torch.float32)
    adapts = adaptive(3, 24, torch.float32)
    options = {"residual": x, **adapts, "activation": Activation("gelu")}
    for kind in ("layer_norm", "rms_norm"):
        with torch.no_grad():
            direct = call(kind, x, w, w, **options)
        general = call(kind, x.clone().requires_grad_(), w, w, **options)
        assert all(map(same_bits, direct, general)) and not direct[0].requires_grad
    op: Any = dispatch._direct["layer_norm"]
    nothing = (0, 0.0, 0.0, None)
    scale, shift = adapts["scale"], adapts["shift"]
    assert op(x, 1, w, w, 1e-5, x, scale, shift, *nothing)[0] is not None
    assert op(x, 1, w, w, 1e-5, x.half(), None, None, *nothing)[0] is not None
    for residual in (x.double(), x[:1], x.cpu(), x.mT.contiguous().mT, x.half()[:1], x.half().mT.contiguous().mT):
        assert op(x, 1, w, w, 1e-5, residual, None, None, *nothing) == (None, None)
    for pair in ((scale, None), (scale[:, 0], shift), (scale[:2], shift), (scale, shift[:1]), (scale.half(), shift),
                 (scale.double(), shift.double()), (scale[..., :1], shift), (scale.contiguous(), shift)):  # fmt: skip
        assert op(x, 1, w, w, 1e-5, None, *pair, *nothing) == (None, None)


def test_opcheck() -> None:
    x, w = tensor((2, 3, 64), torch.float32), tensor((64,), torch.float32)
    s, scale, n = x.new_empty(2, 3), tensor((2, 1, 64), torch.float32), torch.ops.normswap
    options = (x * 2, scale, scale * 2, 2, 0.0, 0.0)
    outs = (torch.empty_like(x), torch.empty_like(x))
    for op, arguments in (
        (n.layer_norm.default, (x, 1, w, w, 1e-5, *options, *outs, s, s.clone(), 0)),
        (n.rms_norm.default, (x, 1, w, 1e-5, 1.0, True, *options, *outs, s, 0)),
        (n.l2_norm.default, (x, 64, 1e-12, torch.empty_like(x), s, 0)),
        (n.l2_norm_dim.default, (x, 1, 1e-12, torch.empty_like(x), x.new_empty(2, 1, 64))),
        (n.layer_norm_dim.default, (x, w[:3], w[:3], 1, 1e-5, torch.empty_like(x), x.new_empty(2, 1, 64), None)),
    ):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.filterwarnings("ignore")
def test_compiled_with_and_without_gradients() -> None:
    x, residual = tensor((3, 5, 24), torch.float32), tensor((3, 5, 24), torch.float32, seed=4)
    w, adapts = tensor((24,), torch.float32), adaptive(3, 24, torch.float32)

    def function(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        out, total = ops.layer_norm(x, (24,), w, residual=residual, activation=Activation("silu"), **adapts)
        more, total = ops.rms_norm(out, (24,), w, residual=total, activation=NONE)
        return more, total

    compiled = torch.compile(function, fullgraph=True)
    for given in (x, x.clone().requires_grad_()):
        for ours, expected in zip(compiled(given, residual), function(given, residual), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
