"""What a comparison need not measure again of memory and speed: a record counts where it was made as is asked for now.

The last record of a recipe, seed, phase and size is what reports read, and alone is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hybridtf.bench.arms import Arm
from hybridtf.bench.options import CompareOptions
from hybridtf.bench.records import Record, Records, select
from hybridtf.bench.subject import Subject
from hybridtf.cost.phases import Phase


class Sizes(NamedTuple):
    """What a phase is measured at: rows, and tokens a row."""

    batch_size: int
    length: int


def sizes_of(arms: Sequence[Arm], phase: Phase, options: CompareOptions) -> Sizes:
    """What a phase of all ``arms`` is measured at: in ``train`` the smallest batch and the smallest length that one of them
    is trained with. No one's order decides, and what fits and is legal for one's own training is so at these."""
    if phase != "train":
        return Sizes(1, options.context)
    configs = [arm.config for arm in arms]
    return Sizes(min(c.batch_size for c in configs), min(c.seq_len for c in configs))


def has_memory(records: Records, subject: Subject, phase: Phase, sizes: Sizes, options: CompareOptions) -> bool:
    """Whether the bytes of a phase are recorded, with the longest length within the limit where one is asked for."""
    last = _last(records, "memory", subject, phase, sizes)
    if last is None or last.get("device") != _device_name(options):
        return False
    return options.limit_bytes is None or (last.get("longest") or {}).get("limit_bytes") == options.limit_bytes


def has_speeds(
    records: Records, subjects: Sequence[Subject], phase: Phase, sizes: Sizes, options: CompareOptions
) -> bool:
    """Whether one session timed a phase of all ``subjects``, in as many rounds at least, with as many threads."""
    same = {"device": _device_name(options), "threads": torch.get_num_threads(), "warmup": options.warmup}
    sessions = set()
    for subject in subjects:
        last = _last(records, "speed", subject, phase, sizes)
        if last is None or any(last.get(name) != value for name, value in same.items()):
            return False
        if (last.get("repeats") or 0) < options.repeats:
            return False
        sessions.add(last.get("session"))
    return len(sessions) == 1 and None not in sessions


def _last(records: Records, kind: str, subject: Subject, phase: Phase, sizes: Sizes) -> Record | None:
    same: dict[str, Any] = {"recipe": subject.name, "recipe_hash": subject.recipe_hash, "seed": subject.seed, "phase": phase}
    found = select(records, kind, **same, **sizes._asdict())
    return found[-1] if found else None


def _device_name(options: CompareOptions) -> str:
    """As records name it: a GPU by its number."""
    device = torch.device(options.chosen_device)
    if str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return str(device)
