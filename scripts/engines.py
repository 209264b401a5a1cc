"""Which sources a figure depends on: an engine of kernels, or the Python that calls them, each with a digest.

A figure was made by engines; an edit of one makes its figures stale and no others, and one of comments and docstrings
alone none. A translation unit belongs to the engines whose patterns its name fits, with every header it includes; one
that fits none belongs to all of them.
"""

from __future__ import annotations

import hashlib
import io
import re
import tokenize
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from normswap import builder, native

KERNELS = {
    "row": (
        "row_*",
        "layer_norm*",
        "rms_norm*",
        "l1_norm*",
        "l2_norm*",
        "frobenius_norm*",
        "group_norm*",
        "group_norm.cpp",
        "instance_norm*",
    ),
    "row_backward": (
        "row_backward*",
        "layer_norm_backward*",
        "rms_norm_backward*",
        "l1_norm_backward*",
        "column_sums*",
    ),
    "column": (
        "group_norm.cpp",
        "column_*",
        "channel_*",
        "group_norm_channels_last*",
    ),
    "group_backward": ("group_backward*", "group_columns*"),
    "dim": ("dim_*", "*_dim*"),
    "batch": ("*scale_batch_norm*", "affine*", "batch_*", "fold_*", "convol*", "depthwise*", "channel_*"),
}
"""The translation units of each engine, where the longest pattern that fits a name decides."""
BACKWARD = ("row_backward", "group_backward")
PYTHON, LINEAR, CONVOLUTION = "python", "linear", "convolution"
OPS = (
    "nodes/*.cpp",
    "nodes/*.h",
    "nodes/*.py",
    "ops/**/*.py",
    "forwards/**/*.py",
    "regions/**/*.py",
    "kinds/**/*.py",
    "reference.py",
    "activation.py",
    "installed.py",
    "modules.py",
    "norms.py",
    "native.py",
)
"""What is on the way of every call besides the kernels."""
READING = ("flow", "owner", "moving", "growing", "patterns", "formula", "through_methods")
"""Of regions/ what only reads forwards: as with rules/, what it finds shows in the plan. No call comes by it but the
first of a class that is new to a region."""
OPS_OF = {
    LINEAR: ("forwards/linear_scale_batch_norm.py",),
    CONVOLUTION: ("nodes/convolution.h", "ops/convolution.py", "regions/convolution.py", "regions/ending.py"),
}
"""Of those what is on the way of some calls alone: of Linear -> scale -> BatchNorm, which none of the whole models has,
and of images, behind whose convolutions a norm stands."""
ENGINES = (*KERNELS, PYTHON, *OPS_OF)

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_LITERAL_OR_COMMENT = re.compile(r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|//[^\n]*|/\*.*?\*/""", re.DOTALL)

OF_TESTS = {
    "test_row_norm.py": ("row", "row_backward", PYTHON),
    "test_row_norm_gradients.py": ("row", "row_backward", PYTHON),
    "test_row_regimes.py": ("row", PYTHON),
    "test_dim_norm.py": ("dim", PYTHON),
    "test_batch_norm.py": ("batch", PYTHON, CONVOLUTION),
    "test_batch_norm_eval.py": ("batch", PYTHON, CONVOLUTION),
    "test_batch_norm_train.py": ("batch", PYTHON, CONVOLUTION),
    "test_case_batch_norm.py": ("batch", PYTHON, CONVOLUTION),
    "test_linear_bias.py": ("batch", PYTHON, LINEAR),
    "test_group_norm.py": ("row", "column", "group_backward", PYTHON, CONVOLUTION),
    "test_activations.py": ("row", "column", *BACKWARD, PYTHON, CONVOLUTION),
    "test_instance_norm.py": ("row", "column", "group_backward", PYTHON, CONVOLUTION),
    "test_rms_by_hand.py": ("row", "row_backward", "dim", PYTHON),
    "test_row_backward.py": ("row", "row_backward", PYTHON),
    "test_narrow_rows.py": ("row", "row_backward", PYTHON),
    "test_group_backward.py": ("row", "column", "group_backward", PYTHON, CONVOLUTION),
    "test_train_casts.py": ("row", "column", *BACKWARD, PYTHON, CONVOLUTION),
    "test_convolution.py": ("batch", PYTHON, CONVOLUTION),
    "test_launched.py": ("batch", PYTHON, CONVOLUTION),
    "test_launched_norms.py": ("row", "column", *BACKWARD, PYTHON, CONVOLUTION),
}
"""What files of tests/gpu depend on; those that are not named here, on everything."""


def of_row(
    kind: str, *, channels_last: bool = False, over_channels: bool = False, backward: bool = False
) -> tuple[str, ...]:
    """The engines of a benchmarked row or a setting of the accuracy sweep."""
    if over_channels:
        return ("dim", "row_backward") if backward and kind == "layer_norm" else ("dim",)
    of_groups = kind in ("group_norm", "instance_norm")
    forward = ("column",) if channels_last and of_groups else owners(kind)
    if not backward or "batch" in forward:
        return forward
    return *forward, "group_backward" if of_groups else "row_backward"


OF_IMAGES = ("resnet", "densenet", "regnety", "efficientnet", "mobilenet")
"""How models are called whose norms are GroupNorms and BatchNorms alone."""
OF_ROWS = ("convnext", "vit", "swin", "mixer", "bert", "llama", "dit")
"""And those that have none of them."""


def of_model(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The engines of a whole model."""
    without = {LINEAR}
    if not row["training"]:
        without.update(BACKWARD)
    if row["model"].startswith(OF_IMAGES):
        without.add("dim")
    if row["model"].startswith(OF_ROWS):
        without.update((CONVOLUTION, "batch", "column", "group_backward"))
    return tuple(engine for engine in ENGINES if engine not in without)


def of_host(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The engines of a row of the host's time."""
    return (PYTHON, LINEAR) if row["module"].startswith("Linear") else (PYTHON,)


def of_tests(file: str) -> tuple[str, ...]:
    return OF_TESTS.get(file, ENGINES)


def digests(source_dir: Path | None = None, package: Path | None = None) -> dict[str, str]:
    """What names the sources of each engine now."""
    source_dir = source_dir or native.source_dir()
    package = package or native.PACKAGE
    units: dict[str, set[Path]] = {name: set() for name in KERNELS}
    for path in builder.sources(source_dir):
        if path.suffix in (".cpp", ".cu"):
            for name in owners(path.name):
                units[name] |= closure(path, source_dir)
    found = {name: _digest(paths, source_dir) for name, paths in units.items()}
    some = {
        engine: {package / name for name in names if (package / name).is_file()} for engine, names in OPS_OF.items()
    }
    reading = {package / "regions" / f"{name}.py" for name in READING}
    ops = {path for glob in OPS for path in package.glob(glob)}.difference(reading, *some.values())
    return found | {engine: _digest(paths, package) for engine, paths in {PYTHON: ops, **some}.items()}


def owners(name: str) -> tuple[str, ...]:
    """The engines to which a translation unit of that name belongs, or a kind in the usual layout."""
    fitting = {engine: max((len(p) for p in of if fnmatch(name, p)), default=0) for engine, of in KERNELS.items()}
    longest = max(fitting.values())
    return tuple(engine for engine, length in fitting.items() if length == longest) if longest else tuple(KERNELS)


def closure(path: Path, source_dir: Path) -> set[Path]:
    """A source with every header of ours that it includes, directly or not."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += _included(one, source_dir)
    return found


def _included(path: Path, source_dir: Path) -> list[Path]:
    places = [(path.parent / name, source_dir / name) for name in _INCLUDE.findall(path.read_text())]
    return [next(p.resolve() for p in pair if p.is_file()) for pair in places if any(p.is_file() for p in pair)]


def _digest(paths: Iterable[Path], top: Path) -> str:
    total = hashlib.sha256()
    for path in sorted({path.resolve() for path in paths}):
        content = _uncommented(path).encode()
        total.update(f"{path.relative_to(top.resolve()).as_posix()}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:16]


def _uncommented(path: Path) -> str:
    """The lines of a source that say something, without comments and docstrings."""
    text = path.read_text()
    code = _without_docstrings(text) if path.suffix == ".py" else _LITERAL_OR_COMMENT.sub(r"\1", text)
    return "\n".join(line.rstrip() for line in code.split("\n") if line.strip())


def _without_docstrings(text: str) -> str:
    """Python without its comments and the statements that are a string. By their places, so that every version of
    Python finds the same."""
    lines, gone = text.split("\n"), []
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            gone.append(token)
        elif token.type == tokenize.NEWLINE:
            if all(one.type == tokenize.STRING for one in statement):
                gone += statement
            statement = []
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            statement.append(token)
    for token in sorted(gone, key=lambda token: token.start, reverse=True):
        (first, start), (last, end) = token.start, token.end
        lines[first - 1 : last] = [lines[first - 1][:start] + lines[last - 1][end:]]
    return "\n".join(lines)
