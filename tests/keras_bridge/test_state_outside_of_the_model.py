"""Variables that a model's step uses and Keras' trainer does not hand to it there.

Plain Keras compiles them as constants, drops what is assigned to them, or fails; TensorFlow does
not. The expected numbers are NumPy's.
"""

import keras
import numpy as np
import pytest

import distributary as dist
from distributary.compat import tensorflow as tf

X = np.arange(16, dtype=np.float32).reshape(8, 2)


class _Call(keras.layers.Layer):
    """A layer that calls a function."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def call(self, x):
        return self._function(self, x)


def _functional(layer):
    inputs = keras.Input((2,))
    return keras.Model(inputs, layer(keras.layers.Dense(2, kernel_initializer="ones")(inputs)))


def _sequential(layer):
    return keras.Sequential([keras.layers.Dense(2, kernel_initializer="ones"), layer])


@pytest.fixture(params=["mirrored", "sharded"])
def two_replicas(request):
    sharded = request.param == "sharded"
    return dist.MirroredStrategy(["cpu:0", "cpu:1"], experimental_shard_parameters=sharded)


@pytest.mark.parametrize(
    ("variable", "make", "eager"),
    [
        (keras.Variable, _functional, False),
        (keras.Variable, _sequential, True),
        (dist.Variable, _sequential, False),
    ],
)
def test_what_a_layer_assigns_stays(variable, make, eager, strategy):
    with strategy.scope():
        total = variable(np.zeros(2, np.float32), trainable=False)

        def add(layer, x):
            total.assign_add(keras.ops.sum(x, axis=0))
            return x

        model = make(_Call(add))
        model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=eager)

    sums = X.sum() * np.ones(2)
    model.predict(X, batch_size=4, verbose=0)
    np.testing.assert_allclose(total, sums)
    model.evaluate(X, X, batch_size=3, verbose=0)
    np.testing.assert_allclose(total, 2 * sums)
    model.fit(X, X, batch_size=4, epochs=2, verbose=0)
    np.testing.assert_allclose(total, 4 * sums)


@pytest.mark.parametrize("variable", [keras.Variable, dist.Variable])
def test_a_step_reads_the_value_of_today(variable, strategy):
    with strategy.scope():
        weight = variable(1.0, trainable=False)

        def penalty(layer, x):
            layer.add_loss(keras.ops.convert_to_tensor(weight))
            return x

        model = _functional(_Call(penalty))
        model.compile("sgd", lambda y, y_pred: keras.ops.zeros_like(y_pred))

    assert model.evaluate(X, X, verbose=0) == 1
    weight.assign(3.0)
    assert model.evaluate(X, X, verbose=0) == 3


class _Carries(keras.layers.Layer):
    """A recurrent layer that begins each batch with the state in which the last one ended."""

    def build(self, shape):
        self.recurrent = keras.layers.GRU(4, return_state=True)
        self.recurrent.build(shape)
        self.state = self.add_weight(shape=(shape[0], 4), initializer="zeros", trainable=False)

    def call(self, x):
        outputs, state = self.recurrent(x, initial_state=self.state)
        self.state.assign(state)
        return outputs


def test_a_stateful_layer_carries_its_state_from_batch_to_batch(strategy):
    def trained(layer):
        inputs = keras.Input((5, 3), batch_size=6)
        model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        rng = np.random.default_rng(0)
        for variable in model.trainable_variables:
            variable.assign(rng.normal(size=variable.shape))
        x, y = rng.normal(size=(18, 5, 3)), rng.normal(size=(18, 1))
        losses = model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0).history["loss"]
        losses.append(model.evaluate(x, y, batch_size=6, verbose=0))
        return losses, [np.array(v) for v in model.trainable_variables]

    expected_losses, expected = trained(_Carries())
    with strategy.scope():
        losses, weights = trained(keras.layers.GRU(4, stateful=True))

    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for value, expected_value in zip(weights, expected, strict=True):
        np.testing.assert_allclose(value, expected_value, rtol=1e-4, atol=1e-6)


def test_statistics_of_a_layer_that_the_model_does_not_have(strategy):
    with strategy.scope():
        normalization = keras.layers.BatchNormalization(momentum=0.5)
        normalization.build((None, 2))
        model = _functional(keras.layers.Lambda(lambda x: normalization(x)))
        model.compile(keras.optimizers.SGD(0.0), "mse")

    model.fit(X, X, batch_size=8, verbose=0)

    np.testing.assert_allclose(normalization.moving_mean, X.sum(1).mean() * np.ones(2) / 2)


@pytest.mark.parametrize(("make", "steps_per_execution"), [(_functional, 1), (_sequential, 2)])
def test_random_numbers_of_tensorflow_differ_in_every_step(make, steps_per_execution, strategy):
    tf.random.set_seed(1)
    with strategy.scope():
        noise = _Call(lambda _, x: 0 * x + tf.random.normal(tf.shape(x)))
        model = make(noise)
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution)

    drawn = [model.predict(X, batch_size=4, verbose=0) for _ in range(2)]
    losses = [model.fit(X, X, batch_size=8, verbose=0).history["loss"][0] for _ in range(3)]

    assert len(np.unique(np.concatenate(drawn))) == 2 * X.size
    assert len(set(losses)) == 3


def test_a_value_that_vmap_traces_is_refused(strategy):
    with strategy.scope():
        total = keras.Variable(0.0, trainable=False)

        def add(layer, x):
            keras.ops.vectorized_map(lambda row: total.assign_add(keras.ops.sum(row)), x)
            return x

        model = _functional(_Call(add))
        model.compile("sgd", "mse", run_eagerly=True)

    with pytest.raises(dist.errors.UnsupportedError, match=r"'variable.*' *: assign got a value"):
        model.evaluate(X, X, verbose=0)


class _Subclassed(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.dense, self.layer = keras.layers.Dense(2, kernel_initializer="ones"), layer

    def call(self, x):
        return self.layer(self.dense(x))


@pytest.mark.parametrize("make", [_functional, _Subclassed])
def test_such_models_train_without_a_strategy(make):
    total = dist.Variable(np.zeros(2, np.float32), trainable=False)

    def add(layer, x):
        total.assign_add(keras.ops.sum(x, axis=0))
        return 0 * x + tf.random.normal(tf.shape(x))

    model = make(_Call(add))
    model.compile(keras.optimizers.SGD(0.0), "mse")

    losses = model.fit(X, X, batch_size=4, epochs=3, verbose=0).history["loss"]
    assert len(set(losses)) == 3
    np.testing.assert_allclose(total, 3 * X.sum() * np.ones(2))
    assert len(np.unique(model.predict(X, batch_size=4, verbose=0))) == X.size


class _Counting(keras.layers.Layer):
    """A dense layer that counts its rows in a metric of its own."""

    def __init__(self):
        super().__init__()
        self.rows = keras.metrics.Sum(name="rows")
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        self.rows.update_state(keras.ops.ones(keras.ops.shape(x)[:1]))
        return self.dense(x)


@pytest.mark.parametrize("eager", [False, True])
def test_metrics_that_a_layer_updates(eager, two_replicas):
    with two_replicas.scope():
        model = keras.Sequential([keras.Input((2,)), _Counting()])
        model.compile("sgd", "mse", run_eagerly=eager)

    assert model.fit(X, X[:, :1], batch_size=3, verbose=0).history["rows"] == [8]
    assert model.evaluate(X, X[:, :1], batch_size=3, verbose=0, return_dict=True)["rows"] == 8


class _Averaged(keras.Model):
    """Halves the learning rate before every update, and averages the weights after it."""

    def __init__(self):
        super().__init__()
        given = {"use_bias": False, "kernel_initializer": "ones"}
        self.dense = keras.layers.Dense(1, **given)
        self.mean = keras.layers.Dense(1, **given, trainable=False)
        for layer in (self.dense, self.mean):
            layer.build((None, 2))
        self.built = True

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, *args, **kwargs):
        rate = self.optimizer.learning_rate
        rate.assign(rate / 2)
        return super().compute_loss(*args, **kwargs)

    def compute_metrics(self, *args, **kwargs):
        self.mean.kernel.assign(0.9 * self.mean.kernel + 0.1 * self.dense.kernel)
        metrics = super().compute_metrics(*args, **kwargs)
        return {**metrics, "sum": keras.ops.sum(self.dense.kernel)}


@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 2}, {"run_eagerly": True}])
def test_a_model_reads_and_assigns_in_the_order_of_its_step(options, two_replicas):
    x, y = X / 16, X[:, :1]
    with two_replicas.scope():
        model = _Averaged()
        model.compile(keras.optimizers.SGD(0.5), "mse", **options)

    logs = model.fit(x, y, batch_size=3, shuffle=False, verbose=0).history

    kernel = mean = np.ones((2, 1))
    rate = 0.5
    for i in range(0, 8, 3):
        rows = x[i : i + 3]
        rate /= 2
        kernel = kernel - rate * 2 * rows.T @ (rows @ kernel - y[i : i + 3]) / len(rows)
        mean = 0.9 * mean + 0.1 * kernel
    np.testing.assert_allclose(model.dense.kernel, kernel, rtol=1e-5)
    np.testing.assert_allclose(model.mean.kernel, mean, rtol=1e-5)
    np.testing.assert_allclose(model.optimizer.learning_rate, rate)
    np.testing.assert_allclose(logs["sum"], [kernel.sum()], rtol=1e-5)
