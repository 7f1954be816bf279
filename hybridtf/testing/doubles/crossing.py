"""Cross-attention over a context, kept in a ``Fixed`` state.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Context,
    Fixed,
    Segments,
    SequenceMixer,
    SequenceMixerConfig,
    State,
    with_history,
)
from hybridtf.testing.doubles.documents import documents, no_length


class CrossConfig(SequenceMixerConfig):
    """Softmax over the context of the token's own document."""

    type: Literal["double_cross"] = "double_cross"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> CrossMixer:
        return CrossMixer(ctx)


def _opens(real: Tensor, document: Tensor) -> Tensor:
    """(b 1) 1 where the row's first document is called 0, as one that goes on."""
    return (real & (document == 0)).any(1, keepdim=True).to(torch.int64)


class CrossMixer(SequenceMixer):
    """See :class:`CrossConfig`. The state holds the projected context and which of its documents the row is in."""

    causal_only = False
    needs_context = True

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.q_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)
        self.k_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)
        self.v_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)
        self.out_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        weight = self.k_proj.weight
        empty = torch.zeros(batch_size, 0, weight.shape[0], dtype=weight.dtype, device=weight.device)
        number = no_length(batch_size, weight)
        nothing = {"k": empty, "v": empty.clone(), "document": number[:, None][:, :0].clone()}
        return Fixed({"at": number}, number.clone(), constant=nothing)

    def project(self, context: Context) -> dict[str, Tensor]:
        """Keys, values (b s d) and the number of each token's document, counted from 1 (0: padding)."""
        real, document = documents(context.x, context.segments)
        number = document + _opens(real, document)
        return {
            "k": self.k_proj(context.x), "v": self.v_proj(context.x),
            "document": torch.where(real, number, torch.zeros_like(number)),
        }

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        if state is None:
            state_in: State = self.init_state(x.shape[0])
            return self._step(x, segments, state_in, context)[0], None

        def step(part: Tensor, part_segments: Segments | None, now: State) -> tuple[Tensor, State]:
            return self._step(part, part_segments, now, None)

        if context is None:
            return with_history(step, x, segments, state, keep, self.init_state)
        opened = Fixed({"at": state["at"]}, state.length, constant=self.project(context))
        return with_history(step, x, segments, opened, keep, self.init_state)

    def _step(
        self, x: Tensor, segments: Segments | None, state: State, context: Context | None
    ) -> tuple[Tensor, State]:
        held = {**state.data, **(state.constant if context is None else self.project(context))}
        real, document = documents(x, segments)
        # The first real token of all opens the first document, whatever the segments say.
        number = held["at"][:, None] + document + (held["at"] == 0)[:, None] * _opens(real, document)
        seen = (number[:, :, None] == held["document"][:, None]) & (held["document"] > 0)[:, None]
        score = torch.bmm(self.q_proj(x), held["k"].to(x.dtype).transpose(1, 2)).masked_fill(~seen, -1e30)
        weight = torch.where(seen, score.softmax(2), torch.zeros_like(score)) if score.shape[2] else score
        y = self.out_proj(torch.bmm(weight, held["v"].to(x.dtype)))
        at = torch.where(real.any(1), number[:, -1], held["at"]) if x.shape[1] else held["at"].clone()
        return y, state.advance({"at": at}, segments, x.shape[1])
