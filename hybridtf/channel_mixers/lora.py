"""``lora``: a channel mixer whose projections have low-rank additions (https://arxiv.org/abs/2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from torch import Tensor

from hybridtf.core import BuildContext, ChannelMixer, ChannelMixerConfig, Component, EdgeSpec, State, active
from hybridtf.nn import LoraOptions, merge_low_rank


class LoraChannelMixerConfig(LoraOptions, ChannelMixerConfig):
    """A channel mixer with low-rank additions to some of its projections; see ``nn.LowRank``."""

    type: Literal["lora"] = "lora"

    channel_mixer: Component[ChannelMixerConfig]

    @classmethod
    def tiny(cls) -> Self:
        mixer: Any = active()["channel_mixers"].get("glu").tiny()
        return cls(channel_mixer=mixer, rank=2, on=("up_proj", "down_proj"))

    def build(self, ctx: BuildContext) -> LoraChannelMixer:
        return LoraChannelMixer(self, ctx)


class LoraChannelMixer(ChannelMixer):
    """See :class:`LoraChannelMixerConfig`. Its state is the channel mixer's."""

    def __init__(self, config: LoraChannelMixerConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.channel_mixer = part = config.channel_mixer.build(ctx.child("channel_mixer"))
        config.apply_to(part, ctx)
        self.cannot, self.losses_cannot, self.reads, self.writes = part.cannot, part.losses_cannot, part.reads, part.writes
        self.losses, self.takes, self.uses_max_len = part.losses, part.takes, part.uses_max_len

    def edge_specs(self) -> Mapping[str, EdgeSpec]:
        return self.channel_mixer.edge_specs()

    def unread(self, edges: frozenset[str]) -> None:
        self.channel_mixer.unread(edges)
        self.writes = self.channel_mixer.writes

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return self.channel_mixer.init_state(batch_size, max_len)

    def forward(self, x: Tensor, **options: Any) -> tuple[Any, ...]:
        """As the channel mixer's."""
        result: tuple[Any, ...] = self.channel_mixer(x, **options)
        return result

    def merge(self) -> None:
        """Fold the additions into the projections, in place."""
        merge_low_rank(self)
