"""What the proof of a region holds its results, gradients and buffers to, as it is recorded: the limits, and what they
are about. After a change that is meant: python tests/test_region_limits.py, and read the differences."""

from __future__ import annotations

import json
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from region_checks import CHANNELS, IMAGES, ROWS
from test_magnitudes import drawn
from test_region_words import written
from torch import Tensor

import normswap
from normswap.proof import compare, prove, runs
from normswap.proof.comparison import Checks, Comparison

RECORD = Path(__file__).parent / "golden/limits.json"
OF_ROWS = [
    "return F.gelu(self.norm(x))",
    "return self.norm(x + y)",
    "s = x + y|return s + self.norm(s)",
    "s = x + y|return s + self.act(self.norm(s))",
    "return self.act(self.norm(x) * (1 + y[:, :1]) + x[:, :1])",
    "return self.rms(x) * (1 + y[:, :1]) + x[:, :1]",
    "return self.rms(x + y)",
    "return self.norm(x + y[:1])",
    "return F.layer_norm(x + y, (8,), self.weight, self.bias, 1e-5)",
    "return F.rms_norm(x + y, (8,), self.weight)",
    "return x / x.norm(dim=-1, keepdim=True)",
    "return F.normalize(x, dim=1) + y",
    "return x / x.norm() + y",
    "return x / x.abs().mean(-1, keepdim=True) * 2",
    "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight + y",
    "z = x.float()|z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6)|return self.weight * z.to(x.dtype) + y",
]
OF_IMAGES = [
    "return F.relu(self.gn(x))",
    "return F.leaky_relu(self.gn(x) + y, 0.3)",
    "return self.gn(x) + y",
    "z = self.gn(x)|return z * torch.sigmoid(z)",
    "return self.leaky(self.inorm(x))",
    "return self.act(self.inorm(x) + y)",
    "return F.relu(F.group_norm(x, 2, self.weight, self.bias))",
    "return F.relu(F.instance_norm(x, weight=self.weight))",
    "return F.relu(F.batch_norm(x, self.bn.running_mean, self.bn.running_var, self.weight))",
    "return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)",
    "return self.act(self.bn(x) + y)",
    "return self.act_(self.bn(self.conv(x)))",
    "return F.relu(self.bn(self.conv(x)) + y)",
]
BODIES = [*OF_ROWS, *OF_IMAGES]


def limits_of(cls: type[Any], shape: tuple[int, ...], dtype: torch.dtype, training: bool) -> list[list[Any]]:
    """What is compared in the proof: [what, c, sums of the magnitude, of what is added to the limit, of what is
    expected]."""
    module = cls()
    for index, (name, tensor) in enumerate(module.state_dict().items()):
        if tensor.is_floating_point():
            values = drawn(*tensor.shape, start=index + 2.0)
            tensor.copy_(values.abs() + 0.5 if "var" in name else values)
    module.to(dtype).train(training)
    x, y = drawn(*shape).to(dtype), drawn(*shape, start=7.0).to(dtype)
    found: list[list[Any]] = []

    class Noted(Checks):
        def add(
            self,
            what: str,
            ours: Tensor,
            eager: Tensor,
            wide: Tensor,
            size: Tensor,
            extra: Any = 0.0,
            c: float | None = None,
        ) -> None:
            sums = [float((each * drawn(*wide.shape, start=3.0).abs()).sum()) for each in (size, extra, wide)]
            found.append([what, self.c if c is None else c, *sums])
            super().add(what, ours, eager, wide, size, extra, c)

    def cotangent(self: Any, output: Tensor) -> Tensor:
        self.drawn = drawn(*output.shape, start=11.0).to(output.device)
        return self.drawn.to(output.dtype)

    def of_regions(compiled: Any, op: Any, *args: Any, **kwargs: Any) -> Comparison:
        if isinstance(op, runs.Swapped):
            return Comparison(kernel_ran=False)
        return compare.compare_region(compiled, op, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch.object(compare, "Checks", Noted))
        stack.enter_context(patch.object(compare.Cotangent, "__call__", cotangent))
        # A norm by itself is compared in the same way: this is about regions.
        stack.enter_context(patch.object(prove, "compare_region", of_regions))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        swapped = normswap.optimize(module, (x, y), validate="grad", min_speedup=None)
    assert all(row["status"] in ("wiring", "refused") for row in normswap.report(swapped).rows), cls
    return found


def limits(folder: Path) -> dict[str, list[list[Any]]]:
    found = {}
    for body, cls in zip(BODIES, written(BODIES, folder), strict=True):
        for dtype in (torch.float32, torch.bfloat16):
            for training in (False, True) if "bn" in body or "batch_norm" in body else (False,):
                name = f"{body}  [{str(dtype).removeprefix('torch.')}, {'training' if training else 'eval'}]"
                found[name] = limits_of(cls, ROWS if body in OF_ROWS else IMAGES, dtype, training)
    return found


def test_limits_are_as_recorded(tmp_path: Path) -> None:
    assert drawn(CHANNELS).unique().numel() == CHANNELS
    recorded, found = json.loads(RECORD.read_text()), limits(tmp_path)
    assert list(found) == list(recorded)
    for case, expected in recorded.items():
        assert [what for what, *_ in found[case]] == [what for what, *_ in expected], case
        for mine, numbers in zip(found[case], expected, strict=True):
            assert mine[1:] == pytest.approx(numbers[1:], rel=1e-6, abs=1e-12), (case, mine[0])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        made = limits(Path(place))
    lines = (f"{json.dumps(name)}: {json.dumps(entries)}" for name, entries in made.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
