"""The calls of ops that a model makes in one pass, kept so that they can be made again, and cut to what a reference can do.

Axes: b batch, t time (queries, for attention), s keys, h heads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from hybridtf.core import KernelRequest, Segments, active
from hybridtf.core.kernels import OpKernel, Phase
from hybridtf.ops.attention.mask import AttentionMask

REFERENCE = "reference"

SCORES = 1 << 23
"""Scores that a reference of attention may hold at once."""

STATES = 1 << 25
"""Numbers that the states of all tokens of a recurrence may have."""

TOKENS = 512
"""Tokens that a reference may walk one by one."""

QUERIES = ("q", "index", "blocks", "outside")
"""Arguments of attention's ops that have a time axis of queries; the others have one of keys."""

MASK_ROWS = ("q_ids", "k_ids", "q_pos", "k_pos", "prefix_len", "q_decay", "k_decay", "rel_q")
"""What a mask says of each row."""

OF_ROWS = ("initial_state", "past", "past_length")
"""Arguments that have rows and no time axis of this call."""


@dataclass
class Call:
    """One call: the kernel that the model chose, and its arguments by name, copied to main memory."""

    op: str
    kernel: str
    phase: Phase
    dtype: torch.dtype
    function: Callable[..., Any]
    reference: Callable[..., Any]
    arguments: dict[str, Any]
    request: KernelRequest

    def call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """The op by another function or with other arguments."""
        bound = inspect.BoundArguments(inspect.signature(self.reference), dict(arguments))
        return function(*bound.args, **bound.kwargs)

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and tokens, b and t."""
        first = pytree.tree_leaves(next(iter(self.arguments.values())))[0]
        return int(first.shape[0]), int(first.shape[1])

    @property
    def attends(self) -> bool:
        """Queries look at keys, each by itself."""
        return "q" in self.arguments and "initial_state" not in inspect.signature(self.reference).parameters

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Of the tensors that are arguments themselves."""
        return {name: list(value.shape) for name, value in self.arguments.items() if isinstance(value, Tensor)}


def is_compiled(model: nn.Module) -> bool:
    """By ``torch.compile`` or ``Module.compile``, as a whole or in parts."""
    dynamo = sys.modules.get("torch._dynamo")  # it takes seconds to load, and has not compiled anything before
    return dynamo is not None and any(
        isinstance(m, dynamo.OptimizedModule) or getattr(m, "_compiled_call_impl", None) is not None for m in model.modules()
    )


@contextmanager
def watching(model: nn.Module, op: str | None = None) -> Iterator[list[Call]]:
    """Inside, the calls of ``model`` by kernels other than the reference, each combination of kernel and shapes once; with
    ``op``, the calls of that op by whatever kernel. A compiled model runs as it was written."""
    calls: list[Call] = []
    seen: set[Any] = set()
    hooks = [
        child.register_forward_pre_hook(_keeper(calls, seen, with_reference=op is not None), with_kwargs=True)
        for child in model.modules() if isinstance(child, OpKernel) and op in (None, child.op)
    ]
    try:
        with torch.compiler.set_stance("force_eager") if is_compiled(model) else contextlib.nullcontext():
            yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _keeper(
    calls: list[Call], seen: set[Any], with_reference: bool
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(module, OpKernel)
        given = {name: value for name, value in kwargs.items() if name != "n_tokens"}
        phase, dtype = module.cell(args[0], kwargs["n_tokens"])
        name = module.chosen.get((phase, dtype))
        key = (module.op, name, phase, dtype, described((args, given), keys_grow=phase == "decode"))
        if name is None or key in seen or (name == REFERENCE and not with_reference):
            return  # where there is none, the call itself says what is wrong
        seen.add(key)
        reference = module.kernels.get(module.op, REFERENCE).load()
        bound = inspect.signature(reference).bind(*args, **given)
        arguments = mapped(dict(bound.arguments), lambda x: x.detach().to("cpu", copy=True))
        request = KernelRequest(module.op, phase, dtype, module.device, module.sizes, module.features)
        calls.append(Call(module.op, name, phase, dtype, module.table[phase, dtype], reference, arguments, request))

    return keep


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """``value`` with every tensor changed: in containers, and in the fields of dataclasses (masks, segments)."""
    if isinstance(value, Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        if not any(isinstance(x, Tensor | Mapping) or dataclasses.is_dataclass(x) for x in fields.values()):
            return value
        return dataclasses.replace(value, **{name: mapped(x, change) for name, x in fields.items()})
    children, spec = pytree.tree_flatten(value, is_leaf=lambda x: x is not value)
    return value if spec.is_leaf() else pytree.tree_unflatten([mapped(child, change) for child in children], spec)


def tensors(value: Any) -> list[Tensor]:
    """The tensors of floating point that :func:`mapped` meets, in its order."""
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    mapped(value, note)
    return [x for x in found if x.is_floating_point()]


def described(value: Any, keys_grow: bool = False) -> Any:
    """What makes one call differ from another: shapes, dtypes and options, never data. ``keys_grow``: calls that differ in the
    number of keys alone, as token after token is decoded, are one."""
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        grows = keys_grow and (value.ndim > 2 or not value.is_floating_point())
        return (shape[:1] + shape[2:] if grows else shape), value.dtype
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [getattr(value, f.name) for f in dataclasses.fields(value) if f.init]
        return type(value).__name__, *(described(field, keys_grow) for field in fields)
    children, spec = pytree.tree_flatten(value, is_leaf=lambda x: x is not value)
    return repr(value) if spec.is_leaf() else tuple(described(child, keys_grow) for child in children)


# -- cuts ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """The part of a call that the reference is run on: the first ``rows`` of b rows, and of t tokens the first ``tokens``,
    or for attention the last ``tokens`` queries, which see all keys. A kernel's whole result is compared on that part."""

    call: Call
    rows: int
    tokens: int

    @property
    def whole(self) -> bool:
        """Nothing is left out."""
        return (self.rows, self.tokens) == self.call.sizes

    @property
    def words(self) -> str:
        """For a record."""
        b, t = self.call.sizes
        if self.whole:
            return "all"
        if self.call.attends:
            return f"{self.rows} of {b} rows, the last {self.tokens} of {t} queries, all keys"
        return f"{self.rows} of {b} rows, the first {self.tokens} of {t} tokens"

    def of_time(self, x: Any) -> Any:
        """A tensor (b t ...), or a pair of such."""
        t = self.call.sizes[1]
        span = slice(t - self.tokens, t) if self.call.attends else slice(0, self.tokens)
        return mapped(x, lambda z: z[: self.rows, span])

    def of_rows(self, x: Any) -> Any:
        """A tensor (b ...)."""
        return mapped(x, lambda z: z[: self.rows])

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the call on this part; differentiable."""
        return dict(given) if self.whole else {name: self._argument(name, value) for name, value in given.items()}

    def _argument(self, name: str, value: Any) -> Any:
        if isinstance(value, AttentionMask):
            return self._mask(value)
        if isinstance(value, Segments):
            cut = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            rows = self.of_rows(cut.pop("continues"))
            return Segments(continues=rows, **{key: self.of_time(x) for key, x in cut.items()})
        if name == "places" and value is not None:
            return self.of_time(value)
        if name in OF_ROWS:
            return self.of_rows(value)
        if self.call.attends:
            of_keys = isinstance(value, Tensor) and value.shape[:2] == self.call.arguments["k"].shape[:2]
            return self.of_time(value) if name in QUERIES else self.of_rows(value) if of_keys else value
        return self.of_time(value) if self._has_time(name, value) else value

    def _mask(self, mask: AttentionMask) -> AttentionMask:
        t = self.call.sizes[1]
        narrow = mask.narrow(t - self.tokens, t, self.call.arguments["k"].shape[1])
        given = {name: getattr(narrow, name) for name in (*MASK_ROWS, *(("sinks",) if _wide(mask.sinks) else ()))}
        return dataclasses.replace(narrow, **{name: x[: self.rows] for name, x in given.items() if x is not None})

    def _has_time(self, name: str, value: Any) -> bool:
        given = tensors(value)
        known = any(name in case.draw(torch.Generator(), 1, 1).timed for case in active().op_cases.get(self.call.op, ()))
        return known and bool(given) and all(tuple(x.shape[:2]) == self.call.sizes for x in given)

    def results(self, out: Any) -> list[Tensor]:
        """Of what the kernel gave for the whole call, what the reference gives for this part."""
        kept = self.comparable(out)
        return kept if self.whole else [self.of_time(x) for x in kept]

    def comparable(self, out: Any) -> list[Tensor]:
        """The results that this part settles: of a row that is cut in time no final state."""
        stateful = "initial_state" in inspect.signature(self.call.reference).parameters
        if self.whole or not stateful:
            return tensors(out)
        return tensors(out[0])


def _wide(x: Tensor | None) -> bool:
    return x is not None and x.ndim == 3


def cut_of(call: Call, out: Any) -> Cut:
    """The largest part that the reference can be run on in little time; ``out``: what the kernel gave."""
    b, t = call.sizes
    if call.op not in active().op_cases or (call.attends and call.arguments.get("segments") is not None):
        return Cut(call, b, t)  # which argument has which axis is not known
    if call.attends:
        k, index = call.arguments["k"], call.arguments.get("index")
        keys = k.shape[1] if index is None else max(k.shape[1], index.shape[-1] * k.shape[-1])
        each = call.arguments["q"].shape[2] * keys
        return _fitting(call, max(SCORES // max(each, 1), 1))
    stateful = "initial_state" in inspect.signature(call.reference).parameters
    if not stateful:  # a convolution: every token reads all before it
        if call.arguments.get("x") is None or call.arguments["x"].ndim < 3:
            return Cut(call, b, t)
        return _fitting(call, max(math.isqrt(STATES // call.arguments["x"].shape[-1]), 1))
    state = sum(x.numel() for x in tensors(out[1])) // b
    return _fitting(call, max(STATES // max(state, 1), 1), TOKENS)


def _fitting(call: Call, budget: int, steps: int | None = None) -> Cut:
    """All rows where b t tokens are within ``budget`` and t within ``steps``, else the first row and as much of it as is."""
    b, t = call.sizes
    fits = b * t <= budget and (steps is None or t <= steps)
    return Cut(call, b, t) if fits else Cut(call, 1, min(t, budget, steps or t))
