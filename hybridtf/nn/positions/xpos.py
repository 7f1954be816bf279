"""xPos: rotary positions whose scores fall with distance, pair by pair (https://arxiv.org/abs/2212.10554)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from hybridtf.core import BuildContext, PositionConfig, Site
from hybridtf.nn.norms import accumulation_dtype
from hybridtf.nn.positions.rope import Rope


class XPosConfig(PositionConfig):
    """Rotary positions, and pair i of a query at n with a key at m weighs zeta_i^((n - m) / scale_base).

    zeta_i = (2i / head_dim + gamma) / (1 + gamma). Only for causal stacks: towards later keys the weights grow without bound.
    """

    type: Literal["xpos"] = "xpos"
    site: ClassVar[Site] = "qk"
    theta: float = Field(default=10000.0, gt=0)
    scale_base: float = Field(default=512.0, gt=0)
    gamma: float = Field(default=0.4, gt=0)
    interleaved: bool = False

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> XPos:
        if ctx.d_model < 2 or ctx.d_model % 2:
            raise ctx.error(f"xpos rotates pairs: head_dim {ctx.d_model} must be even and at least 2")
        if not ctx.causal:
            raise ctx.error("xpos weighs later keys without bound, and this stack looks both ways: use rope")
        return XPos(self, ctx.d_model)


class XPos(Rope):
    """See :class:`XPosConfig`.

    The paper writes zeta^(n/s) on queries and zeta^(-m/s) on keys, and the second leaves float32 at position 36000. Only the
    difference counts, so keys are held rotated and unweighted, and both weights are taken when scores are: from the document's
    first query in the call on. Earlier keys then weigh less than 1, and underflow where their true weight does. Queries and
    keys of the call itself run up to zeta^(+-span/s), so :meth:`span` ends where the square root of the dtype's range does:
    18000 queries in float32 and bfloat16, 2200 in float16. A user cuts longer calls into as many.
    """

    causal_only = True

    def __init__(self, config: XPosConfig, width: int) -> None:
        super().__init__(width, config.theta, config.interleaved)
        self.scale_base, self.gamma = config.scale_base, config.gamma

    def span(self, dtype: torch.dtype) -> int:
        """Queries of one ``read``; at least 1."""
        steepest = math.log((1 + self.gamma) / self.gamma) / self.scale_base
        return max(int(math.log(torch.finfo(dtype).max) / 2 / steepest), 1)

    def decay(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """(width): -ln(zeta) / scale_base of each channel, per token."""
        half = self.width // 2
        zeta = (torch.arange(half, device=device, dtype=dtype) / half + self.gamma) / (1 + self.gamma)
        decay = -zeta.log() / self.scale_base
        return decay.repeat_interleave(2) if self.interleaved else decay.repeat(2)

    def read(
        self, q: Tensor, k: Tensor, *, q_pos: Tensor | None = None, k_pos: Tensor | None = None,
        q_ids: Tensor | None = None, k_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        t, s, dtype = q.shape[1], k.shape[1], accumulation_dtype(q.dtype)
        if not t:
            return q, k
        if q_pos is None or k_pos is None:
            k_pos = torch.arange(s, device=q.device)[None]
            q_pos = k_pos[:, s - t :]
        if q_ids is None or k_ids is None:
            q_from = k_from = q_pos[:, :1]
        else:
            q_from, k_from = _origins(q_pos, q_ids, k_ids)
        decay = self.decay(q.device, dtype)
        # Hidden keys and pads may stand anywhere: they only have to stay finite.
        q_at, k_at = (q_pos - q_from).clamp(min=0, max=t), (k_pos - k_from).clamp(max=t)
        q_weight, k_weight = (-q_at[..., None] * decay).exp(), (k_at[..., None] * decay).exp()
        return (q * q_weight[..., None, :]).to(q.dtype), (k * k_weight[..., None, :]).to(k.dtype)


def _origins(q_pos: Tensor, q_ids: Tensor, k_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(b t) and (b s): the position that weights of each token's document count from.

    Documents that begin among these queries count from 0; the row's first one from its first query.
    """
    far = torch.iinfo(torch.int64).max
    first = torch.where(q_ids > 0, q_ids, far).amin(1, keepdim=True)
    start = torch.where(q_ids == first, q_pos, far).amin(1, keepdim=True)
    zero = torch.zeros_like(start)
    return torch.where(q_ids == first, start, zero), torch.where(k_ids == first, start, zero)
