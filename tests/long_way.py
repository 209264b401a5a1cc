"""Calls by the way of Python, where an op can be replaced and counted: C++'s short way calls none of ours."""

from __future__ import annotations

import pytest

from normswap.ops import at_once


def go_the_long_way(patch: pytest.MonkeyPatch) -> None:
    """As where the nodes are not compiled, until ``patch`` is undone."""
    declines = at_once.AtOnce(None).call
    for one in list(at_once._every):
        patch.setattr(one, "call", one.without)
    for name, value in {"_calls": None, "only_compute": None, "folded_linear": declines}.items():
        patch.setattr(at_once, name, value)
    patch.setattr(at_once, "serve", lambda calls: None)
