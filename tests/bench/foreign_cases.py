"""Foreign models by a function from task to model, at the top of a module so that another process can build them too."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from hybridtf.tasks import Task
from tests.bench.bench_cases import Line

SIZES: dict[str, Any] = {"hidden_size": 16, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
HEADS: dict[str, Any] = {"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama(task: Task) -> nn.Module:
    """Two layers of attention."""
    config = transformers.LlamaConfig(vocab_size=task.vocab_size, num_hidden_layers=2, **HEADS, **SIZES)
    return transformers.LlamaForCausalLM(config)


def mamba2(task: Task) -> nn.Module:
    """Two layers of Mamba-2."""
    config = transformers.Mamba2Config(
        vocab_size=task.vocab_size, num_hidden_layers=2, state_size=8, head_dim=8, num_heads=4, n_groups=1, chunk_size=16,
        **SIZES,
    )
    return transformers.Mamba2ForCausalLM(config)


def jamba(task: Task) -> nn.Module:
    """A layer of attention among three of Mamba, experts in every other layer."""
    config = transformers.JambaConfig(
        vocab_size=task.vocab_size, num_hidden_layers=4, attn_layer_period=4, attn_layer_offset=2, num_experts=2,
        mamba_d_state=4, mamba_dt_rank=4, experts_implementation="batched_mm", **HEADS, **SIZES,
    )
    return transformers.JambaForCausalLM(config)


def line(task: Task) -> nn.Module:
    """A plain module, without segments and without a state."""
    return Line(task.vocab_size, 8)
