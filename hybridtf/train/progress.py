"""What a person sees of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Style: TypeAlias = Literal["auto", "bar", "lines", "none"]


class Reporter:
    """Shows steps and messages on stderr. ``auto``: a bar on a terminal, a line a log step elsewhere."""

    def __init__(self, total: int, style: Style = "auto", console: Console | None = None) -> None:
        self.total = total
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self.style = style if style != "auto" else "bar" if self.console.is_terminal else "lines"
        self._bar: Progress | None = None
        self._task: Any = None

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


def count(value: float) -> str:
    """``950``, ``12.3k``, ``4.56M``."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"
