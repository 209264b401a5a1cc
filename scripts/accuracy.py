"""Errors beside PyTorch's own: every kind, regime, dtype and mean, aligned and not, against float64.

    python scripts/accuracy.py

An error is told as a share of its limit (normswap/criterion.py): half an ulp of the dtype plus what float32 arithmetic
costs. Ours and PyTorch's are those of the same inputs.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import launch_plans
import torch
from tabulate import tabulate
from torch import Tensor, nn
from workloads import ChannelRMSNorm, L1Norm, LinearScaleBatchNorm, randomised

import normswap
from normswap import native
from normswap.criterion import RoundedStatistics, error_share
from normswap.kinds import kind_of, magnitudes
from normswap.plans import REGION, Match
from normswap.proof.comparison import Comparison
from normswap.proof.prove import Prover
from normswap.regions.listening import listening
from normswap.regions.rewrite import Compiled

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MEANS = (0.0, 100.0, 1000.0)
REGIMES = {"subwarp": 1, "warp": 2, "block": 3, "cluster": 4, "split": 5, "team": 6, "both": 7}
LENGTHS = {  # of rows, for each regime
    "subwarp": (7, 64, 127, 192),
    "warp": (130, 769, 1001, 1280),
    "block": (2050, 8192, 16383),
    "cluster": (2050, 20_000, 32_768, 65_535, 100_001),
    "split": (2050, 65_535, 262_146),
    "team": (33_000, 65_535, 262_146),
    "both": (2_500_004,),
}
SHORT_LENGTHS = {
    **{"subwarp": (7, 64, 192), "warp": (130, 1001, 1280), "block": (2050,), "cluster": (20_480, 40_001, 81_920)},
    **{"split": (2050,), "team": (33_000, 140_000), "both": (2_170_000,)},
}
ROWS = 5


PATHS: tuple[tuple[str, str, Callable[[], nn.Module], tuple[int, ...]], ...] = (
    ("group_norm", "channels_last", lambda: nn.GroupNorm(8, 64), (3, 64, 30, 31)),
    ("group_norm", "channels_last", lambda: nn.GroupNorm(3, 12), (2, 12, 5, 7)),
    ("l1_norm", "over channels", L1Norm, (3, 130, 20, 11)),
    ("rms_norm", "over channels", ChannelRMSNorm, (3, 130, 20, 11)),
    ("linear_scale_batch_norm", "eval", lambda: LinearScaleBatchNorm(48, 96), (300, 48)),
    ("linear_scale_batch_norm", "train", lambda: LinearScaleBatchNorm(48, 96), (300, 48)),
)
"""What is not done by rows: kind, path, module, shape."""


@dataclass(frozen=True)
class Setting:
    """One input of one kind; ``regime`` is a row regime that is forced, or names another path."""

    kind: str
    regime: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype
    mean: float
    shifted: bool = False
    """Whether the input starts between two multiples of 16 bytes."""

    def input(self) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(sum(self.shape))
        x = torch.randn(self.shape, generator=generator, device="cuda") + self.mean
        if self.regime == "channels_last":
            x = x.to(memory_format=torch.channels_last)
        if not self.shifted:
            return x.to(self.dtype)
        memory = torch.empty(x.numel() + 1, device="cuda", dtype=self.dtype)[1:]
        return memory.as_strided(x.shape, x.stride(), 1).copy_(x)

    def module(self) -> nn.Module:
        return randomised(self.make()).to("cuda", self.dtype).train(self.regime == "train")


def settings(
    lengths: dict[str, tuple[int, ...]] = LENGTHS,
    dtypes: Iterable[torch.dtype] = DTYPES,
    means: Iterable[float] = MEANS,
) -> Iterator[Setting]:
    """All of them: rows of ``lengths`` in each regime that can do them, then the kinds that have other paths."""
    for dtype, mean, shifted in itertools.product(dtypes, means, (False, True)):
        for regime, columns in itertools.chain.from_iterable(
            ((regime, n) for n in of) for regime, of in lengths.items()
        ):
            for kind, weights, make, shape in _row_kinds(columns):
                if can_be_done(columns, dtype, regime, shifted, weights):
                    yield Setting(kind, regime, make, shape, dtype, mean, shifted)
        for kind, path, make, shape in PATHS:
            if make is ChannelRMSNorm and dtype is not torch.float32:
                continue  # it rounds every step to 16 bits, which no kernel of ours does: such a call runs as it is
            yield Setting(kind, path, make, shape, dtype, mean, shifted)


def _row_kinds(columns: int) -> tuple[tuple[str, int, Callable[[], nn.Module], tuple[int, ...]], ...]:
    """Kind, weights that an element has of its own, module, shape."""
    wide = 2 - columns % 2  # channels of a group, of which each sample has four
    return (
        ("layer_norm", 2, lambda: nn.LayerNorm(columns), (ROWS, columns)),
        ("rms_norm", 1, lambda: nn.RMSNorm(columns, eps=1e-6), (ROWS, columns)),
        ("l1_norm", 0, L1Norm, (ROWS, columns)),
        ("group_norm", 0, lambda: nn.GroupNorm(4, 4 * wide), (2, 4 * wide, columns // wide)),
    )


def gpu_of_plans() -> dict[str, int]:
    """This GPU, as launch_plans.row_plan and launch_plans.column_plan want to know it."""
    device = torch.cuda.get_device_properties()
    return {
        "clusters": device.major in (9, 10),
        "shared": device.shared_memory_per_block_optin,
        "multiprocessors": device.multi_processor_count,
    }


def can_be_done(columns: int, dtype: torch.dtype, regime: str, shifted: bool, weights: int) -> bool:
    """Whether rows of so many columns, with so many weights an element, can be done in the regime on this GPU."""
    ragged = shifted or columns * dtype.itemsize % 16 > 0
    of = {"weights": weights, "ragged": ragged, "regime": REGIMES[regime]}
    return launch_plans.row_plan(ROWS, columns, dtype.itemsize, **of, **gpu_of_plans()) is not None


def forced(kind: str, module: Any, x: Tensor, regime: int) -> Tensor:
    """``module``'s norm of the rows of ``x``, in that regime."""
    out = torch.full_like(x, float("nan"))
    ops, alone = torch.ops.normswap, (None, None, None, 0, 0.0, 0.0)  # no options
    if kind == "layer_norm":
        ops.layer_norm(x, 1, module.weight, module.bias, module.eps, *alone, out, None, None, None, regime)
    elif kind == "rms_norm":
        ops.rms_norm(x, 1, module.weight, module.eps, 0.0, False, *alone, out, None, None, regime)
    elif kind == "l1_norm":
        ops.l1_norm(x, x.shape[-1], 0.0, 0.0, out, None, regime)
    else:
        behind = (0, 0.0, 0.0, None)  # no activation, no residual
        groups = (module.weight, module.bias, module.num_groups, module.eps)
        ops.group_norm(x, *groups, False, *behind, out, None, None, regime)
    return out


def shares(setting: Setting) -> tuple[float, float]:
    """The worst error of ours and of PyTorch's, as shares of their limit."""
    module, x = setting.module(), setting.input()
    swap, *_ = normswap.plan(module).swaps  # a BatchNorm in training is one by itself too
    with torch.no_grad():
        if setting.regime not in REGIMES:
            found = compared(swap.match, module, x, False)
            if not found.kernel_ran or (found.problem and found.share <= 1.0):
                raise RuntimeError(f"{setting}: {found.problem or 'our kernel did not run'}")
            return found.share, found.eager
        reference, magnitude = referee(swap.match, module, x)
        ours = forced(setting.kind, module, x, REGIMES[setting.regime])
        limited = (reference, magnitude, kind_of(swap.match).c)
        return error_share(ours, *limited), error_share(module(x), *limited)


class _Heard(Exception):
    """What the region is given was compared: its own statements need not run."""


class _One(Prover):
    def heard(self, compiled: Compiled, packed: Any) -> None:
        super().heard(compiled, packed)
        raise _Heard


def compared(match: Match, module: nn.Module, x: Tensor, gradients: bool) -> Comparison:
    """The swap of ``module``, or of the one region in its forward, on ``x``."""
    proof = _One(module, type(module), match, gradients, set())
    with suppress(_Heard):
        if match.kind != REGION:
            proof.heard(proof.compiled[0], x)
        with listening([proof]):
            copy.deepcopy(module)(x)
    (found,) = proof.comparisons()
    return found


def referee(match: Match, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The module's result in float64, and the magnitude its sums run through."""
    exact = copy.deepcopy(module).double()
    with RoundedStatistics(x.dtype) if match.kind == "l1_norm" else nullcontext():
        reference = exact(x.double())
    return reference, magnitudes(match, exact, x.double(), x.dtype).output


KINDS = tuple(dict.fromkeys(kind for kind, *_ in (*_row_kinds(2), *PATHS)))


def measure_all(kinds: Collection[str] = KINDS) -> list[dict[str, Any]]:
    """The worst of each of ``kinds``, and regime, dtype and mean, over lengths and alignments."""
    worst: dict[tuple[str, str, str, float], list[float]] = {}
    for setting in (setting for setting in settings() if setting.kind in kinds):
        key = (setting.kind, setting.regime, str(setting.dtype).removeprefix("torch."), setting.mean)
        found = worst.setdefault(key, [0.0, 0.0])
        found[:] = map(max, found, shares(setting))
    names = ("kind", "regime", "dtype", "mean")
    return [
        {**dict(zip(names, key, strict=True)), "ours": round(ours, 4), "pytorch": round(theirs, 4)}
        for key, (ours, theirs) in sorted(worst.items())
    ]


HEADERS = ("kind", *(str(dtype).removeprefix("torch.") for dtype in DTYPES))


def cells(found: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """By kind and dtype: the largest multiple of PyTorch's own error, and the largest share of the limit."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in found):
        told = []
        for dtype in HEADERS[1:]:
            rows = [row for row in found if (row["kind"], row["dtype"]) == (kind, dtype)]
            multiples = [row["ours"] / row["pytorch"] for row in rows if row["pytorch"] > 0.0]  # 0: PyTorch is exact
            multiple = f"{max(multiples):.2f}x" if multiples else "-"
            told.append(f"{multiple}, {max(row['ours'] for row in rows):.0%}")
        lines.append((kind, *told))
    return lines


def beyond(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What misses its limit."""
    return [row for row in found if row["ours"] > 1.0]


def table(found: list[dict[str, Any]]) -> str:
    """The same as a person reads it, and what is beyond its limit."""
    lines = tabulate(cells(found), HEADERS, disable_numparse=True)
    return "\n".join([lines, *(f"BEYOND ITS LIMIT: {row}" for row in beyond(found))])


def main() -> None:
    if not native.load(build=True).available:
        raise SystemExit("accuracy needs a CUDA device and the library")
    print(table(measure_all()))


if __name__ == "__main__":
    main()
