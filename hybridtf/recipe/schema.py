"""A JSON Schema of whole recipes over what is installed, so that editors complete and check them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from hybridtf.core import component_schema
from hybridtf.recipe.tables import Meta


def recipe_schema(sections: Mapping[str, type[BaseModel]] | None = None) -> dict[str, Any]:
    """The schema (draft 2020-12). ``sections``: as of :func:`~hybridtf.recipe.load_recipe`; without, any table fits."""
    defs = component_schema()
    properties: dict[str, Any] = {
        "meta": _table_schema(Meta, defs),
        "model": {"$ref": "#/$defs/models"},
        "task": {"$ref": "#/$defs/tasks"},
        "train": {"type": "object"},
    }
    for name, table in (sections or {}).items():
        properties[name] = _table_schema(table, defs)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hybridtf recipe",
        "type": "object",
        "properties": properties,
        "required": ["model"],
        "additionalProperties": False,
        "$defs": defs,
    }


def _table_schema(table: type[BaseModel], defs: dict[str, Any]) -> dict[str, Any]:
    schema = table.model_json_schema()
    defs.update(schema.pop("$defs", {}))
    return schema
