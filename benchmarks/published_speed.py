"""Time published architectures here and in transformers: the same weights, in turns, in one process.

    python benchmarks/published_speed.py [--lengths 512 2048] [--scale 8] [--rounds 5] [architecture ...]

The reference models of the tests (``tests/interop/tiny_oracles.py``) at ``--scale`` times their widths, written in the
published naming and read by both. Two phases: one forward over a row of each length, and ``--decode`` further tokens, one
by one, after the shortest. transformers has its own defaults (its fastest attention, its cache); its scans are plain
PyTorch, for its kernels need a GPU. Times are those of the processor's clock, on one thread, so that other work on the
machine falls on both alike; what counts is the ratio of the medians: below 1 is faster here.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1]))
from hybridtf.bench.timing import Timed, time_rounds
from hybridtf.cost.phases import Step
from hybridtf.interop import import_checkpoint
from hybridtf.models import LanguageModel
from tests.interop import oracles, tiny_oracles

WIDTHS = re.compile(
    r"hidden_size|intermediate_size|ffn_hidden_size|ffn_dim|n_embd|d_model|embed_dim|embedding_dim|word_embed_proj_dim|n_inner|d_ff|"
    r"\w*head_?dim|head_dim_\w+|\w*d_head|\w*lora_rank|\w*intermediate_size\w*|\w*_latent_size|attention_hidden_size|lru_width|"
    r"mamba_d_ssm|kv_channels|time_step_rank|mamba_dt_rank|rotary_dim|dim_model_base"
)
"""Settings that are widths; numbers of heads, layers, experts and states stay as they are."""
LONGER = re.compile(r"(max_position_embeddings|n_positions|max_seq_len|context_length)")


def scaled(config: Any, scale: int, length: int) -> Any:
    """``config`` with all widths ``scale`` times as large and positions for ``length`` tokens."""
    config = copy.deepcopy(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, bool):
            continue
        if WIDTHS.fullmatch(name) and isinstance(value, int):
            setattr(config, name, value * scale)
        elif WIDTHS.fullmatch(name) and isinstance(value, list) and all(isinstance(v, int) for v in value):
            setattr(config, name, [v * scale for v in value])
        elif LONGER.fullmatch(name) and isinstance(value, int):
            setattr(config, name, max(value, length))
        elif isinstance(value, dict):
            widths = {k: v * scale for k, v in value.items() if WIDTHS.fullmatch(str(k)) and type(v) is int}
            setattr(config, name, {**value, **widths})
    return config


def both(name: str, scale: int, length: int, folder: Path) -> tuple[LanguageModel, nn.Module]:
    """Ours and theirs with the same weights."""
    arch = tiny_oracles.ARCHS[name]
    large = f"{name}@scaled"
    tiny_oracles.ARCHS[large] = dataclasses.replace(
        arch, name=large, config=lambda: scaled(arch.config(), scale, length), attn=None,
    )
    try:
        tiny_oracles.save(large, str(folder))
        ours = import_checkpoint(folder).model.eval()
        theirs = tiny_oracles.hf_class(arch.model).from_pretrained(folder, dtype=torch.float32).eval()
    finally:
        del tiny_oracles.ARCHS[large]
    return ours, theirs


def forward_steps(ours: LanguageModel, theirs: nn.Module, ids: Tensor) -> list[Step]:
    return [_Run(lambda: ours(ids)), _Run(lambda: theirs(ids, use_cache=False))]


def decode_steps(name: str, ours: LanguageModel, theirs: nn.Module, ids: Tensor, n: int) -> list[Step]:
    """Each run reads ``n`` further tokens on what the last run left: lengths grow alike on both sides."""
    key = tiny_oracles.ARCHS[name].cache_key
    t, tokens = ids.shape[1], ids[:, :1]
    here = {"state": ours(ids, state=ours.init_state(1, max_len=4 * t)).state}
    there = {key: theirs(ids, use_cache=True)[key]}

    def run_ours() -> None:
        for _ in range(n):
            here["state"] = ours(tokens, state=here["state"]).state

    def run_theirs() -> None:
        for _ in range(n):
            there[key] = theirs(tokens, **{key: there[key]}, use_cache=True)[key]

    return [_Run(run_ours), _Run(run_theirs)]


class _Run(Step):
    """Any call as a step."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.tokens = call, 0

    def run(self) -> None:
        self.call()


def _ratio(timed: list[Timed]) -> tuple[float, float, float]:
    here, there = (statistics.median(one.times) for one in timed)
    return here, there, here / there


@torch.inference_mode()
def measure(name: str, options: argparse.Namespace) -> dict[str, tuple[float, float, float] | str]:
    """By phase: seconds here, seconds there, and their ratio, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = both(name, options.scale, 4 * max(options.lengths), Path(folder))
    rows = torch.randint(3, 80, (1, max(options.lengths)), generator=torch.Generator().manual_seed(0))
    time_pair = functools.partial(time_rounds, rounds=options.rounds, warmup=1, round_s=0.0, clock=time.process_time)
    found: dict[str, Any] = {}
    for length in options.lengths:
        found[str(length)] = _ratio(time_pair(forward_steps(ours, theirs, rows[:, :length])))
    try:
        found["decode"] = _ratio(time_pair(decode_steps(name, ours, theirs, rows[:, : min(options.lengths)], options.decode)))
    except Exception as error:  # transformers' caches fail in ways of their own; the other phases still count
        found["decode"] = str(error).splitlines()[0][:60]
    return found


def main() -> int:
    """Prints the table; 1 where a ratio is above ``--limit``, or an architecture did not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help="by name; none: all, without their variants")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--scale", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode", type=int, default=16, help="tokens of a run of decoding")
    parser.add_argument("--limit", type=float, default=1.1, help="ratios up to here are those of noise")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    phases = [*map(str, options.lengths), "decode"]
    print(f"| architecture | {' | '.join(phases)} |\n| --- |{' --- |' * len(phases)}")
    slow = 0
    for name in options.architectures or [name for name in oracles.names() if "@" not in name]:
        try:
            found = measure(name, options)
        except Exception as error:
            print(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:100]} |", flush=True)
            slow += 1
            continue
        slow += sum(not isinstance(one, str) and one[2] > options.limit for one in found.values())
        cells = [v if isinstance(v, str) else f"{v[0] * 1e3:.1f} / {v[1] * 1e3:.1f} ms, {v[2]:.2f}" for v in found.values()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return int(slow > 0)


if __name__ == "__main__":
    raise SystemExit(main())
