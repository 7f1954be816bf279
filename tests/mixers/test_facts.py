"""What ``list`` says of every mixer: a source, ops, state and time; and what a count of its calls says of the time."""

from __future__ import annotations

import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hybridtf.core import ConfigError, LengthError, active
from hybridtf.core.registry import BUILT_IN
from hybridtf.testing import Subject, mixer_facts

NAMES = [name for name in active()["mixers"].configs() if active()["mixers"].origin(name) == BUILT_IN]
SHORT, LONG = 512, 4096
COMPILED_LOOPS = ("rnn", "slstm")
"""Ops of nonlinear recurrences: a step needs the one before, and torch's own compiled loop walks through them."""
LESSONS = {"tiled_attention": "one call for each pair of tiles, to be read"}
"""Mixers that are kept for their text; another one is for use."""
CHUNK = 64
CHUNKS = ("chunk_size", "mini_batch", "block_size", "compress_size", "compress_stride")
"""Options that say how many tokens are worked on at once."""
VIEWS = (
    "alias", "as_strided", "chunk", "detach", "diagonal", "empty", "empty_like", "empty_strided", "expand", "flatten", "narrow",
    "permute", "reshape", "resolve_conj", "resolve_neg", "result_type", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "to", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as",
)
"""Calls that compute nothing."""


@pytest.mark.parametrize("name", NAMES)
def test_a_mixer_says_where_it_comes_from(name: str) -> None:
    config = active()["mixers"].get(name)
    facts = mixer_facts(config.tiny())
    assert facts.source.startswith("https://")
    assert 1.0 <= facts.time_exponent <= 2.0
    if facts.state in ("fixed", "ring"):
        assert config.time_exponent == 1.0, "a state of fixed size does a fixed work a token"


def at_its_own_chunks(name: str) -> Subject:
    """The tiny instance with chunks of the length that the mixer has by default, and of ``CHUNK`` at most."""
    config_cls = active()["mixers"].get(name)
    usual = {key: config_cls.model_fields[key].default for key in CHUNKS if key in config_cls.model_fields}
    changes = {key: min(value, CHUNK) for key, value in usual.items() if value is not None}
    return Subject("mixers", config_cls.tiny().model_copy(update=changes))


def calls_and_work(subject: Subject, t: int) -> tuple[int, int]:
    """What computes in one forward without gradients, inside operators of ours too: calls, and the elements that they read.

    What torch calls inside one of its own functions counts as work, not as a call.
    """
    module = subject.build(torch.float32, max_seq_len=LONG)
    inputs = subject.inputs(module, 1, t, dtype=torch.float32)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        subject.call(module, inputs)
    skipped = {f"aten::{name}" for name in VIEWS}
    events = [event for event in prof.events() if event.name.startswith("aten::") and event.name not in skipped]
    calls = [event for event in events if event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::")]
    return len(calls), sum(math.prod(shape) for event in events for shape in event.input_shapes if shape)


def test_a_window_makes_the_time_of_attention_linear() -> None:
    tiny = active()["mixers"].get("attention").tiny()
    assert mixer_facts(tiny).time_exponent == 2.0
    assert mixer_facts(tiny.model_copy(update={"window": 4})).time_exponent == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_calls_grow_with_chunks_and_never_with_tokens(name: str) -> None:
    if name in LESSONS:
        pytest.skip(f"a lesson: {LESSONS[name]}")
    subject = at_its_own_chunks(name)
    if loops := set(mixer_facts(subject.config).ops).intersection(COMPILED_LOOPS):  # type: ignore[arg-type]
        pytest.skip(f"uses {loops}, a compiled loop")
    try:
        (calls, work), (more_calls, more_work) = (calls_and_work(subject, t) for t in (SHORT, LONG))
    except (ConfigError, LengthError) as error:
        pytest.skip(f"has no form of {LONG} tokens: {error}")
    assert (more_calls - calls) / (LONG - SHORT) < 1.0, f"{more_calls - calls} more calls for {LONG - SHORT} more tokens"
    exponent = math.log(more_work / work) / math.log(LONG / SHORT)
    declared = active()["mixers"].get(name).time_exponent
    # A convolution by blocks that double reads n log n numbers, which over these lengths looks like a power of 1.13.
    assert exponent < declared + 0.15, f"its work grows with the power {exponent:.2f} of the length; declared {declared}"
