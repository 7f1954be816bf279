"""Softmax attention whose heads mix their scores before the softmax and their weights after it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.talking_attention.cases import CASES
from hybridtf.ops.talking_attention.chunked import talking_attention_chunked
from hybridtf.ops.talking_attention.reference import talking_attention_reference

__all__ = ["CASES", "KERNELS", "talking_attention_chunked", "talking_attention_reference"]


def _load_reference() -> Callable[..., Tensor]:
    return talking_attention_reference


def _load_chunked() -> Callable[..., Tensor]:
    return talking_attention_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("talking_attention", "reference", 0, always, _load_reference),
    Kernel("talking_attention", "chunked", 10, always, _load_chunked),
)
