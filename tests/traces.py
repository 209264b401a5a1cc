"""All that a call could leave behind in a model or the process, and a model that has much of it."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from models import L1, Projection, randomised
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode

import normswap

PACKAGE = str(Path(normswap.__file__).parent)


class Stop(BaseException):
    """What is raised at a step."""


class Cluttered(nn.Module):
    """Sites of five kinds, one of them under two names; dropout, hooks, tied weights, and a forward that
    stores, counts, draws and overwrites a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.down.weight = self.up.weight
        self.norm = nn.LayerNorm(6)
        self.again = self.norm
        self.projection = Projection(6, 8)
        self.l1, self.group, self.drop = L1(), nn.GroupNorm(2, 8), nn.Dropout(0.3)
        self.batch = nn.BatchNorm1d(8)
        self.register_buffer("last", torch.zeros(4, 6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)
        self.seen: list[int] = []
        self.norm.register_forward_hook(lambda module, args, output: None)
        self.group.register_forward_pre_hook(lambda module, args: self.seen.append(2))
        self.batch.register_full_backward_hook(lambda module, grad_input, grad_output: None)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(1)
        self.noise = random.random() + np.random.rand()
        x = self.again(self.down(self.norm(self.up(x))))
        self.last = x.detach()
        return self.drop(self.batch(self.group(self.l1(self.projection(x)))))


def cluttered() -> Cluttered:
    """In train mode, with gradients."""
    model = randomised(Cluttered()).train()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


class Trace:
    """What ``model`` and the process are like now; a later one equals it if nothing was left behind."""

    def __init__(self, model: nn.Module) -> None:
        self.kept = list(model.modules())  # so that no id is used again
        self.tensors = [*model.parameters(), *model.buffers()]
        self.classes = [type(module) for module in self.kept]
        self.state = {
            "modules": [id(module) for module in self.kept],
            "names": [name for name, _ in model.named_modules(remove_duplicate=False)],
            "attributes": [_held(module.__dict__) for module in self.kept],
            "tensors": [(id(t), t.data_ptr(), t.requires_grad, id(t.grad)) for t in self.tensors],
            "process": _process(),
        }
        self.values = [t.detach().clone() for p in self.tensors for t in (p, p.grad) if t is not None]
        self.generators = [
            torch.get_rng_state(),
            *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []),
        ]

    def assert_same(self, model: nn.Module, *, classes: bool = True) -> None:
        """Fail for the first difference between ``model`` now and then; ``classes``: those too."""
        now = Trace(model)
        for key, before in self.state.items():
            assert now.state[key] == before, key
        for kind in ("values", "generators"):
            for mine, theirs in zip(getattr(now, kind), getattr(self, kind), strict=True):
                assert torch.equal(mine, theirs), kind
        assert not classes or now.classes == self.classes


def _held(value: Any) -> Any:
    """A value by identity, and what is in it if it is a container."""
    if isinstance(value, (dict, OrderedDict)):
        return id(value) if value.get("_parameters") is None else 0, [(k, _held(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return id(value), [_held(one) for one in value]
    return value if isinstance(value, (int, float, str)) else id(value)


def _process() -> tuple[Any, ...]:
    hooks = [name for name, value in vars(torch_module).items() if name.startswith("_global") and value]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        hooks,
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


def _qualified(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # Python 3.11


@contextmanager
def raising_at_call(step: int) -> Iterator[list[str]]:
    """Raise Stop when a function of the package is called, or a generator of it resumed, for the ``step``-th time. The
    list tells the functions called, with their files."""
    called: list[str] = []

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        # Raised as Python 3.10 resumes a generator, no try in that would see it.
        resumes = sys.version_info < (3, 11) and frame.f_lasti >= 0
        if event == "call" and not resumes and frame.f_code.co_filename.startswith(PACKAGE):
            called.append(f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]} {_qualified(frame.f_code)}")
            if len(called) == step + 1:
                sys.setprofile(None)
                raise Stop(called[-1])

    sys.setprofile(on_event)
    try:
        yield called
    finally:
        sys.setprofile(None)


class _RaisingAtOp(TorchDispatchMode):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.seen = step, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if self.seen == self.step + 1:
            raise Stop(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def raising_at_op(step: int) -> Iterator[_RaisingAtOp]:
    """Raise Stop in place of the ``step``-th operation of torch."""
    with _RaisingAtOp(step) as mode:
        yield mode
