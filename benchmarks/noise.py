"""What the speed harness finds on this machine: pairs of the same work, and pairs of which one does 3 % more.

    python benchmarks/noise.py [--pairs 20] [--rounds 20] [--more 3]

One run is 100 products of two 96 x 96 matrices, or 103 of them: the difference is work and not waiting. Each pair is measured
by itself as ``bench speed`` measures two recipes, control included. The noise is whatever else the machine does meanwhile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import NamedTuple

import torch

from hybridtf.bench import noise
from hybridtf.bench.caches import Flush
from hybridtf.bench.threads import pinned
from hybridtf.bench.timing import Work, time_rounds

PRODUCTS = 100


class Pair(NamedTuple):
    """One measurement: the verdict on the second, its ratio, and what the control said."""

    verdict: noise.Verdict
    ratio: noise.Ratio
    control: noise.Control
    reasons: tuple[str, ...]


def work(n: int) -> Work:
    """``n`` products, of matrices of its own."""
    a, b, out = (torch.randn(96, 96) for _ in range(3))

    def run() -> None:
        for _ in range(n):
            torch.mm(a, b, out=out)

    return Work(run)


def measure(n: int, rounds: int, flush: Flush, seed: int) -> Pair:
    """:data:`PRODUCTS` products twice, and ``n`` beside them."""
    first, other = work(PRODUCTS), work(n)
    again, one, two = (t.times for t in time_rounds([first, first, other], rounds=rounds, warmup=2, flush=flush, seed=seed))
    control, ratio = noise.control_of(one, again), noise.ratio_of(two, one)
    verdict, reasons = noise.verdict_of(ratio, control)
    return Pair(verdict, ratio, control, reasons)


def row(name: str, pairs: list[Pair]) -> str:
    """A line of the table: medians over the pairs, and how often each verdict came."""
    said = [pair.verdict for pair in pairs]
    spread, floor, detectable, needed, ratio = (
        statistics.median(values) for values in (
            [pair.control.ratio.spread for pair in pairs], [pair.control.floor or 0 for pair in pairs],
            [pair.control.detectable or 0 for pair in pairs], [pair.control.rounds_for(0.03) or 0 for pair in pairs],
            [pair.ratio.time for pair in pairs],
        )
    )
    return (
        f"| {name} | {said.count('slower')} / {said.count('faster')} / {said.count('~')} | "
        f"{sum(bool(pair.reasons) for pair in pairs)} | {ratio:.3f} | {100 * spread:.1f} % | {100 * floor:.1f} % | "
        f"{100 * detectable:.1f} % | {needed:.0f} |"
    )


def main() -> int:
    """Prints the table; 1 where the same work twice got a verdict, or the heavier work was called faster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--more", type=int, default=3, help="per cent of work that is injected")
    options = parser.parse_args()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    found: dict[str, list[Pair]] = {"the same twice": [], f"{options.more} % more": []}
    with pinned(1), torch.no_grad():
        flush = Flush(torch.device("cpu"))
        for i in range(options.pairs):
            for name, more in zip(found, (0, options.more), strict=True):
                found[name].append(measure(PRODUCTS * (100 + more) // 100, options.rounds, flush, seed=i))
    after = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"{options.rounds} rounds a pair, load {load:.1f} before and {after:.1f} after\n")
    print("| pair | slower / faster / ~ | refused | ratio | spread of the control | floor | detectable | rounds for 3 % |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, pairs in found.items():
        print(row(name, pairs))
    same, heavier = found.values()
    wrong = [pair for pair in same if pair.verdict != "~"] + [pair for pair in heavier if pair.verdict == "faster"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
