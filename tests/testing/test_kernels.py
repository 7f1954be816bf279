"""The laws of kernels: each broken one is caught with a message that names what is wrong, and a refusal is respected."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridtf.core import KernelSet, active, using
from hybridtf.hookspecs import hookimpl
from hybridtf.ops.short_conv import KERNELS, short_conv_taps
from hybridtf.plugins import load_registries, make_plugin_manager
from hybridtf.testing import ContractError
from hybridtf.testing.laws_kernel import check_kernel, smallest_call
from hybridtf.testing.laws_op_use import check_op
from hybridtf.testing.run import PLUGIN_FAULTS
from tests.cli.helpers import run
from tests.testing import broken_kernels
from tests.testing.broken_kernels import BROKEN, no_half, record, refusing

REFERENCE = KERNELS[0].load()


def check(function: Callable[..., Any], why_not: Any = None) -> None:
    """The kit over the op's first case (4 taps, bias, silu), without the mixers."""
    kernel = record(function) if why_not is None else record(function, why_not)
    check_op(active().op_cases["short_conv"][0], kernel.load(), REFERENCE, kernel.why_not)


@pytest.mark.parametrize("function", BROKEN, ids=lambda f: f.__name__)
def test_a_broken_kernel_is_caught_and_named(function: Callable[..., Any]) -> None:
    with pytest.raises((ContractError, IndexError)) as caught:
        check(function)
    assert BROKEN[function] in f"{type(caught.value).__name__}: {caught.value}"


def test_an_honest_kernel_passes() -> None:
    check(short_conv_taps)


def test_every_broken_kernel_is_listed() -> None:
    made = {f for f in vars(broken_kernels).values() if callable(f) and getattr(f, "__module__", "") == broken_kernels.__name__}
    functions = {f for f in made if not isinstance(f, type)} - {record, refusing, broken_kernels.refuse}
    assert functions == set(BROKEN)


def test_what_is_refused_is_not_tried() -> None:
    check(no_half, refusing("no half precision", dtype=torch.float16))
    for phase, function in (("decode", broken_kernels.wrong_decode), ("prefill", broken_kernels.wrong_prefill)):
        check(function, refusing("only trains", phase=phase))


def test_the_smallest_call_is_found() -> None:
    cases = {
        broken_kernels.wrong_final_state: "4 taps, silu, float64: batch 1, 1 tokens",
        broken_kernels.ignores_segments: "4 taps, silu, float64: document ids ['0'] (0 is a pad)",
        broken_kernels.low_precision: "4 taps, silu, float32: batch 1, 1 tokens",
        broken_kernels.wrong_inside_a_chunk: "4 taps, silu, float64: document ids ['12300'] (0 is a pad)",
    }
    assert {function: smallest_call(record(function), PLUGIN_FAULTS) for function in cases} == cases
    assert smallest_call(record(short_conv_taps), PLUGIN_FAULTS) == ""


def test_a_kernel_is_checked_whole_through_its_record() -> None:
    known = KernelSet([*KERNELS, record(no_half)])
    with pytest.raises(ContractError, match="must refuse in why_not, not fail"):
        check_kernel(record(no_half), known)


def test_the_table_shows_kernels_with_the_smallest_failing_case() -> None:
    kernel = record(broken_kernels.wrong_final_state)

    @hookimpl
    def hybridtf_kernels() -> list[Any]:
        return [kernel]

    manager = make_plugin_manager(autoload=False)
    manager.register(SimpleNamespace(hybridtf_kernels=hybridtf_kernels, __name__="mine"), "mine")
    with using(load_registries(manager, strict=True)):
        result = run("check", "--plugin", "mine")
    assert result.exit_code == 1
    row, = [line for line in result.stdout.splitlines() if line.startswith("kernels.short_conv/wrong_final_state  ")]
    assert row.split()[1:] == ["F"]
    where = "short_conv (4 taps, silu) in torch.float64, length 1: the final state"
    assert f"\n  kernels.short_conv/wrong_final_state kernel: {where}" in result.stdout
    assert "      smallest case found: 4 taps, silu, float64: batch 1, 1 tokens" in result.stdout
