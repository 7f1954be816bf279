"""Block sparse attention against masks written token by token, and what it costs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hybridtf.core import ConfigError, KernelError, Segments
from hybridtf.ops.attention import AttentionMask, attention_reference
from hybridtf.ops.block_sparse_attention import (
    Places,
    SparseRule,
    block_sparse_attention_reference,
    block_sparse_attention_torch,
    choose_blocks,
    hold,
    random_blocks,
)
from hybridtf.ops.block_sparse_attention.grouped import PARTS, _backward, _Call, _forward, clauses_of
from tests.ops.live_bytes import Peak

KERNELS = {"reference": block_sparse_attention_reference, "torch": block_sparse_attention_torch}
ROWS = ("1111110222222222222033", "0011111111111111111111", "2222222022222220333000", "1111111111110111111111")

RULES = {
    "window": (SparseRule(window=3), lambda p, j, n: p - j < 3),
    "window, both ways": (SparseRule(block=5, causal=False, window=4), lambda p, j, n: abs(p - j) < 4),
    "dilated": (SparseRule(window=3, dilation=2), lambda p, j, n: p - j in (0, 2, 4)),
    "dilated, both ways": (SparseRule(causal=False, window=2, dilation=3), lambda p, j, n: p - j in (-3, 0, 3)),
    "strided": (SparseRule(window=4, stride=3), lambda p, j, n: p - j <= 3 or (p - j) % 3 == 0),
    "fixed": (SparseRule(block=4, near=1, summary=1), lambda p, j, n: p // 4 == j // 4 or j % 4 == 3),
    "chunks": (SparseRule(block=5, near=1), lambda p, j, n: p // 5 == j // 5),
    "blocks": (
        SparseRule(block=3, causal=False, near=2, first=1, last=1),
        lambda p, j, n: abs(p // 3 - j // 3) < 2 or j < 3 or j // 3 == (n - 1) // 3,
    ),
    "everything": (SparseRule(stride=1), lambda p, j, n: True),
    "all at once": (
        SparseRule(block=4, window=2, dilation=3, near=2, first=1, summary=1, stride=5),
        lambda p, j, n: p - j in (0, 3) or p // 4 - j // 4 < 2 or j < 4 or j % 4 == 3 or (p - j) % 5 == 0,
    ),
    "nothing but what is marked or chosen": (SparseRule(block=3), lambda p, j, n: False),
}


def segments():
    return Segments.from_ids(torch.tensor([[int(c) for c in row] for row in ROWS]))


def draw(h, g, t, b=4, width=4, value=3, dtype=torch.float64):
    shapes = ((b, t, h, width), (b, t, g, width), (b, t, g, value))
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]


def by_hand(q, k, v, ids, sees, marked=None, blocks=None, size=1, causal=True):
    """One query, one head, one key at a time, over the columns of the query's document."""
    b, t, h, width = q.shape
    r, rows = h // k.shape[2], []
    for row in range(b):
        for at in range(t):
            columns = [] if ids[row, at] == 0 else (ids[row] == ids[row, at]).nonzero()[:, 0].tolist()
            for head in range(h):
                seen = []
                for j, column in enumerate(columns):
                    p = columns.index(at)
                    shown = sees(p, j, len(columns)) or (marked is not None and bool(marked[row, column]))
                    if blocks is not None:
                        mine = blocks[row, at, head * blocks.shape[2] // h].tolist()
                        shown = shown or j // size in mine
                    if shown and (j <= p or not causal):
                        seen.append(column)
                if not seen:
                    rows.append(v.new_zeros(v.shape[3]))
                    continue
                weights = (k[row, seen, head // r] @ q[row, at, head] * width**-0.5).softmax(0)
                rows.append(weights @ v[row, seen, head // r])
    return torch.stack(rows).view(b, t, h, -1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", RULES)
def test_rules_marked_and_chosen_blocks_equal_the_loop(name, kernel):
    rule, sees = RULES[name]
    for case, (h, g, choosers, mark) in enumerate(((2, 2, 0, False), (6, 2, 1, True), (6, 2, 2, False), (4, 2, 4, True))):
        if not choosers and not rule.clauses:
            continue
        packed = segments()
        q, k, v = draw(h, g, packed.ids.shape[1])
        marked = torch.rand(packed.ids.shape) < 0.2 if mark else None
        blocks = torch.rand(*packed.ids.shape, choosers, 7).argsort(-1)[..., :3] - 1 if choosers else None
        new = {"k": k, "v": v} if marked is None else {"k": k, "v": v, "marked": marked}
        held = hold(None, new, packed)
        y = KERNELS[kernel](
            q, held.data["k"], held.data["v"], held.places, rule, marked=held.data.get("marked"), blocks=blocks
        )
        want = by_hand(q, k, v, packed.ids, sees, marked, blocks, rule.block, rule.causal)
        torch.testing.assert_close(y, want, rtol=0, atol=1e-12, msg=lambda m, c=case: f"case {c}: {m}")
        weight = torch.randn_like(y)
        got, expected = (torch.autograd.grad((z * weight).sum(), (q, k, v), allow_unused=True) for z in (y, want))
        for a, c in zip(got, expected, strict=True):
            torch.testing.assert_close(a, c, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["window", "strided", "everything", "all at once"])
def test_logs_of_sums_join_two_softmaxes(name, kernel):
    """Over keys of two kinds; where a query sees none of them the log is -inf."""
    (rule, sees), packed, op = RULES[name], segments(), KERNELS[kernel]
    ids = packed.ids
    q, k, v = draw(6, 2, ids.shape[1])
    blocks = torch.rand(*ids.shape, 1, 4).argsort(-1)[..., :2] - 1 if name == "all at once" else None
    held = hold(None, {"k": k, "v": v}, packed)
    y, lse = op(q, held.data["k"], held.data["v"], held.places, rule, blocks=blocks, return_lse=True)
    assert bool((lse.isinf() == (ids == 0)[..., None]).all())
    torch.testing.assert_close(y, by_hand(q, k, v, ids, sees, None, blocks, rule.block), rtol=0, atol=1e-12)
    ones = torch.ones_like(held.data["v"])
    scaled = op(q, held.data["k"] * 0, ones, held.places, rule, blocks=blocks, return_lse=True)[1]
    if blocks is None:  # scores of 0 count keys; the first document has six tokens
        counts = [float(sum(sees(p, j, 6) for j in range(p + 1))) for p in range(6)]
        torch.testing.assert_close(scaled[0, :6, 0].exp(), torch.tensor(counts, dtype=torch.float64))
    score = torch.randn(*lse.shape, dtype=torch.float64, requires_grad=True)
    total = torch.logaddexp(lse, score)
    got = y * (lse - total).exp()[..., None]
    dense = _beside(q, k, v, score, ids, sees, blocks, rule.block)
    torch.testing.assert_close(got, dense, rtol=0, atol=1e-12)
    weight = torch.randn_like(got)
    ours, theirs = (torch.autograd.grad((z * weight).sum(), (q, k, v, score)) for z in (got, dense))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def _beside(q, k, v, score, ids, sees, blocks, size):
    """One dense softmax with one more column that carries no value."""
    b, t, h, width = q.shape
    seen = torch.zeros(b, t, t, dtype=torch.bool)
    for row in range(b):
        for name in set(ids[row].tolist()) - {0}:
            at = (ids[row] == name).nonzero()[:, 0].tolist()
            for p, query in enumerate(at):
                chosen = [] if blocks is None else blocks[row, query, 0].tolist()
                for j in range(p + 1):
                    seen[row, query, at[j]] = bool(sees(p, j, len(at))) or j // size in chosen
    keys, values = (x.repeat_interleave(h // x.shape[2], 2) for x in (k, v))
    scores = (torch.einsum("bthk,bshk->bths", q, keys) * width**-0.5).masked_fill(~seen[:, :, None], -torch.inf)
    weights = torch.cat([scores, score[..., None]], -1).softmax(-1)[..., :-1]
    return torch.einsum("bths,bshv->bthv", weights, values)


@pytest.mark.parametrize("window", [1, 7, 200])
def test_a_window_is_that_of_attention_over_several_groups_of_queries(window):
    q, k, v = draw(4, 2, 151, b=2)
    ours = block_sparse_attention_torch(q, k, v, Places.default(2, 151, 151, q.device), SparseRule(window=window))
    theirs = attention_reference(q, k, v, AttentionMask(window=window))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{"window": 7}, {"window": 4, "dilation": 5}, {"block": 20, "near": 2}])
def test_older_keys_may_be_gone(options):
    q, k, v = draw(4, 2, 151, b=2)
    rule, dropped, start = SparseRule(**options), 37, 100
    whole = block_sparse_attention_reference(q, k, v, Places.default(2, 151, 151, q.device), rule)
    position = torch.arange(start, 151).expand(2, -1)
    zero = torch.zeros_like(position)
    places = Places(position, zero, zero + dropped, zero + 151 - dropped)
    for kernel in KERNELS.values():
        seen = kernel(q[:, start:], k[:, dropped:], v[:, dropped:], places, rule)
        torch.testing.assert_close(seen, whole[:, start:], rtol=0, atol=1e-12)


def test_gradients_by_finite_differences():
    q, k, v = draw(2, 1, 9, b=1, width=2, value=2)
    blocks = torch.rand(1, 9, 2, 3).argsort(-1)[..., :2]
    places, rule = Places.default(1, 9, 9, q.device), SparseRule(block=3, window=2, stride=4)
    assert torch.autograd.gradcheck(lambda *x: block_sparse_attention_torch(*x, places, rule, blocks=blocks), (q, k, v))


def test_no_second_derivatives():
    q, k, v = draw(2, 1, 5, b=1)
    y = block_sparse_attention_torch(q, k, v, Places.default(1, 5, 5, q.device), SparseRule(window=2))
    (dq,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    with pytest.raises(KernelError, match="second derivatives"):
        dq.sum().backward()


def test_large_scores_long_rows_and_low_precision():
    rule, places = SparseRule(block=16, window=9, first=1, stride=50), Places.default(1, 700, 700, torch.device("cpu"))
    q, k, v = draw(2, 1, 700, b=1)
    exact = block_sparse_attention_reference(q * 300, k * 300, v, places, rule)
    strong = block_sparse_attention_torch(q * 300, k * 300, v, places, rule)
    torch.testing.assert_close(strong, exact, rtol=0, atol=1e-11)
    exact = block_sparse_attention_reference(q, k, v, places, rule)
    for dtype, tol in ((torch.float32, 3e-6), (torch.bfloat16, 3e-2)):
        y = block_sparse_attention_torch(q.to(dtype), k.to(dtype), v.to(dtype), places, rule)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exact, rtol=0, atol=tol)


def test_opcheck_and_compile():
    q, k, v = draw(2, 1, 12, b=2, dtype=torch.float32)
    places, rule = Places.default(2, 12, 12, q.device), SparseRule(block=3, window=2, stride=4)
    blocks = torch.tensor([0, 2]).expand(2, 12, 1, 2).contiguous()
    given = [*vars(places).values()]
    for part in ("local", "stride", "chosen"):
        arguments = [q.detach(), k.detach(), v.detach(), *(x.clone() for x in given), None, blocks]
        torch.library.opcheck(
            torch.ops.hybridtf.block_sparse_attention.default,
            (*arguments, [3, 1, 2, 1, 0, 0, 0, 0, 4], PARTS.index(part), 0.5), test_utils=("test_schema", "test_faketensor"),
        )
    run = torch.compile(block_sparse_attention_torch, backend="eager", fullgraph=True)
    y, want = run(q, k, v, places, rule, blocks=blocks), block_sparse_attention_torch(q, k, v, places, rule, blocks=blocks)
    torch.testing.assert_close(y, want)


def test_misfits_are_refused():
    q, k, v = draw(4, 2, 5, b=1)
    places = Places.default(1, 5, 5, q.device)
    for rule in ({"block": 0}, {"window": -1}, {"block": 2, "summary": 3}, {"last": 1}):
        with pytest.raises(ConfigError):
            SparseRule(**rule)
    for options in ({}, {"blocks": torch.zeros(1, 5, 3, 1, dtype=torch.int64)}, {"marked": torch.zeros(1, 5)}):
        with pytest.raises(ConfigError):
            block_sparse_attention_torch(q, k, v, places, SparseRule(), **options)
    with pytest.raises(ConfigError):
        choose_blocks(q, k, places.first, places.count[:, 1:], 2)


# -- routers ---------------------------------------------------------------------------------------------------------


def test_random_blocks_are_different_and_fair():
    block = torch.arange(60).repeat(50)
    chooser = torch.arange(50).repeat_interleave(60)
    one = torch.ones_like(block)
    free = ((one, block - 1), (block + 2, one * 60))
    drawn = random_blocks(block, free, 4, 7, chooser)
    assert torch.equal(drawn, random_blocks(block, free, 4, 7, chooser))
    for at, found in zip(block.tolist(), drawn.tolist(), strict=True):
        real = [x for x in found if x >= 0]
        assert len(set(real)) == len(real) == 4
        assert all(1 <= x < 60 and abs(x - at) > 1 for x in real)
    seen = torch.bincount(drawn[block == 30].flatten(), minlength=60)
    assert (seen > 0).sum() > 50  # 200 draws from 56 blocks
    assert not torch.equal(drawn, random_blocks(block, free, 4, 8, chooser))
    few = random_blocks(torch.tensor([3]), ((torch.tensor([1]), torch.tensor([3])),), 4, 0, torch.tensor([0]))
    assert sorted(few[0].tolist()) == [-1, -1, 1, 2]


def test_the_best_blocks_are_chosen():
    b, t, h, g, j = 2, 40, 4, 2, 9
    q, pooled = torch.randn(b, t, h, 3, dtype=torch.float64), torch.randn(b, j, g, 3, dtype=torch.float64)
    first, count = torch.randint(0, 5, (b, t)), torch.randint(0, 5, (b, t))
    got = choose_blocks(q, pooled, first, count, 3)
    for row in range(b):
        for at in range(t):
            for head in range(h):
                start, n = int(first[row, at]), int(count[row, at])
                scores = pooled[row, start : start + n, head // 2] @ q[row, at, head]
                want = scores.argsort(descending=True)[:3].tolist()
                assert got[row, at, head].tolist() == want + [-1] * (3 - len(want))


# -- cost ------------------------------------------------------------------------------------------------------------

COSTS = {
    "window": (SparseRule(window=32), "local", 1),
    "dilated": (SparseRule(window=16, dilation=4), "dilated", 1),
    "blocks": (SparseRule(block=16, near=2, first=1), "local", 1),
    "marked": (SparseRule(window=16), "local", 1),
    "strided": (SparseRule(stride=32), "stride", 2),
    "fixed": (SparseRule(block=32, summary=2), "local", 2),
    "chosen": (SparseRule(block=16), "chosen", 1),
}


def measure(name, t):
    rule, part, _ = COSTS[name]
    q, k, v = (torch.randn(1, t, 2, 8) for _ in range(3))
    marked = torch.arange(t)[None] < 3 if name == "marked" else None
    blocks = None
    if part == "chosen":
        blocks = (torch.rand(1, t, 2, 3) * (torch.arange(t)[:, None, None] // 16 + 1)).long()
    call = _Call(q, k, v, Places.default(1, t, t, q.device), marked, blocks, rule, part, 0.3)
    assert clauses_of(rule, part, marked is not None)
    with Peak() as forward:
        y, lse = _forward(call)
    with Peak() as backward:
        _backward(call, torch.ones_like(y), torch.zeros_like(lse))
    with FlopCounterMode(display=False) as flops:
        _forward(call)
    return forward.most, backward.most, forward.calls, backward.calls, flops.get_total_flops()


@pytest.mark.parametrize("name", COSTS)
def test_memory_and_calls_are_linear_and_time_is_as_said(name):
    exponent = COSTS[name][2]
    small, middle = measure(name, 512), measure(name, 4096)
    calls = [b / a for a, b in zip(small[2:4], middle[2:4], strict=True)]
    assert max(calls) < 8 * 1.2, f"calls: {calls}"
    # Of the quadratic forms the memory of a chunk reaches its full size later.
    before, after = (small, middle) if exponent == 1 else (middle, measure(name, 16384))
    longer = 8 if exponent == 1 else 4
    memory = [b / a for a, b in zip(before[:2], after[:2], strict=True)]
    assert max(memory) < longer * 1.2, f"memory: {memory}"
    time = after[4] / before[4]
    assert longer ** (exponent * 0.8) < time < longer**exponent * 1.2, f"time: {time}"
