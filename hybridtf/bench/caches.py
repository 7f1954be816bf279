"""Cold caches: what a run finds when other work has filled them."""

from __future__ import annotations

from pathlib import Path

import torch

UNKNOWN_CACHE = 1 << 26
"""Bytes to flush with where the size of the last-level cache is not known: more than most have."""

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Flush:
    """Writes to a buffer of twice the device's last-level cache, so that nothing older is left in it.

    ``cache_bytes``: the size of that cache; None where the system does not say, and then the buffer has twice
    :data:`UNKNOWN_CACHE`."""

    def __init__(self, device: torch.device) -> None:
        self.cache_bytes = cache_bytes(device)
        self.buffer = torch.zeros(2 * (self.cache_bytes or UNKNOWN_CACHE), dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        self.buffer.zero_()

    def to_dict(self) -> dict[str, int | None]:
        """The record's field ``cache``."""
        return {"last_level_bytes": self.cache_bytes, "flush_bytes": self.buffer.numel()}


def cache_bytes(device: torch.device) -> int | None:
    """The last-level cache of a CPU, or the L2 of a GPU; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size) or None
    return cpu_cache_bytes()


def cpu_cache_bytes(folder: str | Path = "/sys/devices/system/cpu/cpu0/cache") -> int | None:
    """The largest cache that Linux lists for the first core."""
    sizes = [size.read_text(encoding="ascii").strip() for size in Path(folder).glob("index*/size")]
    return max((int(text[:-1]) * _UNITS[text[-1]] for text in sizes if text[-1:] in _UNITS), default=None)
