"""Ways to call a swapped norm: train and eval, without gradients, transforms, higher derivatives, autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from norm_models import (
    assert_alike,
    assert_close,
    assert_same_error,
    assert_swaps_alike,
    by_kind,
    cotangent_of,
    made,
    swapped_copy,
)
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from normswap import modules


@by_kind
@pytest.mark.parametrize("proved_in_training", (True, False))
@pytest.mark.case("train-eval")
def test_train_and_eval_whatever_the_proof_ran_in(kind: str, proved_in_training: bool) -> None:
    model, x = made(kind)
    swapped = swapped_copy(model.train(proved_in_training), x)
    for training in (True, False, True):
        model.train(training), swapped.train(training)
        assert_alike(model, swapped, x, cotangent_of(model, x))


@by_kind
@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("no-grad-inference")
def test_without_gradients(kind: str, mode: Callable[[], torch.no_grad], training: bool) -> None:
    model, x = made(kind)
    swapped = swapped_copy(model.train(training), x)
    with mode():
        assert_alike(model, swapped, x)
        assert not swapped(x).requires_grad and swapped(x).is_inference() == model(x).is_inference()


@by_kind
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("requires-grad-each", "frozen-parameters")
def test_any_subset_of_tensors_requires_gradients(kind: str, training: bool) -> None:
    model, x = made(kind)
    swapped = swapped_copy(model.train(training), x)
    cotangent = cotangent_of(model, x)
    names = ["input", *dict(model.named_parameters())]
    subsets = [*([name] for name in names), names, names[1:]]
    for wanted in filter(None, subsets):
        found = []
        for one in (model, swapped):
            leaf = x.detach().clone().requires_grad_("input" in wanted)
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(name in wanted)
                parameter.grad = None
            one(leaf).backward(cotangent)
            found.append({n: t.grad for n, t in (("input", leaf), *one.named_parameters()) if t.grad is not None})
        assert found[0].keys() == found[1].keys() == set(wanted)
        for name, expected in found[0].items():
            assert_close(found[1][name], expected, f"gradient of {name}")


@by_kind
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("double-backward")
def test_double_backward(kind: str, training: bool) -> None:
    model, x = made(kind, dtype=torch.float64)
    swapped = swapped_copy(model.train(training), x)
    found = []
    for one in (model, swapped):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(one(leaf).pow(3).sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [leaf, *one.parameters()], allow_unused=True))
    for ours, theirs in zip(*reversed(found), strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            assert_close(ours, theirs, "gradient")


@by_kind
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("forward-mode-ad")
def test_forward_mode(kind: str, training: bool) -> None:
    """With frozen parameters too, where an autograd.Function would give a tangent of zero."""
    model, x = made(kind)
    swapped, tangent = swapped_copy(model.train(training), x), torch.randn_like(x)
    for frozen in (False, True):
        found = []
        for one in (model, swapped):
            one.requires_grad_(not frozen)
            with forward_ad.dual_level():
                found.append(forward_ad.unpack_dual(one(forward_ad.make_dual(x, tangent))))
            if one.training and kind == "linear_scale_batch_norm":
                continue  # functorch forbids the buffers' in-place updates, in PyTorch as in ours
            found[-1] = (*found[-1], *jvp(one, (x,), (tangent,)))
        for ours, theirs in zip(*reversed(found), strict=True):
            assert theirs.abs().max() > 0
            assert_close(ours, theirs)


@by_kind
@pytest.mark.case("functorch")
def test_vmap_and_functional_call(kind: str) -> None:
    model, x = made(kind)
    swapped = swapped_copy(model, x)
    batch = torch.stack([x, x + 1, 2 * x])
    assert_close(vmap(swapped)(batch), vmap(model)(batch))
    other = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    assert_close(functional_call(swapped, other, (x,)), functional_call(model, other, (x,)))
    ensemble = {name: torch.stack([p, p + 1]) for name, p in other.items()}
    found = []
    for one in (model, swapped):
        loss = lambda parameters, x, one=one: functional_call(one, parameters, (x,)).square().sum()  # noqa: E731
        found.append((grad(loss)(other, x), vmap(grad(loss), (0, None))(ensemble, x)) if other else ())
    for ours, theirs in zip(*reversed(found), strict=True):
        for name, expected in theirs.items():
            assert_close(ours[name], expected, f"gradient of {name}")


@pytest.mark.case("functorch")
def test_vmap_of_batch_norm_in_training_is_pytorchs_error() -> None:
    model, x = made("linear_scale_batch_norm")
    swapped, batch = swapped_copy(model.train(), x), torch.stack([x, x + 1])
    assert_same_error(lambda: vmap(swapped)(batch), lambda: vmap(model)(batch))


@by_kind
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("autocast")
def test_autocast(kind: str, dtype: torch.dtype, training: bool) -> None:
    model, x = made(kind)
    swapped = swapped_copy(model.train(training), x)
    for given in (x, x.to(dtype)) if kind != "linear_scale_batch_norm" else (x,):
        with torch.autocast("cpu", dtype=dtype):
            cotangent = cotangent_of(model, given)
        with torch.autocast("cpu", dtype=dtype):  # without the weights that were cast there, without gradients
            assert_alike(model, swapped, given, cotangent)


@by_kind
@pytest.mark.case("autocast")
def test_a_proof_under_autocast(kind: str) -> None:
    model, x = made(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_swaps_alike(model, x)


class Checkpointed(nn.Module):
    """A norm in an activation checkpoint."""

    def __init__(self, norm: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.norm, self.use_reentrant = norm, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.norm, x, use_reentrant=self.use_reentrant)


@by_kind
@pytest.mark.parametrize("use_reentrant", (True, False))
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("activation-checkpointing")
def test_activation_checkpointing(kind: str, use_reentrant: bool, training: bool) -> None:
    model, x = made(kind)
    model = Checkpointed(model, use_reentrant).train(training)
    swapped = swapped_copy(model, x.requires_grad_())
    assert modules.site_match(swapped.norm) is not None
    assert_alike(model, swapped, x, cotangent_of(model, x))
