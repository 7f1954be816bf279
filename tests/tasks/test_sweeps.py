"""The settings of published benchmarks: as many as the papers run, each one axis away from the first, all trainable."""

from __future__ import annotations

from collections import Counter

import pytest

from hybridtf.core import ConfigError
from hybridtf.tasks import MAD_TASKS, Setting, mad_sweep, state_tracking_sweep, zoology_sweep
from hybridtf.train.config import TrainConfig


def trainable(setting: Setting) -> None:
    for table in setting.trains:
        config = TrainConfig.model_validate(table)
        batch = next(setting.task.load().train_batches(config.batch_size, config.seq_len))
        assert batch.inputs.shape == (config.batch_size, config.seq_len)
        break  # the tables of a setting differ in rates and seeds alone: checked below
    for table in setting.trains:
        TrainConfig.model_validate(table)
        assert {k: v for k, v in table.items() if k in ("batch_size", "seq_len")}.items() <= setting.trains[0].items()


@pytest.mark.parametrize(("task", "axes"), [
    ("mad_compression", {"": 1, "vocabulary": 3, "length": 3, "train size": 4}),
    ("mad_fuzzy_recall", {"": 1, "vocabulary": 3, "length": 3, "train size": 4}),
    ("mad_in_context_recall", {"": 1, "vocabulary": 3, "length": 3, "train size": 4}),
    ("mad_memorization", {"": 1, "vocabulary": 5}),
    ("mad_noisy_recall", {"": 1, "vocabulary": 3, "length": 3, "train size": 4, "noise": 3}),
    ("mad_selective_copying", {"": 1, "vocabulary": 3, "length": 2, "train size": 4, "tokens to copy": 3}),
], ids=lambda x: x if isinstance(x, str) else "")
def test_mad(task, axes) -> None:
    assert task in MAD_TASKS
    settings = mad_sweep(task)
    assert Counter(setting.axis for setting in settings) == axes
    base = settings[0].task.to_dict()
    for setting in settings:
        assert len({(t["lr"], t["weight_decay"]) for t in setting.trains}) == 6
        trainable(setting)
        table = setting.task.to_dict()
        changed = {key for key in base if base[key] != table[key]}
        wanted = {
            "": set(), "vocabulary": {"vocab_size"}, "noise": {"noise"}, "length": {"train", "test"}, "train size": {"train"},
            "tokens to copy": {"train", "test"},
        }[setting.axis]
        assert changed == wanted
        found = {"vocabulary": table.get("vocab_size"), "noise": table.get("noise"), "length": table["test"][0]["length"],
                 "train size": table["train"][0]["n_rows"], "tokens to copy": table["test"][0].get("n_data"), "": None}
        assert found[setting.axis] == setting.value
    assert settings[0].trains[0]["lr"] * settings[0].trains[0]["min_lr_fraction"] == pytest.approx(1e-6)


def test_the_six_of_mad_are_all_there_and_another_is_refused() -> None:
    assert len(MAD_TASKS) == 6
    with pytest.raises(ConfigError, match=r"'mad_fuzy_recall' is no task of MAD.*mad_fuzzy_recall"):
        mad_sweep("mad_fuzy_recall")


def test_zoology() -> None:
    settings = zoology_sweep()
    sizes = [(s.task.train[0].length, s.task.train[0].n_pairs, s.trains[0]["batch_size"]) for s in settings]
    assert sizes == [(64, 4, 512), (128, 8, 512), (256, 16, 256), (512, 64, 128)]
    for setting in settings:
        assert setting.channel_mixer is None
        assert setting.d_models == (64, 128, 256, 512)
        assert [round(t["lr"], 6) for t in setting.trains] == [0.0001, 0.000464, 0.002154, 0.01]
        assert setting.task.train[0].n_rows == 100_000
        trainable(setting)


def test_state_tracking() -> None:
    settings = state_tracking_sweep()
    assert [s.task.type_name() for s in settings] == ["word_problem", "modular_arithmetic", "modular_arithmetic"]
    assert [getattr(s.task, "brackets", None) for s in settings] == [None, False, True]
    for setting in settings:
        assert setting.task.train[0].length == 40
        assert setting.task.test[-1].length == 256
        assert len(setting.trains) == 6
        trainable(setting)
