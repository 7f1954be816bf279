"""Every registered mixer, small: most reports are asked of all of them, so that a new mixer is asked too.

Axes: b batch, t time, d d_model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtf.core import BuildContext, ComponentConfig, Segments, SequenceMixer, State, active, map_state
from hybridtf.models import LanguageModel, LanguageModelConfig
from hybridtf.testing import Subject, preset_config

F32, F64 = torch.float32, torch.float64
VOCAB = 17
LONGEST = 4096
"""Tokens of the longest case."""


BY_THEMSELVES: dict[str, dict[str, Any]] = {
    "rwkv7": {"value_residual": "none"},
    "titans": {"memory_layers": 1, "memory_width": None},
}
"""Options with which a mixer hands nothing to later layers; and with which what it learns on the way stays bounded: a memory of
several layers diverges by its definition on values far above 1, and never leaves zero once it has forgotten all."""


def config(name: str, **options: Any) -> ComponentConfig:
    """A mixer's smallest honest instance, with ``options`` changed."""
    registry = active()["mixers"]
    small = preset_config("mixers", name) if name in registry.presets() else registry.get(name).tiny()
    return registry.make({**small.to_dict(), **BY_THEMSELVES.get(name, {}), **options})


def _alone(name: str) -> bool:
    """It stands in a causal stack, and has one tensor in and one out: no edge, no context."""
    if getattr(config(name), "looks_ahead", False):
        return False
    mixer = config(name).build(BuildContext(d_model=16, device=torch.device("meta")))
    return not mixer.reads and not mixer.writes and not mixer.needs_context


CHOOSE = ("block_indexed_attention", "compressed_attention", "indexed_attention", "indexed_mla", "moba", "nsa")
"""Mixers that choose by scores what is read: a choice passes no gradient, and rounding may change it."""

EVERY = [name for name in (*active()["mixers"].configs(), "sliding_attention") if _alone(name)]
CHUNKED = [name for name in EVERY if "chunk_size" in type(config(name)).model_fields]
CONVOLVED = [name for name in EVERY if "d_conv" in type(config(name)).model_fields]

every = pytest.mark.parametrize("name", EVERY)
chunked = pytest.mark.parametrize("name", CHUNKED)
convolved = pytest.mark.parametrize("name", CONVOLVED)


def mixer(name: str, *laws: str, d_model: int = 16, dtype: torch.dtype = F64, seed: int = 0, **options: Any) -> SequenceMixer:
    """The mixer in eval mode, no parameter at zero or one, its losses left out of what it returns. Skips where it declares that
    it cannot keep one of ``laws``."""
    layer = Subject("mixers", config(name, **options), d_model, seed).build(dtype, max_seq_len=LONGEST)
    assert isinstance(layer, SequenceMixer)
    for law in laws:
        if law in layer.cannot:
            pytest.skip(f"declared: cannot {law} ({layer.cannot[law]})")
    if layer.losses:
        layer.register_forward_hook(_without_losses)
    return layer


def _without_losses(layer: SequenceMixer, args: tuple[Any, ...], out: tuple[Any, ...]) -> tuple[Any, ...]:
    return out[:2]


def model(
    pattern: str, blocks: dict[str, Any], *, dtype: torch.dtype = F64, d_model: int = 16, seed: int = 0, **more: Any
) -> LanguageModel:
    """A language model in eval mode; ``blocks`` gives the mixer of each block, by name or as a table."""
    tables = {
        key: {"mixer": config(value).to_dict() if isinstance(value, str) else value} for key, value in blocks.items()
    }
    recipe = LanguageModelConfig(vocab_size=VOCAB, d_model=d_model, pattern=pattern, blocks=tables, **more)
    return recipe.build(BuildContext(d_model=d_model, param_dtype=dtype, seed=seed)).eval()


HYBRID = {"m": "mamba2", "a": "attention", "w": "sliding_attention", "r": "griffin_recurrent"}
"""A recurrence with a convolution, keys and values that grow, a window, a recurrence channel by channel."""


def hybrid(pattern: str = "m a w r", **more: Any) -> LanguageModel:
    """Four layers with four kinds of state."""
    return model(pattern, {key: HYBRID[key] for key in HYBRID if key in pattern}, **more)


def solo(layer: SequenceMixer, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
    """The output and the final state of rows without padding."""
    return layer(x, state=layer.init_state(x.shape[0]) if state is None else state)


def steps(layer: SequenceMixer, x: Tensor, state: State) -> tuple[Tensor, State]:
    """One token a call."""
    out = [x[:, :0]]
    for t in range(x.shape[1]):
        y, state = layer(x[:, t : t + 1], state=state)
        out.append(y)
    return torch.cat(out, 1), state


def pieces(layer: SequenceMixer, x: Tensor, sizes: list[int], state: State) -> tuple[Tensor, State]:
    """Calls of these lengths."""
    out = []
    for part in x.split(sizes, 1):
        y, state = layer(part, state=state)
        out.append(y)
    return torch.cat(out, 1), state


def same(got: Tensor, want: Tensor, tol: float = 1e-10) -> None:
    """Equal within ``tol``, relative for what is large."""
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


def packed_ids(rows: list[Tensor], *, left: bool = False) -> tuple[Tensor, Segments]:
    """Rows of token ids (t) padded with id 3, a token like any other, to one width; and which are real."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), 3)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        part = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, part], mask[i, part] = row, True
    return ids, Segments.from_mask(mask)


@torch.no_grad()
def greedy(net: LanguageModel, ids: Tensor, n: int, segments: Segments | None = None) -> list[list[int]]:
    """The ``n`` likeliest tokens after each row."""
    out = net(ids, segments=segments, state=net.init_state(len(ids)), logits="last")
    tokens = [out.logits.argmax(-1)]
    for _ in range(n - 1):
        out = net(tokens[-1][:, None], state=out.state, logits="last")
        tokens.append(out.logits.argmax(-1))
    return torch.stack(tokens, 1).tolist()


def with_data(state: State, change: Callable[[Tensor], Tensor]) -> State:
    """The state with ``change`` applied to every floating tensor in it."""
    return map_state(lambda leaf: leaf._rebuild(lambda t: change(t) if t.is_floating_point() else t), state)
