"""``moe`` against transformers' blocks with the same weights: outputs, every gradient, the balancing loss; in float64."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hybridtf.channel_mixers import MoEConfig
from hybridtf.core import BuildContext, Segments
from hybridtf.interop.strict import StrictFloat64

transformers = pytest.importorskip("transformers", reason="parity needs transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns about kernels it does not find

D, F_ = 12, 10


class Case(NamedTuple):
    """``module`` and ``block``: where transformers has it; ``theirs`` and ``ours``: options of both."""

    module: str
    block: str
    config: str
    theirs: dict[str, Any]
    ours: dict[str, Any]


QWEN = {"hidden_size": D, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": F_}
DEEPSEEK = {"hidden_size": D, "n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": F_, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2}
GROUPED = {"n_experts": 8, "top_k": 3, "d_ff": F_, "n_groups": 4, "top_k_groups": 2, "routed_scale": 2.5}
NEMOTRON = {**DEEPSEEK, "moe_shared_expert_intermediate_size": 14, "mlp_hidden_act": "relu2", "layers_block_type": ["moe"]}
PLAIN = {**GROUPED, "scores": "sigmoid", "selection_bias": "fixed", "group_score": "top2", "gated": False,
         "activation": "relu2", "d_ff_shared": 14}

CASES = {
    "mixtral": Case("mixtral", "MixtralSparseMoeBlock", "MixtralConfig",
                    {"hidden_size": D, "intermediate_size": F_, "num_local_experts": 5, "num_experts_per_tok": 2},
                    {"n_experts": 5, "top_k": 2, "d_ff": F_}),
    "jamba": Case("jamba", "JambaSparseMoeBlock", "JambaConfig",
                  {"hidden_size": D, "intermediate_size": F_, "num_experts": 4, "num_experts_per_tok": 2},
                  {"n_experts": 4, "top_k": 2, "d_ff": F_, "normalize": False}),
    "qwen2_moe": Case("qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeConfig",
                      {**QWEN, "shared_expert_intermediate_size": 14, "norm_topk_prob": False},
                      {"n_experts": 6, "top_k": 3, "d_ff": F_, "normalize": False, "d_ff_shared": 14, "shared_gate": True}),
    "qwen3_moe": Case("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", {**QWEN, "norm_topk_prob": True},
                      {"n_experts": 6, "top_k": 3, "d_ff": F_}),
    "olmoe": Case("olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig",
                  {"hidden_size": D, "intermediate_size": F_, "num_experts": 6, "num_experts_per_tok": 3},
                  {"n_experts": 6, "top_k": 3, "d_ff": F_, "normalize": False}),
    "gpt_oss": Case("gpt_oss", "GptOssMLP", "GptOssConfig",
                    {"hidden_size": D, "intermediate_size": F_, "num_local_experts": 5, "num_experts_per_tok": 2},
                    {"type": "gpt_oss_moe", "n_experts": 5, "top_k": 2, "d_ff": F_}),
    "granitemoehybrid": Case("granitemoehybrid", "GraniteMoeHybridMoE", "GraniteMoeHybridConfig",
                             {"hidden_size": D, "intermediate_size": F_, "num_local_experts": 5, "num_experts_per_tok": 2,
                              "mamba_n_heads": 4, "mamba_d_head": 6},
                             {"n_experts": 5, "top_k": 2, "d_ff": F_, "scores": "softmax_top_k"}),
    "deepseek_v2": Case("deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config",
                        {**DEEPSEEK, "num_experts": 8, "num_attention_heads": 2, "topk_method": "group_limited_greedy"},
                        {**GROUPED, "normalize": False, "d_ff_shared": 2 * F_}),
    "deepseek_v3": Case("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config", DEEPSEEK,
                        {"type": "deepseek_moe", **GROUPED, "d_ff_shared": 2 * F_}),
    "nemotron_h": Case("nemotron_h", "NemotronHMoE", "NemotronHConfig", NEMOTRON, PLAIN),
    "nemotron_h latent": Case("nemotron_h", "NemotronHMoE", "NemotronHConfig", {**NEMOTRON, "moe_latent_size": 6},
                              {**PLAIN, "d_latent": 6}),
    "lfm2_moe": Case("lfm2_moe", "Lfm2MoeSparseMoeBlock", "Lfm2MoeConfig",
                     {**QWEN, "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
                     {"n_experts": 6, "top_k": 3, "d_ff": F_, "scores": "sigmoid", "selection_bias": "fixed",
                      "norm_eps": 1e-6, "routed_scale": 1.5}),
    "llama4": Case("llama4", "Llama4TextMoe", "Llama4TextConfig",
                   {"hidden_size": D, "intermediate_size": F_, "num_local_experts": 5, "num_experts_per_tok": 2},
                   {"n_experts": 5, "top_k": 2, "d_ff": F_, "scores": "sigmoid", "normalize": False,
                    "weights_on": "input", "d_ff_shared": F_}),
}


def reference(case: Case) -> nn.Module:
    found = importlib.import_module(f"transformers.models.{case.module}.modeling_{case.module}")
    config = getattr(transformers, case.config)(**case.theirs)
    config._experts_implementation = "eager"
    block = getattr(found, case.block)(config).to(torch.float64).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, value in [*block.named_parameters(), *block.named_buffers()]:
            # The router's logits, gpt-oss's gate and its bound of 7 shall all matter.
            size = 6.0 if "experts.gate_up" in name and case.module == "gpt_oss" else 0.6
            value.copy_(size * torch.randn(value.shape, generator=generator, dtype=torch.float64))
    return block


def ours_of(theirs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """Their tensors (weights, or gradients of weights) under our names."""
    out: dict[str, Tensor] = {}
    for name, value in theirs.items():
        last = name.rsplit(".", 1)[-1]
        if name in ("experts.gate_up_proj", "experts.gate_up_proj_bias"):
            bias = name.endswith("bias")
            if case.module == "gpt_oss":
                gate, up = value[..., ::2], value[..., 1::2]
            elif case.module == "llama4":
                gate, up = value.chunk(2, -1)
            else:
                gate, up = (part.transpose(1, 2) for part in value.chunk(2, 1))
            end = "_bias" if bias else ""
            out[f"experts.gate_proj{end}"], out[f"experts.up_proj{end}"] = gate, up
        elif name in ("experts.up_proj", "experts.down_proj"):
            out[name] = value if case.module in ("gpt_oss", "llama4") else value.transpose(1, 2)
        elif name == "experts.down_proj_bias":
            out[name] = value
        elif name.startswith(("gate.", "router.")) and last in ("weight", "bias"):
            out[f"router.{last}"] = value
        elif last in ("e_score_correction_bias", "expert_bias"):
            out["selection.bias"] = value
        elif name == "shared_expert_gate.weight":
            out["shared_gate.weight"] = value
        elif name.startswith(("shared_expert.", "shared_experts.")):
            out["shared." + name.split(".", 1)[1]] = value
        else:
            new = {"fc1_latent_proj.weight": "latent_in.weight", "fc2_latent_proj.weight": "latent_out.weight"}
            out[new[name]] = value
    return out


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name):
    case = CASES[name]
    from hybridtf.core import active

    block = reference(case)
    config = active()["channel_mixers"].make({"type": "moe", **case.ours})
    mixer = config.build(BuildContext(d_model=D, param_dtype=torch.float64))
    mixer.load_state_dict({k: v.contiguous() for k, v in ours_of(dict(block.state_dict()), case).items()})
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, 17, D, generator=generator, dtype=torch.float64)
    probe = torch.randn(3, 17, D, generator=generator, dtype=torch.float64)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with StrictFloat64():
        want = block(theirs)
        want = want[0] if isinstance(want, tuple) else want
        want = want.reshape(x.shape)
        (want * probe).sum().backward()
    y, _ = mixer(mine)
    (y * probe).sum().backward()
    torch.testing.assert_close(y, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-10)
    grads = ours_of({n: p.grad for n, p in block.named_parameters()}, case)
    found = {n: p.grad for n, p in mixer.named_parameters() if p.requires_grad}
    assert grads.keys() == found.keys()
    for n, grad in grads.items():
        assert bool(grad.any()), n
        torch.testing.assert_close(found[n], grad, rtol=1e-9, atol=1e-9, msg=n)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_balancing_loss(name, padded):
    case = CASES[name]
    found = importlib.import_module(f"transformers.models.{case.module}.modeling_{case.module}")
    options = {**case.ours, "type": "moe", "balance_loss": 1.0, "balance_over": "call"}
    config = MoEConfig(**options)
    mixer = config.build(BuildContext(d_model=D, param_dtype=torch.float64))
    x = torch.randn(3, 11, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mask = torch.ones(3, 11, dtype=torch.int64)
    if padded:
        mask[0, :4], mask[1, 9:], mask[2] = 0, 0, 0
    segments = Segments.from_mask(mask) if padded else None
    total, count = mixer(x, segments=segments)[2].losses["balance"]
    with StrictFloat64():
        logits = mixer.router(x.flatten(0, 1))
        want = found.load_balancing_loss_func(
            (logits,), config.n_experts, config.top_k, mask if padded else None
        )
    assert int(count) == int(mask.sum())
    torch.testing.assert_close(total / count, want, rtol=1e-12, atol=0)
    grads = [torch.autograd.grad(v, mixer.router.weight, retain_graph=True)[0] for v in (total / count, want)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)
