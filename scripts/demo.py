"""What scripts/demo runs: train, convert, reload; a planted error; fold; the speed on a GPU, or the record of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

import digits
import torch
from torch import nn

import normswap
from normswap.timing.clock import Machine, medians_us

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "demo"


def say(title: str) -> None:
    print(f"\n== {title}", flush=True)


def run(*command: str) -> str:
    """Run a command as a user would, show it and what it prints, and return that."""
    shown = " ".join(Path(c).name if c == sys.executable else c for c in command)
    print(f"$ {shown}", flush=True)
    done = subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        raise SystemExit(f"{shown} ended with {done.returncode}: {done.stderr}")
    return done.stdout


RELOAD = """
import digits, json, sys, torch, normswap
where = "cuda" if torch.cuda.is_available() else "cpu"
model = normswap.load_model(sys.argv[1], trust_factory=True, map_location=where)
_, _, images, _ = digits.data()
with torch.no_grad():
    predicted = model(images.to(next(model.parameters()).device)).argmax(1)
print(json.dumps({"swapped": len(normswap.report(model).swapped), "predictions": predicted.tolist()}))
"""


def convert_and_reload() -> nn.Module:
    say("1. Train a classifier on scikit-learn's digits, convert its checkpoint, reload it in a new process")
    started = time.perf_counter()
    model = digits.train()
    right = digits.accuracy(model)
    print(f"trained in {time.perf_counter() - started:.0f} s: {right:.1%} of the test images right")
    if right <= 0.95:
        raise SystemExit(f"the classifier should get more than 95% right, got {right:.1%}")
    OUT.mkdir(parents=True, exist_ok=True)
    checkpoint, converted = OUT / "digits.pt", OUT / "converted"
    torch.save(model.state_dict(), checkpoint)
    cli = (sys.executable, "-m", "normswap.cli")
    run(*cli, "inspect", str(checkpoint))
    options = ("--model", "digits:build", "--input", "float32[64,1,8,8]", "--force")
    run(*cli, "convert", str(checkpoint), str(converted), *options)
    _, _, images, _ = digits.data()
    with torch.no_grad():
        expected = model(images).argmax(1).tolist()
    print("$ python -c 'model = normswap.load_model(...); ...'")
    done = subprocess.run(
        [sys.executable, "-c", RELOAD, str(converted)], cwd=ROOT / "scripts", capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    if found["predictions"] != expected:
        raise SystemExit("the reloaded model predicts something else than the trained one")
    print(f"reloaded in a new process: {found['swapped']} sites swapped, all {len(expected)} predictions equal")
    return model


def trust(model: nn.Module) -> None:
    say("2. Trust: one site computes with an eps of 1e-3 instead of its own; only that site is put back")
    from normswap import modules, ops

    class Wrong(modules.LayerNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return ops.layer_norm(input, self.normalized_shape, self.weight, self.bias, 1e-3)

    right = modules._MODULE_CLASSES[nn.LayerNorm]
    modules._MODULE_CLASSES[nn.LayerNorm] = ("layer_norm", Wrong)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            swapped = normswap.optimize(model, digits.data()[0][:64], min_speedup=None)
    finally:
        modules._MODULE_CLASSES[nn.LayerNorm] = right
    report = normswap.report(swapped)
    print(report)
    failed = [row["name"] for row in report.rows if row["status"] == "failed"]
    if failed != ["norm"] or type(swapped.norm) is not nn.LayerNorm or len(report.swapped) != len(report.rows) - 1:
        raise SystemExit(f"only 'norm' should have been put back, got {failed}")


def fold(model: nn.Module) -> None:
    say("3. Fold: Linear -> scale -> BatchNorm as one plain nn.Linear, for deployment")
    folded = normswap.fold(model)
    _, _, images, _ = digits.data()
    with torch.inference_mode():
        if not torch.equal(model(images).argmax(1), folded(images).argmax(1)):
            raise SystemExit("the folded classifier predicts something else")
    before, after = len(model.state_dict()), len(folded.state_dict())
    print(f"{before} tensors before, {after} after; all {len(images)} predictions equal")
    for what, old, new, x in (
        ("the block alone, 1 image", model.projection, folded.projection, torch.randn(1, 64 * 4 * 4)),
        ("the whole classifier, 1 image", model, folded, images[:1]),
        ("the whole classifier, 64 images", model, folded, images[:64]),
    ):
        slow, fast = latencies(old, new, x)
        print(f"{what}, one CPU thread: {slow:.1f} us before, {fast:.1f} us after ({slow / fast:.2f}x)")


def latencies(before: nn.Module, after: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Median microseconds of a call of each, taken in turn, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        slow, fast = medians_us([lambda: before(x), lambda: after(x)], Machine(), 500)
    torch.set_num_threads(threads)
    return slow, fast


def speed() -> None:
    import benchmark
    import device_time
    import readme_tables
    import record

    if torch.cuda.is_available():
        say("4. Speed on this GPU")
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        shrink = next(s for s in (1, 2, 4, 8, 16) if s == 16 or memory / (56 / s) > 1.05)
        rate = device_time.copy_rate()
        print(benchmark.table(list(benchmark.measured(benchmark.chosen(["headline"], shrink), rate))))
        return
    say("4. Speed: this machine has no GPU. Recorded earlier on another machine, not here:")
    known = record.load()
    headline = [row for row in known["benchmark"] if "headline" in row["tags"]]
    rows, below = readme_tables.said_once(readme_tables.noted(known, headline, record.engines_of_row))
    print(readme_tables.measured_on(known, rows))
    starred = [{**row, "workload": ("* " if row.get("mark") else "") + row["workload"]} for row in rows]
    print(benchmark.table(starred) + below.replace(r"\*", "*"))
    print("\nWhole models stand in README.md, every row in docs/benchmark.md.")


def main() -> None:
    model = convert_and_reload()
    trust(model)
    fold(model)
    speed()
    print("\nDone.")


if __name__ == "__main__":
    main()
