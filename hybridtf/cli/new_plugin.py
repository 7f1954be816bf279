"""``new-plugin``: a distribution that works from its first minute, rendered by copier from the template in this package."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from hybridtf.cli.output import print_text, say

TEMPLATE = Path(__file__).parents[1] / "templates" / "plugin"
"""A template as copier knows them: ``copier copy`` takes its address too."""


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("new-plugin")(new_plugin)


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the distribution and its folder, as in hybridtf-fast-scan.")],
    path: Annotated[Path, typer.Option("--path", metavar="FOLDER", help="The folder to make it in.")] = Path("."),
) -> None:
    """Write a new plugin that works at once.

    It holds a mixer, a kernel and a task that keep every law, with tests, a recipe and a CI file, all to be changed.
    Nothing that is there is overwritten, and nothing is left behind when it fails.
    """
    from hybridtf.core import ConfigError

    folder = path / name
    if not path.is_dir():
        raise ConfigError(f"--path {path}: no such folder")
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists already; nothing was written")
    _refuse_taken(name)
    render(name, path)
    say(f"wrote {folder}")
    train = "hybridtf train recipe.toml -o runs/first"
    print_text(f"cd {folder}\npip install -e '.[test]'\npytest\nhybridtf check --plugin {name}\n{train}")


def package_of(name: str) -> str:
    """The package of a distribution: its normalised name, as an identifier."""
    return re.sub(r"[-_.]+", "_", name.lower())


def _refuse_taken(name: str) -> None:
    """A package that hides another one breaks whoever imports that."""
    from hybridtf.core import ConfigError

    package = package_of(name)
    if package in sys.stdlib_module_names:
        raise ConfigError(f"{name!r}: its package would be called {package}, as a module of Python's own library")
    if not package.isidentifier() or package.startswith("_"):
        return  # refused by the template, with what a name may be
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin is not None:
        raise ConfigError(f"{name!r}: its package would be called {package}, as one that is installed ({spec.origin})")


def render(name: str, path: Path) -> None:
    """The template at ``path / name``, whole or not at all; the template itself says what a name may be."""
    from hybridtf.core import ConfigError, HybridTFError

    try:
        import copier
    except ModuleNotFoundError as error:
        if error.name != "copier":
            raise
        raise HybridTFError("new-plugin needs copier: pip install 'hybridtf[new]'") from None
    try:
        # On the same disk as the folder, so that it comes to its place in one step.
        scratch = tempfile.TemporaryDirectory(prefix=".new-plugin-", dir=path)
    except OSError as error:
        raise ConfigError(f"--path {path}: cannot be written to ({error.strerror})") from None
    with scratch as inside:
        made = Path(inside) / "made"
        try:
            copier.run_copy(str(TEMPLATE), made, data={"name": name}, defaults=True, quiet=True)
        except ValueError as error:
            # copier's words for a refused answer: Validation error for question 'name': must begin ...
            raise ConfigError(f"{name!r}: {str(error).partition(': ')[2] or error}") from None
        made.rename(path / name)
