"""The model a checkpoint belongs to: built by a function of the person's, by timm, or by transformers."""

from __future__ import annotations

import contextlib
import importlib
import re
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from normswap.checkpoint.construct import LeftOnMetaError, build_lean, load_strictly
from normswap.checkpoint.errors import CheckpointError, MissingError, one_line, read_json

HERE = "hf:."
"""The factory of a folder that holds its own config.json."""

PICKLED = "pickle:"
"""The factory of a file that holds the pickled model itself."""

FORMS = "pkg.module:function, timm:NAME or hf:DIR"

_SPEC = re.compile(r"(?P<module>\w+(\.\w+)*):(?P<attribute>\w+(\.\w+)*)")
_TIMM_NAME = re.compile(r"\w+(\.\w+)*")
_OUTSIDE = ("pretrained", "checkpoint", "cache_dir", "trust_remote", "code_revision")


def is_code(factory: str) -> bool:
    """Whether the factory names code to import, or a place outside the checkpoint's own folder."""
    return not factory.startswith("timm:") and factory != HERE


def build_model(factory: str, kwargs: Mapping[str, Any] | None = None, *, folder: Path | None = None) -> nn.Module:
    """Build the model that ``factory`` names, with ``kwargs``: "pkg.module:function" is imported and called,
    "timm:NAME" is made by timm, "hf:DIR" by transformers from DIR/config.json ("hf:." from ``folder``).

    This runs the code named. Raises CheckpointError, with the original error's type, message and place, when
    the name is malformed, the module cannot be imported, the function is missing or raises, or when what it
    returns is not an ``nn.Module``.
    """
    model = _called(f"model factory {factory}", _builder(factory, dict(kwargs or {}), folder))
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"model factory {factory} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def build_filled(
    factory: str, kwargs: Mapping[str, Any], state: Mapping[str, Any], source: object, folder: Path
) -> nn.Module:
    """``build_model`` filled with ``state``; its parameters take no memory of their own where that can be had.

    Raises CheckpointError as ``build_model`` and ``load_strictly`` do.
    """
    lean = build_lean(_builder(factory, dict(kwargs), folder))
    if lean is not None:
        with contextlib.suppress(LeftOnMetaError):  # what has memory from the start is built the ordinary way
            load_strictly(lean, state, source)
            return lean
    model = build_model(factory, kwargs, folder=folder)
    load_strictly(model, state, source)
    return model


def call_function(spec: str) -> Any:
    """Import and call "pkg.module:function". Raises CheckpointError as ``build_model`` does."""
    return _called(f"function {spec}", _function(f"function {spec}", spec))


def _called(what: str, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except CheckpointError:
        raise
    except (Exception, SystemExit) as error:
        raise CheckpointError(f"{what} raised {told(error)}") from error


def _builder(factory: str, kwargs: dict[str, Any], folder: Path | None) -> Callable[[], Any]:
    kind, _, name = factory.partition(":")
    if kind in ("timm", "hf"):
        outside = [key for key in kwargs if key.startswith(_OUTSIDE)]
        if outside:
            raise CheckpointError(
                f"model factory {factory}: {', '.join(outside)} cannot be given, weights come from the file"
            )
    if kind == "timm":
        return _timm(name, kwargs)
    if kind == "hf":
        return partial(_transformers, factory, _config_folder(factory, folder), kwargs)
    return partial(_function(f"model factory {factory}", factory), **kwargs)


def _function(what: str, spec: str) -> Callable[..., Any]:
    named = _SPEC.fullmatch(spec)
    if named is None:
        raise CheckpointError(f"model factory {spec!r} is not written {FORMS}")
    found: object = _imported(what, named["module"])
    for name in named["attribute"].split("."):
        if not hasattr(found, name):
            raise CheckpointError(f"{what}: {named['module']} has no {named['attribute']}")
        found = getattr(found, name)
    if isinstance(found, nn.Module) or not callable(found):
        raise CheckpointError(f"{what}: a {type(found).__name__}, not a function that returns a model")
    return found


def _imported(what: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise CheckpointError(f"{what}: module {module} cannot be imported: {told(error)}") from error


def _library(factory: str, name: str) -> Any:
    try:
        return _imported(f"model factory {factory}", name)
    except CheckpointError as error:
        raise MissingError(f"{error}; install {name}") from error


# --- timm and transformers ----------------------------------------------------------------------------------------


def _timm(name: str, kwargs: dict[str, Any]) -> Callable[[], Any]:
    factory = f"timm:{name}"
    if not _TIMM_NAME.fullmatch(name):
        raise CheckpointError(
            f"model factory {factory!r}: not a plain timm model name, as in timm:vit_tiny_patch16_224"
        )
    timm = _library(factory, "timm")
    if not timm.is_model(name):
        raise CheckpointError(f"model factory {factory}: timm {timm.__version__} has no model of that name")
    return partial(timm.create_model, name, pretrained=False, **kwargs)


def _config_folder(factory: str, folder: Path | None) -> Path:
    name = factory.partition(":")[2]
    found = folder if factory == HERE and folder is not None else Path(name)
    if not name or not (found / "config.json").is_file():
        raise CheckpointError(f"model factory {factory}: no folder with a config.json")
    return found


def _transformers(factory: str, folder: Path, kwargs: dict[str, Any]) -> Any:
    """The architecture that config.json names, by transformers' own class alone: no code of the folder runs."""
    config_file = folder / "config.json"
    data = read_json(config_file)
    names = data.get("architectures") if isinstance(data, dict) else None
    if not isinstance(names, list) or len(names) != 1:
        raise CheckpointError(f"{config_file}: names no single architecture; pass --model pkg.module:function")
    if _names_a_kernel_elsewhere([data, kwargs]):
        raise CheckpointError(f"{config_file}: names kernels of another place; remove attn_implementation")
    if data.get("quantization_config"):
        raise CheckpointError(f"{config_file}: a quantized model; convert the weights it was made from")
    transformers = _library(factory, "transformers")
    cls: Any = getattr(transformers, str(names[0]), None)
    if not _is_subclass(cls, transformers.PreTrainedModel):
        raise CheckpointError(
            f"{config_file}: transformers {transformers.__version__} has no architecture {names[0]!r}; "
            "pass --model pkg.module:function"
        )
    config = transformers.AutoConfig.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False, **kwargs
    )
    model: nn.Module = cls._from_config(config)
    model.tie_weights()  # type: ignore[operator]
    return model


def _names_a_kernel_elsewhere(value: Any) -> bool:
    """Whether an attn_implementation in ``value``, however deep, is a repository to download code from."""
    if isinstance(value, Mapping):
        own = any(str(key).endswith("attn_implementation") and "/" in str(entry) for key, entry in value.items())
        return own or any(map(_names_a_kernel_elsewhere, value.values()))
    return isinstance(value, list) and any(map(_names_a_kernel_elsewhere, value))


def _is_subclass(value: object, of: type) -> bool:
    return isinstance(value, type) and issubclass(value, of)


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
