"""On sm_90 a kernel of ours may start while the one before it on the stream still runs (programmatic dependent launch):
it must read nothing, and write nothing, that the kernels before it are not done with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

import normswap

ROUNDS = 12


class ChannelRMSNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5)


class L1Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.mean(torch.abs(x), dim=-1, keepdim=True)


CHAINS: dict[str, tuple[tuple[int, ...], torch.dtype, Callable[[], nn.Module]]] = {
    "small": ((4096, 768), torch.float16, lambda: nn.Sequential(nn.LayerNorm(768), nn.RMSNorm(768, eps=1e-5))),
    "tiny": ((9000, 64), torch.float32, lambda: nn.Sequential(nn.LayerNorm(64), L1Norm())),
    "many tiny": ((60_000, 64), torch.float32, lambda: nn.Sequential(nn.LayerNorm(64), nn.RMSNorm(64, eps=1e-5))),
    "short": ((60_000, 192), torch.float16, lambda: nn.Sequential(nn.LayerNorm(192), nn.RMSNorm(192, eps=1e-5))),
    "pair": ((3000, 1280), torch.bfloat16, lambda: nn.Sequential(nn.LayerNorm(1280), nn.RMSNorm(1280, eps=1e-5))),
    "odd": ((1000, 1001), torch.bfloat16, lambda: nn.Sequential(nn.LayerNorm(1001), nn.RMSNorm(1001, eps=1e-5))),
    "held": ((700, 8192), torch.bfloat16, lambda: nn.Sequential(nn.LayerNorm(8192), nn.RMSNorm(8192, eps=1e-5))),
    "cluster of two": ((300, 16384), torch.float32, lambda: nn.Sequential(nn.LayerNorm(16384), L1Norm())),
    "cluster": ((70, 65536), torch.float32, lambda: nn.Sequential(nn.LayerNorm(65536), L1Norm())),
    "clusters in turn": ((1100, 65536), torch.float32, lambda: nn.Sequential(nn.LayerNorm(65536), nn.LayerNorm(65536))),
    "cluster of groups": ((70, 131_072), torch.float32, lambda: nn.Sequential(nn.LayerNorm(131_072), L1Norm())),
    "shared memory": (
        (40, 200_000),
        torch.float16,
        lambda: nn.Sequential(nn.LayerNorm(200_000), nn.LayerNorm(200_000)),
    ),
    "split": ((2, 2_400_000), torch.float32, lambda: nn.Sequential(nn.LayerNorm(2_400_000), nn.LayerNorm(2_400_000))),
    "groups": ((4, 64, 128, 128), torch.float16, lambda: nn.Sequential(nn.GroupNorm(8, 64), nn.GroupNorm(32, 64))),
    "groups, team": ((2, 64, 512, 512), torch.float16, lambda: nn.Sequential(nn.GroupNorm(8, 64), nn.GroupNorm(8, 64))),
    "channels": ((4, 64, 64, 64), torch.float32, lambda: nn.Sequential(nn.GroupNorm(8, 64), ChannelRMSNorm())),
    "team": ((3, 2_000_000), torch.float32, lambda: nn.Sequential(L1Norm(), L1Norm())),
    "team, split": ((7, 2_400_000), torch.float32, lambda: nn.Sequential(nn.LayerNorm(2_400_000), L1Norm())),
    "batch norm": (
        (20_000, 512),
        torch.float32,
        lambda: nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.LayerNorm(512)),
    ),
}
CASES = [
    (chain, layout)
    for chain, (shape, _, _) in CHAINS.items()
    for layout in (torch.contiguous_format, torch.channels_last)[: 2 if len(shape) == 4 else 1]
]


def chained(layers: Iterable[nn.Module], x: Tensor, after_each: Callable[[], object]) -> list[Tensor]:
    """What comes of applying the layers over and over, their weights being changed in place between; most of what lies
    between is freed, so that its memory serves again at once."""
    kept = []
    for turn in range(ROUNDS):
        for layer in layers:
            for parameter in layer.parameters():
                parameter.mul_(1.001)
            after_each()
            x = layer(x)
            after_each()
        if turn % 4 == 3:
            kept.append(x.clone())
            after_each()
    return kept


@pytest.mark.parametrize(("chain", "layout"), CASES, ids=str)
@pytest.mark.parametrize("graph", [False, True], ids=("launched", "graph"))
def test_chains_give_the_bits_of_kernels_that_run_alone(chain: str, layout: torch.memory_format, graph: bool) -> None:
    shape, dtype, make = CHAINS[chain]
    torch.manual_seed(0)
    model = make().cuda().to(dtype).train(chain == "batch norm")
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0, 0.1)
    x = torch.randn(shape, device="cuda", dtype=dtype).to(memory_format=layout)
    swapped = normswap.optimize(model, validate="off", min_speedup=None, on_empty="raise")
    layers = [swapped] if chain == "batch norm" else list(swapped)  # Linear -> BatchNorm is one kernel's work
    start = {name: value.clone() for name, value in swapped.state_dict().items()}

    def restart() -> None:
        with torch.no_grad():
            for name, value in swapped.state_dict().items():
                value.copy_(start[name])
        torch.cuda.synchronize()

    with torch.no_grad():
        expected = chained(layers, x, torch.cuda.synchronize)
        restart()
        if not graph:
            found = chained(layers, x, lambda: None)
        else:
            captured = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                chained(layers, x, lambda: None)  # warm up
                restart()
                with torch.cuda.graph(captured, stream=stream):
                    found = chained(layers, x, lambda: None)
            restart()
            captured.replay()
    torch.cuda.synchronize()
    for one, other in zip(found, expected, strict=True):
        assert torch.isfinite(one).all() and torch.equal(one, other)
