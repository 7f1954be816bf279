"""Embeddings of a token for each layer, in any stack."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError
from hybridtf.models import LanguageModelConfig
from hybridtf.models.layer_inputs import LayerInputs
from hybridtf.models.stems import TokenEmbeddingConfig
from tests.models.tiny_models import assert_can_be_cut

D, L = 8, 4


def model(pattern, **stem):
    blocks = {
        "m": {"mixer": {"type": "gru"}},
        "a": {"mixer": {"type": "attention", "n_heads": 2}, "channel_mixer": {"type": "edge_gate", "d_edge": L}},
        "e": {"type": "output_norm", "channel_mixer": {"type": "edge_gate", "d_edge": L}, "stream_scale": "learned"},
        "s": {"channel_mixer": {"type": "edge_gate", "d_edge": L}, "shared": True},
        "w": {"channel_mixer": {"type": "edge_gate", "d_edge": L + 1}},
    }
    stem = {"type": "token_embedding", "layer_inputs": {"d_layer": L, **stem}}
    used = {name: block for name, block in blocks.items() if name in pattern}
    return LanguageModelConfig(vocab_size=11, d_model=D, pattern=pattern, blocks=used, stem=stem).build().double()


def test_by_hand():
    stem, ids = model("a m a", vocab_size=5).stem, torch.tensor([[3, 10, 0]])
    _, _, extras = stem(ids)
    table, x = stem.layer_inputs.embedding.weight, stem.embedding(ids)
    for i, edge in enumerate(("layer_input_0", "layer_input_2")):
        part = slice(i * L, (i + 1) * L)
        told = table[[3, 0, 0], part] * L**0.5
        made = stem.layer_inputs.norm(x @ stem.layer_inputs.proj.weight[part].T * D**-0.5)
        torch.testing.assert_close(extras.edges[edge], (made + told) / 2**0.5)
    assert "layer_input_1" not in extras.edges


def test_a_model_can_be_cut_and_learns_every_part():
    made, ids = model("m e a e"), torch.randint(0, 11, (2, 7))
    assert_can_be_cut(made, ids, [3, 3, 1])
    made.loss(ids, ids).total.backward()
    assert all(p.grad.abs().max() > 0 for p in made.parameters())


def test_its_table_is_made_once(monkeypatch):
    """By the model for the layers that read, by a stem that stands alone for all."""
    made, make = [], LayerInputs.make
    monkeypatch.setattr(LayerInputs, "make", lambda self, writes: (made.append(writes), make(self, writes)))
    table = model("a m a").stem.layer_inputs.embedding
    assert made == [("layer_input_0", "layer_input_2")]
    assert table.weight.shape == (11, 2 * L)
    stem = TokenEmbeddingConfig(layer_inputs={"d_layer": L}).build(BuildContext(d_model=D, n_layers=3), 11)
    assert len(made) == 2
    assert stem.layer_inputs.embedding.weight.shape == (11, 3 * L)


def test_a_shared_block_of_one_visit_reads_its_own():
    assert model("m s").stem.layer_inputs.writes == ("layer_input_1",)


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="layer_inputs are given, and no layer reads one"):
        model("m")
    with pytest.raises(ConfigError, match=r"blocks.s.channel_mixer: edge = 'layer_input' .* and 2 visit this shared block"):
        model("s m s")
    with pytest.raises(ConfigError, match=r"reads the edge 'layer_input_1' as \(b t 5\), .* has it as \(b t 4\)"):
        model("a w")
