"""Tables of n-grams: against transformers' layer, and what the block promises beside the laws of the kit."""

from __future__ import annotations

import itertools

import pytest
import torch

from hybridtf.blocks import EngramConfig
from hybridtf.core import BuildContext, ConfigError, RecipeError, Segments, reorder
from hybridtf.interop.strict import StrictFloat64
from hybridtf.models import LanguageModelConfig
from hybridtf.nn.ngrams import TokenWindow, multipliers, primes

D, T, VOCAB, F64 = 6, 17, 50, torch.float64
START = 3


def config(**more):
    return EngramConfig(**{
        "vocab_size": VOCAB, "n_hashes": 2, "table_size": 11, "d_embed": 8, "n_streams": 2, "start_token": START, **more,
    })


def build(wanted):
    block = wanted.build(BuildContext(d_model=D, param_dtype=F64))
    with torch.no_grad():
        for i, p in enumerate(block.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=F64))
    return block


def drawn(rows=2, streams=2):
    ids = torch.randint(0, 12, (rows, T))  # few of them, so that the start token is one in twelve
    ids[0, :6] = torch.tensor([START, 5, START, START, 7, 8])
    return torch.randn(rows, T, streams, D, dtype=F64), ids


@pytest.mark.parametrize(("ngram_size", "place"), [(3, 0), (2, 1), (4, 2)])
def test_equals_transformers(ngram_size, place):
    """Start tokens within a document too, where n-grams begin anew; and every gradient."""
    module = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    n = (ngram_size - 1) * 2
    said = module.Qwen4ExpTextConfig(
        hidden_size=D, vocab_size=VOCAB, hc_count=2, ple_embed_dim=4 * n, ple_conv_kernel_size=3, ngram_size=ngram_size,
        heads_per_ngram=2, ngram_vocab_size_base=11, make_ngram_vocab_size_divisible_by=8, eos_token_id=START,
    )
    theirs = module.Qwen4ExpTextPLELayer(said, 0, place).double()
    ours = build(config(ngram_size=ngram_size, d_embed=4 * n, d_conv=3, place=place, table_multiple=8))
    hashed = theirs.ple_embedding
    assert (*ours.ngrams.multipliers, *ours.ngrams.sizes) == (*hashed.layer_multipliers.tolist(), *hashed.head_vocab_sizes)

    def mine(name):
        """Theirs of that name, made of ours."""
        if name.startswith("norm_"):
            return torch.cat([norm.weight for norm in getattr(ours, f"{name[5:-7]}_norms")])
        name = name.replace("ple_embedding.ngram_embedding", "ngrams.embedding").replace("conv1d", "conv")
        found = ours.get_parameter(name)
        return found[:, None] if name.startswith("conv") else found

    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(mine(name))
    x, ids = drawn()
    x.requires_grad_()
    with StrictFloat64():
        want = x.flatten(-2) + theirs(x.flatten(-2), ids, None)
    got = ours(x, {"token_ids": ids}).x
    torch.testing.assert_close(got.flatten(-2), want, rtol=0, atol=1e-11)
    weight = torch.randn_like(want)
    asked = torch.autograd.grad((want * weight).sum(), [x, *theirs.parameters()])
    found = torch.autograd.grad((got.flatten(-2) * weight).sum(), [x, *ours.parameters()])
    of_ours = dict(zip([id(p) for p in ours.parameters()], found[1:], strict=True))
    torch.testing.assert_close(found[0], asked[0], rtol=0, atol=1e-10)
    with torch.no_grad():
        for p in ours.parameters():
            p.copy_(of_ours[id(p)])  # so that gradients are renamed as weights are
    for (name, _), b in zip(theirs.named_parameters(), asked[1:], strict=True):
        torch.testing.assert_close(mine(name), b, rtol=0, atol=1e-10, msg=name)


def test_the_last_tokens_are_those_of_the_document():
    """Packed, padded on all sides, cut, and with start tokens: beside the definition, token by token."""
    window = TokenWindow(4, START)
    ids = torch.randint(1, 6, (3, T))
    segments = Segments.from_ids(torch.tensor([
        [1] * 5 + [2] * 12, [0, 1, 1, 0, 0, 1, 2, 2, 0, 2, 0, 0, 0, 0, 0, 0, 0], [0] * 8 + [4] * 9,
    ]))
    for cuts in ([0, T], [0, 1, 2, 3, 10, T], [*range(T + 1)]):
        state, found = window.init_state(3, torch.device("cpu")), []
        for start, stop in itertools.pairwise(cuts):
            part = segments.narrow(start, stop)
            tokens, state = window(ids[:, start:stop], part, state)
            found.append(torch.stack(tokens, -1))
        for row, many in enumerate(torch.cat(found, 1)):
            for t in range(T):
                if not segments.real[row, t]:
                    continue
                earlier = [int(ids[row, u]) for u in range(t) if segments.ids[row, u] == segments.ids[row, t]]
                want = [int(ids[row, t])]
                for token in [*reversed(earlier), *[START] * 4][:3]:
                    want.append(START if len(want) > 1 and want[-1] == START else token)
                assert many[t].tolist() == want, (cuts, row, t)


def test_tables_of_several_layers_are_apart():
    assert primes(10, 0, 3) == (11, 13, 17)
    assert primes(10, 3, 2) == (19, 23)
    assert multipliers(VOCAB, 3, 0, 1234) != multipliers(VOCAB, 3, 1, 1234)
    assert all(m % 2 and 0 < m * (VOCAB - 1) < 2**63 for m in multipliers(VOCAB, 5, 7, 0))


def test_a_row_of_the_table_is_read_and_no_other():
    block = build(config(n_streams=1))
    x, ids = drawn(streams=1)
    (block(x[:, :, 0], {"token_ids": ids}).x.sum()).backward()
    asked = block.ngrams.rows([*block.ngrams.window(ids, None, None)[0]]).unique()
    touched = block.ngrams.embedding.weight.grad.abs().sum(1).nonzero().flatten()
    assert set(touched.tolist()) <= set(asked.tolist())
    table = block.ngrams.embedding.weight
    assert block.idle_parameters() == (len(table) - 4) * table.shape[1]


def test_in_a_stack_of_streams_and_with_beams():
    wiring = {"type": "gated_residual", "n_streams": 2, "rank": 3, "mixer": {"type": "gru"}}
    model = LanguageModelConfig(
        vocab_size=VOCAB, d_model=8, pattern="n m n2 m", merge={"type": "gated", "rank": 3},
        blocks={"m": wiring, "n": config().to_dict(), "n2": config(place=1).to_dict()},
    ).build(BuildContext(d_model=8, param_dtype=F64))
    ids = torch.randint(0, VOCAB, (2, 9))
    want = model(ids).logits
    out = model(ids[:, :5], state=model.init_state(2))
    swapped = reorder(out.state, torch.tensor([1, 0]))
    later = model(ids.flip(0)[:, 5:], state=swapped).logits
    torch.testing.assert_close(later, want.flip(0)[:, 5:], rtol=0, atol=1e-10)


def test_what_does_not_fit_is_refused():
    with pytest.raises(RecipeError, match="d_embed = 6 is not divisible by"):
        config(d_embed=6)
    with pytest.raises(RecipeError, match="start_token = 50 is no token of a vocabulary of 50"):
        config(start_token=50)
    for vocab_size in (VOCAB - 1, VOCAB + 1):
        model = LanguageModelConfig(
            vocab_size=vocab_size, d_model=D, pattern="n", blocks={"n": config(n_streams=1).to_dict()}
        )
        with pytest.raises(ConfigError, match=rf"blocks.n: vocab_size = 50, and the model has {vocab_size} tokens"):
            model.build()
    with pytest.raises(ConfigError, match=r"d_model = 6 is not divisible by .* = 4; give d_embed"):
        EngramConfig(vocab_size=9, n_hashes=2).build(BuildContext(d_model=6))
