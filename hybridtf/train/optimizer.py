"""AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101), in groups by the roles that modules declare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hybridtf.core import NO_DECAY, CheckpointError, Role, param_specs
from hybridtf.train.config import RoleOptions, TrainConfig

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter."""


def parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """One group a role, by name: ``role``, ``params``, ``names``, ``lr_scale``, ``weight_decay``.

    Norms, biases and state parameters are not decayed unless ``config.roles`` gives them a ``weight_decay``. A tied
    embedding is an embedding.
    """
    members: dict[Role, dict[str, Tensor]] = {}
    params = dict(model.named_parameters())
    for name, spec in param_specs(model).items():
        if params[name].requires_grad:
            members.setdefault(spec.role, {})[name] = params[name]
    groups = []
    for role in sorted(members):
        options = config.roles.get(role, RoleOptions())
        decay = options.weight_decay
        if decay is None:
            decay = 0.0 if role in NO_DECAY else config.weight_decay
        groups.append({
            "role": role, "params": list(members[role].values()), "names": list(members[role]),
            "lr_scale": options.lr_scale, "weight_decay": decay,
        })
    return groups


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """The optimizer of ``config`` over :func:`parameter_groups`; :func:`set_lr` gives each step its rate."""
    form = config.optimizer_form
    if form == "auto":
        devices = {p.device.type for p in model.parameters()}
        form = "fused" if devices <= {"cpu", "cuda"} else "foreach"
    return torch.optim.AdamW(
        parameter_groups(model, config), lr=config.lr, betas=config.betas, eps=config.eps, foreach=form == "foreach",
        fused=form == "fused",
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group ``lr`` times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The moments as ``optimizer.<moment>.<parameter>``; empty before the first step."""
    tensors = {}
    for group in optimizer.param_groups:
        for name, param in zip(group["names"], group["params"], strict=True):
            for moment, value in optimizer.state.get(param, {}).items():
                tensors[f"optimizer.{moment}.{name}"] = value
    return tensors


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Take ``tensors`` over as the moments; raises :class:`CheckpointError` naming what does not fit."""
    state: dict[int, dict[str, Tensor]] = {}
    wanted: set[str] = set()
    index = 0
    own = {name for name in tensors if name.startswith("optimizer.")}
    for group in optimizer.param_groups:
        for name, param in zip(group["names"], group["params"], strict=True):
            moments = {moment: f"optimizer.{moment}.{name}" for moment in MOMENTS}
            found = {moment: tensors[key] for moment, key in moments.items() if key in own}
            wanted.update(moments.values())
            # A parameter that never had a gradient has no moments.
            if found and (len(found) != len(MOMENTS) or any(found[m].shape != param.shape for m in MOMENTS[1:])):
                raise CheckpointError(f"{where}: the optimizer's tensors of {name} do not fit the model")
            if found:
                state[index] = found
            index += 1
    if own - wanted:
        raise CheckpointError(f"{where}: holds {min(own - wanted)}, which is no parameter of the model")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
