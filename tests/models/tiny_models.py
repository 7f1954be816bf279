"""Tiny language models of each kind of state, in float64 and sharp enough that tokens differ; and any model in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtf.core import BuildContext, Segments, State
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


def in_pieces(
    model: LanguageModel, ids: Tensor, sizes: Sequence[int], state: State, segments: Segments | None = None, keep: int = 0
) -> tuple[Tensor, State]:
    """Scores of (b t) in calls of these lengths, the state carried; and the state after them."""
    at, parts = 0, []
    for size in sizes:
        part = None if segments is None else segments.narrow(at, at + size)
        out = model(ids[:, at : at + size], segments=part, state=state, keep=keep)
        state, at = out.state, at + size
        parts.append(out.logits)
    return torch.cat(parts, 1), state


def assert_can_be_cut(model: LanguageModel, ids: Tensor, sizes: Sequence[int], *, atol: float = 1e-12) -> None:
    """Pieces of these lengths give what one call gives."""
    got, _ = in_pieces(model, ids, sizes, model.init_state(len(ids)))
    torch.testing.assert_close(got, model(ids).logits, rtol=0, atol=atol)
