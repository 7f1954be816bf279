"""Causal sliding-window attention as full attention over a folded sequence.

Queries are cut into blocks of at least a window; each block attends, through one call of torch's
``scaled_dot_product_attention``, to its own and the previous block of keys under one small mask that all blocks share.

Axes: b batch, t queries, s keys, i blocks, c tokens of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.errors import KernelError
from hybridtf.ops.attention.mask import AttentionMask, check_inputs
from hybridtf.ops.attention.sdpa import call_sdpa, refusal
from hybridtf.ops.spans import by_device

# Smaller blocks waste less on what the band hides; a GPU wants at least one tile of its own kernels.
_SMALLEST_CPU = 16
_SMALLEST_GPU = 64


def attention_banded(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float | None = None, dropout_p: float = 0.0,
    block: int | None = None,
) -> Tensor:
    """The same function as :func:`attention_reference` for a causal window over one document with default positions and
    ``t <= s`` (Beltagy et al. 2020, arXiv 2004.05150, section 3.1). Cost and memory grow with ``t * block``.

    ``block``: tokens per block, at least the window. Raises :class:`KernelError` for any other mask.
    """
    check_inputs(q, k, v, mask, dropout_p)
    t, s, window = q.shape[1], k.shape[1], mask.window
    if window is None or not is_banded(mask, t, s):
        raise KernelError("attention: the banded form needs a causal window, default positions, no ids, and t <= s")
    size = max(window, by_device(q.device, _SMALLEST_CPU, _SMALLEST_GPU)) if block is None else block
    if size < window:
        raise KernelError(f"attention: a block of {size} tokens is smaller than the window of {window}")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    # Keys that the first query's window does not reach are seen by nobody.
    start = max(s - t - window + 1, 0)
    k, v = k[:, start:], v[:, start:]
    head = _direct(q[:, :size], k, v, t, window, scale, dropout_p)
    if t <= size:
        return head
    return torch.cat([head, _folded(q[:, size:], k, v, size, window, scale, dropout_p)], dim=1)


def is_banded(mask: AttentionMask, t: int, s: int) -> bool:
    """Whether :func:`attention_banded` can run this mask."""
    plain = mask.q_ids is None and mask.q_pos is None and mask.prefix_len is None and refusal(mask) is None
    return plain and mask.causal and mask.window is not None and t <= s


def _band(n_queries: int, n_keys: int, offset: int, window: int, device: torch.device) -> Tensor:
    """(queries, keys) bool for queries at ``offset`` after the first key."""
    ahead = torch.arange(offset, offset + n_queries, device=device)[:, None] - torch.arange(n_keys, device=device)
    return (ahead >= 0) & (ahead < window)


def _direct(q: Tensor, k: Tensor, v: Tensor, t: int, window: int, scale: float, dropout_p: float) -> Tensor:
    """The first block: its keys are few, and may start before, at or after a block's edge."""
    n, offset = q.shape[1], k.shape[1] - t
    k, v = k[:, : offset + n], v[:, : offset + n]
    seen = None if n == 1 else _band(n, offset + n, offset, window, q.device)[None, None]
    return call_sdpa(q, k, v, seen, scale=scale, dropout_p=dropout_p)


def _folded(q: Tensor, k: Tensor, v: Tensor, size: int, window: int, scale: float, dropout_p: float) -> Tensor:
    """All other blocks at once, as a batch of (b i): a whole block of keys lies before each."""
    b, t = q.shape[:2]
    blocks = -(-t // size)
    spare = blocks * size - t
    first = k.shape[1] - t - size
    queries = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, spare)).reshape(b * blocks, size, *q.shape[2:])
    keys, values = _pairs(k[:, first:], size, spare), _pairs(v[:, first:], size, spare)
    if q.device.type == "cuda" and q.shape[2] != k.shape[2]:
        # With a mask, no backend there takes grouped heads in linear memory; the fold has copied the keys anyway.
        keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (keys, values))
    seen = _band(size, 2 * size, size, window, q.device)[None, None]
    out = call_sdpa(queries, keys, values, seen, scale=scale, dropout_p=dropout_p)
    return out.reshape(b, blocks * size, *out.shape[2:])[:, :t]


def _pairs(x: Tensor, size: int, spare: int) -> Tensor:
    """(b, (i + 1) c - spare, g, k) -> (b i, 2 c, g, k): every block after the one before it."""
    n = (x.shape[1] + spare) // size
    blocks = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, spare)).reshape(len(x), n, size, *x.shape[2:])
    return torch.cat([blocks[:, :-1], blocks[:, 1:]], dim=2).flatten(0, 1)
