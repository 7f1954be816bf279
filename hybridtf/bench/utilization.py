"""Model FLOPs utilization (PaLM, Chowdhery et al. 2022, arXiv 2204.02311): only where the peak and the operations are known."""

from __future__ import annotations

from typing import Any

import torch

from hybridtf.cost.devices import device_named

GPUS = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100"}
"""By the exact name that the driver gives: another form factor, or a part of a GPU (MIG), has another peak."""


def utilization(flops_per_s: float | None, dtype: str, device: torch.device, gpu: str | None) -> dict[str, Any]:
    """The record's field ``mfu``: ``value`` is the share of the data sheet's dense rate in ``dtype``; None with a ``note``
    on a device whose peak is not known, in a dtype that its table lacks, or where the operations are not known.

    ``dtype``: as a record names it; of ``bfloat16 by autocast`` the rate is that of bfloat16. """
    computed = dtype.split()[0]
    if device.type != "cuda" or gpu is None:
        return {"value": None, "note": "only of a GPU: a CPU's limit is measured (floor)"}
    if gpu not in GPUS:
        return {"value": None, "note": f"the peak of {gpu} is not known, and it is not taken for another's"}
    known = device_named(GPUS[gpu])
    if computed not in known.rates:
        return {"value": None, "note": f"the peak of {gpu} in {computed} is not known"}
    if flops_per_s is None:
        return {"value": None, "note": "the operations are not known"}
    return {"value": flops_per_s / known.rate(computed), "peak_flops_per_s": known.rate(computed), "note": None}
