"""Adapters as peft makes them, on everything registered that has projections."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridtf.core import active
from hybridtf.testing import Subject, preset_config
from hybridtf.testing.compare import close
from hybridtf.testing.subject import by_phase

peft = pytest.importorskip("peft")
BaseTunerLayer = pytest.importorskip("peft.tuners.tuners_utils").BaseTunerLayer

KINDS = ("mixers", "channel_mixers", "models")
COMPONENTS = [(kind, name) for kind in KINDS for name in active()[kind].names()]


def _adapted(kind: str, name: str) -> tuple[Subject, nn.Module]:
    """A component with peft's adapters on every Linear, their weights drawn at random."""
    registry = active()[kind]
    config = preset_config(kind, name) if name in registry.presets() else registry.get(name).tiny()
    subject = Subject(kind, config)
    module = subject.build()
    targets = [path for path, part in module.named_modules() if type(part) is nn.Linear]
    if not targets:
        pytest.skip("has no nn.Linear")
    lora = peft.LoraConfig(r=3, target_modules=targets, init_lora_weights=False)
    return subject, peft.inject_adapter_in_model(lora, module).double().eval()


@pytest.mark.parametrize(("kind", "name"), COMPONENTS)
def test_adapters_of_peft_unmerged_equal_merged(kind: str, name: str) -> None:
    subject, module = _adapted(kind, name)
    inputs = subject.inputs(module, 2, 9)
    plain = by_phase(subject, subject.build(), inputs)
    apart = by_phase(subject, module, inputs)
    for part in module.modules():
        if isinstance(part, BaseTunerLayer):
            part.merge()
    for (what, a), (_, b), (_, before) in zip(apart, by_phase(subject, module, inputs), plain, strict=True):
        close(a, b, tol=1e-9, what=what)
        assert not torch.equal(a, before)
