"""JSON that may stand in a script element, whatever text is in it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any


def inert_json(value: Any) -> str:
    """JSON that is inert inside a script element: no ``<``, ``>`` or ``&``, and null for what JSON cannot hold."""
    text = json.dumps(finite_json(value), ensure_ascii=False, allow_nan=False, default=str)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    # Half a surrogate pair cannot be written as UTF-8; escaped it can, and reads back as it was.
    return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found.group()):04x}", text)


def finite_json(value: Any) -> Any:
    """``value`` with null for every number that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite_json(item) for key, item in value.items()}
    return [finite_json(item) for item in value] if isinstance(value, list | tuple) else value
