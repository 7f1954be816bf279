"""Linear attention by features of queries and keys: attention whose weights are phi(q).phi(k), and so a recurrence.

    S_t = S_{t-1} + phi(k_t) [v_t, 1]^T;   [y_t, z_t] = S_t^T phi(q_t);   out = out_proj(y_t / z_t)

- ``linear_transformer`` (https://arxiv.org/abs/2006.16236): phi(x) = elu(x) + 1.
- ``performer`` (https://arxiv.org/abs/2009.14794): random features, phi(q).phi(k) near exp(q.k / sqrt(head_dim)).
- ``cosformer`` (https://arxiv.org/abs/2202.08791): relu(q_i).relu(k_j) cos(pi (i - j) / 2 M).
- ``based`` (https://arxiv.org/abs/2402.18668): 1 + s + s^2 / 2 with s = q.k / sqrt(feature_dim).
- ``rebased`` (https://arxiv.org/abs/2402.10644): (phi(q).phi(k))^2 / feature_dim with phi = gamma norm(x) + beta.

Axes: b batch, t time, d d_model, h heads, k head_dim, n features, p v_dim.

No outside layer was run: the recurrences of linear_transformer, based and rebased are held to fla's; the features of performer
and its recurrence, and that of cosformer, to performer-pytorch's, without what it adds to features and divisors; performer to
exact softmax, cosformer to the formula of its paper.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from hybridtf.core import BuildContext, Edges, Fixed, LengthError, Segments, SequenceMixerConfig, State
from hybridtf.nn import (
    FEATURE_MAPS,
    LayerNorm,
    LinearHeads,
    RandomFeatures,
    Written,
    accumulation_dtype,
    head_width,
    quadratic,
    running_bound,
    taylor,
    token_positions,
)
from hybridtf.nn.random_features import NOTHING
from hybridtf.ops.ssd import normalised


class FeatureAttentionConfig(SequenceMixerConfig):
    """Options of all mixers of this file."""

    n_heads: int = Field(default=8, gt=0)
    chunk_size: int = Field(default=64, gt=0)
    kernel: str = "auto"


STRETCH = 1024
"""Tokens whose features are formed at a time without gradients: they are many times as wide as their tokens, and those of a
long row would leave every cache."""


class FeatureAttention(LinearHeads):
    """Heads with features and a normaliser. Its state is one matrix S (b h n p+1) a head, of which the last column holds the
    sum of the keys' features."""

    def __init__(
        self, config: FeatureAttentionConfig, ctx: BuildContext, *, k_dim: int, v_dim: int, n_features: int,
        bias: bool = False, eps: float = 0.0,
    ) -> None:
        super().__init__(
            ctx, n_heads=config.n_heads, k_dim=k_dim, v_dim=v_dim, n_features=n_features, ones=True, bias=bias,
            chunk_size=config.chunk_size, kernel=config.kernel,
        )
        self.eps = eps

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.shape[1] <= STRETCH:
            return super().mix(x, segments, state)
        out, held = [], self.init_state(x.shape[0]) if state is None else state
        for start in range(0, x.shape[1], STRETCH):
            part = None if segments is None else segments.narrow(start, min(start + STRETCH, x.shape[1]))
            y, held = super().mix(x[:, start : start + STRETCH], part, held)
            out.append(y)
        return torch.cat(out, dim=1), None if state is None else held

    def written(self, q: Tensor, k: Tensor, x: Tensor, segments: Segments | None, state: Fixed | None) -> Written:
        # In float32 at least: sums of features outgrow a half precision.
        wide = accumulation_dtype(q.dtype)
        return Written(self.features(q.to(wide)), self.features(k.to(wide)))

    def features(self, heads: Tensor) -> Tensor:
        """(b t h k) to (b t h n)."""
        raise NotImplementedError

    def finished(self, y: Tensor, x: Tensor) -> Tensor:
        return normalised(y, self.eps).flatten(-2)


class LinearTransformerConfig(FeatureAttentionConfig):
    """The linear transformer: phi(x) = elu(x) + 1, and no scale."""

    type: Literal["linear_transformer"] = "linear_transformer"
    source: ClassVar[str] = "https://arxiv.org/abs/2006.16236"
    bias: bool = True
    """Of all projections."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the normaliser."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, chunk_size=4)

    def build(self, ctx: BuildContext) -> LinearTransformer:
        return LinearTransformer(self, ctx)


class LinearTransformer(FeatureAttention):
    """See :class:`LinearTransformerConfig`."""

    def __init__(self, config: LinearTransformerConfig, ctx: BuildContext) -> None:
        width = head_width(ctx, config.n_heads)
        super().__init__(
            config, ctx, k_dim=width, v_dim=width, n_features=width, bias=config.bias, eps=config.eps
        )
        self.config = config

    def features(self, heads: Tensor) -> Tensor:
        return FEATURE_MAPS["elu1"](heads)


class PerformerConfig(FeatureAttentionConfig):
    """FAVOR+: an unbiased estimate of causal softmax attention from positive random features."""

    type: Literal["performer"] = "performer"
    source: ClassVar[str] = "https://arxiv.org/abs/2009.14794"
    n_features: int = Field(default=256, gt=0)
    """Directions w, drawn once from the seed and saved; ``redraw`` draws others. The error falls as 1 / sqrt(n_features)."""
    regularised: bool = False
    """All directions have length sqrt(head_dim) instead of the lengths of normal vectors: the paper's SMREG kernel."""
    bias: bool = False
    """Of all projections."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, n_features=7, chunk_size=4)

    def build(self, ctx: BuildContext) -> Performer:
        return Performer(self, ctx)


class Performer(FeatureAttention):
    """See :class:`PerformerConfig`.

    No exponential is of a positive number. A query's largest exponent cancels in the ratio, so it is taken off. Of keys the
    largest exponent so far is taken off, a running bound that is part of the state: the memory shrinks by exp(old - new) where
    it grows, which is a decay of the op. Published code takes the largest of all keys, later ones too, and adds a small
    number to each feature; neither is done here.
    """

    def __init__(self, config: PerformerConfig, ctx: BuildContext) -> None:
        width = head_width(ctx, config.n_heads)
        super().__init__(
            config, ctx, k_dim=width, v_dim=width, n_features=config.n_features, bias=config.bias
        )
        self.config = config
        self.random = RandomFeatures(ctx, width, config.n_features, regularised=config.regularised)

    def redraw(self, seed: int) -> None:
        """Other directions; states from before are of no use afterwards."""
        self.random.redraw(seed)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().state_shapes(), "bound": (self.n_heads,)}

    def written(self, q: Tensor, k: Tensor, x: Tensor, segments: Segments | None, state: Fixed | None) -> Written:
        q, k = (self.random.exponents(z * self.k_dim**-0.25) for z in (q, k))
        before = k.new_full((k.shape[0], self.n_heads), NOTHING)
        if state is not None:
            held = state.length > 0
            if segments is not None:
                held = held & (segments.continues | (segments.last_id == 0))
            # A whole number, whose gradient is 0: it cancels in what is read.
            before = torch.where(held[:, None], state["bound"].round(), before)
        bound = running_bound(k, segments, before)
        # What follows is 0 at the start of a document: there is nothing to shrink.
        earlier = torch.cat([before[:, None], bound[:, :-1]], dim=1)
        log_a = torch.where(earlier == NOTHING, 0.0, (earlier - bound).clamp(max=0))
        # At pads a key may lie above the bound.
        k = (k - bound[..., None]).clamp(max=0).exp()
        q = (q - q.detach().amax(-1, keepdim=True)).exp()
        last = torch.cat([before[:, None], bound], dim=1)[:, -1]
        return Written(q, k, log_a, {"bound": torch.where(last == NOTHING, 0.0, last)})


class CosformerConfig(FeatureAttentionConfig):
    """cosFormer: relu features, and weights that fall with distance as a quarter of a cosine wave. Longer documents than
    ``max_distance`` are refused: beyond it weights would be negative."""

    type: Literal["cosformer"] = "cosformer"
    source: ClassVar[str] = "https://arxiv.org/abs/2202.08791"
    max_distance: int | None = Field(default=None, gt=0, examples=[48])
    """M, the distance at which weights reach 0. None: the model's ``max_seq_len``."""
    bias: bool = True
    """Of all projections."""
    eps: float = Field(default=1e-6, gt=0)
    """The least normaliser: a smaller sum of weights counts as this."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, max_distance=8192, chunk_size=4)

    def build(self, ctx: BuildContext) -> Cosformer:
        return Cosformer(self, ctx)


class Cosformer(FeatureAttention):
    """See :class:`CosformerConfig`. cos(a - b) = cos a cos b + sin a sin b makes twice as many features."""

    def __init__(self, config: CosformerConfig, ctx: BuildContext) -> None:
        width = head_width(ctx, config.n_heads)
        super().__init__(
            config, ctx, k_dim=width, v_dim=width, n_features=2 * width, bias=config.bias, eps=config.eps
        )
        self.config = config
        self.max_distance, self.where = config.max_distance or ctx.max_seq_len, ctx.where

    def written(self, q: Tensor, k: Tensor, x: Tensor, segments: Segments | None, state: Fixed | None) -> Written:
        positions = token_positions(x, segments, state)
        if segments is not None:
            positions = positions.masked_fill(~segments.real, 0)
        self._check(positions)
        wide = accumulation_dtype(q.dtype)
        angle = (positions.to(torch.float64 if x.device.type != "mps" else torch.float32) * (math.pi / 2 / self.max_distance))
        cos, sin = (wave.to(wide)[..., None, None] for wave in (angle.cos(), angle.sin()))
        q, k = (torch.cat([z * cos, z * sin], dim=-1) for z in (q.to(wide).relu(), k.to(wide).relu()))
        return Written(q, k)

    def _check(self, positions: Tensor) -> None:
        if torch.compiler.is_compiling() or not positions.numel():
            return
        longest = int(positions.max()) + 1
        if longest > self.max_distance:
            raise LengthError(
                f"{self.where}: a document of {longest} tokens is longer than cosformer's max_distance = {self.max_distance}"
            )

    def finished(self, y: Tensor, x: Tensor) -> Tensor:
        return (y[..., :-1] / y[..., -1:].clamp(min=self.eps)).flatten(-2)


class BasedConfig(FeatureAttentionConfig):
    """Based's linear attention, by the second order Taylor series of the softmax kernel. Its windows are
    layers of their own."""

    type: Literal["based"] = "based"
    source: ClassVar[str] = "https://arxiv.org/abs/2402.18668"
    n_heads: int = Field(default=12, gt=0)
    feature_dim: int = Field(default=16, gt=0)
    """Width of a head's queries and keys, which make 1 + n + n (n + 1) / 2 features."""
    eps: float = Field(default=1e-12, ge=0)
    """Added to the normaliser."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, feature_dim=3, chunk_size=4)

    def build(self, ctx: BuildContext) -> Based:
        return Based(self, ctx)


class Based(FeatureAttention):
    """See :class:`BasedConfig`."""

    def __init__(self, config: BasedConfig, ctx: BuildContext) -> None:
        n = config.feature_dim
        super().__init__(
            config, ctx, k_dim=n, v_dim=head_width(ctx, config.n_heads), n_features=1 + n + n * (n + 1) // 2, eps=config.eps
        )
        self.config = config

    def features(self, heads: Tensor) -> Tensor:
        return taylor(heads * self.k_dim**-0.25)


class RebasedConfig(FeatureAttentionConfig):
    """ReBased: a square kernel of queries and keys that are normalised and moved by learned weights (gamma, beta)."""

    type: Literal["rebased"] = "rebased"
    source: ClassVar[str] = "https://arxiv.org/abs/2402.10644"
    n_heads: int = Field(default=16, gt=0)
    feature_dim: int = Field(default=16, gt=0)
    """Width of a head's queries and keys, which make n (n + 1) / 2 features."""
    use_gamma: bool = True
    use_beta: bool = True
    eps: float = Field(default=1e-5, gt=0)
    """Added to the normaliser."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, feature_dim=3, chunk_size=4)

    def build(self, ctx: BuildContext) -> Rebased:
        return Rebased(self, ctx)


class Rebased(FeatureAttention):
    """See :class:`RebasedConfig`. ``feature_norm`` is one for queries and keys of all heads."""

    def __init__(self, config: RebasedConfig, ctx: BuildContext) -> None:
        n = config.feature_dim
        super().__init__(
            config, ctx, k_dim=n, v_dim=head_width(ctx, config.n_heads), n_features=n * (n + 1) // 2, eps=config.eps
        )
        self.config = config
        place = ctx.child("feature_norm", d_model=n)
        self.feature_norm = LayerNorm(place, 1e-5, config.use_beta, weight=config.use_gamma)

    def features(self, heads: Tensor) -> Tensor:
        features: Tensor = quadratic(self.feature_norm(heads)) * self.k_dim**-0.5
        return features
