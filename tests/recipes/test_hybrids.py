"""The folder ``hybrids``: published designs side by side, equal in parameters, so that a comparison compares the designs."""

import pytest
import torch

from hybridtf.core import BuildContext
from hybridtf.models import LanguageModel, LanguageModelConfig
from hybridtf.recipe import load_recipe, recipe_names

HYBRIDS = sorted(name for name in recipe_names() if name.startswith("hybrids/"))


def config_of(name: str) -> LanguageModelConfig:
    model = load_recipe(name).model
    assert isinstance(model, LanguageModelConfig)
    return model


def n_params(name: str) -> int:
    model = config_of(name).build(BuildContext(d_model=0, device=torch.device("meta")))
    return sum(param.numel() for param in model.parameters())


def test_all_have_the_same_number_of_parameters_within_a_hundredth() -> None:
    sizes = {name: n_params(name) for name in HYBRIDS}
    assert len(sizes) >= 4
    assert max(sizes.values()) <= 1.01 * min(sizes.values()), sizes


def test_all_are_trained_alike() -> None:
    first, *others = [load_recipe(name) for name in HYBRIDS]
    for other in others:
        assert (other.task, other.train) == (first.task, first.train)


@pytest.mark.parametrize("name", HYBRIDS)
def test_each_says_where_it_is_from(name: str) -> None:
    assert "https://" in recipe_names()[name].read_text().split("[meta]")[0]


def test_ratios_are_those_of_the_papers() -> None:
    kinds = {}
    for name in HYBRIDS:
        config = config_of(name)
        kinds[name] = [config.blocks[layer].mixer.type_name() for layer in config.layers()]  # type: ignore[attr-defined]
    assert kinds["hybrids/jamba"] == ["mamba"] * 4 + ["attention"] + ["mamba"] * 3
    assert kinds["hybrids/griffin"] == (["griffin_recurrent"] * 2 + ["attention"]) * 2 + ["griffin_recurrent"] * 2
    assert kinds["hybrids/samba"] == ["mamba", "attention"] * 4
    jamba = config_of("hybrids/jamba")
    experts = [jamba.blocks[layer].channel_mixer.type_name() == "moe" for layer in jamba.layers()]  # type: ignore[attr-defined]
    assert experts == [False, True] * 4


@pytest.mark.parametrize("name", HYBRIDS)
def test_each_learns(name: str) -> None:
    model: LanguageModel = config_of(name).build()
    tokens = torch.randint(257, (2, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
