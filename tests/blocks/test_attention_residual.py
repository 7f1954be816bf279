"""Attention residuals: the mix against flash-linear-attention's, whole stacks against Inkling 2's layers, and their laws."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybridtf.core import BuildContext, ConfigError, Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.models import GenerationConfig, LanguageModelConfig, generate
from hybridtf.nn import DepthAttention, DepthOptions
from tests.peers import peer

F64 = torch.float64
D = 8
CTX = BuildContext(d_model=D, param_dtype=F64)
ATTENTION = {"mixer": {"type": "attention", "n_heads": 2}, "channel_mixer": {"type": "swiglu", "d_ff": 12}}
MAMBA = {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}}
WIRING = {"type": "attention_residual", "group_size": 2}
INKLING = {"source_norm": {"type": "rms_norm", "weight": False}, "values": "normed", "scale": D**-0.5}
IDS = torch.randint(0, 13, (2, 11), generator=torch.Generator().manual_seed(0))


def nudged(module):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.5 * torch.randn(p.shape, generator=generator, dtype=F64))
    return module


def build(blocks, pattern, **more):
    return nudged(LanguageModelConfig(vocab_size=13, d_model=D, pattern=pattern, blocks=blocks, **more).build(CTX)).eval()


def stack(**more):
    return build({"a": {**ATTENTION, **WIRING}, "m": {**MAMBA, **WIRING}}, "a m*2 a m", **more)


@pytest.mark.parametrize("n", [1, 4])
def test_the_mix_is_fla_s(n):
    naive = peer("fla/ops/attnres/naive.py").naive_attnres
    part = DepthAttention(DepthOptions(scale=0.7), CTX)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        part.query.copy_(torch.randn(D, generator=generator, dtype=F64))
        part.source_norm.weight.copy_(torch.randn(D, generator=generator, dtype=F64))
    sources = [torch.randn(2, 5, D, generator=generator, dtype=F64).requires_grad_() for _ in range(n)]
    with StrictFloat64():
        want = naive(part.query, sources, part.source_norm.weight, scale=0.7)
    got = part(sources)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    watched = [*sources, *(part.parameters() if n > 1 else ())]
    for one, two in zip(*(torch.autograd.grad(y.square().sum(), watched) for y in (got, want)), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)


class Around(nn.Module):
    """One of our mixers, called as theirs is; or nothing at all, in place of a convolution."""

    def __init__(self, mixer, pair):
        super().__init__()
        self.mixer, self.pair = mixer, pair

    def forward(self, hidden_states, **options):
        y = hidden_states if self.mixer is None else self.mixer(hidden_states)[0]
        return (y, None) if self.pair else y


def _theirs(inkling, block, i: int):
    """Their decoder layer around our mixers and norms, with our queries."""
    sizes = SimpleNamespace(hidden_size=D, _attn_implementation="eager")

    def residual(depth):
        with StrictFloat64():
            part = inkling.Inkling2BlockAttentionResidual(sizes)
        part.query = depth.query
        return part

    layer = inkling.Inkling2SlidingDecoderLayer.__new__(inkling.Inkling2SlidingDecoderLayer)
    nn.Module.__init__(layer)
    layer.is_block_boundary = i % 2 == 0
    layer.attention_input = residual(block.mixer_depth) if i else None
    layer.mlp_input = residual(block.channel_depth)
    layer.self_attn, layer.mlp = Around(block.mixer, True), Around(block.channel_mixer, False)
    layer.input_layernorm, layer.post_attention_layernorm = block.mixer_norm, block.channel_norm
    layer.post_attention_convolution = layer.post_mlp_convolution = Around(None, False)
    return layer, residual


@pytest.mark.filterwarnings("ignore")
def test_a_stack_is_inkling_2s():
    pytest.importorskip("transformers", reason="parity needs transformers")
    from transformers.models.inkling2 import modeling_inkling2 as inkling

    model = build({"a": {**ATTENTION, **WIRING, "depth": INKLING}}, "a*5", merge={"type": "attention_residual", **INKLING})
    assert not hasattr(model.stack.blocks()[0], "mixer_depth")
    x = model.stem(IDS)[0].detach().requires_grad_()
    hidden, groups = x, x.new_zeros(*x.shape[:-1], 0, D)
    with StrictFloat64():
        for i, block in enumerate(model.stack.blocks()):
            layer, residual = _theirs(inkling, block, i)
            after = layer(hidden, groups)
            if layer.is_block_boundary:
                groups = torch.cat([groups, hidden.unsqueeze(-2)], -2)
            hidden = after
        want = residual(model.stack.merge.attention)(groups, hidden)[0]
    got = model.stack(x, {}).x
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    params = [x, *model.stack.parameters()]
    for one, two in zip(*(torch.autograd.grad(y.square().sum(), params) for y in (got, want)), strict=True):
        assert two.any()
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)


def test_the_paper_by_hand():
    """Single branches, each a group of its own: every branch reads a mix of the embedding and all outputs before it."""
    alone = {"type": "attention_residual", "group_size": 1}
    model = build({"m": {**MAMBA, **alone}, "f": {"channel_mixer": ATTENTION["channel_mixer"], **alone}}, "m f m")
    x = model.stem(IDS)[0]
    given = [x]
    for block in model.stack.blocks():
        short = "mixer" if block.mixer is not None else "channel"
        part = block.mixer if block.mixer is not None else block.channel_mixer
        h = x if len(given) == 1 else getattr(block, f"{short}_depth")(given)
        given.append(part(getattr(block, f"{short}_norm")(h))[0])
    want = model.stack.merge.attention(given)
    torch.testing.assert_close(model.stack(x, {}).x, want, rtol=0, atol=1e-12)


def test_cut_packed_generated_recomputed():
    model = stack()
    full = model(IDS).logits
    state, got = model.init_state(2), []
    for chunk in IDS.split([1, 5, 0, 2, 3], 1):
        out = model(chunk, state=state)
        state, got = out.state, [*got, out.logits]
    torch.testing.assert_close(torch.cat(got, 1), full, rtol=0, atol=1e-11)
    packed = model(IDS, segments=Segments.from_lengths([[3, 7], [11]])).logits
    torch.testing.assert_close(packed[1], full[1], rtol=0, atol=1e-11)
    torch.testing.assert_close(packed[:1, 3:10], model(IDS[:1, 3:10]).logits, rtol=0, atol=1e-11)
    (text,) = generate(model, [IDS[0, :5].tolist()], GenerationConfig(max_new_tokens=3, temperature=0.0))
    tokens = IDS[0, :5].tolist()
    for _ in range(3):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert list(text) == tokens[5:]
    found = []
    for layers in ((), range(5)):
        model.zero_grad()
        model.stack.checkpointed = frozenset(layers)
        model.loss(IDS[:, :-1], IDS[:, 1:]).mean().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in found[0].items():
        assert grad.any(), name
        torch.testing.assert_close(found[1][name], grad, rtol=1e-10, atol=1e-13)


def test_groups_and_edges():
    model = stack()
    blocks = model.stack.blocks()
    assert [block.writes for block in blocks] == [("group_sum_0",), (), ("group_sum_1",), (), ("group_sum_2",)]
    assert [len(block.reads) for block in blocks] == [0, 1, 1, 2, 2]
    x = model.stem(IDS)[0]
    out = model.stack(x, {})
    assert set(out.edges) == {"group_sum_0", "group_sum_1", "group_sum_2"}
    assert torch.equal(out.edges["group_sum_0"], x)


def test_a_shared_block_begins_a_group_at_every_visit():
    once = {**WIRING, "group_size": 1}
    shared = {**ATTENTION, **once, "shared": True}
    model = build({"m": {**MAMBA, **once}, "a": shared}, "m a*3")
    x = model.stem(IDS)[0]
    out = model.stack(x, {})
    block = model.stack.layers["shared_a"]
    first = model.stack.blocks()[0]
    given, h = [x], first.mixer(first.mixer_norm(x))[0]
    for _ in range(3):
        read = block.mixer_depth([*given, h])
        given.append(h)
        h = block.mixer(block.mixer_norm(read))[0]
        h = h + block.channel_mixer(block.channel_norm(block.channel_depth([*given, h])))[0]
    torch.testing.assert_close(out.x, model.stack.merge.attention([*given, h]), rtol=0, atol=1e-12)


def test_the_stream_stays_in_float32_under_autocast():
    model = LanguageModelConfig(vocab_size=13, d_model=D, pattern="a*3", blocks={"a": {**ATTENTION, **WIRING}}).build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model.stack(model.stem(IDS)[0], {})
    assert {out.x.dtype, *(edge.dtype for edge in out.edges.values())} == {torch.float32}


def test_what_is_refused():
    with pytest.raises(ConfigError, match=r"model\.blocks\.a: the first layer has a mix less"):
        build({"a": {**ATTENTION, **WIRING, "shared": True}}, "a*3")
    with pytest.raises(ConfigError, match=r"layer 1 works on one residual stream, and layer 0 .* on the partial sum"):
        build({"a": {**ATTENTION, **WIRING}, "b": ATTENTION}, "a b")
    with pytest.raises(ConfigError, match=r"model\.merge: merge 'mean' is for several .* the partial sum"):
        stack(merge={"type": "mean"})
    with pytest.raises(ConfigError, match=r"merge 'attention_residual' is for attention residuals"):
        build({"a": ATTENTION}, "a", merge={"type": "attention_residual"})
