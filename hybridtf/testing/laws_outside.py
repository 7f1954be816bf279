"""What others do to a component: low-rank adapters on its projections, and torch.compile."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from hybridtf.core import Growing, Segments, State, leaves
from hybridtf.testing.compare import close, gradients
from hybridtf.testing.errors import ContractError, NotApplicableError
from hybridtf.testing.laws_time import total_loss, weight_like
from hybridtf.testing.subject import TIMELESS, Inputs, Subject, by_phase

RANK = 3
TRACED = 6
"""Tokens of a call that is compiled: more than one chunk, the last one not full; a graph grows with its chunks."""


class LowRank(nn.Module):
    """An adapter around a Linear, as adapter libraries make it: ``weight`` still reads the base's."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(seed)

        def start(*shape: int) -> nn.Parameter:
            value = 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
            return nn.Parameter(value.to(base.weight))

        self.down, self.up = start(RANK, base.in_features), start(base.out_features, RANK)
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return out

    def merged(self) -> nn.Linear:
        """One Linear with the adapter added to its weight."""
        out = copy.deepcopy(self.base)
        out.weight = nn.Parameter(self.base.weight.detach() + (self.up @ self.down).detach())
        return out


def _replace(module: nn.Module, kind: type[nn.Module], change: Callable[[Any, int], nn.Module]) -> int:
    """Replace every submodule of exactly this class; the number replaced."""
    found = [(at, key) for at in module.modules() for key, child in at.named_children() if type(child) is kind]
    for i, (parent, key) in enumerate(found):
        setattr(parent, key, change(getattr(parent, key), i))
    return len(found)


def check_lora(subject: Subject) -> None:
    """With an adapter on every Linear: unmerged equals merged in training, prefill and decode."""
    module = subject.build()
    inputs = subject.inputs(module, 2, 9)
    before = by_phase(subject, module, inputs)
    if not _replace(module, nn.Linear, lambda base, i: LowRank(base, i)):
        raise NotApplicableError("has no nn.Linear")
    adapters = {name: p for name, p in module.named_parameters() if name.endswith((".down", ".up"))}
    out = subject.call(module, inputs)
    in_y = out.y.requires_grad and any(  # a block may give what it makes as edges alone
        grad is not None
        for grad in torch.autograd.grad(out.y.sum(), list(adapters.values()), allow_unused=True, retain_graph=True)
    )
    found = gradients(total_loss(out, weight_like(out.y), with_state=False), list(adapters.values()))
    silent = [name for name, grad in zip(adapters, found, strict=True) if not bool(grad.any())]
    if silent:
        raise ContractError(f"adapters without effect: {silent}; call the Linear itself, or ask core.raw_weight")
    merged = copy.deepcopy(module)
    _replace(merged, LowRank, lambda adapter, i: adapter.merged())
    wanted = by_phase(subject, merged, inputs)
    for (what, a), (_, b), (_, old) in zip(by_phase(subject, module, inputs), wanted, before, strict=True):
        close(a, b, tol=1e-9, what=f"low-rank adapters: unmerged differs from merged in {what}")
        if in_y and torch.equal(b, old):
            raise ContractError(f"low-rank adapters have no effect on {what}")


class _Way(NamedTuple):
    """How a component is called: documents in rows or none, with gradients or without, on a state or from the start."""

    packed: bool
    train: bool
    carried: bool


WAYS: tuple[_Way, ...] = (_Way(packed=True, train=False, carried=False), _Way(False, True, False), _Way(True, True, True))
"""With decode (plain, without gradients, on a state) these meet every pair of the three, each at the cost of one graph."""


def check_compile(subject: Subject, backend: str | None = None) -> None:
    """``torch.compile(fullgraph=True)``: same results, and decode does not compile again at each step.

    ``backend`` None runs the captured graphs eagerly and counts them.
    """
    module = subject.build()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ways = WAYS
            if subject.kind in TIMELESS:
                ways = (_Way(False, True, False),)
            elif backend is not None:
                ways = (_Way(True, True, False),)  # a real compiler takes a minute where the eager one takes a second
            for way in ways:
                torch._dynamo.reset()
                _compiled(subject, module, way, backend)
            if subject.kind not in TIMELESS:
                torch._dynamo.reset()
                _compiled_decode(subject, module, backend)
    except torch._dynamo.exc.TorchDynamoException as error:
        first = str(error).strip().splitlines()
        raise ContractError(f"torch.compile(fullgraph=True) fails: {' '.join(first[:6])}") from error
    finally:
        torch._dynamo.reset()


def _ids(b: int, t: int) -> Segments:
    ids = torch.ones(b, t, dtype=torch.int64)
    ids[:, t // 2 :] = 2
    ids[0, -1] = 0
    return Segments.from_ids(ids)


def _compiled(subject: Subject, module: nn.Module, way: _Way, backend: str | None) -> None:
    inputs = subject.inputs(module, 2, TRACED).watched()

    def run(inputs: Inputs, segments: Segments | None, state: State | None) -> Tensor:
        return subject.call(module, inputs, segments=segments, state=state).y

    compiled: Callable[..., Tensor] = torch.compile(run, backend=backend or CompileCounter(), fullgraph=True)
    segments = _ids(2, TRACED) if way.packed else None
    real: Any = segments.real if segments is not None else slice(None)
    params: list[Tensor] = list(module.parameters()) if way.train else []
    results = []
    with torch.set_grad_enabled(way.train):
        for function in (compiled, run):
            y = function(inputs, segments, subject.init_state(module, 2) if way.carried else None)[real]
            results.append([y, *(gradients((weight_like(y) * y).sum(), params) if params else [])])
    how = f"packed: {way.packed}, gradients: {way.train}, on a state: {way.carried}"
    for a, b in zip(*results, strict=True):
        close(a, b, tol=1e-9, what=f"compiled differs from eager ({how})")


def _compiled_decode(subject: Subject, module: nn.Module, backend: str | None) -> None:
    counter = CompileCounter()

    def run(inputs: Inputs, state: Any) -> tuple[Tensor, Any]:
        out = subject.call(module, inputs, state=state)
        return out.y, out.state

    compiled: Callable[..., tuple[Tensor, Any]] = torch.compile(run, backend=backend or counter, fullgraph=True)
    steps = subject.inputs(module, 2, 10)
    with torch.no_grad():
        first = steps.columns(slice(0, 3))
        states = [subject.call(module, first, state=subject.init_state(module, 2, 16)).state for _ in range(2)]
        counts = []
        for i in range(3, 10):
            one = steps.later().columns(slice(i, i + 1))
            got, states[0] = compiled(one, states[0])
            want, states[1] = run(one, states[1])
            close(got, want, tol=1e-9, what=f"compiled decode differs from eager at step {i}")
            counts.append(counter.frame_count)
    if backend is None and counts[-1] > counts[1]:
        growing = any(isinstance(leaf, Growing) for leaf in leaves(states[1]))
        raise ContractError(
            f"decode compiles again at later steps (graphs so far: {counts})"
            + ("; with max_len a Growing state keeps its shape" if growing else "")
        )
