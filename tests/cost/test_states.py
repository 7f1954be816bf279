"""Bytes of states: what is planned against states that really hold tokens, and published sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridtf.core import BuildContext, Growing, SequenceMixer, StateLeaf, active, leaves, state_bytes
from hybridtf.cost import STATE_KINDS, state_size
from hybridtf.cost.states import kinds_of
from hybridtf.models import LanguageModelConfig
from tests.cost.registry import F32, MIXERS, subject_of

STEPS = 3


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("prompt", [1, 13])
def test_planned_bytes_are_those_of_a_live_state(name: str, prompt: int) -> None:
    """After a prompt and after decoding, by kind; the plan is of a module on the meta device."""
    subject = subject_of(name)
    planned = subject.build_plain(param_dtype=F32, device=torch.device("meta"))
    module: SequenceMixer = subject.build_plain(param_dtype=F32)
    inputs = subject.inputs(module, 2, prompt + STEPS, dtype=F32)
    with torch.no_grad():
        state = subject.call(
            module, inputs.columns(slice(0, prompt)), state=subject.init_state(module, 2, prompt + STEPS)
        ).state
        room = state_size(planned, prompt + STEPS, 2)
        late = {kind: room[kind] for kind in STATE_KINDS}
        assert kinds_of(state) == late or _context_of(module)
        for i in range(prompt, prompt + STEPS):
            state = subject.call(module, inputs.later().columns(slice(i, i + 1)), state=state).state
    if not _context_of(module):
        assert kinds_of(state) == late
        assert room["allocated"] == state_bytes(state) == sum(late.values())
        assert room["used"] <= room["allocated"]


@pytest.mark.parametrize("name", MIXERS)
def test_planned_use_is_that_of_a_state_that_grows(name: str) -> None:
    """Without a longest length: what holds tokens, after a prompt and after every step that follows. Of pooled blocks one more
    a row is planned, at the most."""
    subject, prompt = subject_of(name), 5
    planned = subject.build_plain(param_dtype=F32, device=torch.device("meta"))
    module: SequenceMixer = subject.build_plain(param_dtype=F32)
    if _context_of(module):
        return  # it holds what it looks at, and does not grow
    inputs = subject.inputs(module, 2, prompt + STEPS, dtype=F32)
    with torch.no_grad():
        state = subject.call(module, inputs.columns(slice(0, prompt)), state=subject.init_state(module, 2, None)).state
        for i in range(prompt, prompt + STEPS + 1):
            spare = state_size(planned, i, 2)["used"] - state_bytes(state, used=True)
            assert 0 <= spare <= sum(_a_block(leaf) for leaf in leaves(state))
            if i < prompt + STEPS:
                state = subject.call(module, inputs.later().columns(slice(i, i + 1)), state=state).state


def _a_block(leaf: StateLeaf) -> int:
    """Bytes of one pooled block of every row; of other leaves none."""
    if not (isinstance(leaf, Growing) and leaf.sparse):
        return 0
    return sum(t[:, :1].numel() * t.element_size() for t in leaf.data.values())


def _context_of(module: nn.Module) -> bool:
    """It holds what it looks at, whose size no count of tokens says."""
    return any(getattr(part, "needs_context", False) for part in module.modules())


def test_kinds_are_told_apart() -> None:
    blocks = {
        "m": {"mixer": {"type": "mamba2", "d_state": 8, "head_dim": 8, "d_conv": 4}},
        "a": {"mixer": {"type": "attention", "n_heads": 4, "n_kv_heads": 2}},
        "w": {"mixer": {"type": "attention", "n_heads": 2, "n_kv_heads": 1, "window": 7}},
    }
    config = LanguageModelConfig(vocab_size=11, d_model=16, pattern="m a w", blocks=blocks)
    size = state_size(config.build(BuildContext(d_model=0, device=torch.device("meta"))), 100, 3)
    heads, channels = 32 // 8, 32 + 2 * 8
    assert size["kv"] == 3 * 100 * (2 * 2 * 4) * 4
    assert size["ring"] == 3 * 7 * (2 * 1 * 8) * 4
    assert size["recurrent"] == 3 * heads * 8 * 8 * 4
    assert size["conv"] == 3 * 3 * channels * 4
    assert size["per_token"] == 3 * (2 * 2 * 4) * 4


# Jamba-1.5 (arXiv 2408.12570), table 1: KV cache at 256K tokens in 16 bits. Layers with attention, KV heads, their width, GiB.
# For Llama-3.1-405B the paper's 252 are those of 16 KV heads; with the 8 that the model has it is 126.
KV_TABLE = {
    "mistral-7b": (32, 8, 128, 32), "mixtral-8x7b": (32, 8, 128, 32), "llama-3.1-8b": (32, 8, 128, 32),
    "mixtral-8x22b": (56, 8, 128, 56), "mistral-large-2": (88, 8, 128, 88), "llama-3.1-70b": (80, 8, 128, 80),
    "jamba-1.5-mini": (4, 8, 128, 4), "jamba-1.5-large": (9, 8, 128, 9), "llama-2-7b": (32, 32, 128, 128),
    "llama-3.1-405b, as published": (126, 16, 128, 252), "llama-3.1-405b": (126, 8, 128, 126),
}


def hybrid(n_attention: int, n_kv_heads: int, head_dim: int, others: int) -> nn.Module:
    """A stack on the meta device, narrow but for its keys and values, in bfloat16."""
    mixer = {"type": "attention", "n_heads": n_kv_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim}
    blocks = {"a": {"mixer": mixer}, "m": {"mixer": {"type": "mamba2", "d_state": 8, "head_dim": 8}}}
    pattern = f"a*{n_attention}" + (f" m*{others}" if others else "")
    config = LanguageModelConfig(
        vocab_size=8, d_model=8, pattern=pattern, blocks=blocks if others else {"a": blocks["a"]}
    )
    return config.build(BuildContext(d_model=0, device=torch.device("meta"), param_dtype=torch.bfloat16))


@pytest.mark.parametrize("name", KV_TABLE)
def test_kv_bytes_of_published_models(name: str) -> None:
    layers, heads, width, gib = KV_TABLE[name]
    others = {"jamba-1.5-mini": 28, "jamba-1.5-large": 63}.get(name, 0)
    assert state_size(hybrid(layers, heads, width, others), 1 << 18)["kv"] == gib << 30


def test_a_layer_without_attention_holds_no_keys() -> None:
    """Nemotron-Nano-9B-v2: 4 attention layers of 56, 8 KV heads of 128; 2.00 GiB at 128K tokens, where 56 would be 28."""
    assert state_size(hybrid(4, 8, 128, 27), 1 << 17)["kv"] == 2 << 30
    assert state_size(hybrid(56, 8, 128, 0), 1 << 17)["kv"] == 28 << 30


def test_the_70b_example() -> None:
    """80 layers of 64 heads of 128 in 16 bits at 4096 tokens: 10 GiB; with 8 KV heads 1.25 GiB; with one 160 MiB."""
    found = [state_size(hybrid(80, heads, 128, 0), 4096) for heads in (64, 8, 1)]
    assert [size["kv"] for size in found] == [10 << 30, 5 << 28, 160 << 20]
    assert [size["per_token"] for size in found] == [2_621_440, 327_680, 40_960]


def test_every_mixer_is_tried() -> None:
    assert len(MIXERS) == len(set(active()["mixers"].configs())) >= 70
