"""What a user did wrong, said once: where, what, what is allowed, and the nearest name.

Every mistake of a user (or of a plugin) is a :class:`HybridTFError`; the command line prints its message on its own and
exits with its ``exit_code``. A traceback is for our own bugs only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import ClassVar

MOST_NAMES = 24
"""So many known names are listed in a message, and no more."""

_WORDS = {"num": "n", "number": "n", "attn": "attention", "dims": "dim", "ff": "ffn", "mlp": "ffn"}
"""Other words for one thing, as other libraries have them in names."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` was likely meant to be; None where it would be a guess.

    Near is what differs in letters that are mistyped (one in five, three at most), in case and dashes, in a usual other word
    (``num_heads``), or in a word that was left out or is too many between two.
    """
    steps = [(step, -_likeness(name, other), other) for other in known if (step := _steps(name, other)) is not None]
    return min(steps)[2] if steps else None


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, name).ratio()


def _steps(name: str, other: str) -> float | None:
    """How far two names are apart; None: they have nothing to do with each other."""
    one, two = _words(name), _words(other)
    mistyped = _mistyped("".join(one), "".join(two))
    longest = max(len("".join(one)), len("".join(two)))
    if mistyped == 0 or (longest > 2 and mistyped <= min(3, max(1, longest // 4))):
        return mistyped
    fewer, more = sorted((set(one), set(two)), key=len)
    return 4.0 + len(more) - len(fewer) if len(fewer) > 1 and fewer < more else None


def _words(name: str) -> list[str]:
    """Of a name as people write it: ``num_heads`` and ``NumHeads`` are both ``n`` and ``heads``."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    plain = re.sub("key_?value", "kv", parted.lower())
    return [_WORDS.get(word, word) for word in re.split(r"[-_. ]+", plain) if word]


def _mistyped(one: str, two: str) -> int:
    """Letters left out, too many, or others, and neighbours that changed places: the least that makes ``two`` of ``one``."""
    before: list[int] = []
    last = list(range(len(two) + 1))
    for i, letter in enumerate(one):
        row = [i + 1]
        for j, other in enumerate(two):
            row.append(min(last[j + 1] + 1, row[j] + 1, last[j] + (letter != other)))
            if i and j and letter == two[j - 1] and one[i - 1] == other:
                row[-1] = min(row[-1], before[j - 1] + 1)
        before, last = last, row
    return last[-1]


def known_names(name: str, known: Iterable[str], all_of: str = "") -> str:
    """``Did you mean x? Known: a, b, x``: the tail of every message about an unknown name.

    Of many names those most like ``name``, and how many more there are; ``all_of`` is the command that lists them.
    """
    names = sorted(known)
    hint = nearest(name, names)
    return (f"Did you mean {hint!r}? " if hint else "") + f"Known: {listed(names, all_of, name)}"


def listed(names: Iterable[str], all_of: str = "", like: str = "") -> str:
    """``a, b, c``; of many names the first, or those most like ``like``, and how many more ``all_of`` lists."""
    chosen = sorted(names)
    if len(chosen) <= MOST_NAMES:
        return ", ".join(chosen) or "none"
    if like:
        chosen.sort(key=lambda name: -_likeness(like, name))
    return f"{', '.join(chosen[:MOST_NAMES])} and {len(chosen) - MOST_NAMES} more{f': `{all_of}`' if all_of else ''}"


def one_line(text: str) -> str:
    """Lines after one another, as a message that is one of several has them."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def not_a_table(what: str, value: object, known: Iterable[str]) -> str:
    """``must be a norm, a table as in { type = "rms_norm" }, got 'rms_nrm'``: of a word, the nearest of the known names."""
    names = sorted(known)
    shown = (nearest(value, names) if isinstance(value, str) else None) or (names[0] if names else "...")
    return f'must be a {what}, a table as in {{ type = "{shown}" }}, got {value!r}'


class HybridTFError(Exception):
    """Base of everything hybridtf refuses. ``exit_code`` is what the command line returns."""

    exit_code: ClassVar[int] = 2


class ConfigError(HybridTFError, ValueError):
    """A config (or a combination of configs) that cannot be built."""


class UnknownNameError(ConfigError, KeyError):
    """No component is registered under this name."""

    def __str__(self) -> str:
        return str(self.args[0])


class RecipeError(ConfigError):
    """A recipe file with one or more faults; ``faults`` holds them all, each ``(path, message)``."""

    def __init__(self, source: str, faults: list[tuple[str, str]]) -> None:
        self.source = source
        self.faults = faults
        lines = [f"{path}: {message}" if path else message for path, message in faults]
        head = f"{source}: " if source else ""
        body = lines[0] if len(lines) == 1 else f"{len(lines)} faults\n" + "\n".join(f"  {line}" for line in lines)
        super().__init__(head + body)


class PluginError(HybridTFError):
    """A plugin that is missing, failed to import, or broke the contract."""


class KernelError(HybridTFError):
    """A kernel that was asked for by name cannot run here; the message has its reason."""


class StateError(HybridTFError):
    """A state that was used after it was consumed, cropped too far, or does not belong to this call."""


class RowsError(StateError, ConfigError):
    """A state of other rows than the call that it was given to, or than what is put into it."""


class LengthError(HybridTFError, ValueError):
    """More tokens than a component can place (a learned position table, a full state buffer)."""


class CheckpointError(HybridTFError):
    """A checkpoint that is missing, corrupt or does not fit the model."""


class DataError(HybridTFError):
    """A corpus, prompt or record file that cannot be used."""


class NonFiniteError(HybridTFError):
    """Training met a loss that is not finite; the message names the first module that caused it."""

    exit_code: ClassVar[int] = 1
