"""RWKV-7 time mixing (https://arxiv.org/abs/2503.14456): a state that unlearns at one key and learns at another.

    x^z_t = x_t + (x_{t-1} - x_t) mix_z  for z in r, w, k, v, a, g
    log_w = -e^(-1/2) sigmoid(w_lora(x^w));   a = sigmoid(a_lora(x^a));   g = g_lora(x^g);   kk = unit(k k_k)
    k~ = k (1 + (a - 1) k_a);   v = v + (v_first - v) sigmoid(v_lora(x^v))  but in the first layer, whose v is v_first
    S_t = (Diag(exp(log_w_t)) - (a_t kk_t) kk_t^T) S_{t-1} + k~_t v_t^T
    out = out_proj(g (head_norm(S_t^T r_t) + (sum r_t k~_t r_k) v_t))

Axes: b batch, t time, d d_model, h heads, k head_dim.

The whole layer is held to the one in the authors' package (rwkv), the first of a stack and a later one, gradients too.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Edges,
    EdgeSpec,
    Extras,
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
    l2_normalised,
    layer_depth,
    scaled_orthogonal,
)

FIRST_VALUES = "rwkv7_first_values"


class RWKV7Config(SequenceMixerConfig):
    """RWKV-7: a state that unlearns at one key and learns at another, with a decay a channel. Its channel mixer is
    ``rwkv7_channel``. Ranks that are None follow the published models: the multiples of 32 nearest 1.8, 1.8 and 1.3 times
    sqrt(d_model) for decay, a and v, and 0.6 d_model^0.8 for the gate."""

    source: ClassVar[str] = "https://arxiv.org/abs/2503.14456"

    type: Literal["rwkv7"] = "rwkv7"
    head_dim: int = Field(default=64, gt=0)
    decay_rank: int | None = Field(default=None, gt=0)
    a_rank: int | None = Field(default=None, gt=0)
    v_rank: int | None = Field(default=None, gt=0)
    gate_rank: int | None = Field(default=None, gt=0)
    value_residual: Literal["none", "auto", "first", "later"] = "auto"
    """Later layers mix the first layer's values into theirs. ``auto``: the first such layer of the stack is the first, and the
    others are later ones; ``first``, ``later``: by name; ``none``: own values alone."""
    chunk_size: int = Field(default=32, gt=0)
    kernel: str = "auto"
    conv_kernel: str = "auto"

    @classmethod
    def tiny(cls) -> Self:
        return cls(head_dim=4, decay_rank=3, a_rank=3, v_rank=2, gate_rank=3, chunk_size=4)

    def build(self, ctx: BuildContext) -> RWKV7:
        return RWKV7(self, ctx)

    def ranks(self, d_model: int) -> dict[str, int]:
        """Widths of the four low-rank projections."""
        near = {"decay": 1.8 * d_model**0.5, "a": 1.8 * d_model**0.5, "v": 1.3 * d_model**0.5, "gate": 0.6 * d_model**0.8}
        return {name: getattr(self, f"{name}_rank") or max(32, 32 * round(size / 32)) for name, size in near.items()}


class RWKV7(RecurrentMixer):
    """See :class:`RWKV7Config`. Its state: the token before, and the matrix S (b h k k) of each head."""

    def __init__(self, config: RWKV7Config, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        width, factory = ctx.d_model, ctx.factory
        self.n_heads = head_count(ctx, config.head_dim)
        self.depth, self.height = layer_depth(ctx), (ctx.layer_idx + 1) / max(ctx.n_layers, ctx.layer_idx + 1)
        role = config.value_residual
        if role == "auto":
            role = "later" if FIRST_VALUES in ctx.edges else "first"
        self.reads = (FIRST_VALUES,) if role == "later" else ()
        self.writes = (FIRST_VALUES,) if role == "first" else ()
        self.shift = TokenShift(ctx.child("shift"), config.conv_kernel)
        for name in "rwkvag":
            self.register_parameter(f"mix_{name}", nn.Parameter(torch.empty(width, **factory)))
        self.k_k, self.k_a, self.r_k = (nn.Parameter(torch.empty(width, **factory)) for _ in range(3))
        linear = [nn.Linear(width, width, bias=False, **factory) for _ in range(4)]
        self.r_proj, self.k_proj, self.v_proj, self.out_proj = linear
        ranks = config.ranks(width)
        self.w_lora = Bottleneck(ctx.child("w_lora"), ranks["decay"], width, bias=True, between="tanh")
        self.a_lora = Bottleneck(ctx.child("a_lora"), ranks["a"], width, bias=True)
        self.g_lora = Bottleneck(ctx.child("g_lora"), ranks["gate"], width, bias=False, between="sigmoid")
        self.v_lora = Bottleneck(ctx.child("v_lora"), ranks["v"], width, bias=True) if self.reads else None
        self.norm = LayerNorm(ctx.child("norm"), config.head_dim * 1e-5, True, n_groups=self.n_heads)
        sizes = {"n_heads": self.n_heads, "head_dim": config.head_dim, "d_state": config.head_dim}
        self.dplr = ctx.bind_kernel("dplr", config.kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        """Those of the authors' code: channels from slow to fast, loras silent at the start."""
        (rising, falling), n, width = self.depth, self.config.head_dim, self.r_proj.in_features
        powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
        specs = {f"mix_{name}": channel_ramp(width, power * falling, falling=True) for name, power in powers.items()}

        def across(i: Tensor) -> Tensor:  # from -1/2 to 1/2 over the channels
            return i / max(width - 1, 1) - 0.5

        def in_head(i: Tensor) -> Tensor:  # from -1 to 1 over each head, flat in the middle
            z = (i % n - (n - 1) / 2) / max((n - 1) / 2, 0.5)
            return z * z.abs()

        specs |= {
            "w_lora.up_proj.bias": channel_pattern(
                lambda i: -5.5 + 6 * (across(i) + 0.5) ** (1 + rising**0.3) + 2.5 * in_head(i), "bias"
            ),
            "a_lora.up_proj.bias": channel_pattern(lambda i: -0.19 + 0.3 * in_head(i) + 0.4 * across(i), "bias"),
            "k_k": channel_pattern(lambda i: 0.71 - 0.1 * across(i)),
            "k_a": ParamSpec("state", init.constant(1.02), drawn=False),
            "r_k": ParamSpec("state", init.constant(-0.04), drawn=False),
            "norm.weight": ParamSpec("norm", init.constant(self.height**0.7), drawn=False),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }
        if self.v_lora is not None:
            specs["v_lora.up_proj.bias"] = channel_pattern(lambda i: 0.73 - 0.4 * across(i), "bias")
        for name in ("w_lora", "a_lora", "g_lora", *(("v_lora",) if self.v_lora is not None else ())):
            specs[f"{name}.down_proj.weight"] = ParamSpec("matrix", init.constant(0.0), drawn=False)
            specs[f"{name}.up_proj.weight"] = ParamSpec("matrix", scaled_orthogonal(0.1))
        for name, size in (("r_proj", 0.5), ("k_proj", 0.05), ("v_proj", 0.5)):
            bound = size * width**-0.5
            specs[f"{name}.weight"] = ParamSpec("matrix", init.uniform(-bound, bound))
        return specs

    def edge_specs(self) -> dict[str, EdgeSpec]:
        return {FIRST_VALUES: EdgeSpec((self.r_proj.in_features,))} if self.reads or self.writes else {}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        shapes = {"S": (self.n_heads, self.config.head_dim, self.config.head_dim)}
        dtype = accumulation_dtype(self.dplr.dtype)
        return {
            "shift": self.shift.init_state(batch_size),
            "memory": Fixed.empty(batch_size, shapes, dtype=dtype, device=self.dplr.device),
        }

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None] | tuple[Tensor, State | None, Extras]:
        before, shift = self.shift(x, segments, None if state is None else state["shift"])
        mixed = {name: torch.lerp(x, before, getattr(self, f"mix_{name}").to(x.dtype)) for name in "rwkvag"}
        v = self.v_proj(mixed["v"])
        extras = Extras(edges={FIRST_VALUES: v}) if self.writes else None
        if self.v_lora is not None and edges is not None:
            v = torch.lerp(v, edges[FIRST_VALUES].to(v.dtype), torch.sigmoid(self.v_lora(mixed["v"])))
        y, memory = self._recur(mixed, v, segments, None if state is None else state["memory"])
        out = self.out_proj(y * self.g_lora(mixed["g"]))
        after = None if state is None else {"shift": shift, "memory": memory}
        return (out, after) if extras is None else (out, after, extras)

    def _recur(
        self, mixed: dict[str, Tensor], v: Tensor, segments: Segments | None, state: Fixed | None
    ) -> tuple[Tensor, Fixed | None]:
        """The heads' read-outs, normalised and with the present token's bonus (b t d), and the state after them."""
        dtype = v.dtype
        r, k = self.r_proj(mixed["r"]), self.k_proj(mixed["k"])
        wide = accumulation_dtype(dtype)
        log_w = -math.exp(-0.5) * torch.sigmoid(self.w_lora(mixed["w"]).to(wide))
        a = torch.sigmoid(self.a_lora(mixed["a"]))
        erased = l2_normalised(self._heads(k * self.k_k.to(dtype)), eps=1e-12)
        k = k * (1 + (a - 1) * self.k_a.to(dtype))
        r, k, values, log_w, a = (self._heads(z) for z in (r, k, v, log_w, a))
        y, S = self.dplr(
            r, k, values, log_w, a * erased, -erased, initial_state=None if state is None else state["S"], segments=segments,
            chunk_size=self.config.chunk_size, n_tokens=v.shape[1],
        )
        bonus = (r * k * self._heads(self.r_k.to(dtype))).sum(-1, keepdim=True) * values
        y = self.norm(y.flatten(-2)) + bonus.flatten(-2)
        return y, None if state is None else state.advance({"S": S}, segments, v.shape[1])

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.n_heads, -1))
        return heads
