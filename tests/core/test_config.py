"""Configs: strict, frozen, all faults at once, nested components, schemas, and whose build failed."""

import json
import re
from typing import Annotated, Any, Literal, Self

import jsonschema
import pytest
import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor, nn

from hybridtf import core
from hybridtf.core import (
    BlockConfig,
    BuildContext,
    ChannelMixer,
    ChannelMixerConfig,
    Component,
    ComponentConfig,
    ConfigError,
    ConfigTable,
    Norm,
    NormConfig,
    ParamSpec,
    PluginError,
    Preset,
    RecipeError,
    Registries,
    component_schema,
    init,
    using,
)


class ScaleNorm(Norm):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec("norm", init.constant(3.0))}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ScaleConfig(NormConfig):
    """Scales."""

    type: Literal["scale"] = "scale"
    factor: float = Field(default=1.0, gt=0)
    shape: Literal["round", "square"] = "round"
    pair: tuple[int, int] | None = None

    @classmethod
    def tiny(cls) -> Self:
        return cls(factor=2.0)

    def build(self, ctx: BuildContext) -> Norm:
        return ScaleNorm(ctx.d_model)


class BrokenConfig(ScaleConfig):
    type: Literal["broken"] = "broken"  # type: ignore[assignment]

    def build(self, ctx: BuildContext) -> Norm:
        raise KeyError("width")


class OutOfMemoryConfig(ScaleConfig):
    type: Literal["oom"] = "oom"  # type: ignore[assignment]

    def build(self, ctx: BuildContext) -> Norm:
        raise torch.OutOfMemoryError("no memory left")


class RefusingConfig(ScaleConfig):
    type: Literal["refusing"] = "refusing"  # type: ignore[assignment]

    def build(self, ctx: BuildContext) -> Norm:
        raise ctx.error(f"d_model = {ctx.d_model} is odd")


class MixConfig(ChannelMixerConfig):
    type: Literal["mix"] = "mix"
    d_ff: int
    even: bool = True
    norm: Component[NormConfig] = Field(default_factory=ScaleConfig)
    norms: tuple[Component[NormConfig], ...] = ()
    by_name: dict[str, Component[NormConfig]] = Field(default_factory=dict)
    either: Component[NormConfig] | None = None

    @model_validator(mode="after")
    def _even(self) -> Self:
        if self.even and self.d_ff % 2:
            raise ConfigError(f"d_ff = {self.d_ff} is odd")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(d_ff=2)

    def build(self, ctx: BuildContext) -> ChannelMixer:
        raise NotImplementedError


class PlainBlock(BlockConfig):
    type: Literal["prenorm"] = "prenorm"
    norm: Component[NormConfig] | None = None

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> Any:
        raise NotImplementedError


class OtherBlock(PlainBlock):
    type: Literal["other"] = "other"  # type: ignore[assignment]


class Holder(ConfigTable):
    block: Component[BlockConfig]
    wrapped: dict[str, Annotated[Component[BlockConfig], BeforeValidator(lambda value: value)]] = Field(
        default_factory=dict
    )


@pytest.fixture(autouse=True)
def registries() -> Any:
    registries = Registries()
    for config in (ScaleConfig, BrokenConfig, OutOfMemoryConfig, RefusingConfig):
        registries["norms"].add(config, "plug")
    registries["norms"].add(Preset("double", "scale", {"factor": 2.0}), "plug")
    registries["norms"].add(Preset("paired", "scale", requires=("pair",)), "plug")
    registries["channel_mixers"].add(MixConfig, "plug")
    registries["blocks"].add(PlainBlock, "plug")
    registries["blocks"].add(OtherBlock, "plug")
    with using(registries):
        yield registries


def faults(call: Any) -> list[tuple[str, str]]:
    with pytest.raises(RecipeError) as caught:
        call()
    return caught.value.faults


def test_all_faults_at_once_each_with_its_path() -> None:
    assert faults(lambda: MixConfig(  # type: ignore[call-arg]
        d_ff="4", evne=True, norm={"type": "scale", "factor": -1.0, "shape": "rund", "colour": 1},
        norms=[{"type": "scale"}, {"type": "scle"}],
        by_name={"x": {"factor": 1.0}, "y": {"type": "scale", "pair": [1, 2.5]}}, either=3,
    )) == [
        ("d_ff", "input should be a valid integer, got '4'"),
        ("norm.factor", "input should be greater than 0, got -1.0"),
        ("norm.shape", "input should be 'round' or 'square', got 'rund'. Did you mean 'round'?"),
        ("norm.colour", "unknown option. Known: factor, pair, shape"),
        ("norms[1]", "no norm named 'scle'. Did you mean 'scale'? Known: broken, double, oom, paired, refusing, scale"),
        ("by_name.x", "needs type = one of broken, double, oom, paired, refusing, scale"),
        ("by_name.y.pair[1]", "input should be a valid integer, got 2.5"),
        ("either", 'must be a norm, a table as in { type = "broken" }, got 3'),
        ("evne", "unknown option. Did you mean 'even'? Known: by_name, d_ff, either, even, norm, norms"),
    ]


class Several(ConfigTable):
    sizes: tuple[int, ...] = Field(min_length=1)


def test_wrong_items_are_not_counted_as_missing() -> None:
    assert faults(lambda: Several(sizes=["x"])) == [("sizes[0]", "input should be a valid integer, got 'x'")]  # type: ignore
    assert faults(lambda: Several(sizes=[])) == [("sizes", "tuple should have at least 1 item, not 0, got ()")]  # type: ignore


class Unions(ConfigTable):
    size: int | str | None = None
    sizes: str | tuple[int, ...] = ()
    norms: dict[str, Component[NormConfig]] = Field(default_factory=dict)


def test_union_branches_are_no_part_of_a_path_but_keys_of_their_names_are() -> None:
    assert {path for path, _ in faults(lambda: Unions(size=2.5, sizes=[1.5]))} == {"size", "sizes", "sizes[0]"}  # type: ignore
    assert faults(lambda: Unions(norms={"none": {"type": "x"}, "int": {"type": "scale", "str": 1}})) == [  # type: ignore
        ("norms.none", "no norm named 'x'. Known: broken, double, oom, paired, refusing, scale"),
        ("norms.int.str", "unknown option. Known: factor, pair, shape"),
    ]


def test_a_missing_option() -> None:
    assert faults(MixConfig) == [("d_ff", "is required")]


def test_a_rule_between_options() -> None:
    with pytest.raises(RecipeError) as caught:
        MixConfig(d_ff=3)
    assert str(caught.value) == "d_ff = 3 is odd"


@pytest.mark.parametrize("value", ["1e-5", True, None, [1.0]])
def test_a_rate_is_never_text(value: Any) -> None:
    assert faults(lambda: ScaleConfig(factor=value))[0][0] == "factor"


def test_whole_numbers_are_numbers() -> None:
    assert ScaleConfig(factor=2).factor == 2.0


def test_lists_are_taken_for_tuples_everywhere() -> None:
    config = MixConfig(d_ff=2, norms=[{"type": "scale", "pair": [1, 2]}])  # type: ignore[arg-type, list-item]
    assert config.norms == (ScaleConfig(pair=(1, 2)),)


def test_frozen_equal_and_hashable_where_options_are() -> None:
    config = ScaleConfig(factor=2.0)
    with pytest.raises(Exception, match="frozen"):
        config.factor = 3.0  # type: ignore[misc]
    assert config == ScaleConfig(factor=2.0)
    assert hash(config) == hash(ScaleConfig(factor=2.0))
    assert config != BrokenConfig(factor=2.0)


def test_round_trip_keeps_the_class_and_every_option() -> None:
    config = MixConfig(
        d_ff=3, even=False, norm=BrokenConfig(factor=4.0), norms=(ScaleConfig(shape="square"),),
        by_name={"x": ScaleConfig(pair=(1, 2))}, either=ScaleConfig(factor=9.0),
    )
    table = config.to_dict()
    assert table["norm"] == {"type": "broken", "factor": 4.0, "shape": "round"}
    assert table["by_name"] == {"x": {"type": "scale", "factor": 1.0, "shape": "round", "pair": [1, 2]}}
    assert MixConfig(**table) == config
    assert MixConfig(**json.loads(json.dumps(table))) == config
    assert config.model_dump()["norm"] == table["norm"]


def test_a_preset_is_written_as_its_base() -> None:
    config = MixConfig(d_ff=2, norm={"type": "double"})  # type: ignore[arg-type]
    assert config.to_dict()["norm"] == {"type": "scale", "factor": 2.0, "shape": "round"}


def test_the_default_type_of_a_kind() -> None:
    holder = Holder(block={"norm": {"type": "double"}}, wrapped={"a": {}, "b": {"type": "other"}})  # type: ignore
    assert type(holder.block) is PlainBlock
    assert type(holder.wrapped["b"]) is OtherBlock
    assert faults(lambda: Holder(block={"nrom": 1})) == [  # type: ignore[arg-type]
        ("block.nrom", "unknown option. Did you mean 'norm'? Known: adapters, norm, shared")
    ]


def test_a_config_without_a_name_says_what_it_needs() -> None:
    class Nameless(NormConfig):
        pass

    with pytest.raises(ConfigError, match=r"Nameless needs a field  type: Literal\['name'\] = 'name'"):
        Nameless.type_name()


def test_build_fills_parameters_unless_deferred() -> None:
    assert ScaleConfig().build(BuildContext(d_model=2)).weight.tolist() == [3.0, 3.0]
    torch.use_deterministic_algorithms(True)  # empty memory is NaN
    assert ScaleConfig().build(BuildContext(d_model=2, defer_init=True)).weight.isnan().all()


def test_a_failing_build_names_plugin_layer_and_key() -> None:
    ctx = BuildContext(d_model=2, layer_idx=5, where="model.blocks.m.norm")
    with pytest.raises(PluginError) as caught:
        BrokenConfig().build(ctx)
    assert re.fullmatch(
        r"model\.blocks\.m\.norm: plugin 'plug' could not build 'broken' \(layer 5\): KeyError: 'width' "
        r"\(test_config\.py, line \d+\)", str(caught.value),
    )
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_refusal_of_a_build_is_passed_on_with_whose_it_is() -> None:
    with pytest.raises(ConfigError, match=r"^x: 'refusing' of plugin 'plug': d_model = 3 is odd$"):
        RefusingConfig().build(BuildContext(d_model=3, where="x"))
    ctx = BuildContext(d_model=3, where="model.blocks.m.norm", layer_idx=4)
    with pytest.raises(ConfigError, match=r"^model\.blocks\.m\.norm: 'refusing' of plugin 'plug' \(layer 4\): d_model"):
        RefusingConfig().build(ctx)
    own = Registries()
    own["norms"].add(RefusingConfig, "hybridtf")
    with using(own), pytest.raises(ConfigError, match=r"^x: d_model = 3 is odd$"):
        RefusingConfig().build(BuildContext(d_model=3, where="x"))


def test_out_of_memory_is_a_result_and_passed_on() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        OutOfMemoryConfig().build(BuildContext(d_model=3))


def test_our_own_bugs_keep_their_class() -> None:
    own = Registries()
    own["norms"].add(BrokenConfig, "hybridtf")
    with using(own), pytest.raises(KeyError):
        BrokenConfig().build(BuildContext(d_model=2))
    with using(Registries()), pytest.raises(KeyError):
        BrokenConfig().build(BuildContext(d_model=2))


def test_context_children_know_where_they_are() -> None:
    ctx = BuildContext(d_model=8).child("blocks.a").child("mixer", d_model=4)
    assert (ctx.where, ctx.d_model) == ("blocks.a.mixer", 4)
    assert str(BuildContext(d_model=8).error("no")) == "no"
    assert ctx.factory == {"device": torch.device("cpu"), "dtype": torch.float32}


# -- schema ------------------------------------------------------------------------------------------------------------


def valid(table: Any, kind: str) -> bool:
    schema = {"$ref": f"#/$defs/{kind}", "$defs": component_schema()}
    return jsonschema.Draft202012Validator(schema).is_valid(table)


def test_schema_agrees_with_validation() -> None:
    jsonschema.Draft202012Validator.check_schema({"$defs": component_schema()})
    for table, kind, good in [
        ({"type": "mix", "d_ff": 2}, "channel_mixers", True),
        ({"type": "mix", "d_ff": 2, "norm": {"type": "double"}}, "channel_mixers", True),
        ({"type": "mix", "d_ff": 2, "norm": {"type": "double", "factor": 2.0}}, "channel_mixers", True),
        ({"type": "mix", "d_ff": 2, "norm": {"type": "double", "factor": 3.0}}, "channel_mixers", False),
        ({"type": "mix", "d_ff": 2, "norm": {"type": "scale", "factr": 3.0}}, "channel_mixers", False),
        ({"type": "mix", "d_ff": 2, "norm": {}}, "channel_mixers", False),
        ({"type": "mix"}, "channel_mixers", False),
        ({"d_ff": 2}, "channel_mixers", False),
        ({"type": "scale", "factor": 0}, "norms", False),
        ({"type": "scale", "pair": [1, 2]}, "norms", True),
        ({"type": "paired"}, "norms", False),
        ({"type": "paired", "pair": [1, 2]}, "norms", True),
        ({}, "blocks", True),
        ({"type": "prenorm", "norm": {"type": "scale"}}, "blocks", True),
        ({"type": "other"}, "blocks", True),
        ({"shared": 1}, "blocks", False),
    ]:
        assert valid(table, kind) is good, table


def test_schema_of_a_kind_with_nothing_in_it_refuses_everything() -> None:
    assert not valid({"type": "x"}, "heads")


def test_an_unfinished_config_cannot_be_made() -> None:
    class Unfinished(ComponentConfig):
        type: Literal["unfinished"] = "unfinished"

    with pytest.raises(TypeError, match="abstract method"):
        Unfinished()
    with pytest.raises(NotImplementedError, match=r"Unfinished has no tiny\(\)"):
        Unfinished.tiny()


def test_core_exports_exist() -> None:
    assert [name for name in core.__all__ if not hasattr(core, name)] == []
