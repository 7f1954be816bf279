"""``moba``: each query and head chooses the blocks of keys that it attends to.

    score of block i = q_p . mean of the keys of block i;  y_p = softmax attention over the keys j <= p of p's own block and of
    the ``top_k`` - 1 complete earlier blocks that score highest

Mixture of Block Attention, Lu et al. 2025, https://arxiv.org/abs/2502.13189. The own block is always chosen, and counts in
``top_k``. The choice has no gradient. Blocks count from the document's start. Attention takes
t * top_k * block_size, the router t^2 / block_size.

Axes: b batch, t time, d d_model, h heads, g key heads, k head_dim, j blocks.

No outside reference was run: the published ones need a GPU; the tests hold it against the paper's definition, written query by
query.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from hybridtf.core import BuildContext, Context, Growing, Segments, State
from hybridtf.core.states.leaf import gather_rows
from hybridtf.nn import SparseMixer, SparseMixerConfig, accumulation_dtype
from hybridtf.ops.block_sparse_attention import Held, SparseRule, choose_blocks


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
        slots = None if max_len is None else -(-max_len // self.size)
        shape = (self.n_kv_heads, self.head_dim)
        pooled = Growing.empty(batch_size, {"k": shape}, max_len=slots, sparse=True, **where)
        return {"keys": super().init_state(batch_size, max_len), "pooled": pooled}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        keys, pooled = (state["keys"], state["pooled"]) if isinstance(state, dict) else (None, None)
        q, held = self.projected(x, segments, keys, keep)
        full = (held.places.position % self.size == self.size - 1) & (held.places.count > 0)
        new, columns = self._pool(held, full)
        blocks = self._route(q, held, segments, pooled, new, full.gather(1, columns))
        y = self.out_proj(self.seen(q, held, self.rule, blocks=blocks).flatten(-2))
        if pooled is None:
            return y, None
        rank = (full.to(torch.int64).cumsum(1) - 1).clamp(0, max(new.shape[1] - 1, 0))
        return y, {"keys": held.leaf, "pooled": pooled.append({"k": gather_rows(new, rank)}, segments, where=full)}

    @torch.no_grad()
    def _pool(self, held: Held, full: Tensor) -> tuple[Tensor, Tensor]:
        """(b j g k) mean keys of the blocks that end in this call, in order, and the columns (b j) of their ends; every block
        has ``size`` tokens and at most size - 1 came earlier, which bounds j. Entries beyond a row's ends are of no block."""
        most = (full.shape[1] + self.size - 1) // self.size
        order = torch.argsort((~full).to(torch.int8), dim=1, stable=True)[:, :most]
        places = held.places
        last = (places.first + places.position - places.start).gather(1, order)
        slots = last[..., None] - torch.arange(self.size, device=last.device)
        keys = held.data["k"].detach()
        if not keys.shape[1]:  # a row of pads on an empty state
            return keys.new_zeros(len(keys), most, *keys.shape[2:]).to(self.attention.compute_dtype), order
        wide = gather_rows(keys, slots.clamp(0, keys.shape[1] - 1).flatten(1)).unflatten(1, (most, self.size))
        return wide.to(accumulation_dtype(keys.dtype)).mean(2).to(self.attention.compute_dtype), order

    @torch.no_grad()
    def _route(
        self, q: Tensor, held: Held, segments: Segments | None, leaf: Growing | None, new: Tensor, there: Tensor
    ) -> Tensor:
        """(b t h top_k): ids of the chosen blocks, from the mean keys of the state and the ``new`` ones (where ``there``)."""
        own = held.places.position // self.size
        if leaf is not None:
            order = torch.argsort((~torch.cat([leaf.valid(), there], 1)).to(torch.int8), dim=1, stable=True)
            new = gather_rows(torch.cat([leaf["k"].to(new.dtype), new], 1), order)
        first = torch.zeros_like(own)
        if segments is not None:
            full = (held.places.position % self.size == self.size - 1) & segments.real
            earlier = full.to(torch.int64).cumsum(1) - full.to(torch.int64)
            first = (earlier - own).clamp(min=0)  # of a document that starts in this call
            if leaf is not None:
                carried = segments.ids == segments.carried[:, None]
                first = torch.where(carried, 0, (leaf.count[:, None] + earlier - own).clamp(min=0))
        chosen = choose_blocks(q, new, first, own, self.top_k - 1)
        return torch.cat([own[..., None, None].expand(-1, -1, self.heads, 1), chosen], -1)
