"""Which candidates to keep: a cover of the model by what each saves where the model waits.

A model waits for its device or for its host, and a saving on the other side changes nothing. Where the two are close,
both count, by how close they are. All here is arithmetic on what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        share = waiting.device_share
        original = share * self.original.device_us + (1 - share) * self.original.host_us
        noise = share * self.device_noise_us + (1 - share) * self.host_noise_us
        saved = self.saved_us(waiting)
        return 1.0 if abs(saved) <= noise or original <= saved else original / (original - saved)

    def saved_us(self, waiting: Waiting) -> float:
        """Microseconds of one run of the model."""
        share = waiting.device_share
        return share * self.device_saved_us + (1 - share) * self.host_saved_us

    @property
    def device_saved_us(self) -> float:
        return self.original.device_us - self.ours.device_us

    @property
    def host_saved_us(self) -> float:
        return self.original.host_us - self.ours.host_us

    @property
    def device_noise_us(self) -> float:
        measured = self.original.device_noise_us + self.ours.device_noise_us
        return max(DEVICE_NOISE * self.original.device_us, measured)

    @property
    def host_noise_us(self) -> float:
        measured = self.original.host_noise_us + self.ours.host_noise_us
        return max(HOST_NOISE * self.original.host_us, measured)

    @property
    def gains_on_device(self) -> bool:
        return self.device_saved_us > self.device_noise_us

    def loses_elsewhere(self, waiting: Waiting) -> bool:
        """Whether ours costs more on the side that the model does not wait for."""
        if waiting.bound == "device":
            return -self.host_saved_us > self.host_noise_us
        return -self.device_saved_us > self.device_noise_us


def worth(timed: Timed, waiting: Waiting, least: float) -> bool:
    """Whether to keep a candidate: its gain is ``least`` at least. One that changes nothing but noise is kept, lest
    chance decide, unless it costs more on the other side. One that was not timed is kept."""
    gain = timed.gain(waiting)
    if gain is None:
        return True
    if gain < least:
        return False
    return gain != 1.0 or not timed.loses_elsewhere(waiting)


def cover(found: Sequence[Timed], waiting: Waiting, least: float) -> frozenset[str]:
    """The names of the candidates to keep, no two of which overlap: the one that saves most first, then the next that
    is left. What is not worth keeping hands over to what it overlaps."""
    excluded = _exclusions([timed.candidate for timed in found])
    left = [timed for timed in found if worth(timed, waiting, least)]
    kept: set[str] = set()
    while left:
        most = max(left, key=lambda timed: (timed.saved_us(waiting), timed.candidate.name))
        rivals = [t for t in left if t is most or t.candidate.name in excluded[most.candidate.name]]
        enough = (1 - ALIKE) * most.saved_us(waiting)
        alike = [t for t in rivals if t is most or t.saved_us(waiting) >= enough]
        taken = max(alike, key=lambda timed: (len(timed.candidate.overlaps), timed.candidate.name))
        kept.add(taken.candidate.name)
        gone = {taken.candidate.name} | excluded[taken.candidate.name]
        left = [timed for timed in left if timed.candidate.name not in gone]
    return frozenset(kept)


def widest(found: Sequence[Timed], waiting: Waiting, least: float) -> frozenset[str]:
    """The names of all candidates worth keeping, but for those that others which name more exclude."""
    return _but_for_excluded(found, waiting, least, lambda timed: -len(timed.candidate.overlaps))


def narrowest(found: Sequence[Timed], waiting: Waiting, least: float) -> frozenset[str]:
    """The names of all candidates worth keeping, but for those that others which name fewer exclude."""
    return _but_for_excluded(found, waiting, least, lambda timed: len(timed.candidate.overlaps))


def _but_for_excluded(
    found: Sequence[Timed], waiting: Waiting, least: float, place: Callable[[Timed], int]
) -> frozenset[str]:
    excluded = _exclusions([timed.candidate for timed in found])
    kept: set[str] = set()
    left = [timed for timed in found if worth(timed, waiting, least)]
    for timed in sorted(left, key=lambda timed: (place(timed), timed.candidate.name)):
        if not excluded[timed.candidate.name] & kept:
            kept.add(timed.candidate.name)
    return frozenset(kept)


def _exclusions(candidates: Sequence[Candidate]) -> dict[str, set[str]]:
    """For every candidate the names of those it overlaps, whichever of the two says so."""
    found: dict[str, set[str]] = {candidate.name: set() for candidate in candidates}
    for candidate in candidates:
        for other in candidate.overlaps & found.keys():
            found[candidate.name].add(other)
            found[other].add(candidate.name)
    return found
