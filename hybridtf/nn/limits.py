"""Kinds of numbers that options of many mixers take, each with the reason of its refusal."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field


def _rising(pair: tuple[float, float]) -> tuple[float, float]:
    low, high = pair
    if not 0 < low <= high:
        raise ValueError(f"{[low, high]} must be two rising positive numbers")
    return pair


def _power_of_two(size: int) -> int:
    if size & (size - 1):
        raise ValueError(f"{size} must be a power of 2")
    return size


PositiveRange: TypeAlias = Annotated[tuple[float, float], AfterValidator(_rising)]
"""Where values start: from the first number to the second."""
PowerOfTwo: TypeAlias = Annotated[int, Field(gt=0), AfterValidator(_power_of_two)]
