"""Speculation: the same text where greedy, the same distribution where drawn, on every kind of state."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hybridtf.core import ConfigError, DataError, debug_states
from hybridtf.models import GenerationConfig, Speculation, generate, speculate, stream
from hybridtf.models.generation import distribution
from tests.models.tiny_models import PATTERNS, PROMPTS, tiny_model


@pytest.mark.parametrize("n_draft", [1, 3, 4, 20])
@pytest.mark.parametrize("draft", ["m", "w a"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_greedy_text_is_that_of_the_model_alone(pattern, draft, n_draft):
    model = tiny_model(pattern)
    config = GenerationConfig(max_new_tokens=13)
    with debug_states():
        got = speculate(model, near(model, draft), PROMPTS, config, n_draft=n_draft)
    assert got.tokens == generate(model, PROMPTS, config)
    for made, rounds, accepted, drafted in zip(got.tokens, got.rounds, got.accepted, got.drafted, strict=True):
        # The first token comes with the prompt; each round adds what it keeps and one.
        assert len(made) == 1 + rounds + accepted
        assert accepted <= drafted <= n_draft * rounds
    assert got.acceptance == sum(got.accepted) / sum(got.drafted)


def near(model, pattern):
    """A draft that is often, and not always, right: the model's own embedding and head around other layers."""
    draft = tiny_model(pattern, seed=9, sharpen=1.0)
    with torch.no_grad():
        draft.stem.embedding.weight.copy_(model.stem.embedding.weight)
        draft.final_norm.weight.copy_(model.final_norm.weight)
    return draft


def test_rows_keep_different_numbers_of_tokens():
    model = tiny_model("m a w")
    draft = near(model, "a")
    kept = []
    run = Speculation(model, draft, PROMPTS, GenerationConfig(max_new_tokens=13))
    before = [0] * len(PROMPTS)
    for item in run:
        if item.row == len(PROMPTS) - 1 and run.accepted != before:
            kept.append(tuple(now - old for now, old in zip(run.accepted, before, strict=True)))
            before = list(run.accepted)
    assert any(len(set(row)) > 1 for row in kept)
    assert 0 < sum(run.accepted) < sum(run.drafted)


def test_a_model_that_drafts_for_itself_is_always_right():
    model = tiny_model("m a w")
    for config in (GenerationConfig(max_new_tokens=16), GenerationConfig(max_new_tokens=16, temperature=1.0, min_p=0.02)):
        got = speculate(model, model, PROMPTS, config)
        assert got.acceptance == 1
        assert got.rounds == [3] * len(PROMPTS)  # 1 + 3 * (4 + 1)


def test_stop_tokens_and_the_last_token():
    model = tiny_model("m a w")
    draft = near(model, "m")
    free = generate(model, PROMPTS, GenerationConfig(max_new_tokens=11))
    for stops in ((free[0][2],), (free[0][5], free[1][1]), tuple(range(17))):
        config = GenerationConfig(max_new_tokens=11, stop_tokens=stops)
        items = list(Speculation(model, draft, PROMPTS, config))
        plain = list(stream(model, PROMPTS, config))
        for row in range(len(PROMPTS)):
            got = [(item.token, item.last) for item in items if item.row == row]
            assert got == [(item.token, item.last) for item in plain if item.row == row]
            log_probs = [item.log_prob for item in items if item.row == row]
            assert log_probs == pytest.approx([item.log_prob for item in plain if item.row == row], abs=1e-9)
    one = GenerationConfig(max_new_tokens=1)
    assert speculate(model, draft, PROMPTS, one).tokens == generate(model, PROMPTS, one)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_drawn_row_alone_equals_the_row_in_a_batch(pattern):
    model = tiny_model(pattern)
    config = {"max_new_tokens": 10, "temperature": 1.3, "top_p": 0.95, "repetition_penalty": 1.2, "prefill_chunk": 3}
    batch = speculate(model, near(model, "m"), PROMPTS, GenerationConfig(seed=5, **config))
    for i, prompt in enumerate(PROMPTS):
        alone = speculate(model, near(model, "m"), [prompt], GenerationConfig(seed=5 + i, **config))
        assert alone.tokens[0] == batch.tokens[i]
        assert (alone.rounds[0], alone.accepted[0]) == (batch.rounds[i], batch.accepted[i])


def test_a_greedy_choice_with_a_penalty():
    model = tiny_model("m a w")
    config = GenerationConfig(max_new_tokens=12, repetition_penalty=1.6)
    assert speculate(model, near(model, "a"), PROMPTS, config).tokens == generate(model, PROMPTS, config)


# -- the distribution --------------------------------------------------------------------------------------------------

VOCAB, LENGTH, N = 3, 4, 3000


@torch.no_grad()
def exact(model, prompt, config):
    """The probability of every sequence of LENGTH tokens."""
    known = {}
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        share = 1.0
        for i, token in enumerate(tokens):
            text = (*prompt, *tokens[:i])
            if text not in known:
                scores = model.eval()(torch.tensor([text])).logits[:, -1]
                known[text] = distribution(scores, config, [torch.tensor(text)])[0]
            share *= float(known[text][token])
        known[tokens, "whole"] = share
    return {key[0]: share for key, share in known.items() if key[-1] == "whole"}


def surprise(counts, shares):
    """Chi-square of the counts, in standard deviations above its mean; cells of few expected are one."""
    cells = [(counts.get(tokens, 0), share * N) for tokens, share in shares.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5] + ([(sum(a for a, _ in rare), sum(b for _, b in rare))] if rare else [])
    if any(want < 1e-9 and got for got, want in cells):
        return math.inf
    freedom = len(cells) - 1
    chi = sum((got - want) ** 2 / want for got, want in cells if want >= 1e-9)
    return (chi - freedom) / math.sqrt(2 * freedom)


CONFIGS = {
    "plain": {"temperature": 1.0},
    "cut": {"temperature": 1.4, "top_p": 0.9, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize(
    ("pattern", "options"),
    [*((p, "plain") for p in PATTERNS), ("m a w", "cut"), *(pytest.param(p, "cut", marks=pytest.mark.slow) for p in "awm")],
)
def test_drawn_text_has_the_distribution_of_the_model(pattern, options):
    model = tiny_model(pattern, vocab=VOCAB, sharpen=1.5)
    draft = tiny_model("m", vocab=VOCAB, seed=4, sharpen=1.5)
    config = GenerationConfig(max_new_tokens=LENGTH, seed=1, **CONFIGS[options])
    got = speculate(model, draft, [[1, 2]] * N, config, n_draft=2)
    counts: dict[tuple[int, ...], int] = {}
    for row in got.tokens:
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    shares = exact(model, (1, 2), config)
    assert sum(shares.values()) == pytest.approx(1)
    assert surprise(counts, shares) < 3.5
    assert surprise(counts, exact(draft, (1, 2), config)) > 20  # the test would see a draft that is simply believed
    assert 0.1 < got.acceptance < 0.98


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_speculated():
    model, draft = tiny_model("a"), tiny_model("m")
    with pytest.raises(ConfigError, match="these have 5 and 17 tokens"):
        speculate(model, tiny_model("m", vocab=5), PROMPTS)
    with pytest.raises(ConfigError, match="n_draft must be at least 1; got 0"):
        speculate(model, draft, PROMPTS, n_draft=0)
    with pytest.raises(ConfigError, match="no compiled form"):
        speculate(model, draft, PROMPTS, GenerationConfig(compile=True))
    with pytest.raises(DataError, match="prompt 0 is empty"):
        speculate(model, draft, [[]])
    with pytest.raises(DataError, match="prompt 1 has a token outside of the vocabulary: ids are 0 to 16"):
        speculate(model, draft, [[1], [17]])
    assert speculate(model, draft, []).tokens == []


@pytest.mark.parametrize("law", ["crop", "cut"])
def test_a_model_that_cannot_be_rolled_back_is_refused_with_its_reason(law):
    model, draft = tiny_model("a m"), tiny_model("m")
    mixer = model.stack.blocks()[1].mixer
    mixer.cannot = {law: "its state forgets what it was"}
    message = r"not possible with this model: stack\.layers\.1\.mixer \(Mamba2\) says: its state forgets what it was"
    with pytest.raises(ConfigError, match=message):
        speculate(model, draft, PROMPTS)
    if law == "cut":
        with pytest.raises(ConfigError, match=message):
            generate(model, PROMPTS)
        with pytest.raises(ConfigError, match="drafting is not possible"):
            speculate(draft, model, PROMPTS)
    else:  # a draft is never cropped
        config = GenerationConfig(max_new_tokens=8)
        assert speculate(draft, model, PROMPTS, config).tokens == generate(draft, PROMPTS, config)


@pytest.mark.parametrize("short", ["model", "draft"])
def test_a_learned_position_table_is_no_shorter_for_drafting(short):
    stem = {"type": "token_embedding", "position": {"type": "learned"}}
    tables = {"model": 40, "draft": 40, short: 15}
    model = tiny_model("a", stem=stem, max_seq_len=tables["model"])
    draft = tiny_model("a", seed=5, stem=stem, max_seq_len=tables["draft"])
    prompts = [[1] * 8, [2, 3]]
    config = GenerationConfig(max_new_tokens=8)  # 8 + 8 tokens, of which the last is never read
    assert speculate(model, draft, prompts, config, n_draft=6).tokens == generate(model, prompts, config)


def test_dropout_is_off_in_both_and_modes_come_back():
    model, draft = tiny_model("a").train(), tiny_model("m").eval()
    run = iter(Speculation(model, draft, PROMPTS, GenerationConfig(max_new_tokens=4)))
    next(run)
    assert not model.training
    run.close()
    assert model.training
    assert not draft.training
