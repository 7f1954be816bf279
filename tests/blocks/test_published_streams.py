"""Wirings over several streams equal to the decoder layers of published models, which run here around our mixers:
their connections, their order of things, their weights in strict float64; outputs and gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybridtf.core import BuildContext, active
from hybridtf.interop.strict import StrictFloat64
from hybridtf.models.merges import GatedConfig, MeanConfig, SigmoidConfig

pytest.importorskip("transformers", reason="parity needs transformers")
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.hy_v4 import modeling_hy_v4 as hy
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about kernels it does not find

D, N, T = 10, 3, 7
F64 = torch.float64
PARTS = {
    "mixer": {"type": "attention", "n_heads": 2, "n_kv_heads": 1, "head_dim": 4},
    "channel_mixer": {"type": "swiglu", "d_ff": 9},
}
SIZES = SimpleNamespace(
    hc_mult=N, hidden_size=D, hc_sinkhorn_iters=4, hc_eps=1e-3, rms_norm_eps=1e-2, hc_magnitude=1.7, hc_count=N, hc_lowrank=5
)
MANIFOLD = {"type": "mhc", "n_streams": N, "sinkhorn_iters": 4, "eps": 1e-3, "norm_eps": 1e-2}
LOGITS = {"logits.proj": "fn", "logits.bias": "base", "logits.scale": "scale"}
GATED = {
    "gate.down_proj.weight": "input_mix_weight_down.weight", "gate.up_proj.weight": "input_mix_weight_up.weight",
    "take_proj.weight": "block_inject_weight.weight",
}


class Around(nn.Module):
    """One of our mixers, called and answering as theirs are."""

    def __init__(self, mixer, n_values):
        super().__init__()
        self.mixer, self.n_values = mixer, n_values

    def forward(self, hidden_states, *args, **options):
        y = self.mixer(hidden_states)[0]
        return y if self.n_values == 1 else (y, *[None] * (self.n_values - 1))


def _around(cls, block, connection, *, answer, names, **more):
    """Their decoder layer without its own mixers: the connections are theirs, the mixers and norms ours."""
    layer = cls.__new__(cls)
    nn.Module.__init__(layer)
    layer.self_attn, layer.mlp = Around(block.mixer, answer), Around(block.channel_mixer, 1)
    for site, name in (("mixer_norm", "input_layernorm"), ("channel_norm", "post_attention_layernorm")):
        if hasattr(block, site):
            setattr(layer, name, getattr(block, site))
    for name in names:
        setattr(layer, name, connection(SIZES))
    for name, value in more.items():
        setattr(layer, name, value)
    return layer.to(F64)


def _deepseek(block):
    layer, connection = deepseek.DeepseekV4DecoderLayer, deepseek.DeepseekV4HyperConnection
    return _around(layer, block, connection, answer=2, names=("attn_hc", "ffn_hc"))


def _glm(block):
    return _around(
        glm.Glm5NextTextDecoderLayer, block, glm.Glm5NextTextHyperConnection, answer=3, names=("attn_hc", "ffn_hc"),
        block_type="full_attention",
    )


def _hy(block):
    return _around(hy.HYV4DecoderLayer, block, hy.HYV4HyperConnection, answer=3, names=("attn_hc", "ffn_hc"))


def _qwen(block):
    names = ("attn_hyper_connection", "mlp_hyper_connection")
    return _around(
        qwen.Qwen4ExpTextDecoderLayer, block, qwen.Qwen4ExpTextGatedResidual, answer=2, names=names, ple=None,
        layer_type="full_attention",
    )


CASES = {
    "deepseek_v4": (_deepseek, MANIFOLD), "glm5_next": (_glm, MANIFOLD),
    "hy_v4": (_hy, {**MANIFOLD, "mixing": "none", "magnitude": 1.7}),
    "qwen4_exp": (_qwen, {
        "type": "gated_residual", "n_streams": N, "rank": 5, "norm": {"type": "rms_norm", "eps": 1e-2, "unit_offset": True},
    }),
}


def _draw(module):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.6 * torch.randn(p.shape, generator=generator, dtype=F64))


def _paired(ours, theirs, gated):
    """Parameters of a connection of ours with those of theirs that they equal."""
    own, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    return [(own[name], other[as_theirs]) for name, as_theirs in (GATED if gated else LOGITS).items()]


@pytest.mark.parametrize("name", CASES)
def test_equals_the_published_layer(name):
    make, table = CASES[name]
    block = active()["blocks"].make({**table, **PARTS}).build(BuildContext(d_model=D, param_dtype=F64)).eval()
    with StrictFloat64():
        layer = make(block).eval()
    _draw(layer)
    gated = name == "qwen4_exp"
    theirs = [part for part in layer.children() if not isinstance(part, Around) and "orm" not in type(part).__name__]
    pairs = []
    for own, other in zip((block.mixer_streams, block.channel_streams), theirs, strict=True):
        pairs += _paired(own, other, gated)
        if gated:
            weights = other.hc_norm.weight.detach().view(N, D)
            for norm, weight in zip(own.gate.norms, weights, strict=True):
                norm.weight.data.copy_(weight)
    for one, other in pairs:
        one.data.copy_(other.data)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, T, N, D, dtype=F64, generator=generator).requires_grad_()
    probe = torch.randn(2, T, N, D, dtype=F64, generator=generator)
    given = x.flatten(-2) if gated else x
    with StrictFloat64():
        want = layer(given, position_embeddings=None)
    want = want[0] if isinstance(want, tuple) else want
    want = want.unflatten(-1, (N, D)) if gated else want
    got = block(x, {}).x
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    inner = [x, *block.mixer.parameters(), *block.channel_mixer.parameters()]
    a = torch.autograd.grad((got * probe).sum(), [*inner, *(one for one, _ in pairs)], retain_graph=True)
    b = torch.autograd.grad((want * probe).sum(), [*inner, *(other for _, other in pairs)], retain_graph=True)
    for one, two in zip(a, b, strict=True):
        assert two.any()
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10)
    if gated:
        for own, other in zip((block.mixer_streams, block.channel_streams), theirs, strict=True):
            mine = torch.cat(torch.autograd.grad((got * probe).sum(), [n.weight for n in own.gate.norms], retain_graph=True))
            (wanted,) = torch.autograd.grad((want * probe).sum(), [other.hc_norm.weight], retain_graph=True)
            torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-10)


def _head(cls, **options):
    with StrictFloat64():
        head = cls(SIZES, **options).to(F64)
    _draw(head)
    return head


@pytest.mark.parametrize("name", ["deepseek_v4", "hy_v4", "glm5_next", "qwen4_exp"])
def test_equals_the_published_end(name):
    ctx = BuildContext(d_model=D, param_dtype=F64)
    x = torch.randn(2, T, N, D, dtype=F64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    given = x
    if name == "glm5_next":
        head, merge = glm.Glm5NextTextHyperHead(), MeanConfig().build(ctx, N)
    elif name == "qwen4_exp":
        head = _head(qwen.Qwen4ExpTextGatedResidual, use_combine=False)
        merge = GatedConfig(rank=5, norm={"type": "rms_norm", "eps": 1e-2, "unit_offset": True}).build(ctx, N)
        own = merge.streams
        own.down_proj.weight.data.copy_(head.input_mix_weight_down.weight)
        own.up_proj.weight.data.copy_(head.input_mix_weight_up.weight)
        for norm, weight in zip(own.norms, head.hc_norm.weight.detach().view(N, D), strict=True):
            norm.weight.data.copy_(weight)
        given = x.flatten(-2)
    else:
        head = _head(deepseek.DeepseekV4HyperHead if name == "deepseek_v4" else hy.HYV4HyperHead)
        merge = SigmoidConfig(eps=1e-3, norm_eps=1e-2).build(ctx, N)
        for own, other in (("proj", head.hc_fn), ("bias", head.hc_base), ("scale", head.hc_scale)):
            getattr(merge.streams.logits, own).data.copy_(other)
    with StrictFloat64():
        want = head(given)
    got = merge(x, {})
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    one, two = (torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want))
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)
