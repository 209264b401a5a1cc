"""Whatever people keep a checkpoint in, its tensors come back bit for bit: read, converted, opened."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import SITES, randomized, read_tensors, snapshot, write_shards
from click.testing import CliRunner
from torch import Tensor, nn

from normswap.checkpoint import (
    CheckpointError,
    build_model,
    convert,
    load_model,
    open_checkpoint,
    same_tensors,
    save,
    verify,
)
from normswap.checkpoint.errors import MissingError
from normswap.cli import main
from normswap.modules import site_match

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
IDS = torch.arange(12).reshape(3, 4)
PICKLES = (".pt", ".pth", ".bin", ".ckpt")


@pytest.fixture(autouse=True)
def folder(zoo: Path) -> Path:
    return zoo


def built(name: str) -> nn.Module:
    return randomized(build_model(f"zoo:{name}")).eval()


def converted(*arguments: Any, **options: Any) -> None:
    """convert, on the CPU and without its proof, which other tests are about."""
    convert(*arguments, device="cpu", validate="off", **options)


def swapped_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if site_match(module) is not None}


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.case("state-dict")
@pytest.mark.parametrize("suffix", [*PICKLES, ".safetensors"])
@pytest.mark.parametrize("name", ["net", "net_half"])
def test_a_file(suffix: str, name: str) -> None:
    model = built(name)
    source = Path(f"in{suffix}")
    if suffix == ".safetensors":
        safetensors.torch.save_file(model.state_dict(), source)
    else:
        torch.save(model.state_dict(), source)
    before = source.read_bytes()
    x = X.to(next(model.parameters()).dtype)
    converted(source, "out", f"zoo:{name}", inputs=x)
    assert Path("out", source.name).read_bytes() == before == source.read_bytes()
    loaded = load_model("out", trust_factory=True)
    assert same_tensors(loaded.state_dict(), model.state_dict()) and swapped_names(loaded) == SITES
    build_model(f"zoo:{name}").load_state_dict(loaded.state_dict(), strict=True)
    torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.case("state-dict", "tied-in-safetensors")
@pytest.mark.parametrize("source", ["in.pt", "in.bin", "in.safetensors"])
@pytest.mark.parametrize("out", ["out.ckpt", "out.safetensors"])
def test_tied_weights_from_any_format_into_any(source: str, out: str) -> None:
    model = built("tied")
    if source.endswith(".safetensors"):
        safetensors.torch.save_model(model, source)
    else:
        torch.save(model.state_dict(), source)
    converted(source, out, "zoo:tied", inputs=(IDS,))
    loaded = load_model(out, trust_factory=True)
    assert loaded.head.weight is loaded.embedding.weight
    assert same_tensors(dict(sorted(loaded.state_dict().items())), dict(sorted(model.state_dict().items())))
    assert Path(out).stat().st_size < Path(source).stat().st_size + 2048  # stored once
    assert torch.equal(loaded(IDS), load_model(out, model=built("tied"))(IDS))


@pytest.mark.case("tied-in-safetensors")
def test_a_tied_weight_under_one_of_its_names(folder: Path) -> None:
    """As transformers writes safetensors: the second name is left out, and nothing in the file says so."""
    model = built("tied")
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    safetensors.torch.save_file(state, "in.safetensors")
    converted("in.safetensors", "out", "zoo:tied", inputs=(IDS,))
    loaded = load_model("out", trust_factory=True)
    assert loaded.head.weight is loaded.embedding.weight and torch.equal(loaded.head.weight, model.head.weight)


def test_tied_weights_that_differ_in_the_file_are_refused() -> None:
    state = {**built("tied").state_dict(), "head.weight": torch.zeros(16, 8)}
    torch.save(state, "in.pt")
    with pytest.raises(CheckpointError, match=r"embedding.weight, head.weight are one parameter in Tied, and differ"):
        converted("in.pt", "out", "zoo:tied")


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors"])
def test_a_conversion_needs_nothing_of_its_source(folder: Path, out: str) -> None:
    torch.save(built("net").state_dict(), "in.pt")
    converted("in.pt", out, "zoo:net")
    Path("in.pt").unlink()
    assert swapped_names(load_model(out, trust_factory=True)) == SITES


# --- folders of shards ----------------------------------------------------------------------------------------------


@pytest.mark.case("state-dict")
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("name", ["net", "net_half"])
def test_a_folder_of_four_shards(folder: Path, suffix: str, name: str) -> None:
    model = built(name)
    write_shards(folder / "in", model.state_dict(), suffix, 4)
    (folder / "in/tokens").mkdir()
    (folder / "in/tokens/vocabulary.txt").write_text("one two")
    (folder / "in/README.md").write_text("words")
    before = snapshot(folder / "in")
    x = X.to(next(model.parameters()).dtype)
    converted("in", "out", f"zoo:{name}", inputs=x)
    after = snapshot(folder / "out")
    assert after.pop("normswap.json") and after == before == snapshot(folder / "in")
    loaded = load_model("out", trust_factory=True)
    assert same_tensors(loaded.state_dict(), model.state_dict()) and swapped_names(loaded) == SITES
    torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards_into_one_file(folder: Path, suffix: str) -> None:
    model = built("net")
    write_shards(folder / "in", model.state_dict(), suffix, 4)
    converted("in", "out.safetensors", "zoo:net")
    assert same_tensors(read_tensors("out.safetensors")[0], model.state_dict())
    assert same_tensors(load_model("out.safetensors", trust_factory=True).state_dict(), model.state_dict())


@pytest.mark.parametrize("out", ["out.safetensors", "out.pt", "out.dcp"])
def test_what_a_shard_has_besides_tensors_is_not_dropped(folder: Path, out: str) -> None:
    write_shards(folder / "in", built("net").state_dict(), ".bin", 2)
    shard = sorted((folder / "in").glob("*.bin"))[1]
    torch.save({**torch.load(shard), "epoch": 3}, shard)
    with pytest.raises(CheckpointError, match=rf"{out}: cannot hold .* besides tensors: epoch \(int\); name a folder"):
        converted("in", out, "zoo:net")
    converted("in", "out", "zoo:net")
    assert (folder / "out" / shard.name).read_bytes() == shard.read_bytes()


def test_in_place_adds_only_the_manifest(folder: Path) -> None:
    model = built("net")
    write_shards(folder / "in", model.state_dict(), ".safetensors", 4)
    before = snapshot(folder / "in")
    converted("in", None, "zoo:net", inputs=X)
    after = snapshot(folder / "in")
    assert after.pop("normswap.json") and after == before
    assert swapped_names(load_model("in", trust_factory=True)) == SITES
    with pytest.raises(CheckpointError, match="normswap.json: exists already; pass force"):
        converted("in", None, "zoo:net")


def test_a_folder_with_one_file_and_one_with_two(folder: Path) -> None:
    (folder / "in").mkdir()
    torch.save(built("net").state_dict(), "in/weights.pth")
    converted("in", "out", "zoo:net")
    assert Path("out/weights.pth").read_bytes() == Path("in/weights.pth").read_bytes()
    torch.save({}, "in/other.pth")
    with pytest.raises(CheckpointError, match=r"in: holds 2 checkpoints \(other.pth, weights.pth\); name one"):
        open_checkpoint("in")


# --- state_dicts inside something larger ----------------------------------------------------------------------------


def lightning(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """What Lightning's Trainer saves of a LightningModule that keeps the network as ``self.model``."""
    return {
        "epoch": 3,
        "global_step": 1200,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": OrderedDict((f"model.{name}", tensor) for name, tensor in state.items()),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 3}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_path": "", "current_score": None}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 8},
    }


@pytest.mark.case("state-dict")
@pytest.mark.parametrize("name", ["net", "net_half"])
def test_a_lightning_checkpoint(name: str) -> None:
    model = built(name)
    torch.save(lightning(model.state_dict()), "last.ckpt")
    told: list[str] = []
    with pytest.raises(CheckpointError, match=r"every name begins with 'model.': pass strip_prefix"):
        converted("last.ckpt", "out", f"zoo:{name}")
    converted("last.ckpt", "out", f"zoo:{name}", strip_prefix=["model."], say=told.append)
    assert Path("out/last.ckpt").read_bytes() == Path("last.ckpt").read_bytes()
    loaded = load_model("out", trust_factory=True)
    assert same_tensors(loaded.state_dict(), model.state_dict())
    assert any("took its 'state_dict'" in line and "epoch (int)" in line for line in told)
    assert any("stripped 'model.'" in line for line in told)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (lambda state: {"model": state, "epoch": 3}, None),
        (lambda state: {"model": state, "ema": {n: t + 1 for n, t in state.items()}}, "model"),
        (lambda state: {"ema": state, "state_dict": {"a": torch.ones(1)}}, "ema"),
        (lambda state: {"teacher": {"backbone": state}, "student": {"a": torch.ones(1)}}, "teacher.backbone"),
        (lambda state: {**state, "epoch": 3}, None),
        (lambda state: {**state, "ema": {"a": torch.ones(1)}}, "."),
    ],
    ids=["one", "two", "ema", "nested", "beside a number", "the file itself"],
)
def test_nested_files(content: Any, key: str | None) -> None:
    model = built("net")
    torch.save(content(model.state_dict()), "in.pth")
    converted("in.pth", "out", "zoo:net", key=key)
    assert Path("out/in.pth").read_bytes() == Path("in.pth").read_bytes()
    assert same_tensors(load_model("out", trust_factory=True).state_dict(), model.state_dict())
    for out in ("out.safetensors", "out.dcp"):
        with pytest.raises(CheckpointError, match=f"{out}: cannot hold what in.pth has besides tensors"):
            converted("in.pth", out, "zoo:net", key=key)


def test_what_else_there_is_is_told_at_every_level(folder: Path) -> None:
    state = built("net").state_dict()
    torch.save({"state": {"model": state, "ema": state, "optim": {"a": 1}}, "epoch": 1}, "in.pth")
    found = open_checkpoint("in.pth", key="state.model")
    assert found.others == ("epoch (int)", "state.ema (OrderedDict of 22)", "state.optim (dict of 1)")
    with pytest.raises(CheckpointError, match=r"has besides tensors: epoch \(int\), state.ema"):
        converted("in.pth", "out.safetensors", "zoo:net", key="state.model")


def test_a_key_with_a_dot_in_it(folder: Path) -> None:
    state = built("net").state_dict()
    torch.save({"ema.model": state}, "one.pth")
    torch.save({"ema.model": state, "ema": {"model": state}}, "two.pth")
    found = open_checkpoint("one.pth")
    assert found.notes == ("one.pth: took its 'ema.model'; it also holds nothing else",)
    for key in (None, "ema.model"):
        with pytest.raises(CheckpointError, match="holds 2 state_dicts: ema.model .*; their keys are written alike"):
            open_checkpoint("two.pth", key=key)


@pytest.mark.parametrize("key", [".", "ema"])
def test_a_key_of_shards(folder: Path, key: str) -> None:
    write_shards(folder / "in", built("net").state_dict(), ".safetensors", 2)
    if key == ".":
        assert open_checkpoint("in", key=key).key == key
    else:
        with pytest.raises(CheckpointError, match=r"index.json: no state_dict under the key 'ema'; there is \."):
            open_checkpoint("in", key=key)


def test_two_candidates_need_a_key(folder: Path) -> None:
    state = built("net").state_dict()
    torch.save({"model": state, "ema": state}, "in.pth")
    with pytest.raises(CheckpointError, match=r"holds 2 state_dicts: model \(OrderedDict of 22\), ema .*\(--key\)"):
        converted("in.pth", "out", "zoo:net")
    with pytest.raises(CheckpointError, match=r"no state_dict under the key 'other'; there is model, ema"):
        converted("in.pth", "out", "zoo:net", key="other")
    assert not Path("out").exists()


@pytest.mark.parametrize("prefixes", [("module.",), ("_orig_mod.",), ("module.", "_orig_mod.")])
def test_prefixes_of_wrappers(prefixes: tuple[str, ...]) -> None:
    """What DataParallel and torch.compile put before every name, here with the module versions that go along."""
    model = built("net")
    wrapped: nn.Module = model
    for prefix in reversed(prefixes):
        wrapped = wrapping(prefix.removesuffix("."), wrapped)
    torch.save(wrapped.state_dict(), "in.pt")
    converted("in.pt", "out.safetensors", "zoo:net", strip_prefix=prefixes)
    found, _ = read_tensors("out.safetensors")
    assert same_tensors(found, model.state_dict())
    assert dict(found._metadata) == dict(model.state_dict()._metadata)
    assert same_tensors(load_model("out.safetensors", trust_factory=True).state_dict(), model.state_dict())


def wrapping(name: str, inner: nn.Module) -> nn.Module:
    outer = nn.Module()
    outer.add_module(name, inner)
    return outer


def test_a_prefix_that_no_name_has_or_that_makes_two_names_one() -> None:
    torch.save({"module.a": torch.ones(1), "a": torch.zeros(1)}, "in.pt")
    for prefix, message in (("model.", "no name begins with the prefix 'model.'"), ("module.", "two tensors have one")):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint("in.pt", strip_prefix=[prefix])


# --- pickled models -------------------------------------------------------------------------------------------------


@pytest.mark.case("pickle-deepcopy")
def test_a_whole_pickled_model_needs_leave(folder: Path) -> None:
    model = built("net")
    torch.save(model, "in.pt")
    with pytest.raises(CheckpointError, match=r"in.pt: refused, .* zoo.Net.*--allow-pickle"):
        converted("in.pt", "out", "zoo:net")
    converted("in.pt", "out", allow_pickle=True, inputs=X)
    assert Path("out/in.pt").read_bytes() == Path("in.pt").read_bytes()
    with pytest.raises(CheckpointError, match=r"which is not run unasked; pass trust_factory=True \(--trust-factory\)"):
        load_model("out")
    loaded = load_model("out", trust_factory=True)
    assert same_tensors(loaded.state_dict(), model.state_dict()) and swapped_names(loaded) == SITES
    assert json.loads(Path("out/normswap.json").read_text())["factory"] == "pickle:"


@pytest.mark.parametrize("lost", ("zoo", "zoo.Net"))
def test_a_pickled_model_whose_code_is_not_here(lost: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(built("net"), "in.pt")
    if lost == "zoo":
        monkeypatch.setitem(sys.modules, "zoo", None)
    else:
        monkeypatch.delattr(sys.modules["zoo"], "Net")
    with pytest.raises(MissingError, match=r"in.pt: names code that is not here \(.*; put its module on PYTHONPATH"):
        converted("in.pt", "out", allow_pickle=True, inputs=X)


@pytest.mark.case("pickle-deepcopy")
def test_a_loaded_model_can_be_saved_and_converted_again() -> None:
    torch.save(built("net").state_dict(), "in.pt")
    converted("in.pt", "out", "zoo:net")
    loaded = load_model("out", trust_factory=True)
    torch.save(loaded.state_dict(), "again.pt")
    converted("again.pt", "out2", "zoo:net")
    assert torch.equal(load_model("out2", trust_factory=True)(X), loaded(X))
    torch.save(loaded, "whole.pt")
    assert swapped_names(torch.load("whole.pt", weights_only=False)) == SITES


# --- entries that are no tensors ------------------------------------------------------------------------------------


class Extra(nn.Module):
    """Keeps more than tensors in its state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.seen: dict[str, Any] = {}

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_extra_state_survives(folder: Path) -> None:
    (folder / "more.py").write_text("from test_formats import Extra\n")
    model = Extra()
    model.seen = {"steps": 7, "words": ["a", "b"]}
    torch.save(model.state_dict(), "in.pt")
    converted("in.pt", "out", "more:Extra", inputs=X)
    loaded = load_model("out", model=Extra())
    assert loaded.seen == model.seen and site_match(loaded.norm) is not None
    before = snapshot(folder)
    for out, what in (("out.safetensors", "safetensors"), ("out.dcp", "torch.distributed.checkpoint")):
        cure = r"cannot hold _extra_state \(dict\); name a file that ends in .pt"
        with pytest.raises(CheckpointError, match=f"^{what} {cure}"):
            converted("in.pt", out, "more:Extra")
    assert snapshot(folder) == before


@pytest.mark.parametrize("value", [torch.arange(3.0), float("nan"), [{"a": (torch.ones(2), float("nan"))}]])
def test_extra_state_of_tensors_and_nan_is_compared(value: Any) -> None:
    model = Extra()
    model.seen = {"value": value}
    save(model, "one.pt")
    save(model, "two.pt")
    assert verify("one.pt", "two.pt").same
    model.seen = {"value": [value]}
    save(model, "two.pt", force=True)
    assert verify("one.pt", "two.pt").tensors == "1 changed: _extra_state"


class Sparse(nn.Module):
    """Has a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.register_buffer("edges", torch.tensor([[1.0, float("nan")], [0.0, 2.0]]).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_a_sparse_buffer_survives(folder: Path) -> None:
    (folder / "graph.py").write_text("from test_formats import Sparse\n")
    torch.save(Sparse().state_dict(), "in.pt")
    converted("in.pt", "out.pth", "graph:Sparse", inputs=X)
    assert verify("in.pt", "out.pth").same and verify("out.pth").size == 2 * 24 + 3 * (4 + 2 * 8)
    for command in (["inspect", "in.pt"], ["verify", "in.pt", "out.pth"]):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0 and "3 tensors" in result.stdout
    for out, what in (("out.safetensors", "safetensors"), ("out.dcp", "torch.distributed.checkpoint")):
        with pytest.raises(CheckpointError, match=rf"{what} cannot hold edges \(torch.sparse_coo\); name a file"):
            converted("in.pt", out, "graph:Sparse")
