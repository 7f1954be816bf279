"""Training by matching a teacher: a model that stays as it is, and gives hidden states and scores to come close to.

Two ways. End to end (``given = "student"``) the student reads the text itself:

    loss * cross-entropy  +  logits * T^2 KL(softmax(z_teacher / T) || softmax(z / T))  +  hidden * H

(T the temperature; https://arxiv.org/abs/1503.02531), with H the mean of (y - y_teacher)^2 over the outputs y of the matched
layers, their channels and real tokens. Layer by layer (``given = "teacher"``) each matched layer reads what the teacher's
layer read, and H alone is the loss: the hidden-state alignment of MOHAWK (https://arxiv.org/abs/2408.10189), and close to the
attention transfer of LoLCATs (https://arxiv.org/abs/2410.10254). No layer then suffers from what others have yet to learn.

Axes: b batch, t time, d d_model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtf.core import ConfigError, Edges, Segments
from hybridtf.models import LanguageModel, Stack
from hybridtf.models.language_model import IGNORED, LanguageModelConfig, Loss
from hybridtf.tasks import Batch
from hybridtf.train.checkpoint import load_run
from hybridtf.train.config import TeacherOptions

HIDDEN, LOGITS = "teacher_hidden", "teacher_logits"
"""The losses in the log."""


class Seen(NamedTuple):
    """What a layer was called with, and its output (b t d), or (b t s d) of several streams."""

    x: Tensor
    edges: Edges
    y: Tensor


class Teacher:
    """The model of ``options.run`` beside ``student``, which is no part of it and in none of its checkpoints.

    Raises :class:`ConfigError` where one cannot teach the other, :class:`CheckpointError` where there is no such model.
    """

    def __init__(self, options: TeacherOptions, student: nn.Module) -> None:
        if not isinstance(student, LanguageModel):
            raise ConfigError("train.teacher: only a language model of ours has layers that can be matched")
        some = next(student.parameters())
        loaded = load_run(options.run, device=some.device, dtype=some.dtype)
        if not isinstance(loaded.model, LanguageModel):
            raise ConfigError(f"train.teacher.run: {options.run} is no language model of ours")
        self.options, self.model = options, loaded.model.requires_grad_(False)
        self.layers = _matched(options, student.config, self.model.config)
        if options.given == "teacher":
            _check_edges(self.layers, student.stack, self.model)
        if options.trains == "replaced":
            self._freeze_others(student)

    @property
    def alone(self) -> bool:
        """Whether layers are trained one by one, and the student's scores are nobody's concern."""
        return self.options.given == "teacher"

    @property
    def weights(self) -> dict[str, float]:
        """Of the losses by name."""
        return {HIDDEN: self.options.hidden, LOGITS: self.options.logits}

    @property
    def total_weight(self) -> float:
        """Of ``total``."""
        return self.options.hidden if self.alone else self.options.loss

    def loss(self, student: LanguageModel, batch: Batch) -> Loss:
        """``total`` is the cross-entropy summed over scored tokens, or H times their number where it is all that counts."""
        options, ids, segments = self.options, batch.inputs, batch.segments
        with torch.no_grad(), _watched(self.model.stack, self.layers if options.hidden else ()) as wanted:
            scores = self.model(ids, segments=segments, logits="all" if options.logits else "none").logits
        if self.alone:
            outputs = [
                student.stack.visit(i)(seen.x, seen.edges, segments=segments, state=None, context=None, keep=0).x
                for i, seen in wanted.items()
            ]
            hidden, n_real = _hidden(outputs, list(wanted.values()), segments)
            n_scored = (batch.targets != IGNORED).sum()
            return Loss(hidden / n_real * n_scored, n_scored, {})
        with _watched(student.stack, tuple(wanted)) as found:
            out = student(ids, segments=segments)
        own = student.loss_of(out, batch.targets)
        losses = dict(own.losses)
        if options.hidden:
            losses[HIDDEN] = _hidden([seen.y for seen in found.values()], list(wanted.values()), segments)
        if options.logits:
            losses[LOGITS] = _divergence(out.logits, scores, batch.targets, options.temperature)
        return Loss(own.total, own.count, losses)

    def _freeze_others(self, student: LanguageModel) -> None:
        """Only the mixers of the matched layers are trained."""
        student.requires_grad_(False)
        blocks = student.stack.blocks()
        for i in self.layers:
            mixer = blocks[i].parts().get("mixer")
            if mixer is not None:
                mixer.requires_grad_(True)
        if not any(p.requires_grad for p in student.parameters()):
            raise ConfigError("train.teacher.trains = 'replaced': the matched layers have no mixers with parameters")


# -- which layers --------------------------------------------------------------------------------------------------------


def _matched(options: TeacherOptions, student: LanguageModelConfig, teacher: LanguageModelConfig) -> tuple[int, ...]:
    """The layers that are matched, after it is clear that both models can be held beside each other."""
    for name in ("vocab_size", "d_model") if options.hidden else ("vocab_size",):
        mine, theirs = getattr(student, name), getattr(teacher, name)
        if mine != theirs:
            raise ConfigError(f"train.teacher: {name} = {theirs} of {options.run} is not the {mine} of the model that learns")
    if not options.hidden and options.trains == "all":
        return ()
    one, other = student.layers(), teacher.layers()
    if len(one) != len(other):
        raise ConfigError(f"train.teacher: {options.run} has {len(other)} layers, and the model that learns {len(one)}")
    if isinstance(options.layers, tuple):
        outside = [i for i in options.layers if i >= len(one)]
        if outside:
            raise ConfigError(f"train.teacher.layers names layer {outside[0]}; the model has layers 0 to {len(one) - 1}")
        return tuple(sorted(set(options.layers)))
    if options.layers == "all":
        return tuple(range(len(one)))
    mixers = [[getattr(config.blocks[name], "mixer", None) for name in config.layers()] for config in (student, teacher)]
    found = tuple(i for i, (mine, theirs) in enumerate(zip(*mixers, strict=True)) if mine != theirs)
    if not found:
        raise ConfigError(f"train.teacher.layers = 'replaced': every mixer is that of {options.run}; give 'all' or numbers")
    return found


def _check_edges(layers: Sequence[int], stack: Stack, teacher: LanguageModel) -> None:
    """A layer that is called by itself has the edges of the teacher alone."""
    written = set(teacher.stem.writes)
    for block in teacher.stack.blocks():
        written.update(block.writes, *(part.writes for part in block.parts().values()))
    for i in layers:
        block = stack.blocks()[i]
        reads = set(block.reads).union(*(part.reads for part in block.parts().values())) - set(block.gives)
        if missing := sorted(reads - written):
            why = f"layer {i} reads the edge {missing[0]!r}, which the teacher has not"
            raise ConfigError(f"train.teacher.given = 'teacher': {why}")


# -- losses ----------------------------------------------------------------------------------------------------------------


@contextmanager
def _watched(stack: Stack, layers: Sequence[int]) -> Iterator[dict[int, Seen]]:
    """Filled, while the stack runs once inside, with what the ``layers`` were called with and gave."""
    found: dict[int, Seen] = {}
    calls = 0

    def block(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal calls
        if calls in layers:
            found[calls] = Seen(args[0], dict(args[1]), output.x)
        calls += 1

    handles = [layer.register_forward_hook(block) for layer in dict.fromkeys(stack.blocks())] if layers else []
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _hidden(found: Sequence[Tensor], wanted: Sequence[Seen], segments: Segments | None) -> tuple[Tensor, Tensor]:
    """The squared distance of outputs, a mean over channels and layers, summed over real tokens; and their number."""
    total = found[0].new_zeros((), dtype=_wide(found[0]))
    for mine, seen in zip(found, wanted, strict=True):
        apart = (mine.to(total.dtype) - seen.y.to(total.dtype)).square().flatten(2).mean(-1)  # [b, t]
        total = total + (apart if segments is None else apart[segments.real]).sum()
    n_real = torch.ones_like(found[0].flatten(2)[..., 0]) if segments is None else segments.real
    return total / len(found), n_real.sum()


def _divergence(logits: Tensor, wanted: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """T^2 KL(teacher || student) in nats, summed over scored tokens; and their number."""
    scored = targets != IGNORED
    mine, theirs = ((z[scored].to(_wide(z)) / temperature).log_softmax(-1) for z in (logits, wanted))
    return F.kl_div(mine, theirs, reduction="sum", log_target=True) * temperature**2, scored.sum()


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
