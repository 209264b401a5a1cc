"""Our ops inside PyTorch: opcheck, torch.compile, export, CUDA graphs, streams, autocast, checkpointing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from row_checks import NO_OPTIONS
from torch import nn
from torch.utils.checkpoint import checkpoint

from normswap import modules, ops


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module.cuda()


def cases() -> list[tuple[nn.Module, nn.Module, torch.Tensor]]:
    pairs = [
        (nn.LayerNorm(64), modules.LayerNorm, torch.randn(6, 64)),
        (nn.RMSNorm(64, eps=1e-6), modules.RMSNorm, torch.randn(6, 64)),
        (nn.GroupNorm(4, 8), modules.GroupNorm, torch.randn(3, 8, 5, 5)),
    ]
    out = []
    for plain, swapped, x in pairs:
        randomised(plain)
        out.append((plain, swapped.from_torch(plain), x.cuda()))
    return out


def test_opcheck() -> None:
    x = torch.randn(6, 64, device="cuda")
    w = torch.randn(64, device="cuda")
    s = torch.empty(6, device="cuda")
    n, image = torch.ops.normswap, x.view(3, 8, 4, 4)
    calls = [
        (n.layer_norm.default, (x, 1, w, w, 1e-5, *NO_OPTIONS, torch.empty_like(x), None, s, s.clone(), 0)),
        (n.rms_norm.default, (x, 1, w, 1e-5, 1.0, True, *NO_OPTIONS, torch.empty_like(x), None, s, 0)),
        (n.l1_norm.default, (x, 64, 0.0, 0.0, torch.empty_like(x), None, 0)),
        (n.l1_norm_dim.default, (x, 0, 0.0, 0.1, torch.empty_like(x), w.clone())),
        (n.l1_norm_dim_backward.default, (x, x, w, 0, 0.0, 0.1, torch.empty_like(x))),
        (n.rms_norm_dim.default, (x, s, 0, 1e-5, torch.empty_like(x), w.clone())),
        (n.rms_norm_dim_backward.default, (x, x, s, w, 0, torch.empty_like(x), s.clone())),
        (
            n.group_norm.default,
            (image, w[:8], w[:8], 4, 1e-5, False, 2, 0.0, 0.0, None, image * 0, None, None, 0),
        ),
        (n.affine.default, (x, w, w, w.abs(), w, w, 1e-5, x * 0)),
        (n.fold_linear.default, (x, s * 0, None, s * 0, s * 0 + 1, s * 0, None, 1e-5, x * 0, s * 0)),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_ops_along_a_dim_compile_with_gradients() -> None:
    x, w = torch.randn(3, 16, 5, device="cuda"), torch.randn(16, device="cuda")
    for function in (
        lambda x, w: ops.l1_norm(x, 1, 0.0, 0.1) * w[:, None],
        lambda x, w: ops.rms_norm_dim(x, 1, w),
        lambda x, w: ops.rms_norm(x.transpose(1, 2), (16,), w, 1e-6, weight_offset=1.0, cast_before_weight=True),
    ):
        torch._dynamo.reset()
        results = []
        for f in (function, torch.compile(function, fullgraph=True, dynamic=True)):
            leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
            out = f(*leaves)
            out.square().sum().backward()
            results.append([out, *(leaf.grad for leaf in leaves)])
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_our_kernels_run() -> None:
    from torch.profiler import ProfilerActivity, profile

    for _, swapped, x in cases():
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled, torch.no_grad():
            swapped(x)
            torch.cuda.synchronize()
        assert any("normswap::" in event.key for event in profiled.key_averages())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.case("torch-compile")
def test_compile_without_graph_breaks() -> None:
    for plain, swapped, x in cases():
        torch._dynamo.reset()
        compiled = torch.compile(swapped, fullgraph=True, dynamic=True)
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-4)
        taller = torch.cat([x, x])
        torch.testing.assert_close(compiled(taller), plain(taller), rtol=1e-4, atol=1e-4)
        leaf, alike = x.clone().requires_grad_(), x.clone().requires_grad_()
        compiled(leaf).square().sum().backward()
        plain(alike).square().sum().backward()
        torch.testing.assert_close(leaf.grad, alike.grad, rtol=1e-3, atol=1e-3)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.case("torch-export")
def test_export() -> None:
    for plain, swapped, x in cases():
        exported = torch.export.export(swapped, (x,))
        torch.testing.assert_close(exported.module()(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.case("cuda-graph")
def test_cuda_graph() -> None:
    for plain, swapped, x in cases():
        with torch.no_grad():
            swapped(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = swapped(x)
            x.copy_(torch.randn_like(x))
            graph.replay()
            torch.testing.assert_close(out, plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.case("streams")
def test_current_stream() -> None:
    stream = torch.cuda.Stream()
    x = torch.zeros(4, 128, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(200_000_000)
        x.copy_(torch.arange(128, device="cuda").float().expand(4, 128))
        out = ops.l1_norm(x)
    stream.synchronize()
    torch.testing.assert_close(out, x / x.abs().mean(-1, keepdim=True))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.case("autocast")
def test_autocast(dtype: torch.dtype) -> None:
    for plain, swapped, x in cases():
        for given in (x, x.to(dtype)):
            with torch.autocast("cuda", dtype=dtype):
                expected, ours = plain(given), swapped(given)
            assert ours.dtype == expected.dtype
            torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.case("activation-checkpointing", "no-grad-inference", "functorch")
def test_checkpointing_inference_mode_and_functional_call() -> None:
    for plain, swapped, x in cases():
        leaf, alike = x.clone().requires_grad_(), x.clone().requires_grad_()
        checkpoint(swapped, leaf, use_reentrant=False).square().sum().backward()
        plain(alike).square().sum().backward()
        torch.testing.assert_close(leaf.grad, alike.grad, rtol=1e-3, atol=1e-3)
        with torch.inference_mode():
            torch.testing.assert_close(swapped(x), plain(x), rtol=1e-4, atol=1e-4)
        other = {k: torch.randn_like(v) for k, v in plain.named_parameters()}
        torch.testing.assert_close(
            torch.func.functional_call(swapped, other, (x,)),
            torch.func.functional_call(plain, other, (x,)),
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.case("mixed-weights")
def test_float32_weights_of_16_bit_inputs() -> None:
    x = torch.randn(5, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(96, device="cuda", requires_grad=True)
    ours = ops.rms_norm(x, (96,), w, 1e-6)
    assert ours.dtype == F.rms_norm(x, (96,), w, 1e-6).dtype
    torch.testing.assert_close(ours, F.rms_norm(x, (96,), w, 1e-6))
    ours.sum().backward()
    got = x.grad, w.grad
    x.grad = w.grad = None
    F.rms_norm(x, (96,), w, 1e-6).sum().backward()
    torch.testing.assert_close(got[0], x.grad, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got[1], w.grad, rtol=1e-4, atol=1e-4)
    expected = F.layer_norm(x.float(), (96,), w, w).bfloat16()
    torch.testing.assert_close(ops.layer_norm(x, (96,), w, w), expected)


@pytest.mark.case("bad-shapes")
def test_bad_shapes_raise_pytorch_s_errors() -> None:
    x = torch.randn(4, 30, device="cuda")
    for ours, plain in (
        (lambda: ops.layer_norm(x, (29,)), lambda: F.layer_norm(x, (29,))),
        (lambda: ops.group_norm(x, 8), lambda: F.group_norm(x, 8)),
        (lambda: ops.rms_norm(x, (31,)), lambda: F.rms_norm(x, (31,))),
    ):
        with pytest.raises(Exception) as expected:
            plain()
        with pytest.raises(expected.type) as got:
            ours()
        assert str(got.value) == str(expected.value)
