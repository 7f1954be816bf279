"""The head that reads a document out of its last token: one vector says everything, and nothing else does."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, Segments
from hybridtf.models import GenerationConfig, LanguageModelConfig, PositionDecoderConfig, generate
from hybridtf.testing import check_head

D, VOCAB = 8, 5


def head_of(seed: int = 0):
    module = PositionDecoderConfig().build(BuildContext(d_model=D, param_dtype=torch.float64), VOCAB)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return module


def by_hand(head, z: torch.Tensor, place: int) -> torch.Tensor:
    """(vocab) the formula of the docstring for one place."""
    half = D // 2
    angle = place * 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    x = z + torch.cat([angle.sin(), angle.cos()])
    rms = [lambda v, n=n: v / (v.square().mean() + 1e-6).sqrt() * n.weight for n in head.norms]
    for norm, proj in zip(rms[:2], (head.first_proj, head.second_proj), strict=True):
        h = proj.weight @ norm(x) + proj.bias
        x = h * 0.5 * (1 + torch.erf(h / 2**0.5))
    return head.out_proj.weight @ rms[2](x) + head.out_proj.bias


def test_it_is_the_formula_at_every_place() -> None:
    head = head_of()
    x = torch.randn(2, 7, D, dtype=torch.float64)
    scores, _ = head(x)
    for b in range(2):
        for i in range(7):
            torch.testing.assert_close(scores[b, i], by_hand(head, x[b, -1], i), rtol=1e-10, atol=1e-10)


def test_only_the_last_token_of_a_document_counts() -> None:
    head = head_of()
    x = torch.randn(1, 9, D, dtype=torch.float64, requires_grad=True)
    segments = Segments.from_ids(torch.tensor([[0, 1, 1, 0, 1, 4, 4, 4, 0]]))
    scores, _ = head(x, segments=segments)
    for i, place, last in ((1, 0, 4), (2, 1, 4), (4, 2, 4), (5, 0, 7), (7, 2, 7)):
        torch.testing.assert_close(scores[0, i], by_hand(head, x[0, last], place), rtol=1e-10, atol=1e-10)
    (grad,) = torch.autograd.grad(scores[segments.real].square().sum(), x)
    assert grad[0].abs().sum(-1).nonzero().flatten().tolist() == [4, 7]


def test_the_laws() -> None:
    check_head(PositionDecoderConfig())


def model_of():
    block = {"type": "prenorm", "mixer": {"type": "gqa", "n_heads": 2, "n_kv_heads": 1}}
    config = LanguageModelConfig.model_validate({
        "vocab_size": VOCAB, "d_model": D, "pattern": "a", "blocks": {"a": block}, "head": {"type": "position_decoder"},
    })
    return config.build()


def test_the_last_scores_are_those_of_the_last_place() -> None:
    model, ids = model_of(), torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    assert torch.equal(model(ids, logits="last").logits, model(ids).logits[:, -1])


def test_it_does_not_generate() -> None:
    with pytest.raises(ConfigError, match=r"head \(PositionDecoder\) says: .* last token of its document"):
        generate(model_of(), [torch.tensor([1, 2])], GenerationConfig(max_new_tokens=2))


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ConfigError, match="even width"):
        PositionDecoderConfig().build(BuildContext(d_model=7), VOCAB)
