"""layer_norm, rms_norm and l1_norm on the GPU: every regime, dtype, shape and layout against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from limits import assert_within, gpu_of_plans, same_bits
from torch import Tensor

from normswap import launch_plans, ops, reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (1, 2, 7, 31, 32, 33, 64, 65, 127, 128, 130, 255, 256, 258, 769, 1000, 1001, 1023, 1025, 2047, 2050, 4096)
LONG = (4097, 8192, 16383, 16386, 20480, 32768, 65535, 65536, 81920, 100001, 131073, 262144, 262146)
IN_TURNS = 5
"""Who holds rows (Held, row_plan.h): clusters that keep their weights for several."""
WEIGHTS = {"layer_norm": 2, "rms_norm": 1, "l1_norm": 0}
"""That an element may have of its own."""


def values(rows: int, cols: int, dtype: torch.dtype, mean: float, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + rows + cols)
    return (torch.randn(rows, cols, generator=generator, device="cuda") + mean).to(dtype)


def affine(cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(cols)
    weight = torch.randn(cols, generator=generator, device="cuda") + 0.5
    return weight.to(dtype), torch.randn(cols, generator=generator, device="cuda").to(dtype)


def check_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> None:
    ours = ops.layer_norm(x, x.shape[-1:], weight, bias, eps)
    x64, w64, b64 = x.double(), weight.double(), bias.double()
    rstd = (x64.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    magnitude = w64.abs() * rstd * (x64.abs() + x64.square().mean(-1, keepdim=True).sqrt()) + b64.abs()
    assert_within(ours, F.layer_norm(x64, x.shape[-1:], w64, b64, eps), magnitude, f"layer_norm {tuple(x.shape)}")


def check_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    ours = ops.rms_norm(x, x.shape[-1:], weight, eps)
    reference = F.rms_norm(x.double(), x.shape[-1:], weight.double(), eps)
    assert_within(ours, reference, reference.abs(), f"rms_norm {tuple(x.shape)}")


def check_l1_norm(x: Tensor) -> None:
    ours = ops.l1_norm(x, -1)
    mean = x.double().abs().mean(-1, keepdim=True)
    reference = x.double() / mean.to(x.dtype).double()
    # Where the mean lies within float32 error of a tie of its dtype, its rounding may go the other way: one ulp.
    ulp = 0.0 if x.dtype is torch.float32 else torch.finfo(x.dtype).eps
    low, high = (mean * (1 - 2**-21)).to(x.dtype), (mean * (1 + 2**-21)).to(x.dtype)
    tie = ulp * reference.abs() * (low != high) * 2.0**24 / 4
    assert_within(ours, reference, reference.abs() + tie, f"l1_norm {tuple(x.shape)}")


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


def forced(kind: str, x: Tensor, weight: Tensor, bias: Tensor, regime: int) -> Tensor:
    out = torch.full_like(x, float("nan"))
    if kind == "layer_norm":
        torch.ops.normswap.layer_norm(x, weight, bias, x.shape[-1], 1e-5, out, None, None, regime)
    elif kind == "rms_norm":
        torch.ops.normswap.rms_norm(x, weight, x.shape[-1], 1e-5, 0.0, False, out, None, regime)
    else:
        torch.ops.normswap.l1_norm(x, x.shape[-1], 0.0, 0.0, out, None, regime)
    return out


@pytest.mark.parametrize("kind", tuple(WEIGHTS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_regime_gives_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    compared = 0
    for cols in (*(c for c in LENGTHS if c > 256), *LONG):
        x = values(4, cols, dtype, 3.0)
        weight, bias = affine(cols, dtype)
        automatic = forced(kind, x, weight, bias, 0)
        for regime in (2, 3, 4, 5, 6):  # 7 is for longer rows, below
            gpu = gpu_of_plans()
            if launch_plans.row_plan(4, cols, x.element_size(), weights=WEIGHTS[kind], regime=regime, **gpu) is None:
                continue
            assert same_bits(automatic, forced(kind, x, weight, bias, regime)), (cols, regime)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("kind", tuple(WEIGHTS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_that_share_rows(kind: str, dtype: torch.dtype) -> None:
    """The bits of the regime that reads the input twice, however many rows there are for a cluster or a team."""
    for cols in (17_000, 33_001, 65_536, 131_072, 140_000):
        for rows in (1, 7, 8, 9, 150):
            x = values(rows, cols, dtype, 3.0)
            weight, bias = affine(cols, dtype)
            expected = forced(kind, x, weight, bias, 5)
            for regime in (4, 6):
                assert same_bits(expected, forced(kind, x, weight, bias, regime)), (rows, cols, regime)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_clusters_that_take_row_after_row(dtype: torch.dtype) -> None:
    """The bits of the regime that reads the input twice, in every run, of every row."""
    for cols in (65_544, 70_000, 81_920, 131_072):
        plan = launch_plans.row_plan(4001, cols, 2, weights=1, **gpu_of_plans())
        if plan is None or plan["held"] != IN_TURNS:
            pytest.skip("no clusters here")
        few, parameters = values(17, cols, dtype, 3.0), affine(cols, dtype)
        expected, x = forced("rms_norm", few, *parameters, 5), few.repeat(236, 1)[:4001]
        for weight, bias in (parameters, [p.float() for p in parameters]):
            for _ in range(3):
                ours = forced("rms_norm", x, weight, bias, 0)
                assert all(same_bits(ours[i : i + 17], expected[: len(ours[i:])]) for i in range(0, 4001, 17)), cols


@pytest.mark.parametrize("kind", tuple(WEIGHTS))
def test_a_team_has_the_first_part_of_rows_that_it_cannot_hold(kind: str) -> None:
    """The bits of the regime that reads the input twice, in every run, whether or not blocks are filled."""
    gpu = gpu_of_plans()
    group, blocks, at_once = 16 * 1024, min(128, gpu["multiprocessors"]), gpu["multiprocessors"]
    groups = at_once // 2 + blocks  # between what a team holds and twice its blocks
    if launch_plans.row_plan(19, group * groups, 4, weights=WEIGHTS[kind], regime=7, **gpu) is None:
        pytest.skip("a multiprocessor here has no room for slices of two rows, or a team holds such rows")
    for cols in (group * groups, group * (groups - 1) + 4, 2 * group * blocks - 12):
        chosen = launch_plans.row_plan(19, cols, 4, weights=WEIGHTS[kind], **gpu)
        assert chosen is not None and chosen["regime"] == 7
        weight, bias = affine(cols, torch.float32)
        for rows in (1, 2, 3, 19):
            x = values(rows, cols, torch.float32, 3.0)
            expected = forced(kind, x, weight, bias, 5)
            for _ in range(5):
                assert same_bits(expected, forced(kind, x, weight, bias, 7)), (rows, cols)


@pytest.mark.parametrize("kind", tuple(WEIGHTS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_batch_or_the_run(kind: str, dtype: torch.dtype) -> None:
    for cols in (7, 64, 130, 769, 1001, 4096, 20_480, 65_535, 81_920, 300_001):
        x = values(6, cols, dtype, 3.0)
        x[0, :3] = torch.tensor([2e-38, -1e-37, 3e-39])  # quotients of few bits
        x[1] = 0.0
        weight, bias = affine(cols, dtype)
        whole = forced(kind, x, weight, bias, 0)
        for _ in range(50):
            assert same_bits(whole, forced(kind, x, weight, bias, 0)), cols
        assert same_bits(whole.repeat(40, 1), forced(kind, x.repeat(40, 1), weight, bias, 0)), cols
        for i in range(len(x)):
            alone = torch.empty(cols + 1, device="cuda", dtype=dtype)[1:].copy_(x[i]).reshape(1, cols)
            assert same_bits(whole[i : i + 1], forced(kind, alone, weight, bias, 0)), cols


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


def gradients(function, inputs, grad):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    return torch.autograd.grad(function(*leaves), leaves, grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", (33, 1024, 5000))
def test_layer_norm_gradients(dtype: torch.dtype, cols: int) -> None:
    x, (w, b) = values(12, cols, dtype, 1.0), affine(cols, dtype)
    dy = values(12, cols, dtype, 0.0, seed=5)
    ours = gradients(lambda x, w, b: ops.layer_norm(x, (cols,), w, b), (x, w, b), dy)
    x64, w64, dy64 = x.double(), w.double(), dy.double()
    exact = gradients(lambda x, w, b: F.layer_norm(x, (cols,), w, b), (x64, w64, b.double()), dy64)
    rstd = (x64.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    xhat, g = rstd * (x64.abs() + x64.square().mean(-1, keepdim=True).sqrt()), (dy64 * w64).abs()
    dx = rstd * (g + g.mean(-1, keepdim=True) + xhat * (g * xhat).mean(-1, keepdim=True))
    for mine, ref, size in zip(ours, exact, (dx, (dy64.abs() * xhat).sum(0), dy64.abs().sum(0)), strict=True):
        assert_within(mine, ref, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", (33, 1024, 5000))
def test_rms_norm_gradients(dtype: torch.dtype, cols: int) -> None:
    x, (w, _) = values(12, cols, dtype, 1.0), affine(cols, dtype)
    dy = values(12, cols, dtype, 0.0, seed=5)
    ours = gradients(lambda x, w: ops.rms_norm(x, (cols,), w, 1e-6), (x, w), dy)
    x64, w64, dy64 = x.double(), w.double(), dy.double()
    exact = gradients(lambda x, w: F.rms_norm(x, (cols,), w, 1e-6), (x64, w64), dy64)
    rstd = (x64.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    xhat, g = rstd * x64.abs(), (dy64 * w64).abs()
    dx = rstd * (g + xhat * (g * xhat).mean(-1, keepdim=True))
    for mine, ref, size in zip(ours, exact, (dx, (dy64.abs() * xhat).sum(0)), strict=True):
        assert_within(mine, ref, size)


@pytest.mark.parametrize("cols", (33, 1024, 5000))
def test_l1_norm_gradients(cols: int) -> None:
    x, dy = values(12, cols, torch.float32, 1.0), values(12, cols, torch.float32, 0.0, seed=5)
    (ours,) = gradients(ops.l1_norm, (x,), dy)
    (exact,) = gradients(lambda x: x / x.abs().mean(-1, keepdim=True), (x.double(),), dy.double())
    mean = x.double().abs().mean(-1, keepdim=True)
    size = dy.double().abs() / mean + (dy * x).double().abs().mean(-1, keepdim=True) / mean**2
    assert_within(ours, exact, size)


@pytest.mark.case("requires-grad-each", "strided-gradient")
def test_partial_gradients_and_expanded_cotangents() -> None:
    x, (w, b) = values(7, 300, torch.float32, 1.0), affine(300, torch.float32)
    for wanted in range(3):
        tensors = [t.clone().requires_grad_(i == wanted) for i, t in enumerate((x, w, b))]
        ops.layer_norm(tensors[0], (300,), *tensors[1:]).sum().backward()
        alike = [t.detach().clone().requires_grad_(i == wanted) for i, t in enumerate((x, w, b))]
        F.layer_norm(alike[0], (300,), *alike[1:]).sum().backward()
        torch.testing.assert_close(tensors[wanted].grad, alike[wanted].grad, rtol=1e-4, atol=1e-4)
        assert all(t.grad is None for i, t in enumerate(tensors) if i != wanted)


@pytest.mark.parametrize("kind", tuple(WEIGHTS))
@pytest.mark.case("double-backward")
def test_double_backward(kind: str) -> None:
    x = values(5, 40, torch.float32, 1.0).requires_grad_()
    weight = affine(40, torch.float32)[0].requires_grad_()
    ours, plain = {
        "layer_norm": (lambda: ops.layer_norm(x, (40,), weight), lambda: F.layer_norm(x, (40,), weight)),
        "rms_norm": (lambda: ops.rms_norm(x, (40,), weight, 1e-6), lambda: F.rms_norm(x, (40,), weight, 1e-6)),
        "l1_norm": (lambda: ops.l1_norm(x), lambda: x / x.abs().mean(-1, keepdim=True)),
    }[kind]

    def second(function):
        (first,) = torch.autograd.grad(function().pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(second(ours), second(plain), rtol=1e-3, atol=1e-3)


@pytest.mark.case("functorch", "forward-mode-ad")
def test_transforms_go_to_pytorch() -> None:
    x, (w, b) = values(5, 40, torch.float32, 1.0), affine(40, torch.float32)
    tangent = values(5, 40, torch.float32, 0.0, seed=9)
    for ours, plain in (
        (lambda x: ops.layer_norm(x, (40,), w, b), lambda x: F.layer_norm(x, (40,), w, b)),
        (lambda x: ops.rms_norm(x, (40,), w, 1e-6), lambda x: F.rms_norm(x, (40,), w, 1e-6)),
        (lambda x: ops.l1_norm(x), lambda x: x / x.abs().mean(-1, keepdim=True)),
    ):
        torch.testing.assert_close(torch.vmap(ours)(x), torch.vmap(plain)(x))
        torch.testing.assert_close(torch.func.jvp(ours, (x,), (tangent,)), torch.func.jvp(plain, (x,), (tangent,)))
        expected = torch.func.jvp(plain, (x,), (tangent,))[1]
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            got = torch.autograd.forward_ad.unpack_dual(ours(dual)).tangent
            torch.testing.assert_close(got, expected)
