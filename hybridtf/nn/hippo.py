"""HiPPO-LegS, and its normal part diagonalised (https://arxiv.org/abs/2111.00396, appendix C).

    A[n, k] = -sqrt((2n + 1)(2k + 1)) for n > k, -(n + 1) for n = k, 0 above;  B[n] = sqrt(2n + 1);  P[n] = sqrt(n + 1/2)
    A + P P^T = -1/2 I + (skew) = V diag(Lambda) V^*,  so  A = V (diag(Lambda) - p p^*) V^*  with p = V^* P

Eigenvalues come in conjugate pairs: those with a positive imaginary part stand for both, since all inputs and outputs are real.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def hippo_legs(n: int) -> tuple[Tensor, Tensor]:
    """A (n n) and B (n) of HiPPO-LegS, float64."""
    root = (2 * torch.arange(n, dtype=torch.float64) + 1).sqrt()
    below = (root[:, None] * root).tril(-1)
    return -below - torch.diag(torch.arange(n, dtype=torch.float64) + 1), root


class DiagonalHippo(NamedTuple):
    """Half of the conjugate pairs: n / 2 of each, complex128."""

    eigenvalues: Tensor
    """Lambda (n/2)."""
    low_rank: Tensor
    """p (n/2)."""
    b: Tensor
    """V^* B (n/2)."""
    vectors: Tensor
    """V (n, n/2)."""


def diagonal_hippo(n: int) -> DiagonalHippo:
    """HiPPO-LegS of an even size n in the basis that diagonalises its normal part."""
    a, b = hippo_legs(n)
    p = (torch.arange(n, dtype=torch.float64) + 0.5).sqrt()
    normal = a + p[:, None] * p
    # i times a skew matrix is Hermitian: its eigenvalues, ascending, are those of the skew part over i.
    skew = (normal - normal.mT) / 2
    values, vectors = torch.linalg.eigh(-1j * skew.to(torch.complex128))
    values, vectors = values[n // 2 :], vectors[:, n // 2 :]
    real = normal.diagonal().mean()
    as_complex = torch.complex(real.expand_as(values), values)
    return DiagonalHippo(as_complex, vectors.mH @ p.to(vectors.dtype), vectors.mH @ b.to(vectors.dtype), vectors)
