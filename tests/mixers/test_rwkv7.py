"""RWKV-7's mixer against the layer in the authors' package, and its edges and starts."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import RWKV7Config
from hybridtf.mixers.rwkv7 import FIRST_VALUES
from hybridtf.models import LanguageModelConfig
from hybridtf.testing import Subject, run_law
from tests.mixers.plain_parts import built, given, same
from tests.models.tiny_models import assert_can_be_cut
from tests.peers import peer

WIDTH, HEAD = 128, 64
CONFIG = RWKV7Config(head_dim=HEAD, decay_rank=3, a_rank=2, v_rank=2, gate_rank=5, chunk_size=8)


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    """The authors' package, as plain torch; importing it changes switches of torch's GPU libraries."""
    kept = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RWKV_V7_ON", "1")
        patch.setenv("RWKV_CUDA_ON", "0")
        patch.setattr(torch.jit, "script", lambda fn: fn)
        patch.setattr(torch._C, "_jit_set_autocast_mode", lambda mode: None)
        module = peer("rwkv/model.py")
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = kept
    return module


class AllDigits(StrictFloat64):
    """Their decay exp(-0.606531 sigmoid(.)), its constant exp(-1/2) not cut to six digits."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.exp:
            args = (args[0] * (math.exp(-0.5) / 0.606531),)
        return super().__torch_function__(func, types, args, kwargs)


def weights(m) -> dict[str, torch.Tensor]:
    """By the names that the authors give them; their matrices are transposed."""
    named = {f"x_{z}": getattr(m, f"mix_{z}") for z in "rwkvag"}
    for name in "wav":
        part = m.a_lora if name == "v" and m.v_lora is None else getattr(m, f"{name}_lora")  # the first layer uses no v
        named |= {f"{name}0": part.up_proj.bias, f"{name}1": part.down_proj.weight.T, f"{name}2": part.up_proj.weight.T}
    named |= {"g1": m.g_lora.down_proj.weight.T, "g2": m.g_lora.up_proj.weight.T, "k_k": m.k_k, "k_a": m.k_a, "r_k": m.r_k}
    named |= {"R_": m.r_proj.weight.T, "K_": m.k_proj.weight.T, "V_": m.v_proj.weight.T, "O_": m.out_proj.weight.T}
    return named | {"ln_w": m.norm.weight, "ln_b": m.norm.bias}


def published(theirs: ModuleType, m, x: torch.Tensor, first: torch.Tensor | None = None):
    """The authors' layer, one token after another; the output, the first layer's values, and the last state (values times
    keys). Their form for whole sequences writes over what its gradients need."""
    named, rows, values, states = weights(m), [], [], []
    for i, row in enumerate(x):
        before, state, out = torch.zeros_like(row[0]), row.new_zeros(WIDTH // HEAD, HEAD, HEAD), []
        for t, token in enumerate(row):
            with AllDigits():
                y, before, state, v = theirs.RWKV_x070_TMix_one(
                    int(first is not None), WIDTH // HEAD, HEAD, token, before, token if first is None else first[i, t], state,
                    **named,
                )
            out.append((y, v))
        y, v = (torch.stack(z) for z in zip(*out, strict=True))
        rows.append(y), values.append(v), states.append(state)
    return torch.stack(rows), torch.stack(values), torch.stack(states)


@pytest.mark.parametrize("t", [1, 5, 29])
def test_the_first_layer_and_a_later_one(theirs: ModuleType, t: int) -> None:
    x = given(2, t, WIDTH)
    mixer = built(CONFIG, WIDTH)
    y, state, extras = mixer(x, state=mixer.init_state(2))
    expected, own, last = published(theirs, mixer, x)
    torch.testing.assert_close(extras.edges[FIRST_VALUES], own)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state["memory"]["S"], last.mT, rtol=1e-9, atol=1e-9)
    later = built(CONFIG, WIDTH, layer_idx=1, n_layers=3, edges=frozenset({FIRST_VALUES}))
    first = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    read, _ = later(x, edges={FIRST_VALUES: first})
    mixed = published(theirs, later, x, first)[0]
    torch.testing.assert_close(read, mixed, rtol=1e-9, atol=1e-9)
    if t > 1:  # of one token alone the decay has nothing to act on
        same(y, expected, x, mixer)
        same(read, mixed, x, later)


def test_who_writes_and_who_reads() -> None:
    def edges(role: str, layer_idx: int, *written: str):
        config = CONFIG.model_copy(update={"value_residual": role})
        mixer = config.build(BuildContext(d_model=WIDTH, layer_idx=layer_idx, n_layers=4, edges=frozenset(written)))
        return bool(mixer.writes), bool(mixer.reads), mixer.v_lora is not None

    assert edges("auto", 2) == edges("first", 2, FIRST_VALUES) == (True, False, False)
    assert edges("auto", 2, FIRST_VALUES) == edges("later", 1) == (False, True, True)
    assert edges("none", 0) == edges("none", 3) == (False, False, False)


@pytest.mark.parametrize("law", ["cut", "segment", "lora"])
def test_a_reading_layer_keeps_the_laws(law: str) -> None:
    run_law(Subject("mixers", RWKV7Config.tiny().model_copy(update={"value_residual": "later"})), law)


def test_layers_of_a_model_share_the_first_values() -> None:
    """The first layer writes and the others read, in pieces as in one call."""
    layer = {"mixer": CONFIG.to_dict(), "channel_mixer": {"type": "rwkv7_channel", "d_ff": 16}}
    config = LanguageModelConfig(vocab_size=11, d_model=WIDTH, n_layers=3, pattern="k*", blocks={"k": layer})
    model = config.build(BuildContext(d_model=WIDTH, param_dtype=torch.float64)).eval()
    ids = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(1))
    assert_can_be_cut(model, ids, [4, 1, 3, 1], atol=1e-9)
    reads = [bool(block.mixer.reads) for block in model.stack.layers.values()]
    assert reads == [False, True, True]


@pytest.mark.parametrize(
    ("d_model", "ranks"),
    [(768, (64, 64, 32, 128)), (2048, (96, 96, 64, 256)), (2560, (96, 96, 64, 320))],
)
def test_ranks_of_the_published_sizes(d_model: int, ranks: tuple[int, ...]) -> None:
    """Decay, a, v and gate of the published models of 0.1, 1.5 and 2.9 billion parameters."""
    assert tuple(RWKV7Config().ranks(d_model).values()) == ranks


def test_starts() -> None:
    """The decay's bias rises over the channels and bends within each head; the low-rank parts are silent."""
    mixer = RWKV7Config(head_dim=4).build(BuildContext(d_model=8, layer_idx=1, n_layers=4))
    bias = mixer.w_lora.up_proj.bias.detach()
    i = torch.arange(8.0)
    slope = -6 + 6 * (i / 7) ** (1 + (1 / 3) ** 0.3)
    zigzag = (i % 4 - 1.5) / 1.5
    torch.testing.assert_close(bias, slope + 0.5 + 2.5 * zigzag * zigzag.abs())
    torch.testing.assert_close(mixer.mix_r.detach(), 1 - (i / 8) ** (0.2 * 0.75))
    torch.testing.assert_close(mixer.norm.weight.detach(), torch.full((8,), 0.5**0.7))
    assert not any(bool(part.down_proj.weight.any()) for part in (mixer.w_lora, mixer.a_lora, mixer.g_lora))


def test_a_width_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="d_model = 100 is not divisible by head_dim = 64"):
        CONFIG.build(BuildContext(d_model=100))
