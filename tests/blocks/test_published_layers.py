"""Wirings equal to the decoder layers of published models: the same weights, in strict float64, outputs and gradients."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from hybridtf.core import BuildContext, active
from hybridtf.interop.strict import StrictFloat64

transformers = pytest.importorskip("transformers", reason="parity needs transformers")
from transformers.models.gemma2 import modeling_gemma2 as gemma2  # noqa: E402
from transformers.models.gemma3 import modeling_gemma3 as gemma3  # noqa: E402
from transformers.models.granite import modeling_granite as granite  # noqa: E402
from transformers.models.minimax import modeling_minimax as minimax  # noqa: E402
from transformers.models.olmo2 import modeling_olmo2 as olmo2  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about kernels it does not find

D, FF, HEADS, KV, HEAD, T = 16, 20, 4, 2, 6, 7
SIZES = {
    "vocab_size": 11, "hidden_size": D, "intermediate_size": FF, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": HEAD, "rms_norm_eps": 1e-5, "attn_implementation": "eager",
}
ROPE = {"rope_type": "default", "rope_theta": 1000.0}
ATTENTION = {
    "type": "attention", "n_heads": HEADS, "n_kv_heads": KV, "head_dim": HEAD, "position": {"type": "rope", "theta": 1000.0},
}
OFFSET = {"type": "rms_norm", "eps": 1e-5, "unit_offset": True}
PLAIN = {"type": "rms_norm", "eps": 1e-5}
GELU = {"type": "glu", "d_ff": FF, "activation": "gelu_tanh"}
SILU = {"type": "glu", "d_ff": FF}
SANDWICH_NAMES = [
    (r"^input_layernorm", "mixer_norm"), (r"^post_attention_layernorm", "mixer_post_norm"),
    (r"^pre_feedforward_layernorm", "channel_norm"), (r"^post_feedforward_layernorm", "channel_post_norm"),
]
PRE_NAMES = [(r"^input_layernorm", "mixer_norm"), (r"^post_attention_layernorm", "channel_norm")]
INNER_NAMES = [(r"^self_attn\.o_proj", "mixer.out_proj"), (r"^self_attn\.", "mixer."), (r"^mlp\.", "channel_mixer.")]


def _gemma2():
    options = {"query_pre_attn_scalar": HEAD, "attn_logit_softcapping": None, "rope_parameters": ROPE}
    config = transformers.Gemma2Config(**SIZES, **options, layer_types=["full_attention"] * 2)
    block = {"type": "sandwich", "mixer": ATTENTION, "channel_mixer": GELU, "norm": OFFSET}
    return gemma2.Gemma2DecoderLayer(config, 0), block, SANDWICH_NAMES


def _gemma3():
    config = transformers.Gemma3TextConfig(**SIZES, query_pre_attn_scalar=HEAD, layer_types=["full_attention"] * 2)
    block = {"type": "sandwich", "mixer": {**ATTENTION, "qk_norm": OFFSET}, "channel_mixer": GELU, "norm": OFFSET}
    return gemma3.Gemma3DecoderLayer(config, 0), block, SANDWICH_NAMES


def _olmo2():
    layer = olmo2.Olmo2DecoderLayer(transformers.Olmo2Config(**SIZES, rope_parameters=ROPE), 0)
    layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()  # over all heads at once, which is the mixer's affair
    return layer, {"type": "output_norm", "mixer": ATTENTION, "channel_mixer": SILU, "norm": PLAIN}, SANDWICH_NAMES


def _granite():
    config = transformers.GraniteConfig(
        **SIZES, rope_parameters=ROPE, residual_multiplier=0.22, attention_multiplier=0.3
    )
    block = {"mixer": {**ATTENTION, "scale": 0.3}, "channel_mixer": SILU, "norm": PLAIN, "residual_scale": 0.22}
    return granite.GraniteDecoderLayer(config, 0), {"type": "prenorm", **block}, PRE_NAMES


def _minimax():
    config = transformers.MiniMaxConfig(
        **SIZES, num_local_experts=2, layer_types=["full_attention"] * 2, full_attn_alpha_factor=1.5,
        full_attn_beta_factor=0.7, mlp_alpha_factor=1.2, mlp_beta_factor=0.6,
    )
    layer = minimax.MiniMaxDecoderLayer(config, 0)
    layer.mlp = gemma2.Gemma2MLP(transformers.Gemma2Config(**SIZES))  # in place of experts
    block = {"type": "normed_stream", "mixer": ATTENTION, "channel_mixer": GELU, "norm": PLAIN}
    return layer, {**block, "skip_scale": (1.5, 1.2), "residual_scale": (0.7, 0.6)}, PRE_NAMES


def _rotary() -> tuple[Tensor, Tensor]:
    inverse = 1000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    angle = torch.arange(T, dtype=torch.float64)[:, None] * inverse
    angle = torch.cat([angle, angle], -1)[None]
    return angle.cos(), angle.sin()


def _draw(layer: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in layer.parameters():
            value = torch.rand(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(value + 0.5 if p.ndim == 1 else (2 * value - 1) * (3 / p.shape[1]) ** 0.5)


def _ours(name: str, rules) -> str:
    for pattern, new in [*rules, *INNER_NAMES]:
        name = re.sub(pattern, new, name)
    return name


@pytest.mark.parametrize("make", [_gemma2, _gemma3, _olmo2, _granite, _minimax], ids=lambda f: f.__name__[1:])
def test_equals_the_published_layer(make):
    with StrictFloat64():
        layer, table, rules = make()
    layer = layer.to(torch.float64).eval()
    _draw(layer)
    block = active()["blocks"].make(table).build(BuildContext(d_model=D, param_dtype=torch.float64)).eval()
    block.load_state_dict({_ours(name, rules): p for name, p in layer.named_parameters()})
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, T, D, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.randn(2, T, D, dtype=torch.float64, generator=generator)
    mask = torch.full((T, T), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    with StrictFloat64():
        want = layer(x, position_embeddings=_rotary(), attention_mask=mask)
    want = want[0] if isinstance(want, tuple) else want
    got = block(x, {}).x
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    theirs = {_ours(name, rules): p for name, p in layer.named_parameters()}
    own = dict(block.named_parameters())
    assert theirs.keys() == own.keys()
    names = sorted(own)
    a = torch.autograd.grad((got * weights).sum(), [x, *(own[n] for n in names)])
    b = torch.autograd.grad((want * weights).sum(), [x, *(theirs[n] for n in names)])
    for name, one, two in zip(["x", *names], a, b, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_torchs_encoder_layer(norm_first, causal):
    layer = nn.TransformerEncoderLayer(
        D, HEADS, FF, dropout=0.0, activation="relu", batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    _draw(layer)
    with torch.no_grad():
        layer.self_attn.in_proj_bias.uniform_(-1, 1)
    attention = {"type": "attention", "n_heads": HEADS, "position": {"type": "none"}, "qkv_bias": True, "out_bias": True}
    table = {
        "type": "prenorm" if norm_first else "postnorm", "mixer": attention,
        "channel_mixer": {"type": "mlp", "d_ff": FF, "activation": "relu", "bias": True}, "norm": {"type": "layer_norm"},
    }
    ctx = BuildContext(d_model=D, param_dtype=torch.float64, causal=causal)
    block = active()["blocks"].make(table).build(ctx)
    tensors = {}
    for role, weight, bias in zip(
        "qkv", layer.self_attn.in_proj_weight.chunk(3), layer.self_attn.in_proj_bias.chunk(3), strict=True
    ):
        tensors |= {f"mixer.{role}_proj.weight": weight, f"mixer.{role}_proj.bias": bias}
    site = "norm" if norm_first else "post_norm"
    pairs = {
        "mixer.out_proj": layer.self_attn.out_proj, "channel_mixer.up_proj": layer.linear1,
        "channel_mixer.down_proj": layer.linear2, f"mixer_{site}": layer.norm1, f"channel_{site}": layer.norm2,
    }
    for name, part in pairs.items():
        tensors |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
    block.load_state_dict(tensors)
    x = torch.randn(3, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mask = torch.full((T, T), float("-inf"), dtype=torch.float64).triu(1) if causal else None
    torch.testing.assert_close(block(x, {}).x, layer(x, src_mask=mask), rtol=0, atol=1e-11)
