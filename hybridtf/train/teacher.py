"""Training by matching a teacher: a model that stays as it is, and gives hidden states and scores to come close to.

Two ways. End to end (``given = "student"``) the student reads the text itself:

    loss * cross-entropy  +  logits * T^2 KL(softmax(z_teacher / T) || softmax(z / T))  +  hidden * H

(T the temperature; https://arxiv.org/abs/1503.02531), with H the mean of (y - y_teacher)^2 over the outputs y of the matched
layers, their channels and real tokens. Layer by layer (``given = "teacher"``) each matched layer reads what the teacher's
layer read, and the loss is H and the layers' own auxiliary losses: the hidden-state alignment of MOHAWK
(https://arxiv.org/abs/2408.10189), and close to the attention transfer of LoLCATs (https://arxiv.org/abs/2410.10254). No layer
then suffers from what others have yet to learn.

Axes: b batch, t time, d d_model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtf.core import CheckpointError, ConfigError, Edges, Segments, TaskConfig, kernels_used
from hybridtf.models import LanguageModel, Stack
from hybridtf.models.compose import add_losses
from hybridtf.models.language_model import IGNORED, Loss
from hybridtf.models.weights import canonical_tensors
from hybridtf.tasks import Batch
from hybridtf.train.checkpoint import load_run
from hybridtf.train.config import TeacherOptions
from hybridtf.train.teachable import check_edges, check_tokenizers, matched_layers

HIDDEN, LOGITS = "teacher_hidden", "teacher_logits"
"""The losses in the log."""


class Seen(NamedTuple):
    """What a layer was called with, and its output (b t d), or (b t s d) of several streams."""

    x: Tensor
    edges: Edges
    y: Tensor


class Teacher:
    """The model of ``options.run`` beside ``student``, which is no part of it and in none of its checkpoints.

    ``task``: what both read. ``said``: what nobody can check, in words; empty where nothing is left open. ``options`` name the
    checkpoint that was read. Raises :class:`ConfigError` where one cannot teach the other, :class:`CheckpointError` where
    there is no such model.
    """

    def __init__(self, options: TeacherOptions, student: nn.Module, task: TaskConfig | None = None) -> None:
        if not isinstance(student, LanguageModel):
            raise ConfigError("train.teacher: only a language model of ours has layers that can be matched")
        some = next(student.parameters())
        loaded = load_run(Path(options.run).expanduser(), device=some.device, dtype=some.dtype)
        if not isinstance(loaded.model, LanguageModel):
            raise ConfigError(f"train.teacher.run: {options.run} is no language model of ours")
        # A run that goes on has another newest checkpoint later: this one is what is learnt from.
        self.options, self.model = options.model_copy(update={"run": str(loaded.path)}), loaded.model.requires_grad_(False)
        self.weights_digest = _digest(loaded.model)
        self.said = check_tokenizers(options.run, loaded.recipe.task, task)
        self.layers = matched_layers(options, student, loaded.model)
        if self.alone:
            check_edges(self.layers, student, loaded.model)
        self.learning: tuple[nn.Module, ...] = (student,)
        """The parts of the student that are trained."""
        if options.trains == "replaced":
            self.learning = self._freeze_others(student)

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

    def kernels(self) -> dict[str, dict[str, str]]:
        """As :func:`kernels_used`, under ``teacher``."""
        return {f"teacher.{name}": phases for name, phases in kernels_used(self.model).items()}

    def to_json(self) -> dict[str, str]:
        """For a checkpoint: which model it was."""
        return {"run": self.options.run, "weights": self.weights_digest}

    def require(self, before: Mapping[str, Any] | None, where: str) -> None:
        """Raise :class:`CheckpointError` where a run began with a teacher of other weights; its place may be another."""
        if before is None or before.get("weights") != self.weights_digest:
            was = "" if before is None else f", which lay in {before.get('run')}"
            raise CheckpointError(
                f"{where}: the weights of train.teacher.run = {self.options.run} are not those of the teacher that the run was "
                f"started with{was}; give its checkpoint"
            )

    def loss(self, student: LanguageModel, batch: Batch) -> Loss:
        """``total`` is the cross-entropy summed over scored tokens; or H summed over real ones, where layers learn alone."""
        options, ids, segments = self.options, batch.inputs, batch.segments
        with torch.no_grad(), _watched(self.model.stack, self.layers if options.hidden else ()) as wanted:
            scores = self.model(ids, segments=segments, logits="all" if options.logits else "none").logits
        if self.alone:
            found = [student.stack.run_layer(i, seen.x, seen.edges, segments=segments) for i, seen in wanted.items()]
            losses: dict[str, tuple[Tensor, Tensor]] = {}
            for out in found:
                losses = add_losses(losses, out.losses)
            return Loss(*_hidden([out.x for out in found], list(wanted.values()), segments), losses)
        with _watched(student.stack, tuple(wanted)) as mine:
            given = student(ids, segments=segments)
        own = student.loss_of(given, batch.targets)
        losses = dict(own.losses)
        if options.hidden:
            losses[HIDDEN] = _hidden([seen.y for seen in mine.values()], list(wanted.values()), segments)
        if options.logits:
            losses[LOGITS] = _divergence(given.logits, scores, batch.targets, options.temperature)
        return Loss(own.total, own.count, losses)

    def _freeze_others(self, student: LanguageModel) -> tuple[nn.Module, ...]:
        """Only the mixers of the matched layers are trained, and of them only what would be trained anyway."""
        blocks = student.stack.blocks()
        mixers = [mixer for i in self.layers if (mixer := blocks[i].parts().get("mixer")) is not None]
        # Directions that are drawn once, and the base beneath low-rank additions, stay still.
        learning = {id(p): p for mixer in mixers for p in mixer.parameters() if p.requires_grad}
        if not learning:
            raise ConfigError("train.teacher.trains = 'replaced': the matched layers have no mixers with parameters to train")
        student.requires_grad_(False)
        for p in learning.values():
            p.requires_grad_(True)
        return tuple({id(mixer): mixer for mixer in mixers}.values())


def _digest(model: nn.Module) -> str:
    """Of names, dtypes, shapes and numbers of all tensors."""
    found = hashlib.sha256()
    for name, tensor in sorted(canonical_tensors(model).items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]


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
