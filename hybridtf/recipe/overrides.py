"""``--set path=value``: changes to a recipe's table before it is validated."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from hybridtf.core import RecipeError

_PATH = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_MEANT_AS_TOML = tuple("\"'[{+-0123456789")


def apply_overrides(table: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of ``table`` with ``path=value`` set for each override, in order.

    Values are TOML (``128``, ``1e-4``, ``[0.9, 0.95]``, ``{ type = "gqa" }``); anything else that does not begin like a
    number, string, list or table is taken as a string, so ``type=gqa`` needs no quotes. Tables on the way are made.
    Raises :class:`RecipeError` with every fault; whether a path means anything is left to the validation of the result.
    """
    out = copy.deepcopy(dict(table))
    faults: list[tuple[str, str]] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        path, text = path.strip(), text.strip()
        if not equals or not _PATH.fullmatch(path):
            faults.append((override, "must be path=value, such as model.d_model=128"))
            continue
        try:
            _put(out, path.split("."), _value(text))
        except _OverrideError as error:
            faults.append((override, str(error)))
    if faults:
        raise RecipeError("--set", faults)
    return out


class _OverrideError(Exception):
    """Why an override cannot be applied."""


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}\n")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError as error:
        if not text:
            raise _OverrideError("has no value; an empty string is written \"\"") from None
        if text == "null":
            raise _OverrideError("TOML has no null: leave the option out of the recipe instead") from None
        if text.startswith(_MEANT_AS_TOML):
            reason = re.sub(r" \(at [^)]*\)$", "", str(error))
            raise _OverrideError(f"{text} is no TOML value ({reason}); a string needs quotes") from None
        return text


def _put(table: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for depth, key in enumerate(keys[:-1], start=1):
        below = table.setdefault(key, {})
        if not isinstance(below, dict):
            raise _OverrideError(f"{'.'.join(keys[:depth])} is {below!r}, not a table, so it has no {keys[depth]!r}")
        table = below
    table[keys[-1]] = value
