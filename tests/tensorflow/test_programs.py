"""Programs, random numbers and devices under TensorFlow's names."""

import time

import jax
import numpy as np
import pytest

import distributary as dist
import distributary.compat.tensorflow as tf
from distributary.errors import (
    BackendStartedError,
    ContextError,
    InvalidValueError,
    UnsupportedError,
)


def test_input_signature_converts_and_checks_arguments():
    spec = tf.TensorSpec([None, 2], tf.float32)

    @tf.function(input_signature=[spec, {"by": tf.TensorSpec([], tf.int32)}])
    def scaled(x, options):
        assert (x.dtype, options["by"].dtype) == (np.float32, np.int32)
        return x * options["by"]

    np.testing.assert_array_equal(scaled([[1, 2]], {"by": 3}), [[3, 6]])
    with pytest.raises(InvalidValueError, match=r"scaled: .*shape \(2,\).*None, 2"):
        scaled([1, 2], {"by": 3})
    np.testing.assert_array_equal(scaled(options={"by": 3}, x=[[1, 2]]), [[3, 6]])
    with pytest.raises(TypeError, match=r"scaled\(x, options\): missing .*'options'"):
        scaled([[1, 2]])
    with pytest.raises(InvalidValueError, match="1 arguments, but input_signature has 0"):
        tf.function(lambda x: x, input_signature=[])(1)


def test_input_signature_of_a_method_is_without_self():
    class Model:
        factor = 2

        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
        def scaled(self, x):
            """Doc."""
            return x * self.factor

    np.testing.assert_array_equal(Model().scaled([1, 2]), [2, 4])
    assert Model.scaled.__doc__ == "Doc."


def test_a_concrete_function_takes_arrays_of_its_shapes():
    class Model:
        def __init__(self):
            self.factor = tf.Variable(2.0)

        @tf.function
        def scaled(self, x, power=1, shift=0.0):
            return self.factor * x**power + shift

    model = Model()
    spec = tf.TensorSpec([None, 2], tf.float32)

    squared = model.scaled.get_concrete_function(spec, power=2)

    np.testing.assert_array_equal(squared([[1, 2], [3, 4]]), [[2, 8], [18, 32]])
    np.testing.assert_array_equal(squared(x=tf.ones((1, 2))), [[2, 2]])
    model.factor.assign(3.0)
    np.testing.assert_array_equal(squared(tf.ones((1, 2))), [[3, 3]])
    assert squared.structured_input_signature[0][1:] == (spec, 2)
    assert squared.name == "scaled"
    with pytest.raises(InvalidValueError, match=r"scaled: .*shape \(3,\)"):
        squared(tf.ones(3))
    with pytest.raises(TypeError, match="get_concrete_function of scaled: missing"):
        model.scaled.get_concrete_function(y=spec)

    of_signature = tf.function(lambda a, b: a - b, input_signature=[spec, spec])
    np.testing.assert_array_equal(
        of_signature.get_concrete_function()(tf.ones((1, 2)), b=tf.zeros((1, 2))), [[1, 1]]
    )
    counted = tf.function(lambda x: x + 1)
    for shape in (2, 3, 2):
        counted(tf.zeros(shape))
    assert counted.experimental_get_tracing_count() == 2


def test_variables_take_the_arguments_of_tensorflow(strategy_of):
    with strategy_of(2).scope():
        variable = tf.Variable(
            [1.0], name="v", validate_shape=False, caching_device=None, shape=tf.TensorShape([None])
        )

    assert isinstance(variable, tf.Variable)
    assert isinstance(variable, dist.Variable)
    assert not isinstance(tf.constant(1.0), tf.Variable)
    assert variable.get_shape().as_list() == [1]
    assert tf.Variable(0, False).trainable is False
    variable.scatter_add(tf.IndexedSlices([2.0], [0]), use_locking=False, name="add")
    np.testing.assert_array_equal(variable.sparse_read([0], name="read"), [3.0])
    with pytest.raises(InvalidValueError, match="constraint"):
        tf.Variable(1.0, constraint=lambda v: v)


def test_slices_of_a_variable_can_be_assigned(strategy_of):
    with strategy_of(2).scope():
        variable = tf.Variable([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])

    @tf.function
    def change():
        variable[1, 1:].assign_sub([1.0, 1.0])

    variable[0, 1].assign(42)
    variable[:, 2].assign_add([1.0, 2.0])
    change()

    np.testing.assert_array_equal(variable, [[1, 42, 4], [4, 4, 7]])
    array = tf.constant([1.0])
    assert not hasattr(array[0], "assign")
    assert not hasattr(variable.read_value(), "assign")


def test_a_constant_initializer_takes_as_many_numbers_as_there_are_places():
    layer = tf.keras.layers.Conv2D(
        1,
        [2, 2],
        kernel_initializer=tf.constant_initializer(np.array([[1.0, 2.0], [3.0, 4.0]])),
        bias_initializer=tf.constant_initializer(7.0),
    )

    layer.build((None, 2, 2, 1))

    np.testing.assert_array_equal(layer.kernel.numpy().ravel(), [1, 2, 3, 4])
    np.testing.assert_array_equal(layer.bias, [7])
    with pytest.raises(TypeError, match="reshape"):
        tf.constant_initializer([1.0, 2.0])(shape=[3])
    again = tf.keras.layers.Conv2D.from_config(layer.get_config())
    again.build((None, 2, 2, 1))
    np.testing.assert_array_equal(again.kernel, layer.kernel)


def test_operators_of_variables_take_lists():
    variable = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

    np.testing.assert_array_equal([[1, 2]] @ variable, [[7, 10]])
    np.testing.assert_array_equal(variable - [1.0, 1.0], [[0, 1], [2, 3]])
    np.testing.assert_array_equal(variable * (2, 3), [[2, 6], [6, 12]])


def test_a_device_that_is_not_there_has_no_effect():
    with tf.device("GPU:7"):
        array = tf.constant([1.0])

    assert array.devices() == {jax.devices()[0]}
    with pytest.raises(ValueError, match="no_device"), tf.device("no_device"):
        pass


def test_tensorboard_writes_for_a_model_without_a_strategy(tmp_path, monkeypatch):
    monkeypatch.setenv("CRC32C_SW_MODE", "auto")  # which importing tensorboardX sets
    pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")
    model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback = tf.keras.callbacks.TensorBoard(str(tmp_path))

    model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0, callbacks=[callback])

    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_traces_of_summaries_are_profiles(tmp_path):
    tf.summary.trace_on(graph=True)
    tf.summary.trace_export("nothing")
    tf.summary.trace_on(profiler=True, profiler_outdir=str(tmp_path))
    tf.reduce_sum([1.0])
    tf.summary.trace_export("profile", step=0)
    tf.summary.trace_off()

    assert list(tmp_path.rglob("*.xplane.pb"))


def test_print_shows_values_in_steps_and_outside(strategy_of, capfd):
    strategy = strategy_of(2)
    variable = tf.Variable([1.0, 2.0])

    tf.print("outside", variable, {"a": tf.constant(3)}, sep="|")

    strategy.run(lambda x: tf.print("replica", x), args=(dist.PerReplica([0, 1]),))
    jax.effects_barrier()

    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "outside|[1. 2.]|{'a': 3}"
    assert sorted(err.splitlines()[1:]) == ["replica 0", "replica 1"]


def test_control_flow():
    @tf.function
    def power(x):
        steps, result = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * x), (0, 1.0))
        return tf.cond(steps > 2, lambda: result, lambda: -result)

    assert float(power(tf.constant(2.0))) == 8
    assert tf.executing_eagerly()
    nest = {"a": [1, None], "b": 2}
    doubled = tf.nest.map_structure(lambda x: x and 2 * x, nest)
    assert doubled == {"a": [2, None], "b": 4}
    assert tf.nest.pack_sequence_as(nest, tf.nest.flatten(doubled)) == doubled
    assert tf.is_tensor(tf.Variable(1.0))
    assert not tf.is_tensor(np.ones(1))


@pytest.mark.parametrize("compiled", [False, True])
def test_while_loops_write_arrays_and_give_gradients(compiled):
    x = tf.Variable(2.0)

    def written(n):
        rows = tf.TensorArray(tf.float32, size=3)
        body = lambda i, rows: (i + 1, rows.write(i, x * tf.cast(i, tf.float32)))
        return tf.while_loop(lambda i, _: i < n, body, [tf.constant(0), rows])[1].stack()

    def power(n):
        with tf.GradientTape() as tape:
            body = lambda i, y: (i + 1, y * x)
            loop = (lambda i, _: i < n), body, (tf.constant(0), tf.constant(1.0))
            _, y = tf.while_loop(*loop, maximum_iterations=5)
        return y, tape.gradient(y, x)

    if compiled:
        written, power = tf.function(written), tf.function(power)
    np.testing.assert_array_equal(written(tf.constant(3)), [0, 2, 4])
    np.testing.assert_array_equal(power(tf.constant(3)), [8, 12])
    np.testing.assert_array_equal(power(tf.constant(9)), [32, 80])


def test_an_array_that_grows_in_a_loop_of_a_function_has_as_many_rows_as_are_written():
    x = tf.Variable(2.0)

    @tf.function
    def powers(limit, most):
        rows = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
        power = tf.constant(1.0)
        with tf.GradientTape() as tape:
            for i in tf.range(most):
                power = power * x
                power.set_shape([])
                rows = rows.write(i, power)
                if power > limit:
                    break
            total = tf.reduce_sum(rows.stack())
        x.assign_add(tape.gradient(total, x))
        return rows.stack(), rows.size()

    # The gradient of x + x ** 2 + x ** 3 for x = 2 is 17.
    first, size = powers(tf.constant(7.0), tf.constant(9))
    np.testing.assert_array_equal(first, [2, 4, 8])
    assert size == 3
    np.testing.assert_array_equal(powers(tf.constant(500.0), tf.constant(9))[0], [19, 361, 6859])
    with pytest.raises(ValueError, match=r"\(2,\) and \(\) do not fit"):
        x.value().set_shape([2])


def test_in_a_step_an_array_must_not_grow():
    def step():
        rows = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
        for i in tf.range(tf.cast(tf.constant(3.5), tf.int32)):
            rows = rows.write(i, 1.0)
        return rows.stack()

    with pytest.raises(ValueError, match=r"writes to an array of size 0. Pass the number of rows"):
        tf.distribute.OneDeviceStrategy("cpu:0").run(step)


def test_a_step_for_keras_2_updates_its_metrics():
    class Model(tf.keras.Sequential):
        def train_step(self, data):
            inputs, targets = data
            with tf.GradientTape() as tape:
                predictions = self(inputs, training=True)
                loss = self.compiled_loss(targets, predictions)
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
            self.compiled_metrics.update_state(targets, predictions)
            return {metric.name: metric.result() for metric in self.metrics}

    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    model = Model([tf.keras.Input((2,)), tf.keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse", metrics=["mae"])

    history = model.fit(x, x[:, :1], batch_size=3, verbose=0).history

    # As with TensorFlow: "loss" is the mean of what is predicted, 1, 5 and 9, and not the loss.
    np.testing.assert_allclose(history["loss"], [5.0])
    np.testing.assert_allclose(history["mae"], [3.0])


def test_python_functions_by_decorator():
    @tf.numpy_function(Tout=[tf.float32, tf.int32])
    def step(action):
        """Takes a step."""
        return action.astype(np.float32) / 2, np.int32(1)

    assert step.__doc__ == "Takes a step."
    state, reward = step(tf.constant([1, 2]))
    np.testing.assert_array_equal(state.numpy(), [0.5, 1])
    assert reward.numpy() == 1
    assert tf.py_function(Tout=tf.float32)(lambda x: x.numpy() * 2)(tf.constant(2.0)) == 4


def test_text_keeps_to_the_host():
    text = tf.constant(["a", "bc"])
    assert tf.expand_dims(text, -1).numpy().tolist() == [["a"], ["bc"]]
    assert tf.concat([text, ["d"]], 0).numpy().tolist() == ["a", "bc", "d"]
    assert tf.gather(text, [1, 0]).numpy().tolist() == ["bc", "a"]
    assert tf.stack([text, text]).shape == (2, 2)
    assert tf.equal(text, "a").numpy().tolist() == [True, False]
    assert tf.reshape(text, (2, 1))[0, 0] == "a"
    assert tf.constant("ä").numpy().decode("utf-8") == "ä"

    layer = tf.keras.layers.TextVectorization(max_tokens=9, output_sequence_length=3)
    dataset = tf.data.Dataset.from_tensor_slices(["hello world", "hello"]).batch(2)
    layer.adapt(dataset)
    (rows,) = dataset.map(lambda x: layer(tf.expand_dims(x, -1)))
    np.testing.assert_array_equal(rows, [[2, 3, 0], [2, 0, 0]])


def test_results_of_several_parts_and_shapes_have_their_names():
    top = tf.math.top_k([1.0, 3.0, 2.0], 2)
    np.testing.assert_array_equal(top.values, [3, 2])
    np.testing.assert_array_equal(top.indices, [1, 2])
    assert tf.shape(tf.ones((2, 3))).numpy().tolist() == [2, 3]


@pytest.mark.parametrize(
    "kind", [tf.distribute.MirroredStrategy, tf.distribute.experimental.CentralStorageStrategy]
)
def test_local_results_mix(kind):
    strategy = kind(["CPU:1", "CPU:2"])
    with strategy.scope():
        variable = tf.Variable(5.0, synchronization=None, aggregation=None)
    batch = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0]).batch(4)
    )

    rows = strategy.experimental_local_results(next(iter(batch)))
    sums = strategy.experimental_local_results(
        strategy.run(lambda x: tf.reduce_sum(x), args=(next(iter(batch)),))
    )

    assert [float(value) for value in (sum(sums), tf.add_n(sums), tf.reduce_sum(sums))] == [10] * 3
    np.testing.assert_array_equal(tf.stack(sums), [3, 7])
    np.testing.assert_array_equal(tf.convert_to_tensor(list(sums)), [3, 7])
    np.testing.assert_array_equal(tf.concat(rows, axis=0), [1, 2, 3, 4])
    assert float(sums[0] * 2 + sums[1] + variable) == 18
    assert [float(x) for x in strategy.experimental_local_results(strategy.run(_one))] == [1, 1]


def _one():
    return tf.constant(1)


def _draws(strategy, num_steps):
    def step():
        dropped = tf.nn.dropout(tf.ones([64]), 0.5)
        return tf.random.normal([3]), tf.random.uniform([2], 5, 9, tf.int32), dropped

    return [
        [np.stack(strategy.experimental_local_results(part)) for part in strategy.run(step)]
        for _ in range(num_steps)
    ]


def test_random_numbers_differ_between_steps_and_replicas_and_follow_the_seed(strategy_of):
    strategy = strategy_of(2)

    tf.random.set_seed(7)
    first, second = _draws(strategy, 2)
    tf.random.set_seed(7)
    (again,) = _draws(strategy, 1)
    tf.random.set_seed(8)
    (other,) = _draws(strategy, 1)

    normals = [values for step in (first, second, other) for values in step[0]]
    assert len({values.tobytes() for values in normals}) == 6
    for before, after in zip(first, again, strict=True):
        np.testing.assert_array_equal(before, after)
    assert set(np.concatenate([first[1], second[1]]).ravel()) <= {5, 6, 7, 8}
    assert set(first[2].ravel()) == {0, 2}


def test_random_numbers_outside_of_steps():
    tf.random.set_seed(1)
    values = tf.random.normal([4000], mean=3.0, stddev=2.0).numpy()
    other = tf.random.normal([4000], seed=5).numpy()
    tf.random.set_seed(1)

    np.testing.assert_array_equal(values, tf.random.normal([4000], mean=3.0, stddev=2.0))
    np.testing.assert_array_equal(other, tf.random.normal([4000], seed=5))
    assert abs(values.mean() - 3) < 0.15
    assert abs(values.std() - 2) < 0.15
    assert np.corrcoef(values, other)[0, 1] < 0.1
    tf.random.set_seed(None)
    assert not np.array_equal(values, tf.random.normal([4000], mean=3.0, stddev=2.0))
    assert sorted(tf.random.shuffle([3, 1, 2]).tolist()) == [1, 2, 3]
    assert np.abs(tf.random.truncated_normal([500], stddev=0.5)).max() <= 1
    assert tf.random.categorical([[-50.0, 50.0]], 3).tolist() == [[1, 1, 1]]
    one, two = (tf.random.stateless_uniform([2], (1, i), 5, 50, tf.int32) for i in (2, 3))
    np.testing.assert_array_equal(one, tf.random.stateless_uniform([2], [1, 2], 5, 50, tf.int32))
    assert one.tolist() != two.tolist()


def test_random_numbers_that_would_repeat_are_refused():
    with pytest.raises(ContextError, match=r"jax\.jit compiles"):
        jax.jit(lambda: tf.random.normal([2]))()


def test_devices_are_listed_and_settings_that_come_too_late_are_refused():
    (cpu,) = tf.config.list_physical_devices("CPU")
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    one = tf.config.LogicalDeviceConfiguration()

    assert cpu.name == "/physical_device:CPU:0"
    assert tf.config.list_physical_devices("GPU") == []
    assert [device.name for device in tf.config.list_logical_devices()][-1] == "/device:CPU:7"
    tf.config.set_visible_devices([], "GPU")  # as it is
    strategy = dist.OneDeviceStrategy(tf.config.list_logical_devices("CPU")[3].name)
    assert "CPU:3" in repr(strategy)
    with pytest.raises(BackendStartedError, match="already started"):
        tf.config.set_logical_device_configuration(cpu, [one, one])
    with pytest.raises(BackendStartedError, match="set_memory_growth: JAX has already started"):
        tf.config.experimental.set_memory_growth(gpu, True)
    with pytest.raises(UnsupportedError, match="XLA_PYTHON_CLIENT_MEM_FRACTION"):
        tf.config.set_logical_device_configuration(gpu, [one, one])
    with pytest.raises(UnsupportedError, match="CUDA_VISIBLE_DEVICES"):
        tf.config.set_visible_devices([gpu], "GPU")
    with pytest.raises(InvalidValueError, match="is no GPU"):
        tf.config.experimental.set_memory_growth(cpu, True)


def test_input_signature_may_be_the_spec_of_a_distributed_dataset(strategy_of):
    strategy = strategy_of(2)
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)

    for size, expected in ((4, [[1, 5, 9, 13], [17, 21]]), (6, [[1, 5, 9, 13, 17, 21]])):
        dataset = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices((rows, np.arange(6))).batch(
                size, drop_remainder=size == 6
            )
        )

        @tf.function(input_signature=[dataset.element_spec])
        def sums(element):
            def step(element):
                x, number = element
                assert (x.dtype, number.dtype) == (np.float32, np.int32)
                return tf.reduce_sum(x, axis=1)

            return strategy.gather(strategy.run(step, (element,)), axis=0)

        for element, own in zip(dataset, expected, strict=True):
            np.testing.assert_array_equal(sums(element), own)

    x, number = element
    halves = dist.PerReplica([v.astype(np.float16) for v in x.values])
    np.testing.assert_array_equal(sums((halves, number)), expected[0])
    with pytest.raises(
        InvalidValueError, match=r"component .* has shape \(2, 2\).*input_signature"
    ):
        sums((dist.PerReplica([v[:2] for v in x.values]), number))
    with pytest.raises(InvalidValueError, match="with 3 components, but input_signature has 2"):
        sums((dist.PerReplica([*x.values, x.values[0]]), number))
    with pytest.raises(TypeError, match="spec of a PerReplica with 2 components"):
        sums((rows, number))


class _Net(tf.Module):
    def __init__(self, value):
        super().__init__()
        self.units, self.activation = 3, tf.nn.relu
        self.weights = [tf.Variable([value, 2.0]), {"b": tf.Variable(value)}]
        self.inner = _Inner(value)


class _Inner(tf.Module):
    def __init__(self, value):
        super().__init__()
        self.scale = tf.Variable(value)


def test_a_module_is_saved_and_restored(tmp_path):
    path = tf.train.Checkpoint(net=_Net(5.0)).save(str(tmp_path / "ckpt"))
    net = _Net(0.0)

    tf.train.Checkpoint(net=net).restore(path).assert_consumed()

    assert [name for name, _ in tf.train.list_variables(path)] == [
        "net/weights/0",
        "net/weights/1/b",
        "net/inner/scale",
    ]
    assert net.weights[0].numpy().tolist() == [5, 2]
    assert (net.weights[1]["b"].numpy(), net.inner.scale.numpy()) == (5, 5)


class _Line(tf.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = tf.Variable(5.0), tf.Variable(0.0, trainable=False)


def test_a_module_has_the_variables_of_its_parts_in_the_order_of_tensorflow():
    both = tf.Module()
    both.parts = [_Line(), {"own": _Line()}]

    assert [v.numpy() for v in both.variables] == [0, 5, 0, 5]
    assert [v.numpy() for v in both.trainable_variables] == [5, 5]
    assert both.submodules == (both.parts[0], both.parts[1]["own"])


def test_a_function_may_say_its_gradient():
    clipped = tf.custom_gradient(lambda x: (x, lambda upstream: tf.clip_by_norm(upstream, 0.5)))
    v = tf.Variable(2.0)

    with tf.GradientTape() as tape:
        output = clipped(v * v)

    assert (float(output), float(tape.gradient(output, v))) == (4, 0.5 * 2 * 2)


def test_the_time_is_known_outside_of_steps():
    before = time.time()

    assert before <= tf.timestamp() <= time.time()
    with pytest.raises(UnsupportedError, match=r"tf\.timestamp in a step"):
        tf.function(tf.timestamp)()
