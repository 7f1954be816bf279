"""Softmax attention over a mask rule: causal, window, documents, prefix, soft cap, ALiBi, sinks, grouped heads."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hybridtf.core.kernels import Kernel, KernelRequest, always
from hybridtf.ops.attention.cases import CASES
from hybridtf.ops.attention.choose import attention_torch
from hybridtf.ops.attention.mask import AttentionMask
from hybridtf.ops.attention.reference import attention_reference

__all__ = ["CASES", "KERNELS", "AttentionMask", "attention_reference", "attention_torch"]


def _why_not_flash(request: KernelRequest) -> str | None:
    from hybridtf.ops.attention.flash import why_not_flash

    return why_not_flash(request)


def _why_not_tiled(request: KernelRequest) -> str | None:
    from hybridtf.ops.attention.tiled import why_not_tiled

    return why_not_tiled(request)


# Functions of the module and no lambdas: a built model can be pickled.
def _load_reference() -> Callable[..., Tensor]:
    return attention_reference


def _load_torch() -> Callable[..., Tensor]:
    return attention_torch


def _load_flash() -> Callable[..., Tensor]:
    from hybridtf.ops.attention.flash import attention_flash

    return attention_flash


def _load_tiled() -> Callable[..., Tensor]:
    from hybridtf.ops.attention.tiled import attention_tiled

    return attention_tiled


KERNELS: tuple[Kernel, ...] = (
    Kernel("attention", "reference", 0, always, _load_reference),
    Kernel("attention", "torch", 10, always, _load_torch),
    Kernel("attention", "flash", -1, _why_not_flash, _load_flash),
    Kernel("attention", "tiled", -2, _why_not_tiled, _load_tiled),
)
