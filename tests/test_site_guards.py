"""What the swapped forward of an RMSNorm written by hand asks on a call, spoiled one at a time, and by what words the
rule knows one."""

from __future__ import annotations

import ast
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rms_models import Norm, NoWeight, Times
from torch import Tensor, nn

from normswap import rules
from normswap.forwards import rms_norm as forwards
from normswap.forwards.replaced import Read, Replaced, fingerprint
from normswap.plans import Match
from normswap.rules import module_site, rms_by_hand
from normswap.rules.expression_site import Flow

SIX = 6
X = torch.randn(2, 3, SIX, generator=torch.Generator().manual_seed(1))


class Own(Tensor):
    """What a library may have in a tensor's place."""


class Rooted(Norm):
    """With a method, a function and a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = "plain"

    def root(self, x):
        return torch.rsqrt(mean_of_squares(x) + self.eps)

    def forward(self, x):
        if self.mode == "plain":
            return x * self.root(x) * self.weight
        return x


def mean_of_squares(x):
    return x.pow(2).mean(-1, keepdim=True)


def site_of(module: nn.Module, **changed: Any) -> Any:
    match = rules.alone(module)
    assert isinstance(match, Match), match
    replaced = Replaced(type(module))
    return forwards._Site(replaced, {**match.attributes, **changed})


# --- is it as it was read -------------------------------------------------------------------------------------------


def test_functions_methods_and_settings_are_those_that_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Rooted()
    site = site_of(module)
    assert site.is_as_read(module)
    assert not site_of(module, source="another").is_as_read(module)
    for mode in ("other", ["plain"], type("Text", (str,), {})("plain")):
        module.mode = mode  # type: ignore[assignment]
        assert not site.is_as_read(module)
    del module.mode
    assert not site.is_as_read(module)
    module.mode = "plain"
    vars(module)["root"] = lambda x: x
    assert not site.is_as_read(module)
    del module.root
    assert site.is_as_read(module)
    for owner, name in ((Rooted, "root"), (Rooted, "forward")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda self, x: x)
            assert not site.is_as_read(module), name
            patch.setattr(owner, name, types.FunctionType(getattr(owner, name).__code__, {}))
            assert not site.is_as_read(module), name
        with monkeypatch.context() as patch:
            patch.setattr(getattr(owner, name), "__code__", (lambda self, x: x).__code__)
            assert not site.is_as_read(module), name
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "mean_of_squares", lambda x: x)
        assert not site.is_as_read(module)
    with monkeypatch.context() as patch:
        patch.setattr(mean_of_squares, "__code__", (lambda x: x).__code__)
        assert not site.is_as_read(module)
    for function in (mean_of_squares, Rooted.root):
        with monkeypatch.context() as patch:
            patch.setattr(function, "__defaults__", (X,))
            assert not site.is_as_read(module)
        with monkeypatch.context() as patch:
            patch.setattr(function, "__kwdefaults__", {"x": X})
            assert not site.is_as_read(module)
    assert site.is_as_read(module)
    site.replaced.installed = nn.Linear  # it is swapped no more
    assert not site.is_as_read(module)


def test_a_function_with_defaults_by_name_is_read_anew_where_they_change() -> None:
    def function(x: Tensor, *, by: float = 1.0) -> Tensor:
        return x * by

    read = Read(function)
    before: Any = function.__kwdefaults__
    assert read.is_it(function)
    for now in (None, {}, {"by": 2.0}, {"other": 1.0}):
        function.__kwdefaults__ = now
        assert not read.is_it(function), now
    function.__kwdefaults__ = before
    assert read.is_it(function)
    before["by"] = 3.0
    assert not read.is_it(function)


def test_a_number_of_a_module() -> None:
    module = nn.Module()
    module.eps, module.size, module.flag, module.tensor = 1e-3, 2, True, torch.ones(())
    number = forwards._Site.number
    assert (number(module, 0.5), number(module, "eps"), number(module, "size")) == (0.5, 1e-3, 2)
    assert number(module, "flag") is None and number(module, "tensor") is None and number(module, "nothing") is None


def test_the_weight_of_a_module() -> None:
    site, module = site_of(Times()), Times()
    weight, _, _ = site.given(module, X) or (None, None, None)
    assert weight is module.weight
    plain = Times()
    del plain.weight
    plain.weight = torch.ones(SIX)  # type: ignore[assignment]
    weight, _, _ = site.given(plain, X) or (None, None, None)
    assert weight is plain.weight


class Shifted(Norm):
    """With a number that is added to the weight."""

    offset: Any = 0.5

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (self.offset + self.weight)


def test_what_a_region_around_a_norm_computes_it_with() -> None:
    module, channels = Shifted(), Channels()
    arguments = forwards.arguments_reader(Replaced(Shifted), rules.alone(module).attributes)  # type: ignore[union-attr]
    assert arguments(module, X) == ((SIX,), module.weight, 1e-5, 0.5, False)
    for x in (X.transpose(0, 1), X.double(), torch.ones(())):
        assert arguments(module, x) is None
    for name in ("eps", "offset"):
        setattr(module, name, torch.ones(()))
        assert arguments(module, X) is None
        vars(module)[name] = 1e-5
    assert arguments(module, X) is not None
    assert arguments(module, X.half()) is None and not forwards._Site.casts(site_of(Times()), X)
    assert site_of(Times()).casts(X.half()) and not site_of(module).casts(X.half())
    assert arguments(nn.Linear(1, 1), X) is None  # its forward is another by now
    along = forwards.arguments_reader(Replaced(Channels), rules.alone(channels).attributes)  # type: ignore[union-attr]
    assert along(channels, torch.randn(2, SIX, 4, 5)) is None and along(channels, torch.randn(2, SIX)) is None


# --- does the op serve ----------------------------------------------------------------------------------------------

WEIGHT = torch.randn(SIX)
UNSERVED: dict[str, tuple[Any, Any]] = {
    "x of another class": (X.as_subclass(Own), WEIGHT),
    "x expanded": (X[:1].expand(2, 3, SIX), WEIGHT),
    "x of no dims": (torch.ones(()), WEIGHT),
    "x of another dtype": (X.double(), WEIGHT.double()),
    "weight of another class": (X, WEIGHT.as_subclass(Own)),
    "no weight": (X, None),
    "weight of another dtype": (X, WEIGHT.double()),
    "weight elsewhere": (X, WEIGHT.to("meta")),
    "weight of another rank": (X, WEIGHT[None]),
    "weight of another size": (X, WEIGHT[:1]),
}


@pytest.mark.parametrize("what", UNSERVED)
def test_tensors_that_the_op_does_not_serve(what: str) -> None:
    site = site_of(Times())
    for _ in range(2):  # the second time it is known
        assert not site.serves(*UNSERVED[what])
        assert site.serves(X, WEIGHT) and site.serves(X, nn.Parameter(WEIGHT)) and site.serves(X[0, 0], WEIGHT)


def test_without_a_weight_the_input_alone_decides() -> None:
    site = site_of(NoWeight())
    assert site.serves(X, None) and not site.serves(X.double(), None) and not site.serves(torch.ones(()), None)


class Channels(nn.Module):
    """Along the channels of an image, with a weight as it is stored for that."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.randn(SIX, 1, 1)), 1e-5

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps) * self.gain


def test_a_weight_must_lie_along_the_dim() -> None:
    module = Channels()
    site = site_of(module)
    image = torch.randn(2, SIX, 4, 5)
    assert site.serves(image, module.gain)
    assert not site.serves(image[0], module.gain)  # dim 1 is another of its dims
    assert not site.serves(image[0, 0], module.gain)
    assert not site.serves(torch.randn(2, SIX, SIX), module.gain)
    assert not site.serves(image, module.gain.reshape(1, SIX, 1)) and not site.serves(image, module.gain.reshape(SIX))


def test_a_rounding_before_the_weight_is_along_the_last_dim_alone() -> None:
    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.eps = nn.Parameter(torch.randn(SIX, 1, 1)), 1e-5

        def forward(self, x):
            y = x.float()
            return self.gain * (y * torch.rsqrt(y.pow(2).mean(1, keepdim=True) + self.eps)).to(x.dtype)

    module = Rounds()
    half, image = torch.randn(2, SIX, 4, 5).half(), torch.randn(2, SIX, 4, 5)
    site = site_of(module, cast_before_weight=True)
    site.dtypes = site.dtypes | {(torch.float16, torch.float16)}
    assert not site.serves(half, module.gain.half()) and site.serves(image, module.gain)
    site = site_of(module, cast_before_weight=False)
    site.dtypes = site.dtypes | {(torch.float16, torch.float16)}
    assert site.serves(half, module.gain.half())


def test_verdicts_are_kept_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    site, judged = site_of(Times()), []
    real = site._serves
    monkeypatch.setattr(site, "_serves", lambda *given: judged.append(1) or real(*given))
    for _ in range(3):
        assert site.serves(X, WEIGHT)
    assert len(judged) == 1
    assert site.serves(X[0], WEIGHT) and site.serves(X, WEIGHT) and len(judged) == 2
    for rows in range(1, forwards._VERDICTS + 1):
        site.serves(torch.empty(rows, SIX), WEIGHT)
        assert 0 < len(site.verdicts) <= forwards._VERDICTS


# --- words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "is_square"),
    [
        *((text, True) for text in ("x ** 2", "x * x", "x.pow(2)", "torch.pow(x, 2)", "x.square()", "square(x)")),
        *((text, True) for text in ("torch.mul(x, x)", "x.pow(exponent=2)", "torch.pow(x, exponent=2)")),
        *((text, False) for text in ("x ** 3", "x ** n", "x * y", "x + x", "x.pow(3)", "x.mul(x, 1)", "x.mul(y)")),
        *((text, False) for text in ("x", "x.abs()", "add(x, x)", "f(x)(2)", "torch.mul(x, y)", "x.mul(2)")),
    ],
)
def test_what_is_written_as_a_square(text: str, is_square: bool) -> None:
    assert rms_by_hand._is_square(ast.parse(text, mode="eval").body) == is_square


def flow(text: str) -> Flow:
    tree: Any = ast.parse("def forward(self, x, y):\n    " + text.replace("\n", "\n    ")).body[0]
    return Flow(tree)


@pytest.mark.parametrize(
    ("text", "averages"),
    [
        *(
            (text, True)
            for text in ("return x.pow(2).mean(-1)", "return (x * x).sum(-1)", "y = x ** 2\nreturn y.mean()")
        ),
        *((text, False) for text in ("return x.mean(-1)", "return x.pow(2)", "return x.pow(2).max()")),
        *((text, False) for text in ("return (x - y).pow(2).mean()", "y = x - 1\nreturn (y * y).mean()")),
        *((text, True) for text in ("return squared(x).mean()", "return averaged(x)")),
    ],
)
def test_what_is_written_as_a_mean_of_squares(text: str, averages: bool) -> None:
    read = flow(text)
    found = rms_by_hand._averages(read, frozenset({"squared"}), read.nodes[0], frozenset({"averaged"}))
    assert found == averages


def test_what_is_written_as_a_root() -> None:
    for text, count in (
        ("return x.sqrt()", 1),
        ("return torch.rsqrt(x) + y ** 0.5", 2),
        ("return x.pow(-0.5)", 1),
        ("return x.pow(2) + x ** 2", 0),
        ("return x * y", 0),
        ("return pow(x, 0.5)", 0),
    ):
        assert len([*rms_by_hand._roots(flow(text))]) == count, text


# --- subclasses -----------------------------------------------------------------------------------------------------


class Described(nn.LayerNorm):
    def forward(self, x):
        """Of one line."""
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Named(nn.LayerNorm):
    def forward(self, input):
        x = torch.nn.functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return x


class Flagged(nn.LayerNorm):
    fast = False

    def forward(self, x):
        if self.off:
            return x
        else:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Returns(nn.LayerNorm):
    def forward(self, x):
        _y = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x


class Statement(nn.LayerNorm):
    def forward(self, x):
        print(x)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Swapped(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.bias, self.weight, self.eps)


class Keyword(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, eps=self.eps)


class Fewer(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias)


class OfOther(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(self, self.normalized_shape, self.weight, self.bias, self.eps)


class Default(nn.LayerNorm):
    def forward(self, x=None):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class More(nn.LayerNorm):
    def forward(self, x, y):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class ByTest(nn.LayerNorm):
    def forward(self, x):
        if x is None:
            return x
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class OfClass(nn.LayerNorm):
    eps = property(lambda self: 1e-5, lambda self, value: None)  # type: ignore[assignment]

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Called(Described):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) * 2


class Shifts(nn.LayerNorm):
    def forward(self, x):
        return shifted(x, self.normalized_shape, self.weight, self.bias, self.eps)


def shifted(x, *given):
    return F.layer_norm(x, *given) + 1


class BuiltIn(nn.LayerNorm):
    forward = torch.relu  # type: ignore[assignment]


class Bare(nn.LayerNorm):
    """No forward of its own."""


@pytest.mark.parametrize("cls", [Described, Named, Bare])
def test_a_subclass_that_calls_what_its_base_does(cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = cls(4)
    source = {} if cls is Bare else {"source": fingerprint(cls.forward)}
    assert module_site.match_subclass(module, "layer_norm") == Match("layer_norm", source)
    vars(module)["forward"] = lambda x: x
    assert module_site.match_subclass(module, "layer_norm") is None
    del module.forward
    monkeypatch.setattr(cls, "__getattribute__", lambda self, name: object.__getattribute__(self, name), raising=False)
    assert module_site.match_subclass(module, "layer_norm") is None


def test_a_subclass_with_a_flag() -> None:
    module: Any = Flagged(4)
    for flag in (None, 1):
        module.off = flag
        assert module_site.match_subclass(module, "layer_norm") is None
    for flag in (False, True):
        module.off = flag
        attributes = {"source": fingerprint(Flagged.forward), "unless": "off"}
        assert module_site.match_subclass(module, "layer_norm") == Match("layer_norm", attributes)


OTHERS = [Returns, Statement, Swapped, Keyword, Fewer, OfOther, Default, More, ByTest, OfClass, Called, Shifts, BuiltIn]


@pytest.mark.parametrize("cls", OTHERS)
def test_a_subclass_that_does_something_else(cls: type[nn.Module]) -> None:
    assert module_site.match_subclass(cls(4), "layer_norm") is None  # type: ignore[call-arg]


def test_a_base_class_whose_forward_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module_site.has_torchs_forward(nn.LayerNorm)
    monkeypatch.setattr(nn.LayerNorm, "forward", Described.forward)
    assert not module_site.has_torchs_forward(nn.LayerNorm)
    monkeypatch.setattr(Described, "forward", nn.LayerNorm.forward)
    assert module_site.match_subclass(Bare(4), "layer_norm") is None
    monkeypatch.setattr(nn.LayerNorm, "forward", torch.relu)
    assert not module_site.has_torchs_forward(nn.LayerNorm)
