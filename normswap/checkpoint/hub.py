"""Models of libraries: a folder as they save it, opened by their own code from its own files, and never from a hub."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from normswap.checkpoint.construct import check_keys, load_strictly
from normswap.checkpoint.errors import CheckpointError, MissingError, read_json
from normswap.checkpoint.factory import HERE, called, imported

_TIMM_NAME = re.compile(r"\w+(\.\w+)*")
_OUTSIDE = (
    *(
        "pretrained",
        "checkpoint",
        "cache_dir",
        "trust_remote",
        "code_revision",
        "revision",
        "local_files",
        "state_dict",
    ),
    *("weights_only", "gguf", "from_", "adapter", "_adapter", "kernel", "use_kernels", "quantization", "subfolder"),
)
"""How arguments begin that would take weights or code from elsewhere, or read them in another way."""

_CURE = "pass --model pkg.module:function"


def open_library(
    factory: str, kwargs: Mapping[str, Any], state: Mapping[str, Any], source: Path, dtype: torch.dtype | None
) -> nn.Module:
    """The model of "timm:NAME" or of the config.json in the folder of "hf:DIR" ("hf:.": that of the file ``source``),
    with the tensors of ``state``, in eval mode: "hf:." as ``from_pretrained`` of its library opens the folder, in the
    file's dtypes or, but for what the library keeps in float32, in ``dtype``. Nothing is fetched, and no code of the
    folder runs.

    Raises CheckpointError when it cannot be, MissingError when the library is not installed.
    """
    _check_arguments(factory, kwargs)
    if factory.startswith("timm:"):
        return _timm(factory, factory[len("timm:") :], dict(kwargs), state, source, dtype)
    folder = source.parent if factory == HERE else Path(factory.partition(":")[2])
    config_file = folder / "config.json"
    if not factory.partition(":")[2] or not config_file.is_file():
        raise CheckpointError(f"model factory {factory}: no folder with a config.json")
    config = read_json(config_file)
    if not isinstance(config, dict):
        raise CheckpointError(f"{config_file}: not an object")
    _check_config(config_file, [config, dict(kwargs)])
    if isinstance(config.get("architecture"), str) and "architectures" not in config:
        name = config["architecture"]
        _check_arguments(f"timm:{name}", config.get("model_args") or {})
        return _timm(f"timm:{name}", name, _timm_kwargs(config, kwargs), state, source, dtype)
    if dtype is not None:
        kwargs = {**kwargs, "torch_dtype" if "_class_name" in config else "dtype": dtype}
    if "_class_name" in config:
        return _diffusers(factory, folder, config, dict(kwargs))
    return _transformers(factory, folder, config, dict(kwargs), None if factory == HERE else state)


def _check_arguments(factory: str, kwargs: Mapping[str, Any]) -> None:
    if outside := [key for key in kwargs if key.startswith(_OUTSIDE)]:
        raise CheckpointError(
            f"model factory {factory}: {', '.join(outside)} cannot be given, weights come from the file"
        )


def _check_config(path: Path, values: list[Any]) -> None:
    if found := next(_elsewhere(values), None):
        raise CheckpointError(f"{path}: {found}")
    if isinstance(values[0], dict) and values[0].get("quantization_config"):
        raise CheckpointError(f"{path}: a quantized model; convert the weights it was made from")


def _elsewhere(value: Any) -> Iterator[str]:
    """What in a config, however deep, asks for something from another place."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if str(key).endswith("attn_implementation") and "/" in str(entry):
                yield "names kernels of another place; remove attn_implementation"
            if key in ("use_pretrained_backbone", "pretrained_backbone") and entry:
                yield f"asks for weights of another place; set {key} to false"
            yield from _elsewhere(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _elsewhere(entry)


@contextmanager
def offline() -> Iterator[None]:
    """In the block no library asks a hub for anything, whatever a config says."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "DIFFUSERS_OFFLINE")
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, dict.fromkeys(names, "1")))
        flags = {"huggingface_hub.constants": "HF_HUB_OFFLINE", "transformers.utils.hub": "_is_offline_mode"}
        for module, name in flags.items():
            if hasattr(sys.modules.get(module), name):
                stack.enter_context(patch.object(sys.modules[module], name, True))
        _forget_sessions()
        stack.callback(_forget_sessions)
        yield


def _forget_sessions() -> None:
    """huggingface_hub keeps connections that were made before it was told."""
    forget = getattr(sys.modules.get("huggingface_hub.utils._http"), "reset_sessions", None)
    if forget is not None:
        forget()


def _library(factory: str, name: str) -> Any:
    with offline():
        try:
            return imported(f"model factory {factory}", name)
        except CheckpointError as error:
            raise MissingError(f"{error}; install {name}") from error


def _class(config_file: Path, library: Any, name: object, base: str) -> Any:
    cls = getattr(library, str(name), None)
    if not (isinstance(cls, type) and issubclass(cls, getattr(library, base))):
        raise CheckpointError(
            f"{config_file}: {library.__name__} {library.__version__} has no architecture {name!r}; {_CURE}"
        )
    return cls


def _transformers(
    factory: str, folder: Path, config: Mapping[str, Any], kwargs: dict[str, Any], state: Mapping[str, Any] | None
) -> nn.Module:
    """The architecture that config.json names, as ``from_pretrained`` fills it from the folder, or from ``state``."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise CheckpointError(f"{folder / 'config.json'}: names no single architecture; {_CURE}")
    transformers = _library(factory, "transformers")
    cls = _class(folder / "config.json", transformers, names[0], "PreTrainedModel")
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if "torch_dtype" not in kwargs:
        kwargs.setdefault("dtype", "auto")

    def build() -> Any:
        with offline():
            loading: dict[str, Any] = {"output_loading_info": True}
            if state is None:
                return cls.from_pretrained(str(folder), **options, **loading, **kwargs)
            own = transformers.AutoConfig.from_pretrained(str(folder), **options)
            return cls.from_pretrained(None, config=own, state_dict=dict(state), **loading, **kwargs)

    model, info = called(f"model factory {factory}", build)
    check_keys(model, list(info["missing_keys"]), [], [], folder)
    return model.eval()  # type: ignore[no-any-return]


def _diffusers(factory: str, folder: Path, config: Mapping[str, Any], kwargs: dict[str, Any]) -> nn.Module:
    diffusers = _library(factory, "diffusers")
    cls = _class(folder / "config.json", diffusers, config["_class_name"], "ModelMixin")
    if isinstance(kwargs.get("torch_dtype"), str):
        kwargs["torch_dtype"] = getattr(torch, kwargs["torch_dtype"], kwargs["torch_dtype"])

    def build() -> Any:
        with offline():
            return cls.from_pretrained(str(folder), local_files_only=True, output_loading_info=True, **kwargs)

    model, info = called(f"model factory {factory}", build)
    check_keys(model, list(info["missing_keys"]), [], [], folder)
    return model.eval()  # type: ignore[no-any-return]


def _timm(
    factory: str,
    name: str,
    kwargs: dict[str, Any],
    state: Mapping[str, Any],
    source: Path,
    dtype: torch.dtype | None,
) -> nn.Module:
    if not _TIMM_NAME.fullmatch(name):
        raise CheckpointError(
            f"model factory {factory!r}: not a plain timm model name, as in timm:vit_tiny_patch16_224"
        )
    timm = _library(factory, "timm")
    if not timm.is_model(name):
        raise CheckpointError(f"model factory {factory}: timm {timm.__version__} has no model of that name")

    def build() -> Any:
        with offline():
            return timm.create_model(name, pretrained=False, **kwargs)

    model: nn.Module = called(f"model factory {factory}", build)
    load_strictly(model, state, source)
    return model.eval().to(dtype)


def _timm_kwargs(config: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What timm's ``load_model_config_from_hf`` and ``create_model`` take from the config.json that timm writes."""
    own = {key: config[key] for key in ("num_classes", "global_pool") if key in config}
    return {"pretrained_cfg_overlay": own, **(config.get("model_args") or {}), **kwargs}
