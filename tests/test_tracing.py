"""What a forward says (rules.source.scan) and what it computes (tracing.trace)."""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import abs as magnitude
from torch.nn import functional

from normswap import tracing
from normswap.plan import Reason
from normswap.rules import source

aten = torch.ops.aten
FACTOR = 3.0


class Block(nn.Module):
    """bn(gemm(x) * scale), with everything random."""

    def __init__(self, features: int = 6, channels: int = 4, **batch_norm: Any) -> None:
        super().__init__()
        self.gemm = nn.Linear(features, channels)
        self.scale = nn.Parameter(torch.randn(channels))
        self.bn = nn.BatchNorm1d(channels, **batch_norm)
        self.unread = nn.Parameter(torch.randn(3))
        for tensor in self.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gemm(x) * self.scale
        return self.bn(y)


def reads_everything(self, x):
    """A docstring is no operation."""
    y: Tensor = torch.abs(x)
    z = a = F.relu(y, inplace=False)
    return self.bn(z * -self.scale + a.mean(dim=(-1, 1), keepdim=True)) / abs(x) ** 2 - magnitude(self.cfg.eps)


def test_scan_lists_reads_and_operations_in_order_of_evaluation() -> None:
    scanned = source.scan(reads_everything)
    assert isinstance(scanned, source.Scan), scanned
    assert scanned.argument == "x"
    assert scanned.reads == ("bn", "scale", "cfg")
    assert scanned.operations == (
        *("abs", "relu", "-", "*", "mean", "+", "self.bn"),
        *("abs", "**", "/", ".eps", "abs", "-"),
    )


def shape_read(self, x):
    return x.mean(x.shape[1], keepdim=True) + torch.nn.functional.relu(functional.gelu(x.to(torch.float32)))


def test_scan_shows_what_a_graph_would_hide() -> None:
    scanned = source.scan(shape_read)
    assert isinstance(scanned, source.Scan)
    assert scanned.operations == (".shape", "[]", "mean", "to", "gelu", "relu", "+")


def with_block(self, x):
    with torch.no_grad():
        return x


def branch(self, x):
    if self.training:
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


def early_return(self, x):
    return x
    return x * 2


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
    return torch.linalg.norm(x)


def self_given_away(self, x):
    return F.relu(self)


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
        *(with_block, branch, loop, attribute_store, item_store, in_place, two_targets, lost_result, early_return),
        *(no_return, bare_return, comprehension, lambda_inside, conditional, comparison, walrus, starred),
        *(double_starred, unknown_global, unknown_builtin, class_of_torch, context_manager, missing_in_torch),
        *(other_module, self_given_away, self_replaced, global_statement, generator),
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.case("side-effects", "training-branches", "trap-no-grad-block")
def test_scan_rejects_what_is_not_straight_line(forward: Any) -> None:
    rejection = source.scan(forward)
    assert isinstance(rejection, source.Rejection)
    assert rejection.reason is Reason.NOT_STRAIGHT_LINE, rejection
    assert rejection.detail


def test_scan_says_where() -> None:
    line = with_block.__code__.co_firstlineno + 1
    assert source.scan(with_block) == source.Rejection(Reason.NOT_STRAIGHT_LINE, f"a with block at line {line}")


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
def test_scan_rejects_another_signature(forward: Any) -> None:
    rejection = source.scan(forward)
    assert isinstance(rejection, source.Rejection) and rejection.reason is Reason.UNSUPPORTED
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
def test_scan_rejects_closures_and_decorators(forward: Any, word: str) -> None:
    rejection = source.scan(forward)
    assert isinstance(rejection, source.Rejection)
    assert rejection.reason is Reason.NOT_STRAIGHT_LINE and word in rejection.detail


def test_scan_rejects_what_is_no_plain_function_or_has_no_source() -> None:
    nowhere = types.FunctionType(reads_everything.__code__.replace(co_filename="<nowhere>"), globals())
    for forward in (functools.partial(branch), torch.abs, nowhere, asynchronous):
        rejection = source.scan(forward)
        assert isinstance(rejection, source.Rejection) and rejection.reason is Reason.SOURCE


def _import_file(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


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
def test_scan_rejects_a_source_that_is_not_the_code_that_runs(
    now: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "normswap_stale_example.py"
    path.write_text("import torch\ndef forward(self, x):\n    return x + 1\n")
    monkeypatch.setitem(sys.modules, path.stem, None)  # type: ignore[arg-type]
    forward = _import_file(path).forward
    path.write_text(now + "# longer than it was, so that the cache of lines notices\n")
    rejection = source.scan(forward)
    assert isinstance(rejection, source.Rejection) and rejection.reason is Reason.SOURCE


def test_scan_notices_another_code_object() -> None:
    def forward(self, x):
        return x.abs()

    assert isinstance(source.scan(forward), source.Scan)
    forward.__code__ = with_block.__code__
    assert isinstance(source.scan(forward), source.Rejection)


def _trace(module: nn.Module, **arguments: Any) -> tracing.Traced:
    scanned = source.scan(type(module).forward)
    assert isinstance(scanned, source.Scan), scanned
    traced = tracing.trace(module, scanned.reads, (3, 6), **{"training": True, **arguments})
    assert isinstance(traced, tracing.Traced), traced
    return traced


@pytest.mark.parametrize("training", [True, False])
def test_trace_gives_every_attribute_an_input_of_its_own(training: bool) -> None:
    traced = _trace(Block(), training=training)
    steps = [node for node in traced.operations if node.target is not aten.add_.Tensor]
    assert [node.target for node in steps] == [aten.linear.default, aten.mul.Tensor, aten.batch_norm.default]
    linear, product, normalised = steps
    assert linear.args[0] is traced.argument
    paths = [traced.inputs.get(node) for node in (*linear.args[1:], product.args[1], *normalised.args[1:5])]  # type: ignore[arg-type]
    expected = ["gemm.weight", "gemm.bias", "scale", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"]
    assert paths == expected
    assert normalised.args[5] is training
    assert traced.result is normalised
    assert "unread" not in traced.inputs.values()


def test_trace_keeps_tied_tensors_apart() -> None:
    block = Block()
    block.scale = block.bn.weight
    traced = _trace(block)
    product = next(node for node in traced.operations if node.target is aten.mul.Tensor)
    assert traced.inputs[product.args[1]] == "scale"  # type: ignore[index]


def test_trace_takes_settings_in_place_of_a_childs_own() -> None:
    block = Block(momentum=None)
    scanned = source.scan(Block.forward)
    assert isinstance(scanned, source.Scan)
    rejection = tracing.trace(block, scanned.reads, (3, 6), training=True)
    assert isinstance(rejection, tracing.Rejection) and rejection.reason is Reason.TRACE
    assert isinstance(_trace(block, settings={"bn": {"momentum": 1.0}}), tracing.Traced)
    assert block.bn.momentum is None


class _Fingerprint:
    """All that tracing might disturb."""

    def __init__(self, module: nn.Module) -> None:
        self.state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        self.versions = {name: tensor._version for name, tensor in module.state_dict(keep_vars=True).items()}
        self.ids = {name: id(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}
        self.training = [child.training for child in module.modules()]
        self.dicts = [copy.copy(child.__dict__) for child in module.modules()]
        self.random = torch.get_rng_state()
        self.modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())

    def assert_same(self, other: _Fingerprint) -> None:
        assert all(torch.equal(self.state[name], other.state[name]) for name in self.state)
        assert torch.equal(self.random, other.random)
        for name in ("versions", "ids", "training", "modes"):
            assert getattr(self, name) == getattr(other, name)
        for mine, theirs in zip(self.dicts, other.dicts, strict=True):
            assert mine.keys() == theirs.keys() and all(mine[key] is theirs[key] for key in mine)


@pytest.mark.parametrize("training", [True, False])
def test_trace_leaves_no_trace(training: bool) -> None:
    block = Block()
    block.gemm.eval()
    called: list[str] = []
    block.register_forward_hook(lambda *_: called.append("own"))
    block.bn.register_forward_pre_hook(lambda *_: called.append("child"))
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: called.append("global"))
    before = _Fingerprint(block)
    try:
        _trace(block, training=training)
    finally:
        everywhere.remove()
    before.assert_same(_Fingerprint(block))
    assert called == []


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.device("meta"),
    ],
    ids=["no_grad", "inference_mode", "autocast", "default_device"],
)
def test_trace_does_not_depend_on_where_it_is_called(mode: Any) -> None:
    block = Block()
    usual = [(node.target, str(node.args)) for node in _trace(block).operations]
    with mode:
        assert [(node.target, str(node.args)) for node in _trace(block).operations] == usual


class Fails(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.gemm(self.bn(x))


class Pair(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return (x.abs(),)


class Peeks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.ones(3)
        self.nested = nn.Sequential(nn.Linear(6, 6))
        self.none = None
        self.register_buffer("missing", None)
        self.register_buffer("shadowed", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.plain

    @property
    def answer(self) -> int:
        return 42


class OwnGetattr(Block):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


def test_trace_reports_what_forward_raises() -> None:
    rejection = tracing.trace(Fails(), ("gemm", "bn"), (3, 6), training=True)
    assert isinstance(rejection, tracing.Rejection) and rejection.reason is Reason.TRACE
    assert "Error" in rejection.detail and "\n" not in rejection.detail


def test_trace_fails_on_an_attribute_that_was_not_announced() -> None:
    rejection = tracing.trace(Block(), ("gemm", "bn"), (3, 6), training=True)
    assert isinstance(rejection, tracing.Rejection) and rejection.reason is Reason.TRACE
    assert "scale" in rejection.detail


def test_trace_rejects_a_tuple_of_one_tensor() -> None:
    rejection = tracing.trace(Pair(), (), (3, 6), training=True)
    assert rejection == tracing.Rejection(Reason.UNSUPPORTED, "forward returns a tuple, not a tensor")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *(("plain", Reason.UNSUPPORTED), ("none", Reason.UNSUPPORTED), ("missing", Reason.UNSUPPORTED)),
        *(("answer", Reason.UNSUPPORTED), ("training", Reason.UNSUPPORTED), ("nowhere", Reason.UNSUPPORTED)),
        *(("shadowed", Reason.UNSUPPORTED), ("nested", Reason.CHILD)),
    ],
)
def test_only_registered_tensors_and_leaves_can_be_read(name: str, reason: Reason) -> None:
    module = Peeks()
    module.__dict__["shadowed"] = 3
    rejection = tracing.unreadable(module, (name,))
    assert rejection is not None and rejection.reason is reason and f"self.{name}" in rejection.detail


def test_a_getattr_of_its_own_makes_a_module_unreadable() -> None:
    rejection = tracing.unreadable(OwnGetattr(), ("scale",))
    assert rejection is not None and "__getattr__" in rejection.detail
    assert tracing.unreadable(Block(), ("scale", "gemm", "bn")) is None
