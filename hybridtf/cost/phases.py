"""The three phases that are planned and measured, as steps which can be run again and again.

``train``    loss, backward and a step of the subject's optimizer (AdamW if it names none) on random ids, each row one
             document without padding
``prefill``  a whole prompt read under no_grad into a fresh state, scores of each row's last token alone if it can
``decode``   ``DECODE_TOKENS`` single tokens a row, one call each, after a prompt of ``length`` tokens

Axes: b batch, t time.
"""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from hybridtf.core import ConfigError, Fixed, Growing, OwnClock, Ring, State, StateLeaf, known_names
from hybridtf.cost.calls import call, copy_state, device_of, has_state, mean_loss, need_state
from hybridtf.cost.foreign import has_known_state

Phase: TypeAlias = Literal["train", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("train", "prefill", "decode")

DECODE_TOKENS = 16
"""Tokens a row that one decode step draws."""

PREFILL_CHUNK = 2048
"""Columns a call when a prompt is read only to decode after it."""


class Planned(Protocol):
    """A model that can be built: all that a count needs to know of it. ``hybridtf.bench.Subject`` is one."""

    @property
    def build(self) -> Callable[[], nn.Module]:
        """A fresh model at each call."""

    @property
    def vocab_size(self) -> int:
        """Token ids are drawn below it."""

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype computed in, by autocast; None: that of the parameters."""

    @property
    def optimizer(self) -> Callable[[nn.Module], torch.optim.Optimizer] | None:
        """The optimizer of training steps; None: AdamW."""


class Step(ABC):
    """Work that is measured: ``prepare()`` is not, ``run()`` is. ``tokens``: how many one run takes."""

    tokens: int

    def __init__(self, model: nn.Module, batch_size: int, length: int, dtype: torch.dtype | None) -> None:
        self.model, self.batch_size, self.length, self.dtype = model, batch_size, length, dtype

    def prepare(self) -> None:  # noqa: B027 - most steps need none
        """What a run needs and does not count."""

    @abstractmethod
    def run(self) -> None: ...

    def cast(self) -> contextlib.AbstractContextManager[object]:
        """Autocast to the step's dtype, or nothing."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device_of(self.model).type, dtype=self.dtype)

    def random_ids(self, vocab_size: int, length: int) -> Tensor:
        """(b t) token ids, the same at each call."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocab_size, (self.batch_size, length), generator=generator)
        return ids.to(device_of(self.model))


class TrainStep(Step):
    """See the module. ``after_forward`` is called while the graph stands, for harnesses that count."""

    def __init__(
        self, model: nn.Module, vocab_size: int, batch_size: int, length: int, dtype: torch.dtype | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__(model, batch_size, length, dtype)
        self.tokens = batch_size * length
        ids = self.random_ids(vocab_size, length + 1)
        self.inputs, self.targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.after_forward: Callable[[], None] | None = None
        self.after_backward: Callable[[], None] | None = None

    def run(self) -> None:
        self.model.train()
        with self.cast():
            loss = mean_loss(self.model, self.inputs, self.targets)
        if self.after_forward is not None:
            self.after_forward()
        loss.backward()
        if self.after_backward is not None:
            self.after_backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def optimizer_tensors(self) -> list[Tensor]:
        """What the optimizer keeps between steps."""
        kept = pytree.tree_leaves(list(self.optimizer.state.values()))
        return [leaf for leaf in kept if isinstance(leaf, Tensor)]


class PrefillStep(Step):
    """See the module. A model without state reads its prompt without one."""

    def __init__(
        self, model: nn.Module, vocab_size: int, batch_size: int, length: int, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(model, batch_size, length, dtype)
        self.tokens = batch_size * length
        self.ids = self.random_ids(vocab_size, length)
        self.state: State | None = None

    def prepare(self) -> None:
        self.state = None

    @torch.no_grad()
    def run(self) -> None:
        self.model.eval()
        state = _new_state(self.model, self.batch_size, self.length) if has_state(self.model) else None
        with self.cast():
            self.state = last_scores(self.model, self.ids, state)[1]


class DecodeStep(Step):
    """See the module."""

    def __init__(
        self, model: nn.Module, vocab_size: int, batch_size: int, length: int, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(model, batch_size, length, dtype)
        need_state(model, "decode")
        self.tokens = batch_size * DECODE_TOKENS
        self.ids = self.random_ids(vocab_size, DECODE_TOKENS)
        self.state: State | None = None
        self._prompt = self.random_ids(vocab_size, length)
        self._start: State | None = None

    @torch.no_grad()
    def prepare(self) -> None:
        self.model.eval()
        if self._start is None:
            state = _new_state(self.model, self.batch_size, self.length + DECODE_TOKENS)
            self._start = self._read(self._prompt, state)
        self.state = copy_state(self._start)

    def _read(self, prompt: Tensor, state: State) -> State:
        for start in range(0, self.length, PREFILL_CHUNK):
            with self.cast():
                _, state = last_scores(self.model, prompt[:, start : start + PREFILL_CHUNK], state)
        return state

    @torch.no_grad()
    def run(self) -> None:
        for column in range(DECODE_TOKENS):
            with self.cast():
                # The scores are let go at once: no step holds those of the one before it.
                self.state = last_scores(self.model, self.ids[:, column : column + 1], self.state)[1]

    def forget_start(self) -> None:
        """Drop the copy that further runs would begin from, so that the state is counted once."""
        self._start = None


class LastDecodeStep(Step):
    """The last token of a :class:`DecodeStep`, where it needs most, on a state that only claims to hold what it read:
    all that a count of shapes needs."""

    def __init__(
        self, model: nn.Module, vocab_size: int, batch_size: int, length: int, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(model, batch_size, length, dtype)
        need_state(model, "decode")
        if not has_known_state(model):
            raise ConfigError("decode cannot be predicted: what a foreign cache holds is known by reading alone; measure it")
        self.tokens = batch_size
        # The token is a column of ids that stay alive, as it is when all are decoded; so does the prompt.
        self.ids = self.random_ids(vocab_size, DECODE_TOKENS)
        self._prompt = self.random_ids(vocab_size, length)
        self.state: State | None = None

    @torch.no_grad()
    def prepare(self) -> None:
        self.model.eval()
        total = self.length + DECODE_TOKENS
        self.state = aged_state(_new_state(self.model, self.batch_size, total), total - 1)

    @torch.no_grad()
    def run(self) -> None:
        with self.cast():
            self.state = last_scores(self.model, self.ids[:, -1:], self.state)[1]


def make_step(phase: str, subject: Planned, model: nn.Module, batch_size: int, length: int) -> Step:
    """The step of ``phase`` for a model of ``subject``. Raises :class:`ConfigError` for an unknown phase, or no
    work."""
    if phase not in PHASES:
        raise ConfigError(f"no phase {phase!r}. {known_names(phase, PHASES)}")
    if batch_size < 1 or length < 1:
        raise ConfigError(f"{phase}: batch_size and length must be at least 1, got {batch_size} and {length}")
    sizes = (subject.vocab_size, batch_size, length, subject.autocast)
    if phase == "train":
        return TrainStep(model, *sizes, subject.optimizer(model) if subject.optimizer is not None else None)
    return PrefillStep(model, *sizes) if phase == "prefill" else DecodeStep(model, *sizes)


def last_scores(model: nn.Module, ids: Tensor, state: State | None) -> tuple[Tensor, State | None]:
    """Scores of each row's last token, without those of the others where the model has the option ``logits``."""
    if "logits" in inspect.signature(model.forward).parameters:
        out: Any = model(ids, state=state, logits="last")
        return out.logits, out.state
    scores, after = call(model, ids, state=state)
    return scores[:, -1], after


def _new_state(model: nn.Module, batch_size: int, max_len: int) -> State:
    state: State = model.init_state(batch_size, max_len=max_len)  # type: ignore[operator]
    return state


def aged_state(state: State, length: int) -> State:
    """``state``, which is new, claiming that every row holds ``length`` tokens."""
    return pytree.tree_map(lambda leaf: _aged(leaf, length), state, is_leaf=lambda x: isinstance(x, StateLeaf | OwnClock))


def _aged(leaf: Any, length: int) -> Any:
    if isinstance(leaf, OwnClock):
        return OwnClock(aged_state(leaf.state, length + leaf.more), leaf.more)
    if not isinstance(leaf, StateLeaf):
        return leaf
    # Real even where the leaf has no memory: what a count is asked for.
    now = torch.full(leaf.length.shape, length, device="cpu" if leaf.length.is_meta else leaf.length.device)
    if isinstance(leaf, Growing):
        if leaf.sparse:
            count = torch.full_like(now, leaf.capacity)
            return Growing(leaf.data, now, static=leaf.static, count=count, max_len=leaf.max_len)
        return Growing(leaf.data, now, static=leaf.static, max_len=leaf.max_len).knowing(length)
    if isinstance(leaf, Ring):
        oldest = (now - leaf.capacity).clamp(min=0)
        return Ring(leaf.data, now, window=leaf.window, oldest=oldest, max_len=leaf.max_len).knowing(length)
    if isinstance(leaf, Fixed):
        return type(leaf)(leaf.data, now, max_len=leaf.max_len).knowing(length)
    raise ConfigError(f"a state leaf of the class {type(leaf).__name__} is none that hybridtf knows")
