"""The hooks fit the installed Keras and change nothing for models without a strategy."""

import functools
import inspect
import json

import keras
import numpy as np
import pytest

import distributary as dist
from distributary.errors import UnsupportedError
from distributary.keras_bridge import _hooks, connect
from tests.keras_bridge import small

_PLACES = [(module, path) for module, path, _ in _hooks.HOOKS]


@functools.cache
def _without_distributary():
    """What a process reports that has never seen distributary."""
    code = f"places = {_PLACES!r}\n{inspect.getsource(_signatures)}\n{_TRAIN}\n{_REPORT}"
    return json.loads(small.python(code, KERAS_BACKEND="jax").splitlines()[-1])


def _signatures(places):
    import importlib
    import inspect

    found = {}
    for module, path in places:
        *parents, name = path.split(".")
        owner = importlib.import_module(f"keras.src.{module}")
        for parent in parents:
            owner = getattr(owner, parent)
        function = vars(owner)[name]
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
    x = random.normal(size=(14, 3)).astype("float32")
    y = random.normal(size=(14, 1)).astype("float32")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"], weighted_metrics=["mse"])
    history = model.fit(
        x, y, batch_size=4, epochs=2, verbose=0, sample_weight=abs(y[:, 0]), validation_split=0.3
    ).history
    history["on_batch"] = [float(v) for v in model.train_on_batch(x[:5], y[:5])]
    history["evaluate"] = [float(v) for v in model.evaluate(x, y, verbose=0)]
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


@pytest.mark.parametrize(("module", "path"), _PLACES, ids=[path for _, path in _PLACES])
def test_this_version_of_keras_has_every_place(module, path):
    owner, name = _hooks.find(module, path)

    assert name == path.split(".")[-1]
    assert name in vars(owner)


def test_no_place_is_listed_twice():
    assert len(set(_PLACES)) == len(_PLACES)


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("backend.jax.not_there", "JAXTrainer.fit"),
        ("backend.jax.trainer", "NotThere.fit"),
        ("backend.jax.trainer", "JAXTrainer.not_there"),
        ("backend.jax.trainer", "not_there"),
        # Inherited from `Trainer`: a replacement there would not be what Keras calls elsewhere.
        ("backend.jax.trainer", "JAXTrainer.compile"),
    ],
)
def test_a_place_that_is_missing_is_named_with_the_version_and_the_cure(module, path):
    with pytest.raises(UnsupportedError) as caught:
        _hooks.find(module, path)

    message = str(caught.value)
    assert message.startswith(f"Keras {keras.__version__} has no keras.src.{module}.{path}")
    (first, second), (beyond_first, beyond_second) = _hooks.SUPPORTED
    supported = f"keras>={first}.{second},<{beyond_first}.{beyond_second}"
    assert f"pip install '{supported}'" in message


def test_the_installed_keras_is_in_the_supported_range():
    first, beyond = _hooks.SUPPORTED

    assert first <= tuple(int(part) for part in keras.__version__.split(".")[:2]) < beyond


def test_hooks_are_installed_when_a_scope_is_entered_and_only_once(strategy_of):
    with strategy_of(2).scope():
        pass
    owners = [_hooks.find(module, path) for module, path in _PLACES]
    installed = [vars(owner)[name] for owner, name in owners]

    assert connect()
    with strategy_of(2).scope(), dist.get_strategy().scope():
        pass

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

    got = _signatures(_PLACES)

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


_IMPORTS = """
import sys
import distributary as dist
strategy = dist.MirroredStrategy(["CPU:0"])
with strategy.scope():
    v = dist.Variable(1.0)
strategy.run(lambda: v + 1)
print([name for name in sys.modules if name.split(".")[0] in ("keras", "tensorflow")])
"""


def test_distributary_does_not_import_keras():
    assert small.python(_IMPORTS).strip() == "[]"
