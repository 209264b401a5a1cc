"""Imports inside the package go one way, files stay readable, and nothing names what is not in the repository."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from normswap.kinds import KINDS, NORMS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "normswap"

# For every module of the package, the modules of the package it may import.
MAY_IMPORT: dict[str, set[str]] = {
    "plans": set(),
    "activation": set(),
    "reference": {"activation"},
    "builder": set(),
    "in_float64": set(),
    "held": set(),
    "untouched": {"attributes", "held"},
    "native": {"builder"},
    "nodes_library": {"builder", "native"},
    "nodes": {"native", "nodes", "nodes_library", "ops"},
    "ops": {"activation", "native", "reference", "ops"},
    "installed": {"plans"},
    "forwards": {"activation", "installed", "ops", "plans", "forwards"},
    "norms": {"ops", "forwards"},
    "modules": {"kinds", "norms", "ops", "plans", "forwards", "installed", "regions"},
    "attributes": {"plans"},
    "source": {"plans", "attributes"},
    "regions": {
        *(
            "activation",
            "attributes",
            "forwards",
            "installed",
            "kinds",
            "in_float64",
            "ops",
            "plans",
            "regions",
            "untouched",
            "source",
        ),
    },
    "rules": {
        "kinds",
        "plans",
        "attributes",
        "installed",
        "source",
        "modules",
        "forwards",
        "regions",
        "rules",
        "untouched",
    },
    "finding": {"plans", "regions", "rules"},
    "swapping": {"attributes", "held", "plans", "installed", "modules", "regions", "untouched"},
    "kinds": {"activation", "criterion", "forwards", "kinds", "norms", "ops", "plans"},
    "criterion": set(),
    "progress": set(),
    "proof": {
        *(
            "arguments",
            "criterion",
            "installed",
            "kinds",
            "in_float64",
            "modules",
            "ops",
            "plans",
            "progress",
            "proof",
        ),
        *("held", "regions", "untouched"),
    },
    "reports": {"plans"},
    "uses": {"attributes", "held", "installed", "rules", "source", "untouched", "uses"},
    "folding": {
        "arguments",
        "uses",
        "copying",
        *("attributes", "plans", "reference", "installed", "modules", "forwards", "regions", "rules", "untouched"),
    },
    "timing": {
        "forwards",
        "installed",
        "progress",
        "plans",
        "native",
        "modules",
        "regions",
        "untouched",
        "proof",
        "timing",
    },
    "copying": {"plans"},
    "arguments": {"held"},
    "rollback": {"swapping", "plans", "proof", "timing"},
    "pipeline": {
        "arguments",
        "attributes",
        "rollback",
        "plans",
        "native",
        "nodes",
        "nodes_library",
        "installed",
        "finding",
        "swapping",
        "untouched",
        "proof",
        "timing",
        "copying",
        "reports",
    },
    "checkpoint.errors": {"plans"},
    "checkpoint.files": set(),
    "checkpoint.arrays": set(),
    "checkpoint.tensors": {"held", "checkpoint.arrays", "checkpoint.errors"},
    "checkpoint.distributed": {"checkpoint.errors", "checkpoint.tensors"},
    "checkpoint.reading": {"checkpoint.errors", "checkpoint.files", "checkpoint.tensors"},
    "checkpoint.models": {
        *("pipeline", "reports", "untouched", "checkpoint.errors", "checkpoint.reading", "checkpoint.tensors"),
    },
    "checkpoint.writing": {
        *("plans", "progress", "checkpoint.errors", "checkpoint.files", "checkpoint.models", "checkpoint.reading"),
        *("checkpoint.tensors",),
    },
    "checkpoint.conversion": {
        *("plans", "native", "folding", "pipeline", "reports", "checkpoint.errors", "checkpoint.models"),
        *("checkpoint.reading", "checkpoint.tensors", "checkpoint.writing"),
    },
    "checkpoint.load": {
        *("arguments", "native", "pipeline", "reports", "checkpoint.conversion", "checkpoint.errors"),
        *("checkpoint.files", "checkpoint.models", "checkpoint.reading", "checkpoint.tensors", "checkpoint.writing"),
    },
    "checkpoint": {
        *("checkpoint.conversion", "checkpoint.errors", "checkpoint.load", "checkpoint.models", "checkpoint.reading"),
        *("checkpoint.tensors",),
    },
    "cli.talk": {"progress"},
    "cli.summary": {"checkpoint.tensors"},
    "environment": {"builder", "native", "nodes"},
    "cli.inputs": {"checkpoint.errors", "checkpoint.models", "checkpoint.tensors"},
    "cli.options": {"progress", "checkpoint.errors", "cli.inputs"},
    "cli.bench": {"regions", "reports", "timing", "checkpoint.errors"},
    "cli.commands": {
        *("plans", "builder", "native", "nodes_library", "checkpoint", "checkpoint.errors", "checkpoint.models"),
        "checkpoint.reading",
        *("checkpoint.writing", "environment", "cli.bench", "cli.inputs", "cli.options", "cli.summary", "cli.talk"),
    },
    "cli": {"cli.commands"},
    "api": {
        *("plans", "rules", "folding", "modules", "pipeline", "reports"),
        *("checkpoint", "checkpoint.conversion"),
    },
    "__init__": {"api"},
    "integrations": set(),
    "integrations.together": {"plans"},
    "integrations.lightning": {"integrations.together"},
    "integrations.transformers": {"integrations.together", "plans"},
    "integrations.accelerate": {"integrations.together", "plans"},
    "integrations.diffusers": {"integrations.together", "reports", "untouched"},
}


def part(name: str) -> str:
    """Under which name of the table a module of the package, or a name in it, stands: the longest that fits."""
    names = name.split(".")
    fitting = (".".join(names[:end]) for end in range(len(names), 0, -1))
    return next((candidate for candidate in fitting if candidate in MAY_IMPORT), names[0])


def part_of(path: Path) -> str:
    """The name under which a file stands in the table."""
    names = path.relative_to(PACKAGE).with_suffix("").parts
    return part(".".join(names[:-1] if names[1:] and names[-1] in ("__init__", "__main__") else names))


def imported(source: str) -> set[str]:
    """The parts of the package that ``source`` imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {part(name.removeprefix("normswap.")) for name in names if name.startswith("normswap.")}
    return found


def relative_imports(source: str) -> int:
    return sum(isinstance(node, ast.ImportFrom) and node.level > 0 for node in ast.walk(ast.parse(source)))


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    source = path.read_text()
    assert part_of(path) in MAY_IMPORT, f"give {part_of(path)} a line in MAY_IMPORT"
    assert imported(source) <= MAY_IMPORT[part_of(path)]
    assert "unittest" not in source
    assert relative_imports(source) == 0, "write `from normswap import ...`"


def test_the_table_has_no_cycle() -> None:
    above: dict[str, set[str]] = {name: set(below) - {name} for name, below in MAY_IMPORT.items()}
    while above:
        ground = {name for name, below in above.items() if not below}
        assert ground, f"a cycle among {sorted(above)}"
        above = {name: below - ground for name, below in above.items() if name not in ground}


def test_imports_are_seen() -> None:
    assert imported("import normswap.ops") == {"ops"}
    assert imported("from normswap import native, plans") == {"native", "plans"}
    assert imported("def f():\n    from normswap.rules.l1_norm import match\n") == {"rules"}
    assert imported("from normswap.checkpoint.files import settle") == {"checkpoint.files"}
    assert imported("from normswap.checkpoint import files, load") == {"checkpoint.files", "checkpoint.load"}
    assert imported("from normswap.checkpoint import CheckpointError") == {"checkpoint"}
    assert imported("import torch\nfrom pathlib import Path") == set()
    assert relative_imports("from . import ops") == 1


def named_in(path: Path) -> set[str]:
    """The kinds that a file names in strings."""
    tree, every = ast.parse(path.read_text()), {*NORMS, *KINDS}
    return every & {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def test_only_the_files_of_the_kinds_list_them() -> None:
    """An op goes by the name of its kind: ops/ aside."""
    files = [path for path in FILES if path.relative_to(PACKAGE).parts[0] not in ("kinds", "ops")]
    found = {str(path): named for path in (*files, ROOT / "scripts/engines.py") if (named := named_in(path))}
    assert found and {name: named for name, named in found.items() if len(named) > 4} == {}
    assert {*NORMS} <= set[str]().union(*map(named_in, (PACKAGE / "kinds").glob("*.py")))


def test_builder_imports_only_the_standard_library() -> None:
    """The wheel build loads builder.py where nothing else is installed."""
    used = set()
    for node in ast.walk(ast.parse((PACKAGE / "builder.py").read_text())):
        if isinstance(node, ast.Import):
            used |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            used.add((node.module or "").partition(".")[0])
    assert used <= {*sys.stdlib_module_names}


def tracked() -> list[Path]:
    """The files of the repository, those not committed yet included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]


def test_files_can_be_read_in_a_sitting() -> None:
    code = [path for path in tracked() if path.relative_to(ROOT).parts[0] in ("normswap", "csrc", "scripts")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in code}
    assert len(lines) > 20
    assert {name: count for name, count in lines.items() if count > 500} == {}


def test_what_runs_on_a_gpu_alone_imports_what_there_is() -> None:
    """Here nothing else would tell."""
    own = {path.stem: path for folder in ("tests", "tests/gpu", "scripts") for path in (ROOT / folder).glob("*.py")}
    asked = 0
    for path in (*(ROOT / "tests/gpu").glob("*.py"), *(ROOT / "scripts").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] not in ("normswap", *own):
                continue
            module, names = str(node.module), {alias.name for alias in node.names}
            asked += len(names)
            there = names_in(own[module]) if module in own else names_of(module, names)
            assert names <= there, f"{path.relative_to(ROOT)}: {module} has no {', '.join(sorted(names - there))}"
    assert asked > 100


def names_of(module: str, names: set[str]) -> set[str]:
    """Those of ``names`` that can be imported from a module of the package."""
    found = importlib.import_module(module)
    inner = {one.name for one in pkgutil.iter_modules(getattr(found, "__path__", []))}
    return {name for name in names if name in inner or hasattr(found, name)}


def names_in(path: Path) -> set[str]:
    """What a file makes at its top, or imports."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_nothing_names_a_place_outside_the_repository() -> None:
    words = ["/work" + "/", "shared" + "/design", "shared" + "/kernels", "abi" + "_probe"]
    found = []
    for path in tracked():
        text = path.read_bytes().decode(errors="ignore")
        found += [f"{path.relative_to(ROOT)}: {word}" for word in words if word in text]
    assert found == []
