"""What is kept means what it meant; what does not is named."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import ConfigError
from hybridtf.recipe import parse_recipe
from hybridtf.surgery import replace_mixers
from hybridtf.train import TrainConfig
from tests.surgery.test_replace import ATTENTION, IDS, build, fates, mixer_of, operate, recipe

PLAIN = {"type": "attention", "n_heads": 6, "n_kv_heads": 3, "head_dim": 4}


def test_norms_of_each_head_are_of_its_width_whatever_the_number_of_heads():
    got = fates(operate({"type": "attention", "head_dim": 8})[1])
    assert got["q_norm.weight"] == got["k_norm.weight"] == "fresh: heads are 8 wide, and were 4"
    sixteen = recipe({**PLAIN, "n_heads": 8, "n_kv_heads": 8, "head_dim": 16, "qk_norm": {"type": "rms_norm"}})
    got = fates(operate({"type": "attention", "head_dim": 8}, source=sixteen)[1])
    assert got["q_norm.weight"] == "fresh: heads are 8 wide, and were 16"
    model, found = operate(None, n_kv_heads=1)
    assert torch.equal(mixer_of(found.model).k_norm.weight, mixer_of(model).k_norm.weight)


@pytest.mark.parametrize("option", [{"qk_norm_over": "heads"}, {"qk_norm_after": True}])
def test_a_norm_that_is_read_in_another_way_starts_anew(option):
    # With one head both weights have one shape.
    one = recipe({**ATTENTION, "n_heads": 1, "n_kv_heads": 1})
    got = fates(operate({"type": "attention", **option}, source=one)[1])
    assert got["q_norm.weight"] == got["k_norm.weight"] == "fresh: another qk_norm"


def test_heads_that_are_cut_anew_keep_nothing_by_name_alone():
    gated = recipe({**PLAIN, "output_gate": True})
    got = fates(operate({"type": "attention", "n_heads": 4, "n_kv_heads": 4, "head_dim": 6}, source=gated)[1])
    assert got["gate_proj.weight"] == "fresh: heads are cut anew"
    assert got["q_proj.weight"] == "fresh: heads are 6 wide, and were 4"
    assert fates(operate(None, n_kv_heads=1, source=gated)[1])["gate_proj.weight"] == "kept"
    latent = {"type": "mla", "kv_lora_rank": 4, "qk_rope_head_dim": 2}
    six = recipe({**latent, "n_heads": 6, "qk_nope_head_dim": 2, "v_dim": 4})
    got = fates(operate({**latent, "n_heads": 4, "qk_nope_head_dim": 4, "v_dim": 6}, source=six)[1])
    assert got["out_proj.weight"] == "fresh: heads are cut anew"
    assert "kept" not in set(got.values())
    assert set(fates(operate({**latent, "n_heads": 6}, source=six)[1]).values()) == {"kept"}


def test_options_that_the_new_mixer_has_not_are_left_behind_by_name():
    source = recipe({**PLAIN, "value_scale": 0.5, "softcap": 30.0, "window": 2, "position": {"type": "rope", "theta": 500.0}})
    _, found = operate("delta_net", source=source)
    assert found.left[1].keys() == {"value_scale", "softcap", "window", "position"}
    assert found.left[1]["value_scale"] == 0.5
    _, linear = operate("linear_attention", source=source)
    assert linear.left[1].keys() == {"value_scale", "softcap", "window"}
    _, same = operate({"type": "attention", "softcap": 20.0}, source=source)
    assert same.left[1].keys() == {"window"}  # softcap was given
    assert operate(None, n_kv_heads=1, source=source)[1].left[1] == {}
    assert operate("delta_net", source=recipe(PLAIN))[1].left[1].keys() == {"position"}  # rope, which is the default
    assert operate("delta_net", source=recipe({**PLAIN, "position": {"type": "none"}}))[1].left[1] == {}


def test_an_option_that_one_mixer_may_lack_and_another_has_always_is_taken():
    eps = recipe({**PLAIN, "qk_norm": {"type": "rms_norm", "eps": 1e-3}})
    model, found = operate("gated_attention", source=eps)
    assert found.taken[1]["qk_norm"].eps == 1e-3
    assert fates(found)["q_norm.weight"] == "kept"
    assert torch.equal(mixer_of(found.model).q_norm.weight, mixer_of(model).q_norm.weight)
    assert found.in_way[1] == ("q_proj.weight[gate] (multiplies what goes out)",)


def test_options_can_be_left():
    source = recipe({**PLAIN, "softcap": 30.0})
    _, found = operate("attention", source=source, leave=["softcap"])
    assert found.recipe.model.blocks["a_attention"].mixer.softcap is None
    assert found.left[1] == {}
    with pytest.raises(ConfigError, match=r"would take no 'softcp' from the old ones. Did you mean 'softcap'\?"):
        operate("attention", source=source, leave=["softcp"])


@pytest.mark.parametrize(("source", "groups"), [
    ({"type": "mamba2", "n_heads": 6, "head_dim": 4, "d_state": 4}, 1),
    ({"type": "gated_delta_net", "n_heads": 3, "n_v_heads": 6, "head_dim": 4, "v_dim": 4}, 3),
])
def test_heads_that_share_a_query_become_as_many_heads_as_go_out(source, groups):
    model, found = operate("attention", source=recipe(source))
    new, old, got = mixer_of(found.model), mixer_of(model), fates(found)
    assert (new.config.n_heads, new.config.kv_heads) == (6, 6)
    assert (got["out_proj.weight"], got["v_proj.weight"]) == ("kept", "kept")
    assert got["q_proj.weight"] == got["k_proj.weight"] == f"reshaped: each of {groups} heads {6 // groups} times"
    was = old.in_proj.weight[52:56] if groups == 1 else old.q_proj.weight  # after z, x and b
    assert torch.equal(new.q_proj.weight.view(groups, 6 // groups, 4, 24)[:, -1], was.view(groups, 4, 24))
    other = operate("mamba2" if groups == 3 else "gated_delta_net", source=recipe(source))[1]
    assert {fate for name, fate in fates(other).items() if name.startswith(("in_proj.weight[c", "q_proj"))} == {"kept"}
    assert other.model(IDS).logits.isfinite().all()


def test_blocks_are_named_for_what_they_hold():
    made = recipe()
    model = build(made)
    first = replace_mixers(model, made, [0], "mamba2")
    second = replace_mixers(first.model, first.recipe, [1], {"type": "mamba2", "d_conv": 2})
    assert second.recipe.model.layers() == ("a_mamba2", "a_mamba2_2", "a")


def test_the_teacher_of_the_model_before_is_none_of_the_one_after():
    made = recipe()
    plain = parse_recipe({**made.to_dict(), "train": {"steps": 3, "teacher": {"run": "old"}}}, sections={"train": TrainConfig})
    for given in (plain, plain.model_copy(update={"train": plain.train.to_dict()})):
        _, found = operate("delta_net", source=given)
        assert found.teacher == "old"
        again = parse_recipe(found.recipe.to_dict(), sections={"train": TrainConfig})
        assert (again.train.teacher, again.train.steps) == (None, 3)
    assert operate("delta_net")[1].teacher is None


def test_what_stands_in_the_way_is_named_and_can_be_left_out():
    table = {"type": "gated_delta_net", "d_conv": 1, "output_gate": False}
    assert operate(table)[1].in_way[1] == tuple(f"conv.{name} (each token itself, then silu)" for name in "qkv")
    assert operate("linear_attention")[1].in_way[1] == ()
    assert operate({"type": "rwkv5", "head_dim": 4})[1].in_way[1][0].startswith("shift (projections read a mix")
    assert operate("lru")[1].in_way[1] == ()  # of which nothing was kept
    _, wide = operate({"type": "gated_delta_net", "n_heads": 3, "output_gate": False})
    assert wide.in_way[1] == ("conv.q (4 random taps, then silu)", *(f"conv.{x} (each token itself, then silu)" for x in "kv"))
