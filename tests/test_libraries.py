"""What transformers and timm save converts in one command and answers the same in a new process."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from libraries import CASES, answer, opened_in_a_new_process
from torch import Tensor

from normswap.checkpoint import CheckpointError, convert, load_model, open_checkpoint, same_tensors
from normswap.cli import main

NAMES = [n for n in CASES if importlib.util.find_spec("timm" if n.startswith("timm") else "transformers") is not None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], dict[str, dict[str, Any]]]:
    """A folder with a checkpoint and its conversion for each case, the originals' answers, and a new process's."""
    folder = tmp_path_factory.mktemp("libraries")
    expected = {}
    for name in NAMES:
        case = CASES[name]
        source, model = case.write(folder / name)
        expected[name] = answer(model, case.inputs, "cpu")
        command = ["convert", str(source), str(folder / "out" / name), "--input", case.inputs, "--device", "cpu"]
        result = CliRunner().invoke(main, [*command, *case.options])
        assert result.exit_code == 0, result.output
    return folder, expected, opened_in_a_new_process(folder, "cpu", NAMES)


@pytest.mark.case("state-dict")
@pytest.mark.parametrize("name", CASES)
def test_same_outputs_in_a_new_process(made: tuple[Path, Mapping[str, Any], Mapping[str, Any]], name: str) -> None:
    if name not in NAMES:
        pytest.skip("timm or transformers is not installed")
    folder, expected, answers = made
    found = answers[name]
    assert torch.equal(found["reverted"], expected[name])
    torch.testing.assert_close(found["swapped"], expected[name])
    report = json.loads(found["report"])
    swapped = [row for row in report["rows"] if row["swapped"]]
    assert len(swapped) >= CASES[name].sites and (not swapped or report["model"]["passed"])
    before, after = (
        open_checkpoint(place, **keyed(name)) for place in (source_of(folder, name), folder / "out" / name)
    )
    assert same_tensors(before.state, after.state)


def keyed(name: str) -> dict[str, str]:
    return {"key": "state_dict_ema"} if name == "timm's training" else {}


def source_of(folder: Path, name: str) -> Path:
    found = sorted((folder / name).glob("*.pth"))
    return found[0] if found else folder / name


def test_code_in_a_folder_of_transformers_is_not_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    CASES["bert"].write(tmp_path / "in")
    (tmp_path / "in/modeling.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    config = json.loads((tmp_path / "in/config.json").read_text())
    foreign = {"auto_map": {"AutoConfig": "modeling.C", "AutoModelForMaskedLM": "modeling.M"}}
    (tmp_path / "in/config.json").write_text(json.dumps({**config, **foreign}))
    convert(tmp_path / "in", tmp_path / "out", device="cpu", validate="off")
    load_model(tmp_path / "out")
    (tmp_path / "in/config.json").write_text(json.dumps({**config, **foreign, "model_type": "unheard-of"}))
    convert(tmp_path / "in", tmp_path / "out", device="cpu", validate="off", force=True)
    (tmp_path / "in/config.json").write_text(json.dumps({**config, "architectures": ["os"]}))
    with pytest.raises(CheckpointError, match="has no architecture 'os'"):
        convert(tmp_path / "in", tmp_path / "other", device="cpu", validate="off")
    assert not (tmp_path / "executed").exists() and not (tmp_path / "other").exists()


def test_kernels_from_elsewhere_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    CASES["bert"].write(tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text())
    foreign = {"attn_implementation": "someone/kernels"}
    for more, kwargs in ((foreign, {}), ({"text_config": foreign}, {}), ({}, foreign)):
        (tmp_path / "in/config.json").write_text(json.dumps({**config, **more}))
        with pytest.raises(CheckpointError, match="names kernels of another place"):
            convert(tmp_path / "in", tmp_path / "out", factory_kwargs=kwargs, device="cpu", validate="off")


@pytest.mark.parametrize(
    "kwargs", [{"pretrained": True}, {"checkpoint_path": "x"}, {"pretrained_cfg": {}}, {"weights_only": False}]
)
def test_weights_come_from_the_file_alone(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match="cannot be given, weights come from the file"):
        convert(tmp_path / "in.pt", tmp_path / "out", "timm:vit_tiny_patch16_224", factory_kwargs=kwargs, device="cpu")
