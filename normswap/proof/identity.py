"""Whether a model asks for the class of what is swapped in it, as ``type(self.block) is Block`` does: which sites
change what it computes by having another class, whatever that class does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normswap.installed import class_before, installed_class, marks, unannounced
from normswap.modules import Rewritten
from normswap.proof.whole_model import tensors_in
from normswap.untouched import classes, preserved, same_values

MOST_RUNS = 32
"""Of the model in search of the sites that are asked; all are taken to be that are not found innocent by then."""

_PLAIN = (bool, int, float, str)


def asked(model: nn.Module, sites: Sequence[str], run: Callable[[], Any]) -> list[str]:
    """Which of the swapped ``sites``, by their names, must have their original class for ``run``, a run of ``model``,
    to give what it gave. The original computes at all of them meanwhile, so that every bit must be the same; of a model
    that is not the same from run to run, the forms. The model is left as it was."""
    search = _Search(model, sites, run)
    found: list[str] = []
    left = [*sites]
    while left and search.disturb(left):
        found += search.within(left)
        left = [site for site in left if site not in found]
    return found


class _Search:
    def __init__(self, model: nn.Module, sites: Sequence[str], run: Callable[[], Any]) -> None:
        self.model, self.run, self.runs = model, run, 0
        modules = {name: model.get_submodule(name) for name in sites}
        self.originals = [(module, class_before(module)) for module in modules.values()]
        installed = {name: installed_class(module) for name, module in modules.items()}
        other = {cls: _stand_in(cls) for cls in {*installed.values()}}  # what has one class asks for one
        self.others = {name: (module, other[installed[name]]) for name, module in modules.items()}
        self.expected = self._result([])
        self.exact: bool | None = None  # not known before it matters

    def disturb(self, sites: Sequence[str]) -> bool:
        """Whether another class at all ``sites`` is noticed."""
        self.runs += 1
        if self.runs > MOST_RUNS:
            return True
        try:
            found = self._result(sites)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # what the model says to a class that it does not know
            return True
        if _forms(found) != _forms(self.expected):
            return True
        if _same(found, self.expected):
            return False
        if self.exact is None:
            self.exact = _same(self._result([]), self.expected)
        return self.exact

    def within(self, sites: Sequence[str]) -> list[str]:
        """Those of ``sites``, which disturb together, that do so in fewer; all where none do."""
        if len(sites) == 1:
            return [*sites]
        halves = sites[: len(sites) // 2], sites[len(sites) // 2 :]
        return [site for half in halves if self.disturb(half) for site in self.within(half)] or [*sites]

    def _result(self, sites: Sequence[str]) -> list[Any]:
        """What the original gives, tensors and plain values, with another class at ``sites``."""
        others = [self.others[name] for name in sites]
        with classes(self.originals), classes(others), preserved(self.model), torch.no_grad():
            out = self.run()
            return [t.detach().clone() for t in tensors_in(out)] + [v for v in tree_leaves(out) if type(v) in _PLAIN]


def _stand_in(installed: Any) -> type[nn.Module]:
    """Another class than the one that ``installed`` was put in the place of, which computes what that does."""
    original = installed._normswap_original
    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    body = {**names, **marks(original, installed._normswap_match)}
    made: type[nn.Module] = unannounced(type(original), original.__name__, (Rewritten, original), body)
    return made


def _forms(result: Sequence[Any]) -> list[Any]:
    return [(v.shape, v.dtype) if isinstance(v, Tensor) else type(v) for v in result]


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(_equal(*pair) for pair in zip(one, other, strict=True))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return same_values(one, other)
    return bool(one == other or (one != one and other != other))
