"""Mixers replaced by others: which weights arrive, as what, and what the new model then computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, HybridTFError, active
from hybridtf.models.weights import canonical_tensors
from hybridtf.recipe import Recipe, parse_recipe
from hybridtf.surgery import replace_mixers
from hybridtf.surgery.roles import ROLES, heads_of

ATTENTION = {
    "type": "attention", "n_heads": 6, "n_kv_heads": 3, "head_dim": 4, "qkv_bias": True, "out_bias": True,
    "position": {"type": "rope", "theta": 500.0}, "qk_norm": {"type": "rms_norm"},
}
IDS = torch.arange(12).view(2, 6)


def recipe(mixer: dict[str, Any] = ATTENTION, pattern: str = "a*3", **model: Any) -> Recipe:
    block = {"mixer": mixer, "channel_mixer": {"type": "swiglu", "d_ff": 8}}
    given = {"type": "language_model", "vocab_size": 13, "d_model": 24, "pattern": pattern, "blocks": {"a": block}}
    return parse_recipe({"model": given | model})


def build(made: Recipe, seed: int = 1):
    """In float64, with norms that are not all ones."""
    model = made.model.build(BuildContext(d_model=0, param_dtype=torch.float64, seed=seed)).eval()
    for name, tensor in canonical_tensors(model).items():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.uniform_(tensor, 0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    return model


def operate(mixer: Any, layers: Any = (1,), *, source: Recipe | None = None, **options: Any):
    made = source or recipe()
    model = build(made)
    before = {name: tensor.clone() for name, tensor in canonical_tensors(model).items()}
    found = replace_mixers(model, made, layers, mixer, **options)
    assert all(torch.equal(tensor, before[name]) for name, tensor in canonical_tensors(model).items())  # left as it was
    return model, found


def fates(found, layer: int = 1) -> dict[str, str]:
    """Of the new tensors, and of the old ones whose name no new one has."""
    pieces = sorted(found.pieces[layer], key=lambda piece: piece.fate != "dropped")
    return {piece.tensor: piece.fate + (f": {piece.how}" if piece.how else "") for piece in pieces}


def mixer_of(model, layer: int = 1):
    return model.stack.blocks()[layer].parts()["mixer"]


@pytest.mark.parametrize("layers", [(1,), (0, 1, 2)])
def test_the_same_mixer_is_the_same_model(layers):
    model, found = operate("attention", layers)
    assert found.counts() == {**dict.fromkeys(("reshaped", "fresh", "dropped"), 0), "kept": found.counts()["kept"]}
    assert torch.equal(found.model(IDS).logits, model(IDS).logits)
    assert found.recipe.model.pattern == ("a*3" if len(layers) == 3 else "a a_attention a")
    again = parse_recipe(found.recipe.to_dict())
    assert again.model == found.recipe.model


def test_as_many_kv_heads_as_before_change_nothing():
    model, found = operate(None, n_kv_heads=3)
    assert set(fates(found).values()) == {"kept"}
    assert torch.equal(found.model(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("n_kv_heads", [1, 3])
def test_means_of_equal_heads_are_those_heads(n_kv_heads):
    made = recipe({**ATTENTION, "n_kv_heads": 6})
    model = build(made)
    for layer in range(3):
        for name in ("k_proj", "v_proj"):
            for tensor in getattr(mixer_of(model, layer), name).parameters():
                heads = tensor.data.unflatten(0, (n_kv_heads, 6 // n_kv_heads, 4))
                heads.copy_(heads[:, :1].expand_as(heads))
    found = replace_mixers(model, made, range(3), n_kv_heads=n_kv_heads)
    assert fates(found)["k_proj.weight"] == f"reshaped: mean of {6 // n_kv_heads} heads each"
    assert mixer_of(found.model).k_proj.weight.shape == (4 * n_kv_heads, 24)
    torch.testing.assert_close(found.model(IDS).logits, model(IDS).logits, rtol=0, atol=1e-12)


def test_the_mean_is_of_heads_side_by_side():
    model, found = operate(None, n_kv_heads=1)
    heads = mixer_of(model).v_proj.weight.view(3, 4, 24)
    torch.testing.assert_close(mixer_of(found.model).v_proj.weight, (heads[0] + heads[1] + heads[2]) / 3)


def test_copied_heads_attend_as_shared_ones():
    model, found = operate(None, (0, 2), n_kv_heads=6)
    assert fates(found, 2)["v_proj.bias"] == "reshaped: each of 3 heads 2 times"
    torch.testing.assert_close(found.model(IDS).logits, model(IDS).logits, rtol=0, atol=1e-12)


def test_the_window_alone_is_what_a_table_without_it_leaves_out():
    wide = recipe({**ATTENTION, "window": 2})
    model, found = operate("full_attention", (0, 1, 2), source=wide)
    unbound = build(recipe())
    assert torch.equal(found.model(IDS).logits, unbound(IDS).logits)
    assert found.taken[1]["position"].theta == 500.0
    assert not torch.equal(found.model(IDS).logits, model(IDS).logits)
    assert operate(None, source=wide, n_kv_heads=1)[1].recipe.model.blocks["a_attention"].mixer.window == 2


def test_linear_attention_reads_what_attention_read():
    model, found = operate("linear_attention")
    new, old = mixer_of(found.model), mixer_of(model)
    assert {name for name, fate in fates(found).items() if fate != "kept"} == {"q_norm.weight", "k_norm.weight"}
    assert (found.taken[1]["position"], found.taken[1]["out_bias"]) == (old.config.position, True)
    assert all(torch.equal(new.get_parameter(name), old.get_parameter(name)) for name, _ in new.named_parameters())


def test_delta_rule():
    model, found = operate("gated_delta_net", seed=5)
    new, old, got = mixer_of(found.model), mixer_of(model), fates(found)
    assert dict(found.taken[1]) == {"n_heads": 6, "head_dim": 4, "v_dim": 4}
    assert (got["q_proj.weight"], got["out_proj.weight"]) == ("kept", "kept")
    assert got["k_proj.weight"] == got["v_proj.weight"] == "reshaped: each of 3 heads 2 times"
    for name in ("k_proj", "v_proj"):
        copied = getattr(old, name).weight.view(3, 1, 4, 24).expand(3, 2, 4, 24)
        assert torch.equal(getattr(new, name).weight.view(3, 2, 4, 24), copied)
    # Each tap of the convolutions is that of the token itself; what the mixer does with it is an activation all the same.
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    given, _ = new.conv({"q": x, "k": 2 * x, "v": 3 * x}, None, None)
    for name, n in (("q", 1), ("k", 2), ("v", 3)):
        torch.testing.assert_close(given[name], torch.nn.functional.silu(n * x), rtol=0, atol=1e-12)
    assert found.in_way[1] == (
        *(f"conv.{name} (each token itself, then silu)" for name in "qkv"), "gate_proj.weight (multiplies what goes out)",
    )
    # What decides of decay and rate starts as in a model that was never anything else.
    plain = mixer_of(found.recipe.model.build(BuildContext(d_model=0, param_dtype=torch.float64, seed=5)))
    for name in ("A_log", "dt_bias", "a_proj.weight", "b_proj.weight", "gate_proj.weight", "norm.weight"):
        assert got[name] == "fresh"
        assert torch.equal(new.get_parameter(name), plain.get_parameter(name))


def test_mamba2_is_filled_by_rows_of_one_matrix():
    model, found = operate("mamba2")
    new, old, got = mixer_of(found.model), mixer_of(model), fates(found)
    parts = dict(zip("zxbc", new.in_proj.weight.split([24, 24, 24, 24, 6]), strict=False))
    assert torch.equal(parts["c"], old.q_proj.weight)
    assert torch.equal(parts["b"].view(6, 4, 24)[::2], old.k_proj.weight.view(3, 4, 24))
    assert torch.equal(parts["x"].view(6, 4, 24)[1::2], old.v_proj.weight.view(3, 4, 24))
    assert [got[f"in_proj.weight[{part}]"] for part in ("z", "dt")] == ["fresh", "fresh"]
    assert (got["in_proj.weight[c]"], got["q_proj.bias"]) == ("kept", "dropped")
    assert got["conv.bias"] == "fresh: gives each token itself"
    back = replace_mixers(found.model, found.recipe, [1], {"type": "attention", "n_kv_heads": 3})
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        assert torch.equal(getattr(mixer_of(back.model), name).weight, getattr(old, name).weight), name


def test_norms_over_all_heads_follow_their_heads():
    over = recipe({**ATTENTION, "qk_norm_over": "heads"})
    model, found = operate(None, source=over, n_kv_heads=6)
    norms = [mixer_of(one).k_norm.weight.view(-1, 4) for one in (model, found.model)]
    assert torch.equal(norms[1], norms[0].repeat_interleave(2, 0))
    assert fates(found)["q_norm.weight"] == "kept"


def test_what_does_not_fit_starts_anew_and_says_why():
    _, found = operate({"type": "gated_delta_net", "head_dim": 3, "v_dim": 8})
    got = fates(found)
    assert got["q_proj.weight"] == "fresh: heads are 3 wide, and were 4"
    assert got["conv.q.weight"] == "fresh"  # over nothing that was carried
    assert fates(operate({"type": "gated_delta_net", "n_heads": 3})[1])["q_proj.weight"] == "fresh: 3 heads, and were 6"
    _, other = operate({"type": "attention", "qk_norm": {"type": "rms_norm", "eps": 1e-3}})
    assert fates(other)["q_norm.weight"] == "fresh: another qk_norm"


@pytest.mark.parametrize("name", sorted({*ROLES, "lru", "gru", "mamba", "mla"}))
def test_every_mixer_can_come_and_go(name):
    """All that both have is told of once, by name, and the new model runs; then attention comes back."""
    made = recipe({"type": "attention", "n_heads": 6, "n_kv_heads": 3, "head_dim": 4})
    model = build(made)
    cls = active()["mixers"].get(name)
    tiny, heads = cls.tiny().to_dict(), {"n_heads", "head_dim", "v_dim"} if name in ROLES else set()
    table = {key: tiny[key] for key, field in cls.model_fields.items() if field.is_required() and key not in heads}
    table |= {"type": name} | ({"index_n_heads": 3} if name == "block_indexed_attention" else {})
    found = replace_mixers(model, made, [1], table)
    _adds_up(model, found)
    if name in ROLES:
        assert heads_of(found.recipe.model.blocks[found.recipe.model.layers()[1]].mixer, mixer_of(found.model)) is not None
        assert sum(piece.fate in ("kept", "reshaped") for piece in found.pieces[1]) >= 3
    assert found.model(IDS).logits.isfinite().all()
    back = replace_mixers(found.model, found.recipe, [1], {"type": "attention", "n_heads": 6, "n_kv_heads": 3, "head_dim": 4})
    _adds_up(found.model, back)


def _adds_up(model, found):
    n = {name: sum(x.numel() for x in canonical_tensors(one).values()) for name, one in (("old", model), ("new", found.model))}
    counts = found.counts()
    assert n["new"] == counts["kept"] + counts["reshaped"] + counts["fresh"]
    own, new = canonical_tensors(mixer_of(model)), canonical_tensors(mixer_of(found.model))
    told = [piece.tensor.partition("[")[0] for piece in found.pieces[1] if piece.fate != "dropped"]
    assert set(told) == set(new)
    assert {piece.tensor.partition("[")[0] for piece in found.pieces[1] if piece.fate == "dropped"} <= set(own)
    assert found.others == n["old"] - sum(x.numel() for x in own.values())


def test_a_shared_block_changes_as_a_whole():
    block = {"mixer": ATTENTION, "shared": True}
    made = recipe(pattern="s a s", blocks={"s": block, "a": {"mixer": ATTENTION}})
    with pytest.raises(ConfigError, match="layer 0: its block 's' is shared, so all its layers change or none"):
        operate("delta_net", [0], source=made)
    model, found = operate("delta_net", [0, 2], source=made)
    assert (list(found.pieces), found.recipe.model.pattern) == ([0], "s a s")
    assert found.counts()["kept"] - found.others == 2 * 24 * 24
    assert found.model(IDS).logits.shape == model(IDS).logits.shape


REFUSED = {
    "no such layer": ({"mixer": "delta_net", "layers": [3]}, "layer 3 is not there; the model has layers 0 to 2"),
    "no layer": ({"mixer": "delta_net", "layers": []}, "no layer was named"),
    "an unknown mixer": ({"mixer": "delta_nett"}, "no mixer named 'delta_nett'. Did you mean 'delta_net'?"),
    "an unknown option": ({"mixer": {"type": "delta_net", "n_head": 2}}, "mixer delta_net: layer 1: n_head: unknown option"),
    "no type": ({"mixer": {"n_heads": 2}}, "the table needs a type"),
    "nothing": ({"mixer": None}, "nothing to do"),
    "twice": ({"mixer": {"type": "attention", "n_kv_heads": 3}, "n_kv_heads": 3}, "give it once"),
    "heads that do not divide": ({"mixer": None, "n_kv_heads": 4}, "n_heads = 6 is not divisible by n_kv_heads = 4"),
    "neither divides": ({"mixer": None, "n_kv_heads": 2}, "layer 1: k_proj.weight: 3 heads cannot become 2"),
    "no kv heads": ({"mixer": "delta_net", "n_kv_heads": 3}, "n_kv_heads: unknown option"),
    "a width that does not divide": ({"mixer": {"type": "performer", "n_heads": 5}}, "5 heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_said(case):
    options, why = REFUSED[case]
    with pytest.raises(HybridTFError) as error:
        operate(**options)
    assert why in str(error.value)
    assert "\n" not in str(error.value)


def test_layers_that_live_on_what_is_replaced_are_refused():
    made = recipe({**ATTENTION, "kv_group": "far"})
    with pytest.raises(ConfigError, match=r"stack.layers.1.mixer.k_norm.weight is of no replaced mixer"):
        operate("delta_net", [0], source=made)
    blocks = {"a": {"mixer": ATTENTION}, "f": {"channel_mixer": {"type": "mlp", "d_ff": 8}}}
    only_channels = recipe(pattern="a f", blocks=blocks)
    with pytest.raises(ConfigError, match="layer 1: its block 'f' has no mixer to replace"):
        operate("delta_net", [1], source=only_channels)
