"""The longest length that fits, by trial: every trial in a fresh child process, and every way to fail told apart.

A search inside one process is refused: what a failed trial leaves behind (fragments, caches) shortens the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from hybridtf.bench.child import Trial, available_bytes, run_trial
from hybridtf.bench.outcomes import Outcome
from hybridtf.bench.records import Record, make_record
from hybridtf.bench.subject import Subject
from hybridtf.core import ConfigError
from hybridtf.cost.calls import device_of
from hybridtf.cost.phases import Phase

RESOLUTION = 1 / 64
"""The interval ends when its upper end is longer than the lower one by at most this share, or by one token."""

TRIALS = 12
"""Children that one search may start: enough for any limit between 1,024 and 1,048,576 tokens, the confirmation included."""

GROWTH = 8
"""Three doublings in one: no trial is longer than the longest that fitted by more than this factor."""

SLACK = 0.98
"""Of the lengths that bisection can tell apart: whole tokens and rounding take the rest."""

Ended: TypeAlias = Literal["resolved", "max_length", "trials", "nothing_fits"]
"""``resolved``: the interval is as narrow as asked; ``max_length``: the longest allowed fits; ``trials``: they were used up
before; ``nothing_fits``: a row of one token does not."""


@dataclass(frozen=True)
class Probe:
    """One trial: ``length`` tokens a row, how it ended, and what the child said of it."""

    length: int
    outcome: Outcome
    error: str | None = None
    seconds: float | None = None
    peak: int | None = None
    """Bytes at the peak: resident beyond the bare process on a CPU, allocated on a GPU. None: not known."""

    @property
    def fits(self) -> bool:
        """Whether the step ran to its end with finite results, in time and in memory."""
        return self.outcome == "fits"


@dataclass(frozen=True)
class Search:
    """``fits``: the longest length that ran, None where none did. ``fails``: the next longer one that was tried, and how
    it ended; None where nothing failed. ``confirmed``: a second, independent trial of ``fits`` ran too."""

    fits: int | None
    fails: Probe | None
    confirmed: bool
    ended: Ended
    probes: tuple[Probe, ...]

    @property
    def resolution(self) -> float | None:
        """How much longer than ``fits`` the length that failed is, as a share of ``fits``; None for an open interval."""
        return None if self.fits is None or self.fails is None else (self.fails.length - self.fits) / self.fits


def search_fits(
    probe: Callable[[int], Probe], *, start: int = 1024, max_length: int = 1 << 20, resolution: float = RESOLUTION,
    trials: int = TRIALS,
) -> Search:
    """Doubling from ``start``, then bisection on a scale of equal shares, then a second trial of the length that fits.

    Upwards a step is at most :data:`GROWTH`, and no larger than what the trials that are left can resolve. A length that
    fits once and fails the second time counts as one that fails; from then on every length is tried twice at once. Any
    outcome but ``fits`` is the upper end, whatever its reason, and is handed back with it. Raises :class:`ConfigError`
    for sizes that leave nothing to search.
    """
    if start < 1 or max_length < 1 or not 0 < resolution < 1 or trials < 3:
        raise ConfigError(
            f"start and max_length must be at least 1, resolution between 0 and 1, trials at least 3; "
            f"got {start}, {max_length}, {resolution} and {trials}"
        )
    search = _Searching(probe, max_length, resolution, trials)
    search.grow(min(start, max_length))
    search.bisect()
    while search.low and not search.confirmed and search.left:
        search.confirm()
        search.bisect()
    return search.answer()


class _Searching:
    """The bracket while it closes: ``low`` fits (0: nothing does yet), ``fails`` is the shortest that does not."""

    def __init__(self, probe: Callable[[int], Probe], max_length: int, resolution: float, trials: int) -> None:
        self._probe, self._max, self._resolution, self._trials = probe, max_length, resolution, trials
        self.probes: list[Probe] = []
        self.fitting: list[int] = [0]
        self.fails: Probe | None = None
        self._sure: set[int] = set()
        self._doubt = False

    @property
    def low(self) -> int:
        return self.fitting[-1]

    @property
    def left(self) -> int:
        """Trials that may still be made."""
        return self._trials - len(self.probes)

    @property
    def confirmed(self) -> bool:
        """Whether two trials of the longest length that fits have run."""
        return self.low in self._sure

    def try_length(self, length: int) -> bool:
        """A trial that moves the bracket; where one has been contradicted before, two."""
        if not self._run(length):
            return False
        self.fitting.append(length)
        if self._doubt and self.left:
            self.confirm()
        return self.low == length

    def _run(self, length: int) -> bool:
        found = replace(self._probe(length), length=length)
        self.probes.append(found)
        if not found.fits:
            self.fails = found
        return found.fits

    def grow(self, length: int) -> None:
        """Longer and longer until one fails; where the first one does, a single token is tried next."""
        if not self.try_length(length):
            if length > 1:
                self.try_length(1)
            return
        while self.low < self._max and self.left > 2:
            # After this trial, and with one kept for the confirmation, so many lengths can be told apart.
            cells = SLACK * 2 ** (self.left - 2)
            factor = min(float(GROWTH), math.exp(min(cells * math.log1p(self._resolution), 10.0)))
            longer = min(max(int(self.low * factor), self.low + 1), self._max)
            if not self.try_length(longer):
                return

    def bisect(self) -> None:
        """Close the bracket, one trial kept for the confirmation; in doubt only above a length that is confirmed."""
        while self.fails is not None and self.left > 1 and not self._resolved(self.fails.length):
            if self._doubt and self.low and not self.confirmed:
                return
            low, high = self._scale(self.low), self._scale(self.fails.length)
            middle = round(self._length((low + high) / 2))
            self.try_length(min(max(middle, self.low + 1), self.fails.length - 1))

    def confirm(self) -> None:
        """A second trial of the length that fits; where it fails, the bracket moves down to what fitted before."""
        length = self.low
        if self._run(length):
            self._sure.add(length)
        else:
            self._doubt = True
            self.fitting = [one for one in self.fitting if one < length]

    def answer(self) -> Search:
        ended: Ended = "trials"
        if self.low == 0 and self.fails is not None and self.fails.length == 1:
            ended = "nothing_fits"
        elif self.low == self._max:
            ended = "max_length"
        elif self.low and self.fails is not None and self._resolved(self.fails.length):
            ended = "resolved"
        return Search(self.low or None, self.fails, self.confirmed, ended, tuple(self.probes))

    def _resolved(self, high: int) -> bool:
        return high - self.low <= max(1.0, self._resolution * self.low)

    def _scale(self, length: float) -> float:
        """Where ``length`` stands on the scale on which one step is one token, or the resolution where that is more."""
        knee = 1 / self._resolution
        return length if length <= knee else knee + math.log(length / knee) / math.log1p(self._resolution)

    def _length(self, place: float) -> float:
        """The length at a place of the scale: the inverse of :meth:`_scale`."""
        knee = 1 / self._resolution
        return place if place <= knee else knee * math.exp((place - knee) * math.log1p(self._resolution))


# -- the record --------------------------------------------------------------------------------------------------------

HOW = {
    "trial": "a fresh process builds the model and runs the step twice",
    "limit_cpu": "RLIMIT_DATA: private memory asked for beyond the bare process (interpreter and libraries)",
    "limit_gpu": "share of the device's memory that the allocator may reserve",
    "peak": "cpu: highest resident size less that before the model; gpu: highest allocated; reset before the last run",
}
"""How a search was made; written into the records."""


def measure_fits(
    subject: Subject, *, phase: Phase = "train", batch_size: int = 1, limit_bytes: int | None = None,
    timeout_s: float = 600.0, start: int = 1024, max_length: int = 1 << 20, trial: Trial = run_trial,
    progress: Callable[[Probe], None] | None = None,
) -> Record:
    """A ``fits`` record: the longest rows that a phase takes within ``limit_bytes``, an interval [fits, fails].

    ``limit_bytes``: None takes what memory the machine has free now, or all of a GPU. ``timeout_s``: of one trial. No
    trial raises: out of memory, timed out, not finite and failed are outcomes. Raises :class:`ConfigError` for a subject
    that no other process can build, or a limit that this system cannot enforce.
    """
    model = subject.build()
    device, dtype, identity = device_of(model), subject.dtype_of(model), subject.identity(model)
    del model
    limit = limit_bytes if limit_bytes is not None else available_bytes(device)

    def probe(length: int) -> Probe:
        found = trial(subject, phase, batch_size, length, limit, timeout_s)
        one = Probe(length, found["outcome"], found.get("error"), found.get("seconds"), found.get("peak"))
        if progress is not None:
            progress(one)
        return one

    found = search_fits(probe, start=start, max_length=max_length)
    fields: dict[str, Any] = {
        "phase": phase, "batch_size": batch_size, "device": str(device), "dtype": dtype, "limit_bytes": limit,
        "limit_asked": limit_bytes, "timeout_s": timeout_s, "fits": found.fits,
        "fails": None if found.fails is None else vars(found.fails), "confirmed": found.confirmed,
        "resolution": found.resolution, "max_length": max_length, "ended": found.ended,
        "probes": [vars(one) for one in found.probes], "how": HOW, "note": _note(found),
    }
    return make_record("fits", identity, fields)


def _note(found: Search) -> str | None:
    if found.ended == "trials":
        return "the trials were used up before the interval was as narrow as asked"
    if found.fits is not None and not found.confirmed:
        return "the longest length that fitted was not confirmed by a second trial"
    return None


