"""What the kernels' library declines of calls in plain data, before it asks anything of a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launch_stand_in import DECLINED, BatchNormBackwardCall, GroupBackwardCall, Memory, RowBackwardCall, View
from torch import Tensor

from normswap import native

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
CALLS: dict[str, tuple[type[ctypes.Structure], dict[str, Tensor], dict[str, int]]] = {
    "row_backward": (
        RowBackwardCall,
        {
            **{name: torch.zeros(4, 8) for name in ("grad", "input", "sum_grad")},
            **{"weight": torch.zeros(8), "bias": torch.zeros(8), "statistics": torch.zeros(8)},
        },
        {"cols": 8, "of_input": 1, "of_weight": 1, "of_bias": 1},
    ),
    "group_backward": (
        GroupBackwardCall,
        {
            **{name: torch.zeros(2, 8, 4) for name in ("grad", "input", "residual")},
            **{"weight": torch.zeros(8), "bias": torch.zeros(8), "statistics": torch.zeros(8)},
        },
        {"num_groups": 2, "activation": 2, "of_input": 1, "of_weight": 1, "of_bias": 1, "of_residual": 1},
    ),
    "batch_norm_backward": (
        BatchNormBackwardCall,
        {
            **{name: torch.zeros(2, 8, 4) for name in ("grad", "input", "residual")},
            **{
                name: torch.zeros(8)
                for name in ("weight", "bias", "scale", "input_bias", "running_mean", "running_var")
            },
            "coefficients": torch.zeros(8, 4),
        },
        {
            "training": 1,
            "of_input": 1,
            "of_weight": 1,
            "of_bias": 1,
            "of_residual": 1,
            "of_scale": 1,
            "of_input_bias": 1,
        },
    ),
}
"""Each with its tensors and numbers, which the kernels would take."""
CHANGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "another dtype": lambda t: t.double(),
    "a value less": lambda t: t.flatten()[1:],
    "not dense": lambda t: torch.zeros(*t.shape, 2)[..., 0],
    "absent": lambda t: None,
}
MAY_BE_ABSENT = ("sum_grad", "residual", "scale", "input_bias", "running_mean", "running_var")


def view_of(tensor: Tensor | None) -> View:
    if tensor is None:
        return View()
    sizes, strides = (ctypes.c_int64 * tensor.dim())(*tensor.shape), (ctypes.c_int64 * tensor.dim())(*tensor.stride())
    return View(tensor.data_ptr(), sizes, strides, tensor.dim(), DTYPES.get(tensor.dtype, -1))


def outcome(name: str, changed: dict[str, Tensor | None]) -> int:
    """What the library says of the call; no memory is given."""
    structure, tensors, numbers = CALLS[name]
    asked: list[int] = []
    given = {**tensors, **changed}
    call = structure(**{key: view_of(tensor) for key, tensor in given.items()}, **numbers)
    allocate = dict(Memory._fields_)["allocate"]

    def refuse(memory: Any, part: int, like: Any) -> int:
        asked.append(part)
        return 0

    memory = Memory(allocate(refuse))
    path = native.status().path
    assert path is not None
    function = ctypes.CDLL(str(path))[f"normswap_{name}"]
    found = function(ctypes.byref(call), ctypes.byref(memory), 0)
    assert asked == []
    return int(found)


@pytest.mark.skipif(not native.load().available, reason="the kernels are not compiled here")
@pytest.mark.parametrize(
    ("name", "tensor", "change"),
    [
        (name, tensor, change)
        for name, (_, tensors, _) in CALLS.items()
        for tensor in tensors
        for change in CHANGES
        if change != "absent" or tensor not in MAY_BE_ABSENT
    ],
)
def test_what_kernels_do_not_take_is_declined(name: str, tensor: str, change: str) -> None:
    assert outcome(name, {tensor: CHANGES[change](CALLS[name][1][tensor])}) == DECLINED
