"""A prompt that is read once, and rows that come and go."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import ConfigError, DataError, StateError, debug_states, leaves, state_bytes
from hybridtf.models import GenerationConfig, generate, read_prompt, speculate, stream
from hybridtf.models.generation import prefill
from tests.models.tiny_models import PATTERNS, PROMPTS, tiny_model

PROMPT = [5, 6, 7, 8, 9, 10, 11]


def items(*args, **more):
    return [(item.row, item.token, item.log_prob, item.last) for item in stream(*args, **more)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_continuing_a_prefix_is_reading_the_prompt_bit_for_bit(pattern, dtype):
    model = tiny_model(pattern).to(dtype)
    config = GenerationConfig(max_new_tokens=9, temperature=1.2, top_p=0.9, repetition_penalty=1.2)
    want = items(model, [PROMPT], config)
    with debug_states():
        prefix = read_prompt(model, PROMPT)
        for _ in range(2):  # nothing is consumed
            assert items(model, [[]], config, prefix=prefix) == want


@pytest.mark.parametrize("pattern", PATTERNS)
def test_many_continuations_of_one_prefix(pattern):
    model = tiny_model(pattern)
    more = [[1, 2], [], [3, 4, 5, 6, 7, 8, 9], [2]]
    config = {"max_new_tokens": 8, "temperature": 1.0, "repetition_penalty": 1.3, "prefill_chunk": 3}
    prefix = read_prompt(model, torch.tensor(PROMPT), prefill_chunk=2)
    want = generate(model, [[*PROMPT, *rest] for rest in more], GenerationConfig(**config))
    for batch_size in (None, 1, 3):
        assert generate(model, more, GenerationConfig(**config), prefix=prefix, batch_size=batch_size) == want
    # As many draws from one prompt as one likes, each with its own generator.
    draws = generate(model, [[]] * 5, GenerationConfig(seed=3, **config), prefix=prefix)
    assert draws == [generate(model, [PROMPT], GenerationConfig(seed=3 + i, **config))[0] for i in range(5)]


def test_what_a_prefix_holds():
    model = tiny_model("m a w")
    prefix = read_prompt(model, PROMPT)
    assert prefix.tokens == tuple(PROMPT)
    assert prefix.nbytes == state_bytes(prefix.state) + 17 * 8
    # Seven keys and values, and not a slot more.
    growing = [leaf for leaf in leaves(prefix.state) if type(leaf).__name__ == "Growing"]
    assert [leaf.capacity for leaf in growing] == [7]
    before = [t.clone() for leaf in leaves(prefix.state) for t in leaf.every_tensor()]
    generate(model, [[1], [2, 3]], GenerationConfig(max_new_tokens=4), prefix=prefix)
    after = [t for leaf in leaves(prefix.state) for t in leaf.every_tensor()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(t.requires_grad for t in after)


def test_wrong_prefixes():
    model = tiny_model()
    with pytest.raises(StateError, match="read by another model"):
        generate(model, [[1]], prefix=read_prompt(tiny_model(seed=3), PROMPT))
    with pytest.raises(DataError, match="prompt 0 is empty"):
        read_prompt(model, [])
    with pytest.raises(DataError, match="outside of the vocabulary"):
        generate(model, [[-1]], prefix=read_prompt(model, PROMPT))


# -- rows that come and go ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_small_batch_gives_what_a_whole_one_gives(pattern, batch_size):
    model = tiny_model(pattern)
    prompts = [*PROMPTS, [9], [8, 7, 6], [1, 1]]
    free = generate(model, prompts, GenerationConfig(max_new_tokens=8))
    config = {"max_new_tokens": 8, "temperature": 0.7, "repetition_penalty": 1.1, "stop_tokens": (free[0][1], free[3][3])}
    want = generate(model, prompts, GenerationConfig(seed=7, **config))
    assert len({len(row) for row in want}) > 1
    with debug_states():
        assert generate(model, prompts, GenerationConfig(seed=7, **config), batch_size=batch_size) == want


def test_a_place_is_taken_at_once_and_never_more_than_there_are():
    model = tiny_model("m a")
    widths = []
    model.register_forward_pre_hook(lambda _, args: widths.append(tuple(args[0].shape)))
    prompts = [[1, 2], [3], [4, 5, 6]]
    found = list(stream(model, prompts, GenerationConfig(max_new_tokens=3), batch_size=2))
    assert [item.row for item in found] == [0, 1, 0, 1, 0, 1, 2, 2, 2]
    assert widths == [(2, 2), (2, 1), (2, 1), (1, 3), (1, 1), (1, 1)]
    with pytest.raises(ConfigError, match="batch_size must be at least 1; got 0"):
        generate(model, prompts, batch_size=0)


def test_rows_end_apart_and_others_join_beside_them():
    model = tiny_model("m a w")
    stop = generate(model, [PROMPTS[1]], GenerationConfig(max_new_tokens=4))[0][1]
    widths = []
    model.register_forward_pre_hook(lambda _, args: widths.append(tuple(args[0].shape)))
    config = GenerationConfig(max_new_tokens=6, stop_tokens=(stop,))
    got = generate(model, [PROMPTS[0], PROMPTS[1], PROMPTS[3]], config, batch_size=2)
    assert got == generate(model, [PROMPTS[0], PROMPTS[1], PROMPTS[3]], config)
    assert (1, 1) in widths  # a running row stepped while the next prompt was read
    assert widths.index((1, 5)) < len(widths) - 1


def test_a_chunked_prefill_after_a_prefix():
    model = tiny_model("m a w")
    prefix = read_prompt(model, PROMPT)
    more = [[1] * 9, [], [2] * 4]
    want = torch.cat([prefill(model, [[*PROMPT, *rest]], 100, 1)[0] for rest in more])
    for chunk in (1, 4, 100):
        torch.testing.assert_close(prefill(model, more, chunk, 1, prefix=prefix)[0], want, rtol=0, atol=1e-10)


def test_a_model_that_does_not_know_padding_reads_prompts_of_one_length_only():
    model = tiny_model("m a w")
    model.stack.blocks()[0].mixer.cannot = {"segment": "its filter spans the row"}
    config = GenerationConfig(max_new_tokens=5)
    message = r"unequal lengths is not possible with this model: stack\.layers\.0\.mixer \(Mamba2\) says: its filter"
    with pytest.raises(ConfigError, match=message):
        generate(model, PROMPTS, config)
    want = [generate(model, [prompt], config)[0] for prompt in PROMPTS]
    assert generate(model, PROMPTS, config, batch_size=1) == want
    assert generate(model, [PROMPTS[0], PROMPTS[0]], config) == [want[0], want[0]]
    draft = tiny_model("m", seed=9)
    assert [speculate(model, draft, [prompt], config).tokens[0] for prompt in PROMPTS] == want
    for pair in ((model, draft), (draft, model)):
        with pytest.raises(ConfigError, match="speculation on several rows"):
            speculate(*pair, [PROMPTS[0], PROMPTS[0]], config)
