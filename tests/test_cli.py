from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoints import SITES, ZOO, environment, forget_zoo, randomized, read_tensors, snapshot, write_payload
from click.testing import CliRunner, Result
from torch import nn

import normswap.modules
from normswap import native, nodes_library
from normswap.checkpoint import CheckpointError, build_model, load_model, same_tensors
from normswap.cli import main
from normswap.cli.inputs import make_inputs
from normswap.cli.summary import LikelyNorm, summarize
from normswap.environment import environment as environment_shown
from normswap.modules import site_match

DONE, FAILED, USAGE, MISMATCH, EMPTY, ENVIRONMENT = range(6)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with the module ``zoo`` and checkpoints of zoo:net, zoo:tied and zoo:plain."""
    (tmp_path / "zoo.py").write_text(ZOO)
    monkeypatch.chdir(tmp_path)
    forget_zoo()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("net", "tied", "plain"):
        torch.save(randomized(build_model(f"zoo:{name}")).state_dict(), f"{name}.pt")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    forget_zoo()
    yield tmp_path
    forget_zoo()


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refused(folder: Path, code: int, message: str, *arguments: str) -> None:
    """The command ends with ``code`` and one line on stderr, and leaves every file as it was."""
    before = snapshot(folder)
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    told = [line for line in result.stderr.splitlines() if not line.startswith("normswap: warning: ")]
    assert len(told) == 1 and told[0].startswith("normswap: ") and message in told[0], result.stderr
    assert "normswap: normswap" not in told[0]
    assert snapshot(folder) == before


# --- convert --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("net", ["--input", "float32[4,6]"]),
        ("net", []),
        ("tied", ["--input", "int64[2,5]:0..15", "--input", "scale=float32[]"]),
        ("tied", ["--input", "ids=int64[2,5]:0..15", "--input", "scale=float32[8]"]),
        ("net", ["--input", "x.safetensors"]),
        ("tied", ["--input", "named.safetensors"]),
    ],
)
@pytest.mark.parametrize("out", ["out", "out.safetensors"])
def test_convert_and_open(name: str, inputs: list[str], out: str) -> None:
    safetensors.torch.save_file({"any": torch.randn(3, 6)}, "x.safetensors")
    safetensors.torch.save_file({"ids": torch.arange(6).view(2, 3), "scale": torch.ones(8)}, "named.safetensors")
    result = run("convert", f"{name}.pt", out, "--model", f"zoo:{name}", "--device", "cpu", *inputs)
    assert result.exit_code == DONE, result.output
    assert "layer_norm" in result.stdout and "norm" in result.stdout
    file = Path(out) if out.endswith(".safetensors") else Path(out, f"{name}.pt")
    assert same_tensors(read_tensors(file)[0], read_tensors(f"{name}.pt")[0])
    given = sys.path.copy()
    sys.path.insert(0, "")
    loaded = load_model(out, trust_factory=True)
    sys.path[:] = given
    assert type(loaded.norm) is normswap.modules.LayerNorm


def test_include_and_exclude() -> None:
    arguments = ["--model", "zoo:net", "--device", "cpu"]
    assert run("convert", "net.pt", "one", *arguments, "--include", "norm", "--include", "re:rm.").exit_code == DONE
    assert run("convert", "net.pt", "two", *arguments, "--exclude", "blocks.*").exit_code == DONE
    swaps = {
        out: {s["name"] for s in json.loads(Path(out, "normswap.json").read_text())["plan"]["swaps"]}
        for out in ("one", "two")
    }
    assert swaps["one"] == {"norm", "rms"}
    assert swaps["two"] == SITES - {"blocks.0"}


def test_a_bare_state_dict_needs_a_model(folder: Path) -> None:
    result = run("convert", "net.pt", "out")
    refused(
        folder, USAGE, "net.pt holds tensors and no model: 22 tensors (20 float32, 2 int64)", "convert", "net.pt", "out"
    )
    for part in ("6 likely norms (norm, blocks.0, group, rms, bn, tail.bn)", "pass --model pkg.module:function"):
        assert part in result.stderr


@pytest.mark.parametrize(
    ("code", "message", "arguments"),
    [
        (USAGE, "give either OUT or --in-place", ["convert", "net.pt"]),
        (USAGE, "No such option", ["convert", "net.pt", "out", "--bogus"]),
        (USAGE, "No such command 'prove'", ["prove"]),
        (USAGE, "'loud' is not one of", ["convert", "net.pt", "out", "--model", "zoo:net", "--on-empty", "loud"]),
        (USAGE, "integers need a range", ["convert", "net.pt", "out", "--model", "zoo:net", "--input", "int64[2]"]),
        (FAILED, "none.pt: no such file", ["convert", "none.pt", "out", "--model", "zoo:net"]),
        (FAILED, "none.pt: no such file", ["convert", "none.pt", "out"]),
        (
            USAGE,
            "'re:(' is not a regular expression",
            ["inspect", "net.pt", "--model", "zoo:net", "--include", "re:("],
        ),
        (FAILED, "none.pt: no such file", ["inspect", "none.pt"]),
        (
            FAILED,
            "x.safetensors: no such file",
            ["convert", "net.pt", "out", "--model", "zoo:net", "--input", "x.safetensors"],
        ),
        (FAILED, "truncated, or not a PyTorch checkpoint", ["convert", "cut.pt", "out", "--model", "zoo:net"]),
        (
            FAILED,
            "asks to run more than tensors need: posix.system",
            ["convert", "evil.pt", "out", "--model", "zoo:net"],
        ),
        (FAILED, "asks to run more than tensors need: posix.system", ["inspect", "evil.pt"]),
        (FAILED, "zoo:raises raised KeyError: 'no such size'", ["convert", "net.pt", "out", "--model", "zoo:raises"]),
        (FAILED, "is not written pkg.module:function", ["inspect", "net.pt", "--model", "zoo.net"]),
        (FAILED, "keys do not fit Tied", ["inspect", "net.pt", "--model", "zoo:tied"]),
        (FAILED, "net.pt: exists already", ["convert", "plain.pt", "net.pt", "--model", "zoo:plain"]),
        (
            FAILED,
            "could not be optimized",
            ["convert", "net.pt", "out", "--model", "zoo:net", "--input", "float32[2,5]"],
        ),
        (USAGE, "--arch", ["build", "--arch", "hopper"]),
        *(
            (
                USAGE,
                f"{one} is not a finite number",
                ["convert", "net.pt", "out", "--model", "zoo:net", "--min-speedup", one],
            )
            for one in ("nan", "inf")
        ),
        (
            EMPTY,
            "normswap: nothing was swapped",
            ["convert", "plain.pt", "out", "--model", "zoo:plain", "--on-empty", "raise"],
        ),
    ],
)
def test_refusals(folder: Path, code: int, message: str, arguments: list[str]) -> None:
    Path("cut.pt").write_bytes(Path("net.pt").read_bytes()[:700])
    write_payload(Path("evil.pt"), folder / "executed")
    device = ["--device", "cpu"] if arguments[0] == "convert" and len(arguments) > 3 else []
    refused(folder, code, message, *arguments, *device)


def test_a_failed_proof(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.GroupNorm, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps + 0.5)

    monkeypatch.setattr(normswap.modules.GroupNorm, "forward", forward)
    arguments = ["convert", "net.pt", "out", "--model", "zoo:net", "--input", "float32[4,6]", "--device", "cpu"]
    before = snapshot(folder)
    result = run(*arguments, "--on-mismatch", "raise")
    assert result.exit_code == MISMATCH and "group" in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == "" and snapshot(folder) == before
    assert run(*arguments).exit_code == DONE
    monkeypatch.syspath_prepend(str(folder))
    loaded = load_model("out", trust_factory=True)
    assert type(loaded.group) is nn.GroupNorm and site_match(loaded.norm) is not None


def test_force_replaces() -> None:
    arguments = ["convert", "net.pt", "net.pt", "--model", "zoo:net", "--device", "cpu"]
    before = Path("net.pt").read_bytes()
    assert run(*arguments).exit_code == FAILED
    assert run(*arguments, "--force").exit_code == DONE
    assert Path("net.pt").read_bytes() == before and Path("net.pt.normswap.json").exists()


def test_warnings_are_lines_of_ours() -> None:
    result = run("convert", "plain.pt", "out", "--model", "zoo:plain", "--device", "cpu", "--on-empty", "warn")
    assert result.exit_code == DONE and Path("out/plain.pt").exists()
    assert result.stderr.startswith("normswap: warning: nothing was swapped") and ".py:" not in result.stderr


# --- inspect --------------------------------------------------------------------------------------------------------


def test_inspect_a_checkpoint_alone() -> None:
    result = run("inspect", "net.pt")
    assert result.exit_code == DONE
    assert "net.pt: 22 tensors (20 float32, 2 int64), 1.0 kB, 6 likely norms" in result.stdout
    rows = [line.split(maxsplit=1) for line in result.stdout.splitlines()[3:]]
    assert [row[0] for row in rows] == ["norm", "blocks.0", "group", "rms", "bn", "tail.bn"]
    assert "BatchNorm" in rows[4][1] and "RMSNorm" in rows[3][1] and "8" in rows[0][1]
    assert "no likely norms" in run("inspect", "plain.pt").stdout


def test_inspect_with_a_model_shows_the_plan() -> None:
    result = run("inspect", "net.pt", "--model", "zoo:net", "--exclude", "rms")
    assert result.exit_code == DONE, result.output
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert "LayerNorm" in rows["norm"] and "layer_norm" in rows["norm"] and rows["norm"].rstrip().endswith("swap")
    assert "group_norm" in rows["group"]
    assert "rms" not in rows or "leave" in rows["rms"]
    assert "nothing to swap" in run("inspect", "plain.pt", "--model", "zoo:plain").stdout


def test_likely_norms_by_names_and_shapes() -> None:
    vector, matrix = torch.ones(4), torch.ones(4, 4)
    tensors = {
        "weight": vector,
        "bias": vector,
        "layers.0.input_layernorm.weight": vector,
        "layers.0.mlp.weight": matrix,
        "layers.0.mlp.bias": vector,
        "act.weight": torch.ones(1),
        "prelu.weight": vector,
        "1.weight": vector,
        "1.bias": vector,
        "bn1.running_mean": vector,
        "bn1.num_batches_tracked": torch.tensor(1),
        "ln_f.weight": vector,
        "ln_f.bias": vector,
        "gn.weight": vector,
        "xgnx.weight": vector,
        "gamma": vector,
    }
    vague, plain = "LayerNorm or GroupNorm", "RMSNorm, or LayerNorm without bias"
    summary = summarize(tensors)
    assert summary.norms == (
        LikelyNorm("", vague, 4),
        LikelyNorm("layers.0.input_layernorm", plain, 4),
        LikelyNorm("1", vague, 4),
        LikelyNorm("bn1", "BatchNorm", 4),
        LikelyNorm("ln_f", vague, 4),
        LikelyNorm("gn", plain, 4),
    )
    assert summary.size == sum(t.nbytes for t in tensors.values()) and summary.tensors == 16
    assert summary.dtypes == {"float32": 15, "int64": 1}


# --- inputs ---------------------------------------------------------------------------------------------------------


def test_inputs_as_written() -> None:
    specs = [
        "float32[2,3]",
        "mask=bool[50]",
        "bfloat16[]",
        "ids=int64[1000]:-1..2",
        "half=float16[4]",
        "uint8[3]:255..255",
    ]
    positional, named = make_inputs(specs)
    assert [(t.dtype, tuple(t.shape)) for t in positional] == [
        (torch.float32, (2, 3)),
        (torch.bfloat16, ()),
        (torch.uint8, (3,)),
    ]
    assert positional[2].tolist() == [255] * 3
    assert set(named) == {"mask", "ids", "half"} and set(named["mask"].tolist()) == {True, False}
    assert set(named["ids"].tolist()) == {-1, 0, 1, 2}
    again = make_inputs(specs)
    assert torch.equal(again[0][0], positional[0]) and torch.equal(again[1]["ids"], named["ids"])
    two = make_inputs(["float32[5]", "float32[5]"])[0]
    assert not torch.equal(*two) and make_inputs([]) == ((), {})


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["float33[2]"], "dtype 'float33' is not one of"),
        (["float32"], "is not .name=.float32"),
        (["float32[2"], "is not .name=.float32"),
        (["float32[2,-1]"], "is not .name=.float32"),
        (["float32[2,,3]"], "not a list of sizes"),
        (["float32[2]:0..1"], "only integers take a range"),
        (["int64[2]"], "integers need a range, as in int64"),
        (["int64[2]:5..4"], "range is empty"),
        (["uint8[2]:0..256"], "uint8"),
        (["float32[9999999999,9999999999]"], "input 'float32"),
        (["float32[99999999999999999999]"], "input 'float32"),
        (["int64[2]:0..99999999999999999999"], "input 'int64.2.:0..99999999999999999999': Overflow"),
        (["x=float32[1]", "x=float32[1]"], "'x' is given twice"),
        (["x=two.safetensors"], "holds 2 tensors, which have names of their own"),
    ],
)
def test_inputs_that_are_refused(specs: list[str], message: str) -> None:
    safetensors.torch.save_file({"a": torch.ones(1), "b": torch.ones(1)}, "two.safetensors")
    with pytest.raises(ValueError, match=message):
        make_inputs(specs)


def test_inputs_from_files() -> None:
    safetensors.torch.save_file({"a": torch.ones(1)}, "one.safetensors")
    safetensors.torch.save_file({"a": torch.ones(1), "b": torch.zeros(1)}, "two.safetensors")
    positional, named = make_inputs(["one.safetensors", "y=one.safetensors", "two.safetensors"])
    assert [t.tolist() for t in positional] == [[1.0]]
    assert {k: v.tolist() for k, v in named.items()} == {"y": [1.0], "a": [1.0], "b": [0.0]}
    with pytest.raises(CheckpointError, match="none.safetensors: no such file"):
        make_inputs(["none.safetensors"])


def test_inputs_of_numpy_and_torch(folder: Path) -> None:
    np.save("array.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    torch.save(torch.ones(2), "tensor.pt")
    torch.save([torch.ones(1), torch.zeros(1)], "list.pt")
    torch.save({"ids": torch.arange(3), "scale": 2.0}, "named.pt")
    positional, named = make_inputs(["array.npy", "tensor.pt", "list.pt", "named.pt", "x=array.npy"])
    assert positional[0].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert [t.tolist() for t in positional[1:]] == [[1.0, 1.0], [1.0], [0.0]]
    assert named["ids"].tolist() == [0, 1, 2] and named["scale"] == 2.0 and torch.equal(named["x"], positional[0])
    np.save("objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    write_payload(Path("evil.pt"), folder / "executed")
    for spec, message in (
        ("objects.npy", "cannot be read"),
        ("evil.pt", "asks to run"),
        ("none.npy", "cannot be read"),
    ):
        with pytest.raises(CheckpointError, match=message):
            make_inputs([spec])
    assert not (folder / "executed").exists()


# --- env, build, version --------------------------------------------------------------------------------------------


def test_env_shows_every_entry() -> None:
    result = run("env")
    assert result.exit_code == DONE
    for key in environment_shown():
        assert str(key) in result.stdout


def test_build_shows_the_compilers_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(arch: Any, out: Any = None, **_: Any) -> Path:
        assert (arch, out) == (("80", "90"), Path("here"))
        raise native.BuildError("nvcc failed\nlayer_norm.cu(3): error: identifier is undefined")

    monkeypatch.setattr(native, "build", failing)
    monkeypatch.setattr(nodes_library, "build", lambda out=None, **_: Path("nodes.so"))
    result = run("build", "--arch", "80, 90", "--out", "here")
    assert result.exit_code == ENVIRONMENT and result.stdout == ""
    assert "layer_norm.cu(3): error: identifier is undefined" in result.stderr and "Traceback" not in result.stderr
    monkeypatch.setattr(native, "build", lambda arch, out=None, **_: Path("lib.so"))
    assert run("build").stdout == "lib.so\nnodes.so\n"


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("normswap, version ")
    shown = run("--help")
    assert shown.exit_code == DONE and all(
        command in shown.stdout for command in ("inspect", "convert", "env", "build")
    )
    assert run("convert", "-h").exit_code == DONE


def test_the_command_in_a_process_of_its_own(folder: Path) -> None:
    def process(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "normswap.cli", *arguments]
        return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)

    done = process("convert", "net.pt", "out", "--model", "zoo:net", "--validate", "off", "--device", "cpu")
    assert done.returncode == DONE and "layer_norm" in done.stdout, done
    write_payload(folder / "evil.pt", folder / "executed", plain=True)
    before = snapshot(folder)
    failed = process("convert", "evil.pt", "other", "--model", "zoo:net")
    assert failed.returncode == FAILED and failed.stdout == ""
    assert failed.stderr.count("\n") == 1 and failed.stderr.startswith("normswap: evil.pt: refused"), failed.stderr
    assert snapshot(folder) == before
