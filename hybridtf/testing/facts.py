"""What a mixer is, read from the smallest instance of it: its ops, how its state grows, and what it declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from hybridtf.core import Growing, Ring, SequenceMixerConfig, leaves
from hybridtf.testing.laws_numeric import op_kernels
from hybridtf.testing.subject import Subject

Growth: TypeAlias = Literal["none", "fixed", "ring", "growing"]


@dataclass(frozen=True)
class MixerFacts:
    """What ``hybridtf list`` says of a mixer."""

    source: str
    """Address of the paper or code that defines it."""
    ops: tuple[str, ...]
    """Ops that it calls."""
    state: Growth
    """How its state grows with tokens: ``fixed``, ``ring`` (up to a window), ``growing`` (with every token), ``none``."""
    time_exponent: float
    """The time of a whole sequence grows with this power of its length; a combinator's is the largest of what it holds."""
    combinator: bool
    """It takes other mixers: all but ``source`` and ``cannot`` is said of the ones that this instance holds."""
    cannot: Mapping[str, str]
    """Laws that it breaks by its nature, with the reason."""


def mixer_facts(config: SequenceMixerConfig) -> MixerFacts:
    """The facts of a config, from a module without memory; raises what building it raises."""
    subject = Subject("mixers", config)
    module = subject.build_plain(device=torch.device("meta"))
    found = leaves(subject.init_state(module, 1))
    state: Growth = "fixed" if found else "none"
    if any(isinstance(leaf, Growing) for leaf in found):
        state = "growing"
    elif any(isinstance(leaf, Ring) for leaf in found):
        state = "ring"
    return MixerFacts(
        source=config.source, ops=tuple(sorted({part.op for part in op_kernels(module)})), state=state,
        time_exponent=_time_exponent(config, state), combinator=config.combinator, cannot=dict(getattr(module, "cannot", {})),
    )


def _time_exponent(config: SequenceMixerConfig, state: Growth) -> float:
    if config.combinator:
        return max((mixer_facts(part).time_exponent for part in _held(config)), default=config.time_exponent)
    # A window bounds a token's work, in a mixer that looks at every token without one too.
    return 1.0 if state == "ring" else config.time_exponent


def _held(config: SequenceMixerConfig) -> Iterator[SequenceMixerConfig]:
    """The mixers in a combinator's options."""
    for name in type(config).model_fields:
        yield from _mixers_in(getattr(config, name))


def _mixers_in(value: Any) -> Iterator[SequenceMixerConfig]:
    if isinstance(value, SequenceMixerConfig):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _mixers_in(item)
