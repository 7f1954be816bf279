"""Which keys a query sees: the one rule that every implementation of attention obeys.

Axes: b batch, t queries, s keys, h query heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """What each query sees, and what is added to its scores.

    ``causal``: a query sees no key at a later position.
    ``window``: a token sees ``window`` tokens, itself included: ``q_pos - window < k_pos <= q_pos`` under causal,
    ``|q_pos - k_pos| < window`` otherwise.
    ``q_ids`` (b t), ``k_ids`` (b s), int64: documents; a query sees keys of its own id, and an id of 0 or less neither
    sees nor is seen. None: all one document.
    ``q_pos`` (b t), ``k_pos`` (b s), int64: positions in the document. None: keys 0..s-1 and queries s-t..s-1.
    ``prefix_len`` (b t), int64, per query: of the tokens at positions below it, each sees all (prefix LM), whatever
    ``causal`` and ``window`` say.
    ``softcap``: scores become ``softcap * tanh(scores / softcap)``, before anything else.
    ``slopes`` (h): ALiBi, adds ``-slope * |q_pos - k_pos|``.
    ``sinks`` (h): a learned logit per head, an extra softmax column that carries no value; or (b t h), one of each query.
    ``q_decay`` (b t h), ``k_decay`` (b s h): adds ``q_decay - k_decay`` to a score. With running sums of the logarithms of
    forget gates that is what a head forgot between key and query (Forgetting Transformer). The difference is formed in the
    dtype they come in, which should be float64: the sums of a long document leave no digits for it in float32.
    ``rel_q`` (b t h r), ``rel_bank`` (r e): adds ``rel_q . rel_bank[:, q_pos - k_pos]`` to the scores of keys up to e - 1
    tokens before the query, and nothing to others.

    Raises :class:`ConfigError` for a window below 1, a softcap that is not positive, or half a pair.
    """

    causal: bool = True
    window: int | None = None
    q_ids: Tensor | None = None
    k_ids: Tensor | None = None
    q_pos: Tensor | None = None
    k_pos: Tensor | None = None
    prefix_len: Tensor | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    q_decay: Tensor | None = None
    k_decay: Tensor | None = None
    rel_q: Tensor | None = None
    rel_bank: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"attention mask: window counts the token itself: at least 1; got {self.window}")
        if self.softcap is not None and not self.softcap > 0:
            raise ConfigError(f"attention mask: softcap must be positive, or None for no cap; got {self.softcap}")
        pairs = (
            ("q_ids", self.q_ids, "k_ids", self.k_ids), ("q_pos", self.q_pos, "k_pos", self.k_pos),
            ("q_decay", self.q_decay, "k_decay", self.k_decay), ("rel_q", self.rel_q, "rel_bank", self.rel_bank),
        )
        for one, first, other, second in pairs:
            if (first is None) != (second is None):
                raise ConfigError(f"attention mask: give {one} and {other} together, or neither")

    @property
    def has_tensors(self) -> bool:
        """More than options are given; of a pair, one half stands for both."""
        plain = self.q_ids is None and self.q_pos is None and self.prefix_len is None and self.slopes is None
        return not (plain and self.sinks is None and self.q_decay is None and self.rel_q is None)

    def narrow(self, start: int, stop: int, n_keys: int) -> AttentionMask:
        """The same for queries ``start:stop`` and the first ``n_keys`` keys; positions that are not given stay so."""
        parts: dict[str, Any] = {name: slice(start, stop) for name in ("q_ids", "q_pos", "prefix_len", "q_decay", "rel_q")}
        parts |= {name: slice(n_keys) for name in ("k_ids", "k_pos", "k_decay")}
        if self.sinks is not None and self.sinks.ndim == 3:
            parts["sinks"] = slice(start, stop)
        given = {name: getattr(self, name) for name in parts}
        cut: dict[str, Any] = {name: None if x is None else x[:, parts[name]] for name, x in given.items()}
        return replace(self, **cut)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout_p: float = 0.0) -> None:
    """Raises :class:`ConfigError` where the shapes of a call do not fit together."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ConfigError(f"attention: q, k and v are (b t h k), (b s g k), (b s g v); got {_shapes(q, k, v)}")
    b, t, h, _ = q.shape
    s, g = k.shape[1], k.shape[2]
    if k.shape[0] != b or v.shape[0] != b or v.shape[1] != s or v.shape[2] != g or k.shape[3] != q.shape[3]:
        raise ConfigError(f"attention: q (b t h k), k (b s g k), v (b s g v) do not fit; got {_shapes(q, k, v)}")
    if g == 0 or h % g:
        raise ConfigError(f"attention: {h} query heads are not a multiple of {g} key heads")
    if not 0.0 <= dropout_p < 1.0:
        raise ConfigError(f"attention: dropout_p must be in [0, 1); got {dropout_p}")
    if not mask.has_tensors:
        return
    wanted = {
        "q_ids": (b, t), "k_ids": (b, s), "q_pos": (b, t), "k_pos": (b, s), "prefix_len": (b, t),
        "slopes": (h,), "q_decay": (b, t, h), "k_decay": (b, s, h),
        "sinks": (h,) if mask.sinks is None or mask.sinks.ndim < 3 else (b, t, h),
    }
    if mask.rel_q is not None and mask.rel_bank is not None:
        wanted |= {"rel_q": (b, t, h, mask.rel_bank.shape[0])}
        if mask.rel_bank.ndim != 2 or not mask.rel_bank.shape[1]:
            raise ConfigError(f"attention mask: rel_bank is (r e), e at least 1; got {tuple(mask.rel_bank.shape)}")
    for name, shape in wanted.items():
        value: Tensor | None = getattr(mask, name)
        if value is not None and value.shape != shape:
            raise ConfigError(f"attention mask: {name} must have shape {shape}; got {tuple(value.shape)}")


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that softmax and its sums run in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class Tile:
    """The rectangle of queries ``q0:q1`` and keys ``k0:k1`` in a call of ``t`` queries and ``s`` keys."""

    t: int
    s: int
    q0: int
    q1: int
    k0: int
    k1: int
    device: torch.device

    def positions(self, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """``(b or 1, queries, 1)`` and ``(b or 1, 1, keys)`` int64."""
        if mask.q_pos is not None and mask.k_pos is not None:
            return mask.q_pos[:, self.q0 : self.q1, None], mask.k_pos[:, None, self.k0 : self.k1]
        first = self.s - self.t
        rows = torch.arange(first + self.q0, first + self.q1, device=self.device)
        return rows[None, :, None], torch.arange(self.k0, self.k1, device=self.device)[None, None, :]

    def distance(self, mask: AttentionMask) -> Tensor:
        """``(b or 1, queries, keys)`` int64: ``|q_pos - k_pos|``."""
        rows, cols = self.positions(mask)
        return (rows - cols).abs()

    def visible(self, mask: AttentionMask) -> Tensor | None:
        """``(b or 1, queries, keys)`` bool: the query sees the key. None: every query sees every key."""
        seen: Tensor | None = None
        if mask.causal or mask.window is not None:
            rows, cols = self.positions(mask)
            ahead = rows - cols
            if mask.causal:
                seen = ahead >= 0
                if mask.window is not None:
                    seen = seen & (ahead < mask.window)
            elif mask.window is not None:
                seen = ahead.abs() < mask.window
            if mask.prefix_len is not None and seen is not None:
                prefix = mask.prefix_len[:, self.q0 : self.q1, None]
                seen = seen | ((rows < prefix) & (cols < prefix))
        if mask.q_ids is not None and mask.k_ids is not None:
            ids = mask.q_ids[:, self.q0 : self.q1, None]
            same = (ids == mask.k_ids[:, None, self.k0 : self.k1]) & (ids > 0)
            seen = same if seen is None else seen & same
        return seen


def whole(q: Tensor, k: Tensor) -> Tile:
    """The tile of all queries and keys of a call."""
    return Tile(q.shape[1], k.shape[1], 0, q.shape[1], 0, k.shape[1], q.device)
