"""Base classes of the contracts, and what may be asked of a projection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from torch import nn

from hybridtf.core import LAWS, ChannelMixer, Extras, SequenceMixer, raw_weight
from hybridtf.testing.doubles import EdgesMixer, EmaConfig, SumMixer


def test_abstract_methods_must_be_given() -> None:
    class NoForward(SequenceMixer):
        def init_state(self, batch_size: int, max_len: int | None = None) -> Any:
            return ()

    with pytest.raises(TypeError, match="forward"):
        NoForward()  # type: ignore[abstract]


def test_a_channel_mixer_has_no_state_unless_it_says_so() -> None:
    class Plain(ChannelMixer):
        def forward(self, x: Any, *, segments: Any = None, state: Any = None, keep: int = 0) -> Any:
            return x, state

    assert Plain().init_state(3) == ()
    assert not Plain().extra_results()


def test_extra_results_follow_writes_and_losses() -> None:
    assert EdgesMixer.writes == ("double_gate",)
    assert Extras() == ({}, {})
    assert EdgesMixer.causal_only is False
    assert SumMixer.needs_context is False
    assert {"cut", "segment", "causal", "crop", "compile"} <= set(LAWS)


def test_a_config_builds_a_filled_module() -> None:
    from hybridtf.core import BuildContext, using
    from hybridtf.testing.doubles import registries

    with using(registries()):
        module = EmaConfig().build(BuildContext(d_model=4, seed=3))
        deferred = EmaConfig().build(BuildContext(d_model=4, seed=3, defer_init=True))
    assert not torch.equal(module.in_proj.weight, deferred.in_proj.weight)


class Sub(nn.Linear):
    pass


def _hooked() -> nn.Module:
    linear = nn.Linear(2, 3)
    linear.register_forward_hook(lambda module, args, out: out)
    return linear


def _pre_hooked() -> nn.Module:
    linear = nn.Linear(2, 3)
    linear.register_forward_pre_hook(lambda module, args: None)
    return linear


def _parametrised() -> nn.Module:
    linear = nn.Linear(2, 3)
    parametrize.register_parametrization(linear, "weight", nn.Identity())
    return linear


def _patched() -> nn.Module:
    linear = nn.Linear(2, 3)
    linear.forward = lambda x: x  # type: ignore[method-assign]
    return linear


def test_raw_weight_of_a_plain_linear() -> None:
    linear = nn.Linear(2, 3)
    assert raw_weight(linear) is linear.weight


@pytest.mark.parametrize("make", [_hooked, _pre_hooked, _parametrised, _patched, lambda: Sub(2, 3), nn.Identity])
def test_raw_weight_of_anything_else_is_none(make: Any) -> None:
    assert raw_weight(make()) is None
