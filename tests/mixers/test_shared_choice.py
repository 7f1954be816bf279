"""Layers that attend to what an earlier layer's indexer chose: against transformers' pairs of layers, in models, by the kit."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import IndexedAttentionConfig, IndexedMLAConfig, MetaTokensConfig, ParallelMixersConfig
from hybridtf.models import LanguageModelConfig
from hybridtf.testing import check_mixer
from tests.mixers.plain_parts import published

D, T, F64 = 12, 21, torch.float64
SIZES = {"q_lora_rank": 7, "kv_lora_rank": 9, "qk_nope_head_dim": 5, "v_dim": 3}
RENAMED = {
    "kv_a_proj_with_mqa": "kv_a_proj", "o_proj": "out_proj", "wq_b": "q_proj", "wk": "k_proj", "_layernorm": "_norm",
    "index_kpool_compress_ape": "gate_bias", "index_kpool_compress_gate": "gate_proj.weight",
}
HEADS = {"type": "indexed_attention", "n_heads": 4, "n_kv_heads": 2, "head_dim": 4}
INDEX = {"index_n_heads": 8, "index_head_dim": 4, "index_top_k": 6}


def renamed(name):
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name


def pair(config, their_layers):
    """A writer and a reader with the weights of transformers' layers, and their parameters beside ours by name."""
    ours, params = [], []
    for i, (choice, layer) in enumerate(zip(("write", "read"), their_layers, strict=True)):
        mixer = config.model_copy(update={"index_choice": choice}).build(BuildContext(d_model=D, param_dtype=F64))
        generator = torch.Generator().manual_seed(i)
        state = {n: torch.randn(p.shape, generator=generator, dtype=F64) * 0.5 for n, p in layer.state_dict().items()}
        layer.load_state_dict(state)
        mixer.load_state_dict({renamed(n): p for n, p in state.items()})
        mine = dict(mixer.named_parameters())
        params += [(f"{i} {n}", p, mine[renamed(n)]) for n, p in layer.named_parameters() if "indexer" not in n]
        ours.append(mixer)
    return ours, params


def same_two_layers(ours, params, x, run):
    """Outputs of both layers with a residual stream, and the gradients of x and of all parameters but the indexer's."""
    with StrictFloat64():
        first, choice = run(0, x, None)
        second, _ = run(1, x + first, choice)
    a, _, extras = ours[0](x)
    b, state = ours[1](x + a, edges=extras.edges)
    assert state is None
    torch.testing.assert_close(a, first, rtol=0, atol=1e-10)
    torch.testing.assert_close(b, second, rtol=0, atol=1e-10)
    weight = torch.randn_like(first)
    names, theirs, mine = zip(*params, strict=True)
    want = torch.autograd.grad(((first + second) * weight).sum(), [x, *theirs])
    found = torch.autograd.grad(((a + b) * weight).sum(), [x, *mine])
    for name, one, other in zip(("x", *names), found, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("topk", [4, 8, 40])
def test_a_pair_equals_transformers(topk):
    """GLM-MoE-DSA's full layer and the shared one after it."""
    module = pytest.importorskip("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")
    config = module.GlmMoeDsaConfig(
        hidden_size=D, num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=2, index_n_heads=16, index_head_dim=6,
        index_topk=topk, indexer_types=["full", "shared"], qk_rope_head_dim=4, **published(SIZES),
    )
    config._attn_implementation = "sdpa"
    theirs = [module.GlmMoeDsaAttention(config, i).double() for i in range(2)]
    ours, params = pair(IndexedMLAConfig(
        n_heads=3, index_n_heads=16, index_head_dim=6, index_top_k=topk, qk_rope_head_dim=4,
        index_position={"type": "rope", "interleaved": True}, **SIZES,
    ), theirs)
    mask = torch.ones(T, T, dtype=torch.bool).tril()[None, None].expand(2, 1, T, T)

    def run(i, x, choice):
        table = module.GlmMoeDsaRotaryEmbedding(config)(x, torch.arange(T)[None])
        y, _, chosen = theirs[i](x, position_embeddings=table, attention_mask=mask, prev_topk_indices=choice)
        return y, chosen

    same_two_layers(ours, params, torch.randn(2, T, D, dtype=F64, requires_grad=True), run)


@pytest.mark.parametrize(("topk", "pool"), [(8, 4), (6, 3)])
def test_a_pair_over_blocks_equals_transformers(topk, pool):
    """GLM-5-Next's: the open block is part of what is shared."""
    module = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    sizes, none = {**SIZES, "qk_rope_head_dim": 0}, {"type": "none"}
    config = module.Glm5NextTextConfig(
        hidden_size=D, num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=2, index_n_heads=16, index_head_dim=6,
        index_topk=topk, index_kpool=pool, index_kpool_always_select_tail=True, indexer_types=["full", "shared"],
        **published(sizes),
    )
    config._attn_implementation = "sdpa"
    theirs = [module.Glm5NextTextAttention(config, i).double() for i in range(2)]
    ours, params = pair(IndexedMLAConfig(
        n_heads=3, index_n_heads=16, index_head_dim=6, index_top_k=topk, index_pool=pool, position=none, index_position=none,
        norm={"type": "rms_norm", "eps": config.rms_norm_eps}, **sizes,
    ), theirs)

    def run(i, x, choice):
        y, _, chosen = theirs[i](x, attention_mask=torch.ones(2, T, dtype=torch.bool), prev_topk_indices=choice)
        return y, chosen

    same_two_layers(ours, params, torch.randn(2, T, D, dtype=F64, requires_grad=True), run)


@pytest.mark.parametrize("choice", ["write", "read"])
@pytest.mark.parametrize("pool", [1, 2])
def test_the_kit_holds_writers_and_readers(choice, pool):
    options = {**INDEX, "index_pool": pool, "index_choice": choice}
    laws = ("shape", "empty", "cut", "segment", "causal", "gradients", "crop", "state_bytes", "dead_state", "structure")
    check_mixer(IndexedAttentionConfig(**HEADS, **options), laws=laws)


def test_the_kit_holds_a_latent_that_reads():
    laws = ("shape", "cut", "segment", "causal", "gradients", "reorder", "eval", "bf16", "lora")
    check_mixer(IndexedMLAConfig.tiny().model_copy(update={"index_choice": "read"}), laws=laws)


def test_a_mixer_of_mixers_asks_for_what_its_parts_ask_for():
    reader = {**HEADS, **INDEX, "index_choice": "read"}
    check_mixer(ParallelMixersConfig(branches=[reader, {"type": "gru"}]), laws=("shape", "cut", "segment"))
    both = ParallelMixersConfig(branches=[reader, {**reader, "index_top_k": 4}])
    with pytest.raises(ConfigError, match=r"one has the edge 'indexer_choice' as \(b t [46]\) torch.int64, another as"):
        both.build(BuildContext(d_model=D))


# -- in a model ----------------------------------------------------------------------------------------------------------

BLOCKS = {
    "o": {"mixer": {**HEADS, **INDEX, "index_choice": "write"}},
    "r": {"mixer": {**HEADS, "index_top_k": 6, "index_choice": "read"}},
    "m": {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4, "chunk_size": 4}},
}


def model(pattern, **changes):
    blocks = {name: BLOCKS[name] for name in BLOCKS if name in pattern.split()}
    for name, mixer in changes.items():
        blocks[name] = {"mixer": {**blocks[name]["mixer"], **mixer}}
    config = LanguageModelConfig(vocab_size=17, d_model=D, pattern=pattern, blocks=blocks)
    return config.build(BuildContext(d_model=D, param_dtype=F64)).eval()


@pytest.mark.parametrize("pool", [1, 3])
def test_one_owner_serves_two_readers_packed_padded_and_token_by_token(pool):
    net = model("o m r r", o={"index_pool": pool}, r={"index_pool": pool})
    assert [hasattr(layer.mixer, "indexer") and layer.mixer.indexer is not None for layer in net.stack.blocks()] == [
        True, False, False, False,
    ]
    ids, lengths = torch.randint(0, 17, (1, 30)), [17, 1, 12]
    whole = net(ids, segments=Segments.from_lengths([lengths])).logits
    for part, got in zip(ids.split(lengths, 1), whole.split(lengths, 1), strict=True):
        torch.testing.assert_close(got, net(part).logits, rtol=0, atol=1e-11)
        state, found = net.init_state(1, max_len=part.shape[1]), []
        with torch.no_grad():
            for token in part.split(1, 1):
                out = net(token, state=state)
                state = out.state
                found.append(out.logits)
        torch.testing.assert_close(torch.cat(found, 1), got, rtol=0, atol=1e-11)


def test_readers_follow_the_last_owner():
    """Between two owners the first one's choice counts, after both the second's."""
    net, seen = model("o r o r"), {}
    for i, layer in enumerate(net.stack.blocks()):
        name = "edges" if i % 2 else "written"
        layer.mixer.register_forward_hook(
            lambda _, args, kwargs, out, i=i, name=name: seen.update({
                i: kwargs["edges"]["indexer_choice"] if name == "edges" else out[2].edges["indexer_choice"]
            }), with_kwargs=True,
        )
    net(torch.randint(0, 17, (2, 25)))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[0], seen[2])


def test_recomputed_layers_have_the_same_gradients_and_training_lowers_the_loss():
    ids, targets = torch.randint(0, 17, (2, 24)), torch.arange(48).view(2, 24) % 17
    grads = []
    for recomputed in (frozenset(), frozenset(range(3))):
        net = model("o r r").train()
        net.stack.checkpointed = recomputed
        loss = net.loss(ids, targets)
        taught, count = loss.losses["indexer_kl"]
        assert int(count) == ids.numel(), "only the owner has the loss"
        grads.append(torch.autograd.grad(loss.total + taught, list(net.parameters())))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert all(bool((grad != 0).any()) for grad in grads[0])
    optimizer, losses = torch.optim.Adam(net.parameters(), lr=0.02), []
    for _ in range(25):
        optimizer.zero_grad()
        loss = net.loss(ids, targets)
        (loss.mean() + loss.losses["indexer_kl"][0] / ids.numel()).backward()
        optimizer.step()
        losses.append(float(loss.mean().detach()))
    assert losses[-1] < 0.6 * losses[0]


def test_what_does_not_fit_is_refused_when_it_is_built():
    with pytest.raises(ConfigError, match=r"blocks\.r\.mixer: layer 0 reads the edge 'indexer_choice', which no earlier"):
        model("r o")
    with pytest.raises(ConfigError, match=r"'indexer_choice' as \(b t 4\) torch.int64, .* has it as \(b t 6\) torch.int64"):
        model("o r", r={"index_top_k": 4})
    with pytest.raises(ConfigError, match=r"'indexer_choice' as \(b t 6\) torch.int64, .* has it as \(b t 7\) torch.int64"):
        model("o r", o={"index_pool": 2})
    with pytest.raises(ConfigError, match="'meta_tokens' holds mixers of one sequence, and not one with edges"):
        MetaTokensConfig(n_tokens=2, mixer=BLOCKS["r"]["mixer"]).build(BuildContext(d_model=D))
    reader = IndexedAttentionConfig(**HEADS, index_choice="read").build(BuildContext(d_model=D))
    with pytest.raises(ConfigError, match="index_choice = 'read' needs edges="):
        reader(torch.zeros(1, 3, D))
