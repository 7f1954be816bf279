"""``HybridTFConfig``: the section ``[model]`` of a recipe as a config of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from hybridtf.core import ConfigError
from hybridtf.models import LanguageModelConfig
from hybridtf.recipe import parse_recipe


class HybridTFConfig(PreTrainedConfig):  # type: ignore[misc]
    """``model`` is the table ``[model]`` of a recipe, as plain data; config.json holds it under that key.

    ``loss_weights``: weights of the model's auxiliary losses by name, 1 where nothing is said.
    Raises :class:`hybridtf.core.RecipeError` for a table that is no language model.
    """

    model_type = "hybridtf"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]

    def __init__(
        self, model: Mapping[str, Any] | None = None, use_cache: bool = True,
        loss_weights: Mapping[str, float] | None = None, **more: Any,
    ) -> None:
        # What config.json gives back, so that a config equals itself after a round trip.
        self.model: dict[str, Any] | None = None if model is None else json.loads(json.dumps(model))
        self.use_cache = use_cache
        self.loss_weights = dict(loss_weights or {})
        if self.model is not None:
            self.model.setdefault("type", "language_model")
            more.setdefault("tie_word_embeddings", bool(getattr(self.recipe().head, "tied", False)))
        super().__init__(**more)

    @classmethod
    def from_recipe(cls, model: LanguageModelConfig, **more: Any) -> HybridTFConfig:
        """The config of a model of ours, every option written out."""
        return cls(model=model.to_dict(), **more)

    def recipe(self) -> LanguageModelConfig:
        """The table, understood."""
        if self.model is None:
            raise ConfigError("this HybridTFConfig has no model: give it the table [model] of a recipe")
        found = parse_recipe({"meta": {"title": "hybridtf"}, "model": self.model}, "config.json").model
        if not isinstance(found, LanguageModelConfig):
            raise ConfigError(f"config.json: model.type is {self.model['type']!r}; only a language_model has these classes")
        return found

    @property
    def vocab_size(self) -> int | None:
        """Tokens that the model knows."""
        return None if self.model is None else int(self.model["vocab_size"])

    @property
    def hidden_size(self) -> int | None:
        """Width of the stream."""
        return None if self.model is None else int(self.model["d_model"])

    @property
    def num_hidden_layers(self) -> int | None:
        """Layers of the stack."""
        return None if self.model is None else len(self.recipe().layers())
