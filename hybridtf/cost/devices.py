"""What devices can do, by their makers' data sheets: nothing here was measured, and plans on it are marked so."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hybridtf.core import ConfigError, known_names


@dataclass(frozen=True)
class Device:
    """``rates``: operations of matrix products a second by dtype, dense; ``bandwidth``: bytes a second; ``memory``: bytes."""

    name: str
    rates: Mapping[str, float]
    bandwidth: float
    memory: int
    validated: bool = False
    """Times on it were held against measured ones."""
    kind: str = "cuda"
    """As torch names it: blocks of work have sizes for it."""

    def rate(self, dtype: str) -> float:
        """Of a dtype by name; one that the table lacks (complex numbers) is computed as float32."""
        return self.rates.get(dtype, self.rates["float32"])


def _rates(half: float, single: float, double: float) -> dict[str, float]:
    return {"bfloat16": half, "float16": half, "float32": single, "float64": double}


def _cpu() -> Device:
    # A core with 256-bit registers at 3 GHz: 8 numbers, a multiplication and an addition each, two units.
    single = 96e9 * torch.get_num_threads()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("cpu", _rates(single, single, single / 2), 20e9, memory, kind="cpu")


# H100 and H200 SXM, A100 SXM 80 GB. float32 without TF32, which torch leaves off unless told.
_TABLE = {
    "h200": Device("h200", _rates(989e12, 67e12, 67e12), 4.8e12, 141 * 10**9),
    "h100": Device("h100", _rates(989e12, 67e12, 67e12), 3.35e12, 80 * 10**9),
    "a100": Device("a100", _rates(312e12, 19.5e12, 19.5e12), 2.039e12, 80 * 10**9),
}

DEVICES = (*_TABLE, "cpu")


def device_named(name: str) -> Device:
    """Raises :class:`ConfigError` for one that is not in the table: it is never taken for another."""
    if name == "cpu":
        return _cpu()
    if name not in _TABLE:
        raise ConfigError(f"no device {name!r} in the table. {known_names(name, DEVICES)}")
    return _TABLE[name]
