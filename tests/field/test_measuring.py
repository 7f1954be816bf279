"""Harnesses: room for what is generated, windows that score every token once, one start token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridtf.core import LengthError
from hybridtf.models import GenerationConfig, generate
from hybridtf.tasks.documents import Documents
from hybridtf.tasks.packing import IGNORE, evaluation_pieces, fill
from hybridtf.tasks.tokenization import ByteTokenizer
from tests.field.layers import model


@pytest.mark.parametrize("chunk", [16, 2048])
def test_a_prompt_keeps_all_its_tokens_or_is_refused_when_the_table_ends(chunk):
    """64 places, 8 new tokens, the last of which is never read: 57 fit, and 58 are not cut to make room."""
    learned = {"stem": {"type": "token_embedding", "position": {"type": "learned"}}}
    net = model("a", {"a": {"type": "attention", "n_heads": 2, "position": {"type": "none"}}}, max_seq_len=64, **learned)
    config = GenerationConfig(max_new_tokens=8, prefill_chunk=chunk)
    for n in (55, 56, 57):
        prompt = torch.randint(0, 17, (n,)).tolist()
        (new,) = generate(net, [prompt], config)
        assert len(new) == 8
        ids = torch.tensor([prompt + new])
        assert net(ids[:, : n + 7]).logits[0, n - 1 :].argmax(-1).tolist() == new
    for n in (58, 64, 65):
        with pytest.raises(LengthError, match="longer than the learned position table"):
            generate(net, [torch.randint(0, 17, (n,)).tolist()], config)


@pytest.mark.parametrize("stride", [512, 256])
def test_strided_windows_score_every_token_once(stride):
    """2050 tokens, windows of 512: nothing is lost between windows, and targets are one token on from inputs."""
    text = np.random.default_rng(0).integers(0, 7, 2050).astype(np.uint32)
    ends = np.array([0, 2050])
    documents = Documents(("a",), text, ends, text.astype(np.uint8), ends, "x")
    table = torch.randn(8, 7, dtype=torch.float64).log_softmax(-1)  # row 7 is the start of a document
    exact = table[torch.tensor([7, *text[:-1].tolist()]), torch.tensor(text.tolist())]
    pieces = evaluation_pieces(documents.lengths, 512, stride)
    batch = fill(documents, pieces, [[i] for i in range(len(pieces))], 512, 7)
    scored = batch.targets != IGNORE
    assert int(scored.sum()) == batch.n_tokens == 2050
    found = table[batch.inputs[scored], batch.targets[scored]]
    torch.testing.assert_close(found.sort().values, exact.sort().values, rtol=0, atol=0)
    assert float(found.sum()) == pytest.approx(float(exact.sum()), rel=1e-12)


def test_a_prompt_has_exactly_one_start_token_at_its_beginning():
    tokenizer = ByteTokenizer()
    prompt = tokenizer.prompt("a document. ").tolist()
    (question,) = tokenizer.encode([b"a question?"])
    ids = [*prompt, *question.tolist()]
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1
    assert len(ids) == 1 + len("a document. a question?")
    assert tokenizer.decode(ids) == "a document. a question?"
    assert tokenizer.prompt("").tolist() == [tokenizer.bos_id]
