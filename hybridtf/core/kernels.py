"""Kernels: implementations of an op, why each can or cannot run here, and the small table that a module indexes.

A :class:`Kernel` is a record; ``why_not`` answers a :class:`KernelRequest` with a reason or None, checks device, dtype and
sizes first, and imports its package last (installed is not usable). :class:`OpKernel` is the parameterless module that a
component keeps: building, moving or casting the component refills its table, so a forward only looks a function up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from hybridtf.core.errors import KernelError, UnknownNameError, known_names

Phase: TypeAlias = Literal["train", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("train", "prefill", "decode")
DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class KernelRequest:
    """What a kernel is asked to run: never data, only what is known when a model is built or moved.

    ``sizes`` are the op's own names (``head_dim``, ``n_heads``, ...); ``features`` are options that a kernel may lack
    (``"softcap"``, ``"sinks"``, ...).
    """

    op: str
    phase: Phase
    dtype: torch.dtype
    device: torch.device
    sizes: Mapping[str, int] = field(default_factory=dict)
    features: frozenset[str] = frozenset()


def always(request: KernelRequest) -> str | None:
    """``why_not`` of a kernel that runs everywhere."""
    return None


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op.

    ``load()`` returns the function, with the op's own signature; it is the only place that may import a kernel package.
    Among the kernels that can run, ``auto`` takes the highest ``priority``: 0 is a reference, 10 plain torch.
    """

    op: str
    name: str
    priority: int
    why_not: Callable[[KernelRequest], str | None]
    load: Callable[[], Callable[..., Any]]


class KernelSet:
    """All registered kernels, by op and name."""

    def __init__(self, kernels: Iterable[Kernel] = ()) -> None:
        self._kernels: dict[str, dict[str, Kernel]] = {}
        for kernel in kernels:
            self.add(kernel)

    def add(self, kernel: Kernel) -> None:
        """Register; a taken (op, name) is refused."""
        of_op = self._kernels.setdefault(kernel.op, {})
        if kernel.name in of_op:
            raise KernelError(f"op {kernel.op!r} already has a kernel named {kernel.name!r}")
        of_op[kernel.name] = kernel

    def ops(self) -> tuple[str, ...]:
        return tuple(sorted(self._kernels))

    def of(self, op: str) -> list[Kernel]:
        """Kernels of an op, best first."""
        if op not in self._kernels:
            raise UnknownNameError(f"no op named {op!r}. {known_names(op, self._kernels)}")
        return sorted(self._kernels[op].values(), key=lambda k: (-k.priority, k.name))

    def get(self, op: str, name: str) -> Kernel:
        known = {k.name: k for k in self.of(op)}
        if name not in known:
            raise UnknownNameError(f"op {op!r} has no kernel named {name!r}. {known_names(name, ['auto', *known])}")
        return known[name]

    def reasons(self, request: KernelRequest) -> dict[str, str | None]:
        """For every kernel of the op, why it cannot answer the request (None: it can)."""
        return {k.name: _load(k, request)[0] for k in self.of(request.op)}

    def bind(
        self, op: str, name: str = "auto", *, device: torch.device, dtype: torch.dtype,
        sizes: Mapping[str, int] | None = None, features: Iterable[str] = (), where: str = "",
        compute_dtype: torch.dtype | None = None,
    ) -> OpKernel:
        """The module a component keeps and calls; see :class:`OpKernel`."""
        probe = torch.empty(0, device=device, dtype=dtype)
        op_kernel = OpKernel(self, op, name, sizes or {}, frozenset(features), where, probe)
        op_kernel.built = None if compute_dtype is None else (dtype, compute_dtype)
        return op_kernel


def _load(kernel: Kernel, request: KernelRequest) -> tuple[str | None, Callable[..., Any] | None]:
    """The kernel's function, or why there is none."""
    # The border to other people's code: whatever a plugin's kernel raises is its reason, and the other kernels live on.
    try:
        reason = kernel.why_not(request)
        return (reason, None) if reason is not None else (None, kernel.load())
    except Exception as error:
        return f"it failed to load: {type(error).__name__}: {error}", None


class OpKernel(nn.Module):
    """An op with its implementations chosen: called like the op, with ``n_tokens`` saying how many tokens are new.

    The choice is by phase (gradients on: train; else one token: decode; else prefill) and by the dtype of the first
    argument (of its first part, where that is a (re, im) pair). A kernel asked for by name is never replaced: a cell it
    cannot fill raises :class:`KernelError` when it is used, and if it can fill none, when the module is built. On the meta
    device nothing is refused.
    """

    probe: Tensor
    built: tuple[torch.dtype, torch.dtype] | None = None
    """(parameter dtype, compute dtype) that the model was built with, where it named a compute dtype."""

    def __init__(
        self, kernels: KernelSet, op: str, name: str, sizes: Mapping[str, int], features: frozenset[str], where: str,
        probe: Tensor,
    ) -> None:
        super().__init__()
        self.kernels, self.op, self.kernel = kernels, op, name
        self.sizes, self.features, self.where = dict(sizes), features, where
        self.register_buffer("probe", probe, persistent=False)
        self.fill()

    def __deepcopy__(self, memo: dict[int, Any]) -> OpKernel:
        twin = OpKernel(self.kernels, self.op, self.kernel, self.sizes, self.features, self.where, self.probe.clone())
        twin.built = self.built
        return twin

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of buffered activations (KV, windows): what the model was built for, until it is cast to another."""
        if self.built is not None and self.built[0] == self.probe.dtype:
            return self.built[1]
        return self.probe.dtype

    @property
    def device(self) -> torch.device:
        """Where the component is."""
        return self.probe.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the component's parameters."""
        return self.probe.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OpKernel:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.fill()
        return self

    def fill(self) -> None:
        """Choose again for the device the module is on."""
        self.table: dict[tuple[Phase, torch.dtype], Callable[..., Any]] = {}
        self.chosen: dict[tuple[Phase, torch.dtype], str] = {}
        self.reasons: dict[tuple[Phase, torch.dtype], dict[str, str | None]] = {}
        candidates = self.kernels.of(self.op) if self.kernel == "auto" else [self.kernels.get(self.op, self.kernel)]
        device = torch.device("cpu") if self.probe.device.type == "meta" else self.probe.device
        for phase in PHASES:
            for dtype in DTYPES:
                self._fill_cell(phase, dtype, candidates, device)
        if not self.chosen and self.probe.device.type != "meta":
            raise KernelError(self._refusal("train", self.probe.dtype))

    def _fill_cell(self, phase: Phase, dtype: torch.dtype, candidates: list[Kernel], device: torch.device) -> None:
        request = KernelRequest(self.op, phase, dtype, device, self.sizes, self.features)
        reasons: dict[str, str | None] = {}
        for kernel in candidates:
            reasons[kernel.name], function = _load(kernel, request)
            if function is not None:
                self.table[phase, dtype] = function
                self.chosen[phase, dtype] = kernel.name
                break
        self.reasons[phase, dtype] = reasons

    def _refusal(self, phase: Phase, dtype: torch.dtype) -> str:
        reasons = self.reasons.get((phase, dtype), {"dtype": f"one of {', '.join(map(str, DTYPES))} is needed"})
        because = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
        others = [n for n, r in self.kernels.reasons(self._request(phase, dtype)).items() if r is None]
        where = f"{self.where}: " if self.where else ""
        asked = "no kernel" if self.kernel == "auto" else f"kernel {self.kernel!r}"
        return (
            f"{where}{self.op}: {asked} cannot run for {phase} in {str(dtype).removeprefix('torch.')} ({because}). "
            f"Can run here: {', '.join(others) or 'none'}"
        )

    def _request(self, phase: Phase, dtype: torch.dtype) -> KernelRequest:
        return KernelRequest(self.op, phase, dtype, self.probe.device, self.sizes, self.features)

    def cell(self, first: Any, n_tokens: int) -> tuple[Phase, torch.dtype]:
        """Where :attr:`table` and :attr:`chosen` are looked up for a call whose first argument is ``first``."""
        phase: Phase = "train" if torch.is_grad_enabled() else "decode" if n_tokens == 1 else "prefill"
        return phase, (first[0] if isinstance(first, tuple) else first).dtype  # a complex number comes as a pair

    def forward(self, *args: Any, n_tokens: int, **kwargs: Any) -> Any:
        """Run the op; ``n_tokens`` is the number of new tokens and is not passed on."""
        phase, dtype = self.cell(args[0], n_tokens)
        fn = self.table.get((phase, dtype))
        if fn is None:
            raise KernelError(self._refusal(phase, dtype))
        return fn(*args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.op}, kernel={self.kernel}, uses={sorted(set(self.chosen.values()))}"


def kernels_used(module: nn.Module) -> dict[str, dict[str, str]]:
    """For every op of a model, by module name: the kernel of each phase in the module's own dtype."""
    used: dict[str, dict[str, str]] = {}
    for name, child in module.named_modules():
        if isinstance(child, OpKernel):
            used[name] = {str(phase): child.chosen.get((phase, child.probe.dtype), "none") for phase in PHASES}
    return used
