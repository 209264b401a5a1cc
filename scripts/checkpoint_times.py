"""How long a conversion and an opening take, beside safetensors' own load_file and save_file: python
scripts/checkpoint_times.py [FOLDER]. It writes about 5 GB there."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import normswap

LAYERS, WIDTH = 100, 2000


def build() -> nn.Module:
    """Norms and Linears without memory, so that what the weights cost is all that is timed."""
    with torch.device("meta"):
        return nn.Sequential(*[m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))])


def taken(work: Callable[[], object]) -> float:
    os.sync()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    state = {name: torch.randn(tensor.shape) for name, tensor in build().state_dict().items()}
    source, out, copy = (str(folder / f"{name}.safetensors") for name in ("in", "out", "copy"))
    save_file(state, source)
    options = {"device": "cpu", "validate": "off", "force": True}
    works: dict[str, Callable[[], object]] = {
        "load_file, in memory": lambda: {name: tensor.clone() for name, tensor in load_file(source).items()},
        "load_model, no digests": lambda: normswap.load_model(out, trust_factory=True, check_digests=False),
        "load_model": lambda: normswap.load_model(out, trust_factory=True),
        "save_file": lambda: save_file(state, copy),
        "convert": lambda: normswap.convert(source, out, "checkpoint_times:build", **options),
    }
    works["convert"]()
    rounds = [{name: taken(work) for name, work in works.items()} for _ in range(3)]
    best = {name: min(found[name] for found in rounds) for name in works}
    size = sum(tensor.nbytes for tensor in state.values())
    print(f"{size / 1e9:.1f} GB, best of {len(rounds)}, seconds: {', '.join(f'{n} {t:.1f}' for n, t in best.items())}")
    memory, base = best["load_file, in memory"], best["load_file, in memory"] + best["save_file"]
    print(
        f"load_model: {best['load_model'] / memory:.2f} x load_file, {best['load_model, no digests'] / memory:.2f} "
        f"without digests; convert: {best['convert'] / base:.2f} x load_file + save_file"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        main(Path(name))
