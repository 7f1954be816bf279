"""Tiny recipes over a tiny corpus, shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hybridtf.core import BuildContext
from hybridtf.models import LanguageModel
from hybridtf.recipe import Recipe, parse_recipe
from hybridtf.tasks import TextTask
from hybridtf.train import TrainConfig, train

SENTENCE = "the house of the state is the people and the people are the state of the union"
WORDS = (SENTENCE + " ").split() * 30


def corpus(folder: Path) -> str:
    """A folder of eight texts of unequal length."""
    place = folder / "texts"
    place.mkdir(exist_ok=True)
    for i in range(8):
        (place / f"{i}.txt").write_text(" ".join(WORDS[i * 7 : i * 7 + 12 + 9 * i]))
    return str(place)


def table(folder: Path, *, model: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """A recipe's table: Mamba-2 and attention, dropout on, packed rows. ``options`` change ``[train]``."""
    blocks = {
        "m": {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}, "dropout": 0.1},
        "a": {
            "mixer": {"type": "gqa", "n_heads": 2, "n_kv_heads": 1}, "channel_mixer": {"type": "swiglu", "d_ff": 16},
            "dropout": 0.1,
        },
    }
    given = {"type": "language_model", "vocab_size": 257, "d_model": 8, "pattern": "m a", "blocks": blocks}
    settings = {"batch_size": 2, "seq_len": 32, "lr": 1e-2, "log_every": 2, "eval_tokens": 0, **options}
    if not {"steps", "tokens", "epochs"} & settings.keys():
        settings["steps"] = 6
    return {
        "model": given | (model or {}),
        "task": {"type": "text", "source": corpus(folder), "held_out": 0.3},
        "train": settings,
    }


def recipe(folder: Path, *, model: dict[str, Any] | None = None, **options: Any) -> Recipe:
    """The recipe of :func:`table`."""
    return parse_recipe(table(folder, model=model, **options), sections={"train": TrainConfig})


def settings(**options: Any) -> TrainConfig:
    """A config with only what matters to a test."""
    return TrainConfig(**{"steps": 10, **options})


def build(made: Recipe, dtype: torch.dtype = torch.float32, seed: int = 0) -> LanguageModel:
    """Its model."""
    return made.model.build(BuildContext(d_model=0, param_dtype=dtype, seed=seed))


def task(made: Recipe) -> TextTask:
    """Its task."""
    assert made.task is not None
    return made.task.load(0)


def run(made: Recipe | None, out: Path, **options: Any):
    """Train silently on the CPU."""
    return train(made, out, **{"device": "cpu", "progress": "none", **options})


def assert_equal_weights(left: torch.nn.Module, right: torch.nn.Module) -> None:
    """Bit for bit."""
    a, b = left.state_dict(), right.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
