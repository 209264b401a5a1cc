"""The check that a module with regions in its forward computes what it did, whatever happens to it."""

from __future__ import annotations

import copy
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import randomised
from torch import Tensor, nn

import normswap
from normswap.regions.spec import Region

CHANNELS = 8
ROWS, IMAGES = (2, 3, CHANNELS), (2, CHANNELS, 3, 5)


class Parts(nn.Module):
    """All that some forward here calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2, self.rms = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS), nn.RMSNorm(CHANNELS)
        self.bare = nn.LayerNorm(CHANNELS, elementwise_affine=False)
        self.gn, self.gn2 = nn.GroupNorm(2, CHANNELS), nn.GroupNorm(4, CHANNELS)
        self.bn, self.bn3 = nn.BatchNorm2d(CHANNELS), nn.BatchNorm3d(CHANNELS)
        self.inorm = nn.InstanceNorm2d(CHANNELS, affine=True)
        self.act, self.act_ = nn.GELU(), nn.ReLU(inplace=True)
        self.leaky, self.drop, self.identity = nn.LeakyReLU(0.2), nn.Dropout(0.5), nn.Identity()
        self.lin, self.conv = nn.Linear(CHANNELS, CHANNELS), nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.weight, self.bias = nn.Parameter(torch.ones(CHANNELS)), nn.Parameter(torch.zeros(CHANNELS))
        self.se: Any = None
        self.flag = True
        self.slope, self.dim = 0.2, 1


@dataclass(frozen=True)
class Case:
    """A forward of (self, x, y). ``found``: the names of its regions in order; ``shapes`` of x and y; ``change`` comes
    before the swap, ``later`` after it; ``exact``: bit for bit on a CPU, else within float32's rounding; ``base``: what
    it calls."""

    forward: Callable[..., Any]
    found: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = (ROWS, ROWS)
    change: Callable[[Any], Any] | None = None
    later: Callable[[Any], Any] | None = None
    exact: bool = True
    modes: tuple[str, ...] = ("train", "eval")
    base: type[nn.Module] = Parts


def hook(name: str) -> Any:
    return lambda model: model.get_submodule(name).register_forward_hook(lambda module, args, out: out * 3)


def pre_hook(name: str) -> Any:
    return lambda model: model.get_submodule(name).register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def put(path: str, make: Any) -> Any:
    """A change that sets an attribute to what ``make`` gives."""
    *parents, name = path.split(".")
    return lambda model: setattr(model.get_submodule(".".join(parents)), name, make())


def overlaid(name: str, **attributes: Any) -> Any:
    """Puts a class over that of a child, as FSDP and parametrizations do."""

    def change(model: Any) -> None:
        child = model.get_submodule(name)
        child.__class__ = type("Overlaid", (type(child),), attributes)

    return change


def loaded(path: Path) -> types.ModuleType:
    """The module of the file at ``path``, whose source can be read."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def written(forward: Callable[..., Any], base: type[nn.Module] = Parts) -> nn.Module:
    """A module with that forward."""
    return type("Written", (base,), {"forward": forward})()


def regions_in(model: nn.Module, name: str = "") -> tuple[str, ...]:
    """The names of the regions that are planned in the module called ``name``."""
    swaps = [s for s in normswap.plan(model).swaps if s.site.name == name and s.match.kind == "region"]
    return tuple(Region.from_json(data).name for swap in swaps for data in swap.match.attributes["regions"])


def check(case: Case, mode: str, device: str = "cpu", runs: Sequence[bool] = (False, True, True)) -> None:
    """The regions of ``case`` are found, and swapped it does what the original does, in ``runs`` without gradients and
    with. Bit for bit on a CPU, where those of ours that record gradients are PyTorch's ops."""
    torch.manual_seed(0)
    model = randomised(written(case.forward, case.base)).to(device).train(mode == "train")
    if case.change is not None:
        case.change(model)
    inputs = tuple(torch.randn(shape, device=device) for shape in case.shapes)
    assert regions_in(model) == case.found
    swapped = swap(model)
    for module in (swapped, model) if case.later else ():
        torch.manual_seed(1)
        case.later(module)
    assert_same(swapped, model, inputs, case.exact and device == "cpu" and True in runs, runs)


def swap(model: nn.Module) -> Any:
    """A copy of ``model`` with all swapped, unproved."""
    return normswap.apply(copy.deepcopy(model), normswap.plan(model))


def assert_same(
    swapped: nn.Module,
    model: nn.Module,
    inputs: tuple[Any, ...],
    exact: bool = True,
    runs: Sequence[bool] = (False, True, True),
) -> None:
    """Outputs, what is written into the inputs and into buffers, and gradients."""
    parameters = dict(model.named_parameters())
    for learning in runs:
        ours, theirs = (outcome(one, inputs, learning) for one in (swapped, model))
        if isinstance(theirs, str) or isinstance(ours, str):
            assert ours == theirs, (ours, theirs)
            continue
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].shape == tensor.shape and ours[name].dtype == tensor.dtype, name
            rtol, atol = (0.0, 0.0) if exact else (1e-4, 2e-5)
            if exact or name not in parameters:
                torch.testing.assert_close(ours[name], tensor, rtol=rtol, atol=atol, equal_nan=True)
            else:
                assert_near(ours[name], tensor, partial(_in_float64, model, inputs, name), name, rtol, atol)


def assert_near(ours: Tensor, theirs: Tensor, exact: Callable[[], Tensor], name: str, rtol: float, atol: float) -> None:
    """A gradient of a parameter: as near to the float64 result as ``theirs``, PyTorch's, twice over, and a tolerance.
    Before a BatchNorm it is what is left of sums that cancel, all of them or nearly."""
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
    if torch.allclose(ours, theirs, rtol, atol, equal_nan=True):
        return
    wide = exact()
    off = float((theirs - wide).abs().max())
    assert off <= 1e-4 * (1 + float(wide.abs().max())), f"{name}: PyTorch's own error is {off:.3g}"
    torch.testing.assert_close(
        ours.double(), wide, rtol=rtol, atol=atol + 2 * off, msg=lambda told: f"{name}, PyTorch {off:.3g} off: {told}"
    )


def _in_float64(model: nn.Module, inputs: tuple[Any, ...], name: str) -> Tensor:
    wide = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
    found = outcome(copy.deepcopy(model).double(), wide, True)
    assert isinstance(found, dict), found
    return found[name]


def outcome(module: nn.Module, inputs: tuple[Any, ...], learning: bool) -> dict[str, Tensor] | str:
    """What one call gives by name, or what it raises."""
    leaves = [x.clone().requires_grad_(learning) if isinstance(x, Tensor) else x for x in inputs]
    given = [x * 1 if isinstance(x, Tensor) else x for x in leaves]  # a forward may write into it
    module.zero_grad()
    torch.manual_seed(2)
    try:
        with torch.set_grad_enabled(learning):
            out = module(*given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    outputs = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, Tensor)]
    found = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
    found |= {f"input {i}": t.detach().clone() for i, t in enumerate(given) if isinstance(t, Tensor)}
    found |= {name: buffer.clone() for name, buffer in module.named_buffers()}
    wanted = [t for t in outputs if t.requires_grad]
    if wanted:
        given_back = [torch.cos(torch.arange(t.numel(), device=t.device).to(t)).view(t.shape) for t in wanted]
        try:
            torch.autograd.backward(wanted, given_back)
        except RuntimeError as error:
            return f"backward: {type(error).__name__}: {str(error).splitlines()[0]}"
        gradients = {f"gradient {i}": x.grad for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        gradients |= {name: p.grad for name, p in module.named_parameters()}
        found |= {name: g.clone() for name, g in gradients.items() if g is not None}
    return found
