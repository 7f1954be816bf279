"""config.json as it is published: read as transformers reads it, with all keys that published files have.

``published.jsonl`` holds one file a line, with the keys that published files of each family have. Those that say so are copies,
but for the tables of pictures and of quantisation; most are put together from what is known of them, so that a number in a line
proves nothing of a model. What is tested is that each key is
read as transformers reads it.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="it judges what a file means")
import transformers

from hybridtf.core import CheckpointError
from hybridtf.interop import FAMILIES
from hybridtf.interop.beside_text import AROUND, text_settings
from hybridtf.interop.defaults import UNUSED
from hybridtf.interop.exporting import differences
from hybridtf.interop.importing import table_of
from hybridtf.interop.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore")
LINES = (Path(__file__).parent / "published.jsonl").read_text(encoding="utf-8").splitlines()
PUBLISHED: dict[str, dict[str, Any]] = {(line := json.loads(text)).pop("name"): line for text in LINES}


def read(values: dict[str, Any]) -> Any:
    settings = text_settings(Settings(values, "config.json"))
    return table_of(FAMILIES[settings.values["model_type"]], settings)


def merged(values: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """``values`` with what ``change`` says, table by table."""
    inner = {name: merged(values[name], one) for name, one in change.items() if isinstance(values.get(name), dict)}
    return {**values, **change, **inner}


def sparse(**changes: Any) -> dict[str, Any]:
    return {"text_config": {"sparse_attention_config": changes}}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_transformers_reads_it(name: str) -> None:
    values = PUBLISHED[name]
    config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(json.loads(json.dumps(values)))
    said = {"model_type": values["model_type"]}
    if values["model_type"] in AROUND:
        tied, config = config.tie_word_embeddings, config.text_config
        said = {"model_type": config.model_type, "tie_word_embeddings": tied}
    today = json.loads(json.dumps(config.to_dict(), default=str)) | said
    assert list(differences(read(values), read(today))) == []


@pytest.mark.parametrize("model_type", UNUSED)
def test_transformers_computes_nothing_from_unused_settings(model_type: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type]
    (modelling,) = Path(inspect.getfile(config)).parent.glob("modeling_*.py")
    text = modelling.read_text(encoding="utf-8") + inspect.getsource(config)
    for unused in UNUSED[model_type]:
        assert not re.search(rf"config\.{unused}\b|[\"']{unused}[\"']", text), unused
        assert unused not in config.__dataclass_fields__, unused


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("phi-4-mini", {"lm_head_bias": True}, "lm_head_bias is not known"),
        ("phi-3-mini-4k", {"attention_bias": True}, "attention_bias is not known"),
        ("stablelm-3b-4e1t", {"rope_pct": 0.5}, "rope_pct is not known"),
        ("mimo-v2-flash", {"rope_theta": 10000.0}, "rope_theta is 10000.0; known here: 5000000.0"),
        ("mimo-v2-flash", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; known here: 0.334"),
        ("mimo-v2-flash", {"hybrid_layer_pattern": [1] * 48}, "hybrid_layer_pattern is"),
        ("mamba-codestral", {"rms_norm": False}, "rms_norm is False"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("llama-2-7b", {"pruned_heads": {"0": [1]}}, "pruned_heads is not known"),
        ("minimax-m3, a copy", {"num_reward_heads": 1}, "num_reward_heads is not known"),
        ("minimax-m3, a copy", {"text_config": {"scoring_func": "softmax"}}, "scoring_func is not known"),
        ("minimax-m3, a copy", {"text_config": {"use_gemma_norm": False}}, "use_gemma_norm is not known"),
        ("minimax-m3, a copy", sparse(sparse_score_type="mean"), "sparse_score_type is 'mean'; known here: 'max'"),
        ("minimax-m3, a copy", sparse(sparse_init_block=1), "sparse_init_block is 1; known here: 0"),
        ("minimax-m3, a copy", sparse(use_sparse_attention=False), "use_sparse_attention is False; known here: True"),
        ("minimax-m3, a copy", sparse(sparse_disable_index_value=[0] * 60), "indexers only choose"),
        ("deepseek-v4-flash, experts not packed", {"expert_dtype": "fp4"}, "expert_dtype is not known"),
        ("gemma-3n-e4b, a copy of its text", {"text_config": {"query_pre_attn_scalar": 128}}, "query_pre_attn_scalar is not"),
    ],
)
def test_values_of_other_models_are_refused(name: str, change: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        read(merged(PUBLISHED[name], change))
    assert why in str(refusal.value)
