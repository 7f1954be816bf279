"""The state of an NVIDIA GPU around a measurement, as its driver's ``nvidia-smi`` tells it: what would make a time untrue."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

import torch

FIELDS = (
    "uuid", "driver_version", "clocks.sm", "clocks.max.sm", "temperature.gpu", "power.draw", "power.limit",
    "clocks_throttle_reasons.active", "mig.mode.current",
)

IDLE = 0x1
"""The throttle reason of a GPU that has nothing to do; and of clocks that were set by hand (nvml.h)."""
APPLICATION_CLOCKS = 0x2

MIN_CLOCK = 0.75
"""Share of the highest clock below which times are not claimed (nvbench does so too)."""


def gpu_state(device: torch.device) -> dict[str, Any] | None:
    """What ``nvidia-smi`` says of a CUDA device, with ``others``: other processes that compute on it. None on other devices,
    and ``{"unknown": why}`` where it does not answer."""
    if device.type != "cuda":
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        facts = _ask(f"--query-gpu={','.join(FIELDS)}", uuid)
        processes = _ask("--query-compute-apps=pid", uuid)
    except (OSError, subprocess.SubprocessError) as error:
        return {"unknown": f"nvidia-smi did not answer ({error})"}
    return parsed(facts, processes, os.getpid())


def _ask(query: str, uuid: str) -> str:
    command = ["nvidia-smi", f"--id={uuid}", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


def parsed(facts: str, processes: str, own: int) -> dict[str, Any]:
    """The answers as data: numbers where they are numbers, None where the driver does not say."""
    values = [value.strip() for value in facts.strip().splitlines()[0].split(",")]
    if len(values) != len(FIELDS):
        return {"unknown": f"nvidia-smi gave {len(values)} values for {len(FIELDS)} questions"}
    state: dict[str, Any] = {name: _value(text) for name, text in zip(FIELDS, values, strict=True)}
    found = [int(line) for line in processes.split() if line.isdigit()]
    return {**state, "others": len([pid for pid in found if pid != own])}


def _value(text: str) -> float | int | str | None:
    if text.startswith("["):  # [N/A], [Not Supported]
        return None
    try:
        return int(text, 0)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def refusals(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[str]:
    """Why times taken between the two states are not claimed. None: no GPU, nothing to say."""
    if before is None or after is None:
        return []
    unknown = before.get("unknown") or after.get("unknown")
    if unknown:
        return [f"the GPU's clocks are not known: {unknown}"]
    reasons = []
    if before["others"] or after["others"]:
        reasons.append(f"{max(before['others'], after['others'])} other processes use the GPU")
    clock, highest = after["clocks.sm"], after["clocks.max.sm"]
    if clock is None or highest is None:
        reasons.append("the GPU's clocks are not known: the driver does not say")
    elif clock < MIN_CLOCK * highest:
        reasons.append(f"the GPU's clock fell to {clock} of {highest} MHz")
    throttled = int(after["clocks_throttle_reasons.active"] or 0) & ~(IDLE | APPLICATION_CLOCKS)
    if throttled:
        reasons.append(f"the GPU was throttled (reasons {throttled:#x})")
    return reasons
