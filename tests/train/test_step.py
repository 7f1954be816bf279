import pytest
import torch

from hybridtf.core import ConfigError, Segments, using
from hybridtf.plugins import load_registries, make_plugin_manager
from hybridtf.tasks import IGNORE, Batch
from hybridtf.testing.doubles import EdgesConfig
from hybridtf.train import read_log
from hybridtf.train.precision import make_scaler
from hybridtf.train.step import Sums, accumulate, check_loss_weights, clip
from tests.train.runs import build, recipe, run, settings, task

CPU = torch.device("cpu")


@pytest.fixture
def doubles():
    """The built-in components and a mixer with edges and a loss."""
    registries = load_registries(make_plugin_manager(autoload=False))
    registries["mixers"].add(EdgesConfig, "doubles")
    with using(registries):
        yield


def edges_recipe(folder):
    blocks = {
        "e": {"mixer": {"type": "double_edges"}, "channel_mixer": {"type": "mlp", "d_ff": 8}},
        "a": {"mixer": {"type": "gqa", "n_heads": 2, "n_kv_heads": 1}, "shared": True},
    }
    return recipe(folder, model={"pattern": "e a e a", "blocks": blocks})


def gradient(model, batches, **options):
    model.zero_grad()
    sums = accumulate(model, batches, settings(**options), make_scaler("fp32", CPU), CPU)
    return sums, {name: p.grad.clone() for name, p in model.named_parameters()}


def rows(batch, start, stop):
    index = torch.arange(start, stop)
    targets = batch.targets[index]
    return Batch(batch.inputs[index], targets, batch.segments.rows(index), int((targets != IGNORE).sum()))


def test_accumulation_equals_the_big_batch(tmp_path):
    made = recipe(tmp_path)
    model = build(made, torch.float64).eval()
    big = next(task(made).train_batches(6, 32))
    # Unequal parts: a mean of means would differ.
    big.targets[0, 5:] = IGNORE
    big = rows(big, 0, 6)
    sums, one = gradient(model, [big])
    parts, many = gradient(model, [rows(big, 0, 1), rows(big, 1, 3), rows(big, 3, 6)])
    assert parts.n_tokens == sums.n_tokens == big.n_tokens
    assert parts.nats == pytest.approx(sums.nats, rel=1e-12)
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=1e-10, atol=1e-12)


def test_the_stream_gives_the_same_rows_in_smaller_batches(tmp_path):
    side = task(recipe(tmp_path))
    big, small = side.train_batches(4, 32), side.train_batches(2, 32)
    whole = next(big)
    assert torch.equal(whole.inputs, torch.cat([next(small).inputs, next(small).inputs]))


def test_the_gradient_is_that_of_the_mean_over_tokens(tmp_path):
    made = recipe(tmp_path)
    model = build(made, torch.float64).eval()
    batch = next(task(made).train_batches(3, 32))
    _, ours = gradient(model, [batch])
    model.zero_grad()
    logits = model(batch.inputs, segments=batch.segments).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, rtol=1e-10, atol=1e-12)


def test_packed_equals_separate(tmp_path):
    made = recipe(tmp_path)
    model = build(made, torch.float64).eval()
    lengths = [7, 1, 19, 5]
    ids = torch.randint(0, 257, (1, sum(lengths)))
    targets = torch.randint(0, 257, ids.shape)
    packed = Batch(ids, targets, Segments.from_lengths([lengths]), ids.numel())
    alone = [
        Batch(a, b, None, a.numel()) for a, b in zip(ids.split(lengths, 1), targets.split(lengths, 1), strict=True)
    ]
    together, one = gradient(model, [packed])
    apart, many = gradient(model, alone)
    assert together.nats == pytest.approx(apart.nats, rel=1e-12)
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=1e-9, atol=1e-12)


def test_auxiliary_losses_reach_the_gradient_with_their_weight(tmp_path, doubles):
    made = edges_recipe(tmp_path)
    model = build(made, torch.float64).eval()
    batch = next(task(made).train_batches(4, 32))
    sums, none = gradient(model, [batch], loss_weights={"double_power": 0.0})
    _, two = gradient(model, [batch], loss_weights={"double_power": 2.0})
    _, default = gradient(model, [batch])
    model.zero_grad()
    total, count = model.loss(batch.inputs, batch.targets, batch.segments).losses["double_power"]
    (total / count).backward()
    assert sums.means()["double_power"] == pytest.approx((total / count).item(), rel=1e-12)
    for name, p in model.named_parameters():
        aux = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(two[name] - none[name], 2 * aux, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(default[name] - none[name], aux, rtol=1e-9, atol=1e-12)


def test_auxiliary_losses_are_logged(tmp_path, doubles):
    run(edges_recipe(tmp_path), tmp_path / "out")
    lines = [line for line in read_log(tmp_path / "out" / "log.jsonl") if line["event"] == "train"]
    assert [set(line["losses"]) for line in lines] == [{"double_power"}] * 3
    # The mean square of a sigmoid's output, over two layers.
    assert all(0 < line["losses"]["double_power"] < 1 for line in lines)


def test_auxiliary_losses_accumulate_like_one_batch(tmp_path, doubles):
    made = edges_recipe(tmp_path)
    model = build(made, torch.float64).eval()
    big = next(task(made).train_batches(4, 32))
    big.segments.ids[1, 9:] = 0
    sums, one = gradient(model, [rows(big, 0, 4)])
    parts, many = gradient(model, [rows(big, 0, 2), rows(big, 2, 4)])
    assert parts.means() == pytest.approx(sums.means(), rel=1e-12)
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layers", ["all", 2, (1, 2), (3,)])
def test_checkpointed_layers_give_the_same_gradient(tmp_path, doubles, layers):
    from hybridtf.train.recompute import set_checkpointed

    made = edges_recipe(tmp_path)
    model = build(made)
    batch = next(task(made).train_batches(3, 32))
    _, plain = gradient(model, [batch])
    set_checkpointed(model, layers)
    assert model.stack.checkpointed
    _, again = gradient(model, [batch])
    for name in plain:
        assert torch.equal(plain[name], again[name]), name


def test_a_batch_without_scored_tokens_has_no_gradient(tmp_path):
    made = recipe(tmp_path)
    model = build(made)
    batch = next(task(made).train_batches(2, 16))
    empty = Batch(batch.inputs, torch.full_like(batch.targets, IGNORE), batch.segments, 0)
    sums, grads = gradient(model, [empty])
    assert (sums.nats, sums.n_tokens, sums.loss) == (0.0, 0, 0.0)
    assert all(not g.any() for g in grads.values())


def test_weights_of_unknown_losses_are_refused(tmp_path, doubles):
    model = build(edges_recipe(tmp_path))
    check_loss_weights(model, {"double_power": 1.0})
    with pytest.raises(ConfigError, match=r"no loss named 'double_pwer'\. Did you mean 'double_power'"):
        check_loss_weights(model, {"double_pwer": 1.0})


def test_clip_scales_to_the_norm_and_leaves_small_gradients(tmp_path):
    model = build(recipe(tmp_path))
    for p in model.parameters():
        p.grad = torch.randn(p.shape)
    before = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert clip(model, 1.0) == pytest.approx(float(before.norm()), rel=1e-5)
    after = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(after, before / before.norm(), rtol=1e-4, atol=1e-7)
    assert clip(model, 5.0) == pytest.approx(1.0, rel=1e-4)
    assert torch.equal(torch.cat([p.grad.flatten() for p in model.parameters()]), after)
    for p in model.parameters():
        p.grad.mul_(10)
    assert clip(model, 0.0) == pytest.approx(10.0, rel=1e-4)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), after * 10)


def test_sums_add_up():
    left, right = Sums(1.0, 2, {"a": [1.0, 4.0]}), Sums(3.0, 2, {"a": [2.0, 4.0], "b": [1.0, 0.0]})
    left.add(right)
    assert (left.loss, left.means()) == (1.0, {"a": 3 / 8, "b": 1.0})
    assert not Sums(float("nan"), 1).finite()
    assert not Sums(0.0, 1, {"a": [float("inf"), 1.0]}).finite()
