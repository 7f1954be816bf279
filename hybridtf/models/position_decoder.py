"""``position_decoder``: a head that reads a whole document out of its last token's hidden state.

Axes: b batch, t time, d d_model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtf.core import BuildContext, Head, HeadConfig, Law, ParamSpec, Scores, Segments, State, check_call, init
from hybridtf.core.init import fan_in
from hybridtf.nn import RMSNorm, SinusoidalPosition, SinusoidalPositionConfig


class PositionDecoderConfig(HeadConfig):
    """Scores of what stood at each place, from one vector: the decoder of MAD's ``compression``
    (https://arxiv.org/abs/2403.17844).

    With z the hidden state of a document's last token and p_i the sinusoidal code of place i, the scores at place i are
    W norm(f(f(z + p_i))), where f(x) = gelu(A norm(x) + a) keeps the width. Only z says what the document holds: an encoder
    whose last state lost a token cannot give it back.
    """

    type: Literal["position_decoder"] = "position_decoder"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext, vocab_size: int) -> PositionDecoder:
        if ctx.d_model % 2:
            raise ctx.error(f"sinusoidal codes need an even width: d_model = {ctx.d_model}")
        return PositionDecoder(ctx, vocab_size)


_WHY = "the scores at a token follow from the last token of its document"


class PositionDecoder(Head):
    """See :class:`PositionDecoderConfig`."""

    scores: Scores = "read"
    cannot: Mapping[Law, str] = {"cut": _WHY, "causal": _WHY}

    def __init__(self, ctx: BuildContext, vocab_size: int) -> None:
        super().__init__()
        d = ctx.d_model
        self.place = SinusoidalPosition(SinusoidalPositionConfig(layout="halves"))
        self.norms = nn.ModuleList(RMSNorm(ctx, 1e-6) for _ in range(3))
        self.first_proj = nn.Linear(d, d, **ctx.factory)
        self.second_proj = nn.Linear(d, d, **ctx.factory)
        self.out_proj = nn.Linear(d, vocab_size, **ctx.factory)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {
            "out_proj.weight": ParamSpec("head", fan_in(self.out_proj.weight)),
            "out_proj.bias": ParamSpec("bias", init.constant(0.0)),
        }

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, keep: int = 0,
        tied: Tensor | None = None,
    ) -> tuple[Tensor, State | None]:
        check_call(self, x, segments, state)
        if not x.shape[1]:
            return self.out_proj(x), state
        y = self.place(*_last_of_document(x, segments))
        for norm, proj in zip(self.norms, (self.first_proj, self.second_proj), strict=False):
            y = F.gelu(proj(norm(y)))
        return self.out_proj(self.norms[2](y)), state


def _last_of_document(x: Tensor, segments: Segments | None) -> tuple[Tensor, Tensor]:
    """(b t d) for each token the hidden state of its document's last one, and (b t) its place in the document."""
    b, t, d = x.shape
    steps = torch.arange(t, device=x.device).expand(b, t)
    if segments is None:
        return x[:, -1:].expand(b, t, d), steps
    # The next real token, looked for from the right: a document ends where it has another id, or where there is none.
    ids = torch.where(segments.real, segments.ids, torch.full_like(segments.ids, torch.iinfo(torch.int64).max))
    following = F.pad(_least_from_the_right(ids)[:, 1:], (0, 1), value=-1)
    ends = torch.where(segments.real & (following != segments.ids), steps, torch.full_like(steps, t - 1))
    last = _least_from_the_right(ends)
    return x.gather(1, last[..., None].expand(b, t, d)), segments.position


def _least_from_the_right(values: Tensor) -> Tensor:
    """(b t) the least of the values (b t) at or after each place."""
    return values.flip(1).cummin(1).values.flip(1)
