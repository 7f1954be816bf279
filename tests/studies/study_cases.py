"""Hand-made records for the tests of findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridtf.bench.records import Record


def quality(recipe: str, groups: Mapping[str, float], *, seed: int = 0, task: str = "drawn") -> Record:
    """A ``quality`` record with a value a group; its own value is their mean."""
    value = sum(groups.values()) / len(groups)
    return {
        "kind": "quality", "recipe": recipe, "recipe_hash": f"{recipe} {task}", "seed": seed, "task": task,
        "metric": "accuracy", "value": value, "n_params": 1000,
        "groups": {name: {"value": v} for name, v in groups.items()},
    }


def over_seeds(recipe: str, groups: Mapping[str, float], *, seeds: int = 3, task: str = "drawn") -> list[Record]:
    """The same in every seed."""
    return [quality(recipe, groups, seed=seed, task=task) for seed in range(seeds)]


def model(recipe: str, used: int, *, length: int = 1024, seed: int = 0) -> Record:
    """A ``model`` record with the state of one length."""
    return {"kind": "model", "recipe": recipe, "seed": seed, "n_params": 1000, "state_bytes": {str(length): {"used": used}}}


def beyond(recipe: str, bits: Sequence[float | None], *, seed: int = 0, trained: int = 128) -> Record:
    """An ``extrapolation`` record with bits a byte at 1, 2, 4, ... times the trained length, and their means from the start."""
    multiples = [2**i for i in range(len(bits))]
    known = [value for value in bits if value is not None]
    widths = [multiple - before for before, multiple in zip([0, *multiples], multiples, strict=False)][: len(known)]
    sums = [sum(w * b for w, b in zip(widths[: i + 1], known[: i + 1], strict=True)) for i in range(len(known))]
    cumulative = [total / multiple for total, multiple in zip(sums, multiples, strict=False)]
    return {
        "kind": "extrapolation", "recipe": recipe, "seed": seed, "n_params": 1000, "task": "text", "trained_length": trained,
        "multiples": multiples, "bits_per_byte": list(bits), "cumulative": [*cumulative, *[None] * (len(bits) - len(known))],
    }
