"""``surgery`` from the command line."""

from __future__ import annotations

import pytest
import torch

from hybridtf.train import load_run
from tests.cli.helpers import as_json, ok, refused

TABLE = '{ type = "gated_delta_net", chunk_size = 16 }'


def test_a_run_becomes_a_model_folder(trained, tmp_path):
    found = as_json("surgery", trained, "-o", tmp_path / "new", "--layers", "3", "--mixer", TABLE, "--seed", 3)
    assert found["pattern"] == "m a m a_gated_delta_net"
    layer = found["layers"]["3"]
    assert (layer["mixer"], layer["taken"]) == ("gated_delta_net", {"n_heads": 4, "head_dim": 4, "v_dim": 4})
    assert {"tensor": "k_proj.weight", "fate": "reshaped", "n": 256, "how": "each of 2 heads 2 times"} in layer["pieces"]
    assert layer["in_the_way"][-1] == "gate_proj.weight (multiplies what goes out)"
    assert layer["left_behind"]["position"]["type"] == "rope"
    assert found["teacher_left_out"] is None
    old, new = load_run(trained), load_run(tmp_path / "new")
    counts = found["counts"]
    assert sum(p.numel() for p in new.model.parameters()) == counts["kept"] + counts["reshaped"] + counts["fresh"]
    assert new.recipe.task == old.recipe.task
    assert new.recipe.train == old.recipe.train
    part = "stack.layers.3.mixer.q_proj.weight"
    assert torch.equal(new.model.get_parameter(part), old.model.get_parameter(part))
    assert new.model.stack.layers["3"].mixer.config.chunk_size == 16
    teacher = f'train.teacher = {{ run = "{trained}", given = "teacher", trains = "replaced" }}'
    ok("train", tmp_path / "new" / "recipe.toml", "-o", tmp_path / "run", "--from", tmp_path / "new", "--set", teacher)
    learnt = load_run(tmp_path / "run").model
    moved = {name for name, p in learnt.named_parameters() if not torch.equal(p, new.model.get_parameter(name))}
    assert moved
    assert all(name.startswith("stack.layers.3.mixer.") for name in moved)
    said = ok("surgery", tmp_path / "run", "-o", tmp_path / "third", "--layers", "1", "--mixer", "delta_net").stdout
    assert "left out of the recipe: train.teacher, which was" in said
    assert load_run(tmp_path / "third").recipe.train.teacher is None


def test_what_a_person_sees(trained, tmp_path):
    said = ok("surgery", trained, "-o", tmp_path / "new", "--layers", "every 2 from 1", "--mixer", "linear_attention").stdout
    assert "layers 1, 3: linear_attention" in said
    assert 'position = {"type": "rope"' in said
    assert "pattern (m a)*2;" in said
    assert f"written: {tmp_path / 'new'}" in said
    fewer = ok("surgery", trained, "-o", tmp_path / "mqa", "--layers", "1,3", "--n-kv-heads", 1).stdout
    assert "mean of 2 heads each" in fewer
    assert not any(word in fewer for word in ("taken", "left behind", "in the way"))
    gone = ok("surgery", trained, "-o", tmp_path / "bent", "--layers", "1", "--mixer", "delta_net").stdout
    assert 'left behind, of the replaced mixer: position = {"type": "rope"' in gone
    assert "in the way of what was kept: conv.q (each token itself, then silu)" in gone
    ok("eval", tmp_path / "mqa", "--max-tokens", 32)


@pytest.mark.parametrize(("options", "why"), [
    (["--layers", "4", "--mixer", "delta_net"], "the model has layers 0 to 3, and not all of these"),
    (["--layers", "odd", "--mixer", "delta_net"], "'odd' is none of"),
    (["--layers", "1", "--mixer", "delta_nett"], "--mixer delta_nett: no mixer named 'delta_nett'. Did you mean 'delta_net'?"),
    (["--layers", "1", "--mixer", "swiglu"], "--mixer swiglu: no mixer named 'swiglu', which is a channel mixer. Known: "),
    (["--layers", "1", "--mixer", "{ type = delta_net }"], "--mixer { type = delta_net }: is no TOML table, as "),
    (["--layers", "1", "--mixer", "{ type = delta_net }"], "is one: Invalid value (at line 1, column 10)"),
    (["--layers", "1", "--mixer", "{ n_heads = 2 }"], "--mixer { n_heads = 2 }: the table needs a type"),
    (
        ["--layers", "1", "--mixer", '{ type = "delta_net", n_hedz = 2 }'],
        """--mixer { type = "delta_net", n_hedz = 2 }: layer 1: n_hedz: unknown option""",
    ),
    (
        ["--layers", "1", "--mixer", '{ type = "performer", n_heads = 5 }'],
        """--mixer { type = "performer", n_heads = 5 }: model.blocks.a_performer.mixer: """,
    ),
    (["--layers", "1", "--mixer", '{ type = "performer", n_heads = 5 }'], "does not divide into n_heads = 5 heads"),
    (["--layers", "1", "--n-kv-heads", "3"], "--n-kv-heads 3: layer 1: n_heads = 4 is not divisible by n_kv_heads = 3"),
    (["--layers", "0", "--n-kv-heads", "2"], "n_kv_heads: unknown option"),
    (["--layers", "1", "--mixer", "delta_net", "--leave", "softcap"], "would take no 'softcap' from the old ones"),
    (["--layers", "1"], "give --mixer, --n-kv-heads or both"),
])
def test_wrong_input_is_one_line_and_nothing_is_written(trained, tmp_path, options, why):
    assert why in refused("surgery", trained, "-o", tmp_path / "new", *options)
    assert list(tmp_path.iterdir()) == []


def test_folders(trained, tmp_path):
    options = ["--layers", "1", "--mixer", "delta_net"]
    assert "no such folder" in refused("surgery", tmp_path / "nowhere", "-o", tmp_path / "new", *options)
    assert "is there already" in refused("surgery", trained, "-o", trained, *options)
    assert list(tmp_path.iterdir()) == []
