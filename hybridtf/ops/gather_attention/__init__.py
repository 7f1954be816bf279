"""Softmax attention over tokens that each query chose for itself, and the indexer that chooses them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hybridtf.core.kernels import Kernel, always
from hybridtf.ops.gather_attention.blocks import BestBlocks, best_blocks
from hybridtf.ops.gather_attention.cases import CASES
from hybridtf.ops.gather_attention.choose import choose_tokens
from hybridtf.ops.gather_attention.chosen import gather_attention_torch, index_products, index_scores
from hybridtf.ops.gather_attention.reference import gather_attention_reference
from hybridtf.ops.gather_attention.shapes import slots_of

__all__ = [
    "CASES", "KERNELS", "BestBlocks", "best_blocks", "choose_tokens", "gather_attention_reference", "gather_attention_torch",
    "index_products", "index_scores", "slots_of",
]


def _load_reference() -> Callable[..., tuple[Tensor, ...]]:
    return gather_attention_reference


def _load_torch() -> Callable[..., tuple[Tensor, ...]]:
    return gather_attention_torch


KERNELS: tuple[Kernel, ...] = (
    Kernel("gather_attention", "reference", 0, always, _load_reference),
    Kernel("gather_attention", "torch", 10, always, _load_torch),
)
