"""The experts: tokens sorted by expert, one grouped product a projection, and the results put back.

Axes: n tokens, e experts, k experts a token, s = n k rows, d width of a token, f d_ff.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from hybridtf.core import BuildContext, ParamSpec, init
from hybridtf.nn import GateOptions, activation


class ExpertOptions(GateOptions):
    """What one expert is: down(act(gate(x)) * up(x)), or down(act(up(x))) where it is not ``gated``."""

    d_ff: int
    """Of one expert."""
    gated: bool = True
    bias: bool = False
    """Of the projections of routed and shared experts, and of the latent projections, unless ``outer_bias`` says otherwise."""
    weights_on: Literal["output", "input"] = "output"
    """Where a router's weight multiplies: an expert's output, or its input (Llama 4)."""
    kernel: str = "auto"


class Experts(nn.Module):
    """The stacked weights of all experts, each (e in out), and their biases (e out)."""

    def __init__(self, options: ExpertOptions, n_experts: int, ctx: BuildContext, *, ends_branch: bool) -> None:
        super().__init__()
        self.options, self.n_experts, self.ends_branch = options, n_experts, ends_branch
        d, f = ctx.d_model, options.d_ff
        self.widths = {"gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}
        if not options.gated:
            del self.widths["gate_proj"]
            self.act = activation(options.activation)
        for name, (d_in, d_out) in self.widths.items():
            self.register_parameter(name, nn.Parameter(torch.empty(n_experts, d_in, d_out, **ctx.factory)))
            bias = nn.Parameter(torch.empty(n_experts, d_out, **ctx.factory)) if options.bias else None
            self.register_parameter(f"{name}_bias", bias)
        self.linear = ctx.bind_kernel("grouped_linear", options.kernel, sizes={"d_model": d, "d_ff": f})

    def param_specs(self) -> dict[str, ParamSpec]:
        specs = {}
        for name, (d_in, _) in self.widths.items():
            last = self.ends_branch and name == "down_proj"
            specs[name] = ParamSpec("matrix", init.normal(d_in**-0.5), residual=last)
            if self.options.bias:
                specs[f"{name}_bias"] = ParamSpec("bias", init.constant(0.0))
        return specs

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, n_tokens: int) -> Tensor:
        """x (n d), ``experts`` and ``weights`` (n k) to the weighted sum of the experts' outputs (n d), in x's dtype.

        Experts from e on (past the last) stand for none: they give zero, and nothing is read for them. ``n_tokens``: of a row.
        """
        given = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        n, k = experts.shape
        chosen, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(chosen, torch.arange(self.n_experts, device=chosen.device), right=True)
        inverse = torch.empty_like(order).scatter(0, order, torch.arange(n * k, device=order.device))
        # Passing through autograd costs more than a step of decoding spends on a gather.
        learning = torch.is_grad_enabled()
        dispatch: Any = _Dispatch.apply if learning else _Dispatch.forward
        collect: Any = _Rows.apply if learning else _Rows.forward
        rows: Tensor = dispatch(x, order, inverse, k)
        if self.options.weights_on == "input":
            rows = (rows * weights.flatten()[order, None]).to(x.dtype)
        y: Tensor = collect(self._run(rows, ends, n_tokens), inverse, order).view(n, k, x.shape[1])
        if self.options.weights_on == "output":
            y = y * weights[..., None]
        out: Tensor = y.sum(1).to(given)
        return out

    def _run(self, rows: Tensor, ends: Tensor, n_tokens: int) -> Tensor:
        """Every expert on its rows (s d)."""

        def project(x: Tensor, name: str) -> Tensor:
            y: Tensor = self.linear(x, getattr(self, name), ends, getattr(self, f"{name}_bias"), n_tokens=n_tokens)
            return y

        up = project(rows, "up_proj")
        hidden = self.options.gate_with(project(rows, "gate_proj"), up) if self.options.gated else self.act(up)
        return project(hidden, "down_proj")

    def extra_repr(self) -> str:
        return f"{self.n_experts} experts of {self.widths['up_proj'][0]} x {self.options.d_ff}"


class _Rows(torch.autograd.Function):
    """Rows ``x[index]`` for a permutation and its ``inverse``: the backward is a gather as well."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        return x.index_select(0, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, inverse = ctx.saved_tensors
        return _Rows.apply(grad, inverse, index), None, None  # type: ignore[no-untyped-call]


class _Dispatch(torch.autograd.Function):
    """Each token (n d) once for each of its k experts, in the ``order`` of the sorted (token, expert) pairs."""

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        return x.index_select(0, order // k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, order, inverse, ctx.k = inputs
        ctx.save_for_backward(order, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        order, inverse = ctx.saved_tensors
        pairs = _Rows.apply(grad, inverse, order)  # type: ignore[no-untyped-call]
        return pairs.unflatten(0, (grad.shape[0] // ctx.k, ctx.k)).sum(1), None, None, None
