"""Loops in a pattern: groups of shared blocks visited several times, with what each loop starts from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hybridtf.core import BuildContext, ConfigError, RecipeError, Segments, leaves
from hybridtf.interop.strict import StrictFloat64
from hybridtf.models import GenerationConfig, LanguageModelConfig, generate

F64 = torch.float64
CTX = BuildContext(d_model=8, param_dtype=F64)
ATTENTION = {"mixer": {"type": "attention", "n_heads": 2}, "channel_mixer": {"type": "swiglu", "d_ff": 12}}
MAMBA = {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}}
IDS = torch.randint(0, 13, (2, 11), generator=torch.Generator().manual_seed(0))
NORM = {"type": "rms_norm"}


def build(blocks, pattern, **more):
    return LanguageModelConfig(vocab_size=13, d_model=8, pattern=pattern, blocks=blocks, **more).build(CTX)


def looped():
    """A layer, a group of two layers run three times, each time from what went in plus what it gave, and a layer."""
    blocks = {
        "a": ATTENTION, "keep": {"type": "remember", "edge": "start", "norm": NORM},
        "again": {"type": "inject", "edge": "start", "norm": NORM, "shared": True},
        "m": {**MAMBA, "shared": True}, "b": {**ATTENTION, "shared": True},
    }
    return build(blocks, "a keep (again m b)*3 a").eval()


def hand_loop(model, x: Tensor, **call) -> Tensor:
    layers = model.stack.layers
    x = layers["0"](x, {}, **call).x
    start = layers["1"].norm(x)
    for _ in range(3):
        x = layers["shared_again"].norm(x) + start
        x = layers["shared_m"](x, {}, **call).x
        x = layers["shared_b"](x, {}, **call).x
    return layers[str(len(model.stack.order) - 1)](x, {}, **call).x


def test_a_group_of_shared_blocks_is_a_loop():
    model = looped()
    x = model.stem(IDS)[0].detach().requires_grad_()
    segments = Segments.from_lengths([[3, 7], [11]])
    params = [x, *model.stack.parameters()]
    for call in ({}, {"segments": segments}):
        got, want = model.stack(x, {}, **call).x, hand_loop(model, x, **call)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        for one, two in zip(
            torch.autograd.grad(got.square().sum(), params), torch.autograd.grad(want.square().sum(), params), strict=True
        ):
            assert one.any()
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def test_weights_once_and_a_state_for_each_visit():
    model = looped()
    assert sum(isinstance(part, nn.Module) for part in model.stack.layers.values()) == 6  # two, keep, again, m, b
    states = model.init_state(2)["layers"]
    assert [len(leaves(state)) > 0 for state in states] == [True, False, *[False, True, True] * 3, True]
    full = model(IDS).logits
    state, got = model.init_state(2), []
    for chunk in IDS.split([4, 1, 0, 1, 5], 1):
        out = model(chunk, state=state)
        state, got = out.state, [*got, out.logits]
    torch.testing.assert_close(torch.cat(got, 1), full, rtol=0, atol=1e-11)
    packed = model(IDS, segments=Segments.from_lengths([[3, 7], [11]])).logits
    torch.testing.assert_close(packed[:1, 3:10], model(IDS[:1, 3:10]).logits, rtol=0, atol=1e-11)


def test_generation_and_recomputing():
    model = looped()
    (text,) = generate(model, [IDS[0, :5].tolist()], GenerationConfig(max_new_tokens=4, temperature=0.0))
    tokens = IDS[0, :5].tolist()
    for _ in range(4):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert list(text) == tokens[5:]
    found = []
    for layers in ((), range(len(model.stack.order))):
        model.zero_grad()
        model.stack.checkpointed = frozenset(layers)
        model.loss(IDS[:, :-1], IDS[:, 1:]).mean().backward()
        found.append([p.grad for p in model.parameters()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-13)


def test_a_universal_transformer_is_torchs_layer_again_and_again():
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, activation="relu", batch_first=True, norm_first=True, dtype=F64)
    attention = {"type": "attention", "n_heads": 2, "position": {"type": "none"}, "qkv_bias": True, "out_bias": True}
    block = {
        "mixer": attention, "channel_mixer": {"type": "mlp", "d_ff": 12, "activation": "relu", "bias": True},
        "norm": {"type": "layer_norm"}, "shared": True,
    }
    model = build({"u": block}, "u*4")
    own = {name.removeprefix("shared_u."): p for name, p in model.stack.layers.named_parameters()}
    theirs = {}
    inner = layer.self_attn
    for role, weight, bias in zip("qkv", inner.in_proj_weight.chunk(3), inner.in_proj_bias.chunk(3), strict=True):
        theirs |= {f"mixer.{role}_proj.weight": weight, f"mixer.{role}_proj.bias": bias}
    pairs = {
        "mixer.out_proj": layer.self_attn.out_proj, "channel_mixer.up_proj": layer.linear1,
        "channel_mixer.down_proj": layer.linear2, "mixer_norm": layer.norm1, "channel_norm": layer.norm2,
    }
    for name, part in pairs.items():
        theirs |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
    assert own.keys() == theirs.keys()
    for name, p in own.items():
        p.data.copy_(theirs[name])
    x = want = torch.randn(2, 6, 8, dtype=F64, generator=torch.Generator().manual_seed(1))
    mask = torch.full((6, 6), float("-inf"), dtype=F64).triu(1)
    for _ in range(4):
        want = layer(want, src_mask=mask)
    torch.testing.assert_close(model.stack(x, {}).x, want, rtol=0, atol=1e-11)


def test_what_goes_on_may_have_a_vector_added_that_is_not_trained():
    model = build({"k": {"type": "remember", "edge": "start", "offset": True}, "a": ATTENTION}, "k a")
    block = model.stack.layers["0"]
    assert not block.offset.any()
    assert not block.offset.requires_grad
    x = model.stem(IDS)[0]
    with torch.no_grad():
        block.offset.copy_(torch.arange(8.0, dtype=F64))
    out = block(x, {})
    assert out.edges["start"] is x
    torch.testing.assert_close(out.x, x + torch.arange(8.0, dtype=F64), rtol=0, atol=0)


# -- HRM-Text: two stacks of layers take turns, each with what the other gave --------------------------------------------


def _hrm(cycles_h: int, cycles_l: int):
    """Our model: the low layers see the high stream at every cycle, and the high layers the low one."""
    norm = {"type": "rms_norm", "weight": False}
    layer = {
        "mixer": {
            "type": "gated_attention", "n_heads": 2, "head_dim": 6, "position": {"type": "rope"}, "qk_norm": {"type": "none"},
        },
        "channel_mixer": {"type": "swiglu", "d_ff": 9}, "norm": norm, "shared": True,
    }
    blocks = {
        "high0": layer, "high1": layer, "low0": layer, "low1": layer,
        "keep_input": {"type": "remember", "edge": "high"},
        "keep_high": {"type": "remember", "edge": "high", "norm": norm},
        "keep_low": {"type": "remember", "edge": "low", "norm": norm},
        "add_high": {"type": "inject", "edge": "high", "norm": norm},
        "add_low": {"type": "inject", "edge": "low", "norm": norm},
    }
    low = "low0 low1" + f" (add_high low0 low1)*{cycles_l - 1}"
    turn = f"{low} keep_low add_high high0 high1"
    pattern = f"keep_input {turn} (keep_high add_low {turn})*{cycles_h - 1}"
    head = {"type": "lm_head", "tied": False}
    stem = {"type": "token_embedding", "scale": 2.3}
    return build(blocks, pattern, final_norm=norm, head=head, stem=stem)


def _copy_hrm(model, theirs) -> None:
    given = dict(theirs.named_parameters())
    tensors = {"stem.embedding.weight": given["model.embed_tokens.weight"], "head.proj.weight": given["lm_head.weight"]}
    for stack, name in (("H", "high"), ("L", "low")):
        for i in range(2):
            at, to = f"model.{stack}_module.layers.{i}.", f"stack.layers.shared_{name}{i}."
            attention = {role: given[f"{at}self_attn.{role}_proj.weight"] for role in ("q", "k", "v", "o", "gate")}
            tensors[f"{to}mixer.q_proj.weight"] = torch.cat([attention["q"], attention["gate"]])
            tensors[f"{to}mixer.out_proj.weight"] = attention["o"]
            tensors |= {f"{to}mixer.{role}_proj.weight": attention[role] for role in "kv"}
            tensors |= {f"{to}channel_mixer.{r}_proj.weight": given[f"{at}mlp.{r}_proj.weight"] for r in ("gate", "up", "down")}
    model.load_state_dict({name: tensor.detach() for name, tensor in tensors.items()})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("cycles_h", "cycles_l"), [(2, 3), (3, 2)])
def test_equals_hrm_text(cycles_h, cycles_l):
    transformers = pytest.importorskip("transformers", reason="parity needs transformers")
    config = transformers.HrmTextConfig(
        vocab_size=13, hidden_size=8, intermediate_size=9, num_hidden_layers=2, num_attention_heads=2, head_dim=6,
        H_cycles=cycles_h, L_cycles=cycles_l, L_bp_cycles=[cycles_l] * cycles_h, prefix_lm=False, embedding_scale=2.3,
        attn_implementation="eager",
    )
    with StrictFloat64():
        theirs = transformers.HrmTextForCausalLM(config).to(F64).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if not name.endswith("z_L_init"):
                p.copy_(0.4 * torch.randn(p.shape, generator=generator, dtype=F64))
    model = _hrm(cycles_h, cycles_l).eval()
    _copy_hrm(model, theirs)
    with StrictFloat64():
        want = theirs(IDS, use_cache=False).logits
    got = model(IDS).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    probe = torch.randn(want.shape, dtype=F64, generator=generator)
    (got * probe).sum().backward()
    (want * probe).sum().backward()
    mine, other = dict(model.named_parameters()), dict(theirs.named_parameters())
    for stack, name in (("H", "high"), ("L", "low")):
        for i in range(2):
            one = mine[f"stack.layers.shared_{name}{i}.channel_mixer.up_proj.weight"].grad
            two = other[f"model.{stack}_module.layers.{i}.mlp.up_proj.weight"].grad
            torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)
    one, two = mine["stem.embedding.weight"].grad, other["model.embed_tokens.weight"].grad
    torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)


def test_what_is_refused():
    blocks = {"a": ATTENTION, "b": {"type": "inject", "edge": "start"}, "k": {"type": "remember", "edge": "start"}}
    with pytest.raises(ConfigError, match=r"model\.blocks\.b: layer 1 reads the edge 'start', which no earlier component"):
        build(blocks, "a b k")
    with pytest.raises(RecipeError, match="'embedding' is the stem's"):
        build({"k": {"type": "remember", "edge": "embedding"}}, "k")
    with pytest.raises(RecipeError, match="token_ids"):
        build({"k": {"type": "inject", "edge": "token_ids"}}, "k")


def test_every_loop_may_start_from_the_embedding():
    model = build({"e": {"type": "inject", "edge": "embedding"}, "a": {**ATTENTION, "shared": True}}, "(e a)*2")
    out = model.stem(IDS)
    want = out[0]
    for _ in range(2):
        want = model.stack.layers["shared_a"](want + out[2].edges["embedding"], {}).x
    torch.testing.assert_close(model.stack(out[0], out[2].edges).x, want, rtol=0, atol=1e-12)
