"""The model a checkpoint belongs to: built by a function the person names, then filled strictly."""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Mapping

from torch import Tensor, nn

from normswap.tensors import CheckpointError, listed, one_line

_SPEC = re.compile(r"(?P<module>\w+(\.\w+)*):(?P<attribute>\w+(\.\w+)*)")


def build_model(factory: str) -> nn.Module:
    """Import and call ``factory``, written ``pkg.module:function``, and return the model it makes.

    This runs the code named. Raises CheckpointError, with the original error's type, message and place, when
    the name is malformed, the module cannot be imported, the function is missing or raises, or when what it
    returns is not an ``nn.Module``.
    """
    spec = _SPEC.fullmatch(factory)
    if spec is None:
        raise CheckpointError(f"model factory {factory!r} is not written pkg.module:function")
    try:
        found: object = importlib.import_module(spec["module"])
    except (Exception, SystemExit) as error:
        raise CheckpointError(
            f"model factory {factory}: module {spec['module']} cannot be imported: {_told(error)}"
        ) from error
    for name in spec["attribute"].split("."):
        if not hasattr(found, name):
            raise CheckpointError(f"model factory {factory}: {spec['module']} has no {spec['attribute']}")
        found = getattr(found, name)
    if isinstance(found, nn.Module) or not callable(found):
        raise CheckpointError(f"model factory {factory}: a {type(found).__name__}, not a function that returns a model")
    try:
        model = found()
    except (Exception, SystemExit) as error:
        raise CheckpointError(f"model factory {factory} raised {_told(error)}") from error
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"model factory {factory} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def load_strictly(model: nn.Module, tensors: Mapping[str, Tensor], source: object) -> None:
    """``model.load_state_dict(tensors)``, every key and shape required to fit; ``source`` names them in errors.

    Raises CheckpointError listing up to ten missing and unexpected keys, or up to ten wrong shapes; ``model`` may then
    be partly filled.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise CheckpointError(f"{source}: {type(model).__name__} was built on the meta device; build it on the CPU")
    try:
        keys = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
        problem = "; ".join(lines[:10]) or one_line(error)
        raise CheckpointError(f"{source}: does not fit {type(model).__name__}: {problem}") from error
    except Exception as error:  # a module's own loading code may raise anything
        raise CheckpointError(f"{source}: does not fit {type(model).__name__}: {_told(error)}") from error
    problems = [
        f"{len(names)} {what}: {listed(list(names))}"
        for what, names in (("missing", keys.missing_keys), ("unexpected", keys.unexpected_keys))
        if names
    ]
    if problems:
        raise CheckpointError(f"{source}: keys do not fit {type(model).__name__}: {'; '.join(problems)}")


def _told(error: BaseException) -> str:
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
