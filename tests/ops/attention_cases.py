"""Random calls of attention, and the judge that loops over every pair of tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from hybridtf.ops.attention import AttentionMask

BIASES = ("slopes", "sinks", "q_decay", "k_decay", "rel_q", "rel_bank")
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 31)


@dataclass(frozen=True, eq=False)
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    mask: AttentionMask

    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *self.biases().values()]

    def biases(self) -> dict[str, Tensor]:
        found = {name: getattr(self.mask, name) for name in BIASES}
        return {name: x for name, x in found.items() if x is not None}

    def text(self) -> str:
        mask = {f.name: getattr(self.mask, f.name) for f in fields(self.mask)}
        named = {name: tuple(x.shape) if isinstance(x, Tensor) else x for name, x in mask.items()}
        return f"q {tuple(self.q.shape)} k {tuple(self.k.shape)} v {tuple(self.v.shape)} {named}"


def run(fn: Callable[..., Tensor], case: Case, upper: Tensor | None = None, **options: object) -> list[Tensor]:
    """The output and every gradient, for a fixed upstream gradient."""
    out = fn(case.q, case.k, case.v, case.mask, **options)
    if upper is None:
        upper = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad(out, case.leaves(), upper, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, case.leaves(), strict=True)]
    return [out.detach(), *filled]


def check_equal(got: list[Tensor], want: list[Tensor], case: Case, *, atol: float, rtol: float = 0.0) -> None:
    names = ["out", "dq", "dk", "dv", *(f"d {name}" for name in case.biases())]
    for name, a, b in zip(names, got, want, strict=False):
        torch.testing.assert_close(a, b, atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}\n{case.text()}")


def tensors(
    b: int, t: int, s: int, h: int, g: int, k: int, v: int, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Case:
    gen = torch.Generator().manual_seed(seed)
    made = [
        torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((b, t, h, k), (b, s, g, k), (b, s, g, v))
    ]
    return Case(*made, AttentionMask())


def packed_ids(rng: random.Random, b: int, n: int) -> Tensor:
    """Documents of unequal lengths with pads anywhere; a row may be pads alone."""
    rows = []
    for _ in range(b):
        change, pad = rng.choice([0.0, 0.1, 0.3]), rng.choice([0.0, 0.2, 1.0] if rng.random() < 0.3 else [0.0, 0.2])
        current, row = 1, []
        for _ in range(n):
            current += rng.random() < change
            row.append(0 if rng.random() < pad else current)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64).reshape(b, n)


def positions_of(ids: Tensor) -> Tensor:
    """How many tokens of the same document come earlier."""
    same = ids[:, :, None] == ids[:, None, :]
    return same.tril(-1).sum(-1)


def marks(rng: random.Random, b: int, t: int, s: int) -> dict[str, Tensor]:
    """Ids and positions as a packed row, a static buffer, a shuffled row, positions alone, or nothing."""
    kind = rng.choice(["none", "none", "packed", "buffer", "shuffled", "positions", "ids"])
    if kind == "none":
        return {}
    ids = packed_ids(rng, b, max(s, t))
    pos = positions_of(ids)
    found = {"q_ids": ids[:, -t:] if t else ids[:, :0], "k_ids": ids[:, :s], "q_pos": pos[:, -t:], "k_pos": pos[:, :s]}
    found = {name: x[:, :0] if t == 0 and name[0] == "q" else x for name, x in found.items()}
    if kind == "buffer":
        length = torch.tensor([rng.randint(0, s) for _ in range(b)])[:, None]
        found["k_ids"] = (torch.arange(s) < length).long()
        found["k_pos"] = torch.arange(s).expand(b, s)
        found["q_ids"] = torch.ones(b, t, dtype=torch.int64)
        found["q_pos"] = length - t + torch.arange(t)
    if kind == "shuffled":
        order = torch.tensor(rng.sample(range(s), s), dtype=torch.int64)
        found["k_ids"], found["k_pos"] = found["k_ids"][:, order], found["k_pos"][:, order]
    if kind == "positions":
        return {"q_pos": found["q_pos"], "k_pos": found["k_pos"]}
    return {"q_ids": found["q_ids"], "k_ids": found["k_ids"]} if kind == "ids" else found


def random_case(seed: int, *, plain: bool = False, dtype: torch.dtype = torch.float64) -> Case:
    """Any mask rule, or (``plain``) those without softcap and without what is added to scores."""
    rng = random.Random(seed)
    b, g, r = rng.randint(1, 3), rng.choice([1, 2, 3]), rng.choice([1, 1, 2, 3])
    t = rng.choice(LENGTHS)
    s = rng.choice([t, t, t + rng.randint(0, 20), rng.choice(LENGTHS)])
    k = rng.choice([1, 3, 4, 8])
    case = tensors(b, t, s, g * r, g, k, rng.choice([k, k, 2, 5]), seed=seed, dtype=dtype)
    gen = torch.Generator().manual_seed(seed + 1)
    mask = AttentionMask(
        causal=rng.random() < 0.7,
        window=rng.choice([None, None, 1, 2, 3, 5, 8, 40]),
        prefix_len=torch.tensor([[rng.randint(0, 9)] * t for _ in range(b)]) if rng.random() < 0.25 else None,
        **marks(rng, b, t, s),
    )
    if not plain:
        heads = [torch.randn(g * r, generator=gen, dtype=torch.float64).to(dtype) for _ in range(2)]
        mask = replace(
            mask,
            softcap=rng.choice([None, None, 0.7, 30.0]),
            slopes=heads[0].abs().requires_grad_() if rng.random() < 0.3 else None,
            sinks=heads[1].requires_grad_() if rng.random() < 0.3 else None,
        )
        if mask.sinks is not None and rng.random() < 0.5:
            mask = replace(mask, sinks=torch.randn(b, t, g * r, generator=gen, dtype=torch.float64).to(dtype).requires_grad_())
        mask = replace(mask, **_more_biases(rng, gen, b, t, s, g * r, dtype))
    return replace(case, mask=mask)


def _more_biases(
    rng: random.Random, gen: torch.Generator, b: int, t: int, s: int, h: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    found = {}
    if rng.random() < 0.4:
        found |= {"q_decay": (b, t, h), "k_decay": (b, s, h)}
    if rng.random() < 0.4:
        width = rng.choice([1, 3])
        found |= {"rel_q": (b, t, h, width), "rel_bank": (width, rng.choice([1, 2, 5, 40]))}
    drawn = {name: 2 * torch.randn(shape, generator=gen, dtype=torch.float64) for name, shape in found.items()}
    return {name: x.to(dtype).requires_grad_() for name, x in drawn.items()}


def naive_sees(mask: AttentionMask, row: int, i: int, j: int, t: int, s: int) -> bool:
    """The rule for one pair, in words."""
    if mask.q_ids is not None and mask.k_ids is not None:
        ours, theirs = int(mask.q_ids[row, i]), int(mask.k_ids[row, j])
        if ours <= 0 or ours != theirs:
            return False
    at, key = (s - t + i, j) if mask.q_pos is None else (int(mask.q_pos[row, i]), int(mask.k_pos[row, j]))
    if mask.prefix_len is not None and max(at, key) < int(mask.prefix_len[row, i]):
        return True
    if mask.causal:
        return key <= at and (mask.window is None or key > at - mask.window)
    return mask.window is None or abs(at - key) < mask.window


def naive_biases(mask: AttentionMask, row: int, i: int, head: int, seen: list[int], t: int, s: int) -> Tensor:
    found = torch.zeros(len(seen), dtype=torch.float64)
    if mask.q_decay is not None:
        found = found + mask.q_decay[row, i, head] - mask.k_decay[row, seen, head]
    if mask.rel_q is not None:
        at = s - t + i if mask.q_pos is None else int(mask.q_pos[row, i])
        back = [at - (j if mask.k_pos is None else int(mask.k_pos[row, j])) for j in seen]
        near = torch.tensor([0 <= d < mask.rel_bank.shape[1] for d in back])
        rows = mask.rel_bank[:, [d if near[n] else 0 for n, d in enumerate(back)]]
        found = found + torch.where(near, mask.rel_q[row, i, head] @ rows, 0.0)
    return found


def naive_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """One query at a time over the list of keys that it sees."""
    b, t, h, width = q.shape
    s, repeats = k.shape[1], h // k.shape[2]
    rows = []
    for row, i, head in ((row, i, head) for row in range(b) for i in range(t) for head in range(h)):
        seen = [j for j in range(s) if naive_sees(mask, row, i, j, t, s)]
        if not seen:
            rows.append(0 * q[row, i, head].sum() + torch.zeros(v.shape[3], dtype=q.dtype))
            continue
        scores = (k[row, seen, head // repeats] @ q[row, i, head]) / width**0.5
        if mask.softcap is not None:
            scores = mask.softcap * torch.tanh(scores / mask.softcap)
        if mask.slopes is not None:
            at = s - t + i if mask.q_pos is None else int(mask.q_pos[row, i])
            keys = seen if mask.k_pos is None else mask.k_pos[row, seen].tolist()
            scores = scores - mask.slopes[head] * torch.tensor([abs(at - key) for key in keys], dtype=q.dtype)
        scores = scores + naive_biases(mask, row, i, head, seen, t, s)
        weights = scores.exp()
        sink = None if mask.sinks is None else mask.sinks[head] if mask.sinks.ndim == 1 else mask.sinks[row, i, head]
        total = weights.sum() + (0 if sink is None else sink.exp())
        rows.append((weights / total) @ v[row, seen, head // repeats])
    return torch.stack(rows).reshape(b, t, h, -1)
