"""What is made of the benchmark's rows and of what the GPU's tests told."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import accuracy
import benchmark
import gpu_check
import host_cost
import profile_kernels
import pytest
import readme_tables
import torch
from networks import batch_norm_workloads
from torch import Tensor, nn
from workloads import L1Norm, Target, Workload, randomised

from normswap.ops import dispatch


def row(ours: float, target: float | None = None, *, tags: Sequence[str] = ("common",), **ms: float) -> dict[str, Any]:
    times = {"eager": 2.0, "torch.compile": 1.0, **ms, "normswap": ours}
    known = {"workload": "layer_norm", "shape": [8, 64], "what": "float16", "mode": "eval", "verified": True}
    known |= {"sites": 1, "refused": [], "tags": list(tags), "cannot": {}}
    return {**known, "floor_ms": 0.5, "ms": times, "target_ms": target, "target": "56% of floor" if target else "-"}


@pytest.mark.parametrize("path", sorted(Path(benchmark.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_finds_what_it_imports(path: Path) -> None:
    importlib.import_module(path.stem)


def test_summary_counts_targets_and_names_what_loses() -> None:
    rows = [row(1.0, 1.0), row(1.05, 1.0, tags=["headline"]), row(1.2, 1.0, tags=["headline"]), row(2.5), row(0.5)]
    found = benchmark.summary(rows)
    assert (found["targets"], found["met"]) == (3, 1)
    assert [len(found[key]) for key in ("headline_beyond_10%", "slower_than_eager", "slower_than_compile")] == [1, 1, 3]
    assert found["not_proved"] == []
    assert benchmark.told(found)[:2] == [
        "1 of 3 targets met.",
        "Headline rows more than 10% beyond their target: layer_norm 8x64 float16.",
    ]
    assert benchmark.summary([{**row(1.0), "verified": False}])["not_proved"] == ["layer_norm 8x64 float16"]
    refused = benchmark.summary([{**row(1.0), "verified": False, "sites": 0, "refused": ["too wide"]}])
    assert refused["not_swapped"] == ["layer_norm 8x64 float16"] and refused["not_proved"] == []


def test_a_row_that_is_not_proved_is_tried_again_and_says_why() -> None:
    _, found = benchmark.proved(randomised(nn.LayerNorm(8)), torch.randn(4, 8), False)  # no kernel runs on a CPU
    assert not found["verified"] and found["unproved"] == ["wiring", "on the same input again: wiring"]
    shown = benchmark.table([{**row(1.0), **found}])
    assert "layer_norm 8x64: not proved: on the same input again: wiring" in shown


def test_rows_that_were_not_compiled() -> None:
    one = row(1.0, 1.0)
    del one["ms"]["torch.compile"]
    assert benchmark.summary([one])["slower_than_compile"] == []
    assert benchmark.cells(one, ["eager", "torch.compile", "normswap"])[4] == "-"
    assert Target(of_compile=1.0).limit_ms(1.0, one["ms"]) is None


def test_summary_compares_layouts() -> None:
    image = {"workload": "group_norm", "shape": [2, 32, 8, 8]}
    rows = [{**row(1.0), **image}, {**row(1.24), **image, "what": "float16, channels_last"}]
    assert benchmark.summary(rows)["beyond_the_other_layout"] == []
    rows[1]["ms"]["normswap"] = 1.26
    assert benchmark.summary(rows)["beyond_the_other_layout"] == ["group_norm 2x32x8x8 float16, channels_last"]
    rows[0]["mode"] = "forward + backward"  # another thing was timed
    assert benchmark.summary(rows)["beyond_the_other_layout"] == []


def test_cells_have_a_column_for_everyone_measured() -> None:
    rows = [row(1.0, 0.9), row(0.8, 0.9, quack=0.7)]
    names = benchmark.columns(rows)
    assert names == ["eager", "torch.compile", "quack", "normswap"]
    shown = [benchmark.cells(one, names) for one in rows]
    start = ("layer_norm 8x64", "float16", "0.500", "2.000", "1.000")
    assert shown[0] == (*start, "-", "1.000", "50%", "2.00x", "1.00x", "56% of floor: missed")
    assert shown[1] == (*start, "0.700", "0.800", "62%", "2.50x", "1.25x", "56% of floor: met")
    assert {len(cells) for cells in shown} == {len(benchmark.headers(rows))}


def test_targets_are_shares_of_what_was_timed_in_the_same_run() -> None:
    times = {"copy": 2.0, "torch.compile": 5.0, "linear alone": 10.0}
    limits = {
        Target(): (None, "-"),
        Target(of_floor=0.8): (1.25, "80% of floor"),
        Target(of_copy=1.3): (2.6, "1.30x copy"),
        Target(copy_plus_us=4): (2.004, "copy + 4 us"),
        Target(of_compile=1.0): (5.0, "1.00x compile"),
        Target(of_linear=1.0, linear_plus_ms=0.28): (10.28, "1.00x Linear + 0.28 ms"),
        Target(of_floor=0.5, of_copy=1.3): (2.0, "50% of floor, 1.30x copy"),
    }
    for target, (limit, words) in limits.items():
        assert target.limit_ms(1.0, times) == (None if limit is None else pytest.approx(limit)) and str(target) == words


def test_floors_count_every_pass() -> None:
    def bytes_of(**options: Any) -> int:
        return Workload("layer_norm", L1Norm, (10, 100), 200, **options).floor_bytes

    assert bytes_of() == 4 * (2 * 1000 + 200)
    assert bytes_of(dtype=torch.bfloat16) == 2 * (2 * 1000 + 200)
    assert bytes_of(backward=True) == 4 * (5 * 1000 + 3 * 200)
    assert bytes_of(dtype=torch.bfloat16, autocast=True) == 6 * 1000 + 4 * 200
    assert bytes_of(dtype=torch.bfloat16, autocast=True, backward=True) == 14 * 1000 + 3 * 4 * 200
    assert bytes_of(dtype=torch.bfloat16, passes=3) == 2 * 3 * 1000
    rows = {
        (w.name, w.mode): w for w in batch_norm_workloads() if w.shape[1:] == (64, 56, 56) and w.dtype.itemsize == 2
    }
    assert [w.passes for w in rows.values()] == [3, 8, 3, 8, 4.0625, 10.125]


def test_rows_are_compiled_ahead_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[Sequence[str]] = []
    monkeypatch.setattr(benchmark, "compile_ahead", lambda script, given, at_once: shares.extend(given))
    monkeypatch.setattr(benchmark, "measure", lambda one, rate, compiling: {"workload": one.name})
    these = benchmark.chosen([])
    assert len(list(benchmark.measured(these, 1.0, ahead=True))) == len(these)
    names = [name for share in shares for name in share]
    assert len(shares) == benchmark.AHEAD and len(set(names)) == len(names)
    assert set(names) == {one.called for one in these if one.floor_bytes <= benchmark.AHEAD_BYTES}
    shares.clear()
    for given, options in ((these[:3], {"ahead": True}), (these, {}), (these, {"ahead": True, "compiling": False})):
        assert len(list(benchmark.measured(given, 1.0, **options))) == len(given) and not shares


def test_rows_are_chosen_by_tag_and_by_name() -> None:
    called = [(w.name, w.shape, w.what, w.mode) for w in benchmark.all_workloads()]
    assert len(set(called)) == len(called)  # what the record knows a row by
    names = ("headline", "common", "network", "backward", "batch_norms", "resnet50_gn")
    tags = {tag: [w for w in benchmark.all_workloads() if tag in w.tags] for tag in names}
    assert sum(len(rows) for tag, rows in tags.items() if tag != "resnet50_gn") == len(called)
    assert len(tags["resnet50_gn"]) == 18 and len(tags["headline"]) == 9
    assert {w.shape for w in benchmark.chosen(["layer_norm *x768 bfloat16 eval"])} == {(50432, 768)}
    assert {w.mode for w in benchmark.chosen(["backward"])} == {"forward + backward"}
    assert len(benchmark.chosen(["batch_norms"])) == len(tags["batch_norms"]) == 9 * 3 * 3 * 2 + 1
    assert len(benchmark.chosen([])) == len(called)
    with pytest.raises(SystemExit, match="no row of the benchmark is called nothing like it"):
        benchmark.chosen(["common", "nothing like it"])
    assert all(w.target.of_copy == 1.3 or w.target.copy_plus_us == 4 for w in tags["network"])


@pytest.mark.parametrize("tag", ["network", "backward", "batch_norms"])
def test_every_model_takes_its_input(tag: str) -> None:
    """Each once, with a small batch and image."""
    kinds = {(w.name, w.dtype): w for w in benchmark.chosen([tag])}
    for workload in kinds.values():
        small = (2, *workload.shape[1:2], *(min(size, 4) for size in workload.shape[2:]))
        rows = workload.name in ("layer_norm", "rms_norm", "linear_scale_batch_norm")
        shape = (2, *workload.shape[1:]) if rows else small
        x = torch.randn(shape).to(workload.dtype).requires_grad_(workload.backward)
        model = randomised(workload.make()).to(workload.weights_dtype).train(workload.training)
        if workload.shortcut:
            model.shortcut = nn.Parameter(torch.randn_like(x))
        out = benchmark.with_backward(model, x)(x)[0] if workload.backward else model(x)
        assert out.shape == x.shape and out.isfinite().all(), workload


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


def test_test_files_run_the_slow_ones_first_and_those_that_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_file(file: Path) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
        counted = {"passed": 2, "failed": int(file.name == "test_cost.py"), "skipped": 0, "seconds": 1.0}
        return counted, {"test_x": {"seconds": 1.0}}

    monkeypatch.setattr(gpu_check, "_run_file", run_file)
    kept: list[tuple[str, dict[str, Any], Any]] = []
    beside: list[int] = []
    files = gpu_check.test_files(["test_cost.py", "test_direct.py"])
    gpu_check.run_tests(files, {}, lambda: beside.append(len(kept)), lambda *found: kept.append(found))
    assert beside == [0] and [name for name, _, _ in kept] == ["test_direct.py", "test_cost.py"]
    assert kept[1][1]["failed"] == 1 and kept[1][2] == {"test_x": {"seconds": 1.0}}
    with pytest.raises(RuntimeError, match="accuracy"):  # what runs beside them takes no results along
        gpu_check.run_tests(files, {}, raising, lambda *found: kept.append(found))
    assert len(kept) == 4
    with pytest.raises(SystemExit, match="no such file"):
        gpu_check.test_files(["test_none.py"])


def test_what_readme_says_of_the_proof() -> None:
    assert readme_tables.proof_line({}) == readme_tables.NOT_YET
    told = {
        "test_false_alarms a[train]": {"models": 200.0, "sites": 700.0, "alarms": 0.0},
        "test_false_alarms a[eval]": {"models": 200.0, "sites": 600.0, "alarms": 1.0},
        "test_cost vit[float32]": {"seconds": 0.456, "model_MB": 346.0, "peak_MB": 700.0},
        "test_proof_memory l1": {"beyond_output_MB": 310.0},
    }
    line = readme_tables.proof_line({name.split()[0]: {"told": {}} for name in told} | {"all": {"told": told}})
    assert line.startswith("Of 1,300 sites in 400 random models (dtype and mode included) 1 were put back")
    assert "0.46 s in float32, at most 354 MB beyond" in line and "at most 310 MB beyond its output" in line


def test_errors_by_kind_and_dtype() -> None:
    found = [
        {"kind": "l1_norm", "regime": regime, "dtype": dtype, "mean": 0.0, "ours": ours, "pytorch": 0.5}
        for dtype in ("float32", "float16", "bfloat16")
        for regime, ours in (("warp", 0.25), ("block", 1.5))
    ]
    assert accuracy.cells(found) == [("l1_norm", *("3.00x, 150%",) * 3)]
    assert [one["regime"] for one in accuracy.beyond(found)] == ["block"] * 3
    assert "BEYOND ITS LIMIT" in accuracy.table(found)


@pytest.mark.parametrize("name", host_cost.ROWS)
def test_what_the_host_s_cost_is_told_of_makes_one_call_of_one_op(name: str) -> None:
    calls = []
    _, swapped, x = host_cost.made(name)

    def counted(op: str, idle: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: calls.append(op) or idle(*args)

    with torch.no_grad(), contextlib.ExitStack() as stack:
        host_cost.idle_ops(stack)
        for table in (dispatch._direct, dispatch._native):
            stack.enter_context(mock.patch.dict(table, {op: counted(op, idle) for op, idle in table.items()}))
        swapped(x)
    assert len(calls) == 1


def test_the_host_s_targets_are_told_from_the_record() -> None:
    def rows(ours: float) -> list[dict[str, Any]]:
        found = {"eager_us": 10.0, "normswap_us": ours}
        return [
            {"module": name, "gradients": gradients, **found}
            for name in readme_tables.HOST_TARGETS
            for gradients in host_cost.GRADIENTS
        ]

    line = readme_tables.host_line({"host": rows(11.0)})
    assert (
        line
        == "nn.LayerNorm 1.10 and 1.10 (met), nn.RMSNorm 1.10 and 1.10 (met), nn.GroupNorm 1.10 and 1.10 (**missed**)."
    )
    assert readme_tables.host_line({"host": rows(11.0)[:-1]}) == readme_tables.NOT_YET


def test_the_steps_targets_are_told_from_the_record() -> None:
    ms = {"eager": 40.0, "default": 20.004}
    rows = [{"model": name, "training": True, "ms": ms} for name in ("resnet50_gn step", "llama step", "another step")]
    rows[1] = {**rows[1], "ms": {**ms, "compile": 10.0}}
    line = readme_tables.steps_line({"models": rows})
    assert line == (
        "resnet50_gn step 20.00 ms (20: **missed**); llama step 0.50 of eager (0.77: met, 2.00 of torch.compile's)."
    )
    assert readme_tables.steps_line({"models": []}) == readme_tables.NOT_YET


def test_what_ncu_prints_becomes_a_row_a_kernel() -> None:
    ranges = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
    within = '698  "<default domain>:layer_norm 8x64 float16, channels_last:none:none:none:none:none:none" '
    names = ("Kernel Name", ranges, *profile_kernels.METRICS)
    kernel = "void unnamed>::row_small<unnamed>::LayerNormPolicy, Half, unnamed>::Tile<Half, 32, 1>>(unnamed>::RowArgs)"
    numbers = dict.fromkeys(profile_kernels.METRICS, "0.5") | {profile_kernels.TIME: "17,760"}
    numbers |= {profile_kernels.ISSUED: "0.68", profile_kernels.MEMORY: "36.12", profile_kernels.L2: "63.69"}
    numbers |= {profile_kernels.INSTRUCTIONS: "7,789,824"}
    numbers |= {profile_kernels.STALL.format("barrier"): "1.42", profile_kernels.STALL.format("wait"): "1.06"}
    printed = io.StringIO()
    lines = csv.DictWriter(printed, names, quoting=csv.QUOTE_ALL)
    lines.writeheader()
    lines.writerow(dict.fromkeys(names, "") | {profile_kernels.TIME: "ns"})
    lines.writerow({"Kernel Name": kernel, ranges: within, **numbers})
    (row,) = profile_kernels.rows_of(f"==PROF== Connected to process 698\n{printed.getvalue()}==PROF== Disconnected\n")
    assert row[:7] == ("layer_norm 8x64 float16, channels_last", "`row_small`", "17.8", "68%", "36%", "64%", "7.8")
    assert row[7].startswith("barriers 1.4, the instruction before 1.1, ")
