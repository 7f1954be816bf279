import pytest

from hybridtf.core import ConfigError
from hybridtf.train.recompute import chosen_layers, set_checkpointed
from tests.train.runs import assert_equal_weights, build, recipe, run


def test_which_layers_are_meant():
    assert chosen_layers("none", 5) == frozenset()
    assert chosen_layers("all", 3) == {0, 1, 2}
    assert chosen_layers(2, 5) == {0, 2, 4}
    assert chosen_layers((4, 1), 5) == {1, 4}


def test_a_layer_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="names layer 2; the model has layers 0 to 1"):
        set_checkpointed(build(recipe(tmp_path)), (2,))


def test_the_trained_weights_are_the_same_with_dropout_on(tmp_path):
    plain = run(recipe(tmp_path), tmp_path / "plain")
    again = run(recipe(tmp_path, checkpoint_layers="all"), tmp_path / "again")
    assert again.model.stack.checkpointed == {0, 1}
    assert_equal_weights(plain.model, again.model)
