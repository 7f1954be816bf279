"""Time and memory of a forward and a backward pass at several lengths, for attention that does not look everywhere.

    python benchmarks/sparse_length.py [mixer ...] [--lengths 4096 16384 65536]

A token of a window, of dilated, Longformer's or BigBird's attention looks at a bounded number of others: time and memory a
token must not depend on the length. A router or an indexer scores blocks or tokens that grow in number, and says so by its
``time_exponent``. Each figure comes from a process of its own, on one thread: processor seconds, the median of three
passes, and the growth of the peak of resident memory from the built mixer on.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

D_MODEL, N_HEADS, WINDOW = 256, 4, 256
OPTIONS: dict[str, dict[str, Any]] = {
    "attention": {},
    "sliding_attention": {"window": WINDOW},
    "dilated": {"window": WINDOW},
    "longformer": {"window": WINDOW + 1},
    "bigbird": {},
    "chunked_attention": {"attention_chunk_size": 1024},
    "strided_sparse": {},
    "moba": {},
    "nsa": {},
    "indexed_attention": {},
}
"""The forms, with what is said beside ``n_heads``; one that is not installed is left out."""
TARGET = 1.3


def one(name: str, length: int) -> tuple[float, float]:
    """Seconds of a pass, and megabytes at its peak."""
    import torch

    from hybridtf.core import BuildContext, active

    torch.set_num_threads(1)
    config: Any = active()["mixers"].make({"type": name, "n_heads": N_HEADS, **OPTIONS[name]})
    mixer = config.build(BuildContext(d_model=D_MODEL, max_seq_len=length))

    def step(t: int) -> float:
        x = torch.randn(1, t, D_MODEL, requires_grad=True)
        begun = time.thread_time()
        y, *_ = mixer(x)
        y.sum().backward()
        return time.thread_time() - begun

    step(64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = [step(length) for _ in range(3)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return statistics.median(seconds), peak / 1024


def measure(name: str, length: int) -> tuple[float, float]:
    """:func:`one` in a process of its own."""
    command = [sys.executable, __file__, "--one", name, str(length)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(found[0]), float(found[1])


def main() -> int:
    """Prints the table; 1 where a form of exponent 1 takes more time or memory a token at the longest length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixers", nargs="*", help="by name; none: every form that is installed")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--one", nargs=2, metavar=("MIXER", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(*one(options.one[0], int(options.one[1])))
        return 0
    from hybridtf.core import active

    registry = active()["mixers"]
    names = options.mixers or [name for name in OPTIONS if name in registry.names()]
    heads = " | ".join(f"{length:,}" for length in options.lengths)
    print(f"| mixer | declared | us a token at {heads} | measured | KiB a token at {heads} |")
    print("| --- " * (3 + 2 * len(options.lengths)) + "|")
    slow = []
    for name in names:
        rows = [measure(name, length) for length in options.lengths]
        times = [seconds / length * 1e6 for (seconds, _), length in zip(rows, options.lengths, strict=True)]
        sizes = [mib * 1024 / length for (_, mib), length in zip(rows, options.lengths, strict=True)]
        declared = registry.get(name).time_exponent if "window" not in OPTIONS[name] else 1.0
        exponent = 1 + math.log(times[-1] / times[0]) / math.log(options.lengths[-1] / options.lengths[0])
        words = [f"{value:.1f}" for value in times], [f"{value:.1f}" for value in sizes]
        print(f"| `{name}` | n^{declared:g} | {' | '.join(words[0])} | n^{exponent:.2f} | {' | '.join(words[1])} |", flush=True)
        if sizes[-1] > TARGET * sizes[0] or (declared == 1 and times[-1] > TARGET * times[0]):
            slow.append(name)
    if slow:
        print(f"above {TARGET} a token: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
