"""Mixture of experts (https://arxiv.org/abs/1701.06538) in all its published forms: ``moe`` and its presets.

Axes: b batch, t time, d d_model, n = b t tokens, e experts, k experts a token.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.channel_mixers.glu import GLU, GLUConfig
from hybridtf.channel_mixers.mlp import MLP, MLPConfig
from hybridtf.channel_mixers.moe.experts import ExpertOptions, Experts
from hybridtf.channel_mixers.moe.losses import balance_loss, z_loss
from hybridtf.channel_mixers.moe.router import RouterNetwork, wide_linear
from hybridtf.channel_mixers.moe.routing import RouterOptions, Routing, route
from hybridtf.channel_mixers.moe.selection import SelectionBias
from hybridtf.channel_mixers.moe.token_table import TOKENS, TokenTable
from hybridtf.core import (
    BuildContext,
    ChannelMixer,
    ChannelMixerConfig,
    Component,
    ConfigError,
    Edges,
    EdgeSpec,
    Extras,
    NormConfig,
    ParamSpec,
    Preset,
    Segments,
    State,
    check_call,
    init,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import RMSNormConfig, idle_beside, n_real

ROUTER_STATE = "router_state"
"""The edge by which what a router looks at reaches those of later layers."""


class MoEConfig(ChannelMixerConfig, ExpertOptions, RouterOptions):
    """A router sends each token to ``top_k`` of ``n_experts`` experts; y is the weighted sum of what they return."""

    type: Literal["moe"] = "moe"
    d_ff: int = Field(gt=0)
    """Of one expert."""
    d_ff_shared: int = Field(default=0, ge=0)
    """Width of the expert that serves every token beside the chosen ones (n shared experts of d_ff are one of n d_ff);
    0: none."""
    shared_gate: bool = False
    """Multiply the shared expert's output by sigmoid of a projection of the token (Qwen)."""
    limit_shared: bool = True
    """The shared expert is bounded by ``limit`` as the routed ones are; off: it is not bounded (HY-V4)."""
    d_latent: int = Field(default=0, ge=0)
    """The routed experts work on a projection of this width (Nemotron 3); 0: on the token itself."""
    router_norm: Component[NormConfig] | None = Field(default=None, examples=[{"type": "rms_norm"}])
    """A norm of what the router reads (Gemma 4); with ``d_router`` the one within its network (ZAYA), an RMS norm where none is
    given."""
    expert_norm: Component[NormConfig] | None = Field(default=None, examples=[{"type": "rms_norm"}])
    """A norm of what the routed experts read, where the router reads the token as it comes (Gemma 4)."""
    expert_scale: bool = False
    """Multiplies the weight of each chosen expert by a learned number of that expert, 1 at the start (Gemma 4)."""
    outer_bias: bool | None = None
    """Bias of the shared expert and of the latent projections. None: as ``bias``."""
    balance_loss: float = Field(default=0.0, ge=0)
    """Weight of the loss ``balance``, already in it; 0: there is no such loss."""
    balance_over: Literal["document", "call"] = "document"
    """Over which tokens loads are balanced: those of each document, or all real tokens of one forward pass."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the loss ``router_z``, already in it; 0: there is no such loss."""
    d_router: int = Field(default=0, ge=0)
    """Width of the router's own network, of which the logits are a projection (ZAYA); 0: they are one of the token."""
    router_state: Literal["none", "auto", "first", "later"] = "none"
    """``later``: the network adds what the last layer with such a state has, times a learned vector, to what it makes of the
    token, and hands the sum on. ``first``: it begins such a state. ``auto``: first where no earlier layer has one."""

    _without_limit = idle_beside({"limit": 0.0}, "limit_shared")
    _without_network = idle_beside({"d_router": 0}, "router_state")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.shared_gate and not self.d_ff_shared:
            raise ValueError("shared_gate needs a shared expert: give d_ff_shared")
        if self.n_always and self.balance_loss:
            raise ValueError("balance_loss is for experts that are chosen; with n_always some are not")
        if self.choice == "token_id" and self.balance_loss:
            raise ValueError("balance_loss is for experts that are chosen by score; choice = 'token_id' looks them up")
        if not self.gated and (self.limit or self.up_shift or self.gate_softcap or self.up_softcap or self.gate_scale != 1.0):
            raise ValueError("gate_scale, limit, up_shift and softcaps are of gated experts; these are plain (gated = false)")
        if self.outer_bias is not None and not (self.d_ff_shared or self.d_latent):
            raise ValueError("outer_bias is of a shared expert or of latent projections: give d_ff_shared or d_latent")
        return self

    @property
    def biased_outside(self) -> bool:
        """Whether what all tokens pass has biases."""
        return self.bias if self.outer_bias is None else self.outer_bias

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_experts=6, top_k=2, d_ff=12, n_groups=3, top_k_groups=2, d_ff_shared=8)

    def build(self, ctx: BuildContext) -> MoE:
        return MoE(self, ctx)


class MoE(ChannelMixer):
    """See :class:`MoEConfig`. No expert is ever full: nothing is dropped, and no token's output depends on another's."""

    def __init__(self, config: MoEConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.d_router or ctx.d_model, config.n_scored, bias=config.router_bias, **ctx.factory)
        self.table = TokenTable(config.n_scored, config.top_k, ctx.child("table")) if config.choice == "token_id" else None
        self.reads: tuple[str, ...] = () if self.table is None else (TOKENS,)
        self.router_network = self._network(ctx) if config.d_router else None
        norm = None if config.d_router else config.router_norm
        self.router_norm = None if norm is None else norm.build(ctx.child("router_norm"))
        self.expert_norm = None if config.expert_norm is None else config.expert_norm.build(ctx.child("expert_norm"))
        self.expert_scale = nn.Parameter(torch.empty(config.n_scored, **ctx.factory)) if config.expert_scale else None
        self.selection: SelectionBias | None = None
        if config.selection_bias != "none":
            step = config.bias_step if config.selection_bias == "balanced" else 0.0
            self.selection = SelectionBias(config.n_scored - config.n_always, step, ctx)
        inner = ctx.child("experts", d_model=config.d_latent or ctx.d_model)
        self.experts = Experts(config, config.n_experts, inner, ends_branch=not config.d_latent)
        if config.d_latent:
            self.latent_in = nn.Linear(ctx.d_model, config.d_latent, bias=config.biased_outside, **ctx.factory)
            self.latent_out = nn.Linear(config.d_latent, ctx.d_model, bias=config.biased_outside, **ctx.factory)
        self.shared = _shared_expert(config, ctx.child("shared")) if config.d_ff_shared else None
        self.shared_gate = nn.Linear(ctx.d_model, 1, bias=False, **ctx.factory) if config.shared_gate else None
        self.losses = ("balance",) * bool(config.balance_loss) + ("router_z",) * bool(config.z_loss)
        if config.balance_loss:
            self.losses_cannot = {"cut": "loads are balanced over the tokens of one call"}
            if config.balance_over == "call":
                self.losses_cannot["segment"] = "loads are balanced over all documents of a call"

    def _network(self, ctx: BuildContext) -> RouterNetwork:
        config, role = self.config, self.config.router_state
        follows = role == "later" or (role == "auto" and ROUTER_STATE in ctx.edges)
        if role == "auto" and not follows and ctx.n_visits > 1:
            raise ctx.error(
                f"router_state = 'auto' begins a state at the first of the {ctx.n_visits} visits of this shared block, and the "
                "others, with the same weights, would not take it up: say 'first', or let a layer before it begin the state"
            )
        self.reads += (ROUTER_STATE,) * follows
        self.writes = (ROUTER_STATE,) * (role != "none")
        return RouterNetwork(
            ctx.child("router_network"), config.d_router, config.router_norm or RMSNormConfig(), follows=follows
        )

    def edge_specs(self) -> dict[str, EdgeSpec]:
        crosses = ROUTER_STATE in self.reads or ROUTER_STATE in self.writes
        return {ROUTER_STATE: EdgeSpec((self.config.d_router,))} if crosses else {}

    def unread(self, edges: frozenset[str]) -> None:
        self.writes = tuple(edge for edge in self.writes if edge not in edges)

    def param_specs(self) -> dict[str, ParamSpec]:
        specs = {} if self.expert_scale is None else {"expert_scale": ParamSpec("norm", init.constant(1.0))}
        if self.config.d_latent:
            specs["latent_out.weight"] = ParamSpec("matrix", fan_in(self.latent_out.weight), residual=True)
        return specs

    def idle_parameters(self) -> int:
        """Parameters that one token does not use: those of the experts that it does not choose."""
        total = sum(p.numel() for p in self.experts.parameters())
        return total // self.config.n_experts * max(self.config.n_experts - self.config.top_k - self.config.n_always, 0)

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, keep: int = 0,
        edges: Edges | None = None,
    ) -> tuple[Tensor, State | None] | tuple[Tensor, State | None, Extras]:
        check_call(self, x, segments, state)
        looked_up = None if self.table is None else self.table(edges)
        before = self._before(edges)
        if segments is not None:
            x = x.masked_fill(~segments.real[..., None], 0)  # what pads hold reaches nothing
            before = None if before is None else before.masked_fill(~segments.real[..., None], 0)
        tokens = x.flatten(0, 1)
        seen, looked_at = self._seen(tokens, None if before is None else before.flatten(0, 1))
        logits = self._logits(seen)
        routing = route(logits, self.config, None if self.selection is None else self.selection.bias, looked_up)
        if self.expert_scale is not None:
            routing = routing._replace(weights=routing.weights * self.expert_scale.to(logits.dtype)[routing.experts])
        if segments is not None:
            pads = ~segments.real.flatten()[:, None]
            routing = routing._replace(experts=routing.experts.masked_fill(pads, self.config.n_scored))
        if self.selection is not None:
            chosen = routing.experts[:, : self.config.top_k]
            self.selection.count(chosen.clamp(max=len(self.selection.bias)) if self.config.n_always else chosen)
        y = self._routed(tokens, routing, x.shape[1])
        if self.shared is not None:
            extra = self.shared(tokens)[0]
            y = y + (extra if self.shared_gate is None else self.shared_gate(tokens).sigmoid() * extra)
        y = y.view(x.shape)
        if not self.extra_results():
            return y, state
        losses = self._losses(logits, routing, (x.shape[0], x.shape[1]), segments)
        written = {edge: looked_at.to(x.dtype).unflatten(0, x.shape[:2]) for edge in self.writes}
        return y, state, Extras(written, losses)

    def _before(self, edges: Edges | None) -> Tensor | None:
        """(b t r) what an earlier router looked at, where this one follows it."""
        if ROUTER_STATE not in self.reads:
            return None
        if edges is None or ROUTER_STATE not in edges:
            raise ConfigError(f"router_state = 'later' needs edges={{{ROUTER_STATE!r}: ...}}, what an earlier router looked at")
        return edges[ROUTER_STATE]

    def _seen(self, tokens: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the logits are a projection of, and what the router's network looked at."""
        if self.router_network is None:
            return tokens if self.router_norm is None else self.router_norm(tokens), tokens
        seen, looked_at = self.router_network(tokens, before, self.experts.linear.dtype)
        return seen, looked_at

    def _logits(self, seen: Tensor) -> Tensor:
        """(n e), in float32 at least."""
        logits = wide_linear(self.router, seen, self.experts.linear.dtype)
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def _routed(self, tokens: Tensor, routing: Routing, n_tokens: int) -> Tensor:
        tokens = tokens if self.expert_norm is None else self.expert_norm(tokens)
        inner = self.latent_in(tokens) if self.config.d_latent else tokens
        n = self.config.n_experts
        chosen = routing.experts if self.config.n_scored == n else routing.experts.clamp(max=n)
        y: Tensor = self.experts(inner, chosen, routing.weights, n_tokens)
        if self.config.n_identity:
            given_back = (routing.experts >= n) & (routing.experts < n + self.config.n_identity)
            y = y + (inner * routing.weights.masked_fill(~given_back, 0).sum(-1, keepdim=True)).to(y.dtype)
        return self.latent_out(y) if self.config.d_latent else y

    def _losses(
        self, logits: Tensor, routing: Routing, shape: tuple[int, int], segments: Segments | None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        config, count = self.config, n_real(shape, segments, logits.device)
        losses = {}
        if config.balance_loss:
            total = balance_loss(routing.probs, routing.experts, shape, segments, config.balance_over)
            losses["balance"] = (config.balance_loss * total, count)
        if config.z_loss:
            losses["router_z"] = (config.z_loss * z_loss(logits, segments), count)
        return losses


def _shared_expert(config: MoEConfig, ctx: BuildContext) -> GLU | MLP:
    """The expert of all tokens, of the same kind as the others."""
    if not config.gated:
        return MLP(MLPConfig(d_ff=config.d_ff_shared, activation=config.activation, bias=config.biased_outside), ctx)
    glu = GLUConfig(
        d_ff=config.d_ff_shared, activation=config.activation, limit=config.limit, up_shift=config.up_shift,
        bias=config.biased_outside, gate_scale=config.gate_scale,
    )
    return GLU(glu if config.limit_shared else glu.model_copy(update={"limit": 0.0}), ctx)


# The routers and experts of Switch, Mixtral, DeepSeek-V3 and gpt-oss.
PRESETS = (
    Preset("switch_moe", "moe", {"top_k": 1, "normalize": False, "gated": False, "activation": "relu"}),
    Preset("mixtral_moe", "moe", {"scores": "softmax", "normalize": True, "gated": True, "activation": "silu"}),
    Preset("deepseek_moe", "moe", {
        "scores": "sigmoid", "normalize": True, "selection_bias": "balanced", "group_score": "top2", "gated": True,
        "activation": "silu",
    }),
    Preset("gpt_oss_moe", "moe", {
        "scores": "softmax_top_k", "router_bias": True, "bias": True, "gated": True, "activation": "quick_gelu",
        "limit": 7.0, "up_shift": 1.0,
    }),
)
