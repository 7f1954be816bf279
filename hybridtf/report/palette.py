"""Colours and symbols that stay apart for colour-blind readers, on light and on dark ground."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Okabe and Ito's set without its yellow and black, which vanish on a white or a dark page.
RECIPE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#AA4499")
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")

# Paul Tol's "light" set: cells that carry dark text. Stacks and memory use it, so that no fill is taken for a recipe.
FILLS = ("#77AADD", "#EE8866", "#EEDD88", "#44BB99", "#FFAABB", "#99DDFF", "#BBCC33", "#AAAA00", "#DDDDDD")
INK = "#1a1a1a"
"""Text on a fill."""


@dataclass(frozen=True)
class Key:
    """How one name is drawn everywhere in a report. ``shape`` None: a filled area."""

    label: str
    colour: str
    shape: str | None = None


def recipe_keys(labels: Sequence[str]) -> list[Key]:
    """A colour and a symbol for each recipe; colours come again after eight recipes, with other symbols."""
    n = len(RECIPE_COLOURS)
    return [Key(label, RECIPE_COLOURS[i % n], SHAPES[(i + i // n) % len(SHAPES)]) for i, label in enumerate(labels)]


def fills(names: Iterable[str]) -> dict[str, str]:
    """A fill for each name, in the order given."""
    return {name: FILLS[i % len(FILLS)] for i, name in enumerate(dict.fromkeys(names))}
