"""Models of ours in lm-evaluation-harness: every number is that of a naive loop, and of lm-eval's own ``hf``."""

from __future__ import annotations

import json
import math
import tomllib
from importlib.metadata import EntryPoint

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, DataError, HybridTFError
from hybridtf.interop.lm_eval import scoring
from hybridtf.interop.lm_eval.arguments import read_arguments
from hybridtf.interop.lm_eval.loading import load, max_length
from hybridtf.interop.lm_eval.scoring import score
from hybridtf.interop.lm_eval.texts import OwnTexts, find_texts
from hybridtf.interop.lm_eval.writing import Stops, read_wish, write
from hybridtf.models import LanguageModelConfig
from hybridtf.models.generation.model import refusal
from hybridtf.recipe import parse_recipe
from hybridtf.tasks import make_tokenizer
from hybridtf.train import save_model
from tests.interop.lm_eval_cases import LETTERS, ROOT, program, write_tasks, write_tokenizer

RUNNING = {"type": "dynamic_ntk", "factor": 4.0, "original_max_len": 8, "mode": "running"}
BLOCKS = {
    "m": {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}},
    "a": {"mixer": {"type": "gqa", "n_heads": 4, "n_kv_heads": 2}, "channel_mixer": {"type": "swiglu", "d_ff": 12}},
    "w": {"mixer": {"type": "sliding_attention", "n_heads": 2, "window": 3}},
    "r": {"mixer": {"type": "attention", "n_heads": 2, "position": {"type": "rope", "scaling": RUNNING}}},
}
BYTES = OwnTexts(make_tokenizer("bytes"), None)
PROMPTS = ["abc", "the quick brown fox", "", "the quick brown fox jumps"]
MODEL = {"type": "language_model", "vocab_size": 257, "d_model": 16, "pattern": "m a w", "max_seq_len": 64}


def build(pattern="m a w", dtype=torch.float64, **more):
    blocks = {name: BLOCKS[name] for name in pattern.split()}
    config = LanguageModelConfig(**{**MODEL, "pattern": pattern, "blocks": blocks, **more})
    model = config.build(BuildContext(d_model=16, param_dtype=dtype, seed=2))
    with torch.no_grad():  # sharper than at the start
        for p in model.parameters():
            p.mul_(2)
    return model


@torch.no_grad()
def naive(model, rows, length):
    """One row at a time, in one call."""
    found = []
    for context, following in rows:
        ids = torch.tensor([[*context, *following][-(length + 1) :]])
        scores = model(ids[:, :-1]).logits[0, -len(following) :].log_softmax(-1)
        target = ids[0, -len(following) :]
        total = scores.gather(1, target[:, None]).sum()
        found.append((float(total), bool((scores.argmax(1) == target).all())))
    return found


def some_rows():
    """Contexts that several continuations share, a common beginning, unequal lengths, equal rows."""
    draw = torch.Generator().manual_seed(1)
    few_shot = torch.randint(0, 257, (20,), generator=draw).tolist()
    rows = []
    for i in range(7):
        context = few_shot + torch.randint(0, 257, (1 + 3 * i,), generator=draw).tolist()
        for n in (1, 2, 1, 5)[: 1 + i % 4]:
            rows.append((context, torch.randint(0, 257, (n + i,), generator=draw).tolist()))
    rows += [rows[2], ([256], [1, 2, 3]), ([256], [7]), (few_shot, few_shot)]
    return rows


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize(("length", "all_begin_alike"), [(64, False), (64, True), (23, True)])
def test_scores_are_those_of_one_row_alone(batch_size, length, all_begin_alike, monkeypatch):
    model = build().eval()
    rows = [row for row in some_rows() if not all_begin_alike or len(row[0]) >= 20]
    if batch_size == 3:
        monkeypatch.setattr(scoring, "LOGITS", 257 * 7)  # continuations are read in pieces
    want, counted = naive(model, rows, length), []
    found = score(model, rows, batch_size=batch_size, max_length=length, progress=counted.append)
    assert sum(counted) == len(rows)
    for (a, likeliest), (b, should) in zip(found, want, strict=True):
        assert abs(a - b) < 1e-9
        assert likeliest == should


def test_the_likeliest_continuation_is_known_as_such():
    model = build().eval()
    context, made = [256, 65], []
    for _ in range(3):
        made += [int(model(torch.tensor([[*context, *made]])).logits[0, -1].argmax())]
    (_, yes), (_, no) = score(model, [(context, made), (context, [*made[:2], made[2] ^ 1])], batch_size=2, max_length=64)
    assert (yes, no) == (True, False)


@pytest.mark.parametrize("law", ["cut", "segment"])
def test_a_model_that_cannot_be_cut_or_padded_is_scored_all_the_same(law):
    model = build("m r" if law == "cut" else "m a").eval()
    if law == "segment":
        model.stack.cannot, model.unsegmented = {"segment": "as said here"}, "as said here"
    assert refusal(model, law) is not None
    rows = some_rows()
    for (a, _), (b, _) in zip(score(model, rows, batch_size=4, max_length=64), naive(model, rows, 64), strict=True):
        assert abs(a - b) < 1e-9
    wish = read_wish({"max_gen_toks": 6}, 256, BYTES.end_ids, 0)
    if law == "cut":
        with pytest.raises(ConfigError, match="generation is not possible"):
            write(model, BYTES, [[1]], wish, batch_size=2, max_length=64)
    else:
        prompts = [BYTES.encode(prompt) for prompt in PROMPTS]
        found = write(model, BYTES, prompts, wish, batch_size=2, max_length=64)
        assert found == [greedy(model, prompt, 6, []) for prompt in prompts]


def test_what_cannot_be_scored_is_said():
    model = build()
    with pytest.raises(DataError, match="at least one token each"):
        score(model, [([1], [])], batch_size=1, max_length=8)
    with pytest.raises(DataError, match="9 tokens is longer than max_length = 8"):
        score(model, [([1], [1] * 9)], batch_size=1, max_length=8)


@torch.no_grad()
def greedy(model, prompt, n, until):
    ids = list(prompt)
    made = []
    for _ in range(n):
        token = int(model(torch.tensor([ids + made])).logits[0, -1].argmax())
        if token == 256:
            break
        made.append(token)
    text = BYTES.decode(made)
    return text[: min([text.find(stop) for stop in until if stop in text], default=None)]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_are_those_of_one_prompt_alone_up_to_their_stop(batch_size):
    model = build().eval()
    prompts = [BYTES.encode(prompt) for prompt in PROMPTS]
    free = [greedy(model, prompt, 12, []) for prompt in prompts]
    until = [free[1][3:5], free[0][7:8], "never in it"]
    wish = read_wish({"until": until, "max_gen_toks": 12}, 256, BYTES.end_ids, 0)
    found = write(model, BYTES, prompts, wish, batch_size=batch_size, max_length=64)
    assert found == [greedy(model, prompt, 12, until) for prompt in prompts]
    assert found[1] == free[1][: free[1].find(until[0])]
    assert found[1] != free[1]
    cut = write(model, BYTES, prompts, wish, batch_size=batch_size, max_length=17)
    assert cut == [greedy(model, prompt[-5:], 12, until) for prompt in prompts]


def test_rows_stop_early_and_the_last_token_counts():
    stops = Stops(BYTES, ("\n\n",), 2, BYTES.end_ids)
    assert [stops.ends(0, token) for token in b"ab\n\n"] == [False, False, False, True]
    assert [stops.ends(1, token) for token in (*b"\nx", 256)] == [False, False, True]
    assert stops.texts() == ["ab", "\nx"]


def test_drawing_is_asked_for_and_repeats_with_its_seed():
    model = build().eval()
    options = {"do_sample": True, "temperature": 1.5, "top_p": 0.95, "max_gen_toks": 8}
    made = [
        write(model, BYTES, [[256], [256]], read_wish(options, 256, (256,), seed), batch_size=2, max_length=64)
        for seed in (1, 1, 5)
    ]
    assert made[0] == made[1] != made[2]
    assert made[0][0] != made[0][1]
    assert read_wish({"do_sample": False, "temperature": 0.7, "top_k": 5}, 256, (), 0).config.temperature == 0
    assert read_wish({"do_sample": True}, 256, (), 0).config.temperature == 1
    assert read_wish({"max_new_tokens": 3, "num_beams": 1}, 256, (), 0).config.max_new_tokens == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"untill": "x"}, "untill: no such option. Did you mean 'until'"),
        ({"until": 3}, "until=3: a text or a list of texts"),
        ({"num_beams": 4}, "num_beams=4: one text for each prompt"),
        ({"max_gen_toks": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_wrong_options_of_a_task_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        read_wish(options, 256, (), 0)


def test_no_room_for_a_prompt_is_said():
    with pytest.raises(ConfigError, match="max_gen_toks = 64 leaves no room"):
        write(build(), BYTES, [[1]], read_wish({}, 64, (), 0), batch_size=1, max_length=64)


@pytest.fixture
def run(tmp_path):
    """A model folder of ours, trained on bytes as far as its recipe says."""
    task = {"type": "text", "source": str(tmp_path)}
    model = build(dtype=torch.float32)
    save_model(model, parse_recipe({"model": model.config.to_dict(), "task": task}, "test"), tmp_path / "run")
    return tmp_path / "run"


def test_a_run_brings_its_tokenizer(run):
    said = read_arguments({"pretrained": str(run), "dtype": "float64", "batch_size": "4", "device": "cpu"})
    model, recipe = load(said)
    assert (said.batch_size, next(model.parameters()).dtype, max_length(model, said)) == (4, torch.float64, 64)
    texts = find_texts(said, recipe, 257)
    assert (texts.encode("ab"), texts.encode("ab", False), texts.whole("ab")) == ([256, 97, 98], [97, 98], [97, 98])
    assert (texts.prefix_id, texts.end_ids, texts.decode([97, 256])) == (256, (256,), "a")
    plain = find_texts(read_arguments({"pretrained": str(run), "add_bos_token": False}), recipe, 257)
    assert (plain.encode("ab"), plain.encode("ab", True)) == ([97, 98], [256, 97, 98])
    with pytest.raises(ConfigError, match="has no chat template"):
        texts.chat([], True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pretrained": None}, "pretrained=DIR is missing"),
        ({"pretrained": "gpt2"}, "pretrained=gpt2: no such folder"),
        ({"batchsize": 4}, "batchsize: no such argument. Did you mean 'batch_size'"),
        ({"batch_size": "auto"}, "batch_size=auto: a whole number of at least 1 is needed; sizes are not searched"),
        ({"batch_size": 0}, "batch_size=0: a whole number of at least 1"),
        ({"max_length": 1.5}, "max_length=1.5: a whole number"),
        ({"dtype": "float33"}, "dtype=float33: Did you mean"),
        ({"device": "gpu"}, "device=gpu: is no device"),
        ({"device": "meta"}, "device=meta: allowed are cpu, cuda"),
        ({"weights": "best"}, "weights=best"),
        ({"add_bos_token": "maybe"}, "add_bos_token=maybe: allowed are True and False"),
        ({"trust_remote_code": True}, "no code of a checkpoint is ever run"),
        ({"peft": "x"}, "merge the adapter first"),
        ({"tokenizer": "gpt2"}, "tokenizer=gpt2: no such file or folder"),
        ({"tokenizer": "RUN"}, "holds neither tokenizer_config.json nor tokenizer.json"),
        ({"step": 3}, "step"),
    ],
)
def test_each_wrong_argument_is_one_error(run, more, message):
    more = {name: str(run) if value == "RUN" else value for name, value in more.items()}
    with pytest.raises(HybridTFError, match=message):
        _opened({"pretrained": str(run), "device": "cpu", **more})


def _opened(given):
    said = read_arguments(given)
    model, recipe = load(said)
    return find_texts(said, recipe, model.config.vocab_size)


def test_cuda_where_there_is_none_is_what_lm_eval_says_by_itself(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert read_arguments({"pretrained": str(run), "device": "cuda:0"}).torch_device.type == "cpu"
    assert read_arguments({"pretrained": str(run), "max_batch_size": None}).torch_device.type == "cpu"


def test_a_table_of_positions_is_a_limit(run):
    model = build("a", stem={"type": "token_embedding", "position": {"type": "learned"}}, max_seq_len=32)
    assert max_length(model, read_arguments({"pretrained": str(run)})) == 32
    with pytest.raises(ConfigError, match="a table of 32 learned positions"):
        max_length(model, read_arguments({"pretrained": str(run), "max_length": 33}))


def test_tokenizers_of_a_folder(run, tmp_path):
    pytest.importorskip("transformers")
    write_tokenizer(tmp_path / "tok", add_bos=True)
    said = read_arguments({"pretrained": str(run), "tokenizer": str(tmp_path / "tok")})
    recipe = load(said)[1]
    texts = find_texts(said, recipe, 257)
    assert (texts.prefix_id, texts.end_ids, texts.vocab_size) == (1, (2,), 3 + len(LETTERS) + 7)
    the = texts.encode("the", False)
    assert len(the) == 1
    assert texts.encode("the") == texts.whole("the") == texts.encode("<s>the") == [1, *the]
    assert texts.decode([1, *the, 2]) == "the"
    with pytest.raises(ConfigError, match=r"has ids up to 52, the model up to 49"):
        find_texts(said, recipe, 50)
    with pytest.raises(ConfigError, match="has no chat template"):
        texts.chat([{"role": "user", "content": "x"}], True)
    alone = {"pretrained": str(run), "tokenizer": str(tmp_path / "tok" / "tokenizer.json")}
    with pytest.raises(ConfigError, match=r"up to 53, the model up to 52; its start token .* bos_token="):
        find_texts(read_arguments(alone), recipe, 53)
    assert find_texts(read_arguments({**alone, "bos_token": "<s>"}), recipe, 53).encode("the") == [1, *the]


def test_what_transformers_saved_of_ours(tmp_path):
    pytest.importorskip("transformers")
    from hybridtf.interop.auto import HybridTFForCausalLM

    model = build().eval()
    HybridTFForCausalLM.from_model(model).save_pretrained(tmp_path / "saved")
    write_tokenizer(tmp_path / "saved")
    said = read_arguments({"pretrained": str(tmp_path / "saved"), "device": "cpu"})
    again, recipe = load(said)
    rows = [([1, 2], [3, 4, 5])]
    assert score(again, rows, batch_size=1, max_length=64) == score(model, rows, batch_size=1, max_length=64)
    assert find_texts(said, recipe, 257).prefix_id == 1


def test_the_entry_point_names_the_class():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["lm_eval.models"]
    point = EntryPoint("hybridtf", table["hybridtf"], "lm_eval.models")
    assert (ROOT / (point.module.replace(".", "/") + ".py")).is_file()
    assert f"class {point.attr}(" in (ROOT / (point.module.replace(".", "/") + ".py")).read_text()


@pytest.mark.slow
def test_the_numbers_of_hf(tmp_path):
    """One checkpoint by both classes, over the three kinds of request. ``hf`` takes row by row: in a batch of unequal prompts
    the texts that transformers' Jamba writes depend on the batch."""
    pytest.importorskip("transformers")
    from hybridtf.interop import export_checkpoint, import_checkpoint
    from tests.interop.oracles import oracle

    found = import_checkpoint(oracle("jamba").folder)
    save_model(found.model, found.recipe, tmp_path / "ours")
    export_checkpoint(found.model, tmp_path / "theirs")
    write_tokenizer(tmp_path / "theirs", add_bos=True)
    tasks, length = write_tasks(tmp_path / "tasks"), "max_length=96,dtype=float32"
    models = {
        "hf": ("hf", f"pretrained={tmp_path}/theirs,{length}", 1),
        "published": ("hybridtf", f"pretrained={tmp_path}/theirs,{length}", 3),
        "imported": ("hybridtf", f"pretrained={tmp_path}/ours,tokenizer={tmp_path}/theirs,{length}", 8),
    }
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"models": models, "tasks": str(tasks)}))
    answer = json.loads(program(ROOT / "tests/interop/lm_eval_cases.py", request, cwd=tmp_path).splitlines()[-1])
    for other in ("published", "imported"):
        same(answer[other], answer["hf"])
    assert answer["hf"]["results"]["tiny_rolling"]["bits_per_byte,none"] > 1


def same(found, want):
    """Numbers to 1e-4, everything else exactly."""
    assert type(found) is type(want)
    if isinstance(want, dict):
        assert list(found) == list(want)
        found, want = list(found.values()), list(want.values())
    if isinstance(want, list):
        assert len(found) == len(want)
        for a, b in zip(found, want, strict=True):
            same(a, b)
    elif isinstance(want, float):
        assert found == pytest.approx(want, abs=1e-4, rel=1e-5)
    else:
        assert found == want


@pytest.mark.slow
def test_the_command(run, tmp_path):
    """The program itself, with a run of ours."""
    tasks = write_tasks(tmp_path / "tasks")
    shown = program(
        "-m", "hybridtf", "lm-eval", "--model", "hybridtf", "--model_args", f"pretrained={run},dtype=float64,max_gen_toks=8",
        "--tasks", "tiny_choice,tiny_writing,tiny_rolling", "--include_path", tasks, "--batch_size", "2",
        "--output_path", tmp_path / "out", cwd=tmp_path,
    )  # fmt: skip
    assert "hybridtf ({'pretrained'" in shown
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())
    assert (results["config"]["model_pattern"], results["config"]["model_dtype"]) == ("m a w", "float64")
    texts = [json.loads(line)["text"].encode() for line in (tasks / "data.jsonl").read_text().splitlines()]
    model = load(read_arguments({"pretrained": str(run), "dtype": "float64", "device": "cpu"}))[0]
    total = sum(score for text in texts for score, _ in naive(model, windows([256, *text], 64), 64))
    want = -total / sum(map(len, texts)) / math.log(2)
    assert results["results"]["tiny_rolling"]["bits_per_byte,none"] == pytest.approx(want, rel=1e-12)


def windows(ids, length):
    """Each token but the first is scored once, with as many before it as fit."""
    for begin in range(1, len(ids), length):
        end = min(begin + length, len(ids))
        yield ids[max(0, end - 1 - length) : begin], ids[begin:end]
