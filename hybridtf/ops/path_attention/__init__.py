"""PaTH attention: softmax attention whose positions are products of data-dependent reflections."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.path_attention.cases import CASES
from hybridtf.ops.path_attention.chunked import path_attention_chunked
from hybridtf.ops.path_attention.reference import path_attention_reference

__all__ = ["CASES", "KERNELS", "path_attention_chunked", "path_attention_reference"]


def _load_reference() -> Callable[..., Tensor]:
    return path_attention_reference


def _load_chunked() -> Callable[..., Tensor]:
    return path_attention_chunked


KERNELS: tuple[Kernel, ...] = (
    Kernel("path_attention", "reference", 0, always, _load_reference),
    Kernel("path_attention", "chunked", 10, always, _load_chunked),
)
