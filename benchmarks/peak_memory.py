"""The planned peak of a training step against the one that is measured, over random recipes.

    python benchmarks/peak_memory.py [--recipes 50] [--seed 0] [--no-resident]

Mixers are drawn from the registry with their own defaults, widths, depths, lengths, batches, channel mixers and checkpointed
layers at random; what a recipe refuses, and what is planned to take more than 64 MiB, is drawn again.

``planned``: on shapes without memory. ``live``: bytes of live tensors
at every operator of one step on real tensors. ``resident``: growth of a fresh process's resident size at the peak of its
second step over that before the model was built, on one thread. Ends with 1 where ``planned`` is off ``live`` by more than 5 %
in the median or 10 % in the ninth decile.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hybridtf.bench import Subject, count_bytes
from hybridtf.bench.child import run_trial
from hybridtf.core import HybridTFError, active
from hybridtf.cost.footprint import predict_bytes
from hybridtf.recipe import parse_recipe

MIB = 1 << 20
LARGEST = 64 * MIB
MEDIAN, NINTH = 0.05, 0.10


@dataclass(frozen=True)
class Drawn:
    """A recipe that builds, the step it is asked for, and the planned peak of that."""

    subject: Subject
    batch_size: int
    length: int
    words: str
    planned: int


def random_recipes(n: int, seed: int) -> Iterator[Drawn]:
    """``n`` recipes, the same for the same ``seed`` and registry."""
    draw = random.Random(seed)
    found = 0
    while found < n:
        raw, batch_size, length = _draw(draw)
        try:
            subject = Subject.from_recipe(parse_recipe(raw), f"random {found}")
            planned = predict_bytes(subject, "train", batch_size, length).peak
        except HybridTFError:
            continue  # a mixer that is not causal, reads what no layer writes, does not fit the width, or reads values back
        if planned > LARGEST:
            continue
        found += 1
        model = raw["model"]
        mixers = " ".join(f"{block['mixer']['type']}" for block in model["blocks"].values())
        words = f"{mixers}; {model['pattern']}; d {model['d_model']}; {raw['train']['checkpoint_layers']}"
        yield Drawn(subject, batch_size, length, words, planned)


def _draw(draw: random.Random) -> tuple[dict[str, Any], int, int]:
    d_model, length = draw.choice([32, 64, 96, 128]), draw.randint(24, 320)
    names = draw.sample(sorted(active()["mixers"].configs()), draw.randint(1, 2))
    blocks = {}
    for letter, name in zip("abc", names, strict=False):
        channel: dict[str, Any] = {"type": draw.choice(["swiglu", "mlp"]), "d_ff": draw.choice([1, 2, 4]) * d_model}
        blocks[letter] = {"mixer": _options(name, d_model)}
        if draw.random() < 0.8:
            blocks[letter]["channel_mixer"] = channel
    pattern = " ".join(draw.choice(list(blocks)) for _ in range(draw.randint(1, 3)))
    pattern += "".join(f" {letter}" for letter in blocks if letter not in pattern)
    model = {
        "type": "language_model", "vocab_size": draw.choice([64, 257, 2048]), "d_model": d_model, "pattern": pattern,
        "blocks": blocks, "max_seq_len": 1024,
    }
    layers = draw.choice(["none", "none", "all", 2])
    return {"model": model, "train": {"steps": 1, "checkpoint_layers": layers}}, draw.randint(1, 3), length


def _options(name: str, d_model: int) -> dict[str, Any]:
    """A mixer's defaults; heads where it must be told."""
    fields = active()["mixers"].get(name).model_fields
    return {"type": name} | ({"n_heads": d_model // 32} if "n_heads" in fields and fields["n_heads"].is_required() else {})


def off(planned: int, live: int) -> float:
    """Share of the live bytes by which the plan is off."""
    return abs(planned - live) / live


def ninth(values: list[float]) -> float:
    """The ninth decile."""
    return statistics.quantiles(values, n=10, method="inclusive")[8]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-resident", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    errors, beside = [], []
    print("| recipe | batch x length | planned MiB | live MiB | off | resident MiB | planned / resident |")
    print("| --- " * 7 + "|")
    for one in random_recipes(given.recipes, given.seed):
        planned = one.planned
        live = count_bytes(one.subject, "train", one.batch_size, one.length).peak
        errors.append(off(planned, live))
        resident = None
        if not given.no_resident:
            resident = run_trial(one.subject, "train", one.batch_size, one.length, None, 600.0).get("peak")
        columns = ["", ""]
        if resident:
            beside.append(planned / resident)
            columns = [f"{resident / MIB:.1f}", f"{planned / resident:.2f}"]
        sizes = f"{planned / MIB:.2f} | {live / MIB:.2f} | {errors[-1]:.2%}"
        print(f"| {one.words} | {one.batch_size} x {one.length} | {sizes} | {' | '.join(columns)} |", flush=True)
    median, high = statistics.median(errors), ninth(errors)
    print(f"\n{len(errors)} recipes: off by {median:.2%} in the median, {high:.2%} in the ninth decile, {max(errors):.2%} most")
    if beside:
        print(f"planned / resident: {statistics.median(beside):.2f} in the median, {min(beside):.2f} to {max(beside):.2f}")
    return 0 if median <= MEDIAN and high <= NINTH else 1


if __name__ == "__main__":
    sys.exit(main())
