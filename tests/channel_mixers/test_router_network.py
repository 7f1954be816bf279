"""Routers that are networks with a state along the layers, and choices that are no expert: ZAYA's, and in general."""

from __future__ import annotations

import pytest
import torch

from hybridtf.channel_mixers import MoEConfig
from hybridtf.channel_mixers.moe.routing import route
from hybridtf.core import BuildContext, ConfigError, RecipeError, Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.models import LanguageModelConfig
from hybridtf.testing import check_channel_mixer

D, T, F64 = 8, 19, torch.float64
ZAYA = {
    "n_experts": 4, "n_null": 1, "top_k": 1, "normalize": False, "d_ff": 6, "d_router": 5, "selection_bias": "fixed",
    "router_norm": {"type": "rms_norm", "eps": 1e-5},
}
STATE = "router_state"


def build(edges=(), **more):
    mixer = MoEConfig(**{**ZAYA, **more}).build(BuildContext(d_model=D, param_dtype=F64, edges=frozenset(edges)))
    with torch.no_grad():
        for i, p in enumerate(mixer.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=F64) * 0.8)
        mixer.selection.bias.copy_(torch.tensor([0.1, -0.05] * 3, dtype=F64)[: len(mixer.selection.bias)])
    return mixer


def renamed(mixer):
    """Our tensors under transformers' names."""
    network, experts = mixer.router_network, mixer.experts
    named = {
        "gate.down_proj": network.in_proj, "gate.router_mlp.norm": network.norm, "gate.router_mlp.fc1": network.hidden[0],
        "gate.router_mlp.fc2": network.hidden[1], "gate.router_mlp.out_proj": mixer.router,
    }
    found = {f"{name}.{rest}": p for name, part in named.items() for rest, p in part.named_parameters()}
    both = torch.cat([experts.gate_proj, experts.up_proj], -1).mT
    found |= {"experts.gate_up_proj": both, "experts.down_proj": experts.down_proj.mT}
    if network.state_scale is not None:
        found["gate.router_states_scale"] = network.state_scale
    return found


def test_two_layers_equal_transformers():
    """Outputs, what routers look at, and every gradient, through the state too; some tokens take no expert."""
    module = pytest.importorskip("transformers.models.zaya.modeling_zaya")
    said = module.ZayaConfig(
        hidden_size=D, num_experts=4, moe_intermediate_size=6, router_hidden_size=5, num_hidden_layers=2,
        layer_types=["hybrid"] * 2,
    )
    said._experts_implementation = "eager"
    ours = [build(router_state="auto"), build((STATE,), router_state="auto")]
    theirs = [module.ZayaSparseMoeBlock(said, i).double() for i in range(2)]
    with torch.no_grad():
        for one, other in zip(ours, theirs, strict=True):
            assert set(renamed(one)) == {name for name, _ in other.named_parameters()}
            for name, p in other.named_parameters():
                p.copy_(renamed(one)[name])
            other.gate.balancing_biases = one.selection.bias.detach().clone()
    x = torch.randn(2, T, D, dtype=F64, requires_grad=True)
    with StrictFloat64():
        first, state = theirs[0](x, None)
        second, last = theirs[1](first + x, state)
    y, _, extras = ours[0](x)
    z, _, after = ours[1](y + x, edges=extras.edges)
    for got, want in ((y, first), (extras.edges[STATE], state), (z, second), (after.edges[STATE], last)):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    assert 0 < int((y == 0).all(-1).sum()) < 2 * T
    weight = torch.randn_like(z)
    given = [p for layer in theirs for p in layer.parameters()]
    mine = [p for layer in ours for name, p in layer.named_parameters() if "selection" not in name]
    asked = torch.autograd.grad((second * weight).sum(), [x, *given])
    found = torch.autograd.grad((z * weight).sum(), [x, *mine])
    torch.testing.assert_close(found[0], asked[0], rtol=0, atol=1e-10)
    of_theirs = dict(zip([id(p) for p in given], asked[1:], strict=True))
    with torch.no_grad():
        for p, grad in zip(mine, found[1:], strict=True):
            p.copy_(grad)  # so that gradients are renamed as weights are
    for one, other in zip(ours, theirs, strict=True):
        for name, p in other.named_parameters():
            torch.testing.assert_close(renamed(one)[name], of_theirs[id(p)], rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("more", [
    {"router_state": "first", "top_k": 2}, {"router_state": "later", "top_k": 2}, {"n_null": 2, "top_k": 3, "normalize": True},
])
def test_the_kit_holds_them(more):
    laws = ("shape", "empty", "segment", "causal", "cut", "gradients", "finite")
    check_channel_mixer(MoEConfig(**{**ZAYA, **more}), laws=laws)


def test_choices_that_are_no_expert_count_as_choices():
    """Weights are divided by the sum of all chosen; the load is that of experts and of none, without pads."""
    mixer = build(n_null=2, top_k=2, normalize=True, d_router=0, router_norm={"type": "rms_norm"}, selection_bias="balanced")
    x = torch.randn(2, T, D, dtype=F64)
    real = torch.rand(2, T) < 0.7
    mixer.train()
    y = mixer(x, segments=Segments.from_mask(real))[0]
    scores = mixer.router(mixer.router_norm(x)).softmax(-1)
    chosen = (scores + mixer.selection.bias).topk(2, -1).indices
    load = torch.bincount(chosen[real].flatten(), minlength=6)
    assert mixer.selection.load.tolist() == load.tolist()
    assert int(load[4:].sum())
    experts = mixer.experts
    for b, t in real.nonzero().tolist():
        weights, want = scores[b, t, chosen[b, t]], torch.zeros(D, dtype=F64)
        for e, w in zip(chosen[b, t].tolist(), weights / weights.sum(), strict=True):
            if e < 4:
                h = torch.nn.functional.silu(x[b, t] @ experts.gate_proj[e]) * (x[b, t] @ experts.up_proj[e])
                want = want + w * (h @ experts.down_proj[e])
        torch.testing.assert_close(y[b, t], want, rtol=0, atol=1e-12)


def test_choices_that_are_no_expert_stand_in_no_group():
    """A token may choose from one group of two, and always from them."""
    mixer = build(n_null=2, top_k=2, n_groups=2, normalize=True, d_router=0, router_norm={"type": "rms_norm"})
    x = torch.randn(1, 40, D, dtype=F64)
    wanted = mixer.router(x)[0].softmax(-1) + mixer.selection.bias
    logits, options = mixer.router(x)[0], mixer.config
    for row, chosen in zip(wanted.tolist(), route(logits, options, mixer.selection.bias).experts.tolist(), strict=True):
        group = max(range(2), key=lambda g: max(row[2 * g : 2 * g + 2]))
        allowed = sorted([2 * group, 2 * group + 1, 4, 5], key=lambda e: -row[e])
        assert chosen == allowed[:2]


def test_the_last_layer_hands_nothing_on_and_what_pads_hold_reaches_nothing():
    blocks = {"a": {"channel_mixer": {"type": "moe", **ZAYA, "router_state": "auto"}, "mixer": {"type": "gru"}}}
    model = LanguageModelConfig(vocab_size=11, d_model=D, pattern="a*3", blocks=blocks).build(
        BuildContext(d_model=D, param_dtype=F64)
    )
    parts = [block.channel_mixer for block in model.stack.blocks()]
    assert [(part.reads, part.writes) for part in parts] == [((), (STATE,)), ((STATE,), (STATE,)), ((STATE,), (STATE,))]
    later = build((STATE,), router_state="later")
    x, before = torch.randn(1, 4, D, dtype=F64), torch.randn(1, 4, 5, dtype=F64)
    mask = torch.tensor([[True, False, True, True]])
    want = later(x[mask][None], edges={STATE: before[mask][None]})[0]
    x[0, 1], before[0, 1] = torch.nan, torch.nan
    got = later(x, segments=Segments.from_mask(mask), edges={STATE: before})[0]
    torch.testing.assert_close(got[mask][None], want, rtol=0, atol=1e-12)


def test_a_shared_block_follows_a_state_and_does_not_begin_one():
    moe = {"channel_mixer": {"type": "moe", **ZAYA, "router_state": "auto"}}
    blocks = {"a": moe, "s": {**moe, "shared": True}}

    def parts(pattern):
        used = {name: block for name, block in blocks.items() if name in pattern}
        config = LanguageModelConfig(vocab_size=11, d_model=D, pattern=pattern, blocks=used)
        return [block.channel_mixer for block in config.build(BuildContext(d_model=D)).stack.blocks()]

    assert [part.reads for part in parts("a s s")] == [(), (STATE,), (STATE,)]
    assert [part.reads for part in parts("s a")] == [(), (STATE,)]
    with pytest.raises(ConfigError, match=r"blocks.s.channel_mixer.*: router_state = 'auto' begins .* of the 2 visits"):
        parts("s s")


def test_what_does_not_fit_is_refused():
    with pytest.raises(RecipeError, match="n_null choices cannot stand beside n_always"):
        MoEConfig(**{**ZAYA, "n_always": 1})
    with pytest.raises(RecipeError, match=r"router_state = .*auto.* does nothing beside d_router = 0"):
        MoEConfig(**{**ZAYA, "d_router": 0, "router_state": "auto"})
    with pytest.raises(ConfigError, match="router_state = 'later' needs edges="):
        build((STATE,), router_state="later")(torch.randn(1, 2, D, dtype=F64))
    blocks = {"a": {"channel_mixer": {"type": "moe", **ZAYA, "router_state": "later"}}}
    config = LanguageModelConfig(vocab_size=11, d_model=D, pattern="a", blocks=blocks)
    with pytest.raises(ConfigError, match="reads the edge 'router_state', which no earlier component writes"):
        config.build()
