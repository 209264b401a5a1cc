"""What swaps cost and save: clocks, costs of device and host apart, and the choice by what the whole model gains.

A part that can be swapped is a ``Candidate``; ``decide`` times candidates and the model and says which to keep;
``decide_sites`` does so for the sites of a plan, ``decide_foldings`` says how their convolutions are computed.
"""

from __future__ import annotations

from normswap.timing.decision import has_a_clock
from normswap.timing.foldings import decide_foldings
from normswap.timing.sites import Decision, decide_sites

__all__ = ["Decision", "decide_foldings", "decide_sites", "has_a_clock"]
