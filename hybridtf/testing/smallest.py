"""The smallest case that breaks a law, found by hypothesis: what a person would try first."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hybridtf.core import OpCase, Segments
from hybridtf.testing.errors import NotApplicableError
from hybridtf.testing.laws_op import check_call
from hybridtf.testing.laws_segments import check_layout
from hybridtf.testing.laws_time import check_pieces, no_future
from hybridtf.testing.op_calls import Op, draw
from hybridtf.testing.subject import Subject

LAWS = ("cut", "segment", "causal")
"""Laws over time and documents, of which there are smaller cases than those that the kit tries."""

EXAMPLES = 150


def can_shrink() -> bool:
    """hypothesis is installed."""
    return importlib.util.find_spec("hypothesis") is not None


def smallest_case(subject: Subject, law: str, faults: tuple[type[Exception], ...]) -> str:
    """A few words on the smallest case found that breaks ``law``; empty where none was found, or there is nothing to shrink.

    ``faults``: what a broken component raises.
    """
    if law not in LAWS or not can_shrink():
        return ""
    module = subject.build()
    strategy, check, words = _searches(subject, module)[law]

    def broken(case: Any) -> bool:
        try:
            check(case)
        except NotApplicableError:
            return False
        except faults:
            return True
        return False

    found = _find(strategy, broken)
    return "" if found is None else words(found)


def _find(strategy: Any, broken: Callable[[Any], bool]) -> Any:
    """The smallest case that is broken, or None."""
    from hypothesis import HealthCheck, find, settings
    from hypothesis.errors import NoSuchExample

    checks = list(HealthCheck)
    how = settings(max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=checks)
    with _elsewhere():
        try:
            return find(strategy, broken, settings=how)
        except NoSuchExample:
            return None


@contextmanager
def _elsewhere() -> Iterator[None]:
    """Inside, hypothesis has a folder that is gone afterwards: without a database too it keeps what it found in the sources."""
    from hypothesis.configuration import set_hypothesis_home_dir, storage_directory

    before = storage_directory(intent_to_write=False).home_directory
    with tempfile.TemporaryDirectory() as folder:
        set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            set_hypothesis_home_dir(before)


Search = tuple[Any, Callable[[Any], None], Callable[[Any], str]]


def _searches(subject: Subject, module: nn.Module) -> dict[str, Search]:
    """For each law: cases, the law on one of them, and a case in words."""
    from hypothesis import strategies as st

    pieces = st.tuples(st.integers(1, 2), st.lists(st.integers(0, 6), min_size=1, max_size=5), st.sampled_from([None, 32]))
    packed = st.tuples(_some_rows(), st.booleans())
    places = st.tuples(st.integers(1, 8))
    return {
        "cut": (pieces, lambda case: check_pieces(subject, module, *case), _pieces_in_words),
        "segment": (packed, lambda case: _check_rows(subject, module, *case), _rows_in_words),
        "causal": (places, lambda case: no_future(subject, module, *case), lambda case: f"token {case[0]} of 9 changes"),
    }


def _some_rows() -> Any:
    """Rows: pads before and length of each document, and pads at the end; all of one length."""
    from hypothesis import strategies as st

    document = st.tuples(st.integers(0, 2), st.integers(1, 4))
    return st.lists(st.tuples(st.lists(document, max_size=3), st.integers(0, 2)), min_size=1, max_size=2)


def _pieces_in_words(case: Any) -> str:
    b, cut, max_len = case
    return f"batch {b}, pieces of {list(cut)} tokens{'' if max_len is None else f', max_len={max_len}'}"


def ids_of(rows: Any) -> torch.Tensor:
    """Document ids (b t) of rows as (pads before, length) of each document and pads at the end."""
    found = []
    for documents, tail in rows:
        row: list[int] = []
        for i, (pads, length) in enumerate(documents):
            row += [0] * pads + [i + 1] * length
        found.append(row + [0] * tail)
    width = max(len(row) for row in found)
    return torch.tensor([row + [0] * (width - len(row)) for row in found], dtype=torch.int64).view(len(found), width)


def _check_rows(subject: Subject, module: nn.Module, rows: Any, incoming: bool) -> None:
    ids = ids_of(rows)
    if not ids.numel() or (incoming and subject.needs_context(module)):
        return
    check_layout(subject, module, "a case", ids, incoming, cuts=False)


def _rows_in_words(case: Any) -> str:
    rows, incoming = case
    drawn = ["".join(map(str, row)) for row in ids_of(rows).tolist()]
    return f"document ids {drawn} (0 is a pad){', on a state with three tokens' if incoming else ''}"


def smallest_of(
    case: OpCase, op: Op, reference: Op, dtype: torch.dtype, tol: float, faults: tuple[type[Exception], ...]
) -> str:
    """The same for an op's kernel: the smallest call that differs from the reference in a result or a gradient."""
    from hypothesis import strategies as st

    def broken(given: Any) -> bool:
        segments = None if given[0] == "plain" else _packed(*given[1:])
        if segments is not None and not segments.ids.numel():
            return False
        b, t = given[1:] if segments is None else segments.ids.shape
        try:
            check_call(case, op, reference, draw(case, b, t, dtype=dtype), segments, tol, "a case")
        except faults:
            return True
        return False

    plain = st.tuples(st.just("plain"), st.integers(1, 2), st.integers(1, 12))
    found = _find(st.one_of(plain, st.tuples(st.just("packed"), _some_rows(), st.booleans())), broken)
    if found is None:
        return ""
    kind, first, second = found
    where = f"{case.name}, {str(dtype).removeprefix('torch.')}: "
    if kind == "plain":
        return f"{where}batch {first}, {second} tokens"
    drawn = ["".join(map(str, row)) for row in ids_of(first).tolist()]
    return f"{where}document ids {drawn} (0 is a pad){', going on with the state' if second else ''}"


def _packed(rows: Any, continues: bool) -> Segments:
    return Segments.from_ids(ids_of(rows), continues=continues)
