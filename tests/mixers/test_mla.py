"""Latent attention against transformers' layers of DeepSeek-V2 and V3, and its two forms against each other."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, init_parameters, leaves
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import MLAConfig

D, T = 12, 9
SIZES = {"kv_lora_rank": 7, "qk_nope_head_dim": 5, "qk_rope_head_dim": 6, "v_dim": 3}
YARN = {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 2.0, "beta_slow": 1.0}
v3 = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
v2 = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")


def layer_of(module, name, **more):
    """A layer with random weights, and its table of positions."""
    config = getattr(module, f"{name}Config")(
        hidden_size=D, num_attention_heads=3, num_key_value_heads=3, num_hidden_layers=1, v_head_dim=more.pop("v_dim"), **more
    )
    config._attn_implementation = "sdpa"
    layer = getattr(module, f"{name}Attention")(config, 0).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    with StrictFloat64():
        table = getattr(module, f"{name}RotaryEmbedding")(config)(torch.zeros(1, T, D).double(), torch.arange(T)[None])
    return layer, table


def renamed(name):
    swaps = {"kv_a_proj_with_mqa": "kv_a_proj", "o_proj": "out_proj"}
    name = name.replace("_layernorm", "_norm")
    first, rest = name.split(".")
    return f"{swaps.get(first, first)}.{rest}"


def yarn_parameters():
    return {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 16, **YARN}


@pytest.mark.parametrize("case", ["v3", "v3 without a latent of queries", "v3, biases", "v3, yarn", "v3, halves", "v2"])
def test_equals_transformers(case):
    sizes = {**SIZES, "kv_lora_rank": 8, "qk_nope_head_dim": 4} if case == "v2" else SIZES  # V2's complex numbers: even strides
    more = {**sizes, "q_lora_rank": None if "without" in case else 4, "attention_bias": "biases" in case}
    position = {"type": "rope", "interleaved": "halves" not in case}
    if "yarn" in case:
        more["rope_parameters"] = yarn_parameters()
        position["scaling"] = {"type": "yarn", "original_max_len": 16, **YARN}
    if "halves" in case:
        more["rope_interleave"] = False
    layer, table = layer_of(*((v2, "DeepseekV2") if case == "v2" else (v3, "DeepseekV3")), **more)
    ours = MLAConfig(n_heads=3, q_lora_rank=more["q_lora_rank"], bias=more["attention_bias"], position=position, **sizes)
    mixer = ours.build(BuildContext(d_model=D, param_dtype=torch.float64))
    given = dict(layer.named_parameters())
    mixer.load_state_dict({renamed(n): p.detach() for n, p in given.items()})
    x = torch.randn(2, T, D, dtype=torch.float64, requires_grad=True)
    mask = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with StrictFloat64():
        want = layer(x, position_embeddings=table, attention_mask=mask)[0]
    got = mixer(x)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    weight = torch.randn_like(want)
    mine = dict(mixer.named_parameters())
    theirs = torch.autograd.grad((want * weight).sum(), [x, *given.values()])
    found = torch.autograd.grad((got * weight).sum(), [x, *(mine[renamed(n)] for n in given)])
    for name, a, b in zip(["x", *given], found, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11, msg=name)


def test_absorbed_and_made_keys_are_one_function():
    """The same tokens decoded with the plain projection, and with one that has a hook and must be called."""
    mixer = MLAConfig.tiny().build(BuildContext(d_model=D, param_dtype=torch.float64))
    x = torch.randn(2, T, D, dtype=torch.float64)
    calls = []

    def decoded(n):
        state, parts = mixer.init_state(2), []
        for start in range(0, T, n):
            y, state = mixer(x[:, start : start + n], state=state)
            parts.append(y)
        return torch.cat(parts, 1)

    plain = [decoded(n) for n in (1, 2)]
    mixer.kv_b_proj.register_forward_hook(lambda *_: calls.append(1))
    hooked = [decoded(n) for n in (1, 2)]
    assert len(calls) == T + (T + 1) // 2
    for a in (*plain, *hooked):
        torch.testing.assert_close(a, mixer(x)[0], rtol=0, atol=1e-13)


def test_decoding_makes_no_keys_of_held_tokens():
    mixer = MLAConfig.tiny().build(BuildContext(d_model=D))
    width, rank = mixer.kv_b_proj.weight.shape

    def makes_keys():
        _, state = mixer(torch.randn(1, 8, D), state=mixer.init_state(1))
        with torch.profiler.profile(record_shapes=True) as seen:
            mixer(torch.randn(1, 1, D), state=state)
        return any(e.name == "aten::linear" and e.input_shapes[:2] == [[1, 9, rank], [width, rank]] for e in seen.events())

    assert not makes_keys()
    mixer.kv_b_proj.register_forward_hook(lambda *_: None)
    assert makes_keys()


def test_held_of_a_token_are_the_latent_and_the_rotary_key_alone():
    mixer = MLAConfig(n_heads=4, **SIZES).build(BuildContext(d_model=D, param_dtype=torch.bfloat16))
    _, state = mixer(torch.randn(1, 10, D, dtype=torch.bfloat16), state=mixer.init_state(1))
    (leaf,) = leaves(state)
    assert leaf.used_nbytes() == 10 * 2 * (SIZES["kv_lora_rank"] + SIZES["qk_rope_head_dim"])


def test_a_position_that_is_told_at_each_read_is_refused():
    with pytest.raises(ConfigError, match="'xpos' is told again at each read"):
        MLAConfig(n_heads=2, position={"type": "xpos"}, **SIZES).build(BuildContext(d_model=D))


def test_a_gate_weighs_each_head():
    options = {"n_heads": 3, **SIZES}
    plain, gated = (
        MLAConfig(**options, head_gate=gate).build(BuildContext(d_model=D, param_dtype=torch.float64)) for gate in (False, True)
    )
    gated.load_state_dict({**plain.state_dict(), "gate_proj.weight": torch.randn(3, D, dtype=torch.float64)})
    x, heads = torch.randn(2, T, D, dtype=torch.float64), []
    plain.out_proj.register_forward_pre_hook(lambda _, given: heads.append(given[0].unflatten(-1, (3, -1))))
    plain(x)
    want = gated.out_proj((heads[0] * torch.sigmoid(x @ gated.gate_proj.weight.T)[..., None]).flatten(-2))
    torch.testing.assert_close(gated(x)[0], want, rtol=0, atol=1e-13)
    state, parts = gated.init_state(2), []
    for t in range(T):
        y, state = gated(x[:, t : t + 1], state=state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=0, atol=1e-13)


def test_scaled_latents_are_norms_of_other_weights():
    options = {"n_heads": 2, "q_lora_rank": 5, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_dim": 3}
    ctx = BuildContext(d_model=8, param_dtype=torch.float64)
    plain = MLAConfig(**options).build(ctx)
    scaled = MLAConfig(**options, q_latent_scale=1.5, kv_latent_scale=0.7).build(ctx)
    init_parameters(plain, 0)
    scaled.load_state_dict(plain.state_dict())
    with torch.no_grad():
        plain.q_a_norm.weight.mul_(1.5)
        plain.kv_a_norm.weight.mul_(0.7)
    x = torch.randn(2, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(scaled(x)[0], plain(x)[0], rtol=0, atol=1e-13)
    with pytest.raises(ConfigError, match="give q_lora_rank"):
        MLAConfig(n_heads=2, q_latent_scale=2.0)
