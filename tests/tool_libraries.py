"""What of other libraries becomes of a swapped model: on the CPU, where CI has them."""

from __future__ import annotations

import io
import tempfile
from typing import Any

import torch
from tool_table import (
    IN_ORDER,
    ORIGINAL,
    WORKS,
    Seen,
    compared,
    copied,
    model_on,
    optimized,
    pair,
    refusal,
    row,
    same,
    same_step,
    who_runs,
    x_on,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

import normswap

CPU = ("cpu",)


# --- ONNX ---------------------------------------------------------------------------------------------------------


def answered(file: io.BytesIO, x: Tensor) -> Tensor:
    """What onnxruntime makes of ``x`` by the graph in ``file``."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(out)


def exported_to_onnx(dynamo: bool) -> Seen:
    model, fast, x = pair("cpu")
    file = io.BytesIO()
    if dynamo:
        torch.onnx.export(fast, (x,), dynamo=True, verbose=False).save(file)
    else:
        torch.onnx.export(fast, (x,), file, dynamo=False)
    same(answered(file, x), model(x), 1e-3)
    return Seen(ORIGINAL)


@row("torch.onnx.export", "optimize, export(dynamo=True)", ORIGINAL, devices=CPU, needs=("onnxscript", "onnxruntime"))
def onnx_by_dynamo(device: str) -> Seen:
    return exported_to_onnx(True)


@row("torch.onnx.export", "optimize, export(dynamo=False)", ORIGINAL, devices=CPU, needs=("onnx", "onnxruntime"))
def onnx_by_tracing(device: str) -> Seen:
    return exported_to_onnx(False)


# --- quantisation and adapters ------------------------------------------------------------------------------------


def quantized(model: nn.Module) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return model


@row("torchao quantize_", "optimize, quantize_(Int8WeightOnlyConfig())", devices=CPU, needs=("torchao",))
def torchao_after(device: str) -> Seen:
    model, fast, x = pair(device)
    return compared(quantized(fast), quantized(model), x)


@row("torchao quantize_", "quantize_(Int8WeightOnlyConfig()), optimize", devices=CPU, needs=("torchao",))
def torchao_before(device: str) -> Seen:
    model, x = quantized(model_on(device)), x_on(device)
    return compared(optimized(model, x), model, x)


@row(
    "torchao quantize_", "optimize, quantize_(Int8DynamicActivationInt8WeightConfig())", devices=CPU, needs=("torchao",)
)
def torchao_dynamic(device: str) -> Seen:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model, fast, x = pair(device)
    for one in (model, fast):
        quantize_(one, Int8DynamicActivationInt8WeightConfig())
    return compared(fast, model, x)


def with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(target_modules=["fc"], init_lora_weights=False, lora_dropout=0.0))


@row("peft", "optimize, get_peft_model(LoRA)", devices=CPU, needs=("peft",))
def peft_after(device: str) -> Seen:
    model, fast, x = pair(device)
    adapted, theirs = with_lora(fast), with_lora(model)
    same_step(adapted, theirs, x)
    seen = compared(adapted, theirs, x)
    same(adapted.merge_and_unload()(x), theirs(x))
    return seen


@row("peft", "get_peft_model(LoRA), optimize", devices=CPU, needs=("peft",))
def peft_before(device: str) -> Seen:
    model, x = with_lora(model_on(device)), x_on(device)
    return compared(optimized(model, x), model, x)


# --- trainers and pipelines ---------------------------------------------------------------------------------------


@row(
    "accelerate",
    "integrations.accelerate.prepare",
    IN_ORDER,
    "refused: call this before dispatch_model, or after remove_hook_from_submodules",
    devices=CPU,
    needs=("accelerate",),
)
def accelerated(device: str) -> Seen:
    from accelerate import Accelerator, dispatch_model

    from normswap.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True)
    model, x = model_on(device), x_on(device)
    expected = model(x)
    dispatched = dispatch_model(copied(model), {"0": "cpu", "1": "disk"}, offload_dir=tempfile.mkdtemp())
    text = refusal(lambda: prepare(accelerator, dispatched, example_inputs=x))
    fast = prepare(accelerator, model, example_inputs=x)
    same(fast(x), expected)
    assert who_runs(lambda: fast(x)) == WORKS
    return Seen(IN_ORDER, f"refused: {text.rpartition('; ')[2]}")


def sites(model: nn.Module) -> int:
    return len(normswap.report(model).swapped)


@row("Lightning", "Trainer(callbacks=[integrations.lightning.NormSwap(inputs)])", devices=CPU, needs=("lightning",))
def lightning(device: str) -> Seen:
    from lightning.pytorch import LightningModule, Trainer

    from normswap.integrations.lightning import NormSwap

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model_on(device)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def test_step(self, batch: Tensor, index: int) -> None:
            assert who_runs(lambda: self(batch)) == WORKS

    module, x = Module(), x_on(device)
    expected = module(x)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    Trainer(accelerator="cpu", callbacks=[NormSwap(x)], **quiet).test(
        module, DataLoader([*x], batch_size=4), verbose=False
    )
    assert sites(module)
    return compared(module, lambda x: expected, x)


@row(
    "transformers.Trainer",
    "Trainer(callbacks=[integrations.transformers.NormSwap(inputs)])",
    devices=CPU,
    needs=("transformers", "accelerate"),
)
def transformers_trainer(device: str) -> Seen:
    from transformers import Trainer, TrainingArguments

    from normswap.integrations.transformers import NormSwap

    model, x = model_on(device), x_on(device)
    expected = model(x)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(model, TrainingArguments(folder, report_to=[], use_cpu=True), callbacks=[NormSwap(x)])
    assert sites(model)
    return compared(model, lambda x: expected, x)


@row("transformers from_pretrained", "from_pretrained, optimize", devices=CPU, needs=("transformers",))
def transformers_model(device: str) -> Seen:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.arange(12).reshape(2, 6)
    fast = optimized(model, None, example_kwargs={"input_ids": ids})
    assert sites(fast) >= 5  # the norms, and the layers that hold them beside a sum
    text = [one.generate(ids, max_new_tokens=4, do_sample=False) for one in (model, fast)]
    assert torch.equal(*text)
    return compared(lambda x: fast(x).logits, lambda x: model(x).logits, ids)


@row("diffusers", "integrations.diffusers.optimize_pipeline", devices=CPU, needs=("diffusers",))
def diffusers_pipeline(device: str) -> Seen:
    import diffusers

    from normswap.integrations.diffusers import optimize_pipeline

    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    ).eval()
    pipeline = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())
    pipeline.set_progress_bar_config(disable=True)

    def image(_: Any = None) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.tensor(pipeline(generator=generator, num_inference_steps=2, output_type="np").images)

    expected = image()
    assert optimize_pipeline(pipeline, num_inference_steps=1, output_type="np")["unet"].swapped
    return compared(image, lambda _: expected, expected)
