"""A second channel mixer whose result joins the stream later (ScMoE: https://arxiv.org/abs/2404.05019, LongCat-Flash:
https://arxiv.org/abs/2509.01322).

    x <- x + mixer(norm(x));   n = norm(x);   edge <- shortcut(n);   x <- x + channel_mixer(n)

A later layer of type ``inject`` adds the edge: what lies between does not wait for it, so that its experts may be fetched
meanwhile. LongCat-Flash's layer is ``s a i``, with experts as the shortcut of ``s``, a dense ``prenorm`` layer ``a``, and
``inject`` as ``i``.

Axes: b batch, t time, d d_model.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from hybridtf.blocks.beside import EDGE
from hybridtf.blocks.options import NormsBefore
from hybridtf.blocks.sequential import PreNorm
from hybridtf.blocks.wiring import BranchResult
from hybridtf.core import BuildContext, ChannelMixer, ChannelMixerConfig, Component, EdgeSpec, active


class ShortcutConfig(NormsBefore):
    """``prenorm`` with a second channel mixer, which reads what the first one reads; its result is an edge, as it is, for a
    later layer of type ``inject``."""

    type: Literal["shortcut"] = "shortcut"
    shortcut: Component[ChannelMixerConfig]
    """The second channel mixer."""
    edge: str = Field(default="shortcut", pattern=EDGE)
    """The name of its result."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.channel_mixer is None:
            raise ValueError("a block of type 'shortcut' has a second channel mixer beside a channel_mixer: give both")
        if self.edge in ("embedding", "token_ids"):
            raise ValueError(f"the edge {self.edge!r} is the stem's; choose another name")
        return self

    @classmethod
    def tiny(cls) -> Self:
        mixers, channel_mixers = active()["mixers"], active()["channel_mixers"]
        small: Any = channel_mixers.get("glu").tiny()
        return cls(
            mixer=mixers.get("attention").tiny(), channel_mixer=small,  # type: ignore[arg-type]
            shortcut=channel_mixers.get("moe").tiny(),  # type: ignore[arg-type]
        )

    def build(self, ctx: BuildContext) -> Shortcut:
        return Shortcut(self, ctx)


class Shortcut(PreNorm):
    """See :class:`ShortcutConfig`."""

    def __init__(self, config: ShortcutConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.edge, self.d_model, self.writes = config.edge, ctx.d_model, (config.edge,)
        self.shortcut: ChannelMixer = config.shortcut.build(ctx.child("shortcut"))
        written = (*self.writes, *(edge for part in self.parts().values() for edge in part.writes))
        if len(set(written)) < len(written):
            raise ctx.error(f"two of its parts, or one and its own edge, write one edge: {written}")

    def parts(self) -> dict[str, Any]:
        return {**self.branches(), "shortcut": self.shortcut}

    def edge_specs(self) -> dict[str, EdgeSpec]:
        return {self.edge: EdgeSpec((self.d_model,))}

    def wired(self, x: Tensor, seen: BranchResult, call: dict[str, Any]) -> Tensor:
        if self.mixer is not None:
            x = self.branched("mixer", x, seen, call)
        normed = self.norm("channel_mixer", x)
        y = self.branch("channel_mixer", normed, seen, **call)
        later = self.branch("shortcut", normed, seen, **call)
        seen.edges[self.edge] = later
        return self.onto("channel_mixer", x, self.scaled("channel_mixer", y))
