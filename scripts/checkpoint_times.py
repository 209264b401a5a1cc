"""How long a conversion and an opening take, beside safetensors' own load_file and save_file: python
scripts/checkpoint_times.py [--cold] [FOLDER]. It writes about 5 GB there.

Each is timed in a process of its own, as a person meets it: one process opens one model. A process that has opened and
freed one before takes the memory that it still holds, which saves both sides the page faults, most of a load's time.
load_file only maps. As "copied" its tensors are cloned, so that all bytes are read, as load_model reads them for the
digests; as "mapped" they are handed to the same model, as load_model does without. The files lie in the page cache, or
with --cold on the disk.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import normswap

LAYERS, WIDTH, ROUNDS = 100, 2000, 7
SIDES = ("load_file, copied", "load_model", "load_file, mapped", "load_model, no digests", "save_file", "convert")


def build() -> nn.Module:
    """Norms and Linears without memory, so that what the weights cost is all that is timed."""
    with torch.device("meta"):
        return nn.Sequential(*[m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))])


def mapped(source: str) -> nn.Module:
    """The model, with what load_file maps."""
    model = build()
    model.load_state_dict(load_file(source), assign=True)
    return model


def work(side: str, folder: Path) -> Callable[[], object]:
    """What is timed of ``side``: "save_file" has its tensors in memory before."""
    source, out, copy = (str(folder / f"{name}.safetensors") for name in ("in", "out", "copy"))
    if side == "load_file, copied":
        return lambda: {name: tensor.clone() for name, tensor in load_file(source).items()}
    if side == "load_file, mapped":
        return lambda: mapped(source)
    if side == "save_file":
        state = {name: tensor.clone() for name, tensor in load_file(source).items()}
        return lambda: save_file(state, copy)
    if side == "convert":
        options = {"device": "cpu", "validate": "off", "force": True}
        return lambda: normswap.convert(source, out, "checkpoint_times:build", **options)
    return lambda: normswap.load_model(out, trust_factory=True, check_digests=side == "load_model")


def timed(side: str, folder: Path) -> None:
    """Print the seconds that ``side`` takes in this process: by the clock, and of the processors."""
    sys.path.insert(0, str(Path(__file__).parent))
    run = work(side, folder)
    os.sync()
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    kept = run()
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    print(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    del kept


def forget(folder: Path) -> None:
    """Take the files out of the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main(folder: Path, cold: bool) -> None:
    state = {name: torch.randn(tensor.shape) for name, tensor in build().state_dict().items()}
    size = sum(tensor.nbytes for tensor in state.values())
    save_file(state, folder / "in.safetensors")
    del state
    found: dict[str, list[tuple[float, ...]]] = {side: [] for side in SIDES}
    for number in range(ROUNDS + 1):
        for side in SIDES if number else ("convert", "save_file"):  # the first are over no old file
            if cold:
                forget(folder)
            done = subprocess.run(
                [sys.executable, __file__, side, str(folder)], capture_output=True, text=True, check=True
            )
            if number:
                found[side].append(tuple(map(float, done.stdout.split())))
    where = "on the disk" if cold else "in the page cache"
    print(f"{size / 1e9:.1f} GB {where}, {torch.get_num_threads()} threads, medians of {ROUNDS} processes each:")
    for what, column in (("seconds", 0), ("seconds of processors", 1)):
        one = {side: statistics.median(run[column] for run in runs) for side, runs in found.items()}
        print(f"{what}: {', '.join(f'{side} {seconds:.2f}' for side, seconds in one.items())}")
        copied, by_hand = one["load_file, copied"], one["load_file, mapped"]
        opened, unchecked = one["load_model"], one["load_model, no digests"]
        print(
            f"  load_model: {opened / copied:.2f} x load_file copied; without digests {unchecked / copied:.2f}, "
            f"{unchecked / by_hand:.2f} x load_file mapped; "
            f"convert: {one['convert'] / (copied + one['save_file']):.2f} x load_file copied + save_file"
        )


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in SIDES:
        timed(sys.argv[1], Path(sys.argv[2]))
    else:
        places = [argument for argument in sys.argv[1:] if argument != "--cold"]
        with tempfile.TemporaryDirectory(dir=places[0] if places else None) as name:
            main(Path(name), "--cold" in sys.argv)
