from __future__ import annotations

import ast
import functools
import json
import platform
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import SITES, environment, randomized, read_tensors, snapshot, write_tensors
from torch import nn

import normswap.modules
from normswap import checkpoint
from normswap.checkpoint import CheckpointError, load_model, writing
from normswap.checkpoint.tensors import same_tensors
from normswap.modules import site_match
from normswap.plans import PLAN_FORMAT, MismatchError, NothingSwappedError, PlanError

convert = functools.partial(checkpoint.convert, validate="off")  # its proof takes most of its time
SUFFIXES = (".pt", ".pth", ".safetensors")
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def folder(zoo: Path) -> Path:
    """A current folder with the module ``zoo`` and, in net.pt, a randomised checkpoint of zoo:net."""
    torch.save(built("zoo:net").state_dict(), "net.pt")
    return zoo


def built(factory: str) -> nn.Module:
    return randomized(checkpoint.build_model(factory)).eval()


def swapped_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if site_match(module) is not None}


# --- convert ------------------------------------------------------------------------------------------------------


@pytest.mark.case("state-dict")
@pytest.mark.parametrize("suffix_out", SUFFIXES)
@pytest.mark.parametrize("suffix_in", SUFFIXES)
def test_convert_keeps_every_bit_in_every_format(suffix_in: str, suffix_out: str) -> None:
    model = built("zoo:net_half")
    write_tensors(f"in{suffix_in}", model.state_dict(), {"author": "x"})
    before, metadata = read_tensors(f"in{suffix_in}")
    convert(f"in{suffix_in}", f"to/out{suffix_out}", "zoo:net_half", inputs=X.bfloat16(), device="cpu")
    after, metadata_after = read_tensors(f"to/out{suffix_out}")
    assert same_tensors(model.state_dict(), before) and same_tensors(before, after)
    assert metadata == metadata_after == {"author": "x"}
    assert after._metadata == model.state_dict()._metadata
    loaded = load_model(f"to/out{suffix_out}", trust_factory=True)
    assert same_tensors(loaded.state_dict(), model.state_dict())
    assert swapped_names(loaded) == SITES and not loaded.training


def test_one_format_to_the_same_is_a_copy_byte_for_byte() -> None:
    convert("net.pt", "out/copy.pth", "zoo:net", device="cpu")
    assert Path("out/copy.pth").read_bytes() == Path("net.pt").read_bytes()


CHANGES_ITSELF = """
import torch, zoo

class Net(zoo.Net):
    def forward(self, x):
        with torch.no_grad():
            self.stem.weight.add_(1)
        return super().forward(x)

def build():
    with torch.device("meta"):
        return Net()
"""


@pytest.mark.parametrize("given", ["net.pt", "net.safetensors", "net.dcp"])
@pytest.mark.parametrize("out", ["out", "out.pt", "out.safetensors", "out.dcp"])
def test_a_model_that_changes_its_weights_changes_no_file(folder: Path, given: str, out: str) -> None:
    (folder / "changes.py").write_text(CHANGES_ITSELF)
    if given != "net.pt":
        convert("net.pt", given, "zoo:net", device="cpu")
    before = snapshot(folder)
    convert(given, out, "changes:build", inputs=X, device="cpu")
    assert before.items() <= snapshot(folder).items()
    assert checkpoint.verify("net.pt", out).same
    sys.modules.pop("changes")


def test_a_factory_may_build_on_the_meta_device() -> None:
    convert("net.pt", "out", "zoo:meta", inputs=X, device="cpu")
    torch.testing.assert_close(load_model("out", trust_factory=True)(X), built("zoo:net")(X))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.case("tied-in-safetensors")
def test_tied_weights_stay_tied_and_are_stored_once(suffix: str) -> None:
    model = built("zoo:tied")
    torch.save(model.state_dict(), "tied.pt")
    ids = torch.arange(12).reshape(3, 4)
    convert("tied.pt", f"out{suffix}", "zoo:tied", input_kwargs={"ids": ids, "scale": torch.tensor(2.0)}, device="cpu")
    tensors, _ = read_tensors(f"out{suffix}")
    assert list(tensors) == list(model.state_dict())
    assert tensors["embedding.weight"].data_ptr() == tensors["head.weight"].data_ptr()
    loaded = load_model(f"out{suffix}", trust_factory=True)
    assert loaded.head.weight is loaded.embedding.weight
    torch.testing.assert_close(loaded(ids), model(ids))


def test_manifest_tells_what_was_done() -> None:
    report = convert("net.pt", "out", "zoo:net", inputs=X, validate="auto", device="cpu", exclude="blocks.*")
    manifest = json.loads(Path("out/normswap.json").read_text())
    assert {swap["name"] for swap in manifest["plan"]["swaps"]} == SITES - {"blocks.0"}
    assert (manifest["format"], manifest["factory"], manifest["tensors"]) == (4, "zoo:net", "net.pt")
    assert (manifest["proof"]["device"], manifest["proof"]["gpu"]) == ("cpu", None)
    assert manifest["proof"]["versions"] == {
        "normswap": normswap.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    assert manifest["proof"]["report"] == json.loads(json.dumps(as_data(report)))
    assert swapped_names(load_model("out", trust_factory=True)) == SITES - {"blocks.0"}


def as_data(report: Any) -> Any:
    data = report.to_json()
    return json.loads(data) if isinstance(data, str) else data


@pytest.mark.case("save-over-source")
def test_out_may_be_in() -> None:
    before = Path("net.pt").read_bytes()
    inode = Path("net.pt").stat().st_ino
    with pytest.raises(CheckpointError, match="exists already"):
        convert("net.pt", "net.pt", "zoo:net", device="cpu")
    convert("net.pt", "net.pt", "zoo:net", device="cpu", force=True)
    assert Path("net.pt").read_bytes() == before and Path("net.pt").stat().st_ino == inode
    assert same_tensors(load_model("net.pt", trust_factory=True).state_dict(), built("zoo:net").state_dict())


@pytest.mark.case("save-over-source")
def test_out_may_be_a_link_to_in_under_another_suffix(folder: Path) -> None:
    """Written over the file that is mapped: through the link, in another format."""
    model = built("zoo:net")
    Path("out.safetensors").symlink_to("net.pt")
    Path("other").mkdir()
    safetensors.torch.save_file(model.state_dict(), "other/net.safetensors")
    convert("other/net.safetensors", "out.safetensors", "zoo:net", device="cpu", force=True)
    assert Path("out.safetensors").is_symlink()
    assert same_tensors(read_sorted("out.safetensors"), read_sorted("other/net.safetensors"))
    torch.testing.assert_close(load_model("out.safetensors", trust_factory=True)(X), model(X))


def read_sorted(path: str) -> dict[str, torch.Tensor]:
    return dict(sorted(read_tensors(path)[0].items()))


def test_existing_files_are_refused_without_force(folder: Path) -> None:
    convert("net.pt", "out", "zoo:net", device="cpu")
    before = snapshot(folder)
    for out in ("out", "out/net.pt"):
        with pytest.raises(CheckpointError, match="exists already.*--force"):
            convert("net.pt", out, "zoo:net", device="cpu")
    Path("foreign").mkdir()
    Path("foreign/normswap.json").write_text("[]")
    with pytest.raises(CheckpointError, match="foreign/normswap.json: exists already.*--force"):
        convert("net.pt", "foreign", "zoo:net", device="cpu")
    assert {k: v for k, v in snapshot(folder).items() if not k.startswith("foreign")} == before
    convert("net.pt", "out/net.pt", "zoo:net", device="cpu", force=True, exclude="norm")
    for path in ("out", "out/net.pt"):  # the folder's manifest spoke of this file, and does again
        assert swapped_names(load_model(path, trust_factory=True)) == SITES - {"norm"}


def test_a_site_rolled_back_at_conversion_stays_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_group_norm(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert("net.pt", "out", "zoo:net", inputs=X, validate="auto", device="cpu")
    names = {swap["name"] for swap in json.loads(Path("out/normswap.json").read_text())["plan"]["swaps"]}
    assert names == SITES - {"group"}
    loaded = load_model("out", trust_factory=True)
    assert type(loaded.group) is nn.GroupNorm and type(loaded.norm) is normswap.modules.LayerNorm


def wrong_group_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.GroupNorm, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps + 0.5)

    monkeypatch.setattr(normswap.modules.GroupNorm, "forward", forward)


LAZY = """
from torch import nn

def build():
    return nn.Sequential(nn.LazyLinear(8), nn.LayerNorm(8))
"""


def test_a_lazy_layer_has_the_shape_of_its_file(folder: Path) -> None:
    (folder / "lazy.py").write_text(LAZY)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))
    torch.save(model.state_dict(), "lazy.pt")
    convert("lazy.pt", "out", "lazy:build", device="cpu")
    torch.testing.assert_close(load_model("out", trust_factory=True)(X), model(X))
    sys.modules.pop("lazy")


# --- failures of convert leave nothing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("zoo", "'zoo' is not written pkg.module:function, ./file.py:function, timm:NAME or hf:DIR"),
        ("zoo:", "is not written"),
        ("zoo:net()", "is not written"),
        (":net", "is not written"),
        ("no_such_module:net", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("broken:net", r"cannot be imported: SyntaxError"),
        ("zoo:missing", "zoo has no missing"),
        ("zoo:text", "a str, not a function"),
        ("zoo:instance", "a Plain, not a function"),
        ("zoo:raises", r"zoo:raises raised KeyError: 'no such size' \(.*zoo.py, line \d+\)"),
        ("zoo:exits", "zoo:exits raised SystemExit: 7"),
        ("zoo:needs", "raised TypeError: needs.. missing 1 required positional argument: 'argument'"),
        ("zoo:number", "returned a int, not a torch.nn.Module"),
        (
            "zoo:plain",
            "keys do not fit Plain: 2 missing: only.weight, only.bias; 22 unexpected: stem.weight, .* and 12 more",
        ),
        (
            "zoo:deeper",
            "keys do not fit Net: 4 missing: blocks.1.weight, blocks.1.bias, blocks.2.weight, blocks.2.bias$",
        ),
    ],
)
def test_what_is_wrong_with_the_factory_is_told_in_one_line(folder: Path, factory: str, message: str) -> None:
    Path("broken.py").write_text("def net(:\n")
    fails(folder, CheckpointError, message, "net.pt", "out", factory)


def fails(folder: Path, error: type[Exception], message: str, *arguments: Any, **options: Any) -> None:
    """convert raises ``error`` with one line that matches, and every file and folder is as it was."""
    before = snapshot(folder)
    with pytest.raises(error, match=message) as raised:
        convert(*arguments, device=options.pop("device", "cpu"), **options)
    assert "\n" not in str(raised.value)
    assert snapshot(folder) == before


def test_wrong_shapes_are_listed(folder: Path) -> None:
    state = built("zoo:net").state_dict()
    state["norm.weight"] = torch.ones(9)
    torch.save(state, "wide.pt")
    fails(
        folder,
        CheckpointError,
        r"wide.pt: does not fit Net: size mismatch for norm.weight: .*\[9\].*\[8\]",
        "wide.pt",
        "out",
        "zoo:net",
    )


def test_a_proof_that_fails_under_raise_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_group_norm(monkeypatch)
    before = snapshot(folder)
    with pytest.raises(MismatchError):
        convert("net.pt", "deep/out", "zoo:net", inputs=X, validate="auto", device="cpu", on_mismatch="raise")
    assert snapshot(folder) == before


def test_nothing_to_swap_under_raise_writes_nothing(folder: Path) -> None:
    torch.save(built("zoo:plain").state_dict(), "plain.pt")
    before = snapshot(folder)
    with pytest.raises(NothingSwappedError):
        convert("plain.pt", "out", "zoo:plain", device="cpu", on_empty="raise")
    assert snapshot(folder) == before


def test_inputs_that_do_not_fit_are_told(folder: Path) -> None:
    fails(
        folder,
        CheckpointError,
        "Net could not be optimized: RuntimeError",
        "net.pt",
        "out",
        "zoo:net",
        inputs=torch.ones(2, 5),
        validate="auto",
    )


def test_devices_that_are_not_there_are_told(folder: Path) -> None:
    fails(folder, CheckpointError, "device 'tpu9' cannot be used here", "net.pt", "out", "zoo:net", device="tpu9")


@pytest.mark.parametrize("dtype", [torch.float16, "float12", "int8", "Tensor"])
def test_dtypes_that_cannot_be_are_told(folder: Path, dtype: Any) -> None:
    message = f"dtype {dtype!r} is not the name of a floating-point dtype"
    fails(folder, CheckpointError, message, "net.pt", "out", "zoo:net", dtype=dtype)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("out.onnx", "suffix '.onnx' is not one of .pt, .pth, .bin, .ckpt, .safetensors"),
        ("net.pt/out", "cannot be written .NotADirectoryError"),
        ("n" * 5000, "cannot be written .OSError: .* File name too long"),
        ("n" * 300 + ".pt", "cannot be written .OSError: .* File name too long"),
        ("occupied", "exists and is not a folder"),
        ("full", "full/net.pt: is a folder"),
    ],
)
def test_outs_that_cannot_be_are_told(folder: Path, out: str, message: str) -> None:
    Path("occupied").touch()
    Path("full/net.pt").mkdir(parents=True)
    fails(folder, CheckpointError, message, "net.pt", out, "zoo:net")


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors"])
def test_what_is_written_is_read_back_before_it_counts(folder: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    def with_a_flipped_bit(tensors: dict[str, torch.Tensor], path: Path) -> None:
        bits = tensors["norm.weight"].clone()
        bits.view(torch.uint8)[0] ^= 1
        write_tensors(path.with_suffix(".pt"), {**tensors, "norm.weight": bits})
        path.with_suffix(".pt").replace(path)

    state = read_tensors("net.pt")[0]
    if out.endswith(".pt"):
        monkeypatch.setattr(writing, "copy_file", lambda _, path, **__: with_a_flipped_bit(state, path))
    else:
        changed = {**state, "norm.weight": state["norm.weight"] + 1}
        real = writing.tensor_writer
        monkeypatch.setattr(writing, "tensor_writer", lambda path, _, metadata: real(path, changed, metadata))
    fails(
        folder, CheckpointError, f"{out}: what was written does not read back equal to net.pt", "net.pt", out, "zoo:net"
    )


# --- load_model -----------------------------------------------------------------------------------------------------

OPEN = """
import sys, torch, normswap.checkpoint as c
from normswap.modules import site_match
x = torch.load("x.pt", weights_only=True)
model = c.load_model(sys.argv[1], trust_factory=True)
torch.save({"y": model(x).detach(), "state": model.state_dict()}, "answer.pt")
print(sorted(name for name, module in model.named_modules() if site_match(module)))
"""


@pytest.mark.parametrize("out", ["out", "file.safetensors"])
def test_a_new_process_opens_it_with_the_same_outputs_and_keys(folder: Path, out: str) -> None:
    convert("net.pt", out, "zoo:net", inputs=X, device="cpu")
    torch.save(X, "x.pt")
    run = subprocess.run(
        [sys.executable, "-c", OPEN, out], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    answer = torch.load("answer.pt", weights_only=True)
    original = built("zoo:net")
    torch.testing.assert_close(answer["y"], original(X))
    assert torch.equal(answer["y"], load_model(out, trust_factory=True)(X))
    assert same_tensors(answer["state"], original.state_dict())
    assert set(ast.literal_eval(run.stdout)) == SITES


def test_a_given_model_is_filled_and_no_code_is_imported() -> None:
    convert("net.pt", "out", "zoo:net", device="cpu")
    manifest = json.loads(Path("out/normswap.json").read_text())
    Path("out/normswap.json").write_text(json.dumps({**manifest, "factory": "no_such_module:net"}))
    given = checkpoint.build_model("zoo:net")
    assert load_model("out", model=given) is given
    torch.testing.assert_close(given(X), built("zoo:net")(X))
    with pytest.raises(CheckpointError, match="no_such_module cannot be imported"):
        load_model("out", trust_factory=True)


def test_what_is_no_model_is_not_filled() -> None:
    convert("net.pt", "out", "zoo:net", device="cpu")
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got function"):
        load_model("out", model=built)


@pytest.mark.case("malformed-files")
def test_changed_tensors_are_refused() -> None:
    convert("net.pt", "out", "zoo:net", device="cpu")
    data = bytearray(Path("out/net.pt").read_bytes())
    data[len(data) // 2] ^= 1
    Path("out/net.pt").write_bytes(data)
    with pytest.raises(
        CheckpointError, match="out/net.pt: not the tensors out/normswap.json was written for: net.pt differs"
    ):
        load_model("out", trust_factory=True)
    Path("out/net.pt").unlink()
    with pytest.raises(CheckpointError, match="out/net.pt: no such file, but out/normswap.json was written for it"):
        load_model("out", trust_factory=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "format 3 is not 4"),
        ({"tensors": "../net.pt"}, "not the plain name"),
        ({"tensors": "n" * 5000 + ".pt"}, "not the plain name"),
        ({"files": {"n" * 5000: "0" * 64}}, "has no files"),
        ({"tensors": "net.onnx"}, "not the plain name"),
        ({"files": {"net.pt": "b"}}, "has no files"),
        ({"files": {"../net.pt": "0" * 64}}, "has no files"),
        ({"written": ["../net.pt"]}, "has no written"),
        ({"factory": 3}, "has no factory"),
        ({"plan": []}, "has no plan"),
        ({"plan": {"format": PLAN_FORMAT, "swaps": [{}], "refused": []}}, "normswap.json: plan: not a normswap plan"),
    ],
)
def test_manifests_are_checked(change: dict[str, Any], message: str) -> None:
    convert("net.pt", "out", "zoo:net", device="cpu")
    manifest = json.loads(Path("out/normswap.json").read_text())
    Path("out/normswap.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(CheckpointError, match=message):
        load_model("out", trust_factory=True)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", "\xff", "[" * 100_000])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    Path("normswap.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match="normswap.json: (cannot be read|not written by normswap convert)"):
        load_model(".", trust_factory=True)


def test_a_folder_without_a_manifest_is_refused() -> None:
    with pytest.raises(CheckpointError, match="normswap.json: no such file; normswap convert writes it"):
        load_model("net.pt", trust_factory=True)


def test_a_model_without_the_sites_is_refused() -> None:
    convert("net.pt", "out", "zoo:net", device="cpu")
    manifest = json.loads(Path("out/normswap.json").read_text())
    manifest["plan"]["swaps"][0]["name"] = "gone"
    Path("out/normswap.json").write_text(json.dumps(manifest))
    with pytest.raises(PlanError, match="gone"):
        load_model("out", trust_factory=True)
