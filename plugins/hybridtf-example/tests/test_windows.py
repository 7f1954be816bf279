"""The kernel against the op's reference: outputs, states and gradients, whatever the documents and pads."""

from collections.abc import Callable

import pytest
import torch
from hybridtf_example.windows import WINDOWS, short_conv_windows
from torch import Tensor

from hybridtf.core import KernelRequest, Segments
from hybridtf.ops.short_conv import short_conv_reference

IDS = {
    "one document": None,
    "packed": [[1, 1, 1, 2, 3, 3, 3], [1, 2, 2, 2, 2, 2, 3]],
    "pads": [[0, 1, 1, 0, 0, 1, 0], [1, 1, 0, 2, 0, 2, 2]],
    "a row of pads": [[0, 0, 0, 0, 0, 0, 0], [4, 4, 4, 4, 4, 4, 4]],
}


def run(
    op: Callable[..., tuple[Tensor, Tensor]], width: int, ids: list[list[int]] | None, continues: list[bool], t: int,
    activation: str | None = None,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(width)
    x, weight, bias, state = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, t, 3), (3, width), (3,), (2, width - 1, 3))
    )
    segments = None if ids is None else Segments.from_ids(torch.tensor(ids), continues=torch.tensor(continues))
    y, final = op(x, weight, bias, initial_state=state, segments=segments, activation=activation)
    real = torch.ones(2, t, 1) if segments is None else segments.real[..., None]
    loss = (y * real * torch.arange(1.0, y.numel() + 1).view_as(y)).sum() + (final * final).sum()
    grads = torch.autograd.grad(loss, [x, weight, bias, state], allow_unused=True, materialize_grads=True)
    return [y * real, final, *grads]


@pytest.mark.parametrize("width", [1, 2, 4, 11])
@pytest.mark.parametrize("continues", [[False, False], [True, False], [True, True]])
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_agrees_with_the_reference(ids: list[list[int]] | None, continues: list[bool], width: int) -> None:
    reference = run(short_conv_reference, width, ids, continues, 7)
    for got, want in zip(run(short_conv_windows, width, ids, continues, 7), reference, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("t", [0, 1, 3])
def test_short_calls_with_an_activation(t: int) -> None:
    got = run(short_conv_windows, 4, None, [True, True], t, activation="silu")
    for a, b in zip(got, run(short_conv_reference, 4, None, [True, True], t, activation="silu"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_it_says_why_not() -> None:
    def reason(width: int) -> str | None:
        cpu = torch.device("cpu")
        return WINDOWS.why_not(KernelRequest("short_conv", "train", torch.float32, cpu, {"width": width}))

    assert reason(16) is None
    assert reason(17) == "width 17 is above 16: the windows would fill the memory"


def test_what_the_op_promises_about_dtypes() -> None:
    y, state = short_conv_windows(torch.ones(1, 5, 2, dtype=torch.bfloat16), torch.ones(2, 4, dtype=torch.bfloat16))
    assert y.dtype == state.dtype == torch.bfloat16
    assert y[0, :, 0].tolist() == [1, 2, 3, 4, 4]
