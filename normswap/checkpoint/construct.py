"""A model built without memory for its parameters, and filled from a checkpoint without copying what fits."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from normswap.checkpoint.errors import CheckpointError, listed, one_line
from normswap.checkpoint.nested import likely_prefix
from normswap.checkpoint.tensors import same_tensors


class LeftOnMetaError(CheckpointError):
    """After loading, tensors of the model are still without memory."""


def build_lean(build: Callable[[], nn.Module]) -> nn.Module | None:
    """What ``build`` returns, its parameters on the meta device and its buffers real; None where that is not safe.

    It is not where ``build`` fails on such parameters, or where tensors that no checkpoint holds (non-persistent
    buffers, plain attributes) depend on the values of parameters or on random numbers.
    """
    before = torch.get_rng_state()
    try:
        with _parameters_on_meta():
            model = build()
    except (Exception, SystemExit):  # the ordinary way is tried next, and tells what is wrong
        return None
    finally:
        drawn = not torch.equal(before, torch.get_rng_state())
        torch.set_rng_state(before)
    if not isinstance(model, nn.Module):
        return None
    loose = list(_loose_tensors(model))
    return None if any(t.is_meta for t in loose) or (loose and drawn) else model


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter registered in the block becomes one on the meta device; shared ones stay shared."""
    replaced: dict[int, tuple[weakref.ref[Tensor], nn.Parameter]] = {}

    def on_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or type(parameter) is not nn.Parameter:
            return None
        known = replaced.get(id(parameter))
        if known is None or known[0]() is not parameter:
            known = (weakref.ref(parameter), nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad))
            replaced[id(parameter)] = known
        return known[1]

    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # its annotation forgets the result
    try:
        yield
    finally:
        handle.remove()


def _loose_tensors(model: nn.Module) -> Iterator[Tensor]:
    """The tensors of a model that its state_dict does not have."""
    for module in model.modules():
        for name, value in module._buffers.items():
            if value is not None and name in module._non_persistent_buffers_set:
                yield value
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def load_strictly(model: nn.Module, state: Mapping[str, Any], source: object, *, assign: bool = True) -> None:
    """Fill ``model`` from ``state``, every key and shape required to fit; ``source`` names it in errors.

    With ``assign`` tensors of the right dtype become the model's own, without a copy; others are converted to the dtype
    the model was built with. A tied parameter may be there under one of its names, or under several if they are equal.

    Raises CheckpointError listing up to ten missing and unexpected keys, or up to ten wrong shapes; ``model`` may then
    be partly filled.
    """
    ties = _ties(model)
    given = _with_ties(model, dict(state), ties, source)
    if (versions := getattr(state, "_metadata", None)) is not None:
        given = _Versioned(given)
        given._metadata = copy.deepcopy(versions)  # load_state_dict writes into it
    try:
        keys = model.load_state_dict(given, strict=False, assign=assign)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
        problem = "; ".join(lines[:10]) or one_line(error)
        raise CheckpointError(f"{source}: does not fit {type(model).__name__}: {problem}") from error
    except Exception as error:  # a module's own loading code may raise anything
        raise CheckpointError(f"{source}: does not fit {type(model).__name__}: {one_line(error)}") from error
    _check_keys(model, keys.missing_keys, keys.unexpected_keys, list(state), source)
    _tie(model, ties)
    left = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if left:
        raise LeftOnMetaError(
            f"{source}: {listed(left)} of {type(model).__name__} is on the meta device; build it on the CPU"
        )


class _Versioned(dict[str, Any]):
    """A state_dict with the module versions that load_state_dict looks for."""

    _metadata: Any


def _ties(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _with_ties(model: nn.Module, state: dict[str, Any], ties: list[list[str]], source: object) -> dict[str, Any]:
    """``state`` in the model's dtypes, one tensor under all names of a tied parameter."""
    like = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    for group in ties:
        present = [name for name in group if name in state]
        if any(not same_tensors({"": state[present[0]]}, {"": state[name]}) for name in present[1:]):
            raise CheckpointError(
                f"{source}: {listed(present)} are one parameter in {type(model).__name__}, and differ in the file"
            )
        if present:
            state.update(dict.fromkeys(group, state[present[0]]))
    converted: dict[int, Tensor] = {}
    for name, value in state.items():
        target = like.get(name)
        if isinstance(value, Tensor) and target is not None and value.dtype != target.dtype:
            state[name] = converted.setdefault(id(value), value.to(target.dtype))
    return state


def _tie(model: nn.Module, ties: list[list[str]]) -> None:
    """Make each tied parameter one object again: assigning gave it one for each name."""
    for first, *others in ties:
        parameter = model.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = parameter


def _check_keys(model: nn.Module, missing: list[str], unexpected: list[str], names: list[str], source: object) -> None:
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
