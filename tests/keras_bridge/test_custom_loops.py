"""Keras models, optimizers and metrics inside `Strategy.run` and `distributary.function`."""

import contextlib

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import distributary as dist
from distributary.errors import ContextError, ReplicaDivergenceError
from tests.keras_bridge import small

_ROWS = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
# Not int64: where Keras builds a model by its data, JAX 0.12 warns that it truncates it.
_LABELS = np.random.default_rng(1).integers(0, 3, 20).astype(np.int32)


def _of_size(size):
    return [(_ROWS[i : i + size], _LABELS[i : i + size]) for i in range(0, 20, size)]


_BATCHES = _of_size(8)  # 8, 8 and 4 rows


def _mlp(activation="tanh"):
    keras.utils.set_random_seed(3)
    layers = keras.layers.Dense(5, activation), keras.layers.Dense(3)
    return keras.Sequential([keras.Input((6,)), *layers])


def _loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _train(strategy, optimizer_of, batches, epochs=2):
    """The loop of a TensorFlow user; gives the model, losses of the steps and metric results."""
    with strategy.scope():
        model, optimizer, loss_of = _mlp(), optimizer_of(), _loss()
        accuracy, mean = keras.metrics.SparseCategoricalAccuracy(), keras.metrics.Mean()

    def step(batch):
        x, y = batch
        with dist.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = loss_of(y, outputs)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, outputs)
        mean.update_state(outputs)
        return loss

    losses = []
    for _ in range(epochs):
        accuracy.reset_state()
        mean.reset_state()
        for batch in strategy.experimental_distribute_dataset(batches):
            loss = strategy.run(step, args=(batch,))
            losses.append(float(strategy.reduce("sum", loss, axis=None)))
    return model, losses, [float(accuracy.result()), float(mean.result())]


def _train_on_one_device(optimizer, batches, epochs=2):
    """The same training as plain Keras does it, a batch at a time."""
    model = _mlp()
    model.compile(optimizer, _loss(), metrics=["accuracy"])
    losses = [model.train_on_batch(*batch)[0] for _ in range(epochs) for batch in batches]
    return model, losses


_OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam, clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "schedule-free": lambda: keras.optimizers.ScheduleFreeAdamW(0.01),  # assigns when it is built
    "averaging": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
}


@pytest.mark.parametrize(
    ("optimizer", "num_replicas", "batches"),
    [
        ("accumulating", 2, _of_size(10)),
        ("schedule-free", 2, _of_size(10)),
        ("averaging", 2, _of_size(10)),
        ("adam, clipped", 4, _of_size(7)),
        ("sgd", 4, [(_ROWS[:1], _LABELS[:1]), (_ROWS[1:4], _LABELS[1:4])]),
        ("adam, clipped", "central", _of_size(7)),
    ],
    ids=["accumulating", "schedule-free", "averaging", "uneven", "few rows", "central storage"],
)
def test_a_loop_equals_one_device_on_the_global_batches(
    optimizer, num_replicas, batches, strategy_of
):
    make = _OPTIMIZERS[optimizer]
    expected, expected_losses = _train_on_one_device(make(), batches)
    is_central = num_replicas == "central"
    central = dist.CentralStorageStrategy(["CPU:1", "CPU:2"])

    model, losses, _ = _train(central if is_central else strategy_of(num_replicas), make, batches)

    assert not is_central or {d.id for v in model.variables for d in v.value.devices()} == {0}
    small.assert_equal_weights(model, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)


# JAX reads no table to look up no rows, so some replicas would lack the gradient of it.
def test_a_table_that_some_replicas_read_no_rows_of(strategy_of):
    ids = np.array([[3, 1], [0, 3], [3, 4]], np.int32)
    start = np.arange(10, dtype=np.float32).reshape(5, 2)
    strategy = strategy_of(3)
    with strategy.scope():
        layer = keras.layers.Embedding(5, 2)
        layer.build()
        layer.set_weights([start])
        optimizer = keras.optimizers.SGD(0.1)

    def step(ids):
        small.descend(optimizer, layer.trainable_variables, lambda: jnp.sum(layer(ids) ** 2))

    rows = dist.data.Dataset.from_tensor_slices(ids).batch(2)
    for batch in strategy.experimental_distribute_dataset(rows):  # of 2 rows and of 1
        strategy.run(step, args=(batch,))

    expected = start.copy()
    for batch in (ids[:2], ids[2:]):
        gradient = np.zeros_like(start)
        np.add.at(gradient, batch, 2 * expected[batch])
        expected -= 0.1 * gradient
    np.testing.assert_allclose(layer.get_weights()[0], expected, rtol=1e-5)


def test_metrics_count_every_example_once_and_survive_a_reset(strategy_of):
    model, _, results = _train(strategy_of(2), lambda: keras.optimizers.SGD(0.0), _BATCHES)

    outputs = np.asarray(model(_ROWS))
    accuracy = float(np.mean(outputs.argmax(-1) == _LABELS))
    np.testing.assert_allclose(results, [accuracy, outputs.mean()], rtol=1e-5, atol=1e-7)


def test_a_metric_inside_the_step_is_that_of_the_replica(strategy):
    with strategy.scope():
        metric = keras.metrics.Mean()

    def step(x):
        metric.update_state(x)
        return metric.result()

    rows = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32([1, 3]) + 10 * context.replica_id_in_sync_group
    )
    inside = strategy.run(step, args=(rows,))

    assert [float(v) for v in inside.values] == [2.0, 12.0]
    assert float(metric.result()) == 7.0


def test_batch_normalization_averages_its_moving_statistics(strategy):
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.75)
        layer.build((None, 6))

    (batch,) = strategy.experimental_distribute_dataset([_ROWS[:8]])
    outputs = strategy.run(lambda x: layer(x, training=True), args=(batch,))

    halves = _ROWS[:8].reshape(2, 4, 6)
    means, variances = halves.mean(1), halves.var(1)
    np.testing.assert_allclose(layer.moving_mean, 0.25 * means.mean(0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(layer.moving_variance, 0.75 + 0.25 * variances.mean(0), rtol=1e-5)
    normalized = (halves - means[:, None]) / np.sqrt(variances[:, None] + layer.epsilon)
    for ours, expected in zip(outputs.values, normalized, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-4)


def test_synchronized_batch_normalization_sees_the_whole_batch(strategy):
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.75, synchronized=True)
        layer.build((None, 6))

    (batch,) = strategy.experimental_distribute_dataset([_ROWS[:7]])
    outputs = strategy.run(lambda x: layer(x, training=True), args=(batch,))

    plain = keras.layers.BatchNormalization(momentum=0.75)
    expected = plain(_ROWS[:7], training=True)
    np.testing.assert_allclose(layer.moving_mean, plain.moving_mean, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(layer.moving_variance, plain.moving_variance, rtol=1e-5)
    np.testing.assert_allclose(strategy.gather(outputs, axis=0), expected, rtol=1e-4, atol=1e-5)


def test_dropout_differs_between_replicas_and_repeats_from_one_seed(strategy):
    def masks():
        with strategy.scope():
            layer = keras.layers.Dropout(0.5, seed=7)
        ones = np.ones((2, 64), np.float32)
        (batch,) = strategy.experimental_distribute_dataset([ones])
        steps = [strategy.run(lambda x: layer(x, training=True), args=(batch,)) for _ in range(2)]
        return [np.asarray(part) for step in steps for part in step.values]

    first = masks()

    assert len({mask.tobytes() for mask in first}) == 4
    for mask, again in zip(first, masks(), strict=True):
        np.testing.assert_array_equal(mask, again)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_step_that_builds_the_optimizer_is_compiled_once_and_keeps_slots(
    num_replicas, strategy_of, compilations
):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        model, optimizer, loss_of = _mlp(), _OPTIMIZERS["adam, clipped"](), _loss()
    before = {v.path for v in optimizer.variables}

    def step(batch):
        x, y = batch
        small.descend(optimizer, model.trainable_variables, lambda: loss_of(y, model(x)))

    with compilations() as compiled:
        for batch in strategy.experimental_distribute_dataset(_BATCHES[:2] * 2):
            strategy.run(step, args=(batch,))

    assert compiled.count("jit(step)") == 1, compiled
    slots = [v for v in optimizer.variables if v.path not in before]
    assert len(slots) == 2 * len(model.trainable_variables)
    assert int(optimizer.iterations) == 4
    for slot in slots:
        assert len(slot.value.addressable_shards) == num_replicas
        assert np.any(np.asarray(slot.value))
    assert len(strategy.extended.engine.cache) == 1


def test_a_new_learning_rate_takes_effect_without_a_new_trace(strategy):
    with strategy.scope():
        variable = keras.Variable(np.float32([1.0]), name="w")
        optimizer = keras.optimizers.SGD(1.0)

    def step():
        optimizer.apply([jnp.float32([0.5])], [variable])

    strategy.run(step)
    optimizer.learning_rate = 0.25
    strategy.run(step)

    # The gradients of the two replicas are summed.
    np.testing.assert_allclose(np.asarray(variable.value), [1 - 1.0 - 0.25], rtol=1e-6)
    assert len(strategy.extended.engine.cache) == 1


def test_an_assignment_that_differs_between_replicas_is_refused(strategy):
    with strategy.scope():
        weight = keras.Variable(np.float32(1.0), name="weight")
    xs = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )

    def step(x):
        weight.assign(x)

    with pytest.raises(ReplicaDivergenceError, match="'weight' is mirrored"):
        strategy.run(step, args=(xs,))

    assert float(weight) == 1.0


def test_a_model_created_outside_joins_the_first_strategy_that_runs_it(strategy_of):
    layer = keras.layers.Dense(2)
    layer.build((None, 6))
    expected = np.asarray(layer(_ROWS[:4]))

    outputs = strategy_of(2).run(lambda x: layer(x), args=(_ROWS[:4],))

    np.testing.assert_allclose(outputs.values[1], expected, rtol=1e-5)
    with pytest.raises(ContextError, match=r"strategies cannot be mixed.*in the scope of"):
        strategy_of(4).run(lambda x: layer(x), args=(_ROWS[:4],))


class _Penalized(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(0.5 * keras.ops.sum(inputs))
        return inputs


def test_losses_that_layers_add_are_those_of_the_step(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), _Penalized()])

    def step(x):
        model(x)  # the second call begins anew
        model(x)
        return sum(model.losses)

    losses = strategy.run(step, args=(dist.PerReplica([_ROWS[:4], _ROWS[4:8]]),))
    in_function = dist.function(step)(_ROWS[:4])

    expected = [0.5 * _ROWS[:4].sum(), 0.5 * _ROWS[4:8].sum()]
    np.testing.assert_allclose(losses.values, expected, rtol=1e-5)
    np.testing.assert_allclose(in_function, expected[0], rtol=1e-5)
    assert model.losses == []  # no traced value stays behind


# Keras alone ends with "Array has been deleted", or because a buffer is donated twice.
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_array_that_several_variables_or_a_caller_hold_stays_valid(num_replicas, strategy_of):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        model, target = _mlp(), _mlp()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), _loss())
        other = keras.Variable(np.zeros((6, 5), np.float32))

    def train():
        model.fit(_ROWS[:16], _LABELS[:16], batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()

    before = train()
    for to, value in zip(target.weights, model.weights, strict=True):
        to.assign(value)
    held = [weight.value for weight in model.weights]
    after = train()
    first = model.weights[0]
    other.assign(first.value)

    def step():
        first.assign(first + 1.0)
        other.assign(other - 1.0)

    strategy.run(step)

    for one, array, to, old, new in zip(
        model.weights, held, target.get_weights(), before, after, strict=True
    ):
        np.testing.assert_array_equal(array, old)
        np.testing.assert_array_equal(to, old)
        assert not np.array_equal(old, new)
        np.testing.assert_allclose(one, new + 1 if one is first else new, rtol=1e-6)
    np.testing.assert_allclose(other, after[0] - 1, rtol=1e-6)


def test_spectral_normalization_trains_from_its_normalized_kernel(strategy):
    with strategy.scope():
        dense = keras.layers.Dense(3, use_bias=False)
        layer = keras.layers.SpectralNormalization(dense, power_iterations=2)
        layer.build((None, 6))
        optimizer = keras.optimizers.SGD(0.1)
    left, _, right = np.linalg.svd(dense.kernel, full_matrices=False)
    before = left * [2, 0.01, 0.01] @ right  # so that few iterations find the largest value
    dense.kernel.assign(before)

    def step(x):
        small.descend(optimizer, [dense.kernel], lambda: jnp.sum(layer(x, training=True) ** 2) / 20)

    data = strategy.experimental_distribute_dataset([_ROWS])
    strategy.run(step, args=(next(iter(data)),))

    kernel = before / 2
    gradient = 2 * _ROWS.T @ (_ROWS @ kernel) / 20
    np.testing.assert_allclose(dense.kernel, kernel - 0.1 * gradient, rtol=1e-3, atol=1e-4)


@keras.saving.register_keras_serializable("tests")
class _Shifted(keras.layers.Layer):
    """A layer that makes its variables from values, not from initializers."""

    def build(self, shape):
        self.shift = keras.Variable(np.arange(shape[-1]), dtype="float32", name="shift")
        self.scale = keras.Variable(2.0)

    def call(self, x):
        return x * self.scale + self.shift


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_variable_made_from_a_value_while_a_step_is_traced(num_replicas, strategy_of):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        layer = _Shifted()

    outputs = strategy.run(lambda: layer(jnp.ones((1, 3))))

    for output in strategy.experimental_local_results(outputs):
        np.testing.assert_array_equal(output, [[2, 3, 4]])
    np.testing.assert_array_equal(layer.shift, [0, 1, 2])
    assert layer.shift.dtype == layer.scale.dtype == "float32"


def test_a_gradient_of_none_passes_through_reductions_and_optimizers(strategy):
    with strategy.scope():
        model = _mlp()
        optimizer = keras.optimizers.SGD(0.1)
        fixed = keras.Variable(1.0, trainable=False)
    before = model.get_weights()

    def step(x):
        first, last = model.layers
        with dist.GradientTape() as tape:
            loss = jnp.sum(fixed * last(jax.lax.stop_gradient(first(x)))) / 8
        *own, of_fixed = tape.gradient(loss, [*model.trainable_variables, fixed])
        assert of_fixed is None
        context = dist.get_replica_context()
        together = context.all_reduce("SUM", own)
        each = [context.all_reduce("MEAN", gradient) for gradient in own]
        optimizer.apply_gradients(zip(own, model.trainable_variables, strict=True))
        return [[g is None for g in gradients] for gradients in (together, each)]

    batch = next(iter(strategy.experimental_distribute_dataset([_ROWS[:8]])))
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        kinds = strategy.run(step, args=(batch,))

    assert kinds == [[True, True, False, False]] * 2
    after = model.get_weights()
    hidden = np.tanh(_ROWS[:8] @ before[0] + before[1])
    of_kernel = np.repeat(hidden.mean(0)[:, None], 3, 1)
    for old, new, gradient in zip(before, after, [0, 0, of_kernel, 1], strict=True):
        np.testing.assert_allclose(new, old - 0.1 * np.asarray(gradient), rtol=1e-5, atol=1e-6)


def test_the_loss_scale_of_a_loop_in_half_precision_is_that_of_one_device(strategy):
    x = np.stack([_ROWS[i : i + 8] for i in range(6)])
    x[2, 6] = 1e4  # on replica 1; more than float16 holds, squared and scaled
    y = np.zeros((8, 3), np.float32)
    make = lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), initial_scale=64.0, dynamic_growth_steps=2
    )

    def state(model, optimizer):
        numbers = optimizer.dynamic_scale, optimizer.step_counter, optimizer.iterations
        return [float(number) for number in numbers], model.get_weights()

    keras.config.set_dtype_policy("mixed_float16")
    alone, expected = _mlp(None), []
    alone.compile(make(), keras.losses.MeanSquaredError(dtype="float16"))
    for rows in x:
        alone.train_on_batch(rows, y)
        expected.append(state(alone, alone.optimizer))
    with strategy.scope():
        model, optimizer = _mlp(None), make()
    loss_of = keras.losses.MeanSquaredError(dtype="float16")

    def step(x, y):
        scaled = lambda: optimizer.scale_loss(loss_of(y, model(x, training=True)))
        small.descend(optimizer, model.trainable_variables, scaled)

    batches = strategy.experimental_distribute_dataset([(rows, y) for rows in x])
    for batch, (numbers, weights) in zip(batches, expected, strict=True):
        strategy.run(step, args=batch)
        got_numbers, got_weights = state(model, optimizer)
        assert got_numbers == numbers
        for got, wanted in zip(got_weights, weights, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)
    assert expected[-1][0][2] == 5, "one step is skipped"


@pytest.mark.parametrize(
    ("assign", "num_replicas"),
    [("set_weights", 2), ("assign", 1), ("Variable", 2), ("slot", 1)],
)
def test_an_array_that_changes_later_changes_no_copy(assign, num_replicas, strategy_of):
    memory = np.zeros(4096 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    array = memory[start : start + 4096]  # aligned, so that JAX can use the memory as it is
    array[:] = 1.0
    with strategy_of(num_replicas).scope():
        variable = keras.Variable(np.zeros_like(array))
        layer = keras.layers.EinsumDense("ab,b->ab", 4096)
        layer.build((None, 4096))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build([variable])
        if assign == "Variable":
            variable = keras.Variable(array, dtype="float32")
        elif assign == "set_weights":
            layer.set_weights([array])
            variable = layer.kernel
        else:
            variable = optimizer.momentums[0] if assign == "slot" else variable
            variable.assign(array)
    jax.block_until_ready(variable.value)

    array[:] = 666.0

    for shard in variable.value.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.ones(4096))


def test_a_function_outside_of_run_trains_like_one_device(strategy_of):
    def trained(strategy):
        with strategy.scope() if strategy else contextlib.nullcontext():
            keras.utils.set_random_seed(3)
            layers = [keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
            model, optimizer = keras.Sequential(layers), keras.optimizers.Adam(0.1)

        @dist.function
        def step(x):
            loss_of = lambda: jnp.mean(model(x, training=True) ** 2)
            return small.descend(optimizer, model.trainable_variables, loss_of)

        return [float(step(_ROWS)) for _ in range(3)], model

    losses, model = trained(strategy_of(2))

    expected_losses, expected = trained(None)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    small.assert_equal_weights(model, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("loss_of", "count"),
    [
        (lambda strategy, losses: jnp.mean(losses), 1),
        (lambda strategy, losses: jnp.sum(losses) / (4 * strategy.num_replicas_in_sync), 0),
        (lambda _, losses: keras.losses.MeanSquaredError()(jnp.zeros_like(losses), losses), 0),
        (
            lambda _, losses: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")(
                jnp.zeros_like(losses), losses, sample_weight=jnp.ones_like(losses)
            ),
            0,
        ),
        (lambda _, losses: keras.losses.MeanSquaredError("sum")(losses, 0 * losses) / 8, 0),
    ],
)
def test_a_step_that_does_not_divide_is_told_that_gradients_are_summed(
    loss_of, count, strategy, caplog
):
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
        model = keras.Sequential([_mlp(), keras.layers.BatchNormalization(synchronized=True)])

    def step(x, _):
        small.descend(
            optimizer,
            model.trainable_variables,
            lambda: loss_of(strategy, model(x, training=True).mean(-1)),
        )

    for batch in strategy.experimental_distribute_dataset(_of_size(7)):  # uneven
        strategy.run(step, args=batch)

    told = [one for one in caplog.messages if one.startswith("apply_gradients adds")]
    assert len(told) == count
    assert all("divided by the rows of the global batch" in one for one in told)
    assert all("ignore this" in one and "2 times as large" in one for one in told)
