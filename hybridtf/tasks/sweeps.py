"""The settings that published synthetic benchmarks run, one by one, with the training that each paper tries.

A paper's figure is many runs: a task at several difficulties, each trained at several learning rates of which the best counts.
These functions give them as data: the task of each setting and the ``[train]`` tables to try, for whoever builds the recipes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybridtf.core import ConfigError, active, known_names
from hybridtf.tasks.mqar import MQARConfig, MQARRows
from hybridtf.tasks.synthetic import SyntheticConfig


@dataclass(frozen=True)
class Setting:
    """One setting of a benchmark.

    ``axis`` and ``value``: what differs from the first setting, and to what ("" and None for that one itself). ``task``: the
    task. ``trains``: ``[train]`` tables, the best of which counts. ``d_models``: widths that the paper runs, with ``n_layers``
    pairs of a mixer and a channel mixer (``channel_mixer``; None: mixers alone).
    """

    axis: str
    value: float | None
    task: SyntheticConfig
    trains: tuple[Mapping[str, Any], ...]
    d_models: tuple[int, ...] = (128,)
    n_layers: int = 2
    channel_mixer: str | None = "swiglu"


_ROWS = ("train size", (6400, 3200, 1600, 800))
_RECALL = (("vocabulary", (32, 64, 128)), ("length", (256, 512, 1024)), _ROWS)
_MAD: dict[str, tuple[tuple[str, tuple[float, ...]], ...]] = {
    "mad_compression": (("vocabulary", (32, 64, 128)), ("length", (64, 128, 256)), _ROWS),
    "mad_fuzzy_recall": _RECALL,
    "mad_in_context_recall": _RECALL,
    "mad_memorization": (("vocabulary", (512, 1024, 2048, 4096, 8192)),),
    "mad_noisy_recall": (
        ("vocabulary", (48, 80, 144)), ("length", (256, 512, 1024)), _ROWS, ("noise", (0.4, 0.6, 0.8)),
    ),
    "mad_selective_copying": (
        ("vocabulary", (32, 64, 128)), ("length", (512, 1024)), _ROWS, ("tokens to copy", (32, 64, 96)),
    ),
}
MAD_TASKS = tuple(_MAD)
"""The six tasks of MAD, by the names of their presets."""


def mad_sweep(task: str) -> tuple[Setting, ...]:
    """MAD's settings of one of :data:`MAD_TASKS`: the preset, then one axis at a time away from it.

    Source: Poli et al., https://arxiv.org/abs/2403.17844 and the files ``configs/tasks`` of its code. Training: 200 epochs of
    batches of 128 rows, AdamW, cosine down to 1e-6, the best of three learning rates and two weight decays; two pairs of a
    mixer and a SwiGLU, width 128. MAD's score of a task is the mean over its settings. Raises :class:`ConfigError` for
    other names.
    """
    if task not in _MAD:
        raise ConfigError(f"mad_sweep: {task!r} is no task of MAD. {known_names(task, MAD_TASKS)}")
    base = active()["tasks"].make({"type": task})
    assert isinstance(base, SyntheticConfig)
    changed = [(axis, value, _changed(base, axis, value)) for axis, values in _MAD[task] for value in values]
    return tuple(
        Setting(axis, value, config, tuple(_mad_tables(config))) for axis, value, config in [("", None, base), *changed]
    )


def _changed(base: SyntheticConfig, axis: str, value: float) -> SyntheticConfig:
    """``base`` with another value on one axis."""
    table = base.to_dict()
    if axis in ("vocabulary", "noise"):
        table["vocab_size" if axis == "vocabulary" else "noise"] = value
    else:
        field = {"length": "length", "train size": "n_rows", "tokens to copy": "n_data"}[axis]
        for side in ("train",) if axis == "train size" else ("train", "test"):
            table[side] = [{**size, field: value} for size in table[side]]
    return type(base).model_validate(table)


def _mad_tables(config: SyntheticConfig) -> Iterator[dict[str, Any]]:
    for lr in (1e-4, 5e-4, 1e-3):
        for weight_decay in (0.0, 0.1):
            yield {
                "epochs": 200, "batch_size": 128, "seq_len": config.train[0].length, "lr": lr, "weight_decay": weight_decay,
                "schedule": "cosine", "min_lr_fraction": 1e-6 / lr, "warmup": 0,
            }


def zoology_sweep() -> tuple[Setting, ...]:
    """The settings of figure 2 of Zoology (Arora et al., https://arxiv.org/abs/2312.04927): ``mqar`` at four lengths.

    Training: 64 epochs of 100,000 rows of 8,192 ids, AdamW with weight decay 0.1, cosine, the best of four learning rates; two
    mixers without channel mixers, widths 64 to 512. (The paper stops a run that passes 99 %.)
    """
    found = []
    for length, n_pairs, batch_size in ((64, 4, 512), (128, 8, 512), (256, 16, 256), (512, 64, 128)):
        train, test = (MQARRows(length=length, n_pairs=n_pairs, n_rows=n_rows) for n_rows in (100_000, 3_000))
        tables = tuple(
            {"epochs": 64, "batch_size": batch_size, "seq_len": length, "lr": lr, "weight_decay": 0.1, "schedule": "cosine"}
            for lr in (10**-4, 10 ** (-10 / 3), 10 ** (-8 / 3), 10**-2)
        )
        axis, value = ("", None) if length == 64 else ("length", length)
        task = MQARConfig(vocab_size=8192, train=(train,), test=(test,))
        found.append(Setting(axis, value, task, tables, (64, 128, 256, 512), 2, None))
    return tuple(found)


STATE_TRACKING_TASKS = ("parity", "modular_arithmetic_paper", "modular_arithmetic_brackets_paper")


def state_tracking_sweep() -> tuple[Setting, ...]:
    """Parity and modular arithmetic as Grazzi et al. (https://arxiv.org/abs/2411.12537) run them.

    Rows of 3 to 40 elements are trained on, 40 to 256 tested. Training: 100,000 steps of 256 rows, of which 10,000 warm up; the
    paper's learning rates lie between 1e-3 and 1e-2, of which the ends are given here, and it reports the best of three seeds.
    Scores are scaled so that chance is 0: (accuracy - chance) / (1 - chance).
    """
    found = []
    for i, name in enumerate(STATE_TRACKING_TASKS):
        task = active()["tasks"].make({"type": name})
        assert isinstance(task, SyntheticConfig)
        tables = tuple(
            {"steps": 100_000, "batch_size": 256, "seq_len": 40, "lr": lr, "warmup": 10_000, "seed": seed}
            for lr in (1e-3, 1e-2) for seed in range(3)
        )
        found.append(Setting("task" if i else "", i or None, task, tables))
    return tuple(found)
