"""How rotary positions are stretched beyond the length that a model was trained at.

Each scaling is a table with a literal ``type``. From the exponents e_i = 2i/width and the base theta it gives the angle per
token of each pair; without scaling that is theta^(-e_i). The numbers are those of transformers' ``modeling_rope_utils``.
"""

from __future__ import annotations

import math
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hybridtf.core import ConfigTable

Follows = Literal["nothing", "declared", "running"]
Mode = Literal["declared", "running"]
"""Which length a base or a switch follows: the one declared when a state is made, or that of each document so far."""


class RopeScaling(ConfigTable):
    """Base of the scalings."""

    @property
    def follows(self) -> Follows:
        """The length that the frequencies depend on."""
        return "nothing"

    @classmethod
    def type_name(cls) -> str:
        return str(cls.model_fields["type"].default)

    def fault(self, width: int, theta: float) -> str | None:
        """Why this cannot scale a rotation of ``width`` channels; None if it can."""
        return None

    def magnitude(self, max_seq_len: int) -> float:
        """What cos and sin are multiplied by."""
        return 1.0

    def frequencies(self, e: Tensor, theta: float, length: Tensor | int) -> Tensor:
        """(half), or (b t half) for lengths (b t): radians per token of each pair. ``e`` (half): 2i/width, in float64."""
        raise NotImplementedError


class LinearScaling(RopeScaling):
    """Positions divided by ``factor`` (https://arxiv.org/abs/2306.15595)."""

    type: Literal["linear"] = "linear"
    factor: float = Field(ge=1)

    def frequencies(self, e: Tensor, theta: float, length: Tensor | int) -> Tensor:
        return theta**-e / self.factor


class ProportionalScaling(RopeScaling):
    """The fastest pairs turn, a share ``turning`` of all, and the others stand still (LFM3, Gemma 4). A rotation's
    ``fraction`` leaves channels out instead, and the pairs of the others have all frequencies."""

    type: Literal["proportional"] = "proportional"
    turning: float = Field(default=1.0, gt=0, le=1)
    factor: float = Field(default=1.0, ge=1)
    """Positions are divided by it."""

    def fault(self, width: int, theta: float) -> str | None:
        return None if self._pairs(width) else f"no pair of {width // 2} turns with turning = {self.turning}"

    def _pairs(self, width: int) -> int:
        return int(self.turning * width // 2)

    def frequencies(self, e: Tensor, theta: float, length: Tensor | int) -> Tensor:
        turns = torch.arange(e.shape[0], device=e.device) < self._pairs(2 * e.shape[0])
        return torch.where(turns, theta**-e / self.factor, 0.0)


class _WithBase(RopeScaling):
    """Scalings that change the base, so that the slowest pair turns slower by a given stretch and the fastest not at all."""

    def fault(self, width: int, theta: float) -> str | None:
        return None if width > 2 else f"changes the base, which a single pair (width {width}) does not have; rotate 4 or more"

    def _stretched(self, e: Tensor, theta: float, stretch: Tensor | float) -> Tensor:
        width = 2 * e.shape[0]
        return (theta * stretch ** (width / (width - 2))) ** -e


class NTKScaling(_WithBase):
    """NTK-aware: the base is multiplied by factor^(width / (width - 2)), whatever the length."""

    type: Literal["ntk"] = "ntk"
    factor: float = Field(ge=1)

    def frequencies(self, e: Tensor, theta: float, length: Tensor | int) -> Tensor:
        return self._stretched(e, theta, self.factor)


class DynamicNTKScaling(_WithBase):
    """NTK with a stretch that depends on the length: 1 up to ``original_max_len``, then growing by ``factor`` per multiple.

    ``mode = "declared"``: the length is fixed when the state is made (its ``max_len``, else the model's ``max_seq_len``), so
    that keys rotated early and late agree. ``mode = "running"``: it is that of each document in the call. That is what
    transformers does in one forward; carried over several calls, keys rotated for a shorter document stay as they are.
    """

    type: Literal["dynamic_ntk"] = "dynamic_ntk"
    factor: float = Field(ge=1)
    original_max_len: int = Field(gt=0)
    mode: Mode = "declared"

    @property
    def follows(self) -> Follows:
        return self.mode

    def frequencies(self, e: Tensor, theta: float, length: Tensor | int) -> Tensor:
        original = self.original_max_len
        if isinstance(length, Tensor):
            beyond: Tensor | float = (length.clamp(min=original).to(e.dtype) / original - 1)[..., None]
        else:
            beyond = max(length, original) / original - 1
        return self._stretched(e, theta, 1 + self.factor * beyond)


class YarnScaling(RopeScaling):
    """YaRN (https://arxiv.org/abs/2309.00071): slow pairs are interpolated, fast ones left, a ramp between them.

    ``beta_fast`` and ``beta_slow``: turns within ``original_max_len`` at which the ramp begins and ends; ``truncate`` rounds
    its ends to whole pairs. cos and sin are multiplied by ``attention_factor``; without it by 0.1 ln(factor) + 1, or, with
    ``mscale`` and ``mscale_all_dim`` (given together), by the ratio of 0.1 mscale ln(factor) + 1 to the same of the other.
    """

    type: Literal["yarn"] = "yarn"
    factor: float = Field(ge=1)
    original_max_len: int = Field(gt=0)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    attention_factor: float | None = Field(default=None, gt=0)
    mscale: float | None = Field(default=None, gt=0)
    mscale_all_dim: float | None = Field(default=None, gt=0)
    truncate: bool = True

    @model_validator(mode="after")
    def _one_magnitude(self) -> Self:
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError("mscale and mscale_all_dim act as a ratio: give both or neither")
        if self.attention_factor is not None and self.mscale is not None:
            raise ValueError("attention_factor says it all: mscale and mscale_all_dim would have no effect beside it")
        return self

    def fault(self, width: int, theta: float) -> str | None:
        return None if theta != 1.0 else "a ramp over the pairs needs a theta other than 1"

    def magnitude(self, max_seq_len: int) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

    def frequencies(self, e: Tensor, theta: float, length: Tensor | int) -> Tensor:
        width = 2 * e.shape[0]
        low, high = (self._pair_with(turns, width, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(e.shape[0], device=e.device, dtype=e.dtype) - low) / (high - low)).clamp(0, 1)
        plain = theta**-e
        return plain / self.factor * ramp + plain * (1 - ramp)

    def _pair_with(self, turns: float, width: int, theta: float) -> float:
        """The pair (a fraction allowed) that makes so many turns within the original length."""
        return width * math.log(self.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(theta))


class Llama3Scaling(RopeScaling):
    """Llama 3.1's: waves longer than original_max_len / low_freq_factor are stretched by ``factor``, those shorter than
    original_max_len / high_freq_factor are left, and between them it goes over smoothly.
    """

    type: Literal["llama3"] = "llama3"
    factor: float = Field(ge=1)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    original_max_len: int = Field(gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor} must be above low_freq_factor = {self.low_freq_factor}"
            )
        return self

    def frequencies(self, e: Tensor, theta: float, length: Tensor | int) -> Tensor:
        plain = theta**-e
        turns = plain * (self.original_max_len / (2 * math.pi))
        smooth = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain / self.factor * (1 - smooth) + plain * smooth


class LongRopeScaling(RopeScaling):
    """LongRoPE (https://arxiv.org/abs/2402.13753): each pair is slowed by a factor of its own.

    ``short_factor`` serves lengths up to ``original_max_len``, ``long_factor`` those beyond, one number a pair. ``mode`` says
    which length is meant, as for ``dynamic_ntk``. cos and sin are multiplied by ``attention_factor`` at every length; without
    it by sqrt(1 + ln(s) / ln(original_max_len)), s being ``factor``, or max_seq_len / original_max_len of the model.
    """

    type: Literal["longrope"] = "longrope"
    short_factor: tuple[float, ...] = Field(min_length=1)
    long_factor: tuple[float, ...] = Field(min_length=1)
    original_max_len: int = Field(gt=1)
    attention_factor: float | None = Field(default=None, gt=0)
    factor: float | None = Field(default=None, gt=0)
    mode: Mode = "declared"

    @model_validator(mode="after")
    def _factors(self) -> Self:
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(f"short_factor has {len(self.short_factor)} numbers, long_factor {len(self.long_factor)}")
        if min(*self.short_factor, *self.long_factor) <= 0:
            raise ValueError("short_factor and long_factor must be positive")
        if self.attention_factor is not None and self.factor is not None:
            raise ValueError("factor only sets the attention factor: give one of factor and attention_factor")
        return self

    @property
    def follows(self) -> Follows:
        return self.mode

    def fault(self, width: int, theta: float) -> str | None:
        n, pairs = len(self.short_factor), width // 2
        return None if n == pairs else f"short_factor and long_factor have {n} numbers; the rotation has {pairs} pairs"

    def magnitude(self, max_seq_len: int) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        stretch = max_seq_len / self.original_max_len if self.factor is None else self.factor
        return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(self.original_max_len))

    def frequencies(self, e: Tensor, theta: float, length: Tensor | int) -> Tensor:
        plain = theta**-e
        if not isinstance(length, Tensor):
            chosen = self.long_factor if length > self.original_max_len else self.short_factor
            return plain / torch.tensor(chosen, dtype=e.dtype, device=e.device)
        short, long = (torch.tensor(f, dtype=e.dtype, device=e.device) for f in (self.short_factor, self.long_factor))
        return plain / torch.where((length > self.original_max_len)[..., None], long, short)


SCALINGS: tuple[type[RopeScaling], ...] = (
    LinearScaling, ProportionalScaling, NTKScaling, DynamicNTKScaling, YarnScaling, Llama3Scaling, LongRopeScaling,
)
