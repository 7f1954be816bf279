"""``multi_scale``: one mixer a time scale, each over the means of whole blocks of tokens, counted from a document's start.

    u_j = mean of x over block j of s tokens;   v = mixer_s(u);   y_t = sum_s g_s v_{floor((t + 1) / s) - 1}

A token reads the last whole block, its own where it ends one, so nothing looks ahead. Clocks of several periods in one layer
are the clockwork network's (https://arxiv.org/abs/1402.3511); means of blocks in the place of skipped tokens are ours.

Axes: b batch, t time, j blocks, d d_model.

No outside reference was run: there is none of this form.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Combinator,
    Component,
    Context,
    Fixed,
    Gathered,
    OwnClock,
    ParamSpec,
    Segments,
    SequenceMixerConfig,
    State,
    active,
    check_call,
    concat_rows,
    init,
    leaves,
    reorder,
)
from hybridtf.nn import accumulation_dtype, token_positions


class MultiScaleConfig(SequenceMixerConfig):
    """A mixer at several time scales, each over the means of whole blocks of tokens."""

    type: Literal["multi_scale"] = "multi_scale"
    source: ClassVar[str] = "https://arxiv.org/abs/1402.3511"
    combinator: ClassVar[bool] = True

    mixer: Component[SequenceMixerConfig]
    """Built once for each scale, with weights of its own."""
    scales: tuple[int, ...] = Field(default=(1, 4, 16), min_length=1)
    """Tokens of a block at each scale, rising."""

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if any(s < 1 for s in self.scales) or list(self.scales) != sorted(set(self.scales)):
            raise ValueError(f"scales = {list(self.scales)} must be rising numbers of 1 or more")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(mixer=active()["mixers"].get("mamba2").tiny(), scales=(1, 3))  # type: ignore[arg-type]

    def build(self, ctx: BuildContext) -> MultiScale:
        return MultiScale(self, ctx)


class MultiScale(Combinator):
    """See :class:`MultiScaleConfig`. Its state, a scale: the mixer's over blocks, the open block's sum, the last output."""

    def __init__(self, config: MultiScaleConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, self.d_model = config, ctx.d_model
        if not ctx.causal:
            raise ctx.error("'multi_scale' looks back only, and this stack is not causal; wrap it in 'bidirectional'")
        parts = {f"scale{s}": config.mixer.build(ctx.child("mixer")) for s in config.scales}
        self.adopt(parts, ctx.where)
        self.refuse_edges("multi_scale", ctx, context=False)
        self.takes, self.causal_only = (), True
        self.cannot = {**self.cannot, "crop": "the state of a scale has moved on by a whole block"}
        self.scale_gain = nn.Parameter(torch.empty(len(config.scales), ctx.d_model, **ctx.factory))
        self.register_buffer("probe", torch.empty(0, **ctx.factory), persistent=False)

    probe: Tensor

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"scale_gain": ParamSpec("norm", init.constant(1 / len(self.config.scales)))}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        dtype, shapes = accumulation_dtype(self.probe.dtype), {"open": (self.d_model,), "last": (self.d_model,)}
        return {
            name: {
                "blocks": Fixed.empty(batch_size, shapes, max_len=max_len, dtype=dtype, device=self.probe.device),
                "mixer": OwnClock(part.init_state(batch_size, None if max_len is None else max(1, max_len // s))),
            }
            for (name, part), s in zip(self.parts().items(), self.config.scales, strict=True)
        }

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Any, ...]:
        check_call(self, x, segments, state)
        seen = Gathered(None)
        total = torch.zeros_like(x)
        for i, (name, s) in enumerate(zip(self.names, self.config.scales, strict=True)):
            y = self._at_scale(name, s, x, segments, state[name] if state is not None else None, seen)
            total = total + y.to(x.dtype) * self.scale_gain[i].to(x.dtype)
        return self.result(total, seen, state)

    def _at_scale(
        self, name: str, s: int, x: Tensor, segments: Segments | None, state: State | None, seen: Gathered
    ) -> Tensor:
        """(b t d) what each token reads at one scale; the state after it goes to ``seen``."""
        leaf: Fixed | None = None if state is None else state["blocks"]
        blocks = _blocks(x, s, segments, leaf)
        sums = _sums(x, blocks, None if leaf is None else leaf["open"])
        n = blocks.ids.shape[1]
        pooled = (sums[:, :n] / s).to(x.dtype)
        documents = Segments(blocks.ids, blocks.continues)
        y = self.run(name, pooled, seen, segments=documents, state=None if state is None else state["mixer"].state)
        last = sums.new_zeros(x.shape[0], x.shape[2]) if leaf is None else leaf["last"]
        read = _read(y.to(sums.dtype), blocks, last)
        if leaf is not None and state is not None:
            seen.state[name] = {
                "blocks": leaf.advance(_left(x, read, blocks, leaf), segments, x.shape[1]),
                "mixer": OwnClock(self._forgotten(name, seen.state[name], blocks, segments)),
            }
        return read

    def _forgotten(self, name: str, after: State, blocks: _Blocks, segments: Segments | None) -> State:
        """The mixer's state, empty in rows whose document has no whole block yet: it would be another document's."""
        if segments is None or not leaves(after):
            return after
        stale = blocks.whole == 0
        # Rows are rarely stale; a graph has no branch for that.
        if not torch.compiler.is_compiling() and not bool(stale.any()):
            return after
        b = len(stale)
        fresh = self.parts()[name].init_state(b, leaves(after)[0].max_len)
        rows = torch.arange(b, device=stale.device)
        return reorder(concat_rows([after, fresh]), torch.where(stale, rows + b, rows))


class _Blocks(NamedTuple):
    """The blocks of a call at one scale; n = the most whole blocks that a row may close."""

    slot: Tensor
    """(b t) the whole block that a token is part of, counted from the row's start; n where its block stays open."""
    closed: Tensor
    """(b t) the last whole block up to a token, -1 before any."""
    ids: Tensor
    """(b n) the document of each whole block, 0 for none."""
    documents: Tensor
    """(b t) the document of each token."""
    carried: Tensor
    """(b t) the token's document is the incoming state's."""
    resumes: Tensor
    """(b) the open block of the state is closed in this call."""
    continues: Tensor
    """(b) the first whole block follows those of the state."""
    whole: Tensor
    """(b) whole blocks of the row's last document, those of earlier calls included."""


def _blocks(x: Tensor, s: int, segments: Segments | None, leaf: Fixed | None) -> _Blocks:
    b, t = x.shape[:2]
    length = x.new_zeros(b, dtype=torch.int64) if leaf is None else leaf.length
    if segments is None:
        segments = Segments.from_mask(torch.ones(b, t, dtype=torch.int64, device=x.device))
    real, n = segments.real, -(-t // s)
    position = token_positions(x, segments, leaf)
    closes = real & ((position + 1) % s == 0)
    before = closes.to(torch.int64).cumsum(1) - closes.to(torch.int64)
    total = segments.document_length(length)
    whole = real & ((position // s + 1) * s <= total)
    ids = torch.zeros(b, n + 1, dtype=torch.int64, device=x.device)
    ids = ids.scatter(1, torch.where(closes, before, n), segments.ids)[:, :n].contiguous()
    carried = real & (segments.ids == segments.carried[:, None])
    # Where a row goes on, its first whole block closes the one that the state left open.
    resumes = (whole & carried & (position // s == (length // s)[:, None])).any(1)
    first = Segments(ids, segments.continues).first_id
    continues = segments.continues & (first == segments.carried) & (length >= s)
    return _Blocks(
        torch.where(whole, before, n), before + closes.to(torch.int64) - 1, ids, segments.ids, carried, resumes, continues,
        segments.new_length(length) // s,
    )


def _sums(x: Tensor, blocks: _Blocks, left_open: Tensor | None) -> Tensor:
    """(b n+1 d) the sum of each whole block, and last of all tokens whose block stays open (several documents' together)."""
    wide = accumulation_dtype(x.dtype)
    given = x.to(wide).masked_fill((blocks.documents == 0)[..., None], 0)
    sums = given.new_zeros(x.shape[0], blocks.ids.shape[1] + 1, x.shape[2])
    sums = sums.scatter_add(1, blocks.slot[..., None].expand_as(given), given)
    if left_open is None or sums.shape[1] == 1:
        return sums
    more = left_open.masked_fill(~blocks.resumes[:, None], 0)
    return torch.cat([(sums[:, 0] + more)[:, None], sums[:, 1:]], 1)


def _read(y: Tensor, blocks: _Blocks, last: Tensor) -> Tensor:
    """(b t d) the output of the last whole block of the token's document; zero before any."""
    closed = blocks.closed.clamp(min=0)
    here = (blocks.closed >= 0) & (blocks.documents > 0)
    if y.shape[1]:
        here = here & (blocks.ids.gather(1, closed) == blocks.documents)
        read = y.gather(1, closed[..., None].expand(-1, -1, y.shape[2])).masked_fill(~here[..., None], 0)
    else:
        read = y.new_zeros(*closed.shape, last.shape[1])
    earlier = (blocks.carried & ~here)[..., None]
    return torch.where(earlier, last[:, None], read)


def _left(x: Tensor, read: Tensor, blocks: _Blocks, leaf: Fixed) -> dict[str, Tensor]:
    """What the state keeps: the sum of the open block of each row's last document, and what its last token read."""
    real = blocks.documents > 0
    t = real.shape[1]
    if not t:
        return {"open": leaf["open"], "last": leaf["last"]}
    newest = (real.to(torch.int64) * torch.arange(1, t + 1, device=x.device)).amax(1) - 1
    any_real = (newest >= 0)[:, None]
    at = newest.clamp(min=0)[:, None]
    last = read.gather(1, at[..., None].expand(-1, -1, read.shape[2]))[:, 0]
    in_last = real & (blocks.documents == blocks.documents.gather(1, at))
    still_open = in_last & (blocks.slot == blocks.ids.shape[1])
    opened = x.to(leaf["open"].dtype).masked_fill(~still_open[..., None], 0).sum(1)
    goes_on = blocks.carried.gather(1, at) & ~blocks.resumes[:, None]
    opened = opened + leaf["open"].masked_fill(~goes_on, 0)
    return {"open": torch.where(any_real, opened, leaf["open"]), "last": torch.where(any_real, last, leaf["last"])}
