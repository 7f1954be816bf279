"""A call whose parts do not fit is refused by every component: segments of another shape, and states of other rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridtf.core import (
    ComponentConfig,
    ConfigError,
    Context,
    Fixed,
    Growing,
    OwnClock,
    Ring,
    RowsError,
    Segments,
    State,
    StateError,
    active,
    check_call,
    debug_states,
    leaves,
    overwrite,
    snapshot,
    state_rows,
    write_rows,
)
from hybridtf.models import LanguageModelConfig
from hybridtf.testing import Subject, preset_config

KINDS = ("mixers", "channel_mixers", "blocks", "stems", "heads")
B, T, MAX_LEN = 2, 5, 16
OTHER_SHAPES = ((1, T), (B, T - 1), (B, T + 1), (B, 1), (3, T))
OTHER_SHAPES_OF_ONE = ((1, 1), (B, 0), (B, 2), (3, 1))


def _config(kind: str, name: str) -> ComponentConfig:
    registry = active()[kind]
    return preset_config(kind, name) if name in registry.presets() else registry.get(name).tiny()


def _ones(shape: tuple[int, int]) -> Segments:
    return Segments.from_ids(torch.ones(shape, dtype=torch.int64))


def _bare(n: int) -> Fixed:
    return Fixed.empty(n, {"h": (3,)}, dtype=torch.float64, device="cpu")


COMPONENTS = [(kind, name) for kind in KINDS for name in active()[kind].names()]
every_component = pytest.mark.parametrize(("kind", "name"), COMPONENTS, ids=[f"{kind}-{name}" for kind, name in COMPONENTS])


@every_component
def test_segments_of_another_shape_are_refused(kind: str, name: str) -> None:
    subject = Subject(kind, _config(kind, name))
    module = subject.build()
    inputs = subject.inputs(module, B, T)
    subject.call(module, inputs, segments=_ones((B, T)))
    for columns, shapes in ((T, OTHER_SHAPES), (1, OTHER_SHAPES_OF_ONE)):
        given = inputs.columns(slice(0, columns))
        for shape in shapes:
            said = rf"segments are of shape \({shape[0]}, {shape[1]}\), .*: segments must be \(2, {columns}\)"
            with pytest.raises(ConfigError, match=said):
                subject.call(module, given, segments=_ones(shape))


@every_component
@pytest.mark.parametrize("grad", [True, False])
def test_states_of_other_rows_are_refused(kind: str, name: str, grad: bool) -> None:
    subject = Subject(kind, _config(kind, name))
    module = subject.build()
    if not leaves(subject.init_state(module, 1)):
        pytest.skip("has no state")
    inputs = subject.inputs(module, 3, T + 1)
    prompt, step = inputs.columns(slice(0, T)), inputs.later().columns(slice(T, T + 1))
    with torch.set_grad_enabled(grad), debug_states():
        for rows in (1, 3):
            def state(rows: int = rows) -> State:
                return subject.init_state(module, rows, None if grad else MAX_LEN)

            for segments in (None, _ones((B, T))):
                _refused(subject, module, prompt.rows(slice(0, B)), state(), rows, segments)
                _refused(subject, module, prompt.columns(slice(0, 1)).rows(slice(0, B)), state(), rows, None)
            after = subject.call(module, prompt.rows(slice(0, rows)), state=state()).state
            good = step.rows(slice(0, rows))
            want = subject.call(module, good, state=snapshot(after)).y
            _refused(subject, module, step.rows(slice(0, B)), after, rows, None)
            _refused(subject, module, step.rows(slice(0, B)), after, rows, _ones((B, 1)))
            # What was refused was not consumed.
            assert torch.equal(subject.call(module, good, state=after).y, want)


def _refused(subject: Subject, module: nn.Module, inputs: Any, state: State, rows: int, segments: Segments | None) -> None:
    with pytest.raises(RowsError, match=rf"the state has {rows} rows, the input 2: the state must be one that"):
        subject.call(module, inputs, state=state, segments=segments)


def test_a_message_names_who_refused() -> None:
    with pytest.raises(ConfigError, match=r"^GLA: segments are of shape \(1, 4\), the input of \(1, 3, 16\): "):
        Subject("mixers", _config("mixers", "gla")).build()(torch.zeros(1, 3, 16).double(), segments=_ones((1, 4)))


def test_attention_that_looks_both_ways_refuses_segments_of_another_shape() -> None:
    for name in ("attention", "longformer", "bigbird", "relative_attention"):
        subject = Subject("mixers", _config("mixers", name))
        module = subject.build(causal=False)
        for shape in OTHER_SHAPES:
            with pytest.raises(ConfigError, match="segments are of shape"):
                subject.call(module, subject.inputs(module, B, T), segments=_ones(shape))


def test_a_context_that_does_not_fit_is_refused() -> None:
    subject = Subject("mixers", _config("mixers", "cross_attention"))
    module = subject.build()
    x = torch.zeros(B, T, subject.d_model, dtype=torch.float64)
    for rows in (1, 3):
        for state in (None, subject.init_state(module, B)):
            with pytest.raises(ConfigError, match=f"the context has {rows} rows, the input 2"):
                module(x, state=state, context=Context(x[:1].expand(rows, -1, -1)))
    for shape in OTHER_SHAPES:
        with pytest.raises(ConfigError, match="segments are of shape"):
            module(x, context=Context(x, _ones(shape)))


def test_a_stack_and_a_model_refuse_at_their_door() -> None:
    model = LanguageModelConfig(vocab_size=7, d_model=12, pattern="x*2", blocks={"x": {"mixer": {"type": "gru"}}}).build()
    x, ids = torch.zeros(B, T, 12), torch.ones(B, T, dtype=torch.int64)
    for shape in OTHER_SHAPES:
        with pytest.raises(ConfigError, match="Stack: segments are of shape"):
            model.stack(x, {}, segments=_ones(shape))
    for rows in (1, 3):
        with pytest.raises(ConfigError, match=f"Stack: the state has {rows} rows"):
            model.stack(x, {}, state=model.stack.init_state(rows))
        with pytest.raises(RowsError, match=f"the state has {rows} rows, the token ids 2"):
            model(ids, state=model.init_state(rows))


# -- the pieces ----------------------------------------------------------------------------------------------------


def test_rows_are_found_in_any_nesting() -> None:
    assert state_rows(_bare(3)) == state_rows({"a": (), "b": [{}, OwnClock(_bare(3), 2)]}) == 3
    assert [state_rows(empty) for empty in (None, (), {}, {"a": ((), None)}, OwnClock((), 2))] == [None] * 5
    assert state_rows(_bare(0)) == 0


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (2, 0), (2, 4), (2, 4, 3, 6)])
def test_what_fits_passes(shape: tuple[int, ...]) -> None:
    x = torch.zeros(*shape)
    check_call(x, x, None, None)
    check_call(x, x, _ones(shape[:2]), {"a": _bare(shape[0])})
    check_call(x, x, None, ())


@pytest.mark.parametrize("rows", [1, 3])
def test_leaves_refuse_other_rows(rows: int) -> None:
    where: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    new: dict[str, Tensor] = {"h": torch.zeros(rows, 1, 3, dtype=torch.float64)}
    for call in (
        lambda: _bare(2).advance({"h": new["h"][:, 0]}, None, 1),
        lambda: Growing.empty(2, {"h": (3,)}, **where).append(new, None),
        lambda: Growing.empty(2, {"h": (3,)}, max_len=4, **where).append(new, None),
        lambda: Ring.empty(2, {"h": (3,)}, window=2, **where).push(new, None),
    ):
        with pytest.raises(RowsError, match=f"this state has 2 rows; it was given {rows} of 'h', and must be given 2"):
            call()


@pytest.mark.parametrize("rows", [1, 3])
def test_whole_states_refuse_other_rows(rows: int) -> None:
    with pytest.raises(RowsError, match=rf"state\['a'\]: 2 rows cannot take {rows}"):
        overwrite({"a": _bare(2)}, {"a": _bare(rows)})
    with pytest.raises(RowsError, match=f"state: 2 rows cannot take {rows}"):
        write_rows(_bare(4), torch.tensor([0, 1]), _bare(rows))


def test_an_error_of_rows_is_of_the_state_and_of_the_call() -> None:
    assert issubclass(RowsError, StateError)
    assert issubclass(RowsError, ConfigError)
