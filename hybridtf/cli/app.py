"""The commands as one program: its help, its version, and what its exit code says.

0 done, 1 a check or comparison failed, 2 wrong input, 130 interrupted. A user's mistake is one message on stderr; an
exception of any other kind is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hybridtf.cli import (
    bench,
    catalogue,
    checks,
    compare,
    doctor,
    generate,
    interop,
    match,
    new_plugin,
    plan,
    search,
    show,
    study,
    surgery,
    training,
)
from hybridtf.cli.output import begin_command, say, say_error
from hybridtf.cli.traces import explain

PROGRAM = "hybridtf"

INTERRUPTED = 130

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Why the system refuses what is written to an open stream."""

_UsageError: Any = typer.BadParameter.__bases__[0]
"""typer's usage error, which it does not export."""


def _refusals() -> tuple[type[Exception], ...]:
    """What a user can do wrong. Looked up when something was raised, so that ``--help`` need not import it."""
    errors = sys.modules.get("hybridtf.core.errors")
    return () if errors is None else (errors.HybridTFError,)


def _out_of_memory() -> tuple[type[BaseException], ...]:
    torch = sys.modules.get("torch")
    return (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)


class Commands(TyperGroup):
    """The group of all commands, which turns exceptions into messages and exit codes."""

    def main(self, *args: Any, **options: Any) -> Any:
        # Not standalone: typer would print usage errors and end the process in its own way.
        options["standalone_mode"] = False
        try:
            code = super().main(*args, **options)
        except _UsageError as error:
            sys.exit(_usage(error))
        except typer.Abort:
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _stdout():  # help and version are printed here
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _stdout():
            return self._invoke(ctx)

    def _invoke(self, ctx: Any) -> Any:
        begin_command()
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say("interrupted; nothing was saved")
            raise typer.Exit(INTERRUPTED) from None
        except _refusals() as error:
            code = getattr(error, "exit_code", 2)
            (say if code == INTERRUPTED else say_error)(str(error))
            raise typer.Exit(code) from None
        except _out_of_memory() as error:
            say(f"error: out of memory; a smaller batch or length may fit ({str(error).partition(chr(10))[0]})")
            raise typer.Exit(1) from None


@contextmanager
def _stdout() -> Iterator[None]:
    """All that was printed inside has reached stdout at the end; or the command ends, quietly where the reader has seen
    enough (``| head``), with a message and 1 where stdout cannot be written."""
    try:
        try:
            yield
        except typer.Exit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        raise typer.Exit(0) from None
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        _discard_stdout()
        say(f"error: the output could not be written ({error.strerror or error})")
        raise typer.Exit(1) from None


def _discard_stdout() -> None:
    """Python must not find the broken stdout again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: Any) -> int:
    """One line for a wrong command or option; the exit code."""
    ctx = error.ctx
    where = PROGRAM if ctx is None else ctx.command_path
    near = getattr(error, "possibilities", None)
    message = f"{error.message}. Did you mean {near[0]}?" if near else error.format_message()
    message = message.replace(": Value error, ", ": ", 1)  # pydantic's word before what a validator says
    say(f"error: {message if message.endswith(('.', '?')) else f'{message}.'} See: {where} --help")
    return 2


app = typer.Typer(
    name=PROGRAM,
    cls=Commands,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from hybridtf import __version__

        print(f"{PROGRAM} {__version__}")
        raise typer.Exit(0)


@app.callback(invoke_without_command=True)
def hybridtf(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Compose, train, measure and compare hybrid sequence architectures.

    A RECIPE is a .toml file or the name of an installed one (hybridtf list recipes). A RUN is a folder that train made.
    """
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


for _room in (
    catalogue, show, plan, match, checks, training, generate, bench, compare, search, study, interop, surgery, doctor,
    new_plugin,
):
    _room.register(app)


def _bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    lines, said = explain(error)
    print(lines, end="", file=sys.stderr)
    say(said)


def main() -> None:
    """The console entry point."""
    if sys.stderr is None:  # closed (2>&-): there is nobody to be told
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the program
    if sys.stdout is None:
        say("error: stdout is closed; redirect it to /dev/null to see no results")
        sys.exit(1)
    for stream in (sys.stdout, sys.stderr):
        # Any text may be generated or read from a file: what the terminal cannot show must not end the program.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    from typer.main import get_command

    sys.excepthook = _bug
    get_command(app)(prog_name=PROGRAM)
