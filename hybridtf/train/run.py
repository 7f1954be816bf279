"""One run: what it is made of, its steps, and how it evaluates, saves and fails."""

from __future__ import annotations

import contextlib
import math
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hybridtf.core import BuildContext, CheckpointError, ConfigError, NonFiniteError, RecipeError, kernels_used
from hybridtf.models import LanguageModel
from hybridtf.models.weights import load_weights
from hybridtf.recipe import Recipe, to_toml
from hybridtf.tasks import Batch, Task
from hybridtf.train.average import Average
from hybridtf.train.checkpoint import RunFolder, read_average, read_trainer_state, weights_path
from hybridtf.train.config import train_config
from hybridtf.train.early_stop import EarlyStop
from hybridtf.train.evaluate import EvalResult, check_context, check_scores, evaluate, group_metrics, require_carry
from hybridtf.train.given_weights import start_from
from hybridtf.train.interrupt import StopSignals
from hybridtf.train.log import Log
from hybridtf.train.nonfinite import locate
from hybridtf.train.optimizer import build_optimizer, describe_parameters, set_lr
from hybridtf.train.precision import DTYPES, check_precision, make_scaler
from hybridtf.train.progress import Reporter, counted
from hybridtf.train.recompute import set_checkpointed
from hybridtf.train.results import StepReport, TrainResult, bytes_per_token, in_words, planned_steps, planned_tokens, scores_of
from hybridtf.train.schedule import lr_factor, warmup_steps
from hybridtf.train.sinks import Sinks, check_sinks
from hybridtf.train.stats import LayerStats, watch_eagerly
from hybridtf.train.step import Sums, accumulate, after_step, check_loss_weights, clip
from hybridtf.train.teacher import Teacher
from hybridtf.train.trainer_state import Counters, Place, pack_state, set_random, take_place, unpack_state

LOWEST_SCALE = 1.0
"""Under fp16 a gradient that overflows at this scale of the loss is a fault, not a scale that is too high."""


class _StopEvaluation(Exception):
    """Ctrl-C or SIGTERM during an evaluation, which has nothing to finish."""


class Run:
    """One run: what it is made of, and its loop."""

    reporter: Reporter
    sinks: Sinks
    stop: StopSignals

    def __init__(
        self, recipe: Recipe, folder: RunFolder, device: torch.device, on_step: Callable[[StepReport], None] | None
    ) -> None:
        self.folder, self.device, self.on_step = folder, device, on_step
        self.config = config = train_config(recipe)
        check_precision(config.precision, device)
        check_sinks(config.sinks)
        self.task = _task_of(recipe, config.seed)
        check_context(self.task, config.eval_context)
        self.stream = self.task.train_batches(config.batch_size, config.seq_len)
        self.total = planned_steps(config, self.stream)
        warmup_steps(config, self.total)
        context = BuildContext(d_model=0, device=device, compute_dtype=DTYPES[config.precision], seed=config.seed)
        self.model: LanguageModel = recipe.model.build(context)
        check_scores(self.task, self.model)
        check_loss_weights(self.model, config.loss_weights)
        if config.eval_context == "document" and config.eval_tokens != 0:
            require_carry(self.model)
        set_checkpointed(self.model, config.checkpoint_layers)
        self.teacher = None if config.teacher is None else Teacher(config.teacher, self.model, recipe.task)
        if self.teacher is not None:
            self.config = config = config.model_copy(update={"teacher": self.teacher.options})
        self.optimizer = build_optimizer(self.model, config)
        self.average: Average | None = None
        self.scaler = make_scaler(config.precision, device)
        kernels = kernels_used(self.model) | ({} if self.teacher is None else self.teacher.kernels())
        self.recipe = recipe.resolved(kernels=kernels, seed=config.seed).model_copy(update={"train": config})
        # Layers that are trained by themselves have a loss, but none of the text.
        self.bytes_per_token = None if self.teacher is not None and self.teacher.alone else bytes_per_token(self.task)
        self.counters = Counters()
        self.early_stop = EarlyStop(config, self.task)
        self.checked: float | None = None
        self.evaluation: EvalResult | None = None
        self.metrics: Mapping[str, float] | None = None
        self.ema_metrics: Mapping[str, float] | None = None
        self.stats: Mapping[str, Any] | None = None
        self.eval_seconds = 0.0
        self.resumed = False

    # -- start -----------------------------------------------------------------------------------------------------

    def start(self, *, resume: bool, init_from: str | Path | None) -> None:
        """Fill the model and everything else, from nothing, from weights, or from the newest checkpoint."""
        self.folder.clean()
        torch.manual_seed(self.config.seed)
        start_from(self.model, self.recipe, init_from)
        if resume:
            found = self.folder.checkpoint()
            load_weights(self.model, weights_path(found))
            state = read_trainer_state(found)
            if self.teacher is not None:
                self.teacher.require(state.data.get("teacher"), str(found))
            self.counters = unpack_state(state, self.stream, self.optimizer, self.scaler, self.device, where=str(found))
            if self.counters.step > self.total:
                raise ConfigError(f"the run is at step {self.counters.step}, past the {counted(self.total, 'step')} asked for")
        if self.config.ema_decay is not None:
            self.average = Average(self.model, self.config.ema_decay, self.config.ema_every)
            if resume:
                self.average.load(read_average(found), where=str(found))
        self.resumed = resume
        self.log = Log(self.folder.log, after=self.counters.step if resume else None)
        if (line := self.log.found.get("check")) is not None:
            self.checked = line["value"]
        self.folder.write_recipe(self.recipe)
        self.folder.write_parameters(describe_parameters(self.optimizer))
        self.model.train()
        if self.config.compile:
            self.model.compile()
        if not resume:
            self.save()

    def open_sinks(self) -> Sinks:
        """Open the sinks, which the caller closes."""
        config = tomllib.loads(to_toml(self.recipe))
        self.sinks = Sinks(self.config.sinks, self.folder.path, config, resumed=self.resumed, say=self.reporter.say)
        return self.sinks

    # -- the loop --------------------------------------------------------------------------------------------------

    def loop(self) -> TrainResult:
        config, counters = self.config, self.counters
        if self.resumed:
            self.reporter.resuming(counters.step)
        elif self.teacher is not None and self.teacher.said:
            self.reporter.say(self.teacher.said)
        if self.evaluation_due() and "eval" not in self.log.found:
            self.evaluate()  # a signal cut it off before the run was resumed
        if self.checked is None:
            self.check()  # its line was lost with the machine, after the checkpoint was safe
        while not self.ended:
            self.step()
            self.check()
            at_end = self.ended
            if counters.step % config.log_every == 0 or at_end:
                self.write_log()
            if self.stats is not None:
                self.record("stats", self.stats)
            if self.evaluation_due():
                self.evaluate()
            if counters.step % config.save_every == 0 or at_end or self.stop.received:
                self.save()
            if self.stop.received and not at_end:
                raise self.stop.error(counters.step, self.folder.checkpoint(counters.step))
        if not self.evaluated_before():
            self.evaluate()
        if self.stop.received:
            raise self.stop.error(counters.step, self.folder.checkpoint(counters.step))
        return TrainResult(
            self.folder.path, self.folder.checkpoint(counters.step), self.recipe, self.model, counters.step,
            counters.tokens, counters.seconds, self.evaluation, self.metrics, self.ema_metrics,
            self.eval_seconds, counters.step if self.early_stop.reached(self.checked) else None,
        )

    @property
    def ended(self) -> bool:
        """Whether no step is to follow."""
        return self.counters.step == self.total or self.early_stop.reached(self.checked)

    def step(self) -> None:
        """One optimizer step. Nothing is changed when its loss or gradient is not finite: then it raises."""
        began = time.perf_counter()
        config, counters = self.config, self.counters
        place = take_place(self.stream, self.device)
        batches = [next(self.stream) for _ in range(config.accumulation)]
        lr = config.lr * lr_factor(config, counters.step, self.total)
        set_lr(self.optimizer, lr)
        self.optimizer.zero_grad(set_to_none=True)
        stats = self.layer_stats(place, batches)
        with stats.watching() if stats is not None and not config.compile else contextlib.nullcontext():
            sums = accumulate(self.model, batches, config, self.scaler, self.device, self.teacher)
        if not sums.finite():
            raise self.not_finite("loss", place, batches)
        self.scaler.unscale_(self.optimizer)
        if stats is not None:
            stats.before_update()
        norm = clip(self.model, config.clip_norm)
        if not math.isfinite(norm) and not (self.scaler.is_enabled() and self.scaler.get_scale() > LOWEST_SCALE):
            raise self.not_finite("gradient", place, batches)
        # Under fp16 a step whose gradient overflowed is left out here, and the scale lowered.
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        stepped = self.scaler.get_scale() >= scale
        if stepped:
            after_step(*([self.model] if self.teacher is None else self.teacher.learning))
        self.stats = None if stats is None else stats.after_update()
        if self.average is not None and stepped:
            self.average.update(self.model, counters.step + 1)
        self.count(sums, time.perf_counter() - began)
        self.last = StepReport(counters.step, sums.loss, lr, norm, sums.n_tokens, self.model)
        self.reporter.step(counters.step, self.eta())
        if self.on_step is not None:
            self.on_step(self.last)

    def count(self, sums: Sums, seconds: float) -> None:
        """The step just done, into the counters."""
        counters = self.counters
        counters.step += 1
        self.checked = None
        counters.tokens += sums.n_tokens
        counters.seconds += seconds
        counters.seconds_since_log += seconds
        counters.since_log.add(sums)

    def layer_stats(self, place: Place, batches: list[Batch]) -> LayerStats | None:
        """What watches the coming step, where it is to be watched; random states stay as they are."""
        every = self.config.stats_every
        if every is None or (self.counters.step + 1) % every:
            return None
        stats = LayerStats(self.model)
        if self.config.compile:
            watch_eagerly(stats, self.model, batches, self.config)
            set_random(place.random, self.device)
        return stats

    def record(self, event: str, values: Mapping[str, Any]) -> None:
        """Add a line of the step just done to the log, and send it to the sinks."""
        self.log.write(event, self.counters.step, values)
        self.sinks.write(event, self.counters.step, values)

    def eta(self) -> float:
        """Seconds of training that are left."""
        return self.counters.seconds / self.counters.step * (self.total - self.counters.step)

    def write_log(self) -> None:
        """One line about the steps since the last one."""
        counters = self.counters
        sums, seconds = counters.since_log, counters.seconds_since_log
        line: dict[str, Any] = {"tokens": counters.tokens, "loss": sums.loss}
        if self.bytes_per_token is not None:
            line["bits_per_byte"] = sums.loss / math.log(2) / self.bytes_per_token
        line |= {
            "lr": self.last.lr, "grad_norm": self.last.norm if math.isfinite(self.last.norm) else None,
            "tokens_per_second": sums.n_tokens / seconds, "seconds": counters.seconds,
        }
        if sums.losses:
            line["losses"] = sums.means()
        self.record("train", line)
        self.reporter.logged(counters.step, line, self.eta())
        counters.since_log, counters.seconds_since_log = Sums(), 0.0

    # -- evaluation, saving, failing ---------------------------------------------------------------------------------

    def evaluation_due(self) -> bool:
        """Whether an evaluation belongs to the step just done; the one at the end is apart."""
        step, every = self.counters.step, self.config.eval_every
        return every is not None and step > 0 and not self.ended and step % every == 0

    def evaluated_before(self) -> bool:
        """Whether the log of a finished run has the evaluation that its options ask for; takes its ``metrics``."""
        line = self.log.found.get("eval")
        if line is None or self.log.after != self.counters.step or not self.eval_options().items() <= line.items():
            return False
        self.metrics = {name: line[name] for name in line["metrics"]}
        averaged = line.get("ema")
        self.ema_metrics = None if averaged is None else {name: averaged[name] for name in line["metrics"]}
        return True

    def eval_options(self) -> dict[str, Any]:
        """The options of an evaluation that a resumed run may change."""
        options = {"eval_tokens": self.config.eval_tokens, "eval_context": self.config.eval_context}
        return options | ({"eval_ema": True} if self.config.eval_ema else {})

    def evaluate(self) -> None:
        """Score the held-out side and log it, leaving every random state as it was; a signal ends it without result."""
        config = self.config
        if config.eval_tokens == 0 or self.stop.received:
            return
        began = time.perf_counter()
        self.reporter.evaluating(self.counters.step, planned_tokens(self.task, config.eval_tokens))
        place = take_place(self.stream, self.device)
        averaged: EvalResult | None = None
        try:
            result = self.score()
            if self.average is not None and config.eval_ema:
                with self.average.in_place(self.model):
                    averaged = self.score()
        except _StopEvaluation:
            return
        finally:
            set_random(place.random, self.device)
        seconds = time.perf_counter() - began
        self.evaluation, self.metrics = result, result.metrics
        self.eval_seconds += seconds
        values: dict[str, Any] = {"tokens": self.counters.tokens, **scores_of(result), "n_tokens": result.n_tokens}
        groups = group_metrics(self.task, result)
        values |= {"groups": groups} if groups else {}
        if averaged is not None:
            self.ema_metrics = averaged.metrics
            values["ema"] = scores_of(averaged)
        self.record("eval", values | {"seconds": seconds, **self.eval_options(), "metrics": list(result.metrics)})
        measured = in_words(result) + (f"; average: {in_words(averaged)}" if averaged is not None else "")
        self.reporter.say(f"step {self.counters.step}/{self.total}  held out ({counted(result.n_tokens, 'token')}): {measured}")
        for name, metrics in groups.items():
            self.reporter.say(f"    {name}: {self.task.metric} {metrics[self.task.metric]:.4f}")

    def check(self) -> None:
        """Find out whether the task is learnt, where that is due. No signal cuts it off: the step's checkpoint needs it."""
        counters = self.counters
        if not self.early_stop.due(counters.step) or counters.step == self.total:
            return
        began, place = time.perf_counter(), take_place(self.stream, self.device)
        found = self.early_stop.check(self.model)
        set_random(place.random, self.device)
        self.checked, reached = found.value, self.early_stop.reached(found.value)
        seconds = time.perf_counter() - began
        self.eval_seconds += seconds
        self.record("check", {**found.to_json(), "stop_at": self.config.stop_at, "reached": reached, "seconds": seconds})
        if reached:
            self.reporter.say(f"step {counters.step}/{self.total}  {found.words} reaches stop_at: the run ends")

    def score(self) -> EvalResult:
        """The held-out result of the model as it is."""
        config = self.config
        # Compiled code is for the steps of training: states that grow would be compiled anew at every call.
        with torch.compiler.set_stance("force_eager") if config.compile else contextlib.nullcontext():
            return evaluate(
                self.model, self.task, seq_len=config.seq_len, batch_size=config.batch_size,
                max_tokens=None if config.eval_tokens == "all" else config.eval_tokens,
                context=config.eval_context, precision=config.precision, on_batch=self._on_batch,
            )

    def _on_batch(self, n_tokens: int) -> None:
        if self.stop.received:
            raise _StopEvaluation
        self.reporter.scored(n_tokens)

    def save(self, place: Place | None = None) -> Path:
        """Write a checkpoint, then remove old ones."""
        counters = self.counters
        here = place or take_place(self.stream, self.device)
        teacher = None if self.teacher is None else self.teacher.to_json()
        state = pack_state(counters, here, self.optimizer, self.scaler, self.device, teacher)
        try:
            path = self.folder.save(
                counters.step, self.model, self.recipe, state, None if self.average is None else self.average.tensors,
                max_shard_bytes=self.config.max_shard_bytes,
            )
        except CheckpointError as error:
            latest = self.folder.latest()
            kept = "No earlier checkpoint exists" if latest is None else f"The run can be resumed from {latest}"
            raise CheckpointError(f"{error}. {kept}") from error
        if place is None:
            self.folder.prune(self.config.keep_checkpoints, counters.step)
        return path

    def not_finite(self, what: str, place: Place, batches: list[Batch]) -> NonFiniteError:
        """The error that says where it began, after saving the state before the step; older checkpoints stay."""
        failed = self.counters.step + 1

        def again() -> None:
            set_random(place.random, self.device)
            self.optimizer.zero_grad(set_to_none=True)
            accumulate(self.model, batches, self.config, self.scaler, self.device, self.teacher)

        where = locate(self.model, again, None if self.teacher is None else self.teacher.model)
        set_random(place.random, self.device)
        # What is on disk of this very step was saved before anything went wrong.
        saved = self.folder.find(self.counters.step)
        if saved is None:
            try:
                saved = self.save(place)
            except CheckpointError:
                saved = self.folder.checkpoint()
        return NonFiniteError(
            f"step {failed}: the {what} is not finite; {where}. The last good checkpoint is {saved}, "
            f"of step {step_of(saved)}"
        )


def _task_of(recipe: Recipe, seed: int) -> Task:
    """The task that is trained on. Raises :class:`RecipeError` for none, :class:`ConfigError` for too small a vocabulary."""
    if recipe.task is None:
        raise RecipeError("", [("task", "the recipe has no section [task]; training needs one")])
    task: Task = recipe.task.load(seed)
    vocab_size = getattr(recipe.model, "vocab_size", None)
    if vocab_size is not None and vocab_size < task.vocab_size:
        raise ConfigError(f"model.vocab_size = {vocab_size} is less than the {task.vocab_size} ids of the task {task.name!r}")
    return task


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(checkpoint.name.rpartition("-")[2].removesuffix(".old"))
