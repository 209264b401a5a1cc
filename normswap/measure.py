"""Never slower: each swapped site timed against the original on the shapes one run of the model brings to it.

Only shapes, dtypes and strides are kept of that run; what is timed runs on made-up values, on copies of the site; of an
nn.Sequential only the runs of children that are swapped. Sites that are alike in every respect that can be seen -
classes, attributes, parameters, inputs - are timed once.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normswap import modules, native, timer
from normswap.plan import Match, Swap
from normswap.sites import detached_copy, preserved

_MAX_FORMS = 4
_WARM_UP = 3
_ROUNDS = 9
_BLOCK_US = 2000.0
_MAX_CALLS = 100
_PATIENCE_S = 1.0
_BAR = 30

Timer = Callable[[Sequence[Callable[[], object]]], list[float]]
"""Microseconds a call of each of several functions."""


@dataclass(frozen=True)
class SiteTiming:
    """Microseconds a call of one site, the original's and ours (forward and backward where the site trains), averaged
    over its ``calls`` in one run of the model; in an nn.Sequential every swapped run of children counts as a call. A
    site that could not be timed has zeros, and the reason in ``note``."""

    name: str
    calls: int
    eager_us: float = 0.0
    ours_us: float = 0.0
    note: str = ""

    @property
    def gain(self) -> float | None:
        """How many times faster ours is; None when it was not timed."""
        return self.eager_us / self.ours_us if self.ours_us > 0 else None


@dataclass(frozen=True)
class _Form:
    """All that is kept of an input: enough to make one that is handled alike."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # of its first element from a 16-byte boundary, in elements
    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None

    @classmethod
    def of(cls, x: Tensor) -> _Form:
        kind = x.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        offset = x.data_ptr() % 16 // x.element_size()
        return cls(tuple(x.shape), x.stride(), offset, x.dtype, x.device, autocast)

    def made(self) -> Tensor:
        """A tensor of this form, of random values that do not touch the global generators."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        memory = torch.empty(self.offset + extent, dtype=self.dtype, device=self.device)
        memory.normal_(generator=torch.Generator(self.device).manual_seed(0))
        return memory.as_strided(self.shape, self.stride, self.offset)


def timer_for(device: torch.device) -> Timer | None:
    """What times a call on ``device``; None where our kernels do not run, so that there is nothing to time."""
    return _cuda_timer if device.type == "cuda" and native.available() else None


def time_sites(model: nn.Module, swaps: Sequence[Swap], run: Callable[[], Any]) -> list[SiteTiming]:
    """Time the sites of ``swaps`` in the swapped ``model`` that ``run``, a run on its example inputs, reaches with a
    floating-point tensor on a GPU. The model is left as it was."""
    sites = {swap.site.name: _parts(model.get_submodule(swap.site.name), swap.match) for swap in swaps}
    with preserved(model):
        with _recording([part for parts in sites.values() for part in parts]), torch.no_grad():
            run()
        learns = any(p.requires_grad for p in model.parameters())
        known: dict[Any, tuple[float, float] | str] = {}
        timings = []
        with _progress(len(sites)) as tell:
            for name, parts in sites.items():
                tell()
                timing = _time_site(name, parts, learns, known)
                timings += [] if timing is None else [timing]
    return timings


@dataclass
class _Part:
    """What is timed of a site: a module, its class before and after the swap, whether the site trains, the module whose
    inputs it takes, and the forms of these with how often they came."""

    module: nn.Module
    original: type[nn.Module]
    swapped: type[nn.Module]
    training: bool
    called: nn.Module
    forms: Counter[_Form] = field(default_factory=Counter)


def _parts(site: nn.Module, match: Match) -> list[_Part]:
    found = []
    for piece, module, called in modules.pieces(site, match):
        original = modules.original_class(module) or type(module)
        swapped = modules.swapped_class(piece.kind, original, piece.attributes)
        found.append(_Part(module, original, swapped, site.training, called))
    return found


@contextlib.contextmanager
def _recording(parts: Sequence[_Part]) -> Iterator[None]:
    handles = []
    try:
        for part in parts:  # a hook on a child of a swapped module has that call it
            handles.append(part.called.register_forward_pre_hook(_recorder(part.forms), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _recorder(forms: Counter[_Form]) -> Callable[..., None]:
    def on_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        if x is None or type(x) not in (Tensor, nn.Parameter) or not x.is_floating_point() or x.numel() == 0:
            return
        if timer_for(x.device) is not None:
            forms[_Form.of(x)] += 1

    return on_call


def _time_site(
    name: str, parts: Sequence[_Part], learns: bool, known: dict[Any, tuple[float, float] | str]
) -> SiteTiming | None:
    """The mean over the forms the site is called with most; None when it was not called on a GPU."""
    calls, eager, ours = 0, 0.0, 0.0
    total = sum(part.forms.total() for part in parts)
    for part in parts:
        for form, count in part.forms.most_common(_MAX_FORMS):
            key = (form, part.swapped, *_looks(part.module))
            if key not in known:
                known[key] = _time_form(part, form, learns and part.training)
            times = known[key]
            if isinstance(times, str):
                return SiteTiming(name, total, note=times)
            calls, eager, ours = calls + count, eager + count * times[0], ours + count * times[1]
    return SiteTiming(name, total, eager / calls, ours / calls) if calls else None


def _looks(module: nn.Module) -> tuple[Any, ...]:
    """What tells modules apart whose calls may take different time."""
    found: list[Any] = []
    for one in module.modules():
        plain = {k: v for k, v in one.__dict__.items() if isinstance(v, bool | int | float | str | tuple | None)}
        own = {**one._parameters, **one._buffers}
        tensors = {k: None if t is None else (t.shape, t.stride(), t.dtype, t.requires_grad) for k, t in own.items()}
        found.append((type(one), repr(plain), repr(tensors)))
    return tuple(found)


def _time_form(part: _Part, form: _Form, gradients: bool) -> tuple[float, float] | str:
    time_of = timer_for(form.device)
    if time_of is None:
        return "not timed: our kernels do not run here"
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), _as_called(form):
            x = form.made()
            both = [detached_copy(part.module, cls) for cls in (part.original, part.swapped)]
            eager, ours = time_of([_call(copy, x, gradients) for copy in both])
    except torch.OutOfMemoryError:
        return "not timed: out of memory"
    return eager, ours


@contextlib.contextmanager
def _as_called(form: _Form) -> Iterator[None]:
    """On the device and under the autocast of the call."""
    device, kind = form.device, form.device.type
    with contextlib.ExitStack() as stack:
        if kind == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.autocast(kind, form.autocast, enabled=form.autocast is not None))
        yield


def _call(site: nn.Module, x: Tensor, gradients: bool) -> Callable[[], object]:
    if not gradients:
        return lambda: site(x)
    leaf = x.detach().requires_grad_()
    wanted = [leaf, *(p for p in site.parameters() if p.requires_grad)]
    cotangent = torch.ones_like(site(leaf))

    def forward_and_backward() -> object:
        return torch.autograd.grad(site(leaf), wanted, cotangent, allow_unused=True)

    return forward_and_backward


def _cuda_timer(functions: Sequence[Callable[[], object]]) -> list[float]:
    """Medians over blocks of as many calls as are long enough for a clock."""
    device = torch.device("cuda")
    for _ in range(_WARM_UP):
        for function in functions:
            function()
    once = max(timer.block_us(function, device) for function in functions)
    return timer.medians_us(functions, device, _ROUNDS, max(1, min(_MAX_CALLS, math.ceil(_BLOCK_US / once))))


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """On a terminal, a bar that says how far the timing is, once that has taken a second; nothing elsewhere."""
    done, shown, started = 0, False, time.monotonic()

    def tell() -> None:
        nonlocal done, shown
        if sys.stderr is not None and sys.stderr.isatty() and time.monotonic() - started > _PATIENCE_S:
            bar = "#" * (_BAR * done // total)
            print(f"\rnormswap: timing [{bar:.<{_BAR}}] {done} of {total} sites", end="", file=sys.stderr, flush=True)
            shown = True
        done += 1

    try:
        yield tell
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
