"""Adapters of a shared block reach every projection of every component: beside it they give what they give within it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridtf.core import BuildContext
from hybridtf.models import LanguageModel, LanguageModelConfig
from hybridtf.testing import Subject
from hybridtf.testing.compare import close
from tests.models.random_stacks import D_MODEL, VOCAB, drawable, tiny

COMPONENTS = [(kind, name) for kind in ("mixers", "channel_mixers") for name in drawable(kind)]


def adapted_model(kind: str, name: str) -> LanguageModel:
    config = tiny(kind, name)
    part = kind.removesuffix("s")
    linears = [path for path, m in Subject(kind, config).build_plain().named_modules() if type(m) is nn.Linear]
    if not linears:
        pytest.skip("has no nn.Linear")
    block = {part: config, "shared": True, "adapters": {"rank": 2, "on": [f"{part}.{path}" for path in linears]}}
    model = LanguageModelConfig(
        vocab_size=VOCAB, d_model=D_MODEL, pattern="s", blocks={"s": block}, max_seq_len=64,  # type: ignore[dict-item]
    ).build(BuildContext(d_model=D_MODEL, param_dtype=torch.float64))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=generator, dtype=torch.float64))
    return model.eval()


@torch.no_grad()
def outputs(model: LanguageModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of one call, and of a prompt and single tokens."""
    text = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(4))
    state, steps = model.init_state(2, 12), []
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 9)):
        out = model(text[:, start:stop], state=state)
        state = out.state
        steps.append(out.logits)
    return model(text).logits, torch.cat(steps, 1)  # type: ignore[return-value]


@pytest.mark.parametrize(("kind", "name"), COMPONENTS, ids=[f"{kind}-{name}" for kind, name in COMPONENTS])
def test_adapters_beside_equal_adapters_merged(kind: str, name: str) -> None:
    model = adapted_model(kind, name)
    beside = outputs(model)
    block, visit = model.stack.layers["shared_s"], model.stack.layers["0"]
    for key, path in visit.paths.items():  # type: ignore[union-attr]
        adapter = visit.adapters[key]  # type: ignore[union-attr]
        with torch.no_grad():
            block.get_submodule(path).weight.add_(adapter.up.weight @ adapter.down.weight)  # type: ignore[operator]
            adapter.up.weight.zero_()
    merged = outputs(model)
    for got, want, what in zip(beside, merged, ("one call", "prompt and steps"), strict=True):
        close(got, want, tol=1e-9, what=what)
