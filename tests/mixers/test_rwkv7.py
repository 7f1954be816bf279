"""RWKV-7's mixer against a plain loop written from the paper, in its layout (values times keys), and its edges and starts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, ConfigError
from hybridtf.mixers import RWKV7Config
from hybridtf.mixers.rwkv7 import FIRST_VALUES
from hybridtf.models import LanguageModelConfig
from hybridtf.testing import Subject, run_law
from tests.mixers.plain_parts import built, given, same, shifted

WIDTH, HEAD = 12, 4
CONFIG = RWKV7Config(head_dim=HEAD, decay_rank=3, a_rank=2, v_rank=2, gate_rank=5, chunk_size=8)


def lora(x, part, act=lambda z: z):
    return act(x @ part.down_proj.weight.T) @ part.up_proj.weight.T + (0 if part.up_proj.bias is None else part.up_proj.bias)


def plain(m, x, first=None):
    """The paper's equations, one token after another; returns the output and the layer's own values."""
    delta = shifted(x) - x
    xr, xw, xk, xv, xa, xg = (x + delta * getattr(m, f"mix_{z}") for z in "rwkvag")
    r, k, v = xr @ m.r_proj.weight.T, xk @ m.k_proj.weight.T, xv @ m.v_proj.weight.T
    # The paper's decay: w = exp(-exp(-1/2) sigmoid(d)).
    w = torch.exp(-torch.exp(torch.tensor(-0.5, dtype=x.dtype)) * torch.sigmoid(lora(xw, m.w_lora, torch.tanh)))
    a, g = torch.sigmoid(lora(xa, m.a_lora)), lora(xg, m.g_lora, torch.sigmoid)
    own = v
    if first is not None:
        nu = torch.sigmoid(lora(xv, m.v_lora))
        v = nu * first + (1 - nu) * v
    heads = lambda z: z.unflatten(-1, (-1, HEAD))  # noqa: E731
    kappa = F.normalize(heads(k * m.k_k), dim=-1)
    key = heads(k * (1 - m.k_a + m.k_a * a))
    r, w, v, a = heads(r), heads(w), heads(v), heads(a)
    S = x.new_zeros(x.shape[0], WIDTH // HEAD, HEAD, HEAD)
    out = []
    for t in range(x.shape[1]):
        removal = kappa[:, t, :, :, None] * (a * kappa)[:, t, :, None, :]
        transition = torch.diag_embed(w[:, t]) - removal
        S = S @ transition + v[:, t, :, :, None] * key[:, t, :, None, :]
        read = (S @ r[:, t, :, :, None])[..., 0]
        normed = F.group_norm(read.flatten(1), WIDTH // HEAD, m.norm.weight, m.norm.bias, eps=HEAD * 1e-5)
        bonus = (r[:, t] * key[:, t] * m.r_k.view(-1, HEAD)).sum(-1, keepdim=True) * v[:, t]
        out.append(normed + bonus.flatten(1))
    return (g * torch.stack(out, 1)) @ m.out_proj.weight.T, own


@pytest.mark.parametrize("t", [1, 5, 29])
def test_the_first_layer_and_a_later_one(t: int) -> None:
    x = given(2, t, WIDTH)
    mixer = built(CONFIG, WIDTH)
    y, _, extras = mixer(x)
    expected, own = plain(mixer, x)
    torch.testing.assert_close(extras.edges[FIRST_VALUES], own)
    if t > 1:  # of one token alone the decay has nothing to act on
        same(y, expected, x, mixer)
    later = built(CONFIG, WIDTH, layer_idx=1, n_layers=3, edges=frozenset({FIRST_VALUES}))
    first = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    y, _ = later(x, edges={FIRST_VALUES: first})
    torch.testing.assert_close(y, plain(later, x, first)[0], rtol=1e-9, atol=1e-9)
    if t > 1:
        same(y, plain(later, x, first)[0], x, later)


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
    whole = model(ids).logits
    state, parts = model.init_state(2), []
    for part in ids.split([4, 1, 3, 1], dim=1):
        out = model(part, state=state)
        state = out.state
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)
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
    with pytest.raises(ConfigError, match="d_model = 10 is not divisible by head_dim = 4"):
        CONFIG.build(BuildContext(d_model=10))
