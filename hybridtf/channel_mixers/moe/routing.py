"""Which experts a token goes to, and with which weights: pure functions of the router's logits.

Axes: n tokens, e experts, k chosen experts, g groups of experts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from hybridtf.core.config import ConfigTable


class RouterOptions(ConfigTable):
    """How experts are chosen. ``top_k`` of ``n_experts`` serve each token; none is ever full, so no token is dropped."""

    n_experts: int = Field(gt=0)
    top_k: int = Field(gt=0)
    scores: Literal["softmax", "softmax_top_k", "sigmoid", "sqrt_softplus"] = "softmax"
    """Of the logits: a softmax over all experts; over the chosen ones alone; or each by itself (the last is DeepSeek-V4's). The
    weights are these."""
    choice: Literal["score", "token_id"] = "score"
    """``token_id``: a table, drawn at the start and not trained, says which experts serve a token of this id; scores only weigh
    them (the first layers of DeepSeek-V4)."""
    normalize: bool = True
    """Divide the chosen weights by their sum (plus ``norm_eps``). No effect on ``softmax_top_k``, whose sum is 1."""
    norm_eps: float = Field(default=1e-20, ge=0)
    routed_scale: float = Field(default=1.0, gt=0)
    """Multiplies the weights in the end."""
    logit_scale: float = Field(default=1.0, gt=0)
    """Multiplies the router's logits (Gemma 4: d_model ** -0.5)."""
    router_bias: bool = False
    """Of the router's projection; it moves logits, so choice and weights."""
    selection_bias: Literal["none", "fixed", "balanced"] = "none"
    """A number an expert that is added to its score for the choice alone, and has no gradient. ``balanced``: training
    moves it towards even loads after each optimizer step (https://arxiv.org/abs/2408.15664); ``fixed``: nothing does."""
    bias_step: float = Field(default=1e-3, gt=0)
    """How far a step moves a ``balanced`` selection bias."""
    n_groups: int = Field(default=1, gt=0)
    """Groups of neighbouring experts."""
    top_k_groups: int = Field(default=1, gt=0)
    """Groups that a token may choose from, those with the best ``group_score``."""
    group_score: Literal["max", "top2"] = "max"
    """Of a group: its best expert's score, or the sum of its best two."""
    n_always: int = Field(default=0, ge=0, examples=[3])
    """The last so many of the experts serve every token beside the ``top_k``, which are chosen among the others; their weights
    are made of their scores as all weights are (Inkling)."""
    n_identity: int = Field(default=0, ge=0, examples=[3])
    """So many experts beside the ``n_experts``, the last that the router scores, give back what they are given: a token that
    chooses one computes less (LongCat-Flash)."""
    n_null: int = Field(default=0, ge=0, examples=[1])
    """Choices beyond all experts that are none: a token that takes one gets nothing for it (ZAYA's skip expert). They stand in
    no group, and every token may take them."""

    @model_validator(mode="after")
    def _routes(self) -> Self:
        if self.n_always and self.n_identity:
            raise ValueError("n_always and n_identity are both of the last experts: give one of them")
        if self.n_null and self.n_always:
            raise ValueError("n_null choices cannot stand beside n_always: the last experts would not be the last choices")
        routed = self.n_experts + self.n_identity - self.n_always
        name = "n_experts" + (" - n_always" if self.n_always else " + n_identity" if self.n_identity else "")
        if routed < 1 or routed % self.n_groups:
            raise ValueError(f"{name} = {routed} is not divisible by n_groups = {self.n_groups}")
        size = routed // self.n_groups
        if self.top_k_groups > self.n_groups:
            raise ValueError(f"top_k_groups = {self.top_k_groups} is more than n_groups = {self.n_groups}")
        if self.top_k > self.top_k_groups * size:
            raise ValueError(
                f"top_k = {self.top_k} is more than the {self.top_k_groups * size} experts that a token may choose from"
            )
        if self.group_score == "top2" and size < 2:
            raise ValueError("group_score = 'top2' needs groups of two experts or more")
        if self.top_k == 1 < self.n_scored and not self.n_always and (self.normalize or self.scores == "softmax_top_k"):
            raise ValueError(
                "top_k = 1 with weights that sum to 1 gives every token the weight 1, and the router no gradient; use "
                "normalize = false with scores 'softmax' or 'sigmoid'"
            )
        return self

    @model_validator(mode="after")
    def _looked_up(self) -> Self:
        grouped = self.top_k_groups < self.n_groups
        if self.choice == "token_id" and (self.selection_bias != "none" or grouped or self.n_always):
            raise ValueError("selection_bias, groups and n_always are of a choice by score; choice = 'token_id' looks it up")
        return self

    @property
    def n_scored(self) -> int:
        """Choices that the router has a logit of: experts, those that compute nothing included, and choices that are none."""
        return self.n_experts + self.n_identity + self.n_null


class Routing(NamedTuple):
    """``experts`` (n k) int64, those that always serve last, numbers from ``n_experts`` on for those that compute nothing;
    ``weights`` (n k); ``probs`` (n e): scores that sum to 1."""

    experts: Tensor
    weights: Tensor
    probs: Tensor


def route(
    logits: Tensor, options: RouterOptions, selection_bias: Tensor | None, looked_up: Tensor | None = None
) -> Routing:
    """The choice for each token, ``looked_up`` (n k) where it is known. ``logits`` (n e) are float32 at least, and so are the
    weights."""
    scores = _scores(logits, options)
    # What is compared: a softmax over the chosen ones is not known yet, and has the order of the logits.
    compared = logits if options.scores == "softmax_top_k" else scores
    experts = _chosen(compared, options, selection_bias) if looked_up is None else looked_up
    weights = compared.gather(-1, experts)
    if options.scores == "softmax_top_k":
        weights = weights.softmax(-1)
    elif options.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + options.norm_eps)
    probs = scores / scores.sum(-1, keepdim=True) if options.scores in ("sigmoid", "sqrt_softplus") else scores
    return Routing(experts, weights * options.routed_scale, probs)


def _scores(logits: Tensor, options: RouterOptions) -> Tensor:
    if options.scores == "sigmoid":
        return logits.sigmoid()
    if options.scores == "sqrt_softplus":  # the root of 0 has no gradient
        return F.softplus(logits).clamp(min=torch.finfo(logits.dtype).tiny).sqrt()
    return logits.softmax(-1)


@torch.no_grad()
def _chosen(compared: Tensor, options: RouterOptions, selection_bias: Tensor | None) -> Tensor:
    """(n k), all different in a row."""
    wanted = compared[..., : options.n_scored - options.n_always]
    wanted = wanted if selection_bias is None else wanted + selection_bias.to(compared.dtype)
    experts = _within_groups(wanted, options).topk(options.top_k, -1).indices
    if options.n_always:
        always = torch.arange(wanted.shape[-1], options.n_experts, device=experts.device)
        experts = torch.cat([experts, always.expand(len(experts), -1)], -1)
    return experts


def _within_groups(wanted: Tensor, options: RouterOptions) -> Tensor:
    """``wanted`` (n e) with -inf for the experts of groups that are not among the best."""
    if options.top_k_groups == options.n_groups:
        return wanted
    wanted, free = wanted.split([wanted.shape[-1] - options.n_null, options.n_null], -1)
    grouped = wanted.unflatten(-1, (options.n_groups, wanted.shape[-1] // options.n_groups))
    best = grouped.amax(-1) if options.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
    kept = best.topk(options.top_k_groups, -1).indices
    left_out = torch.ones_like(best, dtype=torch.bool).scatter(-1, kept, False)
    masked = grouped.masked_fill(left_out[..., None], float("-inf")).flatten(-2)
    return torch.cat([masked, free], -1)
