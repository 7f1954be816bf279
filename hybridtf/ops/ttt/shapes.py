"""What every form of ``ttt_linear`` checks before it computes, and the state it starts from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.checks import check_segments
from hybridtf.ops.documents import start_state

State = dict[str, Tensor]


def check(
    q: Tensor, k: Tensor, v: Tensor, lr: Tensor, fixed: Mapping[str, Tensor], initial_state: Mapping[str, Tensor] | None,
    segments: Segments | None,
) -> None:
    """Raise :class:`ConfigError` where the arguments do not fit."""
    if k.ndim != 4 or q.shape != k.shape or v.shape != k.shape:
        found = [tuple(x.shape) for x in (q, k, v)]
        raise ConfigError(f"ttt_linear: q, k and v must be (b t h p) alike; got {found[0]}, {found[1]} and {found[2]}")
    b, t, h, p = k.shape
    wanted = {"norm_weight": (h, p), "norm_bias": (h, p), "W0": (h, p, p), "b0": (h, p)}
    wanted_of = {"lr": (lr, (b, t, h)), **{name: (fixed[name], shape) for name, shape in wanted.items()}}
    if initial_state is not None:
        if set(initial_state) != {"W", "dW", "n"}:
            raise ConfigError(f"ttt_linear: initial_state must have W, dW and n; got {', '.join(initial_state)}")
        wanted_of |= {name: (initial_state[name], (b, h, p + 1, p)) for name in ("W", "dW")}
        wanted_of["n"] = (initial_state["n"], (b,))
    for name, (x, shape) in wanted_of.items():
        if x.shape != shape:
            raise ConfigError(f"ttt_linear: {name} must be {shape}; got {tuple(x.shape)}")
    if fixed["scale"].ndim != 1 or not len(fixed["scale"]):
        raise ConfigError(f"ttt_linear: scale must be (m), m tokens of a mini-batch; got {tuple(fixed['scale'].shape)}")
    check_segments("ttt_linear", segments, b, t)


def start_memory(
    initial_state: Mapping[str, Tensor] | None, k: Tensor, dtype: torch.dtype, segments: Segments | None
) -> State:
    """The incoming state in ``dtype``: zeros where there is none, and in rows that begin another document."""
    b, _, h, p = k.shape
    given = initial_state or {}
    wanted = {"W": ((b, h, p + 1, p), dtype), "dW": ((b, h, p + 1, p), dtype), "n": ((b,), torch.int64)}
    return {name: start_state(given.get(name), shape, k, kind, segments) for name, (shape, kind) in wanted.items()}
