"""The base of mixers that a state of fixed size is all of: one method, and the last tokens remembered for them.

Axes: b batch, t time, d d_model.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from hybridtf.core.calls import check_call
from hybridtf.core.contracts import Context, Edges, SequenceMixer
from hybridtf.core.history import with_history
from hybridtf.core.segments import Segments
from hybridtf.core.states import State


class RecurrentMixer(SequenceMixer):
    """A mixer gives :meth:`mix`; ``forward`` is made of it.

    With ``keep`` the call is cut before each of its last tokens (see :func:`with_history`), so that :meth:`mix` needs to know
    nothing of snapshots. A mixer whose op returns its states token by token overrides ``forward`` and saves that.
    """

    @abstractmethod
    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Any, ...]:
        """x (b t d) to (y (b t d), the state after it (None without one)), and ``Extras`` where the mixer has them."""

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0, edges: Edges | None = None,
    ) -> tuple[Any, ...]:
        """See :class:`SequenceMixer`."""
        check_call(self, x, segments, state)
        if not self.reads:
            return with_history(self.mix, x, segments, state, keep, self.init_state)

        def step(given: tuple[Tensor, Edges | None], part: Segments | None, before: State | None) -> tuple[Any, ...]:
            return self.mix(given[0], part, before, edges=given[1])

        return with_history(step, (x, None if edges is None else dict(edges)), segments, state, keep, self.init_state)
