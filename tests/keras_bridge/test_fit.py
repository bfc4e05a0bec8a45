"""`fit` and its relatives under a strategy do what they do on one device."""

import contextlib
import functools
import gc
import signal
import threading
import warnings

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import distributary as dist
from distributary.errors import ContextError, DistributaryWarning, shown
from tests.keras_bridge import small


@functools.cache
def _alone(**kwargs):
    """History and model of `small.fit` on one device, for all who only read them."""
    model = small.model()
    return small.fit(model, **kwargs), model


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


def test_fit_evaluate_and_predict_inside_the_scope_equal_one_device(strategy):
    model, reference = small.model(strategy), small.model()
    x, y = small.data(14)

    with strategy.scope():
        history = small.fit(model)
        evaluated = model.evaluate(x, y, batch_size=4, verbose=0)
        predicted = model.predict(x, batch_size=4, verbose=0)

    _assert_equal_history(history, small.fit(reference))
    small.assert_equal_weights(model, reference)
    np.testing.assert_allclose(
        evaluated, reference.evaluate(x, y, batch_size=4, verbose=0), **small.CLOSE
    )
    np.testing.assert_allclose(
        predicted, reference.predict(x, batch_size=4, verbose=0), **small.CLOSE
    )


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(validation_data=small.data(6), validation_batch_size=2, validation_steps=2),
        dict(validation_data=small.data(6), validation_freq=2, epochs=4),
        dict(steps_per_epoch=2, epochs=3, initial_epoch=1),
        dict(shuffle=True, validation_split=0.5),
        dict(sample_weight=np.linspace(0, 2, 16)),
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


def test_on_batch_methods_equal_one_device_for_even_and_uneven_batches(strategy_of):
    model, reference = small.model(strategy_of(2)), small.model()
    x, y = small.data()

    for rows, weights in ((8, None), (5, np.linspace(1, 2, 5))):
        for name, args in (
            ("train_on_batch", (x[:rows], y[:rows], weights)),
            ("test_on_batch", (x[:rows], y[:rows], weights)),
            ("predict_on_batch", (x[:rows],)),
        ):
            got, expected = (getattr(m, name)(*args) for m in (model, reference))
            np.testing.assert_allclose(got, expected, err_msg=f"{name} {rows}", **small.CLOSE)
    named = model.test_on_batch(x, y, return_dict=True)
    assert named.keys() == {"loss", "mae"}
    small.assert_equal_weights(model, reference)


def _simplest(strategy=None, **kwargs):
    """A model with few operations: without jit, each of them is compiled."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="small")
        model.compile("sgd", "mse", **kwargs)
    return model


def _assert_one_step_equals_one_device(model):
    x, y = small.data(4)
    reference = _simplest()
    loss = model.train_on_batch(x, y)
    np.testing.assert_allclose(loss, reference.train_on_batch(x, y), **small.CLOSE)
    small.assert_equal_weights(model, reference)
    _assert_one_copy_on_each_device(model.variables, 2)


def test_run_eagerly_equals_one_device(strategy_of):
    model = _simplest(strategy_of(2), run_eagerly=True)

    _assert_one_step_equals_one_device(model)


def test_jit_compile_false_warns_and_is_right(strategy_of):
    with pytest.warns(DistributaryWarning, match=r"small\.compile: jit_compile=False") as caught:
        model = _simplest(strategy_of(2), jit_compile=False)

    assert [w.filename for w in caught] == [__file__]
    _assert_one_step_equals_one_device(model)


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


def test_a_model_cannot_be_compiled_under_another_strategy(strategy_of):
    first, second = strategy_of(2), strategy_of(4)
    model = small.model(first)

    with pytest.raises(ContextError, match=r"small\.compile") as caught, second.scope():
        small.compiled(model)

    assert shown(first) in str(caught.value)
    assert shown(second) in str(caught.value)
    assert "clone_model" in str(caught.value)


@pytest.mark.parametrize("what", ["fit", "evaluate", "predict", "train_on_batch"])
def test_a_model_does_nothing_in_the_scope_of_another_strategy(what, strategy_of):
    first, second = strategy_of(2), strategy_of(4)
    model = small.model(first)
    data = small.data()[:1] if what == "predict" else small.data()
    before = model.get_weights()

    with pytest.raises(ContextError, match=rf"small\.{what}") as caught, second.scope():
        getattr(model, what)(*data)

    assert shown(first) in str(caught.value)
    assert shown(second) in str(caught.value)
    small.assert_equal_weights(model, before, rtol=0)
    assert not dist.has_strategy()


@pytest.mark.parametrize("make", [lambda of: of(2), lambda of: dist.OneDeviceStrategy("CPU:1")])
@pytest.mark.parametrize("is_of_another", [False, True])
def test_fit_inside_of_run_raises(is_of_another, make, strategy_of):
    strategy = make(strategy_of)
    model = small.model(None if is_of_another else strategy)

    with pytest.raises(ContextError, match=r"small\.fit was called inside Strategy\.run"):
        strategy.run(lambda: small.fit(model))


def test_one_device_strategy_trains_on_its_device():
    strategy = dist.OneDeviceStrategy("CPU:1")
    model, reference = small.model(strategy), small.model()

    history = small.fit(model, *small.data(14), validation_data=small.data(5))

    _assert_equal_history(
        history, small.fit(reference, *small.data(14), validation_data=small.data(5))
    )
    small.assert_equal_weights(model, reference)
    for variable in [*model.variables, *model.optimizer.variables, *model.metrics_variables]:
        assert variable.value.devices() == {jax.devices("cpu")[1]}, variable.path
    predicted = model.predict(small.data(5)[0], verbose=0)
    np.testing.assert_allclose(
        predicted, reference.predict(small.data(5)[0], verbose=0), **small.CLOSE
    )


def test_two_models_under_two_strategies_take_turns(strategy_of):
    models = [small.model(strategy_of(2)), small.model(strategy_of(4)), small.model()]

    for _ in range(2):
        for model in models:
            small.fit(model, epochs=1)

    for model in models:
        small.assert_equal_weights(model, small.weights_after(8))


# Exceptions in the middle of an epoch.


class _At(keras.callbacks.Callback):
    """Does something once, at the end of one batch."""

    def __init__(self, batch, action):
        super().__init__()
        self.batch, self.action = batch, action

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            self.batch = None
            self.action()


def _raise(error):
    raise error


def _interrupt():
    signal.raise_signal(signal.SIGINT)


def _batches_then_error(num_batches):
    x, y = small.data()
    for step in range(num_batches):
        yield x[4 * step : 4 * step + 4], y[4 * step : 4 * step + 4]
    raise OSError("the file is gone")


def _assert_usable_after(num_steps, model):
    """The model has the weights of that step and continues from there."""
    assert int(model.optimizer.iterations) == num_steps
    small.assert_equal_weights(model, small.weights_after(num_steps))
    _assert_one_copy_on_each_device([*model.variables, *model.optimizer.variables], 2)
    x, y = small.data()
    for _ in range(num_steps, 4):
        start = 4 * int(model.optimizer.iterations)
        model.train_on_batch(x[start : start + 4], y[start : start + 4])
    small.fit(model, epochs=1)
    small.assert_equal_weights(model, small.weights_after(8))
    assert not dist.has_strategy()


@pytest.mark.parametrize(
    ("action", "error", "trained_before"),
    [
        (lambda: _raise(ZeroDivisionError("mine")), ZeroDivisionError, False),
        (_interrupt, KeyboardInterrupt, True),
    ],
    ids=["error", "ctrl-c"],
)
def test_after_an_exception_in_a_callback_the_weights_are_those_of_the_last_step(
    action, error, trained_before, strategy_of
):
    model = small.model(strategy_of(2))
    if trained_before:
        small.fit(model)
        model.set_weights(small.model().get_weights())
        for variable in model.optimizer.variables[2:]:  # iterations and learning rate come first
            variable.assign(jnp.zeros(variable.shape))
        model.optimizer.iterations.assign(0)

    with pytest.raises(error):
        small.fit(model, callbacks=[_At(1, action)])

    _assert_usable_after(2, model)


# Keras looks at two batches before it trains.
@pytest.mark.parametrize("num_batches", [3, 2])
def test_after_an_exception_in_the_data_the_weights_are_those_of_the_last_step(
    num_batches, strategy_of
):
    model = small.model(strategy_of(2))

    with pytest.raises(OSError, match="the file is gone"):
        small.fit(model, _batches_then_error(num_batches), batch_size=None)

    _assert_usable_after(num_batches, model)


class _FailingData(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise OSError("the file is gone")


@pytest.mark.parametrize(
    ("what", "is_trained"), [("fit", False), ("fit", True), ("evaluate", True), ("predict", True)]
)
def test_weights_survive_data_that_fails_at_once(what, is_trained, strategy_of):
    model = small.model(strategy_of(2))
    if is_trained:
        small.fit(model, epochs=1, validation_data=small.data(4))
        model.predict(small.data(4)[0], verbose=0)
        model.set_weights([np.full_like(w, 0.5) for w in model.get_weights()])
    else:
        model.optimizer.build(model.trainable_variables)
    before = model.get_weights()

    with pytest.raises(OSError, match="the file is gone"):
        getattr(model, what)(_FailingData(), verbose=0)

    small.assert_equal_weights(model, before, rtol=0)
    if not is_trained:
        _assert_usable_after(0, model)


def test_after_an_exception_during_validation_the_weights_are_those_of_the_epoch(strategy):
    model = small.model(strategy)
    broken = keras.callbacks.LambdaCallback()
    broken.on_test_batch_end = lambda batch, logs=None: _raise(ZeroDivisionError())

    with pytest.raises(ZeroDivisionError):
        small.fit(model, validation_data=small.data(8), callbacks=[broken])

    _assert_usable_after(4, model)


def test_after_an_exception_with_several_steps_per_execution_whole_executions_count(strategy_of):
    model = small.model(strategy_of(2), steps_per_execution=2)

    with pytest.raises(ZeroDivisionError):
        small.fit(model, callbacks=[_At(1, lambda: _raise(ZeroDivisionError()))])

    assert int(model.optimizer.iterations) == 2
    small.assert_equal_weights(model, small.weights_after(2))
    small.fit(model, *(a[8:] for a in small.data()), epochs=1)
    small.assert_equal_weights(model, small.weights_after(4))


def test_an_exception_in_the_step_itself_leaves_the_weights_alone(strategy_of):
    class Broken(keras.Model):
        def train_step(self, state, data):
            raise ZeroDivisionError("in the step")

    model = small.model(strategy_of(2), Broken)
    before = model.get_weights()

    with pytest.raises(ZeroDivisionError, match="in the step"):
        small.fit(model)

    small.assert_equal_weights(model, before, rtol=0)
    np.testing.assert_allclose(
        model.predict(small.data()[0], verbose=0), small.model()(small.data()[0]), **small.CLOSE
    )


def _long_epoch():
    """As many steps as 500 epochs, without ends of epochs, where Keras swallows interrupts."""
    return tuple(np.tile(a, (500, 1)) for a in small.data())


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
        small.fit(model, *_long_epoch(), epochs=1)

    num_steps = int(model.optimizer.iterations)
    assert 3 <= num_steps < 2000
    small.assert_equal_weights(model, small.weights_after(num_steps), rtol=1e-3, atol=1e-4)
    small.fit(model, epochs=1)
    assert int(model.optimizer.iterations) == num_steps + 4


def test_ctrl_c_while_a_step_is_compiled_leaves_a_model_that_works(strategy_of):
    class Interrupted(keras.Model):
        interrupt = True

        def train_step(self, state, data):
            if self.interrupt:
                self.interrupt = False
                _interrupt()
            return super().train_step(state, data)

    model = small.model(strategy_of(2), Interrupted)
    handler = signal.getsignal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        small.fit(model)

    assert signal.getsignal(signal.SIGINT) is handler
    num_steps = int(model.optimizer.iterations)
    assert num_steps in (0, 1)
    _assert_usable_after(num_steps, model)


# Saving.


def test_a_model_saved_under_a_strategy_continues_inside_and_outside_of_a_scope(
    strategy_of, tmp_path
):
    model, reference = small.model(strategy_of(2)), small.model()
    small.fit(model, epochs=1)
    model.save(tmp_path / "model.keras")

    outside = keras.models.load_model(tmp_path / "model.keras")
    with strategy_of(4).scope():
        inside = keras.models.load_model(tmp_path / "model.keras")

    small.assert_equal_weights(outside, model, rtol=0)
    small.fit(reference)
    for loaded, num_devices in ((outside, 1), (inside, 4)):
        assert int(loaded.optimizer.iterations) == 4
        small.fit(loaded, epochs=1)
        small.assert_equal_weights(loaded, reference)
        variables = [*loaded.variables, *loaded.optimizer.variables]
        _assert_one_copy_on_each_device(variables, num_devices)


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


def test_models_travel_to_a_process_without_distributary_and_back(strategy_of, tmp_path):
    model, reference = small.model(strategy_of(2)), small.model()
    x, y = small.data()
    small.fit(model, epochs=1)
    model.save(tmp_path / "distributed.keras")
    np.savez(tmp_path / "data.npz", x=x, y=y)

    small.python(_PLAIN_KERAS.format(folder=str(tmp_path)), KERAS_BACKEND="jax")

    predicted = np.load(tmp_path / "predicted.npy")
    np.testing.assert_allclose(predicted, model.predict(x, verbose=0), **small.CLOSE)
    with strategy_of(2).scope():
        back = keras.models.load_model(tmp_path / "plain.keras")
    assert int(back.optimizer.iterations) == 8
    small.fit(back, epochs=1)
    small.fit(reference, epochs=3)
    small.assert_equal_weights(back, reference)


# State and programs.


def test_repeated_calls_compile_nothing_new(strategy, compilations):
    model = small.model(strategy)
    x, y = small.data(14)

    def all_methods():
        small.fit(model, x, y, validation_data=(x, y))
        model.evaluate(x, y, batch_size=4, verbose=0)
        model.predict(x, batch_size=4, verbose=0)
        with strategy.scope():
            model.train_on_batch(x, y)
            model.test_on_batch(x, y)
            model.predict_on_batch(x)

    all_methods()
    with compilations() as compiled:
        all_methods()
        all_methods()
    assert compiled == []


@pytest.mark.parametrize(("num_replicas", "inside"), [(1, True), (2, False)])
def test_a_step_is_compiled_once(num_replicas, inside, strategy_of, compilations):
    strategy = strategy_of(num_replicas)
    with compilations() as compiled:
        model = small.model(strategy) if inside else small.build()
        if not inside:
            with strategy.scope():
                small.compiled(model)
        for _ in range(2):
            small.fit(model)
            model.evaluate(*small.data(), batch_size=4, verbose=0)
            model.predict(small.data()[0], batch_size=4, verbose=0)
            model.set_weights([2 * weight for weight in model.get_weights()])

    assert len([name for name in compiled if f"{model.name}." in name]) == 3, compiled


# Set-ups that do not work.

_OTHER_BACKEND = """
import keras, numpy as np
import distributary as dist
from distributary.errors import UnsupportedError
strategy = dist.MirroredStrategy(["CPU:0"])
def functional():
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.layers.Dense(1)(inputs))
def sequential():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
for create in (lambda: keras.Variable(1.0), functional, sequential):
    try:
        with strategy.scope():
            create()
        print("no error")
    except UnsupportedError as error:
        print(error)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
assert model.predict(np.ones((2, 3)), verbose=0).shape == (2, 1)
"""


def test_with_another_keras_backend_models_in_a_scope_raise():
    message = small.python(_OTHER_BACKEND, KERAS_BACKEND="numpy")

    lines = message.splitlines()
    assert len(lines) == 3
    for created, line in zip(("variable", "functional", "sequential"), lines, strict=True):
        assert "backend 'numpy'" in line, created
        assert "KERAS_BACKEND=jax" in line, created
        assert "MirroredStrategy" in line, created


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


def test_too_little_memory_for_a_variable_is_said_with_what_helps(strategy):
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory") as caught,
        strategy.scope(),
    ):
        dist.Variable(lambda: jnp.zeros(1 << 45))

    assert "experimental_shard_parameters=True" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("labels", "ignored", "told"),
    [(range(3), None, None), (range(4), None, 3), (range(4), 3, None), ((-1, 0, 1), None, -1)],
)
def test_labels_without_a_class_are_named(labels, ignored, told, strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=ignored)
        model.compile("sgd", loss)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(np.ones((8, 4)), np.resize(labels, 8), verbose=0)

    texts = [str(one.message) for one in caught if "label" in str(one.message)]
    assert len(texts) == (told is not None)
    assert all(f"label {told}, but the 3 classes" in text for text in texts)


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_labels_without_a_class_in_a_dataset_are_named(steps_per_execution, strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, steps_per_execution=steps_per_execution)
    rows = dist.data.Dataset.from_tensor_slices((np.ones((16, 4)), np.arange(16) % 3 + 1))

    with pytest.warns(dist.errors.DistributaryWarning, match="label 3, but the 3 classes"):
        model.fit(rows.batch(4), verbose=0)


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
