"""``compare``: train several recipes, measure everything, and append a record for each thing as soon as it is known.

A comparison that was interrupted goes on where it stopped: what the records file holds of a recipe (by name and hash),
seed and kind is not done again, and a half-trained run resumes. """

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from hybridtf.bench.describe import measure_model
from hybridtf.bench.extrapolation import MULTIPLES, HasLongDocuments, measure_extrapolation
from hybridtf.bench.memory import measure_memory
from hybridtf.bench.quality import measure_quality
from hybridtf.bench.records import Record, Records, append_record, make_record, read_records, select
from hybridtf.bench.speed import measure_speed
from hybridtf.bench.subject import Subject
from hybridtf.core import ConfigError, NonFiniteError, RecipeError
from hybridtf.cost.phases import Phase
from hybridtf.recipe import Recipe
from hybridtf.tasks import Task
from hybridtf.train import RunFolder, TrainConfig, load_model, read_log, train, train_config
from hybridtf.train.early_stop import stopped_at_step
from hybridtf.train.precision import DTYPES
from hybridtf.train.progress import Style

RECORDS = "records.jsonl"

Say: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class CompareOptions:
    """What is measured, and how much of it.

    ``steps``: optimizer steps instead of what the recipes say. ``device``: None takes a GPU if there is one.
    ``eval_tokens``, ``stride``: see :func:`~hybridtf.bench.quality.measure_quality`. ``max_documents``: that
    extrapolation reads. ``context``: the prompt that prefill and decode are measured with. ``limit_bytes``: also
    search the longest length whose peak stays within it, for each of ``memory_phases`` (on a CPU predicted, which
    takes a while). """

    steps: int | None = None
    device: torch.device | str | None = None
    stride: int | None = None
    eval_tokens: int | None = None
    multiples: Sequence[int] = MULTIPLES
    max_documents: int | None = 16
    context: int = 1024
    repeats: int = 5
    warmup: int = 2
    speed_phases: Sequence[Phase] = ("train", "prefill", "decode")
    memory_phases: Sequence[Phase] = ("train", "decode")
    limit_bytes: int | None = None
    progress: Style = "auto"
    """How training shows itself."""


def compare(
    recipes: Mapping[str, Recipe], out: str | Path, *, seeds: Sequence[int] = (0,),
    options: CompareOptions | None = None, say: Say | None = None,
) -> Records:
    """Train and measure ``recipes`` (by name) with every seed, into ``out/records.jsonl`` and run folders beside it.

    Quality and extrapolation are measured for every seed (a task without documents has no extrapolation: rows that are
    longer than the trained ones belong to its quality), cost for the first one; in speed the recipes take turns.
    ``say`` is told what is being done, a line at a time. Returns the records of these recipes alone, whatever else the
    file holds. A recipe whose training ends in a loss that is not finite, or without memory, has a ``train`` record with
    ``failed``, and the others go on.

    Raises :class:`ConfigError` for no or doubled work, and what training raises for wrong input and Ctrl-C.
    """
    if not recipes or not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError("compare needs at least one recipe, and seeds that differ")
    run = _Comparison(Path(out), options or CompareOptions(), say or (lambda line: None))
    entries = [_Entry(name, recipe, run.options, seeds[0]) for name, recipe in recipes.items()]
    for entry in entries:
        for seed in seeds:
            run.learn(entry, seed)
        run.memory(entry)
    run.speed(entries)
    asked = {(entry.name, entry.subject.recipe_hash) for entry in entries}
    found = Records(r for r in run.records if (r["recipe"], r["recipe_hash"]) in asked)
    found.skipped = run.records.skipped
    return found


class _Entry:
    """A recipe with its options resolved, and the subject that stands for it."""

    def __init__(self, name: str, recipe: Recipe, options: CompareOptions, seed: int) -> None:
        if recipe.task is None:
            raise RecipeError(name, [("task", "the recipe has no section [task]; a comparison needs one")])
        config = train_config(recipe)
        if options.steps is not None:
            config = config.model_copy(update={"steps": options.steps, "tokens": None, "epochs": None})
        # The comparison measures quality itself, on every token.
        self.name, self.config = name, config.model_copy(update={"eval_tokens": 0, "eval_every": None})
        self.recipe = recipe
        self.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.seed = seed
        self.subject = self.with_seed(seed)

    def with_seed(self, seed: int) -> Subject:
        """The subject of one seed."""
        autocast = None if self.config.precision == "fp32" else DTYPES[self.config.precision]
        return Subject.from_recipe(self.trained_with(seed), self.name, seed=seed, device=self.device, autocast=autocast)

    def trained_with(self, seed: int) -> Recipe:
        """The recipe as it is trained."""
        return self.recipe.model_copy(update={"train": self.config.model_copy(update={"seed": seed})})

    def folder(self, seed: int) -> str:
        """Name of the run's folder: another recipe under the same name gets another."""
        return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', self.name)}-{self.subject.recipe_hash}-seed{seed}"


@dataclass
class _Comparison:
    out: Path
    options: CompareOptions
    say: Say
    records: Records = field(init=False)
    tasks: dict[str, Task] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path = self.out / RECORDS
        # The line that a killed run left unfinished is measured again.
        self.records = read_records(self.path, skip_corrupt=True) if self.path.is_file() else Records()

    def done(self, kind: str, subject: Subject, **fields: Any) -> bool:
        """Whether a record says it all already; what failed is tried again."""
        same = {"recipe": subject.name, "recipe_hash": subject.recipe_hash, "seed": subject.seed}
        return any(not r.get("failed") for r in select(self.records, kind, **same, **fields))

    def add(self, record: Record) -> None:
        append_record(self.path, record)
        self.records.append(record)

    def task(self, recipe: Recipe) -> Task:
        """The recipe's task; recipes of one task share it. Only its held-out side is used, which no seed changes."""
        assert recipe.task is not None  # _Entry has refused that
        key = repr(recipe.task)
        if key not in self.tasks:
            self.tasks[key] = recipe.task.load(0)
        return self.tasks[key]

    # -- what depends on the weights ---------------------------------------------------------------------------------

    def learn(self, entry: _Entry, seed: int) -> None:
        """Train with one seed and measure what was learnt."""
        subject, config = entry.with_seed(seed), entry.config
        how: dict[str, dict[str, Any]] = {
            "quality": {"max_tokens": self.options.eval_tokens, "asked_stride": self.options.stride},
            "extrapolation": {"multiples": list(self.options.multiples), "max_documents": self.options.max_documents},
        }
        all_kinds = ("train", "model", "quality", "extrapolation")
        kinds = [kind for kind in all_kinds if not self.done(kind, subject, **how.get(kind, {}))]
        if "extrapolation" in kinds and not isinstance(self.task(entry.recipe), HasLongDocuments):
            kinds.remove("extrapolation")
        if not kinds:
            return
        folder = self.out / "runs" / entry.folder(seed)
        if "train" in kinds and not self._train(entry, subject, folder):
            return
        model = load_model(folder, device=entry.device)
        if "model" in kinds:
            self.add(measure_model(subject, model))
        if "quality" in kinds:
            self.say(f"{entry.name}, seed {seed}: held-out quality")
            self.add(self._quality(subject, model, entry.recipe, config))
        if "extrapolation" in kinds:
            self.say(f"{entry.name}, seed {seed}: beyond the trained length")
            self.add(measure_extrapolation(
                subject, model, self.task(entry.recipe), trained_length=config.seq_len,
                multiples=self.options.multiples, batch_size=config.batch_size,
                max_documents=self.options.max_documents,
            ))

    def _quality(self, subject: Subject, model: nn.Module, recipe: Recipe, config: TrainConfig) -> Record:
        return measure_quality(
            subject, model, self.task(recipe), seq_len=config.seq_len, stride=self.options.stride,
            batch_size=config.batch_size, max_tokens=self.options.eval_tokens,
        )

    def _train(self, entry: _Entry, subject: Subject, folder: Path) -> bool:
        """Train and record it; False where the training failed."""
        resume = RunFolder(folder).latest() is not None
        self.say(f"{entry.name}, seed {subject.seed}: {'resuming training' if resume else 'training'}")
        failed = None
        try:
            train(
                entry.trained_with(subject.seed), folder, device=entry.device, resume=resume,
                progress=self.options.progress,
            )
        except (NonFiniteError, torch.OutOfMemoryError) as error:
            failed = f"{type(error).__name__}: {error}"
            self.say(f"{entry.name}, seed {subject.seed}: training failed ({failed})")
        self.add(make_record("train", subject.identity(subject.build()), {**train_fields(folder), "failed": failed}))
        return failed is None

    # -- what does not -----------------------------------------------------------------------------------------------

    def memory(self, entry: _Entry) -> None:
        """Bytes of each phase that is not recorded yet."""
        for phase in self.options.memory_phases:
            batch_size, length = self._sizes(entry.config, phase)
            if self.done("memory", entry.subject, phase=phase, batch_size=batch_size, length=length):
                continue
            self.say(f"{entry.name}: memory of {phase}")
            self.add(measure_memory(
                entry.subject, phase=phase, batch_size=batch_size, length=length, limit_bytes=self.options.limit_bytes
            ))

    def speed(self, entries: Sequence[_Entry]) -> None:
        """Tokens a second of all recipes in turn: unless all are recorded, all are measured, since they only compare
        when the machine was the same for all."""
        for phase in self.options.speed_phases:
            batch_size, length = self._sizes(entries[0].config, phase)
            same = {"phase": phase, "batch_size": batch_size, "length": length}
            if all(self.done("speed", entry.subject, **same) for entry in entries):
                continue
            self.say(f"speed of {phase}" + (f", {len(entries)} recipes in turn" if len(entries) > 1 else ""))
            first, *others = [entry.subject for entry in entries]
            for record in measure_speed(
                first, phases=(phase,), batch_size=batch_size, length=length, repeats=self.options.repeats,
                warmup=self.options.warmup, against=others,
            ):
                self.add(record)

    def _sizes(self, config: TrainConfig, phase: Phase) -> tuple[int, int]:
        """Batch size and length that a phase is measured with."""
        return (config.batch_size, config.seq_len) if phase == "train" else (1, self.options.context)


def train_fields(folder: Path) -> dict[str, Any]:
    """What the log of a run says: ``curve`` of [step, tokens, nats a token], and the totals (zero of a run that failed
    before it logged anything)."""
    log = RunFolder(folder).log
    lines = [line for line in read_log(log) if line.get("event") == "train"]
    last = lines[-1] if lines else {"step": 0, "tokens": 0, "seconds": 0.0}
    return {
        "curve": [[line["step"], line["tokens"], line["loss"]] for line in lines], "steps": last["step"],
        "tokens": last["tokens"], "seconds": last["seconds"],
        "tokens_per_s": last["tokens"] / last["seconds"] if lines else None,
        "stopped_at_step": stopped_at_step(read_log(log)),
    }
