"""Tiny language models of each kind of state, in float64 and sharp enough that tokens differ."""

from __future__ import annotations

import torch

from hybridtf.core import BuildContext
from hybridtf.models import LanguageModel, LanguageModelConfig

BLOCKS = {
    "m": {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}},
    "a": {"mixer": {"type": "gqa", "n_heads": 4, "n_kv_heads": 2}, "channel_mixer": {"type": "swiglu", "d_ff": 12}},
    "w": {"mixer": {"type": "sliding_attention", "n_heads": 2, "window": 3}},
}
PATTERNS = ("a", "w", "m", "m a w")
"""A growing state, a ring, a fixed one, and a mix."""
PROMPTS = [[1, 2, 3], [4, 5, 1, 2, 3, 4, 5, 0], [2], [3, 3, 3, 3, 3]]


def tiny_model(
    pattern: str = "m a w", *, vocab: int = 17, seed: int = 2, sharpen: float = 2.0, **more: object
) -> LanguageModel:
    used = {name: BLOCKS[name] for name in pattern.split()}
    config = LanguageModelConfig(vocab_size=vocab, d_model=16, pattern=pattern, blocks=used, **more)  # type: ignore[arg-type]
    model = config.build(BuildContext(d_model=16, param_dtype=torch.float64, seed=seed))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(sharpen)
    return model


@torch.no_grad()
def next_log_probs(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    """(vocab) after the tokens, from a full forward without a state."""
    out = model.eval()(torch.tensor([tokens]))
    assert out.logits is not None
    return out.logits[0, -1].log_softmax(-1)
