"""Conditions whose loss little else would notice: each test here fails when its one is dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Activated, Projection, randomised
from torch import Tensor, nn

import normswap
from normswap import rules
from normswap.criterion import mask_mismatch
from normswap.forwards import linear_scale_batch_norm as lsb
from normswap.plans import Match, Refusal

INF = float("inf")


@pytest.mark.parametrize("ours", [3.0, -INF])
def test_an_inf_that_ours_does_not_have_or_has_with_the_other_sign(ours: float) -> None:
    eager = torch.tensor([1.0, INF])
    assert "Inf in 1" in mask_mismatch(torch.tensor([1.0, ours]), eager, eager.double())
    assert "Inf in 1" in mask_mismatch(eager, torch.tensor([1.0, ours]), torch.tensor([1.0, ours]).double())
    assert mask_mismatch(eager, eager, eager.double()) == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_of_the_folded_linear_stay_in_the_range_of_pytorchs(dtype: torch.dtype) -> None:
    """Many rows of large values: dy^T x leaves float16's range, PyTorch's gradients do not."""
    site = randomised(Projection(2, 3)).eval().to(dtype)
    with torch.no_grad():
        site.bn.weight.fill_(1e-3)
        site.scale.fill_(1e-2)
    x = torch.full((64, 2), 300.0, dtype=dtype)
    fused = lsb.linear_scale_batch_norm(x, site.gemm, site.scale, site.bn)
    assert (fused is None) == (dtype is torch.float16)
    swapped = normswap.optimize(site, x, validate="off")
    gradients = []
    for model in (site, swapped):
        (model(x) * 10).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*reversed(gradients), strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())


@pytest.mark.parametrize("seed", range(5))
def test_fold_cancels_mean_and_bias_in_float64(seed: int) -> None:
    torch.manual_seed(seed)
    site = randomised(Projection(4, 16)).eval()
    with torch.no_grad():
        site.gemm.bias.uniform_(1000, 2000)
        site.bn.running_mean.copy_(site.gemm.bias * site.scale + torch.randn(16) * 1e-3)
    folded: Any = normswap.fold(site)
    wide = {name: tensor.double() for name, tensor in site.state_dict().items()}
    gain = wide["bn.weight"] / (wide["bn.running_var"] + site.bn.eps).sqrt()
    bias = gain * (wide["gemm.bias"] * wide["scale"] - wide["bn.running_mean"]) + wide["bn.bias"]
    assert ((folded.bias - bias).abs() <= bias.abs() * 2**-23 + 1e-9).all()


class Root(nn.Module):
    """An RMSNorm of which ``added`` is the sum under the root."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)
        self.eps = 0.25


class AddedTwice(Root):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), self.eps, alpha=2)) * self.weight


class AddedTwiceLiterally(Root):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).add(1e-3, alpha=3)) * self.weight


class OffsetTwice(Root):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * torch.add(self.weight, 1.0, alpha=2)


class AddedOnce(Root):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), self.eps)) * self.weight


@pytest.mark.parametrize("cls", [AddedTwice, AddedTwiceLiterally])
def test_a_sum_with_alpha_is_another_function(cls: type[nn.Module]) -> None:
    assert isinstance(rules.find(cls()), Refusal)
    assert isinstance(rules.find(AddedOnce()), Match)


def test_what_a_weight_with_alpha_multiplies_is_a_region() -> None:
    """The norm alone, without the sum that is no offset of ours."""
    model, x = OffsetTwice(), torch.randn(4, 8)
    swapped = normswap.optimize(model, x, on_mismatch="raise")
    ((_, region),) = [(s.site.name, one) for s in normswap.plan(model).swaps for one in s.match.attributes["regions"]]
    assert region["kind"] == "rms_norm_by_hand"
    torch.testing.assert_close(swapped(x), model(x))


# --- attributes that are not what they seem -----------------------------------------------------------------------


class Twofold:
    """Reads of ``weight``, ``scale`` and ``eps`` give twice what is stored."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return value * 2 if name == "eps" else value

    def __getattr__(self, name: str) -> Any:
        value = nn.Module.__getattr__(self, name)  # type: ignore[arg-type]
        return value * 2 if name in ("weight", "scale") else value


class GetsAttribute:
    """The same, all in __getattribute__."""

    def __getattribute__(self, name: str) -> Any:
        parameters = super().__getattribute__("__dict__").get("_parameters", {})
        if name in ("weight", "scale") and name in parameters:
            return parameters[name] * 2
        value = super().__getattribute__(name)
        return value * 2 if name == "eps" else value


class L1Eps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.25

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean(dim=-1, keepdim=True) + self.eps)


OWN: dict[str, Callable[[type], nn.Module]] = {
    "by hand": lambda mixin: type("Mine", (mixin, AddedOnce), {})(),
    "l1": lambda mixin: type("Mine", (mixin, L1Eps), {})(),
    "projection": lambda mixin: type("Mine", (mixin, Projection), {})(8, 8),
    "LayerNorm": lambda mixin: type("Mine", (mixin, nn.LayerNorm), {})(8),
    "GroupNorm": lambda mixin: type("Mine", (mixin, nn.GroupNorm), {})(2, 8),
    "RMSNorm": lambda mixin: type("Mine", (mixin, nn.RMSNorm), {})(8, eps=0.25),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mixin", [Twofold, GetsAttribute])
@pytest.mark.parametrize("name", OWN)
def test_a_class_that_looks_attributes_up_in_its_own_way_is_left_alone(name: str, mixin: type) -> None:
    model, x = OWN[name](mixin).eval(), torch.randn(4, 8)
    for parameter in model.parameters():
        nn.init.normal_(parameter)  # a class of one's own may leave them as they lay in memory
    assert not isinstance(rules.find(model), Match)
    assert torch.equal(normswap.optimize(model, None, inplace=True)(x), model(x))


# --- hooks that come later ----------------------------------------------------------------------------------------

LATER: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.register_forward_hook(lambda _, args, out: out * 2),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "backward": lambda m: m.register_full_backward_hook(lambda _, taken, given: (taken[0] * 3,)),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda _, given: (given[0] * 3,)),
}

CHILDREN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "norm before an activation": (lambda: Activated(2, 8), "norm"),
    "norm in a sequential": (lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()), "0"),
    "activation in a sequential": (lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()), "1"),
    "linear": (lambda: Projection(8, 8), "gemm"),
    "batch norm": (lambda: Projection(8, 8), "bn"),
    "linear in a sequential": (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), "0"),
}


@pytest.mark.parametrize("hook", LATER)
@pytest.mark.parametrize("place", CHILDREN)
def test_a_hook_on_a_child_after_the_swap_is_obeyed(place: str, hook: str) -> None:
    make, child = CHILDREN[place]
    model, x = randomised(make()).train(), torch.randn(16, 8)
    swapped = normswap.optimize(model, x)
    assert normswap.report(swapped).swapped
    found = []
    for one in (model, swapped):
        LATER[hook](one.get_submodule(child))
        leaf = x.clone().requires_grad_()
        out = one(leaf)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        found.append([out, leaf.grad, *(parameter.grad for parameter in one.parameters())])
    for ours, theirs in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
