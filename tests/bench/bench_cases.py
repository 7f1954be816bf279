"""Tiny recipes, foreign models and tasks that the tests of this room measure."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hybridtf.bench import Subject
from hybridtf.models import LanguageModelConfig
from hybridtf.recipe import Recipe
from hybridtf.tasks import InductionHeadsConfig, Task, TextConfig

BLOCKS: dict[str, Any] = {
    "m": {
        "mixer": {"type": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 16},
        "channel_mixer": {"type": "swiglu", "d_ff": 24},
    },
    "a": {"mixer": {"type": "attention", "n_heads": 4, "n_kv_heads": 2, "position": {"type": "rope"}}},
    "w": {"mixer": {"type": "attention", "n_heads": 2, "n_kv_heads": 1, "window": 7}},
}
TASK = TextConfig(source="pydoc", max_documents=24, held_out=0.3, min_chars=800)
TRAIN = {"steps": 6, "batch_size": 2, "seq_len": 24, "log_every": 2, "warmup": 0.0}


def recipe(pattern: str, **more: Any) -> Recipe:
    """A byte model of 16 channels whose layers are ``pattern``."""
    blocks = {name: BLOCKS[name] for name in sorted(set(pattern) & set(BLOCKS))}
    return Recipe(model=LanguageModelConfig(vocab_size=257, d_model=16, pattern=pattern, blocks=blocks), **more)


def subject(pattern: str, name: str = "tiny") -> Subject:
    """The subject of :func:`recipe`."""
    return Subject.from_recipe(recipe(pattern), name)


class Table(nn.Module):
    """A foreign model without state: scores of the next token from the last one, ``weight`` (v v)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, ids: Tensor, segments: object = None) -> Tensor:
        return self.weight[ids]


class Line(nn.Module):
    """A foreign model of one matrix (v d) after a one-hot code, without bias: easy to count by hand."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.up = nn.Linear(vocab_size, width, bias=False)
        self.down = nn.Linear(width, vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(self.up(torch.nn.functional.one_hot(ids, self.vocab_size).to(self.up.weight.dtype)))


RECALL = InductionHeadsConfig(
    vocab_size=12, train=({"length": 16, "n_rows": 64},), test=({"length": 16, "n_rows": 16}, {"length": 24, "n_rows": 8})
)
"""A task of drawn rows that are 16 tokens long."""


def table_for(task: Task) -> Table:
    """A foreign model for a task; at the top of a module, so that other processes find it."""
    return Table(torch.randn(task.vocab_size, task.vocab_size) * 0.1)
