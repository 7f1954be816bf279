"""What transformers hands to a model, as hybridtf says it: masks as segments, and nothing passed over.

Axes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridtf.core import ConfigError, DataError, Segments

OUTPUTS = ("output_attentions", "output_hidden_states")
"""Results that a model of ours does not give; False asks for nothing."""


def columns(input_ids: Tensor, mask: Tensor | None, seen: Tensor | None) -> tuple[Tensor, Tensor, Segments | None]:
    """Which columns are real, (b all) so far and (b t) in this call, and the segments that say so (None: all of them).

    ``mask``: of all columns, or of those of this call where none came before. ``seen`` (b n): what earlier masks said.
    """
    if input_ids.ndim != 2:
        raise DataError(f"input_ids must be of shape (b, t); got {tuple(input_ids.shape)}")
    b, t = input_ids.shape
    before = torch.ones(b, 0, dtype=torch.bool, device=input_ids.device) if seen is None else seen
    if mask is None:
        real = torch.ones(b, t, dtype=torch.bool, device=input_ids.device)
        return torch.cat([before, real], dim=1), real, None
    if mask.ndim != 2:
        raise ConfigError(f"attention_mask must be (b, columns), 0 for padding; got shape {tuple(mask.shape)}")
    if mask.shape != (b, before.shape[1] + t):
        raise DataError(
            f"attention_mask is of shape {tuple(mask.shape)}; in {b} rows {before.shape[1]} columns came before and {t} are new"
        )
    every = (mask != 0).to(input_ids.device)
    real = every[:, before.shape[1] :]
    if not torch.equal(every[:, : before.shape[1]], before):
        raise DataError("attention_mask says other pads for the columns that the cache has seen than they were read with")
    return every, real, None if bool(real.all()) else Segments.from_mask(real)


def check_positions(position_ids: Tensor | None, real: Tensor, t: int) -> None:
    """Raise :class:`ConfigError` for positions that do not count each row's real tokens, which is what the model does."""
    if position_ids is None:
        return
    meant = (real.long().cumsum(1) - 1)[:, real.shape[1] - t :]
    given = position_ids.to(meant.device)
    fits = given.ndim == 2 and given.shape[1] == t and given.shape[0] in (1, meant.shape[0])
    if not fits or not bool(((given == meant) | ~real[:, real.shape[1] - t :]).all()):
        raise ConfigError(
            "position_ids are not the numbers of the real tokens of each row, which this model counts itself; say padding "
            "with attention_mask, and leave position_ids out"
        )


def refuse_unknown(config: Any, more: Mapping[str, Any], known: Sequence[str] = ()) -> None:
    """Raise :class:`ConfigError` for an option that would be passed over."""
    for name, value in more.items():
        if name not in known and value is not None and not (name in OUTPUTS and value is False):
            raise ConfigError(f"a hybridtf model takes no {name}")
    if getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False):
        raise ConfigError("a hybridtf model gives no hidden states and no attention weights")
