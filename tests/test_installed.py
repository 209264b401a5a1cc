"""What others can see of an installed class, and who still runs it: registries, captured forwards, threads, compiled
code, forwards that are changed."""

from __future__ import annotations

import abc
import copy
import gc
import pickle
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from models import Every, randomised
from torch import Tensor, nn
from torch.nn.utils import parametrize

import normswap
from normswap import modules, ops
from normswap.installed import is_installed

X = torch.linspace(-2, 3, 32).reshape(4, 8)
pytestmark = pytest.mark.filterwarnings("ignore:normswap returns a copy")


class Recorder(type):
    """A metaclass that keeps every class made."""

    made: ClassVar[list[str]] = []

    def __new__(cls, name: str, bases: Any, body: Any, **kwargs: Any) -> Any:
        cls.made.append(name)
        return super().__new__(cls, name, bases, body, **kwargs)

    def __init__(cls, name: str, bases: Any, body: Any) -> None:
        super().__init__(name, bases, body)
        cls.made.append(name)


class Registered(nn.Module):
    registry: ClassVar[list[type]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.registry.append(cls)


class L1InRegistry(Registered, metaclass=Recorder):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().mean(dim=-1, keepdim=True)


class AbstractL1(nn.Module, abc.ABC):
    @abc.abstractmethod
    def name(self) -> str: ...

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().mean(dim=-1, keepdim=True)


class ConcreteL1(AbstractL1):
    def name(self) -> str:
        return "l1"


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class TwiceByHand(ByHand):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def in_place(model: nn.Module, x: Tensor | None = X) -> nn.Module:
    return normswap.optimize(model.eval(), x, inplace=True)


# --- registries ---------------------------------------------------------------------------------------------------


def test_no_registry_and_no_metaclass_sees_the_class_made() -> None:
    before = list(Recorder.made), list(Registered.registry)
    model = in_place(L1InRegistry())
    assert normswap.report(model).swapped == ("",)
    assert (Recorder.made, Registered.registry) == before
    assert type(type(model)) is Recorder
    assert type("Later", (L1InRegistry,), {}) in Registered.registry and Recorder.made[-1] == "Later"
    Registered.registry.pop()


def test_an_abstract_class_still_knows_its_instances() -> None:
    model, other = in_place(ConcreteL1()), ConcreteL1()
    assert isinstance(other, ConcreteL1) and isinstance(model, ConcreteL1)
    assert isinstance(model, type(model)) and not isinstance(other, type(model))


def test_a_class_made_is_forgotten_with_its_last_module() -> None:
    class Local(ConcreteL1):
        pass

    model = in_place(Local())
    gone = weakref.ref(type(model))
    normswap.revert(model)
    gc.collect()
    assert gone() is None and Local.__subclasses__() == []


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(8), lambda: nn.GroupNorm(2, 8), ByHand, ConcreteL1])
def test_an_installed_class_keeps_the_names_of_the_original(make: Callable[[], nn.Module]) -> None:
    model = make()
    name = type(model).__module__, type(model).__qualname__
    model = in_place(model)
    assert (type(model).__module__, type(model).__qualname__) == name
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model) and torch.equal(twin(X), model(X))


def test_a_copy_needs_no_constructor_of_its_class() -> None:
    class Asking(ByHand):
        def __new__(cls, size: int) -> Any:
            return super().__new__(cls)

        def __init__(self, size: int) -> None:
            super().__init__()

        def __getnewargs__(self) -> tuple[int]:
            return (8,)

    model = in_place(nn.Sequential(Asking(8)))
    assert normswap.report(model).swapped == ("0",)
    assert torch.equal(copy.deepcopy(model)(X), model(X))


# --- captured forwards --------------------------------------------------------------------------------------------


class Counter:
    """Counts the calls of our op of a kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.calls = 0
        for name in names:
            self._count(monkeypatch, name, getattr(ops, name))

    def _count(self, monkeypatch: pytest.MonkeyPatch, name: str, op: Any) -> None:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return op(*args, **kwargs)

        monkeypatch.setattr(ops, name, counted)

    def during(self, function: Callable[[], Any]) -> int:
        self.calls = 0
        function()
        return self.calls


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch, "layer_norm", "rms_norm", "group_norm", "instance_norm", "l1_norm", "batch_norm")


CAPTURED: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(8),
    "RMSNorm": lambda: nn.RMSNorm(8, eps=1e-6),
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(8, affine=True),
    "by hand": ByHand,
    "L1": ConcreteL1,
    "subclass": lambda: type("Mine", (nn.LayerNorm,), {})(8),
    "GroupNorm + activation": lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU()),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_forward_that_was_captured_asks_whether_it_is_on(name: str, counter: Counter) -> None:
    model = in_place(CAPTURED[name](), None)
    captured, x = model.forward, X.reshape(2, 8, 2) if "Instance" in name else X
    expected = captured(x)
    assert counter.during(lambda: captured(x)) == 1
    with normswap.disabled(model):
        assert counter.during(lambda: captured(x)) == 0
        torch.testing.assert_close(captured(x), expected)
    assert counter.during(lambda: captured(x)) == 1
    normswap.revert(model)
    assert counter.during(lambda: captured(x)) == 0
    torch.testing.assert_close(captured(x), expected)


def test_so_does_that_of_a_batch_norm_in_training(counter: Counter) -> None:
    model = nn.BatchNorm1d(8)
    captured = normswap.apply(model, normswap.plan(model), inplace=True).forward
    assert counter.during(lambda: captured(X)) == 1
    with normswap.disabled(model):
        assert counter.during(lambda: captured(X)) == 0


def test_a_wrapper_on_the_instance_as_accelerate_makes_it(counter: Counter) -> None:
    model = in_place(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    norm = model[1]
    old = norm.forward
    norm.forward = types.MethodType(lambda self, x: old(x), norm)
    assert counter.during(lambda: model(X)) == 1
    with normswap.disabled(model):
        assert counter.during(lambda: model(X)) == 0
    normswap.revert(model)
    assert counter.during(lambda: model(X)) == 0


# --- threads ------------------------------------------------------------------------------------------------------


def test_two_threads_inside_disabled(counter: Counter) -> None:
    model = in_place(nn.Sequential(nn.LayerNorm(8)))
    inside, left = threading.Event(), threading.Event()
    during: list[int] = []

    def other() -> None:
        with normswap.disabled(model):
            inside.set()
            left.wait(10)
            during.append(counter.during(lambda: model(X)))

    thread = threading.Thread(target=other)
    with normswap.disabled(model):
        thread.start()
        inside.wait(10)
    left.set()
    thread.join()
    assert during == [0]
    assert counter.during(lambda: model(X)) == 1


def test_what_is_reverted_inside_disabled_stays_so() -> None:
    model = in_place(nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8)))
    with normswap.disabled(model):
        normswap.revert(model[0])
    assert type(model[0]) is nn.LayerNorm and type(model[1]) is modules.LayerNorm


# --- another tool's class over ours -------------------------------------------------------------------------------


def test_a_class_put_over_ours_is_kept_over_the_original() -> None:
    class Watched:
        def watched(self) -> bool:
            return True

    model = in_place(nn.Sequential(nn.LayerNorm(8)))
    model[0].__class__ = over = type("WatchedNorm", (Watched, type(model[0])), {})
    assert normswap.report(model).swapped == ("0",)
    with normswap.disabled(model):
        assert model[0].watched() and not is_installed(type(model[0]))
    assert type(model[0]) is over
    normswap.revert(model)
    assert model[0].watched() and type(model[0]).__bases__ == (Watched, nn.LayerNorm)


def test_a_parametrization_after_the_swap_survives_revert() -> None:
    model = in_place(nn.Sequential(randomised(nn.LayerNorm(8))))
    parametrize.register_parametrization(model[0], "weight", nn.Tanh())
    expected = model(X)
    normswap.revert(model)
    torch.testing.assert_close(model(X), expected)
    assert parametrize.is_parametrized(model[0]) and not is_installed(type(model[0]))
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.LayerNorm


# --- compiled code ------------------------------------------------------------------------------------------------


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any) -> tuple[Any, list[int]]:
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph

    return torch.compile(function, backend=backend), graphs


@pytest.mark.usefixtures("dynamo")
def test_compiled_code_of_other_models_is_kept() -> None:
    other, graphs = compiled(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()).eval())
    for _ in range(3):
        other(X)
    count = len(graphs)
    model = in_place(randomised(Every()), torch.randn(8, 6, 5))
    normswap.validate(model, torch.randn(8, 6, 5))
    with normswap.disabled(model):
        other(X)
    normswap.revert(model)
    other(X)
    assert len(graphs) == count


class Held:
    def __init__(self, model: nn.Module) -> None:
        self.model = model


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("through", ["model", "function", "graph break", "attribute"])
def test_compiled_code_of_this_model_follows_however_it_is_reached(through: str) -> None:
    class Doubled(modules.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval()
    held = Held(model)

    def broken(x: Tensor) -> Tensor:
        x = model[0](x)
        torch._dynamo.graph_break()
        return model[1](x)

    functions = {
        "model": model,
        "function": lambda x: model(x) + 0,
        "graph break": broken,
        "attribute": lambda x: held.model(x) + 0,
    }
    run, _ = compiled(functions[through])
    expected = model(X)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(modules._MODULE_CLASSES, nn.LayerNorm, ("layer_norm", Doubled))
        for _ in range(4):
            torch.testing.assert_close(run(X), expected)
        normswap.optimize(model, validate="off", inplace=True)
        for _ in range(4):
            torch.testing.assert_close(run(X), 2 * expected)
        with normswap.disabled(model):
            for _ in range(4):
                torch.testing.assert_close(run(X), expected)
        torch.testing.assert_close(run(X), 2 * expected)
        normswap.revert(model)
        torch.testing.assert_close(run(X), expected)


# --- forwards that are changed ------------------------------------------------------------------------------------


def test_a_forward_patched_between_two_calls_is_the_one_installed_for(
    monkeypatch: pytest.MonkeyPatch, counter: Counter
) -> None:
    class Local(ByHand):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight

    first = in_place(Local())
    monkeypatch.setattr(Local, "forward", ByHand.forward)
    second = in_place(Local())
    assert normswap.report(second).swapped == ("",)
    assert counter.during(lambda: second(X)) == 1
    assert counter.during(lambda: first(X)) == 0  # what it was read for runs no more


PATCHED: dict[str, tuple[Callable[[], nn.Module], type[nn.Module]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(8), nn.LayerNorm),
    "RMSNorm": (lambda: nn.RMSNorm(8, eps=1e-6), nn.RMSNorm),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), nn.GroupNorm),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(2), nn.InstanceNorm1d),
    "subclass": (lambda: type("Mine", (nn.LayerNorm,), {})(8), nn.LayerNorm),
    "by hand": (ByHand, ByHand),
    "L1": (ConcreteL1, AbstractL1),
    "activation's norm": (lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU()), nn.GroupNorm),
}


@pytest.mark.parametrize("name", PATCHED)
@pytest.mark.parametrize("way", ["forward", "code"])
def test_a_forward_replaced_after_the_swap_is_the_one_that_runs(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, cls = PATCHED[name]
    owner = cls if "forward" in vars(cls) else next(base for base in cls.__mro__ if "forward" in vars(base))
    model, x = in_place(make(), None), X.reshape(2, 2, 8)[:, :, :] if "Instance" in name else X

    def forward(self: nn.Module, input: Tensor) -> Tensor:
        return input + 7

    if way == "forward":
        monkeypatch.setattr(owner, "forward", forward)
    else:
        monkeypatch.setattr(owner.forward, "__code__", forward.__code__)
    assert torch.equal(model(x), (x + 7).relu() if isinstance(model, nn.Sequential) else x + 7)


def test_the_code_of_a_method_that_forward_calls_is_asked_too() -> None:
    class InTwo(ByHand):
        def scaled(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(x) * self.weight

    def scaled(self: Any, x: Tensor) -> Tensor:
        return x + 7

    model = in_place(InTwo())
    assert normswap.report(model).swapped == ("",)
    InTwo.scaled.__code__ = scaled.__code__
    assert torch.equal(model(X), (X + 7) * model.weight)


class MadeAnew(ConcreteL1):
    def __reduce__(self) -> Any:
        return MadeAnew, ()


class OfItsClass(ConcreteL1):
    def __reduce__(self) -> Any:
        return self.__class__, (), self.__dict__


class WithoutWhatIsOpen(ConcreteL1):
    def __init__(self) -> None:
        super().__init__()
        self.open: Any = (number for number in ())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return WithoutWhatIsOpen, (), {**self.__dict__, "open": None}


@pytest.mark.parametrize("cls", [OfItsClass, WithoutWhatIsOpen])
def test_what_says_itself_how_it_is_pickled_is_pickled_so(cls: Any) -> None:
    model = in_place(cls(), None)
    assert normswap.report(model).swapped == ("",)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(twin) is cls and torch.equal(twin(X), model(X))


def test_what_a_copy_of_a_subclass_of_an_installed_class_is() -> None:
    class Mine(modules.LayerNorm):
        pass

    assert type(copy.deepcopy(Mine(8))) is Mine
    swapped: Any = in_place(nn.LayerNorm(8), None)
    swapped.__class__ = type("Over", (type(swapped),), {})
    assert type(copy.deepcopy(swapped)) is type(swapped)
    assert type(copy.deepcopy(in_place(MadeAnew(), None))) is MadeAnew


def test_a_registry_is_told_of_a_subclass_of_an_installed_class() -> None:
    swapped: Any = in_place(L1InRegistry(), None)
    assert Recorder("Further", (type(swapped),), {}) in Registered.registry
