"""Muon for matrices (Jordan et al. 2024, kellerjordan.github.io/posts/muon), AdamW for everything else, in one optimizer.

The momentum of a matrix is brought near the closest matrix with orthonormal rows or columns by a few Newton-Schulz steps, so
that all its directions are learned at one rate. ``torch.optim.Muon`` computes the same and is the judge in the tests. It
is not used here since it takes one matrix a parameter (no fused projections, no stacked experts), works in bfloat16
alone, and beside a second optimizer a gradient that overflows under fp16 would stop one of the two and not the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridtf.core import ConfigError
from hybridtf.nn import accumulation_dtype
from hybridtf.train.config import MuonOptions, MuonScale

EPS = 1e-7


def matrix_splits(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Widths of the matrices inside each fused projection, by canonical name, from what modules declare in ``splits``.

    Raises :class:`ConfigError` where widths do not add up to the projection's outputs.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    found: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules():
        declared = getattr(module, "splits", None)
        for projection, widths in declared.items() if isinstance(declared, Mapping) else ():
            part = getattr(module, projection, None)
            weight = part if isinstance(part, nn.Parameter) else getattr(part, "weight", None)
            name = names.get(id(weight))
            if name is None or weight is None:
                continue
            if sum(widths.values()) != weight.shape[output_dim(weight)]:
                raise ConfigError(
                    f"{path}: splits of {projection} are {dict(widths)}, {sum(widths.values())} together; the matrix has "
                    f"{weight.shape[output_dim(weight)]} outputs"
                )
            found[name] = tuple(widths.values())
    return found


def output_dim(weight: Tensor) -> int:
    """0 in the matrix (out in) of a linear layer, 2 in the stacked matrices (e in out) of experts."""
    return 0 if weight.ndim == 2 else 2


def orthogonalise(
    matrices: Tensor, *, steps: int, coefficients: Sequence[float], dtype: torch.dtype, eps: float = EPS
) -> Tensor:
    """Newton-Schulz on a matrix (r c), or on each of a stack (e r c), in ``dtype``: singular values go to about 0.7 to 1.2.

    A matrix of zeros stays so.
    """
    a, b, c = coefficients
    multiply_add = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(dtype)
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def update_scale(scale: MuonScale, n_out: int, n_in: int) -> float:
    """What the learning rate of a matrix is multiplied with: see :class:`MuonOptions`."""
    if scale == "original":
        return math.sqrt(max(1.0, n_out / max(n_in, 1)))
    return 0.2 * math.sqrt(max(n_out, n_in))


class MuonAdamW(torch.optim.Optimizer):
    """Groups whose ``method`` is ``muon`` by Muon, the others by ``torch.optim.AdamW``; one state for both.

    A Muon group has ``splits``: for each parameter the widths of its matrices, empty where it is one.
    """

    def __init__(self, groups: list[dict[str, Any]], options: MuonOptions, adamw: Mapping[str, Any]) -> None:
        self.options = options
        super().__init__(groups, {"lr": adamw["lr"]})
        rest = self._of("adamw")
        self._adamw = torch.optim.AdamW(rest, **adamw) if rest else None
        self._share()

    def _of(self, method: str) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["method"] == method]

    def _share(self) -> None:
        if self._adamw is not None:
            self._adamw.state, self._adamw.param_groups = self.state, self._of("adamw")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Closures are for line searches, and this has none."""
        if closure is not None:
            raise ConfigError("MuonAdamW.step takes no closure")
        if self._adamw is not None:
            self._adamw.step()
        for group in self._of("muon"):
            for param, widths in zip(group["params"], group["splits"], strict=True):
                if param.grad is not None:
                    self._update(param, param.grad, widths, group["lr"], group["weight_decay"])

    def _update(self, param: Tensor, grad: Tensor, widths: Sequence[int], lr: float, weight_decay: float) -> None:
        options = self.options
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - options.momentum)
        update = grad.lerp(momentum, options.momentum) if options.nesterov else momentum
        param.mul_(1 - lr * weight_decay)
        dim = output_dim(param)
        pieces = [update] if not widths else update.split(list(widths), dim)
        targets = [param] if not widths else param.split(list(widths), dim)
        for piece, target in zip(pieces, targets, strict=True):
            n_in, n_out = (piece.shape[1], piece.shape[0]) if piece.ndim == 2 else piece.shape[1:]
            direction = orthogonalise(
                piece, steps=options.ns_steps, coefficients=options.ns_coefficients, dtype=self._dtype(param)
            )
            target.add_(direction, alpha=-lr * update_scale(options.scale, n_out, n_in))

    def _dtype(self, param: Tensor) -> torch.dtype:
        """The dtype of the Newton-Schulz steps."""
        if self.options.precision == "bf16":
            return torch.bfloat16
        if self.options.precision == "auto" and param.is_cuda and param.dtype != torch.float64:
            return torch.bfloat16
        return accumulation_dtype(param.dtype)
