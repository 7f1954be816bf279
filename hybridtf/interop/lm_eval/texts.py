"""Text to tokens and back for lm-eval: the tokenizer of a run, a ``tokenizer.json``, or one of transformers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridtf.core import ConfigError, DataError
from hybridtf.interop.lm_eval.arguments import Arguments
from hybridtf.recipe import Recipe
from hybridtf.tasks import Tokenizer, make_tokenizer

TRANSFORMERS = "tokenizer_config.json"
PACKAGE = "tokenizer.json"


class Texts(ABC):
    """``prefix_id`` stands before a text that has no context; ``end_ids`` end what is generated."""

    name: str
    prefix_id: int
    end_ids: tuple[int, ...]
    vocab_size: int

    @abstractmethod
    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """Tokens; with the special ones, without, or (None) as the tokenizer does by itself."""

    @abstractmethod
    def whole(self, text: str) -> list[int]:
        """Tokens of a document all of which is scored, after ``prefix_id``."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text, without special tokens."""

    def chat(self, history: list[dict[str, str]], answer: bool) -> str:
        """A conversation as one text; with ``answer`` up to where the model speaks."""
        raise ConfigError(f"tokenizer {self.name}: has no chat template")


class OwnTexts(Texts):
    """A tokenizer of ours. A model of ours was trained on documents that begin with ``bos_id``, which is never a target, and
    ends one by beginning another."""

    def __init__(self, tokenizer: Tokenizer, add_bos: bool | None) -> None:
        self.tokenizer, self.add_bos = tokenizer, add_bos is not False
        self.name, self.prefix_id, self.end_ids = tokenizer.name, tokenizer.bos_id, (tokenizer.bos_id,)
        self.vocab_size = tokenizer.vocab_size

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        ids = self.whole(text)
        return [self.prefix_id, *ids] if (self.add_bos if special is None else special) else ids

    def whole(self, text: str) -> list[int]:
        return [int(i) for i in self.tokenizer.encode([text.encode()])[0]] if text else []

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)


def _told_ends(folder: Path) -> set[int]:
    """Ids that end a text as the files beside a tokenizer say, where transformers stops too: the turn's end of chat models."""
    for name in ("generation_config.json", "config.json"):
        try:
            told = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{folder / name}: not readable as a table of JSON ({error})") from None
        if told is not None:
            return {int(i) for i in (told if isinstance(told, list) else [told])}
    return set()


class TransformersTexts(Texts):
    """A tokenizer of transformers, called as lm-eval's own ``hf`` calls it."""

    def __init__(self, folder: Path, add_bos: bool | None) -> None:
        try:
            import transformers
        except ImportError:
            raise ConfigError(f"tokenizer {folder}: needs transformers. Run  pip install 'hybridtf[hf]'") from None
        more = {} if add_bos is None else {"add_bos_token": add_bos}
        try:
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **more)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise DataError(f"tokenizer {folder}: transformers cannot read it: {error}") from None
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is None and eos is None:
            raise DataError(f"tokenizer {folder}: has no bos_token and no eos_token, and a text has to begin with something")
        self.add_bos, self.name = add_bos, str(folder)
        self.prefix_id = eos if bos is None else bos
        self.end_ids = tuple(sorted({*(() if eos is None else (eos,)), *_told_ends(folder)}))
        self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        if special is None:
            special = False if text.startswith(self.tokenizer.decode([self.prefix_id])) else self.add_bos
        more = {} if special is None else {"add_special_tokens": special}
        return [int(i) for i in self.tokenizer.encode(text, **more)]

    def whole(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, history: list[dict[str, str]], answer: bool) -> str:
        if not self.tokenizer.chat_template:
            return super().chat(history, answer)
        return str(
            self.tokenizer.apply_chat_template(
                history, tokenize=False, add_generation_prompt=answer, continue_final_message=not answer
            )
        )


def find_texts(said: Arguments, recipe: Recipe, vocab_size: int) -> Texts:
    """The tokenizer that was named, else that of the folder, else that of the run's task."""
    texts = _named(said) if said.tokenizer is not None else _own(said, recipe)
    highest = max((texts.vocab_size - 1, texts.prefix_id))
    if highest >= vocab_size:
        hint = ""
        if isinstance(texts, OwnTexts) and texts.prefix_id == highest and said.bos_token is None:
            hint = "; its start token is one of our own behind the vocabulary: name one that it has with bos_token="
        raise ConfigError(f"tokenizer {texts.name}: has ids up to {highest}, the model up to {vocab_size - 1}{hint}")
    return texts


def _named(said: Arguments) -> Texts:
    assert said.tokenizer is not None
    place = Path(said.tokenizer).expanduser()
    if said.tokenizer == "bytes" or place.is_file():
        return OwnTexts(make_tokenizer(said.tokenizer, said.bos_token), said.add_bos_token)
    if not place.is_dir():
        raise ConfigError(f"tokenizer={said.tokenizer}: no such file or folder (and nothing is fetched); 'bytes' needs none")
    found = _in_folder(place, said)
    if found is None:
        raise ConfigError(f"tokenizer={said.tokenizer}: holds neither {TRANSFORMERS} nor {PACKAGE}")
    return found


def _in_folder(folder: Path, said: Arguments) -> Texts | None:
    if (folder / TRANSFORMERS).is_file():
        if said.bos_token is not None:
            raise ConfigError(f"bos_token={said.bos_token}: {folder / TRANSFORMERS} says which token that is")
        return TransformersTexts(folder, said.add_bos_token)
    if (folder / PACKAGE).is_file():
        return OwnTexts(make_tokenizer(str(folder / PACKAGE), said.bos_token), said.add_bos_token)
    return None


def _own(said: Arguments, recipe: Recipe) -> Texts:
    found = _in_folder(Path(said.pretrained).expanduser(), said)
    if found is not None:
        return found
    name = getattr(recipe.task, "tokenizer", None)
    if not isinstance(name, str):
        raise ConfigError(f"{said.pretrained}: holds no tokenizer and was trained on no text: give tokenizer=")
    bos = said.bos_token if said.bos_token is not None else getattr(recipe.task, "bos_token", None)
    return OwnTexts(make_tokenizer(name, bos), said.add_bos_token)
