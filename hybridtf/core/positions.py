"""Positions: what tells tokens where they stand, by the site at which it is told.

Axes: b batch, t time, s keys, d d_model, h heads, g key heads, k head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hybridtf.core.config import BuildContext, ComponentConfig
from hybridtf.core.contracts import Law

Site: TypeAlias = Literal["qk", "bias", "input", "any"]


class Position(nn.Module, ABC):
    """Tells positions to a component at one ``site``; one class below for each. Positions at pads are unspecified."""

    site: ClassVar[Site]

    cannot: Mapping[Law, str] = {}
    """Laws that this position makes its user break (a base that follows the running length: the cut law), each with the
    reason."""


class InputPosition(Position):
    """Told on the input of a stack."""

    site: ClassVar[Site] = "input"

    @abstractmethod
    def forward(self, x: Float[Tensor, "b t d"], positions: Int[Tensor, "b t"]) -> Tensor:
        """``x`` with its positions told."""


class BiasPosition(Position):
    """Told on attention scores: query i of head h loses ``slopes[h] * |i - j|`` on key j."""

    site: ClassVar[Site] = "bias"

    @abstractmethod
    def forward(self, n_heads: int, device: torch.device) -> Float[Tensor, " h"]:
        """The slopes of the query heads, in float32 at least."""


class QueryKeyPosition(Position):
    """Told on queries and keys: by one table a call, ``table(...)``, that serves both.

    Keys are held in the state as ``forward`` left them, so a key's table may depend on its position and on what is fixed
    when the state is made (``max_len``), not on what comes later.
    """

    site: ClassVar[Site] = "qk"

    causal_only: bool = False
    """Only keys before the query: a mixer that looks both ways refuses it."""

    uses_max_len: bool = False
    """As of a mixer's: the user passes on the ``max_len`` of its state, and says so."""

    uses_lengths: bool = False
    """The table depends on how long each document is (``lengths``). May be set by an instance."""

    @abstractmethod
    def table(
        self, positions: Int[Tensor, "b t"], dtype: torch.dtype, *, max_len: int | None = None,
        lengths: Int[Tensor, "b t"] | None = None,
    ) -> Any:
        """What ``forward`` needs to tell these positions to tensors of ``dtype``.

        ``max_len``: the length declared when the state was made; None: the model's ``max_seq_len``. ``lengths``: of each
        token's document, with all of this call; None, where they are used: one document a row, which ends in this call.
        """

    def table_key(self) -> Hashable:
        """Positions with one key make one table of the same arguments, so that layers may share it in a call; None: never."""
        return None

    @abstractmethod
    def forward(self, x: Float[Tensor, "b t h k"], table: Any) -> Tensor:
        """Queries or keys with their positions told."""

    def span(self, dtype: torch.dtype) -> int | None:
        """How many columns of queries one ``read`` takes in ``dtype``; None: nothing is left to do when scores are taken."""
        return None

    def read(
        self, q: Float[Tensor, "b t h k"], k: Float[Tensor, "b s g k"], *, q_pos: Tensor | None = None,
        k_pos: Tensor | None = None, q_ids: Tensor | None = None, k_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Queries and held keys as scores are taken from them, where ``span`` is not None; at most so many queries.

        ``q_pos`` (b t) and ``k_pos`` (b s): positions; None: keys 0..s-1 and queries s-t..s-1. ``q_ids``, ``k_ids``:
        documents, as in an attention mask; None: all one.
        """
        return q, k


class PositionConfig(ComponentConfig):
    """Base of positions' configs; the width is ``ctx.d_model`` (the head's width at site ``qk``)."""

    kind: ClassVar[str] = "positions"
    site: ClassVar[Site]

    @abstractmethod
    def build(self, ctx: BuildContext) -> Position | None: ...

    def build_at(self, ctx: BuildContext, *sites: Site) -> Position | None:
        """:meth:`build` for a user that tells positions at ``sites``.

        Raises :class:`ConfigError`, naming both, where this position is of another site.
        """
        if self.site not in (*sites, "any"):
            other = "give it to the stem" if self.site == "input" else "give it to a mixer"
            takes = " or ".join(repr(site) for site in sites)
            raise ctx.error(f"{self.type_name()!r} is of site {self.site!r}, and here site {takes} is wanted: {other}")
        return self.build(ctx)
