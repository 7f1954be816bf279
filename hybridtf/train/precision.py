"""Precision: autocast by policy over float32 parameters, and the scaled loss of fp16."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch

from hybridtf.core import ConfigError
from hybridtf.train.config import Precision

DTYPES: Mapping[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype that activations are computed in."""


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise :class:`ConfigError` with the reason where ``precision`` makes no sense on ``device``."""
    if precision == "fp16" and device.type == "cpu":
        raise ConfigError(
            "train.precision = 'fp16' is not for the CPU: its matrix products in float16 are about 60 times slower "
            "than in float32. Use 'fp32' or 'bf16', or a GPU"
        )
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"train.precision = 'bf16': {name} has no bfloat16; use 'fp16' or 'fp32'")


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context that a forward pass runs in; nothing at all for fp32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def make_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """Scales the loss in fp16, whose small gradients would vanish; switched off otherwise."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
