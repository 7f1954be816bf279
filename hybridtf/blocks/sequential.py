"""One branch after the other: a mixer, then a channel mixer, each added to the stream, with norms before or after.

f is a branch, x the stream; residual multipliers are left out.

    prenorm        x + f(norm(x))              https://arxiv.org/abs/2002.04745
    postnorm       norm(x + f(x))              https://arxiv.org/abs/1706.03762
    sandwich       x + post(f(norm(x)))        https://arxiv.org/abs/2105.13290, Gemma 2 and 3
    output_norm    x + post(f(x))              https://arxiv.org/abs/2501.00656 (OLMo 2), Swin v2, EXAONE 4
    normed_stream  n + f(n),  n = norm(x)      MiniMax-01: https://arxiv.org/abs/2501.08313
    affine_residual  s (x + b) + s' (f(norm(x)) + b')    ZAYA1, whose transformers code defines it
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from hybridtf.blocks.laurel import AugmentedConfig, Laurel
from hybridtf.blocks.options import BRANCHES, NormsAfter, NormsBefore, WiringConfig
from hybridtf.blocks.wiring import BranchResult, Wiring
from hybridtf.core import BuildContext
from hybridtf.nn import ChannelAffine


class PreNormConfig(NormsBefore, AugmentedConfig):
    """Norm before each branch: x + f(norm(x)). The stream itself is never normed."""

    type: Literal["prenorm"] = "prenorm"

    def build(self, ctx: BuildContext) -> PreNorm:
        return PreNorm(self, ctx)


class PostNormConfig(NormsAfter):
    """Norm of each sum: norm(x + f(x)), the original transformer. Such a stack ends normed: ``final_norm`` may be ``none``."""

    type: Literal["postnorm"] = "postnorm"
    norms_before: ClassVar[bool] = False

    def build(self, ctx: BuildContext) -> PostNorm:
        return PostNorm(self, ctx)


class SandwichConfig(NormsBefore, NormsAfter, AugmentedConfig):
    """Norm before and after each branch: x + post(f(norm(x)))."""

    type: Literal["sandwich"] = "sandwich"

    def build(self, ctx: BuildContext) -> OutputNorm:
        return OutputNorm(self, ctx)


class OutputNormConfig(NormsAfter):
    """Norm of each branch's output, and none before it: x + post(f(x))."""

    type: Literal["output_norm"] = "output_norm"
    norms_before: ClassVar[bool] = False

    def build(self, ctx: BuildContext) -> OutputNorm:
        return OutputNorm(self, ctx)


class NormedStreamConfig(NormsBefore):
    """The residual is taken after the norm: n + f(n) with n = norm(x)."""

    type: Literal["normed_stream"] = "normed_stream"

    def build(self, ctx: BuildContext) -> NormedStream:
        return NormedStream(self, ctx)


class AffineResidualConfig(NormsBefore):
    """Norm before each branch, and learned vectors for each channel: s (x + b) + s' (f(norm(x)) + b'). At the start
    ``prenorm``, with f scaled by the model's ``residual_init`` as there."""

    type: Literal["affine_residual"] = "affine_residual"

    def build(self, ctx: BuildContext) -> AffineResidual:
        return AffineResidual(self, ctx)


class Sequential(Wiring):
    """The mixer's branch, then the channel mixer's; a subclass says how a branch is wired."""

    def branched(self, branch: str, x: Tensor, seen: BranchResult, call: dict[str, Any]) -> Tensor:
        """The stream after the branch."""
        raise NotImplementedError

    def wired(self, x: Tensor, seen: BranchResult, call: dict[str, Any]) -> Tensor:
        for branch in self.parts():
            x = self.branched(branch, x, seen, call)
        return x


class PreNorm(Sequential):
    """See :class:`PreNormConfig`. A learned residual beside a branch is ``mixer_laurel`` or ``channel_laurel``."""

    def __init__(self, config: WiringConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        options = config.laurel if isinstance(config, AugmentedConfig) else None
        for branch in self.parts() if options is not None else ():
            if options is not None and options.on in (branch, "both"):
                self.add_module(f"{BRANCHES[branch]}_laurel", Laurel(options, ctx.child("laurel")))

    def branched(self, branch: str, x: Tensor, seen: BranchResult, call: dict[str, Any]) -> Tensor:
        given = self.norm(branch, x)
        y = self.post_norm(branch, self.branch(branch, given, seen, **call))
        laurel = self._modules.get(f"{BRANCHES[branch]}_laurel")
        return self.onto(branch, x, self.scaled(branch, y if laurel is None else y + laurel(given)))


class OutputNorm(PreNorm):
    """See :class:`SandwichConfig`, :class:`OutputNormConfig`."""

    norms_output = True


class PostNorm(Sequential):
    """See :class:`PostNormConfig`."""

    def branched(self, branch: str, x: Tensor, seen: BranchResult, call: dict[str, Any]) -> Tensor:
        y = self.branch(branch, x, seen, **call)
        return self.post_norm(branch, self.onto(branch, x, self.scaled(branch, y)))


class NormedStream(Sequential):
    """See :class:`NormedStreamConfig`."""

    def branched(self, branch: str, x: Tensor, seen: BranchResult, call: dict[str, Any]) -> Tensor:
        x = self.norm(branch, x)
        return self.onto(branch, x, self.scaled(branch, self.branch(branch, x, seen, **call)))


class AffineResidual(PreNorm):
    """See :class:`AffineResidualConfig`. The vectors of a branch are ``mixer_affine`` and ``channel_affine``."""

    def __init__(self, config: AffineResidualConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        for branch in self.parts():
            name = f"{BRANCHES[branch]}_affine"
            sides = {side: ChannelAffine(ctx.child(name)) for side in ("stream", "output")}
            self.add_module(name, nn.ModuleDict(sides))

    def scaled(self, branch: str, y: Tensor) -> Tensor:
        return super().scaled(branch, getattr(self, f"{BRANCHES[branch]}_affine")["output"](y))

    def onto(self, branch: str, x: Tensor, y: Tensor) -> Tensor:
        return super().onto(branch, getattr(self, f"{BRANCHES[branch]}_affine")["stream"](x), y)
