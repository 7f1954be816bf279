import pytest
import torch

from hybridtf.core import NonFiniteError
from hybridtf.train import load_run, read_log
from hybridtf.train.nonfinite import locate
from tests.train.runs import assert_equal_weights, build, recipe, run


def poison(step, name, value):
    """At the end of ``step``, one number of the parameter ``name`` becomes ``value``."""

    def on_step(report):
        if report.step == step:
            with torch.no_grad():
                dict(report.model.named_parameters())[name].view(-1)[0] = value

    return on_step


@pytest.mark.parametrize(("name", "module"), [
    ("stack.layers.1.mixer.q_proj.weight", r"stack\.layers\.1\.mixer\.q_proj \(Linear\): its weight is not finite"),
    ("stack.layers.0.mixer_norm.weight", r"stack\.layers\.0\.mixer_norm \(RMSNorm\): its weight is not finite"),
    ("final_norm.weight", r"final_norm \(RMSNorm\): its weight is not finite"),
])
def test_the_first_module_is_named_with_step_and_checkpoint(tmp_path, name, module):
    made = recipe(tmp_path, save_every=2)
    with pytest.raises(NonFiniteError, match=module) as caught:
        run(made, tmp_path / "out", on_step=poison(3, name, float("nan")))
    message = str(caught.value)
    assert message.startswith("step 4: the loss is not finite; the first output that is not finite is that of")
    assert str(tmp_path / "out" / "checkpoints" / "step-00000003") in message
    assert caught.value.exit_code == 1


def test_nothing_is_lost(tmp_path):
    made = recipe(tmp_path, save_every=2, keep_checkpoints=1, log_every=1)
    with pytest.raises(NonFiniteError):
        run(made, tmp_path / "out", on_step=poison(3, "final_norm.weight", float("inf")))
    # The checkpoint of before stays beside that of the failing step, whatever keep_checkpoints says.
    kept = sorted(p.name for p in (tmp_path / "out" / "checkpoints").glob("step-*"))
    assert kept == ["step-00000002", "step-00000003"]
    assert [line["step"] for line in read_log(tmp_path / "out" / "log.jsonl")] == [1, 2, 3]
    run(recipe(tmp_path, save_every=1, keep_checkpoints=9), tmp_path / "good")
    places = (("out", 2), ("out", 3), ("good", 3))
    before, failing, good = (load_run(tmp_path / name, step=step).model for name, step in places)
    assert_equal_weights(before, load_run(tmp_path / "good", step=2).model)
    with torch.no_grad():
        assert failing.final_norm.weight[0] == float("inf")
        failing.final_norm.weight[0] = good.final_norm.weight[0]
    assert_equal_weights(failing, good)


def test_a_checkpoint_of_the_step_before_is_not_written_again(tmp_path):
    made = recipe(tmp_path, save_every=3)
    good = run(recipe(tmp_path, save_every=3, keep_checkpoints=9), tmp_path / "good")

    def after_saving(report):
        if report.step == 4:
            raise RuntimeError("the step must not have been reached")

    import hybridtf.train.run as run_module

    real = run_module.Run.save

    def save(self, place=None):
        path = real(self, place)
        if self.counters.step == 3:
            with torch.no_grad():
                self.model.final_norm.weight[0] = float("nan")
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module.Run, "save", save)
        with pytest.raises(NonFiniteError, match=r"of step 3$"):
            run(made, tmp_path / "out", on_step=after_saving)
    assert_equal_weights(load_run(tmp_path / "out", step=3).model, load_run(good.path, step=3).model)


def test_on_a_full_disk_the_last_checkpoint_is_named(tmp_path, monkeypatch):
    import hybridtf.models.weights as weights_module

    real = weights_module.save_file

    def full(tensors, path, metadata):
        if "step-00000003" in str(path):
            raise weights_module.SafetensorError("No space left on device (os error 28)")
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(weights_module, "save_file", full)
    with pytest.raises(NonFiniteError, match=r"step-00000002, of step 2$"):
        run(recipe(tmp_path, save_every=2), tmp_path / "out", on_step=poison(3, "final_norm.weight", float("nan")))


def test_the_saved_state_fails_again_the_same_way(tmp_path):
    made = recipe(tmp_path)
    messages = []
    for options in ({"on_step": poison(3, "final_norm.weight", float("nan"))}, {"resume": True}):
        with pytest.raises(NonFiniteError) as caught:
            run(made, tmp_path / "out", **options)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_gradient_that_is_not_finite_names_the_parameter(tmp_path, monkeypatch):
    """The square root at 0 has a finite value and an infinite slope."""
    from hybridtf.nn.norms import RMSNorm

    def root(self, x):
        return (x * self.weight).abs().sub(torch.finfo(x.dtype).tiny).clamp(min=0).mul(0).sqrt() + x

    monkeypatch.setattr(RMSNorm, "forward", root)
    words = r"step 1: the gradient is not finite; every output is finite; .* final_norm\.weight"
    with pytest.raises(NonFiniteError, match=words):
        run(recipe(tmp_path), tmp_path / "out")


def test_a_norm_that_overflows_is_told_apart(tmp_path):
    model = build(recipe(tmp_path))

    def again():
        (model(torch.zeros(1, 3, dtype=torch.int64)).logits.sum()).backward()

    assert "their norm overflows" in locate(model, again)


def test_the_hooks_are_gone_afterwards(tmp_path):
    model = build(recipe(tmp_path))

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        locate(model, fail)
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_an_inner_module_is_named_before_the_ones_that_hold_it(tmp_path):
    model = build(recipe(tmp_path)).eval()
    with torch.no_grad():
        model.stack.layers["1"].channel_mixer.down_proj.weight.fill_(float("inf"))

    def again():
        model(torch.zeros(1, 3, dtype=torch.int64))

    assert "stack.layers.1.channel_mixer.down_proj (Linear)" in locate(model, again)


def test_the_window_is_run_again_with_the_same_dropout(tmp_path, monkeypatch):
    import hybridtf.train.run as run_module

    states, real = [], run_module.accumulate

    def recorded(*args):
        states.append(torch.get_rng_state())
        return real(*args)

    monkeypatch.setattr(run_module, "accumulate", recorded)
    with pytest.raises(NonFiniteError):
        run(recipe(tmp_path), tmp_path / "out", on_step=poison(2, "final_norm.weight", float("nan")))
    assert len(states) == 4
    assert torch.equal(states[3], states[2])
    assert not torch.equal(states[2], states[1])


def test_a_module_whose_parts_are_finite_is_told_so(tmp_path):
    model = build(recipe(tmp_path)).eval()
    with torch.no_grad():
        model.final_norm.weight.fill_(3e38)
        model.stem.embedding.weight.mul_(100)

    def again():
        model(torch.zeros(1, 3, dtype=torch.int64))

    assert locate(model, again).endswith("final_norm (RMSNorm): its input is finite")


def test_a_value_that_broke_between_modules_is_told_so():
    class Between(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Identity()

        def forward(self, x):
            return self.second(self.first(x) / 0)

    model = Between()
    assert locate(model, lambda: model(torch.ones(1, 2))).endswith("second (Identity): its input is not finite")
