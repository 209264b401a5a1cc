"""What swaps cost and save: clocks, costs of device and host apart, and the choice by what the whole model gains.

A part that can be swapped is a ``Candidate``; ``decide_sites`` times those of a plan and the model and says which to
keep, ``decide_foldings`` says how convolutions are computed.
"""

from __future__ import annotations

from normswap.timing.decision import Decision, decide_sites, has_a_clock
from normswap.timing.foldings import decide_foldings

__all__ = ["Decision", "decide_foldings", "decide_sites", "has_a_clock"]
