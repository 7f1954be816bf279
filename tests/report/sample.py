"""Records as the harnesses write them, for three recipes with made-up but plausible numbers."""

import math
import random
from typing import Any

from hybridtf.bench.quality import COLUMNS

ENVIRONMENT = {
    "python": "3.11.9",
    "torch": "2.13.0+cpu",
    "hybridtf": "0.1.0",
    "plugins": {"hybridtf-example": "0.1.0"},
    "os": "Linux-6.1-x86_64",
    "cpu": "AMD EPYC 7B13",
    "cores": 2,
    "threads": 2,
    "memory": 16_777_216_000,
    "gpu": None,
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "dirty": True,
}
FLOOR = {"matrix_flops_per_s": 9.1e10, "copy_bytes_per_s": 1.35e10}
FLOPS = {"attention": 7_100_000, "mamba2": 8_400_000, "hybrid-3m1a": 8_000_000}
"""Operations a token, a sixth of them."""
BASELINES = {"bigram": 3.391, "unigram": 4.412}

# name: (pattern, layers, score, half its interval, growth of the score beyond the trained length, train and decode
# tokens/s, (state bytes a token, constant ones))
RECIPES: dict[str, tuple[str, list[str], float, float, float, float, float, tuple[int, int]]] = {
    "attention": ("a*8", ["a"] * 8, 2.284, 0.031, 0.55, 11_930.0, 402.0, (4096, 64)),
    "mamba2": ("m*8", ["m"] * 8, 2.243, 0.029, 0.004, 9_470.0, 377.0, (0, 585_792)),
    "hybrid-3m1a": ("(m*3 a)*2", ["m", "m", "m", "a"] * 2, 2.131, 0.030, 0.06, 10_020.0, 381.0, (1024, 439_400)),
}
BLOCKS = {
    "a": {
        "type": "prenorm",
        "shared": False,
        "mixer": {"type": "attention", "summary": "n_heads=8 n_kv_heads=2 position=rope"},
        "channel_mixer": {"type": "swiglu", "summary": "d_ff=688"},
    },
    "m": {
        "type": "prenorm",
        "shared": False,
        "mixer": {"type": "mamba2", "summary": "d_state=64"},
        "channel_mixer": {"type": "swiglu", "summary": "d_ff=688"},
    },
}
TRAINED = 512
MULTIPLES = (1, 2, 4, 8, 16)


def common(kind: str, name: str, seed: int = 0, **fields: Any) -> dict[str, Any]:
    """A record with the fields that all kinds have."""
    pattern = RECIPES[name][0] if name in RECIPES else "a"
    return {
        "schema": 1,
        "kind": kind,
        "recipe": name,
        "recipe_hash": f"{abs(sum(map(ord, name))):016x}",
        "pattern": pattern,
        "seed": seed,
        "n_params": 6_290_000 + len(name),
        "kernels": {"attention": {"train": "torch-sdpa", "prefill": "torch-sdpa", "decode": "chunked"}},
        "time": "2026-11-29T12:00:00+00:00",
        "environment": dict(ENVIRONMENT),
        **fields,
    }


def model(name: str, **more: Any) -> dict[str, Any]:
    pattern, layers, *_, (per_token, constant) = RECIPES[name]
    size = {
        str(n): {
            "allocated": per_token * n + constant,
            "used": per_token * n + constant,
            "per_token": per_token,
            "constant": constant,
        }
        for n in (1024, 65536)
    }
    blocks = {block: BLOCKS[block] for block in dict.fromkeys(layers)}
    stack = {"name": "decoder", "d_model": 256, "pattern": pattern, "layers": layers, "blocks": blocks}
    params = {"total": 6_290_000, "embedding": 65_536, "by_role": {"embedding": 65_536, "matrix": 6_224_464}}
    return common("model", name, params=params, stacks=[stack], state_bytes=size, **more)


def train(name: str, seed: int = 0) -> dict[str, Any]:
    rng = random.Random(f"{name}{seed}")
    score = RECIPES[name if name in RECIPES else "attention"][2] * math.log(2)
    curve = [
        [step, step * 4096, score + (5.545 - score) * math.exp(-step / 90) + rng.gauss(0, 0.05)]
        for step in range(0, 700, 1)
    ]
    return common("train", name, seed, curve=curve, steps=700, tokens=700 * 4096, seconds=301.5, tokens_per_s=9509.0,
                  flops=700 * 4096 * 6 * FLOPS.get(name, 0), lr=1e-3, failed=None)  # fmt: skip


def units(name: str, value: float, n_bytes: int, n_documents: int) -> dict[str, Any]:
    """Sums of equal documents, some of them harder for all recipes and some for one, whose bits per byte are ``value``."""
    hard, own = random.Random("hard"), random.Random(name)
    bits = [value + hard.gauss(0, 0.08) + own.gauss(0, 0.05) for _ in range(n_documents)]
    size = n_bytes // n_documents
    nats = [(b + value - sum(bits) / n_documents) * size * math.log(2) for b in bits]
    return {**dict.fromkeys(COLUMNS, 0), "nats": nats, "n_tokens": size, "n_bytes": size, "n_rows": 1}


def quality(name: str, seed: int = 0, shift: float = 0.0) -> dict[str, Any]:
    value, half = RECIPES[name][2] + shift, RECIPES[name][3]
    return common(
        "quality",
        name,
        seed,
        task="sotu",
        metric="bits_per_byte",
        value=value,
        interval=[value - half, value + half],
        higher_is_better=False,
        baselines=dict(BASELINES),
        n_bytes=1_204_331,
        n_documents=25,
        n_tokens=1_204_331,
        units=units(name, value, 1_204_331, 25),
    )


def recall(name: str, value: float, far: float | None = None) -> dict[str, Any]:
    """A score on a task that is no text, with its two kinds of rows."""
    draw = random.Random(name)
    right = [sum(draw.random() < value for _ in range(12)) for _ in range(896)]
    groups = {"64 tokens, 8 pairs": value, "256 tokens, 32 pairs": value if far is None else far}
    return common(
        "quality", name, task="mqar", metric="accuracy", value=value, interval=[value - 0.01, value + 0.01],
        higher_is_better=True, baselines={"chance": 0.0078, "own_value": 0.0729}, n_bytes=0, n_documents=896, n_tokens=10_752,
        groups={
            group: {"value": score, "interval": [score - 0.02, score + 0.02], "n_tokens": 4096}
            for group, score in groups.items()
        },
        units={**dict.fromkeys(COLUMNS, 0), "n_correct": right, "n_tokens": 12, "n_rows": 1},
    )


def speed(name: str, phase: str, length: int = 512, batch_size: int = 8) -> dict[str, Any]:
    fast = {"train": RECIPES[name][5], "prefill": RECIPES[name][5] * 3.1, "decode": RECIPES[name][6]}[phase]
    rate = fast * (512 / length) ** (0.25 if name == "attention" else 0.02)
    median = batch_size * length / rate
    times = [median * k for k in (0.97, 0.99, 1.0, 1.02, 1.05)]
    return common(
        "speed",
        name,
        phase=phase,
        batch_size=batch_size,
        length=length,
        tokens_per_s=rate,
        median_s=median,
        spread_s=0.03 * median,
        times=times,
        warmup=2,
        threads=2,
        floor=dict(FLOOR),
        flops_per_s=rate * 6 * 6.29e6,
        ratio=None,
    )


def memory(name: str, phase: str = "train") -> dict[str, Any]:
    weights = 25_160_000
    active = {"attention": 210_000_000, "mamba2": 395_000_000, "hybrid-3m1a": 348_000_000}[name]
    parts = (
        {
            "weights": weights,
            "gradients": weights,
            "optimizer": 2 * weights,
            "activations": active,
            "state": 0,
            "peak": active + 3 * weights + 9_000_000,
        }
        if phase == "train"
        else {
            "weights": weights,
            "gradients": 0,
            "optimizer": 0,
            "activations": active // 30,
            "state": 4_700_000,
            "peak": weights + active // 30 + 4_700_000,
        }
    )
    longest = {"limit_bytes": 2_000_000_000, "length": 3391, "phase": phase, "batch_size": 8, "at_least": False}
    return common("memory", name, phase=phase, batch_size=8, length=512, **parts, longest=longest)


def kernel(name: str, which: str, time: float, verdict: str) -> dict[str, Any]:
    """A kernel of a recipe, ``time`` times as long as the first."""
    ratio = {"against": "chunked", "time": time, "interval": [0.98 * time, 1.02 * time], "verdict": verdict, "refused": []}
    return common(
        "kernel", name, op="ssd", kernel=which, phase="train", batch_size=8, length=512, median_s=2e-3 * time,
        p20_s=1.9e-3 * time, p80_s=2.2e-3 * time, cold={"median_s": 3e-3 * time}, ratio=ratio, refused=[], note=None,
    )  # fmt: skip


def fits(name: str, **more: Any) -> dict[str, Any]:
    """The longest length that was found by trial."""
    fails = {"length": 3440, "outcome": "out_of_memory", "error": "no"}
    return common(
        "fits", name, phase="train", batch_size=8, limit_bytes=2_000_000_000, fits=3391, fails=fails, confirmed=True,
        probes=[fails] * 11, **more,
    )  # fmt: skip


def extrapolation(name: str, seed: int = 0) -> dict[str, Any]:
    score, half, growth = RECIPES[name][2], RECIPES[name][3], RECIPES[name][4]
    per_token, constant = RECIPES[name][7]
    values = [score - 0.03 * math.log2(m) + growth * math.log2(m) for m in MULTIPLES]
    buckets = []
    for start in range(0, TRAINED * MULTIPLES[-1], TRAINED // 8):
        beyond = max(0.0, math.log2((start + 1) / TRAINED)) if start >= TRAINED else 0.0
        buckets.append([start, (score + 1.1 / (1 + start / 24) + growth * beyond) * math.log(2), 1600])
    return common(
        "extrapolation",
        name,
        seed,
        trained_length=TRAINED,
        multiples=list(MULTIPLES),
        task="sotu",
        n_documents=25,
        bits_per_byte=values,
        interval=[[v - half, v + half] for v in values],
        change=[None, *({"value": d, "interval": [d - 0.02, d + 0.02]} for d in (v - values[0] for v in values[1:]))],
        cumulative=values,
        by_position=buckets,
        state_bytes=[per_token * TRAINED * m + constant for m in MULTIPLES],
        note=None,
    )


def beyond(name: str, task: str = "mqar", seed: int = 0, trained: int = 64) -> dict[str, Any]:
    """Recall by length, distance and depth; the dearest length of attention did not fit."""
    keeps = {"attention": 0.93, "mamba2": 0.2, "hybrid-3m1a": 0.97}[name]
    lengths, depths = [trained * m for m in MULTIPLES], [0.1, 0.3, 0.5, 0.7, 0.9]

    def accuracy(length: int, depth: float = 0.5) -> float:
        falls = (0.04 if keeps > 0.5 else 0.01) * math.log2(length / trained) * (1.5 - depth) * (1 + 0.02 * seed)
        return max(0.02, min(1.0, keeps - falls))

    by_length = [
        {
            "length": n, "ratio": n / trained, "accuracy": accuracy(n), "chance": 1 / 128, "n_rows": 200, "result": "ok",
            "interval": [max(0.0, accuracy(n) - 0.03), min(1.0, accuracy(n) + 0.03)],
        }
        for n in lengths
    ]
    if name == "attention":
        by_length[-1] |= {"accuracy": None, "interval": None, "result": "out_of_memory"}
    grid = {
        "lengths": lengths, "depths": depths, "accuracy": [[accuracy(n, d) for d in depths] for n in lengths],
        "n": [[40] * len(depths) for _ in lengths],
    }
    grid["accuracy"][0][0], grid["n"][0][0] = None, 0
    by_distance = [[2**p, accuracy(2 ** max(p, 6)), 100 * p + 1] for p in range(10)]
    return common(
        "extrapolation", name, seed, task=task, trained_length=trained, multiples=list(MULTIPLES), by_length=by_length,
        by_distance=by_distance, grid=grid, note=None,
    )  # fmt: skip


def tried(name: str, rate: float, chosen: float | None = None, seed: int = 0) -> dict[str, Any]:
    """A score of one learning rate of several."""
    return {**quality(name, seed, abs(math.log10(rate) + 3) * 0.2), "lr": rate, "chosen_lr": chosen}


def failed(name: str, reason: str, seed: int = 0) -> dict[str, Any]:
    """A training that ended without a model."""
    return {**train(name, seed), "failed": reason}


def wide_records() -> list[dict[str, Any]]:
    """Everything, with a second task, several seeds, recall beyond the trained length, and what failed."""
    out = records()
    for name, (first, far) in {"attention": (0.97, 0.31), "mamba2": (0.62, 0.24), "hybrid-3m1a": (0.98, 0.91)}.items():
        shift = 0.002 * len(name)
        out += [quality(name, 1, 0.02 + shift), quality(name, 2, -0.01 - shift), train(name, 1), train(name, 2)]
        out += [beyond(name), beyond(name, seed=1), recall(name, first, far)]
    out += [kernel("mamba2", "chunked", 1.0, "~"), kernel("mamba2", "reference", 3.1, "slower"), fits("mamba2")]
    oom = {"tokens_per_s": None, "median_s": None, "spread_s": None, "times": [], "note": "out of memory"}
    out.append({**speed("attention", "prefill", 8192, 1), **oom})
    out.append(failed("diverged", "NonFiniteError: the loss at step 41 is nan"))
    return out


def records() -> list[dict[str, Any]]:
    """Everything, of all three recipes, with one seed."""
    out = []
    for name in RECIPES:
        out += [model(name), train(name), quality(name), extrapolation(name), memory(name), memory(name, "decode")]
        out += [
            speed(name, "train"),
            *(speed(name, "prefill", n, 1) for n in (512, 1024, 2048, 4096)),
            speed(name, "decode", 512, 1),
        ]
    return out


def deep_model(name: str = "deep") -> dict[str, Any]:
    """48 layers with a shared block, layers without a mixer, and groups that repeat."""
    layers = ["k"] + (["k", "k", "k", "s"] * 5 + ["e", "m"]) * 2 + ["k", "m", "e"]
    blocks = {
        "k": {
            "type": "prenorm",
            "shared": False,
            "mixer": {"type": "kda", "summary": "n_heads=16 head_dim=128"},
            "channel_mixer": {"type": "moe", "summary": "n_experts=64 top_k=8"},
        },
        "s": {
            "type": "prenorm",
            "shared": True,
            "mixer": {"type": "attention", "summary": "n_heads=32 n_kv_heads=8 position=none a_long_option=1"},
            "channel_mixer": {"type": "swiglu", "summary": "d_ff=688"},
        },
        "m": {"type": "prenorm", "shared": False, "mixer": {"type": "mamba2", "summary": ""}, "channel_mixer": None},
        "e": {"type": "prenorm", "shared": False, "mixer": None, "channel_mixer": {"type": "mlp", "summary": ""}},
    }
    stack = {
        "name": "decoder",
        "d_model": 2048,
        "pattern": "k ((k*3 s)*5 e m)*2 k m e",
        "layers": layers,
        "blocks": blocks,
    }
    return common("model", name, params={}, stacks=[stack], state_bytes=None)
