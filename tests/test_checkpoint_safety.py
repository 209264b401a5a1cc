"""What may never happen to a person's files, models and machine."""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoints import SITES, ZOO, forget_zoo, randomized, snapshot, write_shards
from click.testing import CliRunner, Result
from libraries import CASES
from torch import nn

from normswap import apply, report, rollback
from normswap.checkpoint import (
    CheckpointError,
    build_model,
    convert,
    files,
    load_model,
    open_checkpoint,
    same_tensors,
)
from normswap.cli import main
from normswap.modules import site_match

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
OPTIONS = ["--model", "zoo:net", "--device", "cpu", "--validate", "off"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with the module ``zoo`` and a checkpoint of zoo:net."""
    (tmp_path / "zoo.py").write_text(ZOO)
    monkeypatch.chdir(tmp_path)
    forget_zoo()
    torch.save(built().state_dict(), "net.pt")
    yield tmp_path
    forget_zoo()


def built() -> nn.Module:
    return randomized(build_model("zoo:net")).eval()


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def swapped_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if site_match(module) is not None}


# --- files that are there -------------------------------------------------------------------------------------------


def test_what_comes_while_a_conversion_runs_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    sync, late = files.sync, Path("late.pt")

    def slow(path: Path) -> None:
        if not late.exists():
            late.write_text("precious")
        sync(path)

    monkeypatch.setattr(files, "sync", slow)
    arguments = ["convert", "net.pt", "late.pt", *OPTIONS, "--input", "float32[4,6]"]
    assert "late.pt is there by now; pass force (--force) to replace it" in run(*arguments).stderr
    assert late.read_text() == "precious" and sorted(Path().glob("*.pt*")) == [late, Path("net.pt")]
    assert run(*arguments, "--force").exit_code == 0 and late.read_bytes() != b"precious"


@pytest.mark.parametrize("name", (".net.pt", "a\\b.pt", "n" * 198 + ".pt", "\udcff.pt"))
def test_names_that_could_not_be_opened_are_not_written(name: str) -> None:
    before = snapshot(Path())
    told = run("convert", "net.pt", name, *OPTIONS, "--input", "float32[4,6]")
    rule = "a name must not be hidden, must be UTF-8 without a backslash, and have at most 200 bytes"
    assert told.exit_code == 1 and rule in told.stderr
    assert snapshot(Path()) == before


def test_what_was_converted_opens_on_a_read_only_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    convert("net.pt", "out", "zoo:net", inputs=X, device="cpu")

    def refused(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", refused)
    assert swapped_names(load_model("out", trust_factory=True)) == {*SITES}


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("extra", [["--report", "net.pt"], ["--report", "out/net.pt"], ["--report", "link.json"]])
def test_a_report_never_takes_the_place_of_a_checkpoint(folder: Path, extra: list[str], force: list[str]) -> None:
    Path("link.json").symlink_to("net.pt")
    before = snapshot(folder)
    result = run("convert", "net.pt", "out", *OPTIONS, *extra, *force)
    assert result.exit_code == 1 and "is a file of the checkpoint" in result.stderr
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("given", "out", "extra"),
    [
        ("in", "out", "in/config.json"),
        ("in", "out", "in/words.txt"),
        ("in", "out", "in/normswap.json"),
        ("in", "out.pt", "in/generation_config.json"),
        ("in", "out/net.pt", "out/config.json"),
        ("in", "--in-place", "in/config.json"),
        ("net.pt", "out.dcp", "net.pt"),
    ],
)
def test_a_report_never_takes_the_place_of_what_lies_beside_the_tensors(
    folder: Path, given: str, out: str, extra: str
) -> None:
    for place in ("in", "out"):
        Path(place).mkdir()
        for name in ("config.json", "generation_config.json", "words.txt"):
            Path(place, name).write_text("{}")
    convert("net.pt", "in/net.pt", "zoo:net", device="cpu", validate="off")
    before = snapshot(folder)
    result = run("convert", given, out, *OPTIONS, "--report", extra, "--force")
    assert result.exit_code == 1 and f"{extra}: is a file of the checkpoint" in result.stderr
    assert snapshot(folder) == before


def test_a_report_and_a_program_are_two_files(folder: Path) -> None:
    before = snapshot(folder)
    both = ["--export", "a.pt2", "--report", "./a.pt2", "--input", "float32[4,6]"]
    result = run("convert", "net.pt", "out", *OPTIONS, *both)
    assert result.exit_code == 1 and "a.pt2: cannot be both the report and the program; name two" in result.stderr
    assert snapshot(folder) == before


@pytest.mark.parametrize("option", ["--report", "--export"])
def test_other_files_obey_the_rules_of_out(folder: Path, option: str) -> None:
    Path("notes.pt2").write_text("words")
    Path("place.pt2").mkdir()
    before = snapshot(folder)
    arguments = ["convert", "net.pt", "out", *OPTIONS, "--input", "float32[4,6]", option]
    assert "notes.pt2: exists already" in run(*arguments, "notes.pt2").stderr
    assert "place.pt2: is a folder" in run(*arguments, "place.pt2", "--force").stderr
    assert snapshot(folder) == before
    assert run(*arguments, "notes.pt2", "--force").exit_code == 0 and Path("notes.pt2").read_bytes() != b"words"


@pytest.mark.parametrize("missing", ["none", "there/none"])
@pytest.mark.parametrize("given", [["{}.pt"], ["out.pt", "--report", "{}.json"], ["out.pt", "--export", "{}.pt2"]])
def test_a_path_up_from_a_folder_that_is_not_there_is_refused(folder: Path, given: list[str], missing: str) -> None:
    Path("there").mkdir()
    before = snapshot(folder)
    places = [place.format(f"{missing}/../o") for place in given]
    result = run("convert", "net.pt", *places, *OPTIONS, "--input", "float32[4,6]")
    assert result.exit_code == 1 and f"{places[-1]}: passes through {missing}, where no folder is" in result.stderr
    assert snapshot(folder) == before


@pytest.mark.parametrize("place", ["there/../one.pt", "link/../two.pt", "../{}/three.pt", "more/four.pt"])
def test_any_other_path_is_where_the_system_finds_it(folder: Path, place: str) -> None:
    Path("there/in").mkdir(parents=True)
    Path("link").symlink_to("there/in")
    place = place.format(folder.name)
    assert run("convert", "net.pt", place, *OPTIONS).exit_code == 0 and Path(place).is_file()


def test_two_files_in_one_folder_keep_their_manifests() -> None:
    convert("net.pt", "out/first.pt", "zoo:net", device="cpu", validate="off")
    convert("net.pt", "out/second.safetensors", "zoo:net", device="cpu", validate="off", exclude="norm")
    assert swapped_names(load_model("out/first.pt", trust_factory=True)) == SITES
    assert swapped_names(load_model("out/second.safetensors", trust_factory=True)) == SITES - {"norm"}


# --- the model that was given ---------------------------------------------------------------------------------------

OUTSIDE = """
import torch
from torch import nn

class Table:
    def __init__(self):
        self.values = torch.randn(6)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.hidden = [nn.Linear(6, 6)]
        self.table = Table()

    def forward(self, x):
        return self.hidden[0](self.norm(x)) * self.table.values

def net():
    torch.manual_seed(3)
    return Net()
"""


def test_tensors_outside_the_state_dict_are_those_of_an_ordinary_build() -> None:
    Path("outside.py").write_text(OUTSIDE)
    model = build_model("outside:net").eval()
    with torch.no_grad():
        model.norm.weight.normal_()
    torch.save(model.state_dict(), "in.pt")
    convert("in.pt", "out", "outside:net", device="cpu", inputs=X)
    loaded = load_model("out", trust_factory=True)
    assert torch.equal(loaded.table.values, model.table.values)
    torch.testing.assert_close(loaded(X), model(X))
    sys.modules.pop("outside")


def in_a_file(tensor: torch.Tensor, name: str) -> bool:
    """Whether the memory of ``tensor`` is a mapping of a file of that name."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [tuple(int(end, 16) for end in span.split("-")) for span, *_, file in lines if file.endswith(f"/{name}")]
    return any(low <= tensor.data_ptr() < high for low, high in spans)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
@pytest.mark.parametrize("out", ["out.safetensors", "out.pt"])
def test_a_model_built_without_memory_maps_its_file_and_never_writes_into_it(folder: Path, out: str) -> None:
    convert("net.pt", out, "zoo:meta", device="cpu", validate="off")
    model = load_model(out, trust_factory=True)
    weights = [*model.parameters()]
    assert all(in_a_file(tensor, out) for tensor in weights)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in weights)  # what torch.save would write
    first, before = model(X), snapshot(folder)
    with torch.no_grad():
        weights[0].add_(1.0)
    assert not torch.equal(model(X), first) and snapshot(folder) == before
    torch.save({name: torch.zeros_like(tensor) for name, tensor in built().state_dict().items()}, "zeros.pt")
    again = load_model(out, trust_factory=True)
    convert("zeros.pt", out, "zoo:meta", device="cpu", validate="off", force=True)
    assert torch.equal(again(X), first)  # the file was replaced, not written into


APART = """
import torch
from torch import nn

def build():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))
"""


def test_weights_that_are_one_in_the_file_and_two_in_the_model_stay_two(folder: Path) -> None:
    (folder / "apart.py").write_text(APART)
    one = nn.Linear(6, 6)
    torch.save(nn.Sequential(one, nn.LayerNorm(6), one).state_dict(), "one.pt")
    convert("one.pt", "out.pt", "apart:build", device="cpu", validate="off")
    model = load_model("out.pt", trust_factory=True)
    first, last = model[0].weight, model[2].weight
    assert torch.equal(first, one.weight) and torch.equal(last, one.weight)
    with torch.no_grad():
        first.zero_()
    assert torch.equal(last, one.weight)
    sys.modules.pop("apart")


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "model.safetensors.index.json"])
def test_every_file_of_the_tensors_is_held_to_its_digest(folder: Path, name: str) -> None:
    write_shards(folder / "in", built().state_dict(), ".safetensors", 3)
    convert("in", "out", "zoo:net", device="cpu", validate="off")
    flip(folder / "out" / name)
    with pytest.raises(CheckpointError, match=f"was written for: {name} differs"):
        load_model("out", trust_factory=True)
    if not name.endswith("json"):
        load_model("out", trust_factory=True, check_digests=False)


def test_config_json_is_held_to_its_digest(folder: Path) -> None:
    pytest.importorskip("transformers")
    CASES["bert"].write(folder / "in")
    convert("in", "out", device="cpu", validate="off")
    config = Path("out/config.json")
    config.write_text(config.read_text().replace('"layer_norm_eps": 1e-12', '"layer_norm_eps": 1e-02'))
    with pytest.raises(CheckpointError, match="was written for: config.json differs"):
        load_model("out")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_every_file_is_on_the_disk_before_it_gets_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(folder / "in", built().state_dict(), ".safetensors", 3)
    Path("out").mkdir()
    synced: set[int] = set()
    named: list[tuple[str, bool]] = []
    fsync, rename = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def note_rename(source: Any, target: Any) -> None:
        named.append((Path(target).name, os.stat(source).st_ino in synced))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    convert("in", "out", "zoo:net", device="cpu", validate="off")
    assert all(done for _, done in named) and len(named) == 5 and named[0][0] == "normswap.json"


def test_another_gpu_than_the_one_measured_on_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    convert("net.pt", "out", "zoo:net", device="cpu", validate="off")
    manifest = json.loads(Path("out/normswap.json").read_text())
    assert manifest["plan"]["gpu"] == ""  # nothing was timed
    manifest["plan"]["gpu"] = "NVIDIA H100"
    Path("out/normswap.json").write_text(json.dumps(manifest))
    told = r"chosen by its speed on NVIDIA H100, and this is NVIDIA A10; measure again with normswap\.optimize"
    for name in ("NVIDIA H100", ""):  # there, and where there is none
        monkeypatch.setattr(rollback, "gpu_of", lambda model, name=name: name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = load_model("out", trust_factory=True)
    monkeypatch.setattr(rollback, "gpu_of", lambda model: "NVIDIA A10")
    with pytest.warns(UserWarning, match=told):
        load_model("out", trust_factory=True)
    with pytest.warns(UserWarning, match=told):
        apply(built(), report(model).plan)


# --- files as people have them --------------------------------------------------------------------------------------


def test_a_name_with_dots_is_a_folder() -> None:
    assert run("convert", "net.pt", "Llama-3.1-8B-fast", *OPTIONS).exit_code == 0
    assert swapped_names(load_model("Llama-3.1-8B-fast", trust_factory=True)) == SITES


@pytest.mark.parametrize("name", ["none", "none.model", "missing/none.pt", "Llama-3.1"])
def test_a_missing_in_is_told_as_that(name: str) -> None:
    result = run("inspect", name)
    assert result.exit_code == 1 and result.stderr == f"normswap: {name}: no such file\n"


@pytest.mark.parametrize("name", [".", "./", "../inside"])
def test_the_current_folder_holds_a_checkpoint(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "inside").mkdir()
    (folder / "net.pt").rename(folder / "inside/net.pt")
    monkeypatch.chdir(folder / "inside")
    assert run("inspect", name).exit_code == 0
    assert run("convert", name, "../fast", *OPTIONS).exit_code == 0
    assert run("verify", name, "../fast").exit_code == 0


def test_numbers_of_numpy_and_paths_beside_the_weights() -> None:
    beside = {"loss": np.float64(0.5), "seen": np.arange(3), "step": np.int32(7), "folder": Path("runs/1")}
    torch.save({"state_dict": built().state_dict(), **beside}, "train.ckpt")
    found = open_checkpoint("train.ckpt")
    assert same_tensors(found.state, built().state_dict())
    convert("train.ckpt", "out", "zoo:net", device="cpu", validate="off")
    assert same_tensors(load_model("out", trust_factory=True).state_dict(), built().state_dict())


EXPANDED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.register_buffer("ids", torch.arange(6.0).expand(4, 6))

    def forward(self, x):
        return self.norm(x) + self.ids
"""


@pytest.mark.parametrize("out", ["out", "out.safetensors"])
def test_an_expanded_buffer(out: str) -> None:
    Path("wide.py").write_text(EXPANDED)
    model = build_model("wide:Net")
    torch.save(model.state_dict(), "in.pt")
    convert("in.pt", out, "wide:Net", device="cpu", validate="off")
    loaded = load_model(out, trust_factory=True)
    assert same_tensors(loaded.state_dict(), model.state_dict()) and torch.equal(loaded(X), model(X))
    sys.modules.pop("wide")


def test_dtypes_of_four_bits() -> None:
    packed = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    safetensors.torch.save_file({"a": packed}, "in.safetensors")
    found = open_checkpoint("in.safetensors").tensors["a"]
    assert found.dtype == packed.dtype and torch.equal(found.view(torch.uint8), packed.view(torch.uint8))
    assert (
        run("inspect", "in.safetensors").exit_code == 0
        and run("verify", "in.safetensors", "in.safetensors").exit_code == 0
    )


HOSTILE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def __deepcopy__(self, memo):
        raise KeyError("cannot be copied")

    def forward(self, x):
        return self.norm(x)

class Stubborn(Net):
    def train(self, mode=True):
        raise AttributeError("always the same")
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["bench", "in.pt", "--model", "hostile:Net", "--input", "float32[2,6]", "--device", "cpu"],
            "cannot be copied",
        ),
        (["inspect", "in.pt", "--model", "hostile:Stubborn"], "always the same"),
        (["convert", "in.pt", "out", "--model", "hostile:Stubborn", "--device", "cpu"], "always the same"),
    ],
)
def test_what_a_model_s_own_code_raises_is_one_line(arguments: list[str], message: str) -> None:
    Path("hostile.py").write_text(HOSTILE)
    torch.save(nn.ModuleDict({"norm": nn.LayerNorm(6)}).state_dict(), "in.pt")
    result = run(*arguments)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1 and message in result.stderr, result.stderr
    assert "hostile.py, line" in result.stderr
    sys.modules.pop("hostile")
