"""What mixers of the linear-attention family share: projections to heads, the op ``ssd``, its state, and the way out.

Axes: b batch, t time, d d_model, h heads, k key width before a map, n key width after it, p value width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridtf.core import BuildContext, Fixed, ParamSpec, Segments
from hybridtf.core.init import fan_in
from hybridtf.nn.memory_mixer import MemoryMixer
from hybridtf.nn.norms import accumulation_dtype
from hybridtf.ops.ssd import with_ones


class Written(NamedTuple):
    """What the heads' memory reads and writes with."""

    q: Tensor
    """(b t h n)"""
    k: Tensor
    """(b t h n)"""
    log_a: Tensor | None = None
    """(h) or (b t h): natural logarithm of what a head keeps of its memory at a token. None: all."""
    carried: Mapping[str, Tensor] = MappingProxyType({})
    """Further tensors of the state after the call, by name."""


class LinearHeads(MemoryMixer):
    """S_t = a_t S_{t-1} + k_t v_t^T, y_t = S_t^T q_t in each head, between projections in and out.

    A subclass gives :meth:`written`, what becomes of queries and keys, and :meth:`finished`, what becomes of the read-outs.
    Its memory is S (b h n p), and whatever :meth:`memory_shapes` adds. With ``ones`` the values have a last column of ones,
    so that read-outs are (b t h p+1) and end in the sum of the weights.
    """

    op = "ssd"

    def __init__(
        self, ctx: BuildContext, *, n_heads: int, k_dim: int, v_dim: int, n_features: int | None = None, ones: bool = False,
        bias: bool = False, chunk_size: int = 64, kernel: str = "auto",
    ) -> None:
        super().__init__()
        self.n_heads, self.k_dim, self.v_dim, self.ones, self.chunk_size = n_heads, k_dim, v_dim, ones, chunk_size
        self.n_features = k_dim if n_features is None else n_features
        self.q_proj = nn.Linear(ctx.d_model, n_heads * k_dim, bias=bias, **ctx.factory)
        self.k_proj = nn.Linear(ctx.d_model, n_heads * k_dim, bias=bias, **ctx.factory)
        self.v_proj = nn.Linear(ctx.d_model, n_heads * v_dim, bias=bias, **ctx.factory)
        self.out_proj = nn.Linear(n_heads * v_dim, ctx.d_model, bias=bias, **ctx.factory)
        self.conv = None
        sizes = {"n_heads": n_heads, "head_dim": v_dim + ones, "d_state": self.n_features, "n_groups": n_heads}
        self.ssd = ctx.bind_kernel("ssd", kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def memory_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"S": (self.n_heads, self.n_features, self.v_dim + self.ones)}

    def written(self, q: Tensor, k: Tensor, x: Tensor, segments: Segments | None, state: Fixed | None) -> Written:
        """``q``, ``k`` (b t h k) of the input ``x`` (b t d)."""
        return Written(q, k)

    def finished(self, y: Tensor, x: Tensor) -> Tensor:
        """Read-outs (b t h p), or p+1 with ``ones``, to (b t h*p)."""
        return y.flatten(-2)

    def recur(
        self, x: Tensor, given: Mapping[str, Tensor], segments: Segments | None, memory: Fixed | None, **more: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        (b, t), dtype = x.shape[:2], given["v"].dtype
        q, k, v = (given[name].unflatten(-1, (self.n_heads, -1)) for name in ("q", "k", "v"))
        found = self.written(q, k, x, segments, memory)
        # Sums over time outgrow float16, and the op returns them in the dtype of the values.
        wide = torch.float32 if found.q.dtype == torch.float16 else found.q.dtype
        q, k, v = (z.to(wide) for z in (found.q, found.k, v))
        log_a = found.log_a
        if log_a is None:
            log_a = v.new_zeros(self.n_heads, dtype=accumulation_dtype(wide))
        y, S = self.ssd(
            q, k, with_ones(v) if self.ones else v, log_a.expand(b, t, -1), segments=segments,
            initial_state=None if memory is None else memory["S"], chunk_size=self.chunk_size, n_tokens=t,
        )
        return self.out_proj(self.finished(y, x).to(dtype)), {"S": S, **found.carried}


def head_width(ctx: BuildContext, n_heads: int, **expand: float) -> int:
    """The width of each of ``n_heads`` heads that have ``ctx.d_model`` channels together, or so many times that.

    That factor is given by the name of its option, ``expand_v=2.0``. Raises :class:`ConfigError` where it does not divide.
    """
    (option, factor), *_ = [*expand.items(), ("", 1.0)]
    total = ctx.d_model * factor
    width = round(total)
    if width % n_heads or not width or not math.isclose(total, width, rel_tol=1e-9):
        what = f"{option} * d_model" if option else "d_model"
        raise ctx.error(f"{what} = {total:g} does not divide into n_heads = {n_heads} heads")
    return width // n_heads


def head_count(ctx: BuildContext, head_dim: int, width: int | None = None, what: str = "d_model") -> int:
    """How many heads of ``head_dim`` channels make up ``width`` (None: ``ctx.d_model``), which is called ``what``.

    Raises :class:`ConfigError` where it does not divide.
    """
    width = ctx.d_model if width is None else width
    if width % head_dim:
        raise ctx.error(f"{what} = {width} is not divisible by head_dim = {head_dim}")
    return width // head_dim


def retention_log_decay(n_heads: int, like: Tensor) -> Tensor:
    """(h) ln(1 - 2^(-5 - i)) for head i (https://arxiv.org/abs/2307.08621), in the dtype and on the device of ``like``.

    Formed anew at each call, so that casting a model cannot spoil it.
    """
    wide = torch.float64 if like.device.type != "mps" else torch.float32
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(n_heads, device=like.device, dtype=wide))).to(like.dtype)
