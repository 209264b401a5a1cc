"""What is read of a forward that computes and branches alone (regions.straight)."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from region_checks import loaded
from torch import Tensor, nn
from torch import abs as magnitude
from torch.nn import functional

from normswap.attributes import Rejection
from normswap.plans import Reason
from normswap.regions.straight import Straight, names_of, straight

FACTOR = 3.0


def read(forward: Any, **attributes: Any) -> Straight | Rejection:
    module = type("Written", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return straight(module, forward)


def reads_everything(self, x):
    """A docstring is no operation."""
    y: Tensor = torch.abs(x)
    z = a = F.relu(y, inplace=False)
    return self.bn(z * self.scale + a.mean(dim=(-1, 1), keepdim=True)) / abs(x) ** 2 - magnitude(self.cfg.eps)


def test_reads_and_operations_in_order_of_evaluation() -> None:
    found = read(reads_everything)
    assert isinstance(found, Straight), found
    assert {*found.reads} == {"bn", "scale", "cfg"}
    (way,) = found.ways
    assert [*names_of(way.ops)] == [
        *("abs", "relu", "*", "mean", "+", "self.bn"),
        *("abs", "**", "/", "abs", "-"),
    ]


def shape_read(self, x):
    return x.mean(x.ndim, keepdim=True) + torch.nn.functional.relu(functional.gelu(x.to(torch.float32)))


def test_what_a_graph_would_hide_is_shown() -> None:
    found = read(shape_read)
    assert isinstance(found, Straight)
    assert [*names_of(found.ways[0].ops)] == [".ndim", "mean", "to", "gelu", "relu", "+"]


def halved(x):
    return x / 2


def ways(self, x):
    if self.flag:
        x = halved(x)
    elif self.name == "other":
        x = torch.abs(x)
    if x.dtype in (torch.float16, torch.bfloat16) and self.weight is not None:
        x = x.float()
    return x + 1 if self.training else x + 2


def test_every_way_through_a_branch_on_mode_or_dtype_is_read() -> None:
    found = read(ways, flag=True, name="other", weight=nn.Parameter(torch.ones(2)))
    assert isinstance(found, Straight), found
    read_there = [[*names_of(way.ops)] for way in found.ways]
    assert read_there == [[*("/", ".dtype", "float", "+")]] * 2 + [[*("/", ".dtype", "+")]] * 2
    assert found.tested == {"flag", "weight"} and found.functions == {"halved": halved}
    found = read(ways, flag=False, name="other", weight=None)
    assert isinstance(found, Straight) and len(found.ways) == 4
    assert [*names_of(found.ways[0].ops)] == ["abs", ".dtype", "+"] and not found.functions


def quartered(x):
    return halved(x) / 2


foreign = types.FunctionType(quartered.__code__, {"halved": torch.abs}, "foreign")


def calls_foreign(self, x):
    return foreign(x)


def test_a_function_of_another_module_calls_what_stands_there() -> None:
    found = read(calls_foreign)
    assert isinstance(found, Straight), found
    assert [*names_of(found.ways[0].ops)] == ["abs", "/"] and found.functions == {"foreign": foreign}


def on_a_list(self, x):
    return x + 1 if self.options else x


def test_a_branch_on_what_may_change_in_place_is_refused() -> None:
    rejection = read(on_a_list, options=[1])
    assert isinstance(rejection, Rejection) and "a branch on self.options" in rejection.detail


def many(self, x):
    for_each = x.dtype
    y = x + 1 if for_each is torch.float16 else x
    y = y + 1 if for_each is torch.float16 else y
    y = y + 1 if for_each is torch.float16 else y
    y = y + 1 if for_each is torch.float16 else y
    return y + 1 if for_each is torch.float16 else y


def test_no_more_than_sixteen_ways_are_read() -> None:
    rejection = read(many)
    assert isinstance(rejection, Rejection) and "16 ways" in rejection.detail


def with_block(self, x):
    with torch.no_grad():
        return x


def branch(self, x):
    if x.sum() > 0:
        x = x * 2
    return x


def loop(self, x):
    for _ in range(2):
        x = x + 1
    return x


def attribute_store(self, x):
    self.seen = x
    return x


def item_store(self, x):
    x[0] = 0
    return x


def in_place(self, x):
    x += 1
    return x


def two_targets(self, x):
    a, b = x
    return a + b


def lost_result(self, x):
    x.zero_()
    return x


def no_return(self, x):
    x = x + 1


def bare_return(self, x):
    return


def comprehension(self, x):
    return sum(y for y in x)


def lambda_inside(self, x):
    return torch.relu(lambda: x)


def conditional(self, x):
    return x if self.flag else -x


def comparison(self, x):
    return x > 0


def walrus(self, x):
    return (y := x) + y


def starred(self, x):
    return torch.cat([*x])


def double_starred(self, x):
    return torch.mean(x, **self.options)


def unknown_global(self, x):
    return x * FACTOR


def unknown_builtin(self, x):
    return x * len(x)


def class_of_torch(self, x):
    return torch.Tensor.abs(x)


def context_manager(self, x):
    return torch.no_grad()(x)


def missing_in_torch(self, x):
    return torch.no_such_function(x)


def other_module(self, x):
    return math.sqrt(x)


def part(self, x):
    return x[1:]


def indexed(self, x):
    return x[x]


def recursive(self, x):
    return self.forward(x)


def default_of_tensor(x, factor=(1.0,)):
    return x * factor


def calling_it(self, x):
    return default_of_tensor(x)


def self_replaced(self, x):
    self = x
    return self


def global_statement(self, x):
    global FACTOR
    FACTOR = x
    return x


async def asynchronous(self, x):
    return x


def generator(self, x):
    yield x


@pytest.mark.parametrize(
    "forward",
    [
        *(with_block, branch, loop, attribute_store, item_store, in_place, two_targets, lost_result),
        *(no_return, bare_return, comprehension, lambda_inside, conditional, comparison, walrus, starred),
        *(double_starred, unknown_global, unknown_builtin, class_of_torch, context_manager, missing_in_torch),
        *(other_module, part, indexed, recursive, calling_it, self_replaced, global_statement, generator),
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.case("side-effects", "training-branches", "trap-no-grad-block")
def test_what_does_more_than_compute_is_refused(forward: Any) -> None:
    rejection = read(forward)
    assert isinstance(rejection, Rejection)
    assert rejection.reason is Reason.NOT_STRAIGHT_LINE, rejection
    assert rejection.detail


def test_a_refusal_says_where() -> None:
    line = with_block.__code__.co_firstlineno + 1
    assert read(with_block) == Rejection(Reason.NOT_STRAIGHT_LINE, f"a with block at line {line}")


def no_argument(self):
    return self.scale


def two_arguments(self, x, mask):
    return x * mask


def default(self, x=None):
    return x


def keyword_only(self, x, *, mask=None):
    return x


def variadic(self, x, *rest):
    return x


def variadic_keywords(self, x, **rest):
    return x


@pytest.mark.parametrize(
    "forward",
    [no_argument, two_arguments, default, keyword_only, variadic, variadic_keywords],
    ids=lambda f: f.__name__,
)
@pytest.mark.case("signatures")
def test_another_signature_is_refused(forward: Any) -> None:
    rejection = read(forward)
    assert isinstance(rejection, Rejection) and rejection.reason is Reason.UNSUPPORTED
    assert "(self" in rejection.detail


def _closure() -> Any:
    factor = torch.ones(())

    def forward(self, x):
        return x * factor

    return forward


@torch.no_grad()
def decorated(self, x):
    return x


def _silent(function: Any) -> Any:
    return function


@_silent
def quietly_decorated(self, x):
    return x


@pytest.mark.parametrize(
    ("forward", "word"),
    [(_closure(), "factor"), (decorated, "decorator"), (quietly_decorated, "decorated")],
)
def test_closures_and_decorators_are_refused(forward: Any, word: str) -> None:
    rejection = read(forward)
    assert isinstance(rejection, Rejection)
    assert rejection.reason is Reason.NOT_STRAIGHT_LINE and word in rejection.detail


def test_what_has_no_source_is_refused() -> None:
    nowhere = types.FunctionType(reads_everything.__code__.replace(co_filename="<nowhere>"), globals())
    for forward in (nowhere, asynchronous):
        rejection = read(forward)
        assert isinstance(rejection, Rejection) and rejection.reason is Reason.SOURCE


@pytest.mark.parametrize(
    "now",
    [
        "import torch\ndef forward(self, x):\n    return x + 2\n",
        "import torch\ndef forward(self, x):\n    return x + 1.0\n",
        "import torch\ndef forward(self, x):\n    return x - 1\n",
        "import torch\ndef forward(self, x):\n    return self.x + 1\n",
        "import torch\n\ndef forward(self, x):\n    return x + 1\n",
        "import torch\ndef forward(self, x:\n",
        "",
        "return 3\ndef forward(self, x):\n    return x + 1\n",
    ],
)
def test_a_source_that_is_not_the_code_that_runs_is_refused(
    now: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "normswap_stale_example.py"
    path.write_text("import torch\ndef forward(self, x):\n    return x + 1\n")
    monkeypatch.setitem(sys.modules, path.stem, None)  # type: ignore[arg-type]
    forward = loaded(path).forward
    path.write_text(now + "# longer than it was, so that the cache of lines notices\n")
    rejection = read(forward)
    assert isinstance(rejection, Rejection) and rejection.reason is Reason.SOURCE
