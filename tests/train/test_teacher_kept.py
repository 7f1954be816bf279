"""What a teacher leaves as it was, what it is refused for, and what a window of several forward passes weighs."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from hybridtf.core import BuildContext, CheckpointError, ConfigError, HybridTFError, NonFiniteError
from hybridtf.recipe import parse_recipe
from hybridtf.surgery import replace_mixers
from hybridtf.tasks import IGNORE, TextConfig
from hybridtf.train import TeacherOptions, TrainConfig, load_run, read_log, save_model, train
from hybridtf.train.checkpoint import read_trainer_state
from hybridtf.train.precision import make_scaler
from hybridtf.train.step import accumulate, after_step
from hybridtf.train.teachable import check_tokenizers
from hybridtf.train.teacher import Teacher
from tests.train.runs import build, recipe, run, settings, table, task
from tests.train.test_resume import ctrl_c_at

CPU = torch.device("cpu")
ATTENTION = {"type": "gqa", "n_heads": 2, "n_kv_heads": 1}
MOE = {"type": "moe", "d_ff": 4, "n_experts": 4, "top_k": 2, "balance_loss": 0.5, "selection_bias": "balanced"}
BLOCKS = {"a": {"mixer": ATTENTION, "channel_mixer": {"type": "swiglu", "d_ff": 16}}}


def made_of(tmp_path, blocks=None, pattern="a a"):
    """A model folder in float64, and its recipe."""
    made = recipe(tmp_path, model={"pattern": pattern, "blocks": blocks or BLOCKS})
    save_model(build(made, torch.float64), made, tmp_path / "teacher")
    return made


def operated(tmp_path, made, mixer="delta_net", layers=(1,)):
    return replace_mixers(load_run(tmp_path / "teacher").model, made, layers, mixer).model.train()


def beside(tmp_path, student, **options):
    return Teacher(TeacherOptions(run=str(tmp_path / "teacher"), **options), student)


def window(made):
    """Two forward passes: few tokens of the first are scored, and the second has no pads."""
    batches = task(made).train_batches(2, 32)
    first, second = next(batches), next(batches)
    first.targets[:, 4:] = IGNORE
    first.targets[1] = IGNORE
    assert (first.targets != IGNORE).any()
    return [replace(one, n_tokens=int((one.targets != IGNORE).sum())) for one in (first, second)]


def gradient(student, teacher, batches, **options):
    student.zero_grad()
    sums = accumulate(student, batches, settings(**options), make_scaler("fp32", CPU), CPU, teacher)
    return sums, {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("options", [{"given": "teacher"}, {"hidden": 0.5, "logits": 2.0, "loss": 0.25}])
def test_a_window_is_one_mean_over_its_tokens_and_no_mean_of_means(tmp_path, options):
    made = made_of(tmp_path)
    student = operated(tmp_path, made)
    teacher, batches = beside(tmp_path, student, **options), window(made)
    sums, got = gradient(student, teacher, batches)
    student.zero_grad()
    found = [teacher.loss(student, batch) for batch in batches]
    n_scored, n_real = sum(b.n_tokens for b in batches), sum(int(b.segments.real.sum()) for b in batches)
    if "given" in options:
        total = sum(one.total for one in found) / n_real
        assert sums.loss == pytest.approx(float(total.detach()), rel=1e-10)
    else:
        nats, hidden, logits = (sum(x) for x in zip(
            *((one.total, one.losses["teacher_hidden"][0], one.losses["teacher_logits"][0]) for one in found), strict=True
        ))
        total = 0.25 * nats / n_scored + 0.5 * hidden / n_real + 2.0 * logits / n_scored
    total.backward()
    for name, p in student.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(got[name], p.grad, msg=name)


def test_a_pass_of_pads_alone_teaches_nothing(tmp_path):
    made = made_of(tmp_path)
    student = operated(tmp_path, made)
    batch = next(task(made).train_batches(2, 32))
    empty = replace(batch, segments=replace(batch.segments, ids=torch.full_like(batch.segments.ids, -1)), n_tokens=0)
    empty.targets[:] = IGNORE
    assert not empty.segments.real.any()
    for given in ("teacher", "student"):
        sums, grads = gradient(student, beside(tmp_path, student, given=given), [empty])
        assert sums.finite()
        assert all(not grad.any() for grad in grads.values())


@pytest.mark.parametrize("mixer", [
    {"type": "lora", "mixer": ATTENTION, "rank": 2, "on": ["q_proj"]}, {"type": "performer", "n_heads": 2, "n_features": 4},
])
def test_what_never_learns_does_not_learn_of_a_teacher(tmp_path, mixer):
    made = made_of(tmp_path)
    student = operated(tmp_path, made, mixer)
    before = {name for name, p in student.named_parameters() if p.requires_grad and ".1.mixer." in name}
    still = {name for name, p in student.named_parameters() if not p.requires_grad}
    assert still
    beside(tmp_path, student, trains="replaced")
    assert {name for name, p in student.named_parameters() if p.requires_grad} == before
    assert not before & still


def test_routers_of_frozen_layers_stay_as_they_are(tmp_path):
    made = made_of(tmp_path, {"a": {"mixer": ATTENTION, "channel_mixer": MOE}})
    batch = next(task(made).train_batches(2, 32))
    for trains, moves in (("all", True), ("replaced", False)):
        student = operated(tmp_path, made)
        teacher = beside(tmp_path, student, trains=trains)
        gradient(student, teacher, [batch])
        after_step(*teacher.learning)
        assert student.stack.layers["0"].channel_mixer.selection.bias.any().item() is moves


def test_layers_alone_keep_their_own_losses(tmp_path):
    made = made_of(tmp_path, {"a": {"mixer": ATTENTION, "channel_mixer": MOE}})
    student, batch = operated(tmp_path, made), next(task(made).train_batches(2, 32))
    teacher = beside(tmp_path, student, given="teacher")
    sums, with_it = gradient(student, teacher, [batch])
    assert sums.means()["balance"] > 0
    _, without = gradient(student, teacher, [batch], loss_weights={"balance": 0.0})
    router = next(name for name in with_it if name.startswith("stack.layers.1.") and "router" in name)
    assert not torch.equal(with_it[router], without[router])


def test_layers_alone_are_computed_again_where_that_is_asked_for(tmp_path):
    made = made_of(tmp_path)
    student, batch = operated(tmp_path, made, layers=(0, 1)), next(task(made).train_batches(2, 32))
    teacher = beside(tmp_path, student, given="teacher")
    calls = []
    student.stack.layers["1"].mixer.register_forward_hook(lambda *_: calls.append(1))
    _, whole = gradient(student, teacher, [batch])
    student.stack.checkpointed = frozenset({1})
    _, again = gradient(student, teacher, [batch])
    assert len(calls) == 1 + 2
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_the_teacher_drops_nothing_and_the_student_does(tmp_path):
    made = made_of(tmp_path, {"a": {**BLOCKS["a"], "dropout": 0.5}})
    student, batch = operated(tmp_path, made), next(task(made).train_batches(2, 32))
    teacher = beside(tmp_path, student, layers="all")
    for training in (True, False):
        student.train(training)
        one, other = (teacher.loss(student, batch) for _ in range(2))
        for name in ("teacher_hidden", "teacher_logits"):
            assert torch.equal(one.losses[name][0], other.losses[name][0]) is not training


def test_the_teacher_reads_with_the_tokenizer_of_the_task(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    letters = {chr(65 + i): i for i in range(20)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="A")).save(str(tmp_path / "words.json"))
    made = made_of(tmp_path)
    words = TextConfig(source="x", tokenizer=str(tmp_path / "words.json"))
    assert check_tokenizers("it", made.task, made.task) == ""
    assert "does not say which tokenizer" in check_tokenizers("it", None, made.task)
    with pytest.raises(ConfigError, match=r"the tokenizer of it \('bytes', a document starts with 256\) differs from that of"):
        check_tokenizers("it", made.task, words)
    with pytest.raises(ConfigError, match="differs"):
        check_tokenizers("it", words, replace_bos(words))
    student = load_run(tmp_path / "teacher").model
    with pytest.raises(ConfigError, match="cannot teach on these tokens"):
        Teacher(TeacherOptions(run=str(tmp_path / "teacher"), layers="all"), student, words)


def test_a_run_says_that_nobody_knows_how_its_teacher_reads(tmp_path, capfd):
    made = made_of(tmp_path)
    save_model(build(made), made.model_copy(update={"task": None}), tmp_path / "silent")
    for name, said in (("silent", True), ("teacher", False)):
        options = {"run": str(tmp_path / name), "layers": "all", "given": "teacher"}
        run(recipe(tmp_path, model=made.model.to_dict(), steps=1, teacher=options), tmp_path / f"of_{name}", progress="lines")
        assert ("does not say which tokenizer it reads with" in " ".join("".join(capfd.readouterr()).split())) is said


def replace_bos(config):
    return config.model_copy(update={"bos_token": "B"})


def test_a_run_goes_on_with_the_teacher_that_it_began_with_wherever_it_lies(tmp_path, monkeypatch):
    made = made_of(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    options = {"given": "teacher", "layers": "all", "run": "~/teacher"}
    started = recipe(tmp_path, model=made.model.to_dict(), steps=2, teacher=options)
    with pytest.raises(HybridTFError):
        run(started, tmp_path / "out", on_step=ctrl_c_at(1))
    kept = load_run(tmp_path / "out")
    assert kept.recipe.train.teacher.run == str(tmp_path / "teacher")
    assert any(name.startswith("teacher.stack.") for name in kept.recipe.meta.resolved.kernels)
    assert read_trainer_state(kept.path).data["teacher"]["run"] == str(tmp_path / "teacher")
    shutil.move(tmp_path / "teacher", tmp_path / "moved")
    save_model(build(made, torch.float64, seed=3), made, tmp_path / "teacher")
    with pytest.raises(CheckpointError) as error:
        run(None, tmp_path / "out", resume=True)
    for part in (f"train.teacher.run = {tmp_path / 'teacher'} are not those", f"which lay in {tmp_path / 'teacher'}"):
        assert part in str(error.value)
    elsewhere = table(tmp_path, model=made.model.to_dict(), steps=2, teacher={**options, "run": str(tmp_path / "moved")})
    run(parse_recipe(elsewhere, sections={"train": TrainConfig}), tmp_path / "out", resume=True)
    assert load_run(tmp_path / "out").step == 2
    elsewhere["train"]["teacher"]["layers"] = [0]
    with pytest.raises(CheckpointError, match=r"train\.teacher\.layers: all -> "):
        run(parse_recipe(elsewhere, sections={"train": TrainConfig}), tmp_path / "out", resume=True)


def test_numbers_that_are_none_are_the_teachers_fault_where_they_are(tmp_path):
    made = made_of(tmp_path)
    broken = build(made)
    torch.nn.init.constant_(broken.get_parameter("stack.layers.1.mixer.v_proj.weight"), float("nan"))
    save_model(broken, made, tmp_path / "broken")
    started = recipe(tmp_path, model=made.model.to_dict(), teacher={"run": str(tmp_path / "broken"), "layers": "all"})
    with pytest.raises(NonFiniteError, match=r"that of the teacher's stack\.layers\.1\.mixer\.v_proj \(Linear\): its weight"):
        run(started, tmp_path / "out")


def test_streams_that_differ_are_refused(tmp_path):
    made = made_of(tmp_path)
    several = {"a": {"type": "altup", "n_streams": 2, **BLOCKS["a"]}}
    student = recipe(tmp_path, model={"pattern": "a a", "blocks": several}, teacher={"run": str(tmp_path / "teacher")})
    with pytest.raises(ConfigError, match="hand on one residual stream, and those of the model that learns 2 residual streams"):
        train(student, tmp_path / "out", device="cpu", progress="none")
    assert made.model.layers() == ("a", "a")


def test_a_layer_alone_needs_the_teachers_edges_as_they_are_and_from_before(tmp_path):
    far = {**ATTENTION, "kv_group": "far"}
    blocks = {"a": {"mixer": ATTENTION}, "g": {"mixer": far}}
    made_of(tmp_path, blocks, "a g g")
    wider = {"a": {"mixer": ATTENTION}, "g": {"mixer": {**far, "n_kv_heads": 2}}}
    plain = recipe(tmp_path, model={"pattern": "a g g", "blocks": wider}).model
    student = plain.build(BuildContext(d_model=0))
    with pytest.raises(ConfigError, match=r"layer 2 reads the edge 'far_keys' as \(b t 2 4\), and the last one to write it"):
        beside(tmp_path, student, given="teacher", layers=[2])
    early = recipe(tmp_path, model={"pattern": "g g a", "blocks": {"a": blocks["a"], "g": blocks["g"]}}).model
    with pytest.raises(ConfigError, match=r"layer 1 reads the edge 'far_keys', which no earlier component writes"):
        beside(tmp_path, early.build(BuildContext(d_model=0)), given="teacher", layers=[1])


@pytest.mark.parametrize(("options", "why"), [
    ({"hidden": 0.0, "layers": [99]}, "layers names layers that nothing is done with"),
    ({"hidden": 0.0, "layers": "all"}, "layers names layers that nothing is done with"),
    ({"logits": 0.0, "temperature": 2.0}, "temperature is of the scores"),
])
def test_options_that_would_do_nothing(options, why):
    with pytest.raises(HybridTFError, match=why):
        TrainConfig(steps=1, teacher={"run": "x", **options})


def test_statistics_of_layers_alone_are_of_weights_and_gradients(tmp_path):
    made = made_of(tmp_path)
    started = recipe(
        tmp_path, model=made.model.to_dict(), steps=1, stats_every=1, accumulation=2,
        teacher={"run": str(tmp_path / "teacher"), "given": "teacher", "layers": [1]},
    )
    run(started, tmp_path / "out")
    stats = next(line for line in read_log(tmp_path / "out" / "log.jsonl") if line["event"] == "stats")
    assert {"grad_norm", "update_ratio"} <= stats["layers"]["1.a"].keys()
    assert "activation_rms" not in stats["layers"]["1.a"]
