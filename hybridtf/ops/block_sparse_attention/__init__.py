"""Softmax attention over the keys that a fixed rule or a router selects, counted from each document's start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.block_sparse_attention.cases import CASES
from hybridtf.ops.block_sparse_attention.choose import choose_blocks
from hybridtf.ops.block_sparse_attention.draws import random_blocks
from hybridtf.ops.block_sparse_attention.held import Held, hold
from hybridtf.ops.block_sparse_attention.importance import important_blocks
from hybridtf.ops.block_sparse_attention.reference import block_sparse_attention_reference
from hybridtf.ops.block_sparse_attention.rule import Places, SparseRule
from hybridtf.ops.block_sparse_attention.sparse import block_sparse_attention_torch

__all__ = [
    "CASES", "KERNELS", "Held", "Places", "SparseRule", "block_sparse_attention_reference", "block_sparse_attention_torch",
    "choose_blocks", "hold", "important_blocks", "random_blocks",
]


def _load_reference() -> Callable[..., Any]:
    return block_sparse_attention_reference


def _load_torch() -> Callable[..., Any]:
    return block_sparse_attention_torch


KERNELS: tuple[Kernel, ...] = (
    Kernel("block_sparse_attention", "reference", 0, always, _load_reference),
    Kernel("block_sparse_attention", "torch", 10, always, _load_torch),
)
