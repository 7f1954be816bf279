"""``meta_tokens``: learned tokens that come before every document (Hymba: https://arxiv.org/abs/2411.13676).

    y = mixer([m_1 .. m_n, x_1 .. x_t]),   the outputs at x kept

Attention finds them as keys and values that are always there; a recurrence starts from the state that they leave.

Axes: b batch, t time, n learned tokens, d d_model.

No outside reference was run: the tests hold it against the same mixers put together by hand.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Combinator,
    Component,
    Context,
    Extras,
    Fixed,
    Gathered,
    OwnClock,
    ParamSpec,
    Segments,
    SequenceMixerConfig,
    State,
    active,
    check_call,
    init,
    leaves,
    with_history,
)


class MetaTokensConfig(SequenceMixerConfig):
    """Learned tokens before every document. Hymba learns 128, once for the model; here each layer has its own."""

    type: Literal["meta_tokens"] = "meta_tokens"
    source: ClassVar[str] = "https://arxiv.org/abs/2411.13676"
    combinator: ClassVar[bool] = True

    mixer: Component[SequenceMixerConfig]
    n_tokens: int = Field(default=128, gt=0)

    @classmethod
    def tiny(cls) -> Self:
        return cls(mixer=active()["mixers"].get("attention").tiny(), n_tokens=3)  # type: ignore[arg-type]

    def build(self, ctx: BuildContext) -> MetaTokens:
        return MetaTokens(self, ctx)


class MetaTokens(Combinator):
    """See :class:`MetaTokensConfig`. Its state: the tokens seen, and the mixer's, which counts the learned ones too."""

    def __init__(self, config: MetaTokensConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.adopt({"mixer": config.mixer.build(ctx.child("mixer", max_seq_len=ctx.max_seq_len + config.n_tokens))}, ctx.where)
        self.refuse_edges("meta_tokens", ctx, context=True)
        if ctx.causal and not leaves(self.parts()["mixer"].init_state(1)):
            raise ctx.error(f"'meta_tokens' needs a mixer with a state, and {config.mixer.type_name()!r} has none")
        self.takes = ()
        self.cannot = {**self.cannot, "compile": "it makes room before each document, and has to look how many there are"}
        self.tokens = nn.Parameter(torch.empty(config.n_tokens, ctx.d_model, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"tokens": ParamSpec("embedding", init.normal(0.02))}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        room = None if max_len is None else max_len + self.config.n_tokens
        inner = self.parts()["mixer"].init_state(batch_size, room)
        if not leaves(inner):
            return ()
        return {"seen": self._none_seen(batch_size, max_len), "mixer": OwnClock(inner, self.config.n_tokens)}

    def _none_seen(self, batch_size: int, max_len: int | None = None) -> Fixed:
        return Fixed.empty(batch_size, {}, max_len=max_len, dtype=self.tokens.dtype, device=self.tokens.device)

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Any, ...]:
        check_call(self, x, segments, state)
        inner = state["mixer"].state if state else None
        seen = Gathered(None)
        y = self._mixed(x, segments, inner, seen, {"context": context, "keep": keep})
        after: Any = state
        if state:
            clock = OwnClock(seen.state["mixer"], self.config.n_tokens)
            after = {"seen": self._count(x, segments, state["seen"], keep), "mixer": clock}
        return (y, after, Extras({}, seen.losses)) if self.extra_results() else (y, after)

    def _mixed(
        self, x: Tensor, segments: Segments | None, inner: State | None, seen: Gathered, call: dict[str, Any]
    ) -> Tensor:
        """The mixer's outputs at x, the learned tokens put where documents begin."""
        learned = self.tokens.to(x.dtype).expand(len(x), -1, -1)
        held = leaves(inner)
        if segments is None and x.shape[1] and (not held or held[0].untouched):
            y = self.run("mixer", torch.cat([learned, x], 1), seen, segments=None, state=inner, **call)
            return y[:, self.config.n_tokens :]
        room = self._room(x, segments, inner)
        if room is None:
            return self.run("mixer", x, seen, segments=segments, state=inner, **call)
        wide = torch.cat([x, learned, torch.zeros_like(learned[:, :1])], 1)
        wide = wide.gather(1, room.source[..., None].expand(-1, -1, x.shape[-1]))
        y = self.run("mixer", wide, seen, segments=room.segments, state=inner, **call)
        return y.gather(1, room.places[..., None].expand(-1, -1, y.shape[-1]))

    def _count(self, x: Tensor, segments: Segments | None, seen: Fixed, keep: int) -> Fixed:
        """The tokens seen after the call, with the counts before each of the last ones."""

        def step(part: Tensor, documents: Segments | None, leaf: State) -> tuple[Any, ...]:
            return part, leaf.advance({}, documents, part.shape[1])

        return with_history(step, x[..., :0], segments, seen, keep, self._none_seen)[1]  # type: ignore[no-any-return]

    def _room(self, x: Tensor, segments: Segments | None, inner: State | None) -> _Room | None:
        """Where everything goes; None where no document begins in this call."""
        (b, t), n = x.shape[:2], self.config.n_tokens
        held = leaves(inner)
        if segments is None and held and bool((held[0].length > 0).all()):
            return None
        ids = x.new_ones(b, t, dtype=torch.int64) if segments is None else segments.ids
        continues = x.new_ones(b, dtype=torch.bool) if segments is None else segments.continues
        # A state that no document has begun has not seen the learned tokens either.
        continues = continues & (held[0].length > 0) if held else torch.zeros_like(continues)
        documents = Segments(ids, continues)
        starts = documents.starts
        n_starts = int(starts.sum(1).max()) if starts.numel() else 0
        return None if n_starts == 0 else _make_room(documents, starts, n_starts, n)


class _Room(NamedTuple):
    """A wider call with the learned tokens in their places."""

    source: Tensor
    """(b wide) columns of [tokens, learned tokens, one of zeros]."""
    places: Tensor
    """(b t) where each token went."""
    segments: Segments


def _make_room(documents: Segments, starts: Tensor, n_starts: int, n: int) -> _Room:
    b, t = documents.ids.shape
    wide, columns = t + n * n_starts, torch.arange(t, device=starts.device)
    places = columns + n * starts.cumsum(1)
    source = torch.full((b, wide + 1), t + n, dtype=torch.int64, device=starts.device)  # one more, for what is left out
    ids = torch.zeros_like(source)
    learned = torch.arange(n, device=starts.device)
    before = torch.where(starts[..., None], places[..., None] - n + learned, wide).flatten(1)
    source.scatter_(1, before, (t + learned).expand(b, t, n).flatten(1))
    ids.scatter_(1, before, documents.ids[..., None].expand(b, t, n).flatten(1))
    source.scatter_(1, places, columns.expand(b, t))
    ids.scatter_(1, places, documents.ids)
    return _Room(source[:, :wide], places, Segments(ids[:, :wide].contiguous(), documents.continues))
