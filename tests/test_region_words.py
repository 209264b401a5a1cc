"""What is found in forwards of one or two lines, each a word away from another: as it is recorded. After a change that
is meant: python tests/test_region_words.py, and read the differences."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from region_checks import Parts, loaded

import normswap
from normswap.regions.spec import Region

RECORD = Path(__file__).parent / "golden/regions.txt"
HEAD = """
from typing import Any

import torch
import torch.nn.functional as F
from region_checks import Parts

"""


def written(bodies: list[str], folder: Path) -> list[type[Parts]]:
    """A class for each body; its lines are separated by "|"."""
    text = HEAD
    for number, body in enumerate(bodies):
        lines = "".join(f"        {line}\n" for line in body.split("|"))
        text += f"\nclass Written{number}(Parts):\n    def forward(self, x, y):\n{lines}"
    file = folder / "forwards_of_a_word.py"
    file.write_text(text)
    module = loaded(file)
    return [getattr(module, f"Written{number}") for number in range(len(bodies))]


def told(found: Region) -> str:
    """A region in a line."""
    more: dict[str, Any] = {
        "steps": " ".join(f"{s.does}{s.operand or ''}{'.' if s.is_method else ''}" for s in found.steps),
        "activation": found.activation,
        "passes": found.passes,
        "if": found.conditions,
        "beside": tuple(found.beside),
        "apart": found.apart,
        "nodes": tuple(node.operands for node in found.nodes),
        "constants": dict(found.constants),
    }
    kept = ", ".join(f"{name} {value}" for name, value in more.items() if value)
    shared = f" ({'seen' if found.seen else 'shared'})" if found.shared else ""
    return f"    {found.name}{shared}: {found.kind}, {kept}"


def lines_of(module: torch.nn.Module) -> list[str]:
    plan = normswap.plan(module)
    regions = [r for s in plan.swaps if s.match.kind == "region" for r in s.match.attributes["regions"]]
    others = [f"    {s.match.kind} of all" for s in plan.swaps if not s.site.name and s.match.kind != "region"]
    return [told(Region.from_json(data)) for data in regions] + others


def found_in(bodies: list[str], folder: Path) -> dict[str, list[str]]:
    """What is found in eval mode and, where that is another thing, in training."""
    found = {}
    for body, cls in zip(bodies, written(bodies, folder), strict=True):
        evaluated, training = lines_of(cls().eval()), lines_of(cls().train())
        found[body] = evaluated + ([] if training == evaluated else ["    in training", *training])
    return found


def recorded() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in RECORD.read_text().splitlines():
        if line and not line.startswith("    "):
            found[line] = []
        elif line:
            found[[*found][-1]].append(line)
    return found


def test_what_is_found_is_as_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "forwards_of_a_word", raising=False)
    expected = recorded()
    found = found_in([*expected], tmp_path)
    for body, lines in expected.items():
        assert found[body] == lines, body


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = found_in([*recorded()], Path(folder))
    RECORD.write_text("".join(f"{line}\n" for body, lines in made.items() for line in (body, *lines)))
