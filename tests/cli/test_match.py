"""``match``: what it prints and writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

from hybridtf.core import BuildContext
from hybridtf.recipe import load_recipe
from hybridtf.train import train_config
from tests.cli.helpers import as_json, ok, refused, run

TWO = ("demo/hybrid", "hybrids/lstm")


def test_recipes_are_written_at_the_sizes_found(tmp_path: Path) -> None:
    found = as_json("match", *TWO, "--params", "1.5M", "-o", str(tmp_path / "out"))
    for source, row in zip(TWO, found, strict=True):
        assert (row["name"], row["asked"], row["within"]) == (source, 1_500_000, True)
        before, after = load_recipe(source), load_recipe(row["file"])
        model = after.model.build(BuildContext(d_model=0))
        assert sum(p.numel() for p in model.parameters()) == row["found"]
        assert row["error"] == row["found"] / 1_500_000 - 1
        assert after.task == before.task
        assert train_config(after) == train_config(before)
        assert "1,500,000 parameters" in after.meta.title
        assert after.model.d_model == row["d_model"]  # type: ignore[attr-defined]


def test_the_table_says_what_was_asked_and_found() -> None:
    out = ok("match", *TWO, "--state-bytes", "256KiB", "--length", "512").stdout
    assert "bytes of state at 512 tokens" in out
    assert all(name in out for name in (*TWO, "262,144"))


def test_no_size_within_a_hundredth_ends_with_1(tmp_path: Path) -> None:
    """Channel mixers taken away, only whole heads are left to change."""
    bare = tmp_path / "bare.toml"
    bare.write_text(
        '[model]\ntype = "language_model"\nvocab_size = 11\nd_model = 64\npattern = "m"\n'
        '[model.blocks.m]\nmixer = { type = "mamba2" }\n'
    )
    result = run("match", str(bare), "--params", "50k", "-o", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "nearest below" in result.stdout
    assert "nearest above" in result.stdout
    assert not (tmp_path / "out").exists()


def test_refusals(tmp_path: Path) -> None:
    assert "exactly one of --params, --flops and --state-bytes" in refused("match", "demo/hybrid")
    assert "2 were given" in refused("match", "demo/hybrid", "--params", "1M", "--flops", "1M")
    assert "--params many: is no number" in refused("match", "demo/hybrid", "--params", "many")
    assert "demo/hybrid: 10 parameters are out of reach" in refused("match", "demo/hybrid", "--params", "10")
    assert "two recipes would be written to one file" in refused(
        "match", "demo/hybrid", "demo/hybrid", "--params", "1M", "-o", str(tmp_path)
    )
