"""What a model is made of: parameters by role, its stacks, and the size of its state, all by counting what was
built."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch.utils._pytree as pytree
from torch import Tensor, nn

from hybridtf.bench.live_bytes import WithoutMemory
from hybridtf.bench.phases import aged_state
from hybridtf.bench.records import Record, make_record
from hybridtf.bench.subject import Subject, has_state
from hybridtf.core import ComponentConfig, ConfigError, Growing, Ring, StateLeaf, leaves, param_specs, state_bytes
from hybridtf.core.config import ConfigTable

STATE_LENGTHS = (1024, 65536)
"""Lengths at which a ``model`` record states the size of the state."""

_PARTS = ("mixer", "channel_mixer")


def measure_model(subject: Subject, model: nn.Module) -> Record:
    """The ``model`` record of ``model``, which ``subject`` describes."""
    fields = {
        "params": parameter_counts(model), "stacks": stacks_of(model),
        "state_bytes": {str(n): state_size(model, n) for n in STATE_LENGTHS} if has_state(model) else None,
    }
    return make_record("model", subject.identity(model), fields)


@runtime_checkable
class HasIdleParameters(Protocol):
    """A module of which one token uses a part (a mixture of experts)."""

    def idle_parameters(self) -> int: ...


def parameter_counts(model: nn.Module) -> dict[str, Any]:
    """``total``, ``active`` (without those of experts that a token does not choose), ``embedding`` (tables that tokens are
    looked up in) and ``by_role``; a shared parameter counts once.

    A foreign model, which does not state its roles, is told apart by module class alone (role ``other`` for the rest).
    """
    roles: dict[str, str]
    try:
        roles = {name: spec.role for name, spec in param_specs(model).items()}
    except ConfigError:
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        roles = {name: "embedding" if id(p) in tables else "other" for name, p in model.named_parameters()}
    by_role: dict[str, int] = {}
    for name, param in model.named_parameters():
        by_role[roles[name]] = by_role.get(roles[name], 0) + param.numel()
    total = sum(by_role.values())
    idle = sum(module.idle_parameters() for module in model.modules() if isinstance(module, HasIdleParameters))
    return {"total": total, "active": total - idle, "embedding": by_role.get("embedding", 0), "by_role": by_role}


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


# -- states --------------------------------------------------------------------------------------------------------


def state_size(model: nn.Module, length: int) -> dict[str, int]:
    """Bytes of one row's state that holds ``length`` tokens, from a state that was made (on shapes without memory).

    ``allocated``: with buffers of ``length`` tokens; ``used``: what holds tokens. ``per_token``: what one more token
    adds for good; ``constant``: what does not grow. ``growing``, ``ring`` and ``fixed`` are the allocated bytes of the
    three classes of leaves, ``other`` of plain tensors in a foreign state. """
    with WithoutMemory().enter():
        state = model.init_state(1, max_len=length)  # type: ignore[operator]
        longer = model.init_state(1, max_len=length + 1)  # type: ignore[operator]
        kinds = {"growing": 0, "ring": 0, "fixed": 0}
        for leaf in leaves(state):
            kinds[_kind(leaf)] += leaf.nbytes()
        other, other_longer = _plain_bytes(state), _plain_bytes(longer)
        used = state_bytes(aged_state(state, length), used=True) + other
        allocated = state_bytes(state) + other
        per_token = state_bytes(longer) + other_longer - allocated
    constant = allocated - per_token * length
    return {
        "allocated": allocated, "used": used, "per_token": per_token, "constant": constant, **kinds, "other": other,
    }


def _kind(leaf: StateLeaf) -> str:
    return "growing" if isinstance(leaf, Growing) else "ring" if isinstance(leaf, Ring) else "fixed"


def _plain_bytes(state: Any) -> int:
    found = pytree.tree_leaves(state, is_leaf=lambda x: isinstance(x, StateLeaf))
    return sum(x.numel() * x.element_size() for x in found if isinstance(x, Tensor))
