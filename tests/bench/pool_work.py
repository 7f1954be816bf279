"""Work for the tests of pools, at the top of a module so that another process finds it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hybridtf.bench import Cell
from hybridtf.core import ConfigError, NonFiniteError, RecipeError


def cells(*names: str) -> list[Cell]:
    return [Cell(name, "hash", "task", i, 1e-3) for i, name in enumerate(names)]


def act(cell: Cell) -> Iterator[Any]:
    """What the cell's name says."""
    yield f"{cell.recipe} begins"
    if cell.recipe == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if cell.recipe == "slow":
        time.sleep(600)
    if cell.recipe == "memory":
        torch.empty(1 << 60, dtype=torch.int8)
    if cell.recipe == "diverges":
        raise NonFiniteError("step 3: the loss is not finite")
    if cell.recipe == "bug":
        raise TypeError("no such thing")
    if cell.recipe == "mistake":
        raise ConfigError("a mistake")
    if cell.recipe == "faults":
        raise RecipeError("file.toml", [("model", "is wrong")])
    yield {"threads": torch.get_num_threads(), "omp": os.environ.get("OMP_NUM_THREADS"), "pid": os.getpid()}


def rest(cell: Cell) -> Iterator[Any]:
    """Write who is at work, and never end."""
    Path(cell.recipe).write_text(str(os.getpid()))
    while True:
        time.sleep(0.05)
        yield "on"
