"""The work of a call: operations and bytes moved, by operator, from the shapes that its operators are called on.

Operations are those of matrix products, convolutions, transforms, attention and scans, by the formulas that torch and the ops
register; a multiplication and an addition count as two, elementwise work counts as none but in a scan, which is made of it.
Counted is what is computed: the tiles that a causal or sparse rule does not spare too. ``useful`` is what was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from hybridtf.core import ConfigError
from hybridtf.cost.live_bytes import ASKS_DEVICE
from hybridtf.ops.flop_formulas import USEFUL

KNOWN = ("aten", "prim", "prims", "profiler")
"""Namespaces whose operators without a formula are elementwise, views, sums or copies, but for those of :data:`HEAVY`."""

HEAVY = (
    "linalg_", "_linalg_", "_fft_", "_flash_", "_efficient_", "_scaled_", "_cudnn", "cudnn_",
    "mkldnn_", "miopen_", "_cdist", "cholesky",
)
"""How the names of torch's operators begin that do more than move what they read."""

LIGHT = ("linalg_vector_norm",)
"""Those among them that are sums."""

OWN_KERNEL = torch._C.DispatchKey.CPU
"""An operator that has one runs as it is, even where torch could also make it of others."""

FREE = ("empty", "new_empty", "_local_scalar", "detach", "lift_fresh")
"""How the names of operators begin that move nothing."""

LOOKUPS = ("embedding", "index", "index_select", "gather", "take")
"""Operators that read what they return, and not the whole table."""

UPDATES = ("index_put_", "index_put", "scatter_", "index_add_", "index_copy_")
"""Operators that write what they are given, and not the whole table."""

Key = tuple[str, str]
"""An operator, and the dtype that it computes in."""


def count_flops(fn: Callable[[], object]) -> int:
    """Operations of all that ``fn`` runs, backward included. Raises :class:`ConfigError` where an operator has no formula: a
    sum without it would be no count."""
    counter = CountWork()
    with counter:
        fn()
    unknown = sorted(set().union(*(part.unknown for part in counter.parts.values())))
    if unknown:
        raise ConfigError(f"its operations are unknown: no formula of {', '.join(unknown)}")
    return sum(part.flops for part in counter.parts.values())


@dataclass
class Work:
    """``by_op``: operations and bytes moved by (operator, dtype); ``unknown``: operators that no formula is known of;
    ``asked``: of operators that compute more than was asked for, the operations that were."""

    by_op: dict[Key, tuple[int, int]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    asked: dict[Key, int] = field(default_factory=dict)

    @property
    def flops(self) -> int:
        """Operations of all operators that are known."""
        return sum(flops for flops, _ in self.by_op.values())

    @property
    def useful(self) -> int:
        """Operations that were asked for: without those on masked pairs, and a recurrence as it is written."""
        return sum(self.asked.get(key, flops) for key, (flops, _) in self.by_op.items())

    def flops_by_op(self) -> dict[str, int]:
        """Operations by operator, the largest first, without those that have none."""
        found: dict[str, int] = {}
        for (op, _), (flops, _) in self.by_op.items():
            found[op] = found.get(op, 0) + flops
        return {op: n for op, n in sorted(found.items(), key=lambda item: -item[1]) if n}


class CountWork(TorchDispatchMode):
    """Inside, ``parts[part]`` grows by the work of every operator; ``part`` may be changed at any time."""

    def __init__(self, part: str = "forward") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = part
        self.parts: dict[str, Work] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is ASKS_DEVICE:
            return func(*args)
        kwargs = dict(kwargs or {})
        packet = func._overloadpacket
        if packet not in flop_registry and func.namespace == "aten" and not func.has_kernel_for_dispatch_key(OWN_KERNEL):
            with self:  # one that is made of others (met in inference mode) is counted by them
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        out = func(*args, **kwargs)
        work = self.parts.setdefault(self.part, Work())
        name = f"{func.namespace}.{packet.__name__}"
        flops, useful = 0, None
        if packet in flop_registry:
            with _disable_current_modes():  # what a formula tries out on shapes is no work, and takes no memory
                flops = int(flop_registry[packet](*args, **kwargs, out_val=out))
                useful = int(USEFUL[packet](*args, **kwargs)) if packet in USEFUL else None
        elif func.namespace not in KNOWN or (packet.__name__.startswith(HEAVY) and packet.__name__ not in LIGHT):
            work.unknown.add(name)
        moved = _moved(func, packet.__name__, (args, kwargs), out)
        if flops or moved:
            key = (name, _dtype((args, kwargs), out))
            before = work.by_op.get(key, (0, 0))
            work.by_op[key] = (before[0] + flops, before[1] + moved)
            if useful is not None:
                work.asked[key] = work.asked.get(key, 0) + useful
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _dtype(given: Any, out: Any) -> str:
    floats = [x.dtype for x in (*_tensors(given), *_tensors(out)) if x.is_floating_point() or x.is_complex()]
    return str(floats[0] if floats else torch.int64).removeprefix("torch.")


def _moved(func: Any, name: str, given: Any, out: Any) -> int:
    """Bytes read and written by an operator that fuses with no other."""
    if func.namespace in ("prim", "profiler") or func.is_view or name.startswith(FREE):
        return 0
    written = sum(map(_bytes, _tensors(out)))
    if name in LOOKUPS:
        return 2 * written
    read = sorted(map(_bytes, _tensors(given)))
    if name in UPDATES:
        return 2 * sum(read[:-1])
    if name == "grouped_linear":
        return written + _bytes(given[0][0]) + _touched(*given[0][:2])
    return sum(read) + written


def _touched(x: Tensor, weight: Tensor) -> int:
    """Bytes of the experts' weights that some of the rows of ``x`` go to, as expected where all are alike."""
    n = weight.shape[0]
    return int(_bytes(weight) * (1 - (1 - 1 / n) ** x.shape[0])) if n else 0


def _bytes(x: Tensor) -> int:
    """Memory that a tensor reads: what is repeated along an axis counts once."""
    sizes = [size for size, step in zip(x.shape, x.stride(), strict=True) if step or size == 0]
    return math.prod(sizes) * x.element_size()
