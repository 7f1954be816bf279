"""Experts by token id (Hash layers, https://arxiv.org/abs/2106.04426): a table in place of a choice by score.

Axes: b rows, t time, n = b t tokens, e experts, k experts a token.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from hybridtf.core import BuildContext, ConfigError, Edges, ParamSpec

TOKENS = "token_ids"
"""The stem's edge that is looked up."""


class TokenTable(nn.Module):
    """``experts`` (vocab k) int64: those that serve a token of each id, drawn from the seed, saved, and never trained."""

    def __init__(self, n_experts: int, top_k: int, ctx: BuildContext) -> None:
        super().__init__()
        if ctx.vocab_size is None:
            raise ctx.error("experts are chosen by token id, and this model has none")
        self.n_experts, self.where = n_experts, ctx.where
        drawn = torch.empty(ctx.vocab_size, top_k, dtype=torch.int64, device=ctx.device)
        self.experts = nn.Parameter(drawn, requires_grad=False)

    def param_specs(self) -> dict[str, ParamSpec]:
        def start(tensor: Tensor, generator: Generator) -> None:
            for part in tensor.split(4096):  # of a large vocabulary and many experts at once it would take gigabytes
                order = torch.rand(len(part), self.n_experts, generator=generator)
                part.copy_(order.topk(part.shape[1], -1).indices)

        return {"experts": ParamSpec("state", start)}

    def steering(self) -> tuple[nn.Parameter, ...]:
        """What no gradient trains."""
        return (self.experts,)

    def forward(self, edges: Edges | None) -> Tensor:
        """(n k), of the edge ``token_ids`` (b t)."""
        if edges is None or TOKENS not in edges:
            raise ConfigError(f"{self.where}: experts are chosen by token id: edges={{{TOKENS!r}: ...}} is needed")
        found: Tensor = self.experts[edges[TOKENS].flatten()]
        return found
