"""What can be timed and chosen: the sites of a plan - modules, runs of an nn.Sequential, each region of a forward by
itself - with their original code and ours, on inputs like the recorded ones."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from normswap import installed, modules
from normswap.plans import REGION, Match, Swap
from normswap.proof.whole_model import tensors_in
from normswap.regions.helper import make_helper
from normswap.regions.listening import Listener, holder_of, listening
from normswap.regions.rewrite import Compiled
from normswap.regions.spec import Region, children_of
from normswap.timing.clock import NO_COST, Cost, Function
from normswap.timing.model import Arrangement, Waiting
from normswap.untouched import classes

_PLAIN = (Tensor, nn.Parameter)
DEVICE_NOISE, HOST_NOISE = 0.01, 0.05
"""The least by which times must differ, as a share: equal runs of equal code differ by less."""


@dataclass(frozen=True)
class Use:
    """One way in which a candidate is called, ``calls`` times in a run of the model.

    ``key`` is all that its time depends on: uses with the same key, of whatever candidate, are timed once.
    ``functions``, within it, gives a call of each code that is timed, the original and ours, on inputs of their own.
    """

    key: Hashable
    calls: int
    device: torch.device
    functions: Callable[[], contextlib.AbstractContextManager[Sequence[Function]]]


@dataclass(frozen=True)
class Candidate:
    """A part of the model that was proved and can be swapped by itself.

    ``overlaps`` names the candidates that cannot be swapped beside it (a fused region names the norms inside it); it is
    enough that one of the two says so. Without ``uses`` there is nothing to time, and it stays swapped. The others say
    what its calls in one run of the model cost, the original's and ours; without ``calls`` nothing was timed, and
    ``note`` may say why.
    """

    name: str
    uses: tuple[Use, ...] = ()
    overlaps: frozenset[str] = frozenset()
    calls: int = 0
    original: Cost = NO_COST
    ours: Cost = NO_COST
    note: str = ""

    def gain(self, waiting: Waiting) -> float | None:
        """How many times faster ours is where the model waits; exactly 1 where the difference is noise, None when it
        was not timed."""
        if not self.calls:
            return None
        ours, saved = waiting.weighed(self.ours), self.saved_us(waiting)
        return 1.0 if abs(saved) <= self.noise_us(waiting) or ours <= 0 else (ours + saved) / ours

    def saved_us(self, waiting: Waiting) -> float:
        """Microseconds of one run of the model."""
        return waiting.weighed(self.original) - waiting.weighed(self.ours)

    def noise_us(self, waiting: Waiting) -> float:
        """What they may be off by."""
        original, ours = self.original, self.ours
        device = max(DEVICE_NOISE * original.device_us, original.device_noise_us + ours.device_noise_us)
        host = max(HOST_NOISE * original.host_us, original.host_noise_us + ours.host_noise_us)
        return waiting.weighed(Cost(device, host))


@dataclass(frozen=True)
class Code:
    """What computes a candidate's outputs from what it is given, and the parameters it reads."""

    function: Callable[..., Any]
    parameters: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Form:
    """All that is kept of a tensor: enough to make one that is handled alike."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # of its first element from a 16-byte boundary, in elements
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, x: Tensor) -> Form:
        offset = x.data_ptr() % 16 // x.element_size()
        return cls(tuple(x.shape), x.stride(), offset, x.dtype, x.device, x.requires_grad)

    def made(self) -> Tensor:
        """A tensor of this form, of random values that do not touch the global generators; zeros if not of floats."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        memory = torch.zeros(self.offset + extent, dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point:
            memory.normal_(generator=torch.Generator(self.device).manual_seed(0))
        return memory.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class Call:
    """One call of a candidate: what it was given, tensors by their forms, and the autocast it came under."""

    inputs: tuple[Any, ...]
    structure: TreeSpec = field(compare=False)
    device: torch.device
    autocast: torch.dtype | None

    @classmethod
    def of(cls, given: Any) -> Call | None:
        """None for a call that cannot be made again: an input that is no plain tensor or hashable value, or no tensor
        of floats with elements among them."""
        inputs, structure = tree_flatten(given)
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        floats = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel() > 0]
        if not floats or any(type(tensor) not in _PLAIN for tensor in tensors):
            return None
        if any(not isinstance(value, Hashable) for value in inputs):
            return None
        device = floats[0].device
        forms = tuple(Form.of(value) if isinstance(value, Tensor) else value for value in inputs)
        return cls(forms, structure, device, _autocast(device.type))

    def made(self) -> tuple[Any, ...]:
        """Inputs of these forms."""
        return tuple(value.made() if isinstance(value, Form) else value for value in self.inputs)

    def function(self, code: Code, inputs: Sequence[Any], gradients: bool) -> Function:
        """A call of ``code`` on ``inputs``; with ``gradients`` its backward too, to the inputs and parameters that
        require them."""
        leaves = [
            value.detach().requires_grad_(gradients and form.requires_grad) if isinstance(form, Form) else value
            for form, value in zip(self.inputs, inputs, strict=True)
        ]
        call = partial(code.function, tree_unflatten(leaves, self.structure))
        if not gradients:
            return call
        wanted = [t for t in (*leaves, *code.parameters) if isinstance(t, Tensor) and t.requires_grad]
        return with_backward(call, wanted)


def _autocast(kind: str) -> torch.dtype | None:
    """The dtype of the present autocast, if there is one."""
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def with_backward(call: Callable[[], Any], wanted: Sequence[Tensor]) -> Function:
    """``call`` and the gradients of its outputs, for cotangents of ones, to the ``wanted`` tensors; no ``.grad`` is
    touched. Just ``call`` where no output requires a gradient."""

    def forward_and_backward() -> object:
        outputs = [tensor for tensor in tensors_in(call()) if tensor.requires_grad]
        if not outputs or not wanted:
            return outputs
        cotangents = [torch.ones_like(tensor) for tensor in outputs]
        return torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)

    return forward_and_backward


@dataclass
class Recorder:
    """The calls of one candidate in one run of the model, like ones counted together."""

    calls: Counter[Call] = field(default_factory=Counter)

    def add(self, given: Any) -> None:
        """What the candidate was just called with."""
        call = Call.of(given)
        if call is not None:
            self.calls[call] += 1

    def uses(self, key: Hashable, codes: Callable[[], Sequence[Code]], gradients: bool) -> tuple[Use, ...]:
        """Every form of call with its count; ``codes`` makes what is timed, on state of its own, and ``key`` says what
        the time depends on besides the inputs, the autocast and whether gradients are asked for."""
        return tuple(
            Use((key, call, gradients), count, call.device, partial(_functions, call, codes, gradients))
            for call, count in self.calls.most_common()
        )


@contextlib.contextmanager
def _functions(call: Call, codes: Callable[[], Sequence[Code]], gradients: bool) -> Iterator[list[Function]]:
    kind = call.device.type
    device: Any = torch.cuda.device(call.device) if kind == "cuda" else contextlib.nullcontext()
    autocast = torch.autocast(kind, call.autocast, enabled=call.autocast is not None)
    with torch.inference_mode(False), torch.set_grad_enabled(gradients), device, autocast:
        made, inputs = codes(), call.made()
        yield [call.function(code, inputs, gradients) for code in made]


def candidates(model: nn.Module, swaps: Sequence[Swap], run: Callable[[], Any], *, gradients: bool) -> list[Candidate]:
    """The sites of ``swaps`` in the swapped ``model`` with the calls that ``run``, one run of it, brings to them.
    ``gradients``: the run records them, and what is timed has a backward."""
    sites = [_Site(model.get_submodule(swap.site.name), swap) for swap in swaps]
    originals = [(site.module, installed.class_before(site.module)) for site in sites]
    with classes(originals), listening(sites), torch.set_grad_enabled(gradients):
        run()
    return [candidate for site in sites for candidate in site.candidates(gradients)]


class _Site(Listener):
    """What reaches a site in a run of the original."""

    def __init__(self, module: nn.Module, swap: Swap) -> None:
        super().__init__(module, installed.original_class(module), swap.match)
        self.swap, self.is_region = swap, swap.match.kind == REGION
        self.recorders = {id(one): Recorder() for one in self.compiled}

    def heard(self, compiled: Compiled, packed: Any) -> None:
        """Records."""
        self.recorders[id(compiled)].add(packed)

    def candidates(self, gradients: bool) -> list[Candidate]:
        """The site, or each of its regions, with every form of call."""
        pairs = zip(names_of(self.swap), self.compiled, strict=True)
        return [self._candidate(name, one, gradients) for name, one in pairs]

    def _candidate(self, name: str, compiled: Compiled, gradients: bool) -> Candidate:
        region, codes = compiled.region, lambda: [self._code(compiled, swapped) for swapped in (False, True)]
        uses = self.recorders[id(compiled)].uses(looks_of(region, self.owner), codes, gradients)
        inside = [f"{self.swap.site.name}.{region.norm}".lstrip(".")] if self.is_region and region.type else []
        return Candidate(name, uses, frozenset(inside))

    def _code(self, compiled: Compiled, swapped: bool) -> Code:
        holder = holder_of(compiled.region, self.owner)
        for child in holder._modules.values():
            object.__setattr__(child, "__class__", installed.original_class(child))
        if self.is_region:
            function = partial(make_helper(compiled) if swapped else compiled.snippet, holder)
        else:
            (function,) = holder._modules.values()
            cls = modules.swapped_class(self.match.kind, self.original, self.match.attributes)
            object.__setattr__(function, "__class__", cls if swapped else self.original)
        return Code(function, [*holder.parameters()])


def names_of(swap: Swap) -> list[str]:
    """Of the candidates that ``swap`` is: the site's, or one for each of several regions."""
    site, count = swap.site.name, len(swap.match.attributes.get("regions", ()))
    return [site] if count <= 1 else [f"{site}[{index}]" for index in range(count)]


def kept_of(swap: Swap, kept: Collection[str]) -> Match | None:
    """What is left of ``swap`` with the candidates ``kept``: all, some of its regions, or None."""
    chosen = [index for index, name in enumerate(names_of(swap)) if name in kept]
    regions = swap.match.attributes.get("regions", ())
    if not chosen or len(chosen) >= len(regions):
        return swap.match if chosen else None
    return Match(swap.match.kind, {**swap.match.attributes, "regions": [regions[index] for index in chosen]})


def arrangements(model: nn.Module, swaps: Sequence[Swap]) -> Arrangement:
    """What gives the swapped ``model``, for a block, the original classes at all sites but those named."""
    found = [(swap, model.get_submodule(swap.site.name)) for swap in swaps]
    return lambda kept: classes([(module, _class_with(module, kept_of(swap, kept))) for swap, module in found])


def _class_with(module: nn.Module, match: Match | None) -> type[nn.Module]:
    """The class of the swapped ``module`` with ``match`` in the place of what it has."""
    if match is None:
        return installed.class_before(module)
    now: Any = installed.installed_class(module)  # there is one: it is swapped
    new = modules.swapped_class(match.kind, installed.original_class(module), match.attributes)
    return installed.rebased(type(module), now, new)


def looks_of(region: Region, owner: nn.Module) -> tuple[Any, ...]:
    """What tells regions apart whose calls may take different time; where one stands in its forward does not matter."""
    steps = tuple((step.does, step.operand) for step in region.steps)
    constants = repr(region.constants)
    children = [owner._modules[name] for name in (*children_of(region), *region.feeds)]
    seen = tuple(None if child is None else looks(child) for child in children)
    return region.kind, steps, constants, region.shared, str(region.activation), seen


_SETTINGS = (bool, int, float, str, tuple, type(None))


def looks(module: nn.Module) -> tuple[Any, ...]:
    """What tells modules apart whose calls may take different time: classes, plain attributes, mode, parameters."""
    found: list[Any] = []
    for one in module.modules():
        plain = {k: v for k, v in one.__dict__.items() if isinstance(v, _SETTINGS)}
        own = {**one._parameters, **one._buffers}
        tensors = {k: None if t is None else (t.shape, t.stride(), t.dtype, t.requires_grad) for k, t in own.items()}
        found.append((type(one), repr(plain), repr(tensors)))
    return tuple(found)
