"""Sparse attention mixers against transformers' modules, and against masks written from the papers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hybridtf.core import BuildContext, ConfigError, RecipeError, Segments, StateError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import (
    BigBirdConfig,
    ChunkedAttentionConfig,
    DilatedConfig,
    LongformerConfig,
    MobaConfig,
    StridedSparseConfig,
)
from hybridtf.ops.block_sparse_attention import Places

D = 12


def build(config, causal=True, **more):
    ctx = BuildContext(d_model=D, param_dtype=torch.float64, causal=causal, **more)
    mixer = config.build(ctx)
    with torch.no_grad():
        for i, p in enumerate(mixer.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype) * 0.3)
    return mixer.eval()


def alike(ours, theirs, ours_in, theirs_in, atol=1e-10):
    """Outputs, and gradients of the tensors that the two sides share, agree."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    weight = torch.randn_like(ours)
    got, want = (
        torch.autograd.grad((y * weight).sum(), given, retain_graph=True) for y, given in ((ours, ours_in), (theirs, theirs_in))
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def share(mixer, theirs, names):
    """Our projections take their weights; the way out is left aside, since theirs is a module of its own."""
    pairs = []
    with torch.no_grad():
        for ours, other in names.items():
            a, b = getattr(mixer, ours), getattr(theirs, other)
            a.weight.copy_(b.weight)
            pairs.append((a.weight, b.weight))
            if b.bias is not None:
                a.bias.copy_(b.bias)
                pairs.append((a.bias, b.bias))
        mixer.out_proj.weight.copy_(torch.eye(D))
        if mixer.out_proj.bias is not None:
            mixer.out_proj.bias.zero_()
    return pairs


# -- transformers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marks", [(), (0,), (0, 5, 13)])
@pytest.mark.parametrize("padded", [False, True])
def test_longformer_is_that_of_transformers(marks, padded):
    longformer = pytest.importorskip("transformers.models.longformer.modeling_longformer")
    config = longformer.LongformerPreTrainedModel.config_class(
        hidden_size=D, num_attention_heads=3, attention_window=[6], num_hidden_layers=1, attention_probs_dropout_prob=0.0
    )
    theirs = longformer.LongformerSelfAttention(config, 0).double().eval()
    mixer = build(LongformerConfig(n_heads=3, window=4, n_global=0), causal=False)
    roles = {f"{r[0]}_{end}": name for r in ("query", "key", "value") for end, name in (("proj", r), ("global", f"{r}_global"))}
    pairs = share(mixer, theirs, roles)
    x = torch.randn(2, 18, D, dtype=torch.float64, requires_grad=True)
    real = torch.ones(2, 18, dtype=torch.bool)
    if padded:
        real[1, 14:] = False
    glob = torch.zeros(2, 18, dtype=torch.bool)
    glob[:, list(marks)] = True
    glob &= real
    mask = torch.zeros(2, 18, dtype=torch.float64).masked_fill(~real, -10000.0).masked_fill(glob, 10000.0)
    with StrictFloat64():
        want = theirs(
            x, attention_mask=mask, is_index_masked=mask < 0, is_index_global_attn=mask > 0, is_global_attn=bool(glob.any())
        )[0]
    ids = real.long()
    got = mixer(x, segments=Segments.from_ids(ids, global_tokens=glob))[0]
    used = [pair for pair, name in zip(pairs, [n for n in roles for _ in "wb"], strict=True) if marks or "global" not in name]
    # A key's bias shifts all scores of a query alike: its gradient is a zero that rounding blurs.
    ours, others = zip(*used, strict=True)
    alike(got[real], want[real], (x, *ours), (x, *others))


def test_bigbird_is_that_of_transformers_given_the_same_random_blocks():
    big_bird = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    config = big_bird.BigBirdPreTrainedModel.config_class(
        hidden_size=D, num_attention_heads=3, block_size=4, num_random_blocks=2, use_bias=True, max_position_embeddings=64,
        num_hidden_layers=1,
    )
    theirs = big_bird.BigBirdBlockSparseAttention(config, seed=0).double().eval()
    mixer = build(BigBirdConfig(n_heads=3, block_size=4, n_random_blocks=2, seed=5), causal=False)
    pairs = share(mixer, theirs, {"q_proj": "query", "k_proj": "key", "v_proj": "value"})
    t = 48
    blocks = mixer.drawn(Places.default(1, t, t, torch.device("cpu")))[0, ::4]  # [12, h, 2]
    theirs._bigbird_block_rand_mask_with_head = lambda **_: list(blocks[1:-1].transpose(0, 1).numpy())
    x = torch.randn(2, t, D, dtype=torch.float64, requires_grad=True)
    masks = big_bird.BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(2, t, dtype=torch.float64), 4)
    blocked, band, from_mask, to_mask = masks
    want = theirs(
        x, band_mask=band, from_mask=from_mask, to_mask=to_mask, from_blocked_mask=blocked, to_blocked_mask=blocked
    )[0]
    ours, others = zip(*pairs, strict=True)
    alike(mixer(x)[0], want, (x, *ours), (x, *others))


@pytest.mark.parametrize("norm", [False, True])
def test_chunked_attention_is_that_of_llama4(norm):
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    masking = pytest.importorskip("transformers.masking_utils")
    with StrictFloat64():
        config = llama4.Llama4TextConfig(
            hidden_size=D, num_attention_heads=4, num_key_value_heads=2, head_dim=6, num_hidden_layers=1, no_rope_layers=[1],
            attention_chunk_size=5, use_qk_norm=norm, attn_implementation="eager", rms_norm_eps=1e-5,
        )
        theirs = llama4.Llama4TextAttention(config, 0).double().eval()
        rotary = llama4.Llama4TextRotaryEmbedding(config)
    theta = config.rope_parameters["rope_theta"]
    options = {"qk_norm": {"type": "rms_norm", "weight": False, "eps": 1e-5}} if norm else {}
    position = {"type": "rope", "theta": theta, "interleaved": True}
    sizes = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "attention_chunk_size": 5}
    mixer = build(ChunkedAttentionConfig(**sizes, position=position, **options))
    with torch.no_grad():
        pairs = [(getattr(mixer, n).weight, getattr(theirs, n.replace("out", "o")).weight)
                 for n in ("q_proj", "k_proj", "v_proj", "out_proj")]
        for ours, other in pairs:
            ours.copy_(other)
    x = torch.randn(2, 17, D, dtype=torch.float64, requires_grad=True)
    rule = masking.chunked_causal_mask_function(5, torch.zeros(2, dtype=torch.int64))
    seen = masking.sdpa_mask(batch_size=2, q_length=17, kv_length=17, mask_function=rule, allow_is_causal_skip=False)
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    with StrictFloat64():
        want = theirs(x, rotary(x, torch.arange(17).expand(2, -1)), added)[0]
    ours, others = zip(*pairs, strict=True)
    alike(mixer(x)[0], want, (x, *ours), (x, *others))


# -- the papers ------------------------------------------------------------------------------------------------------


def dense(mixer, x, seen, q=None, k=None, v=None):
    """(t h k): softmax attention of one row x (t d) under a mask (t t) or (h t t)."""
    t = len(x)
    q, k, v = (
        (p or getattr(mixer, name))(x).view(1, t, -1, mixer.head_dim)
        for p, name in ((q, "q_proj"), (k, "k_proj"), (v, "v_proj"))
    )
    if mixer.position is not None:
        table = mixer.position.table(torch.arange(t)[None], x.dtype)
        q, k = mixer.position(q, table), mixer.position(k, table)
    repeat = q.shape[2] // k.shape[2]
    k, v = (z.repeat_interleave(repeat, 2) for z in (k, v))
    scores = torch.einsum("bthk,bshk->hts", q, k) * mixer.head_dim**-0.5
    return torch.einsum("hts,bshv->thv", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def table(t, sees):
    return torch.tensor([[sees(p, j) for j in range(t)] for p in range(t)])


PATTERNS = {
    "dilated": (DilatedConfig(n_heads=3, window=3, dilation=4), lambda p, j: p - j in (0, 4, 8)),
    "window": (DilatedConfig(n_heads=3, window=3, dilation=1), lambda p, j: 0 <= p - j < 3),
    # Child et al. 2019, section 4.2: A1 = {max(0, i - l) .. i}, A2 = {j : (i - j) mod l = 0}.
    "strided": (
        StridedSparseConfig(n_heads=3, stride=4), lambda p, j: j <= p and (p - j <= 4 or (p - j) % 4 == 0),
    ),
    # A1 = {j : floor(j / l) = floor(i / l)}, A2 = {j : j mod l in {l - c .. l - 1}}.
    "fixed": (
        StridedSparseConfig(n_heads=3, pattern="fixed", stride=5, n_summary=2),
        lambda p, j: j <= p and (j // 5 == p // 5 or j % 5 in (3, 4)),
    ),
    "chunks": (
        ChunkedAttentionConfig(n_heads=3, n_kv_heads=1, attention_chunk_size=7), lambda p, j: j <= p and j // 7 == p // 7,
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_fixed_patterns_are_the_sets_of_the_papers(name):
    config, sees = PATTERNS[name]
    mixer = build(config)
    x = torch.randn(23, D, dtype=torch.float64, requires_grad=True)
    want = mixer.out_proj(dense(mixer, x, table(23, sees)).flatten(-2))
    given = (x, *mixer.parameters())
    alike(mixer(x[None])[0][0], want, given, given)


def test_causal_longformer_clips_every_view_to_the_past():
    mixer = build(LongformerConfig(n_heads=3, window=4, n_global=1))
    x = torch.randn(19, D, dtype=torch.float64, requires_grad=True)
    marked = torch.zeros(19, dtype=torch.bool)
    marked[[0, 6, 11]] = True
    seen = table(19, lambda p, j: j <= p and (p - j <= 3 or bool(marked[j])))
    past = table(19, lambda p, j: j <= p)
    near = dense(mixer, x, seen)
    far = dense(mixer, x, past, mixer.q_global, mixer.k_global, mixer.v_global)
    want = mixer.out_proj(torch.where(marked[:, None, None], far, near).flatten(-2))
    given = (x, *mixer.parameters())
    segments = Segments.from_ids(torch.ones(1, 19, dtype=torch.int64), global_tokens=marked[None])
    alike(mixer(x[None], segments=segments)[0][0], want, given, given)
    # Carried in pieces, the state knows who was global; in rows of two documents, each has its own.
    state, outs = mixer.init_state(1), []
    for start, stop in ((0, 4), (4, 12), (12, 13), (13, 19)):
        y, state = mixer(x[None, start:stop], segments=segments.narrow(start, stop), state=state)
        outs.append(y)
    torch.testing.assert_close(torch.cat(outs, 1)[0], want, rtol=0, atol=1e-12)
    ids = torch.tensor([[1] * 19 + [0] + [2] * 19])
    twice = Segments.from_ids(ids, global_tokens=torch.cat([marked, marked[:1], marked])[None])
    both = mixer(torch.cat([x, x[:1], x])[None], segments=twice)[0][0]
    torch.testing.assert_close(both[:19], want, rtol=0, atol=1e-12)
    torch.testing.assert_close(both[20:], want, rtol=0, atol=1e-12)


def test_causal_bigbird_sees_the_first_block_the_window_and_its_random_blocks():
    mixer = build(BigBirdConfig(n_heads=3, block_size=3, n_random_blocks=2))
    x = torch.randn(31, D, dtype=torch.float64, requires_grad=True)
    drawn = mixer.drawn(Places.default(1, 31, 31, x.device))[0]
    for p in range(31):
        for head in range(3):
            free = set(range(1, p // 3 - 1))
            assert len([i for i in drawn[p, head].tolist() if i in free]) == min(2, len(free))
    assert len({tuple(row) for row in drawn[30].tolist()}) > 1, "heads draw alike"
    near = table(31, lambda p, j: j <= p and (j < 3 or p // 3 - j // 3 < 2))
    seen = torch.stack([near | table(31, lambda p, j, h=h: j <= p and j // 3 in drawn[p, h].tolist()) for h in range(3)])
    want = mixer.out_proj(dense(mixer, x, seen).flatten(-2))
    given = (x, *mixer.parameters())
    alike(mixer(x[None])[0][0], want, given, given)
    other = build(BigBirdConfig(n_heads=3, block_size=3, n_random_blocks=2), layer_idx=1)
    assert not torch.equal(drawn, other.drawn(Places.default(1, 31, 31, x.device))[0])


@pytest.mark.parametrize(("size", "top_k"), [(3, 3), (4, 1), (5, 20)])
def test_moba_chooses_as_the_paper_says(size, top_k):
    mixer = build(MobaConfig(n_heads=6, n_kv_heads=2, head_dim=4, block_size=size, top_k=top_k))
    t = 26
    x = torch.randn(t, D, dtype=torch.float64, requires_grad=True)
    angles = mixer.position.table(torch.arange(t)[None], x.dtype)
    q, k = (mixer.position(p(x).view(1, t, -1, 4), angles)[0] for p in (mixer.q_proj, mixer.k_proj))
    seen = torch.zeros(6, t, t, dtype=torch.bool)
    for head in range(6):
        means = [k[i * size : (i + 1) * size, head // 3].mean(0) for i in range(t // size)]
        for p in range(t):
            scores = torch.tensor([float((q[p, head] @ means[i]).detach()) for i in range(p // size)])
            chosen = [p // size, *scores.argsort(descending=True)[: top_k - 1].tolist()]
            for j in range(p + 1):
                seen[head, p, j] = j // size in chosen
    want = mixer.out_proj(dense(mixer, x, seen).flatten(-2))
    given = (x, *mixer.parameters())
    alike(mixer(x[None])[0][0], want, given, given)
    if top_k == 20:
        assert bool((seen == table(t, lambda p, j: j <= p)).all()), "all blocks chosen is full attention"


# -- cost and refusals -----------------------------------------------------------------------------------------------

LINEAR = {
    "dilated": DilatedConfig(n_heads=2, window=16, dilation=3),
    "chunked_attention": ChunkedAttentionConfig(n_heads=2, attention_chunk_size=32),
    "longformer": LongformerConfig(n_heads=2, window=17),
    "bigbird": BigBirdConfig(n_heads=2, block_size=16),
}


@pytest.mark.parametrize("name", LINEAR)
def test_the_time_of_a_sequence_is_linear(name):
    for causal in (True, False):
        mixer = build(LINEAR[name], causal)
        if name == "longformer" and causal:
            mixer.position = None
        counts = []
        for t in (512, 4096):
            with FlopCounterMode(display=False) as count, torch.no_grad():
                x = torch.randn(1, t, D, dtype=torch.float64)
                mixer.attention = Inside()
                mixer(x)
            counts.append(count.get_total_flops())
        assert counts[1] < counts[0] * 8 * 1.2, counts


class Inside(torch.nn.Module):
    """The op without its operators, so that the products inside are counted as they are made."""

    def forward(self, q, k, v, places, rule, *, n_tokens, marked=None, blocks=None):
        from hybridtf.ops.block_sparse_attention import grouped

        for part in grouped.PARTS:
            if not (part == "chosen" and blocks is None) and grouped.clauses_of(rule, part, marked is not None):
                grouped._forward(grouped._Call(q, k, v, places, marked, blocks, rule, part, 0.5))
        return torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)


@pytest.mark.parametrize("config", [
    StridedSparseConfig(n_heads=2, stride=16), MobaConfig(n_heads=2, block_size=16), BigBirdConfig(n_heads=2, block_size=16),
])
def test_decoding_reads_what_is_seen_alone(config):
    mixer = build(config)
    mixer.attention = CountedKeys(mixer.attention)
    with torch.no_grad():
        _, state = mixer(torch.randn(1, 2000, D, dtype=torch.float64), state=mixer.init_state(1))
        mixer.attention.read = 0
        mixer(torch.randn(1, 1, D, dtype=torch.float64), state=state)
    assert 0 < mixer.attention.read < 500


class CountedKeys(torch.nn.Module):
    """The op, with a count of the keys that groups of queries read."""

    def __init__(self, op):
        super().__init__()
        self.op, self.read, self.compute_dtype, self.device = op, 0, op.compute_dtype, op.device

    def forward(self, q, k, v, places, rule, *, n_tokens, marked=None, blocks=None):
        from hybridtf.ops.block_sparse_attention import grouped

        for part in grouped.PARTS:
            if not (part == "chosen" and blocks is None) and grouped.clauses_of(rule, part, marked is not None):
                for chunk in grouped._Call(q, k, v, places, marked, blocks, rule, part, 0.5).chunks():
                    self.read += chunk.keys()[0].numel()
        return self.op(q, k, v, places, rule, marked=marked, blocks=blocks, n_tokens=n_tokens)


def test_refusals():
    for make in (
        lambda: LongformerConfig(n_heads=2, window=0), lambda: BigBirdConfig(n_heads=2, n_window_blocks=2),
        lambda: StridedSparseConfig(n_heads=2, pattern="fixed", stride=4, n_summary=5),
        lambda: DilatedConfig(n_heads=4, n_kv_heads=3),
    ):
        with pytest.raises(RecipeError):
            make()
    with pytest.raises(ConfigError):
        build(DilatedConfig(n_heads=5))
    with pytest.raises(ConfigError, match="xpos"):
        build(DilatedConfig(n_heads=2, position={"type": "xpos"}))
    mixer = build(BigBirdConfig(n_heads=2), causal=False)
    with pytest.raises(StateError):
        mixer(torch.zeros(1, 2, D, dtype=torch.float64), state=())
