"""The families that are read and written, one file for those that share their parts."""

from hybridtf.interop.families import (
    afmoe,
    bloom,
    cycles,
    decoders,
    decoders_more,
    deepseek_v4,
    delta,
    dory,
    gemma,
    gemma3n,
    gemma4,
    glm_hybrids,
    gpt,
    gpt_oss,
    griffin,
    hybrids,
    hybrids_mamba2,
    indexed,
    inkling,
    latents,
    lfm,
    lightning,
    llama4,
    local_global,
    longcat,
    minimax_m3,
    olmo,
    qwen4,
    qwen_hybrids,
    recurrent,
    scans,
    windowed_experts,
    windows,
    zamba,
    zaya,
)
from hybridtf.interop.family import Family

MODULES = (
    decoders, scans, hybrids, afmoe, bloom, cycles, decoders_more, deepseek_v4, delta, dory, gemma, gemma3n, gemma4,
    glm_hybrids, gpt, gpt_oss, griffin, hybrids_mamba2, indexed, inkling, latents, lfm, lightning, llama4, local_global,
    longcat, minimax_m3, olmo, qwen4, qwen_hybrids, recurrent, windowed_experts, windows, zamba, zaya,
)
"""In this order an export looks for a family that has the model."""

FAMILIES: dict[str, Family] = {
    name: family for module in MODULES for family in module.FAMILIES for name in (family.model_type, *family.aliases)
}
"""By ``model_type`` of config.json."""
