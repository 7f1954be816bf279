"""The weights of one mixer in another: by role, so that one rule serves every pair of mixers.

Queries and what goes out are taken as they are, or not at all; but queries that several heads share (Mamba-2's groups, delta
rules of more value heads) become those heads' own. Keys and values of g heads become g' heads:

    g' = n g    each head n times, side by side: what its group of query heads read, they read still, bit for bit
    g  = n g'   the mean of n heads side by side (multi-head to grouped attention, https://arxiv.org/abs/2305.13245)

A norm of queries or keys over all heads follows them. Between mixers of one type every other tensor of the same name and shape
is taken too, as long as heads are cut as before. What is left keeps what the new mixer starts it with, but for short
convolutions over carried queries, keys and values: random taps would undo what was carried, so they start with those that give
each token itself. An activation behind them stays what it is (:mod:`hybridtf.surgery.in_way` tells of it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from hybridtf.core import ConfigError, SequenceMixerConfig
from hybridtf.models.weights import canonical_tensors
from hybridtf.nn import ShortConv
from hybridtf.surgery.roles import HEAD_OPTIONS, ROLES, Heads, Role, heads_of

Fate: TypeAlias = Literal["kept", "reshaped", "fresh", "dropped"]
"""``fresh``: as the new mixer starts it; ``dropped``: of the old mixer, and in the new one nowhere."""

FATES: tuple[Fate, ...] = ("kept", "reshaped", "fresh", "dropped")


@dataclass(frozen=True)
class Piece:
    """What became of a tensor, or of one map of a matrix that holds several (``in_proj.weight[c]``), of ``n`` numbers."""

    tensor: str
    fate: Fate
    n: int
    how: str = ""


@dataclass(frozen=True)
class _Mixer:
    """A mixer with its pieces by name: tensors, or rows of them."""

    config: SequenceMixerConfig
    module: nn.Module
    heads: Heads | None
    pieces: Mapping[str, Tensor]

    @classmethod
    def of(cls, config: SequenceMixerConfig, module: nn.Module) -> _Mixer:
        return cls(config, module, heads_of(config, module), dict(_pieces(module)))

    def role(self, role: Role, end: str) -> str | None:
        """The name of a role's ``weight`` or ``bias`` among the pieces; None where there is none."""
        part = ROLES[self.config.type_name()].get(role, "")
        name, bracket, which = part.partition("[")
        found = f"{name}.{end}{bracket}{which}"
        return found if found in self.pieces else None


def _pieces(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    splits: Mapping[str, Mapping[str, int]] = getattr(module, "splits", {})
    for name, tensor in canonical_tensors(module).items():
        widths = splits.get(name.rpartition(".")[0])
        if widths is None or tensor.shape[0] != sum(widths.values()):
            yield name, tensor
        else:
            yield from zip((f"{name}[{which}]" for which in widths), tensor.split(list(widths.values())), strict=True)


@torch.no_grad()
def transfer(
    old: tuple[SequenceMixerConfig, nn.Module], new: tuple[SequenceMixerConfig, nn.Module]
) -> tuple[Piece, ...]:
    """Fill the ``new`` mixer's tensors from the ``old`` one's in place; every piece of both is told of once.

    Raises :class:`ConfigError` for numbers of key and value heads of which neither divides the other.
    """
    source, target = _Mixer.of(*old), _Mixer.of(*new)
    found: dict[str, Piece] = {}
    read: set[str] = set()
    if source.heads is not None and target.heads is not None:
        for role in ROLES[target.config.type_name()]:
            for end in ("weight", "bias"):
                here, there = target.role(role, end), source.role(role, end)
                if here is None or there is None:
                    continue
                found[here] = _carry(role, end, source, target, source.pieces[there], target.pieces[here], here)
                read |= {there} if found[here].fate != "fresh" else set()
    carried = {name for name, piece in found.items() if piece.fate != "fresh"}
    alike = type(source.config) is type(target.config)
    anew = alike and _cut_anew(source, target)
    for name, tensor in target.pieces.items():
        if name not in found:
            value = source.pieces.get(name)
            same = alike and not anew and value is not None and value.shape == tensor.shape
            if same and value is not None and name not in read:
                tensor.copy_(value)
                read.add(name)
            how = "" if same or not _as_token_itself(name, tensor, target, carried) else "gives each token itself"
            how = how or ("heads are cut anew" if anew and value is not None else "")
            found[name] = Piece(name, "kept" if same else "fresh", tensor.numel(), how)
    dropped = (Piece(name, "dropped", x.numel()) for name, x in source.pieces.items() if name not in read)
    return (*(found[name] for name in target.pieces), *dropped)


def _cut_anew(source: _Mixer, target: _Mixer) -> bool:
    """Whether channels of equal number are other heads': then only roles say what means the same."""
    one, other = source.heads, target.heads
    if one is None or other is None:
        return any(getattr(source.config, name, None) != getattr(target.config, name, None) for name in HEAD_OPTIONS)
    return (one.q, one.out, one.key_width, one.value_width) != (other.q, other.out, other.key_width, other.value_width)


def _carry(
    role: Role, end: str, source: _Mixer, target: _Mixer, value: Tensor, into: Tensor, name: str
) -> Piece:
    """Fill ``into`` with ``value``, or leave it as it is and say why."""
    before, after = source.heads, target.heads
    assert before is not None
    assert after is not None
    if role in ("q_norm", "k_norm"):
        if _norm_of(source.config) != _norm_of(target.config):
            return Piece(name, "fresh", into.numel(), "another qk_norm")
        if _norm_of(target.config)[1] == "head":  # one weight for all heads: numbers of heads do not matter
            if value.shape != into.shape:
                return Piece(name, "fresh", into.numel(), _widths(into.shape[0], value.shape[0]))
            into.copy_(value)
            return Piece(name, "kept", into.numel())
    if role == "out" and end == "bias":
        into.copy_(value)
        return Piece(name, "kept", into.numel())
    part: Literal["q", "k", "v", "out"] = "q" if role == "q_norm" else "k" if role == "k_norm" else role
    n, m = getattr(before, part), getattr(after, part)
    dim = 1 if role == "out" else 0
    given, wanted = (x.unflatten(dim, (heads, -1)) for x, heads in ((value, n), (into, m)))
    if given.shape[dim + 1] != wanted.shape[dim + 1]:
        return Piece(name, "fresh", into.numel(), _widths(wanted.shape[dim + 1], given.shape[dim + 1]))
    if n == m:
        into.copy_(value)
        return Piece(name, "kept", into.numel())
    shared = part == "q" and n < before.out == m and m % n == 0
    if part in ("q", "out") and not shared:
        return Piece(name, "fresh", into.numel(), f"{m} heads, and were {n}")
    if n % m and m % n:
        raise ConfigError(f"{name}: {n} heads cannot become {m}: one of them must divide the other")
    if m > n:
        into.copy_(given.repeat_interleave(m // n, 0).flatten(0, 1))
        return Piece(name, "reshaped", into.numel(), f"each of {n} heads {m // n} times")
    into.copy_(given.double().unflatten(0, (m, -1)).mean(1).flatten(0, 1))
    return Piece(name, "reshaped", into.numel(), f"mean of {n // m} heads each")


def _norm_of(config: SequenceMixerConfig) -> tuple[Any, Any, Any]:
    """What says how a weight of ``q_norm`` or ``k_norm`` is read."""
    return getattr(config, "qk_norm", None), getattr(config, "qk_norm_over", "head"), getattr(config, "qk_norm_after", False)


def _widths(now: int, before: int) -> str:
    return f"heads are {now} wide, and were {before}"


def _as_token_itself(name: str, tensor: Tensor, target: _Mixer, carried: set[str]) -> bool:
    """Let a new short convolution over what was carried give each token itself; whether ``name`` is of such a one."""
    place, _, end = name.rpartition(".")
    if not isinstance(target.module.get_submodule(place) if place else None, ShortConv):
        return False
    role = place.rpartition(".")[2]
    roles: tuple[Role, ...] = (role,) if role in ("q", "k", "v") else ("q", "k", "v")  # type: ignore[assignment]
    if target.heads is None or not {target.role(one, "weight") for one in roles} <= carried:
        return False
    tensor.zero_()
    if end == "weight":
        tensor[:, -1] = 1
    return True
