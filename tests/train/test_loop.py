import math
import signal
import threading

import pytest
import torch

from hybridtf.core import CheckpointError, ConfigError, DataError, LengthError, RecipeError
from hybridtf.recipe import parse_recipe
from hybridtf.train import Interrupted, Terminated, TrainConfig, evaluate, load_run, planned_steps, read_log, save_model
from tests.train.runs import assert_equal_weights, build, recipe, run, table, task


def test_a_tiny_corpus_is_learned_by_heart(tmp_path):
    made = recipe(tmp_path, model={"d_model": 24}, steps=120, batch_size=4, lr=2e-2, eval_tokens="all")
    losses = []
    result = run(made, tmp_path / "out", on_step=lambda step: losses.append(step.loss))
    assert losses[0] > 5
    # The texts repeat one sentence, so that the held-out ones are as easy.
    assert result.evaluation.bits_per_byte < 0.8
    assert result.evaluation.bits_per_byte < task(made).baselines()["bigram"] / 2


def test_the_log_line(tmp_path):
    made = recipe(tmp_path, steps=5, log_every=2, lr=0.5, warmup=4, schedule="constant", eval_every=4, eval_tokens=40)
    seen = []
    result = run(made, tmp_path / "out", on_step=seen.append)
    lines = list(read_log(tmp_path / "out" / "log.jsonl"))
    order = [("train", 2), ("train", 4), ("eval", 4), ("train", 5), ("eval", 5)]
    assert [(x["event"], x["step"]) for x in lines] == order
    first = lines[0]
    assert set(first) == {
        "event", "step", "tokens", "loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_second", "seconds",
    }
    tokens = seen[0].n_tokens + seen[1].n_tokens
    assert first["tokens"] == tokens
    mean = (seen[0].loss * seen[0].n_tokens + seen[1].loss * seen[1].n_tokens) / tokens
    assert first["loss"] == pytest.approx(mean, rel=1e-6)
    assert first["bits_per_byte"] == pytest.approx(first["loss"] / math.log(2))
    assert (first["lr"], first["grad_norm"]) == (0.25, seen[1].norm)
    assert lines[-1]["bits_per_byte"] == result.evaluation.bits_per_byte
    assert (result.steps, result.tokens) == (5, sum(step.n_tokens for step in seen))
    assert (tmp_path / "out" / "recipe.toml").is_file()


def test_the_steps_are_those_of_a_loop_by_hand(tmp_path):
    options = {"schedule": "constant", "warmup": 0, "optimizer_form": "loop", "weight_decay": 0.0}
    made = recipe(tmp_path, steps=3, accumulation=2, **options)
    result = run(made, tmp_path / "out")
    model = build(made)
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    stream = task(made).train_batches(2, 32)
    for _ in range(3):
        optimizer.zero_grad()
        batches = [next(stream), next(stream)]
        for batch in batches:
            total = model.loss(batch.inputs, batch.targets, batch.segments).total
            (total / sum(b.n_tokens for b in batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for a, b in zip(result.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_how_long_a_run_is(tmp_path):
    made = recipe(tmp_path)
    stream = task(made).train_batches(2, 32)
    rows = stream.rows_in_epoch
    assert planned_steps(TrainConfig(tokens=1, batch_size=2, seq_len=32), stream) == 1
    assert planned_steps(TrainConfig(tokens=641, batch_size=2, seq_len=32, accumulation=2), stream) == 6
    assert planned_steps(TrainConfig(epochs=2, batch_size=2), stream) == math.ceil(2 * rows / 2)
    assert planned_steps(TrainConfig(epochs=0.5, batch_size=1), stream) == math.ceil(rows / 2)
    with pytest.raises(ConfigError, match="has no epochs; give steps or tokens"):
        planned_steps(TrainConfig(epochs=1), iter(()))


def test_evaluation_with_a_carried_state(tmp_path):
    made = recipe(tmp_path, eval_tokens=60, eval_context="document")
    result = run(made, tmp_path / "out")
    expected = evaluate(result.model, task(made), seq_len=32, batch_size=2, max_tokens=60, context="document")
    assert result.evaluation == expected
    assert run(recipe(tmp_path), tmp_path / "none").evaluation is None


# -- from weights ------------------------------------------------------------------------------------------------------


def test_fine_tuning_starts_from_the_weights_with_a_fresh_optimizer(tmp_path):
    first = run(recipe(tmp_path), tmp_path / "first")
    starts = []
    other = recipe(tmp_path, steps=2, lr=1e-9, warmup=0, batch_size=3, seq_len=16)
    for source in ("first", "first/checkpoints/step-00000006"):
        tuned = run(other, tmp_path / f"tuned{len(starts)}", init_from=tmp_path / source)
        starts.append(tuned)
        for a, b in zip(tuned.model.parameters(), first.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-7)
        assert tuned.steps == 2
    save_model(first.model, first.recipe, tmp_path / "model")
    starts.append(run(other, tmp_path / "tuned2", init_from=tmp_path / "model"))
    assert_equal_weights(starts[0].model, starts[2].model)
    assert load_run(tmp_path / "tuned0", step=2).recipe.train.batch_size == 3


def test_fine_tuning_is_resumed_like_any_run(tmp_path):
    run(recipe(tmp_path), tmp_path / "first")
    other = recipe(tmp_path, steps=4, save_every=1)
    whole = run(other, tmp_path / "whole", init_from=tmp_path / "first")

    def interrupt(report):
        if report.step == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        run(other, tmp_path / "parts", init_from=tmp_path / "first", on_step=interrupt)
    assert_equal_weights(run(None, tmp_path / "parts", resume=True).model, whole.model)


def test_weights_that_do_not_fit_are_named(tmp_path):
    run(recipe(tmp_path, steps=1), tmp_path / "first")
    with pytest.raises(CheckpointError, match=r"does not fit the model: .*has shape \(8,\), the model's is \(16,\)"):
        run(recipe(tmp_path, model={"d_model": 16}), tmp_path / "out", init_from=tmp_path / "first")
    with pytest.raises(CheckpointError, match="no such folder"):
        run(recipe(tmp_path), tmp_path / "out", init_from=tmp_path / "frist")
    assert not (tmp_path / "out").exists()


def test_weights_of_another_model_are_told_by_layers_with_the_recipe_that_fits(tmp_path):
    run(recipe(tmp_path, steps=1, model={"pattern": "m a a"}), tmp_path / "first")
    folder = tmp_path / "first"

    def refusal(**model):
        with pytest.raises(CheckpointError) as caught:
            run(recipe(tmp_path, model={"pattern": "m a a", **model}), tmp_path / "out", init_from=folder)
        return str(caught.value)

    blocks = recipe(tmp_path).model.to_dict()["blocks"]
    said = refusal(blocks={**blocks, "m": {"mixer": {"type": "gru"}}})
    assert f"{folder}: holds another model than the recipe asks for: layer 0 has the mixer mamba2 there, and gru in the" in said
    assert f"The recipe that fits it is {folder / 'recipe.toml'}. (" in said
    blocks["a"]["mixer"]["n_kv_heads"] = 2
    assert "layers 1, 2 have the mixer attention with n_kv_heads = 1 there, and 2 in the recipe. The" in refusal(blocks=blocks)
    assert "model.d_model is 8 there, and 16 in the recipe. The recipe" in refusal(d_model=16)
    (folder / "recipe.toml").unlink()
    assert f"The recipe that fits it is {folder / 'checkpoints' / 'step-00000001' / 'recipe.toml'}. (" in refusal(d_model=16)


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


def test_the_handler_of_before_comes_back(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    run(recipe(tmp_path, steps=1), tmp_path / "out")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    def twice(report):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(recipe(tmp_path), tmp_path / "out", on_step=twice)
    assert signal.getsignal(signal.SIGINT) is before
    assert load_run(tmp_path / "out").step == 0


def test_ctrl_c_in_the_last_evaluation_keeps_the_finished_run(tmp_path, monkeypatch):
    import hybridtf.train.run as run_module

    real = run_module.evaluate

    def interrupted(*args, on_batch, **options):
        signal.raise_signal(signal.SIGINT)
        return real(*args, on_batch=on_batch, **options)

    monkeypatch.setattr(run_module, "evaluate", interrupted)
    with pytest.raises(Interrupted, match="after step 6"):
        run(recipe(tmp_path, eval_tokens="all"), tmp_path / "out")
    monkeypatch.undo()
    assert run(None, tmp_path / "out", resume=True).evaluation is not None


def test_sigterm_finishes_the_step_and_saves(tmp_path):
    def terminate(report):
        if report.step == 3:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated, match=r"terminated after step 3; saved .*step-00000003") as caught:
        run(recipe(tmp_path), tmp_path / "out", on_step=terminate)
    assert caught.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert load_run(tmp_path / "out").step == 3
    whole = run(recipe(tmp_path), tmp_path / "whole")
    assert_equal_weights(run(None, tmp_path / "out", resume=True).model, whole.model)


def test_a_second_sigterm_ends_at_once(tmp_path):
    def twice(report):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        run(recipe(tmp_path), tmp_path / "out", on_step=twice)
    assert caught.value.code == 143
    assert load_run(tmp_path / "out").step == 0


def test_training_in_another_thread(tmp_path):
    made, results = recipe(tmp_path), []

    def work():
        torch.set_num_threads(1)
        results.append(run(made, tmp_path / "out"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results[0].steps == 6


# -- wrong input -------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_said(tmp_path):
    given = table(tmp_path)
    with pytest.raises(RecipeError, match=r"no section \[task\]"):
        run(parse_recipe({"model": given["model"], "train": given["train"]}), tmp_path / "out")
    with pytest.raises(RecipeError, match=r"no section \[train\]"):
        run(parse_recipe({"model": given["model"], "task": given["task"]}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_that_is_too_small_is_said_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 256 is less than the 257 ids of the task 'text'"):
        run(recipe(tmp_path, model={"vocab_size": 256}), tmp_path / "out")


def test_a_context_that_the_task_lacks_is_said_before_the_run(tmp_path):
    given = {**table(tmp_path), "task": {"type": "mqar_small"}}
    given["train"] = {**given["train"], "seq_len": 64, "eval_context": "document"}
    with pytest.raises(ConfigError, match="eval_context = 'document': the task 'mqar' has no documents; use 'window'"):
        run(parse_recipe(given), tmp_path / "out")
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_file_as_the_folder_of_a_run(tmp_path, resume):
    (tmp_path / "t.toml").write_text("mine")
    with pytest.raises(CheckpointError, match=r"t\.toml: is a file; give a folder$"):
        run(recipe(tmp_path), tmp_path / "t.toml", resume=resume)
    assert (tmp_path / "t.toml").read_text() == "mine"


def test_a_layer_or_loss_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="checkpoint_layers names layer 7"):
        run(recipe(tmp_path, checkpoint_layers=[7]), tmp_path / "out")
    with pytest.raises(ConfigError, match="no loss named 'router'"):
        run(recipe(tmp_path, loss_weights={"router": 1.0}), tmp_path / "out")


def test_rows_longer_than_a_learned_position_table(tmp_path):
    model = {"max_seq_len": 16, "stem": {"type": "token_embedding", "position": {"type": "learned"}}}
    with pytest.raises(LengthError):
        run(recipe(tmp_path, model=model), tmp_path / "out")


def test_an_empty_corpus(tmp_path):
    made = recipe(tmp_path)
    for text in (tmp_path / "texts").iterdir():
        text.unlink()
    with pytest.raises(DataError):
        run(made, tmp_path / "out")


@pytest.mark.slow
def test_a_compiled_run_is_close_to_an_eager_one(tmp_path):
    losses = {}
    for compiled in (False, True):
        seen = losses[compiled] = []
        made = recipe(tmp_path, steps=4, compile=compiled, eval_tokens=60)
        run(made, tmp_path / str(compiled), on_step=lambda step, seen=seen: seen.append(step.loss))
    assert losses[True] == pytest.approx(losses[False], rel=0.05)
    assert load_run(tmp_path / "True").step == 4
