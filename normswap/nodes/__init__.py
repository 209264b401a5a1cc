"""Autograd's nodes in C++, a library beside the kernels: with it nothing of a swapped norm's backward is Python, and
its forward is one step from it. It is bound to one version of torch, as the kernels are not; where there is none for
the torch that runs, and no compiler to make it, the autograd Functions of ``ops`` do the same."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.machinery
import importlib.util
from pathlib import Path

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F

from normswap import native, nodes_library
from normswap.ops import at_once, dispatch, recorded

NORMS = ("layer_norm", "rms_norm", "group_norm", "batch_norm")
"""Whose native ops record gradients by themselves once the library is loaded."""
LAUNCHERS = (
    *("row_norm", "group_norm", "row_backward", "group_backward", "convolve"),
    *("batch_norm", "batch_norm_train", "batch_norm_backward"),
)
"""What the kernels' library has to be called past the dispatcher, in the order of C++."""

_loaded: Path | None = None
_compiled_in_vain = False
_reason = "the kernels are not loaded"


def load(*, compiling: bool = False) -> None:
    """Use the library; to be called when the kernels are loaded. With ``compiling`` it is made where there is none, but
    not again after a failure in the same process, nor where NORMSWAP_BUILD=never forbids it. Where it cannot be had one
    line says why; nothing is raised."""
    global _loaded, _reason, _compiled_in_vain
    if _loaded is not None:
        return
    _reason = "not compiled yet; normswap.optimize does it for a model on CUDA, and so does `normswap build`"
    try:
        path = nodes_library.find()
        if path is None and compiling and not (_compiled_in_vain or native.forbidden()):
            _compiled_in_vain = True
            path = nodes_library.build()
        if path is not None:
            register_formula()
            torch.ops.load_library(str(path))
            dispatch.record_natively(NORMS)
            _loaded = path
            call_at_once(path, launchers=_launchers())
    except (OSError, RuntimeError) as error:
        _reason = str(error)
        native.say(f"without autograd's nodes a backward costs the host more: {_reason}")


@functools.cache
def register_formula() -> torch.library.Library:
    """Declare, once, what the nodes call where kernels do not serve: ``tensors`` and ``numbers`` as they list them."""
    library = torch.library.Library("normswap", "FRAGMENT")
    library.define(
        "norm_formula(str name, Tensor?[] grads, Tensor?[] tensors, float[] numbers, bool[] wanted) -> "
        f"({', '.join(['Tensor?'] * len(recorded.LEARNING))})"
    )
    library.impl("norm_formula", lambda *given: tuple(recorded.gradients(*given)), "CompositeImplicitAutograd")
    return library


def call_at_once(path: Path, device: str = "cuda", launchers: tuple[int, ...] = ()) -> None:
    """Let calls of norms go the short way that the library has, and these and autograd's nodes launch kernels by the
    addresses of ``launchers``, in the order of LAUNCHERS, or by none; it has no such way where it was made without
    Python.h."""
    loader = importlib.machinery.ExtensionFileLoader("_normswap_calls", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    with contextlib.suppress(ImportError):
        calls = importlib.util.module_from_spec(spec)
        tables = at_once.PASSING, at_once.ACTIVATIONS, at_once.FORWARDS
        calls.configure(vars(torch.nn.modules.module), vars(F), vars(forward_ad), *tables, device, launchers)
        at_once.serve(calls)
        if launchers:
            dispatch.launch_at_once({"batch_norm_eval": calls.batch_norm_eval})


def _launchers() -> tuple[int, ...]:
    """Where the kernels' library has what the nodes call past the dispatcher; nothing without that library."""
    if (path := native.status().path) is None:
        return ()
    library = ctypes.CDLL(str(path))
    found = (ctypes.cast(library[f"normswap_{name}"], ctypes.c_void_p).value for name in LAUNCHERS)
    return tuple(address or 0 for address in found)


def status() -> str:
    """Where the library is, or why it does not serve."""
    native.status()
    return str(_loaded or f"none: {_reason}")
