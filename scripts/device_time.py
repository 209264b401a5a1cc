"""The device's time for functions called in turn, from an L2 that holds nothing of theirs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from normswap.timing.clock import block, clock_of

BUDGET_MS = 400.0
LEAST, MOST = 9, 60
AHEAD_US = 500.0
"""In which the host queues what is timed."""


def interleaved(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of the device for each function, called in turn with the host hidden; the L2 is overwritten
    before every call."""
    flush, machine = torch.empty(2**28, dtype=torch.uint8, device="cuda"), clock_of(torch.device("cuda"))

    def once(function: Callable[[], object]) -> float:
        return block(machine, function, 1, AHEAD_US, before=flush.zero_).device_us / 1000

    for function in functions.values():
        function()
    together = sum(once(function) for function in functions.values())
    rounds = min(MOST, max(LEAST, int(BUDGET_MS / together)))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(once(function))
    return {name: statistics.median(values) for name, values in times.items()}


def replayed(functions: dict[str, Callable[[Tensor], object]], inputs: Sequence[Tensor]) -> dict[str, float]:
    """The same of functions of a tensor by CUDA-graph replay: each input in turn, the mean of them."""
    pool = torch.cuda.graph_pool_handle()
    graphs = {name: _captured(function, inputs, pool) for name, function in functions.items()}
    return {name: value / len(inputs) for name, value in interleaved(graphs).items()}


def _captured(
    function: Callable[[Tensor], object], inputs: Sequence[Tensor], pool: tuple[int, int]
) -> Callable[[], object]:
    """Results are dropped: graphs that do not run at once may share the memory of ``pool``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function(inputs[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for x in inputs:
            function(x)
    return graph.replay


def copy_rate() -> float:
    """Bytes per millisecond of a 4 GB device-to-device copy, read plus written."""
    source = torch.empty(2**30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / interleaved({"copy": lambda: target.copy_(source)})["copy"]
