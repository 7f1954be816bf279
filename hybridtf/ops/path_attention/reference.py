"""The definition of PaTH attention: each query walks back over the keys and is reflected at each."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.ops.attention.bias import decay_of
from hybridtf.ops.attention.mask import AttentionMask, accumulate_dtype, check_inputs, whole
from hybridtf.ops.autocast import no_autocast


def path_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, mask: AttentionMask, *, scale: float | None = None
) -> Tensor:
    """Softmax attention whose position is a product of data-dependent reflections between key and query (Yang et al. 2025,
    arXiv 2505.16381).

        score_ij = scale q_i^T H_i H_{i-1} ... H_{j+1} k_j + (c_i - c_j)        H_l = I - beta_l w_l w_l^T

    ``q`` (b t h k), ``k``, ``w`` (b s g k), ``v`` (b s g v), ``beta`` (b s g), ``h`` a multiple of ``g``; every token has a
    key, and the keys of a document lie in the order of their positions. The product runs over the tokens of the query's
    document. c: ``q_decay`` and ``k_decay`` of ``mask``, where it has them. Returns (b t h v) in q's dtype; the arithmetic is
    float32, or float64 for float64 inputs. ``scale`` None is ``k ** -0.5``. A query that sees nothing gives zero. Raises
    :class:`ConfigError` for shapes that do not fit, and a mask that is not causal, or has more than documents, positions and
    decay.
    """
    check_path(q, k, v, w, beta, mask)
    dtype, repeats = accumulate_dtype(q.dtype), q.shape[2] // k.shape[2]
    with no_autocast(q.device):
        keys, values, axes, sizes = (x.to(dtype).repeat_interleave(repeats, 2) for x in (k, v, w, beta))
        seen = whole(q, k).visible(mask)
        assert seen is not None  # a causal mask
        walker = q.to(dtype) * (q.shape[3] ** -0.5 if scale is None else scale)
        columns = []
        for j in reversed(range(k.shape[1])):
            columns.append((walker * keys[:, None, j]).sum(-1))  # [b, t, h]
            along = (walker * axes[:, None, j]).sum(-1) * sizes[:, None, j]
            turned = walker - along[..., None] * axes[:, None, j]
            walker = torch.where(seen[:, :, None, None, j], turned, walker)
        scores = torch.stack(columns[::-1], dim=-1) if columns else walker.new_zeros(*walker.shape[:3], 0)
        return attended(scores.transpose(1, 2), values, seen, decay_of(mask, whole(q, k), dtype)).to(q.dtype)


def attended(scores: Tensor, values: Tensor, seen: Tensor, decay: Tensor | None) -> Tensor:
    """(b t h v) by the softmax of scores (b h t s) over the keys that are seen (b or 1, t, s); ``values`` (b s h v)."""
    scores = scores if decay is None else scores + decay
    alone = ~seen.any(-1, keepdim=True)[:, None]
    # A row that sees nothing is shown all keys, which is finite, and its weights are zeroed.
    weights = scores.masked_fill(~seen[:, None] & ~alone, -torch.inf).softmax(-1).masked_fill(alone, 0.0)
    return torch.einsum("bhts,bshv->bthv", weights, values)


def check_path(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, mask: AttentionMask) -> None:
    """Raises :class:`ConfigError` where a call does not fit together."""
    check_inputs(q, k, v, mask)
    if w.shape != k.shape or beta.shape != k.shape[:3]:
        shapes = f"{tuple(w.shape)} and {tuple(beta.shape)}"
        raise ConfigError(f"path_attention: w is as k {tuple(k.shape)}, beta {tuple(k.shape[:3])}; got {shapes}")
    if not mask.causal:
        raise ConfigError("path_attention: the path leads from the query backwards: the mask must be causal")
    more = {
        "window": mask.window, "prefix": mask.prefix_len, "softcap": mask.softcap, "slopes": mask.slopes, "sinks": mask.sinks,
        "relative": mask.rel_q,
    }
    refused = next((name for name, value in more.items() if value is not None), None)
    if refused is not None:
        raise ConfigError(f"path_attention: the mask may tell documents, positions and decay; it has no {refused}")
