"""RWKV-5 (Eagle) and RWKV-6 (Finch), https://arxiv.org/abs/2404.05892: matrix states, a decay a key channel, and a bonus.

    y_t = (S_{t-1} + Diag(u) k_t v_t^T)^T r_t;   S_t = Diag(w_t) S_{t-1} + k_t v_t^T
    out = out_proj(group_norm(y) * silu(g));   r, k, v, g = projections of x mixed with the token before

    rwkv5:  mixed_i = x + (x' - x) mu_i;   w = exp(-exp(decay)), the same at every token
    rwkv6:  mixed_i = x + (x' - x) (mu_i + tanh(z A) B_i), z = x + (x' - x) mu_x;   w_t = exp(-exp(decay + tanh(m A') B')),
            m mixed like the others

x' is the token before of the same document, 0 at its first. The group norm is of each head at each token. Decay, bonus and mu
start by depth and channel as in the published code (github.com/BlinkDL/RWKV-LM), which has no projections of other widths.

Axes: b batch, t time, d d_model, h heads, k head_dim, m inputs that are mixed, r rank.

No outside reference was run for the layers as a whole (their code needs a GPU): the recurrence is held to fla's plain loop.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Edges,
    Fixed,
    ParamSpec,
    RecurrentMixer,
    Segments,
    SequenceMixerConfig,
    State,
    init,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import (
    Bottleneck,
    LayerNorm,
    TokenShift,
    accumulation_dtype,
    channel_pattern,
    channel_ramp,
    head_count,
    layer_depth,
)


class _RWKVConfig(SequenceMixerConfig):
    """Options of both."""

    source: ClassVar[str] = "https://arxiv.org/abs/2404.05892"

    head_dim: int = Field(default=64, gt=0)
    """Must divide d_model."""
    eps: float = Field(default=64e-5, gt=0)
    """Of the group norm: 1e-5 for outputs divided by 8, as in the published code."""
    chunk_size: int = Field(default=64, gt=0)
    kernel: str = "auto"
    conv_kernel: str = "auto"
    """Of the token shift."""


class RWKV5Config(_RWKVConfig):
    """RWKV-5.2 (Eagle): matrix states with a fixed decay a key channel and a bonus for the present token."""

    type: Literal["rwkv5"] = "rwkv5"

    @classmethod
    def tiny(cls) -> Self:
        return cls(head_dim=4, chunk_size=4)

    def build(self, ctx: BuildContext) -> RWKV5:
        return RWKV5(self, ctx)


class RWKV6Config(_RWKVConfig):
    """RWKV-6 (Finch): RWKV-5 whose decays and token shifts depend on the token."""

    type: Literal["rwkv6"] = "rwkv6"
    mix_rank: int = Field(default=32, gt=0)
    """Of what each mixed input takes from the data."""
    decay_rank: int = Field(default=64, gt=0)
    """Of what the decay takes from the data."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(head_dim=4, mix_rank=3, decay_rank=2, chunk_size=4)

    def build(self, ctx: BuildContext) -> RWKV6:
        return RWKV6(self, ctx)


class _RWKV(RecurrentMixer):
    """What both share. Their state: the last token, and one matrix S (b h k k) a head."""

    inputs: ClassVar[tuple[str, ...]] = ("r", "k", "v", "g")
    """What is mixed with the token before, in the order of ``mu``."""

    def __init__(self, config: _RWKVConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, d = config, ctx.d_model
        self.n_heads = head_count(ctx, config.head_dim)
        self.depth = layer_depth(ctx)
        self.shift = TokenShift(ctx.child("shift"), config.conv_kernel)
        self.mu = nn.Parameter(torch.empty(len(self.inputs), d, **ctx.factory))
        self.decay = nn.Parameter(torch.empty(d, **ctx.factory))
        self.bonus = nn.Parameter(torch.empty(self.n_heads, config.head_dim, **ctx.factory))
        self.r_proj, self.k_proj, self.v_proj, self.gate_proj, self.out_proj = (
            nn.Linear(d, d, bias=False, **ctx.factory) for _ in range(5)
        )
        self.norm = LayerNorm(ctx.child("norm"), config.eps, True, n_groups=self.n_heads)
        sizes = dict.fromkeys(("head_dim", "v_dim"), config.head_dim) | dict.fromkeys(("n_heads", "n_groups"), self.n_heads)
        self.gla = ctx.bind_kernel("gla", config.kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        rising, width = self.depth[0], self.decay.numel()
        return {
            "mu": _mixes(self.inputs, width, *self.depth), "decay": _decays(width, rising), "bonus": _bonus(width, rising),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        shapes = {"S": (self.n_heads, self.config.head_dim, self.config.head_dim)}
        dtype = accumulation_dtype(self.gla.dtype)
        return {
            "shift": self.shift.init_state(batch_size),
            "wkv": Fixed.empty(batch_size, shapes, dtype=dtype, device=self.gla.device),
        }

    def mixed(self, x: Tensor, delta: Tensor) -> dict[str, Tensor]:
        """Each input (b t d), from x and what the token before differs from it."""
        raise NotImplementedError

    def log_decay(self, mixed: dict[str, Tensor], like: Tensor) -> Tensor:
        """(b t d), float32 at least; ``like`` (b t d)."""
        raise NotImplementedError

    def log_w(self, decay: Tensor) -> Tensor:
        """-exp(decay). Beyond 7 a token leaves nothing in any precision, and exp would soon have no finite gradient."""
        return -decay.clamp(max=7.0).exp()

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        before, shift = self.shift(x, segments, None if state is None else state["shift"])
        mixed = self.mixed(x, before - x)
        heads = {"r": self.r_proj(mixed["r"]), "k": self.k_proj(mixed["k"]), "v": self.v_proj(mixed["v"])}
        r, k, v, log_w = (y.unflatten(-1, (self.n_heads, -1)) for y in (*heads.values(), self.log_decay(mixed, x)))
        y, S = self.gla(
            r, k, v, log_w, bonus=self.bonus, initial_state=None if state is None else state["wkv"]["S"], segments=segments,
            chunk_size=self.config.chunk_size, n_tokens=x.shape[1],
        )
        out = self.out_proj(self.norm(y.flatten(-2)) * F.silu(self.gate_proj(mixed["g"])))
        if state is None:
            return out, None
        return out, {"shift": shift, "wkv": state["wkv"].advance({"S": S}, segments, x.shape[1])}


class RWKV5(_RWKV):
    """See :class:`RWKV5Config`."""

    def mixed(self, x: Tensor, delta: Tensor) -> dict[str, Tensor]:
        return {name: torch.addcmul(x, delta, mu) for name, mu in zip(self.inputs, self.mu.to(x.dtype), strict=True)}

    def log_decay(self, mixed: dict[str, Tensor], like: Tensor) -> Tensor:
        return self.log_w(self.decay.to(accumulation_dtype(like.dtype))).expand_as(like)


class RWKV6(_RWKV):
    """See :class:`RWKV6Config`."""

    inputs = ("w", "k", "v", "r", "g")

    def __init__(self, config: RWKV6Config, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        n, rank, d = len(self.inputs), config.mix_rank, ctx.d_model
        self.mu_x = nn.Parameter(torch.empty(d, **ctx.factory))
        self.mix_down_proj = nn.Linear(d, n * rank, bias=False, **ctx.factory)
        self.mix_up = nn.Parameter(torch.empty(n, rank, d, **ctx.factory))
        self.decay_proj = Bottleneck(ctx.child("decay_proj"), config.decay_rank, d, bias=False, between="tanh")
        self.splits = {"mix_down_proj": dict.fromkeys(self.inputs, rank)}

    def param_specs(self) -> dict[str, ParamSpec]:
        # Zero times something small: at the start a layer mixes and decays as it is, and learns from the first step.
        nothing, little = ParamSpec("matrix", init.constant(0.0)), ParamSpec("matrix", init.uniform(-0.01, 0.01))
        return {
            **super().param_specs(),
            "mu_x": channel_ramp(self.mu_x.numel(), self.depth[1], falling=True),
            "mix_down_proj.weight": nothing, "mix_up": little,
            "decay_proj.down_proj.weight": nothing, "decay_proj.up_proj.weight": little,
        }

    def mixed(self, x: Tensor, delta: Tensor) -> dict[str, Tensor]:
        down = self.mix_down_proj(torch.addcmul(x, delta, self.mu_x.to(x.dtype))).tanh()
        up = torch.einsum("btmr,mrd->mbtd", down.unflatten(-1, self.mix_up.shape[:2]), self.mix_up.to(down.dtype))
        shares = up.to(x.dtype) + self.mu.to(x.dtype)[:, None, None]
        return {name: torch.addcmul(x, delta, share) for name, share in zip(self.inputs, shares.unbind(), strict=True)}

    def log_decay(self, mixed: dict[str, Tensor], like: Tensor) -> Tensor:
        wide = accumulation_dtype(like.dtype)
        return self.log_w(self.decay.to(wide) + self.decay_proj(mixed["w"]).to(wide))


# -- starts of the published code: patterns over channels that depend on the layer's depth --------------------------


def _mixes(inputs: tuple[str, ...], width: int, rising: float, falling: float) -> ParamSpec:
    """How much of the token before each input takes: less in high channels, and less in late layers."""
    powers = torch.tensor([[falling * (0.5 if name in "rg" else 1.0)] for name in inputs])
    less = torch.tensor([[0.3 * rising if name == "v" else 0.0] for name in inputs])
    return channel_pattern(lambda i: 1 - (i[:width] / width) ** powers - less)


def _decays(width: int, rising: float) -> ParamSpec:
    """log(-log w) from -6, which forgets slowly, to -1."""
    return channel_pattern(lambda i: -6 + 5 * (i / max(width - 1, 1)) ** (0.7 + 1.3 * rising))


def _bonus(width: int, rising: float) -> ParamSpec:
    """Falling over channels, the more the later the layer; and a pattern of three."""
    return channel_pattern(lambda i: rising * (1 - i / max(width - 1, 1)) + ((i + 1) % 3 - 1) * 0.1)
