"""Qwen4's indexer, which averages keys over blocks: against transformers' layer, by hand, and by the kit."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, RecipeError, Segments, active
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import IndexedAttentionConfig
from hybridtf.testing import check_mixer

D, T, F64 = 12, 23, torch.float64
H, G, HD, IH, IW = 4, 2, 8, 16, 6
ROTATED = 4


def qsa(topk, pool, **more):
    rope = {"type": "rope"}
    return active()["mixers"].make({
        "type": "qsa", "n_heads": H, "n_kv_heads": G, "head_dim": HD, "index_n_heads": IH, "index_head_dim": IW,
        "index_top_k": topk, "index_pool": pool, "position": {**rope, "fraction": ROTATED / HD},
        "index_position": {**rope, "fraction": ROTATED / IW}, **more,
    })


def build(config):
    mixer = config.build(BuildContext(d_model=D, param_dtype=F64))
    with torch.no_grad():
        for i, p in enumerate(mixer.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=F64) * 0.5)
    return mixer


def by_transformers(topk, pool):
    module = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    config = module.Qwen4ExpTextConfig(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=G, head_dim=HD, num_hidden_layers=1, indexer_n_heads=IH,
        layer_types=["indexed_attention"], indexer_kv_heads=1, indexer_head_dim=IW, indexer_budget=topk,
        indexer_compress_ratio=pool,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": ROTATED / HD},
    )
    config._attn_implementation = "sdpa"
    with StrictFloat64():
        rotary = module.Qwen4ExpTextRotaryEmbedding(config)
    return module.Qwen4ExpTextAttention(config, 0).double(), rotary


def weights_of(mixer):
    """The mixer's parameters under transformers' names: queries and gates head by head, the indexer's q and k in one matrix."""
    given = dict(mixer.named_parameters())
    heads = [given.pop(f"{n}.weight").unflatten(0, (H, HD)) for n in ("q_proj", "gate_proj")]
    index = [given.pop(f"indexer.{n}.weight") for n in ("q_proj", "k_proj")]
    renamed = {}
    for name, p in given.items():
        name = name.replace("_norm", "_layernorm") if name.startswith("indexer") else name
        renamed[name.replace("out_proj", "o_proj")] = p
    return {**renamed, "q_proj.weight": torch.cat(heads, 1).flatten(0, 1), "indexer.index_qk_proj.weight": torch.cat(index)}


@pytest.mark.parametrize(("topk", "pool"), [(4, 4), (8, 4), (6, 3), (5, 1), (40, 4)])
def test_equals_transformers(topk, pool):
    """Outputs, and the gradients of the attention; the choice has none, there or here."""
    theirs, rotary = by_transformers(topk, pool)
    mixer = build(qsa(topk, pool))
    theirs.load_state_dict(weights_of(mixer))
    x = torch.randn(2, T, D, dtype=F64, requires_grad=True)
    mask = torch.ones(T, T, dtype=torch.bool).tril()[None, None].expand(2, 1, T, T)
    with StrictFloat64():
        want = theirs(x, rotary(x, torch.arange(T)[None].expand(2, T)), mask)[0]
    got = mixer(x)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    weight, given = torch.randn_like(want), dict(theirs.named_parameters())
    given = {n: p for n, p in given.items() if "indexer" not in n}
    asked = torch.autograd.grad((want * weight).sum(), [x, *given.values()])
    mine = [p for n, p in mixer.named_parameters() if "indexer" not in n]
    found = dict(zip(["x", *(id(p) for p in mine)], torch.autograd.grad((got * weight).sum(), [x, *mine]), strict=True))
    torch.testing.assert_close(found["x"], asked[0], rtol=0, atol=1e-10)
    with torch.no_grad():
        for p in mine:
            p.copy_(found[id(p)])  # so that gradients are renamed as weights are
    for (name, _), b in zip(given.items(), asked[1:], strict=True):
        torch.testing.assert_close(weights_of(mixer)[name], b, rtol=0, atol=1e-10, msg=name)


def test_blocks_count_from_the_first_real_token_as_transformers_counts():
    theirs, rotary = by_transformers(6, 3)
    mixer = build(qsa(6, 3))
    theirs.load_state_dict(weights_of(mixer))
    x, real = torch.randn(3, T, D, dtype=F64), torch.ones(3, T, dtype=torch.bool)
    real[1, :5], real[2, :-1] = False, False
    mask = torch.ones(T, T, dtype=torch.bool).tril()[None, None] & real[:, None, None]
    with StrictFloat64():
        want = theirs(x, rotary(x, (real.cumsum(1) - 1).clamp(min=0)), mask)[0]
    got = mixer(x, segments=Segments.from_mask(real))[0]
    torch.testing.assert_close(got[real], want[real], rtol=0, atol=1e-11)


def test_the_indexer_is_taught_over_blocks_of_averaged_keys():
    """The loss and its gradients, written out for one row without positions."""
    none = {"type": "none"}
    mixer = build(qsa(6, 3, position=none, index_position=none))
    x = torch.randn(1, T, D, dtype=F64)
    loss, count = mixer(x)[2].losses["indexer_kl"]
    index = mixer.indexer
    q = mixer.q_norm(mixer.q_proj(x).unflatten(-1, (H, HD)))
    k = mixer.k_norm(mixer.k_proj(x).unflatten(-1, (G, HD))).repeat_interleave(H // G, 2)
    iq = index.q_norm(index.q_proj(x).unflatten(-1, (IH, IW)))
    blocks = index.k_norm(index.k_proj(x)[0, : T // 3 * 3].unflatten(0, (-1, 3)).mean(1))
    total = 0.0
    for i in range(2, T):
        n = (i + 1) // 3
        scores = torch.relu(iq[0, i] @ blocks[:n].T).sum(0) / IW**0.5
        best = scores.topk(min(2, n)).indices
        tail = torch.arange(3 * n, i + 1)
        tokens = torch.cat([(best[:, None] * 3 + torch.arange(3)).flatten(), tail])
        p = (torch.einsum("hk,jhk->hj", q[0, i], k[0, tokens]) / HD**0.5).softmax(-1).sum(0).detach()
        target = p[: 3 * len(best)].unflatten(0, (-1, 3)).sum(1)
        target = target / target.sum()
        total = total + (target * (target.log() - scores[best].log_softmax(0))).sum()
    torch.testing.assert_close(loss, total, rtol=0, atol=1e-11)
    assert int(count) == T
    names, params = zip(*index.named_parameters(), strict=True)
    assert set(names) == {"q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight"}
    for name, a, b in zip(names, *(torch.autograd.grad(z, params) for z in (loss, total)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("pool", [2, 3])
def test_the_kit_holds_pooled_forms(pool):
    small = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "index_n_heads": 8, "index_head_dim": 4, "index_top_k": 6}
    laws = ("shape", "cut", "segment", "causal", "gradients", "crop", "state_bytes", "finite", "dead_state")
    check_mixer(active()["mixers"].make({"type": "qsa", **small, "index_pool": pool}), laws=laws)


def test_a_position_that_depends_on_the_length_tells_blocks_that_of_their_document():
    dynamic = {"type": "rope", "scaling": {
        "type": "dynamic_ntk", "factor": 2.0, "original_max_len": 8, "mode": "running",
    }}
    small = {"n_heads": 2, "head_dim": 4, "index_n_heads": 8, "index_head_dim": 4, "index_top_k": 4}
    mixer = build(IndexedAttentionConfig(**small, index_pool=2, index_pooling="mean", index_position=dynamic))
    x, docs = torch.randn(2, 36, D, dtype=F64), Segments.from_lengths([[6, 30], [12, 24]])
    packed, _, extras = mixer(x, segments=docs)
    total = 0.0
    for row in range(2):
        for i in (1, 2):
            at = docs.ids[row] == i
            alone, _, more = mixer(x[row : row + 1, at])
            torch.testing.assert_close(packed[row, at], alone[0], rtol=0, atol=1e-12)
            total = total + more.losses["indexer_kl"][0]
    torch.testing.assert_close(extras.losses["indexer_kl"][0], total, rtol=0, atol=1e-11)


def test_the_preset_needs_a_block_and_keeps_its_form():
    with pytest.raises(RecipeError, match="index_pool"):
        active()["mixers"].make({"type": "qsa", "n_heads": 2})
    with pytest.raises(RecipeError, match="index_pooling"):
        qsa(4, 2, index_pooling="gated")
