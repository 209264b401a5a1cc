"""normswap.fold: one plain Linear for Linear -> scale -> BatchNorm, with the outputs of the model."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Every, Projection, randomised
from torch import Tensor, nn

import normswap
from normswap import modules
from normswap.plans import NormswapError


class Scale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Around(Projection):
    """Numbers in front of the BatchNorm, a tensor behind it."""

    factor = -0.3

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.bn(self.gemm(x) * self.factor)


class Twice(nn.Module):
    """One block under two names, and one of its tensors in a third place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Projection(6, 6)
        self.again = self.first
        self.head = nn.Linear(6, 6)
        self.head.weight = self.first.gemm.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.first(x)))


def sequential(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), *between, nn.BatchNorm1d(6))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "inside": (lambda: nn.Sequential(Projection(6, 8), nn.ReLU(), Projection(8, 4)), 2),
    "around": (lambda: nn.Sequential(Around(6, 8), nn.ReLU()), 1),
    "shared": (Twice, 1),
    "whole_sequential": (lambda: nn.Sequential(sequential(Scale(6)), nn.ReLU()), 1),
    "part_of_sequential": (lambda: nn.Sequential(*sequential(Scale(6)), nn.ReLU(), *sequential()), 2),
    "our_own_module": (lambda: nn.Sequential(modules.LinearScaleBatchNorm(6, 4, ())), 1),
    "the_root": (lambda: Projection(6, 8), 1),
}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_folded_model_computes_the_same_with_fewer_tensors(name: str, dtype: torch.dtype, swapped: bool) -> None:
    make, folds = MODELS[name]
    model = randomised(make()).to(dtype).eval()
    x = torch.randn(9, 6, dtype=dtype)
    expected, before = copy.deepcopy(model).double()(x.double()), tensors(model)
    given = normswap.optimize(model, x, on_empty="ignore") if swapped else model
    folded = normswap.fold(given)
    assert not any(isinstance(m, (nn.BatchNorm1d, modules.Rewritten)) for m in folded.modules())
    assert sum(len(tensors(m)) for m in (folded,)) <= len(before) - 4 * folds
    limit = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    assert (folded(x).double() - expected).abs().max() <= limit * expected.abs().max()
    assert before.keys() == tensors(model).keys()
    assert all(torch.equal(tensor, before[key]) for key, tensor in tensors(model).items())


def test_the_result_is_a_plain_module_that_pickles_loads_and_is_shared_as_before() -> None:
    model = randomised(Twice()).eval()
    folded = normswap.fold(model)
    assert type(folded.first) is nn.Linear and folded.again is folded.first
    assert torch.equal(folded.head.weight, model.head.weight)
    assert not folded.first.training and folded.first.weight.requires_grad
    file = io.BytesIO()
    torch.save(folded, file)
    file.seek(0)
    x = torch.randn(9, 6)
    assert torch.equal(torch.load(file, weights_only=False)(x), folded(x))
    again = normswap.fold(randomised(Twice()).eval())
    again.load_state_dict(folded.state_dict())
    assert torch.equal(again(x), folded(x))


def test_places_in_a_sequential_stay() -> None:
    model = randomised(nn.Sequential(*sequential(Scale(6)), nn.ReLU(), nn.Linear(6, 2))).eval()
    folded = normswap.fold(model)
    assert [type(child) for child in folded] == [nn.Linear, nn.Identity, nn.Identity, nn.ReLU, nn.Linear]
    assert list(folded.state_dict()) == ["0.weight", "0.bias", "4.weight", "4.bias"]
    assert type(normswap.fold(normswap.optimize(model, torch.randn(9, 6)))) is nn.Sequential


def test_inplace_changes_the_model_itself_and_leaves_other_swaps() -> None:
    model = randomised(Every()).eval()
    x = torch.randn(9, 6, 5)
    expected = model(x)
    swapped = normswap.optimize(model, x)
    assert normswap.fold(swapped, inplace=True) is swapped
    assert type(swapped.projection) is nn.Linear and type(swapped.layer) is modules.LayerNorm
    torch.testing.assert_close(swapped(x), expected)
    assert type(normswap.revert(swapped).layer) is nn.LayerNorm


def test_fold_in_inference_mode_gives_ordinary_tensors() -> None:
    with torch.inference_mode():
        folded = normswap.fold(nn.Sequential(Projection(6, 4)).eval())
    assert not any(parameter.is_inference() for parameter in folded.parameters())


def test_folding_on_the_meta_device_needs_no_values() -> None:
    folded = normswap.fold(nn.Sequential(Projection(6, 4)).eval().to("meta"))
    assert folded[0].weight.is_meta and folded[0].weight.shape == (4, 6)


def in_train(model: Any) -> None:
    model[0].bn.train()


def without_statistics(model: Any) -> None:
    model[0].bn = nn.BatchNorm1d(4, track_running_stats=False).eval()


def without_a_mean(model: Any) -> None:
    model[0].bn.running_mean = None


def without_a_variance(model: Any) -> None:
    model[0].bn.running_var = None


def hooked(model: Any) -> None:
    model[0].register_forward_hook(lambda *_: None)


def hooked_linear(model: Any) -> None:
    model[0].gemm.register_forward_hook(lambda *_: None)


def hooked_norm(model: Any) -> None:
    model[0].bn.register_forward_hook(lambda *_: None)


def of_another_dtype(model: Any) -> None:
    model[0].scale = nn.Parameter(torch.randn(4).double())


def with_a_bias_of_another_dtype(model: Any) -> None:
    model[0].gemm.bias = nn.Parameter(torch.randn(4).double())


def out_of_range(model: Any) -> None:
    model.half()
    model[0].bn.running_var.fill_(1e-6)
    model[0].scale.data.fill_(6e4)


def with_a_bias_out_of_range(model: Any) -> None:
    model.half()
    model[0].bn.running_mean.fill_(6e4)
    model[0].bn.running_var.fill_(1e-2)


STAYS = [
    *((in_train, "goes by its batch"), (without_statistics, "goes by its batch"), (hooked, "carries hooks")),
    *((of_another_dtype, "in the Linear's dtype"), (out_of_range, "not finite in float16")),
    (with_a_bias_out_of_range, "not finite in float16"),
]
OURS = [
    *(
        (hooked_linear, "carries hooks"),
        (hooked_norm, "carries hooks"),
        (with_a_bias_of_another_dtype, "several dtypes"),
    ),
    *((without_a_mean, "goes by its batch"), (without_a_variance, "goes by its batch")),
]
"""What no rule takes where it is not our own module."""


@pytest.mark.parametrize(
    ("cls", "change", "word"),
    [(cls, *case) for cls in (Projection, modules.LinearScaleBatchNorm) for case in STAYS]
    + [(modules.LinearScaleBatchNorm, *case) for case in OURS],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_what_cannot_be_folded_stays_and_a_warning_says_why(cls: Any, change: Callable[[Any], None], word: str) -> None:
    model = randomised(nn.Sequential(cls(6, 4), Projection(4, 3))).eval()
    change(model)
    model[1].float()
    with pytest.warns(UserWarning, match=f"fold: 0 is left as it is.*{word}"):
        folded = normswap.fold(model)
    assert type(folded[0]) is cls and type(folded[1]) is nn.Linear
    with pytest.warns(UserWarning, match=rf"fold: \(root\) is left as it is.*{word}"), pytest.raises(NormswapError):
        normswap.fold(model[0])


def test_a_scale_that_carries_hooks_stays() -> None:
    model = randomised(nn.Sequential(*sequential(Scale(6)), nn.Linear(6, 6), nn.BatchNorm1d(6))).eval()
    model[1].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="carries hooks"):
        folded = normswap.fold(model)
    assert [type(child) for child in folded[1:]] == [Scale, nn.BatchNorm1d, nn.Linear, nn.Identity]


@pytest.mark.filterwarnings("ignore:.*is left as it is")
def test_a_swapped_sequential_keeps_the_regions_that_are_no_linear() -> None:
    model, x = randomised(nn.Sequential(*sequential(), nn.GroupNorm(2, 6), nn.SiLU())).eval(), torch.randn(9, 6)
    swapped = normswap.optimize(model, x, min_speedup=None)
    folded = normswap.fold(swapped)
    assert isinstance(folded, modules.Rewritten)
    torch.testing.assert_close(folded(x), swapped(x), rtol=1e-5, atol=1e-5)


def test_what_stays_is_spoken_of_once() -> None:
    model = randomised(nn.Sequential(*sequential(), *sequential())).eval()
    model[1].running_mean.fill_(float("inf"))
    with pytest.warns(UserWarning) as told:
        normswap.fold(model)
    assert [str(one.message) for one in told] == [
        "fold: (root) is left as it is: folded, its weights are not finite in float32"
    ]


def test_norms_behind_nothing_are_named() -> None:
    alone = [nn.Sequential(nn.BatchNorm1d(6), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*alone, *sequential(), nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))).eval()
    model[-1][1].running_mean.fill_(float("inf"))
    with pytest.warns(UserWarning) as told:
        normswap.fold(model)
    assert [str(one.message).partition(" (")[0] for one in told][1:] == ["fold: 4 BatchNorms stay"]
    assert "(0.0, 1.0, 2.0, ...): no convolution or Linear was found" in str(told[1].message)
    assert str(told[0].message).startswith(f"fold: {len(model) - 1}.1 is left as it is: folded, its weights")


@pytest.mark.filterwarnings("error")
def test_of_what_folds_as_a_whole_no_part_is_spoken_of() -> None:
    model = nn.Sequential(JustTwo(), JustTwo()).eval()
    model[1].fc = model[0].fc
    assert [type(child) for child in normswap.fold(model)] == [nn.Linear, nn.Linear]


def test_children_changed_after_a_swap_are_seen() -> None:
    model = normswap.optimize(randomised(nn.Sequential(Projection(6, 4), Projection(4, 3))).eval(), torch.randn(9, 6))
    model[0].gemm.register_forward_hook(lambda *_: None)
    assert type(normswap.fold(model)[1]) is nn.Linear
    assert isinstance(normswap.fold(model)[0], Projection)


def test_fold_says_what_is_wrong_and_changes_nothing() -> None:
    with pytest.raises(TypeError, match="got int"):
        normswap.fold(3)  # type: ignore[arg-type]
    with pytest.raises(NormswapError, match="train mode"):
        normswap.fold(nn.Sequential(Projection(6, 4)))
    with pytest.raises(NormswapError, match="no module of this model"):
        normswap.fold(nn.Sequential(nn.Linear(6, 4)).eval())
    root = Projection(6, 4).eval()
    with pytest.raises(NormswapError, match="in place"):
        normswap.fold(root, inplace=True)
    assert type(root.bn) is nn.BatchNorm1d


class LinearParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.act = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()


class ScaledByAChild(LinearParts):
    def __init__(self) -> None:
        super().__init__()
        self.act = Scale(6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.act(self.fc(x))))


class ScaledAndActsBehind(LinearParts):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.fc(x) * self.scale))


class ActsBehind(LinearParts):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.fc(x)))


class AddsBehind(LinearParts):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.fc(x) * self.fc.bias) + x


class CallsChildBehind(LinearParts):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.fc(x)))


class ScaledByItsBias(LinearParts):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.fc(x) * self.fc.bias)


class CalledInItsOwnWay(ScaledByItsBias):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) * 2


class CallImplOfItsOwn(ScaledByItsBias):
    def _call_impl(self, *args: Any) -> Any:
        return super()._call_impl(*args) * 2  # type: ignore[no-untyped-call]


class JustTwo(LinearParts):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.fc(x))


class ScaledByANumber(LinearParts):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.fc(x) * 0.5)


class ScaledByItsInput(LinearParts):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.fc(x) * x)


class OfALoop(LinearParts):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + 1
        return self.bn(self.fc(x) * self.fc.bias)


class OfAFlag(LinearParts):
    def forward(self, x: Tensor) -> Tensor:
        if self.act is None:
            return x
        return self.bn(self.fc(x) * self.fc.bias)


class OfItsMode(LinearParts):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x
        return self.bn(self.fc(x) * self.fc.bias)


class AddsBefore(LinearParts):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        return self.bn(self.fc(x) * self.fc.bias)


class OfItsOwnTensor(LinearParts):
    def __init__(self) -> None:
        super().__init__()
        self.given = nn.Parameter(torch.randn(9, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.fc(self.given) * self.fc.bias)


class ReturnsAnother(LinearParts):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) * self.fc.bias
        self.bn(y)
        return y


WHOLE = (ScaledByItsBias, ScaledByANumber, JustTwo)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "cls",
    (
        *WHOLE,
        *(ActsBehind, AddsBehind, CallsChildBehind, CalledInItsOwnWay, CallImplOfItsOwn, ScaledByItsInput, OfALoop),
        *(ScaledByAChild, ScaledAndActsBehind),
        *(OfAFlag, OfItsMode, AddsBefore, OfItsOwnTensor, ReturnsAnother),
    ),
)
def test_what_stands_beside_them_is_not_lost(cls: type[nn.Module]) -> None:
    model, x = randomised(nn.Sequential(cls(), nn.Linear(6, 2), nn.BatchNorm1d(2))).eval(), torch.randn(9, 6)
    folded = normswap.fold(model)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)
    assert isinstance(folded[0], nn.Linear) == (cls in WHOLE)  # type: ignore[index]
    assert cls is not ActsBehind or type(folded[0].bn) is nn.Identity  # type: ignore[index]


class DoublingSequential(nn.Sequential):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) * 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_sequential_that_is_called_in_its_own_way_keeps_its_convolution() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.bn = DoublingSequential(nn.ReLU(), nn.Conv2d(3, 4, 1)), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.body(x))  # type: ignore[no-any-return]

    model, x = randomised(nn.Sequential(Net(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))).eval(), torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(normswap.fold(model)(x), model(x), rtol=1e-5, atol=1e-5)


def trains(norm: Any) -> None:
    norm.train()


def forgets(norm: Any) -> None:
    norm.running_mean = norm.running_var = None


@pytest.mark.parametrize("change", (trains, forgets))
def test_a_linear_in_a_larger_forward_stays_before_a_norm_that_goes_by_its_batch(change: Callable[[Any], None]) -> None:
    model, x = randomised(nn.Sequential(ActsBehind(), nn.Linear(6, 2), nn.BatchNorm1d(2))).eval(), torch.randn(9, 6)
    change(model[0].bn)
    with pytest.warns(UserWarning, match="0.bn is left as it is: its BatchNorm goes by its batch"):
        folded = normswap.fold(model)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-5, atol=1e-5)
    assert type(folded[0].bn) is nn.BatchNorm1d and type(folded[1]) is nn.Linear
