"""A model filled from a state_dict that must fit it, key by key."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normswap.checkpoint.errors import CheckpointError, listed, one_line
from normswap.checkpoint.layouts import shares_memory_within
from normswap.checkpoint.nested import likely_prefix
from normswap.checkpoint.tensors import same_tensors


def load_strictly(model: nn.Module, state: Mapping[str, Any], source: object, *, share: bool = False) -> None:
    """Copy ``state`` into ``model``, every key and shape required to fit; ``source`` names it in errors.

    What is on the meta device is put into memory first, or with ``share`` becomes the tensor of ``state`` itself.
    Tensors are converted to the dtype the model was built with. A tied parameter may be there under one of its names,
    or under several if they are equal.

    Raises CheckpointError listing up to ten missing and unexpected keys, or up to ten wrong shapes; ``model`` may then
    be partly filled.
    """
    given = _with_ties(model, state, source)
    shared = _give_memory(model, given, share)
    try:
        keys = model.load_state_dict(given, strict=False)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
        problem = "; ".join(lines[:10]) or one_line(error)
        raise CheckpointError(f"{source}: does not fit {type(model).__name__}: {problem}") from error
    except Exception as error:  # a module's own loading code may raise anything
        raise CheckpointError(f"{source}: does not fit {type(model).__name__}: {one_line(error)}") from error
    missing = [name for name in keys.missing_keys if name not in shared]
    check_keys(model, missing, keys.unexpected_keys, list(state), source)
    left = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if left:
        raise CheckpointError(
            f"{source}: {listed(left)} of {type(model).__name__} is on the meta device; build it on the CPU"
        )


def check_keys(model: nn.Module, missing: list[str], unexpected: list[str], names: list[str], source: object) -> None:
    """Raise CheckpointError, with up to ten names of each, unless both lists are empty."""
    problems = [
        f"{len(keys)} {what}: {listed(list(keys))}"
        for what, keys in (("missing", missing), ("unexpected", unexpected))
        if keys
    ]
    if not problems:
        return
    prefix = likely_prefix(names)
    cure = f"; every name begins with {prefix!r}: pass strip_prefix (--strip-prefix {prefix})" if prefix else ""
    raise CheckpointError(f"{source}: keys do not fit {type(model).__name__}: {'; '.join(problems)}{cure}")


class _State(dict[str, Any]):
    """A state_dict with the module versions that load_state_dict looks for."""

    _metadata: Any


def _with_ties(model: nn.Module, state: Mapping[str, Any], source: object) -> _State:
    """``state``, one tensor under all names of a tied parameter."""
    given = _State(state)
    if (versions := getattr(state, "_metadata", None)) is not None:
        given._metadata = copy.deepcopy(versions)  # load_state_dict writes into it
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    for group in groups.values():
        present = [name for name in group if name in state]
        if any(not same_tensors({"": state[present[0]]}, {"": state[name]}) for name in present[1:]):
            raise CheckpointError(
                f"{source}: {listed(present)} are one parameter in {type(model).__name__}, and differ in the file"
            )
        given.update(dict.fromkeys(group, state[present[0]]) if present else {})
    return given


def _give_memory(model: nn.Module, given: dict[str, Any], share: bool) -> set[str]:
    """Put parameters and buffers that ``given`` has, and that cannot be written into, into memory of their own. With
    ``share`` those on the meta device become the tensors of ``given``, and are taken out of it; returns their names."""
    fresh: dict[int, Tensor] = {}
    shared: set[str] = set()
    for owner_name, owner in model.named_modules(remove_duplicate=False):
        for tensors in (owner._parameters, owner._buffers):
            for leaf, tensor in tensors.items():
                name = f"{owner_name}.{leaf}" if owner_name else leaf
                if tensor is None or name not in given or not (tensor.is_meta or shares_memory_within(tensor)):
                    continue
                mine = share and tensor.is_meta and given[name].shape == tensor.shape
                if id(tensor) not in fresh:
                    place = "cpu" if tensor.is_meta else tensor.device
                    new = given[name].to(tensor.dtype) if mine else torch.empty_like(tensor, device=place)
                    fresh[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if tensors is owner._parameters else new
                tensors[leaf] = fresh[id(tensor)]  # type: ignore[assignment]
                if mine:
                    shared.add(name)
    for name in shared:
        del given[name]
    return shared
