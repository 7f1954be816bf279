"""``parallel``: mixers side by side on one input, their outputs added up (Falcon-H1, Hymba).

    y = sum_i out_scale_i norm_i(mixer_i(in_scale_i x)),   divided by the number of mixers for a mean

Axes: b batch, t time, d d_model.

No outside reference was run: the tests hold it against the same mixers put together by hand.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Combinator,
    Component,
    Context,
    Edges,
    Gathered,
    NormConfig,
    Segments,
    SequenceMixerConfig,
    State,
    active,
    check_call,
)


class ParallelMixersConfig(SequenceMixerConfig):
    """Mixers side by side on one input, their outputs added up. Falcon-H1 (https://arxiv.org/abs/2507.22448): scales and a
    sum. Hymba: a norm each and the mean."""

    type: Literal["parallel"] = "parallel"
    source: ClassVar[str] = "https://arxiv.org/abs/2411.13676"
    combinator: ClassVar[bool] = True

    branches: tuple[Component[SequenceMixerConfig], ...] = Field(min_length=2)
    combine: Literal["sum", "mean"] = "sum"
    norm: Component[NormConfig] | None = None
    """Of each branch's output, each with weights of its own: they are Hymba's scales of the two kinds of heads."""
    in_scale: tuple[float, ...] | None = Field(default=None, examples=[(1.0, 0.5)])
    """Multiplies the input of each branch. None: 1."""
    out_scale: tuple[float, ...] | None = Field(default=None, examples=[(0.5, 2.0)])
    """Multiplies the output of each branch. None: 1."""

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        for option in ("in_scale", "out_scale"):
            given = getattr(self, option)
            if given is not None and len(given) != len(self.branches):
                raise ValueError(f"{option} has {len(given)} numbers for {len(self.branches)} branches")
        return self

    @classmethod
    def tiny(cls) -> Self:
        mixers = active()["mixers"]
        return cls(branches=(mixers.get("attention").tiny(), mixers.get("mamba2").tiny()))  # type: ignore[arg-type]

    def build(self, ctx: BuildContext) -> ParallelMixers:
        return ParallelMixers(self, ctx)


class ParallelMixers(Combinator):
    """See :class:`ParallelMixersConfig`. Its children, and the entries of its state, are ``branch0``, ``branch1``, ..."""

    def __init__(self, config: ParallelMixersConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        built = {f"branch{i}": branch.build(ctx.child(f"branches[{i}]")) for i, branch in enumerate(config.branches)}
        self.adopt(built, ctx.where)
        norm = config.norm
        self.norms = None if norm is None else nn.ModuleList(norm.build(ctx.child("norm")) for _ in built)

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0, edges: Edges | None = None,
    ) -> tuple[Any, ...]:
        check_call(self, x, segments, state)
        seen, total = Gathered(edges), None
        for i, name in enumerate(self.names):
            given = x if self.config.in_scale is None else x * self.config.in_scale[i]
            y = self.run(
                name, given, seen, segments=segments, state=None if state is None else state[name], context=context, keep=keep
            )
            y = y if self.norms is None else self.norms[i](y)
            y = y if self.config.out_scale is None else y * self.config.out_scale[i]
            total = y if total is None else total + y
        assert total is not None
        return self.result(total / len(self.names) if self.config.combine == "mean" else total, seen, state)
