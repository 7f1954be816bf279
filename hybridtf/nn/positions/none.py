"""No positions."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from hybridtf.core import BuildContext, PositionConfig, Site


class NoPositionConfig(PositionConfig):
    """No positions: a mixer that knows order by itself, or NoPE attention."""

    type: Literal["none"] = "none"
    site: ClassVar[Site] = "any"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> None:
        return None
