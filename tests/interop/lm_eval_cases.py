"""Tasks on disk, a tiny tokenizer, and lm-eval in a process of its own.

Run as a program it evaluates several models on the same tasks: ``python lm_eval_cases.py REQUEST.json`` prints one JSON line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".peers" / "lm-eval"
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,?!:\n"
MERGES = [("t", "h"), ("th", "e"), ("o", "n"), (" ", "a"), ("e", "r"), ("i", "n"), (" ", "the")]

TASKS = {
    "tiny_choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}\nanswer:", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}", "num_fewshot": 2, "fewshot_config": {"sampler": "first_n"},
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_writing": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 24}, "metric_list": [{"metric": "exact_match"}],
    },
    "tiny_rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    },
}
DOCS = [
    {"question": "what is the fox?", "choices": [" an animal", " a stone", " the"], "gold": 0},
    {"question": "where is one on?", "choices": [" here", " there", " in the other inn"], "gold": 1},
    {"question": "who ran?", "choices": [" a", " the thin one", " none at all"], "gold": 2},
    {"question": "is there an end to it, or not?", "choices": [" yes", " no"], "gold": 0},
]


def write_tasks(folder: Path) -> Path:
    """A folder for ``--include_path``."""
    folder.mkdir()
    text = "the thin one ran on, and on. who? a fox, in the end!\n"
    rows = [{**doc, "text": text * (i + 1) + doc["question"]} for i, doc in enumerate(DOCS)]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        common = {
            "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test", "fewshot_split": "test", "target_delimiter": "", "metadata": {"version": 1},
        }
        (folder / f"{name}.yaml").write_text(json.dumps({**common, **task}))  # JSON is YAML
    return folder


def write_tokenizer(folder: Path, add_bos: bool = False) -> None:
    """A BPE of a few dozen tokens, with the files that transformers writes beside ``tokenizer.json``."""
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *LETTERS, *("".join(pair) for pair in MERGES)]
    bpe = models.BPE({piece: i for i, piece in enumerate(pieces)}, MERGES, unk_token="<unk>")
    tokenizer = Tokenizer(bpe)
    tokenizer.decoder = decoders.Fuse()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    wrapped.save_pretrained(folder)


def program(*command: str | Path, cwd: Path) -> str:
    """The output of a Python program that can import lm_eval, with nothing fetched and nothing kept."""
    if not FOLDER.exists():
        message = "lm-eval is missing: make .peers/.installed"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{FOLDER}", "HF_HOME": str(cwd / "hub"), "HF_HUB_OFFLINE": "1"}
    line = [sys.executable, *map(str, command)]
    done = subprocess.run(line, capture_output=True, text=True, env=env, cwd=cwd, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _evaluate(request: dict[str, Any]) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from hybridtf.interop.lm_eval import register

    register()
    tasks, found = TaskManager(include_path=request["tasks"], include_defaults=False), {}
    for name, (model, arguments, batch_size) in request["models"].items():
        result = lm_eval.simple_evaluate(
            model, arguments, tasks=list(TASKS), task_manager=tasks, bootstrap_iters=0, device="cpu", batch_size=batch_size,
        )
        samples = {
            task: [row["resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]
            for task, rows in result["samples"].items()
        }
        found[name] = {"samples": samples, "results": result["results"]}
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_evaluate(json.loads(Path(sys.argv[1]).read_text())), default=str) + "\n")
