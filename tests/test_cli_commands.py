"""convert with all its options, verify, bench, completion and how the command talks."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from checkpoints import SITES, environment, randomized, read_tensors, snapshot
from click.testing import CliRunner, Result
from torch import nn

import normswap.modules
from normswap import progress
from normswap.arguments import OnEmpty, OnMismatch, Validate
from normswap.checkpoint import build_model, convert, files, load_model, same_tensors
from normswap.cli import main, talk
from normswap.cli.bench import bench
from normswap.modules import site_match
from normswap.regions import helper

DONE, FAILED, USAGE, MISMATCH, EMPTY, ENVIRONMENT = range(6)
MODEL = ["--model", "zoo:net", "--device", "cpu"]
INPUT = ["--input", "float32[4,6]"]
OFF = ["--validate", "off"]
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def folder(zoo: Path) -> Path:
    """A current folder with the module ``zoo`` and a checkpoint of zoo:net."""
    torch.save(original().state_dict(), "net.pt")
    return zoo


def original() -> nn.Module:
    return randomized(build_model("zoo:net")).eval()


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def done(*arguments: str) -> Result:
    result = run(*arguments)
    assert result.exit_code == DONE, result.output
    return result


def swapped_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if site_match(module) is not None}


# --- convert --------------------------------------------------------------------------------------------------------


def test_convert_prints_its_report_as_json_and_writes_it() -> None:
    result = done("convert", "net.pt", "out", *MODEL, *INPUT, "--json", "--report", "proof/report.json")
    printed = json.loads(result.stdout)
    assert json.loads(Path("proof/report.json").read_text()) == printed
    assert {row["name"] for row in printed["rows"] if row["swapped"]} == SITES
    assert json.loads(Path("out/normswap.json").read_text())["proof"]["report"] == printed


def test_dry_run_writes_nothing(folder: Path) -> None:
    before = snapshot(folder)
    more = ["--report", "report.json", "--export", "net.pt2"]
    assert "layer_norm" in done("convert", "net.pt", "out", *MODEL, *INPUT, "--dry-run", *more).stdout
    assert snapshot(folder) == before


def test_in_place() -> None:
    before = Path("net.pt").read_bytes()
    done("convert", "net.pt", "--in-place", *MODEL, *OFF)
    assert Path("net.pt").read_bytes() == before
    assert swapped_names(load_model("net.pt", trust_factory=True)) == SITES
    assert run("convert", "net.pt", "--in-place", *MODEL, *OFF).exit_code == FAILED


def test_dtype() -> None:
    """Proved, and opened, in another dtype than the file's, which stay as they are."""
    done("convert", "net.pt", "out", *MODEL, *INPUT, "--dtype", "bfloat16")
    assert Path("out/net.pt").read_bytes() == Path("net.pt").read_bytes()
    loaded = load_model("out", trust_factory=True)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    expected = original().to(torch.bfloat16)(X.bfloat16())
    torch.testing.assert_close(loaded(X.bfloat16()), expected)


def test_kwargs_build_the_model() -> None:
    torch.save(randomized(build_model("zoo:Net", {"layers": 2})).state_dict(), "two.pt")
    done("convert", "two.pt", "out", "--model", "zoo:Net", "--kwargs", '{"layers": 2}', "--device", "cpu", *OFF)
    assert swapped_names(load_model("out", trust_factory=True)) == {*SITES, "blocks.1"}


def test_key_and_prefix() -> None:
    state = {f"module.{name}": tensor for name, tensor in torch.load("net.pt").items()}
    torch.save({"ema": state, "model": {"a": torch.ones(1)}}, "nested.pt")
    found = done("convert", "nested.pt", "out", *MODEL, *OFF, "--key", "ema", "--strip-prefix", "module.")
    assert found.stderr.splitlines() == [
        "normswap: nested.pt: took its 'ema'; it also holds model (dict of 1)",
        "normswap: nested.pt: stripped 'module.' from the names of its tensors",
    ]
    assert same_tensors(load_model("out", trust_factory=True).state_dict(), torch.load("net.pt"))
    again = ["--key", "ema", "--strip-prefix", "module.", "--force"]
    assert done("convert", "nested.pt", "out", *MODEL, *OFF, *again, "-q").stderr == ""


def test_fold(folder: Path) -> None:
    done("convert", "net.pt", "folded.safetensors", *MODEL, *INPUT, "--fold")
    state, _ = read_tensors("folded.safetensors")
    assert state["tail.weight"].shape == (8, 8) and not any("tail.bn" in name for name in state)
    loaded = load_model("folded.safetensors", trust_factory=True)
    assert type(loaded.tail) is nn.Linear and swapped_names(loaded) == set()
    torch.testing.assert_close(loaded(X), original()(X))
    before = snapshot(folder)
    assert run("convert", "net.pt", "--in-place", *MODEL, *INPUT, "--fold", "--force").exit_code == FAILED
    assert run("convert", "net.pt", "other.pt", *MODEL, "--fold").exit_code == FAILED  # no inputs to prove it on
    assert snapshot(folder) == before


def test_fold_over_the_source() -> None:
    done("convert", "net.pt", "net.pt", *MODEL, *INPUT, "--fold", "--force")
    assert not any("tail.bn" in name for name in torch.load("net.pt"))
    torch.testing.assert_close(load_model("net.pt", trust_factory=True)(X), original()(X))


def test_a_wrong_fold_is_a_failed_proof(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = normswap.reference.fold_scale_batch_norm
    monkeypatch.setattr(
        normswap.reference, "fold_scale_batch_norm", lambda *args: (real(*args)[0], real(*args)[1] + 1e-3)
    )
    before = snapshot(folder)
    result = run("convert", "net.pt", "out.pt", *MODEL, *INPUT, "--fold")
    assert result.exit_code == MISMATCH and "the folded model differs from the original" in result.stderr
    assert snapshot(folder) == before


def test_export(folder: Path) -> None:
    done("convert", "net.pt", "out", *MODEL, "--input", "float32[4,6]", "--export", "programs/net.pt2")
    program = torch.export.load("programs/net.pt2").module()
    torch.testing.assert_close(program(X), original()(X))
    before = snapshot(folder)
    for export, message in (
        ("programs/net.pt2", "exists already"),
        ("net.onnx", "is named .pt2"),
    ):
        result = run("convert", "net.pt", "two", *MODEL, *INPUT, *OFF, "--export", export)
        assert result.exit_code == FAILED and message in result.stderr
    assert "needs example inputs" in run("convert", "net.pt", "two", *MODEL, *OFF, "--export", "a.pt2").stderr
    assert snapshot(folder) == before


def test_a_function_makes_the_inputs(folder: Path) -> None:
    (folder / "made.py").write_text("import torch\ndef batch():\n    return {'x': torch.ones(2, 6)}\n")
    done("convert", "net.pt", "out", *MODEL, "--input", "made:batch", "--validate", "forward")
    sys.modules.pop("made")


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (ENVIRONMENT, ["convert", "net.pt", "out", "--model", "zoo:net", "--device", "tpu9"]),
        (ENVIRONMENT, ["bench", "net.pt", "--model", "zoo:net", "--device", "tpu9", *INPUT]),
        (USAGE, ["bench", "net.pt", "--model", "zoo:net"]),
        (USAGE, ["bench", "net.pt", "--model", "zoo:net", *INPUT, "--rounds", "0"]),
        (FAILED, ["bench", "net.pt", "--model", "zoo:net", "--device", "cpu", "--input", "float32[4,7]"]),
        (FAILED, ["verify", "net.pt", "none.pt"]),
        (USAGE, ["convert", "net.pt", "out", *MODEL, "--kwargs", "[1]"]),
        (USAGE, ["convert", "net.pt", "out", *MODEL, "--kwargs", '{"a": 1, "a": 2}']),
        (USAGE, ["convert", "net.pt", "out", "--in-place", *MODEL]),
        (FAILED, ["convert", "net.pt", "out", "--allow-pickle"]),
        (FAILED, ["convert", "net.pt", "out", *MODEL, *OFF, "--report", "net.pt/report.json"]),
    ],
)
def test_exit_codes(folder: Path, code: int, arguments: list[str]) -> None:
    before = snapshot(folder)
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert snapshot(folder) == before


def test_a_missing_library_is_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    result = run("convert", "net.pt", "out", "--model", "timm:vit_tiny_patch16_224")
    assert result.exit_code == ENVIRONMENT and result.stderr.endswith("; install timm\n")


OWN_WAY = """
import zoo

class Net(zoo.Net):
    def forward(self, x):
        print("called")
        if x.dim() == 3:
            raise SystemExit(0)
        return super().forward(x)

def build():
    print("built")
    return Net()

def batch():
    import torch
    print("drawn")
    return torch.ones(4, 6)
"""


def test_what_a_model_prints_is_no_result(folder: Path) -> None:
    (folder / "own.py").write_text(OWN_WAY)
    arguments = ["--model", "own:build", "--device", "cpu", "--input", "own:batch", "--json"]
    for command in (["inspect", "net.pt", *arguments[:2], "--json"], ["convert", "net.pt", "out", *arguments]):
        found = done(*command)
        assert json.loads(found.stdout) and "built\n" in found.stderr
    assert "called\n" in found.stderr and "drawn\n" in found.stderr
    sys.modules.pop("own")


def test_a_model_that_exits_is_a_failure(folder: Path) -> None:
    (folder / "own.py").write_text(OWN_WAY)
    done("convert", "net.pt", "out", *MODEL, *OFF)
    own = ["--model", "own:build", "--device", "cpu", "--input", "float32[2,4,6]"]
    manifest = json.loads(Path("out/normswap.json").read_text())
    Path("out/normswap.json").write_text(json.dumps({**manifest, "factory": "own:build"}))
    before = snapshot(folder)
    for command in (
        ["convert", "net.pt", "other", *own],
        ["bench", "net.pt", *own],
        ["verify", "out", "--trust-factory", *own[2:]],
    ):
        found = run(*command)
        assert (found.exit_code, found.stdout) == (FAILED, ""), command
        assert "SystemExit: 0" in found.stderr.splitlines()[-1], found.stderr
    assert snapshot(folder) == before
    sys.modules.pop("own")


# --- verify ---------------------------------------------------------------------------------------------------------


def test_verify_two_formats() -> None:
    done("convert", "net.pt", "out.safetensors", *MODEL, *OFF)
    result = done("verify", "net.pt", "out.safetensors")
    assert result.stdout == "tensors: the same, bit for bit (22 tensors, 1,040 bytes)\n"
    assert json.loads(done("verify", "net.pt", "out.safetensors", "--json").stdout)["same"] is True


def test_verify_sees_what_differs(folder: Path) -> None:
    state = torch.load("net.pt")
    state["norm.weight"] = state["norm.weight"] + 1
    state["more"] = state.pop("rms.weight")
    torch.save(state, "other.pt")
    result = run("verify", "net.pt", "other.pt")
    assert result.exit_code == FAILED
    assert result.stdout == "tensors: NOT the same: 1 missing: rms.weight; 1 more: more; 1 changed: norm.weight\n"
    assert json.loads(run("verify", "net.pt", "other.pt", "--json").stdout)["same"] is False


def test_verify_runs_the_model_on_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    done("convert", "net.pt", "out", *MODEL, *OFF)
    arguments = ["verify", "net.pt", "out", *INPUT, "--device", "cpu"]
    assert "not run unasked; pass trust_factory=True (--trust-factory)" in run(*arguments).stderr
    assert "outputs: the same within the proof's limits" in done(*arguments, "--trust-factory").stdout

    def forward(self: nn.GroupNorm, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps + 0.5)

    monkeypatch.setattr(normswap.modules.GroupNorm, "forward", forward)
    result = run(*arguments, "--trust-factory")
    assert result.exit_code == MISMATCH and "outputs: NOT the same at group" in result.stdout


def test_verify_takes_the_inputs_that_convert_took() -> None:
    done("convert", "net.pt", "out", *MODEL, *INPUT, "--dtype", "bfloat16")
    found = done("verify", "net.pt", "out", *INPUT, "--device", "cpu", "--trust-factory")
    assert "outputs: the same within the proof's limits" in found.stdout


def test_verify_holds_a_conversion_to_its_digests() -> None:
    done("convert", "net.pt", "out.safetensors", *MODEL, *OFF)
    content = bytearray(Path("out.safetensors").read_bytes())
    content[-1] ^= 1
    Path("out.safetensors").write_bytes(content)
    result = run("verify", "out.safetensors")
    assert result.exit_code == FAILED and result.stdout == ""
    assert "out.safetensors differs" in result.stderr


# --- bench ----------------------------------------------------------------------------------------------------------


def test_bench() -> None:
    arguments = ["bench", "net.pt", *MODEL, *INPUT, "--rounds", "2"]
    found = json.loads(done(*arguments, "--json").stdout)
    assert (found["device"], found["rounds"]) == ("cpu", 2)
    assert found["eager_ms"] > 0 and found["optimized_ms"] > 0
    assert found["speedup"] == pytest.approx(found["eager_ms"] / found["optimized_ms"])
    assert {row["name"] for row in found["rows"]} == SITES
    for row in found["rows"]:
        assert row["eager_ms"] > 0 and row["optimized_ms"] > 0
    shown = done(*arguments, "--include", "norm").stdout.splitlines()
    assert shown[0] == "median of 2 forward passes on cpu, milliseconds"
    assert [line.split()[0] for line in shown[3:]] == ["(whole", "norm"]


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(x))


def test_bench_times_a_region_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, called = Activated().eval(), torch.randn(2, 8, 4), list[bool]()
    fast = normswap.optimize(model, x)
    fused = helper.Fused.__call__
    monkeypatch.setattr(helper.Fused, "__call__", lambda *given: called.append(True) or fused(*given))
    timing = bench(model, fast, normswap.report(fast), (x,), {}, rounds=2)
    region, norm = ({row["name"]: row for row in timing.rows}[name] for name in ("", "norm"))
    assert region["optimized_ms"] > 0 and norm["optimized_ms"] == 0
    assert len(called) == 3 + 2 + 2  # to warm up, the whole, the sites
    assert [line.split()[-1] for line in str(timing).splitlines() if line.startswith("norm ")] == ["-"]


def test_the_choices_are_those_of_optimize() -> None:
    for name, literal in (("validate", Validate), ("on_mismatch", OnMismatch), ("on_empty", OnEmpty)):
        (option,) = [option for option in main.commands["convert"].params if option.name == name]
        assert tuple(option.type.choices) == get_args(literal)


HELP = """
import sys
before = set(sys.modules)
sys.modules.update(torch=None, numpy=None)
sys.argv = ["normswap", "--help"]
try:
    from normswap.cli import main
    main()
finally:
    print(*(set(sys.modules) - before - {"torch", "numpy"}), file=sys.stderr)
"""


def test_help_needs_no_torch_and_comes_at_once(folder: Path) -> None:
    """At once: of this package it loads the commands alone, and of others what those talk through."""
    Path("bin").mkdir()
    Path("bin/normswap").write_text(HELP)
    command = [sys.executable, "bin/normswap"]
    found = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    loaded = set(found.stderr.split())
    assert "convert" in found.stdout
    assert {name for name in loaded if name.startswith("normswap.")} == {
        *("normswap.cli", "normswap.cli.commands", "normswap.cli.options", "normswap.cli.talk", "normswap.progress")
    }
    others = {name.split(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert others <= {"normswap", "click", "tabulate", "tqdm"} and len(loaded) < 200


def test_the_commands_work_in_a_process_of_their_own(folder: Path) -> None:
    """Where the package began without PyTorch: a factory that uses the public calls finds them."""
    Path("bin").mkdir()
    Path("bin/normswap").write_text("from normswap.cli import main\nmain()\n")
    Path("own.py").write_text("import normswap, zoo\nassert callable(normswap.plan)\nbuild = zoo.net\n")
    command = [sys.executable, "bin/normswap", "convert", "net.pt", "out", "--model", "own:build", "--device", "cpu"]
    found = subprocess.run([*command, *OFF], env=environment(), capture_output=True, text=True)
    assert found.returncode == DONE, found.stderr
    assert found.stdout.endswith(
        "\nwrote net.pt, normswap.json in out\nopen it: normswap.load_model('out', trust_factory=True)\n"
    )
    assert "undo:" not in found.stdout and "normswap.validate" not in found.stdout
    assert "cure: normswap verify out --trust-factory --input ... there" in found.stdout


# --- how it talks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell: str) -> None:
    result = CliRunner(env={"_NORMSWAP_COMPLETE": f"{shell}_source"}).invoke(main, prog_name="normswap")
    assert result.exit_code == DONE and "_NORMSWAP_COMPLETE" in result.stdout
    environment = {"_NORMSWAP_COMPLETE": "bash_complete", "COMP_WORDS": "normswap in", "COMP_CWORD": "1"}
    assert CliRunner(env=environment).invoke(main, prog_name="normswap").stdout == "plain,inspect\n"


class Screen:
    def __init__(self, terminal: bool) -> None:
        self.terminal, self.text = terminal, ""

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_a_bar_moves_while_one_file_is_copied(
    folder: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, quiet: bool
) -> None:
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setattr(progress.Bar, "__init__", functools.partialmethod(progress.Bar.__init__, mininterval=0.0))
    monkeypatch.setattr(files, "CHUNK", 1000)
    with monkeypatch.context() as patch, progress.silent() if quiet else contextlib.nullcontext():
        patch.setattr(files.fcntl, "ioctl", lambda *_: refuse())  # a file system that cannot share
        convert("net.pt", "out", "zoo:net", device="cpu", validate="off")
    shown = [float(found) for found in re.findall(r"writing: *(\d+)%", screen.text)]
    if not terminal or quiet:
        assert screen.text == ""
    else:
        assert len(set(shown)) > 3 and shown == sorted(shown) and shown[-1] > 90
        assert "hashing" in screen.text


def refuse() -> None:
    raise OSError("not supported")


@pytest.mark.parametrize(
    ("terminal", "environment", "red"),
    [(True, {}, True), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False), (False, {}, False)],
)
def test_errors_are_red_where_somebody_looks(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, environment: dict[str, str], red: bool
) -> None:
    shown: list[str] = []
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", Screen(terminal))
    monkeypatch.setattr(talk.click, "echo", lambda text, **_: shown.append(text))
    talk.fail("no such file")
    assert shown == ["\x1b[31mnormswap: no such file\x1b[0m" if red else "normswap: no such file"]


def test_what_is_said_of_any_kind_of_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: BaseException) -> Any:
        def inspect(*_: Any, **__: Any) -> Any:
            raise error

        return inspect

    for error, code, message in (
        (KeyboardInterrupt(), FAILED, "normswap: interrupted\n"),
        (MemoryError(), FAILED, "normswap: MemoryError\n"),
        (PermissionError(13, "Permission denied"), FAILED, "normswap: PermissionError: [Errno 13] Permission denied\n"),
    ):
        monkeypatch.setattr("normswap.checkpoint.reading.open_checkpoint", raising(error))
        result = run("inspect", "net.pt")
        assert (result.exit_code, result.stdout, result.stderr.lstrip()) == (code, "", message)
