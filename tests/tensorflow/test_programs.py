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
    whole = tf.TensorSpec([], tf.int32)
    scaled = tf.function(lambda x, by=3, more=None: x * by, input_signature=[whole, whole])
    assert [int(scaled(2)), int(scaled(2, 5))] == [6, 10]

    class Model:
        factor = 2

        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
        def scaled(self, x):
            """Doc."""
            return x * self.factor

    np.testing.assert_array_equal(Model().scaled([1, 2]), [2, 4])
    np.testing.assert_array_equal(Model().scaled(np.array([1, 2])), [2, 4])
    for wrong in (tf.constant([1, 2]), tf.Variable([1, 2]), tf.shape([1]), [1j]):
        with pytest.raises(TypeError, match=r"tf\.function scaled: got .*expected float32"):
            Model().scaled(wrong)
    assert Model.scaled.__doc__ == "Doc."


def test_python_ints_are_part_of_a_function_and_floats_are_data():
    @tf.function
    def summed(x, rows, axis=1, scale=1.0):
        parts = tf.reshape(x, [rows, -1]) * scale
        return tf.reduce_sum(parts, axis), tf.one_hot(0, rows), [0] * rows

    x = tf.range(6.0)
    total, one_hot, zeros = summed(x, 3)
    np.testing.assert_array_equal(total, [1, 5, 9])
    np.testing.assert_array_equal(one_hot, [1, 0, 0])
    assert zeros == [0, 0, 0]
    np.testing.assert_array_equal(summed(x, 3, scale=2.0)[0], [2, 10, 18])
    np.testing.assert_array_equal(summed(x, 3, scale=3.0)[0], [3, 15, 27])
    np.testing.assert_array_equal(summed(x, 2, axis=0)[0], [3, 5, 7])
    assert summed.experimental_get_tracing_count() == 3


def test_numbers_of_another_kind_are_no_value_of_a_variable():
    for value in (1.5, [1, 2.5]):
        with pytest.raises(TypeError, match=r"^tf\.Variable: got .*, expected int32\. Convert"):
            tf.Variable(value, dtype=tf.int32)
    assert tf.Variable([1, True], dtype=tf.float32).numpy().tolist() == [1, 1]


def test_a_function_returns_the_value_that_a_variable_has_then():
    count = tf.Variable(0.0)

    of_keras = tf.keras.Variable(4.0)

    @tf.function
    def counted():
        return {"count": count.assign_add(1.0), "same": [count], "keras": of_keras}

    results = [counted() for _ in range(3)]

    assert [float(result["count"]) for result in results] == [1, 2, 3]
    assert [float(result["same"][0]) for result in results] == [1, 2, 3]
    of_keras.assign(5.0)
    assert [float(result["keras"]) for result in (results[0], counted())] == [4, 5]


def test_a_function_makes_tensors_of_the_numbers_that_it_returns():
    @tf.function
    def numbers(count):
        return count + 1, {"half": 0.5, "is_done": True, "nothing": None}

    count, others = numbers(2)

    assert (count.dtype, count.numpy()) == (tf.int32, 3)
    assert (others["half"].dtype, others["half"].numpy()) == (tf.float32, 0.5)
    assert others["is_done"].numpy()
    assert others["nothing"] is None


def test_a_model_knows_its_strategy(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])

    assert model.distribute_strategy is strategy


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
    np.testing.assert_array_equal(squared(tf.ones((1, 2)), power=2), [[3, 3]])
    with pytest.raises(TypeError, match=r"scaled: power is 3, but .* for 2"):
        squared(tf.ones((1, 2)), power=3)
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


def test_summaries_on_a_full_disk_raise(tmp_path, full_disk, monkeypatch):
    monkeypatch.setenv("CRC32C_SW_MODE", "auto")  # which importing tensorboardX sets
    writer = tf.summary.create_file_writer(str(tmp_path))
    num_events = 10_000  # more than buffers hold

    with writer.as_default(), full_disk(), pytest.raises(OSError, match="large"):
        for step in range(num_events):
            tf.summary.scalar("loss", 0.5, step=step)
        writer.close()


def test_two_files_of_one_second_have_all_summaries(tmp_path, monkeypatch):
    monkeypatch.setenv("CRC32C_SW_MODE", "auto")
    from tensorboardX.proto.event_pb2 import Event

    for number in range(2):
        writer = tf.summary.create_file_writer(str(tmp_path))
        with writer.as_default(step=3):
            tf.summary.scalar("loss", number)
            values = [0, 1, 2, 3, np.nan, np.inf]
            tf.summary.histogram("weights", np.array(values, np.float32), buckets=3)
            tf.summary.histogram("none", np.array([np.nan]))
        writer.close()
        writer.flush()  # nothing is left

    records = dist.data.TFRecordDataset(sorted(map(str, tmp_path.iterdir())))
    events = [Event.FromString(bytes(record)) for record in records]
    found = [(e.step, value) for e in events for value in e.summary.value]
    assert [(step, v.simple_value) for step, v in found if v.tag == "loss"] == [(3, 0), (3, 1)]
    histograms = [value.histo for _, value in found if value.HasField("histo")]
    assert [(h.num, list(h.bucket)) for h in histograms] == [(4, [0, 1, 1, 2])] * 2


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
    tf.print(strategy.run(lambda: tf.ones(2)))
    assert capfd.readouterr().err == "PerReplica:{\n  0: [1. 1.],\n  1: [1. 1.]\n}\n"


def test_values_of_replicas_are_one_leaf_of_a_nest(strategy_of):
    strategy = strategy_of(2)
    results = strategy.run(lambda x: {"a": x, "b": [2 * x]}, args=(dist.PerReplica([1.0, 3.0]),))

    sums = tf.nest.map_structure(lambda x: strategy.reduce("SUM", x, axis=None), results)

    assert sums == {"a": 4, "b": [8]}
    assert [strategy.experimental_local_results(x) for x in tf.nest.flatten(results)] == [
        (1, 3),
        (2, 6),
    ]


def test_nests_and_parts_of_results_have_their_names():
    assert tf.executing_eagerly()
    nest = {"a": [1, None], "b": 2}
    doubled = tf.nest.map_structure(lambda x: x and 2 * x, nest)
    assert doubled == {"a": [2, None], "b": 4}
    assert tf.nest.pack_sequence_as(nest, tf.nest.flatten(doubled)) == doubled
    assert tf.is_tensor(tf.Variable(1.0))
    assert not tf.is_tensor(np.ones(1))
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), [3, 2])
    assert tf.nest.flatten([rows, 1]) == [rows, 1]
    assert len(tf.nest.flatten([rows, 1], expand_composites=True)) == 3
    top = tf.nn.top_k([1.0, 3.0, 2.0], 2)
    np.testing.assert_array_equal(top.values, [3, 2])
    np.testing.assert_array_equal(top.indices, [1, 2])
    assert tf.shape(tf.ones((2, 3))).numpy().tolist() == [2, 3]


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


def test_text_keeps_to_the_host():
    text = tf.constant(["a", "bc"])
    assert tf.expand_dims(text, -1).numpy().tolist() == [["a"], ["bc"]]
    assert tf.concat([text, ["d"]], 0).numpy().tolist() == ["a", "bc", "d"]
    assert tf.gather(text, [1, 0]).numpy().tolist() == ["bc", "a"]
    assert tf.stack([text, text]).shape == (2, 2)
    assert tf.equal(text, "a").numpy().tolist() == [True, False]
    assert tf.reshape(text, (2, 1))[0, 0] == "a"
    assert tf.constant("ä").numpy().decode("utf-8") == "ä"


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
    with pytest.raises(ContextError, match=r"jax\.jit compiles"):
        jax.jit(lambda: tf.random.normal([2]))()  # they would repeat


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
    with pytest.raises(TypeError, match=r"got an array float16.*expected float32"):
        sums((halves, number))
    with pytest.raises(
        InvalidValueError, match=r"component .* has shape \(2, 2\).*input_signature"
    ):
        sums((dist.PerReplica([v[:2] for v in x.values]), number))
    with pytest.raises(InvalidValueError, match="with 3 components, but input_signature has 2"):
        sums((dist.PerReplica([*x.values, x.values[0]]), number))
    with pytest.raises(TypeError, match="spec of a PerReplica with 2 components"):
        sums((rows, number))


class _Part(tf.Module):
    def __init__(self, value):
        super().__init__()
        self.scale, self.activation = tf.Variable(value), tf.nn.relu
        self.bias = tf.Variable(2 * value, trainable=False)


def _module(value):
    module = tf.Module()
    module.arrays = [tf.Variable([value, 2.0]), {"own": _Part(value)}]
    module.inner = _Part(value)
    return module


def test_a_module_is_saved_and_has_the_variables_of_its_parts_in_the_order_of_tensorflow(tmp_path):
    path = tf.train.Checkpoint(net=_module(5.0)).save(str(tmp_path / "ckpt"))
    net = _module(0.0)

    tf.train.Checkpoint(net=net).restore(path).assert_consumed()
    net.optimizer = tf.keras.optimizers.SGD()  # its variables are its own
    net.last = tf.Variable(7.0)  # before those of `inner`

    assert sorted(name for name, _ in tf.train.list_variables(path)) == [
        *("net/arrays/0", "net/arrays/1/own/bias", "net/arrays/1/own/scale"),
        *("net/inner/bias", "net/inner/scale"),
    ]
    assert [v.numpy().tolist() for v in net.variables] == [[5, 2], 7, 10, 5, 10, 5]
    assert [v.numpy().tolist() for v in net.trainable_variables] == [[5, 2], 7, 5, 5]
    assert net.submodules == (net.arrays[1]["own"], net.inner)


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


def _causal_mask(x):
    num_rows, n = tf.shape(x)[0], tf.shape(x)[1]
    mask = tf.cast(tf.range(n)[:, tf.newaxis] >= tf.range(n), "float32")
    times = tf.concat([tf.expand_dims(num_rows, -1), tf.constant([1, 1])], axis=0)
    return tf.tile(tf.reshape(mask, (1, n, n)), times)


@pytest.mark.parametrize(
    ("call", "shape", "total"),
    [  # totals are those of TensorFlow
        (_causal_mask, (None, None, None), 12),
        (lambda x: x + tf.cast(tf.range(tf.shape(x)[1]), x.dtype)[:, None], (None, None, 4), 300),
        (lambda x: x / tf.cast(tf.shape(x)[1:], tf.float32)[1], (None, None, 4), 69),
        (lambda x: tf.reshape(x, tf.stack([tf.shape(x)[0], -1])), (None, None), 276),
        (lambda x: tf.reshape(x, tf.concat([tf.shape(x)[:2], [2, 2]], 0)), (None, None, 2, 2), 276),
        (lambda x: tf.reshape(x, [tf.unstack(tf.shape(x))[0], -1, 2]), (None, None, 2), 276),
        (lambda x: x[:, : tf.maximum(tf.shape(x)[1] - 1, 1)], (None, None, 4), 152),
        (lambda x: x + tf.ones((tf.shape(x)[0], tf.shape(x)[1], 4)), (None, None, 4), 300),
        (lambda x: tf.repeat(tf.ones((1, 4)), tf.shape(x)[0], axis=0), (None, 4), 8),
    ],
)
def test_shapes_that_depend_on_open_sizes_are_inferred(call, shape, total):
    inputs = tf.keras.Input((None, 4))

    model = tf.keras.Model(inputs, tf.keras.layers.Lambda(call)(inputs))

    assert model.output_shape == shape
    rows = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert float(tf.reduce_sum(model(rows))) == pytest.approx(total)
    assert model.predict(rows, verbose=0).sum() == pytest.approx(total)


def test_sizes_do_not_make_numbers_of_a_step_constant():
    @tf.function
    def drawn(x):
        return tf.random.shuffle(tf.range(tf.size(x))), tf.random.uniform([], 0, tf.size(x))

    first, second = drawn(tf.zeros([99])), drawn(tf.zeros([99]))

    assert first[0].tolist() != second[0].tolist()
    assert first[1] != second[1]


class _Slopes(tf.keras.layers.Layer):
    def call(self, x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = x**3
            slope = inner.gradient(y, x)
        return outer.gradient(slope, x)


def test_a_layer_of_a_functional_model_may_have_a_tape():
    inputs = tf.keras.Input((2,))

    model = tf.keras.Model(inputs, _Slopes()(inputs))

    assert model.output_shape == (None, 2)
    np.testing.assert_array_equal(model(tf.constant([[1.0, 2.0]])), [[6, 12]])
    np.testing.assert_array_equal(model.predict(np.array([[1.0, 2.0]]), verbose=0), [[6, 12]])


class _Positives(tf.keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="positives")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(tf.reduce_sum(tf.cast(y_true > y_pred, tf.float32)))

    def result(self):
        return self.count


class _Counting(tf.keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.positives = _Positives()

    def call(self, x):
        self.positives.update_state(x, tf.zeros_like(x))
        return x


@pytest.mark.parametrize("in_layer", [False, True])
def test_the_result_of_a_metric_may_be_its_variable(in_layer):
    layers = [_Counting()] if in_layer else []
    model = tf.keras.Sequential([tf.keras.Input((3,)), *layers, tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[] if in_layer else [_Positives()])
    x, y = np.ones((4, 3), np.float32), np.full((4, 1), 9, np.float32)

    assert model.fit(x, y, verbose=0).history["positives"] == [12 if in_layer else 4]
    assert model.evaluate(x, y, verbose=0)[1] == (12 if in_layer else 4)
