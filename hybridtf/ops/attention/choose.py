"""The ``torch`` kernel: which form of attention a call takes, by facts that are known without reading any tensor."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from hybridtf.ops.attention.banded import attention_banded, is_banded
from hybridtf.ops.attention.blockwise import attention_blockwise
from hybridtf.ops.attention.few import attention_few
from hybridtf.ops.attention.mask import AttentionMask, check_inputs
from hybridtf.ops.attention.sdpa import (
    FEW,
    checked_sdpa,
    is_linear,
    is_lower_right,
    refusal,
    simple_mask,
    unbounded,
)

# Up to here (b t s pairs) a written-out mask beats a walk over blocks: measured on a CPU, guessed elsewhere.
_MASK_LIMIT_CPU = 2**19
_MASK_LIMIT_GPU = 2**24
# The same for scores (b h t s), where torch has no backend but the one that writes them out.
_SCORE_LIMIT_CPU = 2**19
_SCORE_LIMIT_GPU = 2**24

_FORMS = {"sdpa": checked_sdpa, "few": attention_few, "banded": attention_banded, "blockwise": attention_blockwise}


def attention_torch(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float | None = None, dropout_p: float = 0.0
) -> Tensor:
    """The same function as :func:`attention_reference` in plain torch: fast, in memory linear in length, with every
    mask rule and gradient. Shapes and errors as there."""
    check_inputs(q, k, v, mask, dropout_p)
    return _FORMS[chosen_form(q, k, v, mask, dropout_p)](q, k, v, mask, scale=scale, dropout_p=dropout_p)


def chosen_form(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout_p: float = 0.0
) -> Literal["sdpa", "few", "banded", "blockwise"]:
    """The form that :func:`attention_torch` takes for this call."""
    t, s, on_cpu = q.shape[1], k.shape[1], q.device.type == "cpu"
    if q.shape[0] == 0 or t == 0 or s == 0:
        return "blockwise"
    if refusal(mask) is not None:
        return "few" if t <= FEW else "blockwise"
    pairs = q.shape[0] * t * s
    few = t <= FEW
    small = few or pairs * q.shape[2] <= (_SCORE_LIMIT_CPU if on_cpu else _SCORE_LIMIT_GPU)
    if simple_mask(q, k, mask) is not None or is_lower_right(q, k, mask):
        return "sdpa" if small or is_linear(q, k, v, masked=False, dropout_p=dropout_p) else "blockwise"
    if is_banded(mask, t, s) and not unbounded(mask, s):
        # On a GPU the fold repeats grouped heads, see banded.py: there the keys count as ungrouped.
        keys = k if on_cpu else q
        return "banded" if few or is_linear(q, keys, v, masked=True, dropout_p=dropout_p) else "blockwise"
    short = pairs <= (_MASK_LIMIT_CPU if on_cpu else _MASK_LIMIT_GPU)
    linear = small or is_linear(q, k, v, masked=True, dropout_p=dropout_p)
    return "sdpa" if few or (short and linear) else "blockwise"
