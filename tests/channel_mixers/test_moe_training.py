"""The losses of a router and its selection bias: what they are, how they reduce, and what a run makes of them."""

from __future__ import annotations

import copy

import pytest
import torch

from hybridtf.channel_mixers import MoEConfig
from hybridtf.core import BuildContext, Segments, param_specs
from hybridtf.models import GenerationConfig, LanguageModelConfig, generate, speculate
from hybridtf.train import load_run, read_log
from hybridtf.train.step import after_step, check_loss_weights
from tests.train.runs import assert_equal_weights, recipe, run

D = 8


def build(**options):
    config = MoEConfig(**{"n_experts": 5, "top_k": 2, "d_ff": 8, **options})
    return config.build(BuildContext(d_model=D, param_dtype=torch.float64))


def data(b, t, seed=1):
    return torch.randn(b, t, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- losses --------------------------------------------------------------------------------------------------------


def by_document(mixer, documents):
    """Sum over documents of tokens * e * sum_j f_j P_j: shares and mean probabilities counted in Python."""
    total = torch.zeros((), dtype=torch.float64)
    for x in documents:
        logits = mixer.router(x)
        probs = logits.sigmoid() if mixer.config.scores == "sigmoid" else logits.softmax(-1)
        probs = probs / probs.sum(-1, keepdim=True)
        share = torch.zeros(5, dtype=torch.float64)
        for row in logits.topk(2).indices.tolist():
            for e in row:
                share[e] += 1 / len(x)
        total = total + len(x) * 5 * (share * probs.mean(0)).sum()
    return total


IDS = torch.tensor([[0, 1, 1, 0, 1, 2, 2, 0], [3, 3, 3, 3, 3, 3, 3, 3], [0] * 8, [1, 2, 4, 4, 7, 7, 7, 7]])


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "softmax_top_k"])
def test_balance_over_documents(scores):
    mixer, x = build(balance_loss=1.0, scores=scores), data(4, 8)
    documents = [x[row, IDS[row] == i] for row in range(4) for i in IDS[row].unique().tolist() if i]
    total, count = mixer(x, segments=Segments.from_ids(IDS))[2].losses["balance"]
    want = by_document(mixer, documents)
    assert int(count) == int((IDS > 0).sum())
    torch.testing.assert_close(total, want, rtol=1e-12, atol=0)
    grads = [torch.autograd.grad(v, mixer.router.weight)[0] for v in (total, want)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)
    # Without segments each row is one document; in one document both forms are the same.
    rows = mixer(x)[2].losses["balance"]
    torch.testing.assert_close(rows[0], by_document(mixer, list(x)), rtol=1e-12, atol=0)
    call = copy.deepcopy(mixer)
    call.config = mixer.config.model_copy(update={"balance_over": "call"})
    torch.testing.assert_close(call(x[:1])[2].losses["balance"][0], mixer(x[:1])[2].losses["balance"][0])


def test_even_loads_cost_top_k():
    mixer = build(n_experts=4, top_k=2, balance_loss=1.0)
    with torch.no_grad():
        mixer.router.weight.zero_()
        for e in range(4):
            mixer.router.weight[e, e] = 1e-6
    x = torch.zeros(1, 4, D, dtype=torch.float64)
    for i, (a, b) in enumerate([(0, 1), (1, 2), (2, 3), (3, 0)]):
        x[0, i, a] = x[0, i, b] = 1.0
    total, count = mixer(x)[2].losses["balance"]
    torch.testing.assert_close(total / count, torch.tensor(2.0, dtype=torch.float64), rtol=1e-5, atol=0)


def test_z_loss():
    mixer, x = build(z_loss=0.5), data(4, 8)
    total, count = mixer(x, segments=Segments.from_ids(IDS))[2].losses["router_z"]
    logits = mixer.router(x[IDS > 0])
    torch.testing.assert_close(total, 0.5 * logits.exp().sum(-1).log().square().sum(), rtol=1e-12, atol=0)
    assert int(count) == int((IDS > 0).sum())


@pytest.mark.parametrize(("options", "names"), [
    ({}, ()), ({"balance_loss": 0.1}, ("balance",)), ({"z_loss": 0.1}, ("router_z",)),
    ({"balance_loss": 0.1, "z_loss": 0.1}, ("balance", "router_z")),
])
def test_a_loss_is_there_only_where_it_was_asked_for(options, names):
    mixer = build(**options)
    result = mixer(data(1, 3), state=())
    assert mixer.losses == names
    assert len(result) == (3 if names else 2)
    if names:
        assert tuple(result[2].losses) == names
    check_loss_weights(mixer, dict.fromkeys(names, 2.0))


def test_the_weight_of_a_loss_is_in_it():
    x = data(2, 6)
    one, tenth = (build(balance_loss=w, z_loss=w)(x)[2].losses for w in (1.0, 0.1))
    for name, (total, count) in one.items():
        torch.testing.assert_close(tenth[name][0], 0.1 * total, rtol=1e-12, atol=0)
        assert int(tenth[name][1]) == int(count)


# -- the selection bias --------------------------------------------------------------------------------------------


def test_the_bias_steers_the_choice_and_not_the_weights():
    mixer, x = build(scores="sigmoid", selection_bias="fixed", normalize=False), data(1, 6)
    before = mixer(x)[0]
    with torch.no_grad():
        mixer.selection.bias.fill_(7.0)
        torch.testing.assert_close(mixer(x)[0], before, rtol=1e-12, atol=1e-14)
        mixer.selection.bias[3] = 9.0
        mixer.experts.down_proj[3].fill_(float("nan"))
    assert mixer(x)[0].isnan().all()
    assert not mixer.selection.bias.requires_grad
    assert param_specs(mixer)["selection.bias"].role == "bias"


def test_a_step_follows_the_counted_load():
    mixer = build(selection_bias="balanced", bias_step=0.25, n_experts=4, top_k=2).train()
    mixer.selection.count(torch.tensor([[0, 1], [0, 1], [0, 2], [4, 4]]))
    mixer.selection.count(torch.tensor([[3, 2]]))
    assert mixer.selection.load.tolist() == [3, 2, 2, 1]
    mixer.selection.after_step()
    assert mixer.selection.bias.tolist() == [-0.25, 0, 0, 0.25]
    assert not mixer.selection.load.any()


def test_only_training_passes_count():
    mixer, x = build(selection_bias="balanced"), data(2, 5)
    mixer.eval()(x)
    with torch.no_grad():
        mixer.train()(x)
    assert not mixer.selection.load.any()
    mixer(x)
    assert int(mixer.selection.load.sum()) == 2 * 10
    assert "selection.load" not in mixer.state_dict()
    assert not mixer.to(torch.float32).selection.load.any()
    fixed = build(selection_bias="fixed").train()
    fixed(x)
    after_step(fixed)
    assert not fixed.selection.load.any()
    assert not fixed.selection.bias.any()


def test_the_bias_keeps_its_small_steps_in_a_low_precision():
    """In bfloat16 a step of 0.001 is lost as soon as the bias is past 0.5."""
    for mixer in (build(selection_bias="balanced").to(torch.bfloat16), build(selection_bias="balanced").bfloat16()):
        selection = mixer.selection
        assert selection.bias.dtype == torch.float32
        for _ in range(2000):
            selection.load.copy_(torch.tensor([8, 0, 0, 0, 0]))
            selection.after_step()
        torch.testing.assert_close(selection.bias, torch.tensor([-2.0, 2, 2, 2, 2]), rtol=0, atol=1e-3)
    built = MoEConfig(n_experts=4, top_k=2, d_ff=8, selection_bias="balanced").build(
        BuildContext(d_model=D, param_dtype=torch.bfloat16)
    )
    assert built.selection.bias.dtype == torch.float32
    x = data(2, 3).bfloat16()
    assert built(x)[0].dtype == torch.bfloat16


def test_layers_that_are_computed_again_count_once():
    loads = []
    for checkpointed in (frozenset(), frozenset({0})):
        model = LanguageModelConfig(vocab_size=13, d_model=16, **moe_model()).build()
        model.stack.checkpointed = checkpointed
        out = model(torch.arange(12).view(2, 6))
        out.logits.sum().backward()
        loads.append([m.load.tolist() for m in model.modules() if hasattr(m, "load")])
    assert loads[0] == loads[1]
    assert any(map(any, loads[0]))


def test_steps_even_out_the_loads():
    mixer = build(selection_bias="balanced", bias_step=0.005, scores="sigmoid").train()
    with torch.no_grad():
        mixer.router.weight[0] *= 3
        mixer.router.weight[1, 0] += 2
    x = data(8, 64)
    spread = []
    for _ in range(100):
        mixer(x)
        load = mixer.selection.load.double()
        spread.append(float(load.std() / load.mean()))
        after_step(mixer)
    assert max(spread[-5:]) < 0.3 * spread[0]


# -- in a run ------------------------------------------------------------------------------------------------------


def moe_model(**options):
    channel = {"type": "deepseek_moe", "n_experts": 4, "top_k": 2, "d_ff": 8, "bias_step": 0.01, **options}
    blocks = {
        "m": {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}, "channel_mixer": channel},
        "e": {"channel_mixer": {**channel, "d_ff_shared": 4}, "dropout": 0.1},
    }
    return {"pattern": "m e", "blocks": blocks}


def biases(out):
    return torch.stack([p for n, p in load_run(out).model.named_parameters() if n.endswith("selection.bias")])


def test_a_run_moves_the_bias_and_resumes_bit_for_bit(tmp_path):
    made = recipe(tmp_path, model=moe_model(balance_loss=0.01, z_loss=0.001), accumulation=2, log_every=1)
    run(made, tmp_path / "whole")
    moved = biases(tmp_path / "whole")
    assert moved.any(1).all()
    # Whole multiples of the step, at most one a step of the six.
    steps = moved / 0.01
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)
    assert float(steps.abs().max()) <= 6.01
    half = recipe(tmp_path, model=moe_model(balance_loss=0.01, z_loss=0.001), accumulation=2, log_every=1, steps=3,
                  schedule="constant")
    same = recipe(tmp_path, model=moe_model(balance_loss=0.01, z_loss=0.001), accumulation=2, log_every=1,
                  schedule="constant")
    run(half, tmp_path / "parts")
    run(same, tmp_path / "parts", resume=True)
    run(same, tmp_path / "straight")
    assert_equal_weights(*(load_run(tmp_path / name).model for name in ("parts", "straight")))
    losses = [line["losses"] for line in read_log(tmp_path / "whole" / "log.jsonl") if line["event"] == "train"]
    # Two choices a token, so about two times the weight.
    assert all(0.01 < line["balance"] < 0.05 and line["router_z"] > 0 for line in losses)


def test_accumulation_counts_the_whole_window(tmp_path):
    options = {"steps": 1, "lr": 1e-9, "clip_norm": 0.0}
    run(recipe(tmp_path, model=moe_model(), batch_size=4, **options), tmp_path / "one")
    run(recipe(tmp_path, model=moe_model(), batch_size=2, accumulation=2, **options), tmp_path / "two")
    assert biases(tmp_path / "one").any()
    torch.testing.assert_close(biases(tmp_path / "one"), biases(tmp_path / "two"), rtol=0, atol=0)


def test_layers_that_are_computed_again_change_nothing(tmp_path):
    run(recipe(tmp_path, model=moe_model(), steps=3), tmp_path / "kept")
    run(recipe(tmp_path, model=moe_model(), steps=3, checkpoint_layers="all"), tmp_path / "again")
    torch.testing.assert_close(biases(tmp_path / "kept"), biases(tmp_path / "again"), rtol=0, atol=0)


@pytest.mark.parametrize("over", ["document", "call"])
def test_a_model_with_a_balancing_loss_decodes(over):
    """Only its losses depend on how a call is cut."""
    config = LanguageModelConfig(vocab_size=13, d_model=D, **moe_model(balance_loss=0.01, balance_over=over))
    built = config.build(BuildContext(d_model=0, param_dtype=torch.float64))
    prompts = [[1, 2, 3], [4]]
    texts = [list(prompt) for prompt in prompts]
    with torch.no_grad():
        for text in texts:
            for _ in range(4):
                text.append(int(built.eval()(torch.tensor([text])).logits[0, -1].argmax()))
    wanted = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    assert generate(built, prompts, GenerationConfig(max_new_tokens=4)) == wanted
    assert speculate(built, built, prompts, GenerationConfig(max_new_tokens=4)).tokens == wanted
