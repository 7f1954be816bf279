"""A span of ``dplr``: chunks side by side, and the walk of the state over them.

Axes: b batch, t time, n chunks, h heads, l places of a chunk, k key width, p value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.ops.documents import state_dtype
from hybridtf.ops.dplr.maps import Documents, Tokens, chunk_maps
from hybridtf.ops.passes_op import Call, Masks, States
from hybridtf.ops.spans import chunk_length, chunks_at_once, power_of_two

NAMES = ("q", "k", "v", "log_w", "u", "r")


def span_length(call: Call) -> int:
    """Tokens of a span: as many chunks as keep the largest tensor within a budget."""
    k: Tensor = call["k"]
    size: int = power_of_two(call["chunk_size"])
    return size * chunks_at_once(k.shape[0] * k.shape[2] * size * (2 * k.shape[3] + size), k.device)


def span(call: Call, state: States) -> tuple[Tensor, States]:
    """y (b t h p) and the state (b h k p) after a span."""
    tokens, documents = in_chunks(call)
    n, b, h = tokens.k.shape[:3]
    maps = chunk_maps(tokens, documents)
    A, B = (z.unflatten(0, (n, b * h)) for z in (maps.A, maps.B))
    before, last = _walk(A, B, state[0].flatten(0, 1))
    before = before.flatten(0, 1)
    reads = torch.baddbmm(maps.U, maps.W, before)
    y = torch.baddbmm(torch.baddbmm(maps.Y, maps.Q, before), maps.q_u, reads)
    y = y.unflatten(0, (n, b, h)).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : call.n_tokens]
    return y.to(call["v"].dtype), (last.view(state[0].shape),)


def _walk(A: Tensor, B: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """States (n, b h, k p) before each chunk, and the one after the last; ``A`` (n, b h, k k), ``B`` and ``state`` alike."""
    before = []
    for a, b in zip(A.unbind(0), B.unbind(0), strict=True):
        before.append(state)
        state = torch.baddbmm(b, a, state)
    return torch.stack(before), state


def in_chunks(call: Call) -> tuple[Tokens, Documents | None]:
    """A span's tensors as chunks: pads and what fills the last chunk write nothing and decay nothing."""
    dtype = state_dtype(*(call[name] for name in NAMES))
    n_tokens = call.n_tokens
    size = chunk_length(call["chunk_size"], n_tokens)
    missing = -n_tokens % size
    masks = call.masks

    def chunked(x: Tensor) -> Tensor:
        if masks is not None:
            x = x.masked_fill(~masks.real[:, :, None, None], 0)
        x = F.pad(x.to(dtype), (0, 0, 0, 0, 0, missing))
        chunks: Tensor = x.unflatten(1, (-1, size))
        return chunks.permute(1, 0, 3, 2, 4).contiguous()

    tokens = Tokens(**{name: chunked(call[name]) for name in NAMES})
    return tokens, None if masks is None else _documents(masks, missing, size)


def _documents(masks: Masks, missing: int, size: int) -> Documents:
    ids = masks.ids
    if missing:
        ids = torch.cat([ids, ids[:, -1:].expand(-1, missing)], 1)
    chunks = ids.unflatten(1, (-1, size)).transpose(0, 1)
    return Documents(chunks, torch.cat([masks.before[None], chunks[:-1, :, -1]]))
