"""``match``: the sizes at which recipes are equal in parameters, operations or bytes of state."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridtf.cli.options import Json, Recipes, Set
from hybridtf.cli.output import add_row, console, make_table, print_json, print_table, say
from hybridtf.cli.plan import parse_length
from hybridtf.cli.sources import name_of, names_of, need_folder, parse_size, read_recipe, registries

if TYPE_CHECKING:
    from hybridtf.cost.match import Match, Try, What
    from hybridtf.recipe import Recipe

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kMBGT]?)")
_POWERS = {"": 0, "k": 3, "M": 6, "B": 9, "G": 9, "T": 12}


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("match")(match)


def match(
    recipes: Recipes,
    params: Annotated[str | None, typer.Option("--params", metavar="N", help="Parameters in all, as in 125M.")] = None,
    flops: Annotated[str | None, typer.Option("--flops", metavar="N", help="Forward FLOPs a token, as in 250M.")] = None,
    state_bytes: Annotated[
        str | None, typer.Option("--state-bytes", metavar="SIZE", help="Bytes of a row's state, as in 64MiB.")
    ] = None,
    length: Annotated[
        str, typer.Option("--length", metavar="N", help="Tokens a row that FLOPs and states are counted at.")
    ] = "1k",
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write the recipes found here.")] = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Find the sizes at which recipes are equal.

    For parameters and FLOPs the width changes, with all that follows from it; for bytes of state the sizes of the state
    alone. Give one of --params, --flops and --state-bytes. Exit code 1 where a recipe has no legal size within 1 %: its
    nearest two are shown.
    """
    registries()
    what, asked = _asked(params, flops, state_bytes)
    n_tokens = parse_length(length)
    targets = _targets(recipes, output)
    named = zip(names_of(recipes), recipes, strict=True)
    found = [
        {"name": name, **_matched(source, read_recipe(source, set_), what, asked, n_tokens, targets.get(source))}
        for name, source in named
    ]
    if json:
        print_json(found)
    else:
        _print(found, what)
    if not all(row["within"] for row in found):
        raise typer.Exit(1)


def _matched(source: str, recipe: Recipe, what: What, asked: int, n_tokens: int, file: Path | None) -> dict[str, Any]:
    """What was found for one recipe, written to ``file`` where it is a match."""
    from hybridtf.core import ConfigError
    from hybridtf.cost.match import find_match

    try:
        result = find_match(recipe.model, what, asked, length=n_tokens)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    if file is None or not result.found:
        return {**_said(result, what, n_tokens), "file": None}
    _write(recipe, result, what, file)
    return {**_said(result, what, n_tokens), "file": str(file)}


def _asked(params: str | None, flops: str | None, state_bytes: str | None) -> tuple[What, int]:
    from hybridtf.core import ConfigError

    given = [text for text in (params, flops, state_bytes) if text is not None]
    if len(given) != 1:
        raise ConfigError(f"exactly one of --params, --flops and --state-bytes says what to match; {len(given)} were given")
    if params is not None:
        return "params", parse_count(params, "--params")
    if flops is not None:
        return "flops", parse_count(flops, "--flops")
    return "state_bytes", parse_size(state_bytes or "", "--state-bytes")


def parse_count(text: str, option: str) -> int:
    """``125M`` (of 1000^2), ``1.3B`` or ``1.3G`` (of 1000^3). Raises :class:`ConfigError`."""
    from hybridtf.core import ConfigError

    found = _COUNT.fullmatch(text.strip())
    count = round(float(found[1]) * 10 ** _POWERS[found[2]]) if found else 0
    if count < 1:
        raise ConfigError(f"{option} {text}: is no number; write 125000000, 125M or 1.3B")
    return count


def _targets(recipes: list[str], output: Path | None) -> dict[str, Path]:
    """The file of each recipe. Raises :class:`ConfigError` where two would be one."""
    from hybridtf.core import ConfigError

    if output is None:
        return {}
    need_folder(output)
    targets = {source: output / f"{name_of(source).replace('/', '_')}.toml" for source in recipes}
    if len(set(targets.values())) < len(recipes):
        raise ConfigError(f"--output {output}: two recipes would be written to one file; give each a name of its own")
    return targets


def _said(result: Match, what: What, length: int) -> dict[str, Any]:
    from hybridtf.cost.match import WORDS

    sides = {"below": result.below, "above": result.above}
    return {
        "what": WORDS[what], "asked": result.asked, "length": None if what == "params" else length,
        **_try(result.best, result.asked), "within": result.found,
        **{side: None if one is None else _try(one, result.asked) for side, one in sides.items()},
    }


def _try(one: Try, asked: int) -> dict[str, Any]:
    return {
        "found": one.value, "error": one.error(asked), "d_model": getattr(one.config, "d_model", None), "fine": one.fine,
    }


def _write(recipe: Recipe, result: Match, what: What, file: Path) -> None:
    """The recipe with the sizes found, and what they match in its title."""
    from hybridtf.core.files import atomic_file
    from hybridtf.cost.match import WORDS
    from hybridtf.recipe import to_toml

    title = f"{recipe.meta.title}, matched to {result.asked:,} {WORDS[what]}".removeprefix(", ")
    meta = recipe.meta.model_copy(update={"title": title})
    made = recipe.model_copy(update={"model": result.best.config, "meta": meta})
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as temporary:
        temporary.write_text(to_toml(made), encoding="utf-8")


def _print(found: list[dict[str, Any]], what: What) -> None:
    from hybridtf.cost.match import FINE_OF, WORDS

    right = ("d_model", "asked", "found", "error", FINE_OF[what])
    at = "" if what == "params" else f" at {found[0]['length']:,} tokens"
    table = make_table("recipe", *right, title=f"{WORDS[what]}{at}", right=right)
    for row in found:
        rows = [(row["name"], row)] if row["within"] else [
            (f"{row['name']}, nearest {side}", row[side]) for side in ("below", "above") if row[side] is not None
        ]
        for name, one in rows:
            counts = (f"{row['asked']:,}", f"{one['found']:,}", f"{100 * one['error']:+.2f} %")
            add_row(table, name, one["d_model"], *counts, f"x {one['fine']:.3f}")
    print_table(table)
    for row in found:
        if row["file"] is not None:
            say(f"{row['name']}: written to {row['file']}")
        if not row["within"]:
            console().print(f"{row['name']}: no legal size is within 1 %, and none was written")
