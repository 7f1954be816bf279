"""A file that leaves a setting out, or says null, means what transformers reads from it, or is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("transformers", reason="it judges what a file means")
import transformers

from hybridtf.core import HybridTFError
from hybridtf.interop import FAMILIES
from hybridtf.interop.exporting import differences
from hybridtf.interop.importing import recipe_of, table_of
from hybridtf.interop.settings import SILENT, Settings
from tests.interop import tiny_oracles
from tests.interop.oracles import names

SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
LISTS = ("layer_types", "mlp_layer_types")


def base(name: str) -> dict[str, Any]:
    """Every setting of an oracle, as transformers writes them."""
    return _full(tiny_oracles.make_config(name))


def older(values: dict[str, Any]) -> dict[str, Any]:
    """With the base of positions beside their scaling, as before transformers 5."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict) or any(isinstance(one, dict) for one in rope.values()):
        return {}
    values, rope = dict(values), dict(rope)
    del values["rope_parameters"]
    values |= {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    return values if rope.get("rope_type", "default") == "default" else {**values, "rope_scaling": rope}


def wider(values: dict[str, Any]) -> dict[str, Any]:
    """With other numbers of heads, so that none equals a default by chance."""
    n = values.get("num_attention_heads")
    return {**values, "num_attention_heads": 2 * n} if isinstance(n, int) else {}


def shorter(values: dict[str, Any]) -> dict[str, Any]:
    """Without the kinds of the layers, which then follow from other settings."""
    used = {"use_sliding_window": True} if "use_sliding_window" in values else {}
    return {**{name: value for name, value in values.items() if name not in LISTS}, **used}


def without_one(values: dict[str, Any], *, null: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in values.items():
        if name in SILENT or name in SIZES or value is None:
            continue
        yield name, {other: one for other, one in values.items() if other != name}
        if null:
            yield f"{name} (null)", {**values, name: None}
        if isinstance(value, dict):
            yield from ((f"{name}.{below}", {**values, name: rest}) for below, rest in without_one(value, null=False))


def _full(config: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(config.to_dict(), default=str)), "model_type": config.model_type}


def _read(values: dict[str, Any]) -> Any:
    return table_of(FAMILIES[values["model_type"]], Settings(values, "config.json"))


def faults(values: dict[str, Any], *, null: bool = False) -> Iterator[str]:
    """Settings without which the table is another one than transformers reads."""
    for left_out, reduced in without_one(values, null=null):
        try:
            ours = _read(reduced)
        except HybridTFError:
            continue
        try:
            config = transformers.CONFIG_MAPPING[reduced["model_type"]].from_dict(json.loads(json.dumps(reduced)))
        except Exception:  # transformers has no one error for a file that it does not read
            continue
        try:
            other = list(differences(ours, _read(_full(config))))[:1]
        except HybridTFError as error:
            other = [str(error)]
        if other and _is_model(reduced):
            yield f"{left_out}: {other[0]}"


def _is_model(values: dict[str, Any]) -> bool:
    try:
        recipe_of(FAMILIES[values["model_type"]], Settings(values, "config.json"))
    except HybridTFError:
        return False
    return True


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", [name for name in names() if "@" not in name])
def test_a_setting_left_out(name: str) -> None:
    assert list(faults(base(name))) == []


@pytest.mark.slow
@pytest.mark.parametrize("style", [lambda values: values, older, wider, shorter], ids=["today", "older", "wider", "shorter"])
def test_a_setting_left_out_or_null_in_other_styles(style: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    found = {name: list(faults(style(base(name)), null=True)) for name in names()}
    assert {name: said for name, said in found.items() if said} == {}


def test_null_is_not_left_out() -> None:
    assert "window" not in str(_read({**base("mistral"), "sliding_window": None}))
    left_out = {name: value for name, value in base("mistral").items() if name != "sliding_window"}
    assert "'window': 4096" in str(_read(left_out))
