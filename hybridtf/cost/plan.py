"""The plan of a model: what it needs in training, prefill and decode at any length, and what fits a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from hybridtf.core import ConfigError
from hybridtf.cost.devices import Device
from hybridtf.cost.flops import Work
from hybridtf.cost.footprint import Footprint
from hybridtf.cost.foreign import has_known_state
from hybridtf.cost.live_bytes import WithoutMemory
from hybridtf.cost.longest import longest_length
from hybridtf.cost.parameters import parameter_counts
from hybridtf.cost.phases import PHASES, Phase, Planned
from hybridtf.cost.roofline import roofline
from hybridtf.cost.states import state_size
from hybridtf.cost.trace import PERIOD, TRACED, Tracer, reach_of
from hybridtf.ops.spans import sized_for

MAX_LENGTH = 1 << 20
MAX_BATCH = 1 << 16


def make_plan(
    planned: Planned, *, lengths: Sequence[int], batch_size: int, device: Device, phases: Sequence[Phase] = PHASES,
    sibling: Planned | None = None,
) -> dict[str, Any]:
    """All of the plan as plain data; ``sibling``: the same stack with attention everywhere, to find where they cross.

    A number that no formula is known for is None, and ``unknown`` names the operators. Raises :class:`ConfigError` for a model
    that reads computed values back, and for a batch beyond :data:`MAX_BATCH`.
    """
    if not 1 <= batch_size <= MAX_BATCH:
        raise ConfigError(f"batch_size must be from 1 to {MAX_BATCH}, got {batch_size}")
    with sized_for(device.kind):
        model = shapes_of(planned)
        reach = reach_of(model.config) if callable(getattr(getattr(model, "config", None), "stacks", None)) else MAX_LENGTH
        known = [phase for phase in phases if phase != "decode" or has_known_state(model)]
        tracers = {phase: Tracer(planned, phase, reach) for phase in known}
        found: dict[str, Any] = {
            "device": device.name, "validated": device.validated, "batch_size": batch_size,
            "params": parameter_counts(model),
            "state_bytes": {str(n): state_size(model, n, batch_size) for n in lengths} if has_known_state(model) else None,
            "phases": {
                phase: {str(n): _row(tracer, n, batch_size, device) for n in lengths} for phase, tracer in tracers.items()
            },
            "fits": {phase: _longest(tracer, batch_size, device) for phase, tracer in tracers.items()},
        }
        if sibling is not None:
            ours = tracers.get("prefill") or Tracer(planned, "prefill", reach)
            found["crossover"] = crossover(ours, model, sibling)
        return found


def shapes_of(planned: Planned) -> nn.Module:
    """The model without memory: to be counted, and not run."""
    world = WithoutMemory()
    with world.enter():
        return world.adopt(planned.build())


def _row(tracer: Tracer, length: int, batch_size: int, device: Device) -> dict[str, Any]:
    traced = tracer.at(length, batch_size)
    work = traced.work
    unknown = sorted(set().union(*(part.unknown for part in work.values())))
    time = roofline(work.values(), device)
    footprint = {name: size for name, size in vars(traced.footprint).items() if name != "reserved"}
    return {
        "flops": {name: None if part.unknown else part.flops for name, part in work.items()},
        "useful_flops": {name: None if part.unknown else part.useful for name, part in work.items()},
        "by_op": {name: part.flops_by_op() for name, part in work.items()}, "unknown": unknown,
        "bytes": footprint, "seconds": time.seconds, "bound": time.bound,
        "fits": traced.footprint.peak <= device.memory, "largest_batch": _largest_batch(traced.footprint, batch_size, device),
        "traced": traced.exact,
    }


def _largest_batch(footprint: Footprint, batch_size: int, device: Device) -> int:
    """Rows whose peak fits, if all but weights, gradients and optimizer grows with them; 0: not one."""
    fixed = footprint.fixed
    a_row = max((footprint.peak - fixed) / batch_size, 1.0)
    return max(min(int((device.memory - fixed) / a_row), MAX_BATCH), 0)


def _longest(tracer: Tracer, batch_size: int, device: Device) -> dict[str, Any]:
    """The most tokens a row whose peak fits; ``at_least``: the search ended there."""

    def peak(length: int) -> int:
        # Few lengths are traced where the others are whole periods away.
        rounded = length if length <= TRACED else -(-length // PERIOD) * PERIOD
        footprint: Footprint = tracer.at(rounded, batch_size).footprint
        return footprint.peak

    if tracer.at(PERIOD, batch_size).footprint.fixed > device.memory:
        return {"length": 0, "at_least": False}
    length = longest_length(peak, device.memory, MAX_LENGTH, start=PERIOD)
    return {"length": length, "at_least": length == MAX_LENGTH}


# -- against attention everywhere --------------------------------------------------------------------------------------


def crossover(tracer: Tracer, model: nn.Module, sibling: Planned) -> Mapping[str, int | None]:
    """The least length, by powers of two from 64 to 2^20, from which on a row costs less than the sibling's: ``flops`` of
    reading it (a prefill), and bytes of ``state``. None: nowhere, or unknown."""
    models = (model, shapes_of(sibling))
    tracers = (tracer, Tracer(sibling, "prefill", reach_of(models[1].config)))

    def flops(which: int, length: int) -> int | None:
        work: Work = tracers[which].at(length).work["forward"]
        return None if work.unknown else work.flops

    def state(which: int, length: int) -> int:
        return state_size(models[which], length)["allocated"]

    return {"flops": _first_below(flops), "state": _first_below(state)}


def _first_below(cost: Callable[[int, int], int | None]) -> int | None:
    found = None
    for power in range(20, 5, -1):  # from the longest, since short ones have to be traced each
        ours, theirs = cost(0, 1 << power), cost(1, 1 << power)
        if ours is None or theirs is None or ours >= theirs:
            break
        found = 1 << power
    return found
