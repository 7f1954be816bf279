"""What torch's FLOP counter is told of loops over time that run inside one operator: ours, oneDNN's and cuDNN's.

Axes: b batch, t time, d input width, h width of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula


def forward_flops(
    x: Sequence[int], weight_hh: Sequence[int], weight_ih: Sequence[int] | None, *rest: Any, **more: Any
) -> int:
    """Of the two products of each token, two for a multiplication and an addition. Arguments as shapes."""
    b, t, d = x
    rows, h = weight_hh
    return 2 * b * t * rows * (h + (rows if weight_ih is None else d))


def backward_flops(
    x: Sequence[int], weight_hh: Sequence[int], weight_ih: Sequence[int] | None, *rest: Any, **more: Any
) -> int:
    """The forward again, and twice that for the gradients of both factors."""
    return 3 * forward_flops(x, weight_hh, weight_ih)


def _onednn(x: Sequence[int], w_ih: Sequence[int], w_hh: Sequence[int], *rest: Any, **more: Any) -> int:
    return 2 * x[0] * x[1] * w_hh[0] * (w_ih[1] + w_hh[1])


def _onednn_backward(*shapes: Any, **more: Any) -> int:
    return 2 * _onednn(*shapes[:3])


def _cudnn(x: Sequence[int], weights: Sequence[Sequence[int]], *rest: Any, **more: Any) -> int:
    return _onednn(x, *weights[:2])


def _cudnn_backward(x: Sequence[int], weights: Sequence[Sequence[int]], *rest: Any, **more: Any) -> int:
    return 2 * _onednn(x, *weights[:2])


for _name, _formula in (
    ("mkldnn_rnn_layer", _onednn), ("mkldnn_rnn_layer_backward", _onednn_backward),
    ("_cudnn_rnn", _cudnn), ("_cudnn_rnn_backward", _cudnn_backward),
):
    # torch has no formula for them (2.13); should it get one, that one counts.
    if getattr(torch.ops.aten, _name) not in flop_registry:
        register_flop_formula(getattr(torch.ops.aten, _name))(_formula)
