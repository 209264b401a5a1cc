"""Convolution -> BatchNorm as one plain convolution for deployment."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from convolution_cases import CASES, Doubled, own_inner
from convolution_models import Block, Stem, bn, conv, drawn, of_two, residual, swapped_with, used_twice, written
from norm_act_models import NormAct
from resnet import resnet50
from torch import Tensor, nn
from torch.nn.utils import prune

import normswap
from normswap import reference
from normswap.criterion import half_ulp
from normswap.plans import NormswapError
from normswap.proof.product_bounds import folded_error

FOLDS = {name: case for name, case in CASES.items() if not case.later and name != "weight_norm_by_hook"}
"""All but one that nobody can copy."""
TAKEN = (" pads by ", "Padded", "is called inside an nn.Sequential")
"""What is apart from a region, and yet folded here."""


def norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def folded(model: nn.Module) -> Any:
    """What ``fold`` makes of it and the warnings; None where nothing can be folded."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = normswap.fold(model)
        except NormswapError as error:
            assert "can be folded" in str(error)
            found = None
    return found, [str(warning.message) for warning in told if "left as it is" in str(warning.message)]


@pytest.mark.parametrize("name", FOLDS)
def test_it_computes_what_the_model_did(name: str) -> None:
    case = FOLDS[name]
    model = drawn(case.make).to(case.dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    made, told = folded(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    shared = name in ("shared_convolution", "convolved_twice")
    assert bool(told) == bool((case.apart and not any(why in case.apart for why in TAKEN)) or shared), told
    if made is None:
        assert case.folds == 0 or shared
        return
    assert all(type(m).__module__.startswith(("torch", "convolution_", "norm_act_models")) for m in made.modules())
    x = torch.randn(case.shape).contiguous(memory_format=case.layout).to(case.dtype)
    with torch.no_grad():
        ours, theirs = made(x), model(x)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[case.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=10 * tolerance)
    assert ours.stride() == theirs.stride()


def test_resnet50_needs_53_norms_fewer_and_equals_the_original_within_the_bound() -> None:
    model = drawn(resnet50)
    made, told = folded(model)
    assert (norms(model), norms(made), told) == (53, 0, [])
    assert sum(type(m) is nn.Identity for m in made.modules()) == 53
    seen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if type(module) is nn.Conv2d:
            module.register_forward_hook(lambda _, given, out, name=name: seen.__setitem__(name, given[0]))
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected, ours = model(x), made(x)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        pairs = [(name, name.replace("conv", "bn") if "conv" in name else name[:-1] + "1") for name in seen]
        for name, norm in pairs:
            both = [copy.deepcopy(model.get_submodule(one)).double() for one in (name, norm)]
            given = seen[name]
            z = both[0](given.double())
            limit = folded_error(*both, given.double(), z, torch.float32, given) + half_ulp(both[1](z), torch.float32)
            assert ((made.get_submodule(name)(given).double() - both[1](z)).abs() <= limit).all(), name


@pytest.mark.parametrize("last", (False, True))
@pytest.mark.parametrize("form", ("same", "valid", "reflect", "replicate", "circular"))
def test_convolutions_fold_however_they_pad(form: str, last: bool) -> None:
    how = {"padding": form} if form in ("same", "valid") else {"padding": (2, 1), "padding_mode": form}
    norm = nn.BatchNorm2d if last else lambda channels: NormAct(nn.Identity(), channels=channels)
    layer = drawn(lambda: nn.Sequential(nn.Conv2d(6, 8, 3, **how), norm(8), written(of_two)(conv(**how), norm(6))))
    model = nn.Sequential(layer[0], layer[1], nn.Conv2d(8, 6, 1), layer[2]).eval()
    made, told = folded(model)
    assert norms(model) - norms(made) == 2 and not told and type(made[0]) is nn.Conv2d
    assert (made[0].padding, made[0].padding_mode) == (model[0].padding, model[0].padding_mode)
    x = torch.randn(2, 6, 9, 8)
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_norm_alone_is_told_of_too() -> None:
    for make in (lambda: nn.Sequential(Doubled(6, 6, 3), bn()), lambda: written(of_two)(Doubled(6, 6, 3), bn())):
        made, told = folded(drawn(lambda make=make: nn.Sequential(make(), conv(), bn())))
        assert norms(made) - norms(drawn(make)) == 0 and len(told) == 1 and "Doubled" in told[0]


def shares(model: Any) -> None:
    model[1].conv = model[0].conv


def reads_the_weight(model: Any) -> None:
    model[0].__class__ = written(lambda self, x: self.act(self.bn(self.conv(x))) + self.conv.weight.sum())


def by_getattr(self: Any, x: Tensor) -> Tensor:
    return self.act(self.bn(self.conv(x))) + getattr(self, "conv" + "")(x)


def by_its_name(self: Any, x: Tensor) -> Tensor:
    return self.act(self.bn(self.conv(x))) + getattr(self, "conv")(x)  # noqa: B009


def by_a_computed_default(self: Any, x: Tensor) -> Tensor:
    return self.act(self.bn(self.conv(x))) + getattr(self, "more", self.conv)(x)


def with_what_may_be_absent(self: Any, x: Tensor) -> Tensor:
    """timm's ConvNormAct."""
    x = self.conv(x)
    x = self.bn(x)
    aa = getattr(self, "aa", None)
    if aa is not None:
        x = self.aa(x)
    return x


def by_children(self: Any, x: Tensor) -> Tensor:
    out = self.act(self.bn(self.conv(x)))
    for child in self.children():
        out = child(x) if isinstance(child, nn.Conv2d) else out
    return out


def by_an_index(self: Any, x: Tensor) -> Tensor:
    return self.act(self.bn(self.conv(x))) + self.conv[0](x)


def in_a_row(*changes: Any) -> Any:
    """Puts the first convolution into an nn.Sequential, before the ``changes``."""

    def change(model: Any) -> None:
        model[0].conv = nn.Sequential(model[0].conv).eval()
        for one in changes:
            one(model)

    return change


def _convolved(block: Any, x: Tensor) -> Tensor:
    return block.conv(x)  # type: ignore[no-any-return]


def by_a_function(self: Any, x: Tensor) -> Tensor:
    return self.act(self.bn(self.conv(x))) + _convolved(self, x)


def by_more(self: Any, x: Tensor) -> Tensor:
    return self.act(self.bn(self.conv(x))) + self.more(x)


def calls_it(self: Any, x: Tensor) -> Tensor:
    locals()
    return self.conv(x)  # type: ignore[no-any-return]


def calls_any(self: Any, x: Tensor) -> Tensor:
    locals()
    return getattr(self, "co" + "nv")(x)  # type: ignore[no-any-return]


def beside(more: Any) -> Any:
    """A method that is not read."""
    return lambda model: setattr(model[0], "__class__", type("Beside", (written(by_more),), {"more": more}))


def written_as(forward: Any) -> Any:
    return lambda model: setattr(model[0], "__class__", written(forward))


def overflows(model: Any) -> None:
    model.half()
    model[0].bn.running_var.fill_(0.0)
    model[0].bn.weight.data.fill_(60000.0)


LEFT = {
    "shared": (shares, 2, "called elsewhere too"),
    "weight read": (reads_the_weight, 1, ""),
    "by getattr": (written_as(by_getattr), 1, "called elsewhere too"),
    "by its name": (written_as(by_its_name), 1, "called elsewhere too"),
    "by a default": (written_as(by_a_computed_default), 1, "called elsewhere too"),
    "nothing but what may be absent": (written_as(with_what_may_be_absent), 0, ""),
    "among children": (written_as(by_children), 1, "called elsewhere too"),
    "by a function": (written_as(by_a_function), 1, "called elsewhere too"),
    "in a row": (in_a_row(), 0, ""),
    "in a row, shared": (in_a_row(shares), 2, "called elsewhere too"),
    "in a row, its convolution shared": (in_a_row(lambda model: setattr(model[1], "conv", model[0].conv[0])), 2, "too"),
    "in a row, by an index": (in_a_row(written_as(by_an_index)), 1, "called elsewhere too"),
    "train": (lambda model: model[0].bn.train(), 1, ""),
    "hooked": (lambda model: model[0].bn.register_forward_hook(lambda *_: None), 1, ""),
    "by a method that is not read": (beside(calls_it), 1, "called elsewhere too"),
    "by such a one and any name": (beside(calls_any), 1, "called elsewhere too"),
    "of its own method": (lambda model: own_inner(model[0]), 1, "a forward of its own"),
    "of another width": (lambda model: setattr(model[0], "bn", nn.BatchNorm2d(5).eval()), 1, "of another width"),
    "elsewhere": (lambda model: model[0].bn.to("meta"), 1, "on several devices"),
    "overflows": (overflows, 1, "not finite in float16"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_as_it_is(name: str) -> None:
    change, left, reason = LEFT[name]
    model = drawn(lambda: nn.Sequential(Block(conv(), bn()), written(residual)(conv(), bn())))
    change(model)
    made, told = folded(model)
    assert norms(model if made is None else made) - (norms(model) - 2) == left
    assert len(told) == (left if reason else 0) and all(reason in one for one in told)


def test_folding_on_the_meta_device_needs_no_values() -> None:
    made = normswap.fold(drawn(lambda: nn.Sequential(conv(), bn())).to("meta"))
    assert made[0].weight.is_meta and type(made[1]) is nn.Identity


def test_in_place_all_are_folded_or_none() -> None:
    model = drawn(lambda: nn.Sequential(conv(), bn(), conv(), bn()))
    model[3].running_var = torch.ones(5)
    before = [*model]
    with pytest.raises(RuntimeError, match="must match"):
        normswap.fold(model, inplace=True)
    assert [*model] == before


def test_the_weight_of_a_transposed_convolution_by_outputs_and_back() -> None:
    for groups in (1, 2, 6):
        made = nn.ConvTranspose2d(6, 12, (2, 3), groups=groups)
        weight = made.weight.detach()
        plain = reference.by_output(weight, groups)
        assert plain.shape == (12, 6 // groups, 2, 3) and torch.equal(reference.by_output(plain, groups), weight)
        x = torch.randn(2, 6, 1, 1)  # the corner of what it gives is one tap of each weight
        expected = torch.nn.functional.conv2d(x, plain[:, :, :1, :1], made.bias, groups=groups)
        torch.testing.assert_close(made(x)[:, :, :1, :1], expected)


def test_swapped_models_and_the_root_fold() -> None:
    model, x = drawn(lambda: Stem(conv(), bn())), torch.randn(2, 6, 9, 8)
    made = normswap.fold(swapped_with(model))
    assert type(made) is Stem and type(made.bn) is nn.Identity
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x), rtol=1e-5, atol=1e-5)
    again = copy.deepcopy(model)
    assert normswap.fold(again, inplace=True) is again and type(again.bn) is nn.Identity
    with pytest.raises(NormswapError, match="can be folded"):
        normswap.fold(drawn(lambda: written(used_twice)(conv(), bn())))


def test_what_is_folded_needs_no_normswap(tmp_path: Any) -> None:
    model = drawn(lambda: nn.Sequential(conv(), bn(), nn.ReLU()))
    made, x = normswap.fold(model), torch.randn(2, 6, 9, 8)
    torch.save((made, x, made(x)), tmp_path / "made.pt")
    code = (
        "import sys, torch; made, x, out = torch.load(sys.argv[1], weights_only=False); "
        "assert torch.equal(made(x), out) and 'normswap' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "made.pt")], check=True, timeout=120)


def test_a_model_that_cannot_be_copied_folds_in_place() -> None:
    """A pruned weight is computed, which copy.deepcopy refuses."""
    model, x = drawn(lambda: nn.Sequential(conv(), bn(), nn.ReLU(), conv(), bn())), torch.randn(2, 6, 9, 8)
    prune.l1_unstructured(model[0], "weight", 0.5)
    expected = model(x)
    with pytest.raises(normswap.NormswapError, match="cannot be copied .*; pass inplace=True"):
        normswap.fold(model)
    with pytest.warns(UserWarning, match="carries hooks"):
        made = normswap.fold(model, inplace=True)
    torch.testing.assert_close(made(x), expected, rtol=1e-4, atol=1e-4)
    assert type(made[1]) is nn.BatchNorm2d and type(made[4]) is nn.Identity
