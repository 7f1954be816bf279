"""The base of mixers whose queries look at tokens that the state holds: keys and values, or latents of them.

A mixer gives :meth:`~SoftmaxMixer.project` (queries, and what is held of each token), :meth:`~HeldAttention.read` (softmax over
what is held) and :meth:`~SoftmaxMixer.leave`. Documents, pads, windows, prefixes and decoding come with the bases.

Axes: b batch, t time, s held tokens, d d_model, h heads, g kv heads, k key dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybridtf.core import (
    BiasPosition,
    ConfigError,
    Context,
    Edges,
    Extras,
    Growing,
    Law,
    Position,
    QueryKeyPosition,
    Ring,
    Segments,
    SequenceMixer,
    State,
    StateError,
    check_call,
)
from hybridtf.core.kernels import OpKernel
from hybridtf.nn.positions import token_positions
from hybridtf.ops.attention import AttentionMask

KEY_INPUT, VALUE_INPUT = "key_input", "value_input"
"""Edges (b t d) that a block hands to a mixer whose keys and values have inputs of their own."""

Held: TypeAlias = Mapping[str, Tensor]
"""What is held of each token, by name, each (b s ...)."""


class Projected(NamedTuple):
    """What a call's tokens are made into."""

    q: Tensor
    """(b t h k)."""
    held: Held
    """What the state is to hold of each."""
    gate: Tensor | None = None
    """(b t ...) what the output is multiplied by, where there is a gate."""
    source: Tensor | None = None
    """(b t ...) what the queries are projected from, where that is not x."""


class HeldAttention(SequenceMixer):
    """Attention over what a ``Growing``, or a ``Ring`` with a window, holds of each token.

    What is held by the name ``decay`` (b s h) goes into the mask as ``k_decay``, and stays in the precision it is held in.

    A mixer that carries more than that writes its own ``forward`` of :meth:`enter` and :meth:`attend`. ``__init__`` of a mixer
    sets ``causal``, ``attention`` (the op that scores, which also knows dtype and device) and, through :meth:`place`, the
    position.
    """

    causal_only = False
    takes: tuple[str, ...] = ("prefix_len",)

    causal: bool
    attention: OpKernel
    window: int | None = None
    """Tokens that a token sees, itself included."""
    softcap: float | None = None
    dropout: float = 0.0
    """On the weights, in training."""
    scale: float | None = None
    """Of the scores. None: k ** -0.5."""
    sinks: Tensor | None
    position: Position | None

    # -- what a mixer gives --------------------------------------------------------------------------------------------

    @abstractmethod
    def held_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is held of one token: shapes by name."""

    @abstractmethod
    def read(self, q: Tensor, held: Held, mask: AttentionMask) -> Tensor:
        """Queries (b t h k) over what is held (b s ...), in q's dtype."""

    def held_dtypes(self) -> dict[str, torch.dtype]:
        """Of what a ``Growing`` holds in another dtype than the compute dtype, by name; it is read in that dtype too."""
        return {}

    # -- what comes with it --------------------------------------------------------------------------------------------

    def place(self, position: Position | None, *, looks_back: bool = False) -> None:
        """Take a position, with what it asks of its user. ``looks_back``: the mixer can do no other, whatever the position."""
        # Not defaults of the class, which would hide the parameter or module of an instance.
        self.position, self.sinks = position, None
        self.cannot: dict[Law, str] = {} if position is None else dict(position.cannot)
        if isinstance(position, QueryKeyPosition):
            self.causal_only, self.uses_max_len = position.causal_only, position.uses_max_len
        self.causal_only = self.causal_only or looks_back
        if self.causal_only:
            self.takes = ()  # a prefix is seen both ways

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        if not self.causal:
            return ()
        where: dict[str, Any] = {"dtype": self.attention.compute_dtype, "device": self.attention.device}
        if self.window is not None:
            return Ring.empty(batch_size, self.held_shapes(), window=self.window, max_len=max_len, **where)
        return Growing.empty(batch_size, self.held_shapes(), max_len=max_len, dtypes=self.held_dtypes(), **where)

    def enter(
        self, x: Tensor, segments: Segments | None, state: State | None, leaf: Growing | Ring | None
    ) -> tuple[Tensor, Tensor]:
        """The call's tokens, zero at pads, and their positions (b t), once it is clear that the call may be made."""
        if not self.causal and state is not None:
            raise StateError("attention that looks both ways has no state: give it whole documents")
        check_call(self, x, segments, state)
        if segments is not None:
            # Weights are 0 at pads, but 0 times what lies there must be 0 too.
            x = x.masked_fill(~segments.real[..., None], 0)
            self._check_prefix(segments, leaf)
        return x, token_positions(x, segments, leaf)

    def attend(
        self, q: Tensor, new: Held, positions: Tensor, segments: Segments | None, leaf: Growing | Ring | None, keep: int,
        added: Held = MappingProxyType({}),
    ) -> tuple[Tensor, Growing | Ring | None]:
        """Queries over all that their documents have, in the state and in the call; and the state after it. A mixer that
        attends in a way of its own gives this one; layers that share what they look at call :meth:`attend_over`.

        ``added``: further fields of the mask, by name, that speak of the queries (``q_decay``, ``rel_q``, their own ``sinks``).
        """
        return self.attend_over(q, new, positions, segments, leaf, keep, added)[:2]

    def attend_over(
        self, q: Tensor, new: Held, positions: Tensor, segments: Segments | None, leaf: Growing | Ring | None, keep: int,
        added: Held = MappingProxyType({}), shared: Held | None = None,
    ) -> tuple[Tensor, Growing | Ring | None, Held]:
        """The same, and what was looked at: (b s ...), slots of the state, and the call's tokens where they are not in them.

        ``shared``: what another mixer looked at in this call, to be looked at here. It has been through the same calls with
        a state of the same kind, so that ``leaf``, which then need hold nothing, says what lies where.
        """
        if leaf is None or leaf.untouched:  # the call's own tokens are all there is
            seen = _fitting(shared, q.shape[1]) or new
            y = self._look(q, seen, *_own(segments), segments, added)
            return y, None if leaf is None else _stored(leaf, new, segments, keep), seen
        one = q.shape[1] == 1 and (segments is None or segments.prefix_len is None)
        if one or (segments is None and isinstance(leaf, Growing)):
            after = _stored(leaf, new, segments, keep)
            seen = _fitting(shared, after.capacity) or after.data
            return self._attend_last(q, positions, segments, after, seen, added), after, seen
        held, valid = leaf.positions(), leaf.valid()
        own = torch.ones_like(positions) if segments is None else segments.ids
        old = torch.where(valid, own.new_ones(1) if segments is None else segments.carried[:, None], -torch.ones_like(held))
        ids, pos = (own, torch.cat([old, own], dim=1)), (positions, torch.cat([held, positions], dim=1))
        both = _fitting(shared, pos[1].shape[1]) or {
            name: torch.cat([leaf[name].to(z.dtype), z], dim=1) for name, z in new.items()
        }
        y = self._look(q, both, ids, pos, segments, added)
        return y, _stored(leaf, new, segments, keep), both

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """The op on one call."""
        dropout = self.dropout if self.training else 0.0
        y: Tensor = self.attention(q, k, v, mask, scale=self.scale, dropout_p=dropout, n_tokens=q.shape[1])
        return y

    def score(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """:meth:`run`, of as many queries at a time as the position allows."""
        position = self.position
        if isinstance(position, QueryKeyPosition) and (span := position.span(q.dtype)) is not None:
            parts = [self.run(*part) for part in _read_in_spans(position, q, k, v, mask, span)]
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return self.run(q, k, v, mask)

    def _attend_last(
        self, q: Tensor, positions: Tensor, segments: Segments | None, after: Growing | Ring, seen: Held, added: Held
    ) -> Tensor:
        """The last tokens of each row, which the state holds already: nothing is copied. ``seen`` lies in its slots."""
        plain = segments is None and (isinstance(after, Growing) or self._order_free(q, after, added))
        length = after.shared_length() if plain else None
        if length is not None and isinstance(after, Growing):
            return self._look(q, {name: z[:, :length] for name, z in seen.items()}, None, None, None, added)
        if length is not None and isinstance(after, Ring) and length >= after.window:
            return self._look(q, seen, None, None, None, added)  # all slots are in sight
        real = torch.ones_like(positions) if segments is None else segments.real.to(torch.int64)
        ids = (real, after.valid().to(torch.int64))
        return self._look(q, seen, ids, (positions, after.positions()), None, added)

    def _order_free(self, q: Tensor, ring: Ring, added: Held) -> bool:
        """A full ring's slots may be read in any order."""
        if "rel_q" in added or isinstance(self.position, BiasPosition) or not ring.capacity == ring.window == self.window:
            return False
        return not (isinstance(self.position, QueryKeyPosition) and self.position.span(q.dtype) is not None)

    def _look(
        self, q: Tensor, held: Held, ids: tuple[Tensor, Tensor] | None, pos: tuple[Tensor, Tensor] | None,
        segments: Segments | None, added: Held,
    ) -> Tensor:
        q_ids, k_ids = (None, None) if ids is None else ids
        q_pos, k_pos = (None, None) if pos is None else pos
        slopes = self.position(q.shape[2], q.device) if isinstance(self.position, BiasPosition) else None
        mask = AttentionMask(
            causal=self.causal, window=self.window, q_ids=q_ids, k_ids=k_ids, q_pos=q_pos, k_pos=k_pos,
            prefix_len=None if segments is None else segments.prefix_len, softcap=self.softcap, slopes=slopes,
            k_decay=held.get("decay"), **{"sinks": self.sinks, **added},
        )
        exact, dtype = self.held_dtypes(), q.dtype
        seen = {
            name: z if z.dtype == dtype or name in exact else z.to(dtype) for name, z in held.items() if name != "decay"
        }
        return self.read(q, seen, mask)

    def _check_prefix(self, segments: Segments, leaf: Growing | Ring | None) -> None:
        if segments.prefix_len is not None and "prefix_len" not in self.takes:
            raise ConfigError("a prefix is seen both ways, and the position of this attention allows only earlier keys")
        if segments.prefix_len is None or leaf is None or leaf.untouched or torch.compiler.is_compiling():
            return
        seen = torch.where(segments.ids == segments.carried[:, None], leaf.length[:, None], 0)
        if bool(((seen > 0) & (segments.prefix_len > seen)).any()):
            raise StateError("a prefix that is seen both ways must lie within one call: its first tokens are computed already")


class SoftmaxMixer(HeldAttention):
    """Attention of which every token is projected alone: a mixer gives :meth:`project`, :meth:`read` and :meth:`leave`."""

    @abstractmethod
    def project(
        self, x: Tensor, positions: Tensor, segments: Segments | None, leaf: Growing | Ring | None
    ) -> Projected:
        """The call's tokens (b t d), with ``positions`` (b t) told."""

    @abstractmethod
    def leave(self, y: Tensor, gate: Tensor | None) -> Tensor:
        """The heads' output (b t h v) to the mixer's (b t d)."""

    def exchange(self, held: Held, edges: Edges, segments: Segments | None) -> tuple[Held, Edges]:
        """What is to be held, after the edges that the mixer reads; and the edges that it writes."""
        return held, {}

    def looks_together(self) -> bool:
        """It looks at what another layer does, or hands on what it looks at, and goes through :meth:`attend_over`."""
        return False

    def shared(self, edges: Edges) -> Held | None:
        """What another layer looked at in this call, for a mixer that looks at the same."""
        return None

    def hands_on(self, seen: Held) -> Edges:
        """Edges of what was looked at (b s ...)."""
        return {}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0, edges: Edges | None = None,
    ) -> tuple[Any, ...]:
        leaf = state if isinstance(state, Growing | Ring) else None
        x, positions = self.enter(x, segments, state, leaf)
        q, new, gate, _ = self.project(x, positions, segments, leaf)
        new, written = self.exchange(new, edges or {}, segments)
        if self.looks_together():
            y, after, seen = self.attend_over(q, new, positions, segments, leaf, keep, shared=self.shared(edges or {}))
            written = {**written, **self.hands_on(seen)}
        else:
            y, after = self.attend(q, new, positions, segments, leaf, keep)
        out = (self.leave(y, gate), state if leaf is None else after)
        return (*out, Extras(edges=written)) if self.extra_results() else out


def _stored(leaf: Growing | Ring, new: Held, segments: Segments | None, keep: int) -> Growing | Ring:
    return leaf.append(new, segments) if isinstance(leaf, Growing) else leaf.push(new, segments, keep=keep)


def _fitting(shared: Held | None, slots: int) -> Held | None:
    """What another layer looked at, if it went through the same calls."""
    if shared is None or all(z.shape[1] == slots for z in shared.values()):
        return shared
    has = next(iter(shared.values())).shape[1]
    raise StateError(f"layers that share what is held make their calls together: {slots} slots are wanted, and {has} given")


def _own(segments: Segments | None) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """Ids and positions of a call that sees only its own tokens."""
    if segments is None:
        return None, None
    return (segments.ids, segments.ids), (segments.position, segments.position)


def _read_in_spans(
    position: QueryKeyPosition, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, span: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, AttentionMask]]:
    """Queries ``span`` at a time, with keys, values and mask, as scores are taken from them."""
    t, s = q.shape[1], k.shape[1]
    for start in range(0, max(t, 1), span):
        stop, seen, part = min(start + span, t), s, mask
        if mask.q_pos is None:
            seen = s - t + stop  # without positions the queries are the last of the keys
        if t > span:
            part = mask.narrow(start, stop, seen)
        told, keys = position.read(
            q[:, start:stop], k[:, :seen], q_pos=part.q_pos, k_pos=part.k_pos, q_ids=part.q_ids, k_ids=part.k_ids
        )
        yield told, keys, v[:, :seen], part
