"""Parameters of a model by role, counted from what was built (on the meta device, if it is large)."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import nn

from hybridtf.core import ConfigError, param_specs


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
