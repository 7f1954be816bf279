"""Gradients of the reference models as a checkpoint: what the loss says of each published tensor, under its published name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybridtf.interop.weight_map import WeightMap
from tests.interop import tiny_oracles
from tests.interop.oracles import Oracle

FROZEN = ("z_L_init",)
"""Parameters of references that no training moves; building makes all of them alike."""


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross-entropy of each next token of (b t) out of scores (b t v)."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def write_gradients(one: Oracle, folder: Path) -> float:
    """Writes the reference's config and, in place of its weights, their gradients in strict float64; answers with their sum
    of squares.

    A checkpoint's layout is made of moves alone (names, cuts, joints, transposes), so that gradients go the way of weights.
    Zero is what has none: buffers, and what only chooses.
    """
    model = tiny_oracles.build64(one.name, one.seed)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.endswith(FROZEN))
    if hasattr(model.config, "L_bp_cycles"):  # which of its passes learn is a setting of training
        model.model.L_bp_cycles_padded = [model.config.L_cycles] * model.config.H_cycles
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    _backward(model, one)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.data = _gradient(p, before[name])
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.zero_()
    total = sum(float(p.detach().square().sum()) for p in model.parameters())
    tiny_oracles.write(one.name, model, str(folder))
    return total


def without_link(links: WeightMap, tensors: Mapping[str, Tensor], nothing: float) -> list[str]:
    """Tensors of a checkpoint of gradients, larger than ``nothing``, from which nothing of ours is read."""
    linked = {name for link in links.links for name in link.theirs} | links.copies.keys()
    rest = {name: x for name in tensors if name not in linked and (x := tensors[name]).is_floating_point()}
    return [name for name, x in rest.items() if float(x.abs().max()) > nothing]


def _backward(model: nn.Module, one: Oracle) -> None:
    more = {"use_cache": False} if tiny_oracles._accepts(model, "use_cache") else {}
    with tiny_oracles.strict_float64():
        logits = tiny_oracles.main_output(model(**tiny_oracles.inputs(one.name, one.seed), **more))
        loss_of(logits, one.ids).backward()


def _gradient(p: Tensor, before: Tensor) -> Tensor:
    """By the published weight. Where the reference has put a multiple of it in its place (RWKV halves some), by that number."""
    if p.grad is None:
        return torch.zeros_like(p)
    if torch.equal(p, before):
        return p.grad.clone(memory_format=torch.contiguous_format)
    return p.grad * (p.detach() / before)
