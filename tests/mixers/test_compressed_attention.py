"""Compressed attention: layers of all three kinds against transformers', with gradients; the indexer's loss; what it holds."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, RecipeError, Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import CompressedAttentionConfig
from hybridtf.nn import NoPositionConfig, XPosConfig
from tests.ops.live_bytes import Peak

D, F64 = 12, torch.float64
SIZES = {"n_heads": 4, "head_dim": 10, "q_lora_rank": 7, "qk_rope_head_dim": 4, "n_out_groups": 2, "o_lora_rank": 5}
INDEX = {"index_n_heads": 16, "index_head_dim": 6}
KINDS = {
    "sliding_attention": {"compress_rate": 0, "overlap": False, "index_top_k": 0},
    "compressed_sparse_attention": {"compress_rate": 3, "overlap": True, "index_top_k": 2},
    "heavily_compressed_attention": {"compress_rate": 5, "overlap": False, "index_top_k": 0},
}
RENAMED = {
    "o_b_proj": "out_proj", "compressor.indexer.q_b_proj": "indexer.q_proj",
    "compressor.indexer.scorer.weights_proj": "indexer.weights_proj", "compressor.kv_norm": "compressor.norm",
    "compressor.indexer.kv_norm": "indexer.compressor.norm", "compressor.indexer.": "indexer.compressor.",
}


def config_of(kind, *, window=4, rope=None, **changes):
    position = {"type": "rope", "interleaved": True, "theta": 50.0, **(rope or {})}
    return CompressedAttentionConfig(**{**SIZES, **INDEX, **KINDS[kind], "window": window, "position": position, **changes})


def build(config, **more):
    mixer = config.build(BuildContext(d_model=D, param_dtype=F64, **more))
    with torch.no_grad():
        for i, p in enumerate(mixer.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=F64) * 0.5)
    return mixer


def renamed(name):
    for theirs in sorted(RENAMED, key=len, reverse=True):
        if name.startswith(theirs):
            return RENAMED[theirs] + name[len(theirs) :]
    return name


def ours_of(name, tensors):
    """Their parameter of that name, from tensors by our names."""
    if name != "o_a_proj.weight":
        return tensors[renamed(name)]
    return tensors["out_a_proj.weight"].transpose(1, 2).flatten(0, 1)


def transformers_layer(kind, config, yarn):
    """Their attention layer and its rotary tables, in float64."""
    module = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16} if yarn else None
    theirs = module.DeepseekV4Config(
        hidden_size=D, num_hidden_layers=1, num_attention_heads=4, head_dim=10, q_lora_rank=7, partial_rotary_factor=0.4,
        o_groups=2, o_lora_rank=5, index_n_heads=16, index_head_dim=6, index_topk=config.index_top_k or 1,
        sliding_window=config.window, layer_types=[kind], mlp_layer_types=["moe"], rope_theta=50.0, compress_rope_theta=50.0,
        compress_rates={k: KINDS[k]["compress_rate"] if k != kind else config.compress_rate for k in list(KINDS)[1:]},
        rope_parameters=stretched, max_position_embeddings=64, attn_implementation="eager",
    )
    layer = module.DeepseekV4Attention(theirs, 0).double()
    with StrictFloat64():
        tables = [m for m in layer.modules() if isinstance(m, module.DeepseekV4RotaryEmbedding)]
        for table in tables:
            table.__init__(theirs)
        return layer, module.DeepseekV4RotaryEmbedding(theirs)


def window_mask(t, window):
    ahead = torch.arange(t)[:, None] - torch.arange(t)
    return torch.zeros(t, t, dtype=F64).masked_fill((ahead < 0) | (ahead >= window), -torch.inf)[None, None]


@pytest.mark.parametrize(
    ("kind", "t", "yarn"),
    [*((kind, t, False) for kind in KINDS for t in (1, 2, 3, 7, 23, 30)), *((kind, 29, True) for kind in list(KINDS)[1:])],
)
def test_equals_transformers(kind, t, yarn):
    """Outputs, and gradients of x and of all parameters but the indexer's, which get none there."""
    rope = {"scaling": {"type": "yarn", "factor": 4.0, "original_max_len": 16, "attention_factor": 1.0}} if yarn else None
    config = config_of(kind, rope=rope)
    mixer, (theirs, rotary) = build(config), transformers_layer(kind, config, yarn)
    theirs.load_state_dict({n: ours_of(n, mixer.state_dict()) for n in theirs.state_dict()})
    x = torch.randn(2, t, D, dtype=F64, requires_grad=True)
    steps = torch.arange(t).expand(2, t)
    with StrictFloat64():
        tables = {name: rotary(x, steps, layer_type=name) for name in ("main", "compress")}
        want = theirs(x, tables, steps, window_mask(t, config.window).expand(2, -1, -1, -1))[0]
    got = mixer(x)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    weight, mine = torch.randn_like(want), dict(mixer.named_parameters())
    given = {n: p for n, p in theirs.named_parameters() if "indexer" not in n}
    assert len(given) == len([n for n in mine if "indexer" not in n])
    found = torch.autograd.grad((got * weight).sum(), [x, *mine.values()], allow_unused=True, materialize_grads=True)
    by_name = dict(zip(mine, found[1:], strict=True))
    wanted = torch.autograd.grad((want * weight).sum(), [x, *given.values()], allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-10)
    for name, b in zip(given, wanted[1:], strict=True):
        torch.testing.assert_close(ours_of(name, by_name), b, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    assert not any(bool(grad.any()) for name, grad in by_name.items() if "indexer" in name)


def by_hand(mixer, x):
    """The choice of entries, and the KL from the attention's weights on them, query by query, without positions."""
    config, h = mixer.config, 4
    m, k = config.compress_rate, config.head_dim

    def entries(part, x, width):
        values, gates, made = part.kv_proj(x), part.gate_proj(x), []
        for i in range(x.shape[0] // m):
            own = slice(i * m, i * m + m)
            v, g = values[own, width:], gates[own, width:] + part.position_bias[:, width:]
            if i:
                before = slice(i * m - m, i * m)
                v = torch.cat([values[before, :width], v])
                g = torch.cat([gates[before, :width] + part.position_bias[:, :width], g])
            made.append(part.norm((g.softmax(0) * v).sum(0)))
        return torch.stack(made)

    latent = mixer.q_a_norm(mixer.q_a_proj(x))
    q, kv = mixer.q_norm(mixer.q_b_proj(latent).unflatten(-1, (h, k))), mixer.kv_norm(mixer.kv_proj(x))
    seen, source = x.detach(), latent.detach()
    far, keys = entries(mixer.compressor, x, k), entries(mixer.indexer.compressor, seen, config.index_head_dim)
    asked = mixer.indexer.q_proj(source).unflatten(-1, (16, -1))
    weights = mixer.indexer.weights_proj(seen) / (16 * config.index_head_dim) ** 0.5
    ys, total = [], 0.0
    for t in range(x.shape[0]):
        scores = (weights[t][:, None] * torch.relu(asked[t] @ keys[: (t + 1) // m].T)).sum(0)
        chosen = scores.topk(min(config.index_top_k, len(scores))).indices
        near = kv[max(t + 1 - config.window, 0) : t + 1]
        both = torch.cat([far[chosen], near])
        p = torch.cat([q[t] @ both.T / k**0.5, mixer.sinks[:, None]], 1).softmax(1)[:, :-1]
        ys.append((p @ both).flatten())
        target = p[:, : len(chosen)].sum(0).detach()
        target = target / target.sum()
        total = total + (target * (target.log() - scores[chosen].log_softmax(0))).sum()
    return mixer.out_proj(mixer.out_a_proj(torch.stack(ys)[None]))[0], total


@pytest.mark.parametrize("topk", [2, 30])
def test_the_indexer_is_taught_the_attentions_weights_and_nothing_else_is(topk):
    config = config_of("compressed_sparse_attention", index_top_k=topk)
    mixer = build(config.model_copy(update={"position": NoPositionConfig()}))
    x = torch.randn(1, 23, D, dtype=F64, requires_grad=True)
    y, _, extras = mixer(x)
    loss, count = extras.losses["indexer_kl"]
    want, total = by_hand(mixer, x[0])
    torch.testing.assert_close(y[0], want, rtol=0, atol=1e-11)
    torch.testing.assert_close(loss, total, rtol=0, atol=1e-11)
    assert int(count) == 23
    names, params = zip(*mixer.named_parameters(), strict=True)
    ours, theirs = (torch.autograd.grad(z, [x, *params], allow_unused=True, retain_graph=True) for z in (loss, total))
    for name, a, b in zip(("x", *names), ours, theirs, strict=True):
        assert (b is not None) == name.startswith("indexer")
        if b is None:
            assert a is None or not a.any(), name
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=name)


def test_training_the_loss_teaches_the_choice():
    torch.manual_seed(0)
    mixer = build(config_of("compressed_sparse_attention", index_top_k=8))
    x = torch.randn(2, 48, D, dtype=F64)
    before = mixer(x)[2].losses["indexer_kl"][0]
    optimizer = torch.optim.Adam(mixer.indexer.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        loss, count = mixer(x)[2].losses["indexer_kl"]
        (loss / count).backward()
        optimizer.step()
    assert float(loss.detach()) < 0.8 * float(before.detach())


def test_all_entries_chosen_are_all_entries_in_packed_documents():
    """Both ways of joining entries with the window, over documents of which blocks count from the start."""
    sparse = build(config_of("compressed_sparse_attention", index_top_k=9))
    plain = build(config_of("compressed_sparse_attention", index_top_k=0))
    plain.load_state_dict({n: p for n, p in sparse.state_dict().items() if "indexer" not in n})
    docs = Segments.from_lengths([[10, 2, 12], [1, 19, 3]], width=25)
    x = torch.randn(2, 25, D, dtype=F64, requires_grad=True)
    a, b = sparse(x, segments=docs)[0], plain(x, segments=docs)[0]
    torch.testing.assert_close(a[docs.real], b[docs.real], rtol=0, atol=1e-12)
    weight, names = torch.randn_like(a).masked_fill(~docs.real[..., None], 0), [n for n, _ in plain.named_parameters()]
    ours, theirs = (
        torch.autograd.grad((y * weight).sum(), [x, *(dict(m.named_parameters())[n] for n in names)])
        for y, m in ((a, sparse), (b, plain))
    )
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-11)
    for row, lengths in enumerate(((10, 2, 12), (1, 19, 3))):
        for part, n in zip(x[row, : sum(lengths)].split(lengths), lengths, strict=True):
            at = (x[row] == part[0]).all(-1).nonzero()[0, 0]
            torch.testing.assert_close(sparse(part[None])[0][0], a[row, at : at + n], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_grows_with_the_length(kind):
    mixer = build(config_of(kind, window=16))

    def most(t):
        x = torch.randn(1, t, D, dtype=F64, requires_grad=True)
        with Peak() as peak:
            y = mixer(x)[0]
            y.sum().backward()
        return peak.most

    least = most(600)
    assert most(2400) < 4.6 * least


def test_what_a_token_is_held_as():
    """A long document: the ring of the window, two blocks of open tokens, and an entry for each block."""
    mixer = build(config_of("compressed_sparse_attention"))
    with torch.no_grad():
        state = mixer(torch.randn(2, 100, D, dtype=F64), state=mixer.init_state(2))[1]
    assert state["window"]["kv"].shape == (2, 4, 1, 10)
    assert state["open"]["kv_value"].shape == (2, 6, 20)
    assert state["entries"].count.tolist() == [33, 33]
    assert {name: x.shape[2:] for name, x in state["entries"].data.items()} == {"kv": (1, 10), "index_k": (6,), "position": ()}


def test_misfits_are_refused():
    with pytest.raises(RecipeError, match="n_out_groups"):
        config_of("sliding_attention", n_heads=3)
    with pytest.raises(RecipeError, match="compress_rate = 0"):
        config_of("compressed_sparse_attention", compress_rate=0)
    with pytest.raises(RecipeError, match="index_head_dim = 2"):
        config_of("compressed_sparse_attention", index_head_dim=2)
    with pytest.raises(ConfigError, match="turned back"):
        build(config_of("sliding_attention").model_copy(update={"position": XPosConfig()}))
    running = {"scaling": {"type": "dynamic_ntk", "factor": 2.0, "original_max_len": 8, "mode": "running"}}
    with pytest.raises(ConfigError, match="fixed base"):
        build(config_of("sliding_attention", rope=running))
