"""Pictures of stacks: well formed, complete, short where the stack repeats."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtf.report import layer_groups as lg
from hybridtf.report.evidence import gather
from hybridtf.report.palette import FILLS
from hybridtf.report.stacks import Picture, stack_pictures
from tests.report import sample

SVG = "{http://www.w3.org/2000/svg}"


def pictures(*records: dict) -> list[Picture]:
    return stack_pictures(gather(records))


def unfold(nodes: tuple[lg.Node, ...]) -> list[str]:
    out: list[str] = []
    for node in nodes:
        out += [node.block] if isinstance(node, lg.Layer) else unfold(node.parts) * node.count
    return out


@given(st.lists(st.sampled_from("ab"), max_size=30))
def test_fold_loses_nothing_and_numbers_the_layers_drawn(layers: list[str]) -> None:
    nodes = lg.fold(layers)
    assert unfold(nodes) == layers
    assert sum(map(lg.size, nodes)) == len(layers)
    for layer in lg.drawn(nodes):
        assert layers[layer.index] == layer.block


def test_fold_finds_the_shortest() -> None:
    layers = sample.deep_model()["stacks"][0]["layers"]
    nodes = lg.fold(layers)
    # k ((k*3 s)*5 e m)*2 k m e
    assert [layer.block for layer in lg.drawn(nodes)] == ["k", "k", "s", "e", "m", "k", "m", "e"]
    assert lg.depth(nodes) == 3
    assert [layer.index for layer in lg.drawn(nodes)] == [0, 1, 4, 21, 22, 45, 46, 47]


def test_short_stacks_are_drawn_layer_by_layer() -> None:
    assert len(list(lg.drawn(lg.arrange(["m"] * 12)))) == 12
    assert len(list(lg.drawn(lg.arrange(["m"] * 13)))) == 1


def test_one_box_and_one_strip_a_layer_coloured_by_mixer() -> None:
    (picture,) = pictures(sample.model("hybrid-3m1a"))
    root = ET.fromstring(picture.svg)
    boxes = [rect.get("fill") for rect in root.iter(SVG + "rect") if rect.get("rx") == "6"]
    assert boxes == [FILLS[0], FILLS[0], FILLS[0], FILLS[1]] * 2
    strips = [rect for rect in root.iter(SVG + "rect") if rect.get("rx") == "4"]
    assert len(strips) == 8
    assert all(float(strip.get("height", 0)) < 34 for strip in strips)
    words = [text.text for text in root.iter(SVG + "text")]
    assert words.count("m · mamba2") == 6
    assert words.count("a · attention") == 2
    assert words.count("swiglu d_ff=688") == 8
    assert [word for word in words if word and word.isdigit()] == [str(i) for i in range(8)]


def test_layers_count_from_0_in_what_is_said_of_them_too() -> None:
    (picture,) = pictures(sample.deep_model())
    titles = [title.text or "" for title in ET.fromstring(picture.svg).iter(SVG + "title")]
    assert any(title.startswith("layer 0, ") for title in titles)
    assert "3 times: layers 1 to 3" in titles
    assert any(title.startswith("layer 47, ") for title in titles)


def test_a_mixer_has_one_colour_in_all_pictures() -> None:
    first, second = pictures(sample.model("attention"), sample.model("hybrid-3m1a"))
    colour = next(r.get("fill") for r in ET.fromstring(first.svg).iter(SVG + "rect"))
    assert [r.get("fill") for r in ET.fromstring(second.svg).iter(SVG + "rect") if r.get("rx") == "6"][3] == colour
    assert (first.name, second.name) == ("stack_1", "stack_2")


def test_can_be_read_aloud() -> None:
    (picture,) = pictures(sample.deep_model())
    root = ET.fromstring(picture.svg)
    assert root.get("role") == "img"
    ids = {element.get("id"): element.text for element in root if element.get("id")}
    first, _ = (root.get("aria-labelledby") or "").split()
    assert ids[first] == "Stack of deep"
    spoken = " ".join(text or "" for text in ids.values())
    assert "48 layers of width 2048" in spoken
    assert "weights shared by all layers of this name" in spoken
    assert "mlp" in spoken


def test_deep_stacks_have_brackets_and_shared_blocks_are_marked() -> None:
    (picture,) = pictures(sample.deep_model())
    root = ET.fromstring(picture.svg)
    words = [text.text or "" for text in root.iter(SVG + "text")]
    assert [word for word in words if word.startswith("\u00d7")] == ["\u00d73", "\u00d75", "\u00d72"]
    assert any("shared" in word for word in words)
    assert any(rect.get("stroke-dasharray") for rect in root.iter(SVG + "rect"))
    assert float(root.get("height", "0")) < 600


def test_nothing_leaves_the_picture() -> None:
    for picture in pictures(sample.deep_model(), sample.model("hybrid-3m1a")):
        root = ET.fromstring(picture.svg)
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        for rect in root.iter(SVG + "rect"):
            assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= width
            assert float(rect.get("y", 0)) + float(rect.get("height", 0)) <= height


def test_a_file_has_a_heading_and_white_ground() -> None:
    (picture,) = pictures(sample.model("hybrid-3m1a"))
    root = ET.fromstring(picture.file_svg())
    ground = next(root.iter(SVG + "rect"))
    assert ground.get("fill") == "#ffffff"
    box = [float(number) for number in (root.get("viewBox") or "").split()]
    assert [float(ground.get(name, 0)) for name in ("x", "y", "width", "height")] == box
    assert "hybrid-3m1a" in [text.text for text in root.iter(SVG + "text")]
    assert picture.file_svg().startswith('<svg xmlns="http://www.w3.org/2000/svg"')


def test_names_are_inert() -> None:
    evil = "<script>alert(1)</script>&\"'\x00\ud800"
    record = sample.model("mamba2")
    record["recipe"] = evil
    stack = record["stacks"][0]
    stack.update(name=evil, pattern=evil, layers=[evil], blocks={evil: {"mixer": {"type": evil, "summary": evil}}})
    (picture,) = pictures(record)
    root = ET.fromstring(picture.svg)
    assert not list(root.iter(SVG + "script"))
    assert picture.label.startswith("<script>alert(1)</script>&\"'\ufffd\ufffd")


@pytest.mark.parametrize("stacks", [None, [], "text", [None], [{}], [{"layers": []}]])
def test_without_layers_there_is_no_picture(stacks: object) -> None:
    assert pictures({**sample.model("mamba2"), "stacks": stacks}) == []


@pytest.mark.parametrize("blocks", [None, {"a": 3}, {"a": {"type": "mine", "mixer": None, "channel_mixer": None}}])
def test_an_unknown_block_is_a_box(blocks: object) -> None:
    (picture,) = pictures({**sample.model("mamba2"), "stacks": [{"layers": ["a"], "blocks": blocks}]})
    assert ("mine" if isinstance(blocks, dict) and blocks["a"] != 3 else "unknown block") in picture.svg
