"""States as objects: beams, rows that come and go, resets, reuse, crops, one form for all calls."""

from __future__ import annotations

import math

import pytest
import torch

from hybridtf.core import Fixed, Segments, StateError, crop, leaves, reorder, state_lengths
from hybridtf.testing.compare import close_states
from hybridtf.testing.laws_state import form
from tests.field.layers import F64, HYBRID, every, hybrid, mixer, model, same, solo, steps, with_data


@pytest.mark.parametrize("pattern", ["m a w r", "m m", "a a", "w r"])
@torch.no_grad()
def test_reordered_beams_go_on_like_reordered_prompts(pattern):
    net, ids = hybrid(pattern), torch.randint(0, 17, (3, 5))
    index = torch.tensor([2, 0, 0])
    for max_len in (None, 9):
        state = reorder(net(ids, state=net.init_state(3, max_len)).state, index)
        step = torch.randint(0, 17, (3, 2))
        want = net(torch.cat([ids[index], step], 1)).logits
        for t in range(2):  # the two copies of row 0 take different tokens
            out = net(step[:, t : t + 1], state=state)
            state = out.state
            same(out.logits, want[:, 5 + t : 6 + t])


@torch.no_grad()
def test_rows_are_filtered_before_any_token_down_to_one_and_to_none():
    net, ids = hybrid("a w m"), torch.randint(0, 17, (3, 10))
    state = reorder(net.init_state(3), torch.tensor([0, 2]))
    state = net(ids[[0, 2], :9], state=state).state
    one = net(ids[2:, 9:], state=reorder(state, torch.tensor([1])))
    same(one.logits, net(ids[2:]).logits[:, 9:])
    none = reorder(one.state, torch.zeros(0, dtype=torch.int64))
    assert net(ids[:0, :1], state=none).logits.shape == (0, 1, 17)


@pytest.mark.parametrize("pattern", ["a m", "m a", "r", "a w m"])
@torch.no_grad()
def test_a_stack_goes_back_only_where_every_layer_can_and_names_the_one_that_cannot(pattern):
    net, ids = hybrid(pattern), torch.randint(0, 17, (1, 9))
    state = net(ids[:, :6], state=net.init_state(1)).state
    # Keys and values that grow can always be cropped; a window of 4 that has seen 6 tokens no longer holds the older ones.
    layer = next(i for i, key in enumerate(pattern.split()) if key != "a")
    with pytest.raises(StateError, match=rf"state\['layers'\]\[{layer}\]"):
        crop(state, 2)
    state = net(ids[:, :6], state=net.init_state(1), keep=2).state
    same(net(ids[:, 4:], state=crop(state, 2)).logits, net(ids).logits[:, 4:])


@every
@torch.no_grad()
def test_a_new_prompt_on_a_used_state_forgets_the_old_one(name):
    layer = mixer(name, "segment", "cut")
    old, new = torch.randn(2, 9, 16, dtype=F64), torch.randn(2, 4, 16, dtype=F64)
    for max_len in (None, 20):
        _, used = layer(old, state=layer.init_state(2, max_len))
        fresh = Segments.from_lengths([[4], [4]], continues=False)
        y, state = layer(new, segments=fresh, state=used)
        want, want_state = layer(new, state=layer.init_state(2, max_len))
        same(y, want)
        close_states(state, want_state, tol=1e-10, what="after the new prompt")
        lengths = state_lengths(state)
        assert lengths is None or lengths.tolist() == [4, 4]
        later = torch.randn(2, 2, 16, dtype=F64)
        same(steps(layer, later, state)[0], steps(layer, later, want_state)[0])


@every
@pytest.mark.parametrize("left_behind", [None, 1e30, float("nan")])
@pytest.mark.parametrize("max_len", [None, 32])
@torch.no_grad()
def test_a_one_token_request_in_a_reused_row_sees_nothing_of_the_old_one(name, left_behind, max_len):
    """NaN among old keys and values is not wiped (0 times NaN is NaN), but it never leaves its row."""
    layer = mixer(name, "segment", "cut")
    old, request = torch.randn(2, 20, 16, dtype=F64), torch.randn(2, 4, 16, dtype=F64)
    _, state = layer(old, state=layer.init_state(2, max_len))
    if left_behind is not None:  # whatever the freed row holds
        def spoil(value):
            return torch.cat([torch.full_like(value[:1], left_behind), value[1:]])

        state = with_data(state, spoil)
    reused = Segments.from_ids(torch.ones(2, 1, dtype=torch.int64), continues=torch.tensor([False, True]))
    y, state = layer(request[:, :1], segments=reused, state=state)
    out = torch.cat([y, steps(layer, request[:, 1:], state)[0]], 1)
    if not math.isnan(left_behind or 0.0) or all(isinstance(leaf, Fixed) for leaf in leaves(state)):
        same(out[:1], steps(layer, request[:1], layer.init_state(1))[0])
    same(out[1:], steps(layer, request[1:], solo(layer, old[1:])[1])[0])


@pytest.mark.parametrize("pattern", ["m a", "a m", "m m", "m a m a", "r w", "w r a"])
@torch.no_grad()
def test_the_length_of_a_state_does_not_depend_on_which_layer_comes_first(pattern):
    net = model(pattern, {key: HYBRID[key] for key in HYBRID if key in pattern})
    ids = torch.randint(0, 17, (2, 8))
    want = net(ids).logits
    out = net(ids[:, :6], state=net.init_state(2))
    assert state_lengths(out.state).tolist() == [6, 6]
    for t in (6, 7):
        out = net(ids[:, t : t + 1], state=out.state)
        same(out.logits, want[:, t : t + 1])
    assert state_lengths(out.state).tolist() == [8, 8]


@every
@pytest.mark.parametrize("training", [False, True])
def test_one_token_without_a_state_with_a_new_one_and_without_caching(name, training):
    layer = mixer(name).train(training)
    x = torch.randn(3, 1, 16, dtype=F64)
    want = layer(x)[0]
    assert want.shape == (3, 1, 16)
    for max_len in (None, 1, 8):
        same(layer(x, state=layer.init_state(3, max_len))[0], want)
        with torch.no_grad():
            same(layer(x, state=layer.init_state(3, max_len))[0], want)


@every
@torch.no_grad()
def test_one_token_and_many_leave_a_state_of_one_form_that_either_can_take(name):
    layer = mixer(name, "cut")
    x = torch.randn(2, 6, 16, dtype=F64)
    want = layer(x)[0]
    _, one = layer(x[:, :1], state=layer.init_state(2))
    _, five = layer(x[:, :5], state=layer.init_state(2))
    assert form(one) == form(five) == form(layer.init_state(2))
    same(layer(x[:, 1:], state=one)[0], want[:, 1:])
    same(layer(x[:, 5:], state=five)[0], want[:, 5:])
