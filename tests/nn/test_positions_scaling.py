"""Scaled rotary positions against transformers' functions, run in float64."""

from __future__ import annotations

import math
import tomllib

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, RecipeError, active
from hybridtf.models import LanguageModelConfig
from hybridtf.nn import RopeConfig
from hybridtf.recipe import parse_recipe, to_toml

transformers = pytest.importorskip("transformers")
F64 = torch.float64
MAX = 640
"""The model's max_seq_len."""


def rope(head_dim, theta=10000.0, fraction=1.0, **scaling):
    return RopeConfig(theta=theta, fraction=fraction, scaling=scaling or None).build(
        BuildContext(d_model=head_dim, max_seq_len=MAX)
    )


def factors(head_dim, fraction=1.0, first=1.0):
    return [first + 0.25 * i for i in range(int(head_dim * fraction) // 2)]


def theirs(monkeypatch, name, head_dim, theta, fraction, seq_len=None, max_position=MAX, **parameters):
    """(frequencies, attention factor) of transformers, every float32 in it read as float64."""
    config = transformers.LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=max_position,
        rope_parameters={"rope_type": name, "rope_theta": theta, "partial_rotary_factor": fraction, **parameters},
    )
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float", F64)
        patch.setattr(torch, "float32", F64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[name]
        frequencies, factor = init(config, torch.device("cpu"), seq_len=seq_len)
    assert frequencies.dtype == F64
    return frequencies, factor


def same(ours, found, length=None):
    frequencies, factor = found
    torch.testing.assert_close(ours.frequencies(torch.device("cpu"), length), frequencies, rtol=1e-14, atol=0)
    assert ours.factor == pytest.approx(factor, rel=1e-14)


SIZES = [(8, 10000.0, 1.0), (64, 10000.0, 1.0), (128, 500000.0, 1.0), (32, 10000.0, 0.25), (96, 1e6, 0.75)]


@pytest.mark.parametrize(("d", "theta", "fraction"), SIZES)
@pytest.mark.parametrize("factor", [1.0, 2.0, 7.5])
def test_linear(monkeypatch, d, theta, fraction, factor):
    want = theirs(monkeypatch, "linear", d, theta, fraction, factor=factor)
    same(rope(d, theta, fraction, type="linear", factor=factor), want)


@pytest.mark.parametrize(("d", "theta", "fraction"), [*SIZES, (12, 1000.0, 0.4)])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_proportional(monkeypatch, d, theta, fraction, factor):
    want = theirs(monkeypatch, "proportional", d, theta, fraction, factor=factor)
    same(rope(d, theta, type="proportional", turning=fraction, factor=factor), want)


@pytest.mark.parametrize(("d", "theta", "fraction"), SIZES)
def test_ntk_stretches_the_slowest_pair_by_its_factor_and_the_fastest_not_at_all(d, theta, fraction):
    plain, scaled = rope(d, theta, fraction), rope(d, theta, fraction, type="ntk", factor=6.0)
    ratio = plain.frequencies(torch.device("cpu")) / scaled.frequencies(torch.device("cpu"))
    assert float(ratio[0]) == 1.0
    assert float(ratio[-1]) == pytest.approx(6.0, rel=1e-12)
    width = int(d * fraction)
    bare = rope(d, theta * 6.0 ** (width / (width - 2)), fraction).frequencies(torch.device("cpu"))
    torch.testing.assert_close(scaled.frequencies(torch.device("cpu")), bare, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("d", "theta", "fraction"), SIZES)
@pytest.mark.parametrize("length", [1, 255, 256, 257, 300, 640, 5000])
def test_dynamic_ntk(monkeypatch, d, theta, fraction, length):
    want = theirs(monkeypatch, "dynamic", d, theta, fraction, seq_len=length, max_position=256, factor=3.0)
    declared = rope(d, theta, fraction, type="dynamic_ntk", factor=3.0, original_max_len=256)
    same(declared, want, length)
    running = rope(d, theta, fraction, type="dynamic_ntk", factor=3.0, original_max_len=256, mode="running")
    torch.testing.assert_close(
        running.frequencies(torch.device("cpu"), torch.tensor([[length, 3]])),
        torch.stack([want[0], rope(d, theta, fraction).frequencies(torch.device("cpu"))])[None], rtol=1e-13, atol=0,
    )


@pytest.mark.parametrize("mode", ["declared", "running"])
@pytest.mark.parametrize("factor", [1.1, 4.0])
def test_inside_the_original_length_dynamic_scaling_changes_nothing(mode, factor):
    scaled = rope(16, type="dynamic_ntk", factor=factor, original_max_len=16, mode=mode)
    x = torch.randn(1, 40, 2, 16, dtype=F64)
    for t in (1, 10, 16, 17, 40):
        at = torch.arange(t)[None]
        got, want = (m(x[:, :t], m.table(at, F64, max_len=t)) for m in (scaled, rope(16)))
        assert torch.equal(got, want) == (t <= 16)


@pytest.mark.parametrize(("d", "theta", "fraction"), SIZES)
@pytest.mark.parametrize(
    "options",
    [
        {"factor": 4.0}, {"factor": 1.0}, {"factor": 40.0, "beta_fast": 16.0, "beta_slow": 2.5},
        {"factor": 16.0, "truncate": False}, {"factor": 16.0, "attention_factor": 0.7},
        {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}, {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ],
)
@pytest.mark.parametrize("original", [128, 4096])
def test_yarn(monkeypatch, d, theta, fraction, options, original):
    want = theirs(monkeypatch, "yarn", d, theta, fraction, original_max_position_embeddings=original, **options)
    same(rope(d, theta, fraction, type="yarn", original_max_len=original, **options), want)


@pytest.mark.parametrize(
    ("options", "magnitude"),
    [
        ({"factor": 16.0}, 1.2773), ({"factor": 64.0}, 1.4159), ({"factor": 16.0, "attention_factor": 1.0}, 1.0),
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}, (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
    ],
)
def test_the_magnitude_of_yarn_is_on_cos_and_sin(options, magnitude):
    turn = rope(8, type="yarn", original_max_len=64, **options)
    unit = torch.zeros(1, 1, 1, 8, dtype=F64)
    unit[..., 0] = 1
    got = turn(unit, turn.table(torch.zeros(1, 1, dtype=torch.int64), F64))
    assert float(got.norm()) == pytest.approx(magnitude, abs=5e-5)
    far = turn(unit, turn.table(torch.tensor([[777]]), F64))
    assert float(far.norm()) == pytest.approx(magnitude, abs=5e-5)


@pytest.mark.parametrize(("d", "theta", "fraction"), SIZES)
@pytest.mark.parametrize("options", [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 64), (2.5, 0.5, 9.0, 1000)])
def test_llama3(monkeypatch, d, theta, fraction, options):
    factor, low, high, original = options
    named = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    want = theirs(monkeypatch, "llama3", d, theta, fraction, original_max_position_embeddings=original, **named)
    ours = rope(d, theta, fraction, type="llama3", original_max_len=original, **named)
    torch.testing.assert_close(ours.frequencies(torch.device("cpu")), want[0], rtol=1e-13, atol=0)
    assert ours.factor == want[1]


@pytest.mark.parametrize(("d", "theta", "fraction"), SIZES)
@pytest.mark.parametrize("options", [{}, {"factor": 8.0}, {"factor": 0.5}, {"attention_factor": 1.3}])
@pytest.mark.parametrize("length", [1, 128, 129, 5000])
def test_longrope(monkeypatch, d, theta, fraction, options, length):
    lists = {"short_factor": factors(d, fraction), "long_factor": factors(d, fraction, 3.0)}
    want = theirs(
        monkeypatch, "longrope", d, theta, fraction, seq_len=length, original_max_position_embeddings=128, **lists, **options
    )
    same(rope(d, theta, fraction, type="longrope", original_max_len=128, **lists, **options), want, length)
    running = rope(d, theta, fraction, type="longrope", original_max_len=128, mode="running", **lists, **options)
    torch.testing.assert_close(
        running.frequencies(torch.device("cpu"), torch.tensor([[length]]))[0, 0], want[0], rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("t", [1, 15, 16, 17, 24, 70])
def test_one_forward_with_the_running_length_is_that_of_transformers(t):
    llama, phi3 = (pytest.importorskip(f"transformers.models.{n}.modeling_{n}") for n in ("llama", "phi3"))
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 16}
    lists = {"short_factor": factors(8), "long_factor": factors(8, first=3.0)}
    dynamic = transformers.LlamaConfig(**sizes, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    long = transformers.Phi3Config(
        **{**sizes, "max_position_embeddings": 64}, original_max_position_embeddings=16, pad_token_id=0,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **lists},
    )
    cases = [
        (llama.LlamaRotaryEmbedding(dynamic), {"type": "dynamic_ntk", "factor": 2.0, "original_max_len": 16}),
        (phi3.Phi3RotaryEmbedding(long), {"type": "longrope", "original_max_len": 16, "factor": 4.0, **lists}),
    ]
    at = torch.arange(t)[None]
    for module, scaling in cases:
        ours = rope(8, mode="running", **scaling).table(at, torch.float32)
        halves = (ours.cos[:, :, 0, 0], ours.sin[:, :, 0, 1])
        for got, want in zip(halves, module(torch.zeros(1), at), strict=True):
            torch.testing.assert_close(torch.cat([got, got], -1), want, rtol=0, atol=2e-5)


def test_positions_beyond_every_limit_are_rotated_as_computed_directly():
    """Original length 16, factor 4: nothing ends at 64."""
    turn = rope(8, type="yarn", factor=4.0, original_max_len=16)
    x = torch.randn(1, 70, 1, 8, dtype=F64)
    frequencies = turn.frequencies(torch.device("cpu"))
    for first, stop in ((0, 64), (0, 65), (0, 70), (63, 66)):
        at = torch.arange(first, stop)[None]
        got = turn(x[:, first:stop], turn.table(at, F64))
        angle = at[..., None, None] * frequencies
        z = torch.complex(x[:, first:stop, :, :4], x[:, first:stop, :, 4:])
        z = z * torch.polar(torch.full_like(angle, turn.factor), angle)
        torch.testing.assert_close(got, torch.cat([z.real, z.imag], -1), rtol=0, atol=1e-12)


# -- options -----------------------------------------------------------------------------------------------------------

YARN = {"type": "yarn", "factor": 2.0, "original_max_len": 8}
LONG = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0], "original_max_len": 8}


@pytest.mark.parametrize(
    ("scaling", "fault"),
    [
        ({"type": "linear", "factor": 0.5}, "scaling.factor: input should be greater than or equal to 1"),
        ({"type": "liner"}, "scaling: no scaling of type 'liner'. Did you mean 'linear'?"),
        ({"factor": 2.0}, "scaling: needs type = one of dynamic_ntk, linear"),
        ("linear", "scaling: must be a scaling, a table as in"),
        ({"type": "yarn"}, "scaling.factor: is required"),
        ({**YARN, "mscale": 1.0}, "act as a ratio: give both or neither"),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0}, "attention_factor says it all"),
        ({**YARN, "beta_fas": 3.0}, "scaling.beta_fas: unknown option. Did you mean 'beta_fast'?"),
        ({**LONG, "long_factor": [1.0]}, "short_factor has 2 numbers, long_factor 1"),
        ({**LONG, "long_factor": [1.0, 0.0]}, "must be positive"),
        ({**LONG, "factor": 2.0, "attention_factor": 1.0}, "give one of factor and attention_factor"),
        ({**LONG, "mode": "runing"}, "scaling.mode: input should be 'declared' or 'running', got 'runing'. Did you mean 'run"),
        ({"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "original_max_len": 8}, "must be above low_freq_factor"),
    ],
)
def test_wrong_options_name_their_path(scaling, fault):
    with pytest.raises(RecipeError) as error:
        RopeConfig(scaling=scaling)
    assert fault in str(error.value)


def test_scalings_that_do_not_fit_a_head_are_refused_when_built():
    with pytest.raises(ConfigError, match=r"scaling: short_factor and long_factor have 2 numbers; the rotation has 4 pairs"):
        rope(8, **LONG)
    with pytest.raises(ConfigError, match="scaling: changes the base, which a single pair"):
        rope(8, fraction=0.25, type="ntk", factor=2.0)
    with pytest.raises(ConfigError, match=r"no pair of 4 turns with turning = 0\.2"):
        rope(8, type="proportional", turning=0.2)
    with pytest.raises(ConfigError, match="theta other than 1"):
        rope(8, theta=1.0, **YARN)


def test_a_scaling_round_trips_and_has_a_schema():
    for scaling in (YARN, LONG, {"type": "dynamic_ntk", "factor": 3.0, "original_max_len": 4, "mode": "running"}):
        config = RopeConfig(scaling=scaling)
        table = config.to_dict()
        assert table["scaling"].items() >= {k: v for k, v in scaling.items() if k != "original"}.items()
        assert active()["positions"].make(table) == config
    choices = RopeConfig.model_json_schema()["properties"]["scaling"]["anyOf"][0]["oneOf"]
    assert {choice["properties"]["type"]["const"] for choice in choices} == {
        "linear", "proportional", "ntk", "dynamic_ntk", "yarn", "llama3", "longrope",
    }
    assert all(choice["additionalProperties"] is False and "type" in choice["required"] for choice in choices)


def test_a_scaling_survives_a_recipe_file():
    model = LanguageModelConfig(
        vocab_size=5, d_model=8, pattern="a", max_seq_len=32,
        blocks={"a": {"mixer": {"type": "attention", "n_heads": 2, "position": {"type": "rope", "scaling": LONG}}}},
    )
    text = to_toml({"model": model.to_dict()})
    assert "[model.blocks.a.mixer.position.scaling]" in text
    assert parse_recipe(tomllib.loads(text), "r.toml").model == model
