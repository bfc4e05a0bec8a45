"""Functions of `tf`, compared with what TensorFlow returned for the same calls."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

import distributary as dist
import distributary.compat.tensorflow as tf
from distributary.errors import InvalidValueError

_spec = importlib.util.spec_from_file_location(
    "compat_operations", Path(__file__).with_name("operations.py")
)
operations = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(operations)

_32_BITS = {"float64": "float32", "int64": "int32"}


def test_results_are_those_of_tensorflow():
    recorded = np.load(operations.RESULTS)
    compared = set()

    wrong = []
    for call in operations.CALLS:
        for i, array in enumerate(operations.results(tf, call)):
            expected = recorded[f"{call} [{i}]"]
            array, expected = (
                one.astype(_32_BITS.get(str(one.dtype), one.dtype)) for one in (array, expected)
            )
            compared.add(f"{call} [{i}]")
            if expected.dtype.kind == "U":
                fits = array.tolist() == expected.tolist()
            else:
                fits = (array.shape, array.dtype) == (expected.shape, expected.dtype)
                fits = fits and np.allclose(array, expected, rtol=2e-5, atol=1e-5)
            if not fits:
                wrong.append(f"{call}: {array!r}, expected {expected!r}")

    assert wrong == []
    assert compared == set(recorded.files)


def test_arguments_may_be_variables_and_lists_of_them():
    keras_variable = tf.keras.Variable([1.0, 2.0])
    variable = tf.Variable([3.0, 4.0])

    np.testing.assert_array_equal(tf.add(variable, keras_variable), [4, 6])
    np.testing.assert_array_equal(tf.reduce_sum([variable, keras_variable], axis=0), [4, 6])
    np.testing.assert_array_equal(tf.clip_by_value(variable, 0, variable[0]), [3, 3])
    np.testing.assert_array_equal(tf.gather(variable, [1, 0]), [4, 3])
    np.testing.assert_array_equal([[1, 2]] @ tf.Variable([[1.0, 2.0], [3.0, 4.0]]), [[7, 10]])
    np.testing.assert_array_equal(variable - [1.0, 1.0], [2, 3])
    np.testing.assert_array_equal(variable * (2, 3), [6, 12])


def test_a_slice_begins_where_a_step_has_computed():
    row = tf.function(lambda x, i: tf.slice(x, [i, 1], [1, -1]))

    np.testing.assert_array_equal(row(tf.constant([[1, 2, 3], [4, 5, 6]]), 1), [[5, 6]])


@pytest.mark.parametrize("fold", [tf.foldl, tf.foldr])
def test_a_fold_of_no_elements_is_where_it_begins(fold):
    assert float(fold(lambda total, x: total + x, tf.zeros([0]), 5.0)) == 5


@pytest.mark.parametrize(
    "call",
    [
        lambda x: tf.split(x, [1, 2]),
        lambda x: tf.split(x, [1, -1, 5]),
        lambda x: tf.unstack(x, 3),
        lambda x: tf.tile(x, [2]),
        lambda x: tf.slice(x, [0], [2, 2]),
        lambda x: tf.scatter_nd([[1]], [[1.0]], [4, 3]),
        lambda x: tf.tensor_scatter_nd_add(x, [[1], [2]], x[:1]),
        lambda x: tf.add_n([x, x[0]]),
        lambda x: tf.gather(x, [[0], [1], [1], [0]], axis=0, batch_dims=1),
        lambda x: tf.nn.sigmoid_cross_entropy_with_logits(x[:, 0], x),
        lambda x: tf.nn.sigmoid_cross_entropy_with_logits(x[:, :1], x),
    ],
)
def test_shapes_that_tensorflow_refuses_are_refused(call):
    with pytest.raises(InvalidValueError, match=r"expected|do not add up to 4"):
        call(tf.ones([4, 3]))


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match=r"tf.reduce_sum\(input_tensor, axis=None.*'axes'"):
        tf.reduce_sum([1.0], axes=0)
    with pytest.raises(TypeError, match=r"tf\.add\(x, y, name=None\): missing.*'y'"):
        tf.add(1.0)
    for use in (tf.identity, lambda x: tf.cast(x, tf.float32), lambda x: tf.clip_by_norm(x, 1.0)):
        with pytest.raises((TypeError, ValueError), match="None"):
            use(None)


def test_rows_that_are_gathered_have_sparse_gradients():
    table = tf.Variable(np.ones((5, 2), np.float32))

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [3, 0]) * 2)
        return tape.gradient(loss, table)

    rows = gradient()

    assert isinstance(rows, tf.IndexedSlices)
    np.testing.assert_array_equal(rows.indices, [3, 0])


def test_results_have_the_method_numpy():
    array = tf.reduce_sum([[1.0, 2.0]], axis=1).numpy()

    assert type(array) is np.ndarray
    assert array.flags.writeable
    assert isinstance(tf.reduce_sum([1.0]).numpy(), np.float32)
    assert isinstance(tf.constant(1), tf.Tensor)
    with pytest.raises(AttributeError):
        jax.jit(lambda x: x.numpy())(1.0)


def test_what_is_on_the_host_has_the_method_numpy_down_to_its_items():
    x, pair = tf.zeros([2, 3]), next(iter(tf.data.Dataset.from_tensors([[1, 2], [3, 4]])))
    numbers = [tf.size(x), tf.rank(x), tf.shape(x)[1] * 2, *tf.shape(x), pair[1][0]]
    counted = tf.data.Dataset.range(4).reduce(0, lambda count, _: count + 1)

    assert [one.numpy() for one in numbers] == [6, 2, 6, 2, 3, 3]
    assert (counted.numpy(), tf.constant(["a", "b"])[1].numpy()) == (4, "b")
    sized = tf.function(lambda x: tf.zeros([tf.size(x), tf.shape(x)[0], tf.rank(x)]))
    assert sized(x).shape == (6, 2, 2)


@pytest.mark.parametrize(
    ("mask", "axis", "expected"),
    [
        ([[True, False], [False, True], [False, False]], None, [[0, 1], [6, 7]]),
        ([[True, False], [True, True]], 1, [[0, 2, 3], [4, 6, 7], [8, 10, 11]]),
        (np.array([0, 1]), -1, [[[1], [3]], [[5], [7]], [[9], [11]]]),
    ],
)
def test_masks_pick_along_as_many_dims_as_they_have(mask, axis, expected):
    x = tf.reshape(tf.range(12), [3, 2, 2])

    np.testing.assert_array_equal(tf.boolean_mask(x, mask, axis), expected)


def test_masks_of_text_and_of_another_size():
    assert tf.boolean_mask(["a", "b"], [False, True]).tolist() == ["b"]
    for mask in ([True, False], True):
        with pytest.raises(ValueError, match=r"the mask has shape .* but the array has \("):
            tf.boolean_mask([1, 2, 3], mask)


def test_numbers_become_a_dtype_that_holds_their_kind():
    assert tf.constant([True, 2], tf.float32).numpy().tolist() == [1, 2]
    assert tf.convert_to_tensor(np.array([1.5]), tf.int32).numpy().tolist() == [1]  # as TensorFlow
    for value, dtype in [
        *((1.5, tf.int32), ([1.0], tf.int32), (2, tf.bool), ("a", tf.int32), (1, tf.string)),
        *((tf.constant(1), tf.float32), (tf.Variable(1.5), tf.int32), (tf.size([1]), tf.float32)),
    ]:
        with pytest.raises(TypeError, match=r"got .*, expected .*tf\.cast"):
            tf.convert_to_tensor(value, dtype)
    with pytest.raises(OverflowError, match="300"):
        tf.constant([300], tf.uint8)


def test_arrays_have_the_method_get_shape_also_in_a_step():
    assert tf.zeros([2, 3]).get_shape().as_list() == [2, 3]
    assert tf.zeros([2], tf.string).numpy().tolist() == ["", ""]
    assert next(iter(tf.data.Dataset.range(3).batch(2))).get_shape().as_list() == [2]
    flat = tf.function(lambda x: tf.reshape(x, [-1, x.get_shape().as_list()[0]]))

    assert flat(tf.zeros([2, 3])).get_shape().as_list() == [3, 2]


@pytest.mark.parametrize("unique", [True, False])
def test_classes_are_drawn_by_their_logarithms(unique):
    classes, num_sampled, rounds = 6, 4, 200
    odds = np.log((np.arange(classes) + 2) / (np.arange(classes) + 1)) / np.log(classes + 1)

    @tf.function
    def draw():
        return tf.random.log_uniform_candidate_sampler([[0, 5]], 2, num_sampled, unique, classes)

    results = [[np.asarray(value) for value in draw()] for _ in range(rounds)]

    counts = sum(np.bincount(drawn, minlength=classes) for drawn, _, _ in results)
    expected = sum(of_true[0] for _, of_true, _ in results)
    assert counts.sum() == rounds * num_sampled
    np.testing.assert_allclose(counts[[0, 5]], expected, atol=4 * rounds**0.5)
    for drawn, of_true, of_drawn in results:
        assert not unique or len(set(drawn.tolist())) == num_sampled
        np.testing.assert_allclose(of_drawn[drawn == 5], of_true[0, 1], rtol=1e-5)
    if not unique:
        np.testing.assert_allclose(of_true[0], num_sampled * odds[[0, 5]], rtol=1e-5)
        np.testing.assert_allclose(counts, rounds * num_sampled * odds, atol=4 * rounds**0.5)


def test_a_loss_with_classes_that_are_drawn_can_be_trained():
    weights, biases = tf.Variable(tf.random.normal([8, 3])), tf.Variable(tf.zeros([8]))
    inputs, labels = tf.random.normal([16, 3]), tf.random.uniform([16, 1], 0, 8, tf.int32)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.nce_loss(weights, biases, labels, inputs, 8, 8))
        gradients = tape.gradient(loss, (weights, biases))
        weights.assign_sub(0.5 * gradients[0])
        biases.assign_sub(0.5 * gradients[1])
        return loss

    losses = [float(step()) for _ in range(30)]

    assert losses[-1] < 0.8 * losses[0]
    with pytest.raises(ValueError, match="num_sampled is 9"):
        tf.nn.sampled_softmax_loss(weights, biases, labels, inputs, 9, 8)


def _mean_loss(strategy, losses):
    (batch,) = strategy.experimental_distribute_dataset([np.float32(losses)])

    def step(batch):
        part = tf.nn.compute_average_loss(batch) + tf.nn.scale_regularization_loss(100.0)
        return part, tf.nn.compute_average_loss(batch, sample_weight=2.0, global_batch_size=10)

    parts = strategy.run(step, args=(batch,))
    return [float(strategy.reduce(dist.ReduceOp.SUM, part, axis=None)) for part in parts]


def test_average_loss_is_that_of_the_global_batch_also_of_an_uneven_one(strategy_of):
    strategy = strategy_of(2)

    assert _mean_loss(strategy, [1, 2, 3, 6]) == pytest.approx([103.0, 2.4])
    assert _mean_loss(strategy, [1, 2, 6]) == pytest.approx([103.0, 1.8])
    assert _mean_loss(strategy, [4]) == pytest.approx([104.0, 0.8])


def test_average_loss_says_what_it_needs(strategy_of):
    with strategy_of(2).scope(), pytest.raises(dist.errors.ContextError, match=r"strategy\.run"):
        tf.nn.compute_average_loss([1.0])
    with pytest.raises(ValueError, match=r"a scalar.*reduction=None"):
        tf.nn.compute_average_loss(1.0)


def test_random_changes_of_images_stay_in_their_range():
    image = np.full((4, 4, 3), [0.2, 0.4, 0.6], "float32")

    delta = tf.image.random_brightness(image, 0.1) - image
    hue = tf.image.random_hue(image, 0.5)
    same = [tf.image.stateless_random_saturation(image, 0.5, 2.0, seed=(1, 2)) for _ in "ab"]

    np.testing.assert_allclose(delta, np.full(image.shape, delta[0, 0, 0]), atol=1e-6)
    assert abs(delta).max() <= 0.1 + 1e-6
    np.testing.assert_allclose(hue.max(-1), 0.6, rtol=1e-6)
    np.testing.assert_allclose(hue.min(-1), 0.2, rtol=1e-5)
    np.testing.assert_array_equal(*same)
    assert tf.image.random_flip_up_down(image[None]).shape == (1, 4, 4, 3)
    with pytest.raises(ValueError, match=r"lower is 2\.0, expected from 0 up to"):
        tf.image.random_contrast(image, 2.0, 1.0)


def test_boxes_of_images_are_inside_of_them():
    image = np.arange(48.0).reshape(4, 4, 3)

    traced = tf.function(lambda row: tf.image.crop_to_bounding_box(image, row, 1, 2, 2))

    np.testing.assert_array_equal(traced(tf.constant(2)), image[2:4, 1:3])
    with pytest.raises(ValueError, match="4 x 2 pixels from row 1, column 0 is not inside of 4 x"):
        tf.image.crop_to_bounding_box(image, 1, 0, 4, 2)
    with pytest.raises(ValueError, match="central_fraction is 0, expected above 0"):
        tf.image.central_crop(image, 0)


# The mean areas and ratios are those of 3000 boxes of TensorFlow 2.21.
@pytest.mark.parametrize(
    ("covered", "mean_area", "mean_ratio"), [(0.1, 0.449, 1.239), (0.7, 0.548, 1.373)]
)
def test_distorted_bounding_boxes_keep_to_their_limits(covered, mean_area, mean_ratio):
    image, box = tf.zeros([60, 80, 3]), tf.constant([[[0.2, 0.3, 0.5, 0.9]]])
    top, left, bottom, right = 12, 24, 30, 71  # of the box, in whole pixels
    found = []

    for _ in range(80):
        begin, size, crop_box = tf.image.sample_distorted_bounding_box(
            tf.shape(image), box, 1, covered, aspect_ratio_range=(0.5, 2.0), area_range=(0.2, 1)
        )
        assert tf.slice(image, begin, size).shape == (*size[:2], 3)
        (y, x, _), (height, width, rest) = begin.tolist(), size.tolist()
        expected = [y / 60, x / 80, (y + height) / 60, (x + width) / 80]
        np.testing.assert_allclose(crop_box[0, 0], expected, rtol=1e-6)
        overlap = (min(bottom, y + height) - max(top, y)) * (min(right, x + width) - max(left, x))
        assert overlap >= covered * (bottom - top) * (right - left)
        assert rest == -1
        found.append([height * width / 4800, width / height])

    assert np.all(np.min(found, 0) >= [0.2, 0.49])
    assert np.all(np.max(found, 0) <= [1.0, 2.05])
    np.testing.assert_allclose(np.mean(found, 0), [mean_area, mean_ratio], rtol=0.15)


def test_distorted_bounding_boxes_of_no_box_and_of_no_fit_are_the_image():
    none, far = tf.zeros([1, 0, 4]), tf.constant([[[0.0, 0.0, 1.0, 1.0]]])
    crop = tf.image.sample_distorted_bounding_box

    begin, size, box = crop([6, 8, 3], far, min_object_covered=1.0, area_range=(0.1, 0.5))

    assert begin.numpy().tolist() == [0, 0, 0]
    assert size.numpy().tolist() == [6, 8, -1]
    assert box.numpy().tolist() == [[[0, 0, 1, 1]]]
    assert crop([6, 8, 3], none, use_image_if_no_bounding_boxes=True)[1][2] == -1
    with pytest.raises(ValueError, match="there are no bounding_boxes"):
        crop([6, 8, 3], none)
    with pytest.raises(NotImplementedError, match=r"sample_distorted_bounding_box: .* in a step"):
        tf.function(lambda x: crop(tf.shape(x), far)[1])(tf.zeros([6, 8, 3]))


def test_rows_of_all_replicas_come_together_in_a_loss_and_have_gradients(strategy):
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    (batch,) = strategy.experimental_distribute_dataset([rows])

    @tf.function
    def step(own):
        context = tf.distribute.get_replica_context()
        number, size = context.replica_id_in_sync_group, tf.shape(own)[0]
        with tf.GradientTape() as tape:
            tape.watch(own)
            shape = tf.concat([[context.num_replicas_in_sync], tf.shape(own)], axis=0)
            placed = tf.scatter_nd(indices=[[number]], updates=[own], shape=shape)
            placed = context.all_reduce(tf.distribute.ReduceOp.SUM, placed)
            everything = tf.reshape(placed, [-1, *placed.shape[2:]])
            chosen = tf.one_hot(tf.range(size) + number * size, tf.shape(everything)[0])
            again = tf.matmul(chosen, everything)
            loss = tf.reduce_sum(everything**2) + tf.reduce_sum(again)
        return everything, again, tape.gradient(loss, own)

    results = strategy.run(step, args=(batch,))

    for number, own in enumerate((rows[:2], rows[2:])):
        everything, again, gradient = (part.values[number] for part in results)
        np.testing.assert_array_equal(everything, rows)
        np.testing.assert_array_equal(again, own)
        np.testing.assert_array_equal(gradient, 2 * 2 * own + 1)  # the losses of both replicas
