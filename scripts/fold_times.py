"""What folding for deployment gains on a CPU: milliseconds of a forward at batch 1, the two models taking turns, and
the share of it that batch_norm takes; for a contiguous one also the folded one laid out as channels_last, weights and
input. By the wall's clock, or with --processor in the time of the processors, which others who use the machine do not
lengthen as much.

python scripts/fold_times.py [--threads N] [--rounds N] [--processor]
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable

import torch
from resnet import resnet50
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import normswap
from normswap.timing.clock import Machine, medians_us


def mobile(width: int = 32, blocks: int = 8) -> nn.Module:
    """Pointwise and depthwise convolutions, each with a BatchNorm, as in MobileNets."""
    children: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6()]
    for index in range(blocks):
        stride = 2 if index % 3 == 2 else 1
        wide = 4 * width
        children += [nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        children += [nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        children += [nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)]
    return nn.Sequential(*children)


LAST = torch.channels_last
MODELS: dict[str, Callable[[], nn.Module]] = {"resnet50": resnet50, "mobile": mobile}


class Processor(Machine):
    """The processors' time, of all threads."""

    def now_us(self) -> float:
        return 1e6 * time.process_time()


def norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processor", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    clock = Processor() if given.processor else Machine()
    for name, make in MODELS.items():
        for layout in (torch.contiguous_format, LAST):
            torch.manual_seed(0)
            model = make().eval().to(memory_format=layout)
            x = torch.randn(1, 3, 224, 224).contiguous(memory_format=layout)
            print(f"{name}, {str(layout)[6:]}: {compared(model, x, given.rounds, clock)}")


def share_of_norms(model: nn.Module, x: Tensor) -> float:
    """Of the time of a forward."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model(x)
    found = {event.key: event.cpu_time_total for event in seen.key_averages()}
    return found["aten::batch_norm"] / sum(event.self_cpu_time_total for event in seen.key_averages())


def compared(model: nn.Module, x: Tensor, rounds: int, clock: Machine) -> str:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        folded = normswap.fold(model)
        error = float((folded(x) - model(x)).abs().max() / model(x).abs().max())
        last, given = copy.deepcopy(folded).to(memory_format=LAST), x.contiguous(memory_format=LAST)
        calls = [lambda: model(x), lambda: folded(x), *([lambda: last(given)] if given is not x else [])]
        before, after, *more = medians_us(calls, clock, rounds)
    with torch.no_grad():  # the profiler has warnings of its own
        share = share_of_norms(model, x)
    laid_out = "".join(f" ({before / us:.2f}x as channels_last)" for us in more)
    return (
        f"{norms(model)} -> {norms(folded)} BatchNorms, {before / 1e3:.1f} -> {after / 1e3:.1f} ms, "
        f"{before / after:.2f}x{laid_out}, {share:.0%} in batch_norm, largest difference {error:.1e}"
    )


if __name__ == "__main__":
    main()
