"""Options of the built-in wirings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from hybridtf.core import (
    BlockConfig,
    ChannelMixerConfig,
    Component,
    ConfigTable,
    NormConfig,
    SequenceMixerConfig,
    active,
)
from hybridtf.nn import RMSNormConfig

BRANCHES: Mapping[str, str] = {"mixer": "mixer", "channel_mixer": "channel"}
"""The branches in order, and how the names of their norms and scales begin."""

Multiplier: TypeAlias = Annotated[float, Field(gt=0)]
Share: TypeAlias = Annotated[float, Field(ge=0)]


class LearnedScale(ConfigTable):
    """A learned multiplier of each branch: one a channel (LayerScale, https://arxiv.org/abs/2103.17239) or one number
    (ReZero, https://arxiv.org/abs/2003.04887)."""

    per: Literal["channel", "branch"] = "channel"
    start: float = 0.1
    """Its value at the start: LayerScale takes 0.1 to 1e-6, less the deeper the stack; ReZero 0."""


class WiringConfig(BlockConfig):
    """Options of the built-in wirings. Either mixer may be left out, not both.

    A branch f on the stream x gives ``skip_scale * x + residual_scale * learned_scale * f(x)``, with norms where the wiring
    has them.
    """

    mixer: Component[SequenceMixerConfig] | None = None
    channel_mixer: Component[ChannelMixerConfig] | None = None
    norm: Component[NormConfig] = Field(default_factory=RMSNormConfig)
    """Every norm of the block that has no config of its own."""
    residual_scale: Multiplier | tuple[Multiplier, Multiplier] = 1.0
    """Multiplies the output of each branch (Granite); a pair is for the mixer and the channel mixer (MiniMax)."""
    skip_scale: Share | tuple[Share, Share] = 1.0
    """Multiplies the stream that a branch is added to (DeepNorm's alpha, https://arxiv.org/abs/2203.00555). 0: no residual."""
    learned_scale: LearnedScale | None = Field(default=None, examples=[{"per": "channel", "start": 0.1}])
    """With one, its start takes the place of the model's ``residual_init`` in this block."""
    stream_scale: Literal["fixed", "learned"] | None = None
    """Multiplies the stream after the block by one number of the layer's own, 1 at the start (Gemma 4, where it is ``fixed``:
    loaded, and not learned)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """On what each branch adds, in training."""
    drop_path: float = Field(default=0.0, ge=0, lt=1)
    """Probability that a row skips a branch, in training."""

    norms_before: ClassVar[bool] = True
    """The wiring has norms ``mixer_norm``, ``channel_norm`` before its branches."""
    norms_after: ClassVar[bool] = False
    """The wiring has norms ``mixer_post_norm``, ``channel_post_norm`` after its branches."""

    @model_validator(mode="after")
    def _has_something(self) -> Self:
        if self.mixer is None and self.channel_mixer is None:
            raise ValueError("a block needs a mixer, a channel_mixer, or both")
        both = self.mixer is not None and self.channel_mixer is not None
        for option in ("residual_scale", "skip_scale"):
            if isinstance(getattr(self, option), tuple) and not both:
                raise ValueError(f"{option} is a pair, and the block has one branch: give one number")
        for branch, short in BRANCHES.items():
            for site in (f"{short}_norm", f"{short}_post_norm"):
                if getattr(self, site, None) is not None and getattr(self, branch) is None:
                    raise ValueError(f"{site} is given, and the block has no {branch}")
        return self

    @classmethod
    def tiny(cls) -> Self:
        mixers, channel_mixers = active()["mixers"], active()["channel_mixers"]
        return cls(mixer=mixers.get("attention").tiny(), channel_mixer=channel_mixers.get("glu").tiny())  # type: ignore[arg-type]

    def norm_sites(self, branch: str) -> tuple[str, ...]:
        """Names of the norms around a branch."""
        short = BRANCHES[branch]
        sites = ((f"{short}_norm", self.norms_before), (f"{short}_post_norm", self.norms_after))
        return tuple(site for site, there in sites if there)

    def of_branch(self, option: str, branch: str) -> float:
        """The value of ``residual_scale`` or ``skip_scale`` for a branch."""
        value = getattr(self, option)
        return float(value[tuple(BRANCHES).index(branch)] if isinstance(value, tuple) else value)


class NormsBefore(WiringConfig):
    """Own configs for the norms before the branches."""

    mixer_norm: Component[NormConfig] | None = None
    """None: as ``norm``."""
    channel_norm: Component[NormConfig] | None = None


class NormsAfter(WiringConfig):
    """Own configs for the norms after the branches."""

    norms_after: ClassVar[bool] = True

    mixer_post_norm: Component[NormConfig] | None = None
    """None: as ``norm``."""
    channel_post_norm: Component[NormConfig] | None = None
