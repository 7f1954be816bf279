"""The page in a headless browser, at a desk and on a phone: nothing in its console, nothing beyond its edge, and it answers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report import sample
from tests.report.browser import Browser, find_browser

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium or Chrome on the search path to open the page with")
WIDE, NARROW = 1280, 390


def opened(page: Path, width: int, folder: Path) -> Iterator[Browser]:
    assert PROGRAM is not None
    browser = Browser(PROGRAM, folder)
    try:
        browser.open(page, width)
        yield browser
    finally:
        browser.close()


@pytest.fixture(scope="module")
def wide(wide_page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The page at a desk; what a test changes it changes back."""
    yield from opened(wide_page, WIDE, tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="module")
def phone(wide_page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The page on a phone."""
    yield from opened(wide_page, NARROW, tmp_path_factory.mktemp("profile"))


@pytest.fixture(params=["wide", "phone"])
def either(request: pytest.FixtureRequest) -> Browser:
    found: Browser = request.getfixturevalue(request.param)
    return found


def test_it_fits_its_window_and_its_console_is_silent(either: Browser) -> None:
    width = either.run("innerWidth")
    assert width in (WIDE, NARROW)
    either.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert either.run("document.documentElement.scrollWidth") <= width
    beyond = """[...document.querySelectorAll('body *')].filter((e) => !e.closest('.scroll, pre, svg') &&
        e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"""
    assert either.run(beyond) == []
    either.run("document.querySelectorAll('details').forEach((d) => { d.open = false; })")
    assert either.faults == []


def test_every_chart_is_drawn_live_and_is_as_wide_as_its_column(either: Browser) -> None:
    sizes = either.run(
        """[...document.querySelectorAll('figure[data-chart]')].map((figure) => {
            const svg = figure.querySelector('.drawing.live svg'), box = svg.getBoundingClientRect();
            return [figure.dataset.chart, box.width / figure.getBoundingClientRect().width, box.height,
                    svg.querySelectorAll('.mark-symbol path, .mark-rect path, .mark-line path').length];
        })"""
    )
    assert len(sizes) > 20
    for name, share, height, marks in sizes:
        assert 0.8 < share <= 1.01, name
        assert height > 60, name
        assert marks, name


def test_links_lead_to_records_that_open_whole(wide: Browser) -> None:
    lost = "[...document.querySelectorAll('a[href^=\"#\"]')].filter((a) => !document.getElementById(a.hash.slice(1))).length"
    assert wide.run(lost) == 0
    assert wide.run("document.querySelectorAll('td.number a').length") > 200
    assert wide.run("document.querySelectorAll('td.number:not(.missing):not(:has(a))').length") == 0
    cell = "document.querySelector('#quality ~ details td.number a[href^=\"#quality-\"]')"
    shown = f"document.getElementById({cell}.hash.slice(1))"
    assert wide.run(f"{shown}.open") is False
    wide.run(f"{cell}.click()")
    wide.wait(f"{shown}.open && {shown}.getBoundingClientRect().top < innerHeight")
    wide.wait(f"{shown}.querySelector('pre').textContent.startsWith('{{')")
    record = json.loads(wide.run(f"{shown}.querySelector('pre').textContent"))
    assert record in sample.wide_records()


def test_several_seeds_lead_to_the_list_of_their_records(wide: Browser) -> None:
    cells = "[...document.querySelectorAll('table.cards tbody tr:first-child td')]"
    target = f"{cells}.find((cell) => /held-out bits/.test(cell.dataset.label)).querySelector('a').hash.slice(1)"
    links = wide.run(f"[...document.getElementById({target}).querySelectorAll('a')].map((a) => a.textContent)")
    assert links == [f"quality, attention, sotu, seed {seed}" for seed in (0, 1, 2)]


def middle(element: str) -> str:
    """An expression for where the middle of an element is in the window."""
    return f"(() => {{ const b = {element}.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; }})()"


TABLE = "document.querySelector('table.sortable')"
NAMES = f"[...{TABLE}.tBodies[0].rows].map((row) => row.cells[0].textContent)"


def test_a_click_and_a_key_sort_by_numbers_as_numbers(wide: Browser) -> None:
    heads = wide.run(f"[...{TABLE}.tHead.rows[0].cells].map((head) => head.textContent)")
    column = next(i for i, head in enumerate(heads) if head.startswith("state at 64k"))
    head, first = f"{TABLE}.tHead.rows[0].cells[{column}]", wide.run(NAMES)
    wide.run(f"{head}.querySelector('button').click()")
    # 586 kB, 67.5 MB, 268 MB: by letters 268 would be first; what did not run is last
    assert wide.run(NAMES) == ["mamba2", "hybrid-3m1a", "attention", "diverged"]
    assert wide.run(f"{head}.getAttribute('aria-sort')") == "ascending"
    wide.run(f"{head}.querySelector('button').focus()")
    for kind in ("keyDown", "keyUp"):
        wide.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    assert wide.run(NAMES) == ["attention", "hybrid-3m1a", "mamba2", "diverged"]
    assert wide.run(f"{head}.getAttribute('aria-sort')") == "descending"
    wide.run(f"{head}.querySelector('button').click()")
    assert wide.run(NAMES) == first
    assert wide.run(f"{TABLE}.querySelectorAll('[aria-sort=none]').length") == len(heads)


def test_a_chart_zooms_moves_and_comes_back(wide: Browser) -> None:
    chart = "document.querySelector('figure[data-chart=training]')"
    wide.run(f"{chart}.scrollIntoView({{ block: 'center' }})")
    labels = f"[...{chart}.querySelectorAll('.role-axis-label text')].map((t) => t.textContent).sort()"
    x, y = wide.run(middle(f"{chart}.querySelector('.live svg')"))
    before, scrolled = wide.run(labels), wide.run("scrollY")
    mouse = {"x": x, "y": y, "pointerType": "mouse"}
    wide.call("Input.dispatchMouseEvent", type="mouseWheel", deltaX=0, deltaY=-300, modifiers=2, **mouse)
    wide.wait(f"String({labels}) !== {json.dumps(','.join(before))}")
    assert wide.run("scrollY") == scrolled
    zoomed = wide.run(labels)
    wide.call("Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **mouse)
    for step in range(1, 6):
        moved = {**mouse, "x": x + 20 * step}
        wide.call("Input.dispatchMouseEvent", type="mouseMoved", button="left", buttons=1, **moved)
    wide.call("Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **moved)
    wide.wait(f"String({labels}) !== {json.dumps(','.join(zoomed))}")
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            wide.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=count, **mouse)
    wide.wait(f"String({labels}) === {json.dumps(','.join(before))}")
    assert wide.faults == []


def test_a_tooltip_names_the_record(wide: Browser) -> None:
    point = "document.querySelector('figure[data-chart=quality] .live .mark-symbol path')"
    wide.run(f"{point}.scrollIntoView({{ block: 'center' }})")
    x, y = wide.run(middle(point))
    wide.call("Input.dispatchMouseEvent", type="mouseMoved", x=x - 3, y=y)
    wide.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    wide.wait("document.querySelector('#vg-tooltip-element.visible')")
    assert "quality-attention-sotu-seed0-" in wide.run("document.querySelector('#vg-tooltip-element').textContent")


def test_a_phone_has_another_way_to_sort(phone: Browser) -> None:
    select = "document.querySelector('label.order select')"
    assert phone.run(f"{select}.getBoundingClientRect().height") > 0
    phone.run(f"{select}.value = '1 -1', {select}.dispatchEvent(new Event('change'))")
    assert phone.run(NAMES)[0] == "hybrid-3m1a"


def test_text_is_legible_on_dark_ground(wide: Browser) -> None:
    wide.prefer("dark")
    colours = wide.run(
        """[...document.querySelectorAll('figure .live text')].filter((t) => t.textContent && !t.closest('.mark-rect')
            && !t.closest('.mark-text.role-mark')).map((t) => getComputedStyle(t).fill)"""
    )
    wide.prefer("light")
    assert set(colours) == {"rgb(232, 232, 232)"}
