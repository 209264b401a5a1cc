"""What is found, looks like it and changes at a region: by the short way through C++, over stand-ins on the CPU, it
computes what the original does, without gradients."""

from __future__ import annotations

import pytest
from at_once_stand_in import compiled, needs_compiler, registered, short_way
from region_changes import CHANGED
from region_checks import Case, check
from region_look_alikes import LOOK_ALIKES
from region_models import FOUND
from region_views import VIEWS

__all__ = ["compiled", "registered", "short_way"]

TABLE: dict[str, Case] = {**FOUND, **LOOK_ALIKES, **CHANGED, **{f"view: {name}": case for name, case in VIEWS.items()}}


@needs_compiler
@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("name", [name for name, case in TABLE.items() if case.found])
def test_what_is_found_computes_what_it_did(name: str) -> None:
    for mode in TABLE[name].modes:
        check(TABLE[name], mode, runs=(False, False))
