"""Cross-attention against torch's own, and which document sees which context."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from hybridtf.core import BuildContext, Context, Segments, StateError, crop
from hybridtf.mixers import CrossAttentionConfig

D = 12


def build(**options):
    options = {"n_heads": 3, "qkv_bias": True, "out_bias": True, **options}
    return CrossAttentionConfig(**options).build(BuildContext(d_model=D, param_dtype=torch.float64)).eval()


def pair():
    theirs = nn.MultiheadAttention(D, 3, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    mixer = build()
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        weights = {"weight": theirs.in_proj_weight.chunk(3)[i], "bias": theirs.in_proj_bias.chunk(3)[i]}
        getattr(mixer, name).load_state_dict(weights)
    mixer.out_proj.load_state_dict(theirs.out_proj.state_dict())
    return mixer, theirs


@pytest.mark.parametrize("padded", [False, True])
def test_equals_torch(padded):
    mixer, theirs = pair()
    x, c = (torch.randn(2, n, D, dtype=torch.float64, requires_grad=True) for n in (7, 5))
    real = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 1]])
    segments = Segments.from_mask(real) if padded else None
    got = mixer(x, context=Context(c, segments))[0]
    want = theirs(x, c, c, key_padding_mask=~real.bool() if padded else None)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    weight = torch.randn_like(want)
    params = [x, c, mixer.q_proj.weight, mixer.k_proj.weight, mixer.v_proj.bias, mixer.out_proj.weight]
    mine = torch.autograd.grad((got * weight).sum(), params)
    gx, gc, gw, gb, go = torch.autograd.grad(
        (want * weight).sum(), [x, c, theirs.in_proj_weight, theirs.in_proj_bias, theirs.out_proj.weight]
    )
    for a, b in zip(mine, (gx, gc, gw[:D], gw[D : 2 * D], gb[2 * D :], go), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_each_document_sees_the_context_of_its_id():
    mixer = build(out_bias=False)
    x, c = torch.randn(1, 6, D, dtype=torch.float64), torch.randn(1, 7, D, dtype=torch.float64)
    ours = Segments.from_ids(torch.tensor([[1, 1, 2, 2, 4, 4]]))
    theirs = Segments.from_ids(torch.tensor([[0, 1, 1, 3, 4, 4, 4]]))
    y = mixer(x, segments=ours, context=Context(c, theirs))[0]
    torch.testing.assert_close(y[:, :2], mixer(x[:, :2], context=Context(c[:, 1:3]))[0], rtol=0, atol=1e-14)
    assert (y[:, 2:4] == 0).all()  # the second document has none
    torch.testing.assert_close(y[:, 4:], mixer(x[:, 4:], context=Context(c[:, 4:]))[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("cuts", [(0, 1, 2, 3, 6), (0, 3, 4, 6), (0, 0, 6)])
def test_calls_give_what_one_call_gives(cuts):
    mixer = build()
    x, c = torch.randn(1, 6, D, dtype=torch.float64), torch.randn(1, 7, D, dtype=torch.float64)
    ours = Segments.from_ids(torch.tensor([[1, 1, 3, 3, 4, 4]]))
    context = Context(c, Segments.from_ids(torch.tensor([[0, 1, 1, 3, 4, 4, 4]])))
    state, parts, given = mixer.init_state(1), [], context
    for start, stop in itertools.pairwise(cuts):
        part, state = mixer(x[:, start:stop], segments=ours.narrow(start, stop), state=state, context=given)
        parts.append(part)
        given = None
    torch.testing.assert_close(torch.cat(parts, 1), mixer(x, segments=ours, context=context)[0], rtol=0, atol=1e-14)


def test_a_document_without_context_goes_on_without():
    mixer = build(out_bias=False)
    x, c = torch.randn(1, 5, D, dtype=torch.float64), torch.randn(1, 2, D, dtype=torch.float64)
    context = Context(c, Segments.from_ids(torch.tensor([[1, 3]])))
    begun = Segments.from_ids(torch.tensor([[1, 2, 2]]))
    y, state = mixer(x[:, :3], segments=begun, state=mixer.init_state(1), context=context)
    assert (y[:, 1:] == 0).all()
    y, _ = mixer(x[:, 3:], segments=Segments.from_ids(torch.tensor([[1, 2]])), state=state)
    assert (y[:, 0] == 0).all()
    torch.testing.assert_close(y[:, 1], mixer.out_proj(mixer.v_proj(c))[:, 1], rtol=0, atol=1e-14)


def test_later_calls_count_documents_from_the_one_that_goes_on():
    mixer = build()
    x, c = torch.randn(1, 4, D, dtype=torch.float64), torch.randn(1, 3, D, dtype=torch.float64)
    context = Context(c, Segments.from_ids(torch.tensor([[1, 2, 3]])))
    _, state = mixer(x[:, :1], state=mixer.init_state(1), context=context)
    goes_on = Segments.from_ids(torch.tensor([[7, 8, 9]]))
    y, _ = mixer(x[:, 1:], segments=goes_on, state=state)
    values = mixer.out_proj(mixer.v_proj(c))
    torch.testing.assert_close(y, values, rtol=0, atol=1e-13)  # one token of context each: its value
    _, state = mixer(x[:, :1], state=mixer.init_state(1), context=context)
    y, _ = mixer(x[:, 2:], segments=Segments.from_ids(torch.tensor([[1, 2]]), continues=False), state=state)
    torch.testing.assert_close(y, values[:, 1:], rtol=0, atol=1e-13)


def test_a_document_can_be_cropped_to_its_start_and_still_has_its_context():
    mixer = build()
    x, c = torch.randn(1, 4, D, dtype=torch.float64), torch.randn(1, 4, D, dtype=torch.float64)
    context = Context(c, Segments.from_ids(torch.tensor([[1, 2, 2, 2]])))
    ours = Segments.from_ids(torch.tensor([[1, 1, 2, 2]]))
    want, state = mixer(x, segments=ours, state=mixer.init_state(1), context=context, keep=2)
    state = crop(state, 2)
    assert state.length.tolist() == [0]
    torch.testing.assert_close(mixer(x[:, 2:], state=state)[0], want[:, 2:], rtol=0, atol=1e-14)


def test_without_a_context_it_says_so():
    mixer = build()
    x = torch.randn(1, 2, D, dtype=torch.float64)
    with pytest.raises(StateError, match="give context="):
        mixer(x)
    with pytest.raises(StateError, match="the first call on a state of cross-attention needs context="):
        mixer(x, state=mixer.init_state(1))
