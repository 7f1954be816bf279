"""Cells of a comparison, and the seam to what runs them: a cell is one training and what is measured of it.

An engine takes cells and a function, and gives back what the function finds, in whatever order cells come to their end.
``pool.py`` has those of one machine; one that sends cells to a cluster needs this module alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from hybridtf.bench.outcomes import out_of_memory
from hybridtf.bench.records import Record, select
from hybridtf.core import HybridTFError, NonFiniteError

Result: TypeAlias = Literal["out_of_memory", "timed_out", "non_finite", "crashed"]

WORDS = {"out_of_memory": "OOM", "timed_out": "timed out", "non_finite": "NaN", "crashed": "crashed", "not_run": "not run"}
"""What stands in a table instead of a number. None of them is zero, and no mean is taken over them."""


@dataclass(frozen=True, order=True)
class Cell:
    """One training: ``recipe`` by name and hash (which covers the task and the learning rate), and a seed."""

    recipe: str
    recipe_hash: str
    task: str
    seed: int
    lr: float

    @property
    def key(self) -> str:
        """Name of the cell's run folder: another recipe under the same name has another."""
        return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', self.recipe)}-{self.recipe_hash}-seed{self.seed}"

    def __str__(self) -> str:
        return f"{self.recipe}, seed {self.seed}"


@dataclass(frozen=True)
class Failure:
    """Why a cell came to no end: ``result``, and a line that says more."""

    result: Result
    reason: str


Work: TypeAlias = Callable[[Cell], Iterator[Any]]
"""What is to be done with a cell; it yields what it finds as soon as it is known. Engines of other processes pickle it."""


class Engine(Protocol):
    """Runs cells, here or elsewhere."""

    def run(self, cells: Sequence[Cell], work: Work) -> Iterator[tuple[Cell, Any]]:
        """(cell, what ``work`` yielded), in the order in which it comes; a cell that fails ends with a :class:`Failure`, and
        the others go on.

        A mistake in what was asked for (a :class:`HybridTFError` other than a loss that is not finite), and Ctrl-C, end all of
        them. Work that was cut off is done again by the next call, so it must go on where it was.
        """


def failure_of(error: BaseException) -> Failure | None:
    """What an error in a cell means; None for one that is to be raised: a mistake in what was asked for, or Ctrl-C."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, NonFiniteError):
        return Failure("non_finite", f"{type(error).__name__}: {error}")
    if out_of_memory(error):
        return Failure("out_of_memory", f"out of memory: {reason}")
    if isinstance(error, HybridTFError) or not isinstance(error, Exception):
        return None
    return Failure("crashed", reason)


def failures_of(records: Iterable[Record], recipe: str, recipe_hash: str | None) -> dict[int, str]:
    """The seeds of a recipe whose training failed, and how: of two records of one training the later one counts."""
    latest = {r["seed"]: r for r in select(records, "train", recipe=recipe, recipe_hash=recipe_hash)}
    return {seed: r.get("result") or "crashed" for seed, r in latest.items() if r.get("failed")}
