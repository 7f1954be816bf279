from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from hybridtf.core import (
    BuildContext,
    ConfigError,
    Context,
    Extras,
    PluginError,
    Segments,
    SequenceMixer,
    SequenceMixerConfig,
)
from hybridtf.models import LanguageModelConfig

ATTENTION = {"mixer": {"type": "attention", "n_heads": 2}, "channel_mixer": {"type": "swiglu", "d_ff": 12}}
MAMBA = {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}}
MLP = {"channel_mixer": {"type": "mlp", "d_ff": 12}}


def config(pattern: str, blocks: dict, **more) -> LanguageModelConfig:
    return LanguageModelConfig(vocab_size=13, d_model=8, pattern=pattern, blocks=blocks, **more)


def build(pattern: str, blocks: dict, **more):
    return config(pattern, blocks, **more).build(BuildContext(d_model=8, param_dtype=torch.float64)).eval()


def _scores(model, x):
    return model.head(model.final_norm(x), tied=model.stem.tied_weight())[0]


def test_pattern_and_filling_star():
    model = build("(m*3 a)*", {"m": MAMBA, "a": ATTENTION}, n_layers=8)
    assert model.stack.layer_names == ("m", "m", "m", "a") * 2
    assert model.config.stacks()[0].pattern == "(m*3 a)*2"


def test_pattern_that_does_not_come_out():
    with pytest.raises(ConfigError, match=r"n_layers"):
        build("(m*3 a)*", {"m": MAMBA, "a": ATTENTION}, n_layers=7)


def test_unused_block_and_unknown_name():
    with pytest.raises(ConfigError, match=r"block 'm' is used by no layer"):
        build("a", {"m": MAMBA, "a": ATTENTION})
    with pytest.raises(ConfigError, match=r"'b'"):
        build("a b", {"a": ATTENTION})


def test_layers_of_only_a_mixer_or_only_a_channel_mixer():
    model = build("m f m f", {"m": MAMBA, "f": MLP})
    assert [list(block.parts()) for block in model.stack.blocks()] == [["mixer"], ["channel_mixer"]] * 2
    assert model(torch.zeros(1, 3, dtype=torch.int64)).logits.shape == (1, 3, 13)


def test_shared_block_is_one_set_of_weights_with_a_state_per_visit():
    shared = build("m s m s", {"m": MAMBA, "s": {**ATTENTION, "shared": True}})
    plain = build("m s m s", {"m": MAMBA, "s": ATTENTION})
    count = lambda model: sum(p.numel() for p in model.parameters())  # noqa: E731
    attention = sum(p.numel() for p in shared.stack.layers["shared_s"].parameters())
    assert count(plain) - count(shared) == attention
    ids = torch.arange(9)[None] % 13
    full = shared(ids).logits
    state = shared.init_state(1)
    assert len(state["layers"]) == 4
    first = shared(ids[:, :4], state=state)
    second = shared(ids[:, 4:], state=first.state)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), full, rtol=0, atol=1e-12)


class WriterConfig(SequenceMixerConfig):
    type: Literal["writer"] = "writer"
    reads: str | None = None

    @classmethod
    def tiny(cls) -> WriterConfig:
        return cls()

    def build(self, ctx: BuildContext) -> Writer:
        return Writer(self, ctx)


class Writer(SequenceMixer):
    """Writes its output as the edge ``trace``, adds the edge that it reads, and has a loss."""

    losses = ("size",)

    def __init__(self, config: WriterConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.proj = nn.Linear(ctx.d_model, ctx.d_model, **ctx.factory)
        self.reads = (config.reads,) if config.reads else ()
        self.writes = ("trace",)

    def init_state(self, batch_size, max_len=None):
        return ()

    def forward(
        self, x, *, segments: Segments | None = None, state=None, context: Context | None = None, keep=0, edges=None
    ):
        y = self.proj(x)
        for edge in self.reads:
            y = y + edges[edge]
        total = y.square().sum()
        return y, state, Extras(edges={"trace": y}, losses={"size": (total, torch.tensor(float(y[..., 0].numel())))})


def test_edges_reach_their_readers_and_losses_add_up():
    model = build("w r", {"w": {"mixer": WriterConfig()}, "r": {"mixer": WriterConfig(reads="trace")}})
    ids = torch.tensor([[1, 2, 3]])
    out = model(ids)
    x = model.stem(ids)[0]
    first, second = model.stack.blocks()
    y1 = first.mixer.proj(first.mixer_norm(x))
    y2 = second.mixer.proj(second.mixer_norm(x + y1)) + y1
    torch.testing.assert_close(out.losses["size"][0], y1.square().sum() + y2.square().sum())
    assert float(out.losses["size"][1]) == 6
    torch.testing.assert_close(out.logits, _scores(model, x + y1 + y2))


@pytest.mark.parametrize("shared", [False, True])
def test_the_embedding_is_an_edge_for_every_layer(shared):
    reader = {"mixer": WriterConfig(reads="embedding"), "shared": shared}
    model = build("m r m r", {"m": MAMBA, "r": reader})
    ids = torch.tensor([[1, 2, 3]])
    x = embedding = model.stem(ids)[0]
    for block in model.stack.blocks():
        normed = block.mixer_norm(x)
        mixed = block.mixer.proj(normed) + embedding if isinstance(block.mixer, Writer) else block.mixer(normed)[0]
        x = x + mixed
    torch.testing.assert_close(model(ids).logits, _scores(model, x))


def test_an_edge_nobody_wrote_is_refused_at_build():
    with pytest.raises(ConfigError, match=r"blocks\.r\.mixer: layer 1 reads the edge 'trce'.*Did you mean 'trace'\?") as error:
        build("w r", {"w": {"mixer": WriterConfig()}, "r": {"mixer": WriterConfig(reads="trce")}})
    assert "embedding" in str(error.value)


def test_an_edge_must_be_written_before_it_is_read():
    with pytest.raises(ConfigError, match="layer 0 reads the edge 'trace'"):
        build("r w", {"w": {"mixer": WriterConfig()}, "r": {"mixer": WriterConfig(reads="trace")}})


@pytest.mark.parametrize("pattern", ["w r", "s m s"])
def test_checkpointed_layers_give_the_same_gradients(pattern):
    blocks = {
        "w": {"mixer": WriterConfig()}, "r": {"mixer": WriterConfig(reads="trace")}, "m": MAMBA,
        "s": {**ATTENTION, "shared": True},
    }
    model = build(pattern, {name: blocks[name] for name in set(pattern.split())})
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 1]])

    def gradients():
        model.zero_grad()
        loss = model.loss(ids, ids, Segments.from_lengths([[2, 3], [5]]))
        (loss.mean() + sum(total / count for total, count in loss.losses.values())).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    plain = gradients()
    model.stack.checkpointed = frozenset(range(len(model.stack.order)))
    for name, grad in gradients().items():
        torch.testing.assert_close(grad, plain[name], rtol=0, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


def test_heads_that_do_not_divide_name_their_place():
    with pytest.raises(ConfigError, match=r"blocks\.a\.mixer: n_heads = 4 is not divisible by n_kv_heads = 3"):
        build("a", {"a": {"mixer": {"type": "attention", "n_heads": 4, "n_kv_heads": 3}}})
    with pytest.raises(ConfigError, match=r"model\.blocks\.a\.mixer: d_model = 8 is not divisible by n_heads = 3"):
        build("a", {"a": {"mixer": {"type": "attention", "n_heads": 3}}})


def test_residual_matrices_start_scaled_or_silent():
    blocks = {"a": ATTENTION}
    deep, silent = build("a*8", blocks), build("a*8", blocks, residual_init="zero")
    out = deep.stack.blocks()[0].mixer.out_proj.weight
    assert float(out.detach().std()) == pytest.approx(8**-0.5 * 16**-0.5, rel=0.3)
    assert float(silent.stack.blocks()[0].mixer.out_proj.weight.detach().abs().max()) == 0
    ids = torch.tensor([[1, 2]])
    torch.testing.assert_close(silent(ids).logits, _scores(silent, silent.stem(ids)[0]))


def test_a_mesh_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="device mesh"):
        config("a", {"a": ATTENTION}).build(BuildContext(d_model=8, mesh=object()))


def test_a_mixer_that_forgets_its_state_is_named(monkeypatch):
    model = build("a", {"a": ATTENTION})
    mixer = type(model.stack.blocks()[0].mixer)
    forward = mixer.forward
    monkeypatch.setattr(mixer, "forward", lambda self, x, **k: (forward(self, x, **k)[0], None))
    model(torch.tensor([[1, 2, 3]]))
    with pytest.raises(PluginError, match=r"model\.blocks\.a\.mixer: .* was given a state and returned none"):
        model(torch.tensor([[1, 2, 3]]), state=model.init_state(1))


def test_a_config_that_builds_something_else_is_named(monkeypatch):
    monkeypatch.setattr(WriterConfig, "build", lambda self, ctx: 5)
    with pytest.raises(PluginError, match=r"blocks\.w\.mixer: 'writer' .*must build a SequenceMixer; it built int"):
        build("w", {"w": {"mixer": WriterConfig()}})


def test_a_mixer_that_returns_another_shape_is_named(monkeypatch):
    model = build("w", {"w": {"mixer": WriterConfig()}})
    forward = Writer.forward
    monkeypatch.setattr(Writer, "forward", lambda self, x, **k: (forward(self, x, **k)[0][:, 1:], None, Extras()))
    message = r"model\.blocks\.w\.mixer: 'writer' returned shape \(1, 2, 8\) for an input of \(1, 3, 8\)"
    with pytest.raises(PluginError, match=message):
        model(torch.tensor([[1, 2, 3]]))
