"""Foreign causal models as harnesses call all others: documents of a row told apart, and a cache of theirs as the state.

A model whose ``forward`` names ``segments`` is taken at its word. Any other is behind :class:`Foreign`, for which a document is
a row: packed and padded rows are taken apart, read one document a row with padding after it (which a causal model does not
see), and put together again. An argument that a foreign ``forward`` would swallow by ``**kwargs`` never reaches it.

A model with ``use_cache`` and ``cache`` (``past_key_values`` in older versions), as the causal models of transformers, carries
that cache as its state: how exact a carried call is, is up to it. What such a state will hold at a length is known by
reading alone, so decoding is measured and not planned.

Axes: b batch, t time, v vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from hybridtf.core import ConfigError, Segments
from hybridtf.models import LanguageModelOutput

_CACHES = ("cache", "past_key_values")


def adapted(model: nn.Module) -> nn.Module:
    """``model`` itself where its ``forward`` names ``segments``, else behind :class:`Foreign` or :class:`ForeignWithCache`."""
    options = inspect.signature(model.forward).parameters
    if isinstance(model, Foreign) or "segments" in options:
        return model
    cache = next((name for name in _CACHES if name in options and "use_cache" in options), None)
    return Foreign(model) if cache is None else ForeignWithCache(model, cache)


def has_known_state(model: nn.Module) -> bool:
    """Whether the model has a state whose bytes at a length are known without reading so much."""
    return callable(getattr(model, "init_state", None)) and not isinstance(model, ForeignWithCache)


class Foreign(nn.Module):
    """A causal model that knows one document a row; see the module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(
        self, ids: Tensor, *, segments: Segments | None = None, state: Any = None, logits: str = "all"
    ) -> LanguageModelOutput:
        """Scores (b t v), zero at pads; ``logits="last"``: (b v) of the last column. Raises :class:`ConfigError` for what the
        model cannot honour: a prefix, global tokens, further axes; documents together with a state."""
        if segments is None:
            return self._read(ids, state, logits)
        if state is not None:
            self._need_one_document(segments)
            return self._read(ids, state, logits)
        if segments.prefix_len is not None or segments.global_tokens is not None or segments.axes:
            raise ConfigError(f"{self._name}: a foreign model knows no prefix, global tokens or position axes")
        scores = self._apart(ids, segments.ids)
        return LanguageModelOutput(scores[:, -1] if logits == "last" else scores, None, {})

    @property
    def _name(self) -> str:
        return type(self.model).__name__

    def _need_one_document(self, segments: Segments) -> None:
        if not bool(((segments.ids == segments.ids[:, :1]) & (segments.ids > 0)).all() & segments.continues.all()):
            raise ConfigError(
                f"{self._name}: a foreign cache goes on with one document in each row, without padding; "
                "read each document alone"
            )

    def _apart(self, ids: Tensor, documents: Tensor) -> Tensor:
        """Scores of rows with several documents, each read in a row of its own."""
        real = documents > 0
        rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
        # Real ids do not decrease along a row: in the order of the tokens, those of a document follow each other.
        keys = (rows * (documents.amax() + 1) + documents)[real]
        _, which, counts = torch.unique_consecutive(keys, return_inverse=True, return_counts=True)
        place = torch.arange(len(keys), device=ids.device) - (counts.cumsum(0) - counts)[which]
        alone = ids.new_zeros(len(counts), int(counts.max()) if len(counts) else 0)
        alone[which, place] = ids[real]
        if not len(counts):
            raise ConfigError(f"{self._name}: a batch of padding alone has nothing to read")
        scores = self._read(alone, None, "all").logits
        assert scores is not None  # _scores has refused that
        found = scores[which, place]
        return found.new_zeros(*ids.shape, found.shape[-1]).masked_scatter(real[..., None], found)

    def _read(self, ids: Tensor, state: Any, logits: str) -> LanguageModelOutput:
        if state is not None:
            raise ConfigError(f"{self._name} carries no state")
        out = self.model(ids, **self._options(logits))
        return LanguageModelOutput(self._scores(out, logits), None, {})

    def _options(self, logits: str) -> dict[str, Any]:
        return {"logits_to_keep": 1} if logits == "last" and self._keeps else {}

    def _scores(self, out: Any, logits: str) -> Tensor:
        scores = out if isinstance(out, Tensor) else getattr(out, "logits", None)
        if not isinstance(scores, Tensor):
            raise ConfigError(
                f"{self._name} answered {type(out).__name__}; a measured model answers scores as a tensor, or an object with "
                "logits"
            )
        return scores[:, -1] if logits == "last" else scores


class ForeignWithCache(Foreign):
    """A :class:`Foreign` model whose own cache is the state."""

    def __init__(self, model: nn.Module, cache: str) -> None:
        super().__init__(model)
        self._cache = cache

    def init_state(self, batch_size: int, max_len: int | None = None) -> CacheState:
        """A state that has read nothing; the model makes its cache at the first call, and it grows as the model sees fit."""
        return CacheState(None)

    def _read(self, ids: Tensor, state: Any, logits: str) -> LanguageModelOutput:
        options = self._options(logits) | {"use_cache": state is not None}
        if state is not None and state.cache is not None:
            options[self._cache] = state.cache
        out = self.model(ids, **options)
        if state is None:
            return LanguageModelOutput(self._scores(out, logits), None, {})
        cache = getattr(out, self._cache, None)
        if cache is None:
            raise ConfigError(f"{self._name} was asked for its cache and returned none")
        return LanguageModelOutput(self._scores(out, logits), CacheState(cache), {})


# -- a cache as a state ------------------------------------------------------------------------------------------------


class CacheState:
    """A foreign cache, or None before the first call. A pytree: its leaves are all tensors that hang on the cache."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache


def _flatten(state: CacheState) -> tuple[list[Tensor], CacheState]:
    return list(_tensors(state.cache, set())), state


def _unflatten(leaves: Any, state: CacheState) -> CacheState:
    # A deep copy that finds the new tensors in its memo where it meets the old ones.
    memo = {id(old): new for old, new in zip(_tensors(state.cache, set()), leaves, strict=True)}
    return CacheState(copy.deepcopy(state.cache, memo))


def _tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor within ``thing`` once, in a fixed order."""
    if id(thing) in seen or thing is None or isinstance(thing, str | bytes | int | float | type | torch.dtype | torch.device):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        return
    within = thing.values() if isinstance(thing, Mapping) else thing if isinstance(thing, list | tuple | set) else None
    for part in within if within is not None else list(getattr(thing, "__dict__", {}).values()):
        yield from _tensors(part, seen)


pytree.register_pytree_node(CacheState, _flatten, _unflatten)
