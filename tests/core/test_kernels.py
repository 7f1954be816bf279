"""Kernel records and the table that a component indexes."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybridtf.core import (
    DTYPES,
    PHASES,
    BuildContext,
    Kernel,
    KernelError,
    KernelRequest,
    KernelSet,
    OpKernel,
    Registries,
    UnknownNameError,
    always,
    kernels_used,
    using,
)

CPU = torch.device("cpu")



def slow(x: Tensor, bonus: int = 0) -> Tensor:
    return x + 1 + bonus


def load_named() -> Any:
    return slow


def inference_only(request: KernelRequest) -> str | None:
    return "has no backward" if request.phase == "train" else None


def half_only(request: KernelRequest) -> str | None:
    return None if request.dtype == torch.bfloat16 else f"wants bfloat16, got {request.dtype}"


def small_only(request: KernelRequest) -> str | None:
    return None if request.sizes["width"] <= 4 else f"width {request.sizes['width']} is over 4"


def no_softcap(request: KernelRequest) -> str | None:
    return "has no softcap" if "softcap" in request.features else None


def never(request: KernelRequest) -> str | None:
    return "the package is not installed"


RECORDS = (
    Kernel("twist", "reference", 0, always, load_named),
    Kernel("twist", "inference", 20, inference_only, load_named),
    Kernel("twist", "half", 30, half_only, load_named),
    Kernel("twist", "small", 5, small_only, load_named),
    Kernel("twist", "plain", 40, no_softcap, load_named),
    Kernel("twist", "absent", 99, never, load_named),
)


def chosen(*names: str) -> KernelSet:
    return KernelSet(record for record in RECORDS if record.name in names)


def bind(kernels: KernelSet, name: str = "auto", **more: Any) -> OpKernel:
    given = {"device": CPU, "dtype": torch.float32, "sizes": {"width": 3}, **more}
    return kernels.bind("twist", name, **given)


def test_auto_takes_the_highest_priority_that_can_run_in_each_cell() -> None:
    op = bind(chosen("reference", "inference", "half", "absent"))
    for phase, dtype in itertools.product(PHASES, DTYPES):
        want = "half" if dtype == torch.bfloat16 else "reference" if phase == "train" else "inference"
        assert op.chosen[phase, dtype] == want
    assert op.reasons["train", torch.float32] == {
        "absent": "the package is not installed", "half": "wants bfloat16, got torch.float32",
        "inference": "has no backward", "reference": None,
    }


def test_sizes_and_features_decide() -> None:
    assert bind(chosen("reference", "small")).chosen["train", torch.float32] == "small"
    assert bind(chosen("reference", "small"), sizes={"width": 9}).chosen["train", torch.float32] == "reference"
    assert bind(chosen("reference", "plain")).chosen["train", torch.float32] == "plain"
    assert bind(chosen("reference", "plain"), features={"softcap"}).chosen["train", torch.float32] == "reference"


def test_the_call_picks_phase_and_dtype() -> None:
    calls: list[str] = []

    def recording(name: str) -> Any:
        def load() -> Any:
            def run(x: Tensor, bonus: int = 0) -> Tensor:
                calls.append(name)
                return x + bonus

            return run

        return load

    def only(phase: str) -> Any:
        return lambda request: None if request.phase == phase else f"{phase} only"

    kernels = KernelSet([
        Kernel("twist", "reference", 0, always, recording("reference")),
        Kernel("twist", "decode", 10, only("decode"), recording("decode")),
        Kernel("twist", "prefill", 10, only("prefill"), recording("prefill")),
        Kernel("twist", "half", 20, half_only, recording("half")),
    ])
    op = bind(kernels)
    x = torch.zeros(2)
    assert op(x, bonus=5, n_tokens=1).tolist() == [5, 5]
    with torch.no_grad():
        op(x, n_tokens=1)
        op(x, n_tokens=7)
        op(x, n_tokens=0)
        op(x.bfloat16(), n_tokens=7)
    assert calls == ["reference", "decode", "prefill", "prefill", "half"]


def test_a_named_kernel_is_never_replaced() -> None:
    op = bind(chosen("reference", "inference"), "inference")
    assert set(op.chosen.values()) == {"inference"}
    with torch.no_grad():
        assert op(torch.zeros(1), n_tokens=1).tolist() == [1]
    with pytest.raises(KernelError, match=r"twist: kernel 'inference' cannot run for train in float32") as error:
        op(torch.zeros(1), n_tokens=1)
    assert "inference: has no backward" in str(error.value)
    assert "Can run here: reference" in str(error.value)


def test_a_named_kernel_that_can_run_nothing_is_refused_when_built() -> None:
    with pytest.raises(KernelError, match=r"model.op: twist: kernel 'absent'.*not installed.*: reference"):
        bind(chosen("reference", "absent"), "absent", where="model.op")
    with pytest.raises(KernelError, match=r"no kernel cannot run .*Can run here: none"):
        bind(chosen("absent"))


def test_on_meta_nothing_is_refused() -> None:
    assert bind(chosen("reference", "absent"), "absent", device=torch.device("meta")).chosen == {}


def test_a_dtype_that_no_kernel_takes_is_refused_when_used() -> None:
    op = bind(chosen("half"), dtype=torch.bfloat16)
    with pytest.raises(KernelError, match=r"cannot run for train in float32.*half: wants bfloat16"):
        op(torch.zeros(1), n_tokens=1)
    with pytest.raises(KernelError, match="cannot run for train in int64"):
        op(torch.zeros(1, dtype=torch.int64), n_tokens=1)


def test_unknown_names_say_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"no op named 'twits'\. Did you mean 'twist'"):
        chosen("reference").of("twits")
    with pytest.raises(UnknownNameError, match=r"no kernel named 'referense'\. Did you mean 'reference'.*auto"):
        bind(chosen("reference"), "referense")
    with pytest.raises(KernelError, match="already has a kernel named 'reference'"):
        chosen("reference").add(RECORDS[0])
    assert chosen("reference").ops() == ("twist",)


# -- moving ----------------------------------------------------------------------------------------------------------

ASKED: list[str] = []


def asks(request: KernelRequest) -> str | None:
    ASKED.append(request.device.type)
    return None


class Holder(nn.Module):
    def __init__(self, op: OpKernel) -> None:
        super().__init__()
        self.op = op


@pytest.fixture
def holder() -> Iterator[Holder]:
    yield Holder(bind(KernelSet([Kernel("twist", "reference", 0, asks, load_named)])))
    ASKED.clear()


def test_moving_and_casting_fill_the_table_again(holder: Holder) -> None:
    ASKED.clear()
    holder.to(torch.bfloat16)
    assert len(ASKED) == len(PHASES) * len(DTYPES)
    assert holder.op.dtype == torch.bfloat16
    holder.to("meta")
    assert holder.op.device.type == "meta"
    holder.to_empty(device="cpu")
    assert holder.op.chosen["train", torch.bfloat16] == "reference"
    assert kernels_used(holder) == {"op": dict.fromkeys(PHASES, "reference")}


def test_a_forward_asks_nothing(holder: Holder) -> None:
    ASKED.clear()
    holder.op(torch.zeros(1), n_tokens=1)
    with torch.no_grad():
        holder.op(torch.zeros(1), n_tokens=3)
    assert ASKED == []


def test_copies_and_pickles_work_and_save_nothing(holder: Holder) -> None:
    assert holder.state_dict() == {}
    for other in (copy.deepcopy(holder), pickle.loads(pickle.dumps(holder))):
        assert other.op(torch.zeros(1), n_tokens=1).tolist() == [1]
        assert other.op.probe.data_ptr() != holder.op.probe.data_ptr() or other.op.probe is not holder.op.probe
        assert other.op.chosen == holder.op.chosen
    assert "twist, kernel=auto, uses=['reference']" in repr(holder)


def test_kernels_used_says_none_where_nothing_runs() -> None:
    holder = Holder(bind(chosen("inference"), dtype=torch.float32))
    assert kernels_used(holder) == {"op": {"train": "none", "prefill": "inference", "decode": "inference"}}


def test_a_context_binds_from_its_kernels_or_the_active_ones() -> None:
    registries = Registries()
    registries.kernels.add(RECORDS[0])
    with using(registries):
        op = BuildContext(d_model=4, where="a.b").bind_kernel("twist", sizes={"width": 3})
        assert op.chosen["train", torch.float32] == "reference"
        assert op.where == "a.b"
        own = BuildContext(d_model=4, kernels=chosen("small")).bind_kernel("twist", sizes={"width": 3})
        assert own.chosen["train", torch.float32] == "small"
