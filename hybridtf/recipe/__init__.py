"""Recipes: a TOML file or Python becomes frozen configs, and every fault of a file is said at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybridtf.hookspecs import hookimpl
from hybridtf.recipe.load import load_recipe, parse_recipe, recipe_names
from hybridtf.recipe.overrides import apply_overrides
from hybridtf.recipe.schema import recipe_schema
from hybridtf.recipe.tables import Meta, Recipe, Resolved
from hybridtf.recipe.write import to_toml

__all__ = [
    "Meta", "Recipe", "Resolved", "apply_overrides", "load_recipe", "parse_recipe", "recipe_names", "recipe_schema",
    "to_toml",
]


@hookimpl
def hybridtf_recipes() -> Sequence[Path]:
    """The recipes of hybridtf: ``recipes/`` of a source checkout, or their copy in the wheel."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_recipes", package.parent / "recipes"):
        if folder.is_dir():
            return (folder,)
    return ()
