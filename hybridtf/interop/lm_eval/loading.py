"""A folder as a model: a run, an imported model, a published checkpoint, or what transformers saved of a model of ours."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from hybridtf.core import CheckpointError, ConfigError
from hybridtf.interop.importing import import_checkpoint
from hybridtf.interop.lm_eval.arguments import Arguments
from hybridtf.interop.lm_eval.program import NAME
from hybridtf.interop.settings import CONFIG, read_settings
from hybridtf.models import LanguageModel
from hybridtf.models.generation.model import PositionLimit
from hybridtf.recipe import Recipe, parse_recipe
from hybridtf.train import load_run
from hybridtf.train.checkpoint import WhichWeights


def load(said: Arguments) -> tuple[LanguageModel, Recipe]:
    """The model on its device, in eval mode, and its recipe."""
    folder, device = Path(said.pretrained).expanduser(), said.torch_device
    if (folder / CONFIG).is_file():
        if said.step is not None or said.weights != "model":
            raise ConfigError(f"step and weights are of runs of ours; {folder} is a published checkpoint")
        if read_settings(folder / CONFIG).values.get("model_type") == NAME:
            return _saved_by_transformers(folder, said)
        found = import_checkpoint(folder, dtype=said.torch_dtype)
        return found.model.to(device), found.recipe
    weights = cast(WhichWeights, said.weights)
    run = load_run(folder, device=device, step=said.step, dtype=said.torch_dtype, weights=weights)
    if not isinstance(run.model, LanguageModel):
        raise CheckpointError(f"{folder}: its model is no language model of ours")
    return run.model, run.recipe


def _saved_by_transformers(folder: Path, said: Arguments) -> tuple[LanguageModel, Recipe]:
    try:
        from hybridtf.interop.auto import HybridTFForCausalLM
    except ImportError:
        raise ConfigError(f"{folder}: needs transformers. Run  pip install 'hybridtf[hf]'") from None
    wrapped = HybridTFForCausalLM.from_pretrained(str(folder), dtype=said.torch_dtype or "auto", local_files_only=True)
    recipe = parse_recipe({"model": wrapped.config.model}, str(folder / CONFIG))
    return wrapped.model.eval().to(said.torch_device), recipe


def max_length(model: LanguageModel, said: Arguments) -> int:
    """How many tokens a row may have: what was asked for, else the length that the model was made for."""
    limit = PositionLimit(model).limit
    length = said.max_length or model.config.max_seq_len
    if limit is None or length <= limit:
        return length
    if said.max_length is not None:
        raise ConfigError(f"max_length={length}: the model has a table of {limit} learned positions")
    return limit
