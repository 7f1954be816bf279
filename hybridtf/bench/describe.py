"""What a model is made of: its stacks, and the record of them with its parameters and the size of its state."""

from __future__ import annotations

from typing import Any

from torch import nn

from hybridtf.bench.records import Record, make_record
from hybridtf.bench.subject import Subject
from hybridtf.core import ComponentConfig
from hybridtf.core.config import ConfigTable
from hybridtf.cost import parameter_counts, state_size
from hybridtf.cost.foreign import adapted, has_known_state

STATE_LENGTHS = (1024, 65536)
"""Lengths at which a ``model`` record states the size of the state."""

_PARTS = ("mixer", "channel_mixer")


def measure_model(subject: Subject, model: nn.Module) -> Record:
    """The ``model`` record of ``model``, which ``subject`` describes."""
    model = adapted(model)
    fields = {
        "params": parameter_counts(model), "stacks": stacks_of(model),
        "state_bytes": {str(n): state_size(model, n) for n in STATE_LENGTHS} if has_known_state(model) else None,
    }
    return make_record("model", subject.identity(model), fields)


def stacks_of(model: nn.Module) -> list[dict[str, Any]]:
    """The stacks that the model's config shows; none for a foreign model."""
    config = getattr(model, "config", None)
    if config is None or not callable(getattr(config, "stacks", None)):
        return []
    return [
        {
            "name": stack.name, "d_model": stack.d_model, "pattern": stack.pattern, "layers": list(stack.layers),
            "blocks": {name: _block(block) for name, block in stack.blocks.items()},
        }
        for stack in config.stacks()
    ]


def _block(block: ComponentConfig) -> dict[str, Any]:
    parts = {name: _component(getattr(block, name, None)) for name in _PARTS}
    options = summary(block, without=(*_PARTS, "shared"))
    return {"type": block.type_name(), "summary": options, **parts, "shared": bool(getattr(block, "shared", False))}


def _component(config: ComponentConfig | None) -> dict[str, str] | None:
    return None if config is None else {"type": config.type_name(), "summary": summary(config)}


def summary(config: ConfigTable, without: tuple[str, ...] = ()) -> str:
    """The options that are away from their defaults, in one line: ``n_heads=4 position=rope(fraction=0.5)``."""
    words = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if name == "type" or name in without or value is None or value == field.get_default(call_default_factory=True):
            continue
        words.append(f"{name}={_value(value)}")
    return " ".join(words)


def _value(value: Any) -> str:
    """An option's value as in a recipe; a table by its type, with its own options in brackets."""
    if isinstance(value, ConfigTable):
        name, options = str(getattr(value, "type", "")), summary(value)
        return f"{name}({options})" if options or not name else name
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
