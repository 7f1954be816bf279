"""Running the laws: one by one as results, or all at once as one assertion."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from hybridtf.core import LAWS, ComponentConfig, HybridTFError, KernelError, UnknownNameError, known_names
from hybridtf.core.origins import cause, package_of
from hybridtf.testing import laws_build, laws_crop, laws_numeric, laws_outside, laws_segments, laws_state, laws_task, laws_time
from hybridtf.testing.errors import ContractError, DeclaredError, NotApplicableError
from hybridtf.testing.laws_config import check_config
from hybridtf.testing.smallest import smallest_case
from hybridtf.testing.subject import TIMELESS, Subject

Check = Callable[[Subject], None]


def _check_config(subject: Subject) -> None:
    check_config(type(subject.config), subject.config)


LAW_CHECKS: Mapping[str, Check] = {
    "config": _check_config,
    "shape": laws_time.check_shape,
    "empty": laws_time.check_empty,
    "per_token": laws_time.check_per_token,
    "cut": laws_time.check_cut,
    "segment": laws_segments.check_segment,
    "causal": laws_time.check_causal,
    "gradients": laws_build.check_gradients,
    "finite": laws_numeric.check_finite,
    "kernels": laws_numeric.check_kernels,
    "init": laws_build.check_init,
    "meta": laws_build.check_meta,
    "eval": laws_time.check_eval,
    "state_bytes": laws_state.check_state_bytes,
    "structure": laws_state.check_structure,
    "reorder": laws_state.check_reorder,
    "snapshot": laws_state.check_snapshot,
    "crop": laws_crop.check_crop,
    "dead_state": laws_state.check_dead_state,
    "save_load": laws_build.check_save_load,
    "copies": laws_build.check_copies,
    "lora": laws_outside.check_lora,
    "bf16": laws_numeric.check_bf16,
    "mesh": laws_numeric.check_mesh,
    "compile": laws_outside.check_compile,
    "rows": laws_task.check_rows,
    "resume": laws_task.check_resume,
    "held_out": laws_task.check_held_out,
    "ranks": laws_task.check_ranks,
    "measures": laws_task.check_measures,
}
"""Every law by name, cheap ones first; those of tasks last."""

_OF_TASKS = ("config", "rows", "resume", "held_out", "ranks", "measures")

_OVER_TIME = (
    "cut", "segment", "causal", "state_bytes", "structure", "reorder", "snapshot", "crop", "dead_state", "kernels",
    "mesh",
)

PLUGIN_FAULTS = (
    ArithmeticError, AssertionError, AttributeError, HybridTFError, LookupError, NotImplementedError, RuntimeError,
    TypeError, ValueError,
)
"""What a faulty component raises: reported as its failure, never as ours."""


def laws_for(kind: str) -> tuple[str, ...]:
    """The laws that a kind of component is held to."""
    if kind in TIMELESS:
        return tuple(law for law in LAW_CHECKS if law not in _OVER_TIME and law not in _OF_TASKS[1:])
    if kind == "tasks":
        return _OF_TASKS
    return tuple(law for law in LAW_CHECKS if law != "per_token" and law not in _OF_TASKS[1:])


@dataclass(frozen=True)
class CheckResult:
    """One law on one component. ``skipped``: the law says nothing about it, and ``message`` says why; ``cannot``: because the
    component declares that it breaks the law, and it does. ``smallest``: of a broken law, the smallest case found, in words."""

    component: str
    law: str
    ok: bool
    message: str
    seconds: float
    skipped: bool = False
    cannot: bool = False
    smallest: str = ""


def _cannot(subject: Subject, said: str = "cannot") -> Mapping[str, str]:
    """Laws that the component, or a part of a composed one, declares that it (or its losses) breaks."""
    try:
        module = subject.build_plain()
    except (*PLUGIN_FAULTS, NotApplicableError):
        return {}  # the laws themselves report a build that fails
    return {law: reason for law, reason in _declared(module, said) if law in LAWS}


def _not_built(subject: Subject) -> str | None:
    """Why the component cannot be built; None if it can, or if that is for the laws to say."""
    if subject.kind == "tasks":
        return None
    try:
        subject.build_plain()
    except NotApplicableError:
        return None
    except KernelError:
        return None
    except HybridTFError as error:
        return str(error)
    except PLUGIN_FAULTS as error:
        return cause(error, package_of(type(subject.config)))
    return None


def _declarations(subject: Subject, name: str) -> list[CheckResult]:
    """A result for each declaration of a law that does not exist."""
    try:
        module = subject.build_plain()
    except (*PLUGIN_FAULTS, NotApplicableError):
        return []
    said = [*_declared(module, "cannot"), *_declared(module, "losses_cannot")]
    unknown = [law for law, _ in said if law not in LAWS]
    messages = [f"declares that it cannot {law!r}, which is no law. {known_names(law, LAWS)}" for law in unknown]
    return [CheckResult(name, "cannot", False, message, 0.0) for message in messages]


def _declared(module: nn.Module, said: str) -> Iterator[tuple[str, str]]:
    for part in module.modules():
        yield from getattr(part, said, {}).items()


def run_law(subject: Subject, law: str, cannot: Mapping[str, str] | None = None) -> None:
    """One law; raises :class:`ContractError` when it is broken, or when a declared ``cannot`` is not true.

    Raises :class:`NotApplicableError` where the law says nothing about the component, and ``UnknownNameError`` for a
    law that does not exist.
    """
    if law not in LAW_CHECKS:
        raise UnknownNameError(f"no law named {law!r}. {known_names(law, LAW_CHECKS)}")
    check = LAW_CHECKS[law]
    reason = (_cannot(subject) if cannot is None else cannot).get(law)
    of_losses = _cannot(subject, "losses_cannot").get(law) if reason is None and law in LAWS and subject.with_losses else None
    try:
        check(subject if of_losses is None else replace(subject, with_losses=False))
    except KernelError as error:
        if getattr(subject.config, "kernel", "auto") != "auto":
            raise NotApplicableError(f"its kernel cannot run here: {error}") from error
        raise
    except PLUGIN_FAULTS as error:
        if reason is None:
            raise
        raise DeclaredError(f"declared: cannot {law} ({reason})") from error
    if reason is not None:
        raise ContractError(f"declares that it cannot {law} ({reason}), but it can: take the declaration out")
    if of_losses is not None and _kept(check, subject):
        raise ContractError(f"declares that its losses cannot {law} ({of_losses}), but they can: take the declaration out")


def _kept(check: Callable[[Subject], None], subject: Subject) -> bool:
    try:
        check(subject)
    except PLUGIN_FAULTS:
        return False
    return True


def run_checks(
    kind: str, config: ComponentConfig, laws: Iterable[str] | None = None, *, d_model: int = 16, seed: int = 0,
    shrink: bool = False,
) -> list[CheckResult]:
    """Every law of the kind (or those named) on one component; a broken one is a result, not an exception.

    ``shrink``: look for the smallest case that breaks it, where hypothesis is installed.
    """
    subject = Subject(kind, config, d_model, seed)
    cannot = _cannot(subject)
    unbuilt = _not_built(subject)
    name = f"{kind}/{subject.name}"
    results = _declarations(subject, name)
    for law in laws_for(kind) if laws is None else laws:
        if unbuilt is not None and law != "config":
            reached = any(not r.ok for r in results)
            message = "not reached: it cannot be built" if reached else unbuilt
            results.append(CheckResult(name, law, reached, message, 0.0, reached))
            continue
        result = _checked(subject, law, cannot)
        if shrink and not result.ok:
            result = replace(result, smallest=smallest_case(subject, law, PLUGIN_FAULTS))
        results.append(result)
    return results


def _checked(subject: Subject, law: str, cannot: Mapping[str, str]) -> CheckResult:
    started = time.perf_counter()
    ok, reason, message = True, None, ""
    try:
        run_law(subject, law, cannot)
    except NotApplicableError as error:
        reason, message = error, str(error)
    except (ContractError, HybridTFError) as error:
        ok, message = False, str(error)
    except PLUGIN_FAULTS as error:
        ok, message = False, cause(error, package_of(type(subject.config)))
    seconds = time.perf_counter() - started
    name = f"{subject.kind}/{subject.name}"
    return CheckResult(name, law, ok, message, seconds, reason is not None, isinstance(reason, DeclaredError))


def _check(kind: str, config: ComponentConfig, laws: Iterable[str] | None, d_model: int, seed: int) -> None:
    failed = [r for r in run_checks(kind, config, laws, d_model=d_model, seed=seed) if not r.ok]
    if failed:
        lines = [f"  {r.law}: {r.message}" for r in failed]
        raise ContractError(f"{failed[0].component} breaks {len(failed)} laws of its contract\n" + "\n".join(lines))


def check_mixer(
    config: ComponentConfig, *, laws: Iterable[str] | None = None, d_model: int = 16, seed: int = 0
) -> None:
    """All laws (or ``laws``) on a sequence mixer; raises :class:`ContractError` that lists every broken one."""
    _check("mixers", config, laws, d_model, seed)


def check_channel_mixer(
    config: ComponentConfig, *, laws: Iterable[str] | None = None, d_model: int = 16, seed: int = 0
) -> None:
    """The same for a channel mixer."""
    _check("channel_mixers", config, laws, d_model, seed)


def check_block(
    config: ComponentConfig, *, laws: Iterable[str] | None = None, d_model: int = 16, seed: int = 0
) -> None:
    """The same for a block."""
    _check("blocks", config, laws, d_model, seed)


def check_norm(config: ComponentConfig, *, laws: Iterable[str] | None = None, d_model: int = 16, seed: int = 0) -> None:
    """The same for a norm, which has fewer laws: each token alone."""
    _check("norms", config, laws, d_model, seed)


def check_position(
    config: ComponentConfig, *, laws: Iterable[str] | None = None, d_model: int = 16, seed: int = 0
) -> None:
    """The same for positions; ``d_model`` is the head's width at site ``qk``."""
    _check("positions", config, laws, d_model, seed)


def check_stem(config: ComponentConfig, *, laws: Iterable[str] | None = None, d_model: int = 16, seed: int = 0) -> None:
    """The same for a stem."""
    _check("stems", config, laws, d_model, seed)


def check_head(config: ComponentConfig, *, laws: Iterable[str] | None = None, d_model: int = 16, seed: int = 0) -> None:
    """The same for a head."""
    _check("heads", config, laws, d_model, seed)


def check_model(config: ComponentConfig, *, laws: Iterable[str] | None = None, seed: int = 0) -> None:
    """The same for a whole model over token ids."""
    _check("models", config, laws, 16, seed)


def check_task(config: ComponentConfig, *, laws: Iterable[str] | None = None) -> None:
    """The same for a task: its batches, streams, held-out side and measures."""
    _check("tasks", config, laws, 16, 0)


__all__ = [
    "LAW_CHECKS", "CheckResult", "check_block", "check_channel_mixer", "check_head", "check_mixer", "check_model",
    "check_norm", "check_position", "check_stem", "check_task", "laws_for", "run_checks", "run_law",
]
