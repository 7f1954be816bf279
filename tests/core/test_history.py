"""Snapshots of the last tokens, against runs that never saw them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtf.core import Fixed, Segments, State, StateError, with_history

F64 = torch.float64


def running_sum(x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
    """y_t = sum of the document so far; the state carries it."""
    h, out = state["h"], []
    for t in range(x.shape[1]):
        if segments is not None:
            h = torch.where(segments.starts[:, t, None], torch.zeros_like(h), h)
            h = torch.where(segments.real[:, t, None], h + x[:, t], h)
        else:
            h = h + x[:, t]
        out.append(h)
    y = torch.stack(out, 1) if out else x
    return y, state.advance({"h": h}, segments, x.shape[1])


def empty(b: int) -> Fixed:
    return Fixed({"h": torch.zeros(b, 1, dtype=F64)}, torch.zeros(b, dtype=torch.int64))


def numbers(b: int, t: int) -> Tensor:
    return (2.0 ** torch.arange(b * t, dtype=F64)).view(b, t, 1)


@pytest.mark.parametrize("keep", [0, 1, 3, 5, 9])
@pytest.mark.parametrize("t", [0, 1, 3, 5])
def test_the_output_is_that_of_one_call_and_the_state_goes_back(t: int, keep: int) -> None:
    x = numbers(2, t)
    y, state = with_history(running_sum, x, None, empty(2), keep, empty)
    want, final = running_sum(x, None, empty(2))
    assert torch.equal(y, want)
    assert torch.equal(state["h"], final["h"])
    for n in range(min(keep, t) + 1):
        cropped = state.crop(n)
        assert cropped["h"].flatten().tolist() == x[:, : t - n].sum(1).flatten().tolist()
        assert cropped.length.tolist() == [t - n] * 2


ROWS = ["110110", "001111", "111100", "000000", "112233", "111112", "122222"]


def test_pads_do_not_use_up_snapshots() -> None:
    ids = torch.tensor([[int(c) for c in row] for row in ROWS])
    segments, x = Segments.from_ids(ids), numbers(len(ROWS), 6)
    y, state = with_history(running_sum, x, segments, empty(len(ROWS)), 3, empty)
    want, final = running_sum(x, segments, empty(len(ROWS)))
    assert torch.equal(y[segments.real], want[segments.real])
    assert torch.equal(state["h"], final["h"])
    for r, row in enumerate(ROWS):
        last = [c for c in range(6) if row[c] != "0" and row[c] == max(row)]
        for n in range(4):
            one = torch.zeros(len(ROWS), dtype=torch.int64)
            one[r] = n
            if n > len(last):
                with pytest.raises(StateError, match=f"row {r}"):
                    state.crop(one)
                continue
            got = state.crop(one)
            assert got["h"][r].item() == x[r, last[: len(last) - n]].sum().item()
            assert got.length[r].item() == len(last) - n


def test_a_new_document_does_not_go_back_into_the_one_before() -> None:
    """Before the call the state held seven tokens of another document."""
    held = Fixed({"h": torch.full((1, 1), 100.0, dtype=F64)}, torch.tensor([7]))
    segments = Segments.from_ids(torch.tensor([[5, 5]]), continues=False)
    _, state = with_history(running_sum, numbers(1, 2), segments, held, 3, empty)
    assert state.crop(1)["h"].item() == 1.0
    assert state.crop(2)["h"].item() == 0.0
    assert state.crop(2).length.tolist() == [0]
    with pytest.raises(StateError, match="cannot crop 3 tokens"):
        state.crop(3)
    goes_on = Fixed({"h": torch.full((1, 1), 100.0, dtype=F64)}, torch.tensor([7]))
    segments = Segments.from_ids(torch.tensor([[5, 5]]), continues=True)
    _, state = with_history(running_sum, numbers(1, 2), segments, goes_on, 3, empty)
    assert state.crop(2)["h"].item() == 100.0
    assert state.crop(2).length.tolist() == [7]


def test_gradients_flow_through_a_snapshot() -> None:
    x = torch.ones(1, 4, 1, dtype=F64, requires_grad=True)
    _, state = with_history(running_sum, x, None, empty(1), 2, empty)
    state.crop(2)["h"].sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [1, 1, 0, 0]
