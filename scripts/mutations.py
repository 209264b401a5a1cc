"""Weaker and missing conditions of normswap's files, as changes of their text, and those that change nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

WHERE = (
    *("rules", "forwards", "regions", "kinds", "proof", "timing"),
    *("source.py", "attributes.py", "finding.py", "held.py", "untouched.py", "modules.py", "norms.py", "swapping.py"),
    *("rollback.py", "criterion.py", "in_float64.py", "folding.py", "uses"),
)
"""The files of normswap/ whose conditions decide what is swapped and what is believed; those of them that are there."""
WEAKER = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_EQUIVALENT = """
proof/pieces.py: what fits is one piece, cut out whole
    not dims or size * sample <= SLICE_ELEMENTS
    (not dims)
proof/compare.py: the first problem stays: the rest is compared for nothing
    found[-1].problem
    (False)
kinds/batch_norm.py: in eval PyTorch raises for a BatchNorm that has one of them alone
    site.running_mean is None and site.running_var is None
    (site.running_mean is None)
kinds/l1_norm.py: two values are of two types at most
    {*map(type, given[1:])} <= {int, float, str, type(None)}
    ({*map(type, given[1:])} < {int, float, str, type(None)})
forwards/__init__.py: a longer way to the same tensor
    name in found and name not in own
    (False)
in_float64.py: they are two, and no two have as many bits
    _BITS[dtype] < _BITS[role.dtype]
    (_BITS[dtype] <= _BITS[role.dtype])
regions/growing.py: used twice is only what has a name, and a flow gives one to what is assigned as it is
    isinstance(statement, ast.Assign) and statement.value is op.node
    (isinstance(statement, ast.Assign))
proof/compare.py: a CPU has no kernel to witness
    witness and self.x.is_cuda
    (witness)
regions/inline.py: a copy is read then, more slowly
    not any(isinstance(one, types.FunctionType) and _line_of(one) is not None for one in functions)
    (False)
regions/spelling.py: only norms have a p
    "norm" in name and "p" in bound and name != "normalize"
    ('p' in bound and name != 'normalize')
regions/inline.py: nothing is copied to what has no place
    hasattr(node, "lineno")
    (True)
held.py: what is deleted is put back
    name not in before
    (True)
forwards/linear_scale_batch_norm.py: of a BatchNorm in eval there are both or none
    bn.training or mean is None or var is None
    (bn.training or mean is None)
forwards/linear_scale_batch_norm.py: of a BatchNorm in eval there are both or none
    bn.training or mean is None or var is None
    (bn.training or var is None)
uses/reader.py: of no function there is no parameter
    function is not None and parameter is not None
    (parameter is not None)
uses/reader.py: in nothing there is no module
    item is not None
    (True)
regions/moving.py: of a norm that updates nothing, nothing is written
    norm.updates and norm.function is op.target
    (norm.function is op.target)
proof/comparison.py: a longer way to the same verdict
    ours.dtype == eager.dtype and 0 < ours.numel() <= _AT_ONCE
    (False)
proof/comparison.py: a longer way to the same verdict
    share <= 1.0 and theirs < math.inf
    (False)
proof/comparison.py: a longer way to the same verdict
    share <= 1.0
    (share < 1.0)
"""
EQUIVALENT = {
    (path, old.strip(), new.strip()): why.strip()
    for told, old, new in zip(*[iter(_EQUIVALENT.strip().splitlines())] * 3, strict=True)
    for path, _, why in [told.partition(": ")]
}
"""Mutations that change nothing that can be seen, and why: (file of normswap/, old, new). They are not tried."""


@dataclass(frozen=True)
class Mutation:
    """``old``, at these offsets of the file's bytes, becomes ``new``."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def applied(self, source: str) -> str:
        """The file's text with it, line for line; closures keep their variables, for the old text stays there."""
        text = source.encode()
        return b"".join(
            [text[: self.start], f"({self.new} if True else ({self.old}))".encode(), text[self.end :]]
        ).decode()

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {' '.join(self.old.split())}  ->  {' '.join(self.new.split())}"


def mutations(path: str, source: str) -> list[Mutation]:
    """Every weaker or missing condition of a file, in its order, each once."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[tuple[int, int, str], Mutation] = {}
    for node, new in _weakened(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        old = source.encode()[start:end].decode()
        if (path.removeprefix("normswap/"), " ".join(old.split()), new) not in EQUIVALENT:
            found.setdefault((start, end, new), Mutation(path, node.lineno, start, end, old, new))
    return [found[key] for key in sorted(found)]


def _weakened(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Expressions, and what stands in the place of each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test, "(False)"
            if not isinstance(node, ast.While):
                yield node.test, "(True)"
        elif isinstance(node, ast.comprehension):
            yield from ((condition, "(True)") for condition in node.ifs)
        elif isinstance(node, ast.BoolOp):
            for left_out in range(len(node.values)):
                rest = [value for index, value in enumerate(node.values) if index != left_out]
                kept = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
                yield node, f"({ast.unparse(kept)})"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, f"({ast.unparse(node.operand)})"
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in WEAKER:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            yield node, f"({left} {WEAKER[type(node.ops[0])]} {right})"
        elif isinstance(node, ast.Return) and node.value is not None and _is_truth(node.value):
            yield node.value, "(True)"
            yield node.value, "(False)"


def _is_truth(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("all", "any", "bool", "isinstance")
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def files(names: Sequence[str], root: Path) -> list[str]:
    """The files of normswap/ that are meant, as paths from the root."""
    chosen: list[Path] = []
    for name in names or [name for name in WHERE if (root / "normswap" / name).exists()]:
        path = root / "normswap" / name.removeprefix("normswap/")
        found = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            raise SystemExit(f"no such file in normswap/: {name}")
        chosen += found
    return [path.relative_to(root).as_posix() for path in chosen]


def functions(source: str) -> dict[int, str]:
    """By line inside a function: its name, behind those around it. Other lines run at import."""
    around: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):  # outer ones come first
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = range(node.lineno, (node.end_lineno or 0) + 1)
            around |= {line: f"{around.get(line, '')}.{node.name}" for line in lines}
    return around
