"""The definition of stick-breaking attention: each query breaks its stick key by key."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.ops.attention.mask import AttentionMask, Tile, accumulate_dtype, check_inputs, whole
from hybridtf.ops.attention.sdpa import refusal
from hybridtf.ops.autocast import no_autocast


def stick_breaking_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float | None = None, attend_current: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention by a stick of length 1 for each query, of which the nearest key that it sees breaks off its share first (Tan et
    al. 2024, arXiv 2410.17980).

        z_ij = scale q_i . k_j        A_ij = sigmoid(z_ij) prod_{j < l < i} (1 - sigmoid(z_il))        y_i = sum_j A_ij v_j

    ``q`` (b t h k), ``k`` (b s g k), ``v`` (b s g v) as for the op ``attention``; the keys of a document lie in the order of
    their positions. A query does not see its own key, as in the paper, unless ``attend_current``. Returns y (b t h v) in q's
    dtype, and what is left of the sticks (b t h) in float32 at least: 1 where a query sees nothing. ``scale`` None is
    ``k ** -0.5``. Raises :class:`ConfigError` for shapes that do not fit, and a mask that is not causal, has a prefix, or adds
    to scores.
    """
    check_stick(q, k, v, mask)
    dtype, repeats = accumulate_dtype(q.dtype), q.shape[2] // k.shape[2]
    with no_autocast(q.device):
        keys, values = (x.to(dtype).repeat_interleave(repeats, 2) for x in (k, v))
        scores = torch.einsum("bthk,bshk->bths", q.to(dtype), keys) * (q.shape[3] ** -0.5 if scale is None else scale)
        seen = sees(whole(q, k), mask, attend_current)[:, :, None].expand_as(scores)
        shares = torch.where(seen, torch.sigmoid(scores.masked_fill(~seen, 0.0)), 0.0)
        left, y = scores.new_ones(scores.shape[:3]), scores.new_zeros(*scores.shape[:3], v.shape[3])
        for share, value in zip(reversed(shares.unbind(3)), reversed(values.unbind(1)), strict=True):
            y = y + (share * left)[..., None] * value[:, None]
            left = left * (1 - share)
        return y.to(q.dtype), left


def sees(tile: Tile, mask: AttentionMask, attend_current: bool) -> Tensor:
    """(b or 1, queries, keys) bool: the query may break its stick at the key."""
    seen = tile.visible(mask)
    assert seen is not None  # a causal mask
    if attend_current:
        return seen
    rows, cols = tile.positions(mask)
    return seen & (cols < rows)


def check_stick(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> None:
    """Raises :class:`ConfigError` where a call does not fit together."""
    check_inputs(q, k, v, mask)
    refused = refusal(mask)
    if refused is not None:
        raise ConfigError(f"stick_breaking: scores without a softmax have no {refused}")
    if not mask.causal or mask.prefix_len is not None:
        raise ConfigError("stick_breaking: sticks break from the query backwards: the mask must be causal, without a prefix")
