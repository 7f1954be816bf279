"""Layers that share keys and values: by hand, in a model, and what is refused."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError
from hybridtf.mixers import AttentionConfig
from hybridtf.models import LanguageModelConfig
from hybridtf.testing import Subject, check_mixer, run_law

D = 12
OPTIONS = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "qk_norm": {"type": "rms_norm"}}


def build(**options):
    return AttentionConfig(**{**OPTIONS, **options}).build(BuildContext(d_model=D, param_dtype=torch.float64))


def test_a_reader_attends_to_what_another_layer_holds():
    giver, reader = build(kv_group="far", kv_role="gives"), build(kv_group="far", kv_role="reads")
    assert {name for name, _ in reader.named_parameters()} == {"q_proj.weight", "q_norm.weight", "out_proj.weight"}
    x, other = torch.randn(2, 2, 7, D, dtype=torch.float64)
    _, _, extras = giver(other)
    got, _ = reader(x, edges=extras.edges)
    plain = build()
    plain.load_state_dict({**giver.state_dict(), **reader.state_dict()})
    of_other = {name: getattr(giver, name)(other) for name in ("k_proj", "v_proj")}
    plain.k_proj.forward, plain.v_proj.forward = (lambda _, z=z: z for z in of_other.values())
    torch.testing.assert_close(got, plain(x)[0], rtol=0, atol=1e-14)


def test_values_are_normed_or_keys_as_they_are_projected():
    norm = {"type": "rms_norm", "weight": False}
    mixer, x = build(values_from="keys", v_norm=norm), torch.randn(2, 5, D, dtype=torch.float64)
    assert not hasattr(mixer, "v_proj")
    k, v = mixer.keys_and_values(x)
    torch.testing.assert_close(k.flatten(2), mixer.k_proj(x))
    torch.testing.assert_close(v, k * (k.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


def model(pattern, **more):
    shared = {"type": "attention", "n_heads": 2, "n_kv_heads": 1, "kv_group": "far"}
    blocks = {"a": {"mixer": shared}, "w": {"mixer": {**shared, "window": 3}}, "r": {"mixer": {**shared, **more}}}
    used = {name: block for name, block in blocks.items() if name in pattern}
    return LanguageModelConfig(vocab_size=17, d_model=8, pattern=pattern, blocks=used).build().double().eval()


def test_the_first_layer_of_a_name_gives_and_a_model_can_be_cut():
    made = model("a w a")
    assert [hasattr(layer.mixer, "k_proj") for layer in made.stack.layers.values()] == [True, False, False]
    ids = torch.randint(0, 17, (2, 9))
    whole, state, parts = made(ids).logits, made.init_state(2), []
    for start in range(0, 9, 4):
        out = made(ids[:, start : start + 4], state=state)
        parts.append(out.logits)
        state = out.state
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("law", ["cut", "segment", "gradients", "crop"])
def test_laws_of_a_reader(law):
    run_law(Subject("mixers", AttentionConfig(**OPTIONS, kv_group="far", kv_role="reads")), law)


@pytest.mark.slow
def test_all_laws_of_a_reader():
    check_mixer(AttentionConfig(**OPTIONS, kv_group="far", kv_role="reads", window=3))


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="reads the edge 'far_keys', which no earlier component writes"):
        model("r a", kv_role="reads")
    with pytest.raises(ConfigError, match=r"reads the edge 'far_keys' as \(b t 2 4\), .* has it as \(b t 1 4\)"):
        model("a r", n_kv_heads=2, kv_role="reads")
    for options, why in (
        ({"kv_role": "reads"}, "does nothing beside no kv_group"),
        ({"kv_group": "far", "value_residual": "first"}, "give one"),
        ({"kv_group": "far", "kv_role": "reads", "values_from": "keys"}, "of a layer with keys and values of its own"),
        ({"values_from": "keys", "v_dim": 5}, "values as wide as keys"),
    ):
        with pytest.raises(ValueError, match=why):
            build(**options)
