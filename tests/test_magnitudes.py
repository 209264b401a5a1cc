"""The magnitudes that the proof's limits are made of, as they were recorded: one that is larger than it was lets errors
pass that nobody would see. After a change that is meant: python tests/test_magnitudes.py, and read the differences."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from linear_scale_models import block, found_in, one_line
from torch import Tensor, nn

from normswap import kinds
from normswap.criterion import Magnitudes
from normswap.kinds.l2_norm import euclidean
from normswap.plans import Match
from normswap.proof.product_bounds import LinearMagnitudes
from normswap.regions.spec import Region

RECORD = Path(__file__).parent / "golden/magnitudes.json"


def drawn(*shape: int, start: float = 1.0) -> Tensor:
    """Numbers of either sign about 0, the same with every version of PyTorch."""
    count = int(torch.Size(shape).numel())
    return torch.sin((torch.arange(count, dtype=torch.float64) + start) * 1.7).reshape(shape)


def filled(module: nn.Module, training: bool = False) -> nn.Module:
    """``module`` in float64 with such numbers in it; variances are above 0."""
    for index, (name, tensor) in enumerate(module.double().state_dict().items()):
        if tensor.is_floating_point():
            values = drawn(*tensor.shape, start=index + 2.0)
            tensor.copy_(values.abs() + 0.5 if "var" in name else values)
    return module.train(training)


def without_batches(module: nn.Module) -> nn.Module:
    module.num_batches_tracked = None
    return module


ROWS, IMAGE = drawn(3, 4, 6), drawn(2, 6, 3, 4)
SITES: dict[str, tuple[str, Callable[[], nn.Module], Tensor]] = {
    "layer": ("layer_norm", lambda: nn.LayerNorm(6, eps=1e-3), ROWS),
    "layer, no bias": ("layer_norm", lambda: nn.LayerNorm(6, bias=False), ROWS),
    "layer, nothing": ("layer_norm", lambda: nn.LayerNorm((4, 6), elementwise_affine=False), ROWS),
    "layer, one row": ("layer_norm", lambda: nn.LayerNorm((3, 4, 6)), ROWS),
    "rms": ("rms_norm", lambda: nn.RMSNorm(6, eps=1e-3), ROWS),
    "rms, no eps": ("rms_norm", lambda: nn.RMSNorm(6, elementwise_affine=False), ROWS),
    "group": ("group_norm", lambda: nn.GroupNorm(2, 6), IMAGE),
    "group, nothing": ("group_norm", lambda: nn.GroupNorm(3, 6, affine=False), IMAGE),
    "instance": ("instance_norm", lambda: nn.InstanceNorm2d(6, affine=True), IMAGE),
    "instance, no batch": ("instance_norm", lambda: nn.InstanceNorm2d(6, affine=True), IMAGE[0]),
    "batch, eval": ("batch_norm", lambda: nn.BatchNorm2d(6).eval(), IMAGE),
    "batch, eval, nothing": ("batch_norm", lambda: nn.BatchNorm2d(6, affine=False).eval(), IMAGE),
    "batch, eval, untracked": ("batch_norm", lambda: nn.BatchNorm2d(6, track_running_stats=False).eval(), IMAGE),
    "batch": ("batch_norm", lambda: nn.BatchNorm2d(6), IMAGE),
    "batch, nothing": ("batch_norm", lambda: nn.BatchNorm2d(6, affine=False), IMAGE),
    "batch, average": ("batch_norm", lambda: nn.BatchNorm2d(6, momentum=None), IMAGE),
    "batch, not counted": ("batch_norm", lambda: without_batches(nn.BatchNorm2d(6, momentum=None)), IMAGE),
    "batch, untracked": ("batch_norm", lambda: nn.BatchNorm2d(6, track_running_stats=False), IMAGE),
    "batch, one row": ("batch_norm", lambda: nn.BatchNorm2d(6), IMAGE[:1, :, :1, :1]),
    "batch, two rows": ("batch_norm", lambda: nn.BatchNorm2d(6), IMAGE[:, :, :1, :1]),
}
BY_HAND = {
    "plain": {"dim": -1, "eps": 1e-3},
    "weight": {"dim": -1, "eps": "eps", "weight": "weight", "weight_offset": 1.0},
    "rounds": {"dim": 1, "eps": 1e-6, "weight": "narrow", "weight_offset": "offset", "cast_before_weight": True},
}
DTYPES = {"": torch.float32, " in float16": torch.float16, " in bfloat16": torch.bfloat16}


def columns() -> Iterator[tuple[str, nn.Module]]:
    for name, options in {
        "": {},
        ", nothing": {"affine": False, "linear_bias": False},
        ", average": {"momentum": None},
        ", untracked": {"track_running_stats": False},
        ", one scale": {"scale": ()},
    }.items():
        yield f"columns{name}", block(one_line, **options)
    yield "columns, not counted", block(one_line, momentum=None)


def found() -> Iterator[tuple[str, Magnitudes]]:
    """Every case."""
    for name, (kind, made, x) in SITES.items():
        module = made()
        yield name, kinds.magnitudes(Match(kind), filled(module, module.training), x, torch.float32)
    reads = {"read.normalized_shape": 6, "read.weight": "gain", "read.bias": "offset", "read.eps": 1e-3}
    registered = nn.Module()
    registered.gain, registered.offset = nn.Parameter(drawn(6, start=3)), nn.Parameter(drawn(6, start=4))
    yield "registered", kinds.magnitudes(Match("layer_norm", reads), registered, ROWS, torch.float32)
    for suffix, dtype in DTYPES.items():
        for name, attributes in BY_HAND.items():
            site = nn.Module()
            site.eps, site.offset = 1e-2, 0.5
            site.weight, site.narrow = nn.Parameter(drawn(6, start=3)), nn.Parameter(drawn(4, start=4))
            yield f"by hand, {name}{suffix}", kinds.magnitudes(Match("rms_norm", attributes), site, ROWS, dtype)
        for eps, minimum in ((0.0, None), (0.1, None), (-0.1, None), (0.0, 0.6), (0.05, 0.6)):
            attributes = {"dim": 1, "eps": eps, "minimum": minimum}
            yield (
                f"l1, {eps}, {minimum}{suffix}",
                kinds.magnitudes(Match("l1_norm", attributes), nn.Module(), ROWS, dtype),
            )
        for eps in (0.0, 1.2):
            norm = ROWS.norm(dim=1, keepdim=True)
            yield f"l2, {eps}{suffix}", euclidean(ROWS, norm, eps, dtype)
            yield f"frobenius, {eps}{suffix}", euclidean(ROWS, ROWS.norm(), eps, dtype)
    for name, module in columns():
        match, _ = found_in(module)
        region = Region.from_json(match.attributes["regions"][0])
        for training in (False, True):
            site = filled(module, training)
            if name.endswith("not counted"):
                without_batches(site.bn)  # type: ignore[arg-type]
            for rows in (1, 2, 5) if training else (5,):
                made = LinearMagnitudes(region, site._modules, drawn(rows, 6), site.scale).magnitudes(2.0**-9)
                yield f"{name}, {rows} rows{' in training' if training else ''}", made


def numbers(made: Magnitudes) -> dict[str, list[float]]:
    """Of each tensor its sum, and one that tells its elements apart."""
    tensors: dict[str, Any] = {"output": made.output, "coarse": made.coarse}
    tensors |= {f"d {name}": t for name, t in made.gradients(drawn(*made.output.shape, start=5.0)).items()}
    tensors |= made.buffers | {f"coarse {name}": t for name, t in made.coarse_buffers.items()}
    known = {name: t.detach().ravel() for name, t in tensors.items() if t is not None}
    return {name: [float(t.sum()), float(t @ drawn(len(t), start=9.0).abs())] for name, t in known.items()}


def test_magnitudes_are_as_recorded() -> None:
    recorded, made = json.loads(RECORD.read_text()), {name: numbers(each) for name, each in found()}
    assert list(made) == list(recorded)
    for case, expected in recorded.items():
        assert list(made[case]) == list(expected), case
        for name, values in expected.items():
            assert made[case][name] == pytest.approx(values, rel=1e-9, nan_ok=True), (case, name)


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(numbers(made))}" for name, made in found())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
