"""Checkpoints as transformers and timm write them, for the tests on a CPU and on a GPU."""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import REPOSITORY, environment
from torch import Tensor, nn

from normswap.cli.inputs import make_inputs

TOKENS = "input_ids=int64[2,16]:0..127"
IMAGES = "float32[2,3,32,32]"
VIT = {"img_size": 32, "depth": 2, "num_classes": 5}


@dataclass(frozen=True)
class Case:
    """One checkpoint: ``write`` puts it into a new folder and returns its path and the model; ``inputs`` is what it is
    called with, ``sites`` how many norms are swapped at least, ``options`` are convert's."""

    write: Callable[[Path], tuple[Path, nn.Module]]
    inputs: str
    sites: int
    options: tuple[str, ...] = ()


def drawn(model: nn.Module) -> nn.Module:
    """``model`` with random parameters; buffers, some of which no checkpoint holds, stay."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return model


def _llama(folder: Path, dtype: torch.dtype = torch.float32, **saving: Any) -> tuple[Path, nn.Module]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=128, tie_word_embeddings=True)
    drawn(LlamaForCausalLM(config)).to(dtype).save_pretrained(folder, **saving)
    return folder, LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _bert(folder: Path, **saving: Any) -> tuple[Path, nn.Module]:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(**sizes, vocab_size=128, max_position_embeddings=64)
    drawn(BertForMaskedLM(config)).save_pretrained(folder, **saving)
    return folder, BertForMaskedLM.from_pretrained(folder).eval()


def _vit() -> nn.Module:
    return drawn(import_timm().create_model("vit_tiny_patch16_224", **VIT)).eval()


def _timm(folder: Path) -> tuple[Path, nn.Module]:
    folder.mkdir()
    model = _vit()
    torch.save(model.state_dict(), folder / "vit.pth")
    return folder / "vit.pth", model


def _timm_training(folder: Path) -> tuple[Path, nn.Module]:
    """As timm's train.py saves: the averaged weights beside the last ones, and the arguments."""
    folder.mkdir()
    model = _vit()
    content = {
        "epoch": 7,
        "arch": "vit_tiny_patch16_224",
        "state_dict": {name: tensor + 1 for name, tensor in model.state_dict().items()},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "version": 2,
        "args": argparse.Namespace(model="vit_tiny_patch16_224", lr=0.1),
        "state_dict_ema": model.state_dict(),
        "metric": 78.9,
    }
    torch.save(content, folder / "checkpoint-7.pth.tar.pth")
    return folder / "checkpoint-7.pth.tar.pth", model


_TIMM = ("--model", "timm:vit_tiny_patch16_224", "--kwargs", json.dumps(VIT))
CASES = {
    "llama": Case(lambda f: _llama(f, max_shard_size="20KB"), TOKENS, 0),
    "llama in bfloat16": Case(lambda f: _llama(f, torch.bfloat16), TOKENS, 0),
    "bert": Case(_bert, TOKENS, 6),
    "timm": Case(_timm, IMAGES, 5, _TIMM),
    "timm's training": Case(_timm_training, IMAGES, 5, (*_TIMM, "--key", "state_dict_ema")),
}


def answer(model: nn.Module, inputs: str, device: str) -> Tensor:
    """What ``model`` says on ``device`` to the inputs that ``inputs`` describes."""
    positional, named = on_device(inputs, device)
    with torch.no_grad():
        found = model(*positional, **named)
    return (found if isinstance(found, Tensor) else found.logits).cpu()


def on_device(inputs: str, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positional, named = make_inputs([inputs])
    return tuple(value.to(device) for value in positional), {name: value.to(device) for name, value in named.items()}


# In a new process: load_model, its answers, the proof again, and the answers after revert.
_OPEN = """
import sys, torch, normswap
from libraries import CASES, answer, import_timm, on_device
from torch.profiler import profile
device, *names = sys.argv[1:]
if any(name.startswith("timm") for name in names):
    import_timm()
for name in names:
    inputs = CASES[name].inputs
    model = normswap.load_model(f"out/{name}", map_location=device)
    with profile() as profiled:
        swapped = answer(model, inputs, device)
    positional, named = on_device(inputs, device)
    report = normswap.validate(model, positional or None, named or None)
    kernels = any(event.key.startswith("normswap::") for event in profiled.key_averages())
    found = {"swapped": swapped, "report": report.to_json(), "kernels": kernels, "state": model.state_dict()}
    torch.save({**found, "reverted": answer(normswap.revert(model), inputs, device)}, f"out/{name}.answers")
"""


def opened_in_a_new_process(folder: Path, device: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """What a new process finds in ``folder``/out/NAME, for each of the names."""
    env = environment()
    env["PYTHONPATH"] += f":{REPOSITORY / 'tests'}"
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, device, *names], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {name: torch.load(folder / f"out/{name}.answers", weights_only=True) for name in names}


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module of a package, each with any name one asks for: an empty class."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        own = name.partition(".")[0] == self.package
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if own else None

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(__getattr__=_empty, __version__="0.0")


class _Empty(type):
    def __getattr__(cls, name: str) -> type:
        return _empty(name)


def _empty(name: str) -> type:
    if name.startswith("_"):
        raise AttributeError(name)
    return _Empty(name, (nn.Module,), {})


def import_timm() -> Any:
    """timm, also where it lacks what it reads images with, which no model needs; no trace of a stand-in is left."""
    stand_ins = [_StandIn(name) for name in ("torchvision", "PIL") if importlib.util.find_spec(name) is None]
    sys.meta_path += stand_ins
    try:
        return importlib.import_module("timm")
    finally:
        for stand_in in stand_ins:
            sys.meta_path.remove(stand_in)
            for name in [name for name in sys.modules if name.partition(".")[0] == stand_in.package]:
                del sys.modules[name]
