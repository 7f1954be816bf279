import pytest

from hybridtf.core import RecipeError
from hybridtf.recipe import load_recipe, parse_recipe, recipe_schema, to_toml
from hybridtf.train import MuonOptions, RoleOptions, TrainConfig, train_config
from tests.train.runs import recipe, table


def faults(**options):
    with pytest.raises(RecipeError) as caught:
        TrainConfig(**options)
    return dict(caught.value.faults)


def test_unknown_option_is_refused_with_the_nearest():
    found = faults(steps=1, warm_up=3)
    assert "unknown option. Did you mean 'warmup'?" in found["warm_up"]


def test_unknown_option_of_a_role_is_answered_with_its_own_names():
    found = faults(steps=1, roles={"embedding": {"lr_sclae": 0.1}})
    assert "Did you mean 'lr_scale'? Known: lr_scale, weight_decay" in found["roles.embedding.lr_sclae"]


def test_unknown_role_is_refused():
    (message,) = faults(steps=1, roles={"embeding": {}}).values()
    assert "embedding" in message


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "none of them"), ({"steps": 1, "tokens": 5}, "steps and tokens"),
        ({"epochs": 1, "steps": 2}, "steps and epochs"),
    ],
)
def test_the_length_is_said_once(given, words):
    (message,) = faults(**given).values()
    assert "exactly one of steps, tokens and epochs" in message
    assert words in message


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", 0.0), ("lr", float("nan")), ("batch_size", 0), ("seq_len", -1), ("betas", (0.9, 1.0)), ("warmup", 2.5),
        ("precision", "fp8"), ("schedule", "cosin"), ("min_lr_fraction", 1.5), ("checkpoint_layers", "some"),
        ("checkpoint_layers", 0), ("checkpoint_layers", (-1,)), ("checkpoint_layers", True), ("clip_norm", -1.0),
        ("eval_tokens", -1), ("eval_tokens", None), ("eval_tokens", True), ("eval_tokens", "al"),
        ("loss_weights", {"router": float("inf")}), ("lr", "1e-3"),
    ],
)
def test_wrong_values_are_refused(option, value):
    assert faults(**{"steps": 1, option: value})


def test_how_much_is_evaluated():
    assert [TrainConfig(steps=1, **given).eval_tokens for given in ({}, {"eval_tokens": "all"}, {"eval_tokens": 0})] == [
        100_000, "all", 0,
    ]
    message = faults(steps=1, eval_tokens="al")["eval_tokens"]
    assert "must be 'all' or a number of tokens (0: no evaluation), got 'al'" in message


def test_all_faults_come_together_with_their_path(tmp_path):
    wrong = table(tmp_path, lr=-1.0, schedule="cosin", batchsize=2)
    wrong["model"]["d_modle"] = 3
    with pytest.raises(RecipeError) as caught:
        parse_recipe(wrong, sections={"train": TrainConfig})
    text = str(caught.value)
    for words in ("train.lr: ", "train.schedule: ", "'cosine'", "train.batchsize: unknown option", "model.d_modle"):
        assert words in text


def test_round_trip_with_every_option_away_from_its_default(tmp_path):
    roles = {"embedding": RoleOptions(lr_scale=2.0, weight_decay=0.0), "norm": {"weight_decay": 0.5}}
    config = TrainConfig(
        epochs=1.5, batch_size=3, seq_len=17, accumulation=2, lr=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2,
        roles=roles, optimizer_form="loop", clip_norm=0.5, loss_weights={"router": 0.1}, schedule="wsd", warmup=7,
        min_lr_fraction=0.3, decay_fraction=0.4, precision="bf16", checkpoint_layers=[0, 1], compile=True, seed=5,
        log_every=3, eval_every=4, eval_tokens=9, eval_context="document", save_every=11, keep_checkpoints=5,
        optimizer="muon", muon={"lr": 0.02, "scale": "original", "ns_coefficients": [3.0, -3.2, 1.2]}, max_shard_bytes=9,
        ema_decay=0.9, ema_every=3, eval_ema=True, stats_every=7, sinks=["wandb", "trackio"],
        stop_at=0.5, stop_every=3, teacher={"run": "runs/other", "hidden": 0.0, "layers": [1], "trains": "replaced"},
    )
    default = TrainConfig(epochs=1)
    same = {name for name in TrainConfig.model_fields if getattr(config, name) == getattr(default, name)}
    assert same == {"steps", "tokens"}
    made = recipe(tmp_path).model_copy(update={"train": config})
    (tmp_path / "recipe.toml").write_text(to_toml(made))
    assert load_recipe(tmp_path / "recipe.toml", sections={"train": TrainConfig}).train == config


def test_a_plain_table_is_taken_and_a_missing_one_refused(tmp_path):
    plain = parse_recipe(table(tmp_path, steps=3))
    assert train_config(plain).steps == 3
    with pytest.raises(RecipeError, match=r"train: the recipe has no section \[train\]"):
        train_config(plain.model_copy(update={"train": None}))
    with pytest.raises(RecipeError, match=r"train\.lr"):
        train_config(plain.model_copy(update={"train": {"steps": 1, "lr": -1.0}}))


def test_the_schema_has_every_option():
    table = recipe_schema({"train": TrainConfig})["properties"]["train"]
    assert set(table["properties"]) == set(TrainConfig.model_fields)
    assert table["additionalProperties"] is False
    choices = str(table["properties"]["checkpoint_layers"])
    assert all(word in choices for word in ("'none'", "'all'", "integer", "array"))
    assert all(word in str(table["properties"]["eval_tokens"]) for word in ("'all'", "integer", "100000"))


@pytest.mark.parametrize(("options", "words"), [
    ({"muon": {"lr": 0.1}}, "muon gives options of Muon, and optimizer is 'adamw'"),
    ({"optimizer": "muon", "muon": {"momentun": 0.9}}, "Did you mean 'momentum'"),
    ({"optimizer": "muon", "muon": {"momentum": 1.0}}, "muon.momentum"),
    ({"stop_every": 10}, "give stop_at"), ({"stop_at": float("nan")}, "stop_at"),
    ({"eval_ema": True}, "give ema_decay"), ({"ema_every": 2}, "give ema_decay"), ({"ema_decay": 1.0}, "ema_decay"),
    ({"sinks": ["wandb", "wandb"]}, "names one twice"), ({"sinks": ["mlflow"]}, "tensorboard"),
])
def test_options_that_make_no_sense(options, words):
    with pytest.raises(RecipeError, match=words):
        TrainConfig(steps=1, **options)


def test_muon_without_options_has_the_defaults_and_shows_them():
    config = TrainConfig(steps=1, optimizer="muon")
    assert config.muon == MuonOptions()
    assert config.to_dict()["muon"]["ns_steps"] == 5
    assert TrainConfig(steps=1).muon is None
