"""What a user did wrong, said once: where, what, what is allowed, and the nearest name.

Every mistake of a user (or of a plugin) is a :class:`HybridTFError`; the command line prints its message on its own and
exits with its ``exit_code``. A traceback is for our own bugs only.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like ``name``, or None when nothing is near."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def known_names(name: str, known: Iterable[str]) -> str:
    """``Did you mean x? Known: a, b, x``: the tail of every message about an unknown name."""
    names = sorted(known)
    hint = nearest(name, names)
    listed = ", ".join(names) if names else "none"
    return (f"Did you mean {hint!r}? " if hint else "") + f"Known: {listed}"


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
