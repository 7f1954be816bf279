"""Parts that several plain layers of the tests need, written with torch's own functions."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtf.core import BuildContext
from tests.peers import peer


def built(config, d_model: int, *, layer_idx: int = 0, n_layers: int = 1, edges: frozenset[str] = frozenset()):
    """A float64 mixer with random numbers in every parameter, so that no start hides anything."""
    ctx = BuildContext(d_model=d_model, layer_idx=layer_idx, n_layers=n_layers, param_dtype=torch.float64, edges=edges)
    mixer = config.build(ctx)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in mixer.parameters():
            param.add_(0.3 * torch.randn(param.shape, generator=generator, dtype=torch.float64))
    return mixer


def given(b: int, t: int, d: int) -> Tensor:
    x = torch.randn(b, t, d, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
    return x.requires_grad_()


def causal_conv(x: Tensor, conv: nn.Module) -> Tensor:
    """silu of the depthwise convolution of x (b t c), by torch's own."""
    taps = conv.weight
    padded = F.pad(x.mT, (taps.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, taps[:, None], conv.bias, groups=taps.shape[0])).mT


def shifted(x: Tensor) -> Tensor:
    """x (b t d) one token later, zero at the first."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def same(found: Tensor, expected: Tensor, x: Tensor, mixer: nn.Module, tol: float = 1e-9) -> None:
    """Outputs, and gradients of the input and of every parameter."""
    torch.testing.assert_close(found, expected, rtol=tol, atol=tol)
    weight = torch.linspace(1, 2, found.numel(), dtype=found.dtype).view_as(found)
    inputs = [x, *mixer.parameters()]
    ours = torch.autograd.grad((found * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert bool(a.any())
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def espnet_s4() -> ModuleType:
    """ESPnet's copy of the published state-space models, S4 and S4D."""
    expression = lambda equation, *shapes: functools.partial(torch.einsum, equation)  # noqa: E731
    einsum = {"contract": torch.einsum, "contract_expression": expression}
    return peer("espnet2.asr.state_spaces.s4", opt_einsum=einsum, espnet={"__version__": ""})


def published(sizes):
    """Sizes of a latent attention under the names that transformers has for them."""
    return {"v_head_dim" if name == "v_dim" else name: size for name, size in sizes.items()}
