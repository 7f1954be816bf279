"""Cross-attention (https://arxiv.org/abs/1706.03762, section 3.2.3): queries of x, keys and values of a context.

    y_t = out( sum_s softmax_s(scale q(x_t) . k(c_s)) v(c_s) ),   s over the context of t's document

A document sees the context of its id in the call that brings the context; without one it gives 0 before ``out_proj``. Later
calls have ids of their own: there the document that goes on keeps its context, and each new one takes the next.

Axes: b batch, t time, s context time, d d_model, h heads, g kv heads, k head_dim.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from hybridtf.core import BuildContext, ConfigError, Context, Fixed, Segments, State, StateError, check_call
from hybridtf.nn import HeadCountsConfig, HeadProjections
from hybridtf.ops.attention import AttentionMask


class CrossAttentionConfig(HeadCountsConfig):
    """Attention over a context, which is projected once."""

    type: Literal["cross_attention"] = "cross_attention"
    source: ClassVar[str] = "https://arxiv.org/abs/1706.03762"
    time_exponent: ClassVar[float] = 1.0

    scale: float | None = Field(default=None, gt=0)
    """Of the scores. None: head_dim ** -0.5. T5's is 1."""
    qkv_bias: bool = False
    out_bias: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """On the attention weights, in training."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=3)

    def build(self, ctx: BuildContext) -> CrossAttention:
        return CrossAttention(self, ctx)


class CrossAttention(HeadProjections):
    """See :class:`CrossAttentionConfig`.

    Its state is a ``Fixed``: keys and values of the context, the document of each of its tokens, and ``at``, the document that
    x is in. Documents are numbered 2, 4, 6, ... as the context has them; an odd number has none.
    """

    causal_only = False
    needs_context = True

    def __init__(self, config: CrossAttentionConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, qkv_bias=config.qkv_bias, out_bias=config.out_bias)
        self.config = config
        features = {"non_causal", "dropout"} if config.dropout else {"non_causal"}
        self.attention = ctx.bind_kernel("attention", config.kernel, sizes=self.kernel_sizes(), features=features)

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        none = torch.zeros(batch_size, dtype=torch.int64, device=self.attention.device)
        return Fixed({}, none, constant={"at": none.clone()}, max_len=max_len)

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        check_call(self, x, segments, state)
        if context is not None:
            check_call(context, context.x, context.segments, None)
            if context.x.shape[0] != x.shape[0]:
                rows = f"the context has {context.x.shape[0]} rows, the input {x.shape[0]}"
                raise ConfigError(f"CrossAttention: {rows}: it must have as many")
        if segments is not None:
            x = x.masked_fill(~segments.real[..., None], 0)
        ids = None if segments is None else segments.ids
        if state is None:
            if context is None:
                raise StateError("cross-attention looks at a context: give context=, or a state that holds one")
            return self._look(x, *self._projected(context), ids, _ids_of(context)), None
        if context is None and "k" not in state.constant:
            raise StateError("the first call on a state of cross-attention needs context=")
        held = dict(state.constant)
        if context is None:
            number = _counted(x, segments, held["at"])
        else:
            k, v = self._projected(context)
            own, document = _ids(x, ids), _ids(context.x, _ids_of(context))
            number, held["document"] = _numbered(own, document)
            dtype = self.attention.compute_dtype
            held |= {"k": k.to(dtype), "v": v.to(dtype)}
        y = self._look(x, held["k"].to(x.dtype), held["v"].to(x.dtype), number, held["document"])
        if x.shape[1]:
            held["at"] = torch.where(number.amax(1) > 0, number.amax(1), held["at"])
        return y, _after(state, held, segments, x.shape[1], keep)

    def _projected(self, context: Context) -> tuple[Tensor, Tensor]:
        """Keys and values (b s g k) of a context."""
        given, segments = context.x, context.segments
        if segments is not None:
            given = given.masked_fill(~segments.real[..., None], 0)
        k, v = (self.split(proj(given)) for proj in (self.k_proj, self.v_proj))
        return k, v

    def _look(self, x: Tensor, k: Tensor, v: Tensor, number: Tensor | None, document: Tensor | None) -> Tensor:
        q = self.split(self.q_proj(x))
        mask = AttentionMask(causal=False)
        if number is not None or document is not None:
            mask = AttentionMask(causal=False, q_ids=_ids(x, number), k_ids=_ids(k, document))
        dropout = self.config.dropout if self.training else 0.0
        y: Tensor = self.attention(q, k, v, mask, scale=self.config.scale, dropout_p=dropout, n_tokens=q.shape[1])
        out: Tensor = self.out_proj(y.flatten(-2))
        return out


def _after(state: Fixed, held: dict[str, Tensor], segments: Segments | None, n_tokens: int, keep: int) -> Fixed:
    """Nothing changes within a document, so that it can be cropped to any length."""
    after = state.advance({}, segments, n_tokens)
    after.constant = held
    if keep:
        before = after.length[:, None] - torch.arange(keep, 0, -1, device=after.length.device)
        after.past_length = before.clamp(min=-1)
    return after


def _ids_of(context: Context) -> Tensor | None:
    return None if context.segments is None else context.segments.ids


def _ids(x: Tensor, ids: Tensor | None) -> Tensor:
    """(b t) the document of each token of x (b t ...): 1 where there is one a row."""
    return torch.ones(x.shape[:2], dtype=torch.int64, device=x.device) if ids is None else ids


def _order(ids: Tensor) -> tuple[Tensor, Tensor]:
    """(b 1+t) the largest id up to each place, and how many ids there were, from before the first place on."""
    seen = torch.nn.functional.pad(ids, (1, 0)).cummax(1).values
    return seen, torch.nn.functional.pad((seen[:, 1:] != seen[:, :-1]).to(torch.int64).cumsum(1), (1, 0))


def _numbered(ids: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of the documents of x (b t) and of its context (b s), by ids that they share; 0 at pads."""
    seen, count = _order(context)
    place = torch.searchsorted(seen, ids.contiguous(), right=True) - 1
    number = 2 * count.gather(1, place) + (seen.gather(1, place) != ids)
    return torch.where(ids > 0, number, 0), torch.where(context > 0, 2 * count[:, 1:], 0)


def _counted(x: Tensor, segments: Segments | None, at: Tensor) -> Tensor:
    """Numbers of the documents of x (b t), where a row was in document ``at`` (b; 0: in none yet); 0 at pads."""
    if segments is None:
        return torch.where(at > 0, at, 2)[:, None].expand(-1, x.shape[1])
    goes_on = (segments.carried > 0) & (at > 0)
    nth = _order(segments.ids)[1][:, 1:] - goes_on.to(torch.int64)[:, None]
    number = torch.where(nth > 0, 2 * (torch.div(at, 2, rounding_mode="floor")[:, None] + nth), at[:, None])
    return torch.where(segments.real, number, 0)
