"""Titans' neural long-term memory (https://arxiv.org/abs/2501.00663): a small network that trains on the tokens it reads.

    q, k, v = conv(q_proj(x)), conv(k_proj(x)), conv(v_proj(x)), each through silu, q and k scaled to length 1
    theta = base_lr sigmoid(theta_proj(x)) / m;  eta = sigmoid(eta_proj(x));  alpha = sigmoid(alpha_proj(x))
    S_t = eta_t S_{t-1} - theta_t (the gradient of |M_b(k_t) - v_t|^2 in M_b's weights)
    M_t = (1 - alpha_t) M_{t-1} + S_t;  y_t = M_t(q_t)
    out = out_proj(norm(y) * silu(gate_proj(x)))

S is momentum ("past surprise"), alpha forgets. b is the last token of the mini-batch before; mini-batches have m tokens and
are counted from the document's start. A document starts at M_0, which is learned, with S = 0. M is one matrix, or several
with gelu between them; each head has a memory and gates of its own. The norm is over each head's
channels, with one weight for all heads.

This is the layer alone. What the paper builds of it: layers below attention (MAL), beside it (MAG), over tokens that are
learned (its persistent memory: ``meta_tokens``). The paper does not say how large rates are, nor how gates start: here a token
counts at most as ``base_lr`` over the mini-batch, and at the start momentum keeps a half and forgetting takes 2 % at every
token. Nothing bounds a memory: momentum near 1 with many equal keys makes it diverge, as gradient descent does, and so do
values far above 1 where it has several layers; it ends in NaN then. Blocks put a norm before it.

fla's form of Titans has a norm and a residual inside the loss, as TTT has, and is another. The recurrence is held to the memory
of titans-pytorch and, with one matrix and m = 1, to fla's momentum delta rule; the layer around it is spelled out in the test.

Axes: b batch, t time, d d_model, h heads, k width of a head, m tokens of a mini-batch, n numbers of a memory.
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
from hybridtf.nn import GatedRMSNorm, ShortConvs, accumulation_dtype, head_width, idle_beside, l2_normalised
from hybridtf.ops.titans import layer_shapes


class TitansConfig(SequenceMixerConfig):
    """A memory that learns by gradient descent with momentum and weight decay, as a mixer."""

    source: ClassVar[str] = "https://arxiv.org/abs/2501.00663"

    type: Literal["titans"] = "titans"
    n_heads: int = Field(gt=0)
    head_dim: int | None = Field(default=None, gt=0)
    """None: d_model / n_heads."""
    memory_layers: int = Field(default=2, gt=0)
    """Matrices of a memory (the paper's L_M). With 1 it is linear."""
    memory_width: int | None = Field(default=None, gt=0)
    """Width of a memory between its matrices. None: four times the width of a head."""
    mini_batch: int = Field(default=64, gt=0)
    """Tokens whose gradients are taken at the same weights, counted from the document's start. It changes results."""
    base_lr: float = Field(default=0.5, gt=0)
    """The largest learning rate of a token, times ``mini_batch``."""
    d_conv: int = Field(default=4, gt=0)
    conv_bias: bool = False
    eps: float = Field(default=1e-5, gt=0)
    kernel: str = "auto"
    conv_kernel: str = "auto"

    _without_inside = idle_beside({"memory_layers": 1}, "memory_width")

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, head_dim=3, memory_width=5, mini_batch=4)

    def build(self, ctx: BuildContext) -> Titans:
        return Titans(self, ctx)


class Titans(RecurrentMixer):
    """See :class:`TitansConfig`. Its state: M, what the memory has beyond M0; the momentum S; ``base``, as M, at the start of
    the mini-batch, all (b h n); and the windows of the convolutions."""

    def __init__(self, config: TitansConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, heads, width = config, config.n_heads, ctx.d_model
        p = self.head_dim = config.head_dim or head_width(ctx, heads)
        inner, depth = heads * p, config.memory_layers
        self.d_hidden = 0 if depth == 1 else config.memory_width or 4 * p
        self.q_proj = nn.Linear(width, inner, bias=False, **ctx.factory)
        self.k_proj = nn.Linear(width, inner, bias=False, **ctx.factory)
        self.v_proj = nn.Linear(width, inner, bias=False, **ctx.factory)
        self.theta_proj = nn.Linear(width, heads, bias=True, **ctx.factory)
        self.eta_proj = nn.Linear(width, heads, bias=True, **ctx.factory)
        self.alpha_proj = nn.Linear(width, heads, bias=True, **ctx.factory)
        self.gate_proj = nn.Linear(width, inner, bias=False, **ctx.factory)
        self.out_proj = nn.Linear(inner, width, bias=False, **ctx.factory)
        place, widths = ctx.child("conv"), dict.fromkeys(("q", "k", "v"), inner)
        self.conv = ShortConvs(place, widths, config.d_conv, bias=config.conv_bias, kernel=config.conv_kernel)
        shapes = layer_shapes(p, p, depth, self.d_hidden)
        self.M0 = nn.ParameterList(torch.empty(heads, *shape, **ctx.factory) for shape in shapes)
        self.norm = GatedRMSNorm(
            ctx.child("norm", d_model=inner), n_groups=heads, eps=config.eps, norm_first=True, shared_weight=True
        )
        sizes = {"n_heads": heads, "head_dim": p, "v_dim": p, "mini_batch": config.mini_batch, "depth": depth}
        self.memory = ctx.bind_kernel("titans", config.kernel, sizes={**sizes, "d_hidden": self.d_hidden})

    def param_specs(self) -> dict[str, ParamSpec]:
        layers = {f"M0.{i}": ParamSpec("matrix", init.normal(x.shape[1] ** -0.5)) for i, x in enumerate(self.M0)}
        # Nearly the same for all tokens at first: where eta happens to be near 1, a memory can run away.
        gates = {f"{name}_proj.weight": ParamSpec("matrix", init.normal(0.02)) for name in ("theta", "eta", "alpha")}
        return {
            **layers, **gates, "alpha_proj.bias": ParamSpec("bias", init.constant(-4.0)),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        n = sum(layer[0].numel() for layer in self.M0)
        shapes = dict.fromkeys(("M", "S", "base"), (self.config.n_heads, n))
        dtype = accumulation_dtype(self.memory.dtype)
        memory = Fixed.empty(batch_size, shapes, dtype=dtype, device=self.memory.device)
        return {"memory": memory, "conv": self.conv.init_state(batch_size)}

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        config, wide = self.config, accumulation_dtype(x.dtype)
        given = {"q": self.q_proj(x), "k": self.k_proj(x), "v": self.v_proj(x)}
        found, windows = self.conv(given, segments, None if state is None else state["conv"])
        q, k, v = (found[name].unflatten(-1, (config.n_heads, -1)) for name in ("q", "k", "v"))
        theta = torch.sigmoid(self.theta_proj(x).to(wide)) * (config.base_lr / config.mini_batch)
        before = None
        if state is not None:
            leaf = state["memory"]
            before = {**{name: leaf[name] for name in ("M", "S", "base")}, "n": leaf.length % config.mini_batch}
        y, after = self.memory(
            l2_normalised(q), l2_normalised(k), v, theta, F.logsigmoid(self.eta_proj(x).to(wide)),
            F.logsigmoid(-self.alpha_proj(x).to(wide)), M0=torch.cat([layer.flatten(1) for layer in self.M0], -1),
            mini_batch=config.mini_batch, depth=config.memory_layers, d_hidden=self.d_hidden, initial_state=before,
            segments=segments, n_tokens=x.shape[1],
        )
        out = self.out_proj(self.norm(y.flatten(-2), self.gate_proj(x)))
        if state is None:
            return out, None
        memory = leaf.advance({name: after[name] for name in ("M", "S", "base")}, segments, x.shape[1])
        return out, {"memory": memory, "conv": windows}
