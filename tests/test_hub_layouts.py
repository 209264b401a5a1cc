"""Folders as hubs have them open exactly as their own library opens them: tensors, dtypes, settings, outputs."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from libraries import VIT, drawn, import_timm
from torch import Tensor, nn

import normswap
from normswap.checkpoint import CheckpointError, convert, load_model

IDS = torch.arange(24).reshape(2, 12) % 100
SIZES = {"vocab_size": 100, "num_hidden_layers": 2}
Layout = tuple[Callable[[], nn.Module], dict[str, Tensor]]


def put(folder: Path, config: Any, state: dict[str, Tensor], name: str = "model.safetensors") -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config if isinstance(config, dict) else config.to_dict()))
    if name.endswith(".bin"):
        torch.save(state, folder / name)
    else:
        safetensors.torch.save_file({n: t.clone() for n, t in state.items()}, folder / name, {"format": "pt"})


def gpt2(folder: Path) -> Layout:
    """Without the prefix of its body, with the masks that older versions kept, the head left out: it is tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = drawn(GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=4)))
    model.config.architectures = ["GPT2LMHeadModel"]
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32).tril() for layer in range(2)}
    put(folder, model.config, {**model.transformer.state_dict(), **masks})
    return lambda: GPT2LMHeadModel.from_pretrained(folder, dtype="auto"), {"input_ids": IDS}


def bert(folder: Path) -> Layout:
    """As the first release: gamma and beta, and heads that the architecture has not."""
    from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(**SIZES, **sizes, max_position_embeddings=32, architectures=["BertForMaskedLM"])
    renamed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    state = {}
    for name, tensor in drawn(BertForPreTraining(config)).state_dict().items():
        old = next((name.replace(new, old) for new, old in renamed.items() if new in name), name)
        state[old] = tensor
    put(folder, config, state, "pytorch_model.bin")
    return lambda: BertForMaskedLM.from_pretrained(folder, dtype="auto"), {"input_ids": IDS}


def t5(folder: Path) -> Layout:
    """In float16, but for what transformers keeps in float32."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    drawn(T5ForConditionalGeneration(config)).half().save_pretrained(folder)
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}
    return lambda: T5ForConditionalGeneration.from_pretrained(folder, dtype="auto"), inputs


def llama(folder: Path) -> Layout:
    """In shards, with settings of its own for generation."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_key_value_heads": 2}
    model = drawn(LlamaForCausalLM(LlamaConfig(**SIZES, **sizes)))
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.25, top_p=0.5, eos_token_id=7)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return lambda: LlamaForCausalLM.from_pretrained(folder, dtype="auto"), {"input_ids": IDS}


def vae(folder: Path) -> Layout:
    diffusers = pytest.importorskip("diffusers")
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    model = diffusers.AutoencoderKL(**blocks, block_out_channels=[8, 16], norm_num_groups=4, latent_channels=2)
    drawn(model).save_pretrained(folder)
    return lambda: diffusers.AutoencoderKL.from_pretrained(folder), {"sample": torch.randn(1, 3, 16, 16)}


def timm(folder: Path) -> Layout:
    """As timm's save_for_hf writes it: no architectures, the arguments of the model beside its name."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    name = "vit_tiny_patch16_224"
    own = {key: value for key, value in VIT.items() if key != "num_classes"}
    config = {"architecture": name, "num_classes": 5, "num_features": 192, "model_args": own, "pretrained_cfg": {}}
    model = drawn(import_timm().create_model(name, **VIT))
    put(folder, config, dict(model.state_dict()))
    return lambda: model, {"x": torch.randn(2, 3, 32, 32)}


LAYOUTS = {"gpt2": gpt2, "bert": bert, "t5": t5, "llama": llama, "vae": vae, "timm": timm}


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found = model(**inputs)
    return found if isinstance(found, Tensor) else found[0]


@pytest.mark.case("state-dict")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYOUTS)
def test_opens_as_its_own_library_does(tmp_path: Path, name: str) -> None:
    if name not in ("vae", "timm"):
        pytest.importorskip("transformers")
    own, inputs = LAYOUTS[name](tmp_path / "in")
    expected = own().eval()
    convert(tmp_path / "in", tmp_path / "out", device="cpu", input_kwargs=inputs, validate="forward")
    swapped = load_model(tmp_path / "out")
    torch.testing.assert_close(outputs(swapped, inputs), outputs(expected, inputs))
    found = normswap.revert(swapped)
    assert torch.equal(outputs(found, inputs), outputs(expected, inputs))
    before, after = expected.state_dict(), found.state_dict()
    assert list(before) == list(after) and type(found) is type(expected)
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype and torch.equal(tensor, after[key]), key
    if name == "t5":
        assert {t.dtype for t in after.values()} == {torch.float16, torch.float32}
    settings = getattr(expected, "generation_config", None)
    if settings is not None:
        assert settings.to_dict() == found.generation_config.to_dict()


def test_a_tensor_that_is_not_there_is_told_and_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    gpt2(tmp_path / "in")
    state = safetensors.torch.load_file(tmp_path / "in/model.safetensors")
    del state["h.1.ln_2.weight"]
    safetensors.torch.save_file(state, tmp_path / "in/model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"keys do not fit GPT2LMHeadModel: 1 missing: .*h.1.ln_2.weight"):
        convert(tmp_path / "in", tmp_path / "out", device="cpu", validate="off")


def test_a_pipeline_names_its_models(tmp_path: Path) -> None:
    for part in ("unet", "vae"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text("{}")
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(CheckpointError, match="a pipeline of several models; name the folder of one: unet, vae"):
        convert(tmp_path, tmp_path / "out", device="cpu")


@pytest.mark.parametrize(("name", "file"), [("gpt2", "model"), ("vae", "diffusion_pytorch_model")])
def test_weights_from_elsewhere_with_the_config_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str
) -> None:
    """hf:DIR is built from DIR's config and filled from the file, whatever its keys are called, and wherever one is."""
    pytest.importorskip("transformers")
    own, inputs = LAYOUTS[name](tmp_path / "in")
    expected = own().eval()
    weights = tmp_path / "weights.safetensors"
    (tmp_path / f"in/{file}.safetensors").rename(weights)
    monkeypatch.chdir(tmp_path)
    convert(weights, tmp_path / "out", "hf:in", device="cpu", validate="off")
    monkeypatch.chdir("/")
    opened = normswap.revert(load_model(tmp_path / "out", trust_factory=True))
    assert torch.equal(outputs(opened, inputs), outputs(expected, inputs))


def test_what_is_taken_over_from_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    llama(tmp_path / "in")
    kept = {"tokenizer.json", "README.md", "extra/words.txt", "chat_template.jinja", "modeling.py"}
    left = {
        ".git/HEAD",
        ".gitattributes",
        ".cache/x",
        "original/consolidated.00.pth",
        "optimizer.pt",
        "rng_state_0.pth",
    }
    left |= {"pytorch_model.bin", "flax_model.msgpack", "onnx/model.onnx", "training_args.bin", "scheduler.pt"}
    for name in kept | left:
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text("x")
    convert(tmp_path / "in", tmp_path / "out", device="cpu", validate="off")
    files = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert kept <= files and not left & files
    assert {"config.json", "generation_config.json", "model.safetensors.index.json"} <= files
