"""The hooks fit the installed Keras and change nothing for models without a strategy."""

import inspect
import json
import re

import keras
import numpy as np
import pytest

import distributary as dist
from distributary.devices import missing_names
from distributary.errors import UnsupportedError
from distributary.keras_bridge import _hooks, connect
from distributary.keras_bridge._keras_private import find
from tests.keras_bridge import small

_PLACES = [(owner, name) for owner, name, _ in _hooks.HOOKS]
_METHODS = [(owner, name) for owner, name, _ in _hooks.METHODS]


def _train():
    random = np.random.default_rng(0)
    x = random.normal(size=(12, 3)).astype("float32")
    y = random.normal(size=(12, 1)).astype("float32")
    keras.utils.set_random_seed(0)
    layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile("sgd", "mse", metrics=["mae"])
    options = {"sample_weight": abs(y[:, 0]), "validation_split": 0.34, "epochs": 2}
    history = model.fit(x, y, batch_size=4, verbose=0, **options).history
    history["predict"] = model.predict(x, batch_size=4, verbose=0).tolist()
    history["weights"] = [w.tolist() for w in model.get_weights()]
    return history


_REPORT = """
history = _train()
assert not [name for name in sys.modules if name.startswith("distributary")]
print(json.dumps(history))
"""


def test_this_version_of_keras_has_every_name():
    """Says which names of Keras have gone, all at once."""
    gone = [name for name in missing_names if name.startswith("keras.")]
    for owner, name in (*_PLACES, *_METHODS):
        try:
            assert name in vars(find(owner, name))
        except UnsupportedError as error:
            gone.append(str(error))

    assert not gone, "\n".join(gone)


@pytest.mark.parametrize(
    ("owner", "name", "missing"),
    [
        ("keras.src.backend.jax.not_there", "fit", "keras.src.backend.jax.not_there.fit"),
        ("keras.metrics.NotThere", "update_state", "keras.metrics.NotThere.update_state"),
        ("Trainer", "not_there", "keras.Model.not_there"),
        # Inherited: a replacement there would not be what Keras calls elsewhere.
        ("keras.Model", "compile", "keras.Model.compile"),
    ],
)
def test_a_name_that_is_missing_is_told_with_the_version_and_the_cure(owner, name, missing):
    with pytest.raises(UnsupportedError) as caught:
        find(owner, name)

    assert re.fullmatch(
        rf"Keras {keras.__version__} has no {re.escape(missing)}, which distributary needs. Install"
        r" a tested version: pip install 'keras>=3\.\d+,<3\.\d+'\.",
        str(caught.value),
    )


def test_hooks_are_installed_once_and_look_like_what_they_replace(strategy_of):
    with strategy_of(2).scope():
        pass
    trainer = keras.Model.__bases__[0]
    places = [(find(owner, name), name) for owner, name in _PLACES]
    places += [(trainer, name) for _, name in _METHODS]
    installed = [vars(owner)[name] for owner, name in places]

    assert connect()
    with strategy_of(2).scope(), dist.get_strategy().scope():
        pass

    assert keras.Model.__bases__[0] is trainer
    functions = []
    for (owner, name), hook in zip(places, installed, strict=True):
        assert vars(owner)[name] is hook, name
        if inspect.isfunction(hook):
            original = hook.__wrapped__
            assert "/keras/" in original.__code__.co_filename, name
            for attribute in ("__name__", "__qualname__", "__doc__"):
                assert getattr(hook, attribute) == getattr(original, attribute), name
            assert inspect.signature(hook) == inspect.signature(original), name
            functions.append(name)
    assert len(functions) > 20


def test_models_without_a_strategy_train_as_without_distributary():
    assert connect()
    got = _train()

    code = f"import json, sys, keras, numpy as np\n{inspect.getsource(_train)}{_REPORT}"
    expected = json.loads(small.python(code, KERAS_BACKEND="jax").splitlines()[-1])
    assert got.keys() == expected.keys()
    assert "val_mae" in got
    for name in expected:
        for one, other in zip(got[name], expected[name], strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
