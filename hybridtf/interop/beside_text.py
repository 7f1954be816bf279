"""Checkpoints that hold more than what tells the next token: parts for pictures and sound, and heads for further tokens.

The text of such a checkpoint is a model of its own: its settings stand below ``text_config``, and its tensors have a prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from hybridtf.core import CheckpointError
from hybridtf.interop.defaults import UNUSED
from hybridtf.interop.settings import Settings
from hybridtf.interop.tensors import Lazy, Notes, Tensors

AROUND: Mapping[str, tuple[str, bool]] = {
    "gemma3": ("gemma3_text", True), "gemma3n": ("gemma3n_text", True), "gemma4": ("gemma4_text", True),
    "internvl": ("qwen2", True), "lfm2_vl": ("lfm2", True), "llama4": ("llama4_text", False), "llava": ("llama", False),
    "minimax_m3_vl": ("minimax_m3_vl_text", False), "mistral3": ("mistral", True), "qwen3_5": ("qwen3_5_text", False),
    "qwen3_5_moe": ("qwen3_5_moe_text", False), "qwen4_exp": ("qwen4_exp_text", False),
}
"""``model_type`` of the whole: that of its text where ``text_config`` does not say, and whether its head is the embedding."""

EITHER = frozenset({"minimax_m3_vl"})
"""Where a head is tied if the text says so or the whole does."""

OF_OTHERS = (
    "audio", "boa_", "boi_", "downsample", "eoa_", "eoi_", "image", "merged_", "mm_", "multimodal_", "projector",
    "spatial_merge", "video", "vision",
)
"""How settings begin that are of other parts than the text."""

TEXT = {
    "model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head.",
}
"""How names of the text's tensors begin beside other parts, and how they begin without."""

ASIDE: Mapping[str, tuple[str, ...]] = {
    "audio": ("audio_tower.", "embed_audio."),
    "projector": ("multi_modal_projector.", "patch_merge_mlp."),
    "vision": ("vision_tower.", "vision_model.", "visual.", "embed_vision."),
}
"""Parts that text does not pass through, and how their names begin, below ``model.`` or not."""

FURTHER = ("mtp.", "model.mtp.", "model.mtp_layers.")
"""How heads are called that tell further tokens; the scores of the next one do not ask for them."""


def text_settings(settings: Settings) -> Settings:
    """The settings of the text, where they are those of more; else the same."""
    name = str(settings.values.get("model_type"))
    if name not in AROUND or not isinstance(settings.values.get("text_config"), dict):
        return settings
    text_type, tied = AROUND[name]
    text = Settings({"model_type": text_type, **settings.take("text_config")}, f"{settings.where}: text_config")
    own, outer = text.values.get("tie_word_embeddings"), settings.take("tie_word_embeddings", None, kind=bool)
    if name in EITHER and own:
        outer = True
    if own is not None and outer is None and own != tied:  # else what stands outside counts
        raise CheckpointError(f"{text.where}: tie_word_embeddings is {own}; beside it nothing is said, and {name} takes {tied}")
    text.values["tie_word_embeddings"] = tied if outer is None else outer
    if "quantization_config" in settings:
        text.values.setdefault("quantization_config", settings.take("quantization_config"))
    others = [one for one in settings.values if one.startswith(OF_OTHERS)]
    settings.passed_over("model_type", "ignore_index", "vocab_size", *others)
    settings.says_nothing(UNUSED.get(name, {}))
    settings.refuse_the_rest()
    return text


def text_tensors(tensors: Tensors) -> tuple[Tensors, Notes]:
    """The tensors of the text as a model of text has them; what is left aside is said."""
    found: dict[str, Lazy] = {}
    aside: Counter[str] = Counter()
    for name, one in tensors.lazy.items():
        part = next((part for part, begins in ASIDE.items() if name.removeprefix("model.").startswith(begins)), None)
        if part is not None:
            aside[part] += 1
            continue
        prefix = next((prefix for prefix in TEXT if name.startswith(prefix)), "")
        found[TEXT.get(prefix, "") + name.removeprefix(prefix)] = one
    return Tensors(found, tensors.path), tuple(f"left aside: {n:,} tensors of the {part}" for part, n in aside.items())


def further_heads(settings: Settings, n_layers: int) -> tuple[str, ...]:
    """How the names of further heads begin; some stand as layers after the last."""
    told = settings.values.get("num_nextn_predict_layers", settings.values.get("num_mtp_layers"))
    return (*FURTHER, *(f"model.layers.{n_layers + i}." for i in range(told if isinstance(told, int) else 0)))


def heads_left_aside(names: Iterable[str], begins: tuple[str, ...]) -> Notes:
    """What to say of them."""
    found = sorted(name for name in names if name.startswith(begins))
    if not found:
        return ()
    if len(found) == 1:
        return (f"left aside: 1 tensor of a head that tells further tokens: {found[0]}",)
    return (f"left aside: {len(found):,} tensors of heads that tell further tokens: {found[0]} to {found[-1]}",)
