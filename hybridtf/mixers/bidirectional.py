"""``bidirectional``: one mixer reads each document forwards, another backwards; any causal mixer so serves an encoder.

    sum     y = f(x) + rev(g(rev(x)))
    mean    half of that
    concat  y = out_proj([f(x), rev(g(rev(x)))])
    gated   y = s f(x) + (1 - s) rev(g(rev(x))),   s = sigmoid(gate_proj(x))

Axes: b batch, t time, d d_model.

No outside reference was run: the tests hold it against the same mixers put together by hand.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Combinator,
    Component,
    Context,
    Extras,
    Gathered,
    ParamSpec,
    Segments,
    SequenceMixerConfig,
    State,
    StateError,
    active,
    check_call,
    leaves,
)
from hybridtf.core.init import fan_in


class BidirectionalConfig(SequenceMixerConfig):
    """Two causal mixers, one each way, for stacks that are not causal (Vim: https://arxiv.org/abs/2401.09417)."""

    type: Literal["bidirectional"] = "bidirectional"
    source: ClassVar[str] = "https://doi.org/10.1109/78.650093"
    combinator: ClassVar[bool] = True
    looks_ahead: ClassVar[bool] = True

    mixer: Component[SequenceMixerConfig]
    """Reads forwards."""
    backward_mixer: Component[SequenceMixerConfig] | None = None
    """Reads backwards. None: one more as ``mixer``, with weights of its own."""
    shared: bool = False
    """``mixer`` itself, with the same weights, reads backwards too."""
    combine: Literal["sum", "mean", "concat", "gated"] = "sum"

    @model_validator(mode="after")
    def _one_or_two(self) -> Self:
        if self.shared and self.backward_mixer is not None:
            raise ValueError("backward_mixer is given, and shared = true lets mixer read both ways")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(mixer=active()["mixers"].get("mamba2").tiny())  # type: ignore[arg-type]

    def build(self, ctx: BuildContext) -> Bidirectional:
        return Bidirectional(self, ctx)


class Bidirectional(Combinator):
    """See :class:`BidirectionalConfig`. It has no state: what comes later changes what was said before."""

    def __init__(self, config: BidirectionalConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        if ctx.causal:
            raise ctx.error("'bidirectional' looks ahead, and this stack is causal")
        parts = {"mixer": config.mixer.build(ctx.child("mixer", causal=True))}
        if not config.shared:
            other, place = config.backward_mixer or config.mixer, "mixer" if config.backward_mixer is None else "backward_mixer"
            parts["backward_mixer"] = other.build(ctx.child(place, causal=True))
        self.adopt(parts, ctx.where)
        self.refuse_edges("bidirectional", ctx, context=False)
        self.causal_only, self.takes = False, ()
        self.cannot = {**self.cannot, "cut": "what comes later changes what was said before"}
        self.cannot.pop("crop", None)
        d = ctx.d_model
        self.out_proj = nn.Linear(2 * d, d, bias=False, **ctx.factory) if config.combine == "concat" else None
        self.gate_proj = nn.Linear(d, d, **ctx.factory) if config.combine == "gated" else None

    def param_specs(self) -> dict[str, ParamSpec]:
        if self.out_proj is None:
            return {}
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return ()

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Any, ...]:
        """See :class:`SequenceMixer`. Raises :class:`StateError` for a state that holds anything."""
        check_call(self, x, segments, None)
        if leaves(state):
            raise StateError("'bidirectional' has no state: give it whole documents")
        seen = Gathered(None)
        ahead = self.run("mixer", x, seen, segments=_begun(segments), state=None)
        backwards = "mixer" if self.config.shared else "backward_mixer"
        back = self.run(backwards, x.flip(1), seen, segments=_reversed(segments), state=None).flip(1)
        y = self._combined(x, ahead, back)
        return (y, state, Extras({}, seen.losses)) if self.extra_results() else (y, state)

    def _combined(self, x: Tensor, ahead: Tensor, back: Tensor) -> Tensor:
        if self.out_proj is not None:
            y: Tensor = self.out_proj(torch.cat([ahead, back], dim=-1))
            return y
        if self.gate_proj is not None:
            share = torch.sigmoid(self.gate_proj(x))
            return share * ahead + (1 - share) * back
        return (ahead + back) / 2 if self.config.combine == "mean" else ahead + back


def _begun(segments: Segments | None) -> Segments | None:
    return None if segments is None else Segments(segments.ids, torch.zeros_like(segments.continues))


def _reversed(segments: Segments | None) -> Segments | None:
    """The same documents read from the right: their order turns round, so their ids are counted down."""
    if segments is None:
        return None
    ids = segments.ids.flip(1)
    top = segments.last_id[:, None] + 1
    return Segments(torch.where(ids > 0, top - ids, ids), torch.zeros_like(segments.continues))

