"""Text to token ids and back: bytes without any package, or a file of the package ``tokenizers``."""

from __future__ import annotations

import codecs
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridtf.core.errors import DataError, known_names

if TYPE_CHECKING:
    from tokenizers import Tokenizer as PackageTokenizer

Ids: TypeAlias = NDArray[Any]


class Decoder(ABC):
    """Ids to text as they come: a character is given out once it is complete, and nothing is ever taken back."""

    @abstractmethod
    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain now and was not before."""

    @abstractmethod
    def finish(self) -> str:
        """What is left, an incomplete character as U+FFFD. The decoder is then as new."""


class Tokenizer(ABC):
    """``encode`` adds no special token: ``bos_id`` is put before a document by whoever makes batches."""

    name: str
    vocab_size: int
    bos_id: int
    """The input from which a document's first token is predicted. It is never a target."""
    dtype: np.dtype[Any]
    """The smallest unsigned type that holds every id of a text."""
    fingerprint: str
    """Changes when the same text would get other ids."""

    @abstractmethod
    def encode(self, texts: Sequence[bytes]) -> list[Ids]:
        """The ids of each UTF-8 text, (t) of ``dtype``, without special tokens."""

    def prompt(self, text: str) -> Tensor:
        """(t, int64) ids of the beginning of a document, to generate from: exactly one ``bos_id``, then the text."""
        ids = self.encode([text.encode()])[0].astype(np.int64) if text else np.zeros(0, dtype=np.int64)
        return torch.from_numpy(np.concatenate([np.array([self.bos_id], dtype=np.int64), ids]))

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text; ``bos_id`` gives nothing, and bytes that are not UTF-8 give U+FFFD. Raises :class:`DataError`."""

    @abstractmethod
    def decoder(self) -> Decoder:
        """A decoder for ids that come in pieces."""


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of UTF-8, 256 is the start of a document."""

    name = "bytes"
    vocab_size = 257
    bos_id = 256
    dtype = np.dtype(np.uint8)
    fingerprint = "bytes"

    def encode(self, texts: Sequence[bytes]) -> list[Ids]:
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return _to_bytes(ids).decode("utf-8", errors="replace")

    def decoder(self) -> Decoder:
        return _ByteDecoder()


def _to_bytes(ids: Iterable[int]) -> bytes:
    kept = [int(i) for i in ids if int(i) != ByteTokenizer.bos_id]
    for i in kept:
        if not 0 <= i < 256:
            raise DataError(f"tokenizer 'bytes': {i} is not an id; allowed are 0 to {ByteTokenizer.bos_id}")
    return bytes(kept)


class _ByteDecoder(Decoder):
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(_to_bytes(ids))

    def finish(self) -> str:
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class FileTokenizer(Tokenizer):
    """A ``tokenizer.json`` of the package ``tokenizers``.

    ``bos_token`` names the token that starts a document; None adds an id of our own behind the vocabulary.
    """

    def __init__(self, path: str, bos_token: str | None = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise DataError(
                f"tokenizer {path!r} needs the package tokenizers. Run  pip install hybridtf[text]  "
                "or set tokenizer = \"bytes\""
            ) from None
        place = Path(path).expanduser()
        if not place.is_file():
            hint = "" if "/" in path or place.suffix else f". {known_names(path, ['bytes'])}"
            raise DataError(f"tokenizer {path!r} is no file{hint}")
        try:
            text = place.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"tokenizer {path!r}: cannot be read as text ({error})") from None
        self._tokenizer = _parse(tokenizers.Tokenizer, text, path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # text that spells a special token stays text
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"tokenizer {path!r}: its vocabulary is empty")
        size = max(vocabulary.values()) + 1
        if bos_token is not None and bos_token not in vocabulary:
            special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
            hint = known_names(bos_token, special)
            raise DataError(f"tokenizer {path!r}: no token {bos_token!r} for bos_token. {hint}")
        self.name = path
        self.bos_id = size if bos_token is None else vocabulary[bos_token]
        self.vocab_size = size + (bos_token is None)
        self.dtype = np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)
        self.fingerprint = hashlib.sha256(f"{self.bos_id} {text}".encode()).hexdigest()[:16]

    def encode(self, texts: Sequence[bytes]) -> list[Ids]:
        encodings = self._tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        kept = [int(i) for i in ids if int(i) != self.bos_id]
        for i in kept:
            if not 0 <= i < self.vocab_size:
                raise DataError(f"tokenizer {self.name!r}: {i} is not an id; allowed are 0 to {self.vocab_size - 1}")
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def decoder(self) -> Decoder:
        return _FileDecoder(self)


def _parse(tokenizer: type[PackageTokenizer], text: str, path: str) -> PackageTokenizer:
    try:
        return tokenizer.from_str(text)
    except Exception as error:
        if type(error) is not Exception:  # the package raises a bare Exception for a file that it cannot parse
            raise
        raise DataError(f"tokenizer {path!r} is not a tokenizers JSON file: {error}") from None


class _FileDecoder(Decoder):
    """Decodes from a few ids back, since what an id says may depend on the ids before it (a leading space)."""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._open: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        out = ""
        for i in ids:
            if i == self._tokenizer.bos_id:
                continue
            self._open.append(int(i))
            text = self._new()
            if not text.endswith("\ufffd"):
                out += text
                self._before, self._open = self._open, []
        return out

    def finish(self) -> str:
        rest = self._new()
        self._before, self._open = [], []
        return rest

    def _new(self) -> str:
        before = self._tokenizer.decode(self._before)
        return self._tokenizer.decode(self._before + self._open)[len(before) :]


def make_tokenizer(name: str, bos_token: str | None = None) -> Tokenizer:
    """``bytes``, or the tokenizer of a JSON file."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name, bos_token)
