"""``nsa``: attention to compressed blocks, to the chosen ones among them, and to a window, weighed by gates.

    compressed  k_i = phi(keys of block i), v_i likewise; blocks of ``compress_size`` tokens, one every ``compress_stride``
    selected    the ``top_k`` blocks of ``block_size`` tokens on which p = softmax(q . k_i) falls most, summed over the
                heads of a key head: the own block, the first and the one before the own always
    window      the last ``window`` tokens
    y_t = out( sum over the three of sigmoid(gate_t) * softmax attention to it )

Native Sparse Attention, Yuan et al. 2025, https://arxiv.org/abs/2502.11089. Each branch has keys and values of its own. A
compressed block is seen once it is complete; the choice has no gradient. Blocks count from the document's start. phi is a
two-layer network over a block's tokens, positions in the block added (its width is not published: head_dim), or their mean.
Window and choice take time in t, the compressed branch t^2 / compress_stride.

Axes: b batch, t time, d d_model, h heads, g key heads, k head_dim, j blocks, l compress_size.

Branches (of blocks side by side, phi their mean) and choice are held to fla's, the learned phi to
native-sparse-attention-pytorch's, gradients too; the choice among blocks that overlap to the paper's formula.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import BuildContext, Context, Growing, ParamSpec, Ring, Segments, State, check_call, init
from hybridtf.nn import (
    Ended,
    SparseMixer,
    SparseMixerConfig,
    accumulation_dtype,
    empty_pooled,
    ended,
    entries_seen,
    pooled_with,
    token_positions,
    tokens_of,
)
from hybridtf.ops.block_sparse_attention import Held, SparseRule, hold, important_blocks


class NSAConfig(SparseMixerConfig):
    """Native sparse attention: compressed blocks, the blocks that they choose, and a window, each with a gate. Defaults are the
    paper's."""

    type: Literal["nsa"] = "nsa"
    source: ClassVar[str] = "https://arxiv.org/abs/2502.11089"
    time_exponent: ClassVar[float] = 2.0
    compress_size: int = Field(default=32, gt=0)
    """Tokens of a compressed block: a multiple of ``compress_stride``, at most ``block_size``."""
    compress_stride: int = Field(default=16, gt=0)
    block_size: int = Field(default=64, gt=0)
    """Tokens of a block that is chosen: a multiple of ``compress_stride``."""
    top_k: int = Field(default=16, gt=0)
    """Blocks that a query attends to, those that are always chosen included."""
    window: int = Field(default=512, gt=0)
    compression: Literal["mlp", "mean"] = "mlp"

    @model_validator(mode="after")
    def _blocks_fit(self) -> Self:
        for name in ("compress_size", "block_size"):
            if getattr(self, name) % self.compress_stride:
                raise ValueError(f"{name} = {getattr(self, name)} is no multiple of compress_stride = {self.compress_stride}")
        if self.compress_size > self.block_size:
            raise ValueError(f"compress_size = {self.compress_size} is more than block_size = {self.block_size}")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(
            n_heads=4, n_kv_heads=2, head_dim=6, compress_size=2, compress_stride=1, block_size=2, top_k=4, window=3
        )

    def build(self, ctx: BuildContext) -> NSA:
        return NSA(self, ctx)


class Compression(nn.Module):
    """A block's tokens (b j l g k) to one entry (b j g k)."""

    def __init__(self, ctx: BuildContext, size: int, width: int, *, learned: bool) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(size, width, **ctx.factory)) if learned else None
        self.up_proj = nn.Linear(size * width, width, **ctx.factory) if learned else None
        self.down_proj = nn.Linear(width, width, **ctx.factory) if learned else None

    def param_specs(self) -> dict[str, ParamSpec]:
        return {} if self.position is None else {"position": ParamSpec("state", init.normal(0.02))}

    def forward(self, x: Tensor) -> Tensor:
        if self.position is None or self.up_proj is None or self.down_proj is None:
            return x.to(accumulation_dtype(x.dtype)).mean(2).to(x.dtype)
        x = x + self.position[:, None].to(x.dtype)
        y: Tensor = self.down_proj(torch.relu(self.up_proj(x.transpose(2, 3).flatten(3))))
        return y


class NSA(SparseMixer):
    """See :class:`NSAConfig`. Its state: ``selected``, a ``Growing`` of keys and values; ``window`` and ``open``, ``Ring``s of
    the window's tokens and of those that may be in an open block; ``pooled``, a sparse ``Growing`` of complete blocks."""

    config: NSAConfig

    def __init__(self, config: NSAConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.causal_only = True
        kv = self.n_kv_heads * self.head_dim
        for branch in ("compress", "window"):
            for role in ("k", "v"):
                setattr(self, f"{branch}_{role}_proj", nn.Linear(ctx.d_model, kv, bias=config.qkv_bias, **ctx.factory))
        self.gate_proj = nn.Linear(ctx.d_model, 3 * self.n_heads, bias=False, **ctx.factory)
        learned = config.compression == "mlp"
        self.compress_k = Compression(ctx.child("compress_k"), config.compress_size, self.head_dim, learned=learned)
        self.compress_v = Compression(ctx.child("compress_v"), config.compress_size, self.head_dim, learned=learned)

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        where: dict[str, Any] = {"dtype": self.attention.compute_dtype, "device": self.attention.device}
        shapes = dict.fromkeys(("k", "v"), (self.n_kv_heads, self.head_dim))
        c = self.config
        return {
            "selected": Growing.empty(batch_size, shapes, max_len=max_len, **where),
            "window": Ring.empty(batch_size, shapes, window=c.window, max_len=max_len, **where),
            "open": Ring.empty(batch_size, shapes, window=c.compress_size, max_len=max_len, **where),
            "pooled": empty_pooled(batch_size, shapes, c.compress_stride, max_len, **where),
        }

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        check_call(self, x, segments, state)
        leaves: dict[str, Any] = state if isinstance(state, dict) else {}
        if segments is not None:
            x = x.masked_fill(~segments.real[..., None], 0)
        q, new = self._projected(x, segments, leaves.get("selected"))
        held = {name: hold(leaves.get(name), of, segments, keep=keep) for name, of in new.items()}
        seen, blocks, pooled = self._compressed(q, held["open"], held["selected"], leaves.get("pooled"), segments)
        parts = [
            seen,
            self.seen(q, held["selected"], SparseRule(block=self.config.block_size), blocks=blocks),
            self.seen(q, held["window"], SparseRule(window=self.config.window)),
        ]
        gates = torch.sigmoid(self.gate_proj(x)).unflatten(-1, (self.n_heads, 3)).unbind(-1)
        y = sum(gate[..., None] * part for gate, part in zip(gates, parts, strict=True))
        out = self.out_proj(y.flatten(-2))
        return out, None if state is None else {**{name: of.leaf for name, of in held.items()}, "pooled": pooled}

    def _projected(
        self, x: Tensor, segments: Segments | None, leaf: Growing | None
    ) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        """Queries (b t h k), and the keys and values of each branch, with their positions told."""
        positions = token_positions(x, segments, leaf)
        names = {"selected": ("k_proj", "v_proj")}
        names |= {at: (f"{of}_k_proj", f"{of}_v_proj") for at, of in (("window", "window"), ("open", "compress"))}
        keys = torch.cat([self.split(getattr(self, k)(x)) for k, _ in names.values()], 2)
        q, keys = self.placed(self.split(self.q_proj(x)), keys, positions, segments, leaf)
        of_branch = zip(names.items(), keys.split(self.n_kv_heads, 2), strict=True)
        return q, {at: {"k": k, "v": self.split(getattr(self, v)(x))} for (at, (_, v)), k in of_branch}

    def _compressed(
        self, q: Tensor, tokens: Held, selected: Held, leaf: Growing | None, segments: Segments | None
    ) -> tuple[Tensor, Tensor, Growing | None]:
        """The compressed branch (b t h k), the chosen blocks (b t g n), and the state of complete blocks after the call."""
        c = self.config
        ends: Ended = ended(tokens, c.compress_size, c.compress_stride)
        new = {
            "k": self.compress_k(tokens_of(tokens.data["k"], ends)), "v": self.compress_v(tokens_of(tokens.data["v"], ends)),
        }
        pooled = pooled_with(leaf, new, ends, segments)
        places = entries_seen(pooled.first, ends, selected.places, c.compress_size, c.compress_stride)
        y = self.seen(q, Held(pooled.data, places, None), SparseRule(stride=1))
        own = torch.div(selected.places.position, c.block_size, rounding_mode="floor")
        strides = {"ratio": c.block_size // c.compress_stride, "spread": c.compress_size // c.compress_stride}
        blocks = important_blocks(
            q, pooled.data["k"], pooled.first, places.position + 1, own, c.top_k, scale=self.head_dim**-0.5, **strides
        )
        return y, blocks, pooled.leaf
