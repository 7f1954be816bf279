"""``engram``: a layer without a mixer that adds what a table remembers of the last few tokens.

    e_t  = rows of the table for the n-grams that end at t, side by side (``nn/ngrams.py``)
    k, v = key_proj(e), value_proj(e);    k_j for each stream j
    a_j  = norm(k_j) . norm(x_j) / sqrt(d);    g_j = sigmoid( sign(a_j) sqrt(|a_j|) ) v
    x_j <- x_j + g_j + silu(conv(norm(g_j)))          conv: ``d_conv`` taps, ``ngram_size`` tokens apart

Conditional memory, https://arxiv.org/abs/2601.07372, as Qwen4-Exp has it, whose transformers code defines it. The table takes
memory and no time: a token reads n_hashes * (ngram_size - 1) of its rows.

Axes: b batch, t time, s streams, d d_model.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import (
    Block,
    BlockConfig,
    BlockOutput,
    BuildContext,
    Component,
    Context,
    Edges,
    NormConfig,
    ParamSpec,
    Segments,
    State,
    check_call,
    with_history,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import HashedNgrams, RMSNormConfig, ShortConv, accumulation_dtype


class EngramConfig(BlockConfig):
    """Adds embeddings of the last few tokens, looked up by hashing and gated by the stream. Defaults are Qwen4-Exp's."""

    type: Literal["engram"] = "engram"
    vocab_size: int = Field(gt=0)
    """The model's: token ids are below it, which bounds the multipliers of the hash."""
    ngram_size: int = Field(default=3, gt=1)
    """Tokens of the longest n-gram; the shortest has two."""
    n_hashes: int = Field(default=8, gt=0)
    """Rows of the table for each n."""
    table_size: int = Field(default=20_000_000, gt=1)
    """The least number of rows that a hash chooses from; the numbers are primes from there on."""
    d_embed: int | None = Field(default=None, gt=0, examples=[16])
    """Channels of all rows together. None: d_model."""
    start_token: int = Field(default=0, ge=0)
    """Stands before a document's start; behind each of its kind n-grams begin anew."""
    place: int = Field(default=0, ge=0)
    """Which of the model's layers of this type it is: each has multipliers and primes of its own. Nothing checks that they
    differ: layers of one place, as those of one block that a pattern names twice, hash alike, and the same n-grams collide
    in the tables of both."""
    seed: int = Field(default=1234, ge=0)
    """Of the multipliers."""
    table_multiple: int = Field(default=1, gt=0, examples=[8])
    """The table has a multiple of so many rows."""
    table_parts: int = Field(default=1, gt=0)
    """Tensors that a published checkpoint cuts the table into; here it is one."""
    d_conv: int = Field(default=4, gt=0)
    norm: Component[NormConfig] = Field(default_factory=lambda: RMSNormConfig(unit_offset=True))
    """Of the keys, the streams and what is convolved, each stream with one of its own."""
    n_streams: int = Field(default=1, gt=0)
    """Of the residual stream, as the other blocks of the stack have it."""
    conv_kernel: str = "auto"

    @model_validator(mode="after")
    def _widths_divide(self) -> Self:
        n = (self.ngram_size - 1) * self.n_hashes
        if self.d_embed is not None and self.d_embed % n:
            raise ValueError(f"d_embed = {self.d_embed} is not divisible by (ngram_size - 1) * n_hashes = {n}")
        if self.start_token >= self.vocab_size:
            raise ValueError(f"start_token = {self.start_token} is no token of a vocabulary of {self.vocab_size}")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(vocab_size=97, n_hashes=2, table_size=11, d_embed=8, d_conv=2)

    def build(self, ctx: BuildContext) -> Engram:
        return Engram(self, ctx)


class Engram(Block):
    """See :class:`EngramConfig`. Its state: the last tokens, and what the convolution carries."""

    reads = ("token_ids",)

    def __init__(self, config: EngramConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, self.n_streams, n = config, config.n_streams, (config.ngram_size - 1) * config.n_hashes
        width, d = config.d_embed or ctx.d_model, ctx.d_model
        if width % n:
            raise ctx.error(f"d_model = {width} is not divisible by (ngram_size - 1) * n_hashes = {n}; give d_embed")
        if ctx.vocab_size not in (None, config.vocab_size):
            raise ctx.error(f"vocab_size = {config.vocab_size}, and the model has {ctx.vocab_size} tokens: give the model's")
        self.ngrams = HashedNgrams(
            ctx.child("ngrams"), width=width, ngram_size=config.ngram_size, n_hashes=config.n_hashes, seed=config.seed,
            table_size=config.table_size, vocab_size=config.vocab_size, start_token=config.start_token, place=config.place,
            multiple=config.table_multiple,
        )
        self.key_proj = nn.Linear(width, self.n_streams * d, bias=False, **ctx.factory)
        self.value_proj = nn.Linear(width, d, bias=False, **ctx.factory)
        self.key_norms, self.query_norms, self.conv_norms = (
            nn.ModuleList(config.norm.build(ctx.child("norm")) for _ in range(self.n_streams)) for _ in range(3)
        )
        wide = ctx.child("conv", d_model=self.n_streams * d)
        self.conv = ShortConv(
            wide, config.d_conv, bias=False, activation="silu", kernel=config.conv_kernel, dilation=config.ngram_size
        )

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"value_proj.weight": ParamSpec("matrix", fan_in(self.value_proj.weight), residual=True)}

    def idle_parameters(self) -> int:
        """Parameters that one token does not use: the rows of the table that it does not ask for."""
        table = self.ngrams.embedding
        return (table.num_embeddings - len(self.ngrams.sizes)) * table.embedding_dim

    def parts(self) -> dict[str, Any]:
        return {}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return {"tokens": self.ngrams.init_state(batch_size), "conv": self.conv.init_state(batch_size)}

    def forward(
        self, x: Tensor, edges: Edges, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> BlockOutput:
        check_call(self, x, segments, state)
        given = (x, edges["token_ids"])
        y, after = with_history(self._remembered, given, segments, state, keep, self.init_state)
        return BlockOutput(x + y, dict(edges), {}, after)

    def _remembered(
        self, given: tuple[Tensor, Tensor], segments: Segments | None, state: Any
    ) -> tuple[Tensor, State | None]:
        """What is added to the stream, and the state after the call."""
        x, ids = given
        if segments is not None:
            x = x.masked_fill(~segments.real.view(*ids.shape, *[1] * (x.ndim - 2)), 0)  # what pads hold reaches nothing
        streams = x if self.n_streams > 1 else x.unsqueeze(-2)
        found, tokens = self.ngrams(ids, segments, None if state is None else state["tokens"])
        keys = self.key_proj(found).unflatten(-1, (self.n_streams, -1))
        wide = accumulation_dtype(x.dtype)
        products = _normed(self.key_norms, keys).to(wide) * _normed(self.query_norms, streams).to(wide)
        score = products.sum(-1, keepdim=True) / math.sqrt(x.shape[-1])
        gate = torch.sigmoid(score.abs().clamp_min(1e-6).sqrt() * score.sign())
        y = (gate * self.value_proj(found).unsqueeze(-2)).to(x.dtype)
        flat = _normed(self.conv_norms, y).flatten(-2)
        mixed, conv = self.conv(flat, segments, None if state is None else state["conv"])
        y = y + mixed.unflatten(-1, (self.n_streams, -1))
        return y.view(x.shape), None if state is None else {"tokens": tokens, "conv": conv}


def _normed(norms: nn.ModuleList, x: Tensor) -> Tensor:
    """Streams (b t s d), each with its norm."""
    return torch.stack([norm(one) for norm, one in zip(norms, x.unbind(-2), strict=True)], -2)
