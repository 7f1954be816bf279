"""Text up to a stop: batches whose rows end at different times, each as its prompt alone gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridtf.core import ConfigError, HybridTFError, known_names
from hybridtf.interop.lm_eval.scoring import common_prefix
from hybridtf.interop.lm_eval.texts import Texts
from hybridtf.models import GenerationConfig, LanguageModel, stream
from hybridtf.models.generation.model import evaluating, refusal, require

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""The names by which tasks say it; the first that is there counts, as in lm-eval."""
CUTS = ("top_k", "top_p", "min_p")
ONE = ("num_beams", "num_return_sequences", "n")
"""Options of which only the value 1 is a single text."""
KNOWN = ("until", "do_sample", "temperature", "repetition_penalty", "seed", *CUTS, *LENGTHS, *ONE)


@dataclass(frozen=True)
class Wish:
    """How one text is to be made."""

    until: tuple[str, ...]
    config: GenerationConfig


def read_wish(given: Mapping[str, Any], max_gen_toks: int, ends: Sequence[int], seed: int) -> Wish:
    """``gen_kwargs`` of a task. Greedy unless it says ``do_sample`` or a temperature above 0."""
    for name, value in given.items():
        if name not in KNOWN:
            raise ConfigError(f"gen_kwargs: {name}: no such option. {known_names(name, KNOWN)}")
        if name in ONE and value not in (None, 1):
            raise ConfigError(f"gen_kwargs: {name}={value}: one text for each prompt is made, without beams")
    until = given.get("until") or []
    until = [until] if isinstance(until, str) else until
    if not isinstance(until, list | tuple) or not all(isinstance(stop, str) for stop in until):
        raise ConfigError(f"gen_kwargs: until={until!r}: a text or a list of texts is needed")
    length = next((given[name] for name in LENGTHS if given.get(name) is not None), max_gen_toks)
    options: dict[str, Any] = {"max_new_tokens": length, "stop_tokens": tuple(ends), "seed": given.get("seed", seed)}
    if given.get("repetition_penalty") is not None:
        options["repetition_penalty"] = float(given["repetition_penalty"])
    temperature, sample = given.get("temperature"), given.get("do_sample")
    if sample is True and temperature is None:
        temperature = 1.0
    if sample is not False and temperature:
        options["temperature"] = float(temperature)
        options |= {name: given[name] for name in CUTS if given.get(name) is not None}
    try:
        config = GenerationConfig(**options)
    except HybridTFError as error:
        raise ConfigError(f"gen_kwargs: {error}") from None
    return Wish(tuple(stop for stop in until if stop), config)


def write(
    model: LanguageModel, texts: Texts, prompts: Sequence[Sequence[int]], wish: Wish, *, batch_size: int, max_length: int,
    progress: Callable[[int], object] = lambda n: None,
) -> list[str]:
    """A text for each prompt. Of a prompt that leaves no room for the text, the beginning is left out."""
    room = max_length - wish.config.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"max_gen_toks = {wish.config.max_new_tokens} leaves no room for a prompt within max_length = {max_length}"
        )
    rows = [tuple(prompt)[-room:] or (texts.prefix_id,) for prompt in prompts]
    require(model, "cut", "generation")
    places = 1 if refusal(model, "segment") is not None else batch_size
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i]), rows[i]))
    with evaluating(model):
        prefix = common_prefix(model, rows)
    known = 0 if prefix is None else len(prefix.tokens)
    stops = Stops(texts, wish.until, len(rows), wish.config.stop_tokens)
    for item in stream(
        model, [rows[i][known:] for i in order], wish.config, batch_size=places, prefix=prefix, ends=stops.ends
    ):
        if item.last:
            progress(1)
    found = dict(zip(order, stops.texts(), strict=True))
    return [found[i] for i in range(len(rows))]


class Stops:
    """The new tokens of every row, and where each one's text ends."""

    def __init__(self, texts: Texts, until: Sequence[str], rows: int, ends: Sequence[int]) -> None:
        self.decode, self.until, self.last = texts.decode, until, set(ends)
        self.rows: list[list[int]] = [[] for _ in range(rows)]
        self.reach = max((len(stop.encode()) for stop in until), default=0) + 8
        """A token is at least a byte of text, some are none: the last so many hold a stop that has just come."""

    def ends(self, row: int, token: int) -> bool:
        """Take a token: whether the row's text holds a stop now."""
        tokens = self.rows[row]
        if token in self.last:
            return True
        tokens.append(token)
        if not self.until or not self._holds(tokens[-self.reach :]):
            return False
        return self._holds(tokens)

    def _holds(self, tokens: Sequence[int]) -> bool:
        text = self.decode(tokens)
        return any(stop in text for stop in self.until)

    def texts(self) -> list[str]:
        """Each row's text before its first stop."""
        made = [self.decode(tokens) for tokens in self.rows]
        return [text[: min((text.find(stop) for stop in self.until if stop in text), default=None)] for text in made]
