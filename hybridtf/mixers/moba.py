"""``moba``: each query and head chooses the blocks of keys that it attends to.

    score of block i = q_p . mean of the keys of block i;  y_p = softmax attention over the keys j <= p of p's own block and of
    the ``top_k`` - 1 complete earlier blocks that score highest

Mixture of Block Attention, Lu et al. 2025, https://arxiv.org/abs/2502.13189. The own block is always chosen, and counts in
``top_k``. The choice has no gradient. Blocks count from the document's start. Attention takes
t * top_k * block_size, the router t^2 / block_size.

Axes: b batch, t time, d d_model, h heads, g key heads, k head_dim, j blocks.

The choice and the mixing of parts are held to fla's, packed documents too, with torch's products where it calls flash-attn; all
of it to the paper's definition, written query by query.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from hybridtf.core import BuildContext, Context, Segments, State
from hybridtf.nn import SparseMixer, SparseMixerConfig, accumulation_dtype
from hybridtf.nn.pooled import empty_pooled, ended, pooled_with, tokens_of
from hybridtf.ops.block_sparse_attention import SparseRule, choose_blocks


class MobaConfig(SparseMixerConfig):
    """Mixture of Block Attention: attention to the blocks that a router without parameters chooses."""

    type: Literal["moba"] = "moba"
    source: ClassVar[str] = "https://arxiv.org/abs/2502.13189"
    time_exponent: ClassVar[float] = 2.0
    block_size: int = Field(default=512, gt=0)
    top_k: int = Field(default=3, gt=0, examples=[3])
    """Blocks that a query attends to, its own included."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=6, block_size=2, top_k=2)

    def build(self, ctx: BuildContext) -> Moba:
        return Moba(self, ctx)


class Moba(SparseMixer):
    """See :class:`MobaConfig`. Its state: ``keys``, a ``Growing`` of keys and values (the running block among them), and
    ``pooled``, a sparse ``Growing`` with the mean key of each complete block."""

    causal_only = True

    def __init__(self, config: MobaConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.causal_only = True
        self.size, self.top_k = config.block_size, config.top_k
        self.rule = SparseRule(block=config.block_size)

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        where: dict[str, Any] = {"dtype": self.attention.compute_dtype, "device": self.attention.device}
        pooled = empty_pooled(batch_size, {"k": (self.n_kv_heads, self.head_dim)}, self.size, max_len, **where)
        return {"keys": super().init_state(batch_size, max_len), "pooled": pooled}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        keys, leaf = (state["keys"], state["pooled"]) if isinstance(state, dict) else (None, None)
        q, held = self.projected(x, segments, keys, keep)
        ends = ended(held, self.size, self.size)
        wide = tokens_of(held.data["k"].detach(), ends).to(accumulation_dtype(q.dtype))
        pooled = pooled_with(leaf, {"k": wide.mean(2).to(self.attention.compute_dtype)}, ends, segments)
        own = held.places.position // self.size
        chosen = choose_blocks(q, pooled.data["k"], pooled.first, own, self.top_k - 1)
        blocks = torch.cat([own[..., None, None].expand(-1, -1, self.heads, 1), chosen], -1)
        y = self.out_proj(self.seen(q, held, self.rule, blocks=blocks).flatten(-2))
        return y, None if state is None else {"keys": held.leaf, "pooled": pooled.leaf}
