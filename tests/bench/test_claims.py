"""A claim about long rows is refused where the records do not bear it out, with the reason."""

import pytest

from hybridtf.bench.claims import ClaimError, long_context_claim

DEPTHS = [i / 10 for i in range(10)]


def record(task="needles", *, trained=64, at=(64, 128, 256), accuracy=(1.0, 0.99, 0.95), n=200, depths=10, **more):
    by_length = [
        {
            "length": length, "ratio": length / trained, "accuracy": a, "interval": [a - 0.03, min(a + 0.03, 1)], "n_rows": n,
            "result": "ok",
        }
        for length, a in zip(at, accuracy, strict=False)
    ]
    counts = [[n // depths if i < depths else 0 for i in range(10)] for _ in at]
    grid = {"lengths": list(at), "depths": DEPTHS, "accuracy": [], "n": counts}
    return {
        "kind": "extrapolation", "protocol": "rows", "task": task, "model_hash": "0ab1", "recipe": f"runs/{task}",
        "trained_length": trained, "by_length": by_length, "grid": grid, **more,
    }


def test_refusal_11_a_long_context_claim_needs_two_tasks_two_depths_a_hundred_rows_and_lengths_past_the_trained():
    def refused(*records, why):
        with pytest.raises(ClaimError, match=why):
            long_context_claim(records)

    refused(why="no task of drawn rows was measured")
    refused(record(), why="only 'needles' was measured, and one task .* does not tell")
    refused(record(), record(), why="only 'needles' was measured")  # measured twice is one task
    refused(record(), record("mqar", depths=1), why="'mqar' was asked at one depth alone at 128 tokens")
    refused(record(), record("mqar", n=99), why=r"fewer than 100 rows at 128 tokens, 2 times .* \('mqar' has 99\)")
    refused(record(at=(32, 64)), record("mqar"), why="no length past the trained 64 tokens was measured on all tasks")
    refused(record(at=(64, 512)), record("mqar"), why="no length past the trained 64 tokens")  # none that both have
    refused(record(), record("mqar", model_hash="a"), why="records are of several models: runs/mqar, runs/needles")
    refused(record(model_hash=None), record("mqar", model_hash=None), why="of several models")
    refused(record(), record("mqar", accuracy=(1.0, 0.5)), why="at 128 tokens, 2 times .* 'mqar' is surely right for 47.0 %")


def test_whole_answers_are_what_a_claim_is_about_where_the_task_is_compared_by_them():
    """Nearly all tokens are right, and half the answers."""
    text = record("passkey_text", metric="answer_accuracy")
    with pytest.raises(ClaimError, match="no length past the trained"):
        long_context_claim([record(), text])  # of an older record, whose answers were not measured
    for entry in text["by_length"]:
        entry |= {"answer_accuracy": 0.5, "answer_interval": [0.4, 0.6]}
    with pytest.raises(ClaimError, match=r"'passkey_text' is surely right for 40\.0 % alone"):
        long_context_claim([record(), text])
    for entry in text["by_length"]:
        entry |= {"answer_accuracy": 0.99, "answer_interval": [0.97, 1.0]}
    assert long_context_claim([record(), text]).length == 256


def test_what_the_records_bear_out_is_said_with_the_trained_length_and_the_ratio():
    claim = long_context_claim([record(), record("mqar", n=150)])
    assert (claim.length, claim.trained, claim.ratio, claim.tasks, claim.n_rows) == (256, 64, 4, ("mqar", "needles"), 150)
    assert str(claim) == (
        "answers at least 85.6 % right at 256 tokens, 4 times the trained length of 64, on mqar and needles "
        "(150 rows or more a task)"
    )


def test_the_lower_end_of_the_interval_counts_and_a_gap_ends_the_claim():
    short = long_context_claim([record(), record("mqar", accuracy=(1.0, 0.95, 0.87))])
    assert short.length == 128  # 0.87 may be 0.84
    weak = record("mqar", at=(64, 128, 256, 512), accuracy=(1.0, 0.95, 0.5, 0.99))
    both = [record(at=(64, 128, 256, 512), accuracy=(1, 1, 1, 1)), weak]
    assert long_context_claim(both).length == 128
    assert long_context_claim(both, threshold=0.4).length == 512


def test_the_longest_trained_length_counts_and_loss_is_no_claim():
    claim = long_context_claim([record(), record("mqar", trained=128, at=(128, 256), accuracy=(1.0, 1.0))])
    assert (claim.trained, claim.length, claim.ratio) == (128, 256, 2)
    with pytest.raises(ClaimError, match="only 'needles'"):
        long_context_claim([record(), {**record("text"), "protocol": "documents"}])


def test_every_seed_must_bear_it_out():
    seeds = [record("mqar", seed=0), record("mqar", seed=1, accuracy=(1.0, 0.95, 0.2))]
    assert long_context_claim([record(), *seeds]).length == 128
    assert long_context_claim([record(), seeds[1], {**seeds[0], "seed": 1}]).length == 256  # measured again


def test_few_rows_further_out_end_the_claim_before_them():
    few = record("mqar")
    few["by_length"][2]["n_rows"] = 10
    assert long_context_claim([record(), few]).length == 128
