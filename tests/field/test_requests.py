"""What users of this field's libraries ask for most, as far as it exists here."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import ConfigError, Segments, crop, leaves, restore, snapshot, state_bytes
from hybridtf.models import GenerationConfig, generate
from hybridtf.models.generation import read_prompt, speculate
from hybridtf.testing.compare import close
from tests.field.layers import EVERY, F64, HYBRID, config, every, hybrid, mixer, model, packed_ids, same


def test_packed_training_has_the_gradients_of_the_samples_one_by_one():
    """state-spaces/mamba 244 and 356, transformers 46093."""
    net, lengths = hybrid(), [5, 1, 9, 3]
    ids, targets = torch.randint(0, 17, (1, 18)), torch.randint(0, 17, (1, 18))
    params = list(net.parameters())
    packed = torch.autograd.grad(net.loss(ids, targets, Segments.from_lengths([lengths])).total, params)
    parts = zip(ids.split(lengths, 1), targets.split(lengths, 1), strict=True)
    alone = torch.autograd.grad(sum(net.loss(i, t).total for i, t in parts), params)
    for a, b in zip(packed, alone, strict=True):
        same(a, b)


@pytest.mark.parametrize("left", [True, False])
@torch.no_grad()
def test_padding_on_either_side_in_every_layer_of_a_hybrid(left):
    """state-spaces/mamba 66 and 70, gated_linear_attention 3."""
    net = hybrid()
    prompts = [torch.randint(0, 17, (n,)) for n in (2, 7, 5)]
    ids, segments = packed_ids(prompts, left=left)
    logits = net(ids, segments=segments).logits
    for row, prompt in enumerate(prompts):
        same(logits[row][segments.real[row]], net(prompt[None]).logits[0])


@every
@torch.no_grad()
def test_any_padding_mask_is_turned_into_documents_inside(name):
    """flash-linear-attention 313: every mask of six tokens."""
    layer = mixer(name, "segment")
    masks = torch.tensor([[(n >> i) & 1 for i in range(6)] for n in range(64)]).bool()
    x = torch.randn(1, 6, 16, dtype=F64).expand(64, -1, -1)
    y = layer(x, segments=Segments.from_mask(masks))[0]
    for row in range(1, 64):
        same(y[row][masks[row]], layer(x[row][masks[row]][None])[0][0])


@pytest.mark.parametrize("accepted", [0, 2, 4])
@torch.no_grad()
def test_rejected_draft_tokens_are_taken_back_in_every_layer(accepted):
    """TensorRT-LLM 11533, mlx-lm 1730, llama.cpp 20080."""
    net = hybrid()
    ids, draft, later = (torch.randint(0, 17, (1, n)) for n in (6, 4, 3))
    state = net(ids, state=net.init_state(1)).state
    state = crop(net(draft, state=state, keep=4).state, 4 - accepted)
    got = net(later, state=state).logits
    same(got, net(torch.cat([ids, draft[:, :accepted], later], 1)).logits[:, -3:])


@pytest.mark.parametrize("pattern", ["m a w r", "m", "a"])
def test_speculative_decoding_of_a_hybrid_gives_its_own_text(pattern):
    net, drafter = hybrid(pattern), hybrid("r", seed=4)
    prompts, asked = [[1, 2, 3], [4, 5, 6, 7, 8]], GenerationConfig(max_new_tokens=12)
    assert speculate(net, drafter, prompts, asked).tokens == generate(net, prompts, asked)


def test_one_prefix_serves_many_continuations_of_a_hybrid():
    """vLLM 51198 and 51250, mlx-lm 980."""
    net, asked = hybrid(), GenerationConfig(max_new_tokens=6)
    start, ends = [1, 2, 3, 4, 5], [[6, 7], [8], [9, 10, 11]]
    prefix = read_prompt(net, start)
    for _ in range(2):
        want = [generate(net, [start + end], asked)[0] for end in ends]
        assert generate(net, ends, asked, prefix=prefix) == want
    with torch.no_grad():
        kept = snapshot(net(torch.tensor([start]), state=net.init_state(1)).state)
        for end in ends:
            got = net(torch.tensor([end]), state=restore(kept)).logits
            same(got, net(torch.tensor([start + end])).logits[:, len(start) :])


@torch.no_grad()
def test_the_bytes_of_a_kept_prefix_are_known_before_it_is_kept():
    """Megatron-LM 3225: constant for recurrences, by the token for attention."""
    sizes = {}
    for pattern in ("m r", "a"):
        net = hybrid(pattern)
        for t in (10, 20):
            kept = snapshot(net(torch.zeros(1, t, dtype=torch.int64), state=net.init_state(1)).state)
            sizes[pattern, t] = state_bytes(kept, used=True)
            assert sizes[pattern, t] == sum(leaf.used_nbytes() for leaf in leaves(kept)) <= state_bytes(kept)
    assert sizes["m r", 10] == sizes["m r", 20]
    assert sizes["a", 20] == 2 * sizes["a", 10]


@torch.no_grad()
def test_attention_layers_of_one_stack_differ_in_all_their_settings():
    """flash-linear-attention 153 and 1051."""
    attention = {"type": "attention", "n_heads": 4, "n_kv_heads": 2}
    net = model("m g w n", {
        "m": "mamba2", "g": {**attention, "position": {"type": "alibi"}}, "w": {**attention, "window": 3},
        "n": {**attention, "n_kv_heads": 1, "head_dim": 6, "position": {"type": "none"}},
    })
    ids = torch.randint(0, 17, (2, 9))
    state = net(ids[:, :6], state=net.init_state(2)).state
    same(net(ids[:, 6:], state=state).logits, net(ids).logits[:, 6:])


@pytest.mark.parametrize("recurrence", [name for name in EVERY if "attention" not in name])
@torch.no_grad()
def test_a_recurrent_block_put_into_an_attention_model_generates_with_one_state(recurrence):
    """state-spaces/mamba 470."""
    net = model("a x a", {"a": "attention", "x": recurrence})
    prompt = torch.randint(0, 17, (1, 6))
    (got,) = generate(net, prompt.tolist(), GenerationConfig(max_new_tokens=5))
    ids = torch.cat([prompt, torch.tensor([got])], 1)
    assert net(ids[:, :-1]).logits[0, 5:].argmax(-1).tolist() == got


def test_a_layer_that_looks_back_only_is_refused_in_a_stack_that_looks_both_ways():
    """state-spaces/mamba 99 ask for a choice; until there is one, nothing is run one way in silence."""
    from hybridtf.blocks import PreNormConfig
    from hybridtf.core import BuildContext

    for name in EVERY:
        block = PreNormConfig(mixer=config(name))
        ctx = BuildContext(d_model=16, causal=False)
        if mixer(name).causal_only:
            with pytest.raises(ConfigError, match=r"(only looks back|looks back only), and this stack is not causal"):
                block.build(ctx)
        else:
            x = torch.randn(1, 6, 16)
            changed = torch.cat([x[:, :5], -x[:, 5:]], 1)
            built = block.build(ctx)
            assert not torch.equal(built(x, {}).x[:, :5], built(changed, {}).x[:, :5])


def test_decay_fixed_by_head_as_in_lightning_attention():
    """flash-linear-attention 164: a linear attention whose heads keep 1 - 2^(-5-i) of their state."""
    layer = mixer(
        "linear_attention", n_heads=2, n_kv_heads=2, head_dim=4, v_dim=4, feature_map="identity", normaliser=False,
        decay="retnet",
    )
    x = torch.randn(1, 9, 16, dtype=F64)
    q, k, v = (proj(x).unflatten(-1, (2, 4)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    keep = 1 - 2.0 ** -torch.arange(5, 7, dtype=F64)
    ahead = torch.arange(9)[:, None] - torch.arange(9)
    weights = torch.einsum("bthk,bshk->bhts", q, k) * 0.5 * keep[:, None, None] ** ahead.clamp(min=0) * (ahead >= 0)
    same(layer(x)[0], layer.out_proj(torch.einsum("bhts,bshv->bthv", weights, v).flatten(-2)))


@pytest.mark.parametrize("kind", ["m", "a"])
def test_activations_of_the_layers_of_one_kind_are_recomputed(kind):
    """Megatron-LM 5463: same gradients, fewer saved bytes, and only those layers run twice."""
    from hybridtf.train.recompute import set_checkpointed

    net = hybrid("m a m a")
    ids = torch.randint(0, 17, (2, 16))
    runs = dict.fromkeys(HYBRID, 0)
    for key, block in zip(net.stack.layer_names, net.stack.blocks(), strict=True):
        block.mixer.register_forward_pre_hook(lambda *_, key=key: runs.__setitem__(key, runs[key] + 1))
    want = torch.autograd.grad(net.loss(ids, ids).total, list(net.parameters()))
    assert runs["m"] == runs["a"] == 2
    set_checkpointed(net, tuple(i for i, key in enumerate(net.stack.layer_names) if key == kind))
    got = torch.autograd.grad(net.loss(ids, ids).total, list(net.parameters()))
    for a, b in zip(got, want, strict=True):
        close(a, b, tol=1e-12, what="gradient with recomputation")
    assert runs[kind] == 6
    assert runs["a" if kind == "m" else "m"] == 4
