"""The definition of talking-heads attention: dense, obvious, differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.ops.attention.mask import AttentionMask, accumulate_dtype, check_inputs, whole
from hybridtf.ops.attention.sdpa import refusal
from hybridtf.ops.autocast import no_autocast


def talking_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, score_mix: Tensor | None, weight_mix: Tensor | None, *,
    scale: float | None = None,
) -> Tensor:
    """Attention over the keys that ``mask`` shows, heads mixed on both sides of the softmax (Shazeer et al. 2020, arXiv
    2003.02436).

    ``q`` (b t h k), ``k`` (b s g k), ``v`` (b s g v) as for the op ``attention``. ``score_mix`` (h h): the scores of head j
    become sum_i score_mix[i, j] scores_i; ``weight_mix`` (h h): its weights sum_i weight_mix[i, j] weights_i; None: unmixed.
    Returns (b t h v) in q's dtype; the arithmetic is float32, or float64 for float64 inputs. ``scale`` None is ``k ** -0.5``.
    A query that sees nothing gives zero. Raises :class:`ConfigError` for shapes that do not fit, and a mask with a soft cap,
    slopes or sinks.
    """
    check_talking(q, k, v, mask, score_mix, weight_mix)
    dtype, repeats = accumulate_dtype(q.dtype), q.shape[2] // k.shape[2]
    with no_autocast(q.device):
        keys, values = (x.to(dtype).repeat_interleave(repeats, 2) for x in (k, v))
        scores = torch.einsum("bthk,bshk->bhts", q.to(dtype), keys) * (q.shape[3] ** -0.5 if scale is None else scale)
        if score_mix is not None:
            scores = torch.einsum("bits,ij->bjts", scores, score_mix.to(dtype))
        seen = whole(q, k).visible(mask)
        shown = torch.ones_like(scores, dtype=torch.bool) if seen is None else seen[:, None].expand_as(scores)
        alone = ~shown.any(-1, keepdim=True)
        weights = scores.masked_fill(~shown, -torch.inf).masked_fill(alone, 0.0).softmax(-1).masked_fill(alone, 0.0)
        if weight_mix is not None:
            weights = torch.einsum("bits,ij->bjts", weights, weight_mix.to(dtype))
        return torch.einsum("bhts,bshv->bthv", weights, values).to(q.dtype)


def check_talking(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, score_mix: Tensor | None, weight_mix: Tensor | None
) -> None:
    """Raises :class:`ConfigError` where a call does not fit together."""
    check_inputs(q, k, v, mask)
    refused = refusal(mask)
    if refused is not None:
        raise ConfigError(f"talking_attention: heads that mix their scores have no {refused}")
    h = q.shape[2]
    for name, mix in (("score_mix", score_mix), ("weight_mix", weight_mix)):
        if mix is not None and mix.shape != (h, h):
            raise ConfigError(f"talking_attention: {name} must have shape {(h, h)}; got {tuple(mix.shape)}")
