"""Every mixer from its ``tiny()`` config, on real tensors and on shapes without memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridtf.core import active
from hybridtf.cost.live_bytes import WithoutMemory
from hybridtf.testing import Subject
from hybridtf.testing.subject import Inputs

MIXERS = list(active()["mixers"].configs())
F32 = torch.float32


def subject_of(name: str) -> Subject:
    """The smallest instance of a mixer."""
    return Subject("mixers", active()["mixers"].get(name).tiny())


def without_memory(world: WithoutMemory, given: Inputs) -> Inputs:
    """Inputs as shapes that gradients are asked for."""

    def shape(x: Tensor) -> Tensor:
        return world.shape_of(x).requires_grad_() if x.is_floating_point() else x

    context: Any = None if given.context is None else replace(given.context, x=shape(given.context.x))
    return Inputs(shape(given.x), {name: shape(x) for name, x in given.edges.items()}, context)
