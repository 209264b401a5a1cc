"""What people do with a swapped model: each task gives what it gives with the original."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tool_table import WORKS, Block, model_on, optimized, pair, same, same_step, who_runs, x_on
from torch import Tensor, nn

import normswap
from normswap import modules
from normswap.plans import Plan

pytestmark = pytest.mark.filterwarnings("ignore")
Task = Callable[[Path], None]
TASKS: dict[str, Task] = {}


def task(function: Task) -> Task:
    TASKS[function.__name__] = function
    return function


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, **autocast: Any) -> list[float]:
    """The losses of some steps on the same data."""
    losses, x = [], torch.linspace(-2, 3, 64).reshape(8, 8)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", **{"enabled": False, **autocast}):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_trains_alike(make: Callable[[nn.Module], torch.optim.Optimizer], **more: Any) -> None:
    model, fast, _ = pair("cpu", train=True)
    ours, theirs = (trained(one, make(one), **more) for one in (fast, model))
    assert ours == pytest.approx(theirs, rel=1e-3) and len({*theirs}) == len(theirs)


# --- training -----------------------------------------------------------------------------------------------------


@task
def train_by_sgd(folder: Path) -> None:
    assert_trains_alike(lambda one: torch.optim.SGD(one.parameters(), lr=1e-3, momentum=0.9))


@task
def train_by_fused_adamw(folder: Path) -> None:
    assert_trains_alike(lambda one: torch.optim.AdamW(one.parameters(), lr=1e-3, fused=True))


@task
def train_under_autocast(folder: Path) -> None:
    assert_trains_alike(lambda one: torch.optim.SGD(one.parameters(), lr=1e-3), enabled=True, dtype=torch.bfloat16)


@task
def leave_weight_decay_off_norms(folder: Path) -> None:
    def groups(one: nn.Module) -> list[list[str]]:
        norms = [n for n, m in one.named_modules() if isinstance(m, nn.LayerNorm | nn.GroupNorm)]
        names = [name for name, _ in one.named_parameters()]
        return [[n for n in names if (n.rpartition(".")[0] in norms) is decayed] for decayed in (True, False)]

    model, fast, _ = pair("cpu")
    assert groups(fast) == groups(model) and groups(model)[0]


@task
def clip_gradients(folder: Path) -> None:
    model, fast, x = pair("cpu", train=True)
    for one in (model, fast):
        one(x).square().sum().backward()
    norms = [nn.utils.clip_grad_norm_(one.parameters(), 1.0) for one in (model, fast)]
    same(*norms, 1e-3)


@task
def accumulate_gradients(folder: Path) -> None:
    model, fast, _ = pair("cpu", train=True)
    for one in (model, fast):
        for rows in (2, 3):
            one(torch.ones(rows, 8)).sum().backward()
    for ours, theirs in zip(fast.parameters(), model.parameters(), strict=True):
        same(ours.grad, theirs.grad)


@task
def freeze_the_backbone(folder: Path) -> None:
    model, x = model_on("cpu").train(), x_on("cpu")
    model[0].requires_grad_(False)
    fast = optimized(model, x)
    fast(x).sum().backward()
    assert {n for n, p in fast.named_parameters() if p.grad is not None} == {
        n for n, _ in fast.named_parameters() if n.startswith("1.")
    }


@task
def train_norms_alone(folder: Path) -> None:
    model, fast, x = pair("cpu", train=True)
    for one in (model, fast):
        one.requires_grad_(False)
        one[1].norm.requires_grad_(True)
        one(x).square().sum().backward()
    same(fast[1].norm.weight.grad, model[1].norm.weight.grad, 1e-3)


@task
def tie_weights(folder: Path) -> None:
    model, x = model_on("cpu"), x_on("cpu")
    model[1].norm.weight = model[0].norm.weight
    fast = optimized(model, x)
    assert fast[1].norm.weight is fast[0].norm.weight
    same_step(fast, model, x)


@task
def share_a_norm_between_layers(folder: Path) -> None:
    model, x = model_on("cpu"), x_on("cpu")
    model[1].norm = model[0].norm
    fast = optimized(model, x)
    assert fast[1].norm is fast[0].norm
    same_step(fast, model, x)


@task
def resume_an_optimizer(folder: Path) -> None:
    model, x = model_on("cpu").train(), x_on("cpu")
    plain, other = copy.deepcopy(model), torch.optim.Adam
    state = io.BytesIO()
    first = other(plain.parameters(), lr=1e-3)
    trained(plain, first)
    torch.save((plain.state_dict(), first.state_dict()), state)
    normswap.optimize(model, x, inplace=True)
    second = other(model.parameters(), lr=1e-3)
    state.seek(0)
    for one, known in zip((model, second), torch.load(state), strict=True):
        one.load_state_dict(known)
    assert trained(model, second) == pytest.approx(trained(plain, first), rel=1e-3)


@task
def penalise_gradients(folder: Path) -> None:
    model, fast, x = pair("cpu", train=True)
    found = []
    for one in (model, fast):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(one(leaf).sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), one[0].fc.weight)[0])
    same(found[1], found[0], 1e-2)


@task
def gradients_of_each_sample(folder: Path) -> None:
    model, fast, x = pair("cpu")

    def loss(parameters: dict[str, Tensor], one: nn.Module, row: Tensor) -> Tensor:
        return torch.func.functional_call(one, parameters, (row[None],)).square().sum()

    found = [
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, None, 0))(dict(one.named_parameters()), one, x)
        for one in (model, fast)
    ]
    for name, theirs in found[0].items():
        same(found[1][name], theirs, 1e-2)


@task
def forward_mode_derivatives(folder: Path) -> None:
    model, fast, x = pair("cpu")
    found = [torch.func.jvp(one, (x,), (torch.ones_like(x),)) for one in (fast, model)]
    for ours, theirs in zip(*found, strict=True):
        same(ours, theirs, 1e-3)


# --- inference ----------------------------------------------------------------------------------------------------


@task
def run_without_gradients(folder: Path) -> None:
    model, fast, x = pair("cpu")
    for block in (torch.no_grad(), torch.inference_mode()):
        with block:
            same(fast(x), model(x))


@task
def run_other_batches(folder: Path) -> None:
    model, fast, _ = pair("cpu")
    for rows in (1, 2, 33, 0):
        x = x_on("cpu", rows)
        same(fast(x), model(x))


@task
def convert_to_half_later(folder: Path) -> None:
    model, fast, x = pair("cpu")
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        same(fast.to(dtype)(x.to(dtype)), model.to(dtype)(x.to(dtype)), 2e-2)
    assert normswap.validate(fast.float(), x).swapped


@task
def switch_modes(folder: Path) -> None:
    model, fast, x = pair("cpu")
    same(fast.train()(x), model.train()(x))
    same(fast.eval()(x), model.eval()(x))


@task
def run_a_transformer_of_torch(folder: Path) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    model, x = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8)).eval(), torch.randn(2, 5, 8)
    fast = optimized(model, x)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    same(fast(x, src_key_padding_mask=mask), model(x, src_key_padding_mask=mask))
    same_step(fast.train(False), model, x)


@task
def run_in_threads(folder: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    model, fast, x = pair("cpu")
    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(fast, [x] * 16):
            same(out, model(x))


@task
def profile(folder: Path) -> None:
    _, fast, x = pair("cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        fast(x)
    assert any("layer_norm" in event.key for event in seen.key_averages())


# --- looking into a model, and changing it ------------------------------------------------------------------------


@task
def capture_features_by_hooks(folder: Path) -> None:
    model, fast, x = pair("cpu")
    found: list[list[Tensor]] = []
    for one in (model, fast):
        kept: list[Tensor] = []
        for name in ("norm", "rms", "group"):
            one[0].get_submodule(name).register_forward_hook(lambda m, args, out, kept=kept: kept.append(out))
        one(x)
        found.append(kept)
    assert len(found[0]) == 3
    for ours, theirs in zip(*reversed(found), strict=True):
        same(ours, theirs)


@task
def print_and_count(folder: Path) -> None:
    model, fast, _ = pair("cpu")
    assert str(fast) == str(model)
    assert sum(p.numel() for p in fast.parameters()) == sum(p.numel() for p in model.parameters())
    assert [n for n, _ in fast.named_modules()] == [n for n, _ in model.named_modules()]


@task
def initialise_again(folder: Path) -> None:
    model, fast, x = pair("cpu")

    def reset(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            module.reset_parameters()

    same(fast.apply(reset)(x), model.apply(reset)(x))


@task
def change_eps(folder: Path) -> None:
    model, fast, x = pair("cpu")
    for one in (model, fast):
        one[0].norm.eps = one[1].rms.variance_epsilon = 0.5
    same(fast(x), model(x))


@task
def replace_a_norm_by_another_module(folder: Path) -> None:
    model, fast, x = pair("cpu")
    for one in (model, fast):
        one[0].rms, one[1].norm = nn.Identity(), nn.Tanh()
    same(fast(x), model(x))


@task
def add_a_layer(folder: Path) -> None:
    model, fast, x = pair("cpu")
    more = model_on("cpu", 1)
    for one in (model, fast):
        one.append(copy.deepcopy(more[0]))
    again = optimized(fast, x)
    same(again(x), model(x))
    assert len(normswap.report(again).swapped) == 12


@task
def use_a_part(folder: Path) -> None:
    model, fast, x = pair("cpu")
    same(fast[1](x), model[1](x))
    same(nn.Sequential(*fast[:1], nn.Flatten())(x), model[0](x))


@task
def swap_a_part(folder: Path) -> None:
    model, x = model_on("cpu"), x_on("cpu")
    expected = model(x)
    model[1] = optimized(model[1], x)
    same(model(x), expected)
    assert {name.partition(".")[0] for name in normswap.report(model).swapped} == {"1"}


@task
def convert_to_sync_batch_norm(folder: Path) -> None:
    model, x = nn.Sequential(Block(), nn.BatchNorm1d(8)).eval(), x_on("cpu")
    fast = nn.SyncBatchNorm.convert_sync_batchnorm(optimized(model, x))
    assert type(fast[1]) is nn.SyncBatchNorm and type(fast[0].norm) is modules.LayerNorm
    same(fast(x), model(x))


# --- our own calls ------------------------------------------------------------------------------------------------


@task
def choose_what_is_swapped(folder: Path) -> None:
    model, x = model_on("cpu"), x_on("cpu")
    fast = optimized(model, x, include="0.*", exclude=lambda module, name: isinstance(module, nn.GroupNorm))
    assert set(normswap.report(fast).swapped) == {"0.norm", "0.rms"}


@task
def look_before(folder: Path) -> None:
    model = model_on("cpu")
    assert "0.norm: layer_norm" in str(normswap.plan(model)) and not normswap.report(model).swapped


@task
def keep_a_plan(folder: Path) -> None:
    model, fast, x = pair("cpu")
    (folder / "plan.json").write_text(normswap.report(fast).plan.to_json())
    again = normswap.apply(model_on("cpu"), Plan.from_json((folder / "plan.json").read_text()), inplace=True)
    again.load_state_dict(model.state_dict())
    same(again(x), model(x))
    assert who_runs(lambda: again(x)) == WORKS


@task
def keep_the_report(folder: Path) -> None:
    _, fast, _ = pair("cpu")
    assert len(json.loads(normswap.report(fast).to_json())["rows"]) == 8


@task
def compare_with_the_original(folder: Path) -> None:
    model, fast, x = pair("cpu")
    with normswap.disabled(fast):
        assert torch.equal(fast(x), model(x)) and who_runs(lambda: fast(x)) != WORKS
    assert who_runs(lambda: fast(x)) == WORKS
    assert torch.equal(normswap.revert(fast)(x), model(x))


@task
def write_a_model_with_our_modules(folder: Path) -> None:
    model, x = modules.RMSNorm(8, eps=1e-6), x_on("cpu")
    same(model(x), F.rms_norm(x, (8,), model.weight, 1e-6))
    assert normswap.report(model).swapped == ("",)


@task
def save_and_load_swapped(folder: Path) -> None:
    model, fast, x = pair("cpu")
    normswap.save(fast, folder / "fast")
    again = normswap.load_model(folder / "fast", model=model_on("cpu"))
    same(again.eval()(x), model(x))
    assert normswap.report(again).swapped == normswap.report(fast).swapped


# As usual, and tested elsewhere.
COVERED = {
    "torch.compile": "test_tools.py::test_tool",
    "train by Lightning": "test_integrations.py::test_lightning_trains_to_the_same_weights",
    "train by the Trainer of transformers": "test_integrations.py::test_the_trainer_of_transformers_loses_the_same",
    "accelerate": "test_integrations.py::test_prepare_swaps_first",
    "diffusers": "test_integrations.py::test_every_component_of_a_pipeline",
    "from_pretrained and the plan": "test_integrations.py::test_from_pretrained_replays_the_plan",
    "a checkpoint of Lightning": "test_integrations.py::test_a_checkpoint_of_lightning_loads_without_us",
    "convert a checkpoint": "test_cli.py::test_convert_and_open",
    "convert what transformers and timm save": "test_libraries.py::test_same_outputs_in_a_new_process",
    "an optimizer made before, in place": "test_apply.py::test_an_optimizer_made_before_goes_on_working",
    "run a cell again": "test_again.py::test_again_keeps_the_report_and_the_plan",
    "optimize in two steps": "test_again.py::test_in_two_steps_the_second_knows_of_the_first",
    "optimize what is compiled": "test_again.py::test_a_compiled_model_is_proved_without_compiling",
    "register a norm": "test_registered.py::test_registered_classes_are_swapped_and_proved",
    "fold for deployment": "test_subtle.py::test_fold_cancels_mean_and_bias_in_float64",
    "a report in a notebook": "test_hints.py::test_a_report_is_one_line_and_a_table",
    "reload a module in a notebook": "test_installed.py::test_a_forward_replaced_after_the_swap_is_the_one_that_runs",
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task(name: str, tmp_path: Path) -> None:
    TASKS[name](tmp_path)


def test_all_of_them_are_there() -> None:
    folder = Path(__file__).parent
    for place in COVERED.values():
        file, name = place.split("::")
        assert f"def {name}(" in (folder / file).read_text(), place
    assert len(TASKS) + len(COVERED) >= 50
