"""``generate``: text from a run, streamed as it is drawn."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridtf.cli.options import Device, Json, Step, Weights
from hybridtf.cli.output import interruptible, print_json
from hybridtf.cli.sources import read_run, registries

if TYPE_CHECKING:
    from hybridtf.models import GeneratedToken
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
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, show_default="0.8", help="0: always the likeliest token.")
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Draw among the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", min=0.0, max=1.0, help="Draw among the likeliest tokens that hold this share."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option("--min-p", min=0.0, max=1.0, help="Draw among tokens of at least this share of the likeliest one's."),
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1: tokens that came before come less often.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="The same seed draws the same text.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text. May be repeated.")
    ] = None,
    beams: Annotated[
        int | None, typer.Option("--beams", min=1, help="Search the likeliest text with so many beams; nothing is drawn.")
    ] = None,
    length_penalty: Annotated[
        float | None, typer.Option("--length-penalty", show_default="1.0", help="With --beams: above 0 favours longer text.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option("--draft", metavar="RUN", help="A smaller model of the same vocabulary that drafts tokens.")
    ] = None,
    n_draft: Annotated[
        int | None, typer.Option("--n-draft", min=1, show_default="4", help="With --draft: tokens drafted at a time.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the decode step; pays off for long text.")] = False,
    step: Step = None,
    weights: Weights = "model",
    device: Device = None,
    json: Json = False,
) -> None:
    """Continue a prompt with a trained model.

    The run must be one on a text task, whose tokenizer the prompt is read with. Only the new text is printed, as it is
    drawn. The prompt is read from stdin where none is given and stdin is piped.
    """
    sampling = {
        "--temperature": temperature, "--top-k": top_k, "--top-p": top_p, "--min-p": min_p,
        "--repetition-penalty": None if repetition_penalty == 1 else repetition_penalty,
    }  # fmt: skip
    ways = {"--beams": beams, "--draft": draft, "--compile": compiled or None}
    _check(ways, sampling, {"--beams": ("--length-penalty", length_penalty), "--draft": ("--n-draft", n_draft)})
    if "" in (stop or ()):
        raise typer.BadParameter("an empty text never ends anything; leave it out", param_hint="--stop")
    registries()
    text = _prompt(prompt, prompt_file)
    loaded = read_run(run, device, step, weights)
    made = _Made(_tokenizer(loaded, run), tuple(stop or ()), echo=not json)
    limits = {"max_new_tokens": max_new_tokens, "stop_tokens": (made.tokenizer.bos_id,)}
    with interruptible("nothing is saved by generate"):
        if beams is not None:
            _search(made, loaded.model, text, {**limits, "n_beams": beams}, 1.0 if length_penalty is None else length_penalty)
        else:
            options = {
                **limits, "temperature": 0.8 if temperature is None else temperature, "top_k": top_k, "top_p": top_p,
                "min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed, "compile": compiled,
            }  # fmt: skip
            drafting = None if draft is None else _draft(made.tokenizer, draft, device, run)
            _draw(made, loaded.model, text, options, drafting, n_draft or 4)
    if json:
        print_json({"prompt": text, **made.found()})


def _check(
    ways: Mapping[str, object], sampling: Mapping[str, object], needs: Mapping[str, tuple[str, object]]
) -> None:
    """Refuse options that say nothing together. ``needs``: an option that only means something beside another."""
    chosen = [name for name, value in ways.items() if value is not None]
    if len(chosen) > 1:
        raise typer.BadParameter(f"{chosen[0]} and {chosen[1]} exclude each other", param_hint=chosen[1])
    drawn = [name for name, value in sampling.items() if value is not None]
    if "--beams" in chosen and drawn:
        raise typer.BadParameter(f"beams are searched, not drawn: take {drawn[0]} or --beams away", param_hint=drawn[0])
    for way, (name, value) in needs.items():
        if value is not None and ways[way] is None:
            raise typer.BadParameter(f"has no meaning without {way}", param_hint=name)


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


def _draft(tokenizer: Tokenizer, draft: str, device: str | None, run: str) -> Any:
    """The model that drafts, which must read and write the same tokens."""
    from hybridtf.core import ConfigError

    loaded = read_run(draft, device)
    other = _tokenizer(loaded, draft)
    if (tokenizer.fingerprint, tokenizer.bos_id) != (other.fingerprint, other.bos_id):
        raise ConfigError(f"--draft {draft}: its tokenizer differs from that of {run}, so it cannot draft for it")
    return loaded.model


@dataclass
class _Made:
    """What was made so far; with ``echo`` it is printed as it comes."""

    tokenizer: Tokenizer
    stops: Sequence[str]
    echo: bool
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_prob: float = 0.0
    ended_by: str = "length"
    more: dict[str, Any] = field(default_factory=dict)
    """What only some ways of generating know."""

    def take(self, tokens: Iterable[int]) -> None:
        """Tokens, one after the other, until the text ends."""
        decoder, shown = self.tokenizer.decoder(), 0
        for token in tokens:
            self.tokens.append(token)
            if token == self.tokenizer.bos_id:
                self.ended_by = "end of document"
                break
            self.text += decoder.push([token])
            cut = _cut(self.text, self.stops)
            if cut is not None:
                self.text, self.ended_by = self.text[:cut], "stop"
                break
            if self.echo:
                shown = _show(self.text, shown, _held(self.text, self.stops))
        if self.ended_by != "stop":
            self.text += decoder.finish()
        if self.echo:
            _show(self.text, shown, 0)
            print()

    def found(self) -> dict[str, Any]:
        """What --json prints."""
        result = {name: getattr(self, name) for name in ("text", "tokens", "log_prob", "ended_by")}
        return {**result, **self.more}


def _draw(made: _Made, model: Any, prompt: str, options: dict[str, Any], draft: Any, n_draft: int) -> None:
    from hybridtf.models import GenerationConfig, Speculation, stream

    config, prompts = GenerationConfig(**options), [made.tokenizer.prompt(prompt).tolist()]
    items: Iterable[GeneratedToken] = stream(model, prompts, config)
    if draft is not None:
        items = speculation = Speculation(model, draft, prompts, config, n_draft=n_draft)

    def tokens() -> Iterator[int]:
        for item in items:
            made.log_prob += item.log_prob
            yield item.token

    made.take(tokens())
    if draft is not None:
        made.more = {"drafted": speculation.drafted[0], "accepted": speculation.accepted[0], "rounds": speculation.rounds[0]}


def _search(made: _Made, model: Any, prompt: str, options: dict[str, Any], length_penalty: float) -> None:
    from hybridtf.models import BeamConfig, beam_search

    config = BeamConfig(**options, length_penalty=length_penalty)
    best = beam_search(model, [made.tokenizer.prompt(prompt).tolist()], config)[0][0]
    made.log_prob, made.more = best.log_prob, {"score": best.score}
    made.take(best.tokens)


def _show(text: str, shown: int, held: int) -> int:
    """Print what is new, all but the last ``held`` characters; how much is shown now."""
    until = max(len(text) - held, shown)
    print(text[shown:until], end="", flush=True)
    return until


def _cut(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop begins."""
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


def _held(text: str, stops: Sequence[str]) -> int:
    """How many last characters may be the beginning of a stop."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
