"""Autocast, which ops choose their precision without."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast off, on devices that have it (meta has none)."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    if not torch.compiler.is_compiling() and not torch.is_autocast_enabled(device.type):
        return nullcontext()  # a context that changes nothing costs as much as a small product
    return torch.autocast(device.type, enabled=False)
