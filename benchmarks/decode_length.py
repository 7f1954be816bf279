"""Seconds of a decoded token after a short and after a long context, for every mixer that is installed.

    python benchmarks/decode_length.py [--short 2048] [--long 32768] [mixer ...]

A state of fixed size must decode at one speed whatever lies behind it; attention, whose state grows, stands beside it for
contrast. Both contexts are measured in turns in one process, on one thread, by the processor's clock, so that other work on
the machine falls on both; what counts is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any, NamedTuple

import torch

from hybridtf.bench.timing import quartiles
from hybridtf.core import BuildContext, Growing, SequenceMixer, SequenceMixerConfig, State, active, leaves, state_bytes

D_MODEL = 256
N_HEADS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "chunked_attention": {"attention_chunk_size": 1024},
    "sliding_attention": {"window": 256},
}
"""What a mixer is given at this width beside ``n_heads``, where it counts heads. One that needs more than that is built as its
``tiny()``."""
TOKENS = 50
"""Decoded in one timed run."""
CHUNK = 2048
TARGET = 1.3


class Row(NamedTuple):
    """One mixer: kind and bytes of its state at both lengths, seconds a token, their ratio and its quartiles."""

    name: str
    kinds: str
    short_bytes: int
    long_bytes: int
    short_s: float
    long_s: float
    ratio: float
    low: float
    high: float


class Decoder:
    """A mixer that has read ``context`` tokens, and goes on token by token."""

    def __init__(self, mixer: SequenceMixer, context: int, room: int) -> None:
        self.mixer = mixer
        self.state: State = mixer.init_state(1, context + room)
        generator = torch.Generator().manual_seed(0)
        for start in range(0, context, CHUNK):
            x = torch.randn(1, min(CHUNK, context - start), D_MODEL, generator=generator)
            self.state = mixer(x, state=self.state)[1]
        self.tokens = torch.randn(TOKENS, 1, 1, D_MODEL, generator=generator)

    def seconds(self) -> float:
        """Processor seconds of a token, over ``TOKENS`` of them."""
        start = time.thread_time()
        for token in self.tokens:
            self.state = self.mixer(token, state=self.state)[1]
        return (time.thread_time() - start) / TOKENS


def config_of(name: str) -> SequenceMixerConfig:
    """The mixer of a name at this width."""
    registry = active()["mixers"]
    cls = registry.get(name)
    required = {key for key, field in cls.model_fields.items() if field.is_required()}
    heads = cls.model_fields.get("n_heads")
    counted = heads is not None and (heads.is_required() or heads.default is not None)
    options = {**OPTIONS.get(name, {}), **({"n_heads": N_HEADS} if counted else {})}
    config = registry.make({"type": name, **options}) if required <= set(options) else cls.tiny()
    assert isinstance(config, SequenceMixerConfig)
    return config


@torch.inference_mode()
def measure(name: str, short: int, long: int, repeats: int) -> Row | None:
    """None for a mixer without a state, one for encoders, or one that needs another tensor beside x."""
    config = config_of(name)
    if config.looks_ahead:
        return None
    mixer = config.build(BuildContext(d_model=D_MODEL, max_seq_len=2 * long)).eval()
    if mixer.reads or mixer.needs_context or not leaves(mixer.init_state(1)):
        return None
    room = (repeats + 1) * TOKENS
    decoders = [Decoder(mixer, context, room) for context in (short, long)]
    sizes = [state_bytes(decoder.state) for decoder in decoders]
    times: list[list[float]] = [[], []]
    for turn in range(repeats + 1):  # the first warms up
        for decoder, kept in zip(decoders, times, strict=True):
            seconds = decoder.seconds()
            if turn:
                kept.append(seconds)
    low, high = quartiles([b / a for a, b in zip(*times, strict=True)])
    kinds = " ".join(sorted({type(leaf).__name__ for leaf in leaves(decoders[0].state)}))
    medians = [statistics.median(kept) for kept in times]
    return Row(name, kinds, *sizes, *medians, medians[1] / medians[0], low, high)


def main() -> int:
    """Prints the table; 1 where a state of fixed size decodes slower than the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixers", nargs="*", help="by name; none: all that are installed, and attention in a window")
    parser.add_argument("--short", type=int, default=2048)
    parser.add_argument("--long", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=15, help=f"runs of {TOKENS} tokens at each context")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.mixers or [*active()["mixers"].configs(), "sliding_attention"]
    print(f"| mixer | state | bytes at {options.short} / {options.long} | us a token | ratio | quartiles |")
    print("| --- | --- | --- | --- | --- | --- |")
    slow = []
    for name in names:
        row = measure(name, options.short, options.long, options.repeats)
        if row is None:
            continue
        print(
            f"| `{row.name}` | {row.kinds} | {row.short_bytes:,} / {row.long_bytes:,} | {row.short_s * 1e6:.0f} / "
            f"{row.long_s * 1e6:.0f} | {row.ratio:.2f} | {row.low:.2f} to {row.high:.2f} |", flush=True,
        )
        if row.ratio > TARGET and Growing.__name__ not in row.kinds:
            slow.append(row.name)
    if slow:
        print(f"above {TARGET}: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
