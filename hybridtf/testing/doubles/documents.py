"""Which tokens are real and which document each belongs to.

Axes: b batch, t time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core import (
    Segments,
)


def no_length(batch_size: int, like: Tensor) -> Tensor:
    return torch.zeros(batch_size, dtype=torch.int64, device=like.device)


def documents(x: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
    """(b t) real tokens, and (b t) the document of each token: 0 is the incoming state's."""
    if segments is None:
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        return real, torch.zeros_like(real, dtype=torch.int64)
    return segments.real, segments.starts.to(torch.int64).cumsum(1)
