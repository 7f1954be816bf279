"""Every registered component in every way of generating: what is added later is tried without a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, active, debug_states
from hybridtf.models import (
    BeamConfig,
    GenerationConfig,
    LanguageModel,
    LanguageModelConfig,
    beam_search,
    generate,
    read_prompt,
    speculate,
)
from hybridtf.testing import preset_config
from tests.models.tiny_models import PROMPTS, next_log_probs, tiny_model

ATTENTION = {"type": "gqa", "n_heads": 4, "n_kv_heads": 2}


def _components() -> list[tuple[str, str]]:
    return [(kind, name) for kind in ("mixers", "channel_mixers") for name in active()[kind].names()]


@pytest.fixture(params=_components(), ids=[f"{kind}-{name}" for kind, name in _components()])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    kind, name = request.param
    registry = active()[kind]
    part = preset_config(kind, name) if name in registry.presets() else registry.get(name).tiny()
    block: dict[str, Any] = {"mixer": part} if kind == "mixers" else {"mixer": ATTENTION, "channel_mixer": part}
    config = LanguageModelConfig(vocab_size=17, d_model=24, pattern="x", blocks={"x": block}, max_seq_len=64)  # type: ignore[arg-type]
    try:
        built = config.build(BuildContext(d_model=24, param_dtype=torch.float64, seed=3))
    except ConfigError as reason:
        pytest.skip(f"it cannot be the only layer of a language model: {reason}")
    for law in ("cut", "crop"):
        for module in built.modules():
            if law in getattr(module, "cannot", {}):
                pytest.skip(f"it cannot {law}, and generation says so")
    with torch.no_grad():
        for p in built.parameters():
            p.mul_(1.5)
    return built


def test_eager_ways(model: LanguageModel) -> None:
    config = GenerationConfig(max_new_tokens=7)
    want = generate(model, PROMPTS, config)
    with debug_states():
        assert generate(model, PROMPTS, config, batch_size=2) == want
        prefix = read_prompt(model, PROMPTS[1][:4])
        assert generate(model, [PROMPTS[1][4:]], config, prefix=prefix)[0] == want[1]
        assert speculate(model, tiny_model("a"), PROMPTS, config, n_draft=3).tokens == want
        assert speculate(model, model, PROMPTS, config, n_draft=3).acceptance == 1
        beams = beam_search(model, PROMPTS, BeamConfig(max_new_tokens=4, n_beams=3))
    for prompt, best in zip(PROMPTS, beams, strict=True):
        total = sum(
            float(next_log_probs(model, [*prompt, *best[0].tokens[:i]])[token]) for i, token in enumerate(best[0].tokens)
        )
        assert best[0].log_prob == pytest.approx(total, abs=1e-8)


@pytest.mark.slow
def test_compiled_decoding(model: LanguageModel) -> None:
    if any("compile" in getattr(module, "cannot", {}) for module in model.modules()):
        pytest.skip("it cannot be compiled, and generation says so")
    fast = GenerationConfig(max_new_tokens=7, compile=True, compile_backend="eager")
    assert generate(model, PROMPTS, fast, batch_size=2) == generate(model, PROMPTS, GenerationConfig(max_new_tokens=7))
