"""Attention with a learned relative bias of each token and short convolutions, as Inkling's (transformers ``inkling``).

    k, v = conv(k_proj(x)), conv(v_proj(x))          conv(z)_t = z_t + sum_w weight_w z_{t-w}: causal, each channel alone
    b_td = r_t . rel_bank_d,   r_t = r_proj(x_t) of each head;  0 at distances d from rel_extent on
    y_t  = conv(out( sum_s softmax_s(tau_t (q_t . k_s / k + b_{t,t-s})) v_s )),   s <= t in t's document
    tau_t = 1 + log_alpha ln(max(n_t / log_floor, 1)),  n_t = t's place in its document, counted from 1

Queries and keys are RMS normed in each head, hence 1 / k in place of 1 / sqrt(k). For n_t transformers takes the place of a
token in its row, pads included; here it is that in the document, as the same code has it without pads. The layer's fourth
convolution, behind its channel mixer, is not part of this mixer.

Axes: b batch, t time, s keys, d d_model, h heads, g kv heads, k head_dim, r d_rel.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Context,
    ParamSpec,
    Segments,
    State,
    init,
    with_history,
)
from hybridtf.nn import (
    HeadCountsConfig,
    HeldHeads,
    RMSNorm,
    ShortConv,
    accumulation_dtype,
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
    out_conv: bool = True
    """The output of ``out_proj`` is convolved too."""
    eps: float = Field(default=1e-6, gt=0)
    """Of the norms."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """On the attention weights, in training."""

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
        self.config = config
        self.window, self.dropout, self.scale = config.window, config.dropout, 1.0 / self.head_dim
        kv = self.n_kv_heads * self.head_dim
        self.r_proj = nn.Linear(ctx.d_model, self.n_heads * config.d_rel, bias=False, **ctx.factory)
        self.rel_bank = nn.Parameter(torch.empty(config.d_rel, config.rel_extent, **ctx.factory))
        head = ctx.child("norm", d_model=self.head_dim)
        self.q_norm, self.k_norm = (RMSNorm(head, config.eps) for _ in range(2))
        self.k_conv, self.v_conv = (self._conv(ctx.child(name, d_model=kv)) for name in ("k_conv", "v_conv"))
        self.out_conv = self._conv(ctx) if config.out_conv else None
        self.place(None, looks_back=True)  # as the convolutions do
        has = {"relative": True, "window": config.window is not None, "dropout": config.dropout > 0}
        features = {name for name, on in has.items() if on}
        self.attention = ctx.bind_kernel("attention", config.kernel, sizes=self.kernel_sizes(), features=features)

    def _conv(self, ctx: BuildContext) -> ShortConv:
        return ShortConv(ctx, self.config.d_conv, bias=False, activation=None, kernel=self.config.conv_kernel)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {**super().param_specs(), "rel_bank": ParamSpec("matrix", init.normal(0.02))}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        state: dict[str, State] = {"held": super().init_state(batch_size, max_len), **self._carried(batch_size)}
        return state if self.out_conv is None else {**state, "out_conv": self.out_conv.init_state(batch_size)}

    def _carried(self, batch_size: int) -> dict[str, State]:
        return {"k_conv": self.k_conv.init_state(batch_size), "v_conv": self.v_conv.init_state(batch_size)}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        leaf = None if state is None else state["held"]
        x, positions = self.enter(x, segments, state, leaf)
        carried = None if state is None else {name: state[name] for name in ("k_conv", "v_conv")}
        new, carried = with_history(self._keys_values, x, segments, carried, keep, self._carried)
        q = self.split(self.q_proj(x), self.q_norm)
        sharp = self._sharpness(positions, accumulation_dtype(x.dtype))
        rel_q = self.r_proj(x).unflatten(-1, (self.n_heads, -1))
        added = {"rel_q": _times(rel_q, sharp), "rel_bank": self.rel_bank}
        y, held = self.attend(_times(q, sharp), {"k": new.k, "v": new.v}, positions, segments, leaf, keep, added)
        out = self.out_proj(y.flatten(-2))
        after = None if carried is None else {"held": held, **carried}
        if self.out_conv is None:
            return out, after
        return self._convolved_out(out, segments, None if state is None else state["out_conv"], after, keep)

    def _keys_values(
        self, x: Tensor, segments: Segments | None, carried: dict[str, State] | None
    ) -> tuple[_KeysValues, dict[str, State] | None]:
        given = dict.fromkeys(("k_conv", "v_conv")) if carried is None else carried
        k, k_conv = _convolved(self.k_conv, self.k_proj(x), segments, given["k_conv"])
        v, v_conv = _convolved(self.v_conv, self.v_proj(x), segments, given["v_conv"])
        new = _KeysValues(self.split(k, self.k_norm), self.split(v))
        return new, None if carried is None else {"k_conv": k_conv, "v_conv": v_conv}

    def _convolved_out(
        self, out: Tensor, segments: Segments | None, window: State | None, after: dict[str, State] | None, keep: int
    ) -> tuple[Tensor, State | None]:
        conv = self.out_conv
        assert conv is not None

        def step(x: Tensor, part: Segments | None, before: State | None) -> tuple[Tensor, State | None]:
            return _convolved(conv, x, part, before)

        y, last = with_history(step, out, segments, window, keep, conv.init_state)
        return y, None if after is None else {**after, "out_conv": last}

    def _sharpness(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """(b t) tau of each token; None: 1."""
        if self.config.log_floor is None:
            return None
        places = (positions + 1).to(dtype)
        return 1.0 + self.config.log_alpha * torch.log((places / self.config.log_floor).clamp(min=1.0))


def _convolved(conv: ShortConv, x: Tensor, segments: Segments | None, window: State | None) -> tuple[Tensor, State | None]:
    """x (b t c) and what the convolution adds."""
    added, after = conv(x, segments, window)
    return x + added, after


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    """x (b t h k), each token times its ``factor`` (b t)."""
    return x if factor is None else (x.to(factor.dtype) * factor[..., None, None]).to(x.dtype)
