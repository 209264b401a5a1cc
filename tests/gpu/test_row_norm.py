"""layer_norm, rms_norm and l1_norm on the GPU: every dtype, shape and layout against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from limits import assert_within, same_bits
from row_checks import (
    DTYPES,
    LENGTHS,
    LONG,
    affine,
    check_l1_norm,
    check_layer_norm,
    check_rms_norm,
    gradients,
    values,
)

from normswap import ops, reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", (0.0, 100.0, 1000.0))
@pytest.mark.case("one-element", "ragged-rows", "dtypes")
def test_short_rows(dtype: torch.dtype, mean: float) -> None:
    for cols in LENGTHS:
        for rows in (1, 3, 33, 257):
            x = values(rows, cols, dtype, mean)
            weight, bias = affine(cols, dtype)
            check_layer_norm(x, weight, bias)
            check_rms_norm(x, weight)
            check_l1_norm(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", (0.0, 100.0, 1000.0))
@pytest.mark.case("ragged-rows", "long-row", "dtypes")
def test_long_rows(dtype: torch.dtype, mean: float) -> None:
    for cols in LONG:
        for rows in (1, 5):
            x = values(rows, cols, dtype, mean)
            for of in {dtype, torch.float32}:
                weight, bias = affine(cols, of)
                check_layer_norm(x, weight, bias)
                check_rms_norm(x, weight)
            check_l1_norm(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_absent_weights_are_ones_and_absent_biases_zeros(dtype: torch.dtype) -> None:
    for cols in (64, 769, 1001, 4096, *LONG):
        for rows in (3, 140):
            x, (weight, _) = values(rows, cols, dtype, 1.0), affine(cols, dtype)
            ones, zeros = torch.ones_like(weight), torch.zeros_like(weight)
            size = (cols,)
            assert same_bits(ops.layer_norm(x, size), ops.layer_norm(x, size, ones, zeros)), cols
            assert same_bits(ops.layer_norm(x, size, weight), ops.layer_norm(x, size, weight, zeros)), cols
            assert same_bits(ops.rms_norm(x, size), ops.rms_norm(x, size, ones)), cols


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_weights_of_the_same_value_in_float32_give_the_same_bits(dtype: torch.dtype) -> None:
    for cols in (64, 129, 768, 1001, 4096, 20_001, *LONG):
        x, (weight, bias) = values(5, cols, dtype, 1.0), affine(cols, dtype)
        size, wide = (cols,), weight.float()
        assert same_bits(ops.layer_norm(x, size, wide, bias.float()), ops.layer_norm(x, size, weight, bias)), cols
        for cast in (False, True):
            once, again = (ops.rms_norm(x, size, w, cast_before_weight=cast) for w in (weight, wide))
            assert same_bits(once, again), (cols, cast)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.case("long-row")
def test_rows_of_millions(dtype: torch.dtype) -> None:
    x = values(3, 4_194_304, dtype, 5.0)
    weight, bias = affine(x.shape[1], dtype)
    check_layer_norm(x, weight, bias)
    check_rms_norm(x, weight)
    check_l1_norm(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.case("strided-input", "misaligned", "output-strides", "never-writes-input")
def test_layouts(dtype: torch.dtype) -> None:
    cols = 96
    weight, bias = affine(cols, dtype)
    base = values(40, 2 * cols, dtype, 1.0)
    shifted = torch.empty(40 * cols + 1, device="cuda", dtype=dtype)[1:].view(40, cols).copy_(base[:, :cols])
    columns_first = base[:, :cols].t().contiguous().t()
    for x in (base[:, ::2], base[:, cols:], shifted, columns_first, base[:1, :cols].expand(9, cols)):
        before = x.clone()
        eager = F.layer_norm(x, (cols,), weight, bias)
        ours = ops.layer_norm(x, (cols,), weight, bias)
        assert ours.stride() == eager.stride()
        check_layer_norm(x, weight, bias)
        check_rms_norm(x, weight)
        check_l1_norm(x)
        assert same_bits(before, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.case("normalized-shape-rank", "misaligned")
def test_normalized_shape_of_several_dims_and_shifted_weights(dtype: torch.dtype) -> None:
    x = values(10, 3 * 5 * 8, dtype, 1.0).view(2, 5, 3, 5, 8)
    flat_weight, flat_bias = affine(121, dtype)
    for dims in (2, 3):
        shape = x.shape[-dims:]
        n = shape.numel()
        weight, bias = flat_weight[1 : n + 1].view(shape), flat_bias[1 : n + 1].view(shape)
        ours = ops.layer_norm(x, shape, weight, bias)
        alike = ops.layer_norm(x.reshape(-1, n), (n,), weight.reshape(-1).clone(), bias.reshape(-1).clone())
        assert same_bits(ours.reshape(-1, n), alike)
        torch.testing.assert_close(ours, F.layer_norm(x, shape, weight, bias))
    whole = ops.layer_norm(x, x.shape)
    torch.testing.assert_close(whole, F.layer_norm(x, x.shape))


@pytest.mark.case("empty-batch")
def test_empty_inputs() -> None:
    for shape in ((0, 8), (3, 0, 8)):
        x = torch.empty(shape, device="cuda", requires_grad=True)
        weight = torch.randn(8, device="cuda", requires_grad=True)
        for ours in (ops.layer_norm(x, (8,), weight), ops.rms_norm(x, (8,), weight), ops.l1_norm(x)):
            assert ours.shape == shape
            ours.sum().backward()
            assert x.grad is not None and x.grad.shape == shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.case("constant-rows", "zero-rows", "non-finite-rows")
def test_special_values_stay_in_their_row(dtype: torch.dtype) -> None:
    for cols in (33, 1024, 5000, 40_000):
        x = values(6, cols, dtype, 0.0)
        x[0] = 0
        x[1] = 3
        x[2, 5] = float("nan")
        x[3, 6] = float("inf")
        x[4] = 1e-7
        weight, bias = affine(cols, dtype)
        # PyTorch's rms_norm spreads an infinity over odd rows, the formula does not: compare with that.
        x64 = x.double()
        rms = x64 * (x64.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        pairs = (
            (ops.layer_norm(x, (cols,), weight, bias), F.layer_norm(x, (cols,), weight, bias)),
            (ops.rms_norm(x, (cols,), weight, 1e-6), rms),
            (ops.l1_norm(x), x / x.abs().mean(-1, keepdim=True)),
        )
        for ours, expected in pairs:
            assert torch.equal(ours.isnan(), expected.isnan())
            assert torch.equal(ours.isinf(), expected.isinf())
        assert torch.equal(pairs[0][0][:2], bias.expand(2, cols))  # constant rows: exactly the bias


@pytest.mark.case("large-values")
def test_values_near_1e30() -> None:
    x = values(4, 2048, torch.float32, 0.0) * 1e16
    weight, bias = affine(2048, torch.float32)
    check_layer_norm(x, weight, bias)
    ours, eager = ops.layer_norm(x * 1e14, (2048,)), F.layer_norm(x * 1e14, (2048,))
    assert torch.equal(ours.isfinite(), eager.isfinite())


@pytest.mark.parametrize("eps", (0.0, 1e-12, 1e3))
@pytest.mark.case("eps-range")
def test_eps(eps: float) -> None:
    x = values(9, 777, torch.float32, 1.0)
    weight, bias = affine(777, torch.float32)
    check_layer_norm(x, weight, bias, eps)
    check_rms_norm(x, weight, eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.case("rms-eps-none")
def test_rms_norm_eps_none_is_pytorch_s(dtype: torch.dtype) -> None:
    x = values(9, 512, dtype, 0.0) * 1e-3
    torch.testing.assert_close(ops.rms_norm(x, (512,)), F.rms_norm(x, (512,)))


@pytest.mark.case("rms-cast-orders")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", (33, 128, 1001, 4096, 40_000))
def test_rms_norm_cast_orders(dtype: torch.dtype, cols: int) -> None:
    x, (w, _) = values(12, cols, dtype, 0.5), affine(cols, dtype)
    dy = values(12, cols, dtype, 0.0, seed=5)
    for offset in (0.0, 1.0):
        for cast in (False, True):
            order = {"weight_offset": offset, "cast_before_weight": cast}
            ours = ops.rms_norm(x, (cols,), w, 1e-6, **order)
            x64, w64 = x.double(), w.double()
            factor = (w.float() + offset).double()
            normalised = x64 * (x64.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            # Rounding the normalised value may go the other way where it lies near a tie: one ulp.
            info = torch.finfo(dtype)
            ulp = info.eps * normalised.abs().clamp(min=info.smallest_normal)
            size = (normalised * factor).abs() + 2.0**23 * ulp / 4 * factor.abs() * cast
            assert_within(ours, normalised * factor, size, f"{offset} {cast}")
            got = gradients(lambda x, w, o=order: ops.rms_norm(x, (cols,), w, 1e-6, **o), (x, w), dy)
            exact = gradients(lambda x, w, o=offset: F.rms_norm(x, (cols,), w + o, 1e-6), (x64, w64), dy.double())
            ulp = 4 * torch.finfo(dtype).eps
            assert ((got[0].double() - exact[0]).abs() <= ulp * exact[0].abs().amax(-1, keepdim=True)).all()
            assert ((got[1].double() - exact[1]).abs() <= ulp * (dy.double() * normalised).abs().sum(0)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", (33, 1024, 5000))
def test_l1_norm_variants(dtype: torch.dtype, cols: int) -> None:
    x = values(12, cols, dtype, 0.0)
    x[3], x[4] = 0, 1e-3
    dy = values(12, cols, dtype, 0.0, seed=5)
    for eps, minimum in ((1e-2, None), (0.0, 0.5), (0.0, 1e-2)):
        variant = lambda x, e=eps, m=minimum: ops.l1_norm(x, -1, e, m)  # noqa: E731
        plain = lambda x, e=eps, m=minimum: reference.l1_norm(x, -1, e, m)  # noqa: E731
        torch.testing.assert_close(variant(x), plain(x))
        tolerance = 8 * torch.finfo(dtype).eps
        (mine,), (theirs,) = gradients(variant, (x,), dy), gradients(plain, (x.double(),), dy.double())
        scale = theirs.abs().amax(-1, keepdim=True)
        assert ((mine.double() - theirs).abs() <= tolerance * scale).all()


@pytest.mark.case("many-rows")
def test_many_rows() -> None:
    x = values(70_001, 24, torch.float16, 0.0)
    weight, bias = affine(24, torch.float16)
    check_layer_norm(x, weight, bias)
    check_l1_norm(x)


@pytest.mark.case("over-int32")
def test_more_than_2_31_elements() -> None:
    rows, cols = 33_001, 65_536
    x = torch.randn(8, cols, device="cuda", dtype=torch.float16).repeat(rows // 8 + 1, 1)[:rows]
    assert x.numel() > 2**31
    ours = ops.layer_norm(x, (cols,))
    expected = ops.layer_norm(x[:8], (cols,))
    for start in (0, rows // 2 // 8 * 8, (rows - 8) // 8 * 8):
        assert torch.equal(ours[start : start + 8], expected)
