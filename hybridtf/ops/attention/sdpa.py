"""Attention through torch's ``scaled_dot_product_attention``, where that is exact.

Axes: b batch, t queries, s keys, h query heads, g key heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from hybridtf.core.errors import KernelError
from hybridtf.ops.attention.mask import AttentionMask, check_inputs, whole
from hybridtf.ops.autocast import no_autocast

FEW = 8
"""Up to here a call counts as few queries over many keys (decode, verification of drafts): linear in length however it
is computed."""


def attention_sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float | None = None, dropout_p: float = 0.0
) -> Tensor:
    """The same function as :func:`attention_reference` for masks without softcap, slopes, sinks, decay or
    relative bias (else :class:`KernelError`), by whatever backend torch chooses.

    Masks that torch has no word for are written out, (b t s) booleans: meant for few queries or short rows.
    """
    check_inputs(q, k, v, mask, dropout_p)
    refused = refusal(mask)
    if refused is not None:
        raise KernelError(f"attention: scaled_dot_product_attention has no {refused}")
    return checked_sdpa(q, k, v, mask, scale=scale, dropout_p=dropout_p)


def checked_sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float | None = None, dropout_p: float = 0.0
) -> Tensor:
    """:func:`attention_sdpa` of a call that is known to be one for it."""
    options: dict[str, Any] = {"scale": q.shape[3] ** -0.5 if scale is None else scale, "dropout_p": dropout_p}
    simple = simple_mask(q, k, mask)
    if simple is None:
        return _written_out(q, k, v, mask, options)
    return call_sdpa(q, k, v, None, **options, **simple)


def refusal(mask: AttentionMask) -> str | None:
    """The feature that keeps this mask from ``scaled_dot_product_attention``, or None."""
    features = {
        "softcap": mask.softcap, "slopes": mask.slopes, "sinks": mask.sinks, "decay": mask.q_decay, "relative": mask.rel_q,
    }
    return next((name for name, value in features.items() if value is not None), None)


def unbounded(mask: AttentionMask, s: int) -> bool:
    """No ids, default positions, and no window that hides anything of ``s`` keys."""
    return mask.q_ids is None and mask.q_pos is None and (mask.window is None or mask.window >= s)


def simple_mask(q: Tensor, k: Tensor, mask: AttentionMask) -> dict[str, bool] | None:
    """The mask in torch's own words, or None: is_causal there counts from the first key, so it needs as many queries as
    keys, and one query at the end sees all."""
    t, s = q.shape[1], k.shape[1]
    if not unbounded(mask, s) or (mask.window is not None and t > s):
        return None
    if not mask.causal or (t == 1 and s > 0):
        return {"is_causal": False}
    return {"is_causal": True} if t == s and mask.prefix_len is None else None


def is_lower_right(q: Tensor, k: Tensor, mask: AttentionMask) -> bool:
    """Whether torch has a backend that aligns this causal mask with the last key (on the CPU it would write it out)."""
    s = k.shape[1]
    return q.device.type == "cuda" and mask.causal and q.shape[1] < s and mask.prefix_len is None and unbounded(mask, s)


def call_sdpa(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, *, scale: float, dropout_p: float,
    is_causal: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` on (b t h k), (b s g k), (b s g v); one dtype in and out, autocast or not."""
    wide, narrow = q.shape[3], v.shape[3]
    if q.device.type == "cpu" and wide != narrow:
        # The only backend of the CPU that does not write out t x s scores wants equal widths: zeros change nothing.
        wide = max(wide, narrow)
        q, k, v = (torch.nn.functional.pad(x, (0, wide - x.shape[3])) for x in (q, k, v))
    heads = q.transpose(1, 2)
    keys, values = ((x if x.dtype == q.dtype else x.to(q.dtype)).transpose(1, 2) for x in (k, v))
    folded = q.shape[1] <= FEW and q.shape[2] != k.shape[2] and not is_causal
    if folded:
        # Heads that share keys become queries of one head, so that few queries read each key once, not h / g times.
        repeats = q.shape[2] // k.shape[2]
        heads = heads.reshape(q.shape[0], k.shape[2], repeats * q.shape[1], wide)
        if attn_mask is not None:
            attn_mask = attn_mask.repeat(1, 1, repeats, 1)
    # A branch and not a comparison: with dynamic shapes a compiler would hand over a symbol where torch wants a bool.
    grouped = True if heads.shape[1] != keys.shape[1] else False  # noqa: SIM210
    with no_autocast(q.device):
        out = torch.nn.functional.scaled_dot_product_attention(
            heads, keys, values, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=grouped,
        )
    if folded:
        out = out.reshape(q.shape[0], q.shape[2], q.shape[1], out.shape[3])
    out = out.transpose(1, 2)
    return out if out.shape[3] == narrow else out[..., :narrow]


def _written_out(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, options: dict[str, Any]) -> Tensor:
    t, s = q.shape[1], k.shape[1]
    if t > FEW and is_lower_right(q, k, mask):
        return call_sdpa(q, k, v, causal_lower_right(t, s), **options)
    seen = whole(q, k).visible(mask)
    if seen is None:
        return call_sdpa(q, k, v, None, **options)
    if mask.q_ids is None and mask.q_pos is None and t <= s:
        # Every query sees itself.
        return call_sdpa(q, k, v, seen[:, None], **options)
    return _with_empty_rows(q, k, v, seen, options)


def _with_empty_rows(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, options: dict[str, Any]) -> Tensor:
    """Backends disagree on rows that see nothing. Such a row gets a zero query that sees every key, which is finite in
    every backend, and its output is zeroed, which also stops its gradient."""
    some = seen.any(-1, keepdim=True)
    out = call_sdpa(torch.where(some[..., None], q, 0), k, v, (seen | ~some)[:, None], **options)
    return torch.where(some[..., None], out, 0)


def is_linear(q: Tensor, k: Tensor, v: Tensor, *, masked: bool, dropout_p: float) -> bool:
    """Whether torch has a backend for this call whose memory is linear in length; else it writes out all scores."""
    if q.device.type == "cpu":
        return dropout_p == 0
    if q.device.type != "cuda":
        return False
    half = q.dtype in (torch.float16, torch.bfloat16)
    flash = half and not masked and q.shape[3] == v.shape[3] <= 256
    efficient = q.dtype != torch.float64 and q.shape[2] == k.shape[2]
    return flash or efficient
