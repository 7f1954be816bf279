"""Embeddings of n-grams by hashing: the last n tokens, n = 2 .. ``ngram_size``, are looked up in tables of prime sizes.

    g_n  = xor_{s < n} m_s id_{t-s};    e_t = the rows (g_n mod p_nh) of all n and hashes h, side by side

Before a document's start stands ``start_token``; where that token occurs, n-grams begin anew behind it. Multipliers m_s are odd
and drawn from a seed (SplitMix64), so small that products of ids do not overflow; sizes p are consecutive primes. Both as in
transformers' ``qwen4_exp``; the idea is Engram's (https://arxiv.org/abs/2601.07372).

Axes: b batch, t time, n ngram_size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hybridtf.core import BuildContext, ConvWindow, Segments

_MASK, _GAMMA, _PLACES = 2**64 - 1, 0x9E3779B97F4A7C15, 10007


def _mixed(value: int) -> int:
    """A step of SplitMix64."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def multipliers(vocab_size: int, ngram_size: int, place: int, seed: int) -> tuple[int, ...]:
    """Odd numbers, one for each token of an n-gram. ``place``: which of a model's parts with n-grams this is."""
    half = max(1, (2**63 - 1) // vocab_size // 2)
    begin = seed + _PLACES * place
    return tuple(2 * (_mixed((begin + _GAMMA * (i + 1)) & _MASK) % half) + 1 for i in range(ngram_size))


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def primes(least: int, skip: int, count: int) -> tuple[int, ...]:
    """``count`` primes in a row that are at least ``least``, after the first ``skip`` of them."""
    found: list[int] = []
    n = least
    while len(found) < skip + count:
        if _is_prime(n):
            found.append(n)
        n += 1
    return tuple(found[skip:])


class TokenWindow(nn.Module):
    """The last ``size`` tokens of each token's document, itself first. What the state holds is relative to ``start_token``, so
    that zeros, before a document's start, stand for it."""

    def __init__(self, size: int, start_token: int) -> None:
        super().__init__()
        self.size, self.start_token = size, start_token

    def init_state(self, batch_size: int, device: torch.device) -> ConvWindow:
        """No token yet; oldest first."""
        return ConvWindow.empty(batch_size, {"tokens": (self.size - 1,)}, dtype=torch.int64, device=device)

    def forward(
        self, ids: Tensor, segments: Segments | None, state: ConvWindow | None
    ) -> tuple[list[Tensor], ConvWindow | None]:
        """Ids (b t) to ``size`` tensors (b t), of pads without meaning; and the state after the call."""
        (b, t), width = ids.shape, self.size - 1
        own = ids - self.start_token
        old = own.new_zeros(b, width) if state is None else state["tokens"]
        position = torch.arange(t, device=ids.device).expand(b, t)
        rank, carried = position, torch.ones_like(ids, dtype=torch.bool)
        if segments is not None:
            own = own.gather(1, torch.argsort((~segments.real).to(torch.int8), dim=1, stable=True))  # real ones in front
            rank = (segments.real.to(torch.int64).cumsum(1) - 1).clamp(min=0)
            position, carried = segments.position, segments.ids == segments.carried[:, None]
        row = torch.cat([old, own], 1)
        found = [row.gather(1, rank + width - s).masked_fill(~(carried | (position >= s)), 0) for s in range(self.size)]
        for s in range(2, self.size):  # nothing from before a start token
            found[s] = torch.where(found[s - 1] == 0, 0, found[s])
        after = None if state is None else self._after(found, state, segments, t)
        return [x + self.start_token for x in found], after

    def _after(self, found: list[Tensor], state: ConvWindow, segments: Segments | None, t: int) -> ConvWindow:
        tokens = state["tokens"]
        if t and self.size > 1:
            newest = torch.stack(found[-2::-1], -1)  # oldest first
            if segments is None:
                tokens = newest[:, -1]
            else:
                steps = torch.arange(t, device=tokens.device)
                last = torch.where(segments.real, steps, -1).amax(1)
                own = newest[torch.arange(len(last), device=last.device), last.clamp(min=0)]
                tokens = torch.where(last[:, None] < 0, tokens, own)
        return state.advance({"tokens": tokens.clone()}, segments, t)


class HashedNgrams(nn.Module):
    """See the module. ``n_hashes`` rows of the table for each n; together they are ``width`` channels.

    ``table_size``: the least size of a part of the table; ``multiple``: the whole has a multiple of so many rows, the last of
    which may be of no n-gram.
    """

    def __init__(
        self, ctx: BuildContext, *, width: int, ngram_size: int, n_hashes: int, table_size: int, vocab_size: int,
        start_token: int, place: int, seed: int, multiple: int,
    ) -> None:
        super().__init__()
        self.ngram_size, self.n_hashes = ngram_size, n_hashes
        n = (ngram_size - 1) * n_hashes
        self.multipliers = multipliers(vocab_size, ngram_size, place, seed)
        self.sizes = primes(table_size, place * n, n)
        rows = -(-sum(self.sizes) // multiple) * multiple
        self.window = TokenWindow(ngram_size, start_token)
        self.embedding = nn.Embedding(rows, width // n, **ctx.factory)

    def init_state(self, batch_size: int) -> ConvWindow:
        """No token yet."""
        return self.window.init_state(batch_size, self.embedding.weight.device)

    def rows(self, tokens: list[Tensor]) -> Tensor:
        """(b t n_hashes * (n - 1)): which rows of the table the last tokens (b t each, newest first) ask for."""
        mixed, found, offset = tokens[0] * self.multipliers[0], [], 0
        for n in range(1, self.ngram_size):
            mixed = mixed ^ (tokens[n] * self.multipliers[n])
            for size in self.sizes[(n - 1) * self.n_hashes : n * self.n_hashes]:
                found.append(torch.remainder(mixed, size) + offset)
                offset += size
        return torch.stack(found, -1)

    def forward(
        self, ids: Tensor, segments: Segments | None, state: ConvWindow | None
    ) -> tuple[Tensor, ConvWindow | None]:
        """Ids (b t) to (b t width), and the state after the call."""
        tokens, after = self.window(ids, segments, state)
        y: Tensor = self.embedding(self.rows(tokens)).flatten(-2)
        return y, after
