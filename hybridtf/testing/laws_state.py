"""What holds for states: their size, form, copies, and their end."""

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
    State,
    StateError,
    StateLeaf,
    debug_states,
    leaves,
    reorder,
    restore,
    snapshot,
    state_lengths,
)
from hybridtf.testing.compare import close, finite, storages
from hybridtf.testing.errors import ContractError
from hybridtf.testing.subject import Inputs, Subject, needs_state


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

