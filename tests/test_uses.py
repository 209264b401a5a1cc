"""Whatever the code of a model does with its modules: folded it computes the same, or what differs stays, with a
warning. What calls its modules whole folds."""

from __future__ import annotations

import functools
import itertools
import operator
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolution_models import bn, conv, drawn
from torch import Tensor, nn

import normswap
from normswap import folding
from normswap.uses import uses_in

X = torch.randn(2, 6, 5, 5)


class AttributeDict(dict):  # type: ignore[type-arg]
    """As many configurations are: asked for anything it is no name of, it raises a KeyError."""

    __getattr__ = dict.__getitem__


class Block(nn.Module):
    config = AttributeDict(scale=1.0)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv(), bn()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x))) * self.config.scale

    def pre(self, x: Tensor) -> Any:
        return self.conv(x)

    @property
    def first(self) -> Any:
        return self.conv


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row, self.block = nn.Sequential(conv(), bn(), nn.ReLU()), Block()
        self.rows = nn.ModuleList([nn.Sequential(conv(), bn()), nn.Sequential(conv(), bn())])
        self.stages, self.table = [self.row], {"row": self.row}
        self.dispatch: dict[str, Any] = {"a": self.run_a}
        self.first_of_the_row = lambda x: self.row[0](x)
        self.partly = functools.partial(of_the_net, self)
        self.conv, self.bn = conv(), bn()

    def whole(self, x: Tensor) -> Any:
        x = self.block(self.row(x))
        for row in self.rows:
            x = row(x)
        return x

    def run_a(self, x: Tensor) -> Any:
        return self.row[0](x)

    @property
    def head(self) -> nn.Module:
        return self.row[0]

    @property
    def kernel(self) -> Any:
        return self.conv.weight

    @staticmethod
    def stat(stem: Any, x: Tensor) -> Any:
        return stem[0](x)

    def each(self, rows: Any, x: Tensor) -> Any:
        return sum(row[0](x) for row in rows)


def of_the_net(net: Any, x: Tensor) -> Any:
    return net.row[0](x)


def of_rows(rows: Any, x: Tensor) -> Any:
    return sum(row[0](x) for row in rows)


def wrapping(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


class Uses:
    """Forwards, each of which takes something apart; what each adds to the whole."""

    def by_a_property(self: Any, x: Any) -> Any:
        return self.head(x)

    def weights_by_a_property(self: Any, x: Any) -> Any:
        return self.bn(self.conv(x)) + self.kernel.sum()

    def by_a_function(self: Any, x: Any) -> Any:
        return of_the_net(self, x)

    def rows_by_a_function(self: Any, x: Any) -> Any:
        return of_rows(self.rows, x)

    def rows_by_a_method(self: Any, x: Any) -> Any:
        return self.each(self.rows, x)

    def by_a_static_method(self: Any, x: Any) -> Any:
        return self.stat(self.row, x)

    def unpacked(self: Any, x: Any) -> Any:
        first, _, _ = self.row
        return first(x)

    def unpacked_in_a_loop(self: Any, x: Any) -> Any:
        out = 0
        for first, _ in self.rows:
            out = out + first(x)
        return out

    def annotated(self: Any, x: Any) -> Any:
        first: nn.Module = self.row[0]
        return first(x)

    def mapped(self: Any, x: Any) -> Any:
        return list(map(lambda one: one(x), self.row))[0]  # noqa: C417, RUF015

    def starred(self: Any, x: Any) -> Any:
        out = 0
        for one in [*self.row, *self.rows[0]]:
            x = one(x)
            out = out + x
        return out

    def added_lists(self: Any, x: Any) -> Any:
        out = 0
        for one in list(self.row) + list(self.rows[0]):
            x = one(x)
            out = out + x
        return out

    def chained(self: Any, x: Any) -> Any:
        out = 0
        for one in itertools.chain(*self.rows):
            x = one(x)
            out = out + x
        return out

    def in_a_dict(self: Any, x: Any) -> Any:
        kept = {"a": self.row}
        return kept["a"][0](x)

    def put_in_a_dict(self: Any, x: Any) -> Any:
        kept = {}
        kept["r"] = self.row
        return kept["r"][0](x)

    def in_a_dict_comprehension(self: Any, x: Any) -> Any:
        kept = {place: one for place, one in enumerate(self.row)}  # noqa: C416
        return kept[0](x)

    def popped(self: Any, x: Any) -> Any:
        layers = list(self.row)
        return layers.pop(0)(x)

    def appended(self: Any, x: Any) -> Any:
        layers = []
        layers.append(self.row)
        return layers[0][0](x)

    def of_a_plain_list(self: Any, x: Any) -> Any:
        return self.stages[0][0](x)

    def of_a_plain_dict(self: Any, x: Any) -> Any:
        return self.table["row"][0](x)

    def dispatched(self: Any, x: Any) -> Any:
        return self.dispatch["a"](x)

    def by_a_computed_method(self: Any, x: Any, mode: str = "a") -> Any:
        return getattr(self, f"run_{mode}")(x)

    def by_getattr_itself(self: Any, x: Any) -> Any:
        return self.row.__getattr__("0")(x)

    def by_modules(self: Any, x: Any) -> Any:
        return self.row._modules.get("0")(x)

    def by_an_attrgetter(self: Any, x: Any) -> Any:
        return operator.attrgetter("row.0")(self)(x)

    def by_a_method_of_a_child(self: Any, x: Any) -> Any:
        return self.block.pre(x)

    def by_a_property_of_a_child(self: Any, x: Any) -> Any:
        return self.block.first(x)

    def by_a_partial(self: Any, x: Any) -> Any:
        return functools.partial(of_the_net, self)(x)

    def by_getitem(self: Any, x: Any) -> Any:
        return self.row.__getitem__(0)(x)

    def by_a_default(self: Any, x: Any) -> Any:
        def run(x: Any, one: Any = self.row[0]) -> Any:
            return one(x)

        return run(x)

    def by_a_function_inside(self: Any, x: Any) -> Any:
        def run(one: Any) -> Any:
            return one[0](x)

        return run(self.row)

    def returned_inside(self: Any, x: Any) -> Any:
        def rows() -> Any:
            return self.row

        return rows()[0](x)

    def yielded(self: Any, x: Any) -> Any:
        def layers() -> Any:
            yield from self.row

        out = 0
        for one in layers():
            x = one(x)
            out = out + x
        return out

    def matched(self: Any, x: Any) -> Any:
        match self.row:
            case one:
                return one[0](x)

    def walrus(self: Any, x: Any) -> Any:
        return (first := self.row[0])(x) + 0 * len(type(first).__name__)

    def of_tuples(self: Any, x: Any) -> Any:
        one, _ = self.row, 0
        return one[0](x)

    def of_a_list_of_rows(self: Any, x: Any) -> Any:
        return [self.row, self.rows[0]][0][0](x)

    def zipped(self: Any, x: Any) -> Any:
        out = 0
        for one, factor in zip(self.row, (1, 2, 3), strict=True):
            x = one(x)
            out = out + x * factor
        return out

    def zipped_open(self: Any, x: Any) -> Any:
        firsts, _ = zip(*self.rows, strict=True)
        return firsts[0](x)

    def by_a_state_dict(self: Any, x: Any) -> Any:
        return self.row.state_dict()["0.weight"].sum()

    def by_parameters(self: Any, x: Any) -> Any:
        return sum(p.sum() for p in self.row.parameters())

    def by_parameters_of_self(self: Any, x: Any) -> Any:
        return sum(p.pow(2).sum() for name, p in self.named_parameters() if "row.0" in name)

    def by_a_condition(self: Any, x: Any) -> Any:
        return (self.row if x.ndim == 4 else self.rows[0])[0](x)

    def by_its_weight(self: Any, x: Any) -> Any:
        return F.conv2d(x, self.row[0].weight).mean()

    def by_a_lambda(self: Any, x: Any) -> Any:
        return (lambda one: one(x))(self.row[0])

    def by_a_partial_that_is_kept(self: Any, x: Any) -> Any:
        return self.partly(x)

    def added_in_place(self: Any, x: Any) -> Any:
        layers: list[Any] = []
        layers += self.row
        return layers[0](x)

    def by_names_in_a_loop(self: Any, x: Any) -> Any:
        return sum(self._modules[name][0](x) + getattr(self, name)[0](x) for name in ("row",))

    def by_another_self(self: Any, x: Any) -> Any:
        me = self
        return me.row[0](x)

    def of_a_list_of_one(self: Any, x: Any) -> Any:
        (block,) = [self.block]
        return block.conv(x)

    def asked_what_it_is(self: Any, x: Any) -> Any:
        return x * (2 if isinstance(self.row[1], nn.BatchNorm2d) else 1)

    def asked_for_a_bias(self: Any, x: Any) -> Any:
        return x * (2 if self.rows[0][0].bias is None else 1)

    def asked_for_eps(self: Any, x: Any) -> Any:
        return x * self.row[1].eps


def adding(function: Any) -> Callable[[], nn.Module]:
    def forward(self: Any, x: Tensor) -> Any:
        return self.whole(x) + self.more(x)

    return lambda: type("Written", (Model,), {"forward": forward, "more": function})()


# --- by inheritance, and by what no class says ----------------------------------------------------------------------


class Taps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(conv(), bn(), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        taps = []
        for one in self.row:
            x = one(x)
            taps.append(x)
        return sum(taps)


class Above(Taps):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * 2


class ByName(Taps):
    def forward(self, x: Tensor) -> Any:
        return Taps.forward(self, x) * 2


class Later(Taps):
    def forward(self, x: Tensor) -> Any:
        return getattr(self, "_run")(x)  # noqa: B009

    def _run(self, x: Tensor) -> Any:
        return super().forward(x)


class NoGradients(Taps):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        return self.row[0](x) + self.row(x)


class Wrapped(Taps):
    @wrapping
    def forward(self, x: Tensor) -> Any:
        return self.row[0](x) + self.row(x)


class Partial(Taps):
    def _forward(self, x: Tensor, times: int) -> Any:
        return self.row(x) + times * self.row[0](x)

    forward = functools.partialmethod(_forward, times=2)  # type: ignore[assignment]


class Called(Model):
    forward = Model.whole

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) + self.row[0](x)


class CalledItself(Block):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) + self.conv(x)


SCOPE: dict[str, Any] = {}
exec("def without_source(self, x):\n    return self.row(x) + self.row[0](x)", SCOPE)


class WithoutSource(Taps):
    forward = SCOPE["without_source"]


class Lambda(Taps):
    forward = lambda self, x: self.row(x) + self.row[0](x)  # noqa: E731


class Forwarding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class UsesForwarding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wrapped = Forwarding()

    def forward(self, x: Tensor) -> Any:
        return self.wrapped(x) + self.wrapped.conv(x)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(conv(), bn(), nn.ReLU())
        self.child = Child(self)

    def forward(self, x: Tensor) -> Any:
        return self.child(self.row(x))


class Child(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parents = [parent]

    def forward(self, x: Tensor) -> Any:
        first: Any = self.parents[0]
        return first.row[0](x) + x


class Coder(nn.Module):
    """Without a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(conv(), bn())

    def encode(self, x: Tensor) -> Any:
        return self.row(x) + self.row[0](x)


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.coder = Coder()

    def forward(self, x: Tensor) -> Any:
        return self.coder.encode(x)


def with_a_forward_of_its_own(function: Any, make: Callable[[], Any] = Block) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = make()
        model.forward = types.MethodType(function, model)
        return nn.Sequential(Taps(), model)

    return made


def with_a_method_of_its_own() -> nn.Module:
    model: Any = adding(lambda self, x: 0)()
    model.more = types.MethodType(lambda self, x: self.row[0](x), model)
    return model  # type: ignore[no-any-return]


class Gate(nn.Module):
    """What reads weights of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv(), bn()
        self.alias = [self]

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(x)) * self.gate(x)

    def gate(self, x: Tensor) -> Any:
        return self._of(self)

    @staticmethod
    def _of(module: Any) -> Any:
        return module.conv.weight.mean()


class Gates:
    def by_a_static_method(self: Any, x: Any) -> Any:
        return self._of(self)

    def by_a_computed_name(self: Any, x: Any) -> Any:
        return getattr(self, "co" + "nv").weight.mean()

    def by_a_state(self: Any, x: Any) -> Any:
        return self.state_dict()["conv.weight"].mean()

    def by_parameters(self: Any, x: Any) -> Any:
        return sum(p.sum() for p in self.parameters())

    def by_getattr(self: Any, x: Any) -> Any:
        return self.__getattr__("conv")(x)

    def by_an_alias(self: Any, x: Any) -> Any:
        return self.alias[0].conv(x)

    def by_a_parameter(self: Any, x: Any) -> Any:
        return self.get_parameter("conv.weight").mean()

    def by_a_buffer(self: Any, x: Any) -> Any:
        return self.bn.running_mean.mean()

    without_source = lambda self, x: self.state_dict()["conv.weight"].mean()  # noqa: E731


def functions_in(cls: type) -> dict[str, Any]:
    return {name: one for name, one in vars(cls).items() if isinstance(one, types.FunctionType)}


APART: dict[str, Callable[[], nn.Module]] = {
    **{name: adding(function) for name, function in functions_in(Uses).items()},
    **{f"gate {name}": type("Gated", (Gate,), {"gate": one}) for name, one in functions_in(Gates).items()},
    **{
        cls.__name__: cls
        for cls in (Above, ByName, Later, NoGradients, Wrapped, Partial, Called, CalledItself, WithoutSource, Lambda)
    },
    **{cls.__name__: cls for cls in (UsesForwarding, Parent, Encodes)},
    "a forward of its own": with_a_forward_of_its_own(lambda self, x: self.bn(self.conv(x)) + self.conv(x)),
    "a row's own forward": with_a_forward_of_its_own(
        lambda self, x: self[1](self[0](x)) + self[0](x), lambda: nn.Sequential(conv(), bn())
    ),
    "a parent's own forward": with_a_forward_of_its_own(lambda self, x: self.whole(x) + self.row[0](x), Model),
    "a method of its own": with_a_method_of_its_own,
}


def folded(model: nn.Module) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            made = normswap.fold(model)
        except normswap.NormswapError:
            made = model
    return made, [str(one.message) for one in told]


def norms(model: nn.Module) -> int:
    return sum(isinstance(one, nn.BatchNorm1d | nn.BatchNorm2d) for one in model.modules())


@pytest.mark.parametrize("name", APART)
def test_what_takes_apart_is_seen(name: str) -> None:
    model = drawn(APART[name])
    made, told = folded(model)
    assert told, "nothing stayed"
    with torch.no_grad():
        torch.testing.assert_close(made(X), model(X), rtol=1e-4, atol=1e-4)


# --- what becomes an nn.Linear ----------------------------------------------------------------------------------------


class Projection(nn.Module):
    heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.width = nn.Linear(6, 6), nn.BatchNorm1d(6), 3

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.fc(x))

    def pre(self, x: Tensor) -> Any:
        return self.fc(x)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.row = Projection(), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.parts = nn.ModuleList([Projection(), nn.Linear(6, 6)])
        self.other = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Any:
        return self.more(self.other(x)) + self.part(x) + self.row(x)

    def more(self, x: Tensor) -> Any:
        return x


class Looks:
    def at_attributes(self: Any, x: Any) -> Any:
        return x * self.part.heads * self.part.width

    def at_a_method(self: Any, x: Any) -> Any:
        return self.part.pre(x)

    def at_its_class(self: Any, x: Any) -> Any:
        return x * (2 if isinstance(self.part, Projection) else 1)

    def at_its_type(self: Any, x: Any) -> Any:
        return x * (2 if type(self.part) is nn.Linear else 1)

    def at_its_length(self: Any, x: Any) -> Any:
        return x * len(self.row)

    def at_a_row(self: Any, x: Any) -> Any:
        return x * (2 if isinstance(self.row, nn.Sequential) else 1)

    def in_a_loop(self: Any, x: Any) -> Any:
        return x * sum(isinstance(one, nn.Linear) for one in self.parts)

    def by_an_index(self: Any, x: Any) -> Any:
        return x * (self.row[0] is not None)


LOOKS = functions_in(Looks)


@pytest.mark.parametrize("name", LOOKS)
def test_a_whole_that_is_looked_at_stays(name: str) -> None:
    model, x = drawn(type("Looks", (Holds,), {"more": LOOKS[name]})), torch.randn(9, 6)
    made, told = folded(model)
    assert told and type(made.other) is nn.Linear
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x), rtol=1e-4, atol=1e-4)


# --- what is whole ----------------------------------------------------------------------------------------------------


def padding_of(convolution: Any) -> Any:
    return convolution.kernel_size[0] // 2 - convolution.padding[0]


class Whole:
    """Forwards that take nothing apart."""

    def by_a_geometry(self: Any, x: Any) -> Any:
        return self.bn(self.conv(F.pad(x, [padding_of(self.conv)] * 4)))

    def by_a_dtype(self: Any, x: Any) -> Any:
        x = x.to(self.row[0].weight.dtype).to(next(self.parameters()).device)
        return x * (self.rows[0][0].weight.shape[0] / 6)

    def by_questions(self: Any, x: Any) -> Any:
        if isinstance(self.row, nn.Sequential) and self.row[1] is not None and not hasattr(self, "nothing"):
            return x
        raise TypeError

    def by_a_computed_method(self: Any, x: Any, way: str = "whole") -> Any:
        return getattr(self, f"by_{way}_rows")(x)

    def by_whole_rows(self: Any, x: Any) -> Any:
        return self.rows[1](x)

    def by_a_method_that_calls_it(self: Any, x: Any) -> Any:
        return self.run(self.block, self.run(layer=self.row, x=x))

    def by_slices(self: Any, x: Any) -> Any:
        for row in self.rows[:1]:
            x = row(x)
        return x

    def by_lists(self: Any, x: Any) -> Any:
        layers = [self.row, *self.rows]
        for one in reversed(layers):
            x = one(x)
        return x

    def by_forward(self: Any, x: Any) -> Any:
        return self.row.forward(x)

    def by_what_is_kept(self: Any, x: Any) -> Any:
        return self.stages[0](x) + self.table["row"](x)

    def by_settings(self: Any, x: Any) -> Any:
        self.seen = x.shape
        return x if self.training else x + len(self.rows)

    def run(self: Any, layer: Any, x: Any) -> Any:
        return layer(x)


@pytest.mark.parametrize("name", [name for name in functions_in(Whole) if not name.startswith(("run", "by_whole"))])
def test_what_is_whole_folds(name: str) -> None:
    made = adding(vars(Whole)[name])
    model = drawn(lambda: type("Runs", (type(made()),), {"run": Whole.run, "by_whole_rows": Whole.by_whole_rows})())
    left = 0 if name == "by_a_geometry" else 1  # whose convolution and norm nobody calls
    folds, told = folded(model)
    assert not told and norms(folds) == left
    with torch.no_grad():
        torch.testing.assert_close(folds(X), model(X), rtol=1e-4, atol=1e-4)


def test_what_is_scripted_is_left() -> None:
    """A graph says what it computes."""
    row = nn.Sequential(conv(), bn()).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(row, X)
    model = drawn(lambda: nn.Sequential(nn.Sequential(conv(), bn())))
    model.append(traced)  # type: ignore[operator]
    made, told = folded(nn.ModuleList([model]).eval()[0])
    assert not told and norms(made[0]) == 0
    with torch.no_grad():
        torch.testing.assert_close(made(X), model(X), rtol=1e-4, atol=1e-4)


def by_a_function_that_is_kept(self: Any, x: Any) -> Any:
    return self.first_of_the_row(x)


def test_a_function_that_holds_the_model_is_no_copy() -> None:
    """What it calls is the model that it was made for: of a copy nothing is taken apart."""
    model = drawn(adding(by_a_function_that_is_kept))
    made, told = folded(model)
    expected = model(X)
    assert not told
    with pytest.warns(UserWarning, match=r"row\.1 is left"), pytest.raises(normswap.NormswapError, match="no module"):
        normswap.fold(model, inplace=True)
    with torch.no_grad():
        torch.testing.assert_close(made(X), expected, rtol=1e-4, atol=1e-4)


def test_synchronised_norms_fold() -> None:
    """In eval nothing is to be synchronised."""
    model = drawn(lambda: nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(conv(), bn(), nn.ReLU(), Block())))
    made, told = folded(model)
    assert not told and not any(isinstance(one, nn.SyncBatchNorm) for one in made.modules())
    with torch.no_grad():
        torch.testing.assert_close(made(X), model(X), rtol=1e-4, atol=1e-4)


# --- by running it ----------------------------------------------------------------------------------------------------


def test_with_inputs_it_is_compared() -> None:
    model = drawn(lambda: nn.Sequential(nn.Sequential(conv(), bn()), nn.Dropout(), Block()))
    state = torch.get_rng_state()
    made: Any = normswap.fold(model, X)
    assert norms(made) == 0 and torch.equal(torch.get_rng_state(), state)
    assert norms(normswap.fold(model, (X,))) == 0 and norms(normswap.fold(model, None, {"input": X})) == 0
    with torch.inference_mode():
        assert norms(normswap.fold(model, X)) == 0
    with torch.no_grad():
        torch.testing.assert_close(made(X), model(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inplace", [False, True])
def test_what_is_not_seen_is_seen_by_running_it(inplace: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(model: nn.Module) -> Any:
        uses = uses_in(model)
        uses.apart.clear()
        uses.calls.clear()
        return uses

    monkeypatch.setattr(folding, "uses_in", blind)
    model = drawn(lambda: nn.Sequential(Taps(), nn.Sequential(conv(), bn())))
    assert norms(normswap.fold(model)) == 0
    before = model(X)
    with pytest.raises(normswap.NormswapError, match=r"differ by [0-9.e+-]+ of the largest in float64: code"):
        normswap.fold(model, X, inplace=inplace)
    assert norms(model) == 2 and torch.equal(model(X), before)


def test_what_stays_is_told_of_once() -> None:
    model = drawn(lambda: nn.Sequential(Taps(), Block()))
    with pytest.warns(UserWarning, match="is left as it is") as told:
        normswap.fold(model, X)
    assert len(told) == 1
