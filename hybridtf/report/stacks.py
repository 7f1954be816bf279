"""Pictures of stacks: one box a layer in order, coloured by mixer, the channel mixer as a strip under it.

SVG, drawn here: it needs no package, scales, prints, and can be read aloud. Text beside the boxes takes the colour of
the page (``currentColor``), text in them is dark on light fills.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridtf.report import evidence as ev
from hybridtf.report import layer_groups as lg
from hybridtf.report.palette import INK, fills

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
NO_MIXER = "no sequence mixer"

_SVG = "http://www.w3.org/2000/svg"
_LEFT = 34
_BOX = 236
_BRACKET = 46
_GAP = 7
_MARGIN = 14
_HEADING = 26
_HEAD = 44
_COMPACT_ABOVE = 16
_STRIP_FILL = "#f2f2f2"
_EDGE = "#555555"


@dataclass(frozen=True)
class Picture:
    """The stacks of one recipe: a file name, the recipe's label and the SVG."""

    name: str
    label: str
    svg: str

    def file_svg(self) -> str:
        """The picture for a file: with the recipe as its heading, on white ground."""
        return _standing_alone(self.svg, self.label)


@dataclass(frozen=True)
class _Block:
    """What a layer of this name is. ``mixer`` and ``channel`` are (type, options) or None."""

    name: str
    type: str
    mixer: tuple[str, str] | None
    channel: tuple[str, str] | None
    shared: bool

    @property
    def kind(self) -> str:
        """What its box is coloured by."""
        return self.mixer[0] if self.mixer else NO_MIXER if self.channel else self.type

    def words(self) -> str:
        """Read aloud, or shown when the pointer rests on it."""
        parts = [" ".join(part).strip() for part in (self.mixer, self.channel) if part]
        shared = ", weights shared by all layers of this name" if self.shared else ""
        return f"block {self.name}: {', then '.join(parts) or self.type}{shared}"


@dataclass(frozen=True)
class _Stack:
    name: str
    d_model: str
    pattern: str
    layers: tuple[str, ...]
    blocks: dict[str, _Block]


def stack_pictures(evidence: ev.Evidence) -> list[Picture]:
    """A picture for each recipe whose ``model`` record shows its stacks; mixers have the same colour in all of them."""
    shown = [(subject.label, stacks) for subject in evidence.subjects if (stacks := _stacks_of(subject))]
    colours = fills(
        block.kind for _, stacks in shown for stack in stacks for block in _used(stack) if block.kind != NO_MIXER
    )
    return [
        Picture(f"stack_{i + 1}", label, _draw(f"stack{i + 1}", label, stacks, colours))
        for i, (label, stacks) in enumerate(shown)
    ]


def _stacks_of(subject: ev.Subject) -> list[_Stack]:
    for record in reversed(subject.of("model")):
        stacks = record.get("stacks")
        found = [_read_stack(s) for s in stacks if isinstance(s, Mapping)] if isinstance(stacks, list | tuple) else []
        if any(stack.layers for stack in found):
            return [stack for stack in found if stack.layers]
    return []


def _read_stack(stack: Mapping[str, Any]) -> _Stack:
    layers, blocks = stack.get("layers"), stack.get("blocks")
    names = tuple(map(str, layers)) if isinstance(layers, list | tuple) else ()
    known = blocks if isinstance(blocks, Mapping) else {}
    read = {name: _read_block(name, known.get(name)) for name in dict.fromkeys(names)}
    return _Stack(
        str(stack.get("name") or "stack"),
        str(stack.get("d_model") or "unknown"),
        str(stack.get("pattern") or ""),
        names,
        read,
    )


def _read_block(name: str, block: Any) -> _Block:
    fields = block if isinstance(block, Mapping) else {}
    parts = [
        (str(part.get("type")), str(part.get("summary") or "")) if isinstance(part, Mapping) else None
        for part in (fields.get("mixer"), fields.get("channel_mixer"))
    ]
    return _Block(name, str(fields.get("type") or "unknown block"), parts[0], parts[1], bool(fields.get("shared")))


def _used(stack: _Stack) -> list[_Block]:
    return [stack.blocks[name] for name in dict.fromkeys(stack.layers)]


# -- drawing -----------------------------------------------------------------------------------------------------------


def _draw(key: str, label: str, stacks: Sequence[_Stack], colours: Mapping[str, str]) -> str:
    """One SVG; ``key`` begins its ids, so that many can stand in one page."""
    root = ET.Element(
        "svg",
        {
            "xmlns": _SVG,
            "role": "img",
            "aria-labelledby": f"{key}-title {key}-desc",
            "font-family": FONT,
            "color": INK,
            "class": "stack",
        },
    )
    _child(root, "title", f"Stack of {label}", id=f"{key}-title")
    _child(root, "desc", " ".join(map(_spoken, stacks)), id=f"{key}-desc")
    left, bottom = 0.0, 0.0
    for stack in stacks:
        width, height = _draw_stack(root, stack, colours, left)
        left, bottom = left + width, max(bottom, height)
    bottom = _legend(root, [block for stack in stacks for block in _used(stack)], colours, bottom + 10)
    _frame(root, 0, 0, left, bottom)
    return ET.tostring(root, encoding="unicode")


def _frame(root: ET.Element, x: float, y: float, width: float, height: float) -> None:
    root.set("viewBox", f"{x:g} {y:g} {width:g} {height:g}")
    root.set("width", f"{width:g}")
    root.set("height", f"{height:g}")


def _standing_alone(svg: str, label: str) -> str:
    """The same picture with a heading, a margin and white ground, for a file."""
    root = ET.fromstring(svg)
    width, height = float(root.get("width", 0)) + 2 * _MARGIN, float(root.get("height", 0)) + 2 * _MARGIN + _HEADING
    _frame(root, -_MARGIN, -_MARGIN - _HEADING, width, height)
    place = {"x": f"{-_MARGIN}", "y": f"{-_MARGIN - _HEADING}", "width": f"{width:g}", "height": f"{height:g}"}
    root.insert(2, ET.Element(f"{{{_SVG}}}rect", {**place, "fill": "#ffffff"}))
    heading = ET.SubElement(root, f"{{{_SVG}}}text", {"x": "0", "y": "-8", "font-size": "15", "font-weight": "700"})
    heading.text = label
    ET.register_namespace("", _SVG)
    return ET.tostring(root, encoding="unicode")


def _spoken(stack: _Stack) -> str:
    blocks = "; ".join(block.words() for block in _used(stack))
    size = f"{len(stack.layers)} layers of width {stack.d_model}"
    return f"{stack.name}: {size}, pattern {stack.pattern or 'unknown'}. {blocks}."


def _draw_stack(root: ET.Element, stack: _Stack, colours: Mapping[str, str], left: float) -> tuple[float, float]:
    """Draws one stack at ``left``; gives its width and where it ends below."""
    nodes = lg.arrange(stack.layers)
    compact = sum(1 for _ in lg.drawn(nodes)) > _COMPACT_ABOVE
    group = ET.SubElement(root, "g", {"transform": f"translate({left:g} 0)"})
    n = len(stack.layers)
    _text(
        group,
        f"{stack.name}: {n} layer{'s' if n != 1 else ''}, d_model {stack.d_model}",
        0,
        14,
        13,
        _LEFT + _BOX,
        weight="600",
    )
    _text(group, stack.pattern, 0, 31, 12, _LEFT + _BOX + 30, title=stack.pattern)
    bottom = _draw_nodes(group, nodes, stack.blocks, colours, _HEAD, compact)
    return _LEFT + _BOX + 14 + _BRACKET * lg.depth(nodes), bottom


def _draw_nodes(
    group: ET.Element,
    nodes: Sequence[lg.Node],
    blocks: Mapping[str, _Block],
    colours: Mapping[str, str],
    top: float,
    compact: bool,
) -> float:
    for node in nodes:
        if isinstance(node, lg.Layer):
            top = _draw_layer(group, node, blocks[node.block], colours, top, compact) + _GAP
        else:
            bottom = _draw_nodes(group, node.parts, blocks, colours, top, compact)
            _draw_bracket(group, node, top, bottom - _GAP)
            top = bottom
    return top


def _draw_layer(
    group: ET.Element, layer: lg.Layer, block: _Block, colours: Mapping[str, str], top: float, compact: bool
) -> float:
    """A rounded box for the mixer, and a thinner strip for the channel mixer. Gives where it ends."""
    card = ET.SubElement(group, "g")
    _child(card, "title", f"layer {layer.index}, {block.words()}")
    main, strip = (22, 13) if compact else (34, 16)
    has_box = block.mixer is not None or block.channel is None
    edge = {"stroke": _EDGE, **({"stroke-dasharray": "5 3", "stroke-width": "1.6"} if block.shared else {})}
    _text(card, str(layer.index), _LEFT - 8, top + (main if has_box else strip) / 2 + 4, 11, _LEFT, anchor="end")
    if has_box:
        fill = {"fill": colours.get(block.kind, _STRIP_FILL), **edge}
        _draw_mixer(card, block, fill, top, main, one_line=compact)
        top += main
    if block.channel is not None:
        inset, below = (8, 1) if has_box else (0, 0)
        _rect(card, _LEFT + inset, top + below, _BOX - 2 * inset, strip, 4, {"fill": _STRIP_FILL, **edge})
        words = " ".join(block.channel).strip() if has_box else f"{block.name} · {' '.join(block.channel)}".strip()
        size, rise = (9.5, 2.6) if compact else (10.5, 3.5)
        _text(card, words, _LEFT + 15, top + strip - rise, size, _BOX - 30, fill=INK)
        top += strip + 1
    return top


def _draw_mixer(
    card: ET.Element, block: _Block, style: Mapping[str, str], top: float, height: float, one_line: bool
) -> None:
    name, options = block.mixer or (block.type, "")
    _rect(card, _LEFT, top, _BOX, height, 6, style)
    head = f"{block.name} · {name}{' · shared' if block.shared else ''}"
    if one_line or not options:
        _text(card, f"{head} {options}".strip(), _LEFT + 9, top + height / 2 + 4, 12, _BOX - 16, fill=INK)
    else:
        _text(card, head, _LEFT + 9, top + 14, 12, _BOX - 16, fill=INK, weight="600")
        _text(card, options, _LEFT + 9, top + 28, 10.5, _BOX - 16, fill=INK)


def _draw_bracket(group: ET.Element, node: lg.Group, top: float, bottom: float) -> None:
    x = _LEFT + _BOX + 6 + _BRACKET * lg.depth(node.parts)
    holder = ET.SubElement(group, "g")
    first = next(lg.drawn([node])).index
    _child(holder, "title", f"{node.count} times: layers {first} to {first + lg.size(node) - 1}")
    path = f"M{x:g} {top:g}h5v{bottom - top:g}h-5"
    ET.SubElement(holder, "path", {"d": path, "fill": "none", "stroke": "currentColor", "stroke-width": "1.5"})
    _text(holder, f"\u00d7{node.count}", x + 10, (top + bottom) / 2 + 5, 14, _BRACKET, weight="600")


def _legend(root: ET.Element, blocks: Iterable[_Block], colours: Mapping[str, str], top: float) -> float:
    found = list(blocks)
    entries = [(kind, colours[kind], 14.0, False) for kind in dict.fromkeys(b.kind for b in found) if kind in colours]
    if any(b.channel for b in found):
        entries.append(("channel mixer", _STRIP_FILL, 8.0, False))
    if any(b.shared for b in found):
        entries.append(("weights shared by layers", "none", 14.0, True))
    for label, fill, height, dashed in entries:
        stroke = {"stroke": "currentColor" if dashed else _EDGE, **({"stroke-dasharray": "5 3"} if dashed else {})}
        _rect(root, _LEFT, top + (14 - height) / 2, 22, height, 3, {"fill": fill, **stroke})
        _text(root, label, _LEFT + 30, top + 11.5, 12, _BOX - 30)
        top += 20
    return top + 2


def _rect(
    parent: ET.Element, x: float, y: float, width: float, height: float, radius: float, style: Mapping[str, str]
) -> None:
    place = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}", "rx": f"{radius:g}"}
    ET.SubElement(parent, "rect", {**place, **style})


def _text(
    parent: ET.Element,
    text: str,
    x: float,
    y: float,
    size: float,
    room: float,
    *,
    fill: str = "currentColor",
    weight: str = "400",
    anchor: str = "start",
    title: str | None = None,
) -> None:
    """Text cut to ``room`` pixels, by the mean width of a letter."""
    most = max(3, int(room / (size * (0.58 if weight == "400" else 0.62))))
    cut = text if len(text) <= most else text[: most - 1].rstrip() + "…"
    style = {"font-size": f"{size:g}", "font-weight": weight, "text-anchor": anchor, "fill": fill}
    element = _child(parent, "text", cut, x=f"{x:g}", y=f"{y:g}", **style)
    if title is not None and cut != text:
        _child(element, "title", title)


def _child(parent: ET.Element, tag: str, text: str, **attributes: str) -> ET.Element:
    element = ET.SubElement(parent, tag, attributes)
    element.text = ev.readable(text)
    return element
