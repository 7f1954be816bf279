"""What losses are counted over.

Axes: b rows, t time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core import Segments


def n_real(shape: tuple[int, int], segments: Segments | None, device: torch.device) -> Tensor:
    """The count of every loss: real tokens of the call, int64."""
    if segments is not None:
        return segments.real.sum()
    return torch.full((), shape[0] * shape[1], dtype=torch.int64, device=device)
