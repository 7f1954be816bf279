"""All that a run is beside model and recipe: moments, random states, data position, counters; as tensors and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridtf.core import CheckpointError
from hybridtf.recipe import Recipe
from hybridtf.tasks import Stream
from hybridtf.train.checkpoint import TrainerState
from hybridtf.train.config import MAY_CHANGE, train_config
from hybridtf.train.optimizer import load_optimizer_tensors, optimizer_tensors
from hybridtf.train.step import Sums


@dataclass
class Counters:
    """How far a run is. ``since_log``: what the steps since the last log line scored; seconds are those of training."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    since_log: Sums = field(default_factory=Sums)
    seconds_since_log: float = 0.0

    def to_json(self) -> dict[str, Any]:
        sums = self.since_log
        return {
            "step": self.step, "tokens": self.tokens, "seconds": self.seconds,
            "seconds_since_log": self.seconds_since_log,
            "since_log": {"nats": sums.nats, "n_tokens": sums.n_tokens, "losses": sums.losses},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Counters:
        counters = {name: data[name] for name in ("step", "tokens", "seconds", "seconds_since_log")}
        return cls(**counters, since_log=Sums(**data["since_log"]))


@dataclass(frozen=True)
class Place:
    """Where randomness and data stand at the start of a step, so that the step can be run again."""

    random: Mapping[str, Tensor]
    stream: Mapping[str, Any]


def take_place(stream: Stream, device: torch.device) -> Place:
    """The place that the next step starts from."""
    random = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random["random.cuda"] = torch.cuda.get_rng_state(device)
    return Place(random, stream.state_dict())


def set_random(random: Mapping[str, Tensor], device: torch.device) -> None:
    """Set torch's generators (a model draws from no others) to a place's."""
    torch.set_rng_state(random["random.cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(random["random.cuda"], device)


def pack_state(
    counters: Counters, place: Place, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler,
    device: torch.device, teacher: Mapping[str, str] | None = None,
) -> TrainerState:
    """What a checkpoint holds beside weights and recipe; ``teacher``: which model it learns from."""
    data = {
        "format": 1, "device": device.type, "torch": str(torch.__version__), **counters.to_json(),
        "stream": dict(place.stream), "scaler": scaler.state_dict(),
    }
    if teacher is not None:
        data["teacher"] = dict(teacher)
    return TrainerState(data, {**place.random, **optimizer_tensors(optimizer)})


def unpack_state(
    state: TrainerState, stream: Stream, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler,
    device: torch.device, *, where: str,
) -> Counters:
    """Set all of it to the state of a checkpoint; :class:`CheckpointError` for one that cannot continue here."""
    data = state.data
    if data.get("device") != device.type:
        raise CheckpointError(
            f"{where}: the run was trained on {data.get('device')!r} and continues exactly only there, not on "
            f"{device.type!r}; start a new run from its weights instead"
        )
    try:
        counters = Counters.from_json(data)
        position = data["stream"]
        if scaler.is_enabled():
            scaler.load_state_dict(data["scaler"])
        random = {name: value for name, value in state.tensors.items() if name.startswith("random.")}
        set_random(random, device)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: its trainer state is incomplete ({error})") from error
    stream.load_state_dict(position)
    load_optimizer_tensors(optimizer, state.tensors, where=where)
    return counters


# -- the recipe of a resumed run ---------------------------------------------------------------------------------------


def changes(before: Recipe, after: Recipe) -> list[str]:
    """What a resumed run must not change and ``after`` does, as ``path: old -> new``."""
    old, new = _flat(before), _flat(after)
    return [f"{path}: {old.get(path, 'not set')} -> {new.get(path, 'not set')}" for path in sorted({*old, *new})
            if old.get(path) != new.get(path)]


def _flat(recipe: Recipe) -> dict[str, Any]:
    task = None if recipe.task is None else recipe.task.to_dict()
    train = train_config(recipe).to_dict()
    leaves = leaves_of({"model": recipe.model.to_dict(), "task": task or {}, "train": train}, "")
    free = {f"train.{name}" for name in MAY_CHANGE}
    return {path: value for path, value in leaves if path not in free}


def leaves_of(table: Mapping[str, Any], path: str) -> list[tuple[str, Any]]:
    """Every value of nested tables with its path, as ``(path.name, value)``."""
    out: list[tuple[str, Any]] = []
    for name, value in table.items():
        here = f"{path}.{name}" if path else name
        out += leaves_of(value, here) if isinstance(value, Mapping) else [(here, value)]
    return out


def refuse_changes(before: Recipe, after: Recipe, where: str) -> None:
    """Raise :class:`CheckpointError` naming every change that a resumed run must not make."""
    found = changes(before, after)
    if found:
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise CheckpointError(
            f"{where}: the recipe differs from the one that the run was started with: {'; '.join(found[:5])}{more}. A "
            f"resumed run may change only {', '.join(sorted(MAY_CHANGE))} of train; else start a new run from its "
            "weights"
        )
