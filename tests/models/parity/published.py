"""The recipes of ``recipes/published`` made narrow and shallow, beside transformers' models of the same sizes.

All that is no size stays what the recipe says, and transformers' default config or the published settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import Tensor

from hybridtf.models import LanguageModelConfig
from hybridtf.recipe import apply_overrides, parse_recipe
from hybridtf.recipe.load import read_table
from tests.models.parity.case import COMMON, D_FF, D_MODEL, PRENORM, SPECIAL, VOCAB, Case, Rules
from tests.models.parity.gemma import GRIFFIN_RULES
from tests.models.parity.hybrids import ONE_BRANCH_RULES, RULES
from tests.models.parity.scans import MAMBA_RULES

Split = Callable[[str, Tensor], dict[str, Tensor]]

FAMILY = {
    "jamba": "Jamba", "zamba2": "Zamba2", "falcon_h1": "FalconH1", "nemotron_h_8b": "NemotronH", "nemotron_3_nano": "NemotronH",
    "granite_4_h_tiny": "GraniteMoeHybrid", "qwen3_next": "Qwen3Next", "kimi_linear": "KimiLinear",
    "minimax_text_01": "MiniMax", "bamba": "Bamba", "olmo_hybrid": "OlmoHybrid", "recurrent_gemma": "RecurrentGemma",
    "lfm2": "Lfm2", "mamba2": "Mamba2", "llama": "Llama",
}
"""How transformers calls the family of each recipe."""

HEADS = {"hidden_size": D_MODEL, "num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8}


def recipe(name: str, changes: dict[str, Any]) -> LanguageModelConfig:
    """``published/NAME`` with other sizes; ``changes`` by the path below ``model``."""
    table, path = read_table(f"published/{name}")
    sizes = {"vocab_size": VOCAB, "d_model": D_MODEL, **changes}
    words = [f"model.{key}={'true' if value is True else value}" for key, value in sizes.items()]
    model = parse_recipe(apply_overrides(table, words), path).model
    assert isinstance(model, LanguageModelConfig)
    return model


def _case(
    name: str, theirs: dict[str, Any], ours: dict[str, Any], rules: Rules, split: Split | None = None, **more: Any
) -> Case:
    family = FAMILY[name]
    config = getattr(transformers, f"{family}Config")(**theirs, **SPECIAL)
    return Case(f"{family}ForCausalLM", config, {}, rules, split=split, whole=recipe(name, ours), **more)


def _in(block: str, part: str, **options: Any) -> dict[str, Any]:
    return {f"blocks.{block}.{part}.{key}": value for key, value in options.items()}


def _mixer(block: str, **options: Any) -> dict[str, Any]:
    return _in(block, "mixer", **options)


def _channel(block: str, **options: Any) -> dict[str, Any]:
    return _in(block, "channel_mixer", **options)


GROUPED = {"n_heads": 4, "n_kv_heads": 2}
SSD = {"n_heads": 8, "head_dim": 8, "d_state": 16, "chunk_size": 8}


def llama() -> Case:
    theirs = {**HEADS, "num_key_value_heads": 4, "intermediate_size": D_FF, "num_hidden_layers": 2, "head_dim": 8}
    return _case("llama", theirs, {"pattern": "a*2", **_mixer("a", n_heads=4), **_channel("a", d_ff=D_FF)}, PRENORM)


def jamba() -> Case:
    theirs = {**HEADS, "intermediate_size": D_FF, "num_hidden_layers": 8, "num_experts": 5, "mamba_dt_rank": 5}
    ours = {"pattern": "(m e m e a e m e)*", "n_layers": 8, **_mixer("m", dt_rank=5), **_mixer("e", dt_rank=5)}
    ours |= {**_mixer("a", **GROUPED), **_channel("m", d_ff=D_FF), **_channel("e", d_ff=D_FF, n_experts=5)}
    return _case("jamba", theirs, {**ours, **_channel("a", d_ff=D_FF)}, RULES)


def falcon_h1() -> Case:
    theirs = {**HEADS, **MAMBA2, "mamba_d_ssm": 64, "intermediate_size": D_FF, "num_hidden_layers": 2}
    small = {"type": "mamba2", "norm": False, **SSD}, {"type": "gqa", **GROUPED, "position": {"type": "rope"}}
    tables = ", ".join(_toml(branch) for branch in small)
    ours = {"pattern": "h*2", **_channel("h", d_ff=D_FF), **_mixer("h", branches=f"[{tables}]")}
    rules = (
        (r"\.mamba\.", ".mixer.branch0."), (r"\.self_attn\.", ".mixer.branch1."),
        (r"\.branch0\.conv1d\.", ".branch0.conv."), *PRENORM,
    )
    return _case("falcon_h1", theirs, ours, rules)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(v)}" for key, v in value.items()) + " }"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


NEMOTRON = {
    **HEADS, "head_dim": 8, "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8,
}
ONE_BRANCH = {**_mixer("m", **SSD, n_groups=2), **_mixer("a", **GROUPED, head_dim=8)}


def nemotron_h_8b() -> Case:
    theirs = {**NEMOTRON, "intermediate_size": 40, "layers_block_type": ["mamba", "mlp", "attention", "mlp"]}
    return _case("nemotron_h_8b", theirs, {"pattern": "m f a f", **ONE_BRANCH, **_channel("f", d_ff=40)}, ONE_BRANCH_RULES)


def nemotron_3_nano() -> Case:
    theirs = {
        **NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "moe"], "n_routed_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 2.5,
    }
    experts = _channel("e", n_experts=6, top_k=2, d_ff=20, d_ff_shared=28)
    return _case("nemotron_3_nano", theirs, {"pattern": "m e a e", **ONE_BRANCH, **experts}, ONE_BRANCH_RULES)


def granite_4_h_tiny() -> Case:
    theirs = {
        **HEADS, **MAMBA2, "intermediate_size": 20, "shared_intermediate_size": 24, "num_local_experts": 5,
        "num_experts_per_tok": 2, "num_hidden_layers": 3, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "position_embedding_type": "nope",
        "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0,
    }
    experts = {"n_experts": 5, "top_k": 2, "d_ff": 20, "d_ff_shared": 24}
    ours = {"pattern": "m a m", **_mixer("m", **SSD), **_mixer("a", **GROUPED)}
    return _case("granite_4_h_tiny", theirs, {**ours, **_channel("m", **experts), **_channel("a", **experts)}, RULES)


def bamba() -> Case:
    theirs = {
        **HEADS, **MAMBA2, "intermediate_size": D_FF, "num_hidden_layers": 3, "attn_layer_indices": [1],
        "partial_rotary_factor": 0.5,
    }
    ours = {"pattern": "m a m", **_mixer("m", **SSD), **_mixer("a", **GROUPED)}
    return _case("bamba", theirs, {**ours, **_channel("m", d_ff=D_FF), **_channel("a", d_ff=D_FF)}, RULES)


def mamba2() -> Case:
    theirs = {
        "hidden_size": D_MODEL, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2,
        "chunk_size": 8,
    }
    return _case("mamba2", theirs, {"pattern": "m*2", **_mixer("m", **SSD, n_groups=2)}, MAMBA_RULES)


def recurrent_gemma() -> Case:
    theirs = {
        **HEADS, "num_key_value_heads": 1, "head_dim": 8, "lru_width": None, "intermediate_size": 2 * D_FF,
        "num_hidden_layers": 3, "attention_window_size": 7,
    }
    ours = {"pattern": "r*2 a", "stem.scale": 5.65625, **_mixer("r", n_heads=4)}  # sqrt(32) in bfloat16
    ours |= {**_mixer("a", n_heads=4, window=7), **_channel("r", d_ff=D_FF), **_channel("a", d_ff=D_FF)}
    return _case("recurrent_gemma", theirs, ours, GRIFFIN_RULES, unit_offset=True)


def lfm2() -> Case:
    theirs = {
        **HEADS, "intermediate_size": D_FF, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
    }
    ours = {"pattern": "c a c", **_mixer("a", **GROUPED), **_channel("a", d_ff=D_FF), **_channel("c", d_ff=D_FF)}
    rules = (
        (r"^model\.embedding_norm\.", "final_norm."), (r"\.conv\.conv\.", ".mixer.conv."),
        (r"\.conv\.(in|out)_", r".mixer.\1_"), *COMMON, (r"\.operator_norm\.", ".mixer_norm."),
        (r"\.ffn_norm\.", ".channel_norm."), (r"\.([qk])_layernorm\.", r".\1_norm."), (r"\.w1\.", ".gate_proj."),
        (r"\.w3\.", ".up_proj."), (r"\.w2\.", ".down_proj."),
    )
    return _case("lfm2", theirs, ours, rules)


def _convolved(name: str, value: Tensor, widths: list[int]) -> dict[str, Tensor]:
    """One convolution over queries, keys and values as three."""
    parts = zip("qkv", value.squeeze(1).split(widths), strict=True)
    return {name.replace("conv1d.weight", f"conv.{role}.weight"): part for role, part in parts}


def qwen3_next() -> Case:
    keys, values, k, v = 2, 4, 8, 6
    theirs = {
        **HEADS, "head_dim": 16, "num_hidden_layers": 4, "linear_num_key_heads": keys, "linear_num_value_heads": values,
        "linear_key_head_dim": k, "linear_value_head_dim": v, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24,
    }
    experts = {"n_experts": 6, "top_k": 2, "d_ff": 20, "d_ff_shared": 24}
    ours = {"pattern": "d*3 a", **_mixer("d", n_heads=keys, n_v_heads=values, head_dim=k, v_dim=v)}
    ours |= {**_mixer("a", **GROUPED, head_dim=16), **_channel("d", **experts), **_channel("a", **experts)}

    def split(name: str, value: Tensor) -> dict[str, Tensor]:
        """What is stored head by head, as one matrix a role; of attention, all queries before all gates."""
        many = values // keys
        roles = {
            "in_proj_qkvz": {"q": k, "k": k, "v": many * v, "gate": many * v}, "in_proj_ba": {"b": many, "a": many},
        }
        found = next((key for key in roles if key in name), None)
        if found is not None:
            sizes = roles[found]
            parts = value.view(keys, -1, D_MODEL).split([*sizes.values()], 1)
            return {name.replace(found, f"{role}_proj"): x.flatten(0, 1) for role, x in zip(sizes, parts, strict=True)}
        if name.endswith("conv1d.weight"):
            return _convolved(name, value, [keys * k, keys * k, values * v])
        if name.endswith("self_attn.q_proj.weight"):
            return {name: value.view(4, 2, 16, D_MODEL).transpose(0, 1).reshape(-1, D_MODEL)}
        return {name: value}

    rules = (
        (r"\.linear_attn\.", ".mixer."), *PRENORM, (r"\.channel_mixer\.gate\.", ".channel_mixer.router."),
        (r"\.shared_expert\.", ".shared."), (r"\.shared_expert_gate\.", ".shared_gate."),
    )
    return _case("qwen3_next", theirs, ours, rules, split, unit_offset=True)


def kimi_linear() -> Case:
    theirs = {
        **HEADS, "num_key_value_heads": 4, "num_hidden_layers": 5, "intermediate_size": D_FF, "linear_num_heads": 4,
        "linear_head_dim": 8, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
        "num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 20,
        "layer_types": ["linear_attention"] * 4 + ["full_attention"], "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    }
    experts = {"n_experts": 6, "top_k": 2, "d_ff": 20, "d_ff_shared": 20}
    heads = {"n_heads": 4, "head_dim": 8}
    latent = {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_dim": 6, "n_heads": 4}
    ours = {"pattern": "d k*3 a", **_mixer("d", **heads), **_mixer("k", **heads), **_mixer("a", **latent)}
    ours |= {**_channel("d", d_ff=D_FF), **_channel("k", **experts), **_channel("a", **experts)}

    def split(name: str, value: Tensor) -> dict[str, Tensor]:
        if name.endswith("conv1d.weight"):
            return _convolved(name, value, [32] * 3)
        return {name: value.flatten() if name.endswith("A_log") else value}

    rules = (
        (r"\.forget_gate\.f_a_proj\.", ".decay_proj.down_proj."), (r"\.forget_gate\.f_b_proj\.", ".decay_proj.up_proj."),
        (r"\.forget_gate\.", "."), (r"\.g_a_proj\.", ".gate_proj.down_proj."), (r"\.g_b_proj\.", ".gate_proj.up_proj."),
        (r"\.o_norm\.", ".norm."), (r"\.kv_a_proj_with_mqa\.", ".kv_a_proj."), (r"\.kv_a_layernorm\.", ".kv_a_norm."),
        *PRENORM, (r"\.channel_mixer\.gate\.e_score_correction_bias$", ".channel_mixer.selection.bias"),
        (r"\.channel_mixer\.gate\.", ".channel_mixer.router."), (r"\.shared_experts\.", ".shared."),
    )
    return _case("kimi_linear", theirs, ours, rules, split)


def minimax_text_01() -> Case:
    """Whole heads are turned, as transformers does; the published model turns the first half of them."""
    factor = 3.5565588200778455
    theirs = {
        **HEADS, "head_dim": 8, "num_hidden_layers": 4, "num_local_experts": 5, "intermediate_size": 20, "block_size": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "full_attn_alpha_factor": factor, "linear_attn_alpha_factor": factor, "mlp_alpha_factor": factor,
    }
    experts = {"n_experts": 5, "d_ff": 20}
    ours = {"pattern": "(l a)*2", **_mixer("a", **GROUPED, head_dim=8), **_mixer("l", n_heads=4, head_dim=8, chunk_size=8)}
    ours |= {"blocks.a.mixer.position.fraction": 1.0}
    ours |= {**_channel("a", **experts), **_channel("l", **experts)}

    def split(name: str, value: Tensor) -> dict[str, Tensor]:
        if "slope_rate" in name or "_decay" in name:
            return {}  # buffers that are computed
        if "qkv_proj" not in name:
            return {name: value}
        parts = value.view(4, 3, 8, D_MODEL).unbind(1)
        return {name.replace("qkv", role): part.flatten(0, 1) for role, part in zip("qkv", parts, strict=True)}

    rules = (
        (r"\.self_attn\.norm\.", ".self_attn.output_norm."), (r"\.output_gate\.", ".gate_proj."), *PRENORM,
        (r"\.channel_mixer\.gate\.", ".channel_mixer.router."),
    )
    return _case("minimax_text_01", theirs, ours, rules, split)


def olmo_hybrid() -> Case:
    theirs = {
        **HEADS, "num_key_value_heads": 4, "num_hidden_layers": 4, "intermediate_size": D_FF, "linear_num_key_heads": 4,
        "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 12,
    }
    ours = {"pattern": "d*3 a", **_mixer("d", n_heads=4, head_dim=6, v_dim=12), **_mixer("a", n_heads=4)}
    ours |= {**_channel("d", d_ff=D_FF), **_channel("a", d_ff=D_FF)}

    def split(name: str, value: Tensor) -> dict[str, Tensor]:
        return _convolved(name, value, [24, 24, 48]) if name.endswith("conv1d.weight") else {name: value}

    rules = (
        (r"\.(\d*[37])\.post_attention_layernorm\.", r".\1.mixer_post_norm."),
        (r"\.post_feedforward_layernorm\.", ".channel_post_norm."), (r"\.linear_attn\.", ".mixer."),
        (r"\.g_proj\.", ".gate_proj."), (r"\.o_norm\.", ".norm."), *PRENORM,
    )
    return _case("olmo_hybrid", theirs, ours, rules, split)


def zamba2() -> Case:
    """Layers 2 and 4 there are guided; here a visit of the shared block stands before each of them."""
    theirs = {
        **HEADS, "num_key_value_heads": 4, "num_hidden_layers": 5, "intermediate_size": D_FF, "mamba_d_state": 16,
        "n_mamba_heads": 8, "adapter_rank": 6, "chunk_size": 8,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
    }
    ours = {"pattern": "m*2 s g m s g", "blocks.s.adapters.rank": 6, **_mixer("m", **SSD), **_mixer("g", **SSD)}
    ours |= {**_mixer("s", n_heads=4, head_dim=16, scale=8**-0.5), **_channel("s", d_ff=D_FF)}
    visits = ("2", "5")

    def split(name: str, value: Tensor) -> dict[str, Tensor]:
        """Gate and up, and what a visit adds to them, are one matrix there."""
        if "gate_up_proj" not in name:
            return {name: value}
        halves = dict(zip(("gate_proj", "up_proj"), value.chunk(2), strict=True))
        if "adapter_list" not in name:
            return {name.replace("gate_up_proj", part): half for part, half in halves.items()}
        visit, which = name.removesuffix(".weight").split(".")[-2:]
        at = f"model.layers.{visits[int(visit)]}.adapters.channel_mixer"
        if which == "0":
            return {f"{at}_gate_proj.down.weight": value}
        return {f"{at}_{part}.up.weight": half for part, half in halves.items()}

    rules = (
        (r"^model\.layers\.2\.(linear|mamba_decoder)\.", r"model.layers.G3.\1."),
        (r"^model\.layers\.4\.(linear|mamba_decoder)\.", r"model.layers.G6.\1."),
        (r"^model\.layers\.3\.", "model.layers.4."), (r"\.G(\d)\.", r".\1."), (r"\.linear\.", ".edge_proj."),
        (r"\.mamba_decoder\.", "."), (r"^model\.layers\.2\.shared_transformer\.", "model.layers.shared_s."), *PRENORM,
    )
    return _case("zamba2", theirs, ours, rules, split)


PUBLISHED: dict[str, Callable[[], Case]] = {
    case.__name__: case
    for case in (
        jamba, falcon_h1, nemotron_h_8b, nemotron_3_nano, granite_4_h_tiny, qwen3_next, kimi_linear, minimax_text_01, bamba,
        olmo_hybrid, recurrent_gemma, lfm2, mamba2, llama, zamba2,
    )
}
