"""Tokenised documents, one behind the other in one array."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtf.core.errors import DataError
from hybridtf.tasks.corpora import Document
from hybridtf.tasks.tokenization import ByteTokenizer, Tokenizer


@dataclass(frozen=True, eq=False)
class Documents:
    """``tokens`` (n) of all documents without special tokens; document i is ``tokens[offsets[i]:offsets[i + 1]]``.

    ``raw`` (m, uint8) and ``raw_offsets`` are the same for its UTF-8 bytes; ``names`` are unique only within a source.
    """

    names: tuple[str, ...]
    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    raw: NDArray[np.uint8]
    raw_offsets: NDArray[np.int64]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.names)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.offsets)

    @property
    def n_bytes(self) -> NDArray[np.int64]:
        """UTF-8 bytes of each document."""
        return np.diff(self.raw_offsets)

    def document(self, i: int) -> NDArray[Any]:
        """Tokens of document ``i``."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    @classmethod
    def encode(cls, documents: Sequence[Document], tokenizer: Tokenizer, *, verify: bool = False) -> Documents:
        """Tokenise. ``verify``: raise :class:`DataError` unless every text comes back from its tokens."""
        ids = tokenizer.encode([document.data for document in documents])
        for document, tokens in zip(documents, ids, strict=True):
            if not len(tokens):
                raise DataError(f"{document.name}: tokenizer {tokenizer.name!r} makes no token of it")
        raw, raw_offsets = _join([np.frombuffer(document.data, dtype=np.uint8) for document in documents])
        if isinstance(tokenizer, ByteTokenizer):
            tokens, offsets = raw, raw_offsets
        else:
            tokens, offsets = _join(ids)
            if verify:
                _verify(documents, ids, tokenizer)
        digest = hashlib.sha256(tokenizer.fingerprint.encode())
        for document in documents:
            digest.update(document.digest)
        return cls(tuple(d.name for d in documents), tokens, offsets, raw, raw_offsets, digest.hexdigest()[:16])


def _join(parts: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return np.concatenate(parts), offsets


def _verify(documents: Sequence[Document], ids: Sequence[NDArray[Any]], tokenizer: Tokenizer) -> None:
    for document, tokens in zip(documents, ids, strict=True):
        text, back = document.data.decode(), tokenizer.decode(tokens.tolist())
        if text != back:
            differs = (i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b)
            at = next(differs, min(len(text), len(back)))
            raise DataError(
                f"tokenizer {tokenizer.name!r} loses text: {document.name} has {text[at : at + 20]!r} at {at}, its "
                f" tokens say {back[at : at + 20]!r}. Bits per byte would not be comparable: take a byte-level one"
            )
