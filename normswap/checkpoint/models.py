"""The model of a checkpoint: built by a function of the person's or by its library, which opens what it saved as a
folder from that folder and never from a hub; filled, moved, optimized."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from normswap.checkpoint.errors import MissingError, check, counted, failing, listed, one_line, read_json, running
from normswap.checkpoint.reading import CONFIG, Checkpoint
from normswap.checkpoint.tensors import same_tensors, shares_memory_within
from normswap.pipeline import optimize, report
from normswap.reports import Report
from normswap.untouched import set_in

HERE = "hf:."
"""The factory of a folder that holds its own config.json."""

PICKLED = "pickle:"
"""The factory of a file that holds the pickled model itself."""

_SPEC = re.compile(r"(?P<module>\w+(\.\w+)*|[^:]*\.py):(?P<attribute>\w+(\.\w+)*)")

_FORMS = "pkg.module:function, ./file.py:function, timm:NAME or hf:DIR"

_OUTSIDE = (
    *("pretrained", "checkpoint", "cache_dir", "trust_remote", "code_revision", "revision", "local_files", "subfolder"),
    *("state_dict", "weights_only", "variant", "use_safetensors", "use_flashpack", "dduf", "gguf", "from_"),
    *("adapter", "_adapter", "kernel", "use_kernels", "quantization"),
)
"""How arguments begin that would take weights or code from elsewhere, or read them in another way."""

_DIFFUSERS = tuple(f"diffusion_pytorch_model.{end}" for end in ("safetensors.index.json", "safetensors", "bin"))
"""What diffusers looks for in a folder, in its order."""


def is_code(factory: str) -> bool:
    """Whether the factory names code to import, or a place outside the checkpoint's own folder."""
    return not factory.startswith("timm:") and factory not in (HERE, "")


def settled(factory: str) -> str:
    """The factory as it is kept: with the whole path where it names a file or a folder."""
    found, (kind, _, place) = _SPEC.fullmatch(factory), factory.partition(":")
    if kind == "hf" and place and factory != HERE:
        return f"hf:{Path(place).resolve()}"
    return f"{Path(found['module']).resolve()}:{found['attribute']}" if found and ".py:" in factory else factory


def factory_for(path: Path, found: Checkpoint) -> str:
    """The factory of a checkpoint that brings its own. Raises CheckpointError when it does not."""
    brought = found.module is not None or (path / CONFIG).is_file()
    check(brought, f"{path}: holds tensors and no model; pass a factory (--model)")
    return HERE if found.module is None else PICKLED


def open_model(
    found: Checkpoint, factory: str, kwargs: Mapping[str, Any] | None = None, dtype: str | None = None
) -> nn.Module:
    """The model that a checkpoint belongs to, in eval mode, with its tensors, in ``dtype`` where that is given.

    "timm:NAME" and "hf:DIR" are built by their libraries, which open "hf:.", the checkpoint's own folder, as their
    ``from_pretrained`` does: what they keep in float32 stays so. Nothing is fetched, and no code of the folder runs.
    Any other factory is imported and called. Raises CheckpointError, MissingError when a library is not installed.
    """
    to, (kind, _, place) = _torch(dtype), factory.partition(":")
    if factory == PICKLED:
        check(found.module is not None, f"{found.main}: holds no pickled model")
        return found.module.eval().to(to)  # type: ignore[union-attr]
    if kind not in ("timm", "hf"):
        return filled(build_model(factory, kwargs), found, dtype)
    arguments = dict(kwargs or {})
    _check_arguments(factory, arguments)
    if kind == "timm":
        return _timm(place, arguments, found, dtype)
    file = (found.main.parent if factory == HERE else Path(place)) / CONFIG
    check(place and file.is_file(), f"model factory {factory}: no folder with a {CONFIG}")
    config = read_json(file)
    check(isinstance(config, dict), f"{file}: not an object")
    _check_here(file, [config, arguments])
    check(not config.get("quantization_config"), f"{file}: a quantized model; convert the weights it was made from")
    if isinstance(config.get("architecture"), str) and "architectures" not in config:
        own = config.get("model_args") or {}
        _check_arguments(factory, own)
        head = {key: config[key] for key in ("num_classes", "global_pool") if key in config}
        return _timm(config["architecture"], {"pretrained_cfg_overlay": head, **own, **arguments}, found, dtype)
    return _pretrained(factory, file, config, arguments, found, dtype)


def build_model(factory: str, kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """Build the model of "pkg.module:function" or "./file.py:function", which is imported and called with ``kwargs``:
    this runs the code named. Modules beside the file, or in the current folder, can be imported where nothing else has
    their name. Raises CheckpointError, with the original error's type, message and place."""
    model = call_function(factory, kwargs, what="model factory")
    returned = f"model factory {factory} returned a {type(model).__name__}"
    check(isinstance(model, nn.Module), f"{returned}, not a torch.nn.Module")
    return model


def check_factory(factory: str) -> None:
    """Raise CheckpointError where ``factory`` is not written as one."""
    sound = _SPEC.fullmatch(factory) or (factory.startswith("hf:") and factory != "hf:")
    check(sound, f"model factory {factory!r} is not written {_FORMS}")


def call_function(spec: str, kwargs: Mapping[str, Any] | None = None, *, what: str = "function") -> Any:
    """Import and call "pkg.module:function". Raises CheckpointError as ``build_model`` does."""
    check(_SPEC.fullmatch(spec), f"{what} {spec!r} is not written {_FORMS}")
    module, _, attribute = spec.rpartition(":")
    what = f"{what} {spec}"
    folder = str(Path(module).resolve().parent if module.endswith(".py") else Path.cwd())
    added = [folder] if folder not in sys.path else []
    sys.path += added  # at the end: no module in it takes the place of a library
    try:
        with running(what):
            with running(f"{what}: module {module} cannot be imported:", form="{} {}"):
                found: Any = _from_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
            for name in attribute.split("."):
                check(hasattr(found, name), f"{what}: {module} has no {attribute}")
                found = getattr(found, name)
            sound = callable(found) and not isinstance(found, nn.Module)
            check(sound, f"{what}: a {type(found).__name__}, not a function that returns a model")
            return found(**(kwargs or {}))
    finally:
        sys.path[:] = [place for place in sys.path if place not in added]


def _from_file(path: Path) -> ModuleType:
    """The module in a file, under its plain name unless that is another's."""
    importlib.invalidate_caches()
    name, found = path.stem, importlib.util.find_spec(path.stem)
    if found is not None and os.path.realpath(found.origin or "") == os.path.realpath(path):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(f"_normswap_{name}", os.path.realpath(path))
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check_arguments(factory: str, kwargs: Mapping[str, Any]) -> None:
    outside = ", ".join(key for key in kwargs if key.startswith(_OUTSIDE))
    check(not outside, f"model factory {factory}: {outside} cannot be given, weights come from the file")


def _check_here(file: Path, value: Any) -> None:
    """Raise CheckpointError for what in a config, however deep, asks for something from another place."""
    for key, entry in value.items() if isinstance(value, Mapping) else ():
        kernels = "attn_implementation" in str(key) and "/" in str(entry)
        check(not kernels, f"{file}: names kernels of another place; remove {key}")
        weights = key in ("use_pretrained_backbone", "pretrained_backbone") and entry
        check(not weights, f"{file}: asks for weights of another place; set {key} to false")
        _check_here(file, entry)
    for entry in value if isinstance(value, list | tuple) else ():
        _check_here(file, entry)


@contextmanager
def _offline() -> Iterator[None]:
    """In the block no library asks a hub for anything, whatever a config says."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "DIFFUSERS_OFFLINE")
    flags = {"huggingface_hub.constants": "HF_HUB_OFFLINE", "transformers.utils.hub": "_is_offline_mode"}
    # huggingface_hub keeps connections that were made before it was told.
    forget = getattr(sys.modules.get("huggingface_hub.utils._http"), "reset_sessions", lambda: None)
    with ExitStack() as stack:
        stack.callback(forget)
        stack.enter_context(set_in(os.environ, dict.fromkeys(names, "1")))
        for module, name in flags.items():
            if hasattr(sys.modules.get(module), name):
                stack.enter_context(set_in(vars(sys.modules[module]), {name: True}))
        forget()
        yield


def _library(factory: str, name: str) -> Any:
    what = f"model factory {factory}: module {name} cannot be imported:"
    with running(what, form=f"{{}} {{}}; install {name}", kind=MissingError), _offline():
        return importlib.import_module(name)


def _pretrained(
    factory: str, file: Path, config: Mapping[str, Any], kwargs: dict[str, Any], found: Checkpoint, dtype: str | None
) -> nn.Module:
    """The architecture that a config.json names, as ``from_pretrained`` of transformers or diffusers would open it,
    filled with the tensors of ``found``."""
    diffusers = "_class_name" in config
    names = [config["_class_name"]] if diffusers else config.get("architectures")
    single = isinstance(names, list) and len(names) == 1
    check(single, f"{file}: names no single architecture; pass --model pkg.module:function")
    library = _library(factory, "diffusers" if diffusers else "transformers")
    cls: Any = getattr(library, str(names[0]), None)  # type: ignore[index]
    own = isinstance(cls, type) and issubclass(cls, library.ModelMixin if diffusers else library.PreTrainedModel)
    version = f"{library.__name__} {library.__version__}"
    check(own, f"{file}: {version} has no architecture {names[0]!r}; pass --model pkg.module:function")  # type: ignore[index]
    if factory == HERE:
        _check_own(file, config, found)
    options: dict[str, Any] = {"local_files_only": True, "output_loading_info": True}
    wanted = kwargs.pop("torch_dtype", None) if dtype is None else dtype
    with running(f"model factory {factory}"), _offline():
        if diffusers and factory != HERE:
            settings = cls.load_config(file.parent, local_files_only=True)
            return filled(cls.from_config(settings, **kwargs), found, wanted)
        if diffusers:
            model, info = cls.from_pretrained(file.parent, torch_dtype=_torch(wanted), **options, **kwargs)
        else:  # it is given the tensors, and opens no file with any
            options |= {"dtype": wanted or kwargs.pop("dtype", "auto"), "trust_remote_code": False}
            if attention := kwargs.pop("attn_implementation", None):
                options["attn_implementation"] = attention
            read = cls.config_class.from_pretrained
            options["config"], kwargs = read(file.parent, local_files_only=True, return_unused_kwargs=True, **kwargs)
            options["state_dict"] = dict(found.state) if found.shared else copy.deepcopy(dict(found.state))
            model, info = cls.from_pretrained(None, **options, **kwargs)
            model.name_or_path = model.config.name_or_path = str(file.parent)
            if model.can_generate() and file.with_name("generation_config.json").is_file():
                model.generation_config = library.GenerationConfig.from_pretrained(file.parent, local_files_only=True)
    _check_keys(model, list(info["missing_keys"]), [], found)
    return model.eval()


def _check_own(file: Path, config: Mapping[str, Any], found: Checkpoint) -> None:
    """Raise CheckpointError where the libraries would open the folder with other weights than those of ``found``."""
    main, adapter, other = found.main, file.with_name("adapter_config.json"), config.get("transformers_weights")
    check(not adapter.is_file(), f"{adapter}: its adapter is not in {main.name}; merge it, or move it elsewhere")
    check(other in (None, main.name), f"{file}: names other weights than {main.name}; remove transformers_weights")
    names = _DIFFUSERS if "_class_name" in config else ()
    first = next((name for name in names if file.with_name(name).is_file()), main.name)
    check(first == main.name, f"{main}: diffusers opens {first} beside it instead; name that, or move it elsewhere")


def _timm(name: str, kwargs: dict[str, Any], found: Checkpoint, dtype: str | None) -> nn.Module:
    factory = f"timm:{name}"
    plain = re.fullmatch(r"\w+(\.\w+)*", name)
    check(plain, f"model factory {factory!r}: not a plain timm model name, as in timm:vit_tiny_patch16_224")
    timm = _library(factory, "timm")
    check(timm.is_model(name), f"model factory {factory}: timm {timm.__version__} has no model of that name")
    with running(f"model factory {factory}"), _offline():
        model = timm.create_model(name, pretrained=False, **kwargs)
    return filled(model, found, dtype)


def filled(model: nn.Module, found: Checkpoint, dtype: str | None = None) -> nn.Module:
    """``model``, in eval mode, with the tensors of ``found``, every key and shape required to fit, in ``dtype`` where
    that is given and else in the dtypes it was built with. A tied parameter may be in the file under one of its names,
    or under several if they are equal. Raises CheckpointError; ``model`` may then be partly filled."""
    name, state, given = type(model).__name__, found.state, OrderedDict(found.state)
    if (versions := getattr(state, "_metadata", None)) is not None:
        given._metadata = copy.deepcopy(versions)  # type: ignore[attr-defined]  # load_state_dict writes into it
    owned = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    owned = [(key, tensor) for key, tensor in owned if not is_lazy(tensor)]  # load_state_dict gives it its shape
    # On the meta device, or expanded: it cannot be written into.
    assign = any(t.is_meta or (t.layout is torch.strided and shares_memory_within(t)) for _, t in owned)
    names: dict[Tensor, list[str]] = {}
    for key, tensor in owned:
        names.setdefault(tensor, []).append(key)
    values: dict[Tensor, Tensor] = {}
    for to, tied in names.items():
        if present := [key for key in tied if key in state]:
            values[to] = value = state[present[0]]
            same = all(same_tensors({"": value}, {"": state[key]}) for key in present[1:])
            check(same, f"{found.main}: {listed(present)} are one parameter in {name}, and differ in the file")
            names[to] = tied if isinstance(to, nn.Parameter) else present
    if assign:
        held = set[int]()
        for to, value in values.items():
            place = value.data_ptr() if value.layout is torch.strided else 0
            copied = not found.shared or place in held  # what the model has apart stays apart
            held |= {place} - {0}
            here = value.to(value.device if to.is_meta else to.device, to.dtype, copy=copied)
            values[to] = nn.Parameter(here, to.requires_grad) if isinstance(to, nn.Parameter) else here
    given.update((key, value) for to, value in values.items() for key in names[to])
    lines = lambda error: "; ".join(str(error).split("\n\t")[1:11]).replace("\n", " ") or one_line(error)  # noqa: E731
    with failing(f"{found.main}: does not fit {name}", form="{}: {}", tell=lines):
        keys = model.load_state_dict(given, strict=False, assign=assign)
    _check_keys(model, keys.missing_keys, keys.unexpected_keys, found)
    left = [key for key, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    check(not left, f"{found.main}: {listed(left)} of {name} is on the meta device; build it on the CPU")
    return model.eval() if dtype is None else model.eval().to(_torch(dtype))


def _torch(dtype: str | None) -> torch.dtype | None:
    """The dtype of that name. Raises CheckpointError when it is none of floating-point numbers."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    sound = dtype is None or (isinstance(found, torch.dtype) and found.is_floating_point)
    check(sound, f"dtype {dtype!r} is not the name of a floating-point dtype, as in 'bfloat16'")
    return found


def _check_keys(model: nn.Module, missing: Sequence[str], unexpected: Sequence[str], found: Checkpoint) -> None:
    usual = ("module.", "_orig_mod.", "model.")  # what wrappers put before every name
    prefix = next((p for p in usual if unexpected and all(name.startswith(p) for name in found.state)), None)
    cure = f"; every name begins with {prefix!r}: pass strip_prefix (--strip-prefix {prefix})" if prefix else ""
    problems = counted(missing=missing, unexpected=unexpected)
    check(not problems, f"{found.main}: keys do not fit {type(model).__name__}: {problems}{cure}")


def usable_device(device: str | torch.device | None) -> torch.device:
    """``device``, or the best there is for None. Raises MissingError when it cannot be used."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with failing(f"device {str(device)!r} cannot be used here", kind=MissingError):
        torch.empty(0, device=device)
        return torch.device(device)


def ready(model: nn.Module, device: torch.device) -> nn.Module:
    """``model`` on ``device``. Raises CheckpointError when it cannot be moved."""
    with failing(f"{type(model).__name__} cannot be moved to {device}"):
        return model.to(device)


def moved(values: Any, device: torch.device) -> Any:
    """``values`` with the tensors in it, however deep, on ``device``."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), values)


def in_dtype(values: Any, dtype: str | None) -> Any:
    """``values`` with the floating-point tensors in it, however deep, in ``dtype`` where that is given."""
    to = _torch(dtype)
    return tree_map_only(Tensor, lambda tensor: tensor.to(to) if tensor.is_floating_point() else tensor, values)


def optimized(model: nn.Module, given: tuple[Any, dict[str, Any]], **options: Any) -> tuple[nn.Module, Report]:
    """``model``, swapped in place, and the report. Raises CheckpointError when its own code fails on the inputs, and
    what ``optimize`` raises."""
    with failing(f"{type(model).__name__} could not be optimized", (Exception, SystemExit), form="{}: {}"):
        swapped = optimize(model, given[0], given[1] or None, inplace=True, **options)
        return swapped, report(swapped)
