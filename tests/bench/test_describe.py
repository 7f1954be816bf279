"""What a model is made of: counts against hand arithmetic and against states that really hold tokens."""

import pytest
import torch
from torch import nn

from hybridtf.bench import Subject, measure_model
from hybridtf.bench.describe import stacks_of
from hybridtf.core import BuildContext, Growing, Ring, leaves, state_bytes
from hybridtf.cost import parameter_counts, state_size
from hybridtf.models import LanguageModelConfig
from hybridtf.recipe import Recipe
from tests.bench.bench_cases import BLOCKS, Line, Table, subject


def test_parameters_by_hand():
    found = parameter_counts(subject("a").build())
    d, v = 16, 257
    # q and out are d x d, k and v d x d/2; two norms (the block's and the final one); the head is tied.
    matrices = 3 * d * d
    assert found == {
        "total": v * d + matrices + 2 * d, "active": v * d + matrices + 2 * d, "embedding": v * d,
        "by_role": {"embedding": v * d, "matrix": matrices, "norm": 2 * d},
    }


def test_shared_blocks_count_once():
    blocks = {"a": {**BLOCKS["a"], "shared": True}}
    config = LanguageModelConfig(vocab_size=257, d_model=16, pattern="a*3", blocks=blocks)
    one = Subject.from_recipe(Recipe(model=config), "shared")
    assert parameter_counts(one.build()) == parameter_counts(subject("a").build())
    # But every visit has a state of its own.
    assert state_size(one.build(), 10)["kv"] == 3 * state_size(subject("a").build(), 10)["kv"]


def test_experts_that_a_token_does_not_choose_are_not_active():
    block = {"channel_mixer": {"type": "moe", "n_experts": 5, "top_k": 2, "d_ff": 8}}
    found = parameter_counts(LanguageModelConfig(vocab_size=7, d_model=16, pattern="e*2", blocks={"e": block}).build())
    assert found["total"] - found["active"] == 2 * 3 * (3 * 16 * 8)


def test_foreign_parameters():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
    assert parameter_counts(model)["by_role"] == {"embedding": 40, "matrix": 40, "bias": 10}
    # One parameter that no module speaks for: then only tables are told apart.
    model.append(Table(torch.zeros(3, 3)))
    assert parameter_counts(model) == {"total": 99, "active": 99, "embedding": 40, "by_role": {"embedding": 40, "other": 59}}


def test_the_record_shows_stacks():
    one = subject("m*2 a")
    found = measure_model(one, one.build())
    (stack,) = found["stacks"]
    assert (stack["name"], stack["d_model"], stack["layers"]) == ("decoder", 16, ["m", "m", "a"])
    assert stack["blocks"]["m"]["mixer"] == {"type": "mamba2", "summary": "d_state=8 head_dim=8 chunk_size=16"}
    assert stack["blocks"]["m"]["channel_mixer"] == {"type": "glu", "summary": "d_ff=24"}
    assert stack["blocks"]["a"]["channel_mixer"] is None
    assert stack["blocks"]["a"]["mixer"]["type"] == "attention"
    assert found["n_params"] == found["params"]["total"] == sum(found["params"]["by_role"].values())
    assert set(found["state_bytes"]) == {"1024", "65536"}


def test_a_summary_has_the_options_of_parts_inside():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_len": 64}
    block = {
        "type": "sandwich", "shared": True, "norm": {"type": "rms_norm", "unit_offset": True},
        "adapters": {"rank": 2, "on": ["mixer.q_proj", "mixer.v_proj"]}, "residual_scale": 0.5,
        "mixer": {"type": "attention", "n_heads": 2, "position": {"type": "rope", "scaling": scaling}},
    }
    config = LanguageModelConfig(vocab_size=257, d_model=16, pattern="a*2", blocks={"a": block})
    shown = stacks_of(config.build(BuildContext(d_model=0, device=torch.device("meta"))))[0]["blocks"]["a"]
    assert shown["mixer"]["summary"] == "n_heads=2 position=rope(scaling=yarn(factor=4.0 original_max_len=64))"
    words = "adapters=(rank=2 on=[mixer.q_proj, mixer.v_proj]) norm=rms_norm(unit_offset=true) residual_scale=0.5"
    assert (shown["type"], shown["summary"], shown["shared"]) == ("sandwich", words, True)


def test_a_foreign_model_has_no_stacks_and_no_state():
    one = Subject("line", lambda: Line(5, 3), vocab_size=5)
    found = measure_model(one, one.build())
    assert (found["stacks"], found["state_bytes"], found["pattern"]) == ([], None, None)


@pytest.mark.parametrize("length", [1, 2, 6, 7, 8, 100])
def test_state_sizes_equal_states_that_hold_tokens(length):
    model = subject("a w m").build()
    with torch.no_grad():
        ids = torch.randint(257, (1, length))
        roomy = model(ids, state=model.init_state(1, max_len=length)).state
        grown = model(ids, state=model.init_state(1)).state
    size = state_size(model, length)
    assert size["allocated"] == state_bytes(roomy) == state_bytes(grown)
    assert size["used"] == state_bytes(roomy, used=True)
    assert size["kv"] == sum(x.nbytes() for x in leaves(roomy) if isinstance(x, Growing))
    assert size["ring"] == sum(x.nbytes() for x in leaves(roomy) if isinstance(x, Ring))
    assert size["allocated"] == size["per_token"] * length + size["constant"]
    # Two kv heads of 4 channels, keys and values, float32.
    assert size["per_token"] == 2 * 2 * 4 * 4
    assert size["constant"] == size["ring"] + size["recurrent"] + size["conv"]


def test_no_tokens_no_growth():
    model = subject("a w m").build()
    size = state_size(model, 0)
    assert size["kv"] == 0
    assert size["used"] == size["recurrent"] + size["conv"]


def test_a_foreign_state_of_plain_tensors():
    class Own(Line):
        def init_state(self, batch_size, max_len=None):
            return {"kv": torch.zeros(batch_size, max_len or 0, 3), "h": torch.zeros(batch_size, 2)}

    size = state_size(Own(5, 3), 10)
    assert (size["allocated"], size["per_token"], size["constant"], size["other"]) == (128, 12, 8, 128)
