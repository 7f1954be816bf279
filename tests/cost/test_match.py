"""Sizes that are equal in what was asked: counted again from what the found config builds, and legal by its own validation."""

from __future__ import annotations

import types
import typing
from typing import Any

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, active, state_bytes
from hybridtf.cost import count_flops
from hybridtf.cost.match import WITHIN, find_match
from hybridtf.cost.widths import KNOWN, at_width, with_state
from hybridtf.models import LanguageModelConfig
from hybridtf.recipe import load_recipe

PUBLISHED = [
    pytest.param(f"published/{name}", marks=pytest.mark.slow)
    for name in ("falcon_h1", "jamba", "kimi_linear", "olmo_hybrid", "recurrent_gemma")
]
MIXED = ["demo/hybrid", "demo/attention", "hybrids/jamba", "hybrids/griffin", "hybrids/lstm"]


def config_of(name: str) -> LanguageModelConfig:
    config = load_recipe(name).model
    assert isinstance(config, LanguageModelConfig)
    return config


def n_params(config: Any, device: str = "meta") -> int:
    model = config.build(BuildContext(d_model=config.d_model, device=torch.device(device)))
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", [*MIXED, *PUBLISHED])
def test_equal_parameters(name: str) -> None:
    asked = 125_000_000 if name.startswith("published") else 3_000_000
    config = config_of(name)
    match = find_match(config, "params", asked)
    assert match.found
    found = match.best.config
    assert abs(n_params(found) / asked - 1) <= WITHIN
    assert isinstance(found, LanguageModelConfig)
    assert found.layers() == config.layers()
    assert found.d_model != config.d_model
    assert 0.7 < match.best.fine < 1.4


def test_a_matched_model_is_not_another_kind() -> None:
    """All but sizes is as it was: the types of all parts, and every option that is no whole number."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kept(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [kept(item) for item in value]
        return type(value) if isinstance(value, int) and not isinstance(value, bool) else value

    for name in [*MIXED, "published/kimi_linear", "published/falcon_h1", "published/nemotron_3_nano", "published/qwen3_next"]:
        config = config_of(name)
        assert kept(at_width(config, config.d_model // 2).to_dict()) == kept(config.to_dict())


@pytest.mark.parametrize("name", [*MIXED, *PUBLISHED])
def test_what_it_has_already_is_left_alone(name: str) -> None:
    config = config_of(name)
    assert at_width(config, config.d_model) == config
    assert with_state(config, 1.0) == config
    match = find_match(config, "params", n_params(config))
    assert match.best.config.d_model == config.d_model  # type: ignore[attr-defined]


@pytest.mark.slow
def test_published_ones_at_a_size_that_can_be_run() -> None:
    match = find_match(config_of("published/recurrent_gemma"), "params", 20_000_000)
    model = match.best.config.build(None)
    with torch.no_grad():
        assert bool(model(torch.randint(100, (1, 9))).logits.isfinite().all())


SMALL = {
    "attention": {"type": "attention", "n_heads": 2},
    "mamba2": {"type": "mamba2", "d_state": 16, "head_dim": 8, "chunk_size": 8},
    "gla": {"type": "gla", "n_heads": 2, "chunk_size": 8}, "griffin_recurrent": {"type": "griffin_recurrent", "n_heads": 2},
}


def small(mixer: str, d_ff: int | None = 48, **more: Any) -> LanguageModelConfig:
    block: dict[str, Any] = {"mixer": {**SMALL[mixer], **more}}
    if d_ff is not None:
        block["channel_mixer"] = {"type": "swiglu", "d_ff": d_ff}
    return LanguageModelConfig(vocab_size=31, d_model=32, pattern="a*2", blocks={"a": block})


@pytest.mark.parametrize(
    "mixer", ["mamba2", *(pytest.param(name, marks=pytest.mark.slow) for name in SMALL if name != "mamba2")]
)
def test_equal_operations(mixer: str) -> None:
    asked, length = 60_000, 16
    match = find_match(small(mixer), "flops", asked, length=length)
    assert match.found
    config = match.best.config
    model: Any = config.build(BuildContext(d_model=0))
    ids = torch.randint(31, (1, length))
    with torch.no_grad():
        flops = count_flops(lambda: model.train()(ids))  # the scores of all tokens, as in training
    assert flops / length == pytest.approx(asked, rel=WITHIN)


@pytest.mark.parametrize(
    ("name", "asked"), [("demo/hybrid", 400_000), ("hybrids/griffin", 200_000), ("hybrids/samba", 500_000)]
)
def test_equal_states(name: str, asked: int) -> None:
    """The width and the channel mixers stay; a live state has as many bytes as was asked."""
    config = config_of(name)
    match = find_match(config, "state_bytes", asked, length=256)
    assert match.found
    found: Any = match.best.config
    assert found.d_model == config.d_model
    old: Any = config.blocks
    assert all(block.channel_mixer == old[key].channel_mixer for key, block in found.blocks.items())
    model = found.build(BuildContext(d_model=0))
    ids = torch.randint(257, (1, 256))
    with torch.no_grad():
        state = model(ids[:, :-1], state=model.init_state(1, max_len=256)).state
        state = model(ids[:, -1:], state=state).state
    assert abs(state_bytes(state) / asked - 1) <= WITHIN


def test_where_no_step_is_near_the_nearest_two_are_known() -> None:
    """Mamba-2 alone has steps of whole heads: nothing lies between."""
    config = LanguageModelConfig(vocab_size=11, d_model=64, pattern="m", blocks={"m": {"mixer": {"type": "mamba2"}}})
    below, above = n_params(at_width(config, 64)), n_params(at_width(config, 96))
    match = find_match(config, "params", (below + above) // 2)
    assert not match.found
    assert match.below is not None
    assert match.above is not None
    assert (match.below.value, match.above.value) == (below, above)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="out of reach: at the least it has"):
        find_match(small("attention"), "params", 10)
    with pytest.raises(ConfigError, match="out of reach: at the most it has"):
        find_match(small("attention"), "state_bytes", 10**12)
    with pytest.raises(ConfigError, match="out of reach"):  # of a matrix state that follows the width
        find_match(small("gla"), "state_bytes", 10**6)


def test_an_option_without_a_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridtf.cost.widths.KNOWN", KNOWN - {"d_conv"})
    with pytest.raises(ConfigError, match="'mamba2' has d_conv = 4, and nothing says whether it follows the width"):
        find_match(small("mamba2"), "params", 100_000)


def _whole(annotation: Any) -> bool:
    """An option that may be a whole number."""
    if annotation is int:
        return True
    return typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated) and any(
        _whole(part) for part in typing.get_args(annotation)
    )


@pytest.mark.parametrize("kind", ["mixers", "channel_mixers", "blocks"])
def test_every_option_that_counts_has_a_rule(kind: str) -> None:
    options = {
        name for config in active()[kind].configs().values() for name, field in config.model_fields.items()
        if _whole(field.annotation)
    }
    assert options
    assert options <= KNOWN | {"shared"}, options - KNOWN


QWEN = {"n_heads": 16, "n_kv_heads": 2, "head_dim": 256}


@pytest.mark.parametrize(
    ("d_model", "want"),
    [
        (2048, QWEN), (1024, {"n_heads": 8, "n_kv_heads": 1, "head_dim": 256}),
        (512, {"n_heads": 4, "n_kv_heads": 1, "head_dim": 256}), (128, {"n_heads": 1, "n_kv_heads": 1, "head_dim": 256}),
        (64, {"n_heads": 1, "n_kv_heads": 1, "head_dim": 128}), (4096, {"n_heads": 32, "n_kv_heads": 4, "head_dim": 256}),
    ],
)
def test_heads_of_a_width_of_their_own(d_model: int, want: dict[str, int]) -> None:
    blocks: Any = at_width(config_of("published/qwen3_next"), d_model)
    mixer = blocks.blocks["a"].mixer
    assert {name: getattr(mixer, name) for name in QWEN} == want


@pytest.mark.parametrize(("d_model", "n_heads", "n_kv_heads"), [(128, 4, 2), (136, 4, 2), (192, 6, 3), (256, 8, 4), (64, 2, 1)])
def test_heads_that_share_the_width(d_model: int, n_heads: int, n_kv_heads: int) -> None:
    """Of about 32 channels each, two query heads for one of keys and values, in numbers that divide the width."""
    config: Any = at_width(config_of("demo/hybrid"), d_model)
    mixer = config.blocks["a"].mixer
    assert (mixer.n_heads, mixer.n_kv_heads) == (n_heads, n_kv_heads)
