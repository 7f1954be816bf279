"""``lora``: a mixer whose projections have low-rank additions (https://arxiv.org/abs/2106.09685); see ``nn.LowRank``.

    proj(x) = W x + b + (alpha / rank) up(down(x))   in place of W x + b, for each projection that ``on`` names
    down (rank in) starts as any projection, up (out rank) at 0: at first the mixer is what it was

Axes: b batch, t time, d d_model; of a projection, in and out its widths.

No outside reference was run: the tests hold it against its mixer with the additions folded in.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from torch import Tensor

from hybridtf.core import BuildContext, Combinator, Component, SequenceMixerConfig, State, active
from hybridtf.nn import LoraOptions, merge_low_rank


class LoraMixerConfig(LoraOptions, SequenceMixerConfig):
    """A mixer with low-rank additions to some of its projections."""

    type: Literal["lora"] = "lora"
    source: ClassVar[str] = "https://arxiv.org/abs/2106.09685"
    combinator: ClassVar[bool] = True

    mixer: Component[SequenceMixerConfig]

    @classmethod
    def tiny(cls) -> Self:
        return cls(mixer=active()["mixers"].get("attention").tiny(), rank=2, on=("q_proj", "out_proj"))  # type: ignore[arg-type]

    def build(self, ctx: BuildContext) -> LoraMixer:
        return LoraMixer(self, ctx)


class LoraMixer(Combinator):
    """See :class:`LoraMixerConfig`. Its state is the mixer's."""

    def __init__(self, config: LoraMixerConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        mixer = config.mixer.build(ctx.child("mixer"))
        config.apply_to(mixer, ctx)
        self.adopt({"mixer": mixer}, ctx.where)

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return self.parts()["mixer"].init_state(batch_size, max_len)

    def forward(self, x: Tensor, **options: Any) -> tuple[Any, ...]:
        """As the mixer's."""
        result: tuple[Any, ...] = self.parts()["mixer"](x, **options)
        return result

    def merge(self) -> None:
        """Fold the additions into the projections, in place: the same outputs, and nothing left to learn apart."""
        merge_low_rank(self)
