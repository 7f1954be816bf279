"""What ``--model_args`` may say, checked before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from hybridtf.core import ConfigError, known_names

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NOT_HERE = {
    "max_batch_size": "batch sizes are not searched; give batch_size",
    "trust_remote_code": "no code of a checkpoint is ever run",
    "revision": "nothing is fetched; pretrained is a folder",
    "parallelize": "a model runs on one device",
    "peft": "merge the adapter first, then give the merged checkpoint",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arguments:
    """Checked by :func:`read_arguments`."""

    pretrained: str
    tokenizer: str | None = None
    bos_token: str | None = None
    add_bos_token: bool | None = None
    batch_size: int = 1
    max_length: int | None = None
    max_gen_toks: int = 256
    dtype: str = "auto"
    device: str | None = None
    step: int | None = None
    weights: str = "model"

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None: that of the files."""
        return None if self.dtype == "auto" else DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        """What was asked for. lm-eval asks for ``cuda:0`` where nobody did: without a GPU that is the CPU."""
        has_gpu = torch.cuda.is_available()
        if self.device is None or (self.device in ("cuda", "cuda:0") and not has_gpu):
            if self.device is not None:
                log.warning("device %s is not here: the CPU is used", self.device)
            return torch.device("cuda" if has_gpu else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise ConfigError(f"device={self.device}: is no device; allowed are cpu, cuda and cuda:N") from None
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device={self.device}: allowed are cpu, cuda and cuda:N")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device={self.device}: there are {torch.cuda.device_count()} CUDA devices here")
        return device


def read_arguments(given: Mapping[str, Any]) -> Arguments:
    """Raise :class:`ConfigError` for the first argument that says nothing here."""
    names = [field.name for field in fields(Arguments)]
    for name, value in given.items():
        if name in NOT_HERE and name not in names:
            if value in (None, False):
                continue
            raise ConfigError(f"model_args: {name}={value}: {NOT_HERE[name]}")
        if name not in names:
            raise ConfigError(f"model_args: {name}: no such argument. {known_names(name, names)}")
    said: dict[str, Any] = {name: value for name, value in given.items() if name in names and value is not None}
    if not said.get("pretrained"):
        raise ConfigError("model_args: pretrained=DIR is missing: a run, an imported model, or a published checkpoint")
    said["pretrained"] = str(said["pretrained"])
    for name in ("batch_size", "max_length", "max_gen_toks", "step"):
        if name in said:
            said[name] = _whole(name, said[name], 0 if name == "step" else 1)
    if not isinstance(said.get("add_bos_token", True), bool):
        raise ConfigError(f"model_args: add_bos_token={said['add_bos_token']}: allowed are True and False")
    said["dtype"] = str(said.get("dtype", "auto")).removeprefix("torch.")
    allowed = {"dtype": ("auto", *DTYPES), "weights": ("model", "ema")}
    for name, values in allowed.items():
        if said.get(name, values[0]) not in values:
            raise ConfigError(f"model_args: {name}={said[name]}: {known_names(str(said[name]), values)}")
    for name in ("tokenizer", "bos_token", "device"):
        if name in said:
            said[name] = str(said[name])
    if not Path(said["pretrained"]).expanduser().is_dir():
        raise ConfigError(f"model_args: pretrained={said['pretrained']}: no such folder (and nothing is fetched)")
    return Arguments(**said)


def _whole(name: str, value: Any, least: int) -> int:
    text = str(value)
    if not text.isdigit() or int(text) < least:
        hint = "; sizes are not searched" if text.startswith("auto") else ""
        raise ConfigError(f"model_args: {name}={value}: a whole number of at least {least} is needed{hint}")
    return int(text)
