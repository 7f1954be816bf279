"""Parameters of a model by role, counted from what was built (on the meta device, if it is large)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from hybridtf.core import ConfigError, param_specs


@runtime_checkable
class HasIdleParameters(Protocol):
    """A module of which one token uses a part (a mixture of experts)."""

    def idle_parameters(self) -> int: ...


@runtime_checkable
class HasSteering(Protocol):
    """A module with tensors that steer it and that no gradient trains (a router's selection bias). They are saved with the
    weights, and published counts leave them out."""

    def steering(self) -> Sequence[nn.Parameter]: ...


def parameter_counts(model: nn.Module) -> dict[str, Any]:
    """``total``, ``active`` (without those of experts that a token does not choose), ``embedding`` (tables that tokens are
    looked up in) and ``by_role``; a shared parameter counts once, what steers (:class:`HasSteering`) not at all.

    A foreign model, which does not state its roles, is told apart by module class alone (role ``other`` for the rest).
    """
    roles: dict[str, str]
    try:
        roles = {name: spec.role for name, spec in param_specs(model).items()}
    except ConfigError:
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        roles = {name: "embedding" if id(p) in tables else "other" for name, p in model.named_parameters()}
    steering = {id(p) for module in model.modules() if isinstance(module, HasSteering) for p in module.steering()}
    by_role: dict[str, int] = {}
    for name, param in model.named_parameters():
        if id(param) in steering:
            continue
        by_role[roles[name]] = by_role.get(roles[name], 0) + param.numel()
    total = sum(by_role.values())
    idle = sum(module.idle_parameters() for module in model.modules() if isinstance(module, HasIdleParameters))
    return {"total": total, "active": total - idle, "embedding": by_role.get("embedding", 0), "by_role": by_role}
