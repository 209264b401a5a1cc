"""A stream whose kernels have a few multiprocessors only, by way of the CUDA driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
_OF_THE_DEVICE = 1  # CU_GREEN_CTX_DEFAULT_STREAM
_NON_BLOCKING = 1


def _checked(what: str, status: int) -> None:
    assert status == 0, f"{what} gave CUDA error {status}"


@contextmanager
def stream_of_few(multiprocessors: int) -> Iterator[torch.cuda.ExternalStream]:
    """A stream of the current device's on at least so many of its multiprocessors, and not many more."""
    torch.cuda.current_stream().synchronize()
    cuda = ctypes.CDLL("libcuda.so.1")
    every, some, rest = (ctypes.create_string_buffer(1024) for _ in range(3))
    groups = ctypes.c_uint(1)
    device = torch.cuda.current_device()
    _checked("cuDeviceGetDevResource", cuda.cuDeviceGetDevResource(device, every, _SM))
    split = cuda.cuDevSmResourceSplitByCount(some, ctypes.byref(groups), every, rest, 0, multiprocessors)
    _checked("cuDevSmResourceSplitByCount", split)
    description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _checked("cuDevResourceGenerateDesc", cuda.cuDevResourceGenerateDesc(ctypes.byref(description), some, 1))
    made = cuda.cuGreenCtxCreate(ctypes.byref(context), description, device, _OF_THE_DEVICE)
    _checked("cuGreenCtxCreate", made)
    streamed = cuda.cuGreenCtxStreamCreate(ctypes.byref(stream), context, _NON_BLOCKING, 0)
    _checked("cuGreenCtxStreamCreate", streamed)
    try:
        yield torch.cuda.ExternalStream(stream.value)
    finally:
        torch.cuda.synchronize()
        _checked("cuStreamDestroy", cuda.cuStreamDestroy_v2(stream))
        _checked("cuGreenCtxDestroy", cuda.cuGreenCtxDestroy(context))
