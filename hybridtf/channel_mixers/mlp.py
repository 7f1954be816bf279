"""The plain channel mixer: down(act(up(x)))."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, ChannelMixer, ChannelMixerConfig, ParamSpec, Preset, Segments, State, check_call
from hybridtf.core.init import fan_in
from hybridtf.nn import Activation, activation


class MLPConfig(ChannelMixerConfig):
    """y = down(act(up(x))), the feed-forward layer of the transformer (https://arxiv.org/abs/1706.03762)."""

    type: Literal["mlp"] = "mlp"
    d_ff: int = Field(gt=0)
    activation: Activation = "gelu"
    bias: bool = False

    @classmethod
    def tiny(cls) -> Self:
        return cls(d_ff=12)

    def build(self, ctx: BuildContext) -> MLP:
        return MLP(self, ctx)


class MLP(ChannelMixer):
    """See :class:`MLPConfig`."""

    def __init__(self, config: MLPConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.up_proj = nn.Linear(ctx.d_model, config.d_ff, bias=config.bias, **ctx.factory)
        self.down_proj = nn.Linear(config.d_ff, ctx.d_model, bias=config.bias, **ctx.factory)
        self.act = activation(config.activation)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"down_proj.weight": ParamSpec("matrix", fan_in(self.down_proj.weight), residual=True)}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, keep: int = 0
    ) -> tuple[Tensor, State | None]:
        check_call(self, x, segments, state)
        return self.down_proj(self.act(self.up_proj(x))), state


PRESETS = (Preset("relu2", "mlp", {"activation": "relu2"}),)
