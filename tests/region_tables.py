"""The table of regions: what is found, what looks like it and what changes."""

from __future__ import annotations

from region_changes import CHANGED
from region_checks import Case
from region_look_alikes import LOOK_ALIKES
from region_models import FOUND
from region_views import VIEWS

TABLE: dict[str, Case] = {**FOUND, **LOOK_ALIKES, **CHANGED, **{f"view: {name}": case for name, case in VIEWS.items()}}
