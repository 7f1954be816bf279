"""What a parameter is for, and how it starts: from (seed, canonical name) alone, so that one rank and many start equal.

A module states this in ``param_specs()``, by local parameter name (a dotted name reaches into a child). Parameters of
``nn.Linear`` and ``nn.Embedding`` need no word; any other must have one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Generator, Tensor, nn

from hybridtf.core.errors import ConfigError, known_names
from hybridtf.core.origins import owner_of

Role: TypeAlias = Literal["matrix", "embedding", "head", "norm", "bias", "state", "conv"]
"""Matrices are multiplied with activations; ``state`` are parameters of a recurrence (decays, time steps, skips)."""

NO_DECAY: frozenset[Role] = frozenset({"norm", "bias", "state"})
"""Roles that weight decay leaves alone."""

Init: TypeAlias = Callable[[Tensor, Generator], None]
"""Fills a float32 CPU tensor in place, drawing only from the generator."""


@dataclass(frozen=True)
class ParamSpec:
    """Role and start of one parameter.

    ``residual``: what ends a residual branch, scaled by depth or zero: its last matrix, or the weight of a norm after it.
    ``offset`` is added to the parameter wherever it is used (a norm's 1 + w); the scaling is of their sum.
    ``drawn`` False: the start is a pattern without chance (rates 1, 2, 3, ...), the same for every seed.
    """

    role: Role
    init: Init
    residual: bool = False
    offset: float = 0.0
    drawn: bool = True


def normal(std: float) -> Init:
    def fill(tensor: Tensor, generator: Generator) -> None:
        tensor.normal_(0.0, std, generator=generator)

    return fill


def uniform(low: float, high: float) -> Init:
    def fill(tensor: Tensor, generator: Generator) -> None:
        tensor.uniform_(low, high, generator=generator)

    return fill


def constant(value: float) -> Init:
    def fill(tensor: Tensor, generator: Generator) -> None:
        tensor.fill_(value)

    return fill


def log_uniform(low: float, high: float) -> Init:
    """The logarithm of a number drawn evenly from [low, high] (Mamba-2's ``A_log``)."""

    def fill(tensor: Tensor, generator: Generator) -> None:
        tensor.uniform_(low, high, generator=generator).log_()

    return fill


def softplus_inverse_log_uniform(low: float, high: float, floor: float) -> Init:
    """b with softplus(b) = max(dt, floor), log dt drawn evenly from [log low, log high] (Mamba's ``dt_bias``)."""

    def fill(tensor: Tensor, generator: Generator) -> None:
        tensor.uniform_(math.log(low), math.log(high), generator=generator).exp_().clamp_(min=floor)
        tensor.add_(torch.log(-torch.expm1(-tensor)))

    return fill


def orthogonal(blocks: int = 1) -> Init:
    """``blocks`` equal parts of the rows, each with orthogonal rows (or columns, where it is tall), drawn evenly from all
    such matrices (https://arxiv.org/abs/1312.6120): the recurrent matrix of each gate.
    """

    def fill(tensor: Tensor, generator: Generator) -> None:
        for part in tensor.chunk(blocks):
            nn.init.orthogonal_(part, generator=generator)

    return fill


def fan_in(weight: Tensor) -> Init:
    """Normal with variance 1 / fan-in: unit-size inputs give unit-size outputs."""
    return normal(max(weight[0].numel(), 1) ** -0.5 if weight.ndim > 1 and weight.shape[0] else 1.0)


def _default_spec(module: nn.Module, name: str, param: Tensor) -> ParamSpec | None:
    if isinstance(module, nn.Linear):
        return ParamSpec("bias", constant(0.0)) if name == "bias" else ParamSpec("matrix", fan_in(param))
    if isinstance(module, nn.Embedding):
        return ParamSpec("embedding", normal(param.shape[1] ** -0.5))
    return None


def declared_specs(model: nn.Module) -> dict[str, ParamSpec]:
    """What the modules say in ``param_specs()``, by canonical name."""
    said: dict[str, ParamSpec] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        declare: Callable[[], Mapping[str, ParamSpec]] | None = getattr(module, "param_specs", None)
        for name, spec in (declare() if declare is not None else {}).items():
            said.setdefault(f"{prefix}.{name}" if prefix else name, spec)
    return said


def param_specs(model: nn.Module) -> dict[str, ParamSpec]:
    """The spec of every parameter by canonical name; an outer module's word beats an inner one's.

    Raises :class:`ConfigError` for a parameter that no module speaks for.
    """
    said = declared_specs(model)
    defaults: dict[str, ParamSpec] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, param in module.named_parameters(recurse=False):
            spec_or_none = _default_spec(module, name, param)
            if spec_or_none is not None:
                defaults[dot + name] = spec_or_none
    specs = {}
    for name, _ in model.named_parameters():
        if name not in said and name not in defaults:
            whose, inside = _named(model, name)
            raise ConfigError(
                f"{whose}parameter {inside!r} has no role: its module must name it in param_specs(), as ParamSpec(role, "
                f"start). Roles: {', '.join(get_args(Role))}"
            )
        specs[name] = said.get(name, defaults.get(name))
    return specs  # type: ignore[return-value]


def _named(model: nn.Module, name: str) -> tuple[str, str]:
    """``model.blocks.c.mixer: 'boom' of plugin 'hybridtf-boom' (layer 2): ``, and the parameter's name in that component."""
    origin, inside = owner_of(model, name)
    return ("" if origin is None else f"{origin}: "), inside


def init_parameters(model: nn.Module, seed: int, *, residual_scale: float = 1.0) -> None:
    """Fill every parameter from (``seed``, its name). Drawn in float32 on the CPU, so that all dtypes and devices agree.

    ``residual_scale`` multiplies what ends a residual branch; 0 silences the branches at the start.
    Parameters on the meta device are left alone.
    """
    specs = param_specs(model)
    unknown = sorted(set(declared_specs(model)) - {name for name, _ in model.named_parameters(remove_duplicate=False)})
    if unknown:
        whose, inside = _named(model, unknown[0])
        own = [name.removeprefix(unknown[0].removesuffix(inside)) for name in specs]
        raise ConfigError(f"{whose}param_specs() speaks of {inside!r}, which is no parameter. {known_names(inside, own)}")
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.is_meta:
                continue
            spec = specs[name]
            digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            value = torch.zeros(param.shape, dtype=torch.float32)
            spec.init(value, generator)
            if spec.residual:
                value.add_(spec.offset).mul_(residual_scale).sub_(spec.offset)
            param.copy_(value)
