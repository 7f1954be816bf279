"""A family of published checkpoints: how its settings become a model of ours, and which weights are which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hybridtf.interop.settings import Settings
from hybridtf.interop.weight_map import WeightMap
from hybridtf.models import LanguageModelConfig

Table: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """``model_type``: as config.json names it; ``architecture``: transformers' class.

    ``table``: the section ``[model]`` of a recipe; it asks the settings for everything that it means.
    ``weights``: says every link, from the config that the table gave.
    ``settings``: config.json of a model of ours, as far as the family can say it; an import of it that gives another model is
    refused by the export, so it need not check.
    """

    model_type: str
    architecture: str
    table: Callable[[Settings], Table]
    weights: Callable[[WeightMap, LanguageModelConfig], None]
    settings: Callable[[LanguageModelConfig], Mapping[str, Any]]
    aliases: tuple[str, ...] = field(default=())
    """Other names in config.json for the same."""
    prefix: str = ""
    """How all names but the head's begin; some published checkpoints leave it out."""
    notes: Callable[[LanguageModelConfig], tuple[str, ...]] = field(default=lambda config: ())
    """What a reader should know of such a model: where transformers rounds as we do not."""
