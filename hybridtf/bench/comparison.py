"""``compare``: train several recipes, measure everything, and append a record for each thing as soon as it is known.

A comparison that was interrupted goes on where it stopped: what the records file holds of a recipe (by name and hash),
seed and kind is not done again if it was measured as is asked for now, and a half-trained run resumes. Only this process
writes records. """

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock, Timeout

from hybridtf.bench.arms import Arm, Entrant, Group, Tasks, groups_of
from hybridtf.bench.cells import Cell, Engine, Failure
from hybridtf.bench.extrapolation import HasLongDocuments
from hybridtf.bench.learning import RUNS, Learn, sweep_record, train_record
from hybridtf.bench.memory import measure_memory
from hybridtf.bench.options import CompareOptions
from hybridtf.bench.pool import LocalPool, ThisProcess
from hybridtf.bench.recorded import has_memory, has_speeds, sizes_of
from hybridtf.bench.records import Record, Records, append_record, read_records, select
from hybridtf.bench.speed import measure_speed
from hybridtf.bench.subject import Subject
from hybridtf.bench.sweep import Choice, choose
from hybridtf.core import ConfigError

RECORDS, LOCK = "records.jsonl", ".compare.lock"

Say: TypeAlias = Callable[[str], None]


def compare(
    recipes: Mapping[str, Entrant], out: str | Path, *, seeds: Sequence[int] = (0,), options: CompareOptions | None = None,
    say: Say | None = None, engine: Engine | None = None,
) -> Records:
    """Train and measure ``recipes`` (by name; or :class:`~hybridtf.bench.arms.Foreign` models) with every seed, into
    ``out/records.jsonl`` and run folders beside it.

    Quality and extrapolation are measured for every seed (a task without documents has no extrapolation: rows that are
    longer than the trained ones belong to its quality), cost for the first one; in speed the recipes take turns. Of several
    learning rates only the chosen one is measured on what is held out; all are ``sweep`` records. ``engine``: what runs the
    trainings, instead of the processes that ``options`` ask for. ``say`` is told what is being done, a line at a time.
    Returns the records of what was asked for alone, whatever else the file holds. A training that fails (its loss is not
    finite, no memory, too late, a crash) has a record with ``failed`` and ``result``, and the others go on; the next call
    tries it again.

    Raises :class:`ConfigError` for no or doubled work and where another comparison is at work in ``out``, and what training
    raises for wrong input and Ctrl-C.
    """
    if not recipes or not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError("compare needs at least one recipe, and seeds that differ")
    options = options or CompareOptions()
    tasks = Tasks()
    groups = groups_of(recipes, options, tasks)
    _refuse_twins(groups)
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be made ({error.strerror or error}); choose another folder") from None
    try:
        with FileLock(out / LOCK, blocking=False):
            run = _Comparison(out, options, tasks, tuple(seeds), say or (lambda line: None), engine or _engine(options))
            return run.all(groups)
    except Timeout:
        raise ConfigError(f"{out}: another comparison is at work there; wait for it, or choose another folder") from None


def _engine(options: CompareOptions) -> Engine:
    alone = options.workers == 1 and options.timeout_s is None
    return ThisProcess() if alone else LocalPool(options.workers, timeout_s=options.timeout_s)


def _refuse_twins(groups: Sequence[Group]) -> None:
    """Two arms with one run folder would train each other's model."""
    folders: dict[str, str] = {}
    for arm in (arm for group in groups for arm in group):
        folder = arm.cell(0).key
        if folder in folders:
            raise ConfigError(f"{folders[folder]} and {arm.name} have one folder, {folder}; give one of them another name")
        folders[folder] = arm.name


@dataclass
class _Comparison:
    out: Path
    options: CompareOptions
    tasks: Tasks
    seeds: tuple[int, ...]
    say: Say
    engine: Engine
    records: Records = field(init=False)
    failed: dict[Cell, Failure] = field(default_factory=dict)
    """What failed in this call: it is tried again in the next one."""

    def __post_init__(self) -> None:
        self.path = self.out / RECORDS
        # The line that a killed run left unfinished is measured again.
        self.records = read_records(self.path, skip_corrupt=True) if self.path.is_file() else Records()

    def all(self, groups: Sequence[Group]) -> Records:
        """Choose, learn, measure; then the records of it."""
        self.sweep([arm for group in groups for arm in group if arm.swept])
        if self.options.choose_only:
            return self._asked_for(groups, ())
        choices = [choose(self.records, group, self.seeds) for group in groups]
        for choice in choices:
            if choice.note:
                self.say(f"{choice.arm.name}: {choice.note}")
        self.learn(choices)
        arms = [choice.arm for choice in choices]
        for task in dict.fromkeys(arm.task_name for arm in arms):
            together = [arm for arm in arms if arm.task_name == task]
            self.memory(together)
            self.speed(together)
        return self._asked_for(groups, arms)

    def _asked_for(self, groups: Sequence[Group], arms: Sequence[Arm]) -> Records:
        """The records of this comparison; of learning rates that were not chosen the sweep alone belongs to the answer."""
        chosen = {(arm.name, arm.recipe_hash) for arm in arms}
        swept = {(arm.name, arm.recipe_hash) for group in groups for arm in group}
        found = Records(
            r for r in self.records if (r["recipe"], r["recipe_hash"]) in (swept if r["kind"] == "sweep" else chosen)
        )
        found.skipped = self.records.skipped
        return found

    def done(self, kind: str, subject: Subject, **fields: Any) -> bool:
        """Whether a record says it all already; what failed when it was last tried is tried again."""
        same = {"recipe": subject.name, "recipe_hash": subject.recipe_hash, "seed": subject.seed}
        found = select(self.records, kind, **same, **fields)
        return bool(found) and not found[-1].get("failed")

    def add(self, record: Record) -> None:
        append_record(self.path, record)
        self.records.append(record)

    # -- what depends on the weights ---------------------------------------------------------------------------------

    def sweep(self, arms: Sequence[Arm]) -> None:
        """Train every learning rate with every seed, and score it on the third side."""
        how = {"max_tokens": self.options.eval_tokens, "asked_stride": self.options.stride}
        cells = {
            arm.cell(seed): arm for arm in arms for seed in self.seeds if not self.done("sweep", arm.subject(seed), **how)
        }
        self._run(Learn(self.out, self.options, cells, dict.fromkeys(cells, ("sweep",)), tasks=self.tasks))

    def learn(self, choices: Sequence[Choice]) -> None:
        """Train what is not trained yet, and measure what was learnt."""
        arms, kinds, chosen = {}, {}, {}
        for choice in choices:
            for seed in self.seeds:
                cell = choice.arm.cell(seed)
                missing = self._missing(choice, choice.arm.subject(seed))
                if cell in self.failed and missing:  # in the sweep, a moment ago
                    self.add(self._failure_record(choice.arm, cell, "train"))
                elif missing:
                    arms[cell], kinds[cell], chosen[cell] = choice.arm, missing, choice.fields()
        self._run(Learn(self.out, self.options, arms, kinds, chosen, self.tasks))

    def _missing(self, choice: Choice, subject: Subject) -> tuple[str, ...]:
        arm = choice.arm
        how: dict[str, dict[str, Any]] = {
            "quality": {
                "max_tokens": self.options.eval_tokens, "asked_stride": self.options.stride, "swept": choice.swept,
            },
            "extrapolation": {"multiples": list(self.options.multiples), "max_documents": self.options.max_documents},
        }
        kinds = ["train", "model", "quality"]
        if isinstance(self.tasks.load(arm.task, arm.task_name), HasLongDocuments):
            kinds.append("extrapolation")
        return tuple(kind for kind in kinds if not self.done(kind, subject, **how.get(kind, {})))

    def _run(self, work: Learn) -> None:
        """Run the cells of ``work``, and write what comes of it."""
        for cell, found in self.engine.run(tuple(work.arms), work):
            if isinstance(found, str):
                self.say(found)
            elif isinstance(found, Failure):
                self.failed[cell] = found
                self.say(f"{cell}: training failed ({found.reason})")
                kind = "sweep" if "sweep" in work.kinds[cell] else "train"
                self.add(self._failure_record(work.arms[cell], cell, kind))
            else:
                self.add(found)

    def _failure_record(self, arm: Arm, cell: Cell, kind: str) -> Record:
        subject, folder, failure = arm.subject(cell.seed), self.out / RUNS / cell.key, self.failed[cell]
        if kind == "sweep":
            return sweep_record(subject, folder, cell, failure=failure)
        return train_record(subject, folder, cell, failure)

    # -- what does not -----------------------------------------------------------------------------------------------

    def memory(self, arms: Sequence[Arm]) -> None:
        """Bytes of each phase that are not recorded yet."""
        for arm in arms:
            subject = arm.subject(self.seeds[0])
            for phase in self.options.memory_phases:
                sizes = sizes_of(arms, phase, self.options)
                if has_memory(self.records, subject, phase, sizes, self.options):
                    continue
                self.say(f"{arm.name}: memory of {phase}")
                self.add(measure_memory(
                    subject, phase=phase, batch_size=sizes.batch_size, length=sizes.length, limit_bytes=self.options.limit_bytes
                ))

    def speed(self, arms: Sequence[Arm]) -> None:
        """Tokens a second of all recipes in turn: unless one session timed them all, all are measured, since they only
        compare when the machine was the same for all."""
        subjects = [arm.subject(self.seeds[0]) for arm in arms]
        for phase in self.options.speed_phases:
            sizes = sizes_of(arms, phase, self.options)
            if has_speeds(self.records, subjects, phase, sizes, self.options):
                continue
            self.say(f"speed of {phase}" + (f", {len(arms)} recipes in turn" if len(arms) > 1 else ""))
            first, *others = subjects
            for record in measure_speed(
                first, phases=(phase,), batch_size=sizes.batch_size, length=sizes.length, repeats=self.options.repeats,
                warmup=self.options.warmup, against=others,
            ):
                self.add(record)
