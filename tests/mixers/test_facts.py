"""What ``list`` says of every mixer: a source, ops, state and time; and what a count of its calls says of the time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hybridtf.core import ConfigError, LengthError, active
from hybridtf.core.registry import BUILT_IN
from hybridtf.cost import count_flops
from hybridtf.mixers.attention import AttentionConfig
from hybridtf.testing import Subject, mixer_facts

NAMES = [name for name in active()["mixers"].configs() if active()["mixers"].origin(name) == BUILT_IN]
SHORT, LONG = 512, 4096
COMPILED_LOOPS = ("rnn", "slstm")
"""Ops of nonlinear recurrences: a step needs the one before, and torch's own compiled loop walks through them."""
LESSONS = {"tiled_attention": "one call for each pair of tiles, to be read"}
"""Mixers that are kept for their text; another one is for use."""
FORMULA_SEES_NO_MARKS = {"longformer": "counts each token's look at all the others, which is global tokens' alone"}
"""Mixers of whose operations the formula of an op, which is told shapes alone, says more than is done."""
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


def calls_and_work(subject: Subject, module: nn.Module, t: int) -> tuple[int, int]:
    """What computes in one forward without gradients, inside operators of ours too: calls, and the elements that they read.

    What torch calls inside one of its own functions counts as work, not as a call.
    """
    inputs = subject.inputs(module, 1, t, dtype=torch.float32)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        subject.call(module, inputs)
    skipped = {f"aten::{name}" for name in VIEWS}
    events = [event for event in prof.events() if event.name.startswith("aten::") and event.name not in skipped]
    calls = [event for event in events if event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::")]
    return len(calls), sum(math.prod(shape) for event in events for shape in event.input_shapes if shape)


@dataclass(frozen=True)
class Growth:
    """How one forward grows from ``SHORT`` to ``LONG`` tokens."""

    calls: float
    """More calls for each token more."""
    elements: float
    """Power of the length with which the elements grow that calls read. It sees no work inside a call."""
    flops: float
    """The same of the operations of matrix products, attention and FFTs. It sees no elementwise work."""


def growth(subject: Subject) -> Growth:
    """Measured, on one row; raises what a mixer says that has no form of so many tokens."""
    module = subject.build(torch.float32, max_seq_len=LONG)
    (calls, elements), (more_calls, more_elements) = (calls_and_work(subject, module, t) for t in (SHORT, LONG))
    flops, more_flops = (operations(subject, module, t) for t in (SHORT, LONG))
    return Growth((more_calls - calls) / (LONG - SHORT), power(elements, more_elements), power(flops, more_flops))


def power(short: int, long: int) -> float:
    return math.log(long / short) / math.log(LONG / SHORT)


def operations(subject: Subject, module: nn.Module, t: int) -> int:
    inputs = subject.inputs(module, 1, t, dtype=torch.float32)
    with torch.no_grad():
        return count_flops(lambda: subject.call(module, inputs))


def check_time(found: Growth, declared: float) -> None:
    # A convolution by blocks that double reads n log n numbers and does n log^2 n operations, which over these lengths look
    # like powers of 1.13 and 1.28.
    assert found.elements < declared + 0.15, f"what it reads grows with the power {found.elements:.2f}; declared {declared}"
    assert found.flops < declared + 0.3, f"its operations grow with the power {found.flops:.2f}; declared {declared}"


def test_a_window_makes_the_time_of_attention_linear() -> None:
    tiny = active()["mixers"].get("attention").tiny()
    assert mixer_facts(tiny).time_exponent == 2.0
    assert mixer_facts(tiny.model_copy(update={"window": 4})).time_exponent == 1.0


def test_the_time_of_a_combinator_is_that_of_what_it_holds() -> None:
    registry = active()["mixers"]
    attention, mamba2, lora = (registry.get(name).tiny() for name in ("attention", "mamba2", "lora"))
    near = attention.model_copy(update={"window": 4})
    for branches, time in (((attention, mamba2), 2.0), ((near, mamba2), 1.0), ((mamba2, lora), 2.0)):
        assert mixer_facts(registry.get("parallel")(branches=branches)).time_exponent == time
    for name in NAMES:
        if registry.get(name).combinator:
            assert "time_exponent" not in vars(registry.get(name)), f"{name} declares a time of its own"


class Quadratic(AttentionConfig):
    """Full attention that says that it is linear."""

    time_exponent: ClassVar[float] = 1.0


def test_a_mixer_that_hides_its_square_in_one_call_is_caught() -> None:
    found = growth(Subject("mixers", Quadratic(n_heads=2, head_dim=4)))
    check_time(found, 2.0)
    with pytest.raises(AssertionError, match="operations grow with the power"):
        check_time(found, Quadratic.time_exponent)


@pytest.mark.parametrize("name", NAMES)
def test_calls_grow_with_chunks_and_never_with_tokens(name: str) -> None:
    if name in LESSONS:
        pytest.skip(f"a lesson: {LESSONS[name]}")
    subject = at_its_own_chunks(name)
    if loops := set(mixer_facts(subject.config).ops).intersection(COMPILED_LOOPS):  # type: ignore[arg-type]
        pytest.skip(f"uses {loops}, a compiled loop")
    try:
        found = growth(subject)
    except (ConfigError, LengthError) as error:
        pytest.skip(f"has no form of {LONG} tokens: {error}")
    assert found.calls < 1.0, f"{found.calls:.2f} more calls for each token more"
    if name in FORMULA_SEES_NO_MARKS:
        found = replace(found, flops=0.0)
    check_time(found, mixer_facts(subject.config).time_exponent)  # type: ignore[arg-type]
