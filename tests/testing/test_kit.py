"""The kit itself: exact doubles pass every law, and each broken variant is caught by the law it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, Self

import pytest
import torch
from pydantic import Field
from torch import nn

from hybridtf.core import (
    BuildContext,
    Fixed,
    Growing,
    Kernel,
    KernelRequest,
    RecipeError,
    Registries,
    Ring,
    StateLeaf,
    UnknownNameError,
    active,
    always,
    using,
)
from hybridtf.nn import idle_beside
from hybridtf.testing import (
    LAW_CHECKS,
    CheckResult,
    ContractError,
    NotApplicableError,
    Subject,
    check_block,
    check_channel_mixer,
    check_config,
    check_kernel,
    check_mixer,
    check_norm,
    doubles,
    laws_for,
    option_variants,
    run_checks,
    run_law,
)
from hybridtf.testing.subject import max_len_shows
from tests.testing.broken import BROKEN, HONEST, MIXERS, WRONG, BatchNormConfig, BrokenConfig, load_wrong


@pytest.fixture(autouse=True)
def registries() -> Iterator[Registries]:
    chosen = doubles.registries()
    chosen["mixers"].add(BrokenConfig, "tests")
    chosen.kernels.add(WRONG)
    with using(chosen):
        yield chosen


@pytest.mark.parametrize("config", doubles.CONFIGS, ids=lambda c: c.type_name())
def test_doubles_keep_every_law(config: Any, registries: Registries) -> None:
    # The wrong kernel is a kernel like any other: the kit would find it through the honest double.
    del registries.kernels._kernels["double_ema"]["wrong"]
    for result in run_checks(config.kind, config.tiny()):
        assert result.ok, f"{result.law}: {result.message}"


KEPT: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}


def fixed(n: int, *, name: str = "k", dtype: torch.dtype = torch.float64) -> Fixed:
    return Fixed({name: torch.zeros(1, n, dtype=dtype)}, torch.zeros(1, dtype=torch.int64))


class Sized(nn.Module):
    """Its states are of the form that one of these gives for a ``max_len``."""

    FORMS: ClassVar[dict[str, Callable[[int | None], StateLeaf]]] = {
        "buffers": lambda n: Growing.empty(1, {"k": (2,)}, max_len=n, **KEPT),
        "another leaf": lambda n: fixed(4) if n is None else Growing.empty(1, {"k": (2,)}, max_len=n, **KEPT),
        "a window": lambda n: Ring.empty(1, {"k": (2,)}, window=n or 4, **KEPT),
        "rows": lambda n: fixed(n or 4),
        "a name": lambda n: fixed(4, name="k" if n else "v"),
        "a dtype": lambda n: fixed(4, dtype=torch.float64 if n else torch.float32),
        "none": lambda n: fixed(4),
    }

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def init_state(self, batch_size: int, max_len: int | None = None) -> StateLeaf:
        return self.FORMS[self.form](max_len)


@pytest.mark.parametrize("form", Sized.FORMS)
def test_states_of_another_form_are_told_by_what_they_are(form: str) -> None:
    assert max_len_shows(Subject("mixers", doubles.CONFIGS[0].tiny()), Sized(form)) == (form != "none")


def test_every_broken_variant_is_listed() -> None:
    assert set(MIXERS) - set(BROKEN) == set(HONEST)
    assert set(BROKEN) <= set(MIXERS)


@pytest.mark.parametrize("name", sorted(set(HONEST) - {"Honest"}))
def test_what_the_broken_ones_are_made_of_keeps_every_law(name: str, registries: Registries) -> None:
    del registries.kernels._kernels["double_ema"]["wrong"]
    laws = [law for law in laws_for("mixers") if law != "compile"]  # which takes longest, and is the op's own
    failed = [(r.law, r.message) for r in run_checks("mixers", BrokenConfig(variant=name), laws) if not r.ok]
    assert failed == []


@pytest.mark.parametrize("variant", BROKEN)
def test_broken_variant_is_caught(variant: str) -> None:
    law, message = BROKEN[variant]
    (result,) = run_checks("mixers", BrokenConfig(variant=variant), [law])
    assert not result.ok
    assert message in result.message


@pytest.mark.parametrize("law", sorted({law for law, _ in BROKEN.values()} - {"kernels"}))
def test_the_same_laws_pass_an_honest_mixer(law: str) -> None:
    (result,) = run_checks("mixers", BrokenConfig(), [law])
    assert result.ok, result.message


def test_a_norm_over_tokens_is_caught() -> None:
    with pytest.raises(ContractError, match="per_token: token 0 alone differs"):
        check_norm(BatchNormConfig(), laws=["per_token"])


def test_the_error_lists_every_broken_law() -> None:
    with pytest.raises(ContractError, match=r"mixers/broken breaks 2 laws[\s\S]*segment: [\s\S]*crop: "):
        check_mixer(BrokenConfig(variant="IgnoresSegments"), laws=["shape", "segment", "crop"])


def test_a_result_says_what_when_and_why() -> None:
    results = run_checks("mixers", doubles.EdgesConfig.tiny(), ["shape", "crop"])
    assert [(r.component, r.law, r.ok, r.skipped) for r in results] == [
        ("mixers/double_edges", "shape", True, False), ("mixers/double_edges", "crop", True, True),
    ]
    assert results[1].message == "has no state"
    assert all(isinstance(r, CheckResult) and r.seconds >= 0 for r in results)


def test_a_declared_law_is_skipped_where_it_is_truly_broken() -> None:
    class CannotCrop(MIXERS["IgnoresKeep"]):  # type: ignore[misc]
        cannot = {"crop": "no snapshots"}  # noqa: RUF012

    MIXERS["CannotCrop"] = CannotCrop
    try:
        (result,) = run_checks("mixers", BrokenConfig(variant="CannotCrop"), ["crop"])
    finally:
        del MIXERS["CannotCrop"]
    assert result.ok
    assert result.skipped
    assert result.message == "declared: cannot crop (no snapshots)"


def test_a_law_that_only_losses_break_is_still_a_law_of_the_outputs() -> None:
    class LossOfOneCall(doubles.EdgesMixer):
        losses_cannot = {"cut": "it counts calls"}  # noqa: RUF012

        def forward(self, x: Any, **options: Any) -> Any:
            y, state, extras = super().forward(x, **options)
            losses = {name: (total + 1, count) for name, (total, count) in extras.losses.items()}
            return y, state, extras._replace(losses=losses)

    class OutputsToo(LossOfOneCall):
        def forward(self, x: Any, **options: Any) -> Any:
            y, state, extras = super().forward(x, **options)
            return y * x.shape[1], state, extras

    for cls in (LossOfOneCall, OutputsToo):
        MIXERS[cls.__name__] = cls
        try:
            (cut,) = run_checks("mixers", BrokenConfig(variant=cls.__name__), ["cut"])
        finally:
            del MIXERS[cls.__name__]
        assert cut.ok == (cls is LossOfOneCall), cut.message
        assert not cut.skipped
        if cls is OutputsToo:
            assert "output at t=" in cut.message


def test_an_unknown_law_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"no law named 'segments'\. Did you mean 'segment'"):
        run_law(Subject("mixers", doubles.EmaConfig.tiny()), "segments")


def test_laws_of_each_kind() -> None:
    of_tasks = {"rows", "resume", "held_out", "ranks", "measures"}
    assert set(laws_for("tasks")) == {"config"} | of_tasks
    assert "cut" not in laws_for("norms")
    assert "per_token" in laws_for("positions")
    assert "cut" in laws_for("heads")
    assert set(laws_for("mixers")) == set(LAW_CHECKS) - {"per_token"} - of_tasks


def test_named_checks_run_their_kind() -> None:
    check_mixer(doubles.SumConfig.tiny(), laws=["shape", "gradients"], d_model=6, seed=3)
    check_channel_mixer(doubles.ShiftConfig.tiny(), laws=["cut"])
    check_block(doubles.DoubleBlockConfig(mixer=doubles.WindowConfig(window=2)), laws=["cut", "segment", "crop"])


def test_a_block_carries_edges_losses_and_context() -> None:
    for mixer in (doubles.EdgesConfig(), doubles.CrossConfig()):
        block = doubles.DoubleBlockConfig(mixer=mixer)
        check_block(block, laws=["shape", "cut", "segment", "gradients", "mesh", "causal"])


# -- configs ---------------------------------------------------------------------------------------------------------


class LosesOptionConfig(doubles.WindowConfig):
    type: Literal["loses"] = "loses"  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in super().to_dict().items() if k != "window"}


class HiddenNoneConfig(doubles.SumConfig):
    type: Literal["hidden"] = "hidden"  # type: ignore[assignment]
    width: int | None = 4


class UnguessableConfig(doubles.SumConfig):
    type: Literal["unguessable"] = "unguessable"  # type: ignore[assignment]
    table: str = Field(default="z00000", pattern=r"^z\d{5}$")


class WrongTinyConfig(doubles.SumConfig):
    type: Literal["wrong_tiny"] = "wrong_tiny"  # type: ignore[assignment]

    @classmethod
    def tiny(cls) -> Self:
        return doubles.SumConfig()  # type: ignore[return-value]

    def build(self, ctx: BuildContext) -> doubles.SumMixer:
        return doubles.SumMixer(ctx)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LosesOptionConfig, r"option 'window': written down and read back, \['window'\] changed"),
        (HiddenNoneConfig, "option 'width' has a default and allows None"),
        (UnguessableConfig, r"option 'table': give it Field\(examples="),
        (WrongTinyConfig, r"tiny\(\) gives a SumConfig"),
    ],
)
def test_broken_configs_are_caught(config: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check_config(config)


class IdleConfig(doubles.SumConfig):
    type: Literal["idle"] = "idle"  # type: ignore[assignment]
    norm: bool = False
    eps: float = Field(default=0.5, gt=0)

    _without_norm = idle_beside({"norm": False}, "eps")


def test_an_option_that_is_refused_alone_is_tried_beside_another() -> None:
    with pytest.raises(RecipeError, match=r"eps = 0\.25 does nothing beside norm = false"):
        IdleConfig(eps=0.25)
    varied = dict(option_variants(IdleConfig()))
    assert varied["norm"] == IdleConfig(norm=True)
    assert varied["eps"] == IdleConfig(norm=True, eps=0.25)
    check_config(IdleConfig)


def test_configs_of_the_doubles() -> None:
    for config in doubles.CONFIGS:
        check_config(config)


# -- kernels ---------------------------------------------------------------------------------------------------------


def test_kernels_of_the_doubles(registries: Registries) -> None:
    for name in ("reference", "matrix"):
        check_kernel(registries.kernels.get("double_ema", name))


def test_a_wrong_kernel_is_caught_through_a_mixer() -> None:
    with pytest.raises(ContractError, match="kernel 'wrong' and the reference differ"):
        check_kernel(active().kernels.get("double_ema", "wrong"))


def _vague(request: KernelRequest) -> Any:
    return False


def _gpu_only(request: KernelRequest) -> str | None:
    return None if request.device.type == "cuda" else "needs a CUDA device"


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (Kernel("double_ema", "auto", 1, always, load_wrong), "'auto' cannot be the name"),
        (Kernel("double_ema", "vague", 1, _vague, load_wrong), "a reason or None, got False"),
        (Kernel("double_ema", "local", 1, lambda request: None, load_wrong), "cannot be pickled"),
    ],
)
def test_broken_kernel_records_are_caught(kernel: Kernel, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check_kernel(kernel)


def test_an_op_needs_a_reference(registries: Registries) -> None:
    kernel = Kernel("lonely", "fast", 1, always, load_wrong)
    registries.kernels.add(kernel)
    with pytest.raises(ContractError, match="no kernel named 'reference'"):
        check_kernel(kernel)


def test_a_kernel_for_other_devices_is_not_judged_here(registries: Registries) -> None:
    kernel = Kernel("double_ema", "gpu", 1, _gpu_only, load_wrong)
    registries.kernels.add(kernel)
    with pytest.raises(NotApplicableError, match="cannot run on a CPU"):
        check_kernel(kernel)


def test_a_declaration_of_no_law_is_a_failure(registries: Registries, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubles.EmaMixer, "cannot", {"cuts": "no way"})
    with using(registries):
        first = run_checks("mixers", doubles.EmaConfig.tiny(), ["shape"])[0]
    assert not first.ok
    assert first.message.startswith("declares that it cannot 'cuts', which is no law. Did you mean 'cut'?")


def test_what_cannot_be_built_fails_once(registries: Registries, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args: Any) -> None:
        raise ValueError("d_model is odd")

    monkeypatch.setattr(doubles.EmaMixer, "__init__", explode)
    with using(registries):
        results = run_checks("mixers", doubles.EmaConfig.tiny(), ["shape", "cut", "segment"])
    assert [r.ok for r in results] == [False, True, True]
    assert "d_model is odd" in results[0].message
    assert [r.message for r in results[1:]] == ["not reached: it cannot be built"] * 2
    assert all(r.skipped for r in results[1:])
