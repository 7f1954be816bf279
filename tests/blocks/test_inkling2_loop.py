"""Whole models of Inkling 2 and Inkling 2 Loop against transformers', and the laws of a loop with messages."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, RecipeError, Segments, leaves
from hybridtf.interop.strict import StrictFloat64
from hybridtf.models import GenerationConfig, LanguageModelConfig, generate
from tests.inkling2 import of_model

F64 = torch.float64
D, VOCAB, GROUP = 8, 13, 2
CTX = BuildContext(d_model=D, param_dtype=F64)
IDS = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))
SIZES = {
    "hidden_size": D, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3, "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 1, "swa_head_dim": 4, "sliding_window_size": 4, "d_rel": 3, "rel_extent": 6,
    "log_scaling_n_floor": 3, "log_scaling_alpha": 0.3, "conv_kernel_size": 3, "vocab_size": VOCAB,
    "unpadded_vocab_size": VOCAB, "moe_intermediate_size": 5, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "route_scale": 1.7,
    "qk_l2_clip_threshold": 1.5, "rel_l2_clip_threshold": 0.9, "n_layers_per_attn_res_block": GROUP, "mlp_gate_softcap": 1.1,
    "mlp_up_softcap": 0.9, "final_logit_softcapping": 2.0, "eos_token_id": None,
}
DEPTH = {"source_norm": {"type": "rms_norm", "weight": False}, "values": "normed", "scale": D**-0.5}
EXPERTS = {
    "type": "moe", "n_experts": 4, "top_k": 2, "d_ff": 5, "scores": "sigmoid", "selection_bias": "fixed", "routed_scale": 1.7,
    "norm_eps": 1e-20, "gate_softcap": 1.1, "up_softcap": 0.9,
}
HEADS = {
    "d_rel": 3, "d_conv": 3, "qk_clip": 1.5, "rel_clip": 0.9, "qk_norm": "l2_clip", "value_norm": True,
    "query_sinks": True, "output_gate": True, "type": "relative_attention",
}
FULL = {
    **HEADS, "n_heads": 4, "n_kv_heads": 2, "head_dim": 3, "rel_extent": 6, "log_floor": 3, "log_alpha": 0.3,
    "conv": "dynamic", "separate_inputs": True,
}
SLIDING = {**HEADS, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "rel_extent": 4, "window": 4, "conv": "scaled"}


def block(full, **more):
    return {
        "type": "attention_residual", "mixer": FULL if full else SLIDING, "key_value_mixes": full, "group_size": GROUP,
        "depth": DEPTH, "channel_mixer": {"type": "convolved", "d_conv": 3, "scaled": True, "channel_mixer": EXPERTS}, **more,
    }


def looped(full, **more):
    made = block(full, type="looped_attention_residual", shared=True, gate_rank=3, **more)
    return {**made, "mixer": {**made["mixer"], "separate_inputs": True}}


def build(blocks, pattern):
    return LanguageModelConfig(
        vocab_size=VOCAB, d_model=D, pattern=pattern, blocks=blocks, merge={"type": "attention_residual", **DEPTH},
        stem={"type": "token_embedding", "norm": {"type": "rms_norm"}}, head={"type": "lm_head", "tied": False, "softcap": 2.0},
    ).build(CTX).eval()


def nudged(module):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.5 * torch.randn(p.shape, generator=generator, dtype=F64))
    return module


def of_kinds(kinds):
    return ["hybrid" if kind == "f" else "hybrid_sliding" for kind in kinds]


def loop_model(kinds="sfsfsfsf", passes=3):
    """Ours and how its layers are named, with two layers before and two after a loop of four."""
    inside = {f"l{i}": looped(kinds[i] == "f", **({"first": True} if i == 2 else {})) for i in range(2, 6)}
    blocks = {kind: block(kind == "f") for kind in set(kinds[:2] + kinds[6:])} | inside
    model = build(blocks, f"{kinds[0]} {kinds[1]} ({' '.join(inside)})*{passes} {kinds[6]} {kinds[7]}")
    after = 2 + 4 * passes
    return nudged(model), ("0", "1", *(f"shared_{name}" for name in inside), str(after), str(after + 1))


def theirs_of(module, prefix, kinds, **more):
    config = getattr(module, f"{prefix}TextConfig")(num_hidden_layers=len(kinds), layer_types=of_kinds(kinds), **SIZES, **more)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    torch.manual_seed(0)
    model = getattr(module, f"{prefix}ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for p in [*model.parameters(), *(b for n, b in model.named_buffers() if "correction" in n)]:
            p.copy_(torch.randn_like(p) * 0.5)
    return config, model


def check_equal(ours, theirs, config, keys):
    ours.load_state_dict(of_model(config, theirs.state_dict(), keys))
    with StrictFloat64():
        want = theirs(input_ids=IDS, use_cache=False).logits
    got = ours(IDS).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    upper = torch.randn(want.shape, generator=torch.Generator().manual_seed(5), dtype=F64)
    named = dict(theirs.named_parameters())
    grads = torch.autograd.grad((want * upper).sum(), list(named.values()))
    expected = of_model(config, dict(zip(named, grads, strict=True)), keys)
    mine = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert mine.keys() == expected.keys()
    found = torch.autograd.grad((got * upper).sum(), list(mine.values()))
    for (name, grad), want_grad in zip(zip(mine, found, strict=True), (expected[n] for n in mine), strict=True):
        assert want_grad.any(), name
        torch.testing.assert_close(grad, want_grad, rtol=1e-8, atol=1e-9, msg=name)
    state, rows = ours.init_state(2), []
    for part in IDS.split([4, *[1] * 7], 1):
        out = ours(part, state=state)
        state, rows = out.state, [*rows, out.logits]
    torch.testing.assert_close(torch.cat(rows, 1), want, rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kinds", "passes"), [("sfsfsfsf", 3), ("ffsssfff", 2), ("sfsfsfsf", 1)])
def test_a_looped_model_is_inkling_2_loops(kinds, passes):
    module = pytest.importorskip("transformers.models.inkling2_loop.modeling_inkling2_loop")
    loop = {"loop_layer_index_start": 2, "loop_layer_index_end": 6, "loop_num_passes": passes, "loop_gate_rank": 3}
    config, theirs = theirs_of(module, "Inkling2Loop", kinds, **loop)
    ours, keys = loop_model(kinds, passes)
    if passes == 1:  # gates that no pass asks for have no gradient there
        ours.load_state_dict(of_model(config, theirs.state_dict(), keys))
        with StrictFloat64():
            torch.testing.assert_close(ours(IDS).logits, theirs(input_ids=IDS).logits, rtol=0, atol=1e-10)
    else:
        check_equal(ours, theirs, config, keys)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kinds", ["sfsfs", "fssf"])
def test_a_model_is_inkling_2s(kinds):
    module = pytest.importorskip("transformers.models.inkling2.modeling_inkling2")
    config, theirs = theirs_of(module, "Inkling2", kinds)
    ours = build({kind: block(kind == "f") for kind in set(kinds)}, " ".join(kinds))
    check_equal(ours, theirs, config, tuple(map(str, range(len(kinds)))))


# -- laws ------------------------------------------------------------------------------------------------------------


def test_cut_packed_generated_recomputed():
    model, _ = loop_model()
    full = model(IDS).logits
    states = model.init_state(2)["layers"]
    assert len(states) == 2 + 3 * 4 + 2
    assert all(len(leaves(state)) == 5 for state in states)  # keys and values, and four windows
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
    for layers in ((), range(14)):
        model.zero_grad()
        model.stack.checkpointed = frozenset(layers)
        model.loss(IDS[:, :-1], IDS[:, 1:]).mean().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, grad in found[0].items():
        assert grad.any(), name
        torch.testing.assert_close(found[1][name], grad, rtol=1e-10, atol=1e-13)


def test_any_mixer_may_be_looped_and_two_loops_follow():
    """By hand: each pass starts again, and its layers mix what the pass before made."""
    mamba = {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}, "group_size": 1}
    one = {**mamba, "type": "looped_attention_residual", "shared": True, "first": True, "gate_rank": 3}
    model = build(
        {"m": {**mamba, "type": "attention_residual"}, "a": {**one, "loop": "one"}, "b": {**one, "loop": "two"}}, "m a*3 b*2",
    )
    nudged(model)
    x = model.stem(IDS)[0]
    sums, stream = [], x

    def layer(block, sums, stream, told):
        read = stream if not hasattr(block, "mixer_depth") else block.mixer_depth([*sums, stream])
        if told:
            read = block.mixer_gate(read, block.mixer_message(told))
        return [*sums, stream], block.mixer(block.mixer_norm(read))[0]

    sums, stream = layer(model.stack.layers["0"], sums, stream, [])
    for name, passes in (("a", 3), ("b", 2)):
        told = []
        for _ in range(passes):
            after, made = layer(model.stack.layers[f"shared_{name}"], sums, stream, told)
            told = [made]
        sums, stream = after, made
    want = model.stack.merge.attention([*sums, stream])
    torch.testing.assert_close(model.stack(x, {}).x, want, rtol=0, atol=1e-12)


def test_what_is_refused():
    kinds = {"s": block(False), "a": looped(False, first=True), "b": looped(False)}
    with pytest.raises(ConfigError, match=r"layer 0 reads the edge 'group_sum_0', which no earlier component writes"):
        build({"a": kinds["a"]}, "a*2")
    with pytest.raises(ConfigError, match=r"layer 2 reads the edge 'loop_start', which no earlier component writes"):
        build({"s": kinds["s"], "b": kinds["b"]}, "s*2 b*2")
    with pytest.raises(ConfigError, match=r"model\.blocks\.a: a loop begins with a group, and layer 1 is inside one"):
        build({"s": kinds["s"], "a": kinds["a"]}, "s a*2")
    with pytest.raises(ConfigError, match=r"model\.blocks\.a: the loop 'loop' has begun before"):
        build({"s": kinds["s"], "a": {**kinds["a"], "shared": False}}, "s*2 a*2 a*2")
    with pytest.raises(ConfigError, match=r"key_value_mixes is for a mixer that takes inputs of keys and values apart"):
        build({"s": {**kinds["s"], "key_value_mixes": True}}, "s")
    with pytest.raises(ConfigError, match=r"reads the edge 'key_input', which no earlier component writes"):
        LanguageModelConfig(vocab_size=VOCAB, d_model=D, pattern="a", blocks={"a": {"mixer": FULL}}).build(CTX)
    with pytest.raises(RecipeError, match="gate_softcap bounds the linear factor of silu, and activation = 'gelu'"):
        build({"s": {**kinds["s"], "channel_mixer": {**EXPERTS, "activation": "gelu"}}}, "s")
