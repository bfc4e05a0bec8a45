"""Control flow, tables, random generators and calls of Python in steps; files and states."""

import jax
import numpy as np
import pytest

import distributary.compat.tensorflow as tf
from distributary.errors import InvalidValueError, UnsupportedError


def test_rows_are_written_in_compiled_loops(strategy_of):
    @tf.function
    def powers(x, count):
        rows = tf.TensorArray(tf.float32, size=4)
        for i in tf.range(4):
            rows = rows.write(i, x ** tf.cast(i, tf.float32))
        some = tf.TensorArray(tf.float32, size=3, element_shape=[2])
        i = 0
        while i < count:
            some = some.write(i, rows.read(i))
            i += 1
        if count > 1:
            some = some.write(2, -x)
        return rows.stack(), some.stack()

    x = tf.Variable([2.0, 3.0])
    with tf.GradientTape() as tape:
        rows, some = powers(x, tf.constant(2))
        loss = tf.reduce_sum(rows)

    np.testing.assert_array_equal(rows, [[1, 1], [2, 3], [4, 9], [8, 27]])
    np.testing.assert_array_equal(some, [[1, 1], [2, 3], [-2, -3]])
    np.testing.assert_array_equal(powers(x, tf.constant(0))[1], np.zeros((3, 2)))
    np.testing.assert_array_equal(tape.gradient(loss, x), [1 + 4 + 12, 1 + 6 + 27])
    (own, _) = strategy_of(2).experimental_local_results(
        strategy_of(2).run(lambda: powers(x, tf.constant(1))[0])
    )
    np.testing.assert_array_equal(own, rows)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: tf.TensorArray(tf.float32, 1).write(1, 2.0), "row 1 of 1.*dynamic_size"),
        (lambda: tf.TensorArray(tf.float32, 1).stack(), "element_shape"),
        (lambda: tf.TensorArray(tf.float32, 2).write(0, [1.0]).write(1, 2.0), "others have"),
        (lambda: tf.TensorArray(tf.float32, 2, element_shape=[3]).write(0, 1.0), r"expected \(3,"),
        (lambda: tf.TensorArray(tf.float32, 2).split([1.0, 2.0, 3.0], [1, 2]), "expected one"),
    ],
)
def test_rows_that_do_not_fit_are_refused(use, message):
    with pytest.raises(InvalidValueError, match=message):
        use()


def test_branches_are_chosen_in_steps():
    last = tf.Variable(50.0)

    @tf.function
    def chosen(i):
        by_number = tf.switch_case(i, {1: lambda: 10.0, 5: lambda: last}, default=lambda: -1.0)
        pairs = [(i < 2, lambda: 1.0), (i < 6, lambda: 2.0)]
        return by_number, tf.case(pairs, default=lambda: last - 47.0)

    found = [[float(part) for part in chosen(tf.constant(i))] for i in (1, 5, 7)]

    assert found == [[10, 1], [50, 2], [-1, 3]]
    read = tf.function(lambda x: tf.cond(x > 0, lambda: [last, x], lambda: [x, last]))
    assert [float(part) for part in read(tf.constant(-1.0))] == [-1, 50]
    true = tf.constant(True)
    with pytest.raises(InvalidValueError, match="several conditions"):
        tf.case([(true, lambda: 1), (true, lambda: 2)], exclusive=True)
    with pytest.raises(InvalidValueError, match="Pass a default"):
        tf.case([(tf.constant(False), lambda: 1)])
    calls = []
    tf.cond(true, lambda: calls.append(1), lambda: calls.append(2))
    assert calls == [1]


def test_python_is_called_from_steps_with_known_shapes():
    spec = tf.TensorSpec([2], tf.float32)
    sums = tf.function(lambda x: tf.numpy_function(np.cumsum, [x], spec))

    np.testing.assert_array_equal(sums(tf.constant([1.0, 2.0])), [1, 3])
    with pytest.raises(UnsupportedError, match=r"Tout is .*float32.*TensorSpec"):
        tf.function(lambda x: tf.py_function(abs, [x], tf.float32))(tf.constant(1.0))
    doubled = tf.data.Dataset.range(3).map(
        lambda x: tf.py_function(lambda own: own.numpy() * 2, [x], tf.int64)
    )
    assert [x.numpy() for x in doubled] == [0, 2, 4]

    @tf.numpy_function(Tout=[tf.float32, tf.int32])
    def step(action):
        """Takes a step."""
        return action.astype(np.float32) / 2, np.int32(1)

    assert step.__doc__ == "Takes a step."
    state, reward = step(tf.constant([1, 2]))
    np.testing.assert_array_equal(state.numpy(), [0.5, 1])
    assert reward.numpy() == 1
    assert tf.py_function(Tout=tf.float32)(lambda x: x.numpy() * 2)(tf.constant(2.0)) == 4


def test_python_without_results_runs_in_steps_and_outside():
    seen = []
    note = lambda x: tf.py_function(lambda own: seen.append(float(own)), [x], [])

    @tf.function
    def step(x):
        note(x)
        return x + 1

    assert note(tf.constant(2.0)) == []
    assert step(tf.constant(3.0)) == 4
    jax.effects_barrier()
    assert seen == [2, 3]


def test_computing_again_gives_the_same_gradient():
    x = tf.Variable([1.0, 2.0])

    @tf.function
    def gradient(again):
        with tf.GradientTape() as tape:
            scaled = lambda own: tf.sin(own) * x
            loss = tf.reduce_sum((tf.recompute_grad(scaled) if again else scaled)(x))
        return tape.gradient(loss, x)

    np.testing.assert_allclose(gradient(True), gradient(False), rtol=1e-6)
    assert "remat" in str(jax.make_jaxpr(tf.recompute_grad(lambda v: v * 2))(1.0))


def test_tables_look_up_numbers_in_steps_and_text_on_the_host(tmp_path):
    numbers = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([7, 2], [0.5, 1.5]), default_value=9.0
    )
    (tmp_path / "words").write_text("the\nof\nand\n", encoding="utf-8")
    words = tf.lookup.StaticVocabularyTable(
        tf.lookup.TextFileInitializer(
            str(tmp_path / "words"),
            tf.string,
            tf.lookup.TextFileIndex.WHOLE_LINE,
            tf.int64,
            tf.lookup.TextFileIndex.LINE_NUMBER,
        ),
        num_oov_buckets=2,
    )

    in_step = tf.function(numbers.lookup)(tf.constant([2, 7, 3]))
    in_map = tf.data.Dataset.from_tensor_slices(["of", "and", "it"]).map(words.lookup)

    np.testing.assert_array_equal(in_step, [1.5, 0.5, 9])
    found = [int(number) for number in in_map]
    assert found[:2] == [1, 2]
    assert found[2] in (3, 4)
    changing = tf.lookup.experimental.DenseHashTable(tf.string, tf.int64, -1, "", "gone")
    changing.insert(["a", "b"], [1, 2])
    changing.erase(["b"])
    np.testing.assert_array_equal(changing.lookup(["a", "b"]), [1, -1])
    with pytest.raises(InvalidValueError, match="empty_key"):
        changing.insert([""], [1])
    with pytest.raises(InvalidValueError, match="'a' has the values 1 and 2"):
        tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "a"], [1, 2]), 0)
    with pytest.raises(UnsupportedError, match=r"DenseHashTable.*Dataset\.map"):
        tf.function(changing.lookup)(tf.constant([1]))


def test_a_generator_draws_for_every_step_and_replica_and_repeats(strategy_of, tmp_path):
    strategy = strategy_of(2)
    with strategy.scope():
        generator = tf.random.Generator.from_seed(5)
    step = tf.function(lambda: strategy.run(lambda: generator.normal([3])))
    draws = lambda: [np.array(one) for one in strategy.experimental_local_results(step())]

    first, second = draws(), draws()
    generator.reset_from_seed(5)
    again = draws()
    module = tf.Module()
    module.parts = [generator]
    checkpoints = [tf.train.Checkpoint(one=generator), tf.train.Checkpoint(module)]
    paths = [one.save(str(tmp_path / f"{i}" / "ckpt")) for i, one in enumerate(checkpoints)]
    after = draws()

    np.testing.assert_array_equal(first, again)
    for checkpoint, path in zip(checkpoints, paths, strict=True):
        checkpoint.restore(path).assert_consumed()
        np.testing.assert_array_equal(draws(), after)
    assert len({one.tobytes() for one in (*first, *second)}) == 4
    eager = tf.random.Generator.from_seed(1)
    copy = tf.random.Generator.from_state(eager.state, alg=1)
    np.testing.assert_array_equal(
        eager.uniform([2], 0, 9, tf.int32), copy.uniform([2], 0, 9, tf.int32)
    )
    one, two = eager.split(2)
    assert one.normal([]) != two.normal([])
    copy = tf.random.Generator(copy_from=eager)
    eager.normal([])
    copy.skip(1)
    assert eager.normal([]) == copy.normal([])
    with pytest.raises(InvalidValueError, match="from_seed"):
        tf.random.Generator()


def test_averages_of_variables_follow_their_values(strategy_of):
    strategy = strategy_of(2)
    with strategy.scope():
        variable = tf.Variable(1.0)
        averages = tf.train.ExponentialMovingAverage(0.9, num_updates=tf.constant(2))
        averages.apply([variable])

    variable.assign(4.0)
    strategy.run(lambda: averages.apply([variable]))

    assert float(averages.average(variable)) == pytest.approx(1 + 3 * 0.75)
    assert averages.average(tf.Variable(0.0)) is None


def test_records_and_tensors_survive_files(tmp_path):
    path = str(tmp_path / "records")
    options = tf.io.TFRecordOptions(compression_type="ZLIB")
    with tf.io.TFRecordWriter(path, options) as writer:
        writer.write(tf.io.serialize_tensor(tf.constant([[1.5, 2.5]])))
    records = tf.data.TFRecordDataset(path, "ZLIB")
    (tensor,) = records.map(lambda record: tf.io.parse_tensor(record, tf.float32))
    np.testing.assert_array_equal(tensor, [[1.5, 2.5]])
    with pytest.raises(TypeError, match=r"hold float32.*int32"):
        tf.io.parse_tensor(tf.io.serialize_tensor(tf.constant(1.0)), tf.int32)
    with tf.io.gfile.GFile(str(tmp_path / "text"), "w") as file:
        file.write("one\ntwo\n")
    file = tf.io.gfile.GFile(str(tmp_path / "text"))
    assert (file.size(), file.readline(), file.readlines()) == (8, "one\n", ["two\n"])
    file.close()
    tf.io.gfile.makedirs(str(tmp_path / "own" / "folder"))
    assert tf.io.gfile.exists(str(tmp_path / "own" / "folder"))
    tf.io.gfile.rmtree(str(tmp_path / "own"))
    assert not tf.io.gfile.exists(str(tmp_path / "own"))
    assert tf.io.matching_files(str(tmp_path / "t*")).tolist() == [str(tmp_path / "text")]


def test_the_arrays_of_a_checkpoint_can_be_looked_at(tmp_path):
    checkpoint = tf.train.Checkpoint(v=tf.Variable([1.0, 2.0]), step=3)
    checkpoint.write(str(tmp_path / "ckpt-1"))

    assert tf.train.list_variables(str(tmp_path)) == [("v", [2])]
    np.testing.assert_array_equal(tf.train.load_variable(str(tmp_path), "v"), [1, 2])
    reader = tf.train.load_checkpoint(str(tmp_path / "ckpt-1"))
    assert reader.has_tensor("v")
    assert reader.get_variable_to_shape_map() == {"v": [2]}
    assert [*tf.train.checkpoints_iterator(str(tmp_path), timeout=0)] == [str(tmp_path / "ckpt-1")]
    with pytest.raises(InvalidValueError, match="no array 'w'"):
        tf.train.load_variable(str(tmp_path), "w")


def test_checks_hold_or_raise():
    x = tf.constant([[1.0, 2.0]])
    tf.debugging.assert_rank_in(x, [1, 2])
    tf.debugging.assert_none_equal(x, 3.0)
    assert tf.debugging.assert_same_float_dtype([x, None]) == np.float32

    for check in (
        lambda: tf.debugging.assert_rank_at_least(x, 3),
        lambda: tf.debugging.assert_rank_in(x, [0, 3]),
        lambda: tf.debugging.assert_scalar(x),
        lambda: tf.debugging.assert_integer(x),
        lambda: tf.debugging.assert_non_positive(x),
        lambda: tf.debugging.assert_proper_iterable("text"),
        lambda: tf.debugging.assert_same_float_dtype([x, tf.constant(1)]),
        lambda: tf.nest.assert_same_structure([1], [1, 2]),
    ):
        with pytest.raises((ValueError, TypeError)):
            check()


def test_a_layer_that_a_call_under_a_tape_builds_has_its_gradients():
    class Block(tf.keras.Model):
        def __init__(self):
            super().__init__()
            norm = tf.keras.layers.BatchNormalization()
            self.layers_of_block = tf.keras.Sequential([tf.keras.layers.Dense(2), norm])

        def call(self, x, training=None):
            return self.layers_of_block(x, training=training)

    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    blocks = tf.keras.Sequential([Block(), Block()])

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(blocks(x, training=True) ** 3)
    first = tape.gradient(loss, blocks.trainable_variables)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(blocks(x, training=True) ** 3)
    second = tape.gradient(loss, blocks.trainable_variables)

    assert len(first) == 8
    for one, other in zip(first, second, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic_size", [False, True])
def test_a_write_beyond_the_end_of_an_array_in_a_step_shows(dynamic_size):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def step(count):
        rows = tf.TensorArray(tf.float32, size=3, dynamic_size=dynamic_size)
        for i in tf.range(count):
            rows = rows.write(i, tf.cast(i + 1, tf.float32))
        return rows.stack()

    within, beyond = (strategy.run(step, args=(tf.constant(n),)) for n in (2, 4))

    assert strategy.experimental_local_results(within)[0].tolist() == [1, 2, 0]
    np.testing.assert_array_equal(strategy.experimental_local_results(beyond)[1], [1, 2, np.nan])
