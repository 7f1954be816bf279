from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, DataError, LengthError, NonFiniteError
from hybridtf.models import GenerationConfig, LanguageModelConfig, generate, read_prompt, stream
from hybridtf.models.generation import choose, prefill

BLOCKS = {
    "m": {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}},
    "a": {"mixer": {"type": "gqa", "n_heads": 4, "n_kv_heads": 2}, "channel_mixer": {"type": "swiglu", "d_ff": 12}},
    "w": {"mixer": {"type": "sliding_attention", "n_heads": 2, "window": 3}},
}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [12], [3, 3, 3, 3, 3]]


def build(**more):
    config = LanguageModelConfig(vocab_size=17, d_model=16, pattern="m a w", blocks=BLOCKS, **more)
    model = config.build(BuildContext(d_model=16, param_dtype=torch.float64, seed=2))
    with torch.no_grad():  # sharper than at the start, so that draws differ
        for p in model.parameters():
            p.mul_(2)
    return model


def test_a_balancing_loss_is_no_hindrance():
    moe = {"type": "mixtral_moe", "n_experts": 3, "top_k": 2, "d_ff": 8, "balance_loss": 0.01, "z_loss": 0.001}
    blocks = {"e": {**BLOCKS["m"], "channel_mixer": moe}}
    config = LanguageModelConfig(vocab_size=17, d_model=16, pattern="e*2", blocks=blocks)
    model = config.build(BuildContext(d_model=16, param_dtype=torch.float64, seed=2)).eval()
    found = generate(model, PROMPTS, GenerationConfig(max_new_tokens=6))
    assert found == [greedy_without_state(model, prompt, 6) for prompt in PROMPTS]


@pytest.mark.parametrize(("prompts", "kind"), [([1, 2], "int"), (torch.tensor([1, 2]), "Tensor")])
def test_one_prompt_alone_is_no_list_of_prompts(prompts, kind):
    with pytest.raises(DataError, match=f"prompt 0 is of type {kind}"):
        generate(build(), prompts)


@torch.no_grad()
def greedy_without_state(model, prompt, n):
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_equals_argmax_of_full_forwards_for_unequal_prompts():
    model = build().eval()
    want = [greedy_without_state(model, prompt, 9) for prompt in PROMPTS]
    assert generate(model, PROMPTS, GenerationConfig(max_new_tokens=9)) == want
    assert len({tuple(row) for row in want}) > 1


def test_a_row_ends_where_it_is_told_to():
    model = build().eval()
    whole = generate(model, PROMPTS, GenerationConfig(max_new_tokens=9))
    made = [[] for _ in PROMPTS]

    def ends(row, token):
        return len(made[row]) == row  # the tokens before this one

    for item in stream(model, PROMPTS, GenerationConfig(max_new_tokens=9), batch_size=2, ends=ends):
        made[item.row].append(item.token)
        assert item.last == (len(made[item.row]) == item.row + 1)
    assert made == [row[: i + 1] for i, row in enumerate(whole)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_sampled_batch_equals_single_runs(chunk):
    model = build()
    config = {"max_new_tokens": 12, "temperature": 1.3, "top_k": 9, "top_p": 0.9, "prefill_chunk": chunk}
    batch = generate(model, PROMPTS, GenerationConfig(seed=5, **config))
    single = [generate(model, [p], GenerationConfig(seed=5 + i, **config))[0] for i, p in enumerate(PROMPTS)]
    assert batch == single
    assert batch != generate(model, PROMPTS, GenerationConfig(seed=6, **config))


def test_stop_tokens_end_rows_apart():
    model = build()
    free = generate(model, PROMPTS, GenerationConfig(max_new_tokens=8))
    stop = free[0][2]
    ended = generate(model, PROMPTS, GenerationConfig(max_new_tokens=8, stop_tokens=(stop,)))
    for got, whole in zip(ended, free, strict=True):
        assert got == (whole[: whole.index(stop) + 1] if stop in whole else whole)


def test_stream_marks_the_last_token_and_gives_log_probabilities():
    model = build()
    items = list(stream(model, [[1, 2]], GenerationConfig(max_new_tokens=3)))
    assert [item.last for item in items] == [False, False, True]
    logits = model.eval()(torch.tensor([[1, 2]])).logits[0, -1]
    assert items[0].log_prob == pytest.approx(float(logits.detach().log_softmax(-1)[items[0].token]))


def test_dropout_is_off_and_the_mode_comes_back():
    block = {**BLOCKS["a"], "dropout": 0.5}
    model = LanguageModelConfig(vocab_size=17, d_model=16, pattern="a", blocks={"a": block}).build().train()
    model.stack.blocks()[0].mixer.eval()  # a part that the user froze
    modes = [part.training for part in model.modules()]
    config = GenerationConfig(max_new_tokens=6)
    assert generate(model, [[1, 2]], config) == generate(model, [[1, 2]], config)
    assert [part.training for part in model.modules()] == modes
    assert len(set(modes)) == 2


def test_prefill_activations_do_not_grow_with_the_prompt(monkeypatch):
    model = build().eval()
    widths = []
    model.register_forward_pre_hook(lambda m, args: widths.append(args[0].shape[1]))
    scores, _ = prefill(model, [list(range(10)) * 5], 7, 1)
    assert widths == [7] * 7 + [1]
    with torch.no_grad():
        torch.testing.assert_close(scores, model(torch.tensor([list(range(10)) * 5])).logits[:, -1], rtol=0, atol=1e-10)


def test_top_k_and_top_p_keep_what_they_say():
    scores = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)).repeat(4000, 1)
    generators = [torch.Generator().manual_seed(i) for i in range(4000)]
    draws, _ = choose(scores, GenerationConfig(temperature=1.0), generators)
    shares = torch.bincount(draws, minlength=4) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.15, 0.05]), rtol=0, atol=0.03)
    kept = choose(scores, GenerationConfig(temperature=1.0, top_k=2), generators)[0]
    assert set(kept.tolist()) == {0, 1}
    nucleus = choose(scores, GenerationConfig(temperature=1.0, top_p=0.81), generators)[0]
    assert set(nucleus.tolist()) == {0, 1, 2}
    cold = choose(scores, GenerationConfig(temperature=0.01), generators)[0]
    assert set(cold.tolist()) == {0}


def test_wrong_input():
    model = build()
    with pytest.raises(DataError, match="prompt 1 is empty"):
        generate(model, [[1], []])
    assert generate(model, []) == []
    with pytest.raises(ConfigError, match="top_k and top_p need a temperature"):
        GenerationConfig(top_k=3)
    short = build(max_seq_len=6, stem={"type": "token_embedding", "position": {"type": "learned"}})
    with pytest.raises(LengthError, match="learned position table"):
        generate(short, [[1] * 7])


@pytest.mark.parametrize("prompt", [
    "abc", [1.7, 2.2], [[1, 2]], torch.tensor([[1, 2]]), torch.tensor([1.5]), [True, False], ["1"], [None], [10**30],
])
def test_a_prompt_is_whole_numbers_in_one_row(prompt):
    with pytest.raises(DataError, match="prompt 1 is no flat sequence of token ids"):
        generate(build(), [[1], prompt])


def test_scores_that_are_not_finite_are_said():
    model = build()
    with torch.no_grad():
        model.final_norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="row 0"):
        generate(model, [[1, 2]])


def test_a_declared_length_does_not_depend_on_the_batch():
    """Dynamic NTK takes its base from the model's max_seq_len, not from the room that a batch happens to need."""
    scaling = {"type": "dynamic_ntk", "factor": 4.0, "original_max_len": 8}
    attention = {"type": "full_attention", "n_heads": 2, "position": {"type": "rope", "scaling": scaling}}
    config = LanguageModelConfig(vocab_size=13, d_model=8, pattern="a*2", blocks={"a": {"mixer": attention}}, max_seq_len=32)
    model = config.build(BuildContext(d_model=8, param_dtype=torch.float64))
    prompts, options = [[1, 2, 3], list(range(1, 12))], GenerationConfig(max_new_tokens=12)
    together = generate(model, prompts, options)
    assert together == [generate(model, [prompt], options)[0] for prompt in prompts]
    assert generate(model, [prompts[0][1:]], options, prefix=read_prompt(model, prompts[0][:1])) == [together[0]]
    text = torch.tensor([[*prompts[0], *together[0]]])
    assert model(text).logits[0, 2:-1].argmax(-1).tolist() == together[0]
