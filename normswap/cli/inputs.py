"""Example inputs, as one writes them on a command line."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from normswap.checkpoint.errors import failing
from normswap.checkpoint.models import call_function
from normswap.checkpoint.tensors import load_file

_SPEC = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dtype>[a-z]+\d*)\[(?P<shape>[\d, ]*)\](?::(?P<low>-?\d+)\.\.(?P<high>-?\d+))?"
)
_FILE = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<path>.+\.(safetensors|npy|pt))")
_FUNCTION = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<function>(\w+(\.\w+)*|[^:=]*\.py):\w+(\.\w+)*)")
_FLOATS = {d: getattr(torch, d) for d in ("float16", "bfloat16", "float32", "float64")}
_INTEGERS = {d: getattr(torch, d) for d in ("uint8", "int8", "int16", "int32", "int64")}
_FORMS = (
    "[name=]float32[8,3,224,224], [name=]int64[2,128]:0..30521, [name=]FILE (.safetensors, .npy or .pt) or "
    "[name=]pkg.module:function"
)


class Inputs(NamedTuple):
    """What a model is called with."""

    positional: tuple[Any, ...]
    named: dict[str, Any]


def make_inputs(specs: Sequence[str]) -> Inputs:
    """The positional and named inputs that ``specs`` describe, in their order, on the CPU.

    ``float32[8,3]`` is drawn from a standard normal, ``int64[2,128]:0..9`` uniformly with both ends included,
    ``bool[4]`` evenly; ``name=`` makes it a keyword argument. ``FILE.safetensors`` stands for its tensors by name, or
    for a positional one when it holds only one; ``FILE.npy`` for one array; ``FILE.pt``, read as data alone, and what
    ``pkg.module:function`` returns for one input, a tuple or list for several, a dict for those by name. The same specs
    give the same values.

    Raises ValueError for a malformed spec or a name given twice, CheckpointError for an unreadable file or a function
    that fails.
    """
    generator = torch.Generator().manual_seed(0)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for spec in specs:
        for name, value in _inputs_of(spec, generator):
            if name is None:
                positional.append(value)
            elif name in named:
                raise ValueError(f"input {name!r} is given twice")
            else:
                named[name] = value
    return Inputs(tuple(positional), named)


def _inputs_of(spec: str, generator: torch.Generator) -> list[tuple[str | None, Any]]:
    if match := _SPEC.fullmatch(spec):
        return [(match["name"], _drawn(spec, match, generator))]
    if match := _FILE.fullmatch(spec):
        return _read(spec, match["name"], Path(match["path"]))
    if match := _FUNCTION.fullmatch(spec):
        with redirect_stdout(sys.stderr):
            return _returned(match["name"], call_function(match["function"]))
    raise ValueError(f"input {spec!r} is not {_FORMS}")


def _read(spec: str, name: str | None, path: Path) -> list[tuple[str | None, Any]]:
    if path.suffix == ".npy":
        with failing(f"{path}: cannot be read", (OSError, ValueError, TypeError, EOFError)):
            return [(name, torch.from_numpy(np.load(path)))]
    loaded, _ = load_file(path)
    if path.suffix == ".pt":
        return _returned(name, loaded)
    if len(loaded) == 1:
        return [(name, next(iter(loaded.values())))]
    if name:
        raise ValueError(f"input {spec!r}: the file holds {len(loaded)} tensors, which have names of their own")
    return list(loaded.items())


def _returned(name: str | None, value: Any) -> list[tuple[str | None, Any]]:
    if name is not None:
        return [(name, value)]
    if isinstance(value, Mapping):
        return [(str(key), entry) for key, entry in value.items()]
    return [(None, entry) for entry in value] if isinstance(value, tuple | list) else [(None, value)]


def _drawn(spec: str, match: re.Match[str], generator: torch.Generator) -> Tensor:
    try:
        shape = [int(size) for size in match["shape"].split(",")] if match["shape"].strip() else []
    except ValueError as error:
        raise ValueError(f"input {spec!r}: the shape is not a list of sizes") from error
    try:
        return _values(match, shape, generator)
    except (ValueError, RuntimeError, TypeError) as error:  # for a size or a range that torch cannot take, too
        raise ValueError(f"input {spec!r}: {str(error).splitlines()[0]}") from error


def _values(match: re.Match[str], shape: list[int], generator: torch.Generator) -> Tensor:
    dtype = match["dtype"]
    if dtype in _INTEGERS:
        if match["low"] is None:
            raise ValueError(f"integers need a range, as in {dtype}[2,128]:0..30521")
        low, high = int(match["low"]), int(match["high"])
        if low > high:
            raise ValueError("the range is empty")
        return torch.randint(low, high + 1, shape, generator=generator, dtype=_INTEGERS[dtype])
    if match["low"] is not None:
        raise ValueError("only integers take a range")
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype in _FLOATS:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(_FLOATS[dtype])
    raise ValueError(f"dtype {dtype!r} is not one of {', '.join((*_FLOATS, *_INTEGERS, 'bool'))}")
