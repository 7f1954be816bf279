"""``generate``: text from a run, streamed as it is drawn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridtf.cli.options import Device, Json, Step, Weights
from hybridtf.cli.output import interruptible, print_json
from hybridtf.cli.sources import read_run, registries

if TYPE_CHECKING:
    from hybridtf.models import GenerationConfig
    from hybridtf.tasks import Tokenizer
    from hybridtf.train import LoadedRun


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("generate")(generate)


def generate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, checkpoint or model folder.")],
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="How the text begins.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from this file.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="At most so many new tokens.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0: always the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Draw among the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", min=0.0, max=1.0, help="Draw among the likeliest tokens that hold this share."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="The same seed draws the same text.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text. May be repeated.")
    ] = None,
    step: Step = None,
    weights: Weights = "model",
    device: Device = None,
    json: Json = False,
) -> None:
    """Continue a prompt with a trained model.

    Only the new text is printed, as it is drawn. The prompt is read from stdin where none is given and stdin is piped.
    """
    from hybridtf.models import GenerationConfig

    registries()
    text = _prompt(prompt, prompt_file)
    loaded = read_run(run, device, step, weights)
    tokenizer = _tokenizer(loaded, run)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
        stop_tokens=(tokenizer.bos_id,),
    )  # fmt: skip
    with interruptible("nothing is saved by generate"):
        made = _draw(loaded.model, tokenizer, text, config, tuple(stop or ()), echo=not json)
    if json:
        print_json({"prompt": text, **vars(made)})


def _prompt(prompt: str | None, file: Path | None) -> str:
    from hybridtf.core import DataError

    if prompt is not None and file is not None:
        raise typer.BadParameter("give --prompt or --prompt-file, not both", param_hint="--prompt")
    if prompt is not None:
        data = prompt.encode("utf-8", "surrogateescape")  # the bytes as the shell gave them
    elif file is not None:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise DataError(f"--prompt-file {file}: cannot be read ({error.strerror or error})") from None
    else:
        data = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"the prompt is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from None


def _tokenizer(run: LoadedRun, name: str) -> Tokenizer:
    """The tokenizer of the run's task, without its corpus."""
    from hybridtf.core import DataError
    from hybridtf.tasks import make_tokenizer

    task = run.recipe.task
    tokenizer = getattr(task, "tokenizer", None)
    if not isinstance(tokenizer, str):
        what = "its recipe has no section [task]" if task is None else f"its task {task.type_name()!r} is not text"
        raise DataError(f"{name}: {what}, so there is no tokenizer to read a prompt with")
    return make_tokenizer(tokenizer, getattr(task, "bos_token", None))


@dataclass
class _Made:
    """What was drawn so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_prob: float = 0.0
    ended_by: str = "length"


def _draw(
    model: Any, tokenizer: Tokenizer, prompt: str, config: GenerationConfig, stops: Sequence[str], *, echo: bool
) -> _Made:
    from hybridtf.models import stream

    made, decoder, shown = _Made(), tokenizer.decoder(), 0
    for item in stream(model, [tokenizer.prompt(prompt).tolist()], config):
        made.tokens.append(item.token)
        made.log_prob += item.log_prob
        if item.token == tokenizer.bos_id:
            made.ended_by = "end of document"
            break
        made.text += decoder.push([item.token])
        cut = _cut(made.text, stops)
        if cut is not None:
            made.text, made.ended_by = made.text[:cut], "stop"
            break
        if echo:
            shown = _show(made.text, shown, _held(made.text, stops))
    if made.ended_by != "stop":
        made.text += decoder.finish()
    if echo:
        _show(made.text, shown, 0)
        print()
    return made


def _show(text: str, shown: int, held: int) -> int:
    """Print what is new, all but the last ``held`` characters; how much is shown now."""
    until = max(len(text) - held, shown)
    print(text[shown:until], end="", flush=True)
    return until


def _cut(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop begins."""
    return min((place for stop in stops if stop and (place := text.find(stop)) >= 0), default=None)


def _held(text: str, stops: Sequence[str]) -> int:
    """How many last characters may be the beginning of a stop."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
