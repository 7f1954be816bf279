"""The ``flash`` kernel: torch's flash attention backend and nothing else.

Axes: b batch, t queries, s keys, h query heads, g key heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from hybridtf.core.errors import KernelError
from hybridtf.core.kernels import KernelRequest
from hybridtf.ops.attention.mask import AttentionMask, check_inputs, whole
from hybridtf.ops.autocast import no_autocast

_REFUSED = ("softcap", "sinks", "slopes", "prefix", "window", "decay", "relative")
_MAX_HEAD_DIM_CUDA = 256


def why_not_flash(request: KernelRequest) -> str | None:
    """Why torch's flash backend cannot answer this request; None: it can."""
    head_dim = request.sizes.get("head_dim")
    v_dim = request.sizes.get("v_dim", head_dim)
    missing = [name for name in _REFUSED if name in request.features]
    if request.device.type not in ("cpu", "cuda"):
        return f"torch has no flash backend on {request.device.type}"
    if missing:
        return f"flash attention has no {', '.join(missing)}"
    if head_dim != v_dim:
        return f"flash attention needs keys and values of one width; got {head_dim} and {v_dim}"
    if request.device.type == "cpu":
        return "torch's flash backend has no dropout on the CPU" if "dropout" in request.features else None
    if request.dtype not in (torch.float16, torch.bfloat16):
        return f"flash attention on cuda runs in float16 or bfloat16, not {str(request.dtype).removeprefix('torch.')}"
    if head_dim is not None and head_dim > _MAX_HEAD_DIM_CUDA:
        return f"flash attention on cuda takes a head_dim up to {_MAX_HEAD_DIM_CUDA}; got {head_dim}"
    return _why_not_device(request.device)


def _why_not_device(device: torch.device) -> str | None:
    if not torch.cuda.is_available():
        return "no cuda device is available"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"flash attention needs compute capability 8.0; {torch.cuda.get_device_name(device)} has less"
    return None


def attention_flash(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float | None = None, dropout_p: float = 0.0
) -> Tensor:
    """The same function as :func:`attention_reference` by torch's flash backend alone (Dao 2023, arXiv 2307.08691).

    Documents are cut out and run one by one, so ids and positions cost a wait for the device and a call per document.
    Raises :class:`KernelError` for softcap, sinks, slopes, a prefix, a window, decay, a relative bias, and wherever torch
    refuses the backend.
    """
    check_inputs(q, k, v, mask, dropout_p)
    _refuse(q, v, mask, dropout_p)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if mask.q_ids is None and mask.q_pos is None and q.shape[0] and 0 < q.shape[1] <= k.shape[1]:
        return _flash(q, k, v, mask.causal, scale, dropout_p)
    pieces, index = [], []
    for run in _runs(q, k, mask):
        queries, keys, values = q[run.row, run.queries], k[run.row, run.keys], v[run.row, run.keys]
        pieces.append(_flash(queries[None], keys[None], values[None], mask.causal, scale, dropout_p))
        index.append(run.row * q.shape[1] + run.queries)
    return _assemble(q, k, v, pieces, index)


def _refuse(q: Tensor, v: Tensor, mask: AttentionMask, dropout_p: float) -> None:
    given = {
        "softcap": mask.softcap, "sinks": mask.sinks, "slopes": mask.slopes, "prefix": mask.prefix_len,
        "window": mask.window, "decay": mask.q_decay, "relative": mask.rel_q,
    }
    features = {name for name, value in given.items() if value is not None} | ({"dropout"} if dropout_p else set())
    sizes = {"head_dim": q.shape[3], "v_dim": v.shape[3]}
    reason = why_not_flash(KernelRequest("attention", "train", q.dtype, q.device, sizes, frozenset(features)))
    if reason is not None:
        raise KernelError(f"attention: kernel 'flash' cannot run: {reason}")


@dataclass(frozen=True, eq=False)
class _Run:
    """Queries of one document and the keys they see: all of them, or under causal each query one more than the one
    before it and the last query all. ``queries`` and ``keys`` are int64 indices into the row's tokens."""

    row: int
    queries: Tensor
    keys: Tensor


def _runs(q: Tensor, k: Tensor, mask: AttentionMask) -> Iterator[_Run]:
    rows, cols = whole(q, k).positions(mask)
    b, t, s = q.shape[0], q.shape[1], k.shape[1]
    q_pos, k_pos = rows[..., 0].expand(b, t).cpu(), cols[:, 0].expand(b, s).cpu()
    q_ids = torch.ones(b, t, dtype=torch.int64) if mask.q_ids is None else mask.q_ids.cpu()
    k_ids = torch.ones(b, s, dtype=torch.int64) if mask.k_ids is None else mask.k_ids.cpu()
    for row in range(b):
        for document in sorted(set(q_ids[row].tolist())):
            if document <= 0:
                continue
            queries, keys = (q_ids[row] == document).nonzero()[:, 0], (k_ids[row] == document).nonzero()[:, 0]
            if not mask.causal:
                found = [(queries, keys)] if len(keys) else []
            else:
                found = _staircases(queries, keys, q_pos[row], k_pos[row])
            for some, seen in found:
                yield _Run(row, some.to(q.device), seen.to(q.device))


def _staircases(queries: Tensor, keys: Tensor, q_pos: Tensor, k_pos: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The fewest groups of queries whose counts of visible keys rise one by one."""
    queries = queries[q_pos[queries].argsort(stable=True)]
    keys = keys[k_pos[keys].argsort(stable=True)]
    counts = torch.searchsorted(k_pos[keys], q_pos[queries], right=True)
    queries, counts = queries[counts > 0], counts[counts > 0]
    edges = ((counts.diff() != 1).nonzero()[:, 0] + 1).tolist()
    bounds = zip([0, *edges], [*edges, len(queries)], strict=True)
    return [(queries[i:j], keys[: int(counts[j - 1])]) for i, j in bounds if j > i]


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dropout_p: float) -> Tensor:
    """(b t h k), t <= s where causal: the last query sees all keys."""
    t, s = q.shape[1], k.shape[1]
    attn_mask: Tensor | None = None
    if causal and 1 < t < s:
        # is_causal would count from the first key. The CPU's backend takes a written-out mask, the GPU's an alignment.
        on_cpu = q.device.type == "cpu"
        attn_mask = torch.ones(t, s, dtype=torch.bool).tril(s - t) if on_cpu else causal_lower_right(t, s)
    q, k, v = (x.to(q.dtype) if x.stride(-1) == 1 else x.to(q.dtype).contiguous() for x in (q, k, v))  # torch refuses others
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), no_autocast(q.device):
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=attn_mask,
                dropout_p=dropout_p, is_causal=causal and t == s, scale=scale, enable_gqa=q.shape[2] != k.shape[2],
            )
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        what = f"q {tuple(q.shape)}, k {tuple(k.shape)} in {q.dtype} on {q.device.type}"
        raise KernelError(f"attention: kernel 'flash': torch refuses its flash backend for {what}") from error
    return out.transpose(1, 2)


def _assemble(q: Tensor, k: Tensor, v: Tensor, pieces: list[Tensor], index: list[Tensor]) -> Tensor:
    """Zeros (b t h v) with each piece at its tokens; depends on q, k and v even where nothing is visible."""
    b, t, h, _ = q.shape
    nothing = q.flatten(0, 1)[:0] + (k.flatten(0, 1)[:0] + v.flatten(0, 1)[:0]).sum(1, keepdim=True).to(q.dtype)
    rows = torch.cat([nothing, *(piece[0] for piece in pieces)])
    where = torch.cat([torch.zeros(0, dtype=torch.int64, device=q.device), *index])
    return q.new_zeros(b * t, h, v.shape[3]).index_copy(0, where, rows).reshape(b, t, h, v.shape[3])
