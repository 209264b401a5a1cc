"""What bounds the kernels of a forward, by Nsight Compute: a table in markdown, a line a kernel.

    python scripts/profile_kernels.py [PATTERN ...]

PATTERN as in benchmark.py; `eval` rows alone. Needs ncu and the right to read the GPU's counters. ncu empties the
caches before a kernel and holds the clocks: its microseconds are longer than the benchmark's. Of the cycles, the share
in which an instruction was issued; of the memory's and of the L2's rate, the share that was used; and for what warps
waited, in warps a scheduler per instruction that it issued.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

STALLS = {
    "long_scoreboard": "memory",
    "short_scoreboard": "shared memory or shuffles",
    "barrier": "barriers",
    "wait": "the instruction before",
    "not_selected": "their turn",
    "math_pipe_throttle": "arithmetic units",
    "mio_throttle": "the queue of shared memory",
    "lg_throttle": "the queue of memory",
    "no_instruction": "instructions",
    "imc_miss": "constants",
}
"""What ncu's names of what a warp waits for mean."""
TIME, ISSUED = "gpu__time_duration.sum", "smsp__issue_active.avg.per_cycle_active"
MEMORY = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
L2 = "lts__throughput.avg.pct_of_peak_sustained_elapsed"
INSTRUCTIONS = "smsp__inst_executed.sum"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
METRICS = (TIME, ISSUED, MEMORY, L2, INSTRUCTIONS, *map(STALL.format, STALLS))
HEADERS = ("row", "kernel", "us", "issued", "memory", "L2", "instructions, millions", "warps wait for")
TOLD = 3


def profiled(patterns: Sequence[str]) -> str:
    """What ncu prints of the rows, which it has this file call."""
    ncu = ("ncu", "--metrics", ",".join(METRICS), "--nvtx", "--nvtx-include", "regex:.*/", "--csv", "--page", "raw")
    done = subprocess.run([*ncu, sys.executable, __file__, "--call", *patterns], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"ncu ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


def rows_of(printed: str) -> list[tuple[str, ...]]:
    """A row of the table for every kernel in ncu's csv."""
    lines = csv.DictReader(line for line in printed.splitlines() if not line.startswith("=="))
    units, *kernels = lines
    assert units[TIME] in ("ns", "us"), f"ncu gives the time in {units[TIME]}"
    return [_row(kernel, 1e3 if units[TIME] == "ns" else 1.0) for kernel in kernels]


def _row(kernel: dict[str, str], in_us: float) -> tuple[str, ...]:
    number = {name: float(kernel[name].replace(",", "")) for name in METRICS}
    (ranges,) = (value for name, value in kernel.items() if "Push/Pop_Range" in name)
    called = re.search(r'>:(.*?):[^"]*"', ranges)
    name = re.search(r"(\w+)(<.*)?\(", kernel["Kernel Name"].replace("unnamed>::", ""))
    assert called is not None and name is not None, (ranges, kernel["Kernel Name"])
    waits = sorted(STALLS, key=lambda stall: -number[STALL.format(stall)])[:TOLD]
    return (
        called[1],
        f"`{name[1]}`",
        f"{number[TIME] / in_us:.1f}",
        f"{number[ISSUED]:.0%}",
        f"{number[MEMORY] / 100:.0%}",
        f"{number[L2] / 100:.0%}",
        f"{number[INSTRUCTIONS] / 1e6:.1f}",
        ", ".join(f"{STALLS[stall]} {number[STALL.format(stall)]:.1f}" for stall in waits),
    )


def call(patterns: Sequence[str]) -> None:
    """A forward of each row, swapped, in a range of its name."""
    import benchmark
    import torch
    from workloads import randomised

    import normswap

    with torch.no_grad():
        for one in (one for one in benchmark.chosen(patterns) if one.mode == "eval"):
            model = randomised(one.make()).cuda().to(one.weights_dtype).eval()
            x = benchmark.drawn(one)
            swapped = normswap.optimize(model, x, validate="off", min_speedup=None)  # ncu slows every kernel of a proof
            torch.cuda.synchronize()
            with torch.cuda.nvtx.range(f"{one.name} {'x'.join(map(str, one.shape))} {one.what}"):
                swapped(x)
            torch.cuda.synchronize()


def table(rows: Iterable[Sequence[str]]) -> str:
    import readme_tables

    return readme_tables.markdown(HEADERS, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    parser.add_argument("--call", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.call:
        call(given.patterns)
    else:
        print(table(rows_of(profiled(given.patterns))))


if __name__ == "__main__":
    main()
