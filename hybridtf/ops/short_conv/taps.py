"""``short_conv`` by shifted products, one for each tap. README.md has the derivation and the measurements.

Axes: b batch, t time, c channels, w width.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads, start_state
from hybridtf.ops.gradients import first_order
from hybridtf.ops.short_conv.shapes import check, sum_dtype
from hybridtf.ops.spans import by_device


def short_conv_taps(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, initial_state: Tensor | None = None,
    segments: Segments | None = None, activation: Literal["silu"] | None = None,
) -> tuple[Tensor, Tensor]:
    """The convolution of :func:`short_conv_reference` without a loop over time; the same arguments, results and errors.

    The backward keeps the tokens alone, in their own dtype. Second derivatives raise :class:`KernelError`: the
    reference has them.
    """
    check(x, weight, bias, initial_state, segments, activation)
    state = start_state(initial_state, (x.shape[0], weight.shape[1] - 1, x.shape[2]), x, x.dtype, segments)
    x = mask_pads(x, segments)
    if x.shape[1] == 1:
        return _step(x, weight, bias, state, segments, activation)
    if segments is None:
        tokens = torch.cat([state, x], 1)
        y = _convolve(tokens, weight, bias, None, activation == "silu")
        return y, tokens[:, x.shape[1] :].clone()
    return _documents(x, weight, bias, state, segments, activation == "silu")


def _step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, segments: Segments | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """One token: the state is already forgotten where a document begins, so only pads need care."""
    dtype = sum_dtype(x, weight)
    tokens = torch.cat([state, x], 1)
    y = (tokens.to(dtype) * weight.t().to(dtype)).sum(1, keepdim=True)
    y = y if bias is None else y + bias.to(dtype)
    y = mask_pads(F.silu(y) if activation == "silu" else y, segments)
    new = tokens[:, 1:].clone() if segments is None else torch.where(segments.real[..., None], tokens[:, 1:], state)
    return y.to(x.dtype), new


def _documents(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, segments: Segments, silu: bool
) -> tuple[Tensor, Tensor]:
    """Real tokens side by side; a tap reaches only what has the same document id; then each token back to its place."""
    t, past = x.shape[1], state.shape[1]
    real, ids = segments.real, segments.ids
    n_real = real.sum(1, keepdim=True)
    place = torch.where(real, real.cumsum(1) - 1, n_real + (~real).cumsum(1) - 1)
    source = torch.empty_like(place).scatter_(1, place, torch.arange(t, device=x.device).expand_as(place))
    tokens = torch.cat([state, _Permute.apply(x, source, place)], 1)  # type: ignore[no-untyped-call]
    ids = ids.gather(1, source)
    token_ids = torch.cat([segments.carried[:, None].expand(-1, past), ids], 1)
    other = [(token_ids[:, j : j + t] != ids)[..., None] for j in range(past)]
    y = _convolve(tokens, weight, bias, torch.stack(other) if other else None, silu)
    y = mask_pads(_Permute.apply(y, place, source), segments)  # type: ignore[no-untyped-call]
    last = n_real + torch.arange(past, device=x.device)
    wanted = torch.where(segments.last_id > 0, segments.last_id, segments.carried)
    kept = token_ids.gather(1, last) == wanted[:, None]
    window = tokens.gather(1, last[..., None].expand(-1, -1, x.shape[2]))
    return y, window.masked_fill(~kept[..., None], 0)


class _Permute(torch.autograd.Function):
    """Rows ``x[b, index[b, t]]`` for a permutation ``index`` and its ``inverse``: the backward is a gather as well."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        b, t = index.shape
        flat = index + torch.arange(b, device=x.device)[:, None] * t
        return x.flatten(0, 1).index_select(0, flat.flatten()).view(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        index, inverse = ctx.saved_tensors
        return _Permute.apply(dy, inverse, index), None, None  # type: ignore[no-untyped-call]


BLOCK_ELEMENTS = 2**18


def _blocks(tokens: Tensor, width: int) -> list[tuple[int, int]]:
    """Stretches of time whose temporaries stay in a CPU's cache; the whole length on a GPU and for a compiler."""
    b, t, c = tokens.shape[0], tokens.shape[1] - width + 1, tokens.shape[2]
    elements = by_device(tokens.device, BLOCK_ELEMENTS, 0)
    if not elements or torch.compiler.is_compiling():  # nothing that a compiler would have to know the length for
        return [(0, t)]
    size = max(1, elements // max(1, b * c))
    return [(i, min(i + size, t)) for i in range(0, t, size)]


def _sum_taps(tokens: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None) -> Tensor:
    """(b t c) in the dtype of ``weight``: every tap's product, those that leave the document (``other``) left out."""
    width = weight.shape[1]
    t = tokens.shape[1] - width + 1
    y = tokens[:, width - 1 :] * weight[:, -1]
    y = y if bias is None else y.add_(bias)
    for j in range(width - 1):
        part = tokens[:, j : j + t]
        y.addcmul_(part if other is None else part.masked_fill(other[j], 0), weight[:, j])
    return y


def _convolve(tokens: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, silu: bool) -> Tensor:
    """The convolution of ``tokens`` (b w-1+t c), past first; ``other`` (w-1 b t 1): taps into another document."""
    # Passing through autograd costs more than a short convolution.
    op = _Taps.apply if torch.is_grad_enabled() else _Taps.forward
    y: Tensor = op(tokens, weight, bias, other, silu)
    return y


class _Taps(torch.autograd.Function):
    """Forward and gradients of :func:`_convolve`."""

    @staticmethod
    def forward(tokens: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, silu: bool) -> Tensor:
        dtype, width = sum_dtype(tokens, weight), weight.shape[1]
        taps, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
        y = tokens.new_empty(tokens.shape[0], tokens.shape[1] - width + 1, tokens.shape[2])
        for start, stop in _blocks(tokens, width):
            far = None if other is None else other[:, :, start:stop]
            part = _sum_taps(tokens[:, start : stop + width - 1].to(dtype), taps, shift, far)
            y[:, start:stop] = F.silu(part, inplace=True) if silu else part
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.silu = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weight, bias, other = ctx.saved_tensors
        gradients: Any = _Gradients.apply if torch.is_grad_enabled() else _gradients
        dtokens, dweight, dbias = gradients(dy, tokens, weight, bias, other, ctx.silu)
        return dtokens, dweight, None if bias is None else dbias, None, None


def _gradients(
    dy: Tensor, tokens: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :class:`_Taps` for tokens, weight and bias."""
    dtype, width = sum_dtype(tokens, weight), weight.shape[1]
    taps, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
    dtokens = torch.zeros(tokens.shape, dtype=dtype, device=tokens.device)
    dtaps, dbias = torch.zeros_like(taps.t()), torch.zeros_like(taps[:, 0])
    for start, stop in _blocks(tokens, width):
        far = None if other is None else other[:, :, start:stop]
        wide, part = tokens[:, start : stop + width - 1].to(dtype), dy[:, start:stop].to(dtype)
        if silu:
            part = torch.ops.aten.silu_backward(part, _sum_taps(wide, taps, shift, far))
        dbias += part.sum((0, 1))
        for j in range(width):
            seen = part if far is None or j == width - 1 else part.masked_fill(far[j], 0)
            dtokens[:, start + j : stop + j].addcmul_(seen, taps[:, j])
            dtaps[j] += (seen * wide[:, j : j + stop - start]).sum((0, 1))
    return dtokens.to(tokens.dtype), dtaps.t().to(weight.dtype), dbias.to((weight if bias is None else bias).dtype)


_Gradients = first_order(_gradients, "short_conv", "taps")
