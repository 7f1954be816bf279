"""What each kind of component is: one method each, and the laws that the contract kit checks.

1. Cut law: for any cut of the input in time, carrying the state gives what one call gives, gradients included.
2. Segment law: packed or padded documents give at every real token what each document gives alone.
3. Causal law: in a causal stack no output depends on a later token.

What a component cannot do by its nature it declares in ``cannot``, and the kit fails a declaration that is not true.

Axes: b batch, t time, d d_model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from pydantic import AfterValidator, Field
from torch import Generator, Tensor, nn

from hybridtf.core.config import BuildContext, ComponentConfig, ConfigTable
from hybridtf.core.segments import Segments
from hybridtf.core.states import State

Law: TypeAlias = Literal["cut", "segment", "causal", "crop", "compile", "tensor_parallel", "context_parallel"]
LAWS: tuple[Law, ...] = ("cut", "segment", "causal", "crop", "compile", "tensor_parallel", "context_parallel")

Scores: TypeAlias = Literal["next", "read"]
"""What a head's scores at a token are of: the token that follows, or the token itself."""

Edges: TypeAlias = Mapping[str, Tensor]
"""What crosses layers, by name: written by one component, read by later ones. Each is (b t ...), aligned with x, but
for those that say how far back they :attr:`~EdgeSpec.reach`."""

Losses: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]
"""Auxiliary losses by name, each as (sum, count) over real tokens, so that they reduce rightly over batches and ranks."""


@dataclass(frozen=True)
class EdgeSpec:
    """How an edge looks: (b t *shape), of one dtype."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    """None: floats, as x is. Any other dtype carries no gradient."""
    draw: Callable[[Generator, int, int], Tensor] | None = field(default=None, compare=False)
    """``draw(generator, b, t)``: an example, where normal numbers are none. Needed with a dtype; column t of it belongs to
    token t."""
    reach: float | None = field(default=None, compare=False)
    """None: the call's tokens. Else the edge is (b s *shape), what its writer looks at: all that its state holds, and of the
    call what it does not; the tokens of a window of that size, or of infinity."""

    def __str__(self) -> str:
        return f"(b t{''.join(f' {size}' for size in self.shape)}){'' if self.dtype is None else f' {self.dtype}'}"


class Extras(NamedTuple):
    """Third value of a component that writes edges or has losses of its own."""

    edges: Edges = MappingProxyType({})
    losses: Losses = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Context:
    """What cross-attention looks at: another tensor with its own documents; document i of x sees document i of it.

    ``x`` (b s d) and its ``segments``; None: one document a row, no padding. Projected once, into the state.
    """

    x: Tensor
    segments: Segments | None = None


class _Part(nn.Module, ABC):
    """What the composer asks of any component."""

    cannot: Mapping[Law, str] = {}
    """Laws that this component breaks by its nature, each with the reason. May be set by an instance."""

    losses_cannot: Mapping[Law, str] = {}
    """Laws that its losses alone break (a router's balancing loss is that of one call), each with the reason: what it
    computes keeps them, so that it may decode. May be set by an instance."""

    reads: tuple[str, ...] = ()
    """Edges that the component needs; it then takes ``edges=``. May be set by an instance."""

    writes: tuple[str, ...] = ()
    """Edges that the component returns in :class:`Extras`. May be set by an instance."""

    losses: tuple[str, ...] = ()
    """Losses that the component returns in :class:`Extras`. May be set by an instance."""

    takes: tuple[str, ...] = ()
    """Fields of :class:`Segments` beyond ids that the component obeys: ``prefix_len``, ``global_tokens``, ``axes``.
    May be set by an instance."""

    uses_max_len: bool = False
    """What it computes depends on the ``max_len`` that its state was made with (a rotary base fixed from the declared
    length). May be set by an instance."""

    splits: Mapping[str, Mapping[str, int]] = {}
    """For each projection (or bare matrix) that is one by its paper: the widths of its output roles, in order."""

    def extra_results(self) -> bool:
        """The component returns a third value, :class:`Extras`."""
        return bool(self.writes or self.losses)

    def edge_specs(self) -> Mapping[str, EdgeSpec]:
        """How the edges look that the component reads or writes, by name; none of those that a stem writes. The composer
        refuses a reader of something else than what was written, and the kit draws what is read from it."""
        return {}

    def unread(self, edges: frozenset[str]) -> None:
        """Told once, when all layers of a stack stand and before parameters are filled: which of its edges no layer reads.
        A component with parameters that serve those edges alone can let them go."""


class SequenceMixer(_Part):
    """Mixes along time.

    ``forward`` takes x (b t d) and returns y (b t d) and the state after it (None when none was given). A mixer with
    ``reads`` takes ``edges=`` too; one with ``writes`` or ``losses`` returns a third value. Training, prefill, chunked
    prefill, decode and verification of several tokens are this one method at other lengths. With ``keep`` the returned
    state can be cropped by up to that many of the call's last tokens.
    """

    causal_only: bool = True
    """The mixer can only look back: a stack that is not causal refuses it. May be set by an instance."""

    needs_context: bool = False
    """Cross-attention: the first call on a state needs ``context=``; later calls find it in the state. May be set by an
    instance."""

    def stands(self, given: Mapping[str, EdgeSpec]) -> None:
        """Told when all layers of a stack stand, once a visit: how the edges look that earlier layers write. From then on what
        it reads or writes may :attr:`~EdgeSpec.reach` beyond the call."""

    @abstractmethod
    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        """The empty state of ``batch_size`` rows; with ``max_len``, buffers of that many tokens for good."""

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "b t d"], *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> tuple[Tensor, State | None] | tuple[Tensor, State | None, Extras]: ...  # and edges: Edges, where it reads some


class ChannelMixer(_Part):
    """Mixes along channels. Most have no state: ``init_state`` is then an empty tuple, and ``forward`` hands it on."""

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        """The empty state; none by default."""
        return ()

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "b t d"], *, segments: Segments | None = None, state: State | None = None, keep: int = 0,
    ) -> tuple[Tensor, State | None] | tuple[Tensor, State | None, Extras]: ...


class Norm(nn.Module, ABC):
    """Normalises the last axis, computing in float32 at least, and returns the dtype it was given."""

    cannot: Mapping[Law, str] = {}
    """Laws that this norm makes its user break, each with the reason."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...


class BlockOutput(NamedTuple):
    """What a block returns."""

    x: Tensor
    edges: dict[str, Tensor]
    losses: dict[str, tuple[Tensor, Tensor]]
    state: State | None


class Block(nn.Module, ABC):
    """Norms, mixers and residual wiring: one layer of a stack. All blocks of a stack agree on what the stream is."""

    n_streams: int = 1
    """Streams that the residual stream has: with one, x is (b t d), with more (b t s d), in and out. May be set by an
    instance."""

    partial_sums: bool = False
    """The stream is what one group of layers has added so far; the sums of the groups before it are edges."""

    reads: tuple[str, ...] = ()
    """Edges that the block itself needs, beside those of its parts. May be set by an instance."""

    writes: tuple[str, ...] = ()
    """Edges that the block itself writes. May be set by an instance."""

    reads_again: tuple[str, ...] = ()
    """Edges that later visits of a shared block take where they are there by then; the first visit does without. May be set
    by an instance."""

    gives: tuple[str, ...] = ()
    """Edges that the block makes for its own parts and hands to nobody else. May be set by an instance."""

    def edge_specs(self) -> Mapping[str, EdgeSpec]:
        """How the edges look that the block itself reads or writes, as of any component."""
        return {}

    @abstractmethod
    def parts(self) -> dict[str, _Part]:
        """The components inside, by attribute name, in the order in which they read and write edges."""

    @abstractmethod
    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        """The empty state of one visit."""

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "b t *s d"], edges: Edges, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> BlockOutput: ...


class Stem(_Part):
    """The input side: token ids (b t) to x (b t d). It writes the edges ``token_ids`` and ``embedding``."""

    writes: tuple[str, ...] = ("token_ids", "embedding")

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        """The empty state; none by default."""
        return ()

    def tied_weight(self) -> Tensor | None:
        """The matrix (vocab d) that a tied head shares; None where there is none."""
        return None

    @abstractmethod
    def forward(
        self, inputs: Tensor, *, segments: Segments | None = None, state: State | None = None, keep: int = 0,
    ) -> tuple[Tensor, State | None, Extras]: ...


class Head(_Part):
    """The output side: x (b t d) to scores (b t vocab).

    ``tied`` is the stem's :meth:`Stem.tied_weight`, handed in at each call: a head never holds another module's parameter,
    so that replacing, sharding or adapting the embedding reaches it.
    """

    needs_tied_weight: bool = False
    """The head has no matrix of its own. May be set by an instance."""

    scores: Scores = "next"
    """What the scores at a token are of: ``next``, the token that follows it, from what stands up to it; ``read``, the token
    itself, from a summary of its document. A task asks for one of the two."""

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        """The empty state; none by default."""
        return ()

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "b t d"], *, segments: Segments | None = None, state: State | None = None, keep: int = 0,
        tied: Tensor | None = None,
    ) -> tuple[Tensor, State | None] | tuple[Tensor, State | None, Extras]: ...


# -- configs, one base a kind --------------------------------------------------------------------------------------


class SequenceMixerConfig(ComponentConfig):
    """Base of sequence mixers' configs; ``build`` returns a :class:`SequenceMixer`."""

    kind: ClassVar[str] = "mixers"

    source: ClassVar[str] = ""
    """Address of the paper or code that defines it."""
    time_exponent: ClassVar[float] = 1.0
    """The time of a whole sequence grows with this power of its length: 1 for a recurrence, 2 for full attention. Of a
    combinator nobody reads it: its time is that of what it holds."""
    combinator: ClassVar[bool] = False
    """It mixes nothing by itself: it takes other mixers."""
    looks_ahead: ClassVar[bool] = False
    """Only for stacks that are not causal: a causal one refuses it."""

    @abstractmethod
    def build(self, ctx: BuildContext) -> SequenceMixer: ...


class ChannelMixerConfig(ComponentConfig):
    """Base of channel mixers' configs."""

    kind: ClassVar[str] = "channel_mixers"

    @abstractmethod
    def build(self, ctx: BuildContext) -> ChannelMixer: ...


class NormConfig(ComponentConfig):
    """Base of norms' configs; the width is ``ctx.d_model``."""

    kind: ClassVar[str] = "norms"

    @abstractmethod
    def build(self, ctx: BuildContext) -> Norm: ...


def _once(paths: tuple[str, ...]) -> tuple[str, ...]:
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"names {path!r} twice")
    return paths


ProjectionPaths: TypeAlias = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_once)]
"""Paths of projections inside a component, at least one and each once."""


class AdaptersConfig(ConfigTable):
    """Low-rank additions to projections of a shared block, a pair of matrices for each layer that visits it (Zamba2). ``on``:
    paths inside the block, as ``mixer.q_proj``; ``shared_down``: those of them with one first matrix between them."""
    rank: int = Field(gt=0)
    on: ProjectionPaths
    shared_down: tuple[str, ...] = Field(default=(), examples=[("mixer.q_proj", "mixer.k_proj")])


class BlockConfig(ComponentConfig):
    """Base of blocks' configs. What it holds is for the composer: a block itself sees none of it."""

    kind: ClassVar[str] = "blocks"
    default_type: ClassVar[str | None] = "prenorm"

    shared: bool = False
    """Every layer of this name is one set of weights; each has a state of its own."""
    adapters: AdaptersConfig | None = Field(default=None, examples=[{"rank": 2, "on": ["mixer.q_proj"]}])
    """Of a shared block: what each of its layers adds of its own."""

    @abstractmethod
    def build(self, ctx: BuildContext) -> Block: ...


class StemConfig(ComponentConfig):
    """Base of stems' configs."""

    kind: ClassVar[str] = "stems"

    @abstractmethod
    def build(self, ctx: BuildContext, vocab_size: int) -> Stem: ...


class HeadConfig(ComponentConfig):
    """Base of heads' configs."""

    kind: ClassVar[str] = "heads"

    @abstractmethod
    def build(self, ctx: BuildContext, vocab_size: int) -> Head: ...


@dataclass(frozen=True)
class Stack:
    """What a model shows of one of its stacks."""

    name: str
    pattern: str
    layers: tuple[str, ...]
    """Block name of each layer."""
    blocks: Mapping[str, BlockConfig]
    d_model: int


class ModelConfig(ComponentConfig):
    """Base of models' configs; ``build()`` returns the module."""

    kind: ClassVar[str] = "models"

    @abstractmethod
    def stacks(self) -> tuple[Stack, ...]:
        """Its stacks; show, plan and match read only that."""


class TaskConfig(ComponentConfig):
    """Base of tasks' configs. A task is no part of a model, so it is not built from a context: ``load(seed)`` gives it."""

    kind: ClassVar[str] = "tasks"

    @abstractmethod
    def load(self, seed: int) -> Any:
        """The ``hybridtf.tasks.Task``; ``seed`` draws its training data, never what is held out."""
