"""What a person is told in whose model nothing is swapped, or what was chosen elsewhere."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx, nn

from normswap.plans import Plan
from normswap.reports import Report


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
