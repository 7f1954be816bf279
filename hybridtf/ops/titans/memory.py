"""The memory of ``titans``: a linear map, or layers with gelu between them, without biases; and the gradient of its loss.

Axes: s memories, l rows (tokens), k width of keys, v of values, n numbers of a memory: its matrices (in out), one after the
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Layers: TypeAlias = list[Tensor]


def layer_shapes(k: int, v: int, depth: int, d_hidden: int) -> list[tuple[int, int]]:
    """Rows and columns of each layer."""
    return list(pairwise([k, *[d_hidden] * (depth - 1), v]))


def split(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> Layers:
    """The matrices (... in out) of ``flat`` (... n)."""
    parts = flat.split([rows * columns for rows, columns in shapes], -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def join(layers: Layers) -> Tensor:
    """The other way."""
    return torch.cat([layer.flatten(-2) for layer in layers], -1)


def read(layers: Layers, x: Tensor) -> Tensor:
    """x (s l k) to (s l v)."""
    for layer in layers[:-1]:
        x = F.gelu(torch.bmm(x, layer))
    return torch.bmm(x, layers[-1])


def gradient(layers: Layers, k: Tensor, v: Tensor) -> tuple[Layers, Layers]:
    """The gradient of each row's |memory(k) - v|^2 in layer i: ``x_i^T d_i``, of the rows x that the layer is given (s l in)
    and d (s l out), the gradient in what it makes of them. Differentiable."""
    inputs, made = [k], []
    for layer in layers[:-1]:
        made.append(torch.bmm(inputs[-1], layer))
        inputs.append(F.gelu(made[-1]))
    deltas = [torch.baddbmm(v, inputs[-1], layers[-1], beta=-2, alpha=2)]
    for layer, z in zip(reversed(layers[1:]), reversed(made), strict=True):
        deltas.append(torch.ops.aten.gelu_backward(torch.bmm(deltas[-1], layer.mT), z))
    return inputs, deltas[::-1]
