"""The work of a cell: train it, and measure what was learnt. What is found is handed on as a record as soon as it is known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import nn

from hybridtf.bench.arms import Arm, Tasks
from hybridtf.bench.cells import Cell, Failure
from hybridtf.bench.describe import measure_model
from hybridtf.bench.extrapolation import HasLongDocuments, measure_extrapolation
from hybridtf.bench.options import CompareOptions
from hybridtf.bench.quality import measure_quality
from hybridtf.bench.records import Record, make_record
from hybridtf.bench.subject import Subject
from hybridtf.core import ConfigError, HybridTFError
from hybridtf.core.config import tuples
from hybridtf.cost.trace import Tracer, reach_of
from hybridtf.train import RunFolder, TrainConfig, load_model, read_log, train
from hybridtf.train.early_stop import stopped_at_step

RUNS = "runs"
_PATIENCE = 60.0
"""Seconds that the worker of a comparison that was killed may take to end."""


@dataclass(frozen=True)
class Learn:
    """Trains cells into folders under ``out`` and measures ``kinds`` of each: ``sweep`` (the third side of its task), or any of
    ``train``, ``model``, ``quality`` and ``extrapolation``. Yields records, and lines that say what is being done.

    ``chosen``: what is to be said in ``quality`` of how the learning rate was chosen, by cell.
    """

    out: Path
    options: CompareOptions
    arms: Mapping[Cell, Arm]
    kinds: Mapping[Cell, tuple[str, ...]]
    chosen: Mapping[Cell, Mapping[str, Any]] = field(default_factory=dict)
    tasks: Tasks = field(default_factory=Tasks, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "tasks": Tasks()}  # another process loads what it needs: corpora are large

    def __call__(self, cell: Cell) -> Iterator[Record | str]:
        """Raises what training raises."""
        arm, kinds = self.arms[cell], self.kinds[cell]
        folder = self.out / RUNS / cell.key
        subject = arm.subject(cell.seed)
        with _alone(folder):
            began = RunFolder(folder).latest() is not None
            # A learning rate that was chosen was trained in the sweep.
            if "sweep" in kinds or ("train" in kinds and not (arm.swept and began)):
                yield f"{cell}{_at(cell, arm)}: {'resuming training' if began else 'training'}"
                self._train(arm, cell, folder, resume=began)
            if "train" in kinds:
                yield train_record(subject, folder, cell)
            model = load_model(folder, device=arm.device, config=arm.recipe.model)
            yield from self._measured(cell, subject, model, folder)

    def _train(self, arm: Arm, cell: Cell, folder: Path, *, resume: bool) -> None:
        train(
            arm.trained_with(cell.seed), folder, device=arm.device, resume=resume,
            progress=self.options.progress if self.options.workers == 1 else "none",
        )

    def _measured(self, cell: Cell, subject: Subject, model: nn.Module, folder: Path) -> Iterator[Record | str]:
        arm, kinds, config = self.arms[cell], self.kinds[cell], self.arms[cell].config
        task = self.tasks.load(arm.task, arm.task_name)
        scoring: dict[str, Any] = {
            "seq_len": config.seq_len, "stride": self.options.stride, "batch_size": config.batch_size,
            "max_tokens": self.options.eval_tokens,
        }
        if "sweep" in kinds:
            yield f"{cell}{_at(cell, arm)}: quality on the third side"
            yield sweep_record(subject, folder, cell, measure_quality(subject, model, task.validation(), **scoring))
        if "model" in kinds:
            yield measure_model(subject, model)
        if "quality" in kinds:
            yield f"{cell}: held-out quality"
            found = measure_quality(subject, model, task, **scoring)
            chosen = dict(self.chosen[cell])
            notes = [note for note in (found["note"], chosen.pop("note")) if note]
            yield {**found, **chosen, "note": "; ".join(notes) or None}
        if "extrapolation" in kinds and isinstance(task, HasLongDocuments):
            yield f"{cell}: beyond the trained length"
            yield measure_extrapolation(
                subject, model, task, trained_length=config.seq_len, multiples=self.options.multiples,
                batch_size=config.batch_size, max_documents=self.options.max_documents, too_few="record",
            )


def _at(cell: Cell, arm: Arm) -> str:
    return f", lr {cell.lr:g}" if arm.swept else ""


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One writer a run folder: the worker of a comparison that was killed may live on for a moment."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder.parent / f".{folder.name}.lock", timeout=_PATIENCE):
            yield
    except Timeout:
        raise ConfigError(f"{folder}: another process is training there; end it, or wait for it") from None


# -- records -----------------------------------------------------------------------------------------------------------


def train_record(subject: Subject, folder: Path, cell: Cell, failure: Failure | None = None) -> Record:
    """The ``train`` record of a cell that was trained, or of one that failed."""
    fields = train_fields(folder)
    flops, note = (None, None) if failure else step_flops(subject)
    fields |= {"task": cell.task, "lr": cell.lr, "flops": None if flops is None else flops * fields["steps"], "note": note}
    return make_record("train", subject.identity(subject.build()), {**fields, **_outcome(failure)})


def sweep_record(
    subject: Subject, folder: Path, cell: Cell, scored: Record | None = None, failure: Failure | None = None
) -> Record:
    """The ``sweep`` record of a cell: one learning rate with one seed, its curve, and its score on the third side."""
    names = (
        "metric", "value", "interval", "higher_is_better", "baselines", "groups", "n_tokens", "max_tokens", "asked_stride",
    )
    fields = {"task": cell.task, "lr": cell.lr, **{name: scored and scored[name] for name in names}, **train_fields(folder)}
    return make_record("sweep", subject.identity(subject.build()), {**fields, **_outcome(failure)})


def _outcome(failure: Failure | None) -> dict[str, str | None]:
    return {"failed": failure.reason if failure else None, "result": failure.result if failure else "ok"}


def step_flops(subject: Subject) -> tuple[int | None, str | None]:
    """Operations of one optimizer step as it is trained, every row as long as the longest; or None, and why."""
    table: Any = subject.recipe
    config = TrainConfig(**tuples(table["train"]))
    model = subject.build()
    own = getattr(model, "config", None)
    reach = reach_of(own) if callable(getattr(own, "stacks", None)) else config.seq_len
    try:
        work = Tracer(subject, "train", reach).at(config.seq_len, config.batch_size).work
    except (HybridTFError, RuntimeError, NotImplementedError) as error:  # a foreign model may do what shapes alone cannot
        return None, f"operations are not known: {type(error).__name__}: {error}".splitlines()[0]
    unknown = sorted(set().union(*(part.unknown for part in work.values())))
    if unknown:
        return None, f"operations are not known: no formula of {', '.join(unknown)}"
    once = {"forward": config.accumulation, "backward": config.accumulation}
    return sum(part.flops * once.get(name, 1) for name, part in work.items()), None


def train_fields(folder: Path) -> dict[str, Any]:
    """What the log of a run says: ``curve`` of [step, tokens, nats a token], and the totals (zero of a run that failed
    before it logged anything)."""
    log = RunFolder(folder).log
    logged = read_log(log) if log.is_file() else []
    lines = [line for line in logged if line.get("event") == "train"]
    last = lines[-1] if lines else {"step": 0, "tokens": 0, "seconds": 0.0}
    return {
        "curve": [[line["step"], line["tokens"], line["loss"]] for line in lines], "steps": last["step"],
        "tokens": last["tokens"], "seconds": last["seconds"],
        "tokens_per_s": last["tokens"] / last["seconds"] if lines else None, "stopped_at_step": stopped_at_step(logged),
    }
