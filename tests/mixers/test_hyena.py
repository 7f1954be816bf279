from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, ConfigError, LengthError, RecipeError, Segments, crop
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import HyenaConfig
from tests.mixers.plain_parts import given, same
from tests.peers import peer

D, L, F64 = 5, 40, torch.float64


def build(**options):
    config = HyenaConfig(**{"d_filter": 6, "shift": 0.05, **options})
    mixer = config.build(BuildContext(d_model=D, max_seq_len=L, param_dtype=F64))
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(torch.randn(p.shape, dtype=F64) * 0.2)
    return mixer


def published_filter(mixer, t: int):
    """Taps (t, d (order - 1)) as the published filter makes them: places as complex exponentials, torch's own layers."""
    config, f = mixer.config, mixer.filter
    bands = (config.d_embed - 1) // 2
    w = 2 * math.pi * torch.arange(L, dtype=F64)[:, None] / L
    z = torch.exp(-1j * torch.linspace(1e-4, bands - 1, bands, dtype=F64) * w)
    share = torch.linspace(0, 1, L, dtype=F64)[:, None]
    h = torch.cat([share, z.real, z.imag], -1)
    for weight, bias in zip(f.weights, f.biases, strict=True):
        h = torch.sin(f.freq * F.linear(h, weight, bias))
    h = F.linear(h, f.last)
    slow, fast = (math.log(config.decay_target) / part for part in config.decay)
    deltas = torch.linspace(slow, fast, h.shape[1], dtype=F64)
    return (h * (torch.exp(-share * deltas.abs()) + config.shift))[:t]


def as_published(mixer, u):
    """The published operator: a convolution of torch for the short filter, FFTs of twice the length for the long ones."""
    t, order = u.shape[1], mixer.config.order
    wide = mixer.in_proj(u).mT
    width = mixer.config.d_conv
    wide = F.conv1d(wide, mixer.conv.weight[:, None], mixer.conv.bias, padding=width - 1, groups=wide.shape[1])[..., :t]
    *x, v = wide.split(D, dim=1)
    k = published_filter(mixer, t).unflatten(1, (D, order - 1)).permute(2, 1, 0)  # [order - 1, d, t]
    for o, gate in enumerate(reversed(x[1:])):
        v = v * gate
        long = torch.fft.irfft(torch.fft.rfft(v, n=2 * t) * torch.fft.rfft(k[o], n=2 * t), n=2 * t)[..., :t]
        v = long + v * mixer.filter_bias[o][:, None]
    return mixer.out_proj((v * x[0]).mT)


@pytest.mark.parametrize(
    "options", [{}, {"order": 3, "d_embed": 7}, {"n_inner": 0, "d_conv": 2, "bias": False, "shift": 0.0, "frequency": 10.0}]
)
def test_forward_and_gradients_are_those_of_the_published_operator(options):
    mixer = build(**options)
    u = torch.randn(2, 33, D, dtype=F64, requires_grad=True)
    got, want = mixer(u)[0], as_published(mixer, u)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    weight, params = torch.randn_like(want), [u, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad((y * weight).sum(), params) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


class Projection(torch.nn.Linear):
    """In place of NeMo's projections over ranks."""

    def __init__(self, before, after, bias, **_):
        super().__init__(before, after, bias=bias)


def convolved(u, k, bias, gelu):
    """In place of the kernel that NeMo calls: a causal convolution by FFT, and what passes by."""
    n = 2 * u.shape[-1]
    return torch.fft.irfft(torch.fft.rfft(u, n=n) * torch.fft.rfft(k, n=n), n=n)[..., : u.shape[-1]] + u * bias[:, None]


def short(x, taps, bias):
    """In place of the kernel for the short convolution."""
    return F.conv1d(F.pad(x, (taps.shape[1] - 1, 0)), taps[:, None], bias, groups=len(bias))


def nemo_operator(mixer):
    """NeMo's operator, after the published one, in float64: its kernels and projections over ranks stand in."""
    at, nemo = "nemo/collections/nlp/modules/common/hyena/", "nemo__collections__nlp__modules__common__hyena__"
    build = {"build_module": lambda cls, *args, **options: cls(*args, **options)}
    megatron = {"megatron__core__transformer__identity_op": {}, "megatron__core__transformer__spec_utils": build}
    filters = peer(at + "hyena_filter.py", **megatron)
    module = peer(
        at + "hyena.py", **megatron, megatron__core__extensions__transformer_engine={}, nemo__utils__metaclasses={},
        megatron__core__transformer__transformer_config={}, nemo__collections__nlp__parts__utils_funcs={},
        nemo__collections__common__parts__utils={"activation_registry": {"identity": torch.nn.Identity}},
        causal_conv1d={"causal_conv1d_fn": short},
        **{nemo + "hyena_filter": vars(filters), nemo + "fftconv_wrapper": {"fftconv_func": convolved}},
    )
    parts = SimpleNamespace(
        in_proj=Projection, out_proj=Projection, short_filter=module.CausalDepthWiseConv1d,
        implicit_filter=type("Filter", (filters.HyenaFilter,), {"submodules": None}),
    )
    config = mixer.config
    default = torch.get_default_dtype()
    torch.set_default_dtype(F64)  # of the places and the decays
    try:
        return module.HyenaOperator(
            SimpleNamespace(hidden_size=D, init_method=None, output_layer_init_method=None), L, submodules=parts,
            short_filter_order=config.d_conv, emb_dim=config.d_embed, mlp_width=config.d_filter,
            num_inner_mlps=config.n_inner, shift=config.shift, learn_pos_emb_z=False, fftconv_type="safari",
        )
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize("options", [{}, {"d_embed": 7, "n_inner": 2, "d_conv": 2, "shift": 0.0}])
@pytest.mark.parametrize("t", [2, 33, L])
def test_it_is_the_operator_of_nemo(t, options):
    """Of order 2, the only one that it takes."""
    mixer, u = build(**options), given(2, t, D)
    theirs, taps = nemo_operator(mixer), mixer.filter
    weights = {
        "short_filter._conv_1d.weight": mixer.conv.weight[:, None], "short_filter._conv_1d.bias": mixer.conv.bias,
        "long_conv.bias": mixer.filter_bias[0], "long_conv.filter.mlp.1.freq": taps.freq[None],
        f"long_conv.filter.mlp.{2 * len(taps.weights)}.weight": taps.last,
    }
    for name, proj in (("in_proj", mixer.in_proj), ("out_proj", mixer.out_proj)):
        weights |= {f"{name}.weight": proj.weight, f"{name}.bias": proj.bias}
    for i, (weight, bias) in enumerate(zip(taps.weights, taps.biases, strict=True)):
        weights |= {f"long_conv.filter.mlp.{2 * i}.weight": weight, f"long_conv.filter.mlp.{2 * i}.bias": bias}
    with StrictFloat64():
        want, _ = torch.func.functional_call(theirs, weights, u.transpose(0, 1))
    same(mixer(u)[0], want.transpose(0, 1), u, mixer)


@torch.no_grad()
def test_longer_documents_are_refused_and_packed_ones_are_not():
    mixer = build()
    u = torch.randn(1, 2 * L, D, dtype=F64)
    with pytest.raises(LengthError, match=r"a document of 80 tokens is longer than hyena's filter \(max_seq_len = 40\)"):
        mixer(u)
    two = Segments.from_lengths([[L, L]])
    torch.testing.assert_close(mixer(u, segments=two)[0][:, L:], mixer(u[:, L:])[0], rtol=0, atol=1e-11)
    _, state = mixer(u[:, :L], state=mixer.init_state(1))
    with pytest.raises(LengthError, match="41 tokens"):
        mixer(u[:, :1], state=state)


@torch.no_grad()
def test_a_whole_state_is_cropped_and_continued():
    """Only the short convolution needs to have been told: what the long one has been given can always be cut off."""
    mixer = build()
    u = torch.randn(2, 20, D, dtype=F64)
    _, state = mixer(u[:, :12], state=mixer.init_state(2), keep=4)
    again, _ = mixer(u[:, 8:], state=crop(state, 4))
    torch.testing.assert_close(again, mixer(u)[0][:, 8:], rtol=0, atol=1e-11)


def test_bfloat16_does_not_blur_the_places():
    """Neighbouring taps of a long filter differ by less than bfloat16 resolves: it is computed in float32."""
    narrow = HyenaConfig().build(BuildContext(d_model=D, max_seq_len=4096, param_dtype=torch.bfloat16))
    wide = HyenaConfig().build(BuildContext(d_model=D, max_seq_len=4096))
    wide.load_state_dict({name: value.float() for name, value in narrow.state_dict().items()})
    taps = narrow.filter(4096)
    assert taps.dtype == torch.float32
    torch.testing.assert_close(taps, wide.filter(4096))
    assert len(taps[0].unique()) > 2000


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="odd width of at least 3"):
        build(d_embed=4)
    with pytest.raises(RecipeError, match="decay"):
        HyenaConfig(decay=(1.0, 0.0))
