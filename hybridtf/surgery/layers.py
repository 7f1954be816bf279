"""Which layers of a stack are meant, in words."""

from __future__ import annotations

import re

from hybridtf.core import ConfigError

_EVERY = re.compile(r"every\s+(\d+)(?:\s+from\s+(\d+))?")
_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


def parse_layers(text: str, n_layers: int) -> tuple[int, ...]:
    """The layers, counted from 0, that ``text`` names: ``all``, ``1,3,5``, ``2-7``, ``every 2 from 1``, or several with commas.

    Raises :class:`ConfigError` for other words, and for a layer that is not there.
    """
    found: set[int] = set()
    for part in text.split(","):
        found.update(_part(part.strip(), n_layers))
    outside = [i for i in sorted(found) if i >= n_layers]
    if outside:
        raise ConfigError(f"layers {text!r}: the model has layers 0 to {n_layers - 1}, and not all of these")
    if not found:
        raise ConfigError(f"layers {text!r}: names none of the layers 0 to {n_layers - 1}")
    return tuple(sorted(found))


def _part(part: str, n_layers: int) -> range:
    if part == "all":
        return range(n_layers)
    if (every := _EVERY.fullmatch(part)) is not None and int(every[1]) > 0:
        return range(int(every[2] or 0), n_layers, int(every[1]))
    if (one := _RANGE.fullmatch(part)) is not None and int(one[2] or one[1]) >= int(one[1]):
        # One past the end is enough to be refused: a number of many digits is no reason to count there.
        return range(min(int(one[1]), n_layers), min(int(one[2] or one[1]), n_layers) + 1)
    raise ConfigError(f"layers: {part!r} is none of 'all', '3', '2-7', 'every 2' and 'every 2 from 1' (from 0, with commas)")
