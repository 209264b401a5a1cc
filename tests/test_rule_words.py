"""What is said of forwards of one or two lines, each a word away from another, where the whole forward is the pattern:
as it is recorded. After a change that is meant: python tests/test_rule_words.py, and read the differences."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from region_checks import loaded
from torch import nn

from normswap import rules
from normswap.plans import REGION, Match, Refusal
from normswap.regions.spec import Region

RECORD = Path(__file__).parent / "golden/rules.txt"
SIX = 6
HEAD = """
import torch
import torch.nn.functional as F
from test_rule_words import Parts

SCALE = torch.ones(6)


def helper(x):
    return x.abs().mean(1, keepdim=True)


def helped(x):
    return x / x.abs().mean(1, keepdim=True)

"""


class Parts(nn.Module):
    """All that some forward here reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(SIX)), nn.Parameter(torch.zeros(SIX))
        self.scale, self.tall = nn.Parameter(torch.ones(SIX)), nn.Parameter(torch.ones(SIX, 1))
        self.gemm, self.bn = nn.Linear(SIX, SIX), nn.BatchNorm1d(SIX)
        self.eps, self.dim, self.slope, self.flag, self.nothing = 1e-5, 1, 0.2, True, None

    def squared(self, x):
        return x.pow(2).mean(-1, keepdim=True)


def told(module: nn.Module) -> str:
    """What the rules say of it, in a line."""
    answer = rules.alone(module) or rules.find(module)
    if isinstance(answer, Match) and answer.kind == REGION:
        return f"    region: {', '.join(Region.from_json(data).name for data in answer.attributes['regions'])}"
    if isinstance(answer, Match):
        kept: dict[str, Any] = {key: value for key, value in answer.attributes.items() if key != "source"}
        return f"    {answer.kind} {kept}"
    if not isinstance(answer, Refusal):
        return "    nothing"
    return f"    {answer.kind}: {answer.reason.name}, {re.sub(' at line [0-9]+', '', answer.detail)}"


def answers(bodies: list[str], folder: Path) -> dict[str, list[str]]:
    """What is said in eval mode and, where that is another thing, in training."""
    text = HEAD
    for number, body in enumerate(bodies):
        lines = "".join(f"        {line}\n" for line in body.split("|"))
        text += f"\nclass Written{number}(Parts):\n    def forward(self, x):\n{lines}"
    (folder / "whole_forwards.py").write_text(text)
    module, found = loaded(folder / "whole_forwards.py"), {}
    for number, body in enumerate(bodies):
        cls = getattr(module, f"Written{number}")
        evaluated, training = told(cls().eval()), told(cls().train())
        found[body] = [evaluated, *([] if training == evaluated else [f"{training} (in training)"])]
    return found


def recorded() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in RECORD.read_text().splitlines():
        if line.startswith("    "):
            found[[*found][-1]].append(line)
        else:
            found[line] = []
    return found


def test_what_is_said_is_as_recorded(tmp_path: Path) -> None:
    expected = recorded()
    found = answers([*expected], tmp_path)
    for body, lines in expected.items():
        assert found[body] == lines, body


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        made = answers([*recorded()], Path(place))
    RECORD.write_text("".join(f"{line}\n" for body, lines in made.items() for line in (body, *lines)))
