"""``show``: a recipe's stack as a picture in the terminal, its parameters and the size of its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridtf.cli.options import Json, Set
from hybridtf.cli.output import add_row, console, counted, make_table, print_json, print_table
from hybridtf.cli.sources import build_on_meta, name_of, read_recipe, registries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from hybridtf.recipe import Recipe

LENGTHS = (1024, 16384, 65536)
"""Tokens at which the state's size is shown."""

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("show")(show)


def show(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file or name.")],
    set_: Set = None,
    length: Annotated[
        list[int] | None,
        typer.Option("--length", min=1, help="Tokens at which to show the state's size. May be repeated."),
    ] = None,
    json: Json = False,
) -> None:
    """Show a recipe: its stack, parameters and state.

    The model is built on the meta device: nothing is allocated.
    """
    registries()
    about = describe(read_recipe(recipe, set_), recipe, tuple(length or LENGTHS))
    if json:
        print_json(about)
        return
    out = console()
    title = f"{about['name']}: {about['title']}" if about["title"] else about["name"]
    out.print(f"{title}  ({about['type']}, {counted(about['params']['total'], 'parameter')})", style="bold")
    for text in (about["description"], about["source"]):
        if text:
            out.print(text)
    out.print()
    for stack in about["stacks"]:
        print_table(_picture(stack))
        print_table(_blocks(stack))
    print_table(_parameters(about["params"]))
    if about["state_bytes"] is not None:
        print_table(_states(about["state_bytes"]))


def describe(recipe: Recipe, source: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """All that is shown, as plain data; the model is built on the meta device."""
    from hybridtf.bench.describe import stacks_of
    from hybridtf.cost import parameter_counts, state_size

    model = build_on_meta(recipe, source)
    states = {str(n): state_size(model, n) for n in lengths} if hasattr(model, "init_state") else None
    return {
        "name": name_of(source),
        "title": recipe.meta.title,
        "description": recipe.meta.description,
        "source": recipe.meta.source,
        "type": recipe.model.type_name(),
        "params": parameter_counts(model),
        "stacks": stacks_of(model),
        "state_bytes": states,
        "recipe": recipe.to_dict(),
    }


# -- for people --------------------------------------------------------------------------------------------------------


def _picture(stack: dict[str, Any]) -> Table:
    """One bar a layer from the input up, from 0; what repeats in a deep stack is drawn once with a count."""
    from rich.text import Text

    from hybridtf.report.layer_groups import arrange

    layers, blocks = stack["layers"], stack["blocks"]
    colours = _colours(blocks)
    title = f"{stack['name']}: {counted(len(layers), 'layer')}, d_model {stack['d_model']}, pattern {stack['pattern']}"
    table = make_table("layer", "block", "", "mixer", "channel mixer", "repeated", title=title, right=("layer",))
    for index, name, bracket in _drawn(arrange(layers)):
        block = blocks[name]
        bar = Text("█" * 6, style=colours[_word(block["mixer"])])
        shared = " (shared)" if block["shared"] else ""
        add_row(table, index, f"{name}{shared}", bar, _word(block["mixer"]), _word(block["channel_mixer"]), bracket)
    return table


def _drawn(nodes: Any, bracket: str = "") -> Iterator[tuple[int, str, str]]:
    """Layers in order: index, block, and the brackets that they stand in."""
    from hybridtf.report.layer_groups import Layer

    for node in nodes:
        if isinstance(node, Layer):
            yield node.index, node.block, bracket
            continue
        inside = list(_drawn(node.parts))
        for i, (index, name, inner) in enumerate(inside):
            edge = "x" if len(inside) == 1 else "┐" if i == 0 else "┘" if i == len(inside) - 1 else "│"
            count = f"{edge}{node.count}" if edge == "x" else f"{edge} x{node.count}" if i == 0 else edge
            yield index, name, "  ".join(part for part in (inner, count, bracket) if part)


def _colours(blocks: dict[str, Any]) -> dict[str, str]:
    kinds = dict.fromkeys(_word(block["mixer"]) for block in blocks.values())
    return {kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(kinds)}


def _word(part: dict[str, str] | None) -> str:
    return "-" if part is None else part["type"]


def _blocks(stack: dict[str, Any]) -> Table:
    table = make_table("block", "layers", "type", "mixer", "channel mixer", right=("layers",))
    for name, block in stack["blocks"].items():
        parts = [" ".join(part.values()).strip() if part else "-" for part in (block["mixer"], block["channel_mixer"])]
        kind = f"{block['type']} {block['summary']}".strip()
        add_row(table, name, stack["layers"].count(name), kind, *parts)
    return table


def _parameters(params: dict[str, Any]) -> Table:
    from hybridtf.report.numbers import thousands

    table = make_table("role", "parameters", "share", title="parameters", right=("parameters", "share"))
    for role, count in sorted(params["by_role"].items(), key=lambda item: -item[1]):
        add_row(table, role, thousands(count), f"{100 * count / params['total']:.1f} %")
    add_row(table, "total", thousands(params["total"]), "")
    if params["active"] != params["total"]:
        add_row(table, "active for a token", thousands(params["active"]), f"{100 * params['active'] / params['total']:.1f} %")
    return table


def _states(sizes: dict[str, dict[str, int]]) -> Table:
    from hybridtf.report.numbers import thousands

    heads = ("tokens", "bytes", "kv", "ring", "recurrent", "conv", "a token adds")
    keys = ("allocated", "kv", "ring", "recurrent", "conv", "per_token")
    table = make_table(*heads, title="state of one row, in float32", right=heads)
    for length, size in sizes.items():
        add_row(table, thousands(int(length)), *(thousands(size[key]) for key in keys))
    return table
