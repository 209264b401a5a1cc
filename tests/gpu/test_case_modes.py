"""Ways to call a swapped norm on the GPU: modes, transforms, autocast, streams, another GPU, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from norm_models import (
    DTYPES,
    assert_alike,
    assert_close,
    assert_same_error,
    by_kind,
    cotangent_of,
    made,
    swapped_copy,
)
from torch.func import functional_call, jvp, vmap
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

DEVICE = "cuda"
in_both_modes = pytest.mark.parametrize("training", (True, False))


@by_kind
@pytest.mark.parametrize("proved_in_training", (True, False))
@pytest.mark.case("train-eval")
def test_train_and_eval_whatever_the_proof_ran_in(kind: str, proved_in_training: bool) -> None:
    model, x = made(kind, DEVICE)
    swapped = swapped_copy(model.train(proved_in_training), x)
    for training in (True, False, True):
        model.train(training), swapped.train(training)
        assert_alike(model, swapped, x, cotangent_of(model, x))


@by_kind
@in_both_modes
@pytest.mark.case("no-grad-inference")
def test_without_gradients_our_kernels_run(kind: str, training: bool) -> None:
    model, x = made(kind, DEVICE)
    swapped = swapped_copy(model.train(training), x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_alike(model, swapped, x)
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                swapped(x)
            model(x)  # so that both have seen as many batches
        assert any(event.key.startswith("normswap::") for event in profiled.key_averages())


@by_kind
@in_both_modes
@pytest.mark.case("requires-grad-each", "frozen-parameters")
def test_any_one_tensor_requires_gradients(kind: str, training: bool) -> None:
    model, x = made(kind, DEVICE)
    swapped = swapped_copy(model.train(training), x)
    cotangent = cotangent_of(model, x)
    for wanted in ("input", *dict(model.named_parameters())):
        found = []
        for one in (model, swapped):
            leaf = x.detach().clone().requires_grad_(wanted == "input")
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(name == wanted)
                parameter.grad = None
            one(leaf).backward(cotangent)
            found.append({n: t.grad for n, t in (("input", leaf), *one.named_parameters()) if t.grad is not None})
        assert found[0].keys() == found[1].keys() == {wanted}
        assert_close(found[1][wanted], found[0][wanted], f"gradient of {wanted}")


@by_kind
@in_both_modes
@pytest.mark.case("double-backward")
def test_double_backward(kind: str, training: bool) -> None:
    model, x = made(kind, DEVICE)
    swapped = swapped_copy(model.train(training), x)
    wide, found = model.double(), []
    for one, leaf in ((wide, x.double()), (swapped, x.clone())):
        leaf.requires_grad_()
        (first,) = torch.autograd.grad(one(leaf).pow(3).sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        found.append((first.detach().float(), second.float()))
    for ours, theirs in zip(*reversed(found), strict=True):
        size = float(theirs.abs().max()) + 1.0
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2 * size)


@by_kind
@pytest.mark.case("forward-mode-ad")
def test_forward_mode(kind: str) -> None:
    """With frozen parameters too, where an autograd.Function would give a tangent of zero."""
    model, x = made(kind, DEVICE)
    swapped, tangent = swapped_copy(model, x), torch.randn_like(x)
    for frozen in (False, True):
        found = []
        for one in (model, swapped):
            one.requires_grad_(not frozen)
            with forward_ad.dual_level():
                found.append(forward_ad.unpack_dual(one(forward_ad.make_dual(x, tangent))))
            found[-1] = (*found[-1], *jvp(one, (x,), (tangent,)))
        for ours, theirs in zip(*reversed(found), strict=True):
            assert theirs.abs().max() > 0
            assert_close(ours, theirs)


@by_kind
@pytest.mark.case("functorch")
def test_vmap_and_functional_call(kind: str) -> None:
    model, x = made(kind, DEVICE)
    swapped, batch = swapped_copy(model, x), torch.stack([x, x + 1, 2 * x])
    assert_close(vmap(swapped)(batch), vmap(model)(batch))
    other = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    assert_close(functional_call(swapped, other, (x,)), functional_call(model, other, (x,)))


@pytest.mark.case("functorch")
def test_vmap_of_batch_norm_in_training_is_pytorchs_error() -> None:
    model, x = made("linear_scale_batch_norm", DEVICE)
    swapped, batch = swapped_copy(model.train(), x), torch.stack([x, x + 1])
    assert_same_error(lambda: vmap(swapped)(batch), lambda: vmap(model)(batch))


@by_kind
@pytest.mark.parametrize("dtype", DTYPES[1:])
@in_both_modes
@pytest.mark.case("autocast")
def test_autocast(kind: str, dtype: torch.dtype, training: bool) -> None:
    model, x = made(kind, DEVICE)
    swapped = swapped_copy(model.train(training), x)
    for given in (x, x.to(dtype)) if kind != "linear_scale_batch_norm" else (x,):
        with torch.autocast(DEVICE, dtype=dtype), torch.no_grad():
            assert_alike(model, swapped, given)


@by_kind
@pytest.mark.parametrize("use_reentrant", (True, False))
@in_both_modes
@pytest.mark.case("activation-checkpointing")
def test_activation_checkpointing(kind: str, use_reentrant: bool, training: bool) -> None:
    model, x = made(kind, DEVICE)
    swapped = swapped_copy(model.train(training), x)
    cotangent, found = cotangent_of(model, x), []
    for one in (model, swapped):
        leaf = x.detach().clone().requires_grad_()
        checkpoint(one, leaf, use_reentrant=use_reentrant).backward(cotangent)
        found.append([leaf.grad, *(p.grad for p in one.parameters()), *one.buffers()])
    for ours, theirs in zip(*reversed(found), strict=True):
        assert_close(ours, theirs, "gradient")


@by_kind
@in_both_modes
@pytest.mark.case("streams")
def test_the_current_stream(kind: str, training: bool) -> None:
    """The input is written late on a stream of its own: a kernel launched elsewhere would read zeros."""
    model, x = made(kind, DEVICE)
    swapped = swapped_copy(model.train(training), x)
    expected = model(x).detach()
    stream, late = torch.cuda.Stream(), torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), torch.no_grad():
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        ours = swapped(late)
    stream.synchronize()
    assert_close(ours, expected)


@by_kind
@in_both_modes
@pytest.mark.case("second-gpu")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_tensor_on_another_gpu_than_the_current_one(kind: str, training: bool) -> None:
    model, x = made(kind, "cuda:1")
    assert torch.cuda.current_device() == 0
    swapped = swapped_copy(model.train(training), x)
    assert_alike(model, swapped, x, cotangent_of(model, x))
    assert swapped(x).device == x.device and torch.cuda.current_device() == 0


@by_kind
@pytest.mark.case("cuda-graph")
def test_capture_and_replay(kind: str) -> None:
    model, x = made(kind, DEVICE)
    swapped, graph = swapped_copy(model, x), torch.cuda.CUDAGraph()
    with torch.no_grad():
        swapped(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = swapped(x)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert_close(captured, model(x))


@by_kind
@in_both_modes
@pytest.mark.case("cuda-graph")
def test_capture_of_forward_and_backward(kind: str, training: bool) -> None:
    model, x = made(kind, DEVICE)
    swapped = swapped_copy(model.train(training), x)
    captured = torch.cuda.make_graphed_callables(swapped, (x.clone().requires_grad_(),), allow_unused_input=True)
    fresh, cotangent = torch.randn_like(x), cotangent_of(model, x)
    found = []
    for one in (model, captured):
        leaf = fresh.clone().requires_grad_()
        output = one(leaf)
        output.backward(cotangent)
        found.append((output.detach().clone(), leaf.grad.clone()))
    for ours, theirs in zip(*reversed(found), strict=True):
        assert_close(ours, theirs, "gradient")


@by_kind
@pytest.mark.case("cuda-graph")
def test_nothing_waits_for_the_gpu(kind: str) -> None:
    """A synchronising call would break a capture, and stall every loop."""
    model, x = made(kind, DEVICE)
    swapped = swapped_copy(model.train(), x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        swapped(x.requires_grad_()).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
