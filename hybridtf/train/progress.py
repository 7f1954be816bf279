"""What a person sees of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Style: TypeAlias = Literal["auto", "bar", "lines", "none"]


class Reporter:
    """Shows steps and messages on stderr. ``auto``: a bar on a terminal, a line a log step elsewhere.

    ``pause``: seconds between the lines of one evaluation.
    """

    def __init__(
        self, total: int, style: Style = "auto", console: Console | None = None, *, pause: float = 10.0
    ) -> None:
        self.total, self.pause = total, pause
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self.style = style if style != "auto" else "bar" if self.console.is_terminal else "lines"
        self._bar: Progress | None = None
        self._task: Any = None
        self._evaluated, self._shown = 0, 0.0

    def __enter__(self) -> Self:
        if self.style == "bar":
            self._bar = Progress(
                TextColumn("train"), BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(), TextColumn("eta {task.fields[eta]}"), console=self.console,
            )
            self._task = self._bar.add_task("train", total=self.total, text="", eta="?")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, eta: float) -> None:
        """A step is done; moves the bar. ``eta``: seconds that are left."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, eta=duration(eta))

    def logged(self, step: int, line: Mapping[str, Any], eta: float) -> None:
        """A log line was written."""
        bits = f"  {line['bits_per_byte']:.3f} bits/byte" if line.get("bits_per_byte") is not None else ""
        text = f"loss {line['loss']:.4f}{bits}  {count(line['tokens_per_second'])} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, text=text)
        elif self.style == "lines":
            self._print(f"step {step}/{self.total}  {text}  lr {line['lr']:.2e}  eta {duration(eta)}")

    def resuming(self, step: int) -> None:
        """The run goes on from ``step``."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
        self.say(f"resuming from step {step}")

    def evaluating(self, step: int, planned: str) -> None:
        """An evaluation begins, of ``planned`` tokens in words."""
        self._evaluated, self._shown = step, time.monotonic()
        self.say(f"step {step}/{self.total}  evaluating on {planned} held-out tokens")

    def scored(self, n_tokens: int) -> None:
        """So many tokens of the evaluation are scored: moves the bar's text, or adds a line every ``pause`` seconds."""
        if self._bar is not None:
            self._bar.update(self._task, text=f"evaluating: {count(n_tokens)} tokens scored")
        elif self.style == "lines" and time.monotonic() - self._shown >= self.pause:
            self._shown = time.monotonic()
            self._print(f"step {self._evaluated}/{self.total}  evaluating: {counted(n_tokens, 'token')} scored")

    def say(self, message: str) -> None:
        """One line, above the bar."""
        if self.style != "none":
            self._print(message)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False)


def duration(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    whole = math.ceil(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def counted(n: int, what: str) -> str:
    """``1 step``, ``2,497 steps``."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def count(value: float) -> str:
    """``950``, ``12.3k``, ``4.56M``."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"
