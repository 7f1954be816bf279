"""Hand-made records for the tests of findings."""

from __future__ import annotations

from collections.abc import Mapping

from hybridtf.bench.records import Record


def quality(recipe: str, groups: Mapping[str, float], *, seed: int = 0, task: str = "drawn") -> Record:
    """A ``quality`` record with a value a group; its own value is their mean."""
    value = sum(groups.values()) / len(groups)
    return {
        "kind": "quality", "recipe": recipe, "seed": seed, "task": task, "metric": "accuracy", "value": value, "n_params": 1000,
        "groups": {name: {"value": v} for name, v in groups.items()},
    }


def over_seeds(recipe: str, groups: Mapping[str, float], *, seeds: int = 3, task: str = "drawn") -> list[Record]:
    """The same in every seed."""
    return [quality(recipe, groups, seed=seed, task=task) for seed in range(seeds)]


def model(recipe: str, used: int, *, length: int = 1024, seed: int = 0) -> Record:
    """A ``model`` record with the state of one length."""
    return {"kind": "model", "recipe": recipe, "seed": seed, "n_params": 1000, "state_bytes": {str(length): {"used": used}}}
