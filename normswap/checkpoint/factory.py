"""The model a checkpoint belongs to: built by a function of the person's, by timm, diffusers or transformers."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from normswap.checkpoint.errors import CheckpointError, one_line

HERE = "hf:."
"""The factory of a folder that holds its own config.json."""

PICKLED = "pickle:"
"""The factory of a file that holds the pickled model itself."""

FORMS = "pkg.module:function, ./file.py:function, timm:NAME or hf:DIR"

_SPEC = re.compile(r"(?P<module>\w+(\.\w+)*|[^:]*\.py):(?P<attribute>\w+(\.\w+)*)")


def is_code(factory: str) -> bool:
    """Whether the factory names code to import, or a place outside the checkpoint's own folder."""
    return not factory.startswith("timm:") and factory not in (HERE, "")


def settled(factory: str) -> str:
    """The factory as it is kept: with the whole path where it names a file."""
    found = _SPEC.fullmatch(factory)
    if found is None or not found["module"].endswith(".py"):
        return factory
    return f"{Path(found['module']).resolve()}:{found['attribute']}"


def build_model(factory: str, kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """Build the model of "pkg.module:function" or "./file.py:function", which is imported and called with ``kwargs``.

    This runs the code named; modules beside the file, or in the current folder, can be imported where nothing else has
    their name. Raises CheckpointError, with the original error's type, message and place, when the name is malformed,
    the module cannot be imported, the function is missing or raises, or when what it returns is not an ``nn.Module``.
    """
    what = f"model factory {factory}"
    model = called(what, lambda: _function(what, factory)(**dict(kwargs or {})), factory)
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"{what} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def call_function(spec: str) -> Any:
    """Import and call "pkg.module:function". Raises CheckpointError as ``build_model`` does."""
    return called(f"function {spec}", lambda: _function(f"function {spec}", spec)(), spec)


def called(what: str, build: Callable[[], Any], spec: str = "") -> Any:
    """What ``build`` returns, which imports ``spec`` where that is given. Raises CheckpointError for what it raises."""
    try:
        with _importable(spec) if spec else nullcontext():
            return build()
    except CheckpointError:
        raise
    except (Exception, SystemExit) as error:
        raise CheckpointError(f"{what} raised {told(error)}") from error


@contextmanager
def _importable(spec: str) -> Iterator[None]:
    """Modules in the current folder, or beside the file that ``spec`` names, can be imported in the block, after all
    others: none takes the place of a library."""
    folder = str(Path(spec.rpartition(":")[0]).resolve().parent if ".py:" in spec else Path.cwd())
    sys.path.append(folder)
    try:
        yield
    finally:
        if folder in sys.path:
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(folder)]


def _function(what: str, spec: str) -> Callable[..., Any]:
    named = _SPEC.fullmatch(spec)
    if named is None:
        raise CheckpointError(f"model factory {spec!r} is not written {FORMS}")
    found: object = imported(what, named["module"])
    for name in named["attribute"].split("."):
        if not hasattr(found, name):
            raise CheckpointError(f"{what}: {named['module']} has no {named['attribute']}")
        found = getattr(found, name)
    if isinstance(found, nn.Module) or not callable(found):
        raise CheckpointError(f"{what}: a {type(found).__name__}, not a function that returns a model")
    return found


def imported(what: str, module: str) -> Any:
    """The module of that name, or path. Raises CheckpointError."""
    try:
        return _from_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise CheckpointError(f"{what}: module {module} cannot be imported: {told(error)}") from error


def _from_file(path: Path) -> ModuleType:
    """The module in a file, under its plain name unless that is another's."""
    place = os.path.realpath(path)
    known = sys.modules.get(path.stem)
    if known is not None and os.path.realpath(getattr(known, "__file__", None) or "") == place:
        return known
    other = None if known is not None else importlib.util.find_spec(path.stem)
    free = known is None and (other is None or os.path.realpath(other.origin or "") == place)
    name = path.stem if free else f"_normswap_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def told(error: BaseException) -> str:
    """The error in one line, with where in the person's code it arose."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f.filename != __file__ and not f.filename.startswith("<")
    ]
    where = (
        f" ({frames[-1].filename}, line {frames[-1].lineno})"
        if frames and "importlib" not in frames[-1].filename
        else ""
    )
    return one_line(error) + where
