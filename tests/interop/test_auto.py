"""The classes of transformers around a model of ours, against the model itself."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="the classes are transformers'")

import transformers

from hybridtf.core import BuildContext, CheckpointError, ConfigError, DataError, Segments, StateError, active
from hybridtf.interop.auto import (
    AfterStepCallback,
    HybridTFCache,
    HybridTFConfig,
    HybridTFForCausalLM,
    HybridTFForSequenceClassification,
    register,
)
from hybridtf.models import BeamConfig, GenerationConfig, LanguageModelConfig, beam_search, generate
from hybridtf.models.generation.model import refusal

VOCAB = 17
BLOCKS = {
    "m": {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}},
    "a": {"mixer": {"type": "gqa", "n_heads": 4, "n_kv_heads": 2}, "channel_mixer": {"type": "swiglu", "d_ff": 12}},
    "d": {"mixer": {"type": "gated_delta_net", "n_heads": 2, "head_dim": 6}, "channel_mixer": {"type": "swiglu", "d_ff": 12}},
    "w": {"mixer": {"type": "sliding_attention", "n_heads": 2, "window": 3}},
    "e": {
        "mixer": {"type": "gqa", "n_heads": 2, "n_kv_heads": 1},
        "channel_mixer": {
            "type": "moe", "n_experts": 4, "top_k": 2, "d_ff": 8, "balance_loss": 0.5, "selection_bias": "balanced",
            "bias_step": 0.1,
        },
    },
}
PATTERNS = ("a a", "m a", "d w")
"""Attention alone, Mamba-2 with attention, the delta rule with a window."""
PROMPTS = [[1, 2, 3], [4, 5, 1, 2, 3, 4, 5, 0], [2], [3, 3, 3, 3, 3]]
DTYPES = [torch.float32, torch.float64]


def language_model(pattern="m a", dtype=torch.float64, seed=2, **more):
    known = {**BLOCKS, **more.pop("blocks", {})}
    blocks = {name: known[name] for name in pattern.split()}
    config = LanguageModelConfig(vocab_size=VOCAB, d_model=16, pattern=pattern, blocks=blocks, **more)
    model = config.build(BuildContext(d_model=16, param_dtype=dtype, seed=seed))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    return model.eval()


def wrapped(*args, **more):
    return HybridTFForCausalLM.from_model(language_model(*args, **more))


def padded(prompts, side="left"):
    """Ids and mask; pads are a token that the model knows."""
    width = max(map(len, prompts))
    rows = [([7] * (width - len(p)), p) for p in prompts]
    order = (lambda pad, p: [*pad, *p]) if side == "left" else (lambda pad, p: [*p, *pad])
    ids = torch.tensor([order(pad, p) for pad, p in rows])
    mask = torch.tensor([order([0] * len(pad), [1] * len(p)) for pad, p in rows])
    return ids, mask


def continued(model, ids, mask=None, *, new, **more):
    """What ``generate`` gives, greedily unless told. The pad is no token of the model, or text were taken for it."""
    mask = torch.ones_like(ids) if mask is None else mask
    more = {"do_sample": False, "pad_token_id": VOCAB, **more}
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, **more)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-9 if a.dtype == torch.float64 else 2e-4)


def same_weights(a, b):
    one, other = a.state_dict(), b.state_dict()
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_saved_and_loaded(tmp_path, caplog, pattern, dtype):
    model = wrapped(pattern, dtype, head={"type": "lm_head", "tied": pattern != "m a"})
    model.save_pretrained(tmp_path)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert not caplog.records
    assert type(again) is HybridTFForCausalLM
    assert again.dtype == dtype
    assert not again.training
    same_weights(model, again)
    assert {name: p.dtype for name, p in model.named_parameters()} == {name: p.dtype for name, p in again.named_parameters()}
    ids = torch.tensor([PROMPTS[1]])
    if dtype != torch.bfloat16:
        close(again(ids).logits, model.model(ids).logits)
    assert transformers.AutoConfig.from_pretrained(tmp_path).to_dict() == again.config.to_dict()
    assert again.config.recipe() == model.model.config


def test_names_are_ours_below_one_prefix(tmp_path):
    from safetensors import safe_open

    from hybridtf.models.weights import canonical_tensors

    model = wrapped()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == {f"model.{name}" for name in canonical_tensors(model.model)}
    table = json.loads((tmp_path / "config.json").read_text())["model"]
    assert table["pattern"] == "m a"
    assert LanguageModelConfig(**{k: v for k, v in table.items() if k in ("vocab_size", "d_model", "pattern", "blocks")})


def test_a_shared_block_is_saved_once(tmp_path, caplog):
    model = wrapped("a m a m", blocks={"a": {**BLOCKS["a"], "shared": True}})
    model.save_pretrained(tmp_path)
    again, info = HybridTFForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert not caplog.records
    same_weights(model, again)
    assert len(list(again.parameters())) == len(list(model.parameters()))


def test_a_table_of_a_recipe_is_a_model():
    block = {"mixer": {"type": "gqa", "n_heads": 2, "n_kv_heads": 1}}
    config = HybridTFConfig(model={"vocab_size": 11, "d_model": 8, "pattern": "a*2", "blocks": {"a": block}})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    want = config.recipe().build(BuildContext(d_model=8, param_dtype=torch.float64))
    same_weights(model.model, want)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (11, 8, 2)
    assert model.dtype == torch.float64
    assert HybridTFConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_plain_weight_comes_back(tmp_path, dtype):
    """A selection bias is frozen, and wider than the weights; the load since the last step is in no file."""
    model = wrapped("e", dtype)
    bias = next(p for p in model.parameters() if not p.requires_grad)
    bias.copy_(torch.tensor([0.1, 0.2, -0.3, 0.7]))
    model.save_pretrained(tmp_path)
    again = HybridTFForCausalLM.from_pretrained(tmp_path)
    same_weights(model, again)
    for one, other in ((model.named_parameters(), again.named_parameters()), (model.named_buffers(), again.named_buffers())):
        for (name, mine), (_, theirs) in zip(one, other, strict=True):
            assert (mine.dtype, mine.requires_grad) == (theirs.dtype, theirs.requires_grad), name
            assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_dtype_is_asked_for(tmp_path, dtype):
    model = wrapped("m e", torch.float32)
    model.save_pretrained(tmp_path)
    again = HybridTFForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    want = language_model("m e", dtype)
    for (name, mine), (_, theirs) in zip(model.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert theirs.dtype == want.get_parameter(name).dtype, name
        assert torch.equal(mine.to(theirs.dtype), theirs), name


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    wrapped().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.final_norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks final_norm\.weight"):
        HybridTFForCausalLM.from_pretrained(tmp_path)


def test_loading_leaves_torch_as_it_was(tmp_path):
    wrapped().save_pretrained(tmp_path)
    HybridTFForCausalLM.from_pretrained(tmp_path)
    assert torch.get_default_dtype() == torch.float32
    assert torch.zeros(1).device.type == "cpu"


def test_registering_twice_and_without_transformers():
    register()
    register()
    code = "import sys, hybridtf.interop; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- forward -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_decoding_are_exact(pattern, dtype, side):
    model = wrapped(pattern, dtype)
    ids, mask = padded(PROMPTS, side)
    whole = model(ids, attention_mask=mask)
    follow = torch.tensor([[1, 2], [3, 4], [5, 6], [8, 9]])
    first = model(ids, attention_mask=mask, logits_to_keep=1)
    more = torch.cat([mask, torch.ones_like(follow)], dim=1)
    positions = (more.cumsum(1) - 1)[:, -2:]
    second = model(follow, attention_mask=more, cache=first.cache, position_ids=positions)
    assert second.cache is first.cache
    assert first.cache.get_seq_length() == ids.shape[1] + 2
    for i, prompt in enumerate(PROMPTS):
        alone = model.model(torch.tensor([[*prompt, *follow[i].tolist()]])).logits[0]
        close(whole.logits[i][mask[i] > 0], alone[: len(prompt)])
        close(first.logits[i, 0], alone[len(prompt) - 1])
        close(second.logits[i], alone[len(prompt) :])


def test_logits_to_keep():
    model = wrapped()
    ids = torch.tensor([PROMPTS[1]])
    every = model(ids).logits
    close(model(ids, logits_to_keep=3).logits, every[:, -3:])
    close(model(ids, logits_to_keep=1).logits, every[:, -1:])
    close(model(ids, logits_to_keep=torch.tensor([0, 2])).logits, every[:, [0, 2]])
    assert model(ids, use_cache=False).cache is None
    assert isinstance(model(ids, return_dict=False), tuple)
    with torch.no_grad():
        old = model(ids[:, :3]).past_key_values
        close(model(ids[:, 3:], past_key_values=old).logits, every[:, 3:])


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_is_ours(side):
    model = wrapped()
    ids, mask = padded(PROMPTS, side)
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 2] = -100
    targets = labels[:, 1:].masked_fill((mask[:, 1:] * mask[:, :-1]) == 0, -100)
    want = model.model.loss(ids[:, :-1], targets, Segments.from_mask(mask[:, :-1]))
    out = model(ids, attention_mask=mask, labels=labels)
    close(out.loss, want.mean())
    assert out.cache is None
    close(model(ids, attention_mask=mask, labels=labels, num_items_in_batch=50).loss, want.total / 50)
    with pytest.raises(ConfigError, match="labels need the scores of every column"):
        model(ids, labels=labels, logits_to_keep=1)


def test_auxiliary_losses_are_in_the_loss():
    base = language_model("e")
    model = HybridTFForCausalLM.from_model(base)
    ids = torch.tensor([PROMPTS[1]])
    want = base.loss(ids[:, :-1], ids[:, 1:])
    own = base(ids).losses
    assert own
    aux = sum(total / count for total, count in own.values())
    close(model(ids, labels=ids).loss, want.mean() + aux)
    close(model(ids, labels=ids, num_items_in_batch=14).loss, want.total / 14 + aux / 2)
    model.config.loss_weights = dict.fromkeys(own, 0.0)
    close(model(ids, labels=ids).loss, want.mean())


def test_wrong_input():
    model = wrapped()
    ids, mask = padded(PROMPTS)
    with pytest.raises(ConfigError, match="position_ids are not the numbers of the real tokens"):
        model(ids, attention_mask=mask, position_ids=torch.arange(ids.shape[1])[None])
    with pytest.raises(ConfigError, match=r"attention_mask must be \(b, columns\)"):
        model(ids, attention_mask=mask[:, None, None])
    with pytest.raises(DataError, match="8 columns came before and 1 are new"):
        model(ids[:, :1], attention_mask=mask, cache=model(ids, attention_mask=mask).cache)
    with pytest.raises(DataError, match="says other pads"):
        model(ids[:, :1], attention_mask=torch.ones(4, 9), cache=model(ids, attention_mask=mask).cache)
    with pytest.raises(ConfigError, match="takes no inputs_embeds"):
        model(ids, inputs_embeds=torch.zeros(1))
    with pytest.raises(ConfigError, match="takes no output_attentions"):
        model(ids, output_attentions=True)
    with pytest.raises(ConfigError, match="is a HybridTFCache; got a DynamicCache"):
        model(ids, cache=transformers.DynamicCache())
    with pytest.raises(ConfigError, match="vocabulary belongs to the recipe"):
        model.resize_token_embeddings(30)
    assert model.resize_token_embeddings(VOCAB) is model.get_input_embeddings()
    with pytest.raises(ConfigError, match="cache_implementation = 'static'"):
        continued(model, ids, mask, new=2, cache_implementation="static")
    with pytest.raises(ConfigError, match="has no model"):
        HybridTFForCausalLM(HybridTFConfig())


# -- the cache ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_a_cache_goes_back_within_a_call_and_over_several(pattern):
    model = wrapped(pattern)
    ids = torch.tensor([PROMPTS[1] * 2, PROMPTS[1][::-1] * 2])
    want = model(ids).logits
    for cuts, back in (((5, 9), 2), ((5, 6, 7, 8, 9), 3), ((5, 6, 7, 8), 4), ((4, 7, 9), 3), ((4, 7, 9), 9), ((2, 3), 0)):
        cache = HybridTFCache()
        cache.activate_past_recording()
        start = 0
        for stop in cuts:
            model(ids[:, start:stop], cache=cache)
            start = stop
        cache.crop(-back)
        assert cache.get_seq_length() == start - back
        close(model(ids[:, start - back :], cache=cache).logits, want[:, start - back :])
    with pytest.raises(StateError, match="a number below 0"):
        cache.crop(1)
    with pytest.raises(StateError, match="cannot take back 99 columns"):
        cache.crop(-99)


@torch.no_grad()
def test_a_cache_that_does_not_record_says_so():
    model = wrapped("m a")
    cache = model(torch.tensor([PROMPTS[1]])).cache
    with pytest.raises(StateError, match="cannot be cropped"):
        cache.crop(-2)


@torch.no_grad()
def test_rows_of_a_cache_and_copies_of_it():
    model = wrapped("d w")
    ids, mask = padded(PROMPTS)
    cache = model(ids, attention_mask=mask).cache
    assert (cache.batch_size, len(cache), cache.get_max_length()) == (4, 1, -1)
    twin = copy.deepcopy(cache)
    twin.batch_select_indices(torch.tensor([3, 1]))
    twin.batch_repeat_interleave(2)
    rows = torch.tensor([3, 3, 1, 1])
    step = torch.tensor([[5]] * 4)
    more = torch.cat([mask, torch.ones(4, 1)], dim=1)
    got = model(step, attention_mask=more[rows], cache=twin).logits
    close(got, model(step, attention_mask=more, cache=cache).logits[rows])
    cache.reset()
    assert (cache.batch_size, cache.get_seq_length(), cache.is_initialized) == (-1, 0, False)
    close(model(ids, attention_mask=mask, cache=cache).logits, model(ids, attention_mask=mask).logits)


# -- generate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_greedy_is_ours(pattern, dtype, side):
    model = wrapped(pattern, dtype)
    ids, mask = padded(PROMPTS, side)
    want = generate(model.model, PROMPTS, GenerationConfig(max_new_tokens=8))
    for more in ({}, {"prefill_chunk_size": 3}):
        assert continued(model, ids, mask, new=8, **more)[:, ids.shape[1] :].tolist() == want
    for prompt, row in zip(PROMPTS[:2], want[:2], strict=True):
        assert continued(model, torch.tensor([prompt]), new=8)[0, len(prompt) :].tolist() == row
        assert continued(model, torch.tensor([prompt]), new=4, use_cache=False)[0, len(prompt) :].tolist() == row[:4]


def test_rows_that_end_early():
    model = wrapped()
    ids, mask = padded(PROMPTS)
    stop = generate(model.model, PROMPTS, GenerationConfig(max_new_tokens=9))[0][2]
    want = generate(model.model, PROMPTS, GenerationConfig(max_new_tokens=9, stop_tokens=(stop,)))
    got = continued(model, ids, mask, new=9, eos_token_id=stop, pad_token_id=16)
    for row, tokens in zip(got[:, ids.shape[1] :].tolist(), want, strict=True):
        assert row == [*tokens, *[16] * (len(row) - len(tokens))]


def test_a_conversation_goes_on_from_its_cache():
    model = wrapped("m a")
    first = continued(model, torch.tensor([[1, 2, 3]]), new=5, return_dict_in_generate=True)
    text = torch.cat([first.sequences, torch.tensor([[4, 4, 1]])], dim=1)
    assert first.cache.get_seq_length() == 7
    got = continued(model, text, new=5, cache=first.cache)
    assert got[0, text.shape[1] :].tolist() == generate(model.model, text.tolist(), GenerationConfig(max_new_tokens=5))[0]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("stops", [pytest.param((), marks=pytest.mark.slow), (4, 7)])
def test_beams_are_ours(pattern, stops):
    model = wrapped(pattern)
    config = BeamConfig(max_new_tokens=7, n_beams=3, n_return=3, stop_tokens=stops)
    want = [beam.tokens for beams in beam_search(model.model, PROMPTS, config) for beam in beams]
    more = {"num_beams": 3, "num_return_sequences": 3, "eos_token_id": list(stops) or None}

    def texts(ids, mask=None):
        for row in continued(model, ids, mask, new=7, **more)[:, ids.shape[1] :].tolist():
            ends = [i for i, token in enumerate(row) if token in stops]
            yield tuple(row[: ends[0] + 1] if ends else row)

    assert [text for prompt in PROMPTS for text in texts(torch.tensor([prompt]))] == want
    assert list(texts(*padded(PROMPTS))) == want


def test_sampling_draws_from_the_same_distribution():
    model = wrapped("d w")
    ids = torch.tensor([[1, 2, 3]] * 3)
    out = continued(model, ids, new=6, do_sample=True, return_dict_in_generate=True, output_logits=True)
    want = model.model(out.sequences).logits[:, 2:-1]
    torch.testing.assert_close(torch.stack(out.logits, 1).double(), want, rtol=0, atol=1e-4)
    torch.manual_seed(1)
    first = continued(model, ids, new=6, do_sample=True)
    torch.manual_seed(1)
    assert torch.equal(first, continued(model, ids, new=6, do_sample=True, prefill_chunk_size=2))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "draft", [pytest.param("a a", marks=pytest.mark.slow), "m a", pytest.param("d w", marks=pytest.mark.slow), "itself"]
)
def test_assisted_decoding_is_greedy_decoding(pattern, draft):
    """With itself as the draft most guesses are right; with another most are wrong, and both states go back."""
    model, small = wrapped(pattern), wrapped(pattern) if draft == "itself" else wrapped(draft, seed=5)
    prompt = PROMPTS[1]
    want = generate(model.model, [prompt], GenerationConfig(max_new_tokens=14))[0]
    got = continued(model, torch.tensor([prompt]), new=14, assistant_model=small)
    assert got[0, len(prompt) :].tolist() == want


@pytest.mark.parametrize("pattern", PATTERNS)
def test_prompt_lookup_is_greedy_decoding(pattern):
    model = wrapped(pattern)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    got = continued(model, torch.tensor([prompt]), new=20, prompt_lookup_num_tokens=3)
    assert got[0, len(prompt) :].tolist() == generate(model.model, [prompt], GenerationConfig(max_new_tokens=20))[0]


def test_assisted_decoding_is_refused_where_a_part_cannot_go_back():
    model = wrapped()
    model.model.stack.cannot = {"crop": "it must not"}
    with pytest.raises(ConfigError, match=r"assisted decoding is not possible with this model: stack .* it must not"):
        continued(model, torch.tensor([[1, 2]]), new=4, prompt_lookup_num_tokens=2)
    assert not model(torch.tensor([[1, 2]])).cache.is_croppable


def test_a_model_that_cannot_be_cut_has_no_cache():
    model = wrapped()
    want = continued(model, torch.tensor([[1, 2]]), new=4)
    model.model.stack.cannot = {"cut": "it sees the end"}
    assert model(torch.tensor([[1, 2]])).cache is None
    with pytest.raises(ConfigError, match=r"a cache is not possible with this model: stack .* it sees the end"):
        continued(model, torch.tensor([[1, 2]]), new=4)
    assert torch.equal(continued(model, torch.tensor([[1, 2]]), new=4, use_cache=False), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, made in active()["mixers"].configs().items() if not made.looks_ahead])
def test_every_mixer(tmp_path, name):
    """Saved and loaded, padded, and with a draft, or refused for what the mixer says that it cannot do."""
    tiny = active()["mixers"].configs()[name].tiny()
    part = tiny.build(BuildContext(d_model=16, device=torch.device("meta")))
    if part.reads or part.needs_context:
        pytest.skip("needs what another layer writes")
    ours = language_model("x x", blocks={"x": {"mixer": tiny, "channel_mixer": {"type": "swiglu", "d_ff": 8}}})
    HybridTFForCausalLM.from_model(ours).save_pretrained(tmp_path)
    model = HybridTFForCausalLM.from_pretrained(tmp_path)
    same_weights(model.model, ours)
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 1, 2, 3]]
    want = generate(ours, prompts, GenerationConfig(max_new_tokens=8))
    assert continued(model, *padded(prompts), new=8)[:, 8:].tolist() == want
    drafted = {"new": 8, "prompt_lookup_num_tokens": 3}
    if refusal(ours, "crop") is not None:
        with pytest.raises(ConfigError, match="assisted decoding is not possible with this model"):
            continued(model, torch.tensor(prompts[:1]), **drafted)
    else:
        assert continued(model, torch.tensor(prompts[:1]), **drafted)[:, 8:].tolist() == want[:1]


# -- training ----------------------------------------------------------------------------------------------------------


def rows(n=12, length=10, labels=None):
    generator = torch.Generator().manual_seed(1)
    data = []
    for i in range(n):
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        data.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids if labels is None else labels(i)})
    return data


def trained(model, folder, data, callbacks=()):
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[],
        learning_rate=1e-2, use_cpu=True, logging_steps=1, save_strategy="no", disable_tqdm=True, seed=1,
    )
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data, eval_dataset=data, callbacks=[*callbacks])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return trainer, before, trainer.evaluate()["eval_loss"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_trainer_trains(tmp_path, pattern):
    pytest.importorskip("accelerate", reason="the trainer needs accelerate")
    model = HybridTFForCausalLM(HybridTFConfig.from_recipe(language_model(pattern).config))
    trainer, before, after = trained(model, tmp_path / "run", rows())
    assert after < before
    trainer.save_model(tmp_path / "saved")
    again = HybridTFForCausalLM.from_pretrained(tmp_path / "saved")
    same_weights(model, again)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_moves_a_selection_bias(tmp_path):
    pytest.importorskip("accelerate", reason="the trainer needs accelerate")
    model = HybridTFForCausalLM(HybridTFConfig.from_recipe(language_model("e").config))
    bias = next(p for p in model.parameters() if not p.requires_grad)
    trained(model, tmp_path / "run", rows(), [AfterStepCallback()])
    assert bool(bias.any())


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_trains_a_classifier(tmp_path):
    pytest.importorskip("accelerate", reason="the trainer needs accelerate")
    model = HybridTFForSequenceClassification(HybridTFConfig.from_recipe(language_model().config, num_labels=3))
    trainer, before, after = trained(model, tmp_path / "run", rows(labels=lambda i: torch.tensor(i % 3)))
    assert after < before
    trainer.save_model(tmp_path / "saved")
    same_weights(model, HybridTFForSequenceClassification.from_pretrained(tmp_path / "saved"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [HybridTFForCausalLM, HybridTFForSequenceClassification])
def test_accumulated_batches_are_one_batch(tmp_path, kind):
    """Rows score different numbers of tokens, so that a mean of means would differ."""
    pytest.importorskip("accelerate", reason="the trainer needs accelerate")
    base = kind(HybridTFConfig.from_recipe(language_model("e").config, num_labels=3)).double()
    data = rows(8, labels=None if kind is HybridTFForCausalLM else lambda i: torch.tensor(i % 3))
    for i, row in enumerate(data if kind is HybridTFForCausalLM else ()):
        row["labels"] = row["labels"].clone()
        row["labels"][:i] = -100
    base.config.loss_weights = {"balance": 0.0}  # its loss is that of one call, by its nature
    ends = []
    for size, n in ((8, 1), (4, 2)):
        model = copy.deepcopy(base)
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=n,
            report_to=[], learning_rate=1.0, optim="sgd", max_grad_norm=0, use_cpu=True, save_strategy="no",
            disable_tqdm=True, seed=1,
        )
        transformers.Trainer(model=model, args=args, train_dataset=data).train()
        ends.append(model)
    for one, other in zip(ends[0].parameters(), ends[1].parameters(), strict=True):
        close(one.detach(), other.detach())
    assert any(not torch.equal(a, b) for a, b in zip(ends[0].parameters(), base.parameters(), strict=True))


# -- classification ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_class_is_read_from_the_last_real_token(tmp_path, pattern, side):
    wrapped(pattern, head={"type": "lm_head", "tied": pattern == "a a"}).save_pretrained(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    assert model.score.weight.shape == (5, 16)
    ids, mask = padded(PROMPTS, side)
    got = model(ids, attention_mask=mask).logits
    for prompt, row in zip(PROMPTS, got, strict=True):
        features = model.model(torch.tensor([prompt])).logits[0, -1]
        close(row, model.score(features))
    assert float(model(ids, attention_mask=mask, labels=torch.tensor([0, 1, 4, 2])).loss.detach()) > 0
    assert float(model.score.weight.detach().std()) == pytest.approx(0.25, rel=0.5)
    model.save_pretrained(tmp_path / "again")
    again, info = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info.values()), info
    close(again(ids, attention_mask=mask).logits, got)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, made in active()["mixers"].configs().items() if not made.looks_ahead])
def test_every_mixer_in_a_classifier_with_adapters(name):
    """Padding left and right, adapters on every projection, unmerged and merged: one answer a row."""
    peft = pytest.importorskip("peft", reason="adapters are peft's")
    tiny = active()["mixers"].configs()[name].tiny()
    part = tiny.build(BuildContext(d_model=16, device=torch.device("meta")))
    if part.reads or part.needs_context:
        pytest.skip("needs what another layer writes")
    ours = language_model("x x", blocks={"x": {"mixer": tiny, "channel_mixer": {"type": "swiglu", "d_ff": 8}}})
    torch.set_default_dtype(torch.float64)
    classifier = HybridTFForSequenceClassification(HybridTFConfig.from_recipe(ours.config, num_labels=3)).eval()
    classifier.model.load_state_dict(ours.state_dict(), strict=False)
    linear = [path for path, module in classifier.model.named_modules() if isinstance(module, torch.nn.Linear)]
    options = peft.LoraConfig(
        task_type="SEQ_CLS", target_modules="all-linear", exclude_modules=r".*\.low_rank\..*", r=2, init_lora_weights=False
    )
    model = peft.get_peft_model(classifier, options).eval()
    adapted = [path for path, module in model.named_modules() if isinstance(module, peft.tuners.lora.Linear)]
    assert len(adapted) == len([path for path in linear if ".low_rank." not in path])
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2, 4], [4, 5, 1, 2, 3], [6]]
    want = torch.cat([model(input_ids=torch.tensor([prompt])).logits for prompt in prompts])
    for side in ("left", "right"):
        ids, mask = padded(prompts, side)
        close(model(input_ids=ids, attention_mask=mask).logits, want)
    merged = model.merge_and_unload()
    assert not [path for path, module in merged.named_modules() if isinstance(module, peft.tuners.lora.Linear)]
    close(merged(input_ids=ids, attention_mask=mask).logits, want)


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_adapters_on_every_projection(tmp_path, pattern):
    peft = pytest.importorskip("peft", reason="adapters are peft's")
    base = wrapped(pattern, head={"type": "lm_head", "tied": False})
    linear = [name for name, module in base.model.named_modules() if isinstance(module, torch.nn.Linear)]
    targets = sorted({name.split(".")[-1] for name in linear} - {"proj"})
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=2))
    adapted = [name for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.Linear)]
    assert len(adapted) == len(linear) - 1
    ids, mask = padded(PROMPTS)
    plain = model(input_ids=ids, attention_mask=mask).logits
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    real = mask.bool()
    adapters = model(input_ids=ids, attention_mask=mask).logits
    assert not torch.allclose(adapters[real], plain[real])
    tokens = continued(model, ids, mask, new=5)
    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload()
    close(merged(ids, attention_mask=mask).logits[real].detach(), adapters[real].detach())
    assert torch.equal(tokens, continued(merged, ids, mask, new=5))
    again = peft.PeftModel.from_pretrained(
        wrapped(pattern, head={"type": "lm_head", "tied": False}), tmp_path / "adapter"
    )
    close(again(input_ids=ids, attention_mask=mask).logits[real].detach(), adapters[real].detach())
