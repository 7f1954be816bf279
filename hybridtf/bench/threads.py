"""Threads: how many a measurement computes with, and on which cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hybridtf.core import ConfigError


@contextlib.contextmanager
def pinned(threads: int | None) -> Iterator[None]:
    """Inside, torch computes with ``threads`` threads, on as many of the process's cores; None: nothing is changed.

    Where the system cannot tie threads to cores, their number alone is set. Raises :class:`ConfigError` for more threads
    than the process has cores: they would take turns, and be timed waiting. """
    if threads is None:
        yield
        return
    cores = allowed_cores()
    if threads < 1 or (cores is not None and threads > len(cores)):
        have = "" if cores is None else f", and at most {len(cores)}: the cores that this process may use"
        raise ConfigError(f"threads must be at least 1{have}; got {threads}")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with _tied(None if cores is None else cores[:threads], cores):
            yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _tied(cores: list[int] | None, before: list[int] | None) -> Iterator[None]:
    if cores is None or before is None:
        yield
        return
    _tie(cores)
    try:
        yield
    finally:
        _tie(before)


def _tie(cores: list[int]) -> None:
    """All threads of the process: those that torch has started already too."""
    tasks = Path("/proc/self/task")
    for thread in [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else [0]:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(thread, cores)


def allowed_cores() -> list[int] | None:
    """The cores that this process may use; None where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def thread_facts() -> dict[str, Any]:
    """What a record says: ``threads`` of one operator, ``interop_threads`` and the cores that they may use
    (``affinity``; None where the system does not say)."""
    return {
        "threads": torch.get_num_threads(), "interop_threads": torch.get_num_interop_threads(), "affinity": allowed_cores(),
    }
