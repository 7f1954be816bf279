"""Logits equal to transformers' for Llama, Mamba-2 and Bamba: the same weights under our names, in strict float64."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn

from hybridtf.core import BuildContext, Segments
from hybridtf.models import LanguageModel, LanguageModelConfig
from hybridtf.models.weights import assign_weights, canonical_tensors
from tests.strict_float64 import StrictFloat64

transformers = pytest.importorskip("transformers", reason="parity needs transformers")

VOCAB, D_MODEL, D_FF = 97, 32, 44
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about kernels it does not find


def redraw(model: nn.Module) -> None:
    """No parameter is left at 0 or 1, so that a forgotten term shows."""
    generator = torch.Generator().manual_seed(7)

    def draw(shape, low, high):
        return torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low

    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                value = draw(p.shape, math.log(0.2), math.log(6.0))
            elif name.endswith("dt_bias"):
                dt = draw(p.shape, math.log(0.02), math.log(0.9)).exp()
                value = dt + torch.log(-torch.expm1(-dt))
            elif "norm" in name or name.endswith(".D"):
                value = draw(p.shape, 0.55, 1.45)
            elif p.ndim >= 2:
                value = draw(p.shape, -1, 1) * (3 / p[0].numel()) ** 0.5
            else:
                value = draw(p.shape, 0.05, 0.35)
            p.copy_(value)


def reference(config) -> nn.Module:
    config._attn_implementation = "eager"
    cls = {"llama": "LlamaForCausalLM", "mamba2": "Mamba2ForCausalLM", "bamba": "BambaForCausalLM"}[config.model_type]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with StrictFloat64():
            model = getattr(transformers, cls)(config)
    finally:
        torch.set_default_dtype(default)
    model = model.to(torch.float64).eval()
    redraw(model)
    return model


def renamed(model: nn.Module, rules: list[tuple[str, str]]) -> dict[str, Tensor]:
    tensors = {}
    for name, value in model.named_parameters():
        for pattern, new in rules:
            name = re.sub(pattern, new, name)
        tensors[name] = value.detach().squeeze(1) if name.endswith("conv.weight") else value.detach()
    return tensors


GLU_RULES = [
    (r"^(model|backbone)\.(embed_tokens|embeddings)\.", "stem.embedding."),
    (r"^(model|backbone)\.(norm|norm_f|final_layernorm)\.", "final_norm."),
    (r"^lm_head\.", "head.proj."),
    (r"^(model|backbone)\.layers\.", "stack.layers."),
    (r"\.(self_attn|mamba)\.", ".mixer."),
    (r"\.o_proj\.", ".out_proj."),
    (r"\.(mlp|feed_forward)\.", ".channel_mixer."),
    (r"\.input_layernorm\.", ".mixer_norm."),
    (r"\.(post_attention_layernorm|pre_ff_layernorm)\.", ".channel_norm."),
    (r"\.conv1d\.", ".conv."),
]
MAMBA_RULES = [*GLU_RULES, (r"^(stack\.layers\.\d+)\.norm\.", r"\1.mixer_norm.")]


def llama(**more):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=D_MODEL, intermediate_size=D_FF, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, attention_bias=True, mlp_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )
    attention = {
        "type": "attention", "n_heads": 4, "n_kv_heads": 2, "head_dim": 12, "qkv_bias": True, "out_bias": True,
        "position": {"type": "rope", "theta": 1000.0},
    }
    block = {
        "mixer": attention, "channel_mixer": {"type": "swiglu", "d_ff": D_FF, "bias": True},
        "norm": {"type": "rms_norm", "eps": config.rms_norm_eps},
    }
    ours = {"pattern": "a*3", "blocks": {"a": block}, "final_norm": {"type": "rms_norm", "eps": config.rms_norm_eps}}
    return config, ours, GLU_RULES


def mamba(bias: bool = False, clamp: tuple[float, float] | None = None):
    limit = clamp or (0.0, float("inf"))
    config = transformers.Mamba2Config(
        vocab_size=VOCAB, hidden_size=D_MODEL, num_heads=8, head_dim=8, state_size=16, num_hidden_layers=3, expand=2,
        conv_kernel=4, n_groups=2, chunk_size=8, use_bias=bias, use_conv_bias=not bias, time_step_limit=limit,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )
    mixer = {"type": "mamba2", "d_state": 16, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
    mixer |= {"bias": bias, "conv_bias": not bias}
    if clamp:
        mixer["dt_limit"] = list(clamp)
    norm = {"type": "rms_norm", "eps": config.layer_norm_epsilon}
    ours = {"pattern": "m*3", "blocks": {"m": {"mixer": mixer, "norm": norm}}, "final_norm": norm}
    return config, ours, MAMBA_RULES


def bamba(bias: bool = False):
    config = transformers.BambaConfig(
        vocab_size=VOCAB, hidden_size=D_MODEL, intermediate_size=D_FF, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, attn_layer_indices=[1, 4], mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=16,
        mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=8, mamba_proj_bias=bias, mamba_conv_bias=not bias,
        attention_bias=bias, mlp_bias=bias, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )
    norm = {"type": "rms_norm", "eps": config.rms_norm_eps}
    channel = {"type": "swiglu", "d_ff": D_FF, "bias": bias}
    mamba2 = {
        "type": "mamba2", "d_state": 16, "head_dim": 8, "n_groups": 2, "bias": bias, "conv_bias": not bias,
        "eps": config.rms_norm_eps,
    }
    attention = {
        "type": "gqa", "n_heads": 4, "n_kv_heads": 2, "qkv_bias": bias, "out_bias": bias,
        "position": {"type": "rope", "theta": 10000.0, "fraction": 0.5},
    }
    ours = {
        "pattern": "m a m*2 a m", "final_norm": norm,
        "blocks": {
            "m": {"mixer": mamba2, "channel_mixer": channel, "norm": norm},
            "a": {"mixer": attention, "channel_mixer": channel, "norm": norm},
        },
    }
    return config, ours, GLU_RULES


CASES = {
    "llama": lambda: llama(), "mamba2": lambda: mamba(), "mamba2 with projection bias": lambda: mamba(bias=True),
    "mamba2 with clamped steps": lambda: mamba(clamp=(0.1, 0.4)), "bamba": lambda: bamba(),
    "bamba with biases": lambda: bamba(True),
}


@pytest.fixture(params=list(CASES))
def pair(request) -> tuple[nn.Module, LanguageModel]:
    config, ours, rules = CASES[request.param]()
    theirs = reference(config)
    tied = config.tie_word_embeddings
    full = LanguageModelConfig(vocab_size=VOCAB, d_model=D_MODEL, head={"type": "lm_head", "tied": tied}, **ours)
    model = full.build(BuildContext(d_model=D_MODEL, param_dtype=torch.float64)).eval()
    assign_weights(model, renamed(theirs, rules), where="the reference")
    return theirs, model


@torch.no_grad()
def logits_of(theirs: nn.Module, ids: Tensor) -> Tensor:
    with StrictFloat64():
        return theirs(input_ids=ids, use_cache=False).logits


@torch.no_grad()
def test_logits_equal(pair):
    theirs, model = pair
    ids = torch.randint(3, VOCAB, (2, 27), generator=torch.Generator().manual_seed(0))
    want = logits_of(theirs, ids)
    assert want.dtype == torch.float64
    torch.testing.assert_close(model(ids).logits, want, rtol=0, atol=1e-9)


@torch.no_grad()
def test_padded_packed_and_decoded_equal_their_plain_rows(pair):
    """Where the reference is wrong (left padding with biases, packing, clamped decode) its plain rows are the judge."""
    theirs, model = pair
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(3, VOCAB, (1, n), generator=generator) for n in (5, 14))
    want_a, want_b = logits_of(theirs, a)[0], logits_of(theirs, b)[0]
    packed = model(torch.cat([a, b], 1), segments=Segments.from_lengths([[5, 14]])).logits[0]
    torch.testing.assert_close(packed[:5], want_a, rtol=0, atol=1e-9)
    torch.testing.assert_close(packed[5:], want_b, rtol=0, atol=1e-9)
    left = torch.cat([torch.full((1, 9), 2), a], 1)
    mask = (torch.arange(14) >= 9) | torch.tensor([[False], [True]])
    padded = model(torch.cat([left, b]), segments=Segments.from_mask(mask)).logits
    torch.testing.assert_close(padded[0, 9:], want_a, rtol=0, atol=1e-9)
    torch.testing.assert_close(padded[1], want_b, rtol=0, atol=1e-9)
    state = model.init_state(1, max_len=14)
    steps = []
    for start, stop in ((0, 6), (6, 7), (7, 11), (11, 12), (12, 13), (13, 14)):
        out = model(b[:, start:stop], state=state)
        state = out.state
        steps.append(out.logits[0])
    torch.testing.assert_close(torch.cat(steps), want_b, rtol=0, atol=1e-9)


def test_gradients_equal():
    config, ours, rules = bamba(True)
    theirs = reference(config)
    full = LanguageModelConfig(vocab_size=VOCAB, d_model=D_MODEL, head={"type": "lm_head", "tied": False}, **ours)
    model = full.build(BuildContext(d_model=D_MODEL, param_dtype=torch.float64))
    assign_weights(model, renamed(theirs, rules), where="the reference")
    ids = torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(2))
    with StrictFloat64():
        theirs(input_ids=ids, use_cache=False).logits.square().mean().backward()
    model(ids).logits.square().mean().backward()
    grads = {}
    for name, p in theirs.named_parameters():
        for pattern, new in rules:
            name = re.sub(pattern, new, name)
        grads[name] = p.grad.squeeze(1) if name.endswith("conv.weight") else p.grad
    for name, p in canonical_tensors(model).items():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-8, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
