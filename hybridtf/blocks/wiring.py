"""What all residual wirings share: the optional mixers, their norms, dropout, and how a component is called."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import (
    Block,
    BlockConfig,
    BuildContext,
    ChannelMixer,
    ChannelMixerConfig,
    Component,
    ComponentConfig,
    Context,
    Edges,
    Extras,
    NormConfig,
    PluginError,
    Segments,
    SequenceMixer,
    SequenceMixerConfig,
    State,
    active,
)
from hybridtf.nn import DropPath, RMSNormConfig


class WiringConfig(BlockConfig):
    """Options of the built-in wirings. Either mixer may be left out, not both."""

    mixer: Component[SequenceMixerConfig] | None = None
    channel_mixer: Component[ChannelMixerConfig] | None = None
    norm: Component[NormConfig] = Field(default_factory=RMSNormConfig)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """On the output of each branch, in training."""
    drop_path: float = Field(default=0.0, ge=0, lt=1)
    """Probability that a row skips a branch, in training."""

    @model_validator(mode="after")
    def _has_something(self) -> Self:
        if self.mixer is None and self.channel_mixer is None:
            raise ValueError("a block needs a mixer, a channel_mixer, or both")
        return self

    @classmethod
    def tiny(cls) -> Self:
        mixers, channel_mixers = active()["mixers"], active()["channel_mixers"]
        return cls(mixer=mixers.get("attention").tiny(), channel_mixer=channel_mixers.get("glu").tiny())  # type: ignore[arg-type]


class BranchResult:
    """Collects what the branches of one block leave behind: edges, losses, states."""

    def __init__(self, edges: Edges) -> None:
        self.edges: dict[str, Tensor] = dict(edges)
        self.losses: dict[str, tuple[Tensor, Tensor]] = {}
        self.state: dict[str, State] = {}


class Wiring(Block):
    """A block of at most one mixer and one channel mixer, each a branch with a norm before it."""

    def __init__(self, config: WiringConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, self.where = config, ctx.where
        self.mixer: SequenceMixer | None = None
        self.channel_mixer: ChannelMixer | None = None
        if config.mixer is not None:
            self.mixer_norm = config.norm.build(ctx.child("norm"))
            self.mixer = config.mixer.build(ctx.child("mixer"))
            if self.mixer.causal_only and not ctx.causal:
                raise ctx.error(
                    f"mixer {config.mixer.type_name()!r} only looks back, and this stack is not causal"
                )
        if config.channel_mixer is not None:
            self.channel_norm = config.norm.build(ctx.child("norm"))
            self.channel_mixer = config.channel_mixer.build(ctx.child("channel_mixer"))
        self.dropout = nn.Dropout(config.dropout)
        self.drop_path = DropPath(config.drop_path)

    def parts(self) -> dict[str, Any]:
        parts = {"mixer": self.mixer, "channel_mixer": self.channel_mixer}
        return {name: part for name, part in parts.items() if part is not None}

    def config_of(self, name: str) -> ComponentConfig:
        """The config of one of the parts."""
        config: ComponentConfig = getattr(self.config, name)
        return config

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return {name: part.init_state(batch_size, max_len) for name, part in self.parts().items()}

    def _check_result(self, name: str, part: Any, x: Tensor, result: Any) -> None:
        """Name the component, where it is the only one who could know better."""
        n_values = 3 if part.extra_results() else 2
        if not isinstance(result, tuple) or len(result) != n_values:
            got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            raise self._broken(name, f"must return {'(y, state, Extras)' if n_values == 3 else '(y, state)'}, got {got}")
        if result[0].shape != x.shape:
            shapes = f"{tuple(result[0].shape)} for an input of {tuple(x.shape)}"
            raise self._broken(name, f"returned shape {shapes}; it must return the shape it was given")

    def _broken(self, name: str, what: str) -> PluginError:
        return PluginError(f"{self.where}.{name}: {self.config_of(name).type_name()!r} {what}")

    def branch(
        self, name: str, x: Tensor, seen: BranchResult, *, segments: Segments | None, state: State | None,
        context: Context | None, keep: int,
    ) -> Tensor:
        """The branch's output before the residual is added; what else it returns goes to ``seen``."""
        part = self.parts()[name]
        options: dict[str, Any] = {"segments": segments, "state": None if state is None else state[name], "keep": keep}
        if name == "mixer":
            options["context"] = context
        if part.reads:
            options["edges"] = {edge: seen.edges[edge] for edge in part.reads}
        result = part(x, **options)
        self._check_result(name, part, x, result)
        extras: Extras = result[2] if part.extra_results() else Extras()
        seen.edges.update(extras.edges)
        for loss, (total, count) in extras.losses.items():
            before = seen.losses.get(loss)
            seen.losses[loss] = (total, count) if before is None else (before[0] + total, before[1] + count)
        seen.state[name] = result[1]
        y: Tensor = self.drop_path(self.dropout(result[0]))
        return y
