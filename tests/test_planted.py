"""A wrong kernel is caught by the default validation and put back at exactly its sites, with the rest kept."""

from __future__ import annotations

import warnings

import pytest
import torch
from faults import FAULTS, KINDS, LastL1, Parallel, example, plant
from torch import nn

import normswap
from normswap import modules, ops

PLANTED = [(fault, kind) for fault, (_, kinds) in FAULTS.items() for kind in kinds]
planted = pytest.mark.parametrize(("fault", "kind"), PLANTED, ids=[f"{f} in {k}" for f, k in PLANTED])


@pytest.fixture(autouse=True)
def every_op_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where PyTorch's ops serve in the end."""
    monkeypatch.setattr(ops, "native_serves", lambda *tensors: True)


def assert_put_back(model: Parallel, example_inputs: torch.Tensor | None, wrong: set[int]) -> None:
    """Exactly the sites in ``wrong`` are put back, and the result computes what ``model`` does."""
    classes = [type(site) for site in model.sites]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returns a copy.*")
        if not wrong:
            warnings.simplefilter("error", UserWarning)
            warnings.filterwarnings("ignore", message=".*returns a copy.*")
            swapped = normswap.optimize(model, example_inputs)
        else:
            with pytest.warns(UserWarning, match=f"{len(wrong)} sites do not match the original"):
                swapped = normswap.optimize(model, example_inputs)
    report = normswap.report(swapped)
    names = [f"sites.{i}" for i in range(len(classes))]
    assert [row["name"] for row in report.rows if row["status"] == "failed"] == [f"sites.{i}" for i in sorted(wrong)]
    swapped_sites = tuple(name for name in report.swapped if not name.endswith(".bn"))  # in training sites themselves
    assert swapped_sites == tuple(name for i, name in enumerate(names) if i not in wrong)
    for i, (site, cls) in enumerate(zip(swapped.sites, classes, strict=True)):
        assert type(site) is cls if i in wrong else modules.original_class(site) is cls
    assert [(r.site.name, r.refusal.reason.name) for r in report.plan.refused] == [
        (f"sites.{i}", "MISMATCH") for i in sorted(wrong)
    ]
    assert report.model is None or report.model["passed"]


@planted
def test_it_is_put_back_alone(fault: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, fault, kind)
    model = Parallel(kind, 4, marked={1, 2})
    assert_put_back(model.train(), example(fault, kind, model), wrong={1, 2})


@planted
def test_one_of_fifty(fault: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, fault, kind)
    model = Parallel(kind, 50, marked={31})
    assert_put_back(model.train(), example(fault, kind, model), wrong={31})


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if "gradient" not in fault])
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=("float16", "bfloat16"))
def test_in_sixteen_bits(fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """LayerNorm. What eps 1e-3 changes there is less than half an ulp; a mean of 1000 leaves bfloat16 no spread. For
    the gradients see tests/gpu: on a CPU PyTorch itself sums them in 16 bits."""
    plant(monkeypatch, fault, "layer_norm")
    model = Parallel("layer_norm", 4, marked={2}).to(dtype)
    x = torch.cat([example(fault, "layer_norm", model) for _ in range(20)]).to(dtype)
    if fault == "one-pass variance":
        x = (x.double() / 4).to(dtype) + (torch.arange(24) % 2 * 4).to(dtype)
    assert_put_back(model.train(), x, wrong={2})


@pytest.mark.parametrize("kind", ("layer_norm", "group_norm"))
def test_a_one_pass_variance_is_caught_without_example_inputs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "one-pass variance", kind)
    assert_put_back(Parallel(kind, 4, marked={0}), None, wrong={0})


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_fault_all_are_kept(kind: str) -> None:
    model = Parallel(kind, 4, marked={1, 2})
    assert_put_back(model.train(), torch.randn(20, 24), wrong=set())
    assert (type(model.sites[1]) is LastL1) == (kind == "l1_norm")
    assert isinstance(model, nn.Module)
