"""What must hold for any stack. Each check takes a drawn stack and its model, and raises where it does not hold.

Axes: b batch, t time.
"""

from __future__ import annotations

import random
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hybridtf.core import BuildContext, Segments, crop, reorder, state_lengths
from hybridtf.models import GenerationConfig, LanguageModel, generate, load_weights, save_weights
from hybridtf.recipe import Recipe, parse_recipe, to_toml
from hybridtf.tasks import Batch
from hybridtf.testing.compare import close
from hybridtf.testing.subject import max_len_counts
from hybridtf.train import TrainConfig, build_optimizer
from hybridtf.train.optimizer import set_lr
from hybridtf.train.step import accumulate, after_step
from tests.models.random_stacks import D_MODEL, VOCAB, Drawn
from tests.models.tiny_models import in_pieces

TOL = 1e-9
LENGTH = 23
LAYOUTS = {
    "packed": ["11112333333333333344444", "11111111111111111112222"],
    "left padding": ["00000111111111111111111", "00000000000000000000001"],
    "right padding": ["11111111111111111000000", "10000000000000000000000"],
    "middle padding": ["11000111011111100011111", "01100202222000333333300"],
}
"""Rows of document ids, 0 for padding."""


def tokens(seed: int, b: int, t: int = LENGTH) -> Tensor:
    return torch.randint(VOCAB, (b, t), generator=torch.Generator().manual_seed(seed))


def ids_of(layout: str) -> Tensor:
    return torch.tensor([[int(c) for c in row] for row in LAYOUTS[layout]])


def logits(model: LanguageModel, ids: Tensor, **options: object) -> Tensor:
    out = model(ids, **options).logits  # type: ignore[arg-type]
    assert out is not None
    return out


def cut(rng: random.Random, t: int) -> list[int]:
    """Pieces of t tokens: a prompt in chunks, then single tokens."""
    prompt = rng.randint(t // 2, t - 3)
    sizes, at = [], 0
    while at < prompt:
        sizes.append(min(rng.choice((1, 2, 3, 5, 8)), prompt - at))
        at += sizes[-1]
    return sizes + [1] * (t - prompt)


# -- training ------------------------------------------------------------------------------------------------------------


def check_training(drawn: Drawn, model: LanguageModel) -> None:
    """Two steps on packed rows give every parameter a finite gradient, change it, and lower the loss.

    Without dropout, whose noise is larger than what two steps gain; a pass with it comes after.
    """
    muon = drawn.seed % 2 == 1
    ids = ids_of("packed")
    text = tokens(drawn.seed, *ids.shape)
    targets = text.roll(-1, 1).masked_fill(ids != ids.roll(-1, 1), -100)
    batch = Batch(text, targets, Segments.from_ids(ids), int((targets >= 0).sum()))
    config = TrainConfig(steps=2, optimizer="muon" if muon else "adamw", lr=3e-4)
    optimizer = build_optimizer(model, config)
    set_lr(optimizer, config.lr)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    before = _loss(model.eval(), batch)
    silent = {name for name, param in model.named_parameters() if param.requires_grad}
    for _ in range(2):
        optimizer.zero_grad()
        accumulate(model.eval(), [batch], config, scaler, torch.device("cpu"))
        for name, param in model.named_parameters():
            if not param.requires_grad:
                continue
            assert param.grad is not None, f"{name} has no gradient"
            assert bool(param.grad.isfinite().all()), f"the gradient of {name} is not finite"
            if bool(param.grad.any()):
                silent.discard(name)
        optimizer.step()
        after_step(model)
    assert not silent, f"parameters without gradient: {sorted(silent)}"
    after = _loss(model, batch)
    assert after < before, f"two steps took the loss from {before:.6f} to {after:.6f}"
    optimizer.zero_grad()
    accumulate(model.train(), [batch], config, scaler, torch.device("cpu"))
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None), "dropout spoils a gradient"
    model.eval()


@torch.no_grad()
def _loss(model: LanguageModel, batch: Batch) -> float:
    return float(model.loss(batch.inputs, batch.targets, batch.segments).mean())


# -- laws of the whole stack ---------------------------------------------------------------------------------------------


@torch.no_grad()
def check_segments(drawn: Drawn, model: LanguageModel) -> None:
    """Packed rows, and rows padded on the left, in the middle and on the right, equal each document alone."""
    for layout in LAYOUTS:
        ids = ids_of(layout)
        text = tokens(drawn.seed + 1, *ids.shape)
        got = logits(model, text, segments=Segments.from_ids(ids))
        for row in range(ids.shape[0]):
            for document in ids[row].unique().tolist():
                if document:
                    columns = (ids[row] == document).nonzero()[:, 0]
                    alone = logits(model, text[row : row + 1, columns])
                    close(got[row, columns], alone[0], tol=TOL, what=f"{layout}: row {row}, document {document}")


@torch.no_grad()
def check_cuts(drawn: Drawn, model: LanguageModel) -> None:
    """Chunked prefill, then decode, equals one call: on a growing state, and in buffers made once."""
    rng = random.Random(drawn.seed)
    text = tokens(drawn.seed + 2, 2)
    want = logits(model, text)
    for max_len in (None, LENGTH + 2):
        if max_len is not None and max_len_counts(model):
            want = logits(model, text, state=model.init_state(2, max_len))
        sizes = cut(rng, LENGTH)
        got, state = in_pieces(model, text, sizes, model.init_state(2, max_len))
        close(got, want, tol=TOL, what=f"pieces of {sizes} tokens, max_len={max_len}")
        seen = state_lengths(state)
        assert seen is not None
        assert seen.tolist() == [LENGTH, LENGTH], f"the state says length {seen.tolist()}"


@torch.no_grad()
def check_cut_documents(drawn: Drawn, model: LanguageModel) -> None:
    """Packed and padded rows may be cut anywhere too; what follows them continues the last document of each row."""
    rng = random.Random(drawn.seed + 1)
    for layout in ("packed", "middle padding"):
        ids = ids_of(layout)
        segments = Segments.from_ids(ids)
        text, more = tokens(drawn.seed + 3, *ids.shape), tokens(drawn.seed + 4, ids.shape[0], 3)
        want = logits(model, text, segments=segments)
        got, state = in_pieces(model, text, cut(rng, LENGTH), model.init_state(2), segments)
        close(got[ids > 0], want[ids > 0], tol=TOL, what=f"{layout}, in pieces")
        after, _ = in_pieces(model, more, [1, 2], state)
        for row in range(2):
            last = text[row, ids[row] == ids[row].max()]
            alone = logits(model, torch.cat([last, more[row]])[None])
            close(after[row], alone[0, len(last) :], tol=TOL, what=f"{layout}: what follows row {row}")


@torch.no_grad()
def check_crop(drawn: Drawn, model: LanguageModel) -> None:
    """Rows of a state, chosen and cropped by up to ``keep`` tokens each, go on as if they had never been longer."""
    text, more = tokens(drawn.seed + 5, 3, 11), tokens(drawn.seed + 6, 4, 3)
    index, n = torch.tensor([2, 0, 0, 1]), torch.tensor([0, 3, 1, 2])
    for sizes, max_len in (([11], None), ([6, 5], 20)):
        if max_len is not None and max_len_counts(model):
            continue
        for crop_first in (False, True):
            _, state = in_pieces(model, text, sizes, model.init_state(3, max_len), keep=3)
            of_old = torch.tensor([3, 2, 0])  # tokens that the old rows lose
            state = reorder(crop(state, of_old), index) if crop_first else crop(reorder(state, index), n)
            lost = of_old[index] if crop_first else n
            got, _ = in_pieces(model, more, [1, 2], state)
            for row in range(4):
                kept = text[index[row], : 11 - int(lost[row])]
                want = logits(model, torch.cat([kept, more[row]])[None])
                what = f"crop {'before' if crop_first else 'after'} reorder, pieces of {sizes}: row {row} less {int(lost[row])}"
                close(got[row], want[0, len(kept) :], tol=TOL, what=what)


@torch.no_grad()
def check_reorder(drawn: Drawn, model: LanguageModel) -> None:
    """Rows of a state can be chosen, repeated and dropped."""
    text, more, index = tokens(drawn.seed + 7, 3, 9), tokens(drawn.seed + 8, 4, 3), torch.tensor([2, 0, 0, 1])
    _, state = in_pieces(model, text, [9], model.init_state(3))
    got, _ = in_pieces(model, more, [1, 1, 1], reorder(state, index))
    close(got, logits(model, torch.cat([text[index], more], 1))[:, 9:], tol=TOL, what="reordered rows")


@torch.no_grad()
def check_generation(drawn: Drawn, model: LanguageModel) -> None:
    """Greedy generation from prompts of unequal lengths says what the full forward finds likeliest, token by token."""
    rng = random.Random(drawn.seed + 2)
    prompts = [tokens(drawn.seed + 9 + i, 1, n)[0].tolist() for i, n in enumerate((1, rng.randint(2, 6), 9))]
    made = generate(model, prompts, GenerationConfig(max_new_tokens=5, prefill_chunk=rng.choice((2, 4, 100))))
    for prompt, new in zip(prompts, made, strict=True):
        assert len(new) == 5
        scores = logits(model, torch.tensor([[*prompt, *new]]))[0, len(prompt) - 1 : -1]
        assert scores.argmax(-1).tolist() == new, f"after {prompt}: {new}, likeliest {scores.argmax(-1).tolist()}"


# -- gradients -----------------------------------------------------------------------------------------------------------


def check_gradients(drawn: Drawn, model: LanguageModel) -> None:
    """The gradient of packed and padded rows is the sum of the gradients of their documents alone."""
    ids = torch.cat([ids_of("packed"), ids_of("middle padding")])
    text = tokens(drawn.seed + 15, *ids.shape)
    segments = Segments.from_ids(ids)
    weight = _weights_like(text)
    got = _gradients(model, [(logits(model, text, segments=segments)[ids > 0] * weight[ids > 0]).sum()])
    alone = []
    for row in range(ids.shape[0]):
        for document in ids[row].unique().tolist():
            if document:
                columns = (ids[row] == document).nonzero()[:, 0]
                alone.append((logits(model, text[row : row + 1, columns])[0] * weight[row, columns]).sum())
    for name, want in _gradients(model, alone).items():
        close(got[name], want, tol=TOL, what=f"gradient of {name}")


def check_cut_gradients(drawn: Drawn, model: LanguageModel) -> None:
    """The gradient through a state that is carried is that of one call."""
    text = tokens(drawn.seed + 16, 2)
    weight = _weights_like(text)
    sizes = cut(random.Random(drawn.seed + 3), LENGTH)
    want = _gradients(model, [(logits(model, text) * weight).sum()])
    got = _gradients(model, [(in_pieces(model, text, sizes, model.init_state(2))[0] * weight).sum()])
    for name, value in want.items():
        close(got[name], value, tol=TOL, what=f"pieces of {sizes} tokens: gradient of {name}")


def _weights_like(text: Tensor) -> Tensor:
    return torch.randn(*text.shape, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _gradients(model: LanguageModel, values: list[Tensor]) -> dict[str, Tensor]:
    """Of the sum of ``values``; zero where a parameter has no part in it."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    found = torch.autograd.grad(torch.stack(values).sum(), list(params.values()), allow_unused=True)
    grads = zip(params.items(), found, strict=True)
    return {name: torch.zeros_like(param) if grad is None else grad for (name, param), grad in grads}


# -- files ---------------------------------------------------------------------------------------------------------------


def _context(seed: int) -> BuildContext:
    return BuildContext(d_model=D_MODEL, param_dtype=torch.float64, seed=seed)


@torch.no_grad()
def check_weights(drawn: Drawn, model: LanguageModel) -> None:
    """Weights that were saved, whole or in shards, give a fresh model the same scores, bit for bit."""
    text = tokens(drawn.seed + 13, 2)
    want = logits(model, text)
    for max_shard_bytes in (10**9, 2000):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.safetensors"
            save_weights(model, path, max_shard_bytes=max_shard_bytes)
            assert (len(list(Path(folder).iterdir())) > 2) == (max_shard_bytes == 2000)
            fresh = drawn.config.build(_context(seed=drawn.seed + 1)).eval()
            load_weights(fresh, path)
        assert torch.equal(logits(fresh, text), want), f"scores differ after loading (shards of {max_shard_bytes} bytes)"


@torch.no_grad()
def check_recipe(drawn: Drawn, model: LanguageModel) -> None:
    """A recipe that was written and read is the same, and builds the same model."""
    recipe = Recipe(model=drawn.config)
    again = parse_recipe(tomllib.loads(to_toml(recipe)))
    assert again == recipe
    text = tokens(drawn.seed + 14, 2)
    one, two = (r.model.build(_context(seed=3)).eval() for r in (recipe, again))  # type: ignore[call-arg]
    assert torch.equal(logits(one, text), logits(two, text)), "the recipe's copy gives other scores"


CHECKS: dict[str, tuple[Callable[[Drawn, LanguageModel], None], tuple[str, ...]]] = {
    "segments": (check_segments, ("segment",)),
    "cuts": (check_cuts, ("cut",)),
    "cut documents": (check_cut_documents, ("cut", "segment")),
    "reorder": (check_reorder, ("cut",)),
    "crop": (check_crop, ("cut", "crop")),
    "gradients": (check_gradients, ("segment",)),
    "cut gradients": (check_cut_gradients, ("cut",)),
    "generation": (check_generation, ("cut", "segment")),
    "weights": (check_weights, ()),
    "recipe": (check_recipe, ()),
    "training": (check_training, ()),
}
"""Each check, and the laws it needs: one that a part of the stack says it cannot keep leaves that check out."""
