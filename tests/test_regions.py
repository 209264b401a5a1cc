"""Regions: what is found in a forward, and that it computes what it did, whatever is done to the model."""

from __future__ import annotations

import pytest
from region_checks import Case, check
from region_look_alikes import CHANGED, LOOK_ALIKES
from region_models import FOUND

TABLE: dict[str, Case] = {**FOUND, **LOOK_ALIKES, **CHANGED}


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, case in TABLE.items() for mode in case.modes])
def test_what_is_found_computes_what_it_did(name: str, mode: str) -> None:
    check(TABLE[name], mode)
