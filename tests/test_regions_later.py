"""Regions and the tools around a model: copies, transforms, compilers, other people's patches, plans as data."""

from __future__ import annotations

import copy
import inspect
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
import region_models
import torch
import torch.nn.functional as F
from models import randomised
from region_checks import CHANNELS, ROWS, Case, Parts, assert_same, check, loaded, regions_in, swap, written
from torch import Tensor, nn

import normswap
from normswap.plans import Match, Plan, PlanError


class Block(Parts):
    """A block that pickles."""

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        h = x + y
        h = h + self.lin(self.act(self.norm(h)))
        if self.flag:
            h = F.relu(self.norm2(h))
        return h * scale


class Inherits(Block):
    """Has the forward of its base class."""


class Calls(Block):
    """Calls the forward of its base class."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.silu(self.rms(super().forward(x, y)))


class Beside(Parts):
    """Calls a norm between the operations of a region."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm2(x)
        y = self.norm(x) + y
        return F.relu(h) + y


class Failing(Parts):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x + y
        n = self.norm(h)  # fails here
        return n + h


def given() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS), torch.randn(ROWS)


@pytest.fixture
def pair() -> tuple[Any, Block]:
    torch.manual_seed(0)
    model = randomised(Block())
    assert regions_in(model) == ("sum + norm + act", "sum + norm2 + relu")
    return swap(model), model


def test_copies(pair: Any) -> None:
    swapped, model = pair
    for twin in (copy.deepcopy(swapped), pickle.loads(pickle.dumps(swapped))):
        assert type(twin) is type(swapped)
        assert_same(twin, model, given())
    assert type(normswap.revert(swapped)) is Block


def test_signature_and_defaults(pair: Any) -> None:
    swapped, model = pair
    assert inspect.signature(swapped.forward) == inspect.signature(model.forward)
    x, y = given()
    torch.testing.assert_close(swapped(x, y=y, scale=3.0), model(x, y, scale=3.0), rtol=0, atol=0)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        swapped(x)


def test_inherited_and_called_by_super() -> None:
    for cls in (Inherits, Calls):
        model = randomised(cls())
        assert bool(regions_in(model)) is (cls is Inherits)
        assert_same(swap(model), model, given())


def test_instances_with_other_settings() -> None:
    one, other = randomised(Block()), randomised(Block())
    other.flag, other.norm = False, nn.LayerNorm(CHANNELS, eps=0.1)
    other.act = nn.Tanh()
    model = nn.ModuleList([one, other])
    swapped = swap(model)
    for mine, theirs in zip(swapped, model, strict=True):
        assert_same(mine, theirs, given())
    for module in (swapped, model):
        module[0].flag, module[1].flag = False, True
    for mine, theirs in zip(swapped, model, strict=True):
        assert_same(mine, theirs, given())


def test_a_traceback_shows_the_lines_of_the_file() -> None:
    swapped = swap(Failing())
    swapped.norm.register_forward_hook(lambda module, args, out: out @ out)  # fails, where the norm is called
    with pytest.raises(RuntimeError) as raised:
        swapped(*given())
    lines = [frame.line for frame in traceback.extract_tb(raised.value.__traceback__) if frame.filename == __file__]
    assert "h = x + y" in lines and "n = self.norm(h)  # fails here" in lines


def test_transforms(pair: Any) -> None:
    swapped, model = pair
    x, y = given()
    doubled = {name: p * 2 for name, p in model.named_parameters()}
    calls = [
        lambda m: torch.func.functional_call(m, doubled, (x, y)),
        lambda m: torch.func.jvp(lambda x: m(x, y), (x,), (torch.ones_like(x),)),
        lambda m: torch.func.vmap(m)(x, y),
        lambda m: torch.func.vmap(torch.func.grad(lambda x, y: m(x, y).sum()))(x, y),
        lambda m: torch.jit.trace(m, (x, y), check_trace=False)(x, y),
    ]
    for call in calls:
        torch.testing.assert_close(call(swapped), call(model))


def test_traced_by_fx(pair: Any) -> None:
    model, inputs = pair[1], given()
    plan = Plan(tuple(s for s in normswap.plan(model).swaps if s.match.kind == "region"))
    traced = torch.fx.symbolic_trace(normswap.apply(copy.deepcopy(model), plan))
    torch.testing.assert_close(traced(*inputs), model(*inputs))


def test_autocast(pair: Any) -> None:
    swapped, model = pair
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(swapped, model, given())
    assert_same(swapped.bfloat16(), model.bfloat16(), tuple(t.bfloat16() for t in given()))


def test_compiled_and_exported(pair: Any) -> None:
    swapped, model = pair
    x, y = given()
    torch._dynamo.reset()
    compiled = torch.compile(swapped, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, y), model(x, y))
    torch.testing.assert_close(torch.export.export(swapped, (x, y)).module()(x, y), model(x, y))


@pytest.mark.parametrize("name", ("layer_norm", "relu"))
def test_functions_of_torch_patched_later(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = {"layer_norm": region_models.f_layer_norm_keywords, "relu": region_models.f_relu}[name]
    model = randomised(written(forward))
    swapped, before = swap(model), getattr(F, name)
    monkeypatch.setattr(F, name, lambda *args, **kwargs: before(*args, **kwargs) * 3)
    assert_same(swapped, model, given())


def test_a_modulate_patched_later(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(written(region_models.adaptive_function))
    swapped, inputs = swap(model), (torch.randn(ROWS), torch.randn(ROWS[0], CHANNELS))
    assert_same(swapped, model, inputs)
    monkeypatch.setattr(region_models, "modulate", lambda x, shift, scale: x + scale[:, None])
    assert_same(swapped, model, inputs)


SOURCE = """
import torch
from torch import nn
import torch.nn.functional as F
from region_checks import Parts

class Loaded(Parts):
    def forward(self, x, y):
        return F.relu(self.norm(x)) + y
"""


def test_without_its_source_nothing_is_rewritten(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "executed"}
    exec(SOURCE, names)
    assert regions_in(names["Loaded"]()) == ()
    path = tmp_path / "changed_since.py"
    path.write_text(SOURCE)
    module = loaded(path)
    assert regions_in(module.Loaded()) == ("norm + relu",)
    path.write_text(SOURCE.replace("relu", "silu"))
    assert regions_in(module.Loaded()) == ()


def test_an_expression_deeper_than_the_stack_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep.py"
    path.write_text(SOURCE.replace("+ y", " + y" * 400))
    model = randomised(loaded(path).Loaded())
    swapped, inputs = normswap.optimize(model, given()), given()
    assert type(swapped) is type(model)
    torch.testing.assert_close(swapped(*inputs), model(*inputs))


INHERITED = """
import torch.nn as nn
import torch.nn.functional as F
from region_checks import Parts

class Norm(nn.LayerNorm):
    pass

class Loaded(Parts):
    def __init__(self):
        super().__init__()
        self.norm = Norm(8)

    def forward(self, x, y):
        return self.norm(x + y) + self.norm(y)
"""
OWN = """
    def forward(self, input):
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)"""


@pytest.mark.parametrize("before", [INHERITED, INHERITED.replace("    pass", OWN)])
def test_a_pickle_of_another_version_of_a_norm(before: str, tmp_path: Path) -> None:
    path = tmp_path / "two_norms.py"
    path.write_text(before)
    model = randomised(loaded(path).Loaded())
    text = pickle.dumps(swap(model))
    path.write_text(INHERITED.replace("    pass", OWN + " * 2"))
    newer = loaded(path).Loaded
    twin, expected = pickle.loads(text), newer()
    expected.load_state_dict(model.state_dict())
    assert_same(twin, expected, given())


class ReadsItself(Parts):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.relu(self.norm(x)) + y * self.forward.factor  # type: ignore[attr-defined]


ReadsItself.forward.factor = 2.0  # type: ignore[attr-defined]


def test_what_a_forward_finds_on_itself_it_finds_while_it_is_proved() -> None:
    model = randomised(ReadsItself())
    assert_same(normswap.optimize(model, given(), min_speedup=None), model, given())


class added(Parts):
    """Has the name of its method."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.added(x, y)

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        return F.relu(self.norm(x)) + y


def test_a_class_may_have_the_name_of_its_method() -> None:
    model = randomised(added())
    swapped = normswap.optimize(model, given(), min_speedup=None)
    assert "" in normswap.report(swapped).swapped
    assert_same(swapped, model, given())


def sum_in_another_shape(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.norm((x + y).reshape(2, -1, CHANNELS))


@pytest.mark.parametrize("forward", [region_models.sum_norm_act, region_models.f_relu, sum_in_another_shape])
def test_a_nested_tensor_goes_the_way_it_went(forward: Any) -> None:
    model = randomised(written(forward)).eval()
    x = torch.nested.nested_tensor([torch.randn(n, CHANNELS) for n in (2, 3)])
    ours, theirs = swap(model)(x, x), model(x, x)
    assert all(map(torch.equal, ours.unbind(), theirs.unbind()))


class Nowhere(Parts):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.added(x, y)

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        return F.relu(self.norm(x)) + y


Nowhere.added.__module__ = None  # type: ignore[assignment]  # as that of what exec makes in a bare dict


def test_a_method_of_no_module_is_read() -> None:
    (found,) = (s.match for s in normswap.plan(Nowhere()).swaps if s.match.kind == "region")
    assert found.attributes["method"] == "added"


def test_a_pickle_of_another_version_of_the_source(tmp_path: Path) -> None:
    path = tmp_path / "two_versions.py"
    path.write_text(SOURCE)
    model = randomised(loaded(path).Loaded())
    text = pickle.dumps(swap(model))
    path.write_text(SOURCE.replace("relu", "silu"))
    newer = loaded(path).Loaded
    twin, expected = pickle.loads(text), newer()
    expected.load_state_dict(model.state_dict())
    assert_same(twin, expected, given())


@pytest.mark.parametrize("key", ("norm", "kind", "conditions", "steps", "activation"))
def test_a_plan_that_says_something_else_runs_nothing_of_it(key: str) -> None:
    model = randomised(written(region_models.f_relu))
    (swap_,) = (s for s in normswap.plan(model).swaps if s.match.kind == "region")
    (region,) = swap_.match.attributes["regions"]
    wrong: dict[str, Any] = {
        "norm": "lin",
        "kind": "rms_norm",
        "conditions": [["__import__('os').getpid()", True]],
        "steps": [{**region["steps"][0], "at": [0, 0, 0, 0]}],
        "activation": ["silu", 0.0, 0.0],
    }
    attributes = {**swap_.match.attributes, "regions": [{**region, key: wrong[key]}]}
    plan = Plan((type(swap_)(swap_.site, Match("region", attributes)),))
    try:
        swapped = normswap.apply(copy.deepcopy(model), plan)
    except PlanError:
        return
    assert key not in ("conditions", "steps")
    assert_same(swapped, model, given())


def test_what_a_class_hides_is_read_anew_whenever_it_is_changed() -> None:
    model = randomised(written(Block.forward))
    swapped, inputs = swap(model), given()
    for hiding in (False, True, False, True):
        if hiding:
            type(model).norm = nn.Identity()  # type: ignore[assignment]
        elif "norm" in vars(type(model)):
            del type(model).norm
        assert_same(swapped, model, inputs)


class Bumped(Parts):
    """Reading one of its attributes writes to its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.arange(float(CHANNELS)))

    @property
    def bumped(self) -> float:
        self.kept.mul_(-2)
        return 2.0


def property_between(self, x, y):
    n = self.norm(self.kept)
    factor = self.bumped
    return F.relu(n) * factor + x


def property_behind_a_sum(self, x, y):
    h = x + self.kept
    factor = self.bumped
    return self.norm(h) * factor


@pytest.mark.parametrize("forward", [property_between, property_behind_a_sum])
def test_what_a_property_writes_to_is_read_before_it(forward: Any) -> None:
    check(Case(forward, change=lambda model: model.requires_grad_(False), base=Bumped), "eval")


RELOADED = """
import torch.nn.functional as F
from region_checks import Parts

def modulate(x, shift, scale):
    return x * (1 + {}) + {}

class Block(Parts):
    def forward(self, x, y):
        return modulate(self.norm(F.relu(self.norm2(x))), y, x) * {}
"""


def test_a_file_that_is_reloaded_into_the_same_functions_is_read_anew(tmp_path: Path) -> None:
    """As IPython's autoreload does it."""
    file = tmp_path / "reloaded_in_place.py"
    file.write_text(RELOADED.format("scale", "shift", 2))
    first = loaded(file)
    model, inputs = randomised(first.Block()), (torch.randn(ROWS), torch.randn(ROWS[0], 1, CHANNELS))
    swapped = swap(model)
    for given_now in (("scale", "shift", 30), ("shift", "scale", 30)):
        file.write_text(RELOADED.format(*given_now))
        now = loaded(file)
        first.Block.forward.__code__ = now.Block.forward.__code__
        first.modulate.__code__ = now.modulate.__code__
        assert_same(swapped, model, inputs)
        assert regions_in(model) == ("norm2 + relu", "norm + scale + shift")
        assert_same(swap(model), model, inputs)


def test_defaults_of_a_forward_are_those_that_it_has_now(pair: tuple[Any, Block]) -> None:
    swapped, model = pair
    before = Block.forward.__defaults__
    try:
        Block.forward.__defaults__ = (3.0,)
        assert_same(swapped, model, given())
        assert_same(swap(model), model, given())
    finally:
        Block.forward.__defaults__ = before
    assert_same(swapped, model, given())


def test_a_class_that_loses_one_attribute_and_gets_another(pair: tuple[Any, Block]) -> None:
    swapped, model = pair
    Block.unused = 0  # type: ignore[attr-defined]
    assert_same(swapped, model, given())
    del Block.unused  # type: ignore[attr-defined]
    Block.norm2 = staticmethod(torch.neg)  # type: ignore[assignment]
    try:
        assert_same(swapped, model, given())
    finally:
        del Block.norm2
    assert_same(swapped, model, given())


@pytest.mark.parametrize("name", ("forward", "__call__"))
@pytest.mark.parametrize("cls", (Block, Beside))
def test_what_a_class_over_a_norm_is_given_after_a_call(cls: type[Parts], name: str) -> None:
    model = randomised(cls())
    swapped = swap(model)
    over = []
    for one in (model, swapped):
        one.norm.__class__ = type("Over", (type(one.norm),), {})
        over.append(type(one.norm))
    assert_same(swapped, model, given())
    for one in over:
        setattr(one, name, lambda self, x: x.mul_(3))
    assert_same(swapped, model, given())


def test_a_class_over_a_sequential_may_go_through_it_in_another_order() -> None:
    model = randomised(nn.Sequential(nn.GroupNorm(2, CHANNELS), nn.SiLU(), nn.Tanh()))
    swapped, x = swap(model), torch.randn(2, CHANNELS, 3)
    assert regions_in(model) == ("0 + 1",)
    for one in (model, swapped):
        one.__class__ = type("Reversed", (type(one),), {"__iter__": lambda self: reversed(self._modules.values())})
    assert_same(swapped, model, (x,))


@pytest.mark.parametrize("in_a_row", (True, False))
def test_who_watches_every_call_of_a_module_sees_them_all(in_a_row: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.LayerNorm(CHANNELS), nn.GELU()) if in_a_row else Block()
    swapped, inputs = swap(randomised(model)), given()[: 1 if in_a_row else 2]
    for name in ("__call__", "_call_impl"):
        call: Any = getattr(nn.Module, name)
        monkeypatch.setattr(nn.Module, name, lambda self, *args, call=call, **kwargs: call(self, *args, **kwargs) * 2)
        assert_same(swapped, model, inputs)
        monkeypatch.undo()
        assert_same(swapped, model, inputs)
