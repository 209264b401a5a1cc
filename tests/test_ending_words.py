"""What regions.ending reads of a BatchNorm's forward, by the words of its body: the children that it calls behind the
norm; and the short way of one that is read, spoiled one thing at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_act_models import Alone, NormAct
from region_checks import loaded
from torch import Tensor, nn

from normswap.activation import Activation
from normswap.ops import dispatch
from normswap.regions.ending import Short, behind_of, children_behind, ending_of, is_behind
from normswap.regions.spec import Region, qualified

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
number = 0.1
def same(function):
    return function
def another(x, *given):
    return x
class Written(nn.BatchNorm2d):
"""


def norm(function: str = "F.batch_norm", **changes: str) -> str:
    """The call of the norm, some of it in other words."""
    given = {name: f"self.{name}" for name in ("running_mean", "running_var", "weight", "bias")}
    given |= {"training": "False", "momentum": "self.momentum", "eps": "self.eps"} | changes
    return f"{function}(x, {', '.join(given.values())})"


N = norm()
BODIES: dict[str, str | None] = {
    f"return {N}": "",
    f"'Words.'|pass|return {N}": "",
    f"return self.act({N})": "act",
    f"return self.act(self.drop({N}))": "drop act",
    f"x = {N}|return x": "",
    f"y = {N}|x = self.drop(y)|return self.act(x)": "drop act",
    f"torch._assert(x.ndim == 4, 'no image')|return {N}": "",
    f"another(x)|return {N}": None,
    f"y = {N}|return x": None,
    f"y = {N}|return self.act(x)": None,
    f"y = {N}|return y.relu()": None,
    f"x = {N}|return self.act(x, 1)": None,
    f"x = {N}|return self.act(x, inplace=True)": None,
    f"x = {N}|x = {N}|return x": None,
    f"self = x|return {N}": None,
    f"self.seen = 1|return {N}": None,
    f"x = self.weight|return {N}": None,
    f"y = {N}|y = self.weight|return y": None,
    f"y = {N}": None,
    f"y = {N}|return": None,
    f"return {norm('another')}": None,
    f"return {norm(weight='self.bias', bias='self.weight')}": None,
    f"return {norm(eps='1e-5')}": None,
    "return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)": None,
    f"if self.training:|    return x|return {N}": "",
    f"if not self.training:|    x = {N}|return self.act(x)": "act",
    f"if self.training:|    return x|else:|    x = {N}|return self.act(x)": "act",
    f"if not self.training:|    x = {N}|else:|    return x|return self.act(x)": "act",
    f"m = 2|if self.flag:|    'Words.'|    pass|    m = 1|return {norm(momentum='m')}": "",
    f"if self.flag:|    m = 1|return {norm(momentum='m')}": None,
    f"if self.flag:|    m = 1|else:|    m = 2|return {norm(momentum='m')}": "",
    f"if self.flag:|    pass|else:|    x = 1|return {N}": None,
    f"if self.flag:|    y = {N}|return {N}": None,
    f"if self.flag:|    self.drop(x)|return {N}": None,
    f"if self.flag:|    self = 1|return {N}": None,
    f"if self.flag:|    return x|return {N}": None,
    f"if x:|    m = 1|return {N}": None,
    f"if another(self):|    m = 1|return {N}": None,
    f"t = True|if self.flag:|    t = False|return {norm(training='t')}": None,
    f"m = number|return {norm(momentum='m')}": None,
    f"m = -self.momentum|return {norm(momentum='m')}": None,
}
OF: dict[tuple[str, str], bool] = {
    ("training", "True"): False,
    ("training", "self.training"): True,
    ("training", "not self.training"): False,
    ("training", "self.training or self.running_mean is None"): True,
    ("training", "self.training or self.running_mean is not None"): False,
    ("training", "self.running_var is not None and self.training"): True,
    ("training", "self.flag and self.training"): True,
    ("training", "self.flag or self.training"): False,
    ("training", "self.training and self.flag or self.flag"): False,
    ("training", "not self.flag"): False,
    ("training", "not not self.flag"): False,
    ("training", "self.flag"): False,
    ("training", "self.weight is None"): False,
    ("training", "t"): False,
    ("training", "u"): True,
    ("running_mean", "None"): False,
    ("running_mean", "m"): True,
    ("running_mean", "self.running_mean if not self.training or self.flag else None"): True,
    ("running_mean", "self.running_var if self.training else self.running_mean"): True,
    ("running_mean", "self.running_mean if self.training else self.running_var"): False,
    ("running_mean", "self.running_mean if self.flag else self.running_mean"): True,
    ("momentum", "0.1"): True,
    ("momentum", "number"): False,
    ("momentum", "another(self)"): False,
}


def written(body: str, folder: Path, head: str = "def forward(self, x):") -> Any:
    """A class whose forward has these lines, separated by "|"."""
    file = folder / "endings_by_their_words.py"
    lines = "".join(f"        {line}\n" for line in body.split("|"))
    file.write_text(HEAD + "".join(f"    {line}\n" for line in head.split("|")) + lines)
    return loaded(file).Written


@pytest.mark.parametrize("body", BODIES)
def test_what_a_body_calls_behind_the_norm(body: str, tmp_path: Path) -> None:
    found, cls = BODIES[body], written(body, tmp_path)
    assert behind_of(cls) == (None if found is None else (*found.split(),))
    assert all(is_behind(cls, names) == (found == names) for names in ("", "act", "drop act"))


@pytest.mark.parametrize(("name", "words"), OF)
def test_what_the_norm_is_given(name: str, words: str, tmp_path: Path) -> None:
    body = f"t = not self.training|u = not t|m = self.running_mean|return {norm(**{name: words})}"
    assert behind_of(written(body, tmp_path)) == (() if OF[name, words] else None)


@pytest.mark.parametrize("head", ("def forward(self, x, y=None):", "@same|def forward(self, x):"))
def test_other_functions_are_not_read(head: str, tmp_path: Path) -> None:
    assert behind_of(written(f"return {N}", tmp_path, head)) is None
    assert behind_of(type("Builtin", (NormAct,), {"forward": torch.relu})) is None


def test_to_read_a_class_runs_none_of_its_code() -> None:
    def refused(self: Any, value: bool) -> None:
        raise AssertionError

    training = property(lambda self: False, refused)
    assert behind_of(type("Guarded", (NormAct,), {"training": training, "__init__": refused})) == ("drop", "act")


class Other(nn.Module):
    """Looks like one, and is no BatchNorm."""

    forward = NormAct.forward

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.act = nn.Identity(), nn.ReLU()


def _with(cls: type[nn.Module] = NormAct, **attributes: Any) -> nn.Module:
    return type("With", (cls,), attributes)()


NO_SUCH_ONES: dict[str, Callable[[], nn.Module]] = {
    "no BatchNorm": Other,
    "another __getattr__": lambda: _with(__getattr__=lambda self, name: nn.Module.__getattr__(self, name)),
    "another _call_impl": lambda: _with(_call_impl=lambda self, x: x),
    "a child that the class hides": lambda: _with(drop=staticmethod(torch.neg)),
    "a mode that the class hides": lambda: _with(training=property(lambda self: False, lambda self, value: None)),
    "a flag that the class hides": lambda: _with(momentum=property(lambda self: 0.5, lambda self, value: None)),
}


@pytest.mark.parametrize("what", NO_SUCH_ONES)
def test_modules_that_are_no_such_ones(what: str) -> None:
    assert children_behind(_with()) == ("drop", "act") and children_behind(NO_SUCH_ONES[what]()) is None


# --- on every call --------------------------------------------------------------------------------------------------


def test_a_norm_that_is_another_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_of(norm: Any, cls: Any = NormAct, behind: str = "drop act") -> bool:
        return ending_of(Region("batch_norm", "norm", (), qualified(cls), {"behind": behind}), norm) is not None

    assert is_of(NormAct()) and not is_of(Alone()) and not is_of(nn.BatchNorm2d(6))
    assert not is_of(None) and not is_of(nn.ReLU())
    assert not is_of(NormAct(), behind="act")
    assert not is_of(nn.ReLU(), nn.ReLU) and not is_of(NormAct(), nn.ReLU)
    monkeypatch.setattr(NormAct, "forward", Alone.forward)
    assert not is_of(NormAct())


X, LEAKY = torch.randn(2, 6, 3, 3), Activation("leaky_relu", 0.5)
SPOILED: dict[str, Callable[[Any], Any]] = {
    "in training": lambda n: n.train(),
    "a dropout that drops": lambda n: setattr(n, "drop", nn.Dropout(0.5).train()),
    "a dropout of its own": lambda n: n.__dict__.update(drop=torch.neg),
    "an activation of its own": lambda n: n.__dict__.update(act=torch.neg),
    "another activation": lambda n: setattr(n, "act", nn.Softplus()),
    "no activation": lambda n: n._modules.pop("act"),
    "no mean": lambda n: n._buffers.update(running_mean=None),
    "no variance": lambda n: n._buffers.update(running_var=None),
}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the native op was given: as if there were a GPU."""
    seen: list[Any] = []
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(dispatch, "_direct", {"batch_norm_eval": lambda *given: seen.append(given) or given[0]})
    return seen


@pytest.mark.parametrize("what", SPOILED)
@torch.no_grad()
def test_the_short_way_is_left(what: str, called: list[Any]) -> None:
    short, norm = Short(NormAct, "drop act", lambda: (F.batch_norm,)), NormAct(nn.LeakyReLU(0.5)).eval()
    assert short(norm, X) is X
    assert called[0][1:6] == (norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
    assert called[0][6:] == (None, LEAKY.code, LEAKY.low, LEAKY.high)
    SPOILED[what](norm)
    assert short(norm, X) is None and len(called) == 1


def test_the_short_way_is_for_images_without_gradients(called: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    functions = [F.batch_norm]
    short, norm = Short(NormAct, "drop act", lambda: (*functions,)), NormAct().eval()
    unread = Short(NormAct, "act", lambda: (F.batch_norm,)), Short(NormAct, "drop act", lambda: (F.relu,))
    assert short(norm.requires_grad_(False), X) is None
    with torch.no_grad():
        assert Short(Alone, "", lambda: (F.batch_norm,))(Alone().eval(), X) is X
        assert short(norm, X) is X and all(one(norm, X) is None for one in unread)
        assert all(short(norm, x) is None for x in (X[0], X.double(), None, 1.0))
        forward = short.before(lambda norm, *given, **named: (given, named))
        assert forward(norm, X) is X
        for given, named in (((), {"x": X}), ((X, 1), {}), ((X,), {"more": 1})):
            assert forward(norm, *given, **named) == (given, named)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            assert forward(norm, X)[1] == {}
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "_direct", {})
            assert short(norm, X) is None
        functions[0] = F.relu
        assert short(norm, X) is None
