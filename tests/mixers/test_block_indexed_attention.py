"""MiniMax-M3's sparse attention: against transformers' layer, by hand, and by the kit."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, RecipeError, Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import BlockIndexedAttentionConfig
from hybridtf.ops.block_sparse_attention import Places
from hybridtf.ops.gather_attention import best_blocks
from hybridtf.testing import check_mixer

D, T, F64 = 12, 23, torch.float64
H, G, HD, IW = 8, 4, 8, 6
ROTATED = 4
NORM = {"type": "rms_norm", "unit_offset": True}


def config(**more):
    rope = {"type": "rope"}
    return BlockIndexedAttentionConfig(**{
        "n_heads": H, "n_kv_heads": G, "head_dim": HD, "index_n_heads": G, "index_head_dim": IW, "block_size": 4, "top_k": 2,
        "position": {**rope, "fraction": ROTATED / HD}, "index_position": {**rope, "fraction": ROTATED / IW}, "qk_norm": NORM,
        "index_norm": NORM, **more,
    })


def build(wanted):
    mixer = wanted.build(BuildContext(d_model=D, param_dtype=F64))
    with torch.no_grad():
        for i, p in enumerate(mixer.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=F64) * 0.5)
    return mixer


@pytest.mark.parametrize(("top_k", "size", "local"), [(2, 4, 1), (3, 2, 2), (1, 5, 1), (2, 3, 0), (40, 4, 1)])
def test_equals_transformers(top_k, size, local):
    """Outputs, and the gradients of the attention; the choice has none, there or here."""
    module = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    said = module.MiniMaxM3VLTextConfig(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=G, head_dim=HD, num_hidden_layers=1, index_n_heads=G,
        layer_types=["minimax_m3_sparse"], index_head_dim=IW, index_block_size=size, index_topk_blocks=top_k,
        index_local_blocks=local,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": ROTATED / HD},
    )
    said._attn_implementation = "sdpa"
    with StrictFloat64():
        rotary = module.MiniMaxM3VLRotaryEmbedding(said)
    theirs, mixer = module.MiniMaxM3VLAttention(said, 0).double(), build(config(block_size=size, top_k=top_k, n_local=local))
    theirs.load_state_dict({name.replace("out_proj", "o_proj"): p for name, p in mixer.named_parameters()})
    x = torch.randn(2, T, D, dtype=F64, requires_grad=True)
    positions = torch.arange(T)[None].expand(2, T)
    mask = torch.ones(T, T, dtype=torch.bool).tril()[None, None].expand(2, 1, T, T)
    with StrictFloat64():
        want = theirs(x, rotary(x, positions), mask, position_ids=positions)[0]
    got = mixer(x)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    weight = torch.randn_like(want)
    given = {name: p for name, p in theirs.named_parameters() if "indexer" not in name}
    mine = {name: p for name, p in mixer.named_parameters() if "indexer" not in name}
    asked = torch.autograd.grad((want * weight).sum(), [x, *given.values()])
    found = torch.autograd.grad((got * weight).sum(), [x, *(mine[name.replace("o_proj", "out_proj")] for name in given)])
    for name, a, b in zip(("x", *given), found, asked, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("choosers", [1, 2, 4])
def test_the_indexer_is_taught_over_the_best_tokens_of_its_blocks(choosers):
    """The output, the loss and its gradients, written out for one row without positions."""
    none = {"type": "none"}
    size, top_k = 3, 3
    mixer = build(config(
        block_size=size, top_k=top_k, index_n_heads=choosers, position=none, index_position=none,
    ))
    x = torch.randn(1, T, D, dtype=F64)
    y, _, extras = mixer(x)
    loss, count = extras.losses["indexer_kl"]
    index = mixer.indexer
    q = mixer.q_norm(mixer.q_proj(x).unflatten(-1, (H, HD)))[0]
    k = mixer.k_norm(mixer.k_proj(x).unflatten(-1, (G, HD)))[0].repeat_interleave(H // G, 1)
    v = mixer.v_proj(x).unflatten(-1, (G, HD))[0].repeat_interleave(H // G, 1)
    iq, ik = index.q_norm(index.q_proj(x).unflatten(-1, (choosers, IW)))[0], index.k_norm(index.k_proj(x))[0]
    total, heads, out = 0.0, H // choosers, []
    for i in range(T):
        for c in range(choosers):
            scores = torch.stack([part.amax() for part in (ik[: i + 1] @ iq[i, c] / IW**0.5).split(size)])
            order = torch.cat([scores[:-1], scores.new_full((1,), torch.inf)]).topk(min(top_k, len(scores))).indices
            tokens = torch.cat([torch.arange(b * size, min((b + 1) * size, i + 1)) for b in order.tolist()])
            mine = slice(c * heads, (c + 1) * heads)
            p = (torch.einsum("hk,jhk->hj", q[i, mine], k[tokens, mine]) / HD**0.5).softmax(-1)
            out.append(torch.einsum("hj,jhv->hv", p, v[tokens, mine]))
            target = torch.stack([p[:, tokens // size == b].sum() for b in order.tolist()]).detach() / heads
            total = total + (torch.xlogy(target, target) - target * scores[order].log_softmax(0)).sum() / choosers
    torch.testing.assert_close(y[0], mixer.out_proj(torch.cat(out).view(T, H * HD)), rtol=0, atol=1e-11)
    torch.testing.assert_close(loss, total, rtol=0, atol=1e-11)
    assert int(count) == T
    names, params = zip(*index.named_parameters(), strict=True)
    for name, a, b in zip(names, *(torch.autograd.grad(z, params) for z in (loss, total)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=name)


def test_of_blocks_that_score_the_same_the_later_ones_are_chosen():
    """As ``topk`` breaks ties as it likes: documents side by side, no two cuts of which may choose otherwise."""
    q, k = torch.ones(1, 6, 1, 2), torch.ones(1, 12, 2)
    places = Places(*(torch.tensor([row]) for row in ([3, 9, 1, 5, 0, 0], [0, 0, 2, 2, 10, 0], [0] * 6, [10, 10, 8, 8, 2, 0])))
    found = best_blocks(q, k, places, 2, size=2, local=0)
    assert found.blocks[0, :, 0].tolist() == [[1, 0], [4, 3], [0, -1], [2, 1], [0, -1], [-1, -1]]
    assert [[t // 2 for t in row] for row in found.tokens[0, :, 0].tolist()] == found.blocks[0, :, 0].tolist()


@pytest.mark.slow
def test_the_kit_holds_fewer_choosers_and_none_that_is_always_chosen():
    small = {"n_heads": 4, "n_kv_heads": 4, "head_dim": 4, "index_head_dim": 4, "top_k": 2}
    for more in ({"index_n_heads": 2, "block_size": 3}, {"index_n_heads": 1, "block_size": 1, "n_local": 0}):
        laws = ("shape", "cut", "segment", "causal", "gradients", "crop", "state_bytes", "finite", "dead_state")
        check_mixer(BlockIndexedAttentionConfig(**small, **more), laws=laws)


def test_more_blocks_than_there_are_is_full_attention():
    mixer = build(config(top_k=40))
    x, packed = torch.randn(1, T, D, dtype=F64), Segments.from_lengths([[9, T - 9]])
    got = mixer(x, segments=packed)[0]
    parts = [mixer(part)[0] for part in x.split([9, T - 9], 1)]
    torch.testing.assert_close(got, torch.cat(parts, 1), rtol=0, atol=1e-11)
    q, k = (norm(mixer.split(proj(x))) for norm, proj in ((mixer.q_norm, mixer.q_proj), (mixer.k_norm, mixer.k_proj)))
    table = mixer.position.table(torch.arange(T)[None], F64)
    q, k, v = mixer.position(q, table), mixer.position(k, table), mixer.split(mixer.v_proj(x))
    want = torch.nn.functional.scaled_dot_product_attention(
        *(z.transpose(1, 2) for z in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(mixer(x)[0], mixer.out_proj(want.transpose(1, 2).flatten(2)), rtol=0, atol=1e-11)


def test_what_does_not_fit_is_refused():
    with pytest.raises(RecipeError, match="n_local = 3 blocks are more than top_k = 2"):
        config(n_local=3)
    with pytest.raises(RecipeError, match="4 key heads are not divisible by index_n_heads = 3"):
        config(index_n_heads=3)
    with pytest.raises(ConfigError, match="best_blocks"):
        best_blocks(torch.ones(1, 2, 1, 3), torch.ones(1, 2, 4), Places.default(1, 2, 2, "cpu"), 1, size=2, local=0)
    with pytest.raises(ConfigError, match="is told again at each read"):
        build(config(index_position={"type": "xpos"}))
