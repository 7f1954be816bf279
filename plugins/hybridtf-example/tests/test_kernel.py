"""The kernel: equal to the reference of its op wherever it says that it can run, and refused where it cannot."""

import torch
from hybridtf_example.kernel import KERNEL, short_conv_windows

from hybridtf.core import KernelRequest
from hybridtf.testing import check_kernel


def test_it_agrees_with_the_reference_of_its_op() -> None:
    check_kernel(KERNEL)


def test_it_says_why_not() -> None:
    def reason(width: int) -> str | None:
        cpu = torch.device("cpu")
        return KERNEL.why_not(KernelRequest(KERNEL.op, "train", torch.float32, cpu, {"width": width}))

    assert reason(16) is None
    assert reason(17) == "width 17 is above 16: the windows would fill the memory"


def test_a_convolution_counted_by_hand() -> None:
    y, state = short_conv_windows(torch.ones(1, 5, 2, dtype=torch.bfloat16), torch.ones(2, 4, dtype=torch.bfloat16))
    assert y.dtype == state.dtype == torch.bfloat16
    assert y[0, :, 0].tolist() == [1, 2, 3, 4, 4]
