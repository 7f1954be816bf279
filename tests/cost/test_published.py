"""``recipes/published``: what each says of itself, its parameters, and the published settings read as a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtf.core import BuildContext
from hybridtf.cost import parameter_counts
from hybridtf.models import LanguageModelConfig
from hybridtf.models.pattern import expand_pattern
from hybridtf.recipe import load_recipe, recipe_names
from tests.cost.published_settings import SETTINGS

COUNTS = {
    "axk2": 20_314_494_976, "bailing_hybrid": 124_414_191_072, "bamba": 9_780_235_392, "bloom_176b": 176_247_271_424,
    "cohere": 34_980_831_232, "command_r7b": 8_028_033_024, "deepseek_v2_lite": 15_706_484_224, "deepseek_v3": 671_026_404_352,
    "deepseek_v32": 671_877_929_216, "deepseek_v4": 284_325_869_015, "diffllama": 1_204_885_504, "exaone4_32b": 32_003_216_384,
    "falcon": 6_921_720_704, "falcon_h1": 8_514_961_408, "falcon_h1_0_5b": 521_411_104, "falcon_mamba_7b": 7_272_665_088,
    "flint": 39_785_287_456, "gemma": 8_537_680_896, "gemma2": 2_614_341_888, "gemma2_9b": 9_241_705_984,
    "gemma3_4b": 3_880_263_168, "gemma3n": 6_835_235_568, "gemma4": 5_077_177_886, "glm4": 9_400_279_040,
    "glm5_next": 313_326_816_766, "glm_moe_dsa": 743_911_199_232, "gpt2": 124_439_808, "gpt_neo": 1_315_575_808,
    "gpt_neox": 20_554_567_680, "gpt_oss": 116_829_156_672, "gpt_oss_20b": 20_914_757_184, "gptj": 6_050_882_784,
    "granite_4_1_8b": 8_380_551_168, "granite_4_h_small": 32_207_337_984, "granite_4_h_tiny": 6_939_037_248,
    "granitemoe_swa": 37_039_117_312, "griffin_7b": 7_795_144_704, "hawk_7b": 8_161_562_624, "hunyuan_7b": 7_504_568_320,
    "hy_v4": 58_278_193_133, "inkling": 975_340_270_146, "inkling2": 593_722_930_176, "inkling2_loop": 26_070_382_080,
    "jamba": 51_570_323_328, "jamba_1_5_large": 398_555_145_696, "kimi_linear": 49_122_675_072, "laguna": 33_189_965_824,
    "lara_mini": 7_281_684_672, "lfm2": 1_170_340_608, "lfm2_2_6b": 2_569_272_320, "lfm2_8b_a1b": 8_339_929_856,
    "lfm3": 1_728_801_536, "llama": 6_738_415_616, "llama4": 107_769_861_120, "llama_3_1_8b": 8_030_261_248,
    "longcat_flash": 560_664_958_976, "mamba2": 7_285_403_648, "mamba2_2_7b": 2_702_599_680, "mamba2_hybrid_8b": 8_654_517_248,
    "mamba_2_8b": 2_768_345_600, "mimo_v2_flash": 308_778_768_832, "minicpm3": 4_073_875_968, "minimax_m3": 426_174_565_632,
    "minimax_text_01": 456_089_655_296, "mistral": 7_241_732_096, "mixtral": 46_702_792_704, "modernbert_decoder": 149_655_232,
    "mpt_7b": 6_649_286_656, "nemotron_3_nano": 31_577_937_344, "nemotron_3_super": 120_668_687_360,
    "nemotron_3_ultra": 549_308_968_960, "nemotron_h_47b": 46_791_554_816, "nemotron_h_56b": 56_324_350_464,
    "nemotron_h_8b": 8_100_852_736, "nemotron_nano_9b_v2": 8_888_227_328, "olmo": 6_888_095_744, "olmo2_7b": 7_298_617_344,
    "olmo3": 6_888_624_128, "olmo_hybrid": 7_430_870_688, "olmoe_1b_7b": 6_919_161_856, "opt_6_7b": 6_658_473_984,
    "phi": 1_418_270_720, "phi3": 3_821_079_552, "pythia_2_8b": 2_775_208_960, "qwen2_7b": 7_615_616_512,
    "qwen3_30b_a3b": 30_532_122_624, "qwen3_5": 8_953_803_264, "qwen3_5_27b": 26_895_998_464,
    "qwen3_5_397b_a17b": 396_346_350_336, "qwen3_5_moe": 34_660_610_688, "qwen3_8_flash_next": 176_943_899_520,
    "qwen3_8b": 8_190_735_360, "qwen3_next": 79_674_391_296, "recurrent_gemma": 2_682_862_080,
    "recurrent_gemma_9b": 8_579_977_216, "rwkv4": 7_392_649_216, "rwkv7_2_9b": 2_947_735_040, "samba_421m": 421_793_280,
    "smollm3": 3_075_098_624, "stablelm": 2_795_443_200, "starcoder2": 3_030_371_328, "trinity_mini": 26_123_970_560,
    "xlstm": 6_865_424_896, "zamba": 7_232_490_496, "zamba2": 2_481_848_336, "zamba2_7b": 7_356_749_648, "zaya": 8_840_488_784,
}
"""transformers 5.24's own count of the model of :data:`SETTINGS`, on the meta device, without the selection biases of routers,
which no gradient trains, and without towers for images, but with Gemma 4's factors of layers, which are buffers there. The
three that transformers does not have: see :data:`PRINTED`."""

IDLE = {"longcat_flash": 28 * 256 * 2 * 2048 * 6144}
"""What transformers holds for experts that compute nothing: 256 in each layer, of a gate and an up projection."""

PRINTED = {"samba_421m": (421, 10**6), "mamba2_hybrid_8b": (8, 10**9), "rwkv7_2_9b": (2_947_735_040, 1)}
"""The figure that was published, and its unit: of Samba's preset, of the paper's title row, of the checkpoint's files."""

MAMBA2_OF_1B = {
    "d_model": 2048, "pattern": "m*48", "vocab_size": 32000, "blocks.m.mixer.n_groups": 1, "blocks.m.mixer.n_heads": 64,
}
NO_READING = {
    "griffin_7b": "transformers caps its scores and scales its embedding", "hawk_7b": "as griffin_7b",
    "minimax_text_01": "turns half of a head, transformers all of it",
}
"""What interop cannot read as the published model is."""

STARTS = {"chunk_size", "dt_range", "a_range", "dt_limit"}
"""Options that settings do not decide: how a scan is cut and where weights start; and the limit that transformers puts on the
steps of Zamba2 and Nemotron-H in prefill, which the published code does not have."""


def config_of(name: str, **changes: object) -> LanguageModelConfig:
    recipe = load_recipe(f"published/{name}", [f"model.{path}={value}" for path, value in changes.items()])
    assert isinstance(recipe.model, LanguageModelConfig)
    return recipe.model


def total(name: str, **changes: object) -> int:
    found = parameter_counts(config_of(name, **changes).build(BuildContext(d_model=0, device=torch.device("meta"))))["total"]
    assert isinstance(found, int)
    return found


def test_all_are_counted() -> None:
    names = {name.removeprefix("published/") for name in recipe_names() if name.startswith("published/")}
    assert names == COUNTS.keys() == SETTINGS.keys() | PRINTED.keys()
    assert len(names) >= 100


@pytest.mark.parametrize("name", COUNTS)
def test_parameters(name: str) -> None:
    assert total(name) == COUNTS[name]


@pytest.mark.parametrize("name", PRINTED)
def test_parameters_as_they_were_published(name: str) -> None:
    figure, unit = PRINTED[name]
    assert COUNTS[name] // unit == figure


def test_mamba2_of_the_papers_1_3b_size() -> None:
    """48 layers of width 2048 with one group, a vocabulary of 32,000 and a head of its own."""
    assert total("mamba2", **MAMBA2_OF_1B) == 1_371_839_488


@pytest.mark.parametrize("name", COUNTS)
def test_each_says_what_it_is_and_where_from(name: str) -> None:
    text = recipe_names()[f"published/{name}"].read_text(encoding="utf-8")
    meta = load_recipe(f"published/{name}").meta
    assert text.startswith("# ")
    size = meta.title.split(", ")[-1]
    assert abs(float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]] / COUNTS[name] - 1) < 0.03, meta.title
    assert ("transformers 5.24" in meta.description) != ("published configuration" in meta.description)
    assert meta.source.startswith("https://")


@pytest.mark.parametrize("name", COUNTS)
def test_patterns_are_short_where_layers_repeat(name: str) -> None:
    config = config_of(name)
    items = [word for word in config.pattern.replace("(", " ").replace(")", " ").split() if not word.startswith("*")]
    assert len(items) <= 30
    assert config.layers() == expand_pattern(config.pattern, config.blocks)


def transformers_config(name: str) -> Any:
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, settings = SETTINGS[name]
    return CONFIG_MAPPING[kind](**settings)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SETTINGS)
def test_parameters_as_transformers_counts_them(name: str) -> None:
    config = transformers_config(name)
    import transformers

    from hybridtf.interop.families import FAMILIES

    with torch.device("meta"):
        theirs = getattr(transformers, FAMILIES[SETTINGS[name][0]].architecture)(config)
    apart = ("expert_bias", "e_score_correction_bias")
    counted = {key: p.numel() for key, p in theirs.named_parameters() if not key.endswith(apart) and ".visual." not in key}
    counted |= {key: one.numel() for key, one in theirs.named_buffers() if key.endswith("layer_scalar")}
    assert sum(counted.values()) == COUNTS[name] + IDLE.get(name, 0)


def plain(value: Any) -> Any:
    """Options by name, without those of :data:`STARTS`; as many key heads as heads is what no number of them means."""
    if isinstance(value, dict):
        kept = {key: plain(one) for key, one in value.items() if key not in STARTS and one is not None}
        if "n_heads" in kept and kept.get("n_kv_heads") == kept["n_heads"]:
            del kept["n_kv_heads"]
        return kept
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def laid_out(config: LanguageModelConfig) -> Any:
    """A model as its layers in order and all else, whatever its blocks are called."""
    table = plain(config.to_dict())
    return [table["blocks"][name] for name in config.layers()], {**table, "blocks": None, "pattern": None, "n_layers": None}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - NO_READING.keys()))
def test_the_settings_give_the_recipe(name: str, tmp_path: Path) -> None:
    """config.json of the settings, read as a checkpoint's is: the same model, layer by layer."""
    transformers_config(name).to_json_file(tmp_path / "config.json", use_diff=False)
    from hybridtf.interop.importing import family_of, recipe_of
    from hybridtf.interop.settings import read_settings

    settings = read_settings(tmp_path / "config.json")
    read = recipe_of(family_of(settings), settings).model
    assert isinstance(read, LanguageModelConfig)
    assert laid_out(read) == laid_out(config_of(name))
