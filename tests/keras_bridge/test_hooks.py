"""The hooks fit the installed Keras and change nothing for models without a strategy."""

import functools
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


@functools.cache
def _without_distributary():
    """What a process reports that has never seen distributary."""
    code = f"places = {_found()!r}\n{inspect.getsource(_signatures)}\n{_TRAIN}\n{_REPORT}"
    return json.loads(small.python(code, KERAS_BACKEND="jax").splitlines()[-1])


def _found():
    """The places under the names that this version of Keras gives them."""
    owners = [(find(owner, name), name) for owner, name in _PLACES]
    return [
        (owner.__name__, name)
        if inspect.ismodule(owner)
        else (owner.__module__, f"{owner.__qualname__}.{name}")
        for owner, name in owners
    ] + [("keras", f"Model.{name}") for _, name in _METHODS]


def _signatures(places):
    import inspect
    import pkgutil

    found = {}
    for module, path in places:
        function = pkgutil.resolve_name(f"{module}:{path}")
        if inspect.isfunction(function):
            found[f"{module}.{path}"] = [
                str(inspect.signature(function)),
                function.__name__,
                function.__qualname__,
                function.__doc__,
            ]
    return found


_TRAIN = """
import keras
import numpy as np


def train():
    random = np.random.default_rng(0)
    x = random.normal(size=(12, 3)).astype("float32")
    y = random.normal(size=(12, 1)).astype("float32")
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((3,)), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1)]
    )
    model.compile("sgd", "mse", metrics=["mae"])
    history = model.fit(
        x, y, batch_size=4, epochs=2, verbose=0, sample_weight=abs(y[:, 0]), validation_split=0.34
    ).history
    history["predict"] = model.predict(x, batch_size=4, verbose=0).tolist()
    history["weights"] = [w.tolist() for w in model.get_weights()]
    return history
"""

_REPORT = """
import json
import sys

report = {"history": train(), "signatures": _signatures(places)}
assert not [name for name in sys.modules if name.startswith("distributary")]
print(json.dumps(report))
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
        ("keras.src.losses.loss", "not_there", "keras.src.losses.loss.not_there"),
        # Inherited: a replacement there would not be what Keras calls elsewhere.
        ("keras.Model", "compile", "keras.Model.compile"),
        ("Trainer", "compile", "keras.Model.compile"),
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


def test_hooks_are_installed_when_a_scope_is_entered_and_only_once(strategy_of):
    with strategy_of(2).scope():
        pass
    owners = [(find(owner, name), name) for owner, name in _PLACES]
    installed = [vars(owner)[name] for owner, name in owners]
    bases = keras.Model.__bases__

    assert connect()
    with strategy_of(2).scope(), dist.get_strategy().scope():
        pass

    assert keras.Model.__bases__ == bases
    for (owner, name), before in zip(owners, installed, strict=True):
        assert vars(owner)[name] is before, name
        if inspect.isfunction(before):
            original = before.__wrapped__
            assert original.__module__.startswith("keras."), name
            assert before.__code__.co_filename != original.__code__.co_filename, name
            assert not hasattr(original, "__wrapped__") or "keras" in (
                original.__wrapped__.__code__.co_filename
            ), name


def test_replaced_functions_keep_name_signature_and_documentation():
    assert connect()

    got = _signatures(_found())

    expected = _without_distributary()["signatures"]
    assert len(expected) > 20
    assert got.keys() == expected.keys()
    for place, (signature, *rest) in expected.items():
        if place.endswith("BatchNormalization.__init__"):
            continue  # has `synchronized` already, for TensorFlow
        assert got[place] == [signature, *rest], place


def test_models_without_a_strategy_train_as_without_distributary():
    assert connect()
    namespace = {}
    exec(_TRAIN, namespace)

    got = namespace["train"]()

    expected = _without_distributary()["history"]
    assert got.keys() == expected.keys()
    assert "val_mae" in got
    for name in expected:
        for one, other in zip(got[name], expected[name], strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
