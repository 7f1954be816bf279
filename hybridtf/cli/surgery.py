"""``surgery``: other mixers in place of a trained model's."""

from __future__ import annotations

import re
from itertools import groupby
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridtf.cli.options import Json, Step, Weights
from hybridtf.cli.output import add_row, interruptible, make_table, print_json, print_table, print_text
from hybridtf.cli.sources import need_folder, read_run, registries

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hybridtf.models import LanguageModel
    from hybridtf.recipe import Recipe
    from hybridtf.surgery import Operated


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("surgery")(surgery)


def surgery(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, checkpoint or model folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The model folder to write.")],
    layers: Annotated[
        str, typer.Option("--layers", metavar="WHICH", help="Layers from 0: all; 1,3,5; 2-7; every 2 from 1; and together.")
    ],
    mixer: Annotated[
        str | None, typer.Option("--mixer", metavar="TABLE", help="The new mixer: a name, or a table as in a recipe.")
    ] = None,
    n_kv_heads: Annotated[
        int | None,
        typer.Option("--n-kv-heads", min=1, metavar="N", help="Heads of keys and values; alone: nothing else changes."),
    ] = None,
    leave: Annotated[
        str, typer.Option("--leave", metavar="NAMES", help="Options not to take from the replaced mixer, with commas.")
    ] = "",
    seed: Annotated[int, typer.Option("--seed", help="Of the weights that no old one can fill.")] = 0,
    step: Step = None,
    weights: Weights = "model",
    json: Json = False,
) -> None:
    """Replace mixers of a trained model by others.

    Weights whose meaning survives are kept, and all are listed. What the new mixer leaves open of heads, positions and
    biases is taken from the replaced one. Train on with train --from, and train.teacher in the recipe.
    """
    registries()
    _need_new(output)
    if mixer is None and n_kv_heads is None:
        raise typer.BadParameter("give --mixer, --n-kv-heads or both", param_hint="--mixer")
    options = {"n_kv_heads": n_kv_heads, "seed": seed, "leave": [name.strip() for name in leave.split(",") if name.strip()]}
    found = _operate(_read(run, step, weights), layers, mixer, output, options)
    if json:
        print_json({**_as_json(found), "output": str(output)})
        return
    _show(found, asked=mixer is not None)
    print(f"written: {output}")


def _operate(
    given: tuple[LanguageModel, Recipe], layers: str, mixer: str | None, output: Path, options: Mapping[str, Any]
) -> Operated:
    """Replace, and write."""
    from hybridtf.core import ConfigError
    from hybridtf.surgery import MixerError, parse_layers, replace_mixers
    from hybridtf.train import save_model

    chosen = parse_layers(layers, len(given[0].config.layers()))
    with interruptible("nothing was written"):
        try:
            found = replace_mixers(*given, chosen, None if mixer is None else _table(mixer), **options)
        except MixerError as error:
            heads = options["n_kv_heads"]
            said = [*([] if mixer is None else [f"--mixer {mixer}"]), *([] if heads is None else [f"--n-kv-heads {heads}"])]
            raise ConfigError(f"{' '.join(said)}: {error.why}") from None
        save_model(found.model, found.recipe, output)
    return found


def _need_new(output: Path) -> None:
    """Refuse a folder that holds anything."""
    from hybridtf.core import ConfigError

    need_folder(output)
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output}: is there already; choose another folder")


def _read(run: str, step: int | None, weights: str) -> tuple[LanguageModel, Recipe]:
    from hybridtf.core import CheckpointError
    from hybridtf.models import LanguageModel

    loaded = read_run(run, "cpu", step, weights)
    if not isinstance(loaded.model, LanguageModel):
        raise CheckpointError(f"{run}: is no language model of ours, and its layers are not known")
    return loaded.model, loaded.recipe


def _table(text: str) -> Mapping[str, Any] | str:
    """A mixer's table as TOML has it inline, or its name alone."""
    import tomllib

    from hybridtf.core import ConfigError

    if not text.strip().startswith("{"):
        return text.strip()
    key = "mixer = "
    try:
        found: Mapping[str, Any] = tomllib.loads(key + text)["mixer"]
    except tomllib.TOMLDecodeError as error:
        where = re.sub(r"(?<=line 1, column )\d+", lambda column: str(int(column[0]) - len(key)), str(error))
        shown = '{ type = "delta_net", n_heads = 4 }'
        raise ConfigError(f"--mixer {text}: is no TOML table, as {shown} is one: {where}") from None
    return found


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain_value(value) for name, value in options.items()}


def _plain_value(value: Any) -> Any:
    """As TOML and JSON have it."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, dict):
        return _plain(value)
    return [_plain_value(one) for one in value] if isinstance(value, list | tuple) else value


def _as_json(found: Operated) -> dict[str, Any]:
    layers = {
        str(i): {
            "mixer": _mixer(found, i), "taken": _plain(found.taken[i]), "left_behind": _plain(found.left[i]),
            "in_the_way": list(found.in_way[i]),
            "pieces": [{"tensor": p.tensor, "fate": p.fate, "n": p.n, "how": p.how} for p in pieces],
        }
        for i, pieces in found.pieces.items()
    }
    config = found.model.config
    return {
        "pattern": config.stacks()[0].pattern, "counts": found.counts(), "others": found.others, "layers": layers,
        "teacher_left_out": found.teacher,
    }


def _mixer(found: Operated, layer: int) -> str:
    config = found.model.config
    name: str = config.blocks[config.layers()[layer]].mixer.type_name()  # type: ignore[attr-defined]
    return name


def _show(found: Operated, *, asked: bool) -> None:
    """A table for layers of equal fates, options that were taken and left, what stands in the way, and the sums."""
    def alike(i: int) -> str:
        return repr((found.pieces[i], found.taken[i], found.left[i], found.in_way[i]))

    for _, group in groupby(sorted(found.pieces, key=lambda i: (alike(i), i)), key=alike):
        its = list(group)
        first, heads = its[0], ("numbers",)
        which = f"{'layer' if len(its) == 1 else 'layers'} {', '.join(map(str, its))}"
        table = make_table("tensor", "", *heads, "how", title=f"{which}: {_mixer(found, first)}", right=heads)
        for piece in found.pieces[first]:
            add_row(table, piece.tensor, piece.fate, f"{piece.n:,}", piece.how)
        print_table(table)
        notes = {
            "taken from the replaced mixer": _as_options(found.taken[first]) if asked else "",
            "left behind, of the replaced mixer": _as_options(found.left[first]),
            "newly drawn, and in the way of what was kept": ", ".join(found.in_way[first]),
        }
        for title, text in notes.items():
            if text:
                print_text(f"{title}: {text}\n")
    counts = found.counts()
    pattern = found.model.config.stacks()[0].pattern
    if found.teacher is not None:
        print_text(f"left out of the recipe: train.teacher, which was {found.teacher} and taught the model before surgery")
    print(f"pattern {pattern}; {found.others:,} numbers outside these mixers as they were")
    print(", ".join(f"{fate} {n:,}" for fate, n in counts.items()) + " numbers")


def _as_options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {dumps(value)}" for name, value in sorted(_plain(options).items()))
