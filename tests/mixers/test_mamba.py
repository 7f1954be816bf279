from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtf.core import BuildContext, ConfigError, Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import MambaConfig

D = 12


def build(dtype=torch.float64, d_model=D, **options):
    options = {"d_state": 5, "dt_rank": 3, "chunk_size": 4, **options}
    return MambaConfig(**options).build(BuildContext(d_model=d_model, param_dtype=dtype)).eval()


def redraw(module: nn.Module) -> None:
    """No parameter is left at 0 or 1, so that a forgotten term shows."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            if "A_log" in name:
                p.uniform_(math.log(0.2), math.log(6.0))
            elif p.ndim == 1:
                p.uniform_(0.5, 1.5)
            else:
                p.uniform_(-1, 1).mul_((3 / p[0].numel()) ** 0.5)


def unit(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def by_hand(mixer, u):
    """One row (t d), token by token, from the equations at the top of the module."""
    config, c, n, rank = mixer.config, mixer.d_inner, mixer.config.d_state, mixer.dt_rank
    x, z = mixer.in_proj(u).split([c, c], -1)
    padded = torch.cat([x.new_zeros(config.d_conv - 1, c), x])
    h, rows = torch.zeros(c, n, dtype=u.dtype), []
    for t in range(len(u)):
        conv = (padded[t : t + config.d_conv] * mixer.conv.weight.T).sum(0)
        conv = F.silu(conv + mixer.conv.bias) if mixer.conv.bias is not None else F.silu(conv)
        parts = mixer.x_proj(conv).split([rank, n, n])
        if config.ssm_norm != "none":
            parts = [unit(part, config.eps) for part in parts]
        if config.ssm_norm == "rms":
            norms = (mixer.dt_norm, mixer.b_norm, mixer.c_norm)
            parts = [part * norm.weight for part, norm in zip(parts, norms, strict=True)]
        step = torch.log1p(torch.exp(mixer.dt_proj.weight @ parts[0] + mixer.dt_bias))
        h = torch.exp(-torch.exp(mixer.A_log) * step[:, None]) * h + (step * conv)[:, None] * parts[1]
        rows.append((h @ parts[2] + mixer.D * conv) * F.silu(z[t]))
    return mixer.out_proj(torch.stack(rows))


def assert_same_gradients(got: Tensor, want: Tensor, ours: list[Tensor], theirs: list[Tensor], tol: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=tol)
    weight = torch.randn_like(got)
    found, expected = torch.autograd.grad((got * weight).sum(), ours), torch.autograd.grad((want * weight).sum(), theirs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.view_as(b), b, rtol=0, atol=tol)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"bias": True, "conv_bias": False}, {"d_inner": 7}, {"expand": 1.5, "dt_rank": "auto"}, {"d_conv": 1},
        {"d_conv": 2, "d_state": 1}, {"ssm_norm": "rms", "eps": 0.1}, {"ssm_norm": "weightless", "eps": 0.1},
        {"kernel": "reference", "conv_kernel": "reference"},
    ],
)
def test_forward_and_gradients_equal_the_plain_loop(options):
    mixer = build(**options)
    redraw(mixer)
    u = torch.randn(11, D, dtype=torch.float64, requires_grad=True)
    params = [u, *mixer.parameters()]
    assert_same_gradients(mixer(u[None])[0][0], by_hand(mixer, u), params, params)


# -- transformers --------------------------------------------------------------------------------------------------


def published(name: str, bias: bool, conv_bias: bool):
    """A mixer of transformers in float64, and the options that make ours the same."""
    transformers = pytest.importorskip("transformers")
    if name == "jamba":
        from transformers.models.jamba.modeling_jamba import JambaMambaMixer as Mixer

        config = transformers.JambaConfig(
            hidden_size=D, mamba_d_state=5, mamba_d_conv=3, mamba_expand=2, mamba_dt_rank=3, mamba_conv_bias=conv_bias,
            mamba_proj_bias=bias, rms_norm_eps=0.01, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        )
        more = {"ssm_norm": "rms", "eps": 0.01}
    else:
        shared = {
            "hidden_size": D, "state_size": 5, "conv_kernel": 3, "expand": 2, "time_step_rank": 3, "use_bias": bias,
            "use_conv_bias": conv_bias, "num_hidden_layers": 1,
        }
        if name == "mamba":
            from transformers.models.mamba.modeling_mamba import MambaMixer as Mixer

            config, more = transformers.MambaConfig(**shared), {}
        else:
            from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer as Mixer

            config = transformers.FalconMambaConfig(**shared, mixer_rms_eps=0.01)
            more = {"ssm_norm": "weightless", "eps": 0.01}
    # FalconMamba's would fill its norms before it has made them.
    late = {"initialize_mixer_weights": False} if name == "falcon_mamba" else {}
    mixer = Mixer(config, layer_idx=0, **late).to(torch.float64)
    redraw(mixer)
    return mixer, {"d_conv": 3, "bias": bias, "conv_bias": conv_bias, **more}


RENAMED = {
    "dt_bias": "dt_proj.bias", "conv.weight": "conv1d.weight", "conv.bias": "conv1d.bias",
    "dt_norm.weight": "dt_layernorm.weight", "b_norm.weight": "b_layernorm.weight", "c_norm.weight": "c_layernorm.weight",
}


@pytest.mark.filterwarnings("ignore")  # transformers warns about kernels it does not find
@pytest.mark.parametrize(("bias", "conv_bias"), [(False, True), (True, False)])
@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba"])
def test_equals_the_mixers_of_transformers(name: str, bias: bool, conv_bias: bool) -> None:
    theirs, options = published(name, bias, conv_bias)
    ours = build(**options)
    pairs = {k: dict(theirs.named_parameters())[RENAMED.get(k, k)] for k, _ in ours.named_parameters()}
    assert len(pairs) == len(list(theirs.parameters()))
    ours.load_state_dict({k: v.detach().view_as(ours.get_parameter(k)) for k, v in pairs.items()})
    u = torch.randn(2, 13, D, dtype=torch.float64, requires_grad=True)
    with StrictFloat64():
        want = theirs(u)
        assert_same_gradients(ours(u)[0], want, [u, *ours.parameters()], [u, *pairs.values()])


# -- streams and documents -----------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("norm", ["none", "weightless"])
def test_decoding_equals_one_call(norm: str) -> None:
    mixer = build(ssm_norm=norm)
    u = torch.randn(2, 9, D, dtype=torch.float64)
    whole, _ = mixer(u)
    state, out = mixer.init_state(2), []
    for start, stop in ((0, 4), (4, 5), (5, 6), (6, 9)):
        y, state = mixer(u[:, start:stop], state=state)
        out.append(y)
    torch.testing.assert_close(torch.cat(out, 1), whole, rtol=0, atol=1e-12)
    assert state["ssm"].length.tolist() == [9, 9]
    assert state["ssm"]["h"].shape == (2, mixer.d_inner, 5)


@torch.no_grad()
def test_left_pads_do_not_enter_through_the_biases():
    mixer = build(bias=True)
    for p in (mixer.conv.bias, mixer.in_proj.bias):
        p.fill_(0.5)
    u = torch.randn(1, 6, D, dtype=torch.float64)
    padded = torch.cat([torch.full((1, 5, D), 7.0, dtype=torch.float64), u], 1)
    segments = Segments.from_mask((torch.arange(11) >= 5)[None])
    torch.testing.assert_close(mixer(padded, segments=segments)[0][:, 5:], mixer(u)[0], rtol=0, atol=1e-12)


# -- numbers -------------------------------------------------------------------------------------------------------


def test_starts_where_the_paper_says_in_any_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        mixer = MambaConfig().build(BuildContext(d_model=250, param_dtype=dtype))
        assert (mixer.d_inner, mixer.dt_rank) == (500, 16)
        dt = F.softplus(mixer.dt_bias.detach().float())
        assert 0.0009 < float(dt.min()) < 0.0015
        assert 0.07 < float(dt.max()) < 0.11
        rates = torch.arange(1, 17).log().to(dtype).expand(500, 16)
        assert torch.equal(mixer.A_log, rates)
        assert (mixer.D == 1).all()
        low, high = torch.aminmax(mixer.dt_proj.weight.detach())
        assert -0.25 <= float(low) < -0.24
        assert 0.24 < float(high) <= 0.25
    constant = build(dt_init="constant", dt_scale=2.0, dt_rank=4, dt_floor=0.05)
    assert (constant.dt_proj.weight == 1.0).all()
    assert float(F.softplus(constant.dt_bias.detach()).min()) >= 0.0499


def test_decays_and_time_steps_of_rounded_parameters_are_exact():
    """Parameters are stored in bf16; the exponential and the bias of the time step must not be computed there."""
    mixer = build(torch.float32)
    redraw(mixer)
    with torch.no_grad():
        for p in (mixer.A_log, mixer.dt_bias):
            p.copy_(p.to(torch.bfloat16))
    wide = build(torch.float64)
    wide.load_state_dict(mixer.state_dict())
    u = torch.randn(1, 64, D)
    narrow_state = mixer(u, state=mixer.init_state(1))[1]["ssm"]["h"]
    wide_state = wide(u.double(), state=wide.init_state(1))[1]["ssm"]["h"]
    torch.testing.assert_close(narrow_state.double(), wide_state, rtol=1e-4, atol=1e-6)
    for p in (mixer.A_log, mixer.dt_bias):
        p.data = p.data.to(torch.bfloat16)
    rounded = mixer(u, state=mixer.init_state(1))[1]["ssm"]["h"]
    torch.testing.assert_close(rounded, narrow_state, rtol=1e-5, atol=1e-7)


@torch.no_grad()
@pytest.mark.parametrize("norm", ["none", "rms", "weightless"])
def test_bfloat16_and_autocast_keep_the_state_in_float32(norm: str) -> None:
    exact, low = build(ssm_norm=norm), build(torch.bfloat16, ssm_norm=norm)
    exact.load_state_dict(low.state_dict())
    cast = build(torch.float32, ssm_norm=norm)
    cast.load_state_dict(low.state_dict())
    u = torch.randn(2, 40, D).to(torch.bfloat16)
    want, _ = exact(u.double())
    got, state = low(u, state=low.init_state(2))
    assert (got.dtype, state["ssm"]["h"].dtype, state["conv"]["window"].dtype) == (
        torch.bfloat16, torch.float32, torch.bfloat16,
    )
    with torch.autocast("cpu", torch.bfloat16):
        under, state = cast(u.float(), state=cast.init_state(2))
    assert state["ssm"]["h"].dtype == torch.float32
    for y in (got, under):
        assert float((y.double() - want).norm() / want.norm()) < 0.02


# -- options -------------------------------------------------------------------------------------------------------


def test_roles_of_the_two_fused_projections():
    mixer = build(dt_rank=2, d_inner=7)
    assert mixer.splits == {"in_proj": {"x": 7, "z": 7}, "x_proj": {"dt": 2, "b": 5, "c": 5}}
    for name, widths in mixer.splits.items():
        assert mixer.get_submodule(name).out_features == sum(widths.values())


def test_options_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="dt_range"):
        build(dt_range=(0.1, 0.01))
    with pytest.raises(ConfigError, match="dt_rank"):
        build(dt_rank=0)
    with pytest.raises(ConfigError, match="dt_rank"):
        build(dt_rank="all")
    with pytest.raises(ConfigError, match="leaves no channel"):
        build(expand=0.01)
