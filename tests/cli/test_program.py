"""The program as a whole: its help, its options, its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from typer.main import get_command

import hybridtf
from hybridtf.cli import app
from hybridtf.core import active, using
from hybridtf.plugins import load_registries, make_plugin_manager
from tests.cli.helpers import environment, ok, process, refused, run

OPTIONS = {
    "": "--version",
    "bench extrapolation": (
        "RUNS... --against --batch-size --chunk --device --json --lengths --max-documents --max-rows --multiples --output "
        "--stride --timeout --trained-length -o"
    ),
    "bench kernel": (
        "OP SOURCE --batch-size --device --dtype --json --kernel --length --output --phase --repeats --set --threads "
        "--warmup -o"
    ),
    "bench memory": (
        "SOURCES... --against --batch-size --device --dtype --fits --json --length --limit --max-length --output --phase "
        "--rest --set --timeout -o"
    ),
    "bench speed": (
        "SOURCES... --against --batch-size --device --dtype --json --length --output --phase --repeats --set --threads "
        "--warmup -o"
    ),
    "check": "RECIPES... --component --json --plugin --set",
    "compare": (
        "RECIPES... --context --device --eval-tokens --json --limit --lr --max-documents --output --repeats --seeds --set "
        "--steps --task --timeout --workers -o"
    ),
    "doctor": "--json",
    "eval": "RUN --batch-size --device --json --max-tokens --output --seq-len --step --weights -o",
    "export": "RUN --family --json --output --step --to --weights -o",
    "generate": (
        "RUN --beams --compile --device --draft --json --length-penalty --max-new-tokens --min-p --n-draft --prompt "
        "--prompt-file --repetition-penalty --seed --step --stop --temperature --top-k --top-p --weights -n"
    ),
    "import": "FOLDER --dtype --json --output -o",
    "list": "KIND --json --verbose -v",
    "lm-eval": "ARGUMENTS...",
    "match": "RECIPES... --flops --json --length --output --params --set --state-bytes -o",
    "new-plugin": "NAME --path",
    "parity": "FOLDERS... --all --json",
    "plan": "RECIPE --batch-size --device --dtype --json --length --set",
    "plugins": "--json",
    "report": "SOURCES... --charts --json --latex --markdown --output --skip-corrupt --title -o",
    "schema": "--output -o",
    "search": (
        "SPACE --device --eval-tokens --json --lr --output --params --seed --seeds --steps --task --timeout --trials "
        "--workers -o"
    ),
    "show": "RECIPE --json --length --set",
    "stats": "RUN --json --step",
    "study": "NAME --json --output --seeds --smoke --workers -o",
    "surgery": "RUN --json --layers --leave --mixer --n-kv-heads --output --seed --step --weights -o",
    "train": "RECIPE --device --from --output --resume --seed --set -o",
}
"""Every command with its arguments and options: what scripts of users rely on."""


def _words(command: Any) -> str:
    arguments, options = [], []
    for param in command.params:
        if param.param_type_name == "argument":
            arguments.append(param.name.upper() + ("..." if param.nargs == -1 else ""))
        else:
            options += [*param.opts, *param.secondary_opts]
    return " ".join([*arguments, *sorted(options)])


def _commands(command: Any, path: str = "") -> dict[str, str]:
    children = getattr(command, "commands", {})
    found = {} if children and path else {path: _words(command)}
    for name, child in children.items():
        found |= _commands(child, f"{path} {name}".strip())
    return found


def test_commands_and_options_are_these() -> None:
    assert _commands(get_command(app)) == OPTIONS


@pytest.mark.parametrize("command", OPTIONS)
def test_every_command_explains_itself(command: str) -> None:
    for flag in ("--help", "-h"):
        text = ok(*command.split(), flag).stdout
        assert text.startswith(f"Usage: hybridtf{' ' if command else ''}{command}")
    for param in next(_found(get_command(app), command.split())).params:
        assert param.help, f"{command}: {param.name} has no help"


def _found(command: Any, path: list[str]) -> Any:
    if not path:
        yield command
    else:
        yield from _found(command.commands[path[0]], path[1:])


def test_no_command_is_named_without_its_own_words() -> None:
    listed = ok("--help").stdout
    assert "..." not in listed.partition("Commands:")[2]
    assert ok().stdout == listed


def test_help_loads_nothing_heavy() -> None:
    code = """
        import sys
        from hybridtf.cli import main
        sys.argv = ["hybridtf", "--help"]
        try:
            main()
        except SystemExit:
            print(sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
    """
    done = _python(code)
    loaded = set(done.stderr.strip("[]\n").replace("'", "").split(", "))
    assert "typer" in loaded
    assert not loaded & {"torch", "numpy", "pydantic", "pluggy", "rich", "altair", "safetensors", "transformers"}


def test_help_is_quick() -> None:
    # Seconds of this process's children on a processor, not on the clock: other work on the machine does not count.
    seconds = []
    for _ in range(3):
        before = os.times()
        process("--help")
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) < 0.5


def _python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), check=False, timeout=120)


def test_version() -> None:
    assert ok("--version").stdout == f"hybridtf {hybridtf.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'? See: hybridtf --help"),
        (["train", "--resum"], "No such option: --resum. Did you mean --resume? See: hybridtf train --help"),
        (["bench", "sped"], "No such command 'sped'. Did you mean 'speed'? See: hybridtf bench --help"),
        (
            ["generate", "x", "--stop", ""],
            "Invalid value for --stop: an empty text never ends anything; leave it out. See: hybridtf generate --help",
        ),
        (["train", "demo/hybrid"], "Missing option '--output' / '-o'. See: hybridtf train --help"),
        (
            ["bench", "speed", "x", "--dtype", "float8"],
            "Invalid value for '--dtype': 'float8' is not one of 'float32', 'bfloat16', 'float16'. "
            "See: hybridtf bench speed --help",
        ),
        (["train", "-o", "x"], "Invalid value for RECIPE: a new run needs a recipe. See: hybridtf train --help"),
        (
            ["check"],
            "Invalid value for RECIPE: give recipes, or --plugin NAME, or --component KIND.NAME. See: hybridtf check --help",
        ),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], message: str) -> None:
    assert refused(*arguments) == message


def test_a_value_out_of_range() -> None:
    error = refused("generate", "x", "-n", "0")
    assert error.startswith("Invalid value for '--max-new-tokens' / '-n': ")
    assert error.endswith("1. See: hybridtf generate --help")


@pytest.mark.parametrize("command", ["schema", "list mixers", "list mixers --json", "--help", "--version"])
def test_a_closed_pipe_is_quiet(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "hybridtf", *command.split()], stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
        env=environment(), timeout=120,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", ["list norms", "list norms --json", "--version", "--help"])
def test_a_full_disk_behind_stdout_is_one_line(command: str, buffered: bool) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *([] if buffered else ["-u"]), "-m", "hybridtf", *command.split()], stdout=full, check=False,
            stderr=subprocess.PIPE, text=True, env=environment(PYTHONUNBUFFERED="" if buffered else "1"), timeout=120,
        )  # fmt: skip
    message = "hybridtf: error: the output could not be written (No space left on device)\n"
    assert (done.returncode, done.stderr) == (1, message)


@pytest.mark.parametrize(
    ("closed", "code", "message"),
    [
        (">&-", 1, "hybridtf: error: stdout is closed; redirect it to /dev/null to see no results\n"),
        (">&- 2>&-", 1, ""),
        ("2>&-", 0, ""),
    ],
)
def test_closed_streams(closed: str, code: int, message: str) -> None:
    command = ["sh", "-c", f"exec {sys.executable} -m hybridtf list norms {closed}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False, timeout=120)
    assert (done.returncode, done.stderr, "rms_norm" in done.stdout) == (code, message, code == 0)


def test_a_bug_keeps_its_traceback_and_says_so() -> None:
    done = _python("""
        import sys
        import hybridtf.cli.doctor
        from hybridtf.cli import main
        hybridtf.cli.doctor._versions = lambda: 1 / 0
        sys.argv = ["hybridtf", "doctor"]
        main()
    """)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "ZeroDivisionError" in done.stderr
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("hybridtf: this is a bug")


def test_a_plugin_that_failed_is_named_once_and_the_rest_works() -> None:
    registries = load_registries(make_plugin_manager(autoload=False))
    registries.failures["broken"] = "ImportError: no module named 'nothing'"
    with using(registries):
        result = ok("list", "mixers", "--json")
        assert result.stderr == "hybridtf: warning: plugin 'broken' was not loaded: ImportError: no module named 'nothing'\n"
        assert "mamba2" in json.loads(result.stdout)["mixers"]
        plugins = run("plugins", "--json")
        assert (plugins.exit_code, json.loads(plugins.stdout)["failures"]) == (1, registries.failures)
        assert run("plugins").exit_code == 1
        assert "ImportError" in ok("doctor").stdout
        assert "ImportError" in ok("list", "failures").stdout
        said = run("check", "--plugin", "broken").stderr.splitlines()
        assert said == [
            "hybridtf: warning: plugin 'broken' was not loaded: ImportError: no module named 'nothing'",
            "hybridtf: error: plugin 'broken' was not loaded, as the warning above says",
        ]


def test_out_of_memory_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB.\nmore")

    monkeypatch.setattr("hybridtf.cli.doctor._versions", allocate)
    result = run("doctor")
    assert result.exit_code == 1
    assert result.stderr == (
        "hybridtf: error: out of memory; a smaller batch or length may fit (CUDA out of memory. Tried to allocate 2 TiB.)\n"
    )


def test_ctrl_c_outside_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    active()
    monkeypatch.setattr("hybridtf.cli.doctor._versions", interrupt)
    result = run("doctor")
    assert (result.exit_code, result.stderr) == (130, "hybridtf: interrupted; nothing was saved\n")
