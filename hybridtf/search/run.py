"""The search: Optuna proposes stacks, each is tried once, and the best one is written down.

The journal of Optuna in the folder is all that the search knows of the past: a search that was killed goes on with the trial
that it was at, whose trainings resume. Proposals of a trial follow from its number and the trials before it, so that a kill
changes nothing. A stack that was tried already, or that the space has not, is proposed again; where Optuna insists, a stack is
drawn from what is left.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from hybridtf.core import ConfigError, HybridTFError
from hybridtf.recipe import Recipe
from hybridtf.search.score import scores
from hybridtf.search.space import Space, Stack, Value
from hybridtf.search.trials import Evaluate, at_params

if TYPE_CHECKING:
    import optuna

JOURNAL, LOCK = "search.journal", ".search.lock"
STUDY = "hybridtf search"
PROPOSALS = 20
"""So many times Optuna is asked for a stack that was not tried before."""
STACK, RESULT, ASKED = "stack", "result", "asked"


@dataclass(frozen=True)
class Trial:
    """A stack that was tried. ``score`` None: ``failed`` says why, by task ("" for what concerns all)."""

    number: int
    stack: Stack
    score: float | None
    by_task: Mapping[str, float]
    failed: Mapping[str, str]


@dataclass(frozen=True)
class Search:
    """What is searched, and how a stack is tried. ``asked``: all else that scores depend on (tasks, seeds, steps), as plain
    data: a folder belongs to one of them. ``seed``: of the proposals."""

    space: Space
    n_params: int
    vocab_size: int
    evaluate: Evaluate
    asked: Mapping[str, Any]
    seed: int = 0
    say: Callable[[str], None] = lambda line: None

    def recipe(self, stack: Stack) -> Recipe:
        """The stack at equal parameters. Raises :class:`ConfigError` where it cannot be built, or has no such width."""
        source = f"{self.space.source}, {stack.name}"
        return at_params(self.space.recipe(stack), self.n_params, self.vocab_size, source)

    def run(self, folder: Path, n_trials: int) -> list[Trial]:
        """Go on until ``n_trials`` stacks, or all, are tried; all trials of the folder, the best first.

        Raises :class:`HybridTFError` without Optuna, and :class:`ConfigError` where the folder holds another search, or another
        process searches there.
        """
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder / LOCK, blocking=False):
                return self._run(_Journal(folder, self), n_trials)
        except Timeout:
            raise ConfigError(f"{folder}: another search is at work there; wait for it, or choose another folder") from None

    def _run(self, journal: _Journal, n_trials: int) -> list[Trial]:
        for number, stack in journal.begun():
            self.say(f"trial {number} was cut off; it goes on")
            journal.tell(self._tried(number, stack))
        while len(journal.tried()) < min(n_trials, len(self.space.stacks)):
            number, stack = journal.propose()
            journal.tell(self._tried(number, stack))
        if n_trials > len(self.space.stacks):
            self.say(f"all {len(self.space.stacks)} stacks of the space are tried")
        return sorted(journal.trials(), key=lambda t: (-1.0 if t.score is None else t.score, -t.number), reverse=True)

    def _tried(self, number: int, stack: Stack) -> Trial:
        self.say(f"trial {number}: {stack.name}")
        try:
            recipe = self.recipe(stack)
        except ConfigError as error:  # one that cannot be built is a result of the search, not its end
            return Trial(number, stack, None, {}, {"": str(error)})
        found = scores(self.evaluate(stack.name, recipe))
        return Trial(number, stack, found.mean, found.by_task, found.failed)


class _Journal:
    """The trials of a folder, kept by Optuna."""

    def __init__(self, folder: Path, search: Search) -> None:
        self.search, self.optuna = search, _optuna()
        backend = self.optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL))
        self.study: optuna.Study = self.optuna.create_study(
            study_name=STUDY, storage=self.optuna.storages.JournalStorage(backend), direction="maximize", load_if_exists=True,
        )
        self._belongs(folder)

    def _belongs(self, folder: Path) -> None:
        """Scores of other tasks, sizes or spaces cannot stand beside these."""
        search = self.search
        space = json.dumps([search.space.table, search.space.search.to_dict()], sort_keys=True, default=str)
        asked = {**search.asked, "params": search.n_params, "seed": search.seed,
                 "space": hashlib.sha256(space.encode()).hexdigest()[:12]}
        known = self.study.user_attrs.get(ASKED)
        if known is None:
            self.study.set_user_attr(ASKED, asked)
        elif known != asked:
            other = ", ".join(f"{name} ({known.get(name)}, not {asked.get(name)})" for name in asked
                              if known.get(name) != asked.get(name))
            raise ConfigError(f"{folder}: holds a search of another {other}; choose another folder")

    def trials(self) -> list[Trial]:
        """All that came to an end, by number."""
        kept = self.study.user_attrs
        ended = [t for t in self.study.get_trials(deepcopy=False) if t.state.is_finished() and f"{RESULT} {t.number}" in kept]
        return [
            Trial(t.number, _stack(t.user_attrs[STACK]), t.value, **kept[f"{RESULT} {t.number}"]) for t in ended
        ]

    def tried(self) -> set[Stack]:
        """The stacks of those."""
        return {trial.stack for trial in self.trials()}

    def begun(self) -> list[tuple[int, Stack]]:
        """Trials that a kill cut off: those whose stack was known go on, a proposal that was not made to its end is dropped."""
        found = []
        for trial in self.study.get_trials(states=(self.optuna.trial.TrialState.RUNNING,)):
            if STACK in trial.user_attrs:
                found.append((trial.number, _stack(trial.user_attrs[STACK])))
            else:
                self.study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)
        return found

    def propose(self) -> tuple[int, Stack]:
        """A stack that was not tried, and the number of its trial."""
        tried = self.tried()
        for _ in range(PROPOSALS):
            trial = self._ask()
            stack = self._suggested(trial)
            if stack not in tried and stack in self.search.space.stacks:
                trial.set_user_attr(STACK, _plain(stack))
                return trial.number, stack
            self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
        left = [stack for stack in self.search.space.stacks if stack not in tried]
        stack = random.Random(f"{self.search.seed} {len(self.study.trials)}").choice(left)
        offered = self.search.space.choices_of(stack.blocks)
        places = {path: list(map(repr, offered[path])).index(repr(value)) for path, value in stack.choices}
        self.study.enqueue_trial({**{f"slot {i}": name for i, name in enumerate(stack.blocks)}, **places})
        trial = self._ask()
        assert self._suggested(trial) == stack
        trial.set_user_attr(STACK, _plain(stack))
        return trial.number, stack

    def _ask(self) -> optuna.Trial:
        # Seeded by the number of the trial: a search that was killed proposes what it would have proposed.
        seed = self.search.seed * 1_000_003 + len(self.study.get_trials(deepcopy=False))
        self.study.sampler = self.optuna.samplers.TPESampler(seed=seed % 2**32)
        return self.study.ask()

    def _suggested(self, trial: optuna.Trial) -> Stack:
        slots = self.search.space.search.slots
        blocks = tuple(str(trial.suggest_categorical(f"slot {i}", slot)) for i, slot in enumerate(slots))
        offered = self.search.space.choices_of(blocks)
        return Stack(blocks, tuple((path, self._chosen(trial, path, values)) for path, values in offered.items()))

    @staticmethod
    def _chosen(trial: optuna.Trial, path: str, values: Sequence[Value]) -> Value:
        # By its place: True, 1 and 1.0 are one value to Optuna.
        return values[int(trial.suggest_categorical(path, range(len(values))))]

    def tell(self, trial: Trial) -> None:
        """The end of a trial. What it reached is written before its state: a trial without it is done again."""
        kept: Any = {"by_task": dict(trial.by_task), "failed": dict(trial.failed)}
        self.study.set_user_attr(f"{RESULT} {trial.number}", kept)
        if trial.score is None:
            self.study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)
        else:
            self.study.tell(trial.number, trial.score)


def _plain(stack: Stack) -> list[Any]:
    return [list(stack.blocks), [list(choice) for choice in stack.choices]]


def _stack(plain: Sequence[Any]) -> Stack:
    blocks, choices = plain
    return Stack(tuple(blocks), tuple((path, value) for path, value in choices))


def _optuna() -> Any:
    try:
        import optuna
        import optuna.storages.journal
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise HybridTFError("search needs optuna: pip install 'hybridtf[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
