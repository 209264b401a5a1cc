"""layer_norm and rms_norm with what may stand before and behind them, and layer_norm_dim, without a GPU: formulas,
gradients, errors, plans, fakes."""

from __future__ import annotations

import itertools
from typing import Any

import launch_plans
import pytest
import torch
import torch.nn.functional as F
from test_ops import GPUS
from torch import Tensor

from normswap import native, ops
from normswap.activation import FUNCTIONS, NONE, Activation
from normswap.criterion import error_share

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = (
    *(Activation(name) for name in FUNCTIONS if name not in ("leaky_relu", "clamp")),
    *(Activation("leaky_relu", 0.2), Activation("clamp", -0.5, 1.0), Activation("clamp", 0.0, 6.0)),
)


def values(*shape: int, dtype: torch.dtype = torch.float64, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, dtype=torch.float64) + mean).to(dtype)


def norms(kind: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """An op with random affine parameters over the last dim of 6, and PyTorch's function of the same name."""
    weight, bias = values(6, dtype=dtype, mean=0.5), values(6, dtype=dtype)
    if kind == "layer_norm":
        return (
            lambda x, **options: ops.layer_norm(x, (6,), weight, bias, 1e-3, **options),
            lambda x: F.layer_norm(x, (6,), weight.to(x.dtype), bias.to(x.dtype), 1e-3),
        )
    return (
        lambda x, **options: ops.rms_norm(x, (6,), weight, 1e-3, **options),
        lambda x: F.rms_norm(x, (6,), weight.to(x.dtype), 1e-3),
    )


by_kind = pytest.mark.parametrize("kind", ("layer_norm", "rms_norm"))
by_dtype = pytest.mark.parametrize("dtype", DTYPES)


@by_kind
@by_dtype
def test_a_residual_is_added_first_and_the_sum_returned(kind: str, dtype: torch.dtype) -> None:
    op, pytorch = norms(kind, dtype)
    x, residual = values(3, 4, 6, dtype=dtype, mean=3.0), values(3, 4, 6, dtype=dtype)
    before = x.clone()
    out, total = op(x, residual=residual)
    assert torch.equal(total, x + residual) and total.dtype == dtype
    assert torch.equal(out, pytorch(x + residual)) and torch.equal(x, before)


@by_kind
@by_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_the_activation_is_of_the_rounded_norm(kind: str, dtype: torch.dtype, activation: Activation) -> None:
    op, pytorch = norms(kind, dtype)
    x = values(3, 4, 6, dtype=dtype, mean=0.3)
    assert torch.equal(op(x, activation=activation), activation(pytorch(x)))


@by_kind
@by_dtype
@pytest.mark.parametrize("samples", (1, 3))
def test_scale_and_shift_are_applied_in_float32_before_the_activation(
    kind: str, dtype: torch.dtype, samples: int
) -> None:
    op, pytorch = norms(kind, dtype)
    x = values(3, 4, 6, dtype=dtype, mean=0.3)
    scale, shift = values(samples, 1, 6, dtype=dtype), values(samples, 1, 6, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    adapted = (pytorch(x.to(wide)) * (1 + scale.to(wide)) + shift.to(wide)).to(dtype)
    assert torch.equal(op(x, scale=scale, shift=shift), adapted)
    assert torch.equal(op(x, scale=scale, shift=shift, activation=Activation("relu")), adapted.relu())
    out, total = op(x, residual=x, scale=scale, shift=shift)
    assert torch.equal(total, x + x) and torch.equal(out, op(total, scale=scale, shift=shift))


@by_dtype
def test_rms_norm_rounds_before_the_weight_and_then_adapts(dtype: torch.dtype) -> None:
    x, weight = values(2, 5, 6, dtype=dtype), values(6, dtype=dtype)
    scale, shift = values(2, 1, 6, dtype=dtype), values(2, 1, 6, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    normalised = F.rms_norm(x, (6,), None, 1e-3).to(wide) * (weight.to(wide) + 1.0)
    expected = (normalised * (1 + scale.to(wide)) + shift.to(wide)).to(dtype)
    order = {"weight_offset": 1.0, "cast_before_weight": True}
    assert torch.equal(ops.rms_norm(x, (6,), weight, 1e-3, **order, scale=scale, shift=shift), expected)


@by_kind
def test_options_are_differentiable(kind: str) -> None:
    def function(x: Tensor, residual: Tensor, w: Tensor, b: Tensor, scale: Tensor, shift: Tensor) -> Any:
        options = {"residual": residual, "scale": scale, "shift": shift, "activation": Activation("silu")}
        if kind == "layer_norm":
            return ops.layer_norm(x, (5,), w, b, **options)
        return (*ops.rms_norm(x, (5,), w, 1e-3, **options), b)

    shapes = ((2, 3, 5), (2, 3, 5), (5,), (5,), (2, 1, 5), (2, 1, 5))
    tensors = tuple(values(*shape).requires_grad_() for shape in shapes)
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


def test_what_does_not_fit_is_said() -> None:
    x, w = torch.randn(2, 3, 6), torch.randn(6)
    scale = torch.randn(2, 1, 6)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"residual": torch.randn(2, 1, 6)}, r"residual must have the input's shape.*got \(2, 1, 6\)"),
        ({"residual": x.double()}, "residual must have.*torch.float64"),
        ({"scale": scale}, "scale and shift must be given both or neither"),
        ({"shift": scale}, "scale and shift must be given both or neither"),
        ({"scale": scale[:, 0], "shift": scale}, r"scale must have.*got \(2, 6\)"),
        ({"scale": scale, "shift": torch.randn(2, 3, 6)}, r"shift must have.*got \(2, 3, 6\)"),
        ({"scale": torch.randn(3, 1, 6), "shift": scale}, r"scale must have.*got \(3, 1, 6\)"),
        ({"scale": scale[..., :1], "shift": scale}, r"scale must have.*got \(2, 1, 1\)"),
        ({"activation": Activation("relu7")}, "activation must be one of 'none', 'relu'.*got 'relu7'"),
    )
    for options, message in wrong:
        with pytest.raises(ValueError, match=f"layer_norm: {message}"):
            ops.layer_norm(x, (6,), w, **options)
        with pytest.raises(ValueError, match=f"rms_norm: {message}"):
            ops.rms_norm(x, (6,), w, **options)


def test_an_activation_that_is_none_by_value_is_none() -> None:
    x = torch.randn(2, 6)
    assert torch.equal(ops.layer_norm(x, (6,), activation=Activation()), ops.layer_norm(x, (6,), activation=NONE))


# --- layer_norm_dim ------------------------------------------------------------------------------------------------


@pytest.mark.case("other-dim", "output-strides")
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("shape", ((2, 6, 3, 5), (4, 6), (6,), (3, 1, 4), (2, 6, 1, 1)))
def test_layer_norm_dim_along_every_dim(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = values(*shape, dtype=dtype, mean=1.0)
    for dim in range(-len(shape), len(shape)):
        n = shape[dim]
        weight, bias = values(n, dtype=dtype), values(n, dtype=dtype)
        for pair in ((weight, bias), (None, None)):
            ours = ops.layer_norm_dim(x, dim, *pair, 1e-3)
            assert ours.dtype == dtype and ours.stride() == x.stride()
            rows = x.double().movedim(dim, -1)
            w = torch.ones(n).double() if pair[0] is None else weight.double()
            b = torch.zeros(n).double() if pair[1] is None else bias.double()
            rstd = (rows.var(-1, correction=0, keepdim=True) + 1e-3).rsqrt()
            magnitude = w.abs() * rstd * (rows.abs() + rows.square().mean(-1, keepdim=True).sqrt()) + b.abs()
            exact = F.layer_norm(rows, (n,), w, b, 1e-3)
            assert error_share(ours.movedim(dim, -1), exact, magnitude, 4.0) <= 1.0


def test_layer_norm_dim_keeps_channels_last() -> None:
    x = torch.randn(2, 6, 3, 5).to(memory_format=torch.channels_last)
    assert ops.layer_norm_dim(x, 1, torch.randn(6)).stride() == x.stride()


@pytest.mark.case("double-backward", "forward-mode-ad", "functorch")
def test_layer_norm_dim_is_differentiable() -> None:
    tensors = tuple(values(*shape).requires_grad_() for shape in ((2, 5, 3), (5,), (5,)))
    function = lambda x, w, b: ops.layer_norm_dim(x, 1, w, b)  # noqa: E731
    assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, tensors)
    over_last = torch.vmap(lambda row: ops.layer_norm_dim(row, 1), in_dims=2, out_dims=2)
    torch.testing.assert_close(over_last(tensors[0]), ops.layer_norm_dim(tensors[0], 1))


@pytest.mark.case("bad-shapes")
def test_layer_norm_dim_says_what_is_wrong() -> None:
    x = torch.randn(2, 5, 3)
    for wrong in (torch.randn(3), torch.randn(1), torch.randn(5, 1)):
        with pytest.raises(ValueError, match=r"weight and bias must have shape \(5,\)"):
            ops.layer_norm_dim(x, 1, wrong)
        with pytest.raises(ValueError, match=r"weight and bias must have shape \(5,\)"):
            ops.layer_norm_dim(x, 1, None, wrong)
    with pytest.raises(TypeError, match=r"floating-point, got torch.int64"):
        ops.layer_norm_dim(torch.ones(2, 5, dtype=torch.int64), 1)
    with pytest.raises(IndexError, match="dim must be from -3 to 2, got 3"):
        ops.layer_norm_dim(x, 3)


# --- of the compiled library ---------------------------------------------------------------------------------------


@pytest.fixture
def library() -> None:
    if not native.status().available:
        pytest.skip(f"the compiled library is not here: {native.status().reason}")


@pytest.mark.usefixtures("library")
def test_rows_with_options_lie_in_registers_or_are_split() -> None:
    """And are cut as rows without: the bits of their statistics are the same."""
    same = ("vec", "lanes", "chunk_len", "chunks")
    for cols, rows, itemsize in itertools.product(
        (*range(1, 40), *(2**k + d for k in range(6, 23) for d in (-1, 0, 1, 2)), 3 * 10**8), (1, 100_000), (2, 4)
    ):
        if rows * cols > 2e10:
            continue
        for gpu, ragged in itertools.product(GPUS, (False, True)):
            with_options = launch_plans.row_plan(rows, cols, itemsize, ragged=ragged, options=True, **gpu)
            plain = launch_plans.row_plan(rows, cols, itemsize, ragged=ragged, weights=1, **gpu)
            assert with_options is not None and plain is not None
            assert [with_options[key] for key in same] == [plain[key] for key in same]
            regime, held = with_options["regime"], with_options["held"]
            assert regime in (1, 2, 5) or (regime in (3, 4) and held in (2, 3, 4)), cols
            assert not ragged or regime != 4, cols
            assert regime not in (3, 4) or with_options["warps"] == with_options["block_chunks"]
            for refused in (6, 7):
                forced = launch_plans.row_plan(rows, cols, itemsize, ragged=ragged, options=True, regime=refused, **gpu)
                assert forced is None


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", ("layer_norm", "rms_norm"))
def test_the_fake_of_a_direct_op_declines(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    op = getattr(torch.ops.normswap, f"{name}_or_none")
    with FakeTensorMode():
        x = torch.empty(4, 6, device="cuda")
        norm = (None, 1e-5) if name.startswith("layer") else (1e-5, 0.0, False)
        wide = (False,) if name.startswith("layer") else ()
        assert op(x, 1, None, *norm, x, None, None, 0, 0.0, 0.0, *wide) == (None, None)
