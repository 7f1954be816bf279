"""Time a token of one forward over a short and over a long sequence, for every mixer whose state does not grow.

    python benchmarks/prefill_length.py [--short 2048] [--long 32768] [mixer ...]

A state of fixed size, or a window, does a fixed work a token. Both lengths are measured in turns in one process, on one thread,
by the processor's clock, without gradients; what counts is the ratio of the medians.

Tensors of the long call are above the size from which the C library asks the system for fresh pages each time it allocates
(32 MiB), and the fault of each page costs up to as much as the work on it. That is the allocator's cost, not the mixer's, so
the program runs itself again with that size out of reach; ``--faults`` leaves it as it is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import torch
from decode_length import D_MODEL, TARGET, config_of

from hybridtf.core import BuildContext, Growing, active, leaves, state_bytes

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 33), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""glibc keeps what was freed, whatever its size; other C libraries do not read these."""


@torch.inference_mode()
def measure(name: str, lengths: tuple[int, int], repeats: int) -> tuple[list[float], list[int]] | None:
    """Median seconds a token and bytes of the state after it, at both lengths; None for a mixer whose state grows."""
    config = config_of(name)
    if config.looks_ahead:
        return None
    mixer = config.build(BuildContext(d_model=D_MODEL, max_seq_len=max(lengths))).eval()
    state = mixer.init_state(1)
    if mixer.needs_context or not leaves(state) or any(isinstance(leaf, Growing) for leaf in leaves(state)):
        return None
    inputs = [torch.randn(1, t, D_MODEL) for t in lengths]
    times: list[list[float]] = [[], []]
    sizes = [0, 0]
    for turn in range(repeats + 1):  # the first warms up
        for i, x in enumerate(inputs):
            start = time.thread_time()
            state = mixer(x, state=mixer.init_state(1))[1]
            if turn:
                times[i].append((time.thread_time() - start) / x.shape[1])
            sizes[i] = state_bytes(state)
    return [statistics.median(kept) for kept in times], sizes


def main() -> int:
    """Prints the table; 1 where a token of the long sequence takes more than the target, or the state has other bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixers", nargs="*", help="by name; none: all that are installed")
    parser.add_argument("--short", type=int, default=2048)
    parser.add_argument("--long", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--faults", action="store_true", help="leave the C library's allocator as it is")
    options = parser.parse_args()
    if not options.faults and not ALLOCATOR.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})
    torch.set_num_threads(1)
    print(f"| mixer | us a token at {options.short} / {options.long} | ratio | bytes |")
    print("| --- | --- | --- | --- |")
    slow = []
    for name in options.mixers or active()["mixers"].configs():
        found = measure(name, (options.short, options.long), options.repeats)
        if found is None:
            continue
        (short, long), (few, many) = found
        held = f"{few:,}" if few == many else f"{few:,} / {many:,}"
        print(f"| `{name}` | {short * 1e6:.2f} / {long * 1e6:.2f} | {long / short:.2f} | {held} |", flush=True)
        if long / short > TARGET or few != many:
            slow.append(name)
    if slow:
        print(f"above {TARGET}, or of a state that grows: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
