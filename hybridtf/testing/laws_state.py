"""What holds for states: their size, form, copies, crops, and their end."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from hybridtf.core import (
    Fixed,
    Growing,
    OwnClock,
    Ring,
    Segments,
    State,
    StateError,
    StateLeaf,
    crop,
    debug_states,
    leaves,
    reorder,
    restore,
    snapshot,
    state_lengths,
)
from hybridtf.testing.compare import close, close_rows, finite, storages
from hybridtf.testing.errors import ContractError
from hybridtf.testing.subject import Inputs, Subject, max_len_counts, needs_state


def _prefill(subject: Subject, module: nn.Module, b: int, t: int, **options: Any) -> State:
    return subject.call(module, subject.inputs(module, b, t), state=subject.init_state(module, b, **options)).state


def _steps(subject: Subject, module: nn.Module, state: State, steps: Inputs) -> Tensor:
    """Outputs of single-token calls."""
    outs = []
    for i in range(steps.x.shape[1]):
        out = subject.call(module, steps.columns(slice(i, i + 1)), state=state)
        state = out.state
        outs.append(out.y)
    return torch.cat(outs, 1)


def check_state_bytes(subject: Subject) -> None:
    """All that is carried lies in leaves, is counted, and grows as its leaf class says."""
    module = subject.build()
    needs_state(subject, module)
    sizes: dict[int, list[tuple[int, int]]] = {}
    for t in (4, 8, 16):
        state = _prefill(subject, module, 2, t)
        _only_leaves(state)
        for leaf in leaves(state):
            held = sum(v.numel() * v.element_size() for v in _all_tensors(leaf))
            if leaf.nbytes() != held:
                raise ContractError(f"{type(leaf).__name__} says {leaf.nbytes()} bytes and holds {held}")
            if leaf.used_nbytes() > leaf.nbytes():
                raise ContractError(f"{type(leaf).__name__} uses {leaf.used_nbytes()} of {leaf.nbytes()} bytes")
        lengths = state_lengths(state)
        if lengths is None or lengths.dtype != torch.int64 or lengths.tolist() != [t, t]:
            said = None if lengths is None else lengths.tolist()
            raise ContractError(f"after {t} tokens the state says length {said}")
        sizes[t] = [(leaf.nbytes(), leaf.used_nbytes()) for leaf in leaves(state)]
    for i, leaf in enumerate(leaves(_prefill(subject, module, 2, 4))):
        (small, used4), (_, used8), (large, used16) = sizes[4][i], sizes[8][i], sizes[16][i]
        if isinstance(leaf, Growing):
            # A sparse one grows when a block is full, so only in step with its tokens.
            grows = used4 <= used8 <= used16 if leaf.sparse else used16 - used8 == 2 * (used8 - used4)
            if not grows:
                sizes_of = f"{used4}, {used8}, {used16} bytes at 4, 8, 16 tokens"
                raise ContractError(f"Growing leaf {i}: {sizes_of} is not linear")
        elif small != large:
            raise ContractError(f"{type(leaf).__name__} leaf {i} grew from {small} to {large} bytes (4, 16 tokens)")


def _all_tensors(leaf: StateLeaf) -> list[Tensor]:
    found = list(leaf.data.values())
    return [*found, *leaf.past.values(), *leaf.constant.values()] if isinstance(leaf, Fixed) else found


def _only_leaves(state: State) -> None:
    for value in pytree.tree_leaves(state, is_leaf=lambda x: isinstance(x, StateLeaf | OwnClock)):
        if isinstance(value, OwnClock):
            _only_leaves(value.state)  # its number is the same for good
        elif not isinstance(value, StateLeaf):
            raise ContractError(
                f"the state holds a {type(value).__name__} outside of Growing, Ring and Fixed: it would not be "
                "reordered, cropped or counted"
            )


def form(state: State) -> Any:
    """Nesting, leaf classes, names, dtypes and sizes of a state, without lengths in time."""

    def of(leaf: StateLeaf) -> str:
        first = 1 if isinstance(leaf, Fixed) else 2
        held = {name: (str(value.dtype), tuple(value.shape[first:])) for name, value in sorted(leaf.data.items())}
        return f"{type(leaf).__name__} {held}"

    flat, spec = pytree.tree_flatten(state, is_leaf=lambda x: isinstance(x, StateLeaf))
    return [of(leaf) if isinstance(leaf, StateLeaf) else type(leaf).__name__ for leaf in flat], str(spec)


def check_structure(subject: Subject) -> None:
    """The state has one form, whatever the length of the call that made it."""
    module = subject.build()
    needs_state(subject, module)
    context = subject.needs_context(module)
    if not context:
        _check_start(subject, module)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            want = form(_prefill(subject, module, 2, 5))
            made = {f"a call of {t} tokens": _prefill(subject, module, 2, t) for t in (1, 2, 9)}
            if not context:
                made["init_state"] = subject.init_state(module, 2)
                made["init_state with max_len"] = subject.init_state(module, 2, 16)
            for what, state in made.items():
                if form(state) != want:
                    raise ContractError(f"{what} gives the state {form(state)}, a call of 5 tokens {want}")


def _check_start(subject: Subject, module: nn.Module) -> None:
    """Of a first state, all that is read is defined; only spare slots may be whatever stands in memory."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is full of NaN then
    try:
        state = subject.init_state(module, 2)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    for leaf in leaves(state):
        for name, value in leaf.data.items() if isinstance(leaf, Fixed) else ():
            finite(value, f"init_state leaves {name!r} undefined (torch.empty?)")


def check_reorder(subject: Subject) -> None:
    """Rows of a state can be chosen, repeated and dropped; each row is then independent of the others."""
    module = subject.build()
    needs_state(subject, module)
    index = torch.tensor([1, 1, 2, 0])
    inputs, steps = subject.inputs(module, 3, 7), subject.inputs(module, 4, 3, salt=3).later()
    with torch.no_grad(), debug_states():
        for max_len in (None, 16):
            state = subject.call(module, inputs, state=subject.init_state(module, 3, max_len)).state
            chosen = reorder(state, index)
            if storages(_tensors(state)) & storages(_tensors(chosen)):
                raise ContractError("a reordered state shares memory with the state it was made from")
            got = _steps(subject, module, chosen, steps)
            fresh = subject.call(module, inputs.rows(index), state=subject.init_state(module, 4, max_len)).state
            want = _steps(subject, module, fresh, steps)
            close(got, want, tol=1e-9, what=f"after reorder({index.tolist()}), max_len={max_len}")
            old = _steps(subject, module, state, steps.rows(slice(0, 3)))
            again = subject.call(module, inputs, state=subject.init_state(module, 3, max_len)).state
            want = _steps(subject, module, again, steps.rows(slice(0, 3)))
            close(old, want, tol=1e-9, what="the old state after reorder")


def _tensors(state: State) -> list[Tensor]:
    return [value for leaf in leaves(state) for value in leaf.tensors().values()]


def check_snapshot(subject: Subject) -> None:
    """A snapshot brings the state back, however often, whatever was done to the state since."""
    module = subject.build()
    needs_state(subject, module)
    steps = subject.inputs(module, 2, 3, salt=3).later()
    with torch.no_grad(), debug_states():
        for max_len in (None, 16):
            inputs = subject.inputs(module, 2, 7)
            state = subject.call(module, inputs, state=subject.init_state(module, 2, max_len)).state
            kept = snapshot(state)
            if storages(_tensors(state)) & storages(_tensors(kept)):
                raise ContractError("a snapshot shares memory with its state")
            want = _steps(subject, module, state, steps)
            for _ in range(2):
                got = _steps(subject, module, restore(kept), steps)
                close(got, want, tol=0.0, what=f"steps after restore(snapshot), max_len={max_len}")


PADDINGS = {"no padding": None, "padding": ["1111111000", "0011110111", "0000111111", "1111111111"]}


def check_crop(subject: Subject) -> None:
    """A state made with ``keep`` can forget its last tokens, as if it had never seen them, or says that it cannot."""
    module = subject.build()
    needs_state(subject, module)
    for padding, rows in PADDINGS.items():
        ids = torch.tensor([[int(c) for c in row] for row in rows]) if rows else torch.ones(4, 10, dtype=torch.int64)
        for max_len in (None, 24):
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    for prefix in (0, 6):
                        what = f"crop ({padding}, {prefix} tokens before, max_len={max_len})"
                        _crop(subject, module, ids, prefix, max_len, what)


def _cropped_call(
    subject: Subject, module: nn.Module, ids: Tensor, prefix: int, max_len: int | None, keep: int
) -> tuple[Inputs, Inputs, State]:
    first, inputs = subject.inputs(module, 4, prefix, salt=4), subject.inputs(module, 4, ids.shape[1], salt=5)
    state = subject.init_state(module, 4, max_len)
    if prefix:
        state, inputs = subject.call(module, first, state=state).state, inputs.later()
    segments = None if bool((ids > 0).all()) else Segments.from_mask(ids)
    out = subject.call(module, inputs, segments=segments, state=state, keep=keep)
    plain_state = subject.init_state(module, 4, max_len)
    if prefix:
        plain_state = subject.call(module, first, state=plain_state).state
    plain = subject.call(module, inputs, segments=segments, state=plain_state)
    real = ids > 0
    close(out.y[real], plain.y[real], tol=1e-9, what=f"keep={keep} changes the output")
    return first, inputs, out.state


def _truth(
    subject: Subject, module: nn.Module, first: Inputs, inputs: Inputs, ids: Tensor, row: int, n: int, max_len: int | None
) -> State:
    """The state of one row that never saw its last n real tokens."""
    state, part = subject.init_state(module, 1, max_len if max_len_counts(module) else None), slice(row, row + 1)
    if first.x.shape[1]:
        state = subject.call(module, first.rows(part), state=state).state
    columns = ids[row].nonzero()[:, 0]
    columns = columns[: len(columns) - n]
    return subject.call(module, inputs.rows(part).columns(columns), state=state).state


def _crop(subject: Subject, module: nn.Module, ids: Tensor, prefix: int, max_len: int | None, what: str) -> None:
    keep = 3
    first, inputs, state = _cropped_call(subject, module, ids, prefix, max_len, keep)
    n = torch.tensor([0, 1, 3, 2])
    try:
        cropped = crop(state, n)
    except StateError as error:
        raise ContractError(f"{what}: a state made with keep={keep} refuses {n.tolist()} tokens: {error}") from error
    steps = subject.inputs(module, 4, 3, salt=6).later()
    for row in range(4):
        want = _truth(subject, module, first, inputs, ids, row, int(n[row]), max_len)
        close_rows(cropped, row, want, 0, tol=1e-9, what=f"{what} of {int(n[row])} tokens: row {row}")
    got = _steps(subject, module, cropped, steps)
    for row in range(4):
        want = _truth(subject, module, first, inputs, ids, row, int(n[row]), max_len)
        after = _steps(subject, module, want, steps.rows(slice(row, row + 1)))
        close(got[row], after[0], tol=1e-9, what=f"{what} of {int(n[row])} tokens: row {row}, later steps")
    for kept, too_many in ((keep, 5), (0, 1), (keep, prefix + 11)):
        first, inputs, state = _cropped_call(subject, module, ids, prefix, max_len, kept)
        _refused_or_right(subject, module, first, inputs, ids, state, too_many, max_len, what)


def _refused_or_right(
    subject: Subject, module: nn.Module, first: Inputs, inputs: Inputs, ids: Tensor, state: State, n: int,
    max_len: int | None, what: str,
) -> None:
    try:
        cropped = crop(state, n)
    except StateError:
        return
    for row in range(4):
        if n > int((ids[row] > 0).sum()) + first.x.shape[1]:
            raise ContractError(f"{what}: {n} tokens were cropped of a document that has fewer; raise StateError")
        if n > int((ids[row] > 0).sum()):
            continue
        want = _truth(subject, module, first, inputs, ids, row, n, max_len)
        close_rows(cropped, row, want, 0, tol=1e-9, what=f"{what} of {n} tokens neither refused nor right: row {row}")


def check_dead_state(subject: Subject) -> None:
    """A call consumes its state: with gradients on nothing is written, afterwards the old state is dead."""
    module = subject.build()
    needs_state(subject, module)
    for t in (1, 4):
        for max_len in (None, 16):
            _functional(subject, module, t, max_len)
            for grad in (True, False):
                with torch.set_grad_enabled(grad), debug_states():
                    _dead(subject, module, t, max_len)


def _functional(subject: Subject, module: nn.Module, t: int, max_len: int | None) -> None:
    state = _prefill(subject, module, 2, 5, max_len=max_len)
    before = [(value, value.detach().clone()) for value in _tensors(state)]
    lengths = [leaf.length.clone() for leaf in leaves(state)]
    held = leaves(state)
    subject.call(module, subject.inputs(module, 2, t, salt=2).later(), state=state)
    for value, copy in before:
        if not torch.equal(value, copy):
            raise ContractError("with gradients on, a call wrote into the state it was given: make new tensors")
    for leaf, length in zip(held, lengths, strict=True):
        if not torch.equal(leaf._length, length):
            raise ContractError("a call wrote into the lengths of the state it was given")


def _dead(subject: Subject, module: nn.Module, t: int, max_len: int | None) -> None:
    state = _prefill(subject, module, 2, 5, max_len=max_len)
    old = leaves(state)
    # What a Fixed leaf holds came from the mixer and may be shared; buffers of the other two are their own.
    memory = [value for leaf in old if isinstance(leaf, Growing | Ring) for value in leaf.data.values()]
    new = subject.call(module, subject.inputs(module, 2, t, salt=2).later(), state=state).state
    alive = storages(_tensors(new))
    for i, leaf in enumerate(old):
        try:
            leaf.data  # noqa: B018 - reading is the test
        except StateError:
            continue
        raise ContractError(
            f"leaf {i} ({type(leaf).__name__}) of the old state is still alive after a call of {t} tokens: "
            "update states with append, push or advance"
        )
    if torch.is_grad_enabled():
        return
    for value in memory:
        private = value.untyped_storage().data_ptr() not in alive
        if private and value.is_floating_point() and value.numel() and not bool(value.isnan().all()):
            raise ContractError("memory of the old state that the new one does not share was not poisoned")

