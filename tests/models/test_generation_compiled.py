"""The compiled decode step: the same text, one graph, and memory that never moves."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from hybridtf.core import ConfigError, LengthError, debug_states, leaves
from hybridtf.models import GenerationConfig, generate, read_prompt
from hybridtf.models.generation import compiled, prefill
from hybridtf.models.generation.compiled import CompiledRows, capacity_for, compiled_step
from tests.models.tiny_models import PATTERNS, PROMPTS, tiny_model

SAMPLING = {"max_new_tokens": 9, "temperature": 1.1, "top_p": 0.95, "repetition_penalty": 1.2}


@pytest.mark.parametrize(("pattern", "backend"), [*((p, "eager") for p in PATTERNS), ("m a w", "aot_eager")])
def test_the_text_is_that_of_eager_decoding(pattern, backend):
    model = tiny_model(pattern)
    free = generate(model, PROMPTS, GenerationConfig(**SAMPLING))
    stops = (free[0][2], free[3][4])
    for batch_size in (None, 2):
        plain = GenerationConfig(**SAMPLING, stop_tokens=stops)
        fast = plain.model_copy(update={"compile": True, "compile_backend": backend})
        with debug_states():
            assert generate(model, PROMPTS, fast, batch_size=batch_size) == generate(model, PROMPTS, plain)


@pytest.mark.parametrize("pattern", ["a", "w"])
def test_a_step_that_is_not_compiled_after_all_writes_where_it_should(pattern):
    """Eager code reads lengths that a step has written over."""
    model, fast = tiny_model(pattern), GenerationConfig(**SAMPLING, compile=True, compile_backend="eager")
    with torch.compiler.set_stance("force_eager"):
        found = generate(model, PROMPTS[:1], fast)
    assert found == generate(model, PROMPTS[:1], GenerationConfig(**SAMPLING))


@pytest.mark.slow
def test_the_text_is_that_of_eager_decoding_with_inductor():
    model = tiny_model("m a w")
    fast = GenerationConfig(**SAMPLING, compile=True)
    assert fast.compile_backend == "inductor"
    assert generate(model, PROMPTS, fast) == generate(model, PROMPTS, GenerationConfig(**SAMPLING))


def test_one_graph_for_all_layers_steps_and_calls(monkeypatch):
    model = tiny_model("m a w m a w")
    counter = CompileCounterWithBackend("eager")
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, *, backend, **options: real(f, backend=counter, **options))
    counters.clear()
    config = GenerationConfig(max_new_tokens=12, compile=True, compile_backend="eager")
    for prompts in (PROMPTS, [[1], [2, 3], [4] * 20, [5]]):
        generate(model, prompts, config)
    assert counter.frame_count == 1
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    generate(model, PROMPTS, config, batch_size=2)  # another batch size is another graph, once
    generate(model, [*PROMPTS, *PROMPTS], config, batch_size=2)
    assert counter.frame_count == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_addresses_stay_over_steps_and_changes_of_rows(backend):
    model = tiny_model("m a w").eval()
    scores, state = prefill(model, PROMPTS, 100, 0, max_len=64)
    rows = CompiledRows(model, backend, scores, state)
    tensors = [t for leaf in leaves(rows.state) for t in leaf.every_tensor()]
    places = [t.data_ptr() for t in tensors]
    held = [t for t in tensors if t.numel()]
    assert len({t.data_ptr() for t in held}) == len(held)
    kept = list(range(4))
    for step in range(6):
        tokens = rows.scores.argmax(-1)
        if step == 2:
            kept = [0, 2]
            rows.step(tokens, [0, 2], [10, 10], None)
        elif step == 4:
            rows.step(tokens, [0, 1], [10, 10], prefill(model, [[7, 7]], 100, 0, max_len=64))
            kept = [0, 2, 1]
        else:
            rows.step(tokens, list(range(len(kept))), [10] * len(kept), None)
        assert rows.slots == kept
        assert [t.data_ptr() for leaf in leaves(rows.state) for t in leaf.every_tensor()] == places
    lengths = leaves(rows.state)[0].length.tolist()
    assert [lengths[slot] for slot in rows.slots] == [len(PROMPTS[0]) + 6, len(PROMPTS[2]) + 6, 2 + 1]


def test_a_prefix_feeds_a_compiled_step():
    model = tiny_model("m a w")
    prefix = read_prompt(model, [1, 2, 3])
    more = [[], [4, 5]]
    fast = GenerationConfig(**SAMPLING, compile=True, compile_backend="eager")
    assert generate(model, more, fast, prefix=prefix) == generate(model, more, GenerationConfig(**SAMPLING), prefix=prefix)


def test_more_models_and_sizes_than_torch_compiles_by_itself(monkeypatch):
    model = tiny_model("m")
    fast = GenerationConfig(max_new_tokens=2, compile=True, compile_backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        for n in (1, 2, 3):
            generate(model, [[1]] * n, fast)
        assert torch._dynamo.config.recompile_limit == 2
    monkeypatch.setattr(compiled, "_GRAPHS", 2)  # each model has a limit of its own
    for seed in range(3):
        generate(tiny_model("m", seed=seed), [[1]], fast)
    with pytest.raises(ConfigError, match="has 2 compiled decode steps already"):
        generate(model, [[1]] * 5, fast)


def test_a_compiled_step_is_made_once_and_goes_with_its_model():
    model = tiny_model("m")
    assert compiled_step(model, "eager") is compiled_step(model, "eager")
    generate(model, [[1]], GenerationConfig(max_new_tokens=3, compile=True, compile_backend="eager"))
    gone, known = weakref.ref(model), len(compiled._steps)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    assert len(compiled._steps) == known - 1


def test_capacities():
    assert [capacity_for(n) for n in (1, 256, 257, 1000)] == [256, 256, 512, 1024]


def test_refusals():
    model = tiny_model("m a")
    with pytest.raises(ConfigError, match=r"compile_backend = 'indutcor' is not known to torch.compile"):
        generate(model, PROMPTS, GenerationConfig(compile=True, compile_backend="indutcor"))
    model.stack.blocks()[1].mixer.cannot = {"compile": "it has to look where documents are"}
    with pytest.raises(ConfigError, match=r"a compiled decode step is not possible with this model: .*look where documents"):
        generate(model, PROMPTS, GenerationConfig(compile=True, compile_backend="eager"))
    assert generate(model, [[1]], GenerationConfig(max_new_tokens=2))


def test_a_learned_position_table_ends_the_text_as_it_does_eagerly():
    stem = {"type": "token_embedding", "position": {"type": "learned"}}
    model = tiny_model("a", stem=stem, max_seq_len=6)
    fits = {"max_new_tokens": 4}  # 3 + 4 tokens, of which the last is never read
    fast = {"compile": True, "compile_backend": "eager"}
    plain = generate(model, [[1, 2, 3]], GenerationConfig(**fits))
    assert generate(model, [[1, 2, 3]], GenerationConfig(**fits, **fast)) == plain
    for more in ({}, fast):
        with pytest.raises(LengthError, match="7 tokens is longer than the learned position table"):
            generate(model, [[1, 2, 3]], GenerationConfig(max_new_tokens=5, **more))
