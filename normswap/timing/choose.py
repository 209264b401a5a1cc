"""Which candidates to keep: a cover of the model by what each saves where the model waits.

A model waits for its device or for its host, and a saving on the other side changes nothing. Where the two are close,
both count, by how close they are. All here is arithmetic on what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from normswap.timing.candidate import Candidate
from normswap.timing.hidden import NO_COST, Cost

DEVICE_NOISE, HOST_NOISE = 0.01, 0.05
"""The least by which times must differ, as a share: equal runs of equal code differ by less."""
NEAR = 0.1
"""How far from equal, as a share, device and host may be for both to count."""
ALIKE = 0.03
"""Of candidates that exclude each other and save alike up to this share, the one that names most is taken."""


@dataclass(frozen=True)
class Waiting:
    """What one run of the model costs its device and its host, in microseconds."""

    device_us: float
    host_us: float

    @property
    def bound(self) -> str:
        """What the run waits for: "device" or "host"."""
        return "device" if self.device_us >= self.host_us else "host"

    @property
    def device_share(self) -> float:
        """How much of a device's microsecond saved the run gains; the rest is the host's share."""
        if self.host_us <= 0:
            return 1.0
        return min(1.0, max(0.0, 0.5 + (self.device_us / self.host_us - 1.0) / (2 * NEAR)))

    def weighed(self, device_us: float, host_us: float) -> float:
        """What so many microseconds of each are to the run."""
        return self.device_share * device_us + (1 - self.device_share) * host_us


DEVICE, HOST = Waiting(1.0, 0.0), Waiting(0.0, 1.0)
"""Of a model that waits for one of them alone."""


@dataclass(frozen=True)
class Timed:
    """A candidate with the cost of its calls in one run of the model, the original's and ours. Without calls nothing
    was timed; ``note`` may say why."""

    candidate: Candidate
    calls: int = 0
    original: Cost = NO_COST
    ours: Cost = NO_COST
    note: str = ""

    def gain(self, waiting: Waiting) -> float | None:
        """How many times faster ours is where the model waits; exactly 1 where the difference is noise, None when it
        was not timed."""
        if not self.calls:
            return None
        ours, saved = waiting.weighed(self.ours.device_us, self.ours.host_us), self.saved_us(waiting)
        return 1.0 if abs(saved) <= self.noise_us(waiting) or ours <= 0 else (ours + saved) / ours

    def saved_us(self, waiting: Waiting) -> float:
        """Microseconds of one run of the model."""
        original, ours = self.original, self.ours
        return waiting.weighed(original.device_us - ours.device_us, original.host_us - ours.host_us)

    def noise_us(self, waiting: Waiting) -> float:
        """What they may be off by."""
        original, ours = self.original, self.ours
        device = max(DEVICE_NOISE * original.device_us, original.device_noise_us + ours.device_noise_us)
        host = max(HOST_NOISE * original.host_us, original.host_noise_us + ours.host_noise_us)
        return waiting.weighed(device, host)


def worth(timed: Timed, waiting: Waiting, least: float) -> bool:
    """Whether to keep a candidate: its gain is ``least`` at least. One that changes nothing but noise is kept, lest
    chance decide, unless it costs more on the other side. One that was not timed is kept."""
    gain = timed.gain(waiting)
    if gain is None:
        return True
    other_side = HOST if waiting.bound == "device" else DEVICE
    return gain >= least and (gain != 1.0 or -timed.saved_us(other_side) <= timed.noise_us(other_side))


def cover(found: Sequence[Timed], waiting: Waiting, least: float) -> frozenset[str]:
    """The names of the candidates to keep, no two of which overlap: the one that saves most first, then the next that
    is left. What is not worth keeping hands over to what it overlaps."""
    excluded = _exclusions(found)
    left = [timed for timed in found if worth(timed, waiting, least)]
    kept: set[str] = set()
    while left:
        most = max(left, key=lambda timed: (timed.saved_us(waiting), timed.candidate.name))
        saved = most.saved_us(waiting)
        rivals = [timed for timed in left if timed.candidate.name in excluded[most.candidate.name]]
        alike = [timed for timed in rivals if timed.saved_us(waiting) >= saved - ALIKE * abs(saved)]
        taken = max(alike, key=lambda timed: (len(timed.candidate.overlaps), timed.candidate.name)).candidate.name
        kept.add(taken)
        left = [timed for timed in left if timed.candidate.name not in excluded[taken]]
    return frozenset(kept)


def in_order(found: Sequence[Timed], waiting: Waiting, least: float, *, widest: bool) -> frozenset[str]:
    """The names of all candidates worth keeping, but for those that others exclude which name more, if the ``widest``
    go first, or fewer."""
    excluded, sign = _exclusions(found), -1 if widest else 1
    kept: set[str] = set()
    for timed in sorted(found, key=lambda timed: (sign * len(timed.candidate.overlaps), timed.candidate.name)):
        if worth(timed, waiting, least) and not excluded[timed.candidate.name] & kept:
            kept.add(timed.candidate.name)
    return frozenset(kept)


def _exclusions(found: Sequence[Timed]) -> dict[str, set[str]]:
    """For every candidate its name and those of what it overlaps, whichever of the two says so."""
    names = {timed.candidate.name: {timed.candidate.name} for timed in found}
    for candidate in (timed.candidate for timed in found):
        for other in candidate.overlaps & names.keys():
            names[candidate.name].add(other)
            names[other].add(candidate.name)
    return names
