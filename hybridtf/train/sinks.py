"""Sinks: where the lines of ``log.jsonl`` are sent as well. They show a run and never decide one.

``RUN/sinks.json`` keeps how a tool calls the run and the last step sent of each event. What a resumed run computes again, it
does not send again: the numbers are the same.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from hybridtf.core import ConfigError
from hybridtf.core.files import atomic_file
from hybridtf.train.config import SinkName

PROJECT = "hybridtf"
STATE = "sinks.json"


def flatten(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, float]]:
    """The numbers of a log line as ``eval/bits_per_byte``; texts, lists and nulls are left out."""
    for name, value in values.items():
        here = f"{path}/{name}"
        if isinstance(value, Mapping):
            yield from flatten(value, here)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield here, float(value)


@dataclass(frozen=True)
class SinkRun:
    """What a sink is told of the run: its folder, whose name is its name; an id for good; the resolved recipe."""

    folder: Path
    id: str
    config: Mapping[str, Any] = field(default_factory=dict)
    resumed: bool = False

    @property
    def name(self) -> str:
        return self.folder.resolve().name


class Sink(ABC):
    """One tool. May raise whatever the tool raises: :class:`Sinks` sees to it."""

    package: ClassVar[str]
    """What is imported, before a run starts."""

    @abstractmethod
    def __init__(self, run: SinkRun) -> None: ...

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class TensorBoard(Sink):
    """Event files in ``RUN/tensorboard``."""

    package: ClassVar[str] = "torch.utils.tensorboard"

    def __init__(self, run: SinkRun) -> None:
        self._writer = importlib.import_module(self.package).SummaryWriter(log_dir=str(run.folder / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        # What is recorded as sent must outlive a kill.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Trackio(Sink):
    """The local store of trackio, under the project ``hybridtf`` or that of ``TRACKIO_PROJECT``."""

    package: ClassVar[str] = "trackio"

    def __init__(self, run: SinkRun) -> None:
        self._trackio = trackio = importlib.import_module(self.package)
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._run = trackio.init(
            project=project, name=f"{run.name}-{run.id}", config=dict(run.config), resume="allow" if run.resumed else "never",
            embed=False,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        # Not the run's own finish, after which trackio would finish it once more, and say so on stdout, at exit.
        self._trackio.finish()


class WandB(Sink):
    """Weights & Biases; where and how (``WANDB_MODE=offline``, ``WANDB_PROJECT``) its own environment variables say."""

    package: ClassVar[str] = "wandb"

    def __init__(self, run: SinkRun) -> None:
        wandb = importlib.import_module(self.package)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=run.name, id=run.id, dir=str(run.folder),
            config=dict(run.config), resume="allow",
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


SINKS: Mapping[SinkName, type[Sink]] = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": WandB}


def check_sinks(names: Sequence[SinkName]) -> None:
    """Raise :class:`ConfigError` for a sink whose package cannot be imported, saying what to install."""
    for name in names:
        try:
            importlib.import_module(SINKS[name].package)
        except ImportError as error:
            raise ConfigError(
                f"train.sinks: {name} cannot be imported ({error}); install it with: pip install 'hybridtf[track]'"
            ) from error


class Sinks:
    """The open sinks of a run. One that fails is named once and left out from then on; training goes on.

    ``say`` shows a message. Raises :class:`ConfigError` for one that cannot be opened: nothing has been trained yet.
    """

    def __init__(
        self, names: Sequence[SinkName], folder: Path, config: Mapping[str, Any], *, resumed: bool,
        say: Callable[[str], None],
    ) -> None:
        self._file, self._say = folder / STATE, say
        self._open: dict[str, Sink] = {}
        self._state: dict[str, dict[str, Any]] = _read_state(self._file) if resumed else {}
        for name in names:
            known = name in self._state
            state = self._state.setdefault(name, {"id": secrets.token_hex(4), "sent": {}})
            try:
                # What a tool has to say is no result of ours.
                with contextlib.redirect_stdout(sys.stderr):
                    self._open[name] = SINKS[name](SinkRun(folder, state["id"], config, resumed=known))
            except BaseException as error:
                self.close()
                if not isinstance(error, Exception):  # Ctrl-C while a tool waits for its network
                    raise
                raise ConfigError(
                    f"train.sinks: {name} could not be opened ({type(error).__name__}: {error}); take it out to train without"
                ) from error
        if names:
            self._save()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, event: str, step: int, line: Mapping[str, Any]) -> None:
        """Send the numbers of a log line to every sink that has not had them."""
        if not self._open:
            return
        values = dict(flatten(line, event))
        for name in list(self._open):
            sent = self._state[name]["sent"]
            if values and step > sent.get(event, -1) and self._try(name, lambda sink: sink.write(step, values)):
                sent[event] = step
        self._save()

    def close(self) -> None:
        """Close all; what is closed already stays so."""
        for name in list(self._open):
            self._try(name, lambda sink: sink.close())
            self._open.pop(name, None)

    def _try(self, name: str, call: Callable[[Sink], None]) -> bool:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                call(self._open[name])
            return True
        except Exception as error:  # a tool that shows a run must never end it
            del self._open[name]
            self._say(
                f"warning: the sink {name} failed ({type(error).__name__}: {error}) and gets nothing more; the run goes on, "
                "and log.jsonl has every line"
            )
            return False

    def _save(self) -> None:
        with atomic_file(self._file) as temporary:
            temporary.write_text(json.dumps(self._state), encoding="utf-8")


def _read_state(file: Path) -> dict[str, dict[str, Any]]:
    """What earlier parts of the run sent; nothing where there is no such file."""
    found: Any = {}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, dict) and {"id", "sent"} <= value.keys()}
