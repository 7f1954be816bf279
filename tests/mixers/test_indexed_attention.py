"""Attention to the tokens of an indexer: against transformers' layers, full attention, and what the indexer is taught."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, RecipeError, Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import AttentionConfig, IndexedAttentionConfig, IndexedMLAConfig, MLAConfig
from tests.mixers.plain_parts import published

D, T, F64 = 12, 21, torch.float64
SIZES = {"q_lora_rank": 7, "kv_lora_rank": 9, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_dim": 3}
RENAMED = {"kv_a_proj_with_mqa": "kv_a_proj", "o_proj": "out_proj", "wq_b": "q_proj", "wk": "k_proj"}


def build(config, **more):
    mixer = config.build(BuildContext(d_model=D, param_dtype=F64, **more))
    with torch.no_grad():
        for i, p in enumerate(mixer.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=F64) * 0.5)
    return mixer


def renamed(name):
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name.replace("_layernorm", "_norm")


@pytest.mark.parametrize("topk", [3, 8, 40])
@pytest.mark.parametrize("interleaved", [False, True])
def test_equals_transformers(topk, interleaved):
    """DeepSeek-V3.2's layer, which rotates the indexer in halves, and GLM-MoE-DSA's, where pairs are neighbours: outputs, and
    gradients of the attention. The indexer has none there.
    """
    name, folder = ("GlmMoeDsa", "glm_moe_dsa") if interleaved else ("DeepseekV32", "deepseek_v32")
    module = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    config = getattr(module, f"{name}Config")(
        hidden_size=D, num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=1, index_n_heads=16, index_head_dim=6,
        index_topk=topk, **published(SIZES), **({"indexer_types": ["full"]} if interleaved else {}),
    )
    config._attn_implementation = "sdpa"
    theirs = getattr(module, f"{name}Attention")(config, 0).double()
    ours = IndexedMLAConfig(
        n_heads=3, index_n_heads=16, index_head_dim=6, index_top_k=topk, **SIZES,
        index_position={"type": "rope", "interleaved": interleaved},
    )
    mixer = build(ours)
    theirs.load_state_dict({n: mixer.state_dict()[renamed(n)] for n in theirs.state_dict()})
    x = torch.randn(2, T, D, dtype=F64, requires_grad=True)
    mask = torch.ones(T, T, dtype=torch.bool).tril()[None, None].expand(2, 1, T, T)
    with StrictFloat64():
        table = getattr(module, f"{name}RotaryEmbedding")(config)(x, torch.arange(T)[None])
        want = theirs(x, position_embeddings=table, attention_mask=mask)[0]
    got = mixer(x)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    weight, mine = torch.randn_like(want), dict(mixer.named_parameters())
    given = {n: p for n, p in theirs.named_parameters() if "indexer" not in n}
    found = torch.autograd.grad((got * weight).sum(), [x, *(mine[renamed(n)] for n in given)])
    for a, b in zip(found, torch.autograd.grad((want * weight).sum(), [x, *given.values()]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("topk", [3, 40])
def test_a_gate_of_the_latent_is_that_of_transformers(topk):
    """A.X-K2's layer, where queries and gates are of the latent before and after its norm."""
    module = pytest.importorskip("transformers.models.axk2.modeling_axk2")
    config = module.AXK2Config(
        hidden_size=D, num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=1, index_n_heads=16, index_head_dim=6,
        index_topk=topk, **published(SIZES),
    )
    config._attn_implementation = "sdpa"
    theirs = module.AXK2Attention(config, 0).double()
    indexer = {"index_n_heads": 16, "index_head_dim": 6, "index_top_k": topk}
    mixer = build(IndexedMLAConfig(n_heads=3, output_gate="latent", **indexer, **SIZES))
    own = mixer.state_dict()
    heads = [own[name].unflatten(0, (3, -1)) for name in ("q_b_proj.weight", "gate_proj.weight")]
    own["q_gate_proj.weight"] = torch.cat(heads, 1).flatten(0, 1)
    theirs.load_state_dict({n: own[renamed(n)] for n in theirs.state_dict()})
    x = torch.randn(2, T, D, dtype=F64)
    mask = torch.ones(T, T, dtype=torch.bool).tril()[None, None].expand(2, 1, T, T)
    with StrictFloat64():
        table = module.AXK2RotaryEmbedding(config)(x, torch.arange(T)[None])
        want = theirs(x, position_embeddings=table, attention_mask=mask)[0]
    torch.testing.assert_close(mixer(x)[0], want, rtol=0, atol=1e-11)
    with pytest.raises(RecipeError, match="give q_lora_rank"):
        MLAConfig(n_heads=2, output_gate="latent")


@pytest.mark.parametrize("topk", [3, 40])
def test_sinks_and_a_gate_of_the_input_are_those_of_transformers(topk):
    """HY-V4's layer."""
    module = pytest.importorskip("transformers.models.hy_v4.modeling_hy_v4")
    config = module.HYV4Config(
        hidden_size=D, num_attention_heads=3, num_hidden_layers=1, index_n_heads=16, index_head_dim=6, index_topk=topk,
        indexer_types=["full"], **published(SIZES),
    )
    config._attn_implementation = "eager"
    theirs = module.HYV4Attention(config, 0).double()  # whose indexer rotates its last channels, and ours its first
    mixer = build(IndexedMLAConfig(
        n_heads=3, index_n_heads=16, index_head_dim=6, index_top_k=topk, output_gate="input", sinks=True, **SIZES,
        position={"type": "rope"}, index_k_norm={"type": "layer_norm", "eps": config.rms_norm_eps},
    ))
    own = mixer.state_dict()
    for name in ("q_proj.weight", "k_proj.weight", "k_norm.weight", "k_norm.bias"):
        own[f"indexer.{name}"] = own[f"indexer.{name}"].unflatten(0, (-1, 6)).roll(-4, 1).flatten(0, 1)
    theirs.load_state_dict({n: own[renamed(n)] for n in theirs.state_dict()})
    x = torch.randn(2, T, D, dtype=F64)
    mask = torch.full((T, T), -torch.inf, dtype=F64).triu(1)[None, None].expand(2, 1, T, T)
    with StrictFloat64():
        table = module.HYV4RotaryEmbedding(config)(x, torch.arange(T)[None])
        want = theirs(x, position_embeddings=table, attention_mask=mask)[0]
    torch.testing.assert_close(mixer(x)[0], want, rtol=0, atol=1e-11)


HEADS = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6}
INDEX = {"index_n_heads": 8, "index_head_dim": 6, "index_top_k": 5}


@pytest.mark.parametrize(
    ("sparse", "full"),
    [
        (IndexedAttentionConfig(**HEADS, **{**INDEX, "index_top_k": T}), AttentionConfig(**HEADS)),
        (IndexedMLAConfig(n_heads=3, **SIZES, **{**INDEX, "index_top_k": T + 9}), MLAConfig(n_heads=3, **SIZES)),
    ],
)
def test_is_full_attention_where_all_tokens_are_chosen(sparse, full):
    mixer, plain = build(sparse), build(full)
    plain.load_state_dict({n: p for n, p in mixer.state_dict().items() if "indexer" not in n})
    x = torch.randn(2, T, D, dtype=F64, requires_grad=True)
    docs = Segments.from_lengths([[9, 12], [4, 14]])
    x = x[:, : docs.ids.shape[1]]
    a, b = mixer(x, segments=docs)[0], plain(x, segments=docs)[0]
    torch.testing.assert_close(a[docs.real], b[docs.real], rtol=0, atol=1e-12)
    weight = torch.randn_like(a).masked_fill(~docs.real[..., None], 0)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), [*m.out_proj.parameters(), x]) for y, m in ((a, mixer), (b, plain)))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-11)


def by_hand(mixer, x, topk):
    """Choice, attention weights and KL of each query, written out for heads without positions."""
    h, g = 4, 2
    q = mixer.q_proj(x).unflatten(-1, (h, 6))
    k, v = (p(x).unflatten(-1, (g, 6)).repeat_interleave(h // g, 2) for p in (mixer.k_proj, mixer.v_proj))
    index, seen = mixer.indexer, x.detach()
    iq, ik = index.q_proj(seen).unflatten(-1, (8, 6)), index.k_norm(index.k_proj(seen))
    iw = index.weights_proj(seen) / 48**0.5
    ys, total = [], 0.0
    for i in range(x.shape[1]):
        scores = (iw[0, i][:, None] * torch.relu(iq[0, i] @ ik[0, : i + 1].T)).sum(0)
        chosen = scores.topk(min(topk, i + 1)).indices
        p = (torch.einsum("hk,jhk->hj", q[0, i], k[0, chosen]) / 6**0.5).softmax(-1)
        ys.append(torch.einsum("hj,jhv->hv", p, v[0, chosen]).flatten())
        target = p.sum(0).detach() / h
        total = total + (target * (target.log() - scores[chosen].log_softmax(0))).sum()
    return mixer.out_proj(torch.stack(ys)), total


def test_the_indexer_is_taught_the_attentions_weights_and_nothing_else_is():
    mixer = build(IndexedAttentionConfig(**HEADS, **INDEX, position={"type": "none"}, index_position={"type": "none"}))
    x = torch.randn(1, T, D, dtype=F64, requires_grad=True)
    y, _, extras = mixer(x)
    loss, count = extras.losses["indexer_kl"]
    want, total = by_hand(mixer, x, 5)
    torch.testing.assert_close(y[0], want, rtol=0, atol=1e-11)
    torch.testing.assert_close(loss, total, rtol=0, atol=1e-11)
    assert int(count) == T
    names, params = zip(*mixer.named_parameters(), strict=True)
    ours, theirs = (torch.autograd.grad(z, [x, *params], allow_unused=True, retain_graph=True) for z in (loss, total))
    for name, a, b in zip(("x", *names), ours, theirs, strict=True):
        assert (b is not None) == name.startswith("indexer")
        if b is None:
            assert a is None, name
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=name)
    silent = torch.autograd.grad(y.sum(), [*mixer.indexer.parameters()], allow_unused=True)
    assert all(grad is None for grad in silent)


def test_training_the_loss_teaches_the_choice():
    """The indexer alone is trained on the loss: the KL falls."""
    torch.manual_seed(0)
    mixer = build(IndexedAttentionConfig(**HEADS, **{**INDEX, "index_top_k": 64}))
    x = torch.randn(2, 64, D, dtype=F64)
    before = mixer(x)[2].losses["indexer_kl"][0]
    optimizer = torch.optim.Adam(mixer.indexer.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        loss, count = mixer(x)[2].losses["indexer_kl"]
        (loss / count).backward()
        optimizer.step()
    assert float(loss.detach()) < 0.7 * float(before.detach())


def test_a_latent_that_may_not_be_absorbed_gives_the_same():
    mixer = build(IndexedMLAConfig(n_heads=3, **SIZES, **INDEX))
    x = torch.randn(2, T, D, dtype=F64)
    want = mixer(x)[0]
    mixer.kv_b_proj.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(mixer(x)[0], want, rtol=0, atol=1e-12)


def test_misfits_are_refused():
    with pytest.raises(ConfigError, match="index_head_dim"):
        build(IndexedMLAConfig(n_heads=3, **{**SIZES, "qk_rope_head_dim": 8}, **INDEX))
    with pytest.raises(ConfigError, match="told again"):
        build(IndexedAttentionConfig(**HEADS, **INDEX, position={"type": "xpos"}))
    with pytest.raises(RecipeError):
        IndexedAttentionConfig(n_heads=4, n_kv_heads=3)


@pytest.mark.parametrize(("topk", "pool"), [(8, 4), (6, 3), (40, 4)])
def test_pooled_keys_equal_transformers(topk, pool):
    """GLM-5-Next's layer without positions: blocks of keys are scored, and the open block's tokens are always seen."""
    module = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    sizes = {**SIZES, "qk_rope_head_dim": 0}
    config = module.Glm5NextTextConfig(
        hidden_size=D, num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=1, index_n_heads=16, index_head_dim=6,
        index_topk=topk, index_kpool=pool, index_kpool_always_select_tail=True, indexer_types=["full"],
        **published(sizes),
    )
    config._attn_implementation = "sdpa"
    theirs = module.Glm5NextTextAttention(config, 0).double()
    none = {"type": "none"}
    mixer = build(IndexedMLAConfig(
        n_heads=3, index_n_heads=16, index_head_dim=6, index_top_k=topk, index_pool=pool, position=none, index_position=none,
        norm={"type": "rms_norm", "eps": config.rms_norm_eps}, **sizes,
    ))
    pooling = {"indexer.index_kpool_compress_ape": "indexer.gate_bias"}
    pooling["indexer.index_kpool_compress_gate"] = "indexer.gate_proj.weight"
    names = {n: pooling.get(n, renamed(n)) for n in theirs.state_dict()}
    theirs.load_state_dict({n: mixer.state_dict()[ours] for n, ours in names.items()})
    x = torch.randn(2, T, D, dtype=F64, requires_grad=True)
    with StrictFloat64():
        want = theirs(x, attention_mask=torch.ones(2, T, dtype=torch.bool))[0]
    got = mixer(x)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    weight, mine = torch.randn_like(want), dict(mixer.named_parameters())
    given = {n: p for n, p in theirs.named_parameters() if "indexer" not in n}
    found = torch.autograd.grad((got * weight).sum(), [x, *(mine[names[n]] for n in given)])
    for a, b in zip(found, torch.autograd.grad((want * weight).sum(), [x, *given.values()]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
