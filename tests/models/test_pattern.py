"""Pattern lines: what they expand to, what is refused and how, and that printing is the inverse."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtf.core import ConfigError
from hybridtf.models.pattern import MAX_LAYERS, expand_pattern, print_pattern

NAMES = ("a", "k", "m", "sliding-attention", "_x2")


@pytest.mark.parametrize(
    ("pattern", "n_layers", "layers"),
    [
        ("a", None, "a"),
        ("m a", None, "m a"),
        ("  m\ta  ", 2, "m a"),
        ("k*3", None, "k k k"),
        ("k*03", 3, "k k k"),
        ("(k*3 a)*2 k*2 a", 11, "k k k a k k k a k k a"),
        ("((m a)*2 k)*2", None, "m a m a k m a m a k"),
        ("(m)(a)", None, "m a"),
        ("m*2a", None, "m m a"),
        ("(m*3 a)*", 8, "m m m a m m m a"),
        ("m*", 3, "m m m"),
        ("k (m a)* k", 6, "k m a m a k"),
        ("(k m*)*2", 8, "k m m m k m m m"),
        ("k ((m)*2 a)*", 4, "k m m a"),
        ("sliding-attention _x2", None, "sliding-attention _x2"),
    ],
)
def test_expansion(pattern: str, n_layers: int | None, layers: str) -> None:
    assert expand_pattern(pattern, NAMES, n_layers) == tuple(layers.split())


def test_kimi_linear_has_27_layers() -> None:
    layers = expand_pattern("(k*3 a)*6 k*2 a", ["k", "a"], 27)
    assert len(layers) == 27
    assert layers.count("a") == 7


KNOWN = "Known: _x2, a, k, m, sliding-attention"


@pytest.mark.parametrize(
    ("pattern", "n_layers", "message"),
    [
        ("", None, "pattern '' is empty; it must name a block for each layer, as in 'm*3 a'"),
        ("   ", None, "pattern '   ' is empty; it must name a block for each layer, as in 'm*3 a'"),
        ("m x", None, f"pattern 'm x', column 3: no block named 'x'. {KNOWN}"),
        ("M", None, f"pattern 'M', column 1: no block named 'M'. Did you mean 'm'? {KNOWN}"),
        ("m slidingattention", None,
         "pattern 'm slidingattention', column 3: no block named 'slidingattention'. "
         f"Did you mean 'sliding-attention'? {KNOWN}"),
        ("mmka", None,
         f"pattern 'mmka', column 1: no block named 'mmka'. {KNOWN}. Names are parted by spaces: 'm m k a'?"),
        ("M-M*", 4, f"pattern 'M-M*', column 1: no block named 'M-M'. {KNOWN}"),
        ("ME*", 4, f"pattern 'ME*', column 1: no block named 'ME'. {KNOWN}"),
        ("m?a", None,
         "pattern 'm?a', column 2: unknown symbol '?'; "
         "expected a block (_x2, a, k, m, sliding-attention), '(', ')' or '*'"),
        ("m - a", None,
         "pattern 'm - a', column 3: unknown symbol '-'; "
         "expected a block (_x2, a, k, m, sliding-attention), '(', ')' or '*'"),
        ("m* 3", 3, "pattern 'm* 3', column 4: unknown symbol '3'; a count follows its '*' directly, as in 'm*3'"),
        ("3 m", None, "pattern '3 m', column 1: unknown symbol '3'; a count follows its '*' directly, as in 'm*3'"),
        ("m *3", None, "pattern 'm *3', column 3: a '*' must follow a block or a ')' directly"),
        ("*3", None, "pattern '*3', column 1: a '*' must follow a block or a ')' directly"),
        ("(*2 m)", None, "pattern '(*2 m)', column 2: a '*' must follow a block or a ')' directly"),
        ("m*2*3", None, "pattern 'm*2*3', column 4: a second count for the same block or group"),
        ("m**", 2, "pattern 'm**', column 3: a second count for the same block or group"),
        ("m*0", None, "pattern 'm*0', column 3: a count must be 1 or more"),
        ("m*000", None, "pattern 'm*000', column 3: a count must be 1 or more"),
        ("m*9999999", None, "pattern 'm*9999999', column 3: a count above 100000 layers"),
        ("m*100001", None, "pattern 'm*100001' gives 100001 layers; at most 100000 are allowed"),
        ("(m*9999)*9999", None, "pattern '(m*9999)*9999' gives 99980001 layers; at most 100000 are allowed"),
        ("(m a", None, "pattern '(m a', column 1: this '(' is never closed"),
        ("m ((a) k", None, "pattern 'm ((a) k', column 3: this '(' is never closed"),
        ("m a)", None, "pattern 'm a)', column 4: this ')' closes nothing"),
        ("m ()", None, "pattern 'm ()', column 3: an empty group"),
        ("m* a*", 4, "pattern 'm* a*', column 5: a second filling star; the first is at column 2"),
        ("(m*3 a)*", None, "pattern '(m*3 a)*' has a filling star, so n_layers must be given"),
        ("m a", 3, "pattern 'm a' gives 2 layers, but n_layers = 3"),
        ("m", 2, "pattern 'm' gives 1 layer, but n_layers = 2"),
        ("(m*3 a)*", 10,
         "pattern '(m*3 a)*' gives a multiple of 4, which does not come out at n_layers = 10; 8 or 12 would fit"),
        ("k (m*3 a)*", 8,
         "pattern 'k (m*3 a)*' gives 1 + 4 for each filling, which does not come out at n_layers = 8; "
         "5 or 9 would fit"),
        ("k (m*3 a)*", 1,
         "pattern 'k (m*3 a)*' gives 1 + 4 for each filling, which does not come out at n_layers = 1; 5 would fit"),
    ],
)
def test_refusals(pattern: str, n_layers: int | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand_pattern(pattern, NAMES, n_layers)
    assert str(caught.value) == message


def test_deep_nesting_is_refused_not_a_recursion_error() -> None:
    with pytest.raises(ConfigError, match="column 33: more than 32 groups inside one another"):
        expand_pattern("(" * 5000 + "m" + ")" * 5000, NAMES)
    assert expand_pattern("(" * 32 + "m" + ")" * 32, NAMES) == ("m",)


def test_a_long_line_is_shortened_in_messages() -> None:
    with pytest.raises(ConfigError) as caught:
        expand_pattern("m " * 500 + "x", NAMES)
    assert len(str(caught.value)) < 250
    assert "column 1001" in str(caught.value)


def test_no_blocks_at_all() -> None:
    with pytest.raises(ConfigError, match=re.escape("no block named 'm'. Known: none")):
        expand_pattern("m", [])


@pytest.mark.parametrize(
    ("layers", "line"),
    [
        ("m", "m"),
        ("m m", "m*2"),
        ("m a", "m a"),
        ("m m m a m m m a", "(m*3 a)*2"),
        ("k k k a " * 6 + "k k a", "(k*3 a)*6 k*2 a"),
        ("k m m m a m m m a", "k (m*3 a)*2"),
        ("m a m a k m a m a k", "((m a)*2 k)*2"),
    ],
)
def test_printing(layers: str, line: str) -> None:
    assert print_pattern(layers.split()) == line
    assert print_pattern(tuple(layers.split())) == line


def test_printing_no_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="a stack without layers has no pattern"):
        print_pattern(())


@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=60))
def test_print_then_expand(layers: list[str]) -> None:
    assert expand_pattern(print_pattern(layers), NAMES, len(layers)) == tuple(layers)


_units = st.recursive(
    st.sampled_from(NAMES),
    lambda inner: st.lists(st.tuples(inner, st.integers(1, 4)), min_size=1, max_size=3).map(
        lambda parts: "(" + " ".join(f"{part}*{count}" for part, count in parts) + ")"
    ),
    max_leaves=8,
)


@given(_units)
def test_expand_then_print_then_expand(pattern: str) -> None:
    layers = expand_pattern(pattern, NAMES)
    line = print_pattern(layers)
    assert expand_pattern(line, NAMES, len(layers)) == layers
    assert "\n" not in line


def test_the_largest_stack_is_printed_in_no_time() -> None:
    layers = expand_pattern(f"(m*3 a)*{MAX_LAYERS // 4}", NAMES)
    assert print_pattern(layers) == f"(m*3 a)*{MAX_LAYERS // 4}"
