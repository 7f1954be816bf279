"""Adapters of a shared block: what each layer adds of its own."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from hybridtf.core import BuildContext, ConfigError, Segments, raw_weight
from hybridtf.models import LanguageModelConfig
from hybridtf.models.visits import Visit
from hybridtf.models.weights import load_weights, save_weights
from hybridtf.recipe import Recipe, load_recipe, to_toml
from hybridtf.train.nonfinite import locate

MAMBA = {"mixer": {"type": "mamba2", "d_state": 4, "head_dim": 4}}
ON = ["mixer.q_proj", "mixer.out_proj", "channel_mixer.up_proj"]
SHARED = {
    "mixer": {"type": "attention", "n_heads": 2}, "channel_mixer": {"type": "swiglu", "d_ff": 12}, "shared": True,
}
IDS = torch.randint(0, 13, (2, 9), generator=torch.Generator().manual_seed(0))


def config(pattern: str = "m s m s", **adapters) -> LanguageModelConfig:
    options = {"rank": 3, "on": ON, **adapters}
    blocks = {"m": MAMBA, "s": {**SHARED, "adapters": options} if options["on"] else SHARED}
    blocks = {name: block for name, block in blocks.items() if name in pattern.split()}
    return LanguageModelConfig(vocab_size=13, d_model=8, pattern=pattern, blocks=blocks)


def build(pattern: str = "m s m s", *, nudged: bool = True, seed: int = 0, dtype=torch.float64, **adapters):
    model = config(pattern, **adapters).build(BuildContext(d_model=8, param_dtype=dtype, seed=seed)).eval()
    if nudged:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in model.parameters():
                p.add_((0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p))
    return model


def merged(model, layer: int) -> nn.Module:
    """A copy of the shared block with a layer's adapters added to its weights."""
    block = copy.deepcopy(model.stack.layers["shared_s"])
    with torch.no_grad():
        for path in ON:
            pair = model.stack.layers[str(layer)].adapters[path.replace(".", "_")]
            block.get_submodule(path).weight.add_(pair.up.weight @ pair.down.weight)
    return block


def by_hand(model, ids, segments=None):
    x = model.stem(ids)[0]
    edges = {"embedding": x, "token_ids": ids}
    for i, key in enumerate(model.stack.order):
        block = merged(model, i) if key == "shared_s" else model.stack.layers[key]
        x = block(x, edges, segments=segments).x
    return model.head(model.final_norm(x), tied=model.stem.tied_weight())[0]


@pytest.mark.parametrize("packed", [False, True])
def test_each_visit_is_the_block_with_its_own_matrices_added(packed):
    model = build()
    segments = Segments.from_lengths([[4, 5], [9]]) if packed else None
    torch.testing.assert_close(model(IDS, segments=segments).logits, by_hand(model, IDS, segments), rtol=0, atol=1e-12)


def test_gradients_are_those_of_the_sum():
    model = build("s s")
    weights = torch.randn(2, 9, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (model(IDS).logits * weights).sum().backward()

    # The same network with every projection's effective weight written out.
    twin = build("s s")
    block, parts = twin.stack.layers["shared_s"], dict(twin.named_parameters())

    def run(tensors):
        x = twin.stem(IDS)[0]
        for i in range(2):
            changed = {}
            for path in ON:
                name = f"stack.layers.{i}.adapters.{path.replace('.', '_')}"
                product = tensors[f"{name}.up.weight"] @ tensors[f"{name}.down.weight"]
                changed[f"{path}.weight"] = tensors[f"stack.layers.shared_s.{path}.weight"] + product
            x = torch.func.functional_call(block, changed, (x, {})).x
        return twin.head(twin.final_norm(x), tied=twin.stem.tied_weight())[0]

    reference = run(parts)
    torch.testing.assert_close(model(IDS).logits, reference, rtol=0, atol=1e-12)
    found = torch.autograd.grad((reference * weights).sum(), list(parts.values()))
    for (name, p), grad in zip(model.named_parameters(), found, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_adapters_change_nothing_at_the_start():
    plain, adapted = build(on=(), nudged=False), build(nudged=False)
    assert torch.equal(plain(IDS).logits, adapted(IDS).logits)
    names = set(dict(adapted.named_parameters())) - set(dict(plain.named_parameters()))
    assert names == {
        f"stack.layers.{i}.adapters.{path}.{side}.weight"
        for i in (1, 3) for path in ("mixer_q_proj", "mixer_out_proj", "channel_mixer_up_proj") for side in ("down", "up")
    }
    assert set(adapted.state_dict()) - set(plain.state_dict()) == names
    down = [adapted.get_parameter(f"stack.layers.{i}.adapters.mixer_q_proj.down.weight") for i in (1, 3)]
    assert down[0].any()
    assert not torch.equal(*down)
    assert down[0].shape == (3, 8)


def test_a_visits_gradient_reaches_its_own_adapters_only():
    model = build("s s s")
    x, edges = model.stem(IDS)[0].detach(), {}
    for i in range(3):
        model.zero_grad()
        model.stack.visit(i)(x, edges).x.square().sum().backward()
        for j in range(3):
            grads = [p.grad for p in model.stack.layers[str(j)].parameters()]
            assert all((g is not None and bool(g.any())) == (i == j) for g in grads)
        assert model.stack.layers["shared_s"].mixer.q_proj.weight.grad.any()


def test_state_is_kept_per_visit():
    model = build()
    full = model(IDS).logits
    state, got = model.init_state(2), []
    assert len(state["layers"]) == 4
    for chunk in IDS.split([4, 1, 1, 3], 1):
        out = model(chunk, state=state)
        state, got = out.state, [*got, out.logits]
    torch.testing.assert_close(torch.cat(got, 1), full, rtol=0, atol=1e-12)


def test_checkpointed_layers_give_the_same_gradients():
    model = build()
    segments = Segments.from_lengths([[2, 7], [9]])

    def gradients():
        model.zero_grad()
        model.loss(IDS, IDS, segments).mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    plain = gradients()
    model.stack.checkpointed = frozenset(range(4))
    for name, grad in gradients().items():
        torch.testing.assert_close(grad, plain[name], rtol=0, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


def test_the_shared_block_is_left_as_it_was():
    model = build()
    block = model.stack.layers["shared_s"]
    before = {name: id(part) for name, part in block.named_modules()}
    seen = []
    handle = block.mixer.q_proj.register_forward_hook(lambda module, *_: seen.append(module))
    model(IDS)
    handle.remove()
    assert seen == [block.mixer.q_proj] * 2
    assert {name: id(part) for name, part in block.named_modules()} == before
    assert raw_weight(block.mixer.q_proj) is block.mixer.q_proj.weight
    view = model.stack.layers["1"].view(block)
    assert raw_weight(view.mixer.q_proj) is None
    assert raw_weight(view.mixer.k_proj) is block.mixer.k_proj.weight


def test_mode_dtype_and_hooks_of_the_block_are_those_of_now():
    model = build()
    block = model.stack.layers["shared_s"]
    block.mixer.eval()
    block.train()
    assert model.stack.layers["1"].view(block).mixer.training
    assert model.float()(IDS).logits.dtype == torch.float32
    calls = []
    block.mixer.register_forward_pre_hook(lambda *_: calls.append(1))
    model(IDS)
    assert len(calls) == 2


def test_threads_do_not_meet():
    model = build()
    want = model(IDS).logits
    got: list[torch.Tensor] = []

    def work():
        with torch.no_grad():
            got.extend(model(IDS).logits for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 40
    assert all(torch.equal(y, want) for y in got)


def test_files_and_copies(tmp_path):
    model = build()
    save_weights(model, tmp_path / "w.safetensors")
    other = build(seed=3)
    load_weights(other, tmp_path / "w.safetensors")
    for again in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_meta_then_filled_equals_a_build():
    made = config().build(BuildContext(d_model=8, device=torch.device("meta"), param_dtype=torch.float64))
    made = made.to_empty(device="cpu")
    made.reset_parameters()
    plain = build(nudged=False)
    for name, p in plain.named_parameters():
        assert torch.equal(p, made.get_parameter(name)), name


def test_compiled_whole():
    model = build("s s")
    counter = CompileCounter()
    compiled = torch.compile(lambda ids: model.stack(model.stem(ids)[0], {}).x, backend=counter, fullgraph=True)
    for function in (compiled, compiled):
        want = model.stack(model.stem(IDS)[0], {}).x
        torch.testing.assert_close(function(IDS), want, rtol=0, atol=1e-12)
    grads = [
        torch.autograd.grad(run(IDS).square().sum(), list(model.stack.parameters()))
        for run in (compiled, lambda ids: model.stack(model.stem(ids)[0], {}).x)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_compiled_part_of_the_block_does_not_lose_the_adapters():
    model = build("s s")
    want = model(IDS).logits
    model.stack.layers["shared_s"].mixer.compile(backend="eager")
    model.stack.layers["shared_s"].compile(backend="eager")
    torch.testing.assert_close(model(IDS).logits, want, rtol=0, atol=1e-12)
    torch._dynamo.reset()


def test_what_adapters_cannot_reach_is_refused():
    model = build("s s")
    block = model.stack.layers["shared_s"]
    forward = block.mixer.forward
    block.mixer.forward = lambda *args, **options: forward(*args, **options)
    with pytest.raises(ConfigError, match=r"blocks\.s\.adapters: Attention\.forward was replaced on the module itself"):
        model(IDS)
    del block.mixer.forward
    block.mixer = nn.Sequential(block.mixer)
    with pytest.raises(ConfigError, match=r"the shared block no longer has 'mixer\.q_proj'"):
        model(IDS)


@pytest.mark.filterwarnings("ignore")  # peft warns about tied weights and configs it does not find
def test_low_rank_adapters_of_a_library_on_top():
    peft = pytest.importorskip("peft")
    model = build(dtype=torch.float32)
    plain = model(IDS).logits
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    wrapped = peft.inject_adapter_in_model(options, model)
    replaced = [name for name, part in model.named_modules() if isinstance(part, peft.tuners.lora.Linear)]
    assert replaced == ["stack.layers.shared_s.mixer.q_proj", "stack.layers.shared_s.channel_mixer.up_proj"]
    out = wrapped(IDS).logits
    assert not torch.allclose(out, plain)
    out.square().sum().backward()
    lora = {name: p for name, p in wrapped.named_parameters() if "lora_" in name}
    assert len(lora) == 4
    assert all(bool(p.grad.any()) for p in lora.values())
    for part in list(wrapped.modules()):
        if isinstance(part, peft.tuners.lora.Linear):
            part.merge()
    torch.testing.assert_close(wrapped(IDS).logits, out, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on": ["mixer.q_prj"]}, r"blocks\.s\.adapters: no projection named 'mixer.q_prj'.*Did you mean 'mixer.q_proj'"),
        ({"on": ["mixer"]}, "no projection named 'mixer'"),
        ({"on": ["mixer.q_proj", "mixer.q_proj"]}, "names 'mixer.q_proj' twice"),
        ({"rank": 0}, "rank"),
    ],
)
def test_faults(options, message):
    with pytest.raises(ConfigError, match=message):
        build(**options)


def test_adapters_need_a_shared_block():
    block = {**SHARED, "shared": False, "adapters": {"rank": 2, "on": ["mixer.q_proj"]}}
    with pytest.raises(ConfigError, match=r"blocks\.s\.adapters: .*they need shared = true"):
        LanguageModelConfig(vocab_size=13, d_model=8, pattern="s s", blocks={"s": block}).build()


def test_names_that_would_meet_are_refused():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a_b = nn.Linear(2, 2)
            self.a = nn.Module()
            self.a.b = nn.Linear(2, 2)

    adapters = config(on=["a.b", "a_b"]).blocks["s"].adapters
    with pytest.raises(ConfigError, match=r"the names of 'a_b' and 'a.b' are the same"):
        Visit(adapters, Odd(), BuildContext(d_model=2, where="here"))


def test_recipes_round_trip(tmp_path):
    recipe = Recipe(model=config())
    file = tmp_path / "r.toml"
    file.write_text(to_toml(recipe))
    assert load_recipe(str(file)).model == recipe.model


def test_a_value_that_is_not_finite_is_found_in_the_shared_block():
    model = build(dtype=torch.float32)
    with torch.no_grad():
        model.stack.layers["shared_s"].mixer.k_proj.weight.fill_(float("nan"))
    words = locate(model, lambda: model(IDS))
    assert "stack.layers.shared_s.mixer.k_proj (Linear): its weight is not finite" in words
    model = build(dtype=torch.float32)
    with torch.no_grad():
        model.stack.layers["3"].adapters["mixer_q_proj"].up.weight.fill_(float("nan"))
    assert "stack.layers.3.adapters.mixer_q_proj.up (Linear): its weight is not finite" in locate(model, lambda: model(IDS))


def test_a_router_can_be_adapted():
    moe = {"type": "moe", "n_experts": 4, "top_k": 2, "d_ff": 6, "router_bias": True}
    blocks = {"s": {"channel_mixer": moe, "shared": True, "adapters": {"rank": 2, "on": ["channel_mixer.router"]}}}
    model = LanguageModelConfig(vocab_size=13, d_model=8, pattern="s*2", blocks=blocks).build(
        BuildContext(d_model=8, param_dtype=torch.float64)
    )
    plain = model(IDS).logits
    with torch.no_grad():
        model.stack.layers["1"].adapters["channel_mixer_router"].up.weight.normal_()
    assert not torch.equal(model(IDS).logits, plain)
    pair = model.stack.layers["1"].adapters["channel_mixer_router"]
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    block = copy.deepcopy(model.stack.layers["shared_s"])
    with torch.no_grad():
        block.channel_mixer.router.weight.add_(pair.up.weight @ pair.down.weight)
    want = block(x, {}).x
    torch.testing.assert_close(model.stack.layers["1"](model.stack.layers["shared_s"], x, {}).x, want, rtol=1e-12, atol=1e-12)
