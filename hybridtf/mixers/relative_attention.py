"""Attention with a learned relative bias of each token and short convolutions, as Inkling's (transformers ``inkling``,
https://github.com/huggingface/transformers/blob/main/src/transformers/models/inkling/modeling_inkling.py).

    k, v = conv(k_proj(x)), conv(v_proj(x))          conv(z)_t = z_t + sum_w weight_w z_{t-w}: causal, each channel alone
    b_td = r_t . rel_bank_d,   r_t = r_proj(x_t) of each head;  0 at distances d from rel_extent on
    y_t  = conv(out( sum_s softmax_s(tau_t (q_t . k_s / k + b_{t,t-s})) v_s )),   s <= t in t's document
    tau_t = 1 + log_alpha ln(max(n_t / log_floor, 1)),  n_t = t's place in its document, counted from 1

Queries and keys are RMS normed in each head, hence 1 / k in place of 1 / sqrt(k). For n_t transformers takes the place of a
token in its row, pads included; here it is that in the document, as the same code has it without pads. The layer's fourth
convolution, behind its channel mixer, is not part of this mixer: the channel mixer ``convolved`` has it.

Inkling 2 (transformers ``inkling2``, ``inkling2_loop``; options, all of them in two presets) shortens q, k and r where it
normed or left them, with scores over sqrt(k); norms v; divides its convolutions by the root of what they add up, and makes
their taps from the token in full layers (``conv``); gives each query a sink of its own in the softmax, and each channel of the
heads' output a gate. There keys and values are projected from inputs of their own, which the block makes (edges).

Axes: b batch, t time, s keys, d d_model, h heads, g kv heads, k head_dim, r d_rel.

The tests hold whole layers of all three to transformers', gradients too, and whole models of Inkling 2 and its loop.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Context,
    Edges,
    EdgeSpec,
    ParamSpec,
    Preset,
    Segments,
    State,
    init,
    with_history,
)
from hybridtf.nn import (
    KEY_INPUT,
    VALUE_INPUT,
    ConvForm,
    HeadCountsConfig,
    HeldHeads,
    L2Clip,
    ResidualConv,
    RMSNorm,
    accumulation_dtype,
    idle_beside,
    residual_conv,
)


class RelativeAttentionConfig(HeadCountsConfig):
    """Attention with a learned bias by distance that depends on the query. Defaults are those of Inkling's full layers; its
    sliding ones have ``window = 512`` and ``rel_extent = 512``."""

    type: Literal["relative_attention"] = "relative_attention"
    source: ClassVar[str] = (
        "https://github.com/huggingface/transformers/blob/main/src/transformers/models/inkling/modeling_inkling.py"
    )
    time_exponent: ClassVar[float] = 2.0  # of the whole; with a window 1

    window: int | None = Field(default=None, gt=0)
    """Tokens that a token sees, itself included. None: all before it."""
    d_rel: int = Field(default=16, gt=0)
    """Width of what a head says of distances."""
    rel_extent: int = Field(default=1024, gt=0)
    """Distances that have a bias, 0 included."""
    log_floor: int | None = Field(default=None, gt=0)
    """Length up to which scores are not sharpened. None: they never are."""
    log_alpha: float = Field(default=0.1, gt=0)
    d_conv: int = Field(default=4, gt=1)
    """Taps of the convolutions."""
    conv_kernel: str = "auto"
    conv: ConvForm = "plain"
    """Of keys and values: ``scaled`` divides by the root of the number of terms, ``dynamic`` adds taps that each token makes
    for each head. That of the output is ``plain`` beside ``plain``, else ``scaled``."""
    out_conv: bool = True
    """The output of ``out_proj`` is convolved too."""
    qk_norm: Literal["rms", "l2_clip"] = "rms"
    """``l2_clip``: where a head's query or key is longer than ``qk_clip`` it is shortened to that, the query after a learned
    scale; scores are then divided by sqrt(k)."""
    qk_clip: float = Field(default=512**0.5, gt=0)
    rel_clip: float | None = Field(default=None, gt=0)
    """A head's r is scaled too, and shortened to this. None: taken as it is."""
    value_norm: bool = False
    """RMS norm of values in each head, without weights."""
    query_sinks: bool = False
    """A logit that each query makes for each head, whose weight goes to no value."""
    output_gate: bool = False
    """Multiplies the heads' output by sigmoid(gate_proj(x)) before ``out_proj``."""
    separate_inputs: bool = False
    """Keys and values are projected from the edges ``key_input`` and ``value_input``, which the block hands to its mixer
    (``attention_residual``); all else from x."""
    eps: float = Field(default=1e-6, gt=0)
    """Of the norms."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """On the attention weights, in training."""

    _without_clip = idle_beside({"qk_norm": "rms"}, "qk_clip")
    _without_growth = idle_beside({"log_floor": None}, "log_alpha")

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=4, d_rel=3, rel_extent=5, log_floor=3)

    def build(self, ctx: BuildContext) -> RelativeAttention:
        return RelativeAttention(self, ctx)


class _KeysValues(NamedTuple):
    """Of a call's tokens, each (b t g k)."""

    k: Tensor
    v: Tensor


class RelativeAttention(HeldHeads):
    """See :class:`RelativeAttentionConfig`. Its state is a dict: ``held`` keys and values, and each convolution's window."""

    def __init__(self, config: RelativeAttentionConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.config, self.window, self.dropout = config, config.window, config.dropout
        self.scale = 1.0 / self.head_dim if config.qk_norm == "rms" else self.head_dim**-0.5
        h, g = self.n_heads, self.n_kv_heads
        self.r_proj = self._proj(ctx, h * config.d_rel)
        self.gate_proj = self._proj(ctx, h * self.head_dim) if config.output_gate else None
        self.sink_proj = self._proj(ctx, h) if config.query_sinks else None
        self.rel_bank = nn.Parameter(torch.empty(config.d_rel, config.rel_extent, **ctx.factory))
        self._add_norms(ctx)
        kernel = config.conv_kernel
        self.k_conv, self.v_conv = (
            residual_conv(ctx.child(name, d_model=g * self.head_dim), config.conv, config.d_conv, g, ctx.d_model, kernel=kernel)
            for name in ("k_conv", "v_conv")
        )
        scaled = config.conv != "plain"
        self.out_conv = ResidualConv(ctx, config.d_conv, scaled=scaled, kernel=kernel) if config.out_conv else None
        self.place(None, looks_back=True)  # as the convolutions do
        self.reads = (KEY_INPUT, VALUE_INPUT) if config.separate_inputs else ()
        has = {
            "relative": True, "window": config.window is not None, "dropout": config.dropout > 0, "sinks": config.query_sinks,
        }
        features = {name for name, on in has.items() if on}
        self.attention = ctx.bind_kernel("attention", config.kernel, sizes=self.kernel_sizes(), features=features)

    def _proj(self, ctx: BuildContext, width: int) -> nn.Linear:
        return nn.Linear(ctx.d_model, width, bias=False, **ctx.factory)

    def _add_norms(self, ctx: BuildContext) -> None:
        config, head = self.config, ctx.child("norm", d_model=self.head_dim)
        self.q_norm: nn.Module
        self.k_norm: nn.Module
        if config.qk_norm == "rms":
            self.q_norm, self.k_norm = (RMSNorm(head, config.eps) for _ in range(2))
        else:
            self.q_norm, self.k_norm = L2Clip(head, config.qk_clip, self.n_heads), L2Clip(head, config.qk_clip)
        self.v_norm = RMSNorm(head, config.eps, weight=False) if config.value_norm else None
        told = ctx.child("norm", d_model=config.d_rel)
        self.r_norm = None if config.rel_clip is None else L2Clip(told, config.rel_clip, self.n_heads)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {**super().param_specs(), "rel_bank": ParamSpec("matrix", init.normal(0.02))}

    def edge_specs(self) -> dict[str, EdgeSpec]:
        return dict.fromkeys(self.reads, EdgeSpec((self.q_proj.in_features,)))

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        state: dict[str, State] = {"held": super().init_state(batch_size, max_len), **self._carried(batch_size)}
        return state if self.out_conv is None else {**state, "out_conv": self.out_conv.init_state(batch_size)}

    def _carried(self, batch_size: int) -> dict[str, State]:
        return {"k_conv": self.k_conv.init_state(batch_size), "v_conv": self.v_conv.init_state(batch_size)}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0, edges: Edges | None = None,
    ) -> tuple[Any, ...]:
        leaf = None if state is None else state["held"]
        x, positions = self.enter(x, segments, state, leaf)
        given = (x, x) if not self.reads else self._inputs(edges or {}, segments)
        carried = None if state is None else {name: state[name] for name in ("k_conv", "v_conv")}
        new, carried = with_history(self._keys_values, given, segments, carried, keep, self._carried)
        q = self.split(self.q_proj(x), self.q_norm)
        sharp = self._sharpness(positions, accumulation_dtype(x.dtype))
        y, held = self.attend(
            _times(q, sharp), {"k": new.k, "v": new.v}, positions, segments, leaf, keep, self._told(x, sharp)
        )
        y = y.flatten(-2)
        out = self.out_proj(y if self.gate_proj is None else y * torch.sigmoid(self.gate_proj(x)))
        after = None if carried is None else {"held": held, **carried}
        if self.out_conv is None:
            return out, after
        out, window = self.out_conv.remembered(out, segments, None if state is None else state["out_conv"], keep)
        return out, None if after is None else {**after, "out_conv": window}

    def _inputs(self, edges: Edges, segments: Segments | None) -> tuple[Tensor, Tensor]:
        """What keys and values are made of, zero at pads."""
        k, v = (edges[name] if segments is None else edges[name].masked_fill(~segments.real[..., None], 0)
                for name in (KEY_INPUT, VALUE_INPUT))
        return k, v

    def _told(self, x: Tensor, sharp: Tensor | None) -> dict[str, Tensor]:
        """What the mask is told of the queries."""
        rel_q = self.r_proj(x).unflatten(-1, (self.n_heads, -1))
        rel_q = rel_q if self.r_norm is None else self.r_norm(rel_q)
        told = {"rel_q": _times(rel_q, sharp), "rel_bank": self.rel_bank}
        return told if self.sink_proj is None else {**told, "sinks": self.sink_proj(x)}

    def _keys_values(
        self, given: tuple[Tensor, Tensor], segments: Segments | None, carried: dict[str, Any] | None
    ) -> tuple[_KeysValues, dict[str, State] | None]:
        before = dict.fromkeys(("k_conv", "v_conv")) if carried is None else carried
        of_k, of_v = given
        k, k_conv = self.k_conv(self.k_proj(of_k), segments, before["k_conv"], of_k)
        v, v_conv = self.v_conv(self.v_proj(of_v), segments, before["v_conv"], of_v)
        new = _KeysValues(self.split(k, self.k_norm), self.split(v, self.v_norm))
        return new, None if carried is None else {"k_conv": k_conv, "v_conv": v_conv}

    def _sharpness(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """(b t) tau of each token; None: 1."""
        if self.config.log_floor is None:
            return None
        places = (positions + 1).to(dtype)
        return 1.0 + self.config.log_alpha * torch.log((places / self.config.log_floor).clamp(min=1.0))


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    """x (b t h k), each token times its ``factor`` (b t)."""
    return x if factor is None else (x.to(factor.dtype) * factor[..., None, None]).to(x.dtype)


_INKLING2 = {
    "qk_norm": "l2_clip", "rel_clip": 8.0, "value_norm": True, "query_sinks": True, "output_gate": True,
}
PRESETS = (
    Preset("inkling2_attention", "relative_attention", {**_INKLING2, "conv": "dynamic", "separate_inputs": True}),
    Preset("inkling2_sliding_attention", "relative_attention", {**_INKLING2, "conv": "scaled"}, requires=("window",)),
)
