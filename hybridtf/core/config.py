"""Configs: what a person writes in a recipe. Frozen, strict, one literal ``type`` each, and ``build(ctx)``."""

from __future__ import annotations

import functools
import types
import typing
from abc import abstractmethod
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeAlias, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, core_schema
from torch import nn

from hybridtf.core.errors import ConfigError, HybridTFError, PluginError, RecipeError, known_names, nearest, not_a_table
from hybridtf.core.init import init_parameters
from hybridtf.core.kernels import KernelSet, OpKernel
from hybridtf.core.origins import Origin, cause, package_of, remember
from hybridtf.core.registry import Preset, active, singular

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


UNKNOWN_OPTION = "unknown option"
"""How the fault of an option that a config does not have begins."""


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """All that a component may know of its model. New fields have defaults, so that no plugin breaks."""

    d_model: int
    d_out: int | None = None
    """The width that a mixer gives, where that is not d_model."""
    layer_idx: int = 0
    n_layers: int = 1
    max_seq_len: int = 2048
    vocab_size: int | None = None
    """Of the model's token ids, which the edge ``token_ids`` has; None: it is told none."""
    causal: bool = True
    kernels: KernelSet | None = None
    """Kernels to choose from; None: those of the active registries."""
    param_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None
    """The dtype that activations are expected in (under autocast); None: ``param_dtype``."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = None
    seed: int = 0
    edges: frozenset[str] = frozenset()
    """Edges that earlier layers of the stack write: a part that either makes something or is handed it can tell which."""
    n_visits: int = 1
    """Layers that visit the block of this component; with more than one (a shared block) it is built for the first of them."""
    where: str = ""
    """Path of the component in its recipe, for messages."""
    owner: ComponentConfig | None = field(default=None, compare=False, repr=False)
    """Whose ``build`` is running, for messages."""
    defer_init: bool = False
    """True: the caller fills the parameters itself once the whole model stands."""

    def child(self, name: str, **changes: Any) -> BuildContext:
        """The context of a part called ``name`` (``changes`` often a width: ``d_model=head_dim``)."""
        where = f"{self.where}.{name}" if self.where else name
        return replace(self, where=where, **changes)

    @property
    def factory(self) -> dict[str, Any]:
        """``device`` and ``dtype`` for parameters: ``nn.Linear(a, b, **ctx.factory)``."""
        return {"device": self.device, "dtype": self.param_dtype}

    def bind_kernel(
        self, op: str, name: str = "auto", *, sizes: Mapping[str, int], features: set[str] | None = None
    ) -> OpKernel:
        """The op as a module whose implementation is chosen for this model; see :class:`~hybridtf.core.OpKernel`."""
        kernels = active().kernels if self.kernels is None else self.kernels
        return kernels.bind(
            op, name, device=self.device, dtype=self.param_dtype, sizes=sizes, features=features or (), where=self.where,
            compute_dtype=self.compute_dtype,
        )

    def error(self, message: str) -> ConfigError:
        """A :class:`ConfigError` that says where, and of a plugin's component whose it is."""
        origin = None if self.owner is None else Origin(self.owner, self.where, self.layer_idx)
        if origin is not None and origin.plugin is not None:
            return ConfigError(f"{origin}: {message}")
        return ConfigError(f"{self.where}: {message}" if self.where else message)


class ConfigTable(BaseModel):
    """A table of options: frozen and strict. Unknown keys are refused with the nearest name, all faults at once.

    Lists are taken for tuples, since TOML has only lists. Raises :class:`RecipeError` with every fault.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    if not TYPE_CHECKING:

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**{key: tuples(value) for key, value in data.items()})
            except ValidationError as error:
                raise RecipeError("", faults_of(error, type(self))) from None

    def to_dict(self) -> dict[str, Any]:
        """Plain data with every option that is not None, nested components as tables of their own class."""
        out: dict[str, Any] = {}
        for name in sorted(type(self).model_fields, key=lambda name: name != "type"):  # the type comes first
            value = getattr(self, name)
            if value is not None:
                out[name] = _plain(value)
        return out


class ComponentConfig(ConfigTable):
    """Base of every component's config.

    A subclass gives ``type: Literal["name"] = "name"``, its options, ``tiny`` and ``build``. No option may
    have both a default that is not None and a meaningful None.
    """

    kind: ClassVar[str] = ""
    """The registry this component belongs to; given by the base of its kind."""

    default_type: ClassVar[str | None] = None
    """What a table of this kind without ``type`` means; None: ``type`` is required."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        # A model fills its own parameters: it alone knows the scale of residual branches.
        if cls.kind != "models" and "build" in cls.__dict__ and not getattr(cls.build, "__isabstractmethod__", False):
            cls.build = _initialised(cls.build)  # type: ignore[method-assign]

    @classmethod
    def type_name(cls) -> str:
        """The registered name: the default of ``type``."""
        field = cls.model_fields.get("type")
        if field is None or not isinstance(field.default, str):
            raise ConfigError(f"{cls.__name__} needs a field  type: Literal['name'] = 'name'")
        return field.default

    @classmethod
    @abstractmethod
    def tiny(cls) -> Self:
        """The smallest honest instance, for contract tests."""
        raise NotImplementedError(f"{cls.__name__} has no tiny()")

    def build(self, ctx: BuildContext, *args: Any, **kwargs: Any) -> Any:
        """The module. Its parameters are filled from (``ctx.seed``, name) unless ``ctx.defer_init``."""
        raise NotImplementedError(f"{type(self).__name__} has no build(ctx)")


def _plain(value: Any) -> Any:
    if isinstance(value, ConfigTable):
        return value.to_dict()
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(exclude_none=True))
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def tuples(value: Any) -> Any:
    """``value`` with every list in it turned into a tuple, as configs hold them."""
    if isinstance(value, list | tuple):
        # A named tuple keeps its class: only TOML's plain lists (and plain tuples that hold lists) are rebuilt.
        return tuple(tuples(item) for item in value) if type(value) in (list, tuple) else value
    if type(value) is dict:
        return {key: tuples(item) for key, item in value.items()}
    return value


BuildFn = Callable[..., Any]


def _initialised(build: BuildFn) -> BuildFn:
    @functools.wraps(build)
    def wrapper(self: Any, ctx: BuildContext, *args: Any, **kwargs: Any) -> Any:
        origin = Origin(self, ctx.where, ctx.layer_idx)
        try:
            module = build(self, replace(ctx, owner=self), *args, **kwargs)
        except (HybridTFError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # The plugin boundary: whatever a plugin's code raises must name the plugin, the layer and the recipe key.
            if origin.plugin is None:
                raise
            why = cause(error, package_of(type(self)))
            raise PluginError(
                f"{ctx.where or self.kind}: plugin {origin.plugin!r} could not build {self.type_name()!r}"
                f"{origin.in_layer()}: {why}"
            ) from error
        if isinstance(module, nn.Module):
            remember(module, origin)
            if self.kind == "norms" and origin.plugin is not None:
                _try_norm(module, ctx, origin)
            if not ctx.defer_init:
                init_parameters(module, ctx.seed)
        return module

    return wrapper


def _try_norm(norm: nn.Module, ctx: BuildContext, origin: Origin) -> None:
    """Call a plugin's norm once on zeros, as the first to fail on another width would be the mixer after it.

    Raises :class:`PluginError` for another shape than it was given.
    """
    x = torch.zeros(1, 1, ctx.d_model, **ctx.factory)
    try:
        # Of a copy: a norm may count what it sees, and draw.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            shape = deepcopy(norm)(x).shape
    except Exception:
        return  # its kernel may not run on this device: a call that matters says what is wrong
    if shape != x.shape:
        given = f"{tuple(shape)} for an input of {tuple(x.shape)}"
        raise PluginError(f"{origin} returned shape {given}; a norm must return the shape it was given")


# -- fields that hold another component ----------------------------------------------------------------------------

T = TypeVar("T")


_KIND = "hybridtf_kind"


class _ComponentField:
    """Makes a field validate through the registry of its base's kind."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        base = source

        def validate(value: Any) -> Any:
            if isinstance(value, base):
                return value
            if not isinstance(value, Mapping):
                raise ConfigError(not_a_table(singular(base.kind), value, active()[base.kind].names()))
            if "type" not in value and base.default_type is not None:
                value = {"type": base.default_type, **value}
            return active()[base.kind].make(value)

        return core_schema.no_info_plain_validator_function(
            validate, metadata={_KIND: base.kind},
            serialization=core_schema.plain_serializer_function_ser_schema(lambda config: config.to_dict()),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        # Not a $ref yet: pydantic follows those, and the definitions exist only once all kinds are put together.
        inner: dict[str, Any] = dict(schema)
        while _KIND not in inner.get("metadata", {}):
            inner = inner["schema"]  # another validator stands around the field's own
        return {_KIND: inner["metadata"][_KIND]}


Component: TypeAlias = Annotated[T, _ComponentField()]
"""``Component[Base]``: a field that holds any registered component of ``Base``'s kind."""


def component_schema(kinds: typing.Iterable[str] | None = None) -> dict[str, Any]:
    """``$defs`` of a JSON Schema over what is installed: each kind as a choice of its components and presets."""
    defs: dict[str, Any] = {}
    registries = active()
    for kind in kinds or registries.by_kind:
        choices = []
        for name, config in registries[kind].configs().items():
            schema = config.model_json_schema()
            defs.update(schema.pop("$defs", {}))
            if name != config.default_type:
                schema.setdefault("required", []).append("type")
            defs[f"{kind}.{name}"] = schema
            choices.append({"$ref": f"#/$defs/{kind}.{name}"})
        for name, preset in registries[kind].presets().items():
            defs[f"{kind}.{name}"] = _preset_schema(name, preset, defs[f"{kind}.{preset.type}"])
            choices.append({"$ref": f"#/$defs/{kind}.{name}"})
        defs[kind] = {"oneOf": choices} if choices else {"not": {}}
    linked: dict[str, Any] = _linked(defs)
    return linked


def _linked(schema: Any) -> Any:
    """The schema with every component field as a reference to the choice of its kind."""
    if isinstance(schema, dict):
        out = {key: _linked(item) for key, item in schema.items() if key != _KIND}
        return {"$ref": f"#/$defs/{schema[_KIND]}", **out} if _KIND in schema else out
    return [_linked(item) for item in schema] if isinstance(schema, list) else schema


def _preset_schema(name: str, preset: Preset, schema: dict[str, Any]) -> dict[str, Any]:
    properties = {**schema["properties"], **{key: {"const": value} for key, value in preset.options.items()}}
    properties["type"] = {"const": name, "description": f"{preset.type} with {dict(preset.options)}"}
    required = sorted({"type", *(r for r in schema.get("required", ()) if r not in preset.options), *preset.requires})
    return {**schema, "title": name, "properties": properties, "required": required}


# -- faults --------------------------------------------------------------------------------------------------------


def faults_of(error: ValidationError, config: type[BaseModel]) -> list[tuple[str, str]]:
    """Every fault of a validation as (path, message), nested components' faults under their own path.

    An option that may be of several types has one fault, which says what each would have allowed.
    """
    faults: list[tuple[str, str]] = []
    details = error.errors(include_url=False)
    for detail in details:
        if detail["type"] == "too_short" and any(_is_inside(other, detail) for other in details):
            continue  # pydantic counts the items that are right: those that are wrong have faults of their own
        of_union = any(_is_union_tag(detail, i) for i in range(len(detail["loc"])))
        for path, message in _faults(detail, config):
            if of_union and faults and faults[-1][0] == path:
                faults[-1] = (path, f"{faults[-1][1]}; or {message}")
            else:
                faults.append((path, message))
    return faults


def _is_inside(detail: ErrorDetails, whole: ErrorDetails) -> bool:
    size = len(whole["loc"])
    return len(detail["loc"]) > size and detail["loc"][:size] == whole["loc"]


def _faults(detail: ErrorDetails, config: type[BaseModel]) -> list[tuple[str, str]]:
    loc = _path(tuple(part for i, part in enumerate(detail["loc"]) if not _is_union_tag(detail, i)))
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, RecipeError):
        return [(_join(loc, path), message) for path, message in cause.faults]
    if isinstance(cause, Exception):
        return [(loc, str(cause))]
    if detail["type"] == "extra_forbidden":
        owner = _model_at(config, detail["loc"][:-1])
        key = str(detail["loc"][-1])
        known = [name for name in owner.model_fields if name != "type"]
        kind = owner.kind if issubclass(owner, ComponentConfig) else ""
        return [(loc, f"{UNKNOWN_OPTION}. {known_names(key, known, f'hybridtf list {kind} -v' if kind else '')}")]
    if detail["type"] == "missing":
        return [(loc, "is required")]
    given = "" if isinstance(detail["input"], Mapping) else f", got {detail['input']!r}"
    hint = ""
    if detail["type"] == "literal_error" and isinstance(detail["input"], str):
        allowed = str(detail.get("ctx", {}).get("expected", "")).replace(" or ", ", ").split(", ")
        near = nearest(detail["input"], [word.strip("'") for word in allowed])
        hint = f". Did you mean {near!r}?" if near else ""
    message = detail["msg"].replace(" after validation", "")
    return [(loc, f"{message[0].lower()}{message[1:]}{given}{hint}")]


def _is_union_tag(detail: ErrorDetails, place: int) -> bool:
    # pydantic adds the name of the union branch it tried ("function-plain[validate()]", "int") to a location. A plain
    # type's name comes last, and not under these errors: there it is a key that somebody chose.
    part = detail["loc"][place]
    last = place == len(detail["loc"]) - 1 and detail["type"] not in ("value_error", "extra_forbidden", "missing")
    if not isinstance(part, str):
        return False
    return "[" in part or part.startswith("constrained-") or (last and part in ("int", "float", "str", "bool", "none"))


def _path(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _join(left: str, right: str) -> str:
    return f"{left}.{right}" if left and right and not right.startswith("[") else left + right


def _model_at(config: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    for part in loc:
        field = config.model_fields.get(part) if isinstance(part, str) else None
        if field is None:
            continue
        annotation = field.annotation
        options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        models = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
        if models:
            config = models[0]
    return config


