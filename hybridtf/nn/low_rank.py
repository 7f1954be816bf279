"""Low-rank additions to a projection (LoRA: https://arxiv.org/abs/2106.09685).

    y = W x + scale B A x     A (rank in), B (out rank), B starting at 0
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, ConfigTable, ParamSpec, ProjectionPaths, init, known_names


class LowRank(nn.Module):
    """x (... in) to scale B A x (... out). ``up`` starts at 0: at first an adapter changes nothing."""

    def __init__(self, n_in: int, n_out: int, rank: int, ctx: BuildContext, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.down = nn.Linear(n_in, rank, bias=False, **ctx.factory)
        self.up = nn.Linear(rank, n_out, bias=False, **ctx.factory)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"up.weight": ParamSpec("matrix", init.constant(0.0))}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.down(x))
        return y if self.scale == 1.0 else y * self.scale


class Adapted(nn.Module):
    """A projection with an adapter beside it. No ``nn.Linear``, so that ``raw_weight`` sends its users to ``forward``."""

    def __init__(self, base: nn.Module, adapter: nn.Module) -> None:
        super().__init__()
        self.base, self.adapter = base, adapter

    @property
    def weight(self) -> Tensor:
        """The base's, as adapter libraries have it: its dtype and device say where the projection lives."""
        weight: Tensor = self.base.weight  # type: ignore[assignment]
        return weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.adapter(x)
        return y


class LoraLinear(nn.Linear):
    """A linear layer with an addition of its own: the names of its parameters stay, and ``raw_weight`` refuses it."""

    def __init__(self, base: nn.Linear, low_rank: LowRank) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.low_rank = low_rank

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) + self.low_rank(x)
        return y

    def merged(self) -> nn.Linear:
        """A plain layer with the addition in its weight; the bias is shared."""
        plain = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        with torch.no_grad():
            added = self.low_rank.scale * (self.low_rank.up.weight.double() @ self.low_rank.down.weight.double())
            plain.weight = nn.Parameter((self.weight.double() + added).to(self.weight.dtype))
        plain.bias = self.bias
        return plain


class LoraOptions(ConfigTable):
    """Which projections take an addition, and of what size."""

    rank: int = Field(default=8, gt=0)
    alpha: float = Field(default=16.0, gt=0)
    """The additions are multiplied by alpha / rank."""
    on: ProjectionPaths
    """Paths of projections inside the component: ``q_proj``, ``v_proj``."""
    freeze: bool = True
    """Only the additions learn."""

    def apply_to(self, module: nn.Module, ctx: BuildContext) -> None:
        """Put the additions in. Raises :class:`ConfigError` for a path that is no projection of the module."""
        linears = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
        for path in self.on:
            if path not in linears:
                raise ctx.error(f"no projection named {path!r} in it. {known_names(path, linears)}")
        if self.freeze:
            module.requires_grad_(False)
        for path in self.on:
            base = linears[path]
            adapter = LowRank(base.in_features, base.out_features, self.rank, ctx, self.alpha / self.rank)
            module.set_submodule(path, LoraLinear(base, adapter))


def merge_low_rank(module: nn.Module) -> None:
    """Put a plain layer in the place of every :class:`LoraLinear` inside ``module``."""
    for path, part in list(module.named_modules()):
        if isinstance(part, LoraLinear):
            module.set_submodule(path, part.merged())
