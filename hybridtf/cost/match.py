"""Sizes at which recipes are equal: in parameters, in operations a token, or in bytes of state.

Coarse steps (of the width; for bytes, of a factor of the state) are found on either side of what is asked, and the rest is made
up by fine ones: of the widths of channel mixers and recurrent layers, or of the sizes of states. Every try is a model that was
built without memory and counted; what cannot be built is no legal step and is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import nn

from hybridtf.core import BuildContext, ConfigError, ModelConfig
from hybridtf.cost.calls import has_state
from hybridtf.cost.parameters import parameter_counts
from hybridtf.cost.states import state_size
from hybridtf.cost.trace import Tracer, reach_of
from hybridtf.cost.widths import at_width, with_state

What: TypeAlias = Literal["params", "flops", "state_bytes"]

WITHIN = 0.01
"""An error above this is no match."""
CLOSE = 0.002
"""An error up to this is as good as none: the proportions of the recipe decide then."""
MULTIPLES = (8, 1)
"""Of fine widths; the second where the first leaves more than :data:`CLOSE`."""
FINE_RANGE: Mapping[What, tuple[float, float]] = {"params": (0.75, 1.34), "flops": (0.75, 1.34), "state_bytes": (0.5, 2.0)}
"""How far the fine widths may leave their proportion."""
GAP = 24
"""Steps in a row that may be illegal."""
WIDEST = 1 << 17
STEPS_AN_OCTAVE = 8
FINE_OF: Mapping[What, str] = {"params": "channel widths", "flops": "channel widths", "state_bytes": "sizes of states"}
"""What a fine step changes."""
WORDS: Mapping[What, str] = {"params": "parameters", "flops": "forward FLOPs a token", "state_bytes": "bytes of state"}


@dataclass(frozen=True)
class Try:
    """A config and what was counted of it; ``fine``: the factor of its fine widths beside the proportion."""

    config: ModelConfig
    value: int
    fine: float

    def error(self, asked: int) -> float:
        """Of ``value``, in parts of what was asked."""
        return self.value / asked - 1


@dataclass(frozen=True)
class Match:
    """``best``, and of all that was tried the nearest ``below`` (or at) and ``above`` what was asked; None: there is none."""

    asked: int
    best: Try
    below: Try | None
    above: Try | None

    @property
    def found(self) -> bool:
        """Whether the best is within :data:`WITHIN`."""
        return abs(self.best.error(self.asked)) <= WITHIN


def find_match(config: ModelConfig, what: What, asked: int, *, length: int = 1024) -> Match:
    """The sizes at which ``config`` has ``asked`` parameters, forward operations a token of a row of ``length``, or bytes
    of state of such a row. Operations are those of training, where every token has scores: in prefill the head works for
    the last token alone, which would leave it out.

    Raises :class:`ConfigError` for a recipe whose width or state cannot be scaled, whose operations are not all known, or that
    reaches the number at no width.
    """
    counts = _Counts(what, length)
    counts.of(config)  # what is wrong with the recipe itself is said before any search
    search = _Search(config, what, asked, counts)
    ends = [i for i in search.bracket() if i is not None]
    tries: list[Try] = []
    for multiple in MULTIPLES:
        tries += [found for i in ends for found in search.refine(i, multiple)]
        if any(abs(t.error(asked)) <= CLOSE for t in tries):
            break
    below = max((t for t in tries if t.value <= asked), key=lambda t: t.value, default=None)
    above = min((t for t in tries if t.value > asked), key=lambda t: t.value, default=None)
    best = min(tries, key=lambda t: (max(abs(t.error(asked)), CLOSE), abs(math.log(t.fine))))
    return Match(asked, best, below, above)


@dataclass
class _Counts:
    """Counts of configs, each made once."""

    what: What
    length: int
    _seen: dict[str, int] = field(default_factory=dict)

    def of(self, config: ModelConfig) -> int:
        key = repr(config)
        if key not in self._seen:
            self._seen[key] = self._count(config)
        return self._seen[key]

    def _count(self, config: ModelConfig) -> int:
        if self.what == "flops":
            return self._flops(config)
        model = _on_meta(config)
        if self.what == "params":
            return int(parameter_counts(model)["total"])
        if not has_state(model):
            raise ConfigError(f"a {config.type_name()!r} model carries no state")
        return state_size(model, self.length)["allocated"]

    def _flops(self, config: ModelConfig) -> int:
        work = Tracer(_Plan(config), "train", reach_of(config)).at(self.length).work["forward"]
        if work.unknown:
            raise ConfigError(f"its operations are unknown: {', '.join(sorted(work.unknown))} have no formula")
        return round(work.flops / self.length)


@dataclass(frozen=True)
class _Plan:
    """What a trace asks of a model; see :class:`~hybridtf.cost.phases.Planned`."""

    config: ModelConfig
    autocast: torch.dtype | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None

    @property
    def vocab_size(self) -> int:
        size = getattr(self.config, "vocab_size", None)
        if size is None:
            raise ConfigError(f"a {self.config.type_name()!r} model has no vocab_size: it cannot be fed token ids")
        return int(size)

    @property
    def build(self) -> Callable[[], nn.Module]:
        return lambda: self.config.build(BuildContext(d_model=getattr(self.config, "d_model", 0)))


def _on_meta(config: ModelConfig) -> nn.Module:
    model: nn.Module = config.build(BuildContext(d_model=getattr(config, "d_model", 0), device=torch.device("meta")))
    return model


class _Search:
    """Coarse steps are whole numbers from 1 on: d_model in units that divide the recipe's, or powers of a state's factor."""

    def __init__(self, config: ModelConfig, what: What, asked: int, counts: _Counts) -> None:
        self.config, self.what, self.asked, self.counts = config, what, asked, counts
        self.unit = math.gcd(getattr(config, "d_model", 8), 8)
        self.refusals: dict[int, str] = {}

    def config_at(self, i: int, fine: float = 1.0, multiple: int = 8) -> ModelConfig:
        if self.what == "state_bytes":
            return with_state(self.config, 2.0 ** ((i - self.middle) / STEPS_AN_OCTAVE), fine, multiple)
        return at_width(self.config, i * self.unit, fine, multiple)

    middle = 12 * STEPS_AN_OCTAVE
    """The step at which a state is the recipe's own."""

    @property
    def start(self) -> int:
        """The recipe's own step."""
        return self.middle if self.what == "state_bytes" else max(getattr(self.config, "d_model", 1) // self.unit, 1)

    @property
    def last(self) -> int:
        return 2 * self.middle if self.what == "state_bytes" else WIDEST // self.unit

    def value(self, i: int) -> int | None:
        """What is counted at step ``i``; None where it is not legal."""
        try:
            return self.counts.of(self.config_at(i))
        except ConfigError as error:
            self.refusals[i] = str(error)
            return None

    def legal(self, i: int, stop: int) -> int | None:
        """The first legal step from ``i`` on towards ``stop``, itself included."""
        way = 1 if stop >= i else -1
        for j in range(i, stop + way, way)[: GAP + 1]:
            if self.value(j) is not None:
                return j
        return None

    def bracket(self) -> tuple[int | None, int | None]:
        """Legal steps below (or at) and above what is asked, with none between. Raises :class:`ConfigError` beyond the ends."""
        low = high = self.legal(self.start, self.last)
        if low is None:
            raise ConfigError(f"it cannot be scaled: {self.refusals[self.start]}")
        while high is not None and self._of(high) <= self.asked:
            low, high = high, None if high >= self.last else self.legal(min(2 * high, self.last), self.last)
        while low is not None and self._of(low) > self.asked:
            high, low = low, None if low <= 1 else self.legal(max(low // 2, 1), 1)
        if low is None or high is None:
            return self._at_the_end(low, high)
        return self._narrowed(low, high)

    def _narrowed(self, low: int, high: int) -> tuple[int, int]:
        while high - low > 1:
            middle = self._guess(low, high)
            found = self.legal(middle, high - 1)
            if found is None:
                found = self.legal(middle, low + 1)
            if found is None:
                return low, high
            low, high = (found, high) if self._of(found) <= self.asked else (low, found)
        return low, high

    def _of(self, i: int) -> int:
        value = self.value(i)
        assert value is not None, "a legal step"
        return value

    def _guess(self, low: int, high: int) -> int:
        """Where a power law through both ends has what is asked, kept off the ends; the middle where they are far apart."""
        a, b = self._of(low), self._of(high)
        if high - low > 4 and b > a > 0 and b < 3 * a:
            share = math.log(self.asked / a) / math.log(b / a) if self.asked > a else 0.0
            edge = max((high - low) // 8, 1)
            return min(max(low + round(share * (high - low)), low + edge), high - edge)
        return (low + high) // 2

    def _at_the_end(self, low: int | None, high: int | None) -> tuple[int | None, int | None]:
        """Where one side is missing. Raises :class:`ConfigError` for what no step reaches."""
        end = low if low is not None else high
        assert end is not None
        value = self._of(end)
        if abs(value / self.asked - 1) <= WITHIN:
            return low, high
        reach = "at the most" if low is not None else "at the least"
        raise ConfigError(f"{self.asked:,} {WORDS[self.what]} are out of reach: {reach} it has {value:,}")

    def refine(self, i: int, multiple: int) -> list[Try]:
        """Tries of step ``i`` with the fine widths moved towards what is asked, by false position."""
        own = self._fine(i, 1.0, multiple)
        if own is None:
            return []
        tries = [own]
        low, high = FINE_RANGE[self.what]
        side = high if tries[0].value < self.asked else low
        far = self._fine(i, side, multiple)
        if far is None or far.value == tries[0].value:
            return tries
        tries.append(far)
        near = tries[0]
        for _ in range(8):
            if (near.value - self.asked) * (far.value - self.asked) > 0 or near.value == far.value:
                break  # out of reach on this side
            fine = near.fine + (far.fine - near.fine) * (self.asked - near.value) / (far.value - near.value)
            new = self._fine(i, fine, multiple)
            if new is None or new.value in (near.value, far.value):
                break
            tries.append(new)
            same_side = (new.value - self.asked) * (near.value - self.asked) > 0
            near, far = (new, far) if same_side else (near, new)
        return tries

    def _fine(self, i: int, fine: float, multiple: int) -> Try | None:
        try:
            config = self.config_at(i, fine, multiple)
            return Try(config, self.counts.of(config), fine)
        except ConfigError:
            return None
