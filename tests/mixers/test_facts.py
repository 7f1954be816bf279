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
COMPILED_LOOPS = ("rnn",)
"""Ops of nonlinear recurrences: a step needs the one before, and torch's own compiled loop walks through them."""
CHUNKS = ("chunk_size", "mini_batch")
VIEWS = (
    "alias", "as_strided", "chunk", "detach", "diagonal", "empty", "empty_like", "empty_strided", "expand", "flatten", "narrow",
    "permute", "reshape", "resolve_conj", "resolve_neg", "result_type", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "to", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as",
)
"""Calls that compute nothing."""


@pytest.mark.parametrize("name", NAMES)
def test_a_mixer_says_where_it_comes_from(name: str) -> None:
    facts = mixer_facts(active()["mixers"].get(name).tiny())
    assert facts.source.startswith("https://")
    assert 1.0 <= facts.time_exponent <= 2.0
    if facts.state in ("fixed", "ring"):
        assert facts.time_exponent == 1.0, "a state of fixed size does a fixed work a token"


def at_its_own_chunks(name: str) -> Subject:
    """The tiny instance with chunks of the length that the mixer has by default."""
    config_cls = active()["mixers"].get(name)
    tiny = config_cls.tiny()
    usual = {key: config_cls.model_fields[key].default for key in CHUNKS if key in config_cls.model_fields}
    return Subject("mixers", tiny.model_copy(update={key: value for key, value in usual.items() if value is not None}))


def calls_and_work(subject: Subject, t: int) -> tuple[int, int]:
    """What computes in one forward without gradients, inside operators of ours too: calls, and the elements that they read."""
    module = subject.build(torch.float32, max_seq_len=LONG)
    inputs = subject.inputs(module, 1, t, dtype=torch.float32)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        subject.call(module, inputs)
    skipped = {f"aten::{name}" for name in VIEWS}
    events = [event for event in prof.events() if event.name.startswith("aten::") and event.name not in skipped]
    return len(events), sum(math.prod(shape) for event in events for shape in event.input_shapes if shape)


@pytest.mark.parametrize("name", NAMES)
def test_calls_grow_with_chunks_and_never_with_tokens(name: str) -> None:
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
    assert exponent < declared + 0.1, f"its work grows with the power {exponent:.2f} of the length; declared {declared}"
