"""What all residual wirings share: the optional mixers, norms and scales of their branches, and how a component is called."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hybridtf.blocks.options import BRANCHES, WiringConfig
from hybridtf.core import (
    Block,
    BlockOutput,
    BuildContext,
    ChannelMixer,
    ComponentConfig,
    Context,
    Edges,
    Extras,
    NormConfig,
    ParamSpec,
    PluginError,
    Segments,
    SequenceMixer,
    State,
    check_call,
    init,
)
from hybridtf.core.init import declared_specs
from hybridtf.core.origins import Origin
from hybridtf.nn import DropPath


class BranchResult:
    """Collects what the branches of one block leave behind: edges, losses, states."""

    def __init__(self, edges: Edges) -> None:
        self.edges: dict[str, Tensor] = dict(edges)
        self.losses: dict[str, tuple[Tensor, Tensor]] = {}
        self.state: dict[str, State] = {}


class Wiring(Block):
    """A block of at most one mixer and one channel mixer, each a branch with norms around it and a scale."""

    norms_output: ClassVar[bool] = False
    """The norms after the branches are on their output alone, before it is added."""

    def __init__(self, config: WiringConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, self.where, self.layer_idx = config, ctx.where, ctx.layer_idx
        self.mixer: SequenceMixer | None = None
        self.channel_mixer: ChannelMixer | None = None
        if config.mixer is not None:
            self._add_norm("mixer_norm", "mixer", ctx)
            self.mixer = self._built("mixer", SequenceMixer, self.inner("mixer", ctx).child("mixer"))
            if self.mixer.causal_only and not ctx.causal:
                raise ctx.error(f"mixer {config.mixer.type_name()!r} only looks back, and this stack is not causal")
            self._add_norm("mixer_post_norm", "mixer", ctx)
        if config.channel_mixer is not None:
            self._add_norm("channel_norm", "channel_mixer", ctx)
            self.channel_mixer = self._built("channel_mixer", ChannelMixer, ctx.child("channel_mixer"))
            self._add_norm("channel_post_norm", "channel_mixer", ctx)
        if config.learned_scale is not None:
            width = ctx.d_model if config.learned_scale.per == "channel" else 1
            for branch in self.branches():
                self.register_parameter(f"{BRANCHES[branch]}_scale", nn.Parameter(torch.empty(width, **ctx.factory)))
        self.stream_scale: nn.Parameter | None = None
        if config.stream_scale is not None:
            learned = config.stream_scale == "learned"
            self.stream_scale = nn.Parameter(torch.empty(1, **ctx.factory), requires_grad=learned)
        self.dropout = nn.Dropout(config.dropout)
        self.drop_path = DropPath(config.drop_path)

    def _built(self, name: str, kind: Any, ctx: BuildContext) -> Any:
        """The part of one branch. Raises :class:`PluginError` where its config builds something else."""
        part = getattr(self.config, name).build(ctx)
        if not isinstance(part, kind):
            raise self._broken(name, f"must build a {kind.__name__}; it built {type(part).__name__}")
        return part

    def inner(self, branch: str, ctx: BuildContext) -> BuildContext:
        """What a branch and the norm before it are built for."""
        return ctx

    def _add_norm(self, site: str, branch: str, ctx: BuildContext) -> None:
        if site in self.config.norm_sites(branch):
            ctx = self.inner(branch, ctx) if site.endswith(f"{BRANCHES[branch]}_norm") else ctx
            own: NormConfig | None = getattr(self.config, site, None)
            norm = self.config.norm.build(ctx.child("norm")) if own is None else own.build(ctx.child(site))
            self.add_module(site, norm)

    def param_specs(self) -> dict[str, ParamSpec]:
        """What ends each branch: where its output is normed, that norm's weight, since no scale before it would last."""
        specs: dict[str, ParamSpec] = {}
        for branch, part in self.branches().items():
            short = BRANCHES[branch]
            ends: dict[str, ParamSpec] = {}
            if self.config.learned_scale is not None:
                ends = {f"{short}_scale": ParamSpec("norm", init.constant(self.config.learned_scale.start))}
            elif self.norms_output:
                site = f"{short}_post_norm"
                said = declared_specs(getattr(self, site))
                ends = {f"{site}.{name}": replace(spec, residual=True) for name, spec in said.items()}
            if ends:
                said = declared_specs(part)
                specs |= {f"{branch}.{name}": replace(s, residual=False) for name, s in said.items() if s.residual}
            specs |= ends
        if self.stream_scale is not None:
            specs["stream_scale"] = ParamSpec("norm", init.constant(1.0))
        return specs

    def branches(self) -> dict[str, Any]:
        """What is added to the stream as it passes."""
        parts = {"mixer": self.mixer, "channel_mixer": self.channel_mixer}
        return {name: part for name, part in parts.items() if part is not None}

    def parts(self) -> dict[str, Any]:
        return self.branches()

    def config_of(self, name: str) -> ComponentConfig:
        """The config of one of the parts."""
        config: ComponentConfig = getattr(self.config, name)
        return config

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return {name: part.init_state(batch_size, max_len) for name, part in self.parts().items()}

    @abstractmethod
    def wired(self, x: Tensor, seen: BranchResult, call: dict[str, Any]) -> Tensor:
        """The stream after the block; ``call`` is what each branch is called with beside its input."""

    def forward(
        self, x: Tensor, edges: Edges, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> BlockOutput:
        """See :class:`Block`."""
        check_call(self, x, segments, state)
        seen = BranchResult(edges)
        x = self.wired(x, seen, {"segments": segments, "state": state, "context": context, "keep": keep})
        x = x if self.stream_scale is None else x * self.stream_scale.to(x.dtype)
        return BlockOutput(x, seen.edges, seen.losses, None if state is None else seen.state)

    # -- what a wiring is made of ------------------------------------------------------------------------------------

    def norm(self, branch: str, x: Tensor) -> Tensor:
        """The norm before a branch; nothing where the wiring has none."""
        return self._norm(f"{BRANCHES[branch]}_norm", x)

    def post_norm(self, branch: str, x: Tensor) -> Tensor:
        """The norm after a branch; nothing where the wiring has none."""
        return self._norm(f"{BRANCHES[branch]}_post_norm", x)

    def _norm(self, site: str, x: Tensor) -> Tensor:
        norm = self._modules.get(site)  # an attribute that is not there is slow to miss
        return x if norm is None else norm(x)

    def scaled(self, branch: str, y: Tensor) -> Tensor:
        """The output of a branch as it is added: scaled, and dropped in training."""
        if self.config.learned_scale is not None:
            y = y * getattr(self, f"{BRANCHES[branch]}_scale").to(y.dtype)
        scale = self.config.of_branch("residual_scale", branch)
        y = y if scale == 1.0 else y * scale
        if self.dropout.p or self.drop_path.p:  # two calls of modules that do nothing are felt in a step of decoding
            y = self.drop_path(self.dropout(y))
        return y

    def onto(self, branch: str, x: Tensor, y: Tensor) -> Tensor:
        """``y`` added to the stream that passes the branch by."""
        skip = self.config.of_branch("skip_scale", branch)
        if skip == 0.0:
            return y
        return (x if skip == 1.0 else x * skip) + y

    def branch(
        self, name: str, x: Tensor, seen: BranchResult, *, segments: Segments | None, state: State | None,
        context: Context | None, keep: int, given: Edges = MappingProxyType({}),
    ) -> Tensor:
        """The output of a mixer; what else it returns goes to ``seen``. ``given``: edges that the block makes for it alone."""
        part: Any = getattr(self, name)
        options: dict[str, Any] = {"segments": segments, "state": None if state is None else state[name], "keep": keep}
        if name == "mixer":
            options["context"] = context
        if part.reads:
            options["edges"] = {edge: given[edge] if edge in given else seen.edges[edge] for edge in part.reads}
        result = part(x, **options)
        extra = part.extra_results()
        self._check_result(name, extra, x, result)
        if result[1] is None and options["state"]:
            raise self._broken(name, "was given a state and returned none: what it had seen would be forgotten")
        if extra:
            extras: Extras = result[2]
            seen.edges.update(extras.edges)
            for loss, (total, count) in extras.losses.items():
                before = seen.losses.get(loss)
                seen.losses[loss] = (total, count) if before is None else (before[0] + total, before[1] + count)
        seen.state[name] = result[1]
        y: Tensor = result[0]
        return y

    def _check_result(self, name: str, extra: bool, x: Tensor, result: Any) -> None:
        """Name the component, where it is the only one who could know better."""
        n_values = 3 if extra else 2
        if not isinstance(result, tuple) or len(result) != n_values:
            got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            raise self._broken(name, f"must return {'(y, state, Extras)' if n_values == 3 else '(y, state)'}, got {got}")
        if result[0].shape != x.shape:
            shapes = f"{tuple(result[0].shape)} for an input of {tuple(x.shape)}"
            raise self._broken(name, f"returned shape {shapes}; it must return the shape it was given")

    def _broken(self, name: str, what: str) -> PluginError:
        return PluginError(f"{Origin(self.config_of(name), f'{self.where}.{name}', self.layer_idx)} {what}")
