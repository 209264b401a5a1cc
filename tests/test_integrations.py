"""The adapters with the real libraries, on tiny random models."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import randomised
from tool_table import WORKS, Block, same, who_runs
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import normswap
from normswap.integrations.together import optimize_together
from normswap.plans import MismatchError, NormswapError

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(8, 8)
SITES = 8  # of two blocks


def test_no_library_is_imported_before_its_adapter() -> None:
    code = (
        "import sys, normswap, normswap.integrations, normswap.integrations.together\n"
        "print([n for n in ('lightning', 'transformers', 'diffusers', 'accelerate') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout.strip() == "[]"


# --- Lightning ----------------------------------------------------------------------------------------------------


def lightning_module(**more: Any) -> Any:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = randomised(nn.Sequential(Block(), Block()))
            vars(self).update(more)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: tuple[Tensor], index: int) -> Tensor:
            return self(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    module = Module()
    if "example" in more:
        module.example_input_array = more["example"]
    return module


def fitted(module: Any, folder: Path, *callbacks: Any, **options: Any) -> Any:
    lightning = pytest.importorskip("lightning.pytorch")
    trainer = lightning.Trainer(
        **{"max_steps": 3, "accelerator": "cpu", "logger": False, "enable_progress_bar": False, **options},
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[*callbacks],
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.linspace(-2, 3, 128).reshape(16, 8)), batch_size=4))
    trainer.save_checkpoint(folder / "last.ckpt")
    return trainer


@pytest.mark.parametrize("example", [X, (X,), {"x": X}])
def test_lightning_trains_to_the_same_weights(tmp_path: Path, example: Any) -> None:
    plain = lightning_module()
    fitted(plain, tmp_path / "plain")
    from normswap.integrations.lightning import NormSwap

    module = lightning_module(example=example)
    keys = list(module.state_dict())
    fitted(module, tmp_path, NormSwap())
    report = normswap.report(module)
    assert len(report.swapped) == SITES and {row["inputs"] for row in report.rows} == {"captured"}
    assert list(module.state_dict()) == keys and who_runs(lambda: module(X)) == WORKS
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        same(ours, theirs)


def test_a_checkpoint_of_lightning_loads_without_us(tmp_path: Path) -> None:
    from normswap.integrations.lightning import NormSwap

    module = lightning_module()
    fitted(module, tmp_path, NormSwap(X, min_speedup=None))
    known = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert not known.get("callbacks") or not any("NormSwap" in name for name in known["callbacks"])
    other = lightning_module()
    other.load_state_dict(known["state_dict"])
    same(other(X), module(X))


def test_lightning_again_and_under_bf16(tmp_path: Path) -> None:
    from normswap.integrations.lightning import NormSwap

    module, callback = lightning_module(), NormSwap(X)
    fitted(module, tmp_path, callback, precision="bf16-mixed")
    known = normswap.report(module)
    assert known.swapped
    fitted(module, tmp_path, callback)
    assert normswap.report(module) is known


def test_a_wrong_option_stops_lightning_and_leaves_the_module(tmp_path: Path) -> None:
    from normswap.integrations.lightning import NormSwap

    module = lightning_module()
    with pytest.raises(ValueError, match="min_speedup must be a number above 0"):
        fitted(module, tmp_path, NormSwap(X, min_speedup=-1))
    assert not normswap.report(module).swapped


# --- transformers -------------------------------------------------------------------------------------------------


def bert() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=2
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = transformers.BertForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


IDS = {"input_ids": torch.arange(24).reshape(4, 6), "labels": torch.tensor([0, 1, 0, 1])}
ROWS = [{"input_ids": row, "labels": label} for row, label in zip(IDS["input_ids"], IDS["labels"], strict=True)]


def trainer_of(model: Any, folder: Path, *callbacks: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        folder, max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True, seed=0
    )
    return transformers.Trainer(model, arguments, train_dataset=ROWS, callbacks=[*callbacks])


def test_the_trainer_of_transformers_loses_the_same(tmp_path: Path) -> None:
    from normswap.integrations.transformers import NormSwap

    losses, models = [], []
    for callbacks in ((), (NormSwap(example_kwargs=IDS),)):
        models.append(model := bert())
        trainer = trainer_of(model, tmp_path, *callbacks)
        losses.append(trainer.train().training_loss)
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        same(ours, theirs, 1e-3)
    assert len(normswap.report(model).swapped) >= 5 and normswap.report(model).rows[0]["inputs"] == "captured"
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    trainer.save_model(tmp_path / "saved")
    again = type(bert()).from_pretrained(tmp_path / "saved").eval()
    assert not normswap.report(again).swapped
    same(again(**IDS).logits, model.eval()(**IDS).logits)


def test_a_callback_added_too_late_says_so(tmp_path: Path) -> None:
    from normswap.integrations.transformers import NormSwap

    trainer = trainer_of(bert(), tmp_path)
    trainer.add_callback(NormSwap())
    with pytest.raises(NormswapError, match=r"Trainer\(\.\.\., callbacks=\[NormSwap\(\)\]\)"):
        trainer.train()


def test_from_pretrained_replays_the_plan(tmp_path: Path) -> None:
    from normswap.integrations import transformers

    model = bert().eval()
    normswap.optimize(model, None, IDS, inplace=True, exclude="*.1.*")
    transformers.save_pretrained(model, tmp_path / "saved")
    again = transformers.from_pretrained(type(bert()), tmp_path / "saved").eval()
    assert normswap.report(again).swapped == normswap.report(model).swapped
    same(again(**IDS).logits, model(**IDS).logits)
    plan = normswap.report(model).plan
    assert normswap.report(transformers.from_pretrained(type(bert()), tmp_path / "saved", plan=plan)).swapped


def test_from_pretrained_without_a_plan(tmp_path: Path) -> None:
    from normswap.integrations import transformers

    bert().save_pretrained(tmp_path / "saved")
    with pytest.raises(NormswapError, match=r"no normswap_plan.json in .*pass plan="):
        transformers.from_pretrained(type(bert()), tmp_path / "saved")


# --- accelerate ---------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate")
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(True)


def test_prepare_swaps_first(accelerator: Any) -> None:
    from normswap.integrations.accelerate import prepare

    model = randomised(nn.Sequential(Block(), Block()))
    expected = model(X)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    prepared, stepped = prepare(accelerator, model, optimizer, example_inputs=X)
    assert prepared is model and len(normswap.report(model).swapped) == SITES
    same(prepared(X), expected)
    accelerator.backward(prepared(X).sum())
    stepped.step()
    assert not torch.equal(prepared(X), expected)
    with pytest.raises(NormswapError, match="prepared already"):
        prepare(accelerator, prepared, example_inputs=X)


def test_a_dispatched_model_is_refused_with_the_cure(accelerator: Any) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    from normswap.integrations.accelerate import prepare

    model = randomised(nn.Sequential(Block(), Block()))
    add_hook_to_module(model[1], AlignDevicesHook(torch.device("cpu")))
    with pytest.raises(NormswapError, match=r"around the forward of 1; call this before dispatch_model"):
        prepare(accelerator, model, example_inputs=X)


# --- diffusers ----------------------------------------------------------------------------------------------------


def pipeline() -> Any:
    """A latent diffusion of tiny parts, each of which the pipeline calls in another way."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    blocks = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
    unet = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        **blocks,
    )
    vqvae = diffusers.VQModel(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        **blocks,
    )
    made = diffusers.LDMPipeline(vqvae, unet, diffusers.DDIMScheduler())
    made.set_progress_bar_config(disable=True)
    for part in (made.unet, made.vqvae):
        part.eval()
    return made


def images(made: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.tensor(made(generator=generator, num_inference_steps=2, output_type="np").images)


def test_every_component_of_a_pipeline(tmp_path: Path) -> None:
    from normswap.integrations.diffusers import optimize_pipeline

    made = pipeline()
    expected = images(made)
    reports = optimize_pipeline(made, num_inference_steps=1, output_type="np")
    assert reports.keys() == {"unet", "vqvae"} and all(report.swapped for report in reports.values())
    assert {row["inputs"] for row in reports["unet"].rows if row["swapped"]} == {"captured"}
    decoder = [row for row in reports["vqvae"].rows if row["name"].startswith("decoder.") and row["swapped"]]
    assert decoder and {row["inputs"] for row in decoder} == {"captured"}
    assert "forward" not in vars(made.unet) and "decode" not in vars(made.vqvae)
    same(images(made), expected, 1e-3)
    made.save_pretrained(tmp_path)
    same(images(type(made).from_pretrained(tmp_path)), expected, 1e-3)


def test_a_forward_that_a_person_put_on_a_component_stays() -> None:
    from normswap.integrations.diffusers import optimize_pipeline

    made = pipeline()
    own = made.unet.forward = made.unet.forward
    optimize_pipeline(made, num_inference_steps=1, output_type="np")
    assert vars(made.unet)["forward"] is own


def test_a_pipeline_is_swapped_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from normswap.integrations.diffusers import optimize_pipeline

    made, known = pipeline(), normswap.optimize

    def failing(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if model is made.unet:
            raise MismatchError("planted")
        return known(model, *args, **kwargs)

    monkeypatch.setattr(normswap, "optimize", failing)
    with pytest.raises(MismatchError, match="planted"):
        optimize_pipeline(made, num_inference_steps=1, output_type="np")
    assert not normswap.report(made.vqvae).swapped and "forward" not in vars(made.vqvae)


def test_an_offloaded_pipeline_is_refused_with_the_cure() -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    from normswap.integrations.diffusers import optimize_pipeline

    made = pipeline()
    add_hook_to_module(made.unet, AlignDevicesHook(torch.device("cpu")))
    with pytest.raises(NormswapError, match="around the forward of the model; call this before enable_model_cpu_off"):
        optimize_pipeline(made)


# --- several processes --------------------------------------------------------------------------------------------


def _together(rank: int, folder: str) -> None:
    """What one of two processes does: both hold one plan in the end, and an error of the first is both's."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model, x = randomised(nn.Sequential(Block(), Block())).eval(), torch.ones(4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimize_together(model, x, None, {"include": "0.*"} if rank == 0 else {})
    report = normswap.report(model)
    assert report.swapped == ("0.norm", "0.rms", "0.group")
    assert {row["status"] for row in report.rows if row["swapped"]} == ({"unchecked"} if rank else {"wiring"})
    with pytest.raises(NormswapError if rank else ValueError, match="first process" if rank else "min_speedup"):
        optimize_together(model, x, None, {"min_speedup": -1})
    dist.barrier()
    Path(folder, f"done{rank}").touch()
    dist.destroy_process_group()


def test_two_processes_run_the_same_plan(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_together, (str(tmp_path),), nprocs=2)
    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1"}
