"""``grouped_linear`` one group after the other: the meaning of the op.

Axes: s rows, e groups, i inputs, o outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.grouped_linear.shapes import check


def grouped_linear_reference(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """y[r] = x[r] @ weight[g] + bias[g] for every row r of group g, with x (s i), weight (e i o), bias (e o), y (s o).

    The rows of a group lie side by side: those of group g are ``ends[g - 1]`` up to ``ends[g]``, where ``ends`` (e) does
    not decrease. Rows from ``ends[-1]`` on belong to no group: they are not read, and are zero in y. All is computed in
    the dtype of x. Raises :class:`ConfigError` for shapes that do not fit.
    """
    check(x, weight, ends, bias)
    parts, start = [], 0
    with no_autocast(x.device):
        for group, end in enumerate(ends.tolist()):
            part = x[start:end] @ weight[group].to(x.dtype)
            parts.append(part if bias is None else part + bias[group].to(x.dtype))
            start = end
        rest = x.new_zeros(x.shape[0] - start, weight.shape[2])
        return torch.cat([*parts, rest])
