"""Random stacks over all that is registered, each from one number.

Components are dealt like cards: slot i of a kind takes a card, and all cards are dealt before one comes again, in another
order each time. So a short run meets every component, in other company on every round, and what a plugin registers
is met too. A seed gives the same stack for as long as the registries hold the same names.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

import torch
from torch import nn

from hybridtf.core import BuildContext, ComponentConfig, HybridTFError, SequenceMixer, active
from hybridtf.models import LanguageModel, LanguageModelConfig
from hybridtf.nn.positions import SCALINGS
from hybridtf.testing import ContractError, Subject, option_variants, preset_config

D_MODEL, VOCAB, MAX_SEQ_LEN = 16, 19, 48
N_BLOCKS = 3
"""Blocks of a stack; some come twice."""

OF_STEMS = ("token_ids", "embedding")
"""Edges that every stack has."""

HIDDEN = (("meta_tokens", "longformer"),)
"""Combinators and mixers inside them of which a part stays idle: the global tokens are then the learned ones, which nobody
reads the outputs of."""

SCALING_OPTIONS: dict[str, Any] = {"factor": 4.0, "original_max_len": 16}
"""Rotary positions are stretched within the lengths of the checks."""


def dealt(kind: str, slot: int, cards: Sequence[str]) -> str:
    """The card of a slot."""
    turn, place = divmod(slot, len(cards))
    order = sorted(cards)
    random.Random(f"{kind} {turn}").shuffle(order)
    return order[place]


def stands(kind: str, config: ComponentConfig) -> bool:
    """It can be any layer of a causal stack of its own: no context to look at, no edge but the stem's."""
    if getattr(config, "looks_ahead", False):
        return False
    subject = Subject(kind, config, d_model=D_MODEL)
    for layer_idx in (0, 1):
        try:
            module = subject.build_plain(layer_idx=layer_idx, n_layers=3)
        except HybridTFError:
            return False
        if kind in ("mixers", "channel_mixers") and (
            subject.needs_context(module) or not set(subject.reads(module)).issubset(OF_STEMS)
        ):
            return False
        if kind == "channel_mixers" and any(module.edge_specs()[edge].shape != (D_MODEL,) for edge in module.reads):
            return False  # it reads what is as wide as its own option says
        if kind == "blocks" and (not module.parts() or not set(module.reads).issubset(OF_STEMS)):
            return False  # it only serves other layers, or is part of a loop
        if kind == "blocks" and set(module.writes) == {"shortcut"}:
            return False  # without a later layer where it joins, nothing comes of it
    return kind != "blocks" or _takes_any_mixer(config)


def _takes_any_mixer(config: Any) -> bool:
    """A block that asks more of its mixer than the contract, such as another width, is tested on its own."""
    try:
        Subject("blocks", config.model_copy(update={"mixer": tiny("mixers", "mamba2")}), d_model=D_MODEL).build_plain()
    except HybridTFError:
        return False
    return True


def variants(config: ComponentConfig) -> list[ComponentConfig]:
    """The config with one option away from its default; what this file draws itself left out."""
    found, options = [], option_variants(config)
    with contextlib.suppress(ContractError):  # a preset may leave an option no second value
        for option, other in options:
            if not option.startswith(("position", "shared", "adapters", "layer_inputs")):
                found.append(other)
    return found


def tiny(kind: str, name: str) -> ComponentConfig:
    registry = active()[kind]
    return preset_config(kind, name) if name in registry.presets() else registry.get(name).tiny()


# -- what can be drawn ---------------------------------------------------------------------------------------------------


@functools.cache
def drawable(kind: str) -> tuple[str, ...]:
    """Names of a kind that can stand in any layer. Not of heads that sum up a document: no check of time would be left."""
    names = tuple(name for name in active()[kind].names() if stands(kind, tiny(kind, name)))
    return tuple(name for name in names if kind != "heads" or _follows(tiny(kind, name)))


def _follows(config: Any) -> bool:
    """The head's scores are of the token that follows."""
    return bool(config.build(BuildContext(d_model=8), 5).scores == "next")


@functools.cache
def kin() -> dict[str, tuple[ComponentConfig, ComponentConfig]]:
    """Mixers whose later layers read what the first of their kind wrote: the first layer's config and a later one's."""
    return {name: pair for name, cls in active()["mixers"].configs().items() if (pair := _first_and_later(cls.tiny()))}


def _first_and_later(config: ComponentConfig) -> tuple[ComponentConfig, ComponentConfig] | None:
    forms = list(_forms(config))
    for first in forms:
        written = frozenset(_on_meta(first, 0, frozenset()).writes)
        for later in forms if written else ():
            if written.intersection(_on_meta(later, 1, written).reads):
                return first, later
    return None


def _forms(config: ComponentConfig) -> Iterator[ComponentConfig]:
    """The config, and with each choice of each of its options that name choices."""
    yield config
    for name, info in type(config).model_fields.items():
        for choice in _choices(info.annotation) if name != "type" else ():
            with contextlib.suppress(HybridTFError):
                other = type(config)(**{**config.to_dict(), name: choice})
                _on_meta(other, 0, frozenset())
                yield other


def _choices(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _on_meta(config: ComponentConfig, layer_idx: int, edges: frozenset[str]) -> SequenceMixer:
    place = {"layer_idx": layer_idx, "n_layers": 2, "edges": edges, "causal": not getattr(config, "looks_ahead", False)}
    mixer: SequenceMixer = config.build(BuildContext(d_model=D_MODEL, device=torch.device("meta"), **place))  # type: ignore
    return mixer


@functools.cache
def combinators() -> tuple[str, ...]:
    return tuple(name for name in drawable("mixers") if getattr(active()["mixers"].get(name), "combinator", False))


@functools.cache
def position_cards() -> tuple[str, ...]:
    """Every position, and ``rope`` with each scaling."""
    scaled = [f"rope {scaling.model_fields['type'].default}" for scaling in SCALINGS]
    return (*active()["positions"].names(), *scaled)


def position_tables(card: str) -> list[dict[str, Any]]:
    """Options of a position; several where a list must be as long as a head has pairs."""
    name, _, scaling = card.partition(" ")
    if not scaling:
        return [tiny("positions", name).to_dict()]
    (cls,) = [cls for cls in SCALINGS if cls.model_fields["type"].default == scaling]
    required = [field for field, info in cls.model_fields.items() if info.is_required()]
    lists = [field for field in required if field not in SCALING_OPTIONS]
    options = {"type": scaling, **{k: v for k, v in SCALING_OPTIONS.items() if k in cls.model_fields}}
    tables = []
    for n in range(1, 9) if lists else (0,):
        rising = {field: [1.0 + (i + 1) * 0.3 * j for j in range(n)] for i, field in enumerate(lists)}
        tables.append({"type": name, "scaling": {**options, **rising}})
    return tables


@functools.cache
def positions_of(kind: str, name: str) -> dict[str, dict[str, Any]]:
    """The cards that a component's option ``position`` takes, with their options; none where it has no such option."""
    config = tiny(kind, name)
    if "position" not in type(config).model_fields:
        return {}
    return {card: table for card in position_cards() for table in position_tables(card) if _takes(kind, config, table)}


def _takes(kind: str, config: ComponentConfig, position: dict[str, Any]) -> bool:
    try:
        changed = active()[kind].make({**config.to_dict(), "position": position})
    except HybridTFError:
        return False
    return stands(kind, changed)


# -- residual streams ----------------------------------------------------------------------------------------------------

STREAMS = ("one", "one again", "several", "partial sums")
"""What the residual stream of a stack is, which its blocks must agree on. Most blocks work on one."""

N_STREAMS = 2


@functools.cache
def stream_of(name: str) -> str:
    """Which of them a block works on."""
    module = Subject("blocks", tiny("blocks", name), d_model=D_MODEL).build_plain()
    return "partial sums" if module.partial_sums else "one" if module.n_streams == 1 else "several"


def merges_of(stream: str) -> list[dict[str, Any] | None]:
    """What may come of a stream at the end of a stack."""
    if stream == "several":
        return [None, {"type": "mean"}, {"type": "sigmoid"}, {"type": "gated", "rank": 3}]
    return [None, {"type": "attention_residual", "values": "normed"}] if stream == "partial sums" else [None]


# -- drawing -------------------------------------------------------------------------------------------------------------


class Drawn:
    """The stack of a seed: its config, and the names of all cards in it, by kind."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.cards: dict[str, set[str]] = {}
        # Every other stack takes layers of one stream besides its own.
        self.stream = "one" if seed % 2 == 0 else dealt("streams", seed // 2, STREAMS).removesuffix(" again")
        blocks = {name: self._block(N_BLOCKS * seed + i) for i, name in enumerate("abc")}
        layers = [*blocks, *self.rng.choices(list(blocks), k=self.rng.randint(0, 1))]
        if self.rng.random() < 0.5 and self.stream != "partial sums":  # whose first layer cannot be shared
            layers.append(self._share(blocks))
        if seed % 4 == 0:
            layers += self._kin(blocks)
        elif seed % 4 == 2:
            layers += self._combined(blocks)
        self.rng.shuffle(layers)
        if "first" in layers and layers.index("later") < layers.index("first"):
            layers = [{"first": "later", "later": "first"}.get(name, name) for name in layers]
        self.config = LanguageModelConfig(
            vocab_size=VOCAB, d_model=D_MODEL, pattern=" ".join(layers), blocks=blocks, max_seq_len=MAX_SEQ_LEN,
            stem=self._stem(), head=self._head(), final_norm=self._norm((N_BLOCKS + 1) * seed + N_BLOCKS),
            merge=self.rng.choice(merges_of(self.stream)),
        )  # type: ignore[arg-type]

    def build(self) -> LanguageModel:
        """In float64 and eval mode, every parameter nudged so that zero and one starts hide nothing."""
        model = self.config.build(BuildContext(d_model=D_MODEL, param_dtype=torch.float64, seed=self.seed)).eval()
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.1 * torch.randn(param.shape, generator=generator, dtype=torch.float64))
        return model

    def _card(self, kind: str, slot: int, cards: Sequence[str]) -> str:
        name = dealt(kind, slot, cards)
        self.cards.setdefault(kind, set()).add(name)
        return name

    def _varied(self, kind: str, config: ComponentConfig, share: float) -> ComponentConfig:
        """With this probability the config with one option away from its default, where that can be built."""
        if self.rng.random() >= share:
            return config
        found = variants(config)
        other = self.rng.choice(found) if found else config
        return other if stands(kind, other) else config

    def _placed(self, kind: str, name: str, slot: int, config: ComponentConfig) -> ComponentConfig:
        """The config with a position that it takes, if it takes any."""
        cards = positions_of(kind, name)
        if not cards:
            return config
        card = dealt(f"positions of {kind}", slot, position_cards())
        while card not in cards:
            slot += 1
            card = dealt(f"positions of {kind}", slot, position_cards())
        changed = active()[kind].make({**config.to_dict(), "position": cards[card]})
        if not stands(kind, changed):  # a variant that the position does not go with
            return config
        self.cards.setdefault("positions", set()).add(card)
        return changed

    def _mixer(self, slot: int) -> ComponentConfig:
        names = drawable("mixers")
        name = self._card("mixers", slot, names)
        earlier = sum(bool(positions_of("mixers", dealt("mixers", i, names))) for i in range(slot))
        first = slot < len(names)
        return self._placed("mixers", name, earlier, self._varied("mixers", tiny("mixers", name), 0.0 if first else 0.5))

    def _norm(self, slot: int) -> ComponentConfig:
        return self._varied("norms", tiny("norms", self._card("norms", slot, drawable("norms"))), 0.3)

    def _block(self, slot: int) -> ComponentConfig:
        of_stream = [name for name in drawable("blocks") if stream_of(name) == self.stream]
        name = self._card("blocks", slot, of_stream)
        cls = active()["blocks"].get(name)
        table = self._varied("blocks", cls.tiny(), 0.4).to_dict()
        if "n_streams" in table:
            table["n_streams"] = N_STREAMS
        if "vocab_size" in table:
            table["vocab_size"] = VOCAB
        if "norm" in cls.model_fields:
            table["norm"] = self._norm(slot + self.seed)
        parts: dict[str, Any] = {}
        if "mixer" in cls.model_fields:
            parts["mixer"] = self._mixer(slot)
        if "channel_mixer" in cls.model_fields:
            card = self._card("channel_mixers", slot, drawable("channel_mixers"))
            parts["channel_mixer"] = self._varied("channel_mixers", tiny("channel_mixers", card), 0.4)
        whole = active()["blocks"].make({**table, **parts})
        # Every card is dealt once before a branch is left out.
        if slot < max(len(drawable("mixers")), len(drawable("channel_mixers"))) or self.rng.random() > 0.25:
            return whole
        left_out = self.rng.choice(sorted(parts)) if parts else None
        try:
            return active()["blocks"].make({k: v for k, v in {**table, **parts}.items() if k != left_out})
        except HybridTFError:  # this wiring needs both, or an option of it does
            return whole

    def _share(self, blocks: dict[str, ComponentConfig]) -> str:
        """Make a block shared, most times with adapters; its name, to be visited once more."""
        name = self.rng.choice(sorted(blocks))
        table = {**blocks[name].to_dict(), "shared": True}
        module = Subject("blocks", blocks[name], d_model=D_MODEL).build_plain()
        linears = sorted(path for path, part in module.named_modules() if isinstance(part, nn.Linear))
        if linears and self.rng.random() < 0.7:
            on = self.rng.sample(linears, min(2, len(linears)))
            table["adapters"] = {"rank": 2, "on": on}
        blocks[name] = active()["blocks"].make(table)
        self.cards.setdefault("shared", set()).add("adapters" if "adapters" in table else "plain")
        return name

    def _kin(self, blocks: dict[str, ComponentConfig]) -> list[str]:
        """Two more blocks, of which the later reads what the first wrote; their names."""
        card = self._card("kin", self.seed // 4, tuple(kin()))
        for name, config in zip(("first", "later"), kin()[card], strict=True):
            blocks[name] = active()["blocks"].make({"type": "prenorm", "mixer": config})
        return ["first", "later"]

    def _combined(self, blocks: dict[str, ComponentConfig]) -> list[str]:
        """One more block: a combinator over other mixers than it has in its own small form; its name."""
        slot = self.seed // 4
        card = self._card("combinators", slot, combinators())
        names = [name for name in drawable("mixers") if name not in combinators() and (card, name) not in HIDDEN]
        table = tiny("mixers", card).to_dict()
        inner = [tiny("mixers", dealt("inner mixers", 2 * slot + i, names)) for i in range(2)]
        if "branches" in table:
            table["branches"] = [config.to_dict() for config in inner]
        else:
            table["mixer"] = inner[0].to_dict()
        if "on" in table:
            modules = Subject("mixers", inner[0], d_model=D_MODEL).build_plain().named_modules()
            linears = sorted(path for path, part in modules if isinstance(part, nn.Linear))
            table["on"] = self.rng.sample(linears, min(2, len(linears)))
        try:
            config = active()["mixers"].make(table)
        except HybridTFError:
            return []
        if not stands("mixers", config):  # one with edges inside, say
            return []
        blocks["combined"] = active()["blocks"].make({"type": "prenorm", "mixer": config})
        return ["combined"]

    def _stem(self) -> ComponentConfig:
        name = self._card("stems", self.seed, drawable("stems"))
        return self._placed("stems", name, self.seed, self._varied("stems", tiny("stems", name), 0.3))

    def _head(self) -> ComponentConfig:
        name = self._card("heads", self.seed, drawable("heads"))
        config = self._varied("heads", tiny("heads", name), 0.4)
        if "tied" in type(config).model_fields:
            tied = self.rng.random() < 0.5
            config = active()["heads"].make({**config.to_dict(), "tied": tied})
            self.cards.setdefault("heads tied", set()).add(str(tied))
        return config
