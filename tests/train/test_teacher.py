"""Matching a teacher: what the losses are, what they train, and that a run with one resumes as any other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import CheckpointError, ConfigError, HybridTFError
from hybridtf.models.weights import read_weights
from hybridtf.recipe import parse_recipe
from hybridtf.surgery import replace_mixers
from hybridtf.tasks import IGNORE
from hybridtf.train import RunFolder, TeacherOptions, TrainConfig, load_run, read_log, save_model, train
from hybridtf.train.precision import make_scaler
from hybridtf.train.step import accumulate
from hybridtf.train.teacher import HIDDEN, LOGITS, Teacher
from tests.train.runs import build, recipe, run, settings, table, task
from tests.train.test_resume import assert_same_run, ctrl_c_at

CPU = torch.device("cpu")
ATTENTION = {"type": "gqa", "n_heads": 2, "n_kv_heads": 1}
BLOCKS = {"a": {"mixer": ATTENTION, "channel_mixer": {"type": "swiglu", "d_ff": 16}}}
MODEL = {"pattern": "a*4", "blocks": BLOCKS}


@pytest.fixture
def teacher(tmp_path):
    """A model folder of four layers of attention in float64, and its recipe."""
    made = recipe(tmp_path, model=MODEL)
    save_model(build(made, torch.float64), made, tmp_path / "teacher")
    return tmp_path / "teacher", made


def operated(teacher, mixer="delta_net", layers=(1, 3)):
    found = replace_mixers(load_run(teacher[0]).model, teacher[1], layers, mixer)
    return found.model.train(), found.recipe


def gradient(student, beside, batch, **options):
    student.zero_grad()
    sums = accumulate(student, [batch], settings(**options), make_scaler("fp32", CPU), CPU, beside)
    return sums, {name for name, p in student.named_parameters() if p.grad is not None and p.grad.any()}


def batch_of(made, n=3):
    batch = next(task(made).train_batches(n, 32))
    assert not batch.segments.real.all() or len(batch.segments.ids.unique()) > 1
    return batch


@pytest.mark.parametrize("given", ["student", "teacher"])
def test_an_unchanged_copy_has_nothing_to_learn_of_its_teacher(teacher, given):
    path, made = teacher
    student = load_run(path).model.train()
    alone = given == "teacher"
    beside = Teacher(TeacherOptions(run=str(path), given=given, layers="all", **({} if alone else {"loss": 0.0})), student)
    sums, moved = gradient(student, beside, batch_of(made))
    assert ({"loss": sums.loss} if alone else sums.means()) == ({"loss": 0.0} if alone else {HIDDEN: 0.0, LOGITS: 0.0})
    assert alone is False or moved == set()
    assert (sums.loss > 1) is not alone


def test_the_losses_are_those_that_the_formulas_say(teacher):
    path, made = teacher
    student, _ = operated(teacher)
    options = TeacherOptions(run=str(path), hidden=0.5, logits=2.0, loss=0.25, temperature=3.0)
    beside = Teacher(options, student)
    assert beside.layers == (1, 3)
    batch = batch_of(made)
    batch.targets[0, 5:] = IGNORE
    batch = replace(batch, n_tokens=int((batch.targets != IGNORE).sum()))
    found = beside.loss(student, batch)

    def layers(model):
        seen, x = [], model.stem(batch.inputs, segments=batch.segments)
        edges, x = x[2].edges, x[0]
        for i in range(4):
            x = model.stack.visit(i)(x, edges, segments=batch.segments).x
            seen.append(x)
        return seen

    mine, theirs = layers(student), layers(beside.model)
    real = batch.segments.real
    apart = sum((mine[i] - theirs[i])[real].square().mean(-1).sum() for i in (1, 3)) / 2
    torch.testing.assert_close(found.losses[HIDDEN][0], apart)
    assert int(found.losses[HIDDEN][1]) == int(real.sum())
    scores = [model(batch.inputs, segments=batch.segments).logits / 3.0 for model in (student, beside.model)]
    p, q = (z.softmax(-1) for z in reversed(scores))
    divergence = 9.0 * (p * (p / q).log()).sum(-1)[batch.targets != IGNORE].sum()
    torch.testing.assert_close(found.losses[LOGITS][0], divergence)
    nats = F.cross_entropy((3.0 * scores[0]).flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(found.total, nats)

    accumulate(student, [batch], settings(), make_scaler("fp32", CPU), CPU, beside)
    got = {name: p.grad.clone() for name, p in student.named_parameters()}
    n = int((batch.targets != IGNORE).sum())
    student.zero_grad()
    (0.25 * nats / n + 0.5 * apart / real.sum() + 2.0 * divergence / n).backward()
    for name, p in student.named_parameters():
        torch.testing.assert_close(got[name], p.grad, msg=name)


def test_a_layer_by_itself_reads_what_the_teachers_layer_read(teacher):
    path, made = teacher
    student, _ = operated(teacher)
    beside = Teacher(TeacherOptions(run=str(path), given="teacher"), student)
    batch = batch_of(made)
    sums, moved = gradient(student, beside, batch)
    assert {name.split(".")[2] for name in moved} == {"1", "3"}
    assert sums.n_tokens == batch.n_tokens
    # The first replaced layer reads the same in both ways, the second one not.
    model, x = beside.model, beside.model.stem(batch.inputs, segments=batch.segments)
    edges, x = x[2].edges, x[0]
    total = 0.0
    for i in range(4):
        y = model.stack.visit(i)(x, edges, segments=batch.segments).x
        if i in (1, 3):
            own = student.stack.visit(i)(x, edges, segments=batch.segments).x
            total += float((own - y).detach()[batch.segments.real].square().mean(-1).mean()) / 2
        x = y
    assert sums.loss == pytest.approx(total, rel=1e-10)
    _, twice = gradient(student, beside, batch)
    assert twice == moved
    assert all(not p.requires_grad and p.grad is None for p in model.parameters())
    assert not model.training


@pytest.mark.parametrize("given", ["student", "teacher"])
def test_only_what_was_replaced_is_trained(teacher, given):
    path, made = teacher
    student, _ = operated(teacher)
    beside = Teacher(TeacherOptions(run=str(path), given=given, trains="replaced"), student)
    _, moved = gradient(student, beside, batch_of(made))
    assert moved
    assert all(name.startswith(("stack.layers.1.mixer.", "stack.layers.3.mixer.")) for name in moved)
    assert moved == {name for name, p in student.named_parameters() if p.requires_grad}


TRAINED_AS = {"accumulation": 2, "optimizer": "muon", "stats_every": 2, "checkpoint_layers": [1], "precision": "bf16"}
"""What a run may be beside its teacher."""


def distilled(teacher, folder, **options):
    """The recipe of an operated student, and the folder of its weights; trained in float32, with dropout."""
    student, made = operated(teacher)
    save_model(student.float(), made, folder / "student")
    train = {"steps": 8, **TRAINED_AS, "teacher": {"run": str(teacher[0]), **options}}
    changed = table(folder, **train)
    changed["model"] = made.model.to_dict()
    for block in changed["model"]["blocks"].values():
        block["dropout"] = 0.02
    return parse_recipe(changed, sections={"train": TrainConfig}), folder / "student"


@pytest.mark.parametrize("options", [{"given": "teacher", "trains": "replaced"}, {"temperature": 2.0, "loss": 0.0}])
def test_a_run_learns_of_its_teacher_and_resumes_bit_for_bit(teacher, tmp_path, options):
    made, start = distilled(teacher, tmp_path, **options)
    run(made, tmp_path / "whole", init_from=start)
    with pytest.raises(HybridTFError):
        run(made, tmp_path / "parts", init_from=start, on_step=ctrl_c_at(3))
    run(made, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    lines = [line for line in read_log(tmp_path / "whole" / "log.jsonl") if line["event"] == "train"]
    told = [line["loss"] if "given" in options else line["losses"][HIDDEN] for line in lines]
    assert told[-1] < 0.8 * told[0]
    assert ("bits_per_byte" in lines[0]) is ("given" not in options)
    # Of the teacher there is nothing in the checkpoint but its name.
    folder = RunFolder(tmp_path / "whole").checkpoint()
    weights, before = read_weights(folder / "weights.safetensors"), read_weights(start / "weights.safetensors")
    assert set(weights) == set(before)
    still = {name for name in weights if torch.equal(weights[name], before[name])}
    if options.get("trains") == "replaced":
        assert still == {name for name in weights if not name.startswith(("stack.layers.1.mixer.", "stack.layers.3.mixer."))}
    else:
        assert still == set()
    assert load_run(folder).recipe.train.teacher == made.train.teacher


def test_layers_that_are_computed_again_give_the_same_gradient(teacher):
    path, made = teacher
    student, _ = operated(teacher)
    beside = Teacher(TeacherOptions(run=str(path), loss=0.0), student)
    batch, grads = batch_of(made), []
    for layers in (frozenset(), frozenset({0, 1, 2, 3})):
        student.stack.checkpointed = layers
        gradient(student, beside, batch)
        grads.append({name: p.grad.clone() for name, p in student.named_parameters()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


REFUSED = {
    "not there": ({"run": "nowhere"}, {}, CheckpointError, "nowhere: no such folder"),
    "another vocabulary": ({}, {"vocab_size": 300}, ConfigError, "vocab_size = 257 of"),
    "another width": ({}, {"d_model": 16}, ConfigError, "d_model = 8 of"),
    "more layers": ({}, {"pattern": "a*5"}, ConfigError, "has 4 layers, and the model that learns 5"),
    "no such layer": ({"layers": [4]}, {}, ConfigError, "names layer 4; the model has layers 0 to 3"),
    "nothing replaced": ({}, {}, ConfigError, "every mixer is that of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_teach_is_refused_in_one_line_before_anything_is_written(teacher, tmp_path, case):
    options, model, kind, why = REFUSED[case]
    made = recipe(tmp_path, model={**MODEL, **model}, teacher={"run": str(teacher[0]), **options})
    with pytest.raises(kind) as error:
        train(made, tmp_path / "out", device="cpu", progress="none")
    assert why in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_scores_alone_are_matched_between_models_of_any_shape(teacher, tmp_path):
    blocks = {"m": {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}}}
    model = {"d_model": 16, "pattern": "m", "blocks": blocks}
    made = recipe(tmp_path, model=model, teacher={"run": str(teacher[0]), "hidden": 0.0})
    run(made, tmp_path / "out")
    line = next(read_log(tmp_path / "out" / "log.jsonl"))
    assert set(line["losses"]) == {LOGITS}


@pytest.mark.parametrize(("options", "why"), [
    ({"given": "teacher", "logits": 1.0}, "logits and loss must be 0"),
    ({"given": "teacher", "hidden": 0.0}, "nothing of the teacher has a weight"),
    ({"hidden": 0.0, "logits": 0.0}, "nothing of the teacher has a weight"),
    ({"layers": "replased"}, "layers"), ({"temperature": 0.0}, "temperature"), ({"hiden": 1.0}, "Did you mean 'hidden'?"),
])
def test_options_that_cannot_be(options, why):
    with pytest.raises(HybridTFError, match=why):
        TrainConfig(steps=1, teacher={"run": "x", **options})
    with pytest.raises(HybridTFError, match="hides what layers give"):
        TrainConfig(steps=1, compile=True, teacher={"run": "x"})
