"""One pair of models to compare: transformers' config, ours, and how its tensors are called here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hybridtf.core import BuildContext
from hybridtf.models import LanguageModel, LanguageModelConfig

VOCAB, D_MODEL, D_FF = 97, 32, 44
SPECIAL = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FIRST_PLAIN_ID = 3
EPS = 3e-4
"""Of the norms: no default, and large enough to be seen."""

HALVES = ("gate_proj", "up_proj")

Rules = tuple[tuple[str, str], ...]

COMMON: Rules = (
    (r"^(model|backbone)\.(embed_tokens|embeddings)\.", "stem.embedding."),
    (r"^(model|backbone)\.(norm|norm_f|final_norm|final_layernorm)\.", "final_norm."),
    (r"^lm_head\.", "head.proj."),
    (r"^(model|backbone)\.layers\.", "stack.layers."),
    (r"\.(self_attn|mamba|temporal_block)\.", ".mixer."),
    (r"\.(mlp|feed_forward|mlp_block)\.", ".channel_mixer."),
    (r"\.o_proj\.", ".out_proj."),
    (r"\.input_layernorm\.", ".mixer_norm."),
    (r"\.(conv1d|conv_1d)\.", ".conv."),
)
PRENORM: Rules = (*COMMON, (r"\.(post_attention_layernorm|pre_ff_layernorm)\.", ".channel_norm."))
"""Names of a pre-norm stack; :data:`COMMON` are those that every family shares."""


@dataclass(frozen=True)
class Case:
    """``ours`` are the arguments of a ``LanguageModelConfig``; ``rules`` rename, in order, each to the last one's result."""

    model: str
    config: Any
    ours: dict[str, Any]
    rules: Rules = PRENORM
    unit_offset: bool = False
    experts: Literal["halves", "interleaved"] = "halves"
    """How experts are stored: (e out in) with gate before up, or (e in out) with gate and up in turn."""
    head: dict[str, Any] = field(default_factory=dict)
    split: Callable[[str, Tensor], dict[str, Tensor]] | None = None
    """One of their tensors as several, under their names, before they are renamed."""
    whole: LanguageModelConfig | None = None
    """Our config, in place of ``ours``."""

    def head_table(self) -> dict[str, Any]:
        return {"type": "lm_head", "tied": self.config.tie_word_embeddings, **self.head}

    def language_model(self) -> LanguageModelConfig:
        return self.whole or LanguageModelConfig(vocab_size=VOCAB, d_model=D_MODEL, head=self.head_table(), **self.ours)

    def build(self, config: LanguageModelConfig | None = None, dtype: torch.dtype = torch.float64) -> LanguageModel:
        """The model of this case, or of another config."""
        config = config or self.language_model()
        return config.build(BuildContext(d_model=D_MODEL, param_dtype=dtype)).eval()

    def translated(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors (weights, or their gradients) under our names and in our layout."""
        ours: dict[str, Tensor] = {}
        split = self.split or (lambda name, value: {name: value})
        for name, value in (part for item in tensors.items() for part in split(*item).items()):
            for pattern, new in self.rules:
                name = re.sub(pattern, new, name)
            ours.update(self._spread(name, value))
        return ours

    def _spread(self, name: str, value: Tensor) -> dict[str, Tensor]:
        if name.endswith("conv.weight"):
            return {name: value.squeeze(1)}
        if name.endswith("shared.input_linear.weight"):
            return {name.replace("input_linear", part): half for part, half in zip(HALVES, value.chunk(2), strict=True)}
        if ".experts." not in name:
            return {name: value}
        if self.experts == "halves":
            value = value.transpose(1, 2)
        if "gate_up_proj" not in name:
            return {name: value}
        gate, up = (value[..., ::2], value[..., 1::2]) if self.experts == "interleaved" else value.chunk(2, -1)
        return {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
