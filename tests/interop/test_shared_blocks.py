"""Models with shared blocks go out whatever their blocks are called, and only where the same layers share."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import CheckpointError
from hybridtf.interop import FAMILIES, export_checkpoint, import_checkpoint
from hybridtf.interop.exporting import differences, layer_tables
from hybridtf.interop.importing import recipe_of
from hybridtf.interop.settings import Settings
from hybridtf.models import LanguageModelConfig

SIZES = {
    "vocab_size": 13, "hidden_size": 8, "intermediate_size": 9, "num_layers_per_stack": 2, "num_attention_heads": 2,
    "head_dim": 6, "H_cycles": 2, "L_cycles": 2, "prefix_lm": False, "max_position_embeddings": 32,
}


def config_of(names):
    """HRM-Text with other names of its blocks."""
    table = recipe_of(FAMILIES["hrm_text"], Settings(SIZES, "sizes")).model.to_dict()
    words = [names.get(word, word) for word in LanguageModelConfig(**table).layers()]
    blocks = {names.get(name, name): block for name, block in table["blocks"].items()}
    return LanguageModelConfig(**{**table, "pattern": " ".join(words), "blocks": blocks})


@torch.no_grad()
@pytest.mark.parametrize("names", [{}, {"high0": "x", "low0": "high0", "low1": "y"}])
def test_names_of_shared_blocks_do_not_matter(names, tmp_path):
    model = config_of(names).build().eval()
    export_checkpoint(model, tmp_path / "out", family="hrm_text")
    again = import_checkpoint(tmp_path / "out").model
    ids = torch.arange(10)[None] % 13
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_layers_that_share_where_the_family_does_not_are_refused(tmp_path):
    one, other = config_of({}), config_of({"high1": "low1"})
    faults = list(differences(layer_tables(other), layer_tables(one)))
    assert faults == ["weights_of_layer[9] = 2 (it has 9)", "weights_of_layer[20] = 2 (it has 9)"]
    with pytest.raises(CheckpointError, match="cannot say"):
        export_checkpoint(other.build(), tmp_path / "out", family="hrm_text")
    assert not (tmp_path / "out").exists()
