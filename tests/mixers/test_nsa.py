"""Native sparse attention: its three branches against fla's plain references, and the whole against the paper's formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from hybridtf.core import BuildContext, RecipeError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import NSAConfig
from hybridtf.ops.block_sparse_attention import important_blocks
from tests.mixers.plain_parts import same
from tests.peers import peer

D, F64 = 12, torch.float64
HEADS = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6}


@pytest.fixture
def naive():
    """fla's references of one document a row; what they import for packed rows and for the GPU stands in."""
    return peer("fla/ops/nsa/naive.py", fla__ops__utils={}, fla__ops__utils__pooling={})


def draw(t, h=4, g=2, dtype=torch.float32):
    q, k = torch.randn(2, t, h, 6, dtype=dtype), torch.randn(2, t, g, 6, dtype=dtype)
    return q, k


@pytest.mark.parametrize(("t", "size", "n"), [(23, 4, 3), (24, 4, 5), (17, 3, 4), (40, 5, 20)])
def test_the_choice_is_that_of_fla(naive, t, size, n):
    """Blocks of mean keys without overlap."""
    q, k = draw(t)
    whole = t // size
    pooled = k[:, : whole * size].unflatten(1, (whole, size)).mean(2)
    tail = k[:, whole * size :].mean(1, keepdim=True) if t % size else k[:, :0]
    want = naive.naive_nsa_topk(q, torch.cat([pooled, tail], 1), n, size, 0.4)
    p = torch.arange(t).expand(2, t)
    got = important_blocks(
        q, pooled, torch.zeros_like(p), (p + 1) // size, p // size, n, ratio=1, spread=1, scale=0.4
    )
    torch.testing.assert_close(got.sort(-1).values, want.sort(-1).values)


def test_the_branches_are_those_of_fla(naive):
    """The compressed and the selected branch, weighed by the gates, on the mixer's own keys; gradients too."""
    t, size = 22, 4
    config = NSAConfig(
        **HEADS, compress_size=size, compress_stride=size, block_size=size, top_k=3, window=5, compression="mean",
        position={"type": "none"},
    )
    mixer = config.build(BuildContext(d_model=D, param_dtype=F64))
    with torch.no_grad():
        mixer.out_proj.weight.copy_(torch.randn(D, 24, dtype=F64))
    x = torch.randn(2, t, D, dtype=F64, requires_grad=True)
    projections = {n: p for n, p in mixer.named_children() if n.endswith(("q_proj", "k_proj", "v_proj"))}
    heads = {name: proj(x).unflatten(-1, (-1, 6)) for name, proj in projections.items()}
    whole = t // size * size
    ck, cv = (heads[f"compress_{r}_proj"][:, :whole].unflatten(1, (-1, size)).mean(2) for r in "kv")
    with StrictFloat64():
        compressed, _ = naive.naive_nsa_compression(heads["q_proj"], ck, cv, size, 6**-0.5)
    tail = heads["compress_k_proj"][:, whole:].mean(1, keepdim=True)
    blocks = naive.naive_nsa_topk(heads["q_proj"], torch.cat([ck, tail], 1), 3, size, 6**-0.5)
    with StrictFloat64():
        selected = naive.naive_nsa_selection(heads["q_proj"], heads["k_proj"], heads["v_proj"], blocks, size)
    window = F.scaled_dot_product_attention(
        heads["q_proj"].transpose(1, 2), *(heads[f"window_{r}_proj"].repeat_interleave(2, 2).transpose(1, 2) for r in "kv"),
        attn_mask=torch.ones(t, t).tril().triu(-4).bool(),
    ).transpose(1, 2)
    gates = torch.sigmoid(mixer.gate_proj(x)).unflatten(-1, (4, 3))
    want = sum(gates[..., i, None] * part for i, part in enumerate((compressed, selected, window)))
    same(mixer(x)[0], mixer.out_proj(want.flatten(-2)), x, mixer)


@pytest.mark.parametrize("role", ["k", "v"])
def test_the_learned_compression_is_that_of_native_sparse_attention_pytorch(role):
    """Its network over a block, one for all heads, with positions added before it, in a layer of overlapping blocks."""
    mixer = NSAConfig(**HEADS, compress_size=4, compress_stride=2, block_size=4).build(BuildContext(d_model=D, param_dtype=F64))
    ours = getattr(mixer, f"compress_{role}")
    module = peer("native_sparse_attention_pytorch/compress_networks.py")
    theirs = module.GroupedMLP(6, 4, heads=1, expand_factor=1 / 4).double()
    blocks = torch.randn(2, 7, 4, 2, 6, dtype=F64, requires_grad=True)  # [b, j, l, g, k]
    weights = {}
    for i, proj in ((0, ours.up_proj), (2, ours.down_proj)):
        weights |= {f"net.{i}.weight": proj.weight.T[None], f"net.{i}.bias": proj.bias[None]}
    given = (blocks + ours.position[:, None]).permute(0, 3, 1, 2, 4).flatten(0, 1)[:, None]  # heads along the batch
    weights = {name: value.reshape(theirs.get_parameter(name).shape) for name, value in weights.items()}
    want = torch.func.functional_call(theirs, weights, given).view(2, 2, 7, 6).transpose(1, 2)
    same(ours(blocks), want, blocks, ours)


def by_paper(q, compressed, i, n, sizes, scale):
    """Equations 8 to 11 for one query of one key head, with the blocks of the paper's sum written as those that overlap."""
    length, stride, block = sizes
    seen = [j for j in range(len(compressed)) if j * stride + length - 1 <= i]
    p = (torch.einsum("hk,jk->hj", q, compressed[seen]) * scale).softmax(-1).sum(0) if seen else []
    a, c = block // stride, length // stride
    score = []
    for j in range(i // block + 1):
        terms = [a * j + m - r for m in range(a) for r in range(c)]
        score.append(sum(float(p[s]) for s in terms if s in seen))
    always = [i // block, 0, i // block - 1]
    order = sorted(range(len(score)), key=lambda j: (-always.index(j) if j in always else -9, score[j]), reverse=True)
    return sorted(order[:n])


@pytest.mark.parametrize("sizes", [(4, 2, 8), (4, 4, 8), (2, 1, 2), (6, 2, 6)])
@pytest.mark.parametrize("n", [1, 4])
def test_the_choice_is_that_of_the_paper(sizes, n):
    length, stride, block = sizes
    t = 41
    q, k = draw(t, dtype=F64)
    compressed = k[:, : (t - length) // stride + 1]
    p = torch.arange(t).expand(2, t)
    count = ((p - length + 1).div(stride, rounding_mode="floor") + 1).clamp(min=0)
    got = important_blocks(
        q, compressed, torch.zeros_like(p), count, p // block, n, ratio=block // stride, spread=length // stride, scale=0.7
    )
    for i in range(t):
        want = by_paper(q[1, i, 2:], compressed[1, :, 1], i, n, sizes, 0.7)
        assert sorted(x for x in got[1, i, 1].tolist() if x >= 0) == want, i


def test_a_window_over_all_and_all_blocks_chosen_is_full_attention():
    """With the compressed branch shut and both others over everything, gates weigh two full attentions."""
    config = NSAConfig(**HEADS, compress_size=4, compress_stride=2, block_size=4, top_k=9, window=40)
    mixer = config.build(BuildContext(d_model=D, param_dtype=F64))
    x = torch.randn(2, 30, D, dtype=F64)
    with torch.no_grad():
        mixer.compress_v.down_proj.weight.zero_()
        mixer.compress_v.down_proj.bias.zero_()
    positions = torch.arange(30).expand(2, 30)
    table = mixer.position.table(positions, F64)
    full = []
    for k, v in (("k_proj", "v_proj"), ("window_k_proj", "window_v_proj")):
        q, key = (mixer.position(getattr(mixer, n)(x).unflatten(-1, (-1, 6)), table) for n in ("q_proj", k))
        value = getattr(mixer, v)(x).unflatten(-1, (-1, 6))
        key, value = (z.repeat_interleave(2, 2).transpose(1, 2) for z in (key, value))
        full.append(F.scaled_dot_product_attention(q.transpose(1, 2), key, value, is_causal=True).transpose(1, 2))
    gates = torch.sigmoid(mixer.gate_proj(x)).unflatten(-1, (4, 3))
    want = mixer.out_proj((gates[..., 1, None] * full[0] + gates[..., 2, None] * full[1]).flatten(-2))
    torch.testing.assert_close(mixer(x)[0], want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("sizes", [{"compress_size": 3, "compress_stride": 2}, {"compress_size": 128}, {"block_size": 40}])
def test_misfits_are_refused(sizes):
    with pytest.raises((RecipeError, ValidationError)):
        NSAConfig(n_heads=4, **sizes)
