"""How a measurement can end. What did not end well has no number: never zero, and never left out of a mean in silence."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

Outcome: TypeAlias = Literal["fits", "out_of_memory", "timed_out", "non_finite", "failed"]
"""``fits``: it ran to its end, in time, with finite results. ``failed``: an error of another kind, which is told."""

OUTCOMES: tuple[Outcome, ...] = ("fits", "out_of_memory", "timed_out", "non_finite", "failed")

_MEMORY_WORDS = (
    "defaultcpuallocator", "not enough memory", "can't allocate memory", "cannot allocate memory", "bad_alloc",
    "out of memory", "could not create a memory object",
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had, on a CPU or a GPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and speaks_of_memory(str(error))
    )


def speaks_of_memory(text: str) -> bool:
    """Whether an error's text speaks of memory that could not be had; torch's CPU allocator raises a bare RuntimeError."""
    return any(words in text.lower() for words in _MEMORY_WORDS)
