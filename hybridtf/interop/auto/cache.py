"""``HybridTFCache``: the state of a model of ours where transformers wants a cache.

Axes: b batch, t time. A column is a place of the batch, padding included, as transformers counts; a state counts real tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from hybridtf.core import (
    ConfigError,
    Growing,
    Segments,
    State,
    StateError,
    StateLeaf,
    crop,
    declare,
    leaves,
    map_state,
    reorder,
    with_room,
)
from hybridtf.models import LanguageModel
from hybridtf.models.generation.model import refusal, require
from hybridtf.models.language_model import LanguageModelOutput


@dataclass(frozen=True, eq=False)
class _Point:
    """What a crop over several calls needs: copies of all leaves that cannot simply forget, as they were at a column."""

    columns: int
    kept: list[StateLeaf]


class HybridTFCache(Cache):  # type: ignore[misc]
    """One state for the whole stack, and which columns so far were real.

    While it records (:meth:`activate_past_recording`), every call leaves behind what :meth:`crop` needs to go back.
    ``room``: columns for which memory is made at once; more of it is made where it is needed.
    """

    def __init__(self, model: LanguageModel | None = None, *, room: int = 0) -> None:
        super().__init__(layers=[])
        self.state: State | None = None
        self.real: Tensor | None = None
        """(b columns) bool."""
        self.scores: Tensor | None = None
        """(b vocab) after each row's last real token, where the last call gave them."""
        self.room = room
        self.record = False
        self.uncroppable = None if model is None else refusal(model, "crop")
        """The part of the model that cannot go back, with its reason."""
        self._points: list[_Point] = []

    # -- the model's side ------------------------------------------------------------------------------------------------

    def advance(
        self, model: LanguageModel, token_ids: Tensor, real: Tensor, segments: Segments | None, *, keep: int, logits: Any
    ) -> LanguageModelOutput:
        """Call the model on the columns that follow. ``keep``: columns that a crop into this very call may take."""
        if self.state is None:
            require(model, "cut", "a cache")
            self.uncroppable = refusal(model, "crop")
        columns = self.get_seq_length() + token_ids.shape[1]
        if self.state is None:
            self.room = max(self.room, columns)
            self.state = model.init_state(token_ids.shape[0], max_len=self.room)
            # Positions that depend on a declared length take the model's own: memory has no say in them.
            declare(self.state, None)
        elif columns > self.room:
            self.room = max(columns, 2 * self.room)
            self.state = with_room(self.state, self.room)
        if self.record:
            self._check_croppable()
            kept = [leaf.snapshot() for leaf in leaves(self.state) if not isinstance(leaf, Growing)]
            self._points.append(_Point(self.get_seq_length(), kept))
        keep = keep if self.record else 0
        out: LanguageModelOutput = model(token_ids, segments=segments, state=self.state, keep=keep, logits=logits)
        self.state = out.state
        self.real = real if self.real is None else torch.cat([self.real, real], dim=1)
        return out

    # -- transformers' side ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return f"HybridTFCache(rows={self.batch_size}, columns={self.get_seq_length()})"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far."""
        return 0 if self.real is None else self.real.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit."""
        return -1

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first call."""
        return -1 if self.real is None else self.real.shape[0]

    @property
    def is_initialized(self) -> bool:
        """Whether a call was made."""
        return self.state is not None

    @property
    def is_compileable(self) -> bool:
        """Never: its tensors move."""
        return False

    @property
    def is_linear(self) -> list[bool]:
        """One entry, False: prompts are to be cut to what was not seen yet."""
        return [False]

    @property
    def is_sliding(self) -> list[bool]:
        """One entry, False."""
        return [False]

    @property
    def is_croppable(self) -> bool:
        """Whether every part of the model can go back."""
        return self.uncroppable is None

    def activate_past_recording(self) -> None:
        """From here on every call can be taken back. Raises :class:`ConfigError` for a model that cannot go back."""
        self._check_croppable()
        self.record = True

    def _check_croppable(self) -> None:
        if self.uncroppable is not None:
            raise ConfigError(f"assisted decoding is not possible with this model: {self.uncroppable}")

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` columns (below 0, as in transformers), and forget what was recorded."""
        if tokens_to_remove > 0:
            raise StateError(f"crop takes the number of columns to take back as a number below 0; got {tokens_to_remove}")
        if self.state is not None and self.real is not None and tokens_to_remove:
            target = self.real.shape[1] + tokens_to_remove
            if target < 0:
                raise StateError(f"cannot take back {-tokens_to_remove} columns; there are {self.real.shape[1]}")
            self.state = self._before(target, self.state, self.real)
            self.real, self.scores = self.real[:, :target], None
        self._points.clear()

    def _before(self, target: int, state: State, real: Tensor) -> State:
        """The state after ``target`` columns: the newest leaves that saw them all, cropped."""
        count = real[:, target:].sum(1)
        point = next((point for point in self._points if point.columns >= target), None)
        if point is None:
            return crop(state, count)
        more = real[:, target : point.columns].sum(1)
        kept = iter(crop(point.kept, more))
        return map_state(lambda leaf: leaf.crop(count) if isinstance(leaf, Growing) else next(kept), state)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows ``beam_idx``, in that order."""
        if self.state is None or self.real is None:
            return
        self.state, self.real = reorder(self.state, beam_idx), self.real[beam_idx.to(self.real.device)]
        self.scores = None if self.scores is None else self.scores[beam_idx.to(self.scores.device)]
        self._points.clear()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Rows ``indices``, in that order."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, side by side."""
        if self.real is not None:
            rows = torch.arange(self.batch_size, device=self.real.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        """As before the first call."""
        self.state = self.real = self.scores = None
        self._points.clear()

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: layers of hybridtf carry their own states."""
        raise StateError("a HybridTFCache holds the state of a hybridtf model, and no keys and values of other layers")
