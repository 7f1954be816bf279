"""``bigbird``: blocks near, blocks at the ends, blocks at random.

    y_p = out( softmax over j in S(p) of (q_p . k_j / sqrt(k)), times v_j )
    S(p) = {j : c(j) in {0, last} or |c(p) - c(j)| <= w or c(j) in R_h(c(p))};   the whole document where c(p) is 0 or last
    causal: S(p) = {j <= p : c(j) = 0 or c(p) - c(j) <= w or c(j) in R_h(c(p))}
    c(p) = floor(p / block_size), the block of p;   w = n_window_blocks // 2

A block of queries sees the ``n_window_blocks`` blocks around it, the first and the last block of its document, and R_h,
``n_random_blocks`` more blocks, drawn for each head. The first and the last block see the whole document. Zaheer et al. 2020,
https://arxiv.org/abs/2007.14062, in the form that its code calls ITC. Blocks count from the document's start; the last one may
be short. Random blocks come from (seed, layer, head, block, blocks to draw from) alone, so any call draws the same.

The causal variant is ours: the window reaches back alone, the first block is global, random blocks are drawn from the past,
and no closing block exists while a document grows.

Axes: b batch, t time, d d_model, h heads, g key heads, k head_dim, n random blocks.

The form that looks both ways is held to transformers, the causal one to DeepSpeed's layout under torch's attention; random
blocks are ours in both.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator
from torch import Tensor

from hybridtf.core import BuildContext, Component, PositionConfig, Segments
from hybridtf.nn import NoPositionConfig, SparseMixer, SparseMixerConfig
from hybridtf.ops.block_sparse_attention import Held, Places, SparseRule, random_blocks


class BigBirdConfig(SparseMixerConfig):
    """BigBird: attention to the blocks near, to the ends of the document, and to blocks drawn at random."""

    type: Literal["bigbird"] = "bigbird"
    source: ClassVar[str] = "https://arxiv.org/abs/2007.14062"
    block_size: int = Field(default=64, gt=0)
    n_window_blocks: int = Field(default=3, gt=0, examples=[1])
    """Blocks of the window, the query's own in the middle: odd. Causal: only those that are not ahead."""
    n_random_blocks: int = Field(default=3, ge=0)
    seed: int = Field(default=0, ge=0)
    """Of the random blocks; layers and heads draw differently from it."""
    position: Component[PositionConfig] = Field(default_factory=NoPositionConfig)
    """Told on queries and keys, or nowhere (``none``)."""
    qkv_bias: bool = True

    @field_validator("n_window_blocks")
    @classmethod
    def _odd(cls, window: int) -> int:
        if not window % 2:
            raise ValueError(f"n_window_blocks = {window} must be odd: the query's own block is in the middle")
        return window

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=6, block_size=2, n_random_blocks=1)

    def build(self, ctx: BuildContext) -> BigBird:
        return BigBird(self, ctx)


class BigBird(SparseMixer):
    """See :class:`BigBirdConfig`. Its state is a ``Growing`` of keys and values; decoding reads only what is seen."""

    def __init__(self, config: BigBirdConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.size, self.side = config.block_size, config.n_window_blocks // 2
        self.n_random, self.seed = config.n_random_blocks, config.seed * 1_000_003 + ctx.layer_idx
        self.rule = SparseRule(
            block=self.size, causal=ctx.causal, near=self.side + 1, first=1, last=0 if ctx.causal else 1
        )
        self.whole = SparseRule(causal=False, stride=1)

    def drawn(self, places: Places) -> Tensor:
        """(b t h n): the random blocks of each query and head."""
        block = (places.position // self.size)[..., None].expand(-1, -1, self.n_heads)
        end = block
        if not self.causal:  # all blocks but the last, and those of the window
            end = ((places.count[..., None] - 1) // self.size).expand_as(block)
        one = torch.ones_like(block)
        before = (one, torch.minimum(block - self.side, end))
        after = (torch.maximum(block + self.side + 1, one), end)
        heads = torch.arange(self.n_heads, device=block.device).expand_as(block)
        return random_blocks(block, (before, after), self.n_random, self.seed, heads)

    def attend(self, q: Tensor, held: Held, segments: Segments | None) -> Tensor:
        places = held.places
        blocks = self.drawn(places) if self.n_random else None
        if self.causal:
            return self.seen(q, held, self.rule, blocks=blocks)
        block = places.position // self.size
        ends = (block == 0) | (block == (places.count - 1) // self.size)
        inner = self.seen(q, held, self.rule, places=places.only(~ends), blocks=blocks)
        return torch.where(ends[..., None, None], self.seen(q, held, self.whole, places=places.only(ends)), inner)
