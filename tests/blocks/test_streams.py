"""Blocks over several residual streams: what they compute, how they start, and stacks of them."""

from __future__ import annotations

import pytest
import torch

from hybridtf.blocks import GatedResidualConfig, HyperConnectionsConfig, ManifoldConnectionsConfig
from hybridtf.core import BuildContext, ConfigError, RecipeError, Segments, init_parameters
from hybridtf.models import GenerationConfig, LanguageModelConfig, generate
from hybridtf.nn import HyperConnection, ManifoldConnection, RMSNormConfig
from tests.mixers.plain_parts import same
from tests.peers import peer

F64 = torch.float64
ATTENTION = {"mixer": {"type": "attention", "n_heads": 2}, "channel_mixer": {"type": "swiglu", "d_ff": 12}}
MAMBA = {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}, "channel_mixer": {"type": "mlp", "d_ff": 12}}
TYPES = {
    "hyper_connections": {"n_streams": 3}, "mhc": {"n_streams": 3, "sinkhorn_iters": 4},
    "gated_residual": {"n_streams": 3, "rank": 5},
}
IDS = torch.randint(0, 13, (2, 11), generator=torch.Generator().manual_seed(0))
CTX = BuildContext(d_model=8, param_dtype=F64)


def nudged(module):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=F64))
    return module


def build(blocks, pattern, **more):
    return LanguageModelConfig(vocab_size=13, d_model=8, pattern=pattern, blocks=blocks, **more).build(CTX)


def mixed(merge=None, **more):
    """Every wiring over streams in one stack, two mixers."""
    blocks = {name: {**(MAMBA if i % 2 else ATTENTION), **TYPES[name], "type": name} for i, name in enumerate(TYPES)}
    return nudged(build(blocks, " ".join([*TYPES, "mhc"]), merge=merge, **more))


# -- hyper-connections, written out --------------------------------------------------------------------------------------


def by_hand(block, branch, x, y_of):
    """One branch, token by token, from the definition: the matrix [[0 B], [A_m A_r]] of the paper."""
    part = getattr(block, "mixer_streams" if branch == "mixer" else "channel_streams")
    n = x.shape[-2]
    read, kept, taken = torch.zeros_like(x[..., 0, :]), [0.0] * n, []
    for j in range(n):
        row, b = part.mix[j].expand(*x.shape[:-2], n + 1), part.take[j].expand(x.shape[:-2])
        if part.norm is not None:
            h = x[..., j, :]
            h = h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * part.norm.weight
            row = row + part.mix_scale * torch.tanh(h @ part.mix_proj.T)
            b = b + part.take_scale * torch.tanh(h @ part.take_proj[0])
        read = read + row[..., :1] * x[..., j, :]
        kept = [old + row[..., 1 + k, None] * x[..., j, :] for k, old in enumerate(kept)]
        taken.append(b)
    y = y_of(read)
    return torch.stack([old + b[..., None] * y for old, b in zip(kept, taken, strict=True)], -2)


@pytest.mark.parametrize("dynamic", [True, False])
def test_hyper_connections_are_the_papers_algorithm(dynamic):
    block = nudged(HyperConnectionsConfig(**ATTENTION, n_streams=3, dynamic=dynamic).build(CTX))
    assert any("scale" in name for name, _ in block.named_parameters()) == dynamic
    x = torch.randn(2, 5, 3, 8, dtype=F64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    want = by_hand(block, "mixer", x, lambda h: block.mixer(block.mixer_norm(h))[0])
    want = by_hand(block, "channel", want, lambda h: block.channel_mixer(block.channel_norm(h))[0])
    got = block(x, {}).x
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    probe = torch.randn(want.shape, dtype=F64, generator=torch.Generator().manual_seed(2))
    params = [x, *block.parameters()]
    for one, two in zip(
        torch.autograd.grad((got * probe).sum(), params), torch.autograd.grad((want * probe).sum(), params), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)


def by_package(part, x, y_of):
    """One branch through the package hyper-connections, whose streams lie along the batch, stream by stream within a row."""
    n, d = x.shape[-2:]
    theirs = peer("hyper_connections.hyper_connections").HyperConnections(n, dim=d, layer_index=0)
    weights = {
        "static_alpha": part.mix, "dynamic_alpha_fn": part.mix_proj.T, "dynamic_alpha_scale": part.mix_scale,
        "static_beta": part.take, "dynamic_beta_fn": part.take_proj[0], "dynamic_beta_scale": part.take_scale,
        "norm.gamma": part.norm.weight - 1,
    }
    theirs.branch = Branch(y_of)
    given = x.movedim(-2, 1).flatten(0, 1)
    return torch.func.functional_call(theirs, weights, given).unflatten(0, (-1, n)).movedim(1, -2)


class Branch(torch.nn.Module):
    def __init__(self, y_of):
        super().__init__()
        self.y_of = y_of

    def forward(self, x):
        return self.y_of(x)


@pytest.mark.parametrize("t", [2, 13])
def test_hyper_connections_are_those_of_the_package(t):
    """Its norm is an RMS norm too, with nothing added to the size."""
    norm = {"type": "rms_norm", "eps": 1e-30}
    block = nudged(HyperConnectionsConfig(**ATTENTION, n_streams=3, norm=norm).build(CTX))
    x = torch.randn(2, t, 3, 8, dtype=F64, generator=torch.Generator().manual_seed(t)).requires_grad_()
    want = by_package(block.mixer_streams, x, lambda h: block.mixer(block.mixer_norm(h))[0])
    want = by_package(block.channel_streams, want, lambda h: block.channel_mixer(block.channel_norm(h))[0])
    same(block(x, {}).x, want, x, block)


@pytest.mark.parametrize("options", [{"type": "hyper_connections"}, {"type": "mhc"}, {"type": "mhc", "mixing": "none"}])
def test_at_the_start_streams_are_one_residual_stream(options):
    """The streams start equal and stay so; a layer adds the same to each, up to eps."""
    small = {"eps": 1e-12} if options["type"] == "mhc" else {}
    wide = build({"a": {**ATTENTION, **options, **small, "n_streams": 4}}, "a*3", merge={"type": "mean"})
    plain = build({"a": ATTENTION}, "a*3")
    plain.load_state_dict({n: p for n, p in wide.state_dict().items() if "_streams." not in n})
    x = plain.stem(IDS)[0]
    tolerance = 1e-12
    if options["type"] == "mhc":  # its made parts start small, not at nothing
        with torch.no_grad():
            for name, p in wide.named_parameters():
                if name.endswith("logits.proj"):
                    p.zero_()
        tolerance = 1e-9
    torch.testing.assert_close(wide.stack(x, {}).x, plain.stack(x, {}).x, rtol=0, atol=tolerance)


def test_each_branch_reads_another_stream_at_the_start():
    model = build({"a": {**ATTENTION, "type": "hyper_connections", "n_streams": 3}}, "a*2")
    parts = [getattr(block, f"{name}_streams") for block in model.stack.blocks() for name in ("mixer", "channel")]
    assert [part.mix[:, 0].argmax().item() for part in parts] == [0, 1, 2, 0]


def test_mixing_is_doubly_stochastic_and_bounded():
    part = ManifoldConnection(CTX, 4, sinkhorn_iters=60, magnitude=2.0, eps=1e-9, norm_eps=1e-6)
    init_parameters(part, 0)
    with torch.no_grad():
        part.logits.bias.copy_(torch.randn(24, generator=torch.Generator().manual_seed(5), dtype=F64))
        part.logits.scale.fill_(1.0)
    x = torch.randn(2, 3, 4, 8, dtype=F64, generator=torch.Generator().manual_seed(6))
    logits = part.logits(x)[2].unflatten(-1, (4, 4))
    mix = part._doubly_stochastic(logits)
    for axis in (-1, -2):
        torch.testing.assert_close(mix.sum(axis), torch.ones(2, 3, 4, dtype=F64), rtol=0, atol=1e-5)
    hard = part._doubly_stochastic(logits.float() * 1e4)
    assert bool(hard.isfinite().all())


def test_bfloat16_streams_are_rounded_once():
    """What is made of the streams runs in float32: a bfloat16 connection is near the float32 one on the same numbers."""
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    for make in (
        lambda ctx: HyperConnection(ctx, 3, 1, RMSNormConfig()),
        lambda ctx: ManifoldConnection(ctx, 3, sinkhorn_iters=5, magnitude=2.0, eps=1e-6, norm_eps=1e-6),
    ):
        low = make(BuildContext(d_model=8, param_dtype=torch.bfloat16))
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for p in low.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        wide = make(BuildContext(d_model=8))
        wide.load_state_dict(low.state_dict())
        one, two = low(x), wide(x.float())
        assert one.read.dtype == one.kept.dtype == torch.bfloat16
        assert one.taken.dtype == torch.float32
        torch.testing.assert_close(one.taken, two.taken, rtol=0, atol=1e-6)
        torch.testing.assert_close(one.kept, two.kept.bfloat16(), rtol=0, atol=0)
        torch.testing.assert_close(one.read, two.read.bfloat16(), rtol=0, atol=0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            again = wide(x.float())
        torch.testing.assert_close(again.kept, two.kept, rtol=0, atol=0)
        assert again.kept.dtype == torch.float32


# -- stacks --------------------------------------------------------------------------------------------------------------

MERGES = [None, {"type": "mean"}, {"type": "sigmoid"}, {"type": "gated", "rank": 3}]


@pytest.mark.parametrize("merge", MERGES, ids=lambda m: m["type"] if m else "default")
def test_cut_and_packed(merge):
    model = mixed(merge).eval()
    full = model(IDS).logits
    state, got = model.init_state(2), []
    for chunk in IDS.split([1, 5, 0, 2, 3], 1):
        out = model(chunk, state=state)
        state, got = out.state, [*got, out.logits]
    torch.testing.assert_close(torch.cat(got, 1), full, rtol=0, atol=1e-11)
    packed = model(IDS, segments=Segments.from_lengths([[3, 7], [11]])).logits
    torch.testing.assert_close(packed[1], full[1], rtol=0, atol=1e-11)
    torch.testing.assert_close(packed[:1, 3:10], model(IDS[:1, 3:10]).logits, rtol=0, atol=1e-11)
    torch.testing.assert_close(model(IDS, logits="last").logits, full[:, -1], rtol=0, atol=1e-11)


def test_sum_and_mean():
    model, mean = mixed(), mixed({"type": "mean"})
    x = model.stem(IDS)[0]
    torch.testing.assert_close(model.stack(x, {}).x, 3 * mean.stack(x, {}).x, rtol=1e-12, atol=0)


def test_recomputed_layers_give_the_same_gradients():
    found = []
    for layers in ((), range(4)):
        model = mixed({"type": "sigmoid"})
        model.stack.checkpointed = frozenset(layers)
        model.loss(IDS[:, :-1], IDS[:, 1:]).mean().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in found[0].items():
        assert grad.any(), name
        torch.testing.assert_close(found[1][name], grad, rtol=1e-10, atol=1e-13)


def test_generates_what_whole_calls_say():
    model = mixed().eval()
    prompts = [IDS[0, :5].tolist(), IDS[1, :3].tolist()]
    texts = generate(model, prompts, GenerationConfig(max_new_tokens=4, temperature=0.0))
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = list(prompt)
        for _ in range(4):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert list(text) == tokens[len(prompt):]


def test_a_shared_block_keeps_its_streams():
    blocks = {"a": {**ATTENTION, "type": "mhc", "n_streams": 2, "shared": True}}
    model = nudged(build(blocks, "a*3"))
    x = model.stem(IDS)[0]
    want = x.unsqueeze(-2).expand(-1, -1, 2, -1)
    for _ in range(3):
        want = model.stack.layers["shared_a"](want, {}).x
    torch.testing.assert_close(model.stack(x, {}).x, want.sum(-2), rtol=0, atol=1e-12)


def test_what_does_not_agree_is_refused():
    several = {**ATTENTION, "type": "mhc", "n_streams": 2}
    with pytest.raises(ConfigError, match=r"model\.blocks\.b: layer 1 works on one residual stream, and layer 0 .*'a'\) on 2"):
        build({"a": several, "b": ATTENTION}, "a b")
    with pytest.raises(ConfigError, match=r"layer 1 works on 3 residual streams"):
        build({"a": several, "b": {**several, "n_streams": 3}}, "a b")
    with pytest.raises(ConfigError, match=r"model\.merge: merge 'gated' is for several .* works on one residual stream"):
        build({"a": ATTENTION}, "a", merge={"type": "gated"})
    with pytest.raises(RecipeError, match="n_streams"):
        ManifoldConnectionsConfig(**ATTENTION, n_streams=1)
    with pytest.raises(RecipeError, match="mixer_norm"):
        GatedResidualConfig(**ATTENTION, mixer_norm={"type": "rms_norm"})
    with pytest.raises(RecipeError, match=r"no merge of type 'men'\. .*'mean'"):
        LanguageModelConfig(vocab_size=3, d_model=8, pattern="a", blocks={"a": several}, merge={"type": "men"})
