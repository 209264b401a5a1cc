"""What code may run when a checkpoint is read, converted or opened, and whose weights a model then has."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import ZOO, environment, write_shards
from libraries import CASES
from test_checkpoint_safety import built, folder, run
from torch import nn

from normswap.checkpoint import (
    CheckpointError,
    convert,
    load_model,
    open_checkpoint,
    same_tensors,
    verify,
)
from normswap.checkpoint.models import HERE, open_model

__all__ = ["folder"]


@pytest.mark.parametrize("start", ["script", "module"])
def test_no_module_of_the_current_folder_takes_the_place_of_a_library(folder: Path, start: str) -> None:
    (folder / "bin").mkdir()
    (folder / "bin/normswap").write_text("from normswap.cli import main\nmain()\n")
    (folder / "here").mkdir()
    for name in ("transformers", "torch", "click", "accelerate", "peft", "flash_attn", "bitsandbytes", "kernels"):
        (folder / f"here/{name}.py").write_text(f"open({str(folder / 'executed')!r}, 'w')\n")
    (folder / "here/config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    torch.save({"a": torch.ones(1)}, "here/pytorch_model.bin")
    command = [sys.executable, *(["-m", "normswap.cli"] if start == "module" else ["../bin/normswap"]), "inspect", "."]
    done = subprocess.run(command, cwd=folder / "here", env=environment(), capture_output=True, text=True)
    assert not (folder / "executed").exists()
    told = done.stderr.splitlines()[-1]
    assert "keys do not fit BertModel" in told if done.returncode == 1 else done.returncode == 5, done.stderr
    assert told.startswith("normswap: ")


def test_a_file_of_python_is_a_factory(folder: Path) -> None:
    (folder / "models").mkdir()
    (folder / "models/parts.py").write_text(ZOO)
    (folder / "models/own.py").write_text("import parts\ndef build():\n    return parts.Net()\n")
    result = run("convert", "net.pt", "out", "--model", "./models/own.py:build", "--device", "cpu", "--validate", "off")
    assert result.exit_code == 0, result.output
    assert json.loads(Path("out/normswap.json").read_text())["factory"] == f"{folder}/models/own.py:build"
    assert same_tensors(load_model("out", trust_factory=True).state_dict(), built().state_dict())
    assert str(folder / "models") not in sys.path
    for name in ("own", "parts"):
        sys.modules.pop(name)


class Network:
    """Refuses and counts what would leave this machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        for owner, name in ((socket.socket, "connect"), (socket, "getaddrinfo"), (socket, "create_connection")):
            monkeypatch.setattr(owner, name, self.refuse)

    def refuse(self, *arguments: Any, **_: Any) -> None:
        self.asked.append(arguments)
        raise OSError("no network here")


@pytest.mark.parametrize("deep", [False, True])
def test_a_config_that_asks_for_weights_of_a_hub_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, deep: bool
) -> None:
    pytest.importorskip("transformers")
    CASES["bert"].write(folder / "in")
    convert("in", "out", device="cpu", validate="off")
    network = Network(monkeypatch)
    asks = {"backbone": "microsoft/resnet-50", "use_pretrained_backbone": True}
    for place in ("in", "out"):
        config = json.loads(Path(place, "config.json").read_text())
        Path(place, "config.json").write_text(json.dumps({**config, **({"parts": [{"text": asks}]} if deep else asks)}))
    result = run("inspect", "in")
    assert result.exit_code == 1 and "asks for weights of another place; set use_pretrained_backbone" in result.stderr
    with pytest.raises(CheckpointError, match="config.json"):
        load_model("out")
    with pytest.raises(CheckpointError, match="use_pretrained_backbone"):
        load_model("out", check_digests=False)
    assert network.asked == []


def test_what_a_config_names_is_never_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    config = {"architectures": ["DetrForObjectDetection"], "model_type": "detr", "backbone": "microsoft/resnet-50"}
    config |= {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_config": None}
    Path("in").mkdir()
    Path("in/config.json").write_text(json.dumps(config))
    safetensors.torch.save_file({"a": torch.ones(1)}, "in/model.safetensors", {"format": "pt"})
    network = Network(monkeypatch)
    result = run("inspect", "in")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1, result.stderr
    assert network.asked == []


@pytest.mark.parametrize("named", ["in/pytorch_model.bin", "in/pytorch_model.bin.index.json"])
def test_a_folder_of_transformers_gives_the_weights_that_were_read(folder: Path, named: str) -> None:
    """Not those of a file beside them, which transformers would rather open."""
    pytest.importorskip("transformers")
    _, model = CASES["bert"].write(folder / "other")
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    write_shards(folder / "in", state, ".bin", 2)
    torch.save(state, "in/pytorch_model.bin")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(f"other/{name}", f"in/{name}")
    opened = open_model(open_checkpoint(named), HERE)
    assert all(torch.equal(tensor, state[name]) for name, tensor in opened.state_dict().items())
    assert opened.name_or_path == "in"


def test_arguments_of_a_config_and_of_transformers(folder: Path) -> None:
    pytest.importorskip("transformers")
    CASES["bert"].write(folder / "in")
    kwargs = {"layer_norm_eps": 0.5, "attn_implementation": "eager"}
    config = open_model(open_checkpoint("in"), HERE, kwargs, "bfloat16").config
    assert (config.layer_norm_eps, config._attn_implementation, config.dtype) == (0.5, "eager", torch.bfloat16)


def test_a_model_of_transformers_that_changes_its_weights_changes_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    CASES["bert"].write(folder / "in")
    forward = transformers.BertForMaskedLM.forward

    def changing(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        with torch.no_grad():
            self.bert.embeddings.word_embeddings.weight.add_(1)
        return forward(self, *arguments, **named)

    monkeypatch.setattr(transformers.BertForMaskedLM, "forward", changing)
    ids = torch.ones(1, 4, dtype=torch.int64)
    convert("in", "out.pt", "hf:in", device="cpu", inputs=ids, validate="forward")
    assert verify("in", "out.pt").same


def test_a_config_or_file_that_names_other_weights_is_refused(folder: Path) -> None:
    pytest.importorskip("transformers")
    CASES["bert"].write(folder / "in")
    convert("in", "out", device="cpu", validate="off")
    Path("out/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "../other"}))
    with pytest.raises(CheckpointError, match="adapter_config.json: its adapter is not in model.safetensors; merge"):
        load_model("out")
    config = json.loads(Path("in/config.json").read_text())
    Path("in/config.json").write_text(json.dumps({**config, "transformers_weights": "../other/model.safetensors"}))
    with pytest.raises(CheckpointError, match="names other weights than model.safetensors; remove transformers_weig"):
        convert("in", "other", device="cpu", validate="off")
    for key in ("attn_implementation", "_attn_implementation_internal"):
        Path("in/config.json").write_text(json.dumps({**config, "text_config": {key: "someone/kernel"}}))
        with pytest.raises(CheckpointError, match=f"names kernels of another place; remove {key}"):
            convert("in", "other", device="cpu", validate="off")


def test_a_file_beside_which_diffusers_opens_another_is_refused(folder: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    blocks = {"down_block_types": ["DownEncoderBlock2D"], "up_block_types": ["UpDecoderBlock2D"]}
    model = diffusers.AutoencoderKL(**blocks, block_out_channels=[4], norm_num_groups=2, latent_channels=2)
    for safe in (False, True):
        model.save_pretrained("in", safe_serialization=safe)
    opened = open_model(open_checkpoint("in/diffusion_pytorch_model.safetensors"), HERE)
    assert same_tensors(opened.state_dict(), model.state_dict())
    with pytest.raises(CheckpointError, match="diffusers opens diffusion_pytorch_model.safetensors beside it instead"):
        open_model(open_checkpoint("in/diffusion_pytorch_model.bin"), HERE)
