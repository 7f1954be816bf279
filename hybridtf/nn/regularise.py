"""Drop-path: whole residual branches dropped at random (https://arxiv.org/abs/1603.09382)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """In training, zeroes the branch of each row with probability ``p`` and scales the others by 1 / (1 - p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) >= self.p
        return x * keep.to(x.dtype) / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"
