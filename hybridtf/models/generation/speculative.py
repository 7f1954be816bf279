"""Speculative decoding: a smaller model drafts tokens, the model reads them in one call and keeps what it agrees with.

Rejection sampling makes the result exact (Leviathan et al. 2022, arXiv 2211.17192): a drafted token x, drawn from q, is kept
with probability min(1, p(x) / q(x)), where p is the model's own distribution; at the first one not kept a token is drawn from
max(p - q, 0), and behind a draft that is kept whole from p. With a greedy choice p and q are certain, and this is: keep the
draft as far as the model would have said the same.

Per round and row, with ``last`` the newest token, which no state has seen yet:

    the draft reads what it has not seen (the tokens kept in the last round), is remembered there, and goes on alone
    the model reads last, d_1 .. d_k in one call with ``keep``, and is cropped by what was not kept

Rows keep different numbers of tokens; each is cropped by its own. The draft never needs a crop.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtf.core import ConfigError, Segments, State, crop, reorder, snapshot
from hybridtf.models.generation.config import GenerationConfig
from hybridtf.models.generation.model import evaluating, require
from hybridtf.models.generation.prompts import check_prompts, prefill
from hybridtf.models.generation.sampling import Seen, choose, distribution, finite, invert, uniform
from hybridtf.models.generation.stream import GeneratedToken
from hybridtf.models.language_model import LanguageModel


@dataclass(frozen=True)
class Speculated:
    """New tokens of every prompt, and, a row: calls of the model after its prompt, tokens drafted, and drafts kept."""

    tokens: list[list[int]]
    rounds: list[int]
    drafted: list[int]
    accepted: list[int]

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that were kept; 0 where none was drafted."""
        return sum(self.accepted) / max(sum(self.drafted), 1)


def speculate(
    model: LanguageModel, draft: LanguageModel, prompts: Sequence[Sequence[int]], config: GenerationConfig | None = None, *,
    n_draft: int = 4,
) -> Speculated:
    """The new tokens of every prompt; see :class:`Speculation`."""
    rows: list[list[int]] = [[] for _ in prompts]
    run = Speculation(model, draft, prompts, config, n_draft=n_draft)
    for item in run:
        rows[item.row].append(item.token)
    return Speculated(rows, run.rounds, run.drafted, run.accepted)


class Speculation:
    """Iterate over it for the tokens as they come; ``rounds``, ``drafted`` and ``accepted`` count along, one a row.

    ``draft`` proposes ``n_draft`` tokens a round. A greedy choice gives what :func:`generate` gives, as far as the model's
    scores for several tokens in one call equal those of one at a time; a drawn one has the same distribution, and a row of
    a batch draws what it draws alone.

    Raises :class:`ConfigError` for vocabularies that differ, and for a model with a state that cannot be cropped.
    """

    def __init__(
        self, model: LanguageModel, draft: LanguageModel, prompts: Sequence[Sequence[int]],
        config: GenerationConfig | None = None, *, n_draft: int = 4,
    ) -> None:
        self.config = config or GenerationConfig()
        if model.config.vocab_size != draft.config.vocab_size:
            sizes = f"{draft.config.vocab_size} and {model.config.vocab_size}"
            raise ConfigError(f"a draft must have the vocabulary of the model that it drafts for; these have {sizes} tokens")
        if n_draft < 1:
            raise ConfigError(f"n_draft must be at least 1; got {n_draft}")
        if self.config.compile:
            raise ConfigError("speculation has no compiled form: rows keep different numbers of tokens; set compile = false")
        check_prompts(model, prompts)
        require(model, "cut", "generation")
        require(model, "crop", "speculation")
        require(draft, "cut", "drafting")
        for each in (model, draft) if len(prompts) > 1 else ():
            require(each, "segment", "speculation on several rows, which keep different numbers of tokens,")
        self.model, self.draft, self.prompts, self.n_draft = model, draft, prompts, n_draft
        self.rounds, self.drafted, self.accepted = ([0] * len(prompts) for _ in range(3))

    def __iter__(self) -> Iterator[GeneratedToken]:
        if len(self.prompts):
            with evaluating(self.model, self.draft):
                yield from self._run()

    def _run(self) -> Iterator[GeneratedToken]:
        config = self.config
        chunk, room = config.prefill_chunk, config.max_new_tokens
        rows = list(range(len(self.prompts)))
        self.rounds, self.drafted, self.accepted = ([0] * len(rows) for _ in range(3))
        self.seen = Seen(config, self.prompts)
        self.generators = [torch.Generator().manual_seed(config.seed + row) for row in rows]
        self.made = [0] * len(rows)
        scores, state = prefill(self.model, self.prompts, chunk, room)
        _, behind = prefill(self.draft, self.prompts, chunk, room)
        tokens, log_probs = choose(scores, config, self.generators, self.seen.of(rows))
        new = [[pair] for pair in zip(tokens.tolist(), log_probs.tolist(), strict=True)]
        while True:
            going = []
            for row, pairs in zip(rows, new, strict=True):
                ended = yield from self._emit(row, pairs)
                going.append(not ended)
            kept = [i for i, on in enumerate(going) if on]
            if not kept:
                return
            if len(kept) < len(rows):
                index = torch.tensor(kept)
                state, behind = reorder(state, index), reorder(behind, index)
                rows, new = [rows[i] for i in kept], [new[i] for i in kept]
            unseen = [[token for token, _ in pairs] for pairs in new]
            new, state, behind = self._round(rows, unseen, state, behind)

    def _emit(self, row: int, pairs: list[tuple[int, float]]) -> Generator[GeneratedToken, None, bool]:
        """Hand out new tokens of a row, up to the one that ends it; returns whether it ended."""
        for token, log_prob in pairs:
            self.made[row] += 1
            self.seen.add(row, token)
            last = self.made[row] == self.config.max_new_tokens or token in self.config.stop_tokens
            yield GeneratedToken(row, token, log_prob, last)
            if last:
                return True
        return False

    @torch.no_grad()
    def _round(
        self, rows: list[int], unseen: list[list[int]], state: State, behind: State
    ) -> tuple[list[list[tuple[int, float]]], State, State]:
        """One draft and its check. ``unseen``: the tokens of each row that the draft has not read."""
        # The last new token is the model's own, so a row that may make n more drafts n - 1 at most.
        counts = [min(self.n_draft, self.config.max_new_tokens - self.made[row] - 1) for row in rows]
        drafts, guesses, behind = self._propose(rows, unseen, counts, behind)
        most = max(counts)
        texts = [[tokens[-1], *drafted] for tokens, drafted in zip(unseen, drafts, strict=True)]
        ids, segments = _padded(texts, self.model.device)
        out = self.model(ids, segments=segments, state=state, keep=most)
        new, extra = [], []
        for i, row in enumerate(rows):
            pairs = self._check(row, out.logits[i], drafts[i], [q[i] for q in guesses])
            new.append(pairs)
            extra.append(counts[i] - len(pairs) + 1)
            self.rounds[row] += 1
            self.drafted[row] += counts[i]
            self.accepted[row] += len(pairs) - 1
        state = out.state
        if any(extra):
            state = crop(state, torch.tensor(extra, device=self.model.device))
        return new, state, behind

    def _propose(
        self, rows: list[int], unseen: list[list[int]], counts: list[int], behind: State
    ) -> tuple[list[list[int]], list[Tensor], State]:
        """Each row's drafted tokens, the distributions (b vocab) they were drawn from, and the draft's state before them."""
        drafts: list[list[int]] = [[] for _ in rows]
        guesses: list[Tensor] = []
        if not max(counts):
            return drafts, guesses, behind
        texts, state = unseen, behind
        for place in range(max(counts)):
            ids, segments = _padded(texts, self.draft.device)
            out = self.draft(ids, segments=segments, state=state, logits="last")
            state = out.state
            if place == 0:
                behind = snapshot(state)
            # What a row without a token says means nothing, and is not looked at.
            reads = torch.tensor([bool(text) for text in texts], device=out.logits.device)
            scores = out.logits.masked_fill(~reads[:, None], 0)
            guesses.append(distribution(scores, self.config, self.seen.of(rows, drafts)))
            for i, row in enumerate(rows):
                if place < counts[i]:
                    drafts[i].append(int(invert(guesses[-1][i], uniform(self.generators[row]))))
            texts = [drafted[-1:] if place < counts[i] else [] for i, drafted in enumerate(drafts)]
        return drafts, guesses, behind

    def _check(self, row: int, logits: Tensor, drafted: list[int], guesses: list[Tensor]) -> list[tuple[int, float]]:
        """The new tokens of a row with the model's log-probabilities: drafts that are kept, and one of its own."""
        scores = finite(logits[: len(drafted) + 1])
        seen = self.seen.of([row] * len(scores), [drafted[:i] for i in range(len(scores))])
        probs, log_probs = distribution(scores, self.config, seen), scores.log_softmax(-1)
        generator, tokens = self.generators[row], []
        for p, q, token in zip(probs, guesses, drafted, strict=False):
            if float(uniform(generator)) * float(q[token]) >= float(p[token]):
                left = (p - q).clamp(min=0)
                # Where p and q differ by rounding alone nothing may be left: p is then as good.
                tokens.append(int(invert(left if bool(left.any()) else p, uniform(generator))))
                break
            tokens.append(token)
        else:
            tokens.append(int(invert(probs[len(drafted)], uniform(generator))))
        return [(token, float(log_probs[i, token])) for i, token in enumerate(tokens)]


def _padded(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Segments | None]:
    """Token ids (b t), padded on the right where lengths differ, and the segments that say so."""
    lengths = torch.tensor([len(text) for text in texts], device=device)
    width = int(lengths.max())
    ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts], dtype=torch.int64, device=device)
    if int(lengths.min()) == width:
        return ids, None
    return ids, Segments.from_mask(torch.arange(width, device=device) < lengths[:, None])
