"""Tables against numbers worked out by hand."""

import io
import json

import pytest
from rich.console import Console

from hybridtf.report import compare_table, numbers
from hybridtf.report.detail_tables import extrapolation_table, memory_table, quality_table, speed_table
from hybridtf.report.evidence import gather
from hybridtf.report.fits_table import fits_table
from tests.report import sample

THIN = numbers.THIN


def printed(records: list[dict], width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(compare_table(records).to_rich())
    return out.getvalue()


def test_plain_rows() -> None:
    rows = compare_table(sample.records()).to_rows()
    assert [row["recipe"] for row in rows] == ["attention", "mamba2", "hybrid-3m1a"]
    row = rows[0]
    assert row["n_params"] == 6_290_009
    assert row["n_seeds"] == 1
    assert row["bits_per_byte"] == 2.284
    assert (row["bits_per_byte_low"], row["bits_per_byte_high"]) == pytest.approx((2.253, 2.315))
    assert row["bigram_bits_per_byte"] == 3.391
    assert row["train_tokens_per_s"] == 11_930.0
    assert row["decode_tokens_per_s"] == 402.0
    assert row["peak_train_bytes"] == 210_000_000 + 3 * 25_160_000 + 9_000_000
    assert row["state_bytes_1024"] == 4096 * 1024 + 64
    assert row["state_bytes_65536"] == 4096 * 65536 + 64
    assert row["bits_per_byte_1x"] == 2.284
    assert row["bits_per_byte_4x"] == pytest.approx(2.284 + 2 * 0.52)
    assert row["bits_per_byte_16x"] == pytest.approx(2.284 + 4 * 0.52)
    assert json.loads(json.dumps(rows)) == rows


def test_markdown_has_units_in_heads_and_digits_by_the_interval() -> None:
    text = compare_table(sample.records()).to_markdown()
    head, _, first, second, _ = text.split("\n")[:5]
    assert head.split(" | ")[5:10] == [
        "training (tokens/s)", "decode (tokens/s)", "peak training memory (MB)",
        "state at 1k tokens (MB)", "state at 64k tokens (MB)",
    ]
    # the narrowest spread of a column rounds all of it: 0.029 of a bit leaves three decimals, 142 tokens/s leave tens
    assert [cell.strip() for cell in first.strip("| ").split(" | ")] == [
        "attention", "6.29", "1", "2.284 (2.253\u20132.315)", "3.39", "11,930", "402", "294", "4.19", "268",
        "2.284", "3.324", "4.364",
    ]
    assert second.startswith("| mamba2 | 6.29 | 1 | 2.243 ")
    assert "1 kB = 1,000 bytes" in text
    assert "batch 8 x 512 tokens" in text


@pytest.mark.parametrize("width", [100, 120])
def test_terminal_table_fits(width: int) -> None:
    text = printed(sample.records(), width)
    rows = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, rows)) <= width
    assert max(len(row) for row in rows if row.startswith(("\u2500", "attention", "mamba2", "hybrid"))) <= 100
    names = ("attention", "mamba2", "hybrid-3m1a")
    for word in (*names, "2.284", "2.253\u20132.315", "11,930", "4.364", "2.251", "268", "67.5"):
        assert word in text, word


def test_missing_is_not_run_and_never_zero() -> None:
    records = [r for r in sample.records() if not (r["recipe"] == "mamba2" and r["kind"] in ("speed", "model"))]
    table = compare_table(records)
    row = table.to_rows()[1]
    assert row["train_tokens_per_s"] is None
    assert row["state_bytes_1024"] is None
    assert row["train_tokens_per_s_seeds"] == 0
    assert table.to_markdown().split("\n")[3].count("not run") == 4
    assert "not\n" in printed(records, 120).replace(" ", "\n")


def test_seeds_of_records_without_a_score() -> None:
    records = [sample.train("mamba2", seed) for seed in (0, 1)]
    assert compare_table(records).to_rows()[0]["n_seeds"] == 2


def test_columns_that_nobody_ran_are_named_below() -> None:
    text = printed([sample.quality("mamba2")], 100)
    assert "Not run:" in text
    assert "decode" in text
    assert "2.243" in text


def test_a_true_zero_is_shown_as_zero() -> None:
    record = sample.model("mamba2")
    for size in record["state_bytes"].values():
        size["used"] = 0
    table = compare_table([record])
    assert table.to_rows()[0]["state_bytes_1024"] == 0
    assert table.text(table.rows[0], next(c for c in table.columns if c.key == "state_bytes_1024")) == "0"


def test_several_seeds() -> None:
    records = [sample.quality("mamba2", seed, shift) for seed, shift in ((0, -0.3), (1, 0.0), (2, 0.3))]
    table = compare_table(records)
    row = table.to_rows()[0]
    assert row["n_seeds"] == row["bits_per_byte_seeds"] == 3
    assert row["bits_per_byte"] == pytest.approx(2.243)
    half = 4.302653 * 0.3 / 3**0.5
    assert row["bits_per_byte_high"] == pytest.approx(2.243 + half)
    assert "2.2 (1.5\u20133.0)" in table.to_markdown()


def test_names_are_inert_in_markdown_and_in_the_terminal() -> None:
    record = {**sample.quality("mamba2"), "recipe": "a|b\n<img src=x> [bold]c[/bold] `d`"}
    text = compare_table([record]).to_markdown()
    assert len(text.split("\n")[2].replace("\\|", "").split("|")) == len(text.split("\n")[0].split("|"))
    assert "\\<img" in text
    assert "[bold]" in printed([record], 120).replace("\n", "") or "[bol" in printed([record], 120)


def test_no_records() -> None:
    table = compare_table([])
    assert table.to_rows() == []
    assert "Comparison" in printed([], 100)


def test_detail_tables() -> None:
    evidence = gather(sample.records())
    assert "the spread between the quartiles of the repeats" in speed_table(evidence).to_markdown()
    assert speed_table(gather([sample.quality("mamba2")])).notes == ()
    apart = [{**sample.speed(name, "train"), "session": name} for name in ("mamba2", "attention")]
    assert "From 2 measurements at different times" in " ".join(speed_table(gather(apart)).notes)
    assert "at different times" not in " ".join(speed_table(gather([one | {"session": "a"} for one in apart])).notes)
    speeds = speed_table(evidence).to_rows()
    assert len(speeds) == 3 * 6
    train = next(row for row in speeds if row["recipe"] == "attention" and row["phase"] == "train")
    assert train["matrix_share"] == pytest.approx(100 * 11_930 * 6 * 6.29e6 / 9.1e10)
    assert (train["batch_size"], train["length"]) == (8, 512)
    memory = memory_table(evidence).to_rows()
    assert memory[0]["rest"] is memory[0]["state_used"] is None
    assert memory[0]["longest"] == f"3,391 tokens in 2.00{THIN}GB"
    assert memory[1]["state"] == 0
    assert [row["n_documents"] for row in quality_table(evidence).to_rows()] == [25, 25, 25]
    far = next(row for row in extrapolation_table(evidence).to_rows() if row["ratio"] == "8x")
    assert far["bits_per_byte"] == pytest.approx(2.284 + 3 * 0.52)
    assert (far["length"], far["trained_length"], far["result"]) == (8 * sample.TRAINED, sample.TRAINED, "ok")


def test_refusal_12_every_way_to_have_no_number_keeps_its_word() -> None:
    ended = ("out_of_memory", "timed_out", "non_finite")
    records = []
    for seed, result in enumerate(ended):
        one = {**sample.memory("mamba2"), "recipe": result, "recipe_hash": str(seed), "seed": 0, "result": result}
        records.append(one | dict.fromkeys(("weights", "gradients", "optimizer", "activations", "state", "peak")))
    records.append({**sample.memory("mamba2"), "result": "ok"})
    table = memory_table(gather(records))
    assert [row["peak"] for row in table.to_rows()[:3]] == ["out of memory", "timed out", "not finite"]
    assert table.to_rows()[3]["peak"] > 0
    assert table.to_rows()[3]["rest"] is None  # not run
    text = table.to_markdown()
    for words in ("out of memory", "timed out", "not finite", "not measured"):
        assert words in text


def test_no_mean_hides_a_seed_that_failed() -> None:
    seeds = [{**sample.memory("mamba2"), "seed": seed, "result": "ok"} for seed in range(3)]
    seeds[1] |= {"result": "out_of_memory", "peak": None}
    assert memory_table(gather(seeds)).to_rows()[0]["peak"] == "out of memory in 1 of 3 seeds"


def test_lengths_that_were_tried() -> None:
    row = fits_table(gather([sample.fits("mamba2")])).to_rows()[0]
    assert (row["fits"], row["fails"], row["why"], row["confirmed"], row["trials"]) == (3391, 3440, "out of memory", "yes", 11)
    nothing = {**sample.fits("mamba2"), "fits": None, "fails": {"length": 1, "outcome": "timed_out"}}
    assert fits_table(gather([nothing])).to_rows()[0]["fits"] == "none: timed out"
    most = {**sample.fits("mamba2"), "fails": None}
    assert fits_table(gather([most])).to_rows()[0]["fails"] == "none tried"
    with_memory = memory_table(gather([sample.memory("mamba2"), sample.fits("mamba2")])).to_rows()[0]
    assert with_memory["longest"] == f"3,391 to 3,440 tokens in 2.00{THIN}GB (out of memory)"
    predicted = sample.memory("mamba2")
    predicted["longest"] |= {"predicted": True, "length": None}
    assert memory_table(gather([predicted])).to_rows()[0]["longest"] == f"no length in 2.00{THIN}GB, predicted"


@pytest.mark.parametrize(
    ("value", "half", "text"),
    [
        (2.28449, 0.031, "2.284"), (2.28449, 0.041, "2.28"), (2.28449, None, "2.28"), (12345.6, 179.0, "12,350"),
        (12345.6, 800.0, "12,300"), (0.0, None, "0"), (0.000123456, None, "0.000123"),
        (5.0, 0.0, "5.00"),
    ],
)  # fmt: skip
def test_digits(value: float, half: float | None, text: str) -> None:
    assert numbers.digits(value, half) == text


def test_units() -> None:
    assert numbers.in_bytes(999) == f"999{THIN}B"
    assert numbers.in_bytes(1000) == f"1.00{THIN}kB"
    assert numbers.in_bytes(67_548_264) == f"67.5{THIN}MB"
    assert numbers.byte_unit([10.0, 2e9]) == ("GB", 1e9)
    assert numbers.byte_unit([]) == ("B", 1.0)


def test_a_task_that_is_no_text_has_its_own_measure_and_kinds_of_rows() -> None:
    records = [sample.recall("attention", 0.61, 0.31), sample.recall("mamba2", 0.24)]
    first, second = compare_table(records).to_rows()
    assert (first["accuracy"], first["own_value_accuracy"]) == (0.61, 0.0729)
    assert (first["accuracy: 256 tokens, 32 pairs"], second["accuracy: 256 tokens, 32 pairs"]) == (0.31, 0.24)
    heads = [column.head for column in compare_table(records).columns]
    assert "held-out accuracy (95 %)" in heads
    assert not [head for head in heads if "bits/byte" in head]
    assert "bits/byte at 4x" in [column.head for column in compare_table([sample.quality("attention")]).columns]
    row = quality_table(gather(records)).to_rows()[0]
    assert (row["task"], row["metric"], row["baseline"]) == ("mqar", "accuracy (higher is better)", "own value")


def test_two_tasks_are_told_apart_and_the_common_one_is_compared() -> None:
    records = [sample.quality("attention"), sample.quality("mamba2"), sample.recall("attention", 0.61)]
    assert [row["bits_per_byte"] for row in compare_table(records).to_rows()] == [2.284, 2.243]
    assert [row["task"] for row in quality_table(gather(records)).to_rows()] == ["sotu", "mqar", "sotu"]


def test_rows_beyond_the_trained_length_and_the_claim_they_bear_out() -> None:
    def measured(task: str, n_rows: int) -> dict[str, object]:
        entry = {"length": 256, "ratio": 4, "accuracy": 0.97, "interval": [0.95, 0.99], "n_rows": n_rows, "chance": 0.1}
        entry["result"] = "ok"
        failed = {**entry, "length": 512, "ratio": 8, "accuracy": None, "interval": None, "result": "out_of_memory"}
        collapse = {"length": 512, "ratio": 8, "why": "of a reason"}
        return sample.common(
            "extrapolation", "mamba2", 0, protocol="rows", task=task, model_hash="ab", trained_length=64,
            by_length=[entry, failed], grid=None, collapse=collapse, note=None,
        )

    table = extrapolation_table(gather([measured("mqar", 120), measured("needles", 200)]))
    near, far = [row for row in table.to_rows() if row["task"] == "mqar"]
    assert (near["trained_length"], near["length"], near["ratio"]) == (64, 256, "4x")
    assert (near["accuracy"], near["chance"]) == (0.97, 0.1)
    assert (far["accuracy"], far["result"]) == (None, "out of memory")
    claim = "mamba2: answers at least 85.6 % right at 256 tokens, 4 times the trained length of 64, on mqar and needles"
    assert any(note.startswith(claim) for note in table.notes)
    assert "mamba2: collapsed at 512 tokens (8x the trained length): of a reason" in table.notes
    few = extrapolation_table(gather([measured("mqar", 99), measured("needles", 200)]))
    assert "fewer than 100 rows at 256 tokens, 4 times the trained length" in few.notes[-1]
