"""A swapped model's state_dict, and the whole of it through pickle, deepcopy and torch.save."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import environment
from models import Every, randomised
from norm_models import (
    assert_alike,
    by_kind,
    cotangent_of,
    drawn,
    made,
    swapped_copy,
)
from torch import nn

import normswap
from normswap import modules


@by_kind
@pytest.mark.case("state-dict")
def test_the_state_dict_is_the_same_and_loads_both_ways(kind: str) -> None:
    model, x = made(kind)
    swapped = swapped_copy(model, x)
    ours, theirs = swapped.state_dict(), model.state_dict()
    assert list(ours) == list(theirs) and ours._metadata == theirs._metadata
    for key, value in theirs.items():
        assert torch.equal(ours[key], value) and ours[key].dtype == value.dtype and ours[key].shape == value.shape
        assert ours[key].data_ptr() != value.data_ptr()
    other, _ = made(kind)
    swapped.load_state_dict(other.state_dict(), strict=True)
    assert_alike(other, swapped, x, cotangent_of(other, x))
    model.load_state_dict(swapped.state_dict(), strict=True)
    assert_alike(model, swapped, x, cotangent_of(model, x))
    swapped.load_state_dict({key: torch.zeros_like(value) for key, value in theirs.items()}, assign=True)
    assert all(not value.any() for value in swapped.state_dict().values())


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle protocol 2": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "torch.save": _saved,
    "twice": lambda model: copy.deepcopy(pickle.loads(pickle.dumps(model))),
}


@by_kind
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.case("pickle-deepcopy")
def test_a_copy_is_swapped_and_shares_nothing(kind: str, way: str, training: bool) -> None:
    model, x = made(kind)
    swapped = swapped_copy(model.train(training), x)
    twin = COPIES[way](swapped)
    assert type(twin) is type(swapped) and modules.site_match(twin) == modules.site_match(swapped)
    assert twin.training is training and repr(twin) == repr(model)
    theirs = {tensor.data_ptr() for tensor in swapped.state_dict().values()}
    assert not theirs & {tensor.data_ptr() for tensor in twin.state_dict().values()}
    assert_alike(model, twin, x, cotangent_of(model, x))
    assert type(normswap.revert(twin)) is type(model) and modules.site_match(swapped) is not None


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.case("pickle-deepcopy", "shared-module", "tied-parameters", "hooks")
def test_what_is_shared_stays_shared_in_a_copy(way: str) -> None:
    model = randomised(nn.Sequential(nn.LayerNorm(12), nn.RMSNorm(12, eps=1e-6)))
    model.append(model[0])
    model[1].weight = model[0].weight
    swapped = swapped_copy(model, drawn((5, 12)))
    twin = COPIES[way](swapped)
    assert twin[0] is twin[2] and twin[1].weight is twin[0].weight


READ = """
import sys, torch, normswap
model, x, expected = torch.load(sys.argv[1], weights_only=False)
assert normswap.report(model).swapped == ("group", "layer", "projection", "l1", "rms"), normswap.report(model)
torch.testing.assert_close(model(x), expected)
"""


@pytest.mark.case("pickle-deepcopy")
def test_another_process_reads_a_saved_model(tmp_path: Path) -> None:
    model, x = randomised(Every()).eval(), drawn((8, 6, 5))
    swapped = swapped_copy(model, x)
    torch.save((swapped, x, model(x).detach()), tmp_path / "model.pt")
    tests = str(Path(__file__).parent)
    run = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "model.pt")],
        env={**environment(), "PYTHONPATH": f"{tests}:{Path(tests).parent}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
