from __future__ import annotations

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from hybridtf.core import ConfigError, KernelError, Segments
from hybridtf.ops.state_space import CASES, chunked, state_space_chunked, state_space_reference
from hybridtf.ops.state_space.shapes import check
from hybridtf.ops.state_space.tables import tables
from tests.ops.live_bytes import Peak
from tests.ops.operators import arguments, check_operators
from tests.ops.ssd_cases import random_segments

F64 = torch.float64
KINDS = {case.name: case for case in CASES}
NAMES = sorted(KINDS)


def draw(name: str, t: int, b: int = 2, dtype=F64):
    x = KINDS[name].draw(torch.Generator().manual_seed(t), b, t)
    return pytree.tree_map(lambda z: z.to(dtype).requires_grad_(), {**x.timed, **x.fixed, "initial_state": x.state})


def flat(*trees) -> list[Tensor]:
    return [z for z in pytree.tree_leaves(trees) if isinstance(z, Tensor)]


def as_complex(x) -> Tensor:
    return torch.complex(*x) if isinstance(x, tuple) else x.to(torch.complex128)


@pytest.mark.parametrize("op", [state_space_reference, state_space_chunked])
@pytest.mark.parametrize("name", NAMES)
def test_equals_powers_of_the_whole_matrix(name, op):
    """Each channel as one sum over the past, with torch.linalg.matrix_power of A as a dense complex matrix."""
    t = 11
    x = draw(name, t)
    if "a" in x:
        a = x["a"].to(torch.complex128)
    else:
        log_a = x["log_a"] if isinstance(x["log_a"], tuple) else (x["log_a"], torch.zeros_like(x["log_a"]))
        a = torch.diag_embed(torch.polar(log_a[0].exp(), log_a[1]))
    b, c, h0 = (as_complex(x[key]) for key in ("b", "c", "initial_state"))
    power = [torch.linalg.matrix_power(a, k) for k in range(t + 1)]
    rows = []
    for i in range(t):
        y = torch.einsum("cn,cnm,bcm->bc", c, power[i + 1], h0)
        for j in range(i + 1):
            y = y + torch.einsum("cn,cnm,cm,bc->bc", c, power[i - j], b, x["u"][:, j].to(torch.complex128))
        rows.append(y.real)
    want = torch.stack(rows, 1)
    got, _ = op(**x, chunk_size=4)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(want)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), flat(x), retain_graph=True) for y in (got, want))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_any_documents(name, seed):
    t = 21
    x, segments = draw(name, t, b=4), random_segments(seed, 4, t)
    got, want = (op(**x, segments=segments, chunk_size=8) for op in (state_space_chunked, state_space_reference))
    for one, other in zip(flat(*got), flat(*want), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["complex", "dense"])
def test_gradcheck(name):
    x, segments = draw(name, 6), Segments.from_ids(torch.tensor([[1, 1, 0, 1, 1, 2], [1, 1, 1, 1, 1, 1]]))
    leaves, spec = pytree.tree_flatten(x)

    def run(*given):
        return tuple(flat(*state_space_chunked(**pytree.tree_unflatten(list(given), spec), segments=segments, chunk_size=4)))

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["complex", "dense"])
def test_the_operators_are_well_formed(name, packed):
    t = 10
    x = pytree.tree_map(Tensor.detach, draw(name, t))
    s = random_segments(1, 2, t)
    state = torch.cat(x["initial_state"], -1) if isinstance(x["initial_state"], tuple) else x["initial_state"]
    system = check(x["u"], x["b"], x["c"], x.get("log_a"), x.get("a"), None, None, 4)
    given = (x["u"], *tables(system, 4, F64))
    check_operators(chunked._OP, arguments(given, s if packed else None, ()), [state])


@pytest.mark.parametrize("name", ["complex", "dense"])
def test_compiled(name):
    x, segments = draw(name, 13), random_segments(2, 2, 13)

    def run(x, segments):
        return flat(*state_space_chunked(**x, segments=segments, chunk_size=4))

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for one, other in zip(compiled(x, segments), run(x, segments), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_second_derivatives_are_refused():
    x = draw("real", 9)
    (first,) = torch.autograd.grad(state_space_chunked(**x, chunk_size=4)[0].square().sum(), x["u"], create_graph=True)
    with pytest.raises(KernelError, match="state_space: kernel 'chunked' has no second derivatives"):
        torch.autograd.grad(first.sum(), x["u"])


def test_float32_keeps_fast_phases_over_a_long_input():
    """A phase of about 3 radians a token for 20000 tokens, hardly decaying."""
    gen = torch.Generator().manual_seed(0)
    t, c, n = 20_000, 2, 3
    x = {
        "u": torch.randn(1, t, c, generator=gen, dtype=F64), "b": 2 * (torch.randn(c, n, generator=gen, dtype=F64),),
        "c": 2 * (torch.randn(c, n, generator=gen, dtype=F64),),
        "log_a": (-torch.rand(c, n, generator=gen, dtype=F64) * 1e-3, torch.rand(c, n, generator=gen, dtype=F64) * 3.1),
    }
    x = pytree.tree_map(lambda z: z.float().double(), x)
    with torch.no_grad():
        want, _ = state_space_chunked(**x)
        got, _ = state_space_chunked(**pytree.tree_map(Tensor.float, x))
    assert got.dtype == torch.float32
    assert float((got - want).abs().max() / want.abs().max()) < 2e-5


def test_decay_to_nothing_leaves_no_nan():
    x = draw("strong decay", 37, dtype=torch.float32)
    x["log_a"] = (torch.full_like(x["log_a"][0], -1e30).requires_grad_(), x["log_a"][1])
    y, state = state_space_chunked(**x, segments=random_segments(0, 2, 37), chunk_size=8)
    grads = torch.autograd.grad(y.square().sum() + sum(z.square().sum() for z in flat(state)), flat(x))
    assert all(z.isfinite().all() for z in (y, *flat(state), *grads))


def test_memory_of_the_backward_holds_no_states_between_chunks():
    """Saved are inputs, tables and one state a chunk: for t tokens at most a few times (b t c), though n is 32."""
    t, c, n = 4096, 4, 32
    args = {"b": torch.randn(c, n), "c": torch.randn(c, n), "log_a": -torch.rand(c, n)}
    u, saved = torch.randn(1, t, c, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda z: (saved.append(z), z)[1], lambda z: z):
        state_space_chunked(u, **args)
    size = sum({z.untyped_storage().data_ptr(): z.untyped_storage().nbytes() for z in saved}.values())
    assert size < 4 * 4 * t * c + 8 * 4 * c * 64 * 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_a": None}, "give log_a or a, one of them; got neither"), ({"a": torch.zeros(3, 4, 4)}, "got both"),
        ({"chunk_size": 6}, "power of 2"), ({"b": torch.zeros(3, 5)}, r"c must be \(3, 5\)"),
        ({"b": (torch.zeros(3, 4), torch.zeros(3, 4))}, r"b must be \(3, 4\)"),
        ({"initial_state": torch.zeros(3, 3, 4)}, r"initial_state must be \(2, 3, 4\)"),
        ({"u": torch.zeros(2, 3)}, r"u must be \(b t c\)"),
    ],
)
@pytest.mark.parametrize("op", [state_space_reference, state_space_chunked])
def test_arguments_that_do_not_fit_are_refused(op, change, message):
    with pytest.raises(ConfigError, match=message):
        op(**{**draw("real", 5), **change})


def test_calls_grow_with_chunks():
    counts = []
    for t in (512, 1024, 2048):
        x = pytree.tree_map(Tensor.detach, draw("dense", t))
        with torch.no_grad(), Peak() as calls:
            state_space_chunked(**x)
        counts.append(calls.calls)
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])
    assert counts[2] - counts[1] <= 1024 / 64 * 30
