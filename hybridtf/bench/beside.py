"""Times of several steps beside each other, with the control, and what of them may be claimed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hybridtf.bench import noise
from hybridtf.bench.caches import Flush
from hybridtf.bench.gpu_state import gpu_state, refusals
from hybridtf.bench.timing import Clock, Timed, quartiles, resolution_of, time_rounds
from hybridtf.core import ConfigError
from hybridtf.cost.phases import Step

RESOLUTIONS = 20
"""A run that is shorter than so many steps of the clock is not claimed."""


@dataclass(kw_only=True)
class Beside:
    """One of them. ``note``: why it is not timed."""

    name: str
    step: Step
    note: str | None = None
    timed: Timed | None = None


@dataclass(frozen=True)
class Shared:
    """What all have in common: the control, None where none was timed; whether there are several; why nothing may be claimed;
    the clock's resolution; and the fields of their records on how it was done."""

    control: noise.Control | None
    several: bool
    refused: list[str]
    resolution: float
    fields: dict[str, Any]


def time_beside(
    parts: Sequence[Beside], device: torch.device, clock: Clock, progress: Callable[[], None] | None = None, **how: Any
) -> Shared:
    """Fills ``timed`` of all without a note, the first of which is the control too. ``how``: see :func:`time_rounds`."""
    flush, before, load = Flush(device), gpu_state(device), _load()
    fitting = [part for part in parts if part.note is None]
    steps = [part.step for part in fitting]
    timed = time_rounds([*steps[:1], *steps], clock=clock, device=device, flush=flush, progress=progress, **how)
    for part, its in zip(fitting, timed[1:], strict=True):
        part.timed = its
    control = noise.control_of(timed[1].times, timed[0].times) if fitting else None
    after, resolution = gpu_state(device), resolution_of(clock, device)
    events = device.type == "cuda" and clock is time.perf_counter
    return Shared(control, len(parts) > 1, refusals(before, after), resolution, {
        "clock": {"name": "device events" if events else getattr(clock, "__name__", "clock"), "resolution_s": resolution},
        "cache": flush.to_dict(), "gpu": None if before is None else {"before": before, "after": after},
        "noise": None if control is None else {**control.to_dict(), "of": fitting[0].name, "load": [load, _load()]},
    })


def _load() -> float | None:
    """Processes that want to run, over the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def ratio_fields(part: Beside, first: Beside, shared: Shared) -> dict[str, Any] | None:
    """How many times as long a run takes as one of the first (of that one itself: the control), with the interval at
    :data:`noise.LEVEL`; a ``verdict`` only where the noise bears it, "~" otherwise. None where they are not compared."""
    if not shared.several or shared.control is None or part.timed is None or first.timed is None:
        return None
    short = [_too_short(one.timed.times, shared.resolution) for one in (part, first) if one.timed is not None]
    refused = [*shared.refused, *max(short, key=len)]
    ratio, reasons = shared.control.ratio, shared.control.reasons
    verdict: noise.Verdict = "~"
    if part is not first:
        ratio = noise.ratio_of(part.timed.times, first.timed.times)
        verdict, reasons = noise.verdict_of(ratio, shared.control, refused)
    return {
        "against": first.name, "time": ratio.time, "interval": noise.ends(ratio), "level": noise.LEVEL,
        "verdict": verdict, "refused": list(reasons),
    }


def time_fields(timed: Timed | None, resolution: float) -> dict[str, Any]:
    """What a record says of the times of equal runs, None: it was not timed. The figures are of warm caches, ``cold`` has those
    of cold ones. ``refused``: why they are no claim. Raises :class:`ConfigError` for
    warm times without cold ones, or where the clock stood still."""
    if timed is None:
        names = ("median_s", "p20_s", "p80_s", "spread_s", "drift", "cold")
        return {**dict.fromkeys(names), "times": [], "turns": 0, "refused": []}
    if len(timed.cold) != len(timed.warm) or not timed.cold:
        raise ConfigError("a speed with warm caches is given only beside the one with cold caches")
    times = timed.times
    if min(times) <= 0:
        raise ConfigError("the clock did not move during a run: measure more work, or with a finer clock")
    low, high = quartiles(times)
    return {
        **_quantiles(times), "spread_s": high - low, "times": times, "turns": len(timed.warm[0]),
        "drift": noise.drift_of(times), "cold": {**_quantiles(timed.cold), "times": timed.cold},
        "refused": _unsure(times, resolution),
    }


def _quantiles(times: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.quantile(times, [0.2, 0.5, 0.8])
    return {"median_s": float(middle), "p20_s": float(low), "p80_s": float(high)}


def _unsure(times: Sequence[float], resolution: float) -> list[str]:
    reasons = []
    if len(times) < noise.MIN_ROUNDS:
        reasons.append(f"{len(times)} rounds are too few: at least {noise.MIN_ROUNDS} are needed")
    spread = noise.relative_spread(times)
    if spread > noise.MAX_SPREAD:
        reasons.append(
            f"times differ by {100 * spread:.1f} % between the quartiles; at most {100 * noise.MAX_SPREAD:g} % are a claim"
        )
    return [*reasons, *_too_short(times, resolution)]


def _too_short(times: Sequence[float], resolution: float) -> list[str]:
    if statistics.median(times) >= RESOLUTIONS * resolution:
        return []
    return [f"a run is shorter than {RESOLUTIONS} steps of the clock, of {resolution:.1e} s each"]
