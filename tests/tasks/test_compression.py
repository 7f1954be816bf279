"""A row in one vector: what is asked for, who may be asked, and that the vector alone answers."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import ConfigError, RecipeError, active
from hybridtf.models import LanguageModelConfig
from hybridtf.tasks import IGNORE, CompressionConfig, InductionHeadsConfig
from hybridtf.train import evaluate
from tests.tasks.rows import rows_of


def test_every_token_but_the_last_is_asked_for_at_its_place() -> None:
    config = CompressionConfig(vocab_size=9, train=[{"length": 10, "n_rows": 200}], test=[{"length": 13, "n_rows": 60}])
    seen = set()
    for inputs, targets in rows_of(config.load()):
        assert inputs[-1] == 8
        assert targets == [*inputs[:-1], IGNORE]
        assert 8 not in inputs[:-1]
        seen |= set(inputs)
    assert seen == set(range(9))


def model_of(head: str):
    block = {"type": "prenorm", "mixer": {"type": "gqa", "n_heads": 2, "n_kv_heads": 1}}
    config = LanguageModelConfig.model_validate({
        "vocab_size": 16, "d_model": 32, "pattern": "a", "blocks": {"a": block}, "head": {"type": head},
    })
    return config.build()


def test_each_head_is_for_its_own_tasks() -> None:
    rows = {"train": [{"length": 8, "n_rows": 9}], "test": [{"length": 8, "n_rows": 9}]}
    compression = CompressionConfig(**rows).load()
    with pytest.raises(ConfigError, match="the task 'compression' needs a head that says what was read"):
        evaluate(model_of("lm_head"), compression)
    with pytest.raises(ConfigError, match="the task 'induction_heads' needs a head that says the token that follows"):
        evaluate(model_of("position_decoder"), InductionHeadsConfig(**rows).load())
    assert evaluate(model_of("position_decoder"), compression).n_tokens == 63


def test_training_refuses_the_wrong_head(tmp_path) -> None:
    from hybridtf.recipe import load_recipe
    from hybridtf.train import train

    text = """
    [model]
    type = "language_model"
    vocab_size = 16
    d_model = 8
    pattern = "a"
    [model.blocks.a]
    mixer = { type = "gqa", n_heads = 2, n_kv_heads = 1 }
    [task]
    type = "compression_small"
    [train]
    steps = 1
    seq_len = 16
    """
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="needs a head that says what was read, as 'position_decoder' does"):
        train(load_recipe(path), tmp_path / "run")


def test_a_model_that_is_uniform_scores_chance() -> None:
    """No learning, random weights of the decoder: each token is right about once in 15."""
    task = CompressionConfig(train=[{"length": 20, "n_rows": 9}], test=[{"length": 20, "n_rows": 400}]).load()
    result = evaluate(model_of("position_decoder"), task, batch_size=100)
    assert result.metrics["accuracy"] == pytest.approx(task.baselines()["chance"], abs=0.015)


def test_it_learns_what_one_vector_holds() -> None:
    """Attention over places that are told apart, rows of 4 tokens of 5 ids: a small model says most of them again."""
    block = {"type": "prenorm", "mixer": {"type": "gqa", "n_heads": 4, "n_kv_heads": 4, "position": {"type": "rope"}}}
    config = LanguageModelConfig.model_validate({
        "vocab_size": 6, "d_model": 32, "pattern": "a*2", "blocks": {"a": block}, "head": {"type": "position_decoder"},
    })
    model = config.build()
    task = CompressionConfig(vocab_size=6, train=[{"length": 5, "n_rows": 4000}], test=[{"length": 5, "n_rows": 100}]).load()
    stream = task.train_batches(64, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        batch = next(stream)
        optimizer.zero_grad()
        model.loss(batch.inputs, batch.targets).mean().backward()
        optimizer.step()
    assert evaluate(model, task).metrics["accuracy"] > 0.7


@pytest.mark.parametrize(("options", "match"), [
    ({"train": [{"length": 1, "n_rows": 5}]}, "take 2"), ({"vocab_size": 2}, "greater than or equal to 3"),
], ids=str)
def test_it_refuses(options, match) -> None:
    with pytest.raises((RecipeError, ConfigError), match=match):
        active()["tasks"].make({"type": "compression", **options})
