"""Documents packed in a row must not see, shift or break each other."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, Segments, active
from hybridtf.models import LanguageModelConfig
from hybridtf.testing.compare import close_rows
from tests.field.layers import F32, F64, VOCAB, every, hybrid, mixer, model, same, solo

OVER_THE_ROW = {
    "forgetting_attention": "gates are summed along the row, and a document takes differences",
    "gated_delta_net": "decays are summed along a chunk, which may hold several documents",
    "lightnet": "its normaliser is a running sum of exponentials along the row",
    "mamba3": "angles and decays are summed along the row",
    "mesa": "its system is solved for all chunks of the row at once",
    "titans": "the steps of a chunk are products of sums over all its mini-batches, whosever they are",
    "mlstm": "its stabiliser is a running maximum along the row",
}
"""Mixers in whose results another document leaves rounding behind, and why. In all others the products are the same ones, and
differ by a bit or two at the most: some processors' libraries round by where a tensor lies in memory."""


def unmoved(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for the library's rounding, or within that of sums over the row for the mixers that are listed."""
    same(got, want, 1e-12 if name in OVER_THE_ROW else 1e-14)


@every
@torch.no_grad()
def test_two_layers_keep_packed_documents_apart(name):
    mixer(name, "segment")
    net, lengths = model("a*2", {"a": name}), [5, 1, 9, 3]
    ids = torch.randint(0, 17, (1, 18))
    segments = Segments.from_lengths([lengths])
    got = net(ids, segments=segments).logits
    for part, alone in zip(got.split(lengths, 1), ids.split(lengths, 1), strict=True):
        same(part, net(alone).logits)
    changed = torch.cat([(ids[:, :5] + 1) % 17, ids[:, 5:]], 1)
    again = net(changed, segments=segments).logits
    assert not torch.equal(again[:, :5], got[:, :5])
    unmoved(name, again[:, 5:], got[:, 5:])


@torch.no_grad()
def test_positions_that_restart_are_boundaries_for_every_layer():
    net, ids, lengths = hybrid(), torch.randint(0, 17, (1, 16)), [6, 4, 6]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    want = torch.cat([net(part).logits for part in ids.split(lengths, 1)], 1)
    said = {
        "as positions": Segments.from_positions(positions), "as lengths": Segments.from_lengths([lengths]),
        "as ids": Segments.from_ids(torch.repeat_interleave(torch.arange(1, 4), torch.tensor(lengths))[None]),
    }
    for segments in said.values():
        same(net(ids, segments=segments).logits, want)
    with pytest.raises(TypeError, match="position_ids"):
        net(ids, position_ids=positions)


@every
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_boundaries_and_a_padding_mask_together(name, masked):
    layer = mixer(name, "segment")
    x = torch.randn(1, 6, 16, dtype=F64)
    ids = torch.tensor([[1, 1, 1, 2, 0 if masked else 2, 2]])
    y, _ = layer(x, segments=Segments.from_ids(ids))
    assert y.shape == (1, 6, 16)
    for document in (1, 2):
        same(y[ids == document], layer(x[ids == document][None])[0][0])
    with pytest.raises(TypeError):
        layer(x, segments=Segments.from_ids(ids), attention_mask=ids)


@every
@pytest.mark.parametrize("lengths", [[0, 1, 0, 1], [3, 0, 4], [0, 0], [0, 2, 0]])
@pytest.mark.parametrize("continues", [False, True])
@torch.no_grad()
def test_documents_of_no_tokens(name, lengths, continues):
    """An empty one has no place in a row: the state goes on with the documents that have tokens, or stays as it was."""
    layer = mixer(name, "segment", "cut")
    before, x = torch.randn(1, 5, 16, dtype=F64), torch.randn(1, sum(lengths), 16, dtype=F64)
    y, state = layer(x, segments=Segments.from_lengths([lengths], continues=continues), state=solo(layer, before)[1])
    assert y.shape == x.shape
    final = solo(layer, before)[1]
    first = True
    for part in x.split([n for n in lengths if n], 1):
        if part.shape[1]:
            want, final = layer(part, state=final if first and continues else layer.init_state(1))
            same(y[:, : part.shape[1]], want)
            y, first = y[:, part.shape[1] :], False
    close_rows(state, 0, final, 0, tol=1e-10, what="final state")


@every
@pytest.mark.parametrize(("dtype", "tol"), [(F64, 1e-9), (F32, 1e-4)], ids=["float64", "float32"])
@torch.no_grad()
def test_packed_and_separate_differ_by_rounding_alone(name, dtype, tol):
    options = {"chunk_size": 16} if "chunk_size" in type(mixer(name).config).model_fields else {}
    layer = mixer(name, "segment", dtype=dtype, **options)
    lengths = [n // 4 for n in (50, 64, 202, 92, 123)]
    x = torch.randn(1, sum(lengths), 16, dtype=dtype)
    got = layer(x, segments=Segments.from_lengths([lengths]))[0]
    want = torch.cat([layer(part)[0] for part in x.split(lengths, 1)], 1)
    assert float((got - want).abs().max() / want.abs().max()) < tol


@every
def test_gradients_do_not_cross_documents(name):
    layer = mixer(name, "segment")
    x = torch.randn(1, 12, 16, dtype=F64, requires_grad=True)
    y, _ = layer(x, segments=Segments.from_lengths([[4, 5, 3]]))
    (grad,) = torch.autograd.grad(y[:, 4:9].square().sum(), x)
    for others in (grad[:, :4], grad[:, 9:]):
        unmoved(name, others, torch.zeros_like(others))
    alone = x.detach()[:, 4:9].requires_grad_()
    same(grad[:, 4:9], torch.autograd.grad(layer(alone)[0].square().sum(), alone)[0])


@torch.no_grad()
def test_pieces_of_a_packed_row_keep_their_boundaries():
    net, ids = hybrid(), torch.randint(0, 17, (1, 18))
    segments, state, out, at = Segments.from_lengths([[5, 1, 9, 3]]), net.init_state(1), [], 0
    for size in (3, 4, 1, 10):
        result = net(ids[:, at : at + size], segments=segments.narrow(at, at + size), state=state)
        state, at = result.state, at + size
        out.append(result.logits)
    same(torch.cat(out, 1), net(ids, segments=segments).logits)


CHANNEL = {name: made.tiny() for name, made in active()["channel_mixers"].configs().items()}
if "moe" in CHANNEL:
    losing = {**CHANNEL["moe"].to_dict(), "balance_loss": 0.1, "z_loss": 0.1}
    CHANNEL["moe with losses"] = active()["channel_mixers"].make(losing)


@pytest.mark.parametrize("name", CHANNEL)
@torch.no_grad()
def test_neighbours_and_pads_do_not_reach_channel_mixers_and_their_losses(name):
    """Experts have room for every token, and pads are not counted."""
    blocks = {"a": {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}, "channel_mixer": CHANNEL[name]}}
    net = LanguageModelConfig(vocab_size=VOCAB, d_model=16, pattern="a a", blocks=blocks)
    net = net.build(BuildContext(d_model=16, param_dtype=F64)).eval()
    ids = torch.randint(0, VOCAB, (1, 12))
    packed = net(ids, segments=Segments.from_ids(torch.tensor([[1, 1, 1, 0, 0, 2, 2, 2, 2, 2, 3, 0]])))
    documents = [net(ids[:, start:stop]) for start, stop in ((0, 3), (5, 10), (10, 11))]
    same(packed.logits[:, [*range(3), *range(5, 11)]], torch.cat([d.logits for d in documents], 1))
    assert bool(packed.losses) == (name == "moe with losses")
    for key, (total, count) in packed.losses.items():
        same(total, sum(d.losses[key][0] for d in documents))
        assert int(count) == sum(int(d.losses[key][1]) for d in documents)
    state, out = net.init_state(1), []
    for t in range(12):
        result = net(ids[:, t : t + 1], state=state)
        state = result.state
        out.append(result.logits)
    same(torch.cat(out, 1), net(ids).logits)
