"""The families by name, and a built pair of each, made once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridtf.models import LanguageModel
from hybridtf.models.weights import assign_weights, canonical_tensors
from tests.models.parity import decoders, gemma, hybrids, scans
from tests.models.parity.case import FIRST_PLAIN_ID, VOCAB, Case
from tests.models.parity.reference import logits_of, reference

CASES = {
    "llama": lambda: decoders.llama(),
    "mixtral": lambda: decoders.mixtral(),
    "gpt_oss": lambda: decoders.gpt_oss(),
    "gpt_oss with bounds that are reached": lambda: decoders.gpt_oss(limit=0.8),
    "gemma2": lambda: gemma.gemma2(),
    "gemma3": lambda: gemma.gemma3(),
    "gemma3 with stretched positions": lambda: gemma.gemma3(factor=4.0),
    "recurrent_gemma": lambda: gemma.recurrent_gemma(),
    "recurrent_gemma of another width": lambda: gemma.recurrent_gemma(d_inner=40, n_kv_heads=2, bias=True),
    "mamba": lambda: scans.mamba(),
    "mamba with projection bias": lambda: scans.mamba(bias=True),
    "falcon_mamba": lambda: scans.mamba(norms=True),
    "mamba2": lambda: scans.mamba2(),
    "mamba2 with projection bias": lambda: scans.mamba2(bias=True),
    "mamba2 with clamped steps": lambda: scans.mamba2(clamp=(0.1, 0.4)),
    "bamba": lambda: hybrids.bamba(),
    "bamba with biases": lambda: hybrids.bamba(bias=True),
    "jamba": lambda: hybrids.jamba(),
    "jamba with biases": lambda: hybrids.jamba(bias=True),
    "granitemoehybrid": lambda: hybrids.granite(),
    "nemotron_h": lambda: hybrids.nemotron(),
    "nemotron_h with latent experts": lambda: hybrids.nemotron(latent=True),
}
SHORT, LONG = 5, 19
"""Tokens of the two documents; the longer one is longer than any window, and than two chunks of a scan."""


def ids(n_rows: int, n_tokens: int, seed: int) -> Tensor:
    return torch.randint(FIRST_PLAIN_ID, VOCAB, (n_rows, n_tokens), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Pair:
    case: Case
    theirs: nn.Module
    model: LanguageModel
    short: Tensor
    long: Tensor
    want_short: Tensor
    want_long: Tensor


@functools.cache
def pair_of(name: str) -> Pair:
    """Both models of a case, two documents, and the reference's logits of each alone."""
    case = CASES[name]()
    theirs = reference(case.model, case.config, unit_offset=case.unit_offset)
    model = case.build()
    assign_weights(model, case.translated(canonical_tensors(theirs)), where="the reference")
    short, long = ids(1, SHORT, 1), ids(1, LONG, 2)
    with torch.no_grad():
        want_short, want_long = logits_of(theirs, short)[0], logits_of(theirs, long)[0]
    assert want_long.dtype == torch.float64
    return Pair(case, theirs, model, short, long, want_short, want_long)
