"""RMSNorms written by hand on the GPU: every spelling, the classes of transformers, look-alikes, modes and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import region_checks
import torch
from models import randomised
from rms_look_alikes import LOOK_ALIKES
from rms_models import (
    CHANNELS,
    DTYPES,
    LAST,
    NARROW,
    SIZE,
    TRANSFORMERS,
    Calls,
    Helpers,
    OfChannelsOffset,
    OfChannelsWeighted,
    Optional_,
    Power,
    Squared,
    Sub,
    Times,
    assert_same,
    check,
    from_transformers,
    made,
    shape_for,
    tiny_model,
)
from torch import Tensor, nn

import normswap
from normswap import rules
from normswap.plans import Reason, Refusal

KINDS = (Times, Power, OfChannelsWeighted, OfChannelsOffset)
"""The weight after a cast, an offset before it, along another dim than the last, both."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def pair(cls: type[nn.Module]) -> tuple[Any, Any, Tensor]:
    """(the original, a swapped copy of it, an input)."""
    module = made(cls).cuda()
    return module, normswap.optimize(module, validate="off"), torch.randn(shape_for(cls), device="cuda")


@pytest.mark.case("rms-cast-orders", "dtypes", "training-branches", "train-eval")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls", [*LAST, *CHANNELS, Sub], ids=lambda c: c.__name__)
@pytest.mark.filterwarnings("ignore:optimize. returns a copy")
def test_every_spelling_is_swapped_and_equal(
    cls: type[nn.Module], dtype: torch.dtype, training: bool, calls: Calls
) -> None:
    module = made(cls).to("cuda", dtype).train(training)
    x = 2 * torch.randn(shape_for(cls), device="cuda", dtype=dtype) + 1
    check(module, x, calls, served=cls not in NARROW or dtype is torch.float32)


@pytest.mark.case("mixed-weights")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("cls", [Squared, Power, OfChannelsWeighted, Times, Optional_], ids=lambda c: c.__name__)
def test_float32_weights_with_16_bit_inputs(cls: type[nn.Module], dtype: torch.dtype, calls: Calls) -> None:
    x = torch.randn(shape_for(cls), device="cuda").to(dtype)
    check(made(cls).cuda(), x, calls, cls not in (Times, Optional_))


@pytest.mark.case("rms-cast-orders", "dtypes")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_classes_of_transformers_are_swapped_and_equal(name: str, dtype: torch.dtype, calls: Calls) -> None:
    module = randomised(from_transformers(name)).to("cuda", dtype).eval()
    x = (3 * torch.randn(5, 7, SIZE, device="cuda")).to(dtype)
    check(module, x, calls, served=name not in NARROW or dtype is torch.float32)


@pytest.mark.case("ragged-rows", "offset-mean")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [769, 1001, 4096, 65535])
@pytest.mark.parametrize("name", ["llama.LlamaRMSNorm", "gemma.GemmaRMSNorm", "olmo2.Olmo2RMSNorm"])
def test_rows_of_every_length(name: str, size: int, dtype: torch.dtype, calls: Calls) -> None:
    module = randomised(from_transformers(name, size)).to("cuda", dtype).eval()
    for mean in (0.0, 100.0):
        check(module, (torch.randn(9, size, device="cuda") + mean).to(dtype), calls)


@pytest.mark.case("one-element")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["llama.LlamaRMSNorm", "gemma.GemmaRMSNorm", "olmo2.Olmo2RMSNorm"])
def test_a_weight_of_one_value_may_be_meant_for_every_channel(name: str, dtype: torch.dtype) -> None:
    module = randomised(from_transformers(name, 1)).to("cuda", dtype).eval()
    answer = rules.alone(module)
    assert isinstance(answer, Refusal) and "not one value per index" in answer.detail
    swapped = region_checks.swap(module)
    for channels in (1, 5):
        x = torch.randn(9, channels, device="cuda").to(dtype)
        assert_same(swapped(x), module(x), dtype)


@pytest.mark.case("containers")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "sites"), [("qwen3", 2 * 4 + 1), ("gemma2", 2 * 4 + 1), ("llama", 2 * 2 + 1)])
def test_whole_models_of_transformers(name: str, sites: int, dtype: torch.dtype, calls: Calls) -> None:
    model = tiny_model(name).to("cuda", dtype).eval()
    tokens = torch.randint(0, 90, (2, 11), device="cuda")
    swapped = normswap.optimize(model, tokens, min_speedup=None)
    report = normswap.report(swapped)
    norms = [row for row in report.rows if row["kind"] == "rms_norm" and row["swapped"]]
    assert len(norms) == sites and report.model is not None and report.model["passed"], str(report)
    before = calls.count
    with torch.no_grad():
        swapped(tokens)
    assert calls.count == before + sites


@pytest.mark.case(
    "strided-input", "channels-last", "output-strides", "strided-gradient", "never-writes-input", "misaligned"
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls", KINDS, ids=lambda c: c.__name__)
def test_layouts(cls: type[nn.Module], dtype: torch.dtype, calls: Calls) -> None:
    module = made(cls).to("cuda", dtype)
    plain = torch.randn(shape_for(cls), device="cuda").to(dtype)
    for x in (
        plain.transpose(0, -2).contiguous().transpose(0, -2),
        plain.transpose(-1, 1).contiguous().transpose(-1, 1),
        torch.cat([plain, plain], -2)[..., : plain.shape[-2], :],
        plain[:1].expand(7, *plain.shape[1:]),
        torch.cat([plain.flatten()[:1], plain.flatten()])[1:].view(plain.shape),
    ):
        before = x.clone()
        swapped = check(module, x, calls, served=0 not in x.stride())
        leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        swapped(leaf).sum().backward()
        assert leaf.grad is not None and torch.equal(x, before)


@pytest.mark.case("empty-batch", "zero-rows", "non-finite-rows", "large-values", "eps-range", "zero-weights")
@pytest.mark.parametrize("cls", KINDS, ids=lambda c: c.__name__)
def test_values(cls: type[nn.Module]) -> None:
    module, swapped, x = pair(cls)
    bad = x.clone()
    bad[0, 0], bad[1, 0] = torch.nan, torch.inf
    with torch.no_grad():
        module.weight[0] = swapped.weight[0] = 0
    for eps in (1e-5, 0.0, 1e-30, 10.0):
        module.eps = swapped.eps = eps
        for given in (x + 1000, torch.zeros_like(x), x * 1e30, x[:0], bad):
            torch.testing.assert_close(swapped(given), module(given), equal_nan=True)


@pytest.mark.case("autocast")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("cls", [*KINDS, Optional_], ids=lambda c: c.__name__)
def test_autocast_is_the_originals(cls: type[nn.Module], dtype: torch.dtype) -> None:
    module, swapped, x = pair(cls)
    with torch.autocast("cuda", dtype=dtype):
        for given in (x, x.to(dtype)):
            expected = module(given)
            assert_same(swapped(given), expected, dtype)


@pytest.mark.case("functorch", "double-backward", "forward-mode-ad")
@pytest.mark.parametrize("cls", KINDS, ids=lambda c: c.__name__)
def test_transforms_are_the_originals(cls: type[nn.Module]) -> None:
    module, swapped, x = pair(cls)
    direction = torch.randn_like(x)

    def results(norm: nn.Module) -> list[Tensor]:
        value, tangent = torch.func.jvp(norm, (x,), (direction,))
        rows = torch.vmap(norm)(x[None].expand(2, *x.shape))
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(norm(leaf).sin().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad((first * direction).sum(), leaf)
        return [value, tangent, rows, first, second]

    for ours, theirs in zip(results(swapped), results(module), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("cls", [*KINDS, Helpers, Optional_], ids=lambda c: c.__name__)
def test_compile_and_export_without_graph_breaks(cls: type[nn.Module]) -> None:
    module, swapped, x = pair(cls)
    torch._dynamo.reset()
    compiled = torch.compile(swapped, fullgraph=True, dynamic=True)
    for given in (x, torch.cat([x, x])):
        assert_same(compiled(given), module(given), torch.float32)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(ours).sin().sum().backward()
    module(theirs).sin().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    exported = torch.export.export(swapped, (x,)).module()
    assert_same(exported(x), module(x), torch.float32)


@pytest.mark.case("cuda-graph", "streams", "no-grad-inference", "attributes-changed-later")
@pytest.mark.parametrize("cls", KINDS, ids=lambda c: c.__name__)
def test_cuda_graph_reads_the_weight_on_replay(cls: type[nn.Module]) -> None:
    module, swapped, x = pair(cls)
    torch.cuda.synchronize()  # the other stream does not wait for what made these
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        assert_same(swapped(x), module(x), torch.float32)
        torch.cuda.synchronize()
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = swapped(x)
        x.normal_()
        swapped.weight.data.mul_(3)
        module.weight.data.mul_(3)
        graph.replay()
        assert_same(out, module(x), torch.float32)


@pytest.mark.case("trap-no-grad-block", "trap-autocast-block", "trap-grad-query", "trap-config-and-globals")
@pytest.mark.case("trap-isinstance", "trap-shape-after-in-place", "trap-returns-rstd", "side-effects")
@pytest.mark.parametrize(("cls", "reason", "word"), LOOK_ALIKES, ids=lambda v: getattr(v, "__name__", ""))
def test_look_alikes_are_refused(cls: type[nn.Module], reason: Reason, word: str) -> None:
    answer = rules.alone(cls().cuda())
    assert isinstance(answer, Refusal), answer
    assert (answer.kind, answer.reason) == ("rms_norm", reason) and word in answer.detail
