"""The segment law: documents packed in a row or padded anywhere give what each document gives alone.

Axes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from hybridtf.core import Context, Segments, State, debug_states, leaves, reorder
from hybridtf.testing.compare import close, close_rows, close_tokens, finite, gradients, probe_state
from hybridtf.testing.errors import ContractError
from hybridtf.testing.laws_time import join_losses, run_pieces, weight_like
from hybridtf.testing.subject import Inputs, Outcome, Subject, max_len_counts, max_len_shows

GARBAGE = 1e4
LAYOUTS: dict[str, list[str]] = {
    "packed": ["1111122233", "1222222222", "1111111111"],
    "left padding": ["0001111111", "0000000001", "0000000000"],
    "right padding": ["1111111000", "1000000000", "0000000000"],
    "middle padding": ["1100102202", "0110333004", "1000000001"],
    "one row": ["0102222033"],
    "one row, one document": ["1111001100"],
    "one column": ["1", "0", "2", "3"],
    "pads alone": ["000", "000"],
}
"""Rows of document ids, 0 for padding. An id that is left out is a document of no tokens."""


@dataclass(frozen=True)
class Packed:
    """One batch of packed rows, and which documents it is made of."""

    name: str
    ids: Tensor
    inputs: Inputs
    continues: Tensor
    prefix: Inputs | None

    @property
    def segments(self) -> Segments:
        return Segments.from_ids(self.ids, continues=self.continues)

    def documents(self, row: int) -> list[int]:
        return [int(i) for i in self.ids[row].unique(sorted=True) if i > 0]

    def alone(self, row: int, document: int) -> tuple[Tensor, Inputs]:
        """Columns of a document, and the document as an input of its own."""
        columns = (self.ids[row] == document).nonzero()[:, 0]
        inputs = self.inputs.columns(columns).rows(slice(row, row + 1))
        if inputs.context is not None and inputs.context.segments is not None:
            seen = (inputs.context.segments.ids[0] == document).nonzero()[:, 0]
            inputs = replace(inputs, context=Context(inputs.context.x[:, seen], None))
        return columns, inputs


def _pack(subject: Subject, module: nn.Module, name: str, ids: Tensor, incoming: bool) -> Packed:
    b, t = ids.shape
    inputs = subject.inputs(module, b, t)
    pad = ids == 0
    if inputs.x.is_floating_point():
        inputs.x[pad] = GARBAGE
    for edge in inputs.edges.values():
        if edge.is_floating_point():
            edge[pad] = GARBAGE
    if inputs.context is not None:
        inputs = replace(inputs, context=_contexts(subject, ids))
    continues = torch.tensor([row % 2 == 0 for row in range(b)]) if incoming else torch.zeros(b, dtype=torch.bool)
    prefix = subject.inputs(module, b, 3, salt=8) if incoming else None
    return Packed(name, ids, inputs, continues, prefix)


def _contexts(subject: Subject, ids: Tensor) -> Context:
    """Context documents of unequal lengths, one for each document of a row, with a pad in front."""
    rows = []
    for r, row in enumerate(ids):
        found = [int(i) for i in row.unique(sorted=True) if i > 0]
        rows.append([0, *(i for j, i in enumerate(found) for _ in range((r + j) % 3 + 1))])
    width = max(len(row) for row in rows)
    context_ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    generator = torch.Generator().manual_seed(31)
    x = torch.randn(*context_ids.shape, subject.d_model, generator=generator, dtype=torch.float64)
    return Context(x, Segments.from_ids(context_ids))


def _incoming(subject: Subject, module: nn.Module, packed: Packed, max_len: int | None = None) -> State:
    state = subject.init_state(module, packed.ids.shape[0], max_len)
    return state if packed.prefix is None else subject.call(module, packed.prefix, state=state).state


def _row(state: State, row: int) -> State:
    return reorder(state, torch.tensor([row]))


def _alone(
    subject: Subject, module: nn.Module, packed: Packed, row: int, max_len: int | None, incoming: State
) -> Iterator[tuple[Tensor, Outcome]]:
    """Each document of a row by itself, the first one on the incoming state where it continues that."""
    for i, document in enumerate(packed.documents(row)):
        columns, inputs = packed.alone(row, document)
        if i == 0 and packed.prefix is not None and bool(packed.continues[row]):
            state, inputs = _row(incoming, row), inputs.later()
        else:
            state = subject.init_state(module, 1, max_len)
        yield columns, subject.call(module, inputs, state=state)


@dataclass(frozen=True)
class Expected:
    """What the documents of a batch give alone: outputs by (row, columns), final state of each row, losses, and (row) the
    outputs (3 ...) of later steps, once they were asked for."""

    outs: list[list[tuple[Tensor, Outcome]]]
    finals: list[State]
    later: dict[int, Tensor] = field(default_factory=dict)


def _expect(subject: Subject, module: nn.Module, packed: Packed, max_len: int | None = None) -> Expected:
    outs, finals = [], []
    incoming = _incoming(subject, module, packed, max_len)
    for row in range(packed.ids.shape[0]):
        found = list(_alone(subject, module, packed, row, max_len, incoming))
        outs.append(found)
        finals.append(found[-1][1].state if found else _row(incoming, row))
    return Expected(outs, finals)


def check_segment(subject: Subject) -> None:
    """Packed and padded documents: outputs, gradients, losses, final states and three later steps, as each alone."""
    module = subject.build()
    stateful = bool(leaves(subject.init_state(module, 1)))
    # Who cannot be cut by its nature can still tell documents apart in one call.
    said = ("cannot", "losses_cannot") if subject.with_losses else ("cannot",)
    cuts = not any("cut" in getattr(part, name, {}) for part in module.modules() for name in said)
    for name, rows in LAYOUTS.items():
        ids = torch.tensor([[int(c) for c in row] for row in rows])
        for incoming in (False, True) if stateful and not subject.needs_context(module) else (False,):
            check_layout(subject, module, name, ids, incoming, cuts)
    _check_undefined_pads(subject, module, stateful)


def _check_undefined_pads(subject: Subject, module: nn.Module, stateful: bool) -> None:
    """Pads may hold NaN, which no product with zero hides. Without gradients: those of a Linear over all tokens see it."""
    name = "middle padding"
    packed = _pack(subject, module, name, torch.tensor([[int(c) for c in row] for row in LAYOUTS[name]]), incoming=False)
    if not packed.inputs.x.is_floating_point():
        return
    real, b = packed.segments.real, packed.ids.shape[0]

    def with_nan(x: Tensor) -> Tensor:
        return x.clone().masked_fill(~real.view(*real.shape, *[1] * (x.ndim - 2)), torch.nan) if x.is_floating_point() else x

    spoilt = replace(packed.inputs, x=with_nan(packed.inputs.x), edges={k: with_nan(v) for k, v in packed.inputs.edges.items()})
    with torch.no_grad():
        clean, dirty = (
            subject.call(module, given, segments=packed.segments, state=subject.init_state(module, b))
            for given in (packed.inputs, spoilt)
        )
    what = f"segment law broken ({name}), with NaN at pads"
    close(dirty.y[real], clean.y[real], tol=1e-9, what=f"{what}: output at real tokens")
    for row in range(b) if stateful else ():
        close_rows(dirty.state, row, clean.state, row, tol=1e-9, what=f"{what}, row {row}")


def check_layout(subject: Subject, module: nn.Module, name: str, ids: Tensor, incoming: bool, cuts: bool) -> None:
    """The segment law on rows of document ids (b t), in one call, in pieces (``cuts``) and under no_grad.

    ``incoming``: on a state that has seen three tokens, which every other row's first document goes on from.
    """
    packed = _pack(subject, module, name, ids, incoming)
    packed = replace(packed, inputs=packed.inputs.watched())
    expected = _expect(subject, module, packed)
    what = f"segment law broken ({name}{', with an incoming state' if incoming else ''})"
    _check_graph(subject, module, packed, expected, what)
    if cuts:
        _check_pieces(subject, module, packed, expected, what)
    with torch.no_grad(), debug_states():
        for max_len in (None, 24) if max_len_shows(subject, module) else (None,):
            if max_len is not None and max_len_counts(module):
                expected = _expect(subject, module, packed, max_len)
            how = f"{what} under no_grad, max_len={max_len}"
            _check_steps(subject, module, packed, expected, max_len, how, cuts)


def _check_graph(subject: Subject, module: nn.Module, packed: Packed, expected: Expected, what: str) -> None:
    got = subject.call(module, packed.inputs, segments=packed.segments, state=_incoming(subject, module, packed))
    _same_outputs(packed, got, expected, what)
    if packed.prefix is None:
        bare = subject.call(module, packed.inputs, segments=packed.segments)
        _same_outputs(packed, bare, expected, f"{what} without a state")
    weight = weight_like(got.y)
    pad = (packed.ids == 0).view(*packed.ids.shape, *[1] * (got.y.ndim - 2))
    loss = (weight.masked_fill(pad, 0.0) * got.y).sum() + sum(v for v, _ in got.losses.values())
    want = torch.zeros((), dtype=torch.float64)
    for row, outs in enumerate(expected.outs):
        for columns, out in outs:
            want = want + (weight[row : row + 1, columns] * out.y).sum() + sum(v for v, _ in out.losses.values())
    if not subject.needs_context(module):
        loss = loss + probe_state(got.state)
        want = want + sum((probe_state(final, [0]) for final in expected.finals), torch.zeros((), dtype=torch.float64))
    tensors = [*packed.inputs.watching(), *module.parameters()]
    names = [f"input {i}" for i in range(len(packed.inputs.watching()))] + [n for n, _ in module.named_parameters()]
    for name, a, b in zip(names, gradients(loss, tensors), gradients(want, tensors), strict=True):
        close(a, b, tol=1e-8, what=f"{what}: gradient of {name}")


def _check_pieces(subject: Subject, module: nn.Module, packed: Packed, expected: Expected, what: str) -> None:
    """The packed rows cut in time, each piece with the documents of its columns."""
    width = packed.ids.shape[1]
    for cut in ((1,) * width, (3, 1, width - 4)) if width > 4 else ((1,) * width,):
        state, outs, at = _incoming(subject, module, packed), [], 0
        for size in cut:
            piece = packed.inputs.columns(slice(at, at + size))
            part = packed.segments.narrow(at, at + size)
            out = subject.call(module, piece.later() if at else piece, segments=part, state=state)
            state, at = out.state, at + size
            outs.append(out)
        edges = {name: torch.cat([out.edges[name] for out in outs], 1) for name in outs[0].edges}
        got = Outcome(torch.cat([out.y for out in outs], 1), state, edges, join_losses(outs))
        how = f"{what}, cut in pieces of {list(cut)}"
        _same_outputs(packed, got, expected, how)
        if not subject.needs_context(module):
            for row, final in enumerate(expected.finals):
                close_rows(state, row, final, 0, tol=1e-9, what=f"{how}: row {row}")


def _token_of(what: str, columns: Tensor) -> Callable[[int], str]:
    return lambda i: f"{what}: output at its token {i} (column {int(columns[i])})"


def _same_outputs(packed: Packed, got: Outcome, expected: Expected, what: str) -> None:
    finite(got.y, f"{what}: y, pads included")
    for row, outs in enumerate(expected.outs):
        for columns, out in outs:
            document = int(packed.ids[row, columns[0]])
            at = f"{what}: row {row}, document {document}"
            close_tokens(got.y[row, columns], out.y[0], tol=1e-9, what=_token_of(at, columns))
            for name, edge in out.edges.items():
                close(got.edges[name][row, columns], edge[0], tol=1e-9, what=f"{at}: edge {name!r}")
    for name, (total, count) in join_losses([out for outs in expected.outs for _, out in outs]).items():
        close(got.losses[name][0], total, tol=1e-9, what=f"{what}: loss {name!r} (pads must not count)")
        if int(got.losses[name][1]) != int(count):
            raise ContractError(f"{what}: count of loss {name!r} is {int(got.losses[name][1])}, expected {int(count)}")


def _check_steps(
    subject: Subject, module: nn.Module, packed: Packed, expected: Expected, max_len: int | None, what: str, cuts: bool
) -> None:
    """``cuts``: what a document alone gives later may be asked for in one call."""
    state = _incoming(subject, module, packed, max_len)
    got = subject.call(module, packed.inputs, segments=packed.segments, state=state)
    _same_outputs(packed, got, expected, what)
    context = subject.needs_context(module)
    live = [row for row, outs in enumerate(expected.outs) if outs or not context]
    if not leaves(got.state):
        return
    if not context:
        for row in live:
            close_rows(got.state, row, expected.finals[row], 0, tol=1e-9, what=f"{what}: row {row}")
    steps = subject.inputs(module, packed.ids.shape[0], 3, salt=9).later()
    after = run_pieces(subject, module, steps, (1, 1, 1), got.state)[0].y
    for row in live:
        if row not in expected.later:
            # The states that documents left alone serve several runs: they are copied before they are consumed.
            copied = _row(expected.finals[row], 0)
            one = steps.rows(slice(row, row + 1))
            expected.later[row] = run_pieces(subject, module, one, (3,) if cuts else (1, 1, 1), copied)[0].y[0]
        close_tokens(after[row], expected.later[row], tol=1e-9, what=f"{what}: row {row}, later step {{}}".format)
