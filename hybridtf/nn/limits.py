"""What options of many mixers may say, each with the reason of its refusal: kinds of numbers, and options that go together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from hybridtf.core.config import ConfigTable


def _rising(pair: tuple[float, float]) -> tuple[float, float]:
    low, high = pair
    if not 0 < low <= high:
        raise ValueError(f"{[low, high]} must be two rising positive numbers")
    return pair


def _power_of_two(size: int) -> int:
    if size & (size - 1):
        raise ValueError(f"{size} must be a power of 2")
    return size


PositiveRange: TypeAlias = Annotated[tuple[float, float], AfterValidator(_rising)]
"""Where values start: from the first number to the second."""
PowerOfTwo: TypeAlias = Annotated[int, Field(gt=0), AfterValidator(_power_of_two)]


def idle_beside(others: Mapping[str, Any], *options: str) -> Any:
    """A validator of a config: where all ``others`` have these values, ``options`` do nothing, and are refused away from
    their defaults. At its default an option stays legal, since a recipe that was written back names it.

        _without_convolution = idle_beside({"d_conv": 0}, "conv_bias", "conv_kernel")
    """

    def refuse(config: ConfigTable) -> ConfigTable:
        if any(getattr(config, name) != value for name, value in others.items()):
            return config
        fields = type(config).model_fields
        idle = [name for name in options if getattr(config, name) != fields[name].get_default(call_default_factory=True)]
        if idle:
            given, beside = ({name: getattr(config, name) for name in names} for names in (idle, others))
            raise ValueError(f"{_said(given)} {'does' if len(idle) == 1 else 'do'} nothing beside {_said(beside)}")
        return config

    return model_validator(mode="after")(refuse)


def _said(options: Mapping[str, Any]) -> str:
    """As a recipe says them."""
    said = (
        f"no {name}" if value is None else f"{name} = {json.dumps(value, default=_table)}" for name, value in options.items()
    )
    return " and ".join(said)


def _table(config: ConfigTable) -> dict[str, Any]:
    """A component among options, as a recipe says it."""
    return config.model_dump(mode="json")
