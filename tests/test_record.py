"""The record of what ran on a GPU: what an edit makes stale, what is merged, what README then says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import benchmark
import engines
import gpu_check
import pytest
import readme_tables
import record as records

from normswap import builder, native

ROOT = Path(__file__).resolve().parent.parent
KERNELS = [*engines.KERNELS]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Sources of every engine, in sub-folders, with headers of one engine and of several."""
    files = {
        "row/layer_norm.cu": '#include "row/row.cuh"\n',
        "row/row.cuh": '#include "../device/vec.cuh"\n#include <cuda_runtime.h>\n',
        "column/group_norm_channels_last.cu": '  #  include "column/column.cuh"\n',
        "column/column.cuh": '#include "device/vec.cuh"\n',
        "dim/dim_norm.cu": '#include "plan/missing.h"\n',
        "batch/scale_batch_norm.cu": '#include "column/column.cuh"\n',
        "abi/register.cpp": "// the schemas\n",
        "device/vec.cuh": '#include "device/vec.cuh"\n',
        "device/nobody.cuh": "",
    }
    for name, text in files.items():
        (tmp_path / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "csrc" / name).write_text(text)
    (tmp_path / "package/ops").mkdir(parents=True)
    (tmp_path / "package/regions").mkdir()
    for name in (
        "ops/layer_norm.py",
        "reference.py",
        "compare.py",
        "regions/helper.py",
        "regions/moving.py",
        "regions/ending.py",
    ):
        (tmp_path / "package" / name).write_text("")
    return tmp_path


def changed(sources: Path, name: str) -> set[str]:
    """The engines whose digest an edit of a file changes."""
    before = engines.digests(sources / "csrc", sources / "package")
    with (sources / name).open("a") as file:
        file.write("edited")
    after = engines.digests(sources / "csrc", sources / "package")
    return {engine for engine in before if before[engine] != after[engine]}


@pytest.mark.parametrize(
    ("name", "made_stale"),
    [
        ("csrc/row/layer_norm.cu", ["row"]),
        ("csrc/row/row.cuh", ["row"]),
        ("csrc/column/column.cuh", ["column", "batch"]),
        ("csrc/column/group_norm_channels_last.cu", ["column"]),
        ("csrc/batch/scale_batch_norm.cu", ["batch"]),
        ("csrc/dim/dim_norm.cu", ["dim"]),
        ("csrc/device/vec.cuh", ["row", "column", "batch"]),
        ("csrc/device/nobody.cuh", []),
        ("csrc/abi/register.cpp", KERNELS),
        ("package/ops/layer_norm.py", ["python"]),
        ("package/reference.py", ["python"]),
        ("package/regions/helper.py", ["python"]),
        ("package/regions/ending.py", ["convolution"]),
        ("package/regions/moving.py", []),
        ("package/compare.py", []),
    ],
)
def test_an_edit_makes_stale_what_depends_on_it(sources: Path, name: str, made_stale: list[str]) -> None:
    assert changed(sources, name) == set(made_stale)


def test_a_file_that_moves_makes_its_engine_stale(sources: Path) -> None:
    before = engines.digests(sources / "csrc", sources / "package")
    shutil.move(sources / "csrc/dim/dim_norm.cu", sources / "csrc/dim_norm.cu")
    after = engines.digests(sources / "csrc", sources / "package")
    assert {engine for engine in before if before[engine] != after[engine]} == {"dim"}


def test_our_own_sources_belong_to_engines() -> None:
    """Every header is some engine's, and each engine has kernels of its own."""
    folder = native.source_dir()
    units = [path for path in builder.sources(folder) if path.suffix in (".cpp", ".cu")]
    reached = {path.resolve() for unit in units for path in engines.closure(unit, folder)}
    assert reached == {path.resolve() for path in builder.sources(folder)}
    for engine in engines.KERNELS:
        assert any(list(engines.owners(unit.name)) == [engine] for unit in units), engine
    assert len(set(engines.digests().values())) == len(engines.ENGINES)


WORDS = {
    "package/ops/layer_norm.py": (
        'def norm(x):\n    return x["a # b"]\n\n\nEPS = 1\n',
        '"""Of rows.\n\nAnd more."""\n\n\ndef norm(x):  # the norm\n    r"""Of x."""  # here\n    # now\n    '
        'return x["a # b"]  # (x)\n\nEPS = 1\n"""Beside the ""variance: # no comment."""\n',
        'def norm(x):\n    return x["a # c"]\n\n\nEPS = 1\n',
    ),
    "csrc/row/layer_norm.cu": (
        '#include "row/row.cuh"\n\nconst char* url = "http://x";  \nint x = 1 / 2;\n',
        '/* "Rows */\n#include "row/row.cuh"  // "row"\nconst char* url = "http://x";  // url\n'
        "/* of\n two */int x = 1 / 2;\n",
        '#include "row/row.cuh"\n\nconst char* url = "http://y";\nint x = 1 / 2;\n',
    ),
}
"""Of a file a source, the same with other words, and another source."""


@pytest.mark.parametrize("name", WORDS)
def test_words_make_nothing_stale(sources: Path, name: str) -> None:
    found = []
    for text in WORDS[name]:
        (sources / name).write_text(text)
        found.append(engines.digests(sources / "csrc", sources / "package"))
    assert found[0] == found[1] != found[2]
    apart = {f"regions/{name}.py" for name in engines.READING}.union(*engines.OPS_OF.values())
    assert all((native.PACKAGE / name).is_file() for name in apart)
    assert set(engines.OF_TESTS) <= {file.name for file in (ROOT / "tests/gpu").glob("test_*.py")}


def test_a_whole_model_depends_on_what_its_norms_come_by() -> None:
    rows = records.load()["models"]
    models = [row["model"] for row in rows]
    without = {
        engine: {row["model"] for row in rows if engine not in engines.of_model(row)} for engine in engines.ENGINES
    }
    assert without["linear"] == {*models} and not without["python"] | without["row"]
    assert {"resnet50_gn", "resnet50 step", "densenet121 channels_last"} <= without["dim"]
    assert {"vit_base, batch 32", "llama step", "convnext_base"} <= without["convolution"]
    assert without["batch"] == without["column"] == without["convolution"]
    assert {"vit_base step", "resnet50_gn step"}.isdisjoint(without["row_backward"])
    assert "resnet50_gn step" not in without["group_backward"] and "vit_base step" in without["group_backward"]
    assert {"vit_base", "resnet50_gn"} <= without["row_backward"] & without["group_backward"]
    assert not without["dim"] & without["convolution"] and "sd-unet-like" not in without["dim"] | without["convolution"]


def test_every_row_of_the_benchmark_has_engines() -> None:
    rows = [{"workload": w.name, "what": w.what, "mode": w.mode} for w in benchmark.all_workloads()]
    found = {(r["workload"], "channels_last" in r["what"], r["mode"]): records.engines_of_row(r) for r in rows}
    assert found["layer_norm", False, "eval"] == ("row",) and found["layer_norm over channels", False, "eval"] == (
        "dim",
    )
    assert found["group_norm + silu", True, "eval"] == ("column",) and found["group_norm", False, "eval"] == ("row",)
    assert found["layer_norm", False, "forward + backward"] == ("row", "row_backward")
    assert found["group_norm", True, "forward + backward"] == ("column", "group_backward")
    assert found["linear_scale_batch_norm", False, "forward + backward"] == ("batch",)
    assert {mode for _, _, mode in found if "backward" not in mode} == {"eval", "train"}
    assert all(len(of) == 1 for (_, _, mode), of in found.items() if "backward" not in mode)


MADE = {"device": "GPU A", "torch": "2.13", "cuda": "13.0", "driver": 13000, "date": "2026-01-01", "peers": {}}
MADE |= {"copy_GB_per_s": 3000.0}


def row(name: str, ours: float = 1.0, what: str = "float16", tag: str = "common") -> dict[str, Any]:
    known = {"workload": name, "shape": [8, 64], "what": what, "mode": "eval", "tags": [tag], "sites": 1, "refused": []}
    times = {"copy": 0.9, "eager": 2.0, "torch.compile": 1.5, "normswap": ours}
    known |= {"verified": True, "error_share": 0.5, "eager_error_share": 0.5, "target": "80% of floor"}
    return {**known, "target_ms": 1.1, "floor_ms": 0.8, "cannot": {}, "ms": times}


@pytest.fixture
def checking(tmp_path: Path) -> gpu_check.Checking:
    return gpu_check.Checking(records.empty(), tmp_path / "record.json", {**MADE, "sources": engines.digests()})


def later(checking: gpu_check.Checking, **changes: Any) -> gpu_check.Checking:
    """Another run, on what the one before wrote."""
    return gpu_check.Checking(records.load(checking.path), checking.path, {**checking._made, **changes})


def test_parts_are_merged_each_with_its_stamp(checking: gpu_check.Checking) -> None:
    order = [records.key_of_row(row(name)) for name in ("layer_norm", "rms_norm", "l1_norm")]
    checking.add("benchmark", [row("rms_norm")], records.key_of_row, order)
    checking.add("benchmark", [row("gone")], records.key_of_row)
    second = later(checking, date="2026-01-02")
    second.add("benchmark", [row("layer_norm", 0.9), row("rms_norm", 0.8)], records.key_of_row, order)
    known = records.load(checking.path)
    assert [(one["workload"], one["ms"]["normswap"]) for one in known["benchmark"]] == [
        ("layer_norm", 0.9),
        ("rms_norm", 0.8),
    ]
    assert [made["date"] for made in known["stamps"].values()] == ["2026-01-02"]  # the other names nothing any more
    third = later(second, device="GPU B")
    third.add("benchmark", [row("l1_norm")], records.key_of_row, order)
    known = records.load(checking.path)
    devices = [known["stamps"][one["stamp"]]["device"] for one in known["benchmark"]]
    assert devices == ["GPU A", "GPU A", "GPU B"]


def test_tests_are_merged_by_file(checking: gpu_check.Checking) -> None:
    counts = {"passed": 3, "failed": 0, "skipped": 0, "seconds": 1.0}
    checking.record["tests"]["test_gone.py"] = {**counts, "told": {}, "stamp": "none"}
    checking.add_tests("test_dim_norm.py", counts, {"test_a": {"peak_MB": 1.0}})
    checking.add_tests("test_cost.py", {**counts, "failed": 1}, {})
    again = later(checking)
    again.add_tests("test_dim_norm.py", {**counts, "passed": 4}, {})
    again.add_tests("test_dim_norm.py", {**counts, "passed": 0, "skipped": 4}, {})
    found = records.load(checking.path)["tests"]
    assert {name: (one["passed"], one["failed"]) for name, one in found.items()} == {
        "test_cost.py": (3, 1),
        "test_dim_norm.py": (4, 0),
    }
    assert checking.failed and not again.failed


def test_models_and_kinds_run_alone_replace_their_own_rows(
    checking: gpu_check.Checking, monkeypatch: pytest.MonkeyPatch
) -> None:
    import accuracy
    import check_models

    def model(name: str, ms: float) -> dict[str, Any]:
        known = {"model": name, "dtype": "float16", "training": False, "swapped": 1, "kept": 1, "problems": []}
        return {**known, "ms": {"eager": ms}}

    def error(kind: str, ours: float, regime: str = "warp") -> dict[str, Any]:
        return {"kind": kind, "regime": regime, "dtype": "float16", "mean": 0.0, "ours": ours, "pytorch": 0.5}

    monkeypatch.setattr(check_models, "table", str)
    compiled: list[bool] = []

    def check_all(names: Sequence[str], compiling: bool, ahead: bool) -> Iterator[dict[str, Any]]:
        compiled.append(compiling)
        yield from (model(name, 2.0 if names else 1.0) for name in names or ("b", "c", "a"))

    monkeypatch.setattr(check_models, "check_all", check_all)
    monkeypatch.setattr(check_models, "EVERY", [SimpleNamespace(name=name) for name in "abc"])
    checking.models([], True)
    checking.models(["b"], False)
    found = [(one["model"], one["ms"]["eager"]) for one in checking.record["models"]]
    assert found == [("a", 1.0), ("b", 2.0), ("c", 1.0)] and compiled == [True, False]
    assert "| a (to be" not in readme_tables.models_table(checking.record, False)
    checking.record["models"][1]["ms"]["compile"] = 0.5
    checking.record["models"][2]["training"] = True
    assert readme_tables.models_table(checking.record, True).splitlines()[2:] == ["| c | float16 | 1/1 | - | 1.00 |"]
    assert readme_tables.models_table(checking.record, False).splitlines() == [
        *("| model | dtype | swapped | waits for | eager | compile |", "|---|---|---|---|---|---|"),
        *("| a | float16 | 1/1 | - | 1.00 | - |", "| b | float16 | 1/1 | - | 2.00 | 0.50 |"),
    ]

    monkeypatch.setattr(accuracy, "table", str)
    monkeypatch.setattr(
        accuracy,
        "measure_all",
        lambda kinds: [error(kind, 0.5, regime) for kind in kinds for regime in ("warp", "old")],
    )
    checking.accuracy(["l1_norm", "rms_norm"])
    monkeypatch.setattr(accuracy, "measure_all", lambda kinds: [error(kind, 1.5) for kind in kinds])
    checking.accuracy(["rms_norm"])
    errors = [(one["kind"], one["regime"], one["ours"]) for one in checking.record["errors"]]
    assert errors == [("l1_norm", "warp", 0.5), ("l1_norm", "old", 0.5), ("rms_norm", "warp", 1.5)]
    assert checking.failed
    with pytest.raises(SystemExit, match="no such kind: l3_norm"):
        checking.accuracy(["l3_norm"])


def test_tools_of_the_sanitizer_run_alone(checking: gpu_check.Checking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "run_sanitizer", lambda tool: {"tool": tool, "exit": 0, "seconds": 1})
    checking.sanitizer([])
    monkeypatch.setattr(gpu_check, "run_sanitizer", lambda tool: {"tool": tool, "exit": 99, "seconds": 2})
    checking.sanitizer(["racecheck"])
    assert [(one["tool"], one["exit"]) for one in checking.record["sanitizer"]] == [("memcheck", 0), ("racecheck", 99)]


def test_racecheck_leaves_out_what_it_cannot_follow_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        ran.append(command)
        return SimpleNamespace(stdout="ERROR SUMMARY: 0 errors", returncode=0)

    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: __file__)
    monkeypatch.setattr(gpu_check.children, "run", run)
    assert [gpu_check.run_sanitizer(tool)["exit"] for tool in gpu_check.TOOLS] == [0, 0]
    assert [command[-3:] for command in ran] == [
        [gpu_check.SANITIZED, "-k", ""],
        [gpu_check.SANITIZED, "-k", "not test_convolution or depthwise"],
    ]
    sweep = (gpu_check.ROOT / gpu_check.SANITIZED).read_text()
    assert sweep.count("def test_convolution") == 1 and '"depthwise"' in sweep


def test_what_is_asked_for() -> None:
    everything = {part: [] for part in ("tests", "sanitizer", "benchmark", "accuracy", "models")}
    assert gpu_check.asked([]) == (everything, True, True)
    assert gpu_check.asked(["--models", "vit", "--eager"])[1:] == (False, True)
    assert gpu_check.asked(["--models", "vit", "--compiled"])[1:] == (True, False)
    found = gpu_check.asked(["--benchmark", "llama", "host", "--sanitizer", "memcheck", "--tests"])
    assert found[0] == {
        **{"tests": [], "sanitizer": ["memcheck"], "benchmark": ["llama", "host"]},
        **{"accuracy": None, "models": None},
    }


def test_stale_figures_are_marked(checking: gpu_check.Checking, monkeypatch: pytest.MonkeyPatch) -> None:
    image = row("group_norm", what="float16, channels_last", tag="network")
    checking.add("benchmark", [row("layer_norm"), image, row("rms_norm", tag="backward")], records.key_of_row)
    checking.add("host", [{"module": "m", "gradients": "no", "eager_us": 2.0, "normswap_us": 1.0}], str)
    error = {"regime": "warp", "mean": 0.0, "ours": 0.5, "pytorch": 0.5}
    for kind in ("l1_norm", "linear_scale_batch_norm"):
        rows = [{**error, "kind": kind, "dtype": dtype} for dtype in ("float32", "float16", "bfloat16")]
        checking.add("errors", rows, records.key_of_error)
    counts = {"passed": 3, "failed": 0, "skipped": 0, "seconds": 1.0}
    for file in ("test_row_norm.py", "test_dim_norm.py"):
        checking.add_tests(file, counts, {})
    checking.add("sanitizer", [{"tool": "memcheck", "exit": 0}], str)
    known = records.load(checking.path)

    fresh = readme_tables.tables(known)
    assert not [name for name, text in fresh.items() if records.AGAIN in text or "run again" in text]
    assert fresh["measured on"].startswith("1 rows on one GPU A, torch 2.13, 2026-01-01, a copy rate of 3000 GB/s")

    edited = {**engines.digests(), "row": "edited"}
    monkeypatch.setattr(engines, "digests", lambda: edited)
    found = readme_tables.tables(known)
    assert "| layer_norm 8x64 (to be measured again) |" in found["benchmark"]
    assert "1 of them have changed since; they are to be measured again" in found["measured on"]
    assert found["networks"] == fresh["networks"] and found["host"] == fresh["host"]
    assert "| l1_norm (to be measured again) |" in found["errors"]
    assert "| linear_scale_batch_norm |" in found["errors"]
    assert "no full run yet of test_activations.py, " in found["checks"]  # of no file that there is
    assert (
        "1 of 2 files are to be run again" in found["checks"] and "memcheck clean (to be run again)" in found["checks"]
    )
    edited |= {"row": known["stamps"][known["host"][0]["stamp"]]["sources"]["row"], "python": "edited"}
    found = readme_tables.tables(known)
    assert found["benchmark"] == fresh["benchmark"] and "| m (to be measured again) |" in found["host"]
    assert "2 of 2 files" in found["checks"] and "memcheck clean." in found["checks"]

    checking.add("host", [{"module": "n", "gradients": "no", "eager_us": 2.0, "normswap_us": 1.0}], str)
    for digest, where in (("edited", ["m"]), ("again", [])):  # of all of several it is said once
        edited["python"] = digest
        if digest == "edited":
            made = {**checking.record["stamps"][known["host"][0]["stamp"]], "sources": dict(edited)}
            checking.record["host"][1]["stamp"] = records.stamp(checking.record, made)
        found = readme_tables.tables(checking.record)
        assert [name for name in "mn" if f"| {name} (to be measured again) |" in found["host"]] == where
        assert found["host"].count(records.AGAIN) == 1
    checking.add("host", [{"module": "o", "gradients": "no", "eager_us": 2.0, "normswap_us": 1.0}], str)
    checking.record["host"][2]["stamp"] = checking.record["host"][0]["stamp"]
    checking.record["host"][1]["stamp"] = records.stamp(checking.record, {**made, "sources": dict(edited)})
    found = readme_tables.tables(checking.record)
    assert [name for name in "mno" if rf"| {name} \* |" in found["host"]] == ["m", "o"]  # of several that are stale
    assert found["host"].count(records.AGAIN) == 1


def test_rows_of_two_gpus_say_of_which(checking: gpu_check.Checking) -> None:
    checking.add("benchmark", [row("layer_norm")], records.key_of_row)
    later(checking, device="GPU B").add("benchmark", [row("rms_norm")], records.key_of_row)
    found = readme_tables.tables(records.load(checking.path))
    assert "| layer_norm 8x64 (GPU A) |" in found["benchmark"] and "| rms_norm 8x64 (GPU B) |" in found["benchmark"]
    assert "1 rows on one GPU A" in found["measured on"] and "1 rows on one GPU B" in found["measured on"]


def test_an_empty_record_can_be_shown(tmp_path: Path) -> None:
    found = readme_tables.tables(records.load(tmp_path / "none.json"))
    assert found["networks"] == found["host"] == found["models"] == found["errors"] == readme_tables.NOT_YET
    assert found["checks"].startswith("The tests on the GPU have not been recorded yet; compute-sanitizer has not")


def test_the_committed_record_is_whole() -> None:
    text = records.RECORD.read_text()
    known = records.load()
    assert json.loads(text).keys() == records.empty().keys()
    parts = [row for name in ("benchmark", "host", "models", "errors", "sanitizer") for row in known[name]]
    assert {row["stamp"] for row in (*parts, *known["tests"].values())} == set(known["stamps"])
