"""The first layer's values in later layers, by hand and in a model."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError
from hybridtf.mixers import AttentionConfig
from hybridtf.models import LanguageModelConfig
from hybridtf.testing import check_mixer
from tests.models.tiny_models import assert_can_be_cut

D = 12


def build(role, **options):
    options = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "value_residual": role, **options}
    return AttentionConfig(**options).build(BuildContext(d_model=D, param_dtype=torch.float64))


def test_later_layers_attend_to_mixed_values():
    first, later, x = build("first"), build("later"), torch.randn(2, 7, D, dtype=torch.float64)
    _, _, extras = first(x)
    values = extras.edges["attention_values"]
    torch.testing.assert_close(values.flatten(2), first.v_proj(x))
    with torch.no_grad():
        later.value_mix.copy_(torch.tensor([0.25, -1.25]))
    got, _ = later(x, edges=extras.edges)
    plain = build("none")
    plain.load_state_dict({n: p for n, p in later.state_dict().items() if n != "value_mix"})
    mixed = 0.25 * values.flatten(2) - 1.25 * later.v_proj(x)
    plain.v_proj.forward = lambda _: mixed
    torch.testing.assert_close(got, plain(x)[0], rtol=0, atol=1e-14)


def test_the_mix_starts_half_and_half():
    assert build("later").value_mix.tolist() == [0.5, 0.5]


def model(pattern, **later):
    attention = {"type": "attention", "n_heads": 2, "n_kv_heads": 1}
    blocks = {
        "f": {"mixer": {**attention, "value_residual": "first"}},
        "a": {"mixer": {**attention, "value_residual": "later", **later}},
    }
    return LanguageModelConfig(
        vocab_size=17, d_model=8, n_layers=3, pattern=pattern, blocks={k: v for k, v in blocks.items() if k in pattern}
    ).build()


def test_the_first_of_a_stack_is_found():
    blocks = {"a": {"mixer": {"type": "attention", "n_heads": 2, "n_kv_heads": 1, "value_residual": "auto"}}}
    found = LanguageModelConfig(vocab_size=17, d_model=8, n_layers=3, pattern="a*3", blocks=blocks).build()
    named = model("f a*2")
    named.load_state_dict(dict(zip(named.state_dict(), found.state_dict().values(), strict=True)))
    ids = torch.randint(0, 17, (2, 5))
    assert torch.equal(found(ids).logits, named(ids).logits)


def test_in_a_model_the_first_layer_writes_and_the_others_read():
    made = model("f a*2").double().eval()
    ids = torch.randint(0, 17, (2, 9))
    assert_can_be_cut(made, ids, [4, 4, 1])
    made(ids).logits.sum().backward()
    assert all(layer.mixer.value_mix.grad.abs().min() > 0 for layer in list(made.stack.layers.values())[1:])


def test_values_that_nobody_wrote_or_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match="reads the edge 'attention_values', which no earlier component writes"):
        model("a*3")
    with pytest.raises(ConfigError, match=r"reads the edge 'attention_values' as \(b t 2 4\), .* has it as \(b t 1 4\)"):
        model("f a*2", n_kv_heads=2)
    x = torch.randn(1, 3, D, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"have \(heads, width\) \(2, 4\), this layer's \(4, 4\)"):
        build("later", n_kv_heads=4)(x, edges=build("first")(x)[2].edges)


@pytest.mark.slow
def test_the_reader_keeps_every_law():
    check_mixer(AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=6, value_residual="later"))
