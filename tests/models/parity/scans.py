"""Stacks of Mamba, FalconMamba or Mamba-2 alone."""

from __future__ import annotations

from typing import Any

import transformers

from tests.models.parity.case import D_MODEL, EPS, PRENORM, SPECIAL, Case

MAMBA_RULES = (
    *PRENORM, (r"^(stack\.layers\.\d+)\.norm\.", r"\1.mixer_norm."), (r"\.dt_proj\.bias$", ".dt_bias"),
    (r"\.(dt|b|c)_layernorm\.", r".\1_norm."),
)
NORM = {"type": "rms_norm", "eps": EPS}
NARROW = {"hidden_size": D_MODEL, "num_hidden_layers": 3, **SPECIAL}


def mamba(bias: bool = False, norms: bool = False) -> Case:
    """``norms``: FalconMamba."""
    kind = "FalconMamba" if norms else "Mamba"
    options: dict[str, Any] = {"mixer_rms_eps": 2e-4} if norms else {}
    options |= {"use_bias": bias, "use_conv_bias": not bias, "tie_word_embeddings": not bias}
    config = getattr(transformers, f"{kind}Config")(
        state_size=16, conv_kernel=4, expand=2, time_step_rank=5, layer_norm_epsilon=EPS, **options, **NARROW
    )
    mixer: dict[str, Any] = {"type": "mamba", "d_state": 16, "dt_rank": 5, "bias": bias, "conv_bias": not bias}
    if norms:
        mixer |= {"ssm_norm": "weightless", "eps": 2e-4}
    ours = {"pattern": "m*3", "blocks": {"m": {"mixer": mixer, "norm": NORM}}, "final_norm": NORM}
    return Case(f"{kind}ForCausalLM", config, ours, MAMBA_RULES)


def mamba2(bias: bool = False, clamp: tuple[float, float] | None = None) -> Case:
    config = transformers.Mamba2Config(
        num_heads=8, head_dim=8, state_size=16, expand=2, conv_kernel=4, n_groups=2, chunk_size=8, use_bias=bias,
        use_conv_bias=not bias, time_step_limit=clamp or (0.0, float("inf")), layer_norm_epsilon=EPS, **NARROW,
    )
    mixer: dict[str, Any] = {"type": "mamba2", "d_state": 16, "head_dim": 8, "n_groups": 2, "chunk_size": 8, "eps": EPS}
    mixer |= {"bias": bias, "conv_bias": not bias}
    if clamp:
        mixer["dt_limit"] = list(clamp)
    ours = {"pattern": "m*3", "blocks": {"m": {"mixer": mixer, "norm": NORM}}, "final_norm": NORM}
    return Case("Mamba2ForCausalLM", config, ours, MAMBA_RULES)
