"""Attention by blocks: equal to the reference, linear in memory, one operator to the compiler."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hybridtf.core import KernelError
from hybridtf.ops.attention import AttentionMask, attention_reference, attention_torch
from hybridtf.ops.attention import blockwise as module
from hybridtf.ops.attention.blocks import plan_blocks
from hybridtf.ops.attention.blockwise import attention_blockwise
from hybridtf.ops.attention.mask import Tile
from tests.ops.attention_cases import Case, check_equal, random_case, run, tensors

BLOCKS = [(1, 1), (2, 3), (3, 2), (4, 4), (7, 5), (8, 16), (64, 64), (None, None)]


@pytest.mark.parametrize("seed", range(250))
def test_equals_reference(seed: int) -> None:
    case = random_case(5000 + seed)
    block_q, block_k = BLOCKS[seed % len(BLOCKS)]
    got = run(attention_blockwise, case, block_q=block_q, block_k=block_k)
    check_equal(got, run(attention_reference, case), case, atol=1e-10)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3])
def test_scale(scale: float) -> None:
    case = random_case(3)
    got = run(attention_blockwise, case, scale=scale, block_q=3, block_k=4)
    check_equal(got, run(attention_reference, case, scale=scale), case, atol=1e-10)


@pytest.mark.parametrize("seed", range(30))
def test_large_scores_stay_finite(seed: int) -> None:
    case = random_case(6000 + seed)
    with torch.no_grad():
        case.q.mul_(300)
    got = run(attention_blockwise, case, block_q=3, block_k=4)
    assert all(torch.isfinite(x).all() for x in got)
    check_equal(got, run(attention_reference, case), case, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("seed", range(120))
@pytest.mark.parametrize("sync", [True, False])
def test_the_plan_skips_nothing_visible_and_masks_all_invisible(seed: int, sync: bool) -> None:
    case = random_case(7000 + seed)
    t, s, mask = case.q.shape[1], case.k.shape[1], case.mask
    plan = plan_blocks(mask, t, s, 3, 4, sync=sync)
    for i, q0 in enumerate(range(0, t, 3)):
        row = dict(plan.row(i))
        for j, k0 in enumerate(range(0, s, 4)):
            seen = Tile(t, s, q0, min(q0 + 3, t), k0, min(k0 + 4, s), case.q.device).visible(mask)
            seen = torch.ones(1, dtype=torch.bool) if seen is None else seen
            assert j in row or not seen.any(), case.text()
            assert row.get(j, True) or seen.all(), case.text()


def test_the_plan_skips_what_it_should() -> None:
    def visited(mask: AttentionMask, t: int = 64, sync: bool = True) -> int:
        plan = plan_blocks(mask, t, t, 8, 8, sync=sync)
        return sum(len(plan.row(i)) for i in range(t // 8))

    ids = (torch.arange(64) // 8 + 1)[None]
    assert visited(AttentionMask()) == 36
    assert visited(AttentionMask(), sync=False) == 36
    assert visited(AttentionMask(window=8)) == 15
    assert visited(AttentionMask(causal=False, window=8)) == 22
    assert visited(AttentionMask(causal=False)) == 64
    assert visited(AttentionMask(q_ids=ids, k_ids=ids)) == 8
    assert visited(AttentionMask(causal=False, q_ids=ids, k_ids=ids)) == 8
    assert visited(AttentionMask(causal=False, q_ids=ids, k_ids=ids), sync=False) == 64
    assert visited(AttentionMask(q_ids=ids * 0, k_ids=ids)) == 0


class _Peak(TorchDispatchMode):
    """The most bytes that tensors made inside were alive with at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def _free(self, key: int, size: int) -> None:
        self.live -= size
        self.known.discard(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.known:
                storage, size = x.untyped_storage(), x.untyped_storage().nbytes()
                self.known.add(storage._cdata)
                self.live += size
                weakref.finalize(storage, self._free, storage._cdata, size)
        self.peak = max(self.peak, self.live)
        return out


def _peaks(mask: AttentionMask, t: int, dropout: bool) -> tuple[int, int]:
    """Peak bytes of forward and backward beyond inputs, run without the operator's wrapping, which hides its inside."""
    case = tensors(1, t, t, 4, 2, 16, 16, dtype=torch.float32)
    q, k, v = (x.detach() for x in (case.q, case.k, case.v))
    seed = torch.tensor([3]) if dropout else None
    call = module._Call(q, k, v, mask, seed, 0.25, 0.1 if dropout else 0.0, 32, 32, True)
    with _Peak() as forward:
        out, lse = module._forward(call)
    upper = torch.ones_like(out)
    with _Peak() as backward:
        module._backward(call, upper, out, lse)
    return forward.peak, backward.peak


@pytest.mark.parametrize(
    "rule", ["causal", "full", "window", "ids", "slopes", "softcap", "sinks", "prefix", "decay", "relative", "dropout"]
)
def test_memory_is_linear_in_length(rule: str) -> None:
    def mask(t: int) -> AttentionMask:
        ids = (torch.arange(t) * 3 // t + 1)[None]
        return {
            "full": AttentionMask(causal=False), "window": AttentionMask(window=50),
            "ids": AttentionMask(q_ids=ids, k_ids=ids), "slopes": AttentionMask(slopes=torch.ones(4)),
            "softcap": AttentionMask(softcap=3.0), "sinks": AttentionMask(sinks=torch.ones(4)),
            "prefix": AttentionMask(prefix_len=ids * 0 + t // 3),
            "decay": AttentionMask(q_decay=torch.zeros(1, t, 4).double(), k_decay=torch.zeros(1, t, 4).double()),
            "relative": AttentionMask(rel_q=torch.ones(1, t, 4, 3), rel_bank=torch.ones(3, 20)),
        }.get(rule, AttentionMask())

    short, double = _peaks(mask(512), 512, rule == "dropout"), _peaks(mask(1024), 1024, rule == "dropout")
    assert double[0] <= 2.2 * short[0]
    assert double[1] <= 2.2 * short[1]
    # The whole of one head's scores would already be more.
    assert double[1] < 1024 * 1024 * 4


def test_the_meter_sees_a_square() -> None:
    def peak(t: int) -> int:
        case = tensors(1, t, t, 4, 2, 16, 16, dtype=torch.float32)
        with _Peak() as meter:
            attention_reference(case.q.detach(), case.k.detach(), case.v.detach(), case.mask)
        return meter.peak

    assert peak(256) > 256 * 256 * 4 * 4
    assert peak(512) > 3.5 * peak(256)


def test_only_inputs_output_and_log_sums_are_saved() -> None:
    case = tensors(1, 256, 256, 4, 2, 16, 16, dtype=torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        attention_blockwise(case.q, case.k, case.v, case.mask)
    assert sum(x.numel() for x in saved) == 2 * case.q.numel() + case.k.numel() + case.v.numel() + 256 * 4


# -- dropout ---------------------------------------------------------------------------------------------------------


def test_without_dropout_the_generator_is_untouched() -> None:
    case = random_case(11)
    before = torch.get_rng_state()
    attention_blockwise(case.q, case.k, case.v, case.mask)
    assert torch.equal(before, torch.get_rng_state())


def test_dropout_keeps_the_mean_and_drops_its_share() -> None:
    torch.manual_seed(0)
    case = tensors(2, 64, 64, 2, 1, 8, 8)
    case = replace(case, mask=AttentionMask(causal=False), v=torch.ones_like(case.v))
    flat = replace(case, q=torch.zeros_like(case.q))
    options = {"dropout_p": 0.25, "block_q": 16, "block_k": 16}
    sums = torch.cat([attention_blockwise(flat.q, flat.k, flat.v, flat.mask, **options) for _ in range(20)])
    assert abs(sums.mean().item() - 1) < 0.01
    # Each sum is a mean of 64 kept-or-dropped weights: variance p / (1 - p) / 64.
    assert abs(sums[..., 0].var().item() / (0.25 / 0.75 / 64) - 1) < 0.15


def test_dropout_differs_between_calls_blocks_and_heads() -> None:
    torch.manual_seed(0)
    q = k = torch.zeros(1, 8, 2, 8, dtype=torch.float64)
    v = torch.eye(8, dtype=torch.float64)[None, :, None].expand(1, 8, 2, 8)

    def kept() -> Tensor:
        return attention_blockwise(q, k, v, AttentionMask(causal=False), dropout_p=0.5, block_q=4, block_k=4) > 0

    one, two = kept()[0], kept()[0]
    assert not torch.equal(one, two)
    assert not torch.equal(one[:, 0], one[:, 1])
    tiles = [one[i : i + 4, :, j : j + 4] for i in (0, 4) for j in (0, 4)]
    assert not any(torch.equal(a, b) for n, a in enumerate(tiles) for b in tiles[:n])


@pytest.mark.parametrize("seed", range(6))
def test_backward_drops_what_forward_dropped(seed: int) -> None:
    case = random_case(8000 + seed)

    def fixed(*leaves: Tensor) -> Tensor:
        torch.manual_seed(1)
        mask = replace(case.mask, **dict(zip(case.biases(), leaves[3:], strict=True)))
        return attention_blockwise(*leaves[:3], mask, dropout_p=0.3, block_q=4, block_k=3)

    assert torch.autograd.gradcheck(fixed, case.leaves(), fast_mode=True)


# -- torch's machinery -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_operator_is_well_formed(seed: int) -> None:
    case = random_case(9000 + seed)
    m = case.mask
    args = (
        case.q, case.k, case.v, m.q_ids, m.k_ids, m.q_pos, m.k_pos, m.prefix_len, m.slopes, m.sinks, m.q_decay, m.k_decay,
        m.rel_q, m.rel_bank, None, m.causal, m.window, m.softcap, 0.5, 0.0, 3, 4, True,
    )
    # Its gradients are the business of the autograd function around it.
    args = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
    torch.library.opcheck(module._forward_op, args)


@pytest.mark.parametrize("seed", range(12))
def test_compiles_into_one_graph(seed: int) -> None:
    case = random_case(9500 + seed)

    def block(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        return attention_blockwise(q * 1.0, k, v, mask, block_q=4, block_k=4)

    compiled = torch.compile(block, fullgraph=True, backend="eager")
    check_equal(run(compiled, case), run(attention_reference, case), case, atol=1e-10)
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("rule", ["causal", "window", "ids", "decode", "softcap", "long_window", "dropout"])
def test_the_torch_kernel_compiles_into_one_graph(rule: str, dynamic: bool | None) -> None:
    t = {"decode": 1, "long_window": 400}.get(rule, 24)
    case = tensors(2, t, 400 if rule in ("decode", "long_window") else 24, 4, 2, 8, 8)
    ids = torch.ones(2, 24).long()

    def block(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        mask = {
            "window": AttentionMask(window=5), "ids": AttentionMask(q_ids=ids, k_ids=ids),
            "softcap": AttentionMask(softcap=2.0), "long_window": AttentionMask(window=70),
        }.get(rule, AttentionMask())
        return attention_torch(q, k, v, mask, dropout_p=0.1 if rule == "dropout" else 0.0)

    compiled = torch.compile(block, fullgraph=True, backend="eager", dynamic=dynamic)
    torch.manual_seed(0)
    got = compiled(case.q, case.k, case.v, ids)
    torch.manual_seed(0)
    torch.testing.assert_close(got, block(case.q, case.k, case.v, ids), atol=1e-12, rtol=0)
    torch._dynamo.reset()


@pytest.mark.parametrize("fn", [attention_torch, attention_reference, attention_blockwise])
def test_shapes_without_data(fn: Any) -> None:
    case = tensors(2, 300, 300, 4, 2, 8, 6)
    ids = torch.ones(2, 300, dtype=torch.int64, device="meta")
    q, k, v = (x.detach().to("meta").requires_grad_() for x in (case.q, case.k, case.v))
    documents = AttentionMask(q_ids=ids, k_ids=ids)
    for mask in (AttentionMask(), AttentionMask(window=50), documents, AttentionMask(softcap=2.0)):
        out = fn(q, k, v, mask)
        assert out.shape == (2, 300, 4, 6)
        assert torch.autograd.grad(out.sum(), v)[0].shape == v.shape


def test_checkpointing_repeats_the_dropout() -> None:
    case = random_case(12)
    mask = AttentionMask(softcap=2.0)
    torch.manual_seed(0)
    plain = run(attention_blockwise, Case(case.q, case.k, case.v, mask), dropout_p=0.2)
    torch.manual_seed(0)

    def saved(*args: Any, **options: Any) -> Tensor:
        return torch.utils.checkpoint.checkpoint(attention_blockwise, *args, use_reentrant=False, **options)

    again = run(saved, Case(case.q, case.k, case.v, mask), dropout_p=0.2)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_torch_func_and_the_flop_counter_see_through_it() -> None:
    q, k = torch.randn(1, 9, 4, 4, dtype=torch.float64), torch.randn(1, 9, 2, 4, dtype=torch.float64)
    v = torch.randn(1, 9, 2, 6, dtype=torch.float64)
    mask = AttentionMask(softcap=2.0)
    got = torch.func.grad(lambda x: attention_blockwise(x, k, v, mask).square().sum())(q)
    want = torch.func.grad(lambda x: attention_reference(x, k, v, mask).square().sum())(q)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    q.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        out = attention_blockwise(q, k, v, mask)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * 4 * 9 * 9 * (4 + 6)
    assert counter.get_total_flops() - forward == 2 * 4 * 9 * 9 * (3 * 4 + 2 * 6)


def test_the_gradient_of_the_gradient_is_refused_by_name() -> None:
    q = torch.randn(1, 5, 2, 4, dtype=torch.float64, requires_grad=True)
    out = attention_blockwise(q, q * 1, q * 2, AttentionMask(softcap=2.0))
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(KernelError, match="no second derivatives"):
        grad.sum().backward()
