"""``compressed_attention``: a window, and entries that blocks of tokens were compressed into, under one softmax: the layers of
DeepSeek-V4 (https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash-Base; its report, sections 2.3.1 and 2.3.2; transformers,
models/deepseek_v4).

    k_t = v_t = R_t norm(W_kv x_t)                                                      one head, keys and values in one
    c_i = R_im norm( sum_j softmax_j(z_j + beta_j) * u_j )                              j: the m tokens of block i
    q_th = R_t rms( W_b norm(W_a x_t) )_h                                               l_t: norm(W_a x_t), the queries' latent
    o_th = R_-t (sum of softmax(q_th . [k_s, c_i], sink_h) [v_s, c_i, 0])                t - window < s <= t, (i + 1) m <= t + 1
    y_t  = out_proj( each group of heads' o_t times a matrix of its own )

R turns the last ``qk_rope_head_dim`` channels by a position (of an entry: the first of its block); as values were turned too,
the output is turned back. u and z are two projections of x. With ``overlap`` each has two halves: a block compresses the first
halves of the m tokens before it and the second halves of its own (the first block its own alone). Entries are seen once their
block is complete, and blocks count from the document's start.

With ``index_top_k`` a query sees only the entries that a lightning indexer scores highest (CSA; else HCA):

    I_ti = sum_h w_th relu(a_th . e_i) / sqrt(d_i n_i)         a: of l_t, turned; e_i: entries of a narrow compressor of its own

The indexer's inputs carry no graph; it learns from the loss ``indexer_kl`` = KL(p_t || softmax over the chosen of I_t). p_t
are the attention's weights on the entries, those of the whole softmax, summed over heads and made to sum to 1.

Axes: b batch, t time, d d_model, h heads, k head_dim, l tokens of a block, j blocks that end in a call, n choices. Layers of
the three kinds are held to transformers', gradients too; the indexer's loss to a formula.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Component,
    Context,
    Extras,
    Growing,
    NormConfig,
    ParamSpec,
    PositionConfig,
    Preset,
    Ring,
    Segments,
    SequenceMixer,
    SequenceMixerConfig,
    State,
    check_call,
    init,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import HeadLinear, RMSNormConfig, Rope, RopeConfig, accumulation_dtype, n_real, token_positions
from hybridtf.nn.indexed_mixer import LOSS, indexer_kl
from hybridtf.nn.pooled import Ended, Pooled, empty_pooled, ended, entries_seen, pooled_with, tokens_of
from hybridtf.nn.positions import Rotation
from hybridtf.ops.block_sparse_attention import Held, Places, SparseRule, hold
from hybridtf.ops.gather_attention import choose_tokens, index_scores


class CompressedAttentionConfig(SequenceMixerConfig):
    """A window, and blocks of tokens compressed into entries, under one softmax; a trained indexer chooses among the entries.

    Defaults are DeepSeek-V4-Flash's compressed sparse layers. A heavily compressed one has compress_rate 128 and neither
    overlap nor indexer; one of the window alone compress_rate 0, neither of both, and a rope of theta 10000.
    """

    type: Literal["compressed_attention"] = "compressed_attention"
    source: ClassVar[str] = "https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash-Base"
    time_exponent: ClassVar[float] = 2.0

    n_heads: int = Field(gt=0)
    head_dim: int = Field(default=512, gt=0)
    """Also the width of the one key, which is its own value."""
    q_lora_rank: int = Field(default=1024, gt=0)
    """Width of the queries' latent."""
    qk_rope_head_dim: int = Field(default=64, ge=0)
    """The last so many channels of queries, keys and entries are told positions."""
    window: int = Field(default=128, gt=0)
    """Tokens that are seen as they are, the query's own included."""
    compress_rate: int = Field(default=4, ge=0)
    """Tokens of a block that become one entry. 0: there are no entries."""
    overlap: bool = True
    """An entry is made of the block before it too."""
    index_top_k: int = Field(default=512, ge=0, examples=[3])
    """Entries that a query attends to. 0: all, and there is no indexer."""
    index_n_heads: int = Field(default=64, gt=0)
    index_head_dim: int = Field(default=128, gt=0)
    n_out_groups: int = Field(default=8, gt=0)
    """Groups of heads that leave through a matrix each."""
    o_lora_rank: int = Field(default=1024, gt=0)
    """Channels that each group leaves with, on the way to ``out_proj``."""
    position: Component[PositionConfig] = Field(default_factory=lambda: RopeConfig(interleaved=True, theta=160000.0))
    """``rope``, or ``none`` with qk_rope_head_dim 0. Told to the indexer too."""
    norm: Component[NormConfig] = Field(default_factory=RMSNormConfig)
    """Of the queries' latent, the keys and the entries."""
    q_norm: Component[NormConfig] = Field(default_factory=lambda: RMSNormConfig(weight=False))
    """Of each head's queries, before positions."""
    kernel: str = "auto"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.n_heads % self.n_out_groups:
            raise ValueError(f"n_heads = {self.n_heads} is not divisible by n_out_groups = {self.n_out_groups}")
        if not self.compress_rate and (self.overlap or self.index_top_k):
            raise ValueError("compress_rate = 0 makes no entries: set overlap = false and index_top_k = 0 too")
        widths = {"head_dim": self.head_dim, **({"index_head_dim": self.index_head_dim} if self.index_top_k else {})}
        for name, width in widths.items():
            if self.qk_rope_head_dim > width:
                raise ValueError(f"{name} = {width} is less than qk_rope_head_dim = {self.qk_rope_head_dim}")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(
            n_heads=4, head_dim=6, q_lora_rank=5, qk_rope_head_dim=4, window=3, compress_rate=2, index_top_k=2,
            index_n_heads=8, index_head_dim=6, n_out_groups=2, o_lora_rank=3,
        )

    def build(self, ctx: BuildContext) -> CompressedAttention:
        return CompressedAttention(self, ctx)


class Turns(NamedTuple):
    """The last channels of heads turned by their positions."""

    rope: Rope | None
    max_len: int | None

    def table(self, positions: Tensor, dtype: torch.dtype) -> Rotation | None:
        """Of positions (b t), for heads in ``dtype``."""
        return None if self.rope is None else self.rope.table(positions, dtype, max_len=self.max_len)

    def turned(self, x: Tensor, table: Rotation | None) -> Tensor:
        """(b t h k)"""
        if self.rope is None or table is None:
            return x
        passed = x.shape[-1] - self.rope.width
        return torch.cat([x[..., :passed], self.rope(x[..., passed:], table)], dim=-1)


class Compressor(nn.Module):
    """Blocks of ``rate`` tokens to one entry of ``width`` channels each: a mean of values, weighed channel by channel."""

    def __init__(self, config: CompressedAttentionConfig, ctx: BuildContext, width: int) -> None:
        super().__init__()
        self.rate, self.width, self.overlap = config.compress_rate, width, config.overlap
        both = {"next": width, "own": width} if config.overlap else {"own": width}
        """What a token gives to the block after its own, and to its own."""
        self.splits = {} if len(both) == 1 else {"kv_proj": both, "gate_proj": both}
        self.kv_proj = nn.Linear(ctx.d_model, sum(both.values()), bias=False, **ctx.factory)
        self.gate_proj = nn.Linear(ctx.d_model, sum(both.values()), bias=False, **ctx.factory)
        self.position_bias = nn.Parameter(torch.empty(self.rate, sum(both.values()), **ctx.factory))
        self.norm = config.norm.build(ctx.child("norm", d_model=width))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"position_bias": ParamSpec("state", init.normal(0.02))}

    def held(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values and gates of tokens (b t d), to be held until their blocks are complete."""
        return self.kv_proj(x), self.gate_proj(x)

    def forward(self, values: Tensor, gates: Tensor, there: Tensor) -> Tensor:
        """Values and gates of blocks (b j l c), those before them first, to entries (b j k); tokens ``there`` (b j l) exist."""
        dtype, wide = values.dtype, accumulation_dtype(gates.dtype)
        values, gates = self._of_block(values.to(wide)), self._of_block(gates.to(wide))
        bias = self.position_bias.to(wide)
        bias = torch.cat(bias.split(self.width, -1)) if self.overlap else bias
        hidden = ~there[..., None]
        weights = (gates + bias).masked_fill(hidden, -torch.inf).softmax(2)
        entries: Tensor = self.norm((weights * values.masked_fill(hidden, 0.0)).sum(2).to(dtype))
        return entries

    def _of_block(self, x: Tensor) -> Tensor:
        """(b j l c) to what each token gives to this block, (b j l k)."""
        if not self.overlap:
            return x
        before, own = x.split(self.rate, 2)
        return torch.cat([before[..., : self.width], own[..., self.width :]], 2)


class Indexer(nn.Module):
    """Queries of the latent, weights of x, and entries of its own to be scored."""

    def __init__(self, config: CompressedAttentionConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.n_heads, self.width = config.index_n_heads, config.index_head_dim
        self.q_proj = nn.Linear(config.q_lora_rank, self.n_heads * self.width, bias=False, **ctx.factory)
        self.weights_proj = nn.Linear(ctx.d_model, self.n_heads, bias=False, **ctx.factory)
        self.compressor = Compressor(config, ctx.child("compressor"), self.width)

    def forward(self, x: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (b t h k), not turned, and weights (b t h) with the scale of the scores."""
        weights: Tensor = self.weights_proj(x) * (self.width * self.n_heads) ** -0.5
        return self.q_proj(latent).unflatten(-1, (self.n_heads, self.width)), weights


class Entries(NamedTuple):
    """The entries in reach of a call."""

    pooled: Pooled
    places: Places
    open: Growing | Ring | None
    """The tokens of open blocks, after the call."""


class CompressedAttention(SequenceMixer):
    """See :class:`CompressedAttentionConfig`. Its state: ``window``, a ``Ring`` of keys; ``open``, a ``Ring`` of the values and
    gates of tokens whose blocks are open, or to be overlapped; ``entries``, a sparse ``Growing``."""

    def __init__(self, config: CompressedAttentionConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        h, k, rank = config.n_heads, config.head_dim, config.q_lora_rank
        self.q_a_proj = nn.Linear(ctx.d_model, rank, bias=False, **ctx.factory)
        self.q_a_norm = config.norm.build(ctx.child("q_a_norm", d_model=rank))
        self.q_b_proj = nn.Linear(rank, h * k, bias=False, **ctx.factory)
        self.q_norm = config.q_norm.build(ctx.child("q_norm", d_model=k))
        self.kv_proj = nn.Linear(ctx.d_model, k, bias=False, **ctx.factory)
        self.kv_norm = config.norm.build(ctx.child("kv_norm", d_model=k))
        left = config.n_out_groups * config.o_lora_rank
        self.out_a_proj = HeadLinear(ctx.child("out_a_proj", d_model=h * k), config.n_out_groups, bias=False, d_out=left)
        self.out_proj = nn.Linear(left, ctx.d_model, bias=False, **ctx.factory)
        self.sinks = nn.Parameter(torch.empty(h, **ctx.factory))
        self.rope = _rope(config, ctx)
        self.uses_max_len = self.rope is not None and self.rope.uses_max_len
        self.compressor = Compressor(config, ctx.child("compressor"), k) if config.compress_rate else None
        self.indexer = Indexer(config, ctx.child("indexer")) if config.index_top_k else None
        self.losses: tuple[str, ...] = (LOSS,) if config.index_top_k else ()
        sizes = {"n_heads": h, "n_kv_heads": 1, "head_dim": k, "v_dim": k}
        self.attention = ctx.bind_kernel("block_sparse_attention", config.kernel, sizes=sizes)
        self.chosen = ctx.bind_kernel("gather_attention", config.kernel, sizes=sizes) if config.index_top_k else None

    def param_specs(self) -> dict[str, ParamSpec]:
        return {
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
            "sinks": ParamSpec("state", init.normal(0.02)),
        }

    @property
    def reach(self) -> int:
        """Tokens that an entry is made of."""
        return self.config.compress_rate * (2 if self.config.overlap else 1)

    def _compressors(self) -> dict[str, Compressor]:
        """By the name of their entries."""
        of = {"kv": self.compressor, "index_k": None if self.indexer is None else self.indexer.compressor}
        return {name: compressor for name, compressor in of.items() if compressor is not None}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        where: dict[str, Any] = {"dtype": self.attention.compute_dtype, "device": self.attention.device}
        c, parts = self.config, self._compressors()
        window = Ring.empty(batch_size, {"kv": (1, c.head_dim)}, window=c.window, max_len=max_len, **where)
        if not parts:
            return {"window": window}
        shapes = {f"{name}_{role}": (of.kv_proj.out_features,) for name, of in parts.items() for role in ("value", "gate")}
        entries = {name: (1, of.width) if name == "kv" else (of.width,) for name, of in parts.items()}
        return {
            "window": window,
            "open": Ring.empty(batch_size, shapes, window=self.reach, max_len=max_len, **where),
            "entries": empty_pooled(batch_size, entries, c.compress_rate, max_len, **where),
        }

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Any, ...]:
        check_call(self, x, segments, state)
        leaves: dict[str, Any] = state if isinstance(state, dict) else {}
        leaf: Ring | None = leaves.get("window")
        if segments is not None:
            x = x.masked_fill(~segments.real[..., None], 0)
        turns = Turns(self.rope, None if leaf is None else leaf.max_len)
        table = turns.table(token_positions(x, segments, leaf), x.dtype)
        latent = self.q_a_norm(self.q_a_proj(x))
        q = turns.turned(self.q_norm(self.q_b_proj(latent).unflatten(-1, (self.config.n_heads, -1))), table)
        kv = turns.turned(self.kv_norm(self.kv_proj(x))[:, :, None], table)
        window = hold(leaf, {"kv": kv}, segments, keep=keep)
        y, outside = self._near(q, window)
        after: dict[str, Any] = {"window": window.leaf}
        losses: dict[str, tuple[Tensor, Tensor]] = {}
        if self.compressor is not None:
            entries = self._entries(x, window.places, leaves, segments, turns, keep)
            after |= {"open": entries.open, "entries": entries.pooled.leaf}
            if self.indexer is None:
                y = self._all(q, entries, y, outside)
            else:
                asked, weights = self.indexer(x.detach(), latent.detach())
                y, loss = self._chosen(q, (turns.turned(asked, table), weights), entries, y, outside)
                losses[LOSS] = (loss, n_real((x.shape[0], x.shape[1]), segments, x.device))
        back = None if table is None else Rotation(table.cos, -table.sin)
        out = self.out_proj(self.out_a_proj(turns.turned(y.to(q.dtype), back).flatten(2)))
        return (out, None if state is None else after, *([Extras(losses=losses)] if losses else []))

    def _near(self, q: Tensor, window: Held) -> tuple[Tensor, Tensor]:
        """What queries read from the window beside their sinks (b t h k), and the log of the sum over both (b t h)."""
        kv = window.data["kv"].to(q.dtype)
        rule = SparseRule(window=self.config.window)
        y, lse = self.attention(q, kv, kv, window.places, rule, return_lse=True, n_tokens=q.shape[1])
        outside = torch.logaddexp(lse, self.sinks.to(lse.dtype).expand_as(lse))
        return y * (lse - outside).exp()[..., None], outside

    def _entries(
        self, x: Tensor, places: Places, leaves: dict[str, Any], segments: Segments | None, turns: Turns, keep: int
    ) -> Entries:
        """The entries of the blocks that end in the call, and those before them; ``places`` are the window's."""
        rate, reach, parts = self.config.compress_rate, self.reach, self._compressors()
        new: dict[str, Tensor] = {}
        for name, part in parts.items():
            new[f"{name}_value"], new[f"{name}_gate"] = part.held(x if name == "kv" else x.detach())
        tokens = hold(leaves.get("open"), new, segments, keep=keep)
        ends = ended(tokens, rate, rate, reach)
        last = places.position.gather(1, ends.columns)
        back = torch.arange(reach - 1, -1, -1, device=x.device)
        there = (last[..., None] >= back) | (back < rate)
        table = turns.table((last - rate + 1).clamp(min=0), x.dtype)
        made = {
            name: turns.turned(self._made(part, name, tokens, ends, there)[:, :, None], table) for name, part in parts.items()
        }
        if "index_k" in made:
            made["index_k"] = made["index_k"][:, :, 0]
        pooled = pooled_with(leaves.get("entries"), made, ends, segments)
        seen = entries_seen(pooled.first, ends, tokens.places, rate, rate)
        return Entries(pooled, seen, tokens.leaf)

    @staticmethod
    def _made(part: Compressor, name: str, tokens: Held, ends: Ended, there: Tensor) -> Tensor:
        """(b j k)"""
        entries: Tensor = part(*(tokens_of(tokens.data[f"{name}_{role}"], ends) for role in ("value", "gate")), there)
        return entries

    def _all(self, q: Tensor, entries: Entries, near: Tensor, outside: Tensor) -> Tensor:
        """All entries, beside what was read ``near`` with its ``outside``."""
        kv = entries.pooled.data["kv"].to(q.dtype)
        y, lse = self.attention(q, kv, kv, entries.places, SparseRule(stride=1), return_lse=True, n_tokens=q.shape[1])
        ahead = (lse - outside)[..., None]
        joined: Tensor = torch.sigmoid(ahead) * y + torch.sigmoid(-ahead) * near
        return joined

    def _chosen(
        self, q: Tensor, asked: tuple[Tensor, Tensor], entries: Entries, near: Tensor, outside: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The entries that the indexer chooses, beside what was read ``near``; and the indexer's loss."""
        assert self.chosen is not None
        data, places = entries.pooled.data, entries.places
        kv, keys = data["kv"].to(q.dtype), data["index_k"].to(q.dtype)
        index = choose_tokens(*asked, keys, places, self.config.index_top_k)
        y, mass, share = self.chosen(q, kv, kv, index[:, :, None], places, outside=outside, n_tokens=q.shape[1])
        loss = indexer_kl(index_scores(*asked, keys, index, places), mass[:, :, 0], index)
        joined: Tensor = y + share[..., None] * near
        return joined, loss


def _rope(config: CompressedAttentionConfig, ctx: BuildContext) -> Rope | None:
    position = config.position.build_at(ctx.child("position", d_model=config.qk_rope_head_dim), "qk")
    if position is None:
        return None
    if type(position) is not Rope or position.uses_lengths:  # no heir, whose table may be another
        raise ctx.error("position: values are turned back by the angle of the query, which 'rope' of a fixed base allows alone")
    return position


PRESETS = (
    Preset("compressed_sparse_attention", "compressed_attention"),
    Preset(
        "heavily_compressed_attention", "compressed_attention", {"overlap": False, "index_top_k": 0},
        requires=("compress_rate",),
    ),
)
