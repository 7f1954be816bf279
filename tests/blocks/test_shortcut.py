"""``shortcut``: a second channel mixer whose result joins the stream at a later layer."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, RecipeError
from hybridtf.models import LanguageModelConfig

F64 = torch.float64
HALF = {"mixer": {"type": "attention", "n_heads": 2}, "channel_mixer": {"type": "swiglu", "d_ff": 12}}
EXPERTS = {"type": "moe", "n_experts": 3, "top_k": 2, "d_ff": 6, "n_identity": 2, "z_loss": 0.1}
BLOCKS = {"s": {"type": "shortcut", **HALF, "shortcut": EXPERTS}, "a": HALF, "i": {"type": "inject", "edge": "shortcut"}}
IDS = torch.randint(0, 13, (2, 9), generator=torch.Generator().manual_seed(0))


def build(pattern="(s a i)*2", **blocks):
    config = LanguageModelConfig(vocab_size=13, d_model=8, pattern=pattern, blocks={**BLOCKS, **blocks})
    return config.build(BuildContext(d_model=8, param_dtype=F64))


def test_it_joins_after_the_next_layer():
    model = build().eval()
    x = want = model.stem(IDS)[0]
    for i in (0, 3):
        first, second = model.stack.layers[str(i)], model.stack.layers[str(i + 1)]
        want = want + first.mixer(first.mixer_norm(want))[0]
        normed = first.channel_norm(want)
        later = first.shortcut(normed)[0]
        want = want + first.channel_mixer(normed)[0]
        want = want + second.mixer(second.mixer_norm(want))[0]
        want = want + second.channel_mixer(second.channel_norm(want))[0] + later
    out = model.stack(x, {})
    torch.testing.assert_close(out.x, want, rtol=0, atol=1e-12)
    assert set(out.losses) == {"router_z"}


def test_all_of_it_learns():
    model = build(s={**BLOCKS["s"], "learned_scale": {"per": "branch", "start": 0.5}, "residual_scale": (0.5, 2.0)})
    model.loss(IDS[:, :-1], IDS[:, 1:]).mean().backward()
    silent = [name for name, param in model.named_parameters() if param.grad is None or not param.grad.any()]
    assert silent == []


def test_without_a_mixer_and_with_its_own_name():
    alone = {"type": "shortcut", "channel_mixer": HALF["channel_mixer"], "shortcut": EXPERTS, "edge": "late"}
    model = build("s a i", s=alone, i={"type": "inject", "edge": "late"})
    assert model(IDS).logits.shape == (2, 9, 13)


@pytest.mark.parametrize(("changes", "message"), [
    ({"channel_mixer": None}, "give both"), ({"edge": "embedding"}, "is the stem's"), ({"edge": "Late"}, "edge"),
])
def test_what_does_not_fit(changes, message):
    block = {name: value for name, value in {**BLOCKS["s"], **changes}.items() if value is not None}
    with pytest.raises(RecipeError, match=message):
        build(s=block)


def test_two_that_write_one_edge_are_refused():
    router = {**EXPERTS, "d_router": 4, "router_state": "auto"}
    assert build(s={**BLOCKS["s"], "shortcut": router})(IDS).logits.shape == (2, 9, 13)
    with pytest.raises(ConfigError, match=r"blocks.s: two of its parts.*'router_state', 'router_state'"):
        build(s={**BLOCKS["s"], "channel_mixer": router, "shortcut": router})
    with pytest.raises(ConfigError, match=r"blocks.s: two of its parts.*'router_state', 'router_state'"):
        build(s={**BLOCKS["s"], "shortcut": router, "edge": "router_state"})


def test_a_result_that_joins_nowhere_before_is_refused():
    with pytest.raises(ConfigError, match="'shortcut', which no earlier component writes"):
        build("i s a")
