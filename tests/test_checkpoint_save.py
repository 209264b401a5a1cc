"""normswap.save writes a model optimized in Python as the command line writes one; DCP folders, in and out."""

from __future__ import annotations

import collections
import enum
import os
import pathlib
import pickle
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import REPOSITORY, SITES, ZOO, forget_zoo, randomized, snapshot
from libraries import CASES
from torch import nn

import normswap
from normswap.checkpoint import CheckpointError, build_model, convert, open_checkpoint, same_tensors, verify
from normswap.modules import site_match

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with the module ``zoo``."""
    (tmp_path / "zoo.py").write_text(ZOO)
    monkeypatch.chdir(tmp_path)
    forget_zoo()
    yield tmp_path
    forget_zoo()


def built() -> nn.Module:
    return randomized(build_model("zoo:net")).eval()


def swapped_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if site_match(module) is not None}


@pytest.mark.parametrize("out", ["net.pt", "net.dcp"])
def test_a_place_that_cannot_be_written_to_is_told(monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    monkeypatch.setattr(os, "mkdir", refused)
    with pytest.raises(CheckpointError, match=f"{out}: cannot be written .PermissionError"):
        normswap.save(built(), out, factory="zoo:net")


@pytest.mark.parametrize("out", ["deep/out", "net.pt", "net.safetensors", "net.dcp"])
def test_saved_and_opened(folder: Path, out: str) -> None:
    model = built()
    fast = normswap.optimize(model, X, exclude="norm", validate="forward")
    normswap.save(fast, out, factory="zoo:net")
    assert not [name for name in snapshot(folder) if name.endswith(".tmp")]
    opened = normswap.load_model(out, trust_factory=True)
    assert swapped_names(opened) == SITES - {"norm"} and same_tensors(opened.state_dict(), model.state_dict())
    assert torch.equal(opened(X), fast(X)) and verify(out).same
    before = snapshot(folder)
    with pytest.raises(CheckpointError, match="exists already; pass force"):
        normswap.save(fast, out)
    assert snapshot(folder) == before
    normswap.save(fast, out, force=True)
    with pytest.raises(CheckpointError, match="says nothing of what builds the model; pass model="):
        normswap.load_model(out, trust_factory=True)
    given = build_model("zoo:net")
    assert normswap.load_model(out, model=given) is given and torch.equal(given(X), fast(X))


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        *(
            (None, {"factory": name}, f"{name!r} is not written pkg.module")
            for name in ("xx", "pickle:", "hf:", "a:b c")
        ),
        (
            None,
            {"factory": "zoo:net", "factory_kwargs": {"a": {1}}},
            r"factory_kwargs: a is no JSON, .* give num",
        ),
        (nn.ReLU(), {}, "ReLU has no parameters or buffers, so there is nothing to save"),
    ],
)
@pytest.mark.parametrize("out", ["out", "net.pt", "net.safetensors", "net.dcp"])
def test_what_could_not_be_opened_is_not_saved(folder: Path, model: Any, given: Any, message: str, out: str) -> None:
    before = snapshot(folder)
    with pytest.raises(CheckpointError, match=message) as raised:
        normswap.save(model or built(), out, **given)
    assert ".tmp" not in str(raised.value) and snapshot(folder) == before


def test_arguments_that_are_no_json_are_refused_before_anything_is_read() -> None:
    with pytest.raises(CheckpointError, match="factory_kwargs: layers is no JSON, in which the manifest"):
        convert("none.pt", "out", "zoo:Net", factory_kwargs={"depth": (1, 2), "layers": object()})


@pytest.mark.parametrize("factory", ["timm:vit_tiny.in1k", "hf:some/folder", "./zoo.py:net", "hf:."])
def test_every_way_to_write_a_factory_is_taken(folder: Path, factory: str) -> None:
    normswap.save(built(), "out", factory=factory)


def test_a_folder_that_cannot_be_filled_goes_by_its_own_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, storage_writer: Any, **__: object) -> None:
        raise OSError(28, "No space left on device", f"{storage_writer.path}/__0_0.distcp")

    monkeypatch.setattr(dcp, "save", full)
    with pytest.raises(
        CheckpointError, match=r"^net\.dcp: cannot be written .*No space left .*'net\.dcp/__0_0\.distcp'"
    ):
        normswap.save(built(), "net.dcp")


KINDS = """
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.group = nn.GroupNorm(2, 8)

    def forward(self, x):
        return F.silu(self.group(F.relu(self.bn(self.conv(x)) + x)))

def build():
    return nn.Sequential(Block(), nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
"""


def test_regions_and_batch_norms_behind_convolutions_convert_fold_and_reload(folder: Path) -> None:
    (folder / "norm_kinds.py").write_text(KINDS)
    model, x = randomized(build_model("norm_kinds:build")).eval(), torch.randn(2, 8, 6, 6)
    torch.save(model.state_dict(), "in.pt")
    report = convert("in.pt", "out", "norm_kinds:build", inputs=x, device="cpu")
    kinds = {row["name"]: row["kind"] for row in report.rows if row["swapped"]}
    assert kinds == {"": "region", "0": "region", "0.group": "group_norm", "1": "instance_norm"}
    opened = normswap.load_model("out", trust_factory=True)
    assert swapped_names(opened) == {*kinds} and same_tensors(opened.state_dict(), model.state_dict())
    torch.testing.assert_close(opened(x), model(x))
    convert("in.pt", "folded.pt", "norm_kinds:build", inputs=x, device="cpu", fold=True)
    plain = normswap.load_model("folded.pt", trust_factory=True)
    assert not swapped_names(plain) and not [m for m in plain.modules() if isinstance(m, nn.BatchNorm2d)]
    torch.testing.assert_close(plain(x), model(x), atol=1e-5, rtol=1e-4)
    sys.modules.pop("norm_kinds")


def test_a_model_of_transformers_opens_by_itself(folder: Path) -> None:
    pytest.importorskip("transformers")
    _, model = CASES["bert"].write(folder / "in")
    ids = torch.arange(8).reshape(1, 8)
    fast = normswap.optimize(model, None, {"input_ids": ids}, validate="forward")
    normswap.save(fast, "out")
    opened = normswap.load_model("out")
    assert torch.equal(opened(ids).logits, fast(ids).logits) and swapped_names(opened) == swapped_names(fast)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))])
def test_of_a_wrapped_model_the_one_inside_is_saved(folder: Path, wrap: Callable[[nn.Module], nn.Module]) -> None:
    fast = normswap.optimize(built(), X, validate="forward")
    normswap.save(wrap(fast), "out", factory="zoo:net")
    opened = normswap.load_model("out", trust_factory=True)
    assert swapped_names(opened) == SITES and same_tensors(opened.state_dict(), built().state_dict())


class _SavesAPart(nn.Sequential):
    """As an adapter's does: neither all tensors, nor what builds the model."""

    def save_pretrained(self, folder: Path) -> None:
        torch.save({"0.weight": self[0].weight}, folder / "adapter_model.bin")


def test_what_a_model_of_no_known_library_saves_is_not_trusted_to_be_whole(folder: Path) -> None:
    model = _SavesAPart(nn.Linear(6, 8), nn.LayerNorm(8))
    normswap.save(normswap.optimize(model, X, validate="forward"), "out")
    opened = normswap.load_model("out", model=_SavesAPart(nn.Linear(6, 8), nn.LayerNorm(8)))
    assert same_tensors(opened.state_dict(), model.state_dict()) and swapped_names(opened) == {"1"}


def test_a_model_of_transformers_with_an_adapter_is_saved_whole(folder: Path) -> None:
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    _, model = CASES["bert"].write(folder / "in")
    model.add_adapter(peft.LoraConfig(target_modules=["query"]))
    normswap.save(model, "out")
    assert open_checkpoint("out").state.keys() == model.state_dict().keys()


def test_what_the_docs_show(folder: Path) -> None:
    text = (REPOSITORY / "docs/checkpoints.md").read_text()
    *both, opening = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1].splitlines()
    (folder / "pkg").mkdir()
    (folder / "pkg/models.py").write_text("import zoo\nbuild = zoo.net\n")
    torch.save(built().state_dict(), "net.pt")
    fast = normswap.optimize(built(), X, validate="forward")
    for line in both:
        found: dict[str, Any] = {"normswap": normswap, "x": X, "fast": fast}
        exec(line, found)
        exec(opening, found)
        assert torch.equal(found["model"](X), fast(X))
        shutil.rmtree("fast")


def test_convert_is_public() -> None:
    torch.save(built().state_dict(), "net.pt")
    report = normswap.convert("net.pt", "out", "zoo:net", inputs=X, device="cpu", validate="forward")
    assert {row["name"] for row in report.rows if row["swapped"]} == SITES


# --- torch.distributed.checkpoint -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("out", ["out", "out.safetensors", "net.pt"])
def test_a_distributed_checkpoint_is_read(nested: bool, out: str) -> None:
    model = built()
    training = {"epoch": 3, "optimizer": {"state": {"0": {"exp_avg": torch.ones(3)}}}}
    content = {"model": model.state_dict(), **training} if nested else model.state_dict()
    dcp.save(content, storage_writer=dcp.FileSystemWriter("in"), no_dist=True)
    key = {"key": "model"} if nested else {}
    if nested and out != "out":
        with pytest.raises(CheckpointError, match="cannot hold what in/.metadata has besides tensors"):
            normswap.convert("in", out, "zoo:net", device="cpu", validate="off", **key)
        return
    normswap.convert("in", out, "zoo:net", device="cpu", validate="off", **key)
    opened = normswap.load_model(out, trust_factory=True)
    assert same_tensors(dict(sorted(opened.state_dict().items())), dict(sorted(model.state_dict().items())))
    assert swapped_names(opened) == SITES
    if out == "out":
        file = next(Path("out").glob("*.distcp"))
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        with pytest.raises(CheckpointError, match=r"__0_0.distcp differs"):
            normswap.load_model("out", trust_factory=True)


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint_is_written_over_another(folder: Path) -> None:
    torch.save(built().state_dict(), "net.pt")
    for force in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            normswap.convert("net.pt", "out.dcp", "zoo:net", device="cpu", validate="off", force=force)
        found = {name: torch.zeros_like(tensor) for name, tensor in built().state_dict().items()}
        dcp.load(found, storage_reader=dcp.FileSystemReader("out.dcp"), no_dist=True)
        assert same_tensors(found, built().state_dict())
        assert swapped_names(normswap.load_model("out.dcp", trust_factory=True)) == SITES


class _Runs:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.filterwarnings("ignore")
class _ByGetattr(pickle.Pickler):
    """Writes the members of enums as Python 3.11.2 does."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_the_metadata_of_a_distributed_checkpoint_may_name_members_of_enums_by_getattr(folder: Path) -> None:
    state = built().state_dict()
    dcp.save(state, storage_writer=dcp.FileSystemWriter("in"), no_dist=True)
    metadata = Path("in/.metadata")
    held = pickle.loads(metadata.read_bytes())
    with metadata.open("wb") as file:
        _ByGetattr(file).dump(held)
    assert b"getattr" in metadata.read_bytes()
    assert same_tensors(dict(sorted(open_checkpoint("in").tensors.items())), dict(sorted(state.items())))
    for owner, name in ((type(held), "__init__"), (collections.OrderedDict, "fromkeys")):
        metadata.write_bytes(pickle.dumps(_Got(owner, name)))
        with pytest.raises(CheckpointError, match="refused, it asks to run more than tensors need: builtins.getattr"):
            open_checkpoint("in")


@pytest.mark.parametrize("module", ("pathlib", "pathlib._local"))
@pytest.mark.parametrize("name", ("in", "in.pt"))
def test_paths_are_read_as_any_python_writes_them(
    name: str, module: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.13 gives them another module."""
    state = built().state_dict()
    with monkeypatch.context() as written:
        written.setitem(sys.modules, module, pathlib)
        for kind in (pathlib.PosixPath, pathlib.PurePosixPath):
            written.setattr(kind, "__module__", module)
        if name == "in":
            dcp.save(state, storage_writer=dcp.FileSystemWriter(name), no_dist=True)
        else:
            torch.save({"state_dict": state, "out": Path("out"), "data": pathlib.PurePosixPath("data")}, name)
    assert same_tensors(dict(sorted(open_checkpoint(name).tensors.items())), dict(sorted(state.items())))


class _Got:
    """Pickled as what reads an attribute."""

    def __init__(self, *of: object) -> None:
        self.of = of

    def __reduce__(self) -> Any:
        return getattr, self.of


def test_the_metadata_of_a_distributed_checkpoint_runs_nothing(folder: Path) -> None:
    dcp.save(built().state_dict(), storage_writer=dcp.FileSystemWriter("in"), no_dist=True)
    metadata = Path("in/.metadata")
    sound = metadata.read_bytes()
    metadata.write_bytes(pickle.dumps({"a": _Runs(folder / "executed")}))
    with pytest.raises(CheckpointError, match=r"refused, it asks to run more than tensors need: (posix|os).system"):
        open_checkpoint("in")
    assert not Path("executed").exists()
    for damaged in (b"", sound[:50], sound.replace(b"__0_0.distcp", b"../../0.dist"), pickle.dumps([1])):
        metadata.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="truncated, or not a distributed checkpoint") as raised:
            open_checkpoint("in")
        assert "\n" not in str(raised.value)
