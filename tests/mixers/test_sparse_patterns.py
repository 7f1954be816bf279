"""Who sees whom in sparse attention, by DeepSpeed's layouts, transformers' masks and fla's MoBA; the softmax is torch's."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import BigBirdConfig, DilatedConfig, LongformerConfig, MobaConfig, StridedSparseConfig
from hybridtf.ops.block_sparse_attention import Places
from tests.mixers.plain_parts import built, given, same
from tests.peers import peer

D, F64 = 12, torch.float64
PLAIN = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 3, "position": {"type": "none"}}


def heads(mixer, x, names=("q_proj", "k_proj", "v_proj")):
    """q, k, v (b h t k) of x (b t d), keys repeated for their queries."""
    q, k, v = (getattr(mixer, name)(x).unflatten(-1, (-1, mixer.head_dim)).transpose(1, 2) for name in names)
    return q, *(z.repeat_interleave(q.shape[1] // z.shape[1], 1) for z in (k, v))


def attended(mixer, x, seen):
    """The layer over a mask (t t) or (h t t) with torch's attention."""
    return mixer.out_proj(F.scaled_dot_product_attention(*heads(mixer, x), attn_mask=seen).transpose(1, 2).flatten(2))


def layout(name, t, block, **options):
    """A causal layout of DeepSpeed over t tokens (t t). Within blocks it leaves causality to the softmax."""
    config = getattr(peer("deepspeed/ops/sparse_attention/sparsity_config.py"), f"{name}SparsityConfig")
    blocks = config(num_heads=1, block=block, attention="unidirectional", **options).make_layout(-(-t // block) * block)[0]
    return blocks.bool().repeat_interleave(block, 0).repeat_interleave(block, 1)[:t, :t].tril()


@pytest.mark.parametrize(("stride", "summary"), [(6, 2), (5, 1), (4, 4)])
@pytest.mark.parametrize("t", [2, 29])
def test_the_fixed_pattern_is_that_of_deepspeed(t, stride, summary):
    mixer, x = built(StridedSparseConfig(**PLAIN, pattern="fixed", stride=stride, n_summary=summary), D), given(2, t, D)
    seen = layout("Fixed", t, 1, num_local_blocks=stride, num_global_blocks=summary)
    same(mixer(x)[0], attended(mixer, x, seen), x, mixer)


@pytest.mark.parametrize("t", [8, 31])
def test_causal_longformer_is_the_layout_of_deepspeed(t):
    mixer, x = built(LongformerConfig(**{**PLAIN, "n_kv_heads": 4}, window=4, n_global=1), D), given(1, t, D)
    marked = torch.zeros(t, dtype=torch.bool)
    marked[[0, 5]] = True
    seen = layout("BSLongformer", t, 1, num_sliding_window_blocks=7, global_block_indices=[0, 5])
    near, far = (
        F.scaled_dot_product_attention(*heads(mixer, x, names), attn_mask=seen)
        for names in (("q_proj", "k_proj", "v_proj"), ("q_global", "k_global", "v_global"))
    )
    want = mixer.out_proj(torch.where(marked[:, None], far, near).transpose(1, 2).flatten(2))
    segments = Segments.from_ids(torch.ones(1, t, dtype=torch.int64), global_tokens=marked[None])
    same(mixer(x, segments=segments)[0], want, x, mixer)


@pytest.mark.parametrize("t", [9, 31])
def test_causal_bigbird_is_the_layout_of_deepspeed_and_its_random_blocks(t):
    mixer, x = built(BigBirdConfig(**PLAIN, block_size=3, n_random_blocks=2), D), given(1, t, D)
    seen = layout("BigBird", t, 3, num_random_blocks=0, num_sliding_window_blocks=3).expand(4, t, t).clone()
    drawn = mixer.drawn(Places.default(1, t, t, x.device))[0]
    for p, head in itertools.product(range(t), range(4)):
        for block in drawn[p, head].tolist():
            seen[head, p, block * 3 : min(block * 3 + 3, p + 1)] |= block >= 0
    same(mixer(x)[0], attended(mixer, x, seen), x, mixer)


@pytest.mark.parametrize(("window", "dilation"), [(3, 4), (5, 2), (1, 3)])
@pytest.mark.parametrize("t", [7, 29])
def test_a_dilated_window_is_that_of_transformers_over_every_so_manieth_token(t, window, dilation):
    masking = pytest.importorskip("transformers.masking_utils")
    mixer, x = built(DilatedConfig(**PLAIN, window=window, dilation=dilation), D), given(2, t, D)
    rule, want = masking.sliding_window_causal_mask_function(window), torch.zeros(2, t, D, dtype=F64)
    for start in range(dilation):
        part = x[:, start::dilation]
        n = part.shape[1]
        seen = masking.sdpa_mask(batch_size=2, q_length=n, kv_length=n, mask_function=rule, allow_is_causal_skip=False)
        want = want.index_add(1, torch.arange(start, t, dilation), attended(mixer, part, seen))
    if window == 1:  # queries and keys do not matter
        torch.testing.assert_close(mixer(x)[0], want, rtol=0, atol=1e-11)
    else:
        same(mixer(x)[0], want, x, mixer)


# -- MoBA: flash-attn's functions stand in, for documents one after another ---------------------------------------------


def _documents(q_ends, k_ends):
    return zip(itertools.pairwise(q_ends.tolist()), itertools.pairwise(k_ends.tolist()), strict=True)


def _scores(q, k, scale, causal):
    scores = torch.einsum("thk,shk->hts", q, k) * scale
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf) if causal else scores


def varlen_forward(*, q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, **_):
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for (a, b), (c, d) in _documents(cu_seqlens_q, cu_seqlens_k):
        scores = _scores(q[a:b], k[c:d], softmax_scale, causal)
        out[a:b], lse[:, a:b] = torch.einsum("hts,shk->thk", scores.softmax(-1), v[c:d]), scores.logsumexp(-1)
    return out, lse, None, None


def varlen_backward(*, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, **_):
    for (a, b), (c, d) in _documents(cu_seqlens_q, cu_seqlens_k):
        weights = (_scores(q[a:b], k[c:d], softmax_scale, causal) - softmax_lse[:, a:b, None]).exp()
        inner = (dout[a:b] * out[a:b]).sum(-1).T[..., None]
        back = weights * (torch.einsum("thk,shk->hts", dout[a:b], v[c:d]) - inner) * softmax_scale
        dv[c:d] = torch.einsum("hts,thk->shk", weights, dout[a:b])
        dq[a:b], dk[c:d] = torch.einsum("hts,shk->thk", back, k[c:d]), torch.einsum("hts,thk->shk", back, q[a:b])


def parallel_moba():
    as_it_is = lambda *args, **options: args[0] if args else as_it_is  # noqa: E731
    index = peer(
        "fla/ops/utils/index.py", triton__language={}, fla__utils={"tensor_cache": as_it_is, "autotune_cache_kwargs": {}},
        triton={"autotune": lambda **_: as_it_is, "jit": as_it_is, "Config": as_it_is, "cdiv": lambda a, b: -(-a // b)},
    )
    flash = {"_flash_attn_varlen_forward": varlen_forward, "_flash_attn_varlen_backward": varlen_backward}
    return peer(
        "fla/ops/moba/parallel.py", fla__ops__utils__index=vars(index), flash_attn={"flash_attn_varlen_func": as_it_is},
        flash_attn__flash_attn_interface=flash,
    ).parallel_moba


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize(("size", "top_k"), [(3, 3), (4, 2), (5, 20)])
@pytest.mark.parametrize("lengths", [[26], [13, 9, 17], [30, 1]])
def test_moba_is_that_of_fla(lengths, size, top_k):
    """Documents one after another in a row, of which each counts its own blocks."""
    mixer, x = built(MobaConfig(**PLAIN, block_size=size, top_k=top_k), D), given(1, sum(lengths), D)
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    q, k, v = (z.transpose(1, 2).contiguous() for z in heads(mixer, x))
    with StrictFloat64():
        y = parallel_moba()(q, k, v, ends, max(lengths), size, top_k)
    same(mixer(x, segments=Segments.from_lengths([lengths]))[0], mixer.out_proj(y.flatten(2)), x, mixer)
