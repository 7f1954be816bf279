"""What a call of ``gather_attention`` must look like, and where its choices lie.

Axes: b batch, t queries, s slots of keys, h query heads, g key heads, c choosers, n choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.block_sparse_attention import Places, hold


def check_call(q: Tensor, k: Tensor, v: Tensor, index: Tensor) -> None:
    """Raises :class:`ConfigError` where the tensors of a call do not fit together."""
    shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise ConfigError(f"gather_attention: q, k and v are (b t h k), (b s g k), (b s g v); got {shapes}")
    (b, t, h, width), g = q.shape, k.shape[2]
    if k.shape[0] != b or k.shape[3] != width or g == 0 or h % g:
        raise ConfigError(f"gather_attention: q (b t h k), k (b s g k), v (b s g v) do not fit; got {shapes}")
    if index.ndim != 4 or index.shape[:2] != (b, t) or index.shape[2] not in (1, g) or index.dtype != torch.int64:
        raise ConfigError(
            f"gather_attention: index must be int64 (b t c n) with c = 1 or {g} key heads; "
            f"got {index.dtype} {tuple(index.shape)}"
        )


def placed(
    q: Tensor, k: Tensor, v: Tensor, places: Places | None, segments: Segments | None
) -> tuple[Tensor, Tensor, Tensor, Places]:
    """Queries, keys and values, and where the documents lie. Without ``places`` the keys are the call's own, in documents by
    ``segments``: pads are zero then, and the keys moved."""
    if places is not None:
        if segments is not None:
            raise ConfigError("gather_attention: give places or segments: places say where documents lie")
        return q, k, v, places
    if segments is not None:
        q, k, v = (x.masked_fill(~segments.real[..., None, None], 0) for x in (q, k, v))
    held = hold(None, {"k": k, "v": v}, segments)
    return q, held.data["k"], held.data["v"], held.places


def outside_of(outside: Tensor | None, q: Tensor, segments: Segments | None) -> Tensor | None:
    """``outside`` (b t h) of a call, 0 at the pads of ``segments``. Raises :class:`ConfigError` for another shape."""
    if outside is None:
        return None
    if outside.shape != q.shape[:3]:
        raise ConfigError(f"gather_attention: outside must be (b t h) = {tuple(q.shape[:3])}; got {tuple(outside.shape)}")
    return outside if segments is None else outside.masked_fill(~segments.real[..., None], 0)


def slots_of(index: Tensor, places: Places, s: int) -> Tensor:
    """(b t ...) the slots of choices ``index`` (b t ...), by position in the document; -1 for none, and for what the query does
    not see: later tokens, and those no longer held."""
    p, first, start, count = (
        x.view(*x.shape, *[1] * (index.ndim - 2)) for x in (places.position, places.first, places.start, places.count)
    )
    seen = (index >= start) & (index <= p) & (index < start + count)
    return torch.where(seen, torch.remainder(first + index - start, max(s, 1)), -1)
