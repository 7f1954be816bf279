"""A field that holds one of several tables, told apart by their literal ``type``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from hybridtf.core.config import ConfigTable
from hybridtf.core.errors import ConfigError, known_names, not_a_table


@dataclass(frozen=True)
class OneOf:
    """``Annotated[Base, OneOf("scaling", A, B)]``: a field that holds an ``A`` or a ``B``, tables with a literal ``type``.

    Unlike a union of pydantic's, its faults have the path that the file has, and name the nearest type. For parts of one
    component; what plugins may add to is a ``Component``.
    """

    word: str
    """What the tables are, for messages."""
    tables: tuple[type[ConfigTable], ...]

    def __init__(self, word: str, *tables: type[ConfigTable]) -> None:
        object.__setattr__(self, "word", word)
        object.__setattr__(self, "tables", tables)

    def names(self) -> dict[str, type[ConfigTable]]:
        """The tables by their ``type``."""
        return {str(table.model_fields["type"].default): table for table in self.tables}

    def validate(self, value: Any) -> ConfigTable:
        """The table that ``value`` is or describes. Raises :class:`ConfigError`, or ``RecipeError`` with its faults."""
        if isinstance(value, self.tables):
            return value
        known = self.names()
        if not isinstance(value, Mapping):
            raise ConfigError(not_a_table(self.word, value, known))
        name = value.get("type")
        if not isinstance(name, str):
            raise ConfigError(f"needs type = one of {', '.join(sorted(known))}")
        if name not in known:
            raise ConfigError(f"no {self.word} of type {name!r}. {known_names(name, known)}")
        return known[name](**value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.validate, serialization=core_schema.plain_serializer_function_ser_schema(lambda table: table.to_dict())
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        choices = []
        for table in self.tables:
            choice = table.model_json_schema()
            choice.setdefault("required", []).append("type")
            choices.append(choice)
        return {"oneOf": choices}
