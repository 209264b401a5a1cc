"""What is made of the benchmark's rows and of what the GPU's tests told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accuracy
import benchmark
import gpu_check
import pytest
import readme_tables
import torch
from torch import Tensor, nn
from workloads import common_workloads, workloads


def row(ours: float, target: float | None = None, *, headline: bool = False, **ms: float) -> dict[str, Any]:
    times = {"eager": 2.0, "torch.compile": 1.0, **ms, "normswap": ours}
    known = {"workload": "layer_norm", "shape": [8, 64], "what": "float16", "mode": "eval", "verified": True}
    return {**known, "floor_ms": 0.5, "ms": times, "target_ms": target, "headline": headline, "cannot": {}}


def test_summary_counts_targets_and_names_what_loses() -> None:
    rows = [row(1.0, 1.0), row(1.05, 1.0, headline=True), row(1.2, 1.0, headline=True), row(2.5), row(0.5)]
    found = benchmark.summary(rows)
    assert (found["targets"], found["met"]) == (3, 1)
    assert [len(found[key]) for key in ("headline_beyond_10%", "slower_than_eager", "slower_than_compile")] == [1, 1, 3]
    assert found["not_proved"] == []
    assert benchmark.told(found)[:2] == [
        "1 of 3 targets met.",
        "Headline rows more than 10% beyond their target: layer_norm 8x64 float16.",
    ]
    assert benchmark.summary([{**row(1.0), "verified": False}])["not_proved"] == ["layer_norm 8x64 float16"]


def test_cells_have_a_column_for_everyone_measured() -> None:
    rows = [row(1.0, 0.9), row(0.8, 0.9, quack=0.7)]
    names = benchmark.columns(rows)
    assert names == ["eager", "torch.compile", "quack", "normswap"]
    shown = [benchmark.cells(one, names) for one in rows]
    start = ("layer_norm 8x64", "float16", "0.500", "2.000", "1.000")
    assert shown[0] == (*start, "-", "1.000", "50%", "2.00x", "1.00x", "0.900, missed")
    assert shown[1] == (*start, "0.700", "0.800", "62%", "2.50x", "1.25x", "0.900, met")
    assert {len(cells) for cells in shown} == {len(benchmark.headers(rows))}


def test_targets_beside_a_linear() -> None:
    linear = {(w.what, w.training): w.target(10.0) for w in workloads() if w.of_linear}
    assert linear == {
        ("float32", False): pytest.approx(10.1),
        ("float32", True): pytest.approx(10.28),
        ("float32, TF32", False): pytest.approx(10.4),
        ("float32, TF32", True): pytest.approx(10.28),
        ("bfloat16", False): pytest.approx(10.4),
        ("bfloat16", True): pytest.approx(10.15),
    }
    assert all(w.target(None) == w.target_ms for w in common_workloads())


def test_peers_that_differ_or_fail_are_not_timed() -> None:
    norm, x = nn.LayerNorm(8), torch.randn(4, 8)

    def unable(model: nn.Module) -> None:
        raise ImportError("no compiler\nat all")

    offers = {
        "right": lambda model: lambda x: model(x),
        "wrong": lambda model: lambda x: model(x) + 1e-2,
        "unable": unable,
        "none": lambda model: None,
    }
    right, cannot = benchmark.compared(offers, norm, x)
    assert list(right) == ["right"] and isinstance(right["right"](x), Tensor)
    assert cannot == {"wrong": "differs from eager", "unable": "ImportError: no compiler"}


RESULTS = """<testsuites><testsuite errors="1" failures="2" skipped="1" tests="9" time="3.21">
<testcase name="test_a[f32]"><properties><property name="seconds" value="0.46"/></properties></testcase>
<testcase name="test_b"/></testsuite></testsuites>"""


def test_results_of_a_test_file() -> None:
    counted, told = gpu_check.read_results(RESULTS)
    assert counted == {"passed": 5, "failed": 3, "skipped": 1, "seconds": 3.2}
    assert told == {"test_a[f32]": {"seconds": 0.46}}


def raising() -> None:
    raise RuntimeError("accuracy")


def test_tests_are_recorded_as_their_files_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_file(file: Path) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
        counted = {"passed": 2, "failed": int(file.name == "test_cost.py"), "skipped": 0, "seconds": 1.0}
        return counted, {"test_x": {"seconds": 1.0}}

    monkeypatch.setattr(gpu_check, "_run_file", run_file)
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    beside: list[int] = []
    gpu_check.run_tests(
        ["test_cost.py", "test_direct.py"],
        {"files": {"test_planted.py": {"passed": 7, "failed": 0, "skipped": 1, "seconds": 3.0}}},
        lambda: beside.append(len(kept)),
        lambda tests, told: kept.append((tests, dict(told))),
    )
    assert beside == [0] and len(kept) == 2
    first, last = kept[0][0], kept[1][0]
    assert first["unfinished"] == ["test_cost.py"] and first["passed"] == 9  # what times runs last, alone
    assert (last["unfinished"], last["passed"], last["failed"], last["skipped"]) == ([], 11, 1, 1)
    assert set(kept[1][1]) == {"test_cost: test_x", "test_direct: test_x"}
    cut = {**last, "unfinished": ["test_direct.py", "test_no_trace.py"]}
    with pytest.raises(RuntimeError, match="accuracy"):  # what runs beside them takes no results along
        gpu_check.run_tests(["test_direct.py"], cut, raising, lambda tests, told: kept.append((tests, dict(told))))
    assert kept[2][0]["unfinished"] == ["test_no_trace.py"] and kept[2][0]["passed"] == 11
    with pytest.raises(SystemExit, match="no such file"):
        gpu_check.run_tests(["test_none.py"], {}, lambda: None, lambda tests, told: None)


def test_what_readme_says_of_the_proof() -> None:
    assert readme_tables.proof_line({}) == readme_tables.NOT_YET
    told = {
        "test_false_alarms a[train]": {"models": 200.0, "sites": 700.0, "alarms": 0.0},
        "test_false_alarms a[eval]": {"models": 200.0, "sites": 600.0, "alarms": 1.0},
        "test_cost vit[float32]": {"seconds": 0.456, "model_MB": 346.0, "peak_MB": 700.0},
        "test_proof_memory l1": {"beyond_output_MB": 310.0},
    }
    line = readme_tables.proof_line(told)
    assert line.startswith("Of 1,300 sites in 400 random models (dtype and mode included) 1 were put back")
    assert "0.46 s in float32, at most 354 MB beyond" in line and "at most 310 MB beyond its output" in line


def test_what_readme_says_of_the_checks() -> None:
    tests = {"passed": 170, "failed": 2, "files": {"test_a.py": {"failed": 2}, "test_b.py": {"failed": 0}}}
    assert "not been recorded" in readme_tables.checks_line(None, None)
    assert "not been run" in readme_tables.checks_line(tests, None)
    cut = readme_tables.checks_line({**tests, "unfinished": ["test_c.py"]}, None)
    assert "1 files did not end (`test_c.py`)" in cut
    tools = [{"tool": "memcheck", "exit": 0}, {"tool": "racecheck", "exit": 99}, {"tool": "initcheck"}]
    line = readme_tables.checks_line(tests, tools)
    assert line.startswith("On the GPU 170 tests passed, 2 failed (`test_a.py`);")
    assert line.endswith("memcheck clean, racecheck NOT CLEAN, initcheck NOT CLEAN.")


def test_errors_by_kind_and_dtype() -> None:
    found = [
        {"kind": "l1_norm", "regime": regime, "dtype": dtype, "mean": 0.0, "ours": ours, "pytorch": 0.5}
        for dtype in ("float32", "float16", "bfloat16")
        for regime, ours in (("warp", 0.25), ("block", 1.5))
    ]
    assert accuracy.cells(found) == [("l1_norm", *("3.00x, 150%",) * 3)]
    assert [one["regime"] for one in accuracy.beyond(found)] == ["block"] * 3
    assert "BEYOND ITS LIMIT" in accuracy.table(found)
