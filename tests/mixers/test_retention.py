"""Mixers that forget, against transformers, other people's references and the formulas of their papers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from hybridtf.core import BuildContext, ConfigError
from hybridtf.mixers import LightningAttentionConfig, LinearAttentionConfig, RetNetConfig, SimpleGLAConfig
from tests.peers import peer

D, H, T = 12, 2, 11
F64 = torch.float64


def build(config, dtype=F64, **context):
    mixer = config.build(BuildContext(d_model=D, param_dtype=dtype, **context)).eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for name, param in mixer.named_parameters():
            if "norm" in name or "bias" in name:
                param.add_(0.3 * torch.randn_like(param))
    return mixer


def agree(mixer, want, rtol=1e-9, atol=1e-9, b=2, t=T):
    """Output and gradients of all parameters, of one call and of ``want(x)``."""
    x = torch.randn(b, t, D, dtype=next(mixer.parameters()).dtype, requires_grad=True)
    weight = torch.randn(x.shape, dtype=x.dtype)
    got, expected = mixer(x)[0], want(x)
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    asked = [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad((y * weight).sum(), asked) for y in (got, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol * 100, atol=atol * 100)


def turned(z, t):
    """Pair (2i, 2i+1) of ``z`` (b t h k) as one complex number, times exp(i n theta_i): theta_i = 10000^(-2i/k)."""
    pairs = torch.view_as_complex(z.unflatten(-1, (-1, 2)).contiguous())
    theta = 10000.0 ** (-torch.arange(pairs.shape[-1], dtype=F64) / pairs.shape[-1])
    angle = torch.arange(t, dtype=F64)[:, None, None] * theta
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def projected(mixer, x):
    return tuple(proj(x).unflatten(-1, (mixer.n_heads, -1)) for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj))


# -- retnet ------------------------------------------------------------------------------------------------------------


def retention_of_the_paper(mixer, x):
    """Equation 5 over all pairs: (Q K^T * D) V with D_nm = gamma^(n - m), gamma = 1 - 2^(-5 - i); scores over sqrt(d)."""
    q, k, v = projected(mixer, x)
    t = x.shape[1]
    q, k, v = (z.transpose(1, 2) for z in (turned(q, t), turned(k, t) * mixer.k_dim**-0.5, v))
    gamma = 1 - 2.0 ** (-5 - torch.arange(mixer.n_heads, dtype=F64))
    n = torch.arange(t, dtype=F64)
    decay = (gamma[:, None, None] ** (n[:, None] - n).clamp(min=0)).tril()
    return ((q @ k.mT * decay) @ v).transpose(1, 2)


def test_retnet_equals_the_paper():
    """Equation 8: out = (swish(X W_G) * GroupNorm_h(heads)) W_O."""
    mixer = build(RetNetConfig(n_heads=H, expand_v=1.5, chunk_size=4))

    def want(x):
        y, norm = retention_of_the_paper(mixer, x).flatten(2), mixer.output_norm
        normed = F.group_norm(y.flatten(0, 1), H, norm.weight, norm.bias, 1e-6).view_as(y)
        return mixer.out_proj(F.silu(mixer.gate_proj(x)) * normed)

    agree(mixer, want)


def test_retnet_equals_the_published_scaling():
    """Published code divides rows of D by the root of their sum, then rows of the scores by their absolute sum between 1 and
    5e4, and has a plain RMS norm for each head: the divisors cancel in the norm, but for its eps."""
    mixer = build(RetNetConfig(n_heads=H, expand_v=1.5, chunk_size=4, output_norm="rms_norm", eps=1e-12))

    def want(x):
        q, k, v = projected(mixer, x)
        q, k, v = (z.transpose(1, 2) for z in (turned(q, T), turned(k, T) * mixer.k_dim**-0.5, v))
        n = torch.arange(T, dtype=F64)
        mask = ((1 - 2.0 ** (-5 - torch.arange(H, dtype=F64)))[:, None, None] ** (n[:, None] - n).clamp(min=0)).tril()
        scores = q @ k.mT * (mask / mask.sum(-1, keepdim=True).sqrt())
        scores = scores / scores.detach().abs().sum(-1, keepdim=True).clamp(min=1, max=5e4)
        y = (scores @ v).transpose(1, 2)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-12)
        return mixer.out_proj(F.silu(mixer.gate_proj(x)) * y.flatten(2))

    agree(mixer, want, rtol=1e-6, atol=1e-6)


def test_retention_equals_the_reference_of_others():
    """fla's, in float32, on the heads before the norm."""
    naive = peer("fla/ops/retention/naive.py").naive_retention
    mixer = build(RetNetConfig(n_heads=H, expand_v=1.5, chunk_size=4))
    mixer.finished = lambda y, x: y.flatten(2)

    def want(x):
        q, k, v = projected(mixer, x)
        y = naive(*(z.transpose(1, 2) for z in (turned(q, T), turned(k, T), v)))
        return mixer.out_proj(y.transpose(1, 2).flatten(2))

    x = torch.randn(2, T, D, dtype=F64)
    torch.testing.assert_close(mixer(x)[0], want(x), rtol=1e-4, atol=1e-5)


def test_retnet_is_linear_attention_with_these_options():
    options = {"feature_map": "identity", "normaliser": False, "decay": "retnet", "output_gate": True, "v_dim": 9}
    options |= {"position": {"type": "rope", "interleaved": True}, "output_norm": {"type": "rms_norm", "weight": False}}
    general = build(LinearAttentionConfig(n_heads=H, chunk_size=4, **options))
    named = build(RetNetConfig(n_heads=H, expand_v=1.5, chunk_size=4, output_norm="rms_norm"))
    named.load_state_dict(general.state_dict())
    x = torch.randn(2, T, D, dtype=F64)
    torch.testing.assert_close(named(x)[0], general(x)[0], rtol=0, atol=1e-10)


# -- lightning attention -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "layers"), [(0, 1), (1, 6), (5, 6)])
@pytest.mark.parametrize("t", [1, 8, 13])
def test_lightning_attention_equals_transformers(layer, layers, t):
    """One layer of MiniMax; its single matrix holds [q, k, v] head by head."""
    config = MiniMaxConfig(
        hidden_size=D, num_attention_heads=4, head_dim=6, num_hidden_layers=layers, block_size=8,
        layer_types=["linear_attention"] * layers,
    )
    theirs = MiniMaxLightningAttention(config, layer).double()
    ours = build(LightningAttentionConfig(n_heads=4, head_dim=6, chunk_size=4), layer_idx=layer, n_layers=layers)
    # Their slopes are formed in float32.
    slopes = ours.slopes(4, torch.device("cpu")) * ours.depth_factor
    torch.testing.assert_close(theirs.slope_rate.flatten(), slopes, rtol=1e-3, atol=1e-7)
    theirs.slope_rate = slopes[:, None, None]
    theirs.query_decay, theirs.key_decay, theirs.diagonal_decay = theirs.decay_factors(theirs.slope_rate)

    def want(x):
        q, k, v = (proj.weight.unflatten(0, (4, 6)) for proj in (ours.q_proj, ours.k_proj, ours.v_proj))
        given = {
            "qkv_proj.weight": torch.cat([q, k, v], 1).flatten(0, 1), "out_proj.weight": ours.out_proj.weight,
            "output_gate.weight": ours.gate_proj.weight, "norm.weight": ours.output_norm.weight,
        }
        return torch.func.functional_call(theirs, given, (x, None, None))[0]

    # Their norm casts to float32.
    agree(ours, want, rtol=1e-5, atol=1e-5, t=t)


def test_slopes_of_the_published_model():
    """64 heads, 80 layers: exp(-2^(-(h + 1) / 8)) in the first layer, next to 1 in the last."""
    config = LightningAttentionConfig()
    assert (config.n_heads, config.head_dim) == (64, 128)
    small = LightningAttentionConfig(n_heads=64, head_dim=1)
    first, last = (small.build(BuildContext(d_model=4, layer_idx=i, n_layers=80)) for i in (0, 79))
    x = torch.zeros(1, 1, 4)
    q = torch.zeros(1, 1, 64, 1)
    want = -(2.0 ** (-(torch.arange(64) + 1) / 8))
    torch.testing.assert_close(first.written(q, q, x, None, None).log_a, want * (1 + 1e-5), rtol=1e-6, atol=0)
    torch.testing.assert_close(last.written(q, q, x, None, None).log_a, want * 1.0127e-5, rtol=1e-3, atol=0)


# -- simple gla --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["naive_recurrent_simple_gla", "naive_parallel_simple_gla"])
@pytest.mark.parametrize("options", [{}, {"d_conv": 0}, {"conv_bias": True, "d_conv": 3, "expand_k": 0.5}])
def test_simple_gla_equals_the_reference_of_others(form, options):
    """fla's loops, which run in float32, between torch's own convolution, RMS norm and gate, as in fla's layer."""
    naive = getattr(peer("fla/ops/simple_gla/naive.py"), form)
    mixer = build(SimpleGLAConfig(n_heads=H, expand_v=1.5, chunk_size=4, **options), torch.float32)

    def conv(z, part):
        padded = F.pad(z.mT, (part.d_conv - 1, 0))
        return F.silu(F.conv1d(padded, part.weight[:, None], part.bias, groups=z.shape[-1])).mT

    def want(x):
        q, k, v = mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)
        if mixer.conv is not None:
            q, k, v = conv(q, mixer.conv.q), conv(k, mixer.conv.k), conv(v, mixer.conv.v)
        q, k, v = (z.unflatten(-1, (H, -1)) for z in (q, k, v))
        y, _ = naive(q, k, v, F.logsigmoid(mixer.decay_proj(x)) / 16)
        y = F.rms_norm(y, y.shape[-1:], mixer.output_norm.weight, 1e-5)
        return mixer.out_proj(y.flatten(2) * F.silu(mixer.gate_proj(x)))

    agree(mixer, want, rtol=1e-4, atol=1e-5)


def test_gated_retnet_turns_queries_and_keys():
    """https://arxiv.org/abs/2405.05254, equation 4: gamma = sigmoid(X W)^(1 / 16), q and k turned as in RetNet."""
    mixer = build(SimpleGLAConfig(n_heads=H, d_conv=0, rotary=True, chunk_size=4))

    def want(x):
        q, k, v = projected(mixer, x)
        q, k, v = (z.transpose(1, 2) for z in (turned(q, T), turned(k, T), v))
        log_a = (torch.sigmoid(mixer.decay_proj(x)).log() / 16).mT.cumsum(-1)
        decay = (log_a[..., :, None] - log_a[..., None, :]).tril().exp().tril()
        y = ((q @ k.mT * mixer.k_dim**-0.5 * decay) @ v).transpose(1, 2)
        y = F.rms_norm(y, y.shape[-1:], mixer.output_norm.weight, 1e-5)
        return mixer.out_proj(y.flatten(2) * F.silu(mixer.gate_proj(x)))

    agree(mixer, want)


@pytest.mark.parametrize("config_cls", [RetNetConfig, LightningAttentionConfig, SimpleGLAConfig])
@torch.no_grad()
def test_float16_sums_do_not_overflow(config_cls):
    """Read-outs of ten thousands are normalised before they are rounded."""
    options = {"head_dim": 4} if config_cls is LightningAttentionConfig else {}
    mixer = config_cls(n_heads=H, **options).build(BuildContext(d_model=D, param_dtype=torch.float16)).eval()
    for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj):
        proj.weight.mul_(24.0)
    x = torch.randn(1, 256, D, dtype=torch.float16)
    y = mixer(x)[0]
    wide = config_cls(n_heads=H, **options).build(BuildContext(d_model=D, param_dtype=F64)).eval()
    wide.load_state_dict(mixer.state_dict())
    want = wide(x.double())[0]
    assert float((y.double() - want).norm() / want.norm()) < 2e-2


def test_widths_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="d_model = 12 does not divide into n_heads = 5 heads"):
        build(RetNetConfig(n_heads=5))
    with pytest.raises(ConfigError, match=r"expand_v \* d_model = 13.2 does not divide into n_heads = 2"):
        build(SimpleGLAConfig(n_heads=2, expand_v=1.1))
    with pytest.raises(ConfigError, match="rope rotates pairs: head_dim 3"):
        build(RetNetConfig(n_heads=4))
