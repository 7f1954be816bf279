"""Components that each break one law, for the kit to find."""

from __future__ import annotations

from typing import Literal, Self

from hybridtf.core import BuildContext, SequenceMixer, SequenceMixerConfig
from hybridtf.testing.doubles import EmaConfig, EmaMixer, WindowConfig, WindowMixer
from tests.testing.broken import building, documents, numbers, outside, positions, state, time
from tests.testing.broken.norms import BatchNormConfig
from tests.testing.broken.outside import WRONG, load_wrong
from tests.testing.broken.parts import ConvEma, EmaParts, Placed

__all__ = ["BROKEN", "HONEST", "MIXERS", "WRONG", "BatchNormConfig", "BrokenConfig", "load_wrong"]

IDEAS = (time, positions, documents, state, building, numbers, outside)


class BrokenConfig(SequenceMixerConfig):
    """Builds the class of this name in :data:`MIXERS`."""

    type: Literal["broken"] = "broken"
    variant: str = "Honest"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> SequenceMixer:
        cls = MIXERS[self.variant]
        if issubclass(cls, WindowMixer):
            return cls(WindowConfig(), ctx)
        if issubclass(cls, EmaMixer):
            return cls(EmaConfig(kernel="wrong" if self.variant == "WrongKernel" else "auto"), ctx)
        return cls(ctx)  # type: ignore[call-arg]


class Honest(EmaMixer):
    """Breaks nothing."""


HONEST: dict[str, type[SequenceMixer]] = {cls.__name__: cls for cls in (Honest, EmaParts, ConvEma, Placed)}
"""What the broken ones are made of: these keep every law."""

MIXERS: dict[str, type[SequenceMixer]] = HONEST | {
    cls.__name__: cls
    for idea in IDEAS
    for cls in vars(idea).values()
    if isinstance(cls, type) and issubclass(cls, SequenceMixer) and cls.__module__ == idea.__name__
}

BROKEN: dict[str, tuple[str, str]] = {name: found for idea in IDEAS for name, found in idea.BROKEN.items()}
"""The law that each one breaks, and what the message must say."""
