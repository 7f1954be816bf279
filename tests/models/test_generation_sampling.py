"""The cuts against transformers' processors, and what each leaves of a distribution."""

from __future__ import annotations

import itertools

import pytest
import torch

from hybridtf.core import ConfigError, NonFiniteError
from hybridtf.models import GenerationConfig, generate
from hybridtf.models.generation import choose, distribution
from hybridtf.models.generation.sampling import Seen
from tests.models.tiny_models import PROMPTS, next_log_probs, tiny_model

F64 = torch.float64


def processed(scores: torch.Tensor, config: GenerationConfig, texts: list[list[int]]) -> torch.Tensor:
    """Probabilities by transformers' processors, in the order in which it applies them."""
    made = pytest.importorskip("transformers").generation.logits_process
    rows = []
    for row, text in zip(scores, texts, strict=True):
        steps = made.LogitsProcessorList()
        if config.repetition_penalty != 1:
            steps.append(made.RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
        if config.temperature not in (0, 1):
            steps.append(made.TemperatureLogitsWarper(config.temperature))
        if config.top_k is not None:
            steps.append(made.TopKLogitsWarper(config.top_k))
        if config.top_p is not None:
            steps.append(made.TopPLogitsWarper(config.top_p))
        if config.min_p is not None:
            steps.append(made.MinPLogitsWarper(config.min_p))
        rows.append(steps(torch.tensor([text]), row[None].clone())[0].softmax(-1))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "penalty"),
    list(itertools.product([0.7, 1.0, 1.8], [None, 6], [None, 0.8], [None, 0.2], [1.0, 1.3, 0.8])),
)
def test_cuts_and_their_order_are_those_of_transformers(temperature, top_k, top_p, min_p, penalty):
    scores = torch.randn(5, 23, dtype=F64) * 3
    texts = [torch.randint(23, (n,)).tolist() for n in (1, 2, 5, 40, 7)]
    config = GenerationConfig(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    got = distribution(scores, config, Seen(config, texts).of(range(5)))
    torch.testing.assert_close(got, processed(scores, config, texts), rtol=0, atol=1e-12)


def test_draws_follow_the_distribution():
    scores = torch.randn(1, 9, dtype=F64).repeat(6000, 1)
    config = GenerationConfig(temperature=1.4, top_p=0.9, min_p=0.05, repetition_penalty=1.5)
    seen = [torch.tensor([0, 3])] * 6000
    draws, log_probs = choose(scores, config, [torch.Generator().manual_seed(i) for i in range(6000)], seen)
    want = distribution(scores[:1], config, seen[:1])[0]
    torch.testing.assert_close(torch.bincount(draws, minlength=9) / 6000, want.float(), rtol=0, atol=0.025)
    assert set(draws.tolist()) == set(want.nonzero()[:, 0].tolist())
    # What is told is the model's own.
    torch.testing.assert_close(log_probs, scores.log_softmax(-1).gather(1, draws[:, None])[:, 0])


def test_the_penalty_sees_prompt_and_new_text_of_the_row_alone():
    model = tiny_model()
    config = GenerationConfig(max_new_tokens=8, repetition_penalty=1.7)
    want = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(8):
            with torch.no_grad():
                scores = model.eval()(torch.tensor([text])).logits[0, -1]
            for token in set(text):
                scores[token] = scores[token] * 1.7 if scores[token] < 0 else scores[token] / 1.7
            text.append(int(scores.argmax()))
        want.append(text[len(prompt) :])
    # Token 0 is what a shorter prompt is filled with: it must not count as seen.
    assert generate(model, PROMPTS, config) == want
    assert generate(model, PROMPTS) != want


def test_a_penalised_row_alone_equals_the_row_in_a_batch():
    model = tiny_model()
    config = {"max_new_tokens": 10, "temperature": 1.5, "min_p": 0.05, "repetition_penalty": 1.4}
    batch = generate(model, PROMPTS, GenerationConfig(seed=5, **config))
    assert batch == [generate(model, [p], GenerationConfig(seed=5 + i, **config))[0] for i, p in enumerate(PROMPTS)]


def test_extremes():
    scores = torch.tensor([[0.1, 2.0, -3.0, 1.9]], dtype=F64)
    for config in (GenerationConfig(), GenerationConfig(temperature=1e-308), GenerationConfig(temperature=1.0, min_p=1.0)):
        assert distribution(scores, config).tolist() == [[0, 1, 0, 0]]
    impossible = torch.tensor([[-float("inf"), 0.0, -float("inf"), 0.0]], dtype=F64)
    assert distribution(impossible, GenerationConfig(temperature=1.0)).tolist() == [[0, 0.5, 0, 0.5]]
    seen = [torch.tensor([0, 1])]
    penalised = distribution(impossible, GenerationConfig(temperature=1.0, repetition_penalty=2.0), seen)
    assert penalised.tolist() == [[0, 0.5, 0, 0.5]]
    for bad in (float("nan"), float("inf")):
        with pytest.raises(NonFiniteError, match="row 1"):
            distribution(torch.tensor([[0.0, 1.0], [bad, 0.0]]), GenerationConfig())
    with pytest.raises(NonFiniteError, match="row 0"):
        choose(torch.full((1, 3), -float("inf")), GenerationConfig(), [torch.Generator()])


def test_ties_are_cut_by_id():
    scores = torch.zeros(1, 4, dtype=F64)
    assert distribution(scores, GenerationConfig(temperature=1.0, top_k=2)).tolist() == [[0.5, 0.5, 0, 0]]
    assert distribution(scores, GenerationConfig(temperature=1.0, top_p=0.5)).tolist() == [[0.5, 0.5, 0, 0]]


def test_options_that_say_nothing_together():
    with pytest.raises(ConfigError, match="min_p needs a temperature"):
        GenerationConfig(min_p=0.1)
    with pytest.raises(ConfigError, match="repetition_penalty"):
        GenerationConfig(repetition_penalty=0.0)


def test_full_forward_and_decode_agree_on_log_probabilities():
    model = tiny_model()
    from hybridtf.models import stream

    text = list(PROMPTS[0])
    for item in stream(model, [text], GenerationConfig(max_new_tokens=5, temperature=1.0, repetition_penalty=1.2)):
        assert item.log_prob == pytest.approx(float(next_log_probs(model, text)[item.token]), abs=1e-10)
        text.append(item.token)
