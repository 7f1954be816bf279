"""HGRN2 (https://arxiv.org/abs/2404.07904): a gated linear recurrence whose keys are what its forget gate lets go.

    f_t = bound + (1 - bound) sigmoid(f_proj(x));   S_t = Diag(f_t) S_{t-1} + (1 - f_t) i_t^T;   y_t = S_t^T silu(q_t) k^(-1/2)
    out = out_proj(norm(y));   q, i = q_proj(x), i_proj(x)

The norm is over all heads' channels together; before it the published code divides by the root of the key width. The lower
bound rises with depth, by one parameter for the whole stack: the first HGRN2 layer owns it, has the bound 0, and writes an
edge for each later layer (:class:`~hybridtf.nn.LowerBounds`). A layer used alone, or the only one of a stack, has the bound 0.

Axes: b batch, t time, d d_model, h heads, k key width of a head (``expand_ratio``), v value width, the same.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Edges,
    Extras,
    Fixed,
    ParamSpec,
    RecurrentMixer,
    Segments,
    SequenceMixerConfig,
    State,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import LowerBounds, RMSNorm, ShortConvs, accumulation_dtype, log_forget


class HGRN2Config(SequenceMixerConfig):
    """HGRN2, with d_model / expand_ratio heads."""

    source: ClassVar[str] = "https://arxiv.org/abs/2404.07904"

    type: Literal["hgrn2"] = "hgrn2"
    expand_ratio: int = Field(default=128, gt=0)
    """Rows of the state for each channel of the recurrence: the key width of a head. Must divide d_model."""
    lower_bound: bool = True
    """Forget gates have a lower bound that rises with depth. False: 0 everywhere."""
    d_conv: int | None = Field(default=None, gt=0)
    """Width of short convolutions on queries, gates and inputs, a variant of the published code. None: without."""
    eps: float = Field(default=1e-5, gt=0)
    chunk_size: int = Field(default=64, gt=0)
    kernel: str = "auto"
    conv_kernel: str = "auto"

    @classmethod
    def tiny(cls) -> Self:
        return cls(expand_ratio=4, chunk_size=4)

    def build(self, ctx: BuildContext) -> HGRN2:
        return HGRN2(self, ctx)


class HGRN2(RecurrentMixer):
    """See :class:`HGRN2Config`. Its state: one matrix S (b h k v) a head, and the windows of convolutions, if any."""

    def __init__(self, config: HGRN2Config, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        width, d = config.expand_ratio, ctx.d_model
        if d % width:
            raise ctx.error(f"d_model = {d} is not divisible by expand_ratio = {width}")
        self.n_heads = d // width
        self.q_proj, self.f_proj, self.i_proj, self.out_proj = (
            nn.Linear(d, d, bias=False, **ctx.factory) for _ in range(4)
        )
        self.bounds = LowerBounds(ctx.child("bounds"), "hgrn2") if config.lower_bound else None
        if self.bounds is not None:
            self.reads, self.writes = self.bounds.reads, self.bounds.writes
        self.norm = RMSNorm(ctx.child("norm"), config.eps)
        self.convs = None
        if config.d_conv is not None:
            channels = dict.fromkeys(("q", "f", "i"), d)
            place = ctx.child("convs")
            self.convs = ShortConvs(place, channels, config.d_conv, activation=None, kernel=config.conv_kernel)
        sizes = {"n_heads": self.n_heads, "n_groups": self.n_heads, "head_dim": width, "v_dim": width}
        self.gla = ctx.bind_kernel("gla", config.kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def unread(self, edges: frozenset[str]) -> None:
        if self.bounds is not None:
            self.bounds.unread(edges)
            self.writes = self.bounds.writes

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        shapes = {"S": (self.n_heads, self.config.expand_ratio, self.config.expand_ratio)}
        dtype = accumulation_dtype(self.gla.dtype)
        memory: dict[str, State] = {"gla": Fixed.empty(batch_size, shapes, dtype=dtype, device=self.gla.device)}
        return memory if self.convs is None else {**memory, "convs": self.convs.init_state(batch_size)}

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Any, ...]:
        given = {"q": self.q_proj(x), "f": self.f_proj(x), "i": self.i_proj(x)}
        windows = None
        if self.convs is not None:
            given, windows = self.convs(given, segments, None if state is None else state["convs"])
        bound, written = (None, {}) if self.bounds is None else self.bounds(x, edges)
        log_f = log_forget(given["f"], bound)
        k = -torch.expm1(log_f)
        q = F.silu(given["q"]) * self.config.expand_ratio**-0.5
        q, k, v, log_f = (y.unflatten(-1, (self.n_heads, -1)) for y in (q, k.to(q.dtype), given["i"], log_f))
        y, S = self.gla(
            q, k, v, log_f, initial_state=None if state is None else state["gla"]["S"], segments=segments,
            chunk_size=self.config.chunk_size, n_tokens=x.shape[1],
        )
        out = self.out_proj(self.norm(y.flatten(-2)))
        after = None
        if state is not None:
            after = {"gla": state["gla"].advance({"S": S}, segments, x.shape[1])}
            after |= {} if windows is None else {"convs": windows}
        return (out, after, Extras(written)) if self.writes else (out, after)
