"""What a person is told who gave something else than was meant, or in whose model nothing is swapped."""

from __future__ import annotations

import gc
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from normswap.plans import Plan
from normswap.reports import Report


def how_to_give(inputs: Any) -> str:
    """How to pass example inputs that are neither a tensor nor a tuple."""
    if isinstance(inputs, Mapping):
        return "pass a dict as example_kwargs"
    if isinstance(inputs, list):
        return "pass tuple(example_inputs), or (example_inputs,) for one argument that is a list"
    if type(inputs).__module__.partition(".")[0] == "numpy":
        return "make a tensor of it: torch.from_numpy(example_inputs)"
    if isinstance(inputs, DataLoader | Iterator):
        return "pass one batch of it: next(iter(example_inputs))"
    return "put a single argument of another kind into a tuple: (argument,)"


def how_to_make(model: Any) -> str:
    """What to do with something that is given in the place of a model; "" where that is not known."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        return f"; make one: {model.__name__}(...)"
    if isinstance(model, Mapping):
        return "; load_state_dict it into a model first"
    if isinstance(model, torch.export.ExportedProgram):
        return "; optimize the model before exporting it"
    if isinstance(model, types.FunctionType | types.MethodType):
        return "; optimize the modules it calls"
    return ""


def optimizers_of(model: nn.Module) -> list[str]:
    """The names of the classes of the optimizers that hold parameters of ``model``."""
    parameters = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    # By type(), which runs no code of the objects: some are proxies that do things when they are looked at.
    found = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)] if parameters else []
    held = [one for one in found if any(id(p) in parameters for group in one.param_groups for p in group["params"])]
    return sorted({type(one).__name__ for one in held})


def gpu_of(model: nn.Module) -> str:
    """The name of the GPU that ``model`` is on; "" where it is on none."""
    place = next((t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"), None)
    return "" if place is None else torch.cuda.get_device_name(place)


def measured_elsewhere(plan: Plan, here: str) -> str:
    """What to say where ``plan`` was chosen by what was measured on another GPU than ``here``; "" where it was not."""
    if not here or plan.gpu in ("", here):
        return ""
    again = "measure again with normswap.optimize(normswap.revert(model), example_inputs, inplace=True)"
    return f"normswap: what is swapped was chosen by its speed on {plan.gpu}, and this is {here}; {again}"


def why_nothing(model: nn.Module, report: Report) -> str:
    """Why no site of ``model`` is swapped, in a few words."""
    if report.rows:
        became = {
            "slower": "put back, as they are not faster here",
            "declined": "put back, as the original's own statements run there",
            "identity": "put back, as the model asks for their class",
            "failed": "put back, as they did not match",
        }
        counts = {status: sum(row["status"] == status for row in report.rows) for status in (*became, "refused")}
        parts = [f"{count} {became.get(status, 'left alone')}" for status, count in counts.items() if count]
        return f"of {len(report.rows)} sites that were recognised {', '.join(parts)}; see normswap.report(model)"
    kinds = Counter(type(module).__name__ for module in model.modules() if "norm" in type(module).__name__.lower())
    if not kinds and isinstance(model, fx.GraphModule | torch.jit.ScriptModule):
        return "the model was scripted, traced or exported, and holds no modules any more: optimize it before that"
    if not kinds:
        return "the model holds no norm that is known"
    told = ", ".join(name if count == 1 else f"{name} ({count})" for name, count in kinds.items())
    return f"the model holds norms of no kind that is swapped: {told}"
