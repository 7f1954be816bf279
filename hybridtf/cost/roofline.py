"""The least time that work takes on a device, and what bounds it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hybridtf.cost.devices import Device
from hybridtf.cost.flops import Work


@dataclass(frozen=True)
class Roofline:
    """``seconds``: every operator as fast as its products or its bytes allow, one after the other, none fused with
    another; ``bound``: which of the two takes the larger part; None where the time is unknown."""

    seconds: float | None
    bound: Literal["compute", "memory"] | None


def roofline(parts: Iterable[Work], device: Device) -> Roofline:
    """The time of all parts. Unknown where an operator has no formula."""
    compute = memory = 0.0
    for work in parts:
        if work.unknown:
            return Roofline(None, None)
        for (_, dtype), (flops, moved) in work.by_op.items():
            products, bytes_ = flops / device.rate(dtype), moved / device.bandwidth
            compute, memory = (compute + products, memory) if products > bytes_ else (compute, memory + bytes_)
    return Roofline(compute + memory, "compute" if compute > memory else "memory")
