"""Pattern lines: which block each layer is, written as one line, and printed back as one.

    pattern = item { " " item }          items side by side
    item    = ( NAME | "(" pattern ")" ) [ "*" COUNT | "*" ]

``m*3`` is three layers, ``(m*3 a)*6`` repeats a group, one bare star fills up to ``n_layers``: ``k (m*3 a)*``. Names
begin with a letter or ``_`` and go on with letters, digits, ``_`` and ``-``: bare keys of TOML, never a number.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hybridtf.core import ConfigError, known_names

MAX_LAYERS = 100_000
"""More layers than anybody builds: a pattern that gives more is a slip of the keyboard."""

MAX_DEPTH = 32
"""Groups inside groups."""

MAX_PERIOD = 128
"""The longest group that :func:`print_pattern` looks for."""

_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<name>[A-Za-z_][A-Za-z0-9_-]*)|(?P<open>\()|(?P<close>\))|(?P<star>\*(?P<count>[0-9]*))"
)
_FILL = 0


@dataclass
class _Item:
    """A name or a group, repeated; ``count`` 0 is the filling star."""

    column: int
    name: str = ""
    parts: list[_Item] = field(default_factory=list)
    count: int = 1
    counted: bool = False


def expand_pattern(pattern: str, names: Collection[str], n_layers: int | None = None) -> tuple[str, ...]:
    """The block name of each layer.

    ``names`` are the blocks there are. With ``n_layers`` the pattern must come out exactly. A star needs it, and
    what it repeats occurs at least once. Raises :class:`ConfigError` with the column (from 1), what is wrong and what
    is allowed.
    """
    items = _Parser(pattern, names).parse()
    fixed, per_fill = _size(items)
    fills = 0
    if per_fill:
        fills = _fills(pattern, fixed, per_fill, n_layers)
    elif n_layers is not None and fixed != n_layers:
        raise ConfigError(f"pattern {_short(pattern)} gives {_layers(fixed)}, but n_layers = {n_layers}")
    if fixed + fills * per_fill > MAX_LAYERS:
        given = _layers(fixed + fills * per_fill)
        raise ConfigError(f"pattern {_short(pattern)} gives {given}; at most {MAX_LAYERS} are allowed")
    return tuple(_expand(items, fills))


def _fills(pattern: str, fixed: int, per_fill: int, n_layers: int | None) -> int:
    if n_layers is None:
        raise ConfigError(f"pattern {_short(pattern)} has a filling star, so n_layers must be given")
    fills, rest = divmod(n_layers - fixed, per_fill)
    if rest == 0 and fills >= 1:
        return fills
    fitting = [fixed + k * per_fill for k in ((fills, fills + 1) if fills >= 1 else (1,))]
    given = f"{fixed} + {per_fill} for each filling" if fixed else f"a multiple of {per_fill}"
    raise ConfigError(
        f"pattern {_short(pattern)} gives {given}, which does not come out at n_layers = {n_layers}; "
        f"{' or '.join(map(str, fitting))} would fit"
    )


def _layers(n: int) -> str:
    return f"{n} layer{'s' if n != 1 else ''}"


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else pattern[:77] + "...")


class _Parser:
    def __init__(self, pattern: str, names: Collection[str]) -> None:
        self.pattern = pattern
        self.names = set(names)
        self.groups: list[_Item] = [_Item(1)]
        self.star = 0

    def error(self, column: int, message: str) -> ConfigError:
        return ConfigError(f"pattern {_short(self.pattern)}, column {column}: {message}")

    def parse(self) -> list[_Item]:
        at = 0
        touching = False
        while at < len(self.pattern):
            found = _TOKEN.match(self.pattern, at)
            if found is None:
                raise self._stray(at)
            if found["name"]:
                self._name(found["name"], at + 1)
            elif found["open"]:
                self._open(at + 1)
            elif found["close"]:
                self._close(at + 1)
            elif found["star"]:
                self._repeat(found["count"], at + 1, touching)
            touching = not found["space"]
            at = found.end()
        if len(self.groups) > 1:
            raise self.error(self.groups[-1].column, "this '(' is never closed")
        if not self.groups[0].parts:
            raise ConfigError(f"pattern {self.pattern!r} is empty; it must name a block for each layer, as in 'm*3 a'")
        return self.groups[0].parts

    def _stray(self, at: int) -> ConfigError:
        symbol = self.pattern[at]
        hint = "a count follows its '*' directly, as in 'm*3'" if symbol.isdigit() else (
            f"expected a block ({', '.join(sorted(self.names)) or 'none is defined'}), '(', ')' or '*'"
        )
        return self.error(at + 1, f"unknown symbol {symbol!r}; {hint}")

    def _name(self, name: str, column: int) -> None:
        if name not in self.names:
            letters = " ".join(name)
            hint = f" Names are parted by spaces: {letters!r}?" if len(name) > 1 and set(name) <= self.names else ""
            known = known_names(name, self.names)
            raise self.error(column, f"no block named {name!r}. {known}.{hint}".removesuffix("."))
        self.groups[-1].parts.append(_Item(column, name))

    def _open(self, column: int) -> None:
        if len(self.groups) > MAX_DEPTH:
            raise self.error(column, f"more than {MAX_DEPTH} groups inside one another")
        self.groups.append(_Item(column))

    def _close(self, column: int) -> None:
        if len(self.groups) == 1:
            raise self.error(column, "this ')' closes nothing")
        group = self.groups.pop()
        if not group.parts:
            raise self.error(group.column, "an empty group")
        self.groups[-1].parts.append(group)

    def _repeat(self, count: str, column: int, touching: bool) -> None:
        parts = self.groups[-1].parts
        if not parts or not touching:
            raise self.error(column, "a '*' must follow a block or a ')' directly")
        item = parts[-1]
        if item.counted:
            raise self.error(column, "a second count for the same block or group")
        if count and not count.strip("0"):
            raise self.error(column + 1, "a count must be 1 or more")
        if len(count.lstrip("0")) > len(str(MAX_LAYERS)):
            raise self.error(column + 1, f"a count above {MAX_LAYERS} layers")
        if not count and self.star:
            raise self.error(column, f"a second filling star; the first is at column {self.star}")
        self.star = self.star if count else column
        item.count, item.counted = int(count) if count else _FILL, True


def _size(items: Sequence[_Item]) -> tuple[int, int]:
    """Layers that are always there, and layers that each filling adds."""
    fixed = per_fill = 0
    for item in items:
        base, more = _size(item.parts) if item.parts else (1, 0)
        if item.count == _FILL:
            per_fill += base
        else:
            fixed, per_fill = fixed + base * item.count, per_fill + more * item.count
    return fixed, per_fill


def _expand(items: Sequence[_Item], fills: int) -> list[str]:
    out: list[str] = []
    for item in items:
        out.extend((_expand(item.parts, fills) if item.parts else [item.name]) * (item.count or fills))
    return out


def print_pattern(layers: Sequence[str]) -> str:
    """One line that :func:`expand_pattern` turns back into ``layers``: runs and repeated groups are counted.

    Raises :class:`ConfigError` for no layers.
    """
    if not layers:
        raise ConfigError("a stack without layers has no pattern")
    words: list[str] = []
    at = 0
    while at < len(layers):
        period, count = _best_repeat(layers, at)
        unit = layers[at : at + period]
        text = unit[0] if period == 1 else f"({print_pattern(unit)})"
        words.append(text if count == 1 else f"{text}*{count}")
        at += period * count
    return " ".join(words)


def _best_repeat(layers: Sequence[str], at: int) -> tuple[int, int]:
    """The (period, count) of the repetition from ``at`` that covers most layers; the shortest period among equals."""
    best = (1, 1)
    for period in range(1, min(MAX_PERIOD, (len(layers) - at) // 2) + 1):
        if layers[at] != layers[at + period]:
            continue
        unit, count = layers[at : at + period], 1
        while layers[at + count * period : at + (count + 1) * period] == unit:
            count += 1
        if count > 1 and period * count > best[0] * best[1]:
            best = (period, count)
    return best
