"""Which tensor of a published checkpoint is which of ours: links that are read in both directions.

A family names modules; a name stands for all tensors below it (``weight``, and ``bias`` where ours has one). Every tensor of
ours has exactly one link, and so has every tensor of the checkpoint: what is left over on either side is an error by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridtf.core import CheckpointError, known_names

FREQUENCIES = "rotary_emb.inv_freq"
"""Tensors of older files that the settings give as well; transformers leaves them unread."""

Change = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Link:
    """Some tensors of ours and of theirs that hold the same numbers; ``read``: theirs into ours, ``write``: back."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    read: Change
    write: Change


class WeightMap:
    """Links of one model. ``own``: shapes of its tensors by canonical name; ``whole``: those of whole numbers."""

    def __init__(self, own: Mapping[str, torch.Size], whole: Iterable[str] = ()) -> None:
        self.own, self.whole = own, frozenset(whole)
        self.links: list[Link] = []
        self.others: list[Link] = []
        """Links of another layout, which take the place of those of the same tensors where a checkpoint has it."""
        self.copies: dict[str, str] = {}
        """Tensors of theirs that a checkpoint may hold once more: each has to equal the other."""
        self.silent: tuple[str, ...] = ()
        """How tensors begin that a checkpoint may hold and the scores of a token do not ask for."""
        self.further_heads: tuple[str, ...] = ()
        """Those of them that are said."""
        self.fillers: dict[str, tuple[int, ...]] = {}
        """Tensors of theirs, by name and shape, that nothing is read from and that their code wants to find."""

    # -- what families say ----------------------------------------------------------------------------------------------

    def same(self, ours: str, theirs: str) -> None:
        """A module, or one tensor, under another name."""
        for name, rest in self._below(ours):
            self.link([name], [theirs + rest], _as_it_is, _as_it_is)

    def named(self, ours: str, theirs: str, names: Mapping[str, str] | Sequence[str]) -> None:
        """Modules below ``ours`` that stand below ``theirs``: theirs of ours, or the names of those that are called alike."""
        for one, other in names.items() if isinstance(names, Mapping) else zip(names, names, strict=True):
            self.same(f"{ours}.{one}", f"{theirs}.{other}")

    def turned(self, ours: str, theirs: str, read: Callable[[Tensor], Tensor], write: Callable[[Tensor], Tensor]) -> None:
        """One tensor in another layout; ``write`` undoes ``read``."""
        self.link([ours], [theirs], lambda x: [read(x[0])], lambda x: [write(x[0])])

    def fused(self, ours: Sequence[str], theirs: str, dim: int = 0) -> None:
        """Several modules of ours that are one of theirs, one after the other along ``dim``."""
        self.links += self._fused(ours, theirs, dim)

    def also_fused(self, ours: Sequence[str], theirs: str, dim: int = 0) -> None:
        """The same, of some checkpoints alone; what is written is not of these."""
        self.others += self._fused(ours, theirs, dim)

    def _fused(self, ours: Sequence[str], theirs: str, dim: int) -> list[Link]:
        found = []
        for _, rest in self._below(ours[0]):
            names = tuple(one + rest for one in ours)
            cut = _cutting([self.own[name][dim] for name in names], dim)
            found.append(Link(names, (theirs + rest,), cut, _joining(dim)))
        return found

    def joined(self, ours: str, theirs: Sequence[str], sizes: Sequence[int], dim: int = 0) -> None:
        """One module of ours that is several of theirs, of these ``sizes`` along ``dim``."""
        for name, rest in self._below(ours):
            self.link([name], [one + rest for one in theirs], _joining(dim), _cutting(sizes, dim))

    def stacked(self, ours: str, theirs: Iterable[str], *, transposed: bool = True) -> None:
        """One tensor (e in out) of ours that is a matrix (out in) of theirs for each e."""
        def turn(x: Tensor) -> Tensor:
            return x.mT if transposed else x

        self.link(
            [ours], list(theirs), lambda x: [torch.stack([turn(one) for one in x])], lambda x: [turn(y) for y in x[0].unbind()]
        )

    def convolution(self, ours: str, theirs: str) -> None:
        """A depthwise convolution, (c w) here and (c 1 w) there, with its bias if it has one."""
        self.turned(f"{ours}.weight", f"{theirs}.weight", lambda x: x.squeeze(1), lambda x: x.unsqueeze(1))
        if f"{ours}.bias" in self.own:
            self.same(f"{ours}.bias", f"{theirs}.bias")

    def copied(self, theirs: str, of: str) -> None:
        """A tensor that some checkpoints hold once more (a tied head): it may be there, and must equal ``of`` then."""
        self.copies[theirs] = of

    def passed_over(self, *prefixes: str) -> None:
        """Tensors that begin so are left unread, and are not written: further heads, and what the settings give as well."""
        self.silent += prefixes

    def further(self, *prefixes: str) -> None:
        """The same of heads that tell further tokens; an import says that it left them."""
        self.passed_over(*prefixes)
        self.further_heads += prefixes

    def unused(self, theirs: str, shape: tuple[int, ...]) -> None:
        """A tensor that may be there and says nothing, and without which their code does not load: it is written as zeros."""
        self.fillers[theirs] = shape

    def shorten(self, prefix: str) -> None:
        """Theirs without ``prefix``, as a checkpoint of the model without its head has them."""
        def short(links: list[Link]) -> list[Link]:
            return [replace(link, theirs=tuple(name.removeprefix(prefix) for name in link.theirs)) for link in links]

        self.links, self.others = short(self.links), short(self.others)
        self.copies = {name.removeprefix(prefix): of.removeprefix(prefix) for name, of in self.copies.items()}
        self.silent = tuple(name.removeprefix(prefix) for name in self.silent)
        self.further_heads = tuple(name.removeprefix(prefix) for name in self.further_heads)
        self.fillers = {name.removeprefix(prefix): shape for name, shape in self.fillers.items()}

    def link(self, ours: Sequence[str], theirs: Sequence[str], read: Change, write: Change) -> None:
        """The general form."""
        self.links.append(Link(tuple(ours), tuple(theirs), read, write))

    def has(self, ours: str) -> bool:
        """Whether the model has a module or tensor of that name."""
        return bool(self._below(ours))

    def _below(self, prefix: str) -> list[tuple[str, str]]:
        if prefix in self.own:
            return [(prefix, "")]
        return [(name, name.removeprefix(prefix)) for name in self.own if name.startswith(prefix + ".")]

    # -- what reads and writes them ----------------------------------------------------------------------------------------

    def check_complete(self) -> None:
        """Every tensor of ours once. A fault here is one of the family's, not of a checkpoint."""
        linked = [name for link in self.links for name in link.ours]
        twice = sorted({name for name in linked if linked.count(name) > 1})
        missing = sorted(self.own.keys() - set(linked))
        unknown = sorted(set(linked) - self.own.keys())
        if twice or missing or unknown:
            raise AssertionError(f"links: without one {missing[:5]}, with two {twice[:5]}, of no tensor {unknown[:5]}")

    def follow(self, held: Iterable[str]) -> None:
        """Takes the links of the layout that the checkpoint has, which holds tensors of these names."""
        names = set(held)
        for other in self.others:
            if names.issuperset(other.theirs):
                self.links = [*(link for link in self.links if not set(link.ours) <= set(other.ours)), other]

    def check_names(self, held: Iterable[str], where: str) -> None:
        """Raises :class:`CheckpointError` for tensors that are missing and those that nothing is known of."""
        names = set(held)
        wanted = [name for link in self.links for name in link.theirs]
        missing = [name for name in wanted if name not in names]
        may = self.copies.keys() | self.fillers.keys()
        rest = sorted(
            name for name in names - set(wanted) - may
            if not name.startswith(self.silent) and not name.endswith(FREQUENCIES)
        )
        if missing:
            which = "it" if len(missing) == 1 else "them"
            raise CheckpointError(f"{where}: {_some(missing)} missing; the settings ask for {which}")
        if rest:
            near = known_names(rest[0], wanted) if len(wanted) < 40 else ""
            what = "in the files and in no layer that the settings ask for"
            raise CheckpointError(f"{where}: {_some(rest)} {what}. {near}".rstrip(". "))

    def read(self, tensors: Mapping[str, Tensor], where: str) -> Iterable[tuple[str, Tensor]]:
        """Our tensors out of theirs, one link at a time. Raises :class:`CheckpointError` for shapes that do not fit."""
        for link in self.links:
            given = [tensors[name] for name in link.theirs]
            try:
                found = link.read(given)
            except RuntimeError:
                wanted = _shapes(link.ours, self.own)
                raise CheckpointError(f"{where}: {_shapes(link.theirs, given)} cannot be {wanted}") from None
            for name, value in zip(link.ours, found, strict=True):
                if value.shape != self.own[name]:
                    wanted = f"the settings ask for {tuple(self.own[name])} as {name}"
                    raise CheckpointError(f"{where}: {_shapes(link.theirs, given)}; {wanted}")
                yield name, value
        for name, of in self.copies.items():
            if name in tensors and not torch.equal(tensors[name], tensors[of]):
                raise CheckpointError(f"{where}: {name} differs from {of}, to which the settings tie it")

    def write(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their tensors out of ours."""
        found: dict[str, Tensor] = {}
        for link in self.links:
            parts = link.write([own[name] for name in link.ours])
            found |= {name: value.contiguous() for name, value in zip(link.theirs, parts, strict=True)}
        like = next(iter(found.values()))
        found |= {name: like.new_zeros(shape) for name, shape in self.fillers.items()}
        return found


def _as_it_is(x: list[Tensor]) -> list[Tensor]:
    return x


def _cutting(sizes: Sequence[int], dim: int) -> Change:
    return lambda x: list(x[0].split(list(sizes), dim))


def _joining(dim: int) -> Change:
    return lambda x: [torch.cat(x, dim)]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more are" if len(names) > 4 else (" is" if len(names) == 1 else " are")
    return ", ".join(names[:4]) + more


def _shapes(names: Sequence[str], shapes: Mapping[str, torch.Size] | Sequence[Tensor]) -> str:
    of = shapes if isinstance(shapes, Mapping) else {name: x.shape for name, x in zip(names, shapes, strict=True)}
    said = [f"{name} {tuple(of[name])}" for name in names[:4]]
    return ", ".join(said) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
