"""Unknown names: the one that was likely meant, or none; and no message that lists hundreds."""

from __future__ import annotations

import pytest

from hybridtf.core import ConfigError, UnknownNameError, active, known_names, nearest
from hybridtf.core.errors import MOST_NAMES

MEANT = {
    "mixers": {
        "manba2": "mamba2", "Mamba-2": "mamba2", "mamba_2": "mamba2", "GatedDeltaNet": "gated_delta_net",
        "deltanett": "delta_net", "retnt": "retnet", "mingru": "min_gru", "flash_attn": "flash_attention", "lstn": "lstm",
        "atention": "attention", "flash_attention_2": "flash_attention",
    },
    "norms": {"rmsnorm": "rms_norm", "LayerNorm": "layer_norm"},
    "channel_mixers": {"swigl": "swiglu", "ffn": "mlp", "mixtralmoe": "mixtral_moe"},
}

UNRELATED = {
    "mixers": ["transformer", "banana", "local_attention", "softmax", "conv", "swiglu", "s6", "multi_head_attention"],
    "norms": ["batch", "none_at_all", "weight"],
    "channel_mixers": ["attention", "silu", "dense"],
}


@pytest.mark.parametrize(("kind", "name", "meant"), [(k, n, m) for k, names in MEANT.items() for n, m in names.items()])
def test_what_was_mistyped_is_named(kind: str, name: str, meant: str) -> None:
    assert nearest(name, active()[kind].names()) == meant


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in UNRELATED.items() for name in names])
def test_a_word_that_is_like_none_is_answered_by_none(kind: str, name: str) -> None:
    assert nearest(name, active()[kind].names()) is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("num_heads", "n_heads"), ("n_head", "n_heads"), ("num_key_value_heads", "n_kv_heads"), ("headdim", "head_dim"),
        ("nheads", "n_heads"), ("softcapp", "softcap"), ("bias", None), ("window_size", None), ("theta", None),
    ],
)
def test_options_as_others_write_them(name: str, meant: str | None) -> None:
    assert nearest(name, active()["mixers"].get("attention").model_fields) == meant


def test_of_many_names_those_most_alike_are_listed_and_where_the_rest_stands() -> None:
    mixers = active()["mixers"]
    with pytest.raises(UnknownNameError) as caught:
        mixers.get("mamba9")
    head, _, listed = str(caught.value).partition("Known: ")
    assert head == "no mixer named 'mamba9'. Did you mean 'mamba'? "
    assert listed.endswith(f" and {len(mixers.names()) - MOST_NAMES} more: `hybridtf list mixers`")
    names = listed.partition(" and ")[0].split(", ")
    assert names[:3] == ["mamba", "mamba2", "mamba3"]
    assert len(set(names)) == MOST_NAMES


def test_few_names_are_all_listed_in_order() -> None:
    assert known_names("x", ["b", "a"]) == "Known: a, b"
    names = [f"name{i:02}" for i in range(MOST_NAMES)]
    assert known_names("x", names, "hybridtf list") == f"Known: {', '.join(names)}"


def test_a_table_without_a_type_lists_as_few() -> None:
    with pytest.raises(ConfigError, match=r"^needs type = one of attention, .* and \d+ more: `hybridtf list mixers`$"):
        active()["mixers"].make({})


def test_options_are_bounded_too() -> None:
    with pytest.raises(ConfigError, match=r" and \d+ more: `hybridtf list mixers -v`$"):
        active()["mixers"].make({"type": "attention", "n_heads": 2, "zzz": 1})


def test_a_name_of_another_kind_is_told_from_one_that_is_not_there() -> None:
    with pytest.raises(UnknownNameError, match=r"^no mixer named 'swiglu', which is a channel mixer\. Known: "):
        active()["mixers"].get("swiglu")
