"""What runs on a CPU gives the same on a GPU: every component, kernel and way of generating.

Marked ``gpu``, so that ``make gpu-check`` runs it; the device may be named in ``HYBRIDTF_TEST_DEVICE``.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from hybridtf.core import BuildContext, KernelError, Segments, active
from hybridtf.models import GenerationConfig, LanguageModelConfig, generate
from hybridtf.testing import NotApplicableError, Subject, preset_config

DEVICE = torch.device(os.environ.get("HYBRIDTF_TEST_DEVICE", "cuda"))
pytestmark = pytest.mark.gpu

KINDS = ("mixers", "channel_mixers", "blocks", "norms")
NAMES = [(kind, name) for kind in KINDS for name in active()[kind].names()]
BF16_TOLERANCE = 0.06
"""Of the largest output: bfloat16 has 8 bits, and a GPU sums in another order."""


def config_of(kind: str, name: str):
    registry = active()[kind]
    return preset_config(kind, name) if name in registry.presets() else registry.get(name).tiny()


def pair(kind: str, name: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    subject = Subject(kind, config_of(kind, name))
    try:
        return tuple(subject.build(dtype, device=torch.device(d)) for d in ("cpu", DEVICE))  # type: ignore[return-value]
    except NotApplicableError as reason:
        pytest.skip(str(reason))
    except KernelError as reason:
        pytest.skip(f"its kernel does not run here: {reason}")


def run(kind: str, module: nn.Module, x: torch.Tensor, segments: Segments | None) -> torch.Tensor:
    if kind == "norms":
        return module(x)
    if kind == "blocks":
        return module(x, {}, segments=segments).x
    return module(x, segments=segments)[0]


@pytest.mark.parametrize(("kind", "name"), NAMES, ids=[f"{kind}-{name}" for kind, name in NAMES])
def test_outputs_and_gradients_equal_those_of_the_cpu(kind: str, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 37, 16, generator=generator, dtype=torch.float64)
    segments = None if kind == "norms" else Segments.from_lengths([[5, 13, 19], [37]])
    results = []
    for module in pair(kind, name, torch.float64):
        device = next(module.parameters(), x.new_empty(0)).device
        given = x.to(device).requires_grad_()
        y = run(kind, module, given, None if segments is None else segments.to(device))
        (y.square().sum() / 100).backward()
        grads = {n: p.grad.cpu() for n, p in module.named_parameters() if p.grad is not None}
        results.append((y.detach().cpu(), given.grad.cpu(), grads))
    (y, dx, grads), (y_there, dx_there, grads_there) = results
    torch.testing.assert_close(y_there, y, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(dx_there, dx, rtol=1e-7, atol=1e-8)
    assert grads.keys() == grads_there.keys()
    for n, grad in grads.items():
        torch.testing.assert_close(grads_there[n], grad, rtol=1e-7, atol=1e-8, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("name", [n for k, n in NAMES if k == "mixers"])
@torch.no_grad()
def test_bfloat16_prefill_and_decode_stay_near_float32(name: str) -> None:
    exact, _ = pair("mixers", name, torch.float32)
    _, low = pair("mixers", name, torch.bfloat16)
    x = torch.randn(2, 33, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact.load_state_dict({n: t.float().cpu() for n, t in low.state_dict().items()})
    want = exact(x.float())[0]
    state, parts = low.init_state(2, 33), []
    for start, stop in ((0, 20), (20, 21), (21, 32), (32, 33)):
        y, state = low(x[:, start:stop].to(DEVICE), state=state)
        parts.append(y)
    assert float((torch.cat(parts, 1).float().cpu() - want).abs().max()) < BF16_TOLERANCE * float(want.abs().max())


@pytest.mark.parametrize("compiled", [False, True])
def test_text_equals_that_of_the_cpu(compiled: bool) -> None:
    mixers = ("mamba", "gqa", "mamba2", "sliding_attention", "griffin_recurrent", "linear_attention", "lstm")
    blocks = {f"l{i}": {"mixer": config_of("mixers", name).to_dict()} for i, name in enumerate(mixers)}
    config = LanguageModelConfig(vocab_size=23, d_model=16, pattern=" ".join(blocks), blocks=blocks, max_seq_len=64)
    models = [config.build(BuildContext(d_model=16, device=torch.device(d), seed=3)) for d in ("cpu", DEVICE)]
    prompts, options = [[1, 2, 3], [4] * 9], {"max_new_tokens": 16}
    want = generate(models[0], prompts, GenerationConfig(**options))
    assert generate(models[1], prompts, GenerationConfig(**options, compile=compiled)) == want
