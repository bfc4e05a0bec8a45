"""`fit` and its relatives under a strategy do what they do on one device."""

import functools
import gc
import signal
import threading

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import distributary as dist
from distributary.errors import ContextError, DistributaryWarning, shown
from tests.keras_bridge import small


@functools.cache
def _alone():
    """History and model of `small.fit` on one device, for all who only read them."""
    model = small.model()
    return small.fit(model), model


def _assert_equal_history(got, expected):
    assert got.epoch == expected.epoch
    small.assert_equal_logs(got.history, expected.history)


def _assert_one_copy_on_each_device(variables, num_replicas):
    assert variables
    for variable in variables:
        copies = [np.asarray(shard.data) for shard in variable.value.addressable_shards]
        devices = {shard.device for shard in variable.value.addressable_shards}
        assert len(devices) == len(copies) == num_replicas, variable.path
        for copy in copies:
            assert copy.shape == tuple(variable.shape), variable.path
            np.testing.assert_array_equal(copy, copies[0], variable.path)


@pytest.fixture(autouse=True)
def _ctrl_c_as_found():
    handler = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is handler, "the test changed the handler of SIGINT"


# Where fit is called, and its arguments.


def test_all_methods_inside_the_scope_equal_one_device(strategy):
    model, reference = small.model(strategy), small.model()
    x, y = small.data(14)
    options = {"batch_size": 4, "verbose": 0}
    calls = [("evaluate", (x, y), options), ("predict", (x,), options)]
    for rows, weights in ((8, None), (5, np.linspace(1, 2, 5))):
        for name in ("train_on_batch", "test_on_batch"):
            calls.append((name, (x[:rows], y[:rows], weights), {}))
        calls.append(("predict_on_batch", (x[:rows],), {}))

    with strategy.scope():
        history = small.fit(model)
        results = [getattr(model, name)(*args, **kwargs) for name, args, kwargs in calls]
        named = model.test_on_batch(x, y, return_dict=True)

    _assert_equal_history(history, small.fit(reference))
    for (name, args, kwargs), result in zip(calls, results, strict=True):
        expected = getattr(reference, name)(*args, **kwargs)
        np.testing.assert_allclose(result, expected, err_msg=name, **small.CLOSE)
    assert named.keys() == {"loss", "mae"}
    small.assert_equal_weights(model, reference)


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(
            validation_data=small.data(6),
            validation_batch_size=2,
            validation_steps=2,
            validation_freq=2,
            epochs=4,
        ),
        dict(steps_per_epoch=2, epochs=3, initial_epoch=1),
        dict(shuffle=True, validation_split=0.5, sample_weight=np.linspace(0, 2, 16)),
    ],
    ids=lambda kwargs: "-".join(kwargs),
)
def test_arguments_of_fit_mean_the_same_as_on_one_device(kwargs, strategy_of):
    model, reference = small.model(strategy_of(2)), small.model()

    keras.utils.set_random_seed(7)
    history = small.fit(model, **kwargs)
    keras.utils.set_random_seed(7)
    expected = small.fit(reference, **kwargs)

    _assert_equal_history(history, expected)
    small.assert_equal_weights(model, reference)
    assert int(model.optimizer.iterations) == int(reference.optimizer.iterations)


def test_a_model_that_is_not_to_be_compiled_is_right(strategy):
    def make(**options):
        keras.utils.set_random_seed(0)
        # Of few operations: without jit, each of them is compiled.
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="small")
        model.compile("sgd", "mse", **options)
        return model

    with strategy.scope():
        model = make(jit_compile=False)
    reference, batch = make(), small.data(4)

    loss = model.train_on_batch(*batch)

    np.testing.assert_allclose(loss, reference.train_on_batch(*batch), **small.CLOSE)
    small.assert_equal_weights(model, reference)
    _assert_one_copy_on_each_device(model.variables, 2)


# Steps written by the user.


def test_an_output_without_rows_of_the_batch_comes_once_for_each_batch(strategy_of):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x), self.dense.kernel[None]

    with strategy_of(2).scope():
        model = Model()
        model.compile()

    rows, kernels = model.predict(small.data(6)[0], batch_size=4, verbose=0)

    assert len(rows) == 6
    assert len(kernels) == 2


# Which strategy a model belongs to.


def _compiled_outside(strategy):
    with strategy.scope():
        model = small.build()
    return small.compiled(model)


def _created_outside(strategy):
    model = small.build()
    with strategy.scope():
        return small.compiled(model)


def _with_an_optimizer_created_outside(strategy):
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    with strategy.scope():
        model = small.build()
        model.compile(optimizer, "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize(
    "make", [_compiled_outside, _created_outside, _with_an_optimizer_created_outside]
)
def test_a_model_joins_the_strategy_it_is_created_or_compiled_under(make, strategy):
    model = make(strategy)

    history = small.fit(model)

    expected, reference = _alone()
    _assert_equal_history(history, expected)
    small.assert_equal_weights(model, reference)
    _assert_one_copy_on_each_device([*model.variables, *model.optimizer.variables], 2)


def test_a_model_trained_without_a_strategy_continues_under_one(strategy_of):
    model = small.model()
    small.fit(model, epochs=1)

    with strategy_of(2).scope():
        small.fit(model, epochs=1)

    small.assert_equal_weights(model, small.weights_after(8))
    _assert_one_copy_on_each_device([*model.variables, *model.optimizer.variables], 2)


def test_a_model_does_nothing_in_the_scope_of_another_strategy(strategy_of):
    first, second = strategy_of(2), strategy_of(4)
    model = small.model(first)
    x, y = small.data()
    before = model.get_weights()
    calls = {
        "compile": lambda: small.compiled(model),
        "fit": lambda: model.fit(x, y),
        "evaluate": lambda: model.evaluate(x, y),
        "predict": lambda: model.predict(x),
        "train_on_batch": lambda: model.train_on_batch(x, y),
    }

    for name, call in calls.items():
        with pytest.raises(ContextError, match=rf"small\.{name}") as caught, second.scope():
            call()
        assert shown(first) in str(caught.value)
        assert shown(second) in str(caught.value)
        assert "clone_model" in str(caught.value) or name != "compile"
    small.assert_equal_weights(model, before, rtol=0)
    assert not dist.has_strategy()


@pytest.mark.parametrize("is_of_another", [False, True])
def test_fit_inside_of_run_raises(is_of_another):
    strategy = dist.OneDeviceStrategy("CPU:1")
    model = small.model(None if is_of_another else strategy)

    with pytest.raises(ContextError, match=r"small\.fit was called inside Strategy\.run"):
        strategy.run(lambda: small.fit(model))


def test_one_device_strategy_trains_on_its_device():
    model, x = small.model(dist.OneDeviceStrategy("CPU:1")), small.data(5)[0]

    history = small.fit(model)

    expected, reference = _alone()
    _assert_equal_history(history, expected)
    small.assert_equal_weights(model, reference)
    for variable in [*model.variables, *model.optimizer.variables, *model.metrics_variables]:
        assert variable.value.devices() == {jax.devices("cpu")[1]}, variable.path
    predicted = [each.predict(x, verbose=0) for each in (model, reference)]
    np.testing.assert_allclose(*predicted, **small.CLOSE)


def test_two_models_under_two_strategies_take_turns(strategy_of):
    models = [small.model(strategy_of(2)), small.model(strategy_of(4)), small.model()]

    for _ in range(2):
        for model in models:
            small.fit(model, epochs=1)

    for model in models:
        small.assert_equal_weights(model, small.weights_after(8))


# Exceptions in the middle of an epoch.


def _fail(*_):
    raise OSError("the file is gone")


def _interrupt(*_):
    signal.raise_signal(signal.SIGINT)


def _batches_then_error(num_batches):
    x, y = small.data()
    for step in range(num_batches):
        yield x[4 * step : 4 * step + 4], y[4 * step : 4 * step + 4]
    _fail()


def _assert_usable_after(num_steps, model):
    """The model has the weights of that step and continues from there."""
    assert int(model.optimizer.iterations) == num_steps
    small.assert_equal_weights(model, small.weights_after(num_steps))
    _assert_one_copy_on_each_device([*model.variables, *model.optimizer.variables], 2)
    if num_steps < 4:
        small.fit(model, *(a[4 * num_steps :] for a in small.data()), epochs=1)
    small.fit(model, epochs=1)
    small.assert_equal_weights(model, small.weights_after(8))
    assert not dist.has_strategy()


def _in_validation():
    callback = keras.callbacks.LambdaCallback()
    callback.on_test_batch_end = lambda batch, logs=None: _fail()
    return callback


@pytest.mark.parametrize(
    ("make", "compiled", "num_steps"),
    [
        (lambda: ((), dict(callbacks=[small.AtBatch(1, _fail)])), {}, 2),
        (lambda: ((), dict(callbacks=[small.AtBatch(1, _fail)])), {"steps_per_execution": 2}, 2),
        # Keras looks at two batches before it trains.
        (lambda: ((_batches_then_error(2),), dict(batch_size=None)), {}, 2),
        (lambda: ((_batches_then_error(3),), dict(batch_size=None)), {}, 3),
        (lambda: ((), dict(validation_data=small.data(8), callbacks=[_in_validation()])), {}, 4),
    ],
    ids=["callback", "several steps", "data", "later data", "validation"],
)
def test_after_an_exception_the_weights_are_those_of_the_last_step(
    make, compiled, num_steps, strategy
):
    model = small.model(strategy, **compiled)
    data, options = make()

    with pytest.raises(OSError, match="the file is gone"):
        small.fit(model, *data, **options)

    _assert_usable_after(num_steps, model)


def test_after_ctrl_c_in_a_trained_model_the_weights_are_those_of_the_last_step(strategy):
    model = small.model(strategy)
    small.fit(model)
    model.set_weights(small.model().get_weights())
    for variable in model.optimizer.variables[2:]:  # iterations and learning rate come first
        variable.assign(jnp.zeros(variable.shape))
    model.optimizer.iterations.assign(0)

    with pytest.raises(KeyboardInterrupt):
        small.fit(model, callbacks=[small.AtBatch(1, _interrupt)])

    _assert_usable_after(2, model)


class _FailingData(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        _fail()


def _assert_data_that_fails_changes_nothing(model, name):
    before = model.get_weights()
    with pytest.raises(OSError, match="the file is gone"):
        getattr(model, name)(_FailingData(), verbose=0)
    small.assert_equal_weights(model, before, rtol=0)


def test_weights_survive_data_that_fails_at_once(strategy):
    model = small.model(strategy)
    model.optimizer.build(model.trainable_variables)

    _assert_data_that_fails_changes_nothing(model, "fit")
    _assert_usable_after(0, model)
    model.evaluate(*small.data(4), verbose=0)
    model.predict(small.data(4)[0], verbose=0)
    for name in ("fit", "evaluate", "predict"):
        model.set_weights([np.full_like(w, 0.5) for w in model.get_weights()])
        _assert_data_that_fails_changes_nothing(model, name)


def test_after_ctrl_c_in_a_step_with_host_callbacks_the_model_works(strategy_of):
    main_thread = threading.get_ident()
    sent = []

    def send(iterations):
        if iterations >= 3 and not sent:
            sent.append(True)
            signal.pthread_kill(main_thread, signal.SIGINT)

    class Interrupting(keras.Model):
        def train_step(self, state, data):
            # Steps with effects are dispatched by Python code of JAX.
            jax.debug.callback(send, state[2][0])
            return super().train_step(state, data)

    model = small.model(strategy_of(2), Interrupting)

    with pytest.raises(KeyboardInterrupt):
        # 500 epochs in one: at the ends of epochs, Keras swallows interrupts.
        small.fit(model, *(np.tile(a, (500, 1)) for a in small.data()), epochs=1)

    num_steps = int(model.optimizer.iterations)
    assert 3 <= num_steps < 2000
    small.assert_equal_weights(model, small.weights_after(num_steps), rtol=1e-3, atol=1e-4)
    small.fit(model, epochs=1)
    assert int(model.optimizer.iterations) == num_steps + 4


@pytest.mark.parametrize(("action", "error"), [(_interrupt, KeyboardInterrupt), (_fail, OSError)])
def test_an_exception_while_a_step_is_compiled_leaves_a_model_that_works(
    action, error, strategy_of
):
    class Failing(keras.Model):
        fails = True

        def train_step(self, state, data):
            if self.fails:
                self.fails = False
                action()
            return super().train_step(state, data)

    model = small.model(strategy_of(2), Failing)
    handler = signal.getsignal(signal.SIGINT)

    with pytest.raises(error):
        small.fit(model)

    assert signal.getsignal(signal.SIGINT) is handler
    num_steps = int(model.optimizer.iterations)
    assert num_steps in (0, 1)
    _assert_usable_after(num_steps, model)


# Saving.


_PLAIN_KERAS = """
import sys
import numpy as np, keras
folder = {folder!r}
data = np.load(folder + "/data.npz")
model = keras.models.load_model(folder + "/distributed.keras")
np.save(folder + "/predicted.npy", model.predict(data["x"], verbose=0))
model.fit(data["x"], data["y"], batch_size=4, epochs=1, shuffle=False, verbose=0)
model.save(folder + "/plain.keras")
assert "distributary" not in sys.modules
"""


def test_a_saved_model_continues_in_any_scope_and_without_distributary(strategy_of, tmp_path):
    model = small.model(strategy_of(2))
    x, y = small.data()
    small.fit(model, epochs=1)
    model.save(tmp_path / "distributed.keras")
    np.savez(tmp_path / "data.npz", x=x, y=y)

    outside = keras.models.load_model(tmp_path / "distributed.keras")
    with strategy_of(4).scope():
        inside = keras.models.load_model(tmp_path / "distributed.keras")
    small.python(_PLAIN_KERAS.format(folder=str(tmp_path)), KERAS_BACKEND="jax")
    with strategy_of(2).scope():
        back = keras.models.load_model(tmp_path / "plain.keras")

    small.assert_equal_weights(outside, model, rtol=0)
    predicted = np.load(tmp_path / "predicted.npy")
    np.testing.assert_allclose(predicted, model.predict(x, verbose=0), **small.CLOSE)
    for loaded, num_devices, num_steps in ((outside, 1, 4), (inside, 4, 4), (back, 2, 8)):
        assert int(loaded.optimizer.iterations) == num_steps
        small.fit(loaded, epochs=1)
        small.assert_equal_weights(loaded, small.weights_after(num_steps + 4))
        variables = [*loaded.variables, *loaded.optimizer.variables]
        _assert_one_copy_on_each_device(variables, num_devices)


# State and programs.


@pytest.mark.parametrize(("num_replicas", "inside"), [(1, True), (2, False)])
def test_each_step_is_compiled_once(num_replicas, inside, strategy_of, compilations):
    strategy = strategy_of(num_replicas)
    x, y = small.data(14)

    def call_all(model, x, y):
        small.fit(model, x, y)
        model.evaluate(x, y, batch_size=4, verbose=0)
        model.predict(x, batch_size=4, verbose=0)
        model.set_weights([2 * weight for weight in model.get_weights()])

    def call_more(model):
        call_all(model, x, y)
        with strategy.scope():
            small.fit(model, x, y, validation_data=(x, y))
            model.train_on_batch(x, y)
            model.test_on_batch(x, y)
            model.predict_on_batch(x)

    with compilations() as compiled:
        model = small.model(strategy) if inside else _created_outside(strategy)
        for _ in range(2):
            call_all(model, *small.data())
    assert len([name for name in compiled if f"{model.name}." in name]) == 3, compiled
    call_more(model)
    with compilations() as compiled:
        call_more(model)
        call_more(model)
    assert compiled == []


# Set-ups that do not work.

_OTHER_BACKEND = """
import keras, numpy as np
import distributary as dist
strategy = dist.MirroredStrategy(["CPU:0"])
inputs = keras.Input((3,))
outputs = keras.layers.Dense(1)(inputs)
for create in (
    lambda: keras.Variable(1.0),
    lambda: keras.Model(inputs, outputs),
    lambda: keras.Sequential([keras.layers.Dense(1)]),
):
    try:
        with strategy.scope():
            create()
    except dist.errors.UnsupportedError as error:
        print(error)
assert keras.Model(inputs, outputs).predict(np.ones((2, 3)), verbose=0).shape == (2, 1)
"""


def test_with_another_keras_backend_models_in_a_scope_raise():
    lines = small.python(_OTHER_BACKEND, KERAS_BACKEND="numpy").splitlines()

    assert len(lines) == 3
    for line in lines:
        for told in ("backend 'numpy'", "KERAS_BACKEND=jax", "MirroredStrategy"):
            assert told in line


_IMPORT_INSIDE = """
import warnings
import numpy as np
import distributary as dist
strategy = dist.MirroredStrategy(["CPU:0"])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with strategy.scope():
        import keras
(warning,) = [w for w in caught if w.category is dist.errors.DistributaryWarning]
print(warning.message, warning.filename)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
assert model._distributary_strategy is strategy
"""


def test_keras_imported_inside_a_scope_only_warns_and_works_in_the_next_scope():
    message = small.python(_IMPORT_INSIDE, KERAS_BACKEND="jax")

    assert "Keras was imported inside the scope of" in message
    assert "import keras before" in message
    assert message.rstrip().endswith("<string>")


class _Huge(keras.layers.Layer):
    def call(self, x):
        return x + jnp.cumsum(jnp.sort(jnp.arange(1 << 45, dtype=jnp.float32) * x[0, 0]))[-1]


def test_too_little_memory_is_said_with_what_helps(strategy_of):
    with strategy_of(1).scope():
        model = keras.Sequential([keras.Input((4,)), _Huge(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory") as caught:
        model.fit(np.ones((8, 4)), np.ones(8), verbose=0)

    (note,) = caught.value.__notes__
    assert "A smaller batch" in note
    assert "experimental_shard_optimizer_state=True" in note
    assert "experimental_shard_parameters=True" in note
    assert "distributary plan" in note


def test_a_distribution_of_keras_beside_a_strategy_is_named(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
    try:
        with pytest.warns(DistributaryWarning, match="set_distribution was called with <DataPara"):
            model.fit(np.ones((8, 4)), np.ones(8), verbose=0)
    finally:
        keras.distribution.set_distribution(None)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_first_step_updates_weights_in_place(num_replicas, strategy_of):
    shape = 3, 1236 + num_replicas  # of no other array
    with strategy_of(num_replicas).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(shape[1])])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    kept = jnp.ones(shape)
    model.layers[0].kernel.assign(kept)
    gc.collect()
    weights = [a for a in jax.live_arrays() if a.shape == shape and a is not kept]
    assert len(weights) == 3  # with both moments of Adam

    model.fit(np.ones((2, 3)), np.zeros((2, shape[1])), verbose=0)

    assert all(array.is_deleted() for array in weights)
    np.testing.assert_array_equal(kept, np.ones(shape))
