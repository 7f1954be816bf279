"""A published checkpoint read here beside transformers' own reading of it: the same scores, in every way to call."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import hybridtf
from hybridtf.core import CheckpointError, DataError, HybridTFError, Segments
from hybridtf.interop.importing import import_checkpoint
from hybridtf.interop.settings import CONFIG, read_settings
from hybridtf.interop.strict import strict_float64
from hybridtf.models import LanguageModel

EXACT = 1e-9
"""How far a score may be off in float64: rounding is 1e-13 at most, and a term that is missing shows at 1e-4."""
ROUNDED = 1e-4
"""The same in float32, of the largest score."""
SHORT = 5
"""Tokens of the second document, where there is one."""


class Reference(Protocol):
    """A checkpoint and what another implementation answers. ``ids`` (2 t); ``scores`` of them in float64 or float32 (2 t v);
    ``tolerance`` of the former: :data:`EXACT`, or what the reference itself rounds."""

    @property
    def name(self) -> str: ...

    @property
    def folder(self) -> Path: ...

    @property
    def ids(self) -> Tensor: ...

    @property
    def tolerance(self) -> float: ...

    def scores(self, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True)
class Parity:
    """Largest differences of scores: from the reference in ``float64`` and ``float32``; in float64, of tokens one at a time
    (``decode``), of two documents in a row (``packed``) and of padded rows (``padded``), from the reference's plain rows.

    ``why``: what failed, or is left out with its reason; ``passed``: nothing failed.
    """

    name: str
    family: str | None
    parameters: int | None
    pattern: str | None
    scale: float | None
    float64: float | None
    float32: float | None
    decode: float | None
    packed: float | None
    padded: float | None
    why: str | None
    passed: bool

    def to_json(self) -> dict[str, Any]:
        """One record; the verdict is called ``pass``."""
        found = asdict(self)
        return found | {"pass": found.pop("passed")}


def parity_of(reference: Reference) -> Parity:
    """Both readings beside each other. What cannot be read is a row that did not pass; none raises but for bugs of ours."""
    try:
        wide = import_checkpoint(reference.folder, dtype=torch.float64)
        narrow = import_checkpoint(reference.folder, dtype=torch.float32).model
    except HybridTFError as error:
        return _unread(reference, str(error))
    model, ids = wide.model, reference.ids
    with torch.no_grad():
        want = reference.scores(torch.float64)
        rounded = _off(narrow(ids).logits.double(), reference.scores(torch.float32).double())
        found = {
            "float64": _off(model(ids).logits, want), "float32": rounded, "decode": _decode(model, ids[:1], want[0]),
            "packed": _packed(model, ids, want[0]), "padded": _padded(model, ids, want[0]),
        }
    scale = float(want.abs().max())
    limits = {name: ROUNDED * scale if name == "float32" else reference.tolerance for name in found}
    wrong = [name for name, value in found.items() if value is not None and not value <= limits[name]]
    why = f"off: {', '.join(wrong)}" if wrong else None
    if found["decode"] is None and why is None:
        why = f"not decoded in steps: {_cannot(model)}"
    (stack,) = model.config.stacks()
    parameters = sum(p.numel() for p in model.parameters())
    return Parity(reference.name, wide.family.model_type, parameters, stack.pattern, scale, **found, why=why, passed=not wrong)


def _unread(reference: Reference, why: str) -> Parity:
    nothing: dict[str, Any] = {field.name: None for field in fields(Parity)}
    why = why.removeprefix(f"{reference.folder}/{CONFIG}: ").removeprefix(f"{reference.folder}: ").partition(" Known: ")[0]
    return Parity(**nothing | {"name": reference.name, "why": f"not read: {why}", "passed": False})


def _off(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max())


def _cannot(model: nn.Module) -> str | None:
    """Why a model cannot go on from a state."""
    laws: list[dict[str, str]] = [getattr(module, "cannot", {}) for module in model.modules()]
    return next((one["cut"] for one in laws if "cut" in one), None)


def _decode(model: LanguageModel, ids: Tensor, want: Tensor) -> float | None:
    if _cannot(model) is not None:
        return None
    state, parts = model.init_state(1, max_len=ids.shape[1]), []
    for token in ids.unbind(1):
        out = model(token[:, None], state=state)
        state = out.state
        parts.append(out.logits[0])
    return _off(torch.cat(parts), want)


def _packed(model: LanguageModel, ids: Tensor, want: Tensor) -> float:
    """A short document before the long one, in one row."""
    short = ids[1:, :SHORT]
    row = torch.cat([short, ids[:1]], 1)
    logits = model(row, segments=Segments.from_lengths([[short.shape[1], ids.shape[1]]])).logits[0]
    return _off(logits, torch.cat([model(short).logits[0], want]))


def _padded(model: LanguageModel, ids: Tensor, want: Tensor) -> float:
    """A short document with pads to its left, on both sides and to its right, beside the long one."""
    short, t = ids[1:, :SHORT], ids.shape[1]
    alone, worst = model(short).logits[0], 0.0
    for before in sorted({0, min(3, t - short.shape[1]), t - short.shape[1]}):
        real = torch.zeros(1, t, dtype=torch.bool)
        real[:, before : before + short.shape[1]] = True
        row = torch.full_like(ids[:1], 2)
        row[real] = short[0]
        mask = torch.cat([real, torch.ones_like(real)])
        logits = model(torch.cat([row, ids[:1]]), segments=Segments.from_mask(mask)).logits
        worst = max(worst, _off(logits[0][real[0]], alone), _off(logits[1], want))
    return worst


# -- references --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class LocalCheckpoint:
    """A folder as transformers reads it, over ``n_tokens`` drawn tokens."""

    folder: Path
    n_tokens: int = 23
    tolerance: float = EXACT

    @property
    def name(self) -> str:
        return self.folder.name

    @functools.cached_property
    def ids(self) -> Tensor:
        vocab_size = read_settings(self.folder / CONFIG).count("vocab_size")
        return torch.randint(vocab_size, (2, self.n_tokens), generator=torch.Generator().manual_seed(0))

    def scores(self, dtype: torch.dtype) -> Tensor:
        """Raises :class:`CheckpointError` where transformers does not read the folder."""
        from transformers import AutoModelForCausalLM

        with strict_float64() if dtype is torch.float64 else contextlib.nullcontext(), torch.no_grad():
            try:
                plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # fused ones have no float64
                model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype, **plain)
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                raise CheckpointError(f"{self.folder}: transformers does not read it ({error})") from error
            logits: Tensor = model.eval()(self.ids, use_cache=False).logits
        return logits


def repository_references() -> list[Reference]:
    """The reference models that the repository's tests have, each of a published family. Raises :class:`DataError` outside of a
    checkout."""
    root = Path(hybridtf.__file__).parents[1]
    if not (root / "tests" / "interop" / "oracles.py").is_file():
        raise DataError("the reference models are in the repository (tests/interop), not in the package; name folders instead")
    sys.path.append(str(root))
    oracles = importlib.import_module("tests.interop.oracles")
    if Path(str(oracles.__file__)).parents[2] != root:
        raise DataError(f"{oracles.__file__}: another package is called tests; run from {root}")
    return [oracles.oracle(name) for name in oracles.every_name()]
