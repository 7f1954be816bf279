"""Gradients: through states, in eval mode, and updates whose roles could be swapped where sizes are equal."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import ConfigError, active, leaves, map_state
from hybridtf.testing.compare import row_tensors
from tests.field.layers import F64, every, mixer, same, solo


def held(state) -> list[torch.Tensor]:
    """Every floating tensor of a state's rows, without spare slots; not those of an indexer, which only choose."""
    found = [part for row in range(leaves(state)[0].batch_size) for part in row_tensors(state, row)]
    return [value for name, value in found if value.is_floating_point() and "['index_" not in name]


def floating(state) -> list[torch.Tensor]:
    return [value for leaf in leaves(state) for value in leaf.data.values() if value.is_floating_point()]


def filled(state, values):
    """The state with its floating data replaced, in order."""
    rest = iter(values)
    return map_state(lambda leaf: leaf._rebuild(lambda t: next(rest) if t.is_floating_point() else t), state)


@every
def test_final_and_initial_states_carry_gradients(name):
    layer = mixer(name, "cut", d_model=8)
    x = torch.randn(1, 6, 8, dtype=F64, requires_grad=True)
    with torch.no_grad():
        before = torch.randn(1, 3, 8, dtype=F64)
        _, warm = solo(layer, before)
    start = [value.clone().requires_grad_() for value in floating(warm)]
    if not start:
        pytest.skip("has no state")

    def run(x, *start):
        y, state = layer(x, state=filled(warm, start))
        found = [y, *held(state)]
        return tuple(found[:-1] if name in ("moba", "nsa") else found)  # the last part of their state only chooses

    assert torch.autograd.gradcheck(run, (x, *start), fast_mode=True)


@every
def test_a_cut_through_the_state_leaves_the_gradients_as_they_are(name):
    layer = mixer(name, "cut")
    x = torch.randn(1, 6, 16, dtype=F64, requires_grad=True)
    _, warm = solo(layer, torch.randn(1, 3, 16, dtype=F64))
    start = [value.detach().clone().requires_grad_() for value in floating(warm)]
    weight = torch.randn(1, 6, 16, dtype=F64)

    def grads(sizes):
        state, out = filled(warm, start), []
        for part in x.split(sizes, 1):
            y, state = layer(part, state=state)
            out.append(y)
        loss = (torch.cat(out, 1) * weight).sum() + sum((value * value.detach().cos()).sum() for value in held(state))
        asked = [x, *start, *(p for p in layer.parameters() if p.requires_grad)]
        return torch.autograd.grad(loss, asked, materialize_grads=True)

    for a, b in zip(grads([2, 4]), grads([6]), strict=True):
        same(a, b)


@every
@pytest.mark.parametrize("t", [1, 8, 64, 65])
def test_eval_mode_has_a_backward_and_it_is_that_of_training(name, t):
    layer = mixer(name)
    x = torch.randn(2, t, 16, dtype=F64, requires_grad=True)
    found = []
    for training in (False, True):
        layer.train(training)
        asked = [x, *(p for p in layer.parameters() if p.requires_grad)]
        found.append(torch.autograd.grad(layer(x)[0].square().sum(), asked, materialize_grads=True))
    for a, b in zip(*found, strict=True):
        same(a, b)


def recurrence(q, k, v, log_a, S):
    """One head a group: S = a S + k v^T, y = S^T q, in a plain loop."""
    out = []
    for q_t, k_t, v_t, a_t in zip(*(z.unbind(1) for z in (q, k, v, log_a)), strict=True):
        S = a_t.exp()[..., None, None] * S + torch.einsum("bhn,bhp->bhnp", k_t, v_t)
        out.append(torch.einsum("bhnp,bhn->bhp", S, q_t))
    return torch.stack(out, 1), S


@pytest.mark.parametrize("form", active().kernels.of("ssd"), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("t", [1, 5, 17])
@pytest.mark.parametrize("decays", [False, True])
def test_keys_and_values_of_unequal_width_keep_their_roles_and_a_given_state_its_layout(form, t, decays):
    op = form.load()
    q, k, v, h0 = (
        torch.randn(s, dtype=F64, requires_grad=True) for s in ((2, t, 3, 4), (2, t, 3, 4), (2, t, 3, 6), (2, 3, 4, 6))
    )
    log_a = (-torch.rand(2, t, 3, dtype=F64) if decays else torch.zeros(2, t, 3, dtype=F64)).requires_grad_()
    got, want = op(q, k, v, log_a, initial_state=h0, chunk_size=8), recurrence(q, k, v, log_a, h0)
    tokens = [x.split(1, 1) for x in (q, k, v, log_a)]
    stepped, state = [], h0
    for parts in zip(*tokens, strict=True):
        y, state = op(*parts, initial_state=state)
        stepped.append(y)
    weights = [torch.randn_like(z) for z in want]
    wanted = torch.autograd.grad(sum((w * z).sum() for w, z in zip(weights, want, strict=True)), (q, k, v, log_a, h0))
    for one in (got, (torch.cat(stepped, 1), state)):
        for a, b in zip(one, want, strict=True):
            same(a, b)
        found = torch.autograd.grad(sum((w * z).sum() for w, z in zip(weights, one, strict=True)), (q, k, v, log_a, h0))
        for a, b in zip(found, wanted, strict=True):
            same(a, b)
    with pytest.raises(ConfigError, match="initial_state"):
        op(q, k, v, log_a, initial_state=h0.transpose(2, 3))


@every
def test_a_state_of_another_layout_is_not_taken(name):
    """Transposed or too narrow: an error, never a result."""
    layer = mixer(name, "cut")
    _, warm = solo(layer, torch.randn(1, 3, 16, dtype=F64))
    wrong = [value[..., :-1] for value in floating(warm)]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the kinds differ, that there is one matters
        layer(torch.randn(1, 2, 16, dtype=F64), state=filled(warm, wrong))
    assert isinstance(caught.value, ConfigError | RuntimeError | ValueError)
