"""README's figures are those of the committed record, its outputs those of its code."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import benchmark
import demo
import digits
import picture
import pytest
import readme_tables
import record
import torch
from checkpoints import write_payload
from click.testing import CliRunner

import normswap
from normswap.cli import main

ROOT = Path(__file__).resolve().parent.parent
EXPRESSIONS = ROOT / "docs" / "expressions.md"
PROOF = ROOT / "docs" / "proof.md"
COMMANDS = ROOT / "docs" / "command_line.md"


def test_the_example_of_expressions_prints_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = EXPRESSIONS.read_text().split("<!-- expressions -->")[1].split("<!-- /expressions -->")[0]
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    runpy.run_path(str(tmp_path / "example.py"))
    # Errors and the name of the library's origin are this machine's.
    pattern = re.escape(re.sub(r"\d\S*%|\d\.\d+e-\d+", "@", shown)).replace(r"\[\.\.\.\]", ".*").replace("@", r"\S+")
    pattern = re.sub(r"(\\ )+", r"\\s+", pattern)
    assert re.fullmatch(pattern, capsys.readouterr().out, re.DOTALL)


def test_calls_are_listed_with_their_parameters() -> None:
    section = (ROOT / "README.md").read_text().split("## API")[1]
    listed = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", section, re.MULTILINE))
    whole = {name: given for name, given in listed.items() if "..." not in given}
    assert len(whole) > 10
    for name, given in whole.items():
        parameters = inspect.signature(getattr(normswap, name)).parameters.values()
        bare = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
        assert str(bare).replace("'", '"') == f"({given})"


def test_links_lead_to_files_and_every_document_is_reached() -> None:
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        file = waiting.pop()
        reached.add(file)
        links = re.findall(r"\]\((?!https?:)([^)#\s]+)", file.read_text())
        found = {(file.parent / link).resolve() for link in links}
        assert [path for path in found if not path.exists()] == []
        waiting += [path for path in found if path.suffix == ".md" and path not in reached]
    assert {*(ROOT / "docs").glob("*.md")} <= reached


def test_figures_are_the_record_s() -> None:
    known = record.load()
    found = readme_tables.tables(known)
    for file, names in readme_tables.FILES.items():
        text = file.read_text()
        assert readme_tables.filled(text, found, names) == text, "run python scripts/readme_tables.py"
    shown = picture.shows(readme_tables.PICTURE)
    assert shown == picture.digest(known["benchmark"]), "run python scripts/readme_tables.py"
    assert readme_tables.PICTURE.name in readme_tables.MORE.read_text()
    assert len(readme_tables.README.read_text().splitlines()) <= 200


def test_the_model_written_by_hand_gives_the_report_shown(tmp_path: Path) -> None:
    """All but the figures and what the machine's library is, which differ from one CPU to the next."""
    section = re.search(r"<!-- by hand -->(.*?)<!-- /by hand -->", EXPRESSIONS.read_text(), re.DOTALL)
    assert section is not None
    code, shown = re.findall(r"```(?:python)?\n(.*?)\n```", section[1], re.DOTALL)
    (tmp_path / "hand.py").write_text(code)
    ran = subprocess.run(
        [sys.executable, tmp_path / "hand.py"],
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )

    def stable(text: str) -> str:
        return re.sub(r"kernels: .*|\d+%|difference \S+ limit \S+", "_", text)

    assert stable(ran.stdout.strip()) == stable(shown)


def test_the_demo_puts_back_what_it_plants_and_folds(capsys: pytest.CaptureFixture[str]) -> None:
    """And the report is the one shown but for the figures, which are of a trained one, and the machine's library."""
    model = digits.build().eval()
    demo.trust(model)
    shown = re.search(r"<!-- demo -->\n```\n(.*?)\n```", PROOF.read_text(), re.DOTALL)
    assert shown is not None and without_errors(shown[1]) in without_errors(capsys.readouterr().out)
    demo.fold(model)
    assert "predictions equal" in capsys.readouterr().out


def test_without_a_gpu_the_demo_shows_the_headline_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    demo.speed()
    shown = capsys.readouterr().out
    titles = [benchmark.title(row) for row in record.load()["benchmark"] if "headline" in row["tags"]]
    assert len(titles) == 9 and all(title in shown for title in titles)
    assert len(shown.splitlines()) < 30


def without_errors(text: str) -> str:
    return re.sub(r"kernels: .*|[\d.]+%|(?<=difference )\S+|(?<=limit )\S+|(?<=error is )\S+", "_", text)


def test_the_command_line_says_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the figures, and what is left out as [...]."""
    section = re.search(r"<!-- command line -->\n```\n(.*?)\n```", COMMANDS.read_text(), re.DOTALL)
    assert section is not None
    monkeypatch.chdir(tmp_path)
    torch.save(digits.build().state_dict(), "digits.pt")
    write_payload(Path("net.bin"), tmp_path / "executed")
    for run in section[1].split("\n\n"):
        command, shown = run.split("\n", 1)
        result = CliRunner().invoke(main, shlex.split(command.removeprefix("$ normswap ")))
        expected = re.escape(without_figures(shown)).replace(re.escape("[...]"), "(?s:.*)")
        assert re.fullmatch(expected, without_figures(result.output.strip())), result.output


def without_figures(text: str) -> str:
    return re.sub(r"(difference )[\d.e-]+", r"\1_", text)
