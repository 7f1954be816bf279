"""How tokens are chosen one by one."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from hybridtf.core import ConfigTable


class GenerationConfig(ConfigTable):
    """How tokens are chosen. ``temperature = 0`` is greedy.

    Applied in this order, which is also that of transformers: ``repetition_penalty`` on the scores, ``temperature``,
    ``top_k``, ``top_p``, ``min_p``. Each cut looks at what the ones before it left, made to sum to one again.
    """

    max_new_tokens: int = Field(default=128, gt=0)
    temperature: float = Field(default=0.0, ge=0)
    top_k: int | None = Field(default=None, gt=0)
    """Keep so many of the likeliest tokens; among equals the smaller ids."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Keep the likeliest tokens up to the one with which they hold this share (https://arxiv.org/abs/1904.09751)."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Keep tokens of at least this share of the likeliest one's probability (https://arxiv.org/abs/2407.01082)."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Scores of tokens that the row's prompt or its new text holds are divided by it where positive, else multiplied (CTRL,
    https://arxiv.org/abs/1909.05858). 1: none. Greedy choice obeys it too."""
    seed: int = 0
    """Row i of a batch draws from seed + i: alone, with that seed, it draws the same."""
    stop_tokens: tuple[int, ...] = ()
    """A row ends when it draws one of these, which is its last token."""
    prefill_chunk: int = Field(default=2048, gt=0)
    """Prompt tokens per forward: activation memory of the prefill does not grow with the prompt."""
    compile: bool = False
    """Compile the decode step (``torch.compile``) over states whose memory stays in place. Prompts are read eagerly."""
    compile_backend: str = "inductor"
    """Backend of ``torch.compile``."""

    @model_validator(mode="after")
    def _greedy_draws_nothing(self) -> Self:
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p need a temperature above 0")
        if self.temperature == 0 and self.min_p is not None:
            raise ValueError("min_p needs a temperature above 0")
        return self
