"""A folder as a model: a run or an imported model of ours, or a published checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from hybridtf.core import CheckpointError, ConfigError
from hybridtf.interop.importing import import_checkpoint
from hybridtf.interop.lm_eval.arguments import Arguments
from hybridtf.interop.settings import CONFIG
from hybridtf.models import LanguageModel
from hybridtf.models.generation.model import PositionLimit
from hybridtf.recipe import Recipe
from hybridtf.train import load_run
from hybridtf.train.checkpoint import WhichWeights


def load(said: Arguments) -> tuple[LanguageModel, Recipe]:
    """The model on its device, in eval mode, and its recipe."""
    folder, device = Path(said.pretrained).expanduser(), said.torch_device
    if (folder / CONFIG).is_file():
        if said.step is not None or said.weights != "model":
            raise ConfigError(f"step and weights are of runs of ours; {folder} is a published checkpoint")
        found = import_checkpoint(folder, dtype=said.torch_dtype)
        return found.model.to(device), found.recipe
    weights = cast(WhichWeights, said.weights)
    run = load_run(folder, device=device, step=said.step, dtype=said.torch_dtype, weights=weights)
    if not isinstance(run.model, LanguageModel):
        raise CheckpointError(f"{folder}: its model is no language model of ours")
    return run.model, run.recipe


def max_length(model: LanguageModel, said: Arguments) -> int:
    """How many tokens a row may have: what was asked for, else the length that the model was made for."""
    limit = PositionLimit(model).limit
    length = said.max_length or model.config.max_seq_len
    if limit is None or length <= limit:
        return length
    if said.max_length is not None:
        raise ConfigError(f"max_length={length}: the model has a table of {limit} learned positions")
    return limit
