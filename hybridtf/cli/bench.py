"""``bench``: speed and memory of recipes or runs, and how far a run reads beyond its trained length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridtf.cli.options import BatchSize, Device, Json, Limit, Records, Set, Threads, takes
from hybridtf.cli.output import interruptible, print_json, print_measures, say
from hybridtf.cli.sources import (
    choose_device,
    is_run,
    names_of,
    need_file,
    parse_size,
    read_recipe,
    read_run,
    registries,
    run_subject,
    save_records,
    table_json,
)

if TYPE_CHECKING:
    from hybridtf.bench.records import Record
    from hybridtf.bench.subject import Subject
    from hybridtf.cost import phases
    from hybridtf.train import LoadedRun

Sources = Annotated[list[str], typer.Argument(metavar="RECIPE_OR_RUN...", help="Recipe files or names, or run folders.")]
Against = Annotated[
    list[str] | None,
    typer.Option("--against", metavar="RECIPE_OR_RUN", help="Measure this beside the others, and compare with it."),
]
Multiples = Annotated[
    str | None, typer.Option("--multiples", metavar="N,N,...", help="Of the trained length. Default: 1,2,4,8,16.")
]
Length = Annotated[
    int | None, typer.Option("--length", min=1, help="Tokens a row; for decode, the prompt before it. Default: 1024.")
]
LENGTH = 1024


Rounds = Annotated[int, typer.Option("--repeats", min=1, help="Rounds; fewer than 10 bear no verdict.")]
Warmup = Annotated[int, typer.Option("--warmup", min=0, help="Runs before them that do not count.")]


class Phase(StrEnum):
    """What is measured."""

    train = "train"
    prefill = "prefill"
    decode = "decode"


class Dtype(StrEnum):
    """What it is measured in; below float32 by autocast."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Phases = Annotated[list[Phase] | None, typer.Option("--phase", help="May be repeated.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Computed in, by autocast.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    group = typer.Typer(name="bench", help="Measure speed, memory and extrapolation.", rich_markup_mode=None)
    group.command("speed")(speed)
    group.command("kernel")(kernel)
    group.command("memory")(memory)
    group.command("extrapolation")(extrapolation)
    app.add_typer(group)


@dataclass(frozen=True)
class Measured:
    """What ``speed`` and ``memory`` are told alike: which models, how they are called, and what becomes of the records."""

    sources: Sources
    against: Against = None
    phase: Phases = None
    length: Length = None
    batch_size: BatchSize = 1
    dtype: DtypeOption = Dtype.float32
    set_: Set = None
    device: Device = None
    output: Records = None
    json: Json = False

    def subjects(self) -> list[Subject]:
        """The models, the one to compare with first."""
        return _subjects([*(self.against or ()), *self.sources], self.set_, self.device, self.dtype)


@takes(Measured)
def speed(
    asked: Measured,
    repeats: Rounds = 20,
    warmup: Warmup = 2,
    threads: Threads = None,
) -> None:
    """Measure tokens a second in training, prefill and decode. Several models take turns."""
    from hybridtf.bench.speed import measure_speed
    from hybridtf.cost import phases as known
    from hybridtf.report.detail_tables import speed_table

    registries()
    need_file(asked.output)
    subjects = asked.subjects()
    chosen = known.PHASES if asked.phase is None else tuple(_phase(one) for one in asked.phase)
    with interruptible("nothing was written"):
        records = measure_speed(
            subjects[0], against=subjects[1:], phases=chosen, batch_size=asked.batch_size, length=asked.length or LENGTH,
            repeats=repeats, warmup=warmup, threads=threads,
        )
    _finish(records, speed_table, asked.output, asked.json)


def kernel(
    op: Annotated[str, typer.Argument(metavar="OP", help="The op, as list ops names it.")],
    source: Annotated[str, typer.Argument(metavar="RECIPE_OR_RUN", help="Whose call of it is timed.")],
    kernels: Annotated[
        list[str] | None, typer.Option("--kernel", metavar="NAME", help="May be repeated. Default: all that can run.")
    ] = None,
    phase: Annotated[Phase, typer.Option("--phase", help="In train with the backward.")] = Phase.train,
    length: Length = 1024,
    batch_size: BatchSize = 1,
    dtype: DtypeOption = Dtype.float32,
    repeats: Rounds = 20,
    warmup: Warmup = 2,
    threads: Threads = None,
    set_: Set = None,
    device: Device = None,
    output: Records = None,
    json: Json = False,
) -> None:
    """Time the kernels of an op on a call of a model.

    All kernels that can make the call take turns. In training the backward belongs to it.
    """
    from hybridtf.bench.kernel_speed import measure_kernels
    from hybridtf.report.detail_tables import kernel_table

    registries()
    need_file(output)
    (subject,) = _subjects([source], set_, device, dtype)
    with interruptible("nothing was written"):
        records = measure_kernels(
            subject, op, kernels=kernels or (), phase=_phase(phase), length=length or LENGTH, batch_size=batch_size,
            repeats=repeats, warmup=warmup, threads=threads,
        )
    _finish(records, kernel_table, output, json)


@takes(Measured)
def memory(
    asked: Measured,
    limit: Limit = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", min=1, help="The search for it ends here. Default: 1,048,576.")
    ] = None,
    rest: Annotated[bool, typer.Option("--rest", help="On a CPU, also what a fresh process holds beyond.")] = False,
    fits: Annotated[bool, typer.Option("--fits", help="Try the longest length in child processes instead.")] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=1, help="Seconds for each child process. Default: 600.")
    ] = None,
) -> None:
    """Count bytes by kind, and the peak.

    Kinds: weights, gradients, optimizer, activations and state.
    """
    from hybridtf.bench.memory import measure_memory
    from hybridtf.report.detail_tables import memory_table
    from hybridtf.report.fits_table import fits_table

    registries()
    need_file(asked.output)
    limit_bytes = None if limit is None else parse_size(limit, "--limit")
    _refuse_idle(
        ("--max-length", max_length is not None and not fits and limit is None, "it needs --limit or --fits"),
        ("--timeout", timeout is not None and not fits and not rest, "it needs --fits or --rest"),
        ("--rest", rest and fits, "--fits finds the longest length alone"),
        ("--length", asked.length is not None and fits, "--fits tries lengths of its own, to --max-length"),
    )
    max_length, timeout = max_length or 1 << 20, timeout or 600.0
    with interruptible("nothing was written"):
        records = [
            _try_lengths(subject, one, asked.batch_size, limit_bytes, timeout, max_length) if fits else
            measure_memory(
                subject, phase=_phase(one), batch_size=asked.batch_size, length=asked.length or LENGTH, limit_bytes=limit_bytes,
                max_length=max_length, rest=rest, timeout_s=timeout,
            )
            for subject in asked.subjects()
            for one in asked.phase or (Phase.train,)
        ]
    _finish(records, fits_table if fits else memory_table, asked.output, asked.json)


def _try_lengths(
    subject: Subject, phase: Phase, batch_size: int, limit_bytes: int | None, timeout_s: float, max_length: int
) -> Record:
    """The longest length by trial, each trial told as it ends."""
    from hybridtf.bench.fits import Probe, measure_fits
    from hybridtf.report.failures import ended

    def told(one: Probe) -> None:
        say(f"{subject.name}, {phase.value}: {one.length:,} tokens: {'fits' if one.fits else ended(one.outcome)}")

    return measure_fits(
        subject, phase=_phase(phase), batch_size=batch_size, limit_bytes=limit_bytes, timeout_s=timeout_s,
        max_length=max_length, progress=told,
    )


def extrapolation(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run, checkpoint or model folders.")],
    against: Against = None,
    multiples: Multiples = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", metavar="N,N,...", help="Tokens instead of multiples, as in 1k,64k,1M.")
    ] = None,
    trained_length: Annotated[
        int | None, typer.Option("--trained-length", min=1, help="Default: the recipe's train.seq_len.")
    ] = None,
    chunk: Annotated[
        int | None, typer.Option("--chunk", min=1, help="Tokens a call. Default: the trained length, at most 512.")
    ] = None,
    batch_size: BatchSize = 8,
    timeout: Annotated[float | None, typer.Option("--timeout", min=0.001, help="Seconds a length may take.")] = None,
    max_documents: Annotated[int | None, typer.Option("--max-documents", min=1, help="Read at most so many.")] = None,
    stride: Annotated[
        int | None, typer.Option("--stride", min=1, help="Read documents in windows that move by so many tokens.")
    ] = None,
    max_rows: Annotated[int, typer.Option("--max-rows", min=1, help="Rows of each length, where they are drawn.")] = 128,
    device: Device = None,
    output: Records = None,
    json: Json = False,
) -> None:
    """Score runs beyond the length they were trained at.

    The state is carried from chunk to chunk, so that memory stays flat.
    """
    from hybridtf.bench.extrapolation import measure_extrapolation
    from hybridtf.report.detail_tables import extrapolation_table

    registries()
    need_file(output)
    _refuse_idle(("--multiples", multiples is not None and lengths is not None, "--lengths says all of them"))
    asked: dict[str, Any] = {"multiples": _multiples(multiples or "1,2,4,8,16"), "lengths": _lengths(lengths)}
    asked |= {"chunk": chunk, "batch_size": batch_size, "timeout": timeout, "max_documents": max_documents}
    asked |= {"stride": stride, "max_rows": max_rows}
    sources, records = [*(against or ()), *runs], []
    with interruptible("nothing was written"):
        for source, name in zip(sources, names_of(sources), strict=True):
            run = read_run(source, device)
            task, trained = _task_and_length(run, source, trained_length)
            records.append(measure_extrapolation(run_subject(run, name), run.model, task, trained_length=trained, **asked))
    _finish(records, extrapolation_table, output, json)


def _refuse_idle(*options: tuple[str, bool, str]) -> None:
    """Refuse an option that would do nothing: its name, whether that is so, and why."""
    from hybridtf.core import ConfigError

    for name, idle, why in options:
        if idle:
            raise ConfigError(f"{name} does nothing here: {why}")


# -- what they share ---------------------------------------------------------------------------------------------------


def _multiples(text: str) -> list[int]:
    from hybridtf.core import ConfigError

    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigError(f"--multiples {text}: must be whole numbers with commas between, such as 1,4,16")
    return [int(n) for n in text.split(",")]


def _lengths(text: str | None) -> list[int] | None:
    """Tokens of ``64``, ``64k`` (1,024 each) or ``1M``, with commas between."""
    from hybridtf.core import ConfigError

    if text is None:
        return None
    words = [re.fullmatch(r"(\d+)([kKmM]?)", word) for word in text.split(",")]
    if not all(words):
        raise ConfigError(f"--lengths {text}: must be tokens with commas between, such as 1k,64k,1M")
    return [int(word[1]) << 10 * " km".index(word[2].lower() or " ") for word in words if word]


def _task_and_length(run: LoadedRun, source: str, length: int | None) -> tuple[Any, int]:
    """The task that a run was trained on, and the trained length: ``length`` where it is given."""
    from hybridtf.core import DataError

    trained = length or (run.recipe.train.seq_len if run.recipe.train is not None else None)
    if run.recipe.task is None or trained is None:
        raise DataError(f"{source}: its recipe has no section [task] or [train], so there are no data or no trained length")
    return run.recipe.task.load(0), trained


def _phase(phase: Phase) -> phases.Phase:
    return phase.value


def _subjects(sources: Sequence[str], overrides: Sequence[str] | None, device: str | None, dtype: Dtype) -> list[Subject]:
    import torch

    from hybridtf.bench.subject import Subject

    autocast = None if dtype is Dtype.float32 else getattr(torch, dtype.value)
    names = names_of(sources)
    _refuse_changed_runs(sources, overrides)
    found = []
    for source, name in zip(sources, names, strict=True):
        if is_run(source):
            found.append(replace(run_subject(read_run(source, device), name), autocast=autocast))
        else:
            recipe = read_recipe(source, overrides)
            found.append(Subject.from_recipe(recipe, name, device=choose_device(device), autocast=autocast))
    return found


def _refuse_changed_runs(sources: Sequence[str], overrides: Sequence[str] | None) -> None:
    from hybridtf.core import ConfigError

    run = next((source for source in sources if is_run(source)), None)
    if overrides and run is not None:
        raise ConfigError(f"{run}: is a run, and --set changes recipes alone: its model is measured as it was trained")


def _finish(records: Sequence[Record], table: Any, output: Path | None, json: bool) -> None:
    from hybridtf.report.evidence import gather

    save_records(output, records)
    made = table(gather(records))
    if json:
        print_json(table_json(made, records))
    else:
        print_measures(made)
