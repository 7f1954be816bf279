"""The cut law, the causal law, and what holds for lengths and batches of any size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybridtf.core import ConfigError, Growing, State, debug_states, leaves
from hybridtf.testing.compare import close, close_states, close_tokens, finite, gradients, probe_state
from hybridtf.testing.errors import ContractError
from hybridtf.testing.subject import TIMELESS, Inputs, Outcome, Subject, max_len_counts, max_len_shows

LENGTH = 13
ROOM = LENGTH + 3
"""The ``max_len`` of states that are made with one."""
CUTS: tuple[tuple[int, ...], ...] = (
    (LENGTH,), (1,) * LENGTH, (5, 8), (1, 12), (12, 1), (4, 0, 9), (3, 1, 1, 4, 2, 2), (2, 7, 3, 1),
)

ONE_CUT: tuple[tuple[int, ...], ...] = ((3, 1, 1, 4, 2, 2),)
"""For states that are the same with and without ``max_len``."""


def check_shape(subject: Subject) -> None:
    """y has the shape and dtype of x, and is finite."""
    for dtype in (torch.float32, torch.float64):
        module = subject.build(dtype)
        for b, t in ((2, 7), (1, 1), (3, 2)):
            inputs = subject.inputs(module, b, t, dtype=dtype)
            y = subject.call(module, inputs).y
            at = f"for x {tuple(inputs.x.shape)} in {dtype}"
            same = y.shape == inputs.x.shape or subject.kind in ("heads", "stems", "models")
            if y.shape[:2] != (b, t) or not same:
                raise ContractError(f"y has shape {tuple(y.shape)} {at}")
            if y.dtype != dtype:
                raise ContractError(f"y is {y.dtype} {at}; a component returns the dtype it was given")
            finite(y, f"y {at}")


def check_empty(subject: Subject) -> None:
    """No rows and no tokens are ordinary input: they give empty output and leave the state as it was."""
    module = subject.build()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for b, t in ((0, 5), (2, 0), (0, 0)):
                inputs = subject.inputs(module, b, t)
                for state in (None, subject.init_state(module, b)):
                    y = subject.call(module, inputs, state=state).y
                    if y.shape[:2] != (b, t):
                        raise ContractError(f"y has shape {tuple(y.shape)} for b={b}, t={t}")
            if subject.kind in TIMELESS:
                continue
            inputs = subject.inputs(module, 2, 4)
            state = subject.call(module, inputs, state=subject.init_state(module, 2)).state
            want = subject.call(module, inputs, state=subject.init_state(module, 2)).state
            got = subject.call(module, inputs.later().columns(slice(0, 0)), state=state).state
            close_states(got, want, tol=0.0, what="a call of no tokens changes the state")


def run_pieces(
    subject: Subject, module: nn.Module, inputs: Inputs, cut: Sequence[int], state: State
) -> tuple[Outcome, list[Outcome]]:
    """The input in pieces of these lengths, the state carried; outputs and edges joined."""
    outs: list[Outcome] = []
    at = 0
    for size in cut:
        piece = inputs.columns(slice(at, at + size))
        out = subject.call(module, piece if at == 0 and not outs else piece.later(), state=state)
        state, at = out.state, at + size
        outs.append(out)
    edges = {name: torch.cat([out.edges[name] for out in outs], 1) for name in outs[0].edges}
    return Outcome(torch.cat([out.y for out in outs], 1), state, edges, join_losses(outs)), outs


def join_losses(outs: Sequence[Outcome]) -> dict[str, tuple[Tensor, Tensor]]:
    """Sums and counts added up."""
    names = {name for out in outs for name in out.losses}

    def added(name: str, which: int) -> Tensor:
        return torch.stack([out.losses[name][which] for out in outs if name in out.losses]).sum()

    return {name: (added(name, 0), added(name, 1)) for name in sorted(names)}


def total_loss(out: Outcome, weight: Tensor, *, with_state: bool = True) -> Tensor:
    """A number that depends on everything a call returned."""
    total = (weight * out.y).sum() + sum((value for value, _ in out.losses.values()), torch.zeros(()))
    for edge in out.edges.values():
        if edge.is_floating_point():
            total = total + (edge * edge.detach().cos()).sum()
    return total + probe_state(out.state) if with_state else total


def weight_like(y: Tensor, salt: int = 5) -> Tensor:
    """Fixed random numbers of the shape of y."""
    generator = torch.Generator().manual_seed(salt)
    return torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)


def check_cut(subject: Subject) -> None:
    """Any cut in time, the state carried, gives what one call gives: outputs, gradients, final state."""
    module = subject.build()
    inputs = subject.inputs(module, 2, LENGTH).watched()
    params = list(module.parameters())
    whole = subject.call(module, inputs, state=subject.init_state(module, 2))
    plain = subject.call(module, inputs)
    close(whole.y, plain.y, tol=1e-9, what="a call with an empty state differs from one without a state")
    weight = weight_like(plain.y)
    wholes = {None: whole, ROOM: _whole_with_room(subject, module, inputs, whole)}
    watched = [*inputs.watching(), *params]
    want: dict[int | None, list[Tensor]] = {None: gradients(total_loss(whole, weight), watched)}
    want[ROOM] = want[None] if wholes[ROOM] is whole else gradients(total_loss(wholes[ROOM], weight), watched)
    names = [f"input {i}" for i in range(len(inputs.watching()))] + [name for name, _ in module.named_parameters()]
    for cut, max_len in [*((cut, None) for cut in CUTS), ((1,) * LENGTH, ROOM), ((5, 8), ROOM)]:
        got, _ = run_pieces(subject, module, inputs, cut, subject.init_state(module, 2, max_len))
        what = f"cut law broken for pieces of {list(cut)} tokens{f', max_len={max_len}' if max_len else ''}"
        _same_outcome(got, wholes[max_len], what)
        found = gradients(total_loss(got, weight), watched)
        for name, a, b in zip(names, found, want[max_len], strict=True):
            close(a, b, tol=1e-9, what=f"{what}: gradient of {name}")
    with torch.no_grad(), debug_states():
        for max_len, out in wholes.items():
            shows = max_len is None or max_len_shows(subject, module)
            for cut in CUTS if shows else ONE_CUT:
                _cut_in_place(subject, module, inputs, cut, max_len, out)


def check_pieces(subject: Subject, module: nn.Module, b: int, cut: Sequence[int], max_len: int | None) -> None:
    """The cut law for one cut, with gradients and in place under no_grad, on states made with ``max_len``."""
    inputs = subject.inputs(module, b, sum(cut)).watched()
    watched = [*inputs.watching(), *module.parameters()]
    whole = subject.call(module, inputs, state=subject.init_state(module, b, max_len))
    got, _ = run_pieces(subject, module, inputs, cut, subject.init_state(module, b, max_len))
    _same_outcome(got, whole, "cut")
    weight = weight_like(whole.y)
    found, want = (gradients(total_loss(out, weight), watched) for out in (got, whole))
    for a, b_ in zip(found, want, strict=True):
        close(a, b_, tol=1e-9, what="gradients")
    with torch.no_grad(), debug_states():
        _cut_in_place(subject, module, inputs, cut, max_len, whole)


def _whole_with_room(subject: Subject, module: nn.Module, inputs: Inputs, whole: Outcome) -> Outcome:
    """What calls on a state made with ``max_len`` are to give: the same, or, for a component that says so, something else."""
    if not max_len_counts(module):
        return whole
    out = subject.call(module, inputs, state=subject.init_state(module, inputs.x.shape[0], ROOM))
    if torch.equal(out.y, whole.y):
        raise ContractError(f"declares uses_max_len, but gives the same with max_len={ROOM}: take the declaration out")
    return out


def _same_outcome(got: Outcome, want: Outcome, what: str) -> None:
    close_tokens(got.y.transpose(0, 1), want.y.transpose(0, 1), tol=1e-9, what=lambda t: f"{what}: output at t={t}")
    for name, edge in want.edges.items():
        close(got.edges[name], edge, tol=1e-9, what=f"{what}: edge {name!r}")
    for name, (total, count) in want.losses.items():
        close(got.losses[name][0], total, tol=1e-9, what=f"{what}: loss {name!r}")
        if int(got.losses[name][1]) != int(count):
            raise ContractError(f"{what}: count of loss {name!r} is {int(got.losses[name][1])}, expected {int(count)}")
    close_states(got.state, want.state, tol=1e-9, what=what)


def _cut_in_place(
    subject: Subject, module: nn.Module, inputs: Inputs, cut: Sequence[int], max_len: int | None, whole: Outcome
) -> None:
    state = subject.init_state(module, inputs.x.shape[0], max_len)
    before = [(leaf.capacity, _addresses(leaf)) for leaf in leaves(state) if isinstance(leaf, Growing)]
    got, _ = run_pieces(subject, module, inputs, cut, state)
    how = f"under no_grad with max_len={max_len}"
    _same_outcome(got, whole, f"cut law broken {how} for pieces of {list(cut)} tokens")
    after = [(leaf.capacity, _addresses(leaf)) for leaf in leaves(got.state) if isinstance(leaf, Growing)]
    if max_len is not None and before != after:
        raise ContractError(f"{how} a Growing state must stay in its buffer: shape or address changed")


def _addresses(leaf: Growing) -> list[int]:
    return [value.data_ptr() for value in leaf.data.values()]


def check_causal(subject: Subject) -> None:
    """In a causal stack no output depends on a later token; otherwise a mixer sees both ways or refuses."""
    if subject.looks_ahead:
        _check_only_ahead(subject)
        return
    module = subject.build()
    for j in (1, 4, 8):
        no_future(subject, module, j)
    if subject.kind in ("mixers", "blocks"):
        _check_both_ways(subject, module)


def _changed(subject: Subject, module: nn.Module, j: int) -> Tensor:
    """(t) largest change of the output at each token when token j changes."""
    inputs, other = (subject.inputs(module, 2, 9, salt=salt) for salt in (0, 1))
    x = inputs.x.clone()
    x[:, j] = (x[:, j] + 1) % 5 if subject.takes_ids else other.x[:, j]
    edges = {name: edge.clone() for name, edge in inputs.edges.items()}
    for name, edge in edges.items():
        edge[:, j] = other.edges[name][:, j]
    changed = Inputs(x, edges, inputs.context)
    with torch.no_grad():
        difference = subject.call(module, changed).y - subject.call(module, inputs).y
    return difference.abs().flatten(2).amax((0, 2))


def no_future(subject: Subject, module: nn.Module, j: int) -> None:
    """No output before token ``j`` (of 9) changes with it."""
    change = _changed(subject, module, j)
    for t in range(j):
        if float(change[t]) > 1e-10:
            raise ContractError(
                f"looks into the future: output at t={t} changes by {float(change[t]):.1e} when token {j} changes"
            )


def _check_only_ahead(subject: Subject) -> None:
    """What is for stacks that are not causal only."""
    try:
        subject.build(causal=True)
    except ConfigError:
        pass
    else:
        raise ContractError("looks_ahead is True, but a causal stack takes it: it must refuse")
    if float(_changed(subject, subject.build(), 5)[4]) <= 1e-10:
        raise ContractError("looks_ahead is True, but the output at t=4 is the same when token 5 changes")


def _check_both_ways(subject: Subject, causal: nn.Module) -> None:
    only = [name for name, part in causal.named_modules() if getattr(part, "causal_only", False)]
    if subject.kind == "mixers" and only:
        return  # the block refuses it
    try:
        module = subject.build(causal=False)
    except ConfigError as error:
        if only:
            return
        raise ContractError(f"causal_only is False, but a non-causal stack is refused: {error}") from error
    if only:
        raise ContractError(
            f"{only[0]} is causal_only, but the block was built for a non-causal stack: it must refuse such a mixer"
        )
    mixes = float(_changed(subject, causal, 4)[5]) > 1e-10
    if subject.kind == "mixers" and mixes and float(_changed(subject, module, 5)[4]) <= 1e-10:
        raise ContractError(
            "built for a non-causal stack it does not see ahead: output at t=4 is the same when token 5 changes; "
            "look both ways or set causal_only = True"
        )


def check_per_token(subject: Subject) -> None:
    """Each token alone gives what it gives among others."""
    module = subject.build()
    inputs = subject.inputs(module, 2, 6)
    whole = subject.call(module, inputs).y
    for t in range(6):
        alone = subject.call(module, inputs.columns(slice(t, t + 1))).y
        close(alone[:, 0], whole[:, t], tol=1e-9, what=f"token {t} alone differs from token {t} among others")


def check_eval(subject: Subject) -> None:
    """Gradients on or off, training or eval: without dropout the same numbers."""
    module = subject.build()
    inputs = subject.inputs(module, 2, LENGTH)
    with torch.no_grad():
        want = subject.call(module, inputs).y
    close(subject.call(module, inputs).y, want, tol=1e-9, what="in eval mode, gradients on differ from gradients off")
    module.train()
    first, second = (_seeded(subject, module, inputs, seed) for seed in (1, 2))
    if torch.equal(first, second):
        close(first, want, tol=1e-9, what="training mode differs from eval mode, though nothing is random")


def _seeded(subject: Subject, module: nn.Module, inputs: Inputs, seed: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return subject.call(module, inputs).y
