"""AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101), alone or beside Muon, in groups by the roles that modules declare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hybridtf.core import NO_DECAY, CheckpointError, Role, param_specs
from hybridtf.train.config import RoleOptions, TrainConfig
from hybridtf.train.muon import MuonAdamW, matrix_splits

MOMENTS: Mapping[str, tuple[str, ...]] = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
"""What each method keeps of a parameter."""


def parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """One group a role and method, by name: ``role``, ``method``, ``params``, ``names``, ``lr_scale``, ``weight_decay``.

    Muon takes the matrices, stacked ones (e in out) included, and its groups have ``splits``; all else is AdamW's. Norms,
    biases and state parameters are not decayed unless ``config.roles`` gives them a ``weight_decay``. A tied embedding is
    an embedding.
    """
    members: dict[tuple[Role, str], dict[str, Tensor]] = {}
    params = dict(model.named_parameters())
    for name, spec in param_specs(model).items():
        if params[name].requires_grad:
            by_muon = config.muon is not None and spec.role == "matrix" and params[name].ndim in (2, 3)
            members.setdefault((spec.role, "muon" if by_muon else "adamw"), {})[name] = params[name]
    splits = matrix_splits(model) if config.muon is not None else {}
    groups = []
    for role, method in sorted(members):
        options = config.roles.get(role, RoleOptions())
        decay = options.weight_decay
        if decay is None:
            decay = 0.0 if role in NO_DECAY else config.weight_decay
        names = list(members[role, method])
        group = {
            "role": role, "method": method, "params": list(members[role, method].values()), "names": names,
            "lr_scale": options.lr_scale, "weight_decay": decay,
        }
        if method == "muon":
            group["splits"] = [splits.get(name, ()) for name in names]
            if config.muon is not None and config.muon.lr is not None:
                group["lr_scale"] = options.lr_scale * config.muon.lr / config.lr
        groups.append(group)
    return groups


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of ``config`` over :func:`parameter_groups`; :func:`set_lr` gives each step its rate."""
    form = config.optimizer_form
    if form == "auto":
        devices = {p.device.type for p in model.parameters()}
        form = "fused" if devices <= {"cpu", "cuda"} else "foreach"
    groups = parameter_groups(model, config)
    adamw: dict[str, Any] = {
        "lr": config.lr, "betas": config.betas, "eps": config.eps, "foreach": form == "foreach", "fused": form == "fused",
    }
    if config.muon is not None:
        return MuonAdamW(groups, config.muon, adamw)
    return torch.optim.AdamW(groups, **adamw)


def describe_parameters(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """How each parameter is trained, by name: role, optimizer, shape, scale of the learning rate, decay, fused widths."""
    found: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for i, (name, param) in enumerate(zip(group["names"], group["params"], strict=True)):
            found[name] = {
                "role": group["role"], "optimizer": group["method"], "shape": list(param.shape),
                "lr_scale": group["lr_scale"], "weight_decay": group["weight_decay"],
            }
            if group.get("splits") and group["splits"][i]:
                found[name]["splits"] = list(group["splits"][i])
    return dict(sorted(found.items()))


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
            kept = MOMENTS[group["method"]]
            moments = {moment: f"optimizer.{moment}.{name}" for moment in kept}
            found = {moment: tensors[key] for moment, key in moments.items() if key in own}
            wanted.update(moments.values())
            # A parameter that never had a gradient has no moments.
            if found and (found.keys() != set(kept) or any(found[m].shape != param.shape for m in kept if m != "step")):
                raise CheckpointError(f"{where}: the optimizer's tensors of {name} do not fit the model")
            if found:
                # A tensor of a file maps it; moments live on after the file is gone.
                state[index] = {moment: value.clone() for moment, value in found.items()}
            index += 1
    if own - wanted:
        raise CheckpointError(f"{where}: holds {min(own - wanted)}, which is no parameter of the model")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
