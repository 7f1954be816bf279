"""The law of crops: a state forgets its last tokens as if it had never seen them, or says that it cannot.

Axes: b batch, t time.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from hybridtf.core import Segments, State, StateError, crop, reorder
from hybridtf.testing.compare import close, close_rows
from hybridtf.testing.errors import ContractError
from hybridtf.testing.laws_time import run_pieces
from hybridtf.testing.subject import Inputs, Subject, max_len_counts, needs_state

KEEP = 3
PADDINGS = {"no padding": None, "padding": ["1111111000", "0011110111", "0000111111", "1111111111"]}


def check_crop(subject: Subject) -> None:
    """A state made with ``keep`` can forget its last tokens, as if it had never seen them, or says that it cannot."""
    module = subject.build()
    needs_state(subject, module)
    for padding, rows in PADDINGS.items():
        ids = torch.tensor([[int(c) for c in row] for row in rows]) if rows else torch.ones(4, 10, dtype=torch.int64)
        for prefix in (0, 6):
            case = _Case(subject, module, ids, prefix)
            for max_len in (None, 24):
                if max_len is not None and max_len_counts(module):
                    case = _Case(subject, module, ids, prefix, max_len)
                for grad in (True, False):
                    with torch.set_grad_enabled(grad):
                        _crop(case, max_len, f"crop ({padding}, {prefix} tokens before, max_len={max_len})")


class _Case:
    """Rows that are cropped, and what rows give that never saw their last tokens.

    That is the same with and without gradients and for every ``max_len`` (but for mixers that say otherwise), so it is worked
    out once: ``max_len`` is the one it is worked out with.
    """

    def __init__(self, subject: Subject, module: nn.Module, ids: Tensor, prefix: int, max_len: int | None = None) -> None:
        self.subject, self.module, self.ids, self.prefix, self.max_len = subject, module, ids, prefix, max_len
        self.segments = None if bool((ids > 0).all()) else Segments.from_mask(ids)
        self.truths: dict[tuple[int, int], State] = {}
        self.later: dict[tuple[int, int], Tensor] = {}

    @cached_property
    def first(self) -> Inputs:
        return self.subject.inputs(self.module, 4, self.prefix, salt=4)

    @cached_property
    def inputs(self) -> Inputs:
        inputs = self.subject.inputs(self.module, 4, self.ids.shape[1], salt=5)
        return inputs.later() if self.prefix else inputs

    @cached_property
    def steps(self) -> Inputs:
        return self.subject.inputs(self.module, 4, 3, salt=6).later()

    def start(self, rows: slice, max_len: int | None) -> State:
        """The state of these rows before the call that is cropped."""
        state = self.subject.init_state(self.module, rows.stop - rows.start, max_len)
        return self.subject.call(self.module, self.first.rows(rows), state=state).state if self.prefix else state

    def called(self, max_len: int | None, keep: int) -> tuple[Tensor, State]:
        """Output and state of the call."""
        state = self.start(slice(0, 4), max_len)
        out = self.subject.call(self.module, self.inputs, segments=self.segments, state=state, keep=keep)
        return out.y, out.state

    def after(self, state: State, rows: slice) -> Tensor:
        """Outputs of single tokens that follow."""
        return run_pieces(self.subject, self.module, self.steps.rows(rows), (1, 1, 1), state)[0].y

    @torch.no_grad()
    def truth(self, row: int, n: int) -> State:
        """The state of one row that never saw its last ``n`` real tokens: to be read, not to be run on."""
        if (row, n) not in self.truths:
            rows = slice(row, row + 1)
            columns = self.ids[row].nonzero()[:, 0]
            part = self.inputs.rows(rows).columns(columns[: len(columns) - n])
            self.truths[row, n] = self.subject.call(self.module, part, state=self.start(rows, self.max_len)).state
        return self.truths[row, n]

    @torch.no_grad()
    def later_steps(self, row: int, n: int) -> Tensor:
        """What follows that state."""
        if (row, n) not in self.later:
            copy = reorder(self.truth(row, n), torch.tensor([0]))
            self.later[row, n] = self.after(copy, slice(row, row + 1))
        return self.later[row, n]


def _crop(case: _Case, max_len: int | None, what: str) -> None:
    plain, plain_state = case.called(max_len, 0)
    y, state = case.called(max_len, KEEP)
    real = case.ids > 0
    close(y[real], plain[real], tol=1e-9, what=f"keep={KEEP} changes the output")
    _refused_or_right(case, plain_state, 1, what)
    for too_many in (5, case.prefix + 11):
        if not _refused_or_right(case, state, too_many, what):
            _, state = case.called(max_len, KEEP)
    n = torch.tensor([0, 1, 3, 2])
    try:
        cropped = crop(state, n)
    except StateError as error:
        raise ContractError(f"{what}: a state made with keep={KEEP} refuses {n.tolist()} tokens: {error}") from error
    for row in range(4):
        want = case.truth(row, int(n[row]))
        close_rows(cropped, row, want, 0, tol=1e-9, what=f"{what} of {int(n[row])} tokens: row {row}")
    got = case.after(cropped, slice(0, 4))
    for row in range(4):
        after = case.later_steps(row, int(n[row]))
        close(got[row], after[0], tol=1e-9, what=f"{what} of {int(n[row])} tokens: row {row}, later steps")


def _refused_or_right(case: _Case, state: State, n: int, what: str) -> bool:
    """A crop of ``n`` tokens, perhaps too many, is refused (True: the state is then whole) or right."""
    try:
        cropped = crop(state, n)
    except StateError:
        return True
    for row in range(4):
        seen = int((case.ids[row] > 0).sum())
        if n > seen + case.prefix:
            raise ContractError(f"{what}: {n} tokens were cropped of a document that has fewer; raise StateError")
        if n <= seen:
            at = f"{what} of {n} tokens neither refused nor right: row {row}"
            close_rows(cropped, row, case.truth(row, n), 0, tol=1e-9, what=at)
    return False
