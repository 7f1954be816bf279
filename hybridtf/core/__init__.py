"""The contracts: all that a plugin author needs."""

from hybridtf.core import init
from hybridtf.core.calls import check_call, state_rows
from hybridtf.core.choice import OneOf
from hybridtf.core.combinator import Combinator, Gathered
from hybridtf.core.config import BuildContext, Component, ComponentConfig, ConfigTable, component_schema
from hybridtf.core.contracts import (
    LAWS,
    AdaptersConfig,
    Block,
    BlockConfig,
    BlockOutput,
    ChannelMixer,
    ChannelMixerConfig,
    Context,
    Edges,
    EdgeSpec,
    Extras,
    Head,
    HeadConfig,
    Law,
    Losses,
    ModelConfig,
    Norm,
    NormConfig,
    ProjectionPaths,
    Scores,
    SequenceMixer,
    SequenceMixerConfig,
    Stack,
    Stem,
    StemConfig,
    TaskConfig,
)
from hybridtf.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HybridTFError,
    KernelError,
    LengthError,
    NonFiniteError,
    PluginError,
    RecipeError,
    RowsError,
    StateError,
    UnknownNameError,
    known_names,
    nearest,
)
from hybridtf.core.history import with_history
from hybridtf.core.init import NO_DECAY, Init, ParamSpec, Role, init_parameters, param_specs
from hybridtf.core.kernels import DTYPES, PHASES, Kernel, KernelRequest, KernelSet, OpKernel, Phase, always, kernels_used
from hybridtf.core.op_cases import OpCase, OpInputs, randn
from hybridtf.core.positions import BiasPosition, InputPosition, Position, PositionConfig, QueryKeyPosition, Site
from hybridtf.core.projections import raw_weight
from hybridtf.core.recurrent_mixer import RecurrentMixer
from hybridtf.core.registry import KINDS, Preset, Registries, Registry, active, singular, using
from hybridtf.core.segments import Segments
from hybridtf.core.states import (
    ConvWindow,
    Fixed,
    Growing,
    OwnClock,
    Ring,
    State,
    StateLeaf,
    concat_rows,
    crop,
    debug_states,
    declare,
    detach,
    leaves,
    map_state,
    overwrite,
    own_memory,
    reorder,
    restore,
    snapshot,
    state_bytes,
    state_lengths,
    with_room,
    write_rows,
)

__all__ = [
    "DTYPES", "KINDS", "LAWS", "NO_DECAY", "PHASES", "AdaptersConfig", "BiasPosition", "Block", "BlockConfig",
    "BlockOutput", "BuildContext", "ChannelMixer", "ChannelMixerConfig", "CheckpointError", "Combinator", "Component",
    "ComponentConfig", "ConfigError", "ConfigTable", "Context", "ConvWindow", "DataError", "EdgeSpec", "Edges", "Extras",
    "Fixed", "Gathered", "Growing", "Head", "HeadConfig", "HybridTFError", "Init", "InputPosition", "Kernel",
    "KernelError", "KernelRequest", "KernelSet", "Law", "LengthError", "Losses", "ModelConfig", "NonFiniteError", "Norm",
    "NormConfig", "OneOf", "OpCase", "OpInputs", "OpKernel", "OwnClock", "ParamSpec", "Phase", "PluginError", "Position",
    "PositionConfig", "Preset", "ProjectionPaths", "QueryKeyPosition", "RecipeError", "RecurrentMixer", "Registries",
    "Registry", "Ring", "Role", "RowsError", "Scores", "Segments", "SequenceMixer", "SequenceMixerConfig", "Site", "Stack",
    "State", "StateError", "StateLeaf", "Stem", "StemConfig", "TaskConfig", "UnknownNameError", "active", "always",
    "check_call", "component_schema", "concat_rows", "crop", "debug_states", "declare", "detach", "init", "init_parameters",
    "kernels_used", "known_names", "leaves", "map_state", "nearest", "overwrite", "own_memory", "param_specs", "randn",
    "raw_weight", "reorder", "restore", "singular", "snapshot", "state_bytes", "state_lengths", "state_rows", "using",
    "with_history", "with_room", "write_rows",
]
