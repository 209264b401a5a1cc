"""What is found, looks like it and changes at a region: by the short way through C++, over stand-ins on the CPU, it
computes what the original does, without gradients."""

from __future__ import annotations

import pytest
from at_once_stand_in import compiled, needs_compiler, registered, short_way
from region_checks import check
from region_tables import TABLE

__all__ = ["compiled", "registered", "short_way"]


@needs_compiler
@pytest.mark.usefixtures("short_way")
@pytest.mark.parametrize("name", [name for name, case in TABLE.items() if case.found])
def test_what_is_found_computes_what_it_did(name: str) -> None:
    for mode in TABLE[name].modes:
        check(TABLE[name], mode, runs=(False, False))
