"""Beams against every sequence there is, against greedy decoding, and against transformers."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, DataError
from hybridtf.models import (
    BeamConfig,
    GenerationConfig,
    LanguageModelConfig,
    beam_search,
    generate,
    read_prompt,
    stream,
)
from hybridtf.models.weights import assign_weights
from tests.models.tiny_models import PATTERNS, PROMPTS, next_log_probs, tiny_model

VOCAB, LENGTH, STOP = 4, 3, 2


def every_sequence(model, prompt, length_penalty):
    """(tokens, log-probability, score) of all sequences that end in the stop token or are of full length, best first."""
    found = []
    for n in range(1, LENGTH + 1):
        for tokens in itertools.product(range(VOCAB), repeat=n):
            if STOP in tokens[:-1] or (n < LENGTH and tokens[-1] != STOP):
                continue
            total = sum(
                float(next_log_probs(model, [*prompt, *tokens[:i]])[token]) for i, token in enumerate(tokens)
            )
            found.append((tokens, total, total / n**length_penalty))
    return sorted(found, key=lambda item: -item[2])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 3.0])
def test_enough_beams_are_an_exhaustive_search(pattern, length_penalty):
    model = tiny_model(pattern, vocab=VOCAB, seed=5)
    prompts = [[1, 3], [3, 0, 1, 1, 0], [2]]
    config = BeamConfig(
        max_new_tokens=LENGTH, n_beams=VOCAB**LENGTH, n_return=12, length_penalty=length_penalty, early_stopping="never",
        stop_tokens=(STOP,),
    )
    for prompt, beams in zip(prompts, beam_search(model, prompts, config), strict=True):
        want = every_sequence(model, prompt, length_penalty)
        assert [beam.tokens for beam in beams] == [tokens for tokens, _, _ in want[:12]]
        for beam, (_, total, score) in zip(beams, want, strict=False):
            assert beam.log_prob == pytest.approx(total, abs=1e-9)
            assert beam.score == pytest.approx(score, abs=1e-9)


def test_all_sequences_come_back_where_all_are_asked_for():
    model = tiny_model("m a w", vocab=VOCAB, seed=5)
    config = BeamConfig(
        max_new_tokens=LENGTH, n_beams=64, n_return=64, early_stopping="never", stop_tokens=(STOP,)
    )
    beams = beam_search(model, [[1, 3]], config)[0]
    assert len(beams) == 1 + 3 * 1 + 9 * 4
    assert {beam.tokens for beam in beams} == {tokens for tokens, _, _ in every_sequence(model, [1, 3], 1.0)}


@pytest.mark.parametrize("early", [True, False, "never"])
def test_one_beam_is_greedy(early):
    model = tiny_model()
    free = generate(model, PROMPTS, GenerationConfig(max_new_tokens=9))
    stops = (free[0][2], free[1][5])
    want = generate(model, PROMPTS, GenerationConfig(max_new_tokens=9, stop_tokens=stops))
    got = beam_search(model, PROMPTS, BeamConfig(max_new_tokens=9, n_beams=1, stop_tokens=stops, early_stopping=early))
    assert [list(beams[0].tokens) for beams in got] == want
    assert len({len(row) for row in want}) > 1
    sums = [0.0] * len(PROMPTS)
    for item in stream(model, PROMPTS, GenerationConfig(max_new_tokens=9, stop_tokens=stops)):
        sums[item.row] += item.log_prob
    assert [beams[0].log_prob for beams in got] == pytest.approx(sums)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_batch_of_unequal_prompts_gives_what_each_gives_alone(pattern):
    model = tiny_model(pattern)
    config = BeamConfig(max_new_tokens=7, n_beams=3, n_return=3, stop_tokens=(2, 5), prefill_chunk=3)
    batch = beam_search(model, PROMPTS, config)
    for prompt, beams in zip(PROMPTS, batch, strict=True):
        alone = beam_search(model, [prompt], config)[0]
        assert [beam.tokens for beam in alone] == [beam.tokens for beam in beams]
        for beam in beams:
            text = list(prompt)
            total = 0.0
            for token in beam.tokens:
                total += float(next_log_probs(model, text)[token])
                text.append(token)
            assert beam.log_prob == pytest.approx(total, abs=1e-9)


def test_more_beams_find_at_least_as_likely_text_here():
    model = tiny_model()
    best = [
        beam_search(model, PROMPTS, BeamConfig(max_new_tokens=6, n_beams=n, length_penalty=0.0)) for n in (1, 17**2)
    ]
    pairs = list(zip(*best, strict=True))
    assert all(wide[0].score >= narrow[0].score - 1e-12 for narrow, wide in pairs)
    assert any(wide[0].score > narrow[0].score + 1e-6 for narrow, wide in pairs)


def test_beams_after_a_prefix():
    model = tiny_model()
    config = BeamConfig(max_new_tokens=5, n_beams=3, n_return=2)
    prefix = read_prompt(model, [1, 2, 3])
    got = beam_search(model, [[4, 5], [], [6]], config, prefix=prefix)
    want = beam_search(model, [[1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 3, 6]], config)
    assert [[beam.tokens for beam in beams] for beams in got] == [[beam.tokens for beam in beams] for beams in want]


def test_wrong_input():
    model = tiny_model()
    assert beam_search(model, []) == []
    with pytest.raises(DataError, match="prompt 1 is empty"):
        beam_search(model, [[1], []])
    with pytest.raises(ConfigError, match="n_return = 3 sequences cannot come from n_beams = 2"):
        BeamConfig(n_beams=2, n_return=3)


# -- transformers ------------------------------------------------------------------------------------------------------

RULES = (
    (r"^model\.embed_tokens\.", "stem.embedding."), (r"^model\.norm\.", "final_norm."), (r"^lm_head\.", "head.proj."),
    (r"^model\.layers\.", "stack.layers."), (r"\.self_attn\.", ".mixer."), (r"\.o_proj\.", ".out_proj."),
    (r"\.mlp\.", ".channel_mixer."), (r"\.input_layernorm\.", ".mixer_norm."),
    (r"\.post_attention_layernorm\.", ".channel_norm."),
)


@pytest.fixture(scope="module")
def twins():
    """A llama of transformers and ours, with the same weights, sharp enough that no two beams are as good."""
    transformers = pytest.importorskip("transformers", reason="the comparison needs transformers")
    config = transformers.LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )
    theirs = transformers.LlamaForCausalLM(config).to(torch.float64).eval()
    generator, tensors = torch.Generator().manual_seed(3), {}
    for name, p in theirs.named_parameters():
        with torch.no_grad():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * (0.5 if p.ndim > 1 else 1))
        for pattern, new in RULES:
            name = re.sub(pattern, new, name)
        tensors[name] = p.detach()
    norm = {"type": "rms_norm", "eps": config.rms_norm_eps}
    block = {
        "mixer": {"type": "gqa", "n_heads": 4, "n_kv_heads": 2}, "channel_mixer": {"type": "swiglu", "d_ff": 20}, "norm": norm,
    }
    ours = LanguageModelConfig(
        vocab_size=13, d_model=16, pattern="a*2", blocks={"a": block}, final_norm=norm, head={"type": "lm_head", "tied": False}
    ).build(BuildContext(d_model=16, param_dtype=torch.float64))
    assign_weights(ours, tensors, where="the reference")
    return theirs, ours


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stops", [(), (4,), (4, 7)])
@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 1.0, 2.0])
def test_beams_are_those_of_transformers(twins, stops, early, length_penalty):
    theirs, ours = twins
    prompts = [[1, 2, 3], [5, 6, 8, 9, 10], [11]]
    config = BeamConfig(
        max_new_tokens=7, n_beams=3, n_return=3, length_penalty=length_penalty, early_stopping=early, stop_tokens=stops
    )
    for prompt, beams in zip(prompts, beam_search(ours, prompts, config), strict=True):
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, num_beams=3, num_return_sequences=3, do_sample=False,
            length_penalty=length_penalty, early_stopping=early, eos_token_id=list(stops) or None, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True,
        )
        want = []
        for row in out.sequences[:, len(prompt) :].tolist():
            ends = [i for i, token in enumerate(row) if token in stops]
            want.append(tuple(row[: ends[0] + 1] if ends else row))
        assert [beam.tokens for beam in beams] == want
        # It sums float32.
        assert [beam.score for beam in beams] == pytest.approx(out.sequences_scores.tolist(), abs=2e-4)
