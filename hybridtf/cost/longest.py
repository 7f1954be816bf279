"""The longest length that fits under a limit: by doubling, then between a length that fits and one that does not."""

from __future__ import annotations

from collections.abc import Callable

from hybridtf.core import ConfigError

PeakAt = Callable[[int], int | None]
"""Bytes at the peak for a length; None: out of memory."""

FARTHEST = 16
"""A search goes at most so many times as far as it has been."""


RESOLUTION = 0.01
"""The search ends when a length fits and one longer by at most this share does not."""


def longest_length(
    peak_at: PeakAt, limit_bytes: int, max_length: int = 1 << 20, *, start: int = 64, resolution: float = RESOLUTION
) -> int:
    """A length that fits ``limit_bytes``, at most ``max_length``, while one longer by ``resolution`` (or by one token)
    does not; 0 where one token is too many.

    Peaks are taken to rise with length. The next length is guessed on the line through the two nearest peaks, since
    memory is close to a straight line, and at every other turn halfway, so that a bad guess costs little.
    """
    if limit_bytes < 1 or max_length < 1:
        raise ConfigError(f"limit_bytes and max_length must be at least 1, got {limit_bytes} and {max_length}")
    fits: tuple[int, int] | None = None
    length = min(start, max_length)
    while True:
        peak = peak_at(length)
        if peak is None or peak > limit_bytes:
            fails = (length, peak)
            break
        if length == max_length:
            return length
        # Twice as long, or as far as the line through the last two peaks says if that is farther.
        target = 2 * length
        if fits is not None and peak > fits[1]:
            on_line = length + (limit_bytes - peak) * (length - fits[0]) // (peak - fits[1]) + 1
            target = max(min(on_line, FARTHEST * length), length + 1)
        fits, length = (length, peak), min(target, max_length)
    if fits is None:
        return _between(peak_at, limit_bytes, (0, 0), fails, resolution, guess=False)
    return _between(peak_at, limit_bytes, fits, fails, resolution, guess=True)


def _between(
    peak_at: PeakAt, limit: int, fits: tuple[int, int], fails: tuple[int, int | None], resolution: float, *, guess: bool
) -> int:
    turn = 0
    while fails[0] - fits[0] > max(1.0, resolution * fits[0]):
        low, high = fits[0], fails[0]
        length = (low + high) // 2
        if guess and turn % 3 < 2 and fails[1] is not None and fails[1] > fits[1]:
            on_line = low + (limit - fits[1]) * (high - low) // (fails[1] - fits[1])
            # A little beyond the line at every second guess: the bracket closes from both sides.
            beyond = (turn % 3) * max(int(resolution * low) // 2, 1)
            length = min(max(on_line + beyond, low + 1), high - 1)
        peak = peak_at(length)
        if peak is None or peak > limit:
            fails = (length, peak)
        else:
            fits = (length, peak)
        turn += 1
    return fits[0]
