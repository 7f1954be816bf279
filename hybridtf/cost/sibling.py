"""The all-attention sibling of a model: the same stack, with full attention where there was another mixer."""

from __future__ import annotations

from typing import Any

from hybridtf.core import ModelConfig, active

HEAD_DIM = 64


def attention_sibling(config: ModelConfig) -> ModelConfig | None:
    """The config of the sibling: its attention is that of the model's own first full attention layer, or has heads of
    :data:`HEAD_DIM` channels. None for a model whose blocks are not its own, or that is attention already."""
    blocks = getattr(config, "blocks", None)
    if not isinstance(blocks, dict):
        return None
    full = next((block.mixer for block in blocks.values() if _is_full(getattr(block, "mixer", None))), None)
    if full is None:
        d_model = int(getattr(config, "d_model", 0))
        width = next(w for w in range(min(HEAD_DIM, d_model), 0, -1) if d_model % w == 0)
        attention: Any = active()["mixers"].get("attention")
        full = attention(n_heads=d_model // width)
    new = {
        name: block if getattr(block, "mixer", None) is None or _is_full(block.mixer)
        else block.model_copy(update={"mixer": full})
        for name, block in blocks.items()
    }
    return None if new == blocks else config.model_copy(update={"blocks": new})


def _is_full(mixer: Any) -> bool:
    return mixer is not None and mixer.type_name() == "attention" and getattr(mixer, "window", None) is None
