"""From what a person names on the command line to what the library takes: recipes, runs, devices, records."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from hybridtf.cli.output import counted, say, say_warning

if TYPE_CHECKING:
    import torch

    from hybridtf.bench.records import Record
    from hybridtf.bench.subject import Subject
    from hybridtf.core import Registries
    from hybridtf.recipe import Recipe
    from hybridtf.train import LoadedRun

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", re.IGNORECASE)


def registries() -> Registries:
    """Everything that is installed; plugins that could not be loaded are named, and the rest works."""
    from hybridtf.core import active

    found = active()
    for name, reason in found.failures.items():
        say_warning(f"plugin {name!r} was not loaded", reason)
    return found


def read_recipe(source: str, overrides: Sequence[str] | None = None, steps: int | None = None) -> Recipe:
    """A recipe by file or name, all its sections validated; ``steps`` instead of what it says of how long to train."""
    from hybridtf.recipe import apply_overrides, parse_recipe
    from hybridtf.recipe.load import read_table
    from hybridtf.train import TrainConfig

    table, path = read_table(source)
    table = apply_overrides(table, list(overrides or ()))
    if steps is not None:
        train = table.get("train", {})
        if isinstance(train, dict):  # anything else is left for the validation
            kept = {key: value for key, value in train.items() if key not in ("tokens", "epochs")}
            table["train"] = kept | {"steps": steps}
    return parse_recipe(table, path, sections={"train": TrainConfig})


def need_train(recipe: Recipe, source: str, option: str) -> None:
    """Refuse a recipe that does not say how long to train; ``option`` would."""
    from hybridtf.core import RecipeError

    if recipe.train is None:
        raise RecipeError(source, [("train", f"the recipe has no section [train]; write one, or give {option}")])


def build_on_meta(recipe: Recipe, source: str) -> Any:
    """The model, without memory. Raises :class:`ConfigError` that names ``source``, where only building shows a fault."""
    import torch

    from hybridtf.core import BuildContext, ConfigError

    try:
        return recipe.model.build(BuildContext(d_model=0, device=torch.device("meta")))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def need_folder(path: Path) -> None:
    """Refuse an output folder that cannot be made or written to, before any work is done. What is tried is undone."""
    from hybridtf.core import ConfigError

    places = (path, *path.parents)
    for place in places:
        if os.path.exists(place) and not os.path.isdir(place):
            raise ConfigError(f"{place}: is a file; give a folder")
    missing = [place for place in places if not os.path.exists(place)]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written to ({error.strerror or error}); give another folder") from None
    finally:
        for place in missing:
            with contextlib.suppress(OSError):
                place.rmdir()


def need_file(path: Path | None) -> None:
    """Refuse an output file in a folder that cannot be written to, or that is one itself, before any work is done."""
    from hybridtf.core import ConfigError

    if path is None:
        return
    if os.path.isdir(path):
        raise ConfigError(f"{path}: is a folder; give a file")
    need_folder(path.parent)


def names_of(sources: Sequence[str]) -> list[str]:
    """The names that records call several by: files of one name in different folders by their path.

    Raises :class:`ConfigError` for one that is named twice, and where two have one name all the same.
    """
    from hybridtf.core import ConfigError

    if len(set(sources)) < len(sources):
        twice = max(sources, key=list(sources).count)
        raise ConfigError(f"{twice} is named twice; copy it to another name if both are meant")
    names = [name_of(source) for source in sources]
    names = [source if names.count(name) > 1 else name for source, name in zip(sources, names, strict=True)]
    if len(set(names)) < len(names):
        raise ConfigError(f"two recipes are called {max(names, key=names.count)!r}; copy one of them to another name")
    return names


def is_run(source: str) -> bool:
    """Whether a run, checkpoint or model folder is meant, not a recipe."""
    return Path(source).is_dir()


def name_of(source: str) -> str:
    """What records call it: a file by its name alone, an installed recipe and a folder as they were written."""
    path = Path(source)
    return path.stem if path.suffix == ".toml" else path.as_posix()


def choose_device(name: str | None) -> torch.device:
    """The device of a name, or a GPU if there is one. Raises :class:`ConfigError` where it is not here."""
    import torch

    from hybridtf.core import ConfigError

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name}: is no device; allowed are cpu, cuda and cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices here")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: allowed are cpu, cuda and cuda:N")
    return device


def parse_size(text: str, option: str) -> int:
    """Bytes of ``8GB`` (1000^3 each) or ``8GiB`` (1024^3 each). Raises :class:`ConfigError`."""
    from hybridtf.core import ConfigError

    match = _SIZE.fullmatch(text.strip())
    size = 0
    if match is not None:
        power = " kmgt".index(match[2].lower() or " ")
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if size < 1:
        raise ConfigError(f"{option} {text}: is no size; write 800MB, 8GB or 8GiB")
    return size


def read_run(source: str, device: str | None = None, step: int | None = None, weights: str = "model") -> LoadedRun:
    """A trained model. A recipe's name is answered with what to do first."""
    from hybridtf.core import CheckpointError, ConfigError, known_names
    from hybridtf.recipe import recipe_names
    from hybridtf.train import load_run
    from hybridtf.train.checkpoint import WhichWeights

    if weights not in get_args(WhichWeights):
        raise ConfigError(f"--weights {weights}: {known_names(weights, get_args(WhichWeights))}")

    if not Path(source).exists() and source in recipe_names():
        first = f"hybridtf train {source} -o runs/{Path(source).name}"
        raise CheckpointError(f"{source}: is a recipe, and a run is needed; train it first: {first}")
    return load_run(source, device=choose_device(device), step=step, weights=cast(WhichWeights, weights))


def run_subject(run: LoadedRun, name: str) -> Subject:
    """What records say about a trained model."""
    from hybridtf.bench.subject import Subject

    seed = run.recipe.train.seed if run.recipe.train is not None else 0
    plan = Subject.from_recipe(run.recipe, name, seed=seed)
    return Subject.from_model(run.model, name, recipe=plan.recipe, pattern=plan.pattern, seed=seed)


def save_records(path: Path | None, records: Sequence[Record]) -> None:
    """Append to ``path`` where one was given, and say so."""
    from hybridtf.bench.records import append_record

    if path is None:
        return
    for record in records:
        append_record(path, record)
    say(f"{counted(len(records), 'record')} appended to {path}")


def table_json(table: Any, records: Sequence[Record]) -> dict[str, Any]:
    """A table with the records that it was made of."""
    return {"table": table.to_rows(), "notes": list(table.notes), "records": list(records)}
