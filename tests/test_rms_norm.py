"""RMSNorms written by hand, as the pinned transformers has them: single classes and whole models."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from models import randomised
from rms_models import (
    DTYPES,
    NARROW,
    SIZE,
    TRANSFORMERS,
    Calls,
    check,
    from_transformers,
    tiny_model,
)
from torch import Tensor, nn

import normswap
from normswap import modules


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.mark.case("rms-cast-orders", "dtypes")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_classes_of_transformers_are_swapped_and_equal(name: str, dtype: torch.dtype, calls: Calls) -> None:
    module = randomised(from_transformers(name)).to(dtype).eval()
    x = (3 * torch.randn(5, 7, SIZE)).to(dtype)
    swapped = check(module, x, calls, served=name not in NARROW or dtype is torch.float32)
    assert isinstance(swapped, type(module)) and swapped.state_dict().keys() == module.state_dict().keys()
    for twin in (copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        assert torch.equal(twin(x), swapped(x)) and modules.site_match(twin) == modules.site_match(swapped)
    assert type(normswap.revert(swapped)) is type(module)


def outputs(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens).last_hidden_state


@pytest.mark.case("containers", "train-eval")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("name", "sites"), [("qwen3", 2 * 4 + 1), ("gemma2", 2 * 4 + 1), ("llama", 2 * 2 + 1)])
def test_whole_models_of_transformers(name: str, sites: int, training: bool, calls: Calls) -> None:
    """Every norm of a model is swapped, those of each head's queries and keys included."""
    model = tiny_model(name).train(training)
    tokens = torch.randint(0, 90, (2, 11))
    swapped = normswap.optimize(model, tokens)
    rows = normswap.report(swapped).rows
    assert [row["status"] for row in rows if row["kind"] == "rms_norm"] == ["wiring"] * sites
    before = calls.count
    torch.testing.assert_close(outputs(swapped, tokens), outputs(model, tokens), rtol=1e-4, atol=1e-4)
    assert calls.count == before + sites
    assert swapped.state_dict().keys() == model.state_dict().keys()
    if name == "qwen3":
        assert modules.site_match(swapped.layers[0].self_attn.q_norm) is not None
