"""Weights of one recipe in another that is not trained: they are really taken, and refused where they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridtf.bench import CompareOptions, Records, Subject, append_record, make_record, measure_extrapolation
from hybridtf.core import CheckpointError, ConfigError
from hybridtf.recipe import Recipe, load_recipe
from hybridtf.studies.untuned import measure_untuned
from hybridtf.train import TrainConfig, save_model

OPTIONS = CompareOptions(multiples=(1, 4), max_documents=2, device="cpu")
TINY = (
    "task.source=pydoc", "task.max_bytes=20000", "task.held_out=0.5", "train.seq_len=8", "model.d_model=32",
    "model.blocks.a.channel_mixer.d_ff=16",
)


def recipe(*overrides: str) -> Recipe:
    return load_recipe("studies/text_positions/rope_pi", (*TINY, *overrides), sections={"train": TrainConfig})


def trained(folder: Path, *, failed: str | None = None) -> tuple[Records, Recipe]:
    """A run of plain rotary attention, as a comparison leaves it."""
    plain = recipe("model.blocks.a.mixer.position.scaling.factor=1")
    subject = Subject.from_recipe(plain, "plain")
    model = subject.build()
    record = make_record("train", subject.identity(model), {"failed": failed})
    append_record(folder / "records.jsonl", record)
    save_model(model, plain, folder / "runs" / f"plain-{subject.recipe_hash}-seed0")
    return Records([record]), plain


def test_the_weights_are_those_of_the_trained_recipe(tmp_path: Path) -> None:
    records, plain = trained(tmp_path)
    assert plain.task is not None
    subject = Subject.from_recipe(plain, "plain", seed=0)
    direct = measure_extrapolation(
        subject, subject.build().eval(), plain.task.load(0), trained_length=8, multiples=(1, 4), max_documents=2
    )
    names = {"same": "plain", "stretched": "plain"}
    found = measure_untuned({"same": plain, "stretched": recipe()}, names, records, tmp_path, OPTIONS)
    assert [r["weights_of"] for r in found] == ["plain", "plain"]
    # The same options with the same weights read the same; the options of the other are its own.
    assert found[0]["bits_per_byte"] == pytest.approx(direct["bits_per_byte"], rel=1e-12)
    assert found[1]["bits_per_byte"] != found[0]["bits_per_byte"]
    again = measure_untuned({"same": plain, "stretched": recipe()}, names, records, tmp_path, OPTIONS)
    assert again == found  # nothing is measured twice


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    records, _ = trained(tmp_path)
    wider = recipe("model.blocks.a.channel_mixer.d_ff=24")
    with pytest.raises(ConfigError, match=r"wide cannot take the weights of plain: .*channel_mixer.* is not the same in both"):
        measure_untuned({"wide": wider}, {"wide": "plain"}, records, tmp_path, OPTIONS)


def test_a_failed_training_gives_nothing_and_a_missing_run_is_named(tmp_path: Path) -> None:
    records, plain = trained(tmp_path)
    failed = Records([{**records[0], "failed": "the loss is not finite"}])
    assert measure_untuned({"same": plain}, {"same": "plain"}, failed, tmp_path, OPTIONS) == []
    elsewhere = Records([{**records[0], "seed": 1}])
    with pytest.raises(CheckpointError, match=r"seed1: no such run; its weights are needed for plain"):
        measure_untuned({"same": plain}, {"same": "plain"}, elsewhere, tmp_path, OPTIONS)
