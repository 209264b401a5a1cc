"""Whether calling a module runs torch.nn's own code and nothing else, asked on every call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as _torch_module

from normswap.forwards.replaced import Replaced
from normswap.ops.at_once import FORWARDS

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_CLASSES = (
    *(nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, *CONVOLUTIONS),
    *(nn.ReLU, nn.SiLU, nn.GELU, nn.LeakyReLU, nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.Sigmoid, nn.Tanh),
    *(nn.Identity, *DROPOUTS),
)
_FORWARDS: Mapping[type[nn.Module], Replaced] = {cls: Replaced(cls) for cls in _CLASSES}
FORWARDS.update((cls, one.known) for cls, one in _FORWARDS.items())


def is_plain(module: Any, expected: type[nn.Module]) -> bool:
    """True when calling ``module`` does what torch.nn's ``expected.forward`` does and nothing more."""
    if type(module) is not expected or not _FORWARDS[expected].is_unchanged():
        return False
    return is_bare(module.__dict__) and not _torch_module._has_any_global_hook()


def is_plain_itself(module: Any) -> bool:
    """The same of a module of torch.nn's, whatever hooks there are for all modules."""
    return _FORWARDS[type(module)].is_unchanged() and is_bare(module.__dict__)


def replaced_function(cls: type[nn.Module]) -> str:
    """The function of torch.nn.functional that ``cls`` of torch.nn calls and somebody has replaced; "" if none."""
    return next((name for name, one in _FORWARDS[cls].functional if getattr(F, name, None) is not one), "")


def is_unhooked(module: nn.Module) -> bool:
    """True when calling ``module`` runs its class's forward and nothing before or after it."""
    return is_bare(module.__dict__) and not _torch_module._has_any_global_hook()


def calls_forward(cls: Any) -> bool:
    """Whether calling a module of the class ``cls`` runs its forward as nn.Module does."""
    return cls.__call__ is nn.Module.__call__ and cls._call_impl is nn.Module._call_impl


TORCHS_CALLS = nn.Module.__call__, nn.Module._call_impl
"""As they were when this was imported."""


def calls_are_torchs() -> bool:
    """Whether modules are called so still: who watches all of them may have put his own there."""
    return nn.Module.__call__ is TORCHS_CALLS[0] and nn.Module._call_impl is TORCHS_CALLS[1]


def is_bare(attributes: Mapping[str, Any]) -> bool:
    """Whether nothing of a module's own, whose ``__dict__`` these are, is run when it is called."""
    return not (
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or "forward" in attributes
        or "_call_impl" in attributes
    )
